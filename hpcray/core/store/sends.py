"""The sending side of transfers: which nodes are being sent which objects, and how far they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hpcray.base.ids import raylet_of
from hpcray.core.effects import Effect, Send, StartSend
from hpcray.core.store.objects import Reader, State, StoredObject
from hpcray.core.store.pulls import chunks_of
from hpcray.core.store.readers import ROOT, Readers
from hpcray.wire import messages as m

TREE_MIN = 1 << 20
"""Bytes below which a node is never sent elsewhere: the way there would cost more than it saves."""

_WINDOW = 4  # chunks under way to one node
_TOGETHER = 16  # chunks under way to all nodes; each may have one


class Sends:
    """Sends under way; `ok` counts the objects that were sent whole.

    Chunks of one object go in order. Nodes share the wire fairly: each has as many chunks under way as the others.

    Args:
        node: index of this node.
        dead_nodes: nodes that are not told of anything any more.
        keep: called with each object whose block is needed from now on.
        unread: called with each object that is read by one node less.
        tree_min: bytes from which on several readers get an object from each other.
    """

    def __init__(
        self,
        node: int,
        dead_nodes: Collection[int],
        keep: Callable[[StoredObject], None],
        unread: Callable[[StoredObject, list[Effect]], None],
        tree_min: int = TREE_MIN,
    ) -> None:
        self.ok = 0
        self.sent_on = 0
        self._node = node
        self._dead_nodes = dead_nodes
        self._keep = keep
        self._unread = unread
        self._tree_min = tree_min
        self._order = 0
        self._readers: dict[int, Reader] = {}
        self._sending: dict[int, Reader] = {}

    def serve(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """A node asks for a sealed object: send it, or let it ask a node that is already receiving it."""
        parent = ROOT
        if obj.size >= self._tree_min and not msg.whole and msg.root < 0:
            if obj.tree is None:
                obj.tree = Readers(chunks_of(obj.size, msg.chunk or obj.size))
            self._order += 1
            parent = obj.tree.join(node, self._order, self._dead_nodes)
        if parent in (ROOT, node):
            self.start(obj, node, msg, out)
        else:
            self.sent_on += 1
            out.append(Send(raylet_of(node), m.PullElsewhere(obj.id, msg.tag, parent, self._order)))

    def start(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """Send what is here of an object, and the rest when it comes; its block stays until the last send is over."""
        obj.reads += 1
        self._keep(obj)
        reader = Reader(obj, node, msg.tag, msg.chunk or max(1, obj.size), msg.first, msg.first, msg.order)
        self._readers[msg.tag] = obj.readers[msg.tag] = reader
        self._pump(reader, out)

    def grown(self, obj: StoredObject, out: list[Effect]) -> None:
        """More of the object is here."""
        for reader in list(obj.readers.values()):
            self._pump(reader, out)

    def ended(self, tag: int, error: str | None, out: list[Effect]) -> None:
        """The send of a chunk is over; the receiver of a failed one is told, so that it tries elsewhere."""
        reader = self._sending.pop(tag, None)
        if reader is None:
            return
        reader.flying -= 1
        if error is not None:
            end_reader(reader, f"sending failed: {error}", self._dead_nodes, out)
        else:
            self._pump(reader, out)
        self._leave(reader, out)

    def refuse(
        self,
        obj: StoredObject,
        reason: str,
        out: list[Effect],
        full: bool = False,
        again: bool = False,
        below: int | None = None,
        hints: Sequence[int] = (),
    ) -> None:
        """The rest of the object will not come here: its readers must look elsewhere.

        Args:
            full, again: see `wire.messages.PullRefused`.
            below: only those whose number is not higher than this.
            hints: nodes that may have it.
        """
        for reader in list(obj.readers.values()):
            if below is None or reader.order <= below:
                end_reader(reader, reason, self._dead_nodes, out, full, hints, again)
                self._leave(reader, out)

    def node_died(self, node: int, out: list[Effect]) -> None:
        """Nothing more is sent there; what is under way ends with a report."""
        for reader in [reader for reader in self._readers.values() if reader.node == node]:
            reader.over = True
            self._leave(reader, out)

    def __len__(self) -> int:
        """Number of nodes that are being sent something, once for each object."""
        return len(self._readers)

    def _pump(self, reader: Reader, out: list[Effect]) -> None:
        obj = reader.obj
        available = obj.size if obj.state is State.SEALED else obj.here
        window = max(1, min(_WINDOW, _TOGETHER // len(self._readers)))
        while not reader.over and reader.flying < window:
            at = reader.next * reader.chunk
            size = min(reader.chunk, obj.size - at)
            if at + size > available or (size <= 0 and reader.next > 0):
                return
            tag = reader.tag + reader.next - reader.first
            reader.next += 1
            reader.flying += 1
            self._sending[tag] = reader
            out.append(StartSend(obj.id, reader.node, tag, obj.offset + at, size))

    def _leave(self, reader: Reader, out: list[Effect]) -> None:
        """It has all, or gets no more: when nothing is under way to it any more it reads the object no longer."""
        obj = reader.obj
        complete = reader.next * reader.chunk >= max(1, obj.size)
        if reader.flying or not (reader.over or complete) or reader.tag not in self._readers:
            return
        self.ok += complete and not reader.over
        del self._readers[reader.tag], obj.readers[reader.tag]
        obj.reads -= 1
        if not obj.readers:
            obj.tree = None
        self._unread(obj, out)


def end_reader(
    reader: Reader,
    reason: str,
    dead_nodes: Collection[int],
    out: list[Effect],
    full: bool = False,
    hints: Sequence[int] = (),
    again: bool = False,
) -> None:
    """It gets no more from here, and is told so, once; the arguments as in `wire.messages.PullRefused`."""
    if not reader.over and reader.node not in dead_nodes:
        refusal = m.PullRefused(reader.obj.id, reader.tag, reason, full, list(hints), again)
        out.append(Send(raylet_of(reader.node), refusal))
    reader.over = True
