"""The receiving side of transfers: which objects the data plane is filling, and who is asked next."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect
from hpcray.core.store.objects import StoredObject
from hpcray.core.store.pulls import Asker, Pull
from hpcray.wire.messages import PullRefused


class Receives:
    """Receives under way, by tag; `ok` counts those that ended well.

    Args:
        node: index of this node.
        sealed: called with an object that has arrived.
        fail: called with one that cannot be had, the kind ("lost" or "full") and the reason.
    """

    def __init__(
        self,
        node: int,
        sealed: Callable[[StoredObject, list[Effect]], None],
        fail: Callable[[StoredObject, str, str, list[Effect]], None],
    ) -> None:
        self.ok = 0
        self._node = node
        self._sealed = sealed
        self._fail = fail
        self._asker = Asker(node)
        self._receiving: dict[int, StoredObject] = {}

    @property
    def dead_nodes(self) -> set[int]:
        """Nodes that are not asked any more; add to it when one dies."""
        return self._asker.dead_nodes

    def add(self, obj: StoredObject, nodes: list[int]) -> Pull:
        """The object may be pulled from these nodes too."""
        obj.pull = obj.pull or Pull()
        obj.pull.offer([node for node in nodes if node != self._node], self._asker.start(obj.id))
        return obj.pull

    def ask_next(self, obj: StoredObject, out: list[Effect]) -> None:
        """Ask the next node for the object; give up when nobody waits any more or nobody is left to ask."""
        pull = obj.pull
        assert pull is not None
        if obj.wanted and pull.ask_next(obj.id, obj.size, obj.offset, self._asker, out):
            self._receiving[pull.tag] = obj
            return
        failures = "; ".join(pull.failures) or "none has it"
        reason = f"object {obj.id.hex()} could not be read from any node ({failures})"
        self._fail(obj, "full" if pull.full else "lost", reason, out)

    def refused(self, msg: PullRefused, out: list[Effect]) -> None:
        """The node that was asked will not send."""
        obj = self._receiving.get(msg.tag)
        if obj is not None and obj.pull is not None:
            obj.pull.full |= msg.full
            obj.pull.cancel(msg.reason, out)

    def ended(self, tag: int, error: str | None, out: list[Effect]) -> None:
        """The receive is over; after an error the next node is asked."""
        obj = self._receiving.pop(tag, None)
        if obj is None:
            return
        assert obj.pull is not None
        obj.pull.ended(error)
        if error is None:
            self.ok += 1
            self._sealed(obj, out)
        else:
            self.ask_next(obj, out)

    def __len__(self) -> int:
        """Number of receives under way."""
        return len(self._receiving)
