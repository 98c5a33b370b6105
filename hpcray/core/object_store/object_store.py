"""The object store of one node, as a pure state machine: messages and ends of transfers in, effects out.

An object is created by a process of the node (its *primary* copy) or pulled from another node (a *replica*). It is
WAITING for a block, then CREATING or PULLING, then SEALED (`stored_object.TRANSITIONS`). Processes, of this node or of
neighboring ones, pin it with Create and Open and unpin it with Release; the creator's Release before the seal takes
the creation back. A process has at most one Open of an object under way to read it, and one to pin a replica; it gets
an answer to each, and gives up each by itself. Replicas without a pin may be evicted; primaries stay until their owner
frees them or dies, in memory or, when room is short, SPILLED to disk (`spill_manager`), from where they are RESTORED
when they are requested.

The raylet that runs the store must report the end of every StartReceive, StartSend, WriteSpill and ReadSpill, once,
whatever happened (a CancelReceive or the death of the other node included): the store reuses a block only after that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from heapq import nlargest
from typing import Any

from hpcray.common.ids import node_of, number_of, owner_of, raylet_of
from hpcray.common.labels import place_of
from hpcray.core.effects import Effect, Send
from hpcray.core.object_store.allocator import Allocator, LruEvictionPolicy
from hpcray.core.object_store.object_lifecycle import NO_ROOM_TO_RESTORE, ObjectLifecycle
from hpcray.core.object_store.pull_manager import CHUNK_BYTES, PRIORITIES, PullManager
from hpcray.core.object_store.push_manager import PushManager
from hpcray.core.object_store.stored_object import StoredObject, StoredObjectState
from hpcray.protocol import messages as m

OVERFLOW_DELAY = 1.0
"""Seconds for which a request for a new object waits where nothing can be spilled: Unpin was sent."""
SHORT_OVERFLOW_DELAY = 0.1
"""The same, where another one has just waited in vain."""
LEND_DELAY = 1.0
"""Seconds for which a request for an object on disk waits where nothing can be spilled: Unpin was sent."""

_STILL_RECEIVING = "it is still being received here"
_MAX_FULL_TIMEOUTS = 10  # a pull waits so many times `full_timeout` for room while others arrive
_LOWEST_PRIORITY = PRIORITIES - 1


class ObjectStore:
    """Objects of one node: created, sealed, pinned by processes, pulled from and sent to other nodes, freed.

    Args:
        node: index of this node.
        size: bytes of its arena.
        full_timeout: seconds a request waits for room, while nothing is being spilled, before it fails.
        spill_threshold: share of the arena beyond which what no process reads is spilled; 0: nothing is ever spilled.
        chunk: objects larger than this travel between nodes in pieces of so many bytes.
        slots: places of `chunk` bytes behind the arena, for what is sent straight from disk.
        overflow: bytes of the overflow file; 0: there is none.

    Attributes:
        lifecycle: the objects, and the parts that manage them.
    """

    def __init__(
        self,
        node: int,
        size: int,
        full_timeout: float = 10.0,
        spill_threshold: float = 0.0,
        chunk: int = CHUNK_BYTES,
        slots: int = 0,
        overflow: int = 0,
    ) -> None:
        self._node = node
        self._full_timeout = full_timeout
        self.lifecycle = ObjectLifecycle(node, size, full_timeout / 2, spill_threshold, chunk, slots, overflow)
        self._objects = self.lifecycle.objects
        self._dead_nodes = self.lifecycle.dead_nodes
        self._dead_procs = self.lifecycle.dead_procs

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """React to a message of `HANDLES` from `src`.

        Raises:
            KeyError: the message is none of these.
        """
        out: list[Effect] = []
        _HANDLERS[type(msg)](self, now, src, msg, out)
        return self.lifecycle.make_room(now, out)

    def receive_ended(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The receive with this tag is over; on an error (or a cancellation) its part of the block holds nothing."""
        out: list[Effect] = []
        pulls = self.lifecycle.pulls
        obj = pulls.receive_ended(now, tag, error, out)
        if obj is not None and pulls.is_complete(obj):
            pulls.completed += 1
            self.lifecycle.seal_object(obj, out)
        elif obj is not None:
            self.lifecycle.continue_pull(now, obj, out)
        return self.lifecycle.make_room(now, out)

    def send_ended(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The send with this tag is over. A failed one is reported to the receiver, which tries elsewhere."""
        out: list[Effect] = []
        if self.lifecycle.spilled_pushes.owns_send(tag):
            for obj in self.lifecycle.spilled_pushes.send_ended(tag, error, out):
                self.lifecycle.push_ended(obj, out)
        elif (ended := self.lifecycle.pushes.send_ended(tag, error, out)) is not None:
            self.lifecycle.push_ended(ended, out)
        return self.lifecycle.make_room(now, out)

    def spill_write_ended(self, now: float, error: str | None) -> list[Effect]:
        """The WriteSpill is over; on an error the objects are where they were, and the next try comes later."""
        out: list[Effect] = []
        for obj in self.lifecycle.spills.write_ended(now, error, out):
            if obj.idle:
                self.lifecycle.settle(obj, out)
        return self.lifecycle.make_room(now, out)

    def spill_read_ended(self, now: float, ident: bytes, error: str | None) -> list[Effect]:
        """The ReadSpill or ReserveOverflow with this name is over; what cannot be read is pulled from other nodes."""
        out: list[Effect] = []
        if self.lifecycle.overflow.owns(ident):
            self.lifecycle.overflow_reserved(now, ident, error, out)
        elif self.lifecycle.spilled_pushes.owns_read(ident):
            for obj in self.lifecycle.spilled_pushes.read_ended(ident, error, out):
                self.lifecycle.push_ended(obj, out)
        else:
            self.lifecycle.read_ended(now, ident, error, out)
        return self.lifecycle.make_room(now, out)

    def disk_stalled(self, now: float, stuck: list[bytes], what: str) -> list[Effect]:
        """WriteSpill (b"") and ReadSpills (their names) that have not moved for long; none: the disk answers again.

        Call it again and again while there are any: a later request waits no longer than until the next call.

        Args:
            what: does not answer, and since when.
        """
        out: list[Effect] = []
        self.lifecycle.disk_stalled(stuck, what, out)
        return self.lifecycle.make_room(now, out)

    def process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process of this node or of another is gone: its pins, what it had not sealed, and what it owned, go."""
        self._dead_procs.add(proc)
        out: list[Effect] = []
        lifecycle = self.lifecycle
        for obj in lifecycle.clients.objects_of_client(proc):
            if obj.announcer == proc:
                obj.announcer = None  # the owner may never have heard of this replica: the next opener announces it
            lifecycle.unpin_replica(obj, proc, out)
            if self._objects.get(obj.id) is obj:
                lifecycle.release_client(now, obj, proc, out)
        lifecycle.spills.loans.process_died(proc, out)
        for obj in lifecycle.clients.objects_of_owner(proc):
            lifecycle.free_object(obj.id, out)
        return lifecycle.make_room(now, out)

    def nodes_placed(self, nodes: Collection[m.NodeInfo]) -> None:
        """Take note of where nodes are in the network."""
        self.lifecycle.places.update((info.index, place) for info in nodes if (place := place_of(info.labels)))

    def node_died(self, now: float, node: int, guests: Collection[bytes] = ()) -> list[Effect]:
        """A node is gone: transfers from it are taken up elsewhere, objects owned there are freed when unpinned.

        Args:
            guests: processes of that node which may still read here; `process_died` is called for each later.
        """
        self._dead_nodes.add(node)
        out: list[Effect] = []
        lifecycle = self.lifecycle
        for obj in lifecycle.pushes.receiver_died(node):
            lifecycle.push_ended(obj, out)
        for obj in lifecycle.spilled_pushes.receiver_died(node):
            lifecycle.push_ended(obj, out)
        for obj in list(lifecycle.clients.awaited_elsewhere.values()):
            for asker, msg in lifecycle.clients.take_waiting_pulls(obj):
                if asker != node:
                    lifecycle.clients.add_waiting_pull(obj, asker, msg)
            lifecycle.drop_unrequested(obj, out)
        lifecycle.pulls.source_died(node, out)
        for obj in list(lifecycle.pulls.paused.values()):
            lifecycle.continue_pull(now, obj, out)
        for obj in lifecycle.clients.objects_of_owning_node(node):
            lifecycle.free_object(obj.id, out)
        for proc in sorted(lifecycle.clients.clients()):
            if node_of(proc) == node and proc not in guests:
                out += self.process_died(now, proc)
        return lifecycle.make_room(now, out)

    def tick(self, now: float) -> list[Effect]:
        """Fail the requests that have waited for room too long, and continue the pulls that were paused after a broken
        data link. Call it a few times within `full_timeout`."""
        out: list[Effect] = []
        lifecycle = self.lifecycle
        for obj in lifecycle.pulls.due_retries(now):
            lifecycle.continue_pull(now, obj, out)
        spills, timeout = lifecycle.spills, self._full_timeout
        hopeless, as_full = not spills.may_make_room(now - timeout), lifecycle.as_full_as_before(now)
        for obj in list(lifecycle.queue.pending.values()):
            waited = now - obj.since
            if obj.spill_slot is not None and obj.openers and not spills.disk.stalled:
                if waited >= timeout if hopeless else spills.stuck and waited >= LEND_DELAY:
                    spills.loans.last_shortage = (now, lifecycle.blocks.used)
                    lifecycle.lend_from_disk(obj, out)
            elif (
                obj.spill_slot is None
                and (hopeless or spills.stuck)
                and not spills.disk.stalled
                and waited >= (SHORT_OVERFLOW_DELAY if as_full else OVERFLOW_DELAY)
                and now >= spills.disk.may_retry_at
                and not self._may_fit_soon(now, obj)
                and lifecycle.overflow_object(now, obj, out)
            ):
                continue
            elif hopeless and waited >= timeout and not self._may_fit_soon(now, obj):
                lifecycle.fail(obj, "full", lifecycle.full_reason(obj, f"waited {waited:.1f} s for room"), out)
        return lifecycle.make_room(now, out)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for people and tests: bytes, objects by state, waiting requests, transfers, counters."""
        lifecycle = self.lifecycle
        return {
            "node": self._node,
            **space_stats(lifecycle.blocks, lifecycle.eviction),
            "overflow": lifecycle.overflow.used,
            **object_stats(self._objects.values()),
            **transfer_stats(lifecycle.pulls, lifecycle.pushes),
            "queued": len(lifecycle.pulls.admission),
            "pulled_bytes": lifecycle.pulls.received_bytes,
            "sent_bytes": lifecycle.pushes.sent_bytes + lifecycle.spilled_pushes.sent_bytes,
            "from_disk": lifecycle.spilled_pushes.completed,
            "lent": lifecycle.spills.loans.count,
            **lifecycle.spills.snapshot(lifecycle.spilled_pushes.loaded_bytes),
            "created": lifecycle.created,
            "freed": lifecycle.freed,
            "failed": lifecycle.failed,
        }

    def transfers(self) -> list[dict[str, Any]]:
        """The transfers of objects from and to other nodes that are under way, or wait for their turn: "id", "size",
        "done" (bytes), "node" at the other end (-1: not known yet), "state"."""
        lifecycle = self.lifecycle
        return [*lifecycle.pulls.rows(), *lifecycle.pushes.rows(), *lifecycle.spilled_pushes.rows()]

    def largest_objects(self, limit: int) -> list[dict[str, Any]]:
        """The largest objects, at most so many (see `stats.largest_objects`)."""
        return largest_objects(self._objects.values(), limit)

    @property
    def used(self) -> int:
        """Bytes of the arena in use."""
        return self.lifecycle.blocks.used

    @property
    def shortages(self) -> int:
        """Number of requests for a block so far that found no room at once."""
        return self.lifecycle.queue.shortages

    @property
    def high_water(self) -> int:
        """End of the part of the arena that was ever handed out."""
        return self.lifecycle.blocks.high_water

    # ------------------------------------------------------------ messages of processes

    def _create(self, now: float, src: bytes, msg: m.Create, out: list[Effect]) -> None:
        if msg.id in self._objects:
            state = self._objects[msg.id].state.value
            out.append(Send(src, m.StoreError(msg.id, "exists", f"object {msg.id.hex()} is here already ({state})")))
            return
        if src in self._dead_procs:
            return
        obj = self.lifecycle.add_object(StoredObject(msg.id, msg.size, src, now))
        self.lifecycle.place_object(now, obj, out)

    def _seal(self, now: float, src: bytes, msg: m.Seal, out: list[Effect]) -> None:
        obj = self._objects.get(msg.id)
        if obj is not None and obj.creator == src and obj.state is StoredObjectState.CREATING:
            self.lifecycle.created += 1
            self.lifecycle.seal_object(obj, out)

    def _open(self, now: float, src: bytes, msg: m.Open, out: list[Effect]) -> None:
        if src in self._dead_procs:
            return
        obj = self._objects.get(msg.id)
        if msg.pin_replica and not msg.nodes and node_of(src) == self._node:
            if obj is not None and src in obj.pins:
                obj.promoted = True
        elif obj is None:
            self._open_absent(now, src, msg, out)
        elif msg.pin_replica and (obj.state is StoredObjectState.SEALED or obj.spill_slot is not None):
            self.lifecycle.pin_replica(obj, src, out)
        elif obj.state is StoredObjectState.SEALED:
            self.lifecycle.pin_object(obj, src, out)
            self.lifecycle.read_ahead_of(now, obj, out)
        else:
            self._open_without_bytes(now, obj, src, msg, out)

    def _open_absent(self, now: float, src: bytes, msg: m.Open, out: list[Effect]) -> None:
        sources = self._living_others(msg.nodes)
        if not sources:
            reason = absent_reason(self._node, msg.id, msg.nodes, self._dead_nodes)
            out.append(
                Send(src, m.ReplicaPinned(msg.id, reason) if msg.pin_replica else m.StoreError(msg.id, "lost", reason))
            )
            return
        lifecycle = self.lifecycle
        obj = lifecycle.add_object(StoredObject(msg.id, msg.size, None, now, priority=_clamp_priority(msg.priority)))
        lifecycle.await_object(now, obj, src, sources, msg.pin_replica, out)
        if not lifecycle.blocks.could_hold(obj.size) or lifecycle.pulls.admission.admit(obj):
            lifecycle.place_object(now, obj, out)

    def _open_without_bytes(self, now: float, obj: StoredObject, src: bytes, msg: m.Open, out: list[Effect]) -> None:
        lifecycle = self.lifecycle
        if node_of(src) != self._node and obj.only_on_disk and not lifecycle.queue.has_room(obj.size):
            # The neighbor's own node can read it straight from the disk, into a store that may be less full.
            out.append(Send(src, m.StoreError(obj.id, "full", NO_ROOM_TO_RESTORE)))
            return
        lifecycle.await_object(now, obj, src, msg.nodes, msg.pin_replica, out)
        self._raise_pull_priority(obj, msg.priority)
        lifecycle.request_restore(now, obj, out)
        if obj.spill_slot is not None:
            lifecycle.read_ahead_of(now, obj, out)
            if obj.state is StoredObjectState.WAITING and lifecycle.as_full_as_before(now):
                lifecycle.lend_from_disk(obj, out)

    def _raise_priority(self, now: float, src: bytes, msg: m.RaisePriority, out: list[Effect]) -> None:
        obj = self._objects.get(msg.id)
        if obj is not None and src in obj.openers:
            self._raise_pull_priority(obj, msg.priority)

    def _raise_pull_priority(self, obj: StoredObject, priority: int) -> None:
        self.lifecycle.pulls.admission.raise_priority(obj, _clamp_priority(priority))
        if obj.id in self.lifecycle.queue.pending:
            self.lifecycle.queue.note_room()  # the order of the queue has changed

    def _prefetch(self, now: float, src: bytes, msg: m.Prefetch, out: list[Effect]) -> None:
        lifecycle = self.lifecycle
        for ref in msg.refs:
            obj = self._objects.get(ref.id)
            if obj is not None:
                if obj.state is StoredObjectState.SPILLED:
                    lifecycle.restore_early(now, obj, out)
                continue
            sources = self._living_others(ref.nodes)
            freed = node_of(ref.id) in self._dead_nodes or owner_of(ref.id) in self._dead_procs
            if freed or not sources or not lifecycle.queue.has_room(ref.size):
                continue
            new = StoredObject(ref.id, ref.size, None, now, priority=_LOWEST_PRIORITY, prefetched=True)
            obj = lifecycle.add_object(new)
            lifecycle.pulls.add_sources(obj, sources)
            if lifecycle.pulls.admission.admit(obj):
                lifecycle.place_object(now, obj, out)

    def _disk_read(self, now: float, src: bytes, msg: m.DiskRead, out: list[Effect]) -> None:
        slot = self.lifecycle.spills.loans.return_slot(src, msg.id, out)
        if not msg.error:
            return
        obj = self._objects.get(msg.id)
        if obj is None or obj.spill_slot is None or obj.spill_slot != slot or not obj.only_on_disk:
            self._open(now, src, m.Open(msg.id, msg.size, msg.nodes), out)  # it is not what could not be read
        else:
            self.lifecycle.await_object(now, obj, src, msg.nodes, False, out)
            self.lifecycle.replace_unreadable(now, obj, msg.error, out)

    def _release(self, now: float, src: bytes, msg: m.Release, out: list[Effect]) -> None:
        for ident in msg.ids:
            obj = self._objects.get(ident)
            if obj is not None and msg.unpin_replica:
                self.lifecycle.unpin_replica(obj, src, out)
            elif obj is not None:
                self.lifecycle.release_client(now, obj, src, out)

    def _free(self, now: float, src: bytes, msg: m.Free, out: list[Effect]) -> None:
        for ident in msg.ids:
            self.lifecycle.free_object(ident, out)
        if number_of(src):
            out.extend(Send(raylet_of(node), m.Free(msg.ids, [])) for node in self._living_others(msg.nodes))

    def _object_get(self, now: float, src: bytes, msg: m.ObjectGet, out: list[Effect]) -> None:
        """A process looks for an object whose owner has left: this node may keep a copy of it."""
        obj = self._objects.get(msg.id)
        found = obj is not None and (obj.state is StoredObjectState.SEALED or obj.spill_slot is not None)
        size = obj.size if obj is not None and found else 0
        out.append(Send(src, m.ObjectReady(msg.id, 0 if found else 2, b"", size, [self._node] if found else [])))

    # ------------------------------------------------------------ messages of other raylets

    def _pull(self, now: float, src: bytes, msg: m.Pull, out: list[Effect]) -> None:
        node, lifecycle = node_of(src), self.lifecycle
        obj = self._objects.get(msg.id)
        if node in self._dead_nodes:
            return
        hints: list[int] = []
        if obj is None:
            reason = "it is not here"
        elif obj.size != msg.size:
            reason = f"it has {obj.size} bytes here, not {msg.size}"
        elif obj.state is StoredObjectState.SEALED:
            lifecycle.serve_pull(obj, node, msg, out)
            lifecycle.read_ahead_of(now, obj, out)
            return
        elif (
            obj.only_on_disk and lifecycle.spilled_pushes.can_serve(obj, msg) and not lifecycle.queue.has_room(obj.size)
        ):
            lifecycle.spilled_pushes.start_push(obj, node, msg, out)
            return
        elif obj.creator is not None or obj.spill_slot is not None:
            lifecycle.clients.add_waiting_pull(obj, node, msg)
            lifecycle.request_restore(now, obj, out)
            lifecycle.read_ahead_of(now, obj, out)
            return
        elif obj.pull is not None and obj.pull.can_relay_to(msg):
            lifecycle.pushes.start_push(obj, node, msg, out)
            return
        else:
            reason = _STILL_RECEIVING
            hints = obj.pull.possible_sources() if obj.pull is not None else []
        out.append(Send(src, m.PullRefused(msg.id, msg.tag, reason, False, hints)))

    def _pull_refused(self, now: float, src: bytes, msg: m.PullRefused, out: list[Effect]) -> None:
        self.lifecycle.pulls.pull_refused(msg, out)

    def _pull_redirected(self, now: float, src: bytes, msg: m.PullElsewhere, out: list[Effect]) -> None:
        self.lifecycle.pulls.pull_redirected(msg, out)

    # ------------------------------------------------------------ conditions

    def _living_others(self, nodes: list[int]) -> list[int]:
        return [node for node in nodes if node != self._node and node not in self._dead_nodes]

    def _may_fit_soon(self, now: float, obj: StoredObject) -> bool:
        """True if a pull lacks room only because of others that are on their way: when these are here, and have been
        read, they can be evicted. The wait is bounded, as their readers may keep them."""
        timeout, lifecycle = self._full_timeout, self.lifecycle
        if obj.creator is not None or lifecycle.pulls.last_progress <= now - timeout:
            return False
        if now - obj.since > _MAX_FULL_TIMEOUTS * timeout:
            return False
        return lifecycle.queue.can_fit(obj.size - lifecycle.pulls.admission.incoming_bytes())

    def check_invariants(self) -> None:
        """Check all that must hold between two events."""
        lifecycle = self.lifecycle
        lifecycle.blocks.check_invariants()
        lifecycle.eviction.check_invariants(self._objects)
        lifecycle.queue.check_invariants(self._objects)
        lifecycle.clients.check_invariants(self._objects, raylet_of(self._node))
        lifecycle.spills.check_invariants(self._objects)
        lifecycle.pulls.check_invariants(self._objects)
        lifecycle.pushes.check_invariants(self._objects)
        lifecycle.spilled_pushes.check_invariants(self._objects)
        awaited = {obj.id: obj for obj in self._objects.values() if obj.waiting_pulls}
        assert awaited == lifecycle.clients.awaited_elsewhere, (
            "the index of what other nodes wait for, and the objects differ"
        )
        readers = [*lifecycle.pushes.objects(), *lifecycle.spilled_pushes.objects(), *lifecycle.spills.written_now()]
        self._check_blocks(readers)
        io_reads = Counter(id(obj) for obj in readers)
        for obj in self._objects.values():
            self._check_object(obj, io_reads[id(obj)])

    def _check_blocks(self, reading: list[StoredObject]) -> None:
        """Every block of the allocator belongs to one object: of the store, or forgotten and still being sent."""
        lifecycle = self.lifecycle
        everything = {id(obj): obj for obj in (*self._objects.values(), *reading) if obj.offset >= 0}
        lifecycle.overflow.check_invariants([obj for obj in everything.values() if obj.overflows])
        holders = {key: obj for key, obj in everything.items() if not obj.overflows}
        offsets = sorted(obj.offset for obj in holders.values())
        blocks = lifecycle.blocks.blocks()
        assert offsets == sorted(blocks), f"blocks at {sorted(blocks)}, objects at {offsets}"
        for obj in holders.values():
            assert blocks[obj.offset] >= obj.size, f"{obj.id.hex()} has {blocks[obj.offset]} of {obj.size} bytes"

    def _check_object(self, obj: StoredObject, reads: int) -> None:
        lifecycle, state, name = self.lifecycle, obj.state, obj.id.hex()
        in_memory = state not in (StoredObjectState.WAITING, StoredObjectState.SPILLED)
        assert (obj.offset >= 0) == in_memory, f"{name} is {state.value}, its block is at {obj.offset}"
        assert not obj.forgotten, f"{name} is in the store, and was forgotten"
        assert obj.io_reads == reads, f"{name} counts {obj.io_reads} reads, not {reads}"
        if state is StoredObjectState.SEALED:
            assert not obj.openers and not obj.replica_pin_waiters and not obj.waiting_pulls, f"{name} is here already"
            evictable = lifecycle.eviction.is_candidate(obj)
            spillable = lifecycle.spills.is_candidate(obj)
            held = evictable or spillable or (obj.overflows and obj.preserved and obj.idle)
            assert obj.idle == held, f"{name}: idle {obj.idle}, {evictable}, {spillable}"
            assert not (obj.idle and obj.unneeded), f"{name} is idle and freed, and still here"
        elif state is StoredObjectState.SPILLED:
            assert obj.spill_slot is not None and not obj.requested, f"{name} is requested, and stays on disk"
            assert obj.io_reads or (obj.preserved and not obj.unneeded), f"{name} is on disk for no process"
        elif state is StoredObjectState.CREATING:
            assert obj.pins == {obj.creator} and obj.spill_slot is None, f"{name}: its creator must pin it"
        elif state is StoredObjectState.PULLING:
            assert obj.creator is None and obj.spill_slot is None and not obj.pins, f"{name} is pulled, and pinned"
        elif state is StoredObjectState.RESTORING:
            assert obj.spill_slot is not None and not obj.pins, f"{name} is read back, and pinned"
        elif state is StoredObjectState.RESERVING:
            assert obj.overflows and obj.spill_slot is None and not obj.pins, f"{name} has no range past the store"
        else:
            queued = obj.id in lifecycle.queue.pending or lifecycle.pulls.admission.is_waiting(obj)
            assert queued and obj.requested | (obj.creator is not None), f"{name} waits for nothing, or in no queue"
        assert obj.pins.isdisjoint(self._dead_procs), f"{name} is pinned by a dead process"


def _clamp_priority(priority: int) -> int:
    return max(0, min(priority, _LOWEST_PRIORITY))


_HANDLERS: dict[type, Callable[[ObjectStore, float, bytes, Any, list[Effect]], None]] = {
    m.Create: ObjectStore._create,
    m.Seal: ObjectStore._seal,
    m.Open: ObjectStore._open,
    m.Release: ObjectStore._release,
    m.Free: ObjectStore._free,
    m.Pull: ObjectStore._pull,
    m.PullRefused: ObjectStore._pull_refused,
    m.PullElsewhere: ObjectStore._pull_redirected,
    m.RaisePriority: ObjectStore._raise_priority,
    m.Prefetch: ObjectStore._prefetch,
    m.DiskRead: ObjectStore._disk_read,
    m.ObjectGet: ObjectStore._object_get,
}
HANDLES = tuple(_HANDLERS)
"""Message types for `ObjectStore.handle`."""


def absent_reason(node: int, ident: bytes, nodes: Collection[int], dead: Collection[int]) -> str:
    """Why an object that is not on `node` cannot be had from the `nodes` that the opener named."""
    if not nodes:
        return f"object {ident.hex()} is not on node {node}"
    known = ", ".join(f"{other} (dead)" if other in dead else str(other) for other in nodes)
    return f"object {ident.hex()} is not on node {node}, and no other living node has it (named: {known or 'none'})"


def space_stats(blocks: Allocator, eviction: LruEvictionPolicy) -> dict[str, int]:
    """Numbers of the arena, in bytes; `evicted` counts objects."""
    return {
        "capacity": blocks.size,
        "used": blocks.used,
        "largest_free": blocks.largest_free,
        "high_water": blocks.high_water,
        "evictable": eviction.evictable_bytes,
        "evicted": eviction.evicted,
    }


def object_stats(objects: Collection[StoredObject]) -> dict[str, int]:
    """How many objects there are, are pinned, and are in which state."""
    numbers = dict.fromkeys((state.value for state in StoredObjectState), 0)
    for obj in objects:
        numbers[obj.state.value] += 1
    return {"objects": len(objects), "pinned": sum(1 for obj in objects if obj.pins), **numbers}


def transfer_stats(pulls: PullManager, pushes: PushManager) -> dict[str, int]:
    """How many transfers are under way, how many ended well, how many askers were sent to other readers, how many pulls
    wait before they try a node behind a broken data link again."""
    return {
        "receiving": len(pulls),
        "pulled": pulls.completed,
        "paused": len(pulls.paused),
        "sending": len(pushes),
        "sent": pushes.completed,
        "sent_on": pushes.redirected,
    }


def largest_objects(objects: Iterable[StoredObject], limit: int) -> list[dict[str, Any]]:
    """The largest objects, at most so many: id, bytes, where ("memory", "spilled", "both", or what is being done),
    whether it is a copy of another node's, the processes that have it pinned, and the transfers that read it."""
    return [
        {
            "id": obj.id,
            "size": obj.size,
            "state": _location(obj),
            "copy": obj.creator is None,
            "pins": sorted(obj.pins),
            "reads": obj.io_reads,
        }
        for obj in nlargest(limit, objects, key=lambda obj: (obj.size, obj.id))
    ]


def _location(obj: StoredObject) -> str:
    if obj.state is StoredObjectState.SEALED:
        return "overflow" if obj.overflows else "memory" if obj.spill_slot is None else "both"
    return str(obj.state.value)
