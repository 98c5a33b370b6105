"""The sending side of transfers: which objects are being read by the data plane, and for whom."""

from __future__ import annotations

from collections.abc import Callable, Collection

from hpcray.base.ids import raylet_of
from hpcray.core.effects import Effect, Send, StartSend
from hpcray.core.store.objects import StoredObject
from hpcray.wire.messages import PullRefused


class Sends:
    """Sends under way, by tag; `ok` counts those that ended well.

    Args:
        dead_nodes: nodes that are not told of anything any more.
        keep: called with each object whose block is needed from now on.
    """

    def __init__(self, dead_nodes: Collection[int], keep: Callable[[StoredObject], None]) -> None:
        self.ok = 0
        self._dead_nodes = dead_nodes
        self._keep = keep
        self._sending: dict[int, tuple[StoredObject, int]] = {}

    def start(self, obj: StoredObject, node: int, tag: int, out: list[Effect]) -> None:
        """Send a sealed object; its block stays until `ended`."""
        obj.reads += 1
        self._keep(obj)
        self._sending[tag] = (obj, node)
        out.append(StartSend(obj.id, node, tag, obj.offset, obj.size))

    def ended(self, tag: int, error: str | None, out: list[Effect]) -> StoredObject | None:
        """The send is over; the receiver of a failed one is told, so that it tries elsewhere."""
        obj, node = self._sending.pop(tag, (None, -1))
        if obj is not None:
            obj.reads -= 1
            self.ok += error is None
            if error is not None and node not in self._dead_nodes:
                out.append(Send(raylet_of(node), PullRefused(obj.id, tag, f"sending failed: {error}")))
        return obj

    def __len__(self) -> int:
        """Number of sends under way."""
        return len(self._sending)
