"""Where frames go: to a process of this node, into another node's batch, or back to the sender as Undeliverable.

Forwarded frames are never decoded. The messages that this raylet sends in one turn of its loop are grouped per
destination into one frame. Order is kept per destination: they leave before a frame that arrives after them.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.common.memory import BufferPool
from hpcray.core.effects import Effect
from hpcray.core.raylet.frame_slots import FrameSlotManager
from hpcray.platform.arena import Arena
from hpcray.platform.sockets import Piece
from hpcray.protocol import messages as m
from hpcray.protocol.frames import HEADER, LENGTH, LONG, SLOT_BYTES, FrameError, pack
from hpcray.protocol.messages import Message, Undeliverable, encode
from hpcray.runtime.raylet.local_sockets import LocalSocket
from hpcray.transport.base import ControlTransport, PeerLost

_MAX_EXIT_REASONS = 10_000


class WireCounter:
    """Messages on the control wire, of many frames each, and their bytes, since the start of this raylet."""

    __slots__ = ("received", "received_bytes", "sent", "sent_bytes")

    def __init__(self) -> None:
        self.sent = self.sent_bytes = self.received = self.received_bytes = 0


class Router:
    """The routes of one raylet.

    Attributes:
        links: the local processes that said Hello.
        dirty: links with something to send.
        inbox: messages of this raylet to itself.
        neighbor_links: processes of neighboring nodes that read in this node's store.
        lost_nodes: node to reason.
        contacted: nodes to which something was sent; emptied by its reader.
        head_location: where the head is.
        mine: the addresses of this raylet; HEAD among them where it is the head.
        to_head: the frames of this node for the head.
        deferred_to_head: (source, frame) of frames that waited for the head, which this raylet has become.
    """

    def __init__(
        self, node: int, cluster_size: int, control: ControlTransport | None, head_location: HeadLocation | None = None
    ) -> None:
        self.me = raylet_of(node)
        self.head_location = head_location or HeadLocation()
        self.mine = {self.me, HEAD} if self.head_location.node == node else {self.me}
        self.to_head = HeadOutbox(self.head_location)
        self.deferred_to_head: list[tuple[bytes, bytes]] = []
        self.head_location.listeners.append(self._head_moved)
        self.links: dict[bytes, LocalSocket] = {}
        self.dirty: list[LocalSocket] = []
        self.inbox: list[Message] = []
        self.neighbor_links: dict[bytes, LocalSocket] = {}
        self._replies: dict[bytes, list[Message]] = {}
        self.lost_nodes: dict[int, str] = {}
        self.contacted: set[int] = set()
        self._node = node
        self._cluster_size = cluster_size
        self._control = control
        self._pending: dict[bytes, list[Message]] = {}
        self._batches: dict[int, list[Piece]] = {}
        self._exit_reasons: dict[bytes, str] = {}
        self.wire_counts = WireCounter()
        self.kept_at: dict[int, list[int]] = {}

    def attach(self, control: ControlTransport) -> None:
        """Use this wire from now on."""
        self._control = control

    def grow(self, cluster_size: int) -> None:
        """The job has so many nodes now, those that have died included."""
        self._cluster_size = max(self._cluster_size, cluster_size)

    def send(self, dest: bytes, msg: Message) -> None:
        """Send a message to any process of the job, at the end of this turn."""
        if dest in self.mine:
            self.inbox.append(msg)
            return
        waiting = self._pending.get(dest)
        if waiting is None:
            self._pending[dest] = [msg]
        else:
            waiting.append(msg)

    def forward(self, dest: bytes, src: bytes, frame: Piece) -> None:
        """Pass a frame on."""
        if self._pending:
            self.encode()
        link = self.links.get(dest)
        if link is not None:
            link.peers.add(src)
            self._append(link, frame)
        else:
            self._to_node(dest, src, frame)

    def refer(self, dest: bytes, src: bytes, msg: Message) -> bool:
        """Send a process of this node this message in place of a frame from `src`. Returns False where it cannot get
        it."""
        if self._pending:
            self.encode()
        link = self.links.get(dest)
        if link is None or link.closing:
            return False
        link.peers.add(src)
        self._append(link, pack(dest, self.me, encode([msg])))
        return True

    def forget(self, proc: bytes, reason: str) -> None:
        """Make frames for this local process undeliverable, for this reason."""
        self.links.pop(proc, None)
        if len(self._exit_reasons) >= _MAX_EXIT_REASONS:
            del self._exit_reasons[next(iter(self._exit_reasons))]
        self._exit_reasons[proc] = reason

    def lose_node(self, node: int, reason: str, kept_at: list[int] | None = None) -> None:
        """Make frames for this node undeliverable. kept_at: nodes that keep objects which its processes owned."""
        self.lost_nodes[node] = reason
        if kept_at:
            self.kept_at[node] = kept_at
        self._batches.pop(node, None)

    def send_heartbeat(self, msg: Message) -> None:
        """Send a message to the head of another node without waking it, unless something for that node waits to be
        sent, which then takes it along."""
        self.encode()
        node = self.head_location.node
        if node in self._batches or node in self.lost_nodes or self._control is None:
            self.send(HEAD, msg)
            return
        frame = pack(HEAD, self.me, encode([msg]))
        if self.to_head.add(frame):
            try:
                self._control.send(node, frame, wake=False)
            except PeerLost:
                self._batches[node] = [frame]  # `flush` reports it
                return
            self.contacted.add(node)
            self.wire_counts.sent += 1
            self.wire_counts.sent_bytes += len(frame)

    def send_now(self, node: int, msg: Message) -> None:
        """Send to the raylet of a node that is about to be lost, before all that waits; it may arrive or not."""
        if self._control is not None and node not in self.lost_nodes:
            with contextlib.suppress(PeerLost):
                self._control.send(node, pack(raylet_of(node), self.me, encode([msg])))

    def flush(self) -> list[tuple[int, str]]:
        """Pass the batches to the transport. Returns the nodes that could not be reached, and why."""
        failed: list[tuple[int, str]] = []
        if self._pending:
            self.encode()
        if self._batches and self._control is not None:
            batches, self._batches = self._batches, {}
            self.contacted.update(batches)
            counts = self.wire_counts
            for node, frames in batches.items():
                try:
                    for batch in _batches(frames):
                        self._control.send(node, batch)
                        counts.sent += 1
                        counts.sent_bytes += len(batch)
                except PeerLost as error:
                    failed.append((node, error.why))
        return failed

    def _append(self, link: LocalSocket, frame: Piece) -> None:
        if link.closing:
            return  # its peers get a ProcDied
        if not link.out:
            self.dirty.append(link)
        link.out.append(frame)

    def _to_node(self, dest: bytes, src: bytes, frame: Piece) -> None:
        node = (dest[0] << 8) | dest[1]
        batch = self._batches.get(node)
        if batch is not None:
            batch.append(frame)
        elif node == self._node or node >= self._cluster_size or node in self.lost_nodes or self._control is None:
            if dest == HEAD:
                self._to_head(src, frame)
            else:
                self._undeliverable(dest, src)
        else:
            self._batches[node] = [frame]

    def _to_head(self, src: bytes, frame: Piece) -> None:
        if self.head_location.node == self._node:
            self.deferred_to_head.append((src, bytes(frame)))
        elif self.to_head.add(frame):
            self._batches.setdefault(self.head_location.node, []).append(frame)

    def _head_moved(self) -> None:
        unseen = self.to_head.unseen_frames()
        if self.head_location.node == self._node:
            self.mine = {self.me, HEAD}
            self.deferred_to_head += [(frame[12:20], frame) for frame in unseen]
        elif unseen:
            self._batches.setdefault(self.head_location.node, []).extend(unseen)

    def _undeliverable(self, dest: bytes, src: bytes) -> None:
        node = node_of(dest)
        if node in self.lost_nodes:
            reason = f"node {node} is dead: {self.lost_nodes[node]}"
        else:
            reason = self._exit_reasons.get(dest, "no such process")
        self.send(src, Undeliverable(dest, reason, self.kept_at.get(node, [])))

    def welcome(self, link: LocalSocket, welcome: Message, arena_fd: int) -> None:
        """Send the first message to a process, with the descriptor of the arena.

        Raises:
            OSError: it cannot be sent.
        """
        frame = pack(link.proc, self.me, encode([welcome]))
        sent = socket.send_fds(link.sock, [frame], [arena_fd])
        if sent < len(frame):
            link.out.append(frame[sent:])
            self.dirty.append(link)

    def reply_to_neighbor(self, proc: bytes, msg: Message) -> None:
        """Send a reply of the store to a process of a neighboring node over its own connection. All other messages
        reach it through its raylet, so messages that have an order take one route."""
        self._replies.setdefault(proc, []).append(msg)

    def encode(self) -> None:
        """Encode the pending messages of this raylet, and add their frames to links and batches."""
        if self._replies:
            replies, self._replies = self._replies, {}
            for proc, messages in replies.items():
                link = self.neighbor_links.get(proc)
                if link is not None:
                    self._append(link, pack(proc, self.me, encode(messages)))
        # Undeliverable messages may be added meanwhile, hence the loop.
        while self._pending:
            pending, self._pending = self._pending, {}
            for dest, messages in pending.items():
                frame = pack(dest, self.me, encode(messages))
                link = self.links.get(dest)
                if link is not None:
                    self._append(link, frame)
                else:
                    self._to_node(dest, self.me, frame)


def _batches(frames: list[Piece]) -> list[Piece]:
    """The frames as messages: a long one alone and without a copy, so that it travels while the next one is read."""
    if len(frames) == 1:
        return frames
    if max(map(len, frames)) < LONG:
        return [b"".join(frames)]
    batches: list[Piece] = []
    short: list[Piece] = []
    for frame in frames:
        if len(frame) < LONG:
            short.append(frame)
            continue
        if short:
            batches.append(b"".join(short))
            short = []
        batches.append(frame)
    if short:
        batches.append(b"".join(short))
    return batches


class HeadLocation:
    """Where the head is, as far as this raylet knows.

    Attributes:
        node: index of the node whose raylet is the head, or was until it died.
        epoch: number of moves of the head.
        lost: the head is dead, and no successor is known yet.
        taken: number of this node's frames that the present head knew when it took over (`HeadOutbox`).
        listeners: called after a move, in order.
    """

    def __init__(self, node: int = 0, epoch: int = 0) -> None:
        self.node = node
        self.epoch = epoch
        self.lost = False
        self.taken = 0
        self.listeners: list[Callable[[], None]] = []

    def gone(self) -> None:
        """The head is dead: frames for it wait for its successor."""
        self.lost = True

    def moved_to(self, node: int, epoch: int, taken: int = 0) -> bool:
        """The raylet of `node` has become the head. Returns False for an older move, or the same again."""
        if epoch <= self.epoch:
            return False
        self.node, self.epoch, self.taken, self.lost = node, epoch, taken, False
        for listener in self.listeners:
            listener()
        return True


class HeadOutbox:
    """The frames of one node for the head, counted. They arrive in order, so a count says which have arrived.

    Attributes:
        sent: how many frames there have been.
        retaining: whether frames are kept until the head reports that the standby knows them (`settled`).
        taken: on the head: node to the number of its frames that have arrived here.
    """

    def __init__(self, head_location: HeadLocation) -> None:
        self.retaining = False
        self.taken: dict[int, int] = {}
        self._head_location = head_location
        self._retained: deque[bytes] = deque()
        self.sent = 0

    def add(self, frame: bytes | memoryview) -> bool:
        """Count a frame for the head. Returns whether it can be sent now."""
        self.sent += 1
        lost = self._head_location.lost
        if lost or self.retaining:
            self._retained.append(bytes(frame))
        elif self._retained:
            self._retained.clear()
        return not lost

    def settled(self, count: int) -> None:
        """Drop the first `count` frames: every successor of the head knows them."""
        retained = self._retained
        for _ in range(min(len(retained), count - (self.sent - len(retained)))):
            retained.popleft()

    def unseen_frames(self) -> list[bytes]:
        """Return the frames that a new head has not received, in order."""
        self.settled(self._head_location.taken)
        return list(self._retained)

    def arrived(self, node: int) -> None:
        """Count a frame of `node` that has arrived, on the head."""
        self.taken[node] = self.taken.get(node, 0) + 1


# ------------------------------------------------------------ frame slots
# Long frames between the processes of a node and other nodes, in memory that the raylet and its processes share.
#
# The raylet forwards a frame that a process has written there without a copy, and has the wire receive frames for a
# process there. How long a slot is in use is seen at the views into it: whatever holds the frame (a batch, a send under
# way, a link) holds a view.

_NOTHING: tuple[()] = ()


class FrameSlotRouter:
    """See the module.

    Args:
        arena: with its reserve, in which the slots are.
        offsets: of the slots.
    """

    def __init__(self, arena: Arena, offsets: list[int], router: Router) -> None:
        self._arena = arena
        self._slots = FrameSlotManager(offsets)
        self._router = router
        self._private = BufferPool()
        self._at: dict[int, int] = {}  # offset by the identity of what the views of a slot view
        self._identity: dict[int, int] = {}
        self._lent: dict[bytes, dict[int, memoryview]] = {}  # by reader and offset

    def take(self, size: int) -> memoryview:
        """Memory for a frame that arrives from another node: shared, if there is a slot. See `BufferPool.take`."""
        offset = self._slots.take() if size <= SLOT_BYTES else -1
        return self._private.take(size) if offset < 0 else self._view(offset)[:size]

    def offset_of(self, batch: Any) -> int:
        """Where in the arena the memory is that `take` gave; -1: it is not shared."""
        return self._at.get(id(batch.obj), -1) if type(batch) is memoryview else -1

    def deliver(self, dest: bytes, src: bytes, frame: memoryview, offset: int) -> bool:
        """Pass on a frame at this offset to a process of this node, which reads it there. Returns False for a process
        that has none of this memory."""
        if not self._router.refer(dest, src, m.SlotFrame(offset, len(frame))):
            return False
        self._lent.setdefault(dest, {})[offset] = frame
        return True

    def sent_long(self, proc: bytes) -> list[Effect]:
        """A process has sent a long frame to another node through its socket."""
        return self._slots.grant(proc)

    def process_died(self, proc: bytes) -> None:
        """A process of this node reads and writes no more."""
        self._lent.pop(proc, None)
        self._slots.process_died(proc)

    # ------------------------------------------------------------ messages of processes

    def on_slot_frame(self, now: float, src: bytes, msg: m.SlotFrame) -> Iterable[Effect]:
        """Forward the frame that a process has written into a slot.

        Raises:
            FrameError: the slot is not its own, or no frame is there.
        """
        if not HEADER <= msg.size <= SLOT_BYTES or not self._slots.fill(src, msg.offset):
            raise FrameError(f"it has no frame of {msg.size} bytes at {msg.offset}")
        frame = self._view(msg.offset)[: msg.size].toreadonly()
        if LENGTH.unpack_from(frame)[0] + 4 != msg.size:
            raise FrameError(f"the frame at {msg.offset} has not the {msg.size} bytes that were announced")
        self._router.forward(bytes(frame[4:12]), src, frame)
        return self._slots.grant(src)

    def on_frame_read(self, now: float, src: bytes, msg: m.FrameRead) -> Iterable[Effect]:
        """A process has read a frame."""
        self._lent.get(src, {}).pop(msg.offset, None)
        return _NOTHING

    def on_returned(self, now: float, src: bytes, msg: m.FrameSlotsReturned) -> Iterable[Effect]:
        """A process does without its slots."""
        self._slots.give_back(src, msg.offsets)
        return _NOTHING

    def _view(self, offset: int) -> memoryview:
        view, identity = self._arena.borrowed_view(offset, SLOT_BYTES, partial(self._unused, offset))
        self._at[identity] = offset
        self._identity[offset] = identity
        return view

    def _unused(self, offset: int) -> None:
        del self._at[self._identity.pop(offset)]
        self._slots.release(offset)
