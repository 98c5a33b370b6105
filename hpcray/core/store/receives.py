"""The receiving side of transfers: which objects the data plane is filling, and who is asked next."""

from __future__ import annotations

from collections.abc import Callable

from hpcray.core.effects import Effect
from hpcray.core.store.objects import StoredObject
from hpcray.core.store.pulls import CHUNK, Asker, Pull, chunks_of
from hpcray.core.store.sends import Sends
from hpcray.wire.messages import PullElsewhere, PullRefused

_SENT_ON = "it is received from another node than was thought"


class Receives:
    """Receives under way, by tag; `ok` counts the objects that came whole.

    Args:
        node: index of this node.
        sends: the sending side: what has come of an object is passed on.
        sealed: called with an object that has arrived.
        fail: called with one that cannot be had, the kind ("lost" or "full") and the reason.
        dead_nodes: nodes that are not asked any more.
        chunk: bytes of a piece of a large object.

    Attributes:
        progress: when something came last.
    """

    def __init__(
        self,
        node: int,
        sends: Sends,
        sealed: Callable[[StoredObject, list[Effect]], None],
        fail: Callable[[StoredObject, str, str, list[Effect]], None],
        dead_nodes: set[int],
        chunk: int = CHUNK,
    ) -> None:
        self.ok = 0
        self.progress = float("-inf")
        self._node = node
        self._sends = sends
        self._sealed = sealed
        self._fail = fail
        self._asker = Asker(node, dead_nodes, chunk)
        self._receiving: dict[int, StoredObject] = {}
        self._attempts: dict[int, StoredObject] = {}

    def add(self, obj: StoredObject, nodes: list[int]) -> Pull:
        """The object may be pulled from these nodes too."""
        obj.pull = obj.pull or Pull()
        others = [node for node in nodes if node != self._node]
        obj.pull.offer(others, self._asker.start(obj.id) if len(others) > 1 else 0)
        return obj.pull

    def ask_next(self, obj: StoredObject, out: list[Effect]) -> None:
        """Ask the next node for the object; give up when nobody waits any more or nobody is left to ask."""
        pull = obj.pull
        assert pull is not None
        if pull.failed:
            # Our number among the readers changes: whoever waits here asks the root again, too.
            self._sends.refuse(obj, _SENT_ON, out, again=True, hints=pull.sources())
            pull.start_afresh()
        if obj.wanted and pull.ask_next(obj.id, obj.size, obj.offset, self._asker, out):
            self._attempts[pull.tag] = obj
            self._receiving.update(dict.fromkeys(pull.posted, obj))
            return
        failures = "; ".join(pull.failures) or "none has it"
        reason = f"object {obj.id.hex()} could not be read from any node ({failures})"
        self._fail(obj, "full" if pull.full else "lost", reason, out)

    def refused(self, msg: PullRefused, out: list[Effect]) -> None:
        """The node that was asked will not send (any more)."""
        obj = self._attempts.get(msg.tag)
        if obj is not None and obj.pull is not None:
            obj.pull.full |= msg.full
            self.add(obj, msg.nodes)
            obj.pull.cancel(msg.reason, out, blame=not msg.again)

    def sent_on(self, msg: PullElsewhere, out: list[Effect]) -> None:
        """The node that was asked has named another that is already receiving the object."""
        obj = self._attempts.get(msg.tag)
        if obj is not None and obj.pull is not None:
            obj.pull.redirect(msg.node, msg.order, out)
            self._sends.refuse(obj, _SENT_ON, out, again=True, below=msg.order)

    def ended(self, now: float, tag: int, error: str | None, out: list[Effect]) -> None:
        """The receive is over; when all of an attempt are and something is missing, the next node is asked."""
        obj = self._receiving.pop(tag, None)
        if obj is None:
            return
        pull, chunk = obj.pull, self._asker.chunk_for(obj.size)
        assert pull is not None
        first, had = pull.tag, pull.have
        pull.ended(tag, error, out)
        if pull.have > had:
            self.progress = now
            obj.here = min(obj.size, pull.have * chunk)
            if obj.readers:
                self._sends.grown(obj, out)
        if pull.posted:
            return
        del self._attempts[first]
        if pull.have == chunks_of(obj.size, chunk):
            self.ok += 1
            self._sealed(obj, out)
        else:
            self.ask_next(obj, out)

    def node_died(self, obj: StoredObject, node: int, out: list[Effect]) -> None:
        """If it was to send the object, another one is asked."""
        if obj.pull is not None and obj.pull.tag >= 0 and obj.pull.node == node:
            obj.pull.cancel("the node died", out, blame=False)

    def __len__(self) -> int:
        """Number of objects on their way."""
        return len(self._attempts)
