"""The sending side of transfers: which nodes are being sent which objects, from memory or disk, and their progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hpcray.common.ids import raylet_of
from hpcray.common.labels import NO_PLACES, Place
from hpcray.core.effects import Effect, Piece, ReadSpill, Send, StartSend
from hpcray.core.object_store.stored_object import ROOT, BroadcastTree, ChunkedPush, StoredObject, StoredObjectState
from hpcray.protocol import messages as m

MIN_BROADCAST_BYTES = 1 << 20
"""Bytes below which a node is never sent elsewhere: the way there would cost more than it saves."""

_CHUNKS_PER_NODE = 4  # under way to one node
_CHUNKS_IN_FLIGHT = 16  # under way to all nodes; each may have one


class PushManager:
    """Sends under way. Chunks of one object go in order; nodes share the wire fairly: each has as many chunks under
    way as the others.

    A method that ends a push returns the object that is read by one push less: the lifecycle decides what follows.

    Args:
        dead_nodes: nodes that are sent no message any more; kept up to date by the store.
        places: of the nodes in the network, where they are known; kept up to date by the store.
        node: index of this node.
        min_broadcast: bytes from which on several readers get an object from each other.

    Attributes:
        completed: count of the objects that were sent whole. sent_bytes: bytes that were sent.
        redirected: count of the askers that were sent to a node that relays the object.
    """

    def __init__(
        self,
        dead_nodes: Collection[int],
        min_broadcast: int = MIN_BROADCAST_BYTES,
        places: Mapping[int, Place] = NO_PLACES,
        node: int = ROOT,
    ) -> None:
        self.completed = self.sent_bytes = 0
        self.redirected = 0
        self._dead_nodes = dead_nodes
        self._places, self._node = places, node
        self._min_broadcast = min_broadcast
        self._order = 0
        self._pushes: dict[int, ChunkedPush] = {}
        self._sending: dict[int, ChunkedPush] = {}

    def serve_pull(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> bool:
        """A node asks for a sealed object: send it (True), or redirect it to a node that is already receiving it."""
        parent = ROOT
        if obj.size >= self._min_broadcast and not msg.whole and msg.root < 0:
            if obj.broadcast_tree is None:
                place = self._places.get(self._node, ())
                obj.broadcast_tree = BroadcastTree(chunk_count(obj.size, msg.chunk or obj.size), place)
            self._order += 1
            parent = obj.broadcast_tree.join(node, self._order, self._dead_nodes, self._places.get(node, ()))
        if parent in (ROOT, node):
            self.start_push(obj, node, msg, out)
            return True
        self.redirected += 1
        out.append(Send(raylet_of(node), m.PullElsewhere(obj.id, msg.tag, parent, self._order)))
        return False

    def start_push(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """Send what is here of an object, and the rest when it comes; its block stays until the last send is over."""
        obj.io_reads += 1
        push = ChunkedPush(obj, node, msg.tag, msg.chunk or max(1, obj.size), msg.first, msg.first, msg.order)
        self._pushes[msg.tag] = obj.pushes[msg.tag] = push
        self._send_chunks(push, out)

    def push_arrived(self, obj: StoredObject, out: list[Effect]) -> None:
        """More of the object is here: pass it on."""
        for push in list(obj.pushes.values()):
            self._send_chunks(push, out)

    def send_ended(self, tag: int, error: str | None, out: list[Effect]) -> StoredObject | None:
        """The send of a chunk is over; the receiver of a failed one is informed, so that it tries elsewhere."""
        push = self._sending.pop(tag, None)
        if push is None:
            return None
        push.flying -= 1
        if error is not None:
            refuse_push(push, f"sending failed: {error}", self._dead_nodes, out, link_broken=True)
        else:
            self.sent_bytes += push.size_of(tag)
            self._send_chunks(push, out)
        return self._remove_if_over(push)

    def refuse_waiting(
        self,
        obj: StoredObject,
        reason: str,
        out: list[Effect],
        full: bool = False,
        again: bool = False,
        below: int | None = None,
        hints: Sequence[int] = (),
    ) -> None:
        """The rest of the object, which is not sealed, will not come here: its readers must look elsewhere.

        Args:
            full, again: see `protocol.messages.PullRefused`.
            below: only those whose number is not higher than this.
            hints: nodes that may have it.
        """
        for push in list(obj.pushes.values()):
            if below is None or push.order <= below:
                refuse_push(push, reason, self._dead_nodes, out, full, hints, again)
                self._remove_if_over(push)

    def receiver_died(self, node: int) -> list[StoredObject]:
        """Nothing more is sent there; what is under way ends with a report."""
        over = [push for push in self._pushes.values() if push.node == node]
        for push in over:
            push.over = True
        return list(dict.fromkeys(push.obj for push in over if self._remove_if_over(push)))

    def objects(self) -> list[StoredObject]:
        """The objects that are being sent, forgotten ones included; once for each receiver."""
        return [push.obj for push in self._pushes.values()]

    def rows(self) -> list[dict[str, Any]]:
        """The pushes: id and size of the object, bytes that the data plane has got, and the node that they go to."""
        return push_rows(self._pushes.values())

    def __len__(self) -> int:
        """Number of nodes that are being sent something, once for each object."""
        return len(self._pushes)

    def _send_chunks(self, push: ChunkedPush, out: list[Effect]) -> None:
        obj = push.obj
        available = obj.size if obj.state is StoredObjectState.SEALED else obj.received_bytes
        window = max(1, min(_CHUNKS_PER_NODE, _CHUNKS_IN_FLIGHT // len(self._pushes)))
        while not push.over and push.flying < window:
            at = push.next * push.chunk
            size = min(push.chunk, obj.size - at)
            if at + size > available or (size <= 0 and push.next > 0):
                return
            tag = push.tag + push.next - push.first
            push.next += 1
            push.flying += 1
            self._sending[tag] = push
            out.append(StartSend(obj.id, push.node, tag, obj.offset + at, size))

    def _remove_if_over(self, push: ChunkedPush) -> StoredObject | None:
        """The receiver has all, or gets no more: once nothing is under way to it, the push reads the object no more."""
        obj = push.obj
        if push.flying or not (push.over or push.complete) or push.tag not in self._pushes:
            return None
        self.completed += push.complete and not push.over
        del self._pushes[push.tag], obj.pushes[push.tag]
        obj.io_reads -= 1
        if not obj.pushes:
            obj.broadcast_tree = None
        return obj

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """Every push reads an object that has its block: one of the store, or one that was forgotten meanwhile."""
        for tag, push in self._pushes.items():
            obj, name = push.obj, push.obj.id.hex()
            assert obj.pushes.get(tag) is push, f"{name} does not know that it is sent to node {push.node}"
            assert obj.forgotten != (objects.get(obj.id) is obj), f"{name} is sent, and not in the store"
            assert obj.offset >= 0, f"{name} is sent, and has no block"
            sealed = obj.state in (StoredObjectState.SEALED, StoredObjectState.PULLING)
            assert obj.forgotten or sealed, f"{name} is sent, and {obj.state.value}"
            assert push.flying or not (push.over or push.complete), f"the push of {name} to {push.node} is over"
            assert push.flying == sum(other is push for other in self._sending.values()), f"sends of {name}"
        for obj in objects.values():
            assert obj.pushes.keys() <= self._pushes.keys(), f"{obj.id.hex()} is sent by no push of the store"


def push_rows(pushes: Iterable[ChunkedPush]) -> list[dict[str, Any]]:
    """A row for each push, see `PushManager.rows`."""
    return [
        {
            "id": push.obj.id,
            "size": push.obj.size,
            "done": min(push.obj.size, push.next * push.chunk),
            "node": push.node,
            "state": "sends",
        }
        for push in pushes
    ]


def chunk_count(size: int, chunk: int) -> int:
    """In how many chunks an object of `size` bytes travels; at least one."""
    return max(1, -(-size // chunk))


def refuse_push(
    push: ChunkedPush,
    reason: str,
    dead_nodes: Collection[int],
    out: list[Effect],
    full: bool = False,
    hints: Sequence[int] = (),
    again: bool = False,
    link_broken: bool = False,
) -> None:
    """Send no more, and inform the receiver, once; the arguments as in `protocol.messages.PullRefused`."""
    if not push.over and push.node not in dead_nodes:
        refusal = m.PullRefused(push.obj.id, push.tag, reason, full, list(hints), again, link_broken)
        out.append(Send(raylet_of(push.node), refusal))
    push.over = True


_SLOTS_PER_PUSH = 2  # at most, while others wait for some: one is read into, one sent


class SpilledObjectPush:
    """Pushes of objects on disk; each chunk is read into one of a few slots beside the arena, and sent from it.

    A full store could read an object back only after something else has made way. Two full stores that need each
    other's objects would wait for each other; this way neither needs room for what it only passes on.

    A method that ends pushes returns the objects that are read by one push less: the lifecycle decides what follows.

    Args:
        slots: offsets of the slots in the raylet's mapping; none: nothing is sent this way.
        size: bytes of a slot.
        dead_nodes: nodes that are sent no message any more; kept up to date by the store.

    Attributes:
        completed: count of the objects that were sent whole. sent_bytes: bytes that were sent.
        loaded_bytes: bytes that were read from disk.
    """

    def __init__(self, slots: Sequence[int], size: int, dead_nodes: Collection[int]) -> None:
        self.completed = self.sent_bytes = 0
        self.loaded_bytes = 0
        self._slots = list(slots)
        self._free = list(slots)
        self._slot_bytes = size if slots else 0
        self._dead_nodes = dead_nodes
        self._pushes: deque[ChunkedPush] = deque()
        self._reading: dict[bytes, tuple[ChunkedPush, int, int, int]] = {}
        self._sending: dict[int, tuple[ChunkedPush, int]] = {}

    def can_serve(self, obj: StoredObject, msg: m.Pull) -> bool:
        """True if the requested chunks fit into slots."""
        return obj.spill_slot is not None and 0 < (msg.chunk or obj.size) <= self._slot_bytes

    def start_push(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """Send an object that is on disk; its place there stays until the last chunk has been read."""
        obj.io_reads += 1
        self._pushes.append(ChunkedPush(obj, node, msg.tag, msg.chunk or obj.size, msg.first, msg.first, msg.order))
        self._fill_slots(out)

    def owns_read(self, ident: bytes) -> bool:
        """True if the ReadSpill with this name is one of these."""
        return ident in self._reading

    def owns_send(self, tag: int) -> bool:
        """True if the StartSend with this tag is one of these."""
        return tag in self._sending

    def read_ended(self, ident: bytes, error: str | None, out: list[Effect]) -> list[StoredObject]:
        """A ReadSpill is over."""
        push, slot, tag, size = self._reading.pop(ident)
        if error is None:
            self.loaded_bytes += size
        else:
            refuse_push(push, f"reading from disk failed: {error}", self._dead_nodes, out)
        if push.over:
            return self._release_slot(push, slot, out)
        self._sending[tag] = push, slot
        out.append(StartSend(push.obj.id, push.node, tag, slot, size))
        return []

    def send_ended(self, tag: int, error: str | None, out: list[Effect]) -> list[StoredObject]:
        """A send is over."""
        push, slot = self._sending.pop(tag)
        if error is not None:
            refuse_push(push, f"sending failed: {error}", self._dead_nodes, out, link_broken=True)
        else:
            self.sent_bytes += push.size_of(tag)
        return self._release_slot(push, slot, out)

    def abandon_object(self, obj: StoredObject, reason: str, out: list[Effect]) -> list[StoredObject]:
        """The bytes of the object on disk must not be used any more."""
        return self._refuse([push for push in self._pushes if push.obj is obj], reason, out)

    def reads_stalled(self, stuck: Collection[bytes], reason: str, out: list[Effect]) -> list[StoredObject]:
        """These ReadSpills, not only ours, have not moved for long: the receivers of ours are informed. A slot is taken
        until its read has ended; where all slots are, no other receiver gets one either."""
        mine = [self._reading[ident][0] for ident in stuck if ident in self._reading]
        all_stuck = mine and len(mine) == len(self._reading) and not self._free
        return self._refuse(list(self._pushes) if all_stuck else mine, reason, out, full=True)

    def receiver_died(self, node: int) -> list[StoredObject]:
        """Nothing more is sent there."""
        over = [push for push in self._pushes if push.node == node]
        for push in over:
            push.over = True
        return list(dict.fromkeys(push.obj for push in over if self._remove_if_over(push)))

    def objects(self) -> list[StoredObject]:
        """The objects that are being sent, forgotten ones included; once for each receiver."""
        return [push.obj for push in self._pushes]

    def rows(self) -> list[dict[str, Any]]:
        """See `PushManager.rows`."""
        return push_rows(self._pushes)

    def __len__(self) -> int:
        """Number of pushes."""
        return len(self._pushes)

    def _refuse(
        self, pushes: list[ChunkedPush], reason: str, out: list[Effect], full: bool = False
    ) -> list[StoredObject]:
        for push in pushes:
            refuse_push(push, reason, self._dead_nodes, out, full=full)
        return list(dict.fromkeys(push.obj for push in pushes if self._remove_if_over(push)))

    def _fill_slots(self, out: list[Effect]) -> None:
        for _ in range(len(self._pushes) * _SLOTS_PER_PUSH):
            if not self._free:
                return
            push = self._pushes[0]
            self._pushes.rotate(-1)
            obj, at = push.obj, push.next * push.chunk
            if push.over or at >= obj.size or push.flying >= _SLOTS_PER_PUSH or obj.spill_slot is None:
                continue
            slot, size = self._free.pop(), min(push.chunk, obj.size - at)
            tag = push.tag + push.next - push.first
            push.next += 1
            push.flying += 1
            ident = tag.to_bytes(8, "big")
            self._reading[ident] = push, slot, tag, size
            out.append(ReadSpill(ident, obj.spill_slot.segment, Piece(slot, size, obj.spill_slot.offset + at)))

    def _release_slot(self, push: ChunkedPush, slot: int, out: list[Effect]) -> list[StoredObject]:
        self._free.append(slot)
        push.flying -= 1
        ended = self._remove_if_over(push)
        self._fill_slots(out)
        return [push.obj] if ended else []

    def _remove_if_over(self, push: ChunkedPush) -> bool:
        if push.flying or not (push.over or push.complete) or push not in self._pushes:
            return False
        self._pushes.remove(push)
        self.completed += not push.over
        push.obj.io_reads -= 1
        return True

    def check_invariants(self, objects: dict[bytes, StoredObject]) -> None:
        """Every slot is free, read into or sent from; every push that goes on has an object on disk."""
        busy = [slot for _, slot, _, _ in self._reading.values()] + [slot for _, slot in self._sending.values()]
        assert sorted(self._free + busy) == self._slots, f"slots: {self._free} are free, {busy} are busy"
        flying = [push for push, *_ in self._reading.values()] + [push for push, _ in self._sending.values()]
        for push in self._pushes:
            obj, name = push.obj, push.obj.id.hex()
            assert push.flying == sum(other is push for other in flying), f"slots of {name}"
            assert obj.forgotten != (objects.get(obj.id) is obj), f"{name} is sent from disk, and not in the store"
            if not push.over and not push.complete:
                assert obj.spill_slot is not None, f"{name} is to be sent from disk, and is not there"
