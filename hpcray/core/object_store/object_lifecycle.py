"""The life of the objects in one store: placed, sealed, pinned, released, settled, forgotten."""

from __future__ import annotations

from hpcray.common.ids import node_of, owner_of, raylet_of
from hpcray.common.labels import Place
from hpcray.core.effects import Effect, Piece, ReadSpill, ReleaseOverflow, ReserveOverflow, Send
from hpcray.core.object_store.allocator import (
    LARGE,
    Allocator,
    CreateRequestQueue,
    LruEvictionPolicy,
    format_size,
    full_reason,
)
from hpcray.core.object_store.pull_manager import CHUNK_BYTES, PullManager
from hpcray.core.object_store.push_manager import MIN_BROADCAST_BYTES, PushManager, SpilledObjectPush
from hpcray.core.object_store.spill_manager import SpillManager
from hpcray.core.object_store.stored_object import ObjectsByClient, StoredObject, StoredObjectState
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import OVERFLOW

# ------------------------------------------------------------ overflow
# Objects past the store: what neither fits into the arena nor can wait for room lies in a file that processes map.


_PREFIX = b"overflow"


class OverflowFile:
    """Hands out ranges of the overflow file. The disk space of a range is reserved before it is written through a
    mapping: a write that finds the disk full would kill its process.

    Args:
        size: bytes that may be handed out; 0: there is no such file.
    """

    def __init__(self, size: int) -> None:
        self._blocks = Allocator(size) if size else None
        self._reserving: dict[bytes, StoredObject] = {}

    @property
    def enabled(self) -> bool:
        """True if there is such a file."""
        return self._blocks is not None

    @property
    def used(self) -> int:
        """Bytes handed out."""
        return self._blocks.used if self._blocks is not None else 0

    def reserve(self, obj: StoredObject, out: list[Effect]) -> bool:
        """Begin to give a WAITING object a range; False: there is none."""
        position = self._blocks.allocate(max(LARGE, obj.size)) if self._blocks is not None else None
        if position is None:
            return False
        obj.offset = OVERFLOW + position
        obj.change_state(StoredObjectState.RESERVING)
        name = _PREFIX + position.to_bytes(8, "big")
        self._reserving[name] = obj
        out.append(ReserveOverflow(name, position, obj.size))
        return True

    def owns(self, name: bytes) -> bool:
        """True for the name of a ReserveOverflow that has not ended."""
        return name in self._reserving

    def reserving(self) -> list[StoredObject]:
        """The objects of the store whose ranges are being reserved."""
        return [obj for obj in self._reserving.values() if not obj.forgotten]

    def reserve_ended(self, name: bytes, out: list[Effect]) -> StoredObject | None:
        """The ReserveOverflow is over: the object; None: it has left the store meanwhile, and its range goes now."""
        obj = self._reserving.pop(name)
        if obj.state is StoredObjectState.RESERVING and not obj.forgotten:
            return obj
        self.release(obj, out)
        return None

    def release(self, obj: StoredObject, out: list[Effect]) -> None:
        """The range of an object is not needed any more. One that is being reserved goes when that has ended."""
        position = obj.offset - OVERFLOW
        if _PREFIX + position.to_bytes(8, "big") in self._reserving:
            obj.forgotten = True
            return
        assert self._blocks is not None
        self._blocks.free(position)
        out.append(ReleaseOverflow(position, obj.size))
        obj.offset = -1

    def check_invariants(self, holders: list[StoredObject]) -> None:
        """Every range belongs to one of these objects, or to one that left while its range was being reserved."""
        left = [obj for obj in self._reserving.values() if obj.forgotten]
        offsets = sorted(obj.offset - OVERFLOW for obj in [*holders, *left])
        blocks = self._blocks.blocks() if self._blocks is not None else {}
        assert offsets == sorted(blocks), f"ranges past the store at {sorted(blocks)}, objects at {offsets}"
        for name, obj in self._reserving.items():
            assert obj.forgotten or obj.state is StoredObjectState.RESERVING, f"{name!r} is reserved for no object"


# ------------------------------------------------------------ object lifecycle


SHORTAGE_PERIOD = 5.0
"""Seconds after a wait for room in vain in which other requests do not wait, if the store is as full as before."""
_TOO_LARGE = "is larger than the whole store"
NO_ROOM_TO_RESTORE = "there is no room to bring it back from disk"
_STALL_HINT = "hint: get it when the disk answers again; HPCRAY_SPILL_DIR names another one for the next job"


class ObjectLifecycle:
    """The objects of one node and the steps from state to state; `ObjectStore` maps messages and events to these steps.

    The parts report what ended by return values; only this class moves an object from one part to another.

    Args:
        node: index of this node.
        size: bytes of its arena.
        overtake_timeout: seconds for which small requests may overtake one that does not fit.
        spill_threshold: share of the arena beyond which what no process reads is spilled; 0: nothing is ever spilled.
        chunk: objects larger than this travel between nodes in pieces of so many bytes.
        slots: places of `chunk` bytes behind the arena, for what is sent straight from disk.
        overflow: bytes of the overflow file; 0: there is none.

    Attributes:
        objects: all objects of the store.
        dead_procs, dead_nodes: whose messages and objects no longer count.
        places: of the nodes in the network, where they are known.
        created, freed, failed: counters.
        blocks, eviction, queue, clients, spills, overflow, pulls, pushes, spilled_pushes: the parts.
    """

    def __init__(
        self,
        node: int,
        size: int,
        overtake_timeout: float,
        spill_threshold: float = 0.0,
        chunk: int = CHUNK_BYTES,
        slots: int = 0,
        overflow: int = 0,
    ) -> None:
        self._node = node
        self.objects: dict[bytes, StoredObject] = {}
        self.dead_procs: set[bytes] = set()
        self.dead_nodes: set[int] = set()
        self.places: dict[int, Place] = {}
        self.created = self.freed = self.failed = 0
        self.blocks = Allocator(size)
        self.eviction = LruEvictionPolicy()
        self.queue = CreateRequestQueue(self.blocks, self.eviction, overtake_timeout)
        self.clients = ObjectsByClient()
        self.spills = SpillManager(self.blocks, self.queue, self.eviction, self.clients, spill_threshold)
        self.overflow = OverflowFile(overflow)
        self.pushes = PushManager(self.dead_nodes, min(MIN_BROADCAST_BYTES, chunk), self.places, node)
        self.pulls = PullManager(node, self.pushes, self.dead_nodes, chunk, self.places)
        self.spilled_pushes = SpilledObjectPush(range(size, size + slots * chunk, chunk), chunk, self.dead_nodes)

    # ------------------------------------------------------------ into the store, and blocks

    def add_object(self, obj: StoredObject) -> StoredObject:
        """A new object comes into the store, WAITING."""
        obj.freed = owner_of(obj.id) in self.dead_procs or node_of(obj.id) in self.dead_nodes
        self.clients.add_object(obj)
        return self.objects.setdefault(obj.id, obj)

    def place_object(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give a new object its block, or queue it behind those that wait."""
        if obj.prefetched and not (obj.openers or obj.replica_pin_waiters):
            if self.queue.has_room(obj.size):
                self._enqueue(now, obj, out)
            if obj.state is StoredObjectState.WAITING:
                self._forget(obj, out)  # a prefetch makes no process wait, and has nothing written to disk
        elif self.blocks.could_hold(obj.size):
            self._enqueue(now, obj, out)
        else:
            self.queue.shortages += 1
            if self.spills.disk.stalled or not self.overflow.reserve(obj, out):
                self.fail(obj, "full", self.full_reason(obj, _TOO_LARGE), out)

    def overflow_object(self, now: float, obj: StoredObject, out: list[Effect]) -> bool:
        """Have an object that waits for a block written past the store instead; False: that cannot be."""
        if not self.overflow.reserve(obj, out):
            return False
        self.spills.loans.last_shortage = (now, self.blocks.used)
        self.queue.withdraw_request(obj)
        return True

    def overflow_reserved(self, now: float, name: bytes, error: str | None, out: list[Effect]) -> None:
        """The ReserveOverflow of this name is over. Without its range an object waits on, if it can ever have room."""
        obj = self.overflow.reserve_ended(name, out)
        self.spills.disk.write_ended(now, error)
        if obj is None:
            return
        if error is None:
            self._fill_block(now, obj, out)
            return
        self.overflow.release(obj, out)
        obj.change_state(StoredObjectState.WAITING)
        if self.blocks.could_hold(obj.size):
            self.queue.pending[obj.id] = obj
            self.queue.note_room()
            self.drop_unrequested(obj, out)
        else:
            self.fail(obj, "full", self.full_reason(obj, _TOO_LARGE), out)

    def as_full_as_before(self, now: float) -> bool:
        """True if a request for room has just waited in vain, and a new one would, too."""
        at, used = self.spills.loans.last_shortage
        return self.spills.stuck and now - at < SHORTAGE_PERIOD and self.blocks.used >= used

    def make_room(self, now: float, out: list[Effect]) -> list[Effect]:
        """Start the pulls whose turn it is, serve the requests for which there is room now, and start what makes room
        if it is short; after each event."""
        while (obj := self.pulls.admission.admit_next()) is not None:
            obj.since = now
            self.place_object(now, obj, out)
        while self.queue.changed:
            self._serve_queue(now, out)
        self.spills.start_if_short(now, out)
        return out

    def _enqueue(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give an object its block, now or when there is room; earlier requests are served first."""
        if self.queue.pending:
            self.queue.pending[obj.id] = obj
            self._serve_queue(now, out)
        elif not self._allocate(now, obj, out):
            self.queue.pending[obj.id] = obj
        self.queue.shortages += obj.id in self.queue.pending

    def _serve_queue(self, now: float, out: list[Effect]) -> None:
        """Serve pending requests. A small one may overtake a large one that does not fit, but not for ever."""
        queue = self.queue
        queue.changed = False
        for obj in queue.in_order():
            if obj.id not in queue.pending:
                continue
            if self._allocate(now, obj, out):
                queue.pending.pop(obj.id, None)
            elif queue.blocks_others(now, obj):
                break

    def _allocate(self, now: float, obj: StoredObject, out: list[Effect]) -> bool:
        """Give an object its block; others are evicted only where that can be enough."""
        offset = self.blocks.allocate(obj.size)
        if offset is None and self.queue.can_fit(obj.size):
            while offset is None and (victim := self.eviction.next_victim()) is not None:
                if victim.spill_slot is None:
                    self._forget(victim, out)
                else:
                    self._return_to_disk(victim, out)
                offset = self.blocks.allocate(obj.size)
        if offset is None:
            return False
        obj.offset = offset
        self._fill_block(now, obj, out)
        return True

    def _fill_block(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        if obj.spill_slot is not None:
            obj.change_state(StoredObjectState.RESTORING)
            slot = obj.spill_slot
            self.spills.restores.began(now)
            out.append(ReadSpill(obj.id, slot.segment, Piece(obj.offset, obj.size, slot.offset)))
        elif obj.creator is not None:
            obj.change_state(StoredObjectState.CREATING)
            obj.pins.add(obj.creator)
            out.append(Send(obj.creator, m.Created(obj.id, obj.offset, obj.size)))
        else:
            obj.change_state(StoredObjectState.PULLING)
            self.continue_pull(now, obj, out)

    # ------------------------------------------------------------ pulls and pushes

    def await_object(
        self, now: float, obj: StoredObject, proc: bytes, nodes: list[int], pin_replica: bool, out: list[Effect]
    ) -> None:
        """A process waits to read an object that is not here yet, or to have a replica pinned; `nodes`: where it could
        be pulled from."""
        if pin_replica:
            obj.replica_pinners.add(proc)
            obj.replica_pin_waiters[proc] = None
        else:
            obj.openers[proc] = None
        self.clients.add_client(proc, obj)
        pull = self.pulls.add_sources(obj, nodes)
        if obj.id in self.pulls.paused and pull.sources_left:
            self.continue_pull(now, obj, out)

    def continue_pull(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Try the next source of the object, pause, or give up."""
        failure = self.pulls.try_next_source(now, obj, out)
        if failure is not None:
            self.fail(obj, *failure, out)

    def serve_pull(self, obj: StoredObject, node: int, msg: m.Pull, out: list[Effect]) -> None:
        """Another node asks for a sealed object."""
        if self.pushes.serve_pull(obj, node, msg, out):
            self._mark_in_use(obj)

    def push_ended(self, obj: StoredObject, out: list[Effect]) -> None:
        """The object is read by one push less."""
        if obj.forgotten:
            if not obj.io_reads and obj.overflows:
                self.overflow.release(obj, out)
            elif not obj.io_reads and obj.offset >= 0:
                self.queue.release_block(obj)
        elif obj.idle:
            self.settle(obj, out)
        else:
            self._forget_if_unneeded_on_disk(obj, out)

    def refuse_waiting_nodes(self, obj: StoredObject, reason: str, out: list[Effect], full: bool = False) -> None:
        """Nodes that wait for the object must look elsewhere. They must not wait until it is pulled from another one,
        which may wait for them."""
        for node, msg in self.clients.take_waiting_pulls(obj):
            hints = obj.pull.possible_sources() if obj.pull is not None else []
            out.append(Send(raylet_of(node), m.PullRefused(obj.id, msg.tag, reason, full, hints)))
        self.pushes.refuse_waiting(obj, reason, out, full)

    # ------------------------------------------------------------ sealed and pinned

    def seal_object(self, obj: StoredObject, out: list[Effect]) -> None:
        """The bytes are there: serve all processes and nodes that waited for them."""
        obj.change_state(StoredObjectState.SEALED)
        obj.pull = None
        self.pulls.remove_pull(obj)
        for proc in list(obj.openers):
            self.pin_object(obj, proc, out)
        for proc in obj.replica_pin_waiters:
            self._confirm_replica_pin(obj, proc, out)
        obj.prefetched = False
        if obj.creator is None and obj.announcer is None and not obj.freed:
            # Prefetched, or no longer requested: this raylet announces the replica to the owner.
            obj.announcer = raylet_of(self._node)
            out.append(Send(owner_of(obj.id), m.AddLocation(obj.id, self._node)))
        obj.openers.clear()
        obj.replica_pin_waiters.clear()
        self.pushes.push_arrived(obj, out)
        for node, msg in self.clients.take_waiting_pulls(obj):
            self.serve_pull(obj, node, msg, out)
        if obj.idle:
            self.settle(obj, out)

    def pin_object(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process reads the sealed object from now on. One of a neighbor does not map the overflow file: its own node
        pulls the object."""
        if obj.overflows and node_of(proc) != self._node:
            out.append(Send(proc, m.StoreError(obj.id, "full", NO_ROOM_TO_RESTORE)))
            obj.openers.pop(proc, None)
            self.clients.drop_client(proc, obj)
            return
        obj.pins.add(proc)
        self._mark_in_use(obj)
        self.clients.add_client(proc, obj)
        out.append(Send(proc, m.Opened(obj.id, obj.offset, obj.size, self._becomes_announcer(obj, proc))))

    def pin_replica(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A replica that is here stays for this process from now on, in memory or on disk."""
        self._mark_in_use(obj)
        obj.replica_pinners.add(proc)
        self._confirm_replica_pin(obj, proc, out)
        if obj.idle:
            self.settle(obj, out)

    def unpin_replica(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process gives up a replica that stayed for it; with no pinner left it is an ordinary, evictable copy."""
        if proc not in obj.replica_pinners:
            return
        obj.replica_pinners.discard(proc)
        obj.replica_pin_waiters.pop(proc, None)
        if not obj.preserved or obj.unneeded:
            if obj.idle:
                self._mark_in_use(obj)
                self.settle(obj, out)
            else:
                self._forget_if_unneeded_on_disk(obj, out)
        self.drop_unrequested(obj, out)
        self.clients.drop_client(proc, obj)

    def _confirm_replica_pin(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        self._becomes_announcer(obj, proc)
        self.clients.add_client(proc, obj)
        out.append(Send(proc, m.ReplicaPinned(obj.id)))

    def _mark_in_use(self, obj: StoredObject) -> None:
        self.eviction.remove_candidate(obj)
        self.spills.remove_candidate(obj)

    @staticmethod
    def _becomes_announcer(obj: StoredObject, proc: bytes) -> bool:
        """True if this process is the one that announces the replica to the owner."""
        pulled = obj.creator is None and obj.announcer is None
        if pulled:
            obj.announcer = proc
        return pulled

    # ------------------------------------------------------------ released, freed, settled

    def release_client(self, now: float, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process gives up its pin, its request to open, or (before the seal) its creation."""
        obj.openers.pop(proc, None)
        if proc in obj.pins:
            obj.pins.discard(proc)
            if obj.idle:
                self.settle(obj, out)
        if obj.being_created and obj.creator == proc:
            self._creator_left(now, obj, out)
        else:
            self.drop_unrequested(obj, out)
        self.clients.drop_client(proc, obj)

    def _creator_left(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """An object will not be sealed by its creator: those who wait for it get another node's copy, if any."""
        reason = f"object {obj.id.hex()} was not finished: its creator left or died"
        self.refuse_waiting_nodes(obj, reason, out)
        if obj.pull is None or not obj.pull.sources_left or not obj.requested:
            self.fail(obj, "lost", reason, out)
            return
        obj.creator = None
        if obj.state is StoredObjectState.CREATING:
            obj.change_state(StoredObjectState.PULLING)
            self.continue_pull(now, obj, out)

    def drop_unrequested(self, obj: StoredObject, out: list[Effect]) -> None:
        """If nothing waits any more for an object without bytes, give up its place in the queue, or its paused pull."""
        if obj.id in self.pulls.paused:
            if not obj.awaited:
                self.fail(obj, *self.pulls.failure_of(obj), out)
        elif obj.state is StoredObjectState.WAITING and not obj.requested:
            if obj.spill_slot is not None:
                self._return_to_disk(obj, out)
            elif obj.creator is None:
                self._forget(obj, out)

    def free_object(self, ident: bytes, out: list[Effect]) -> None:
        """No reference is left, or the owner died: the object goes, at once or with the last pin; but for one that is
        kept for a borrower (`StoredObject.kept`)."""
        obj = self.objects.get(ident)
        if obj is not None:
            obj.freed = True
            obj.prefetched = False
            if not obj.unneeded:
                return
            if obj.idle:
                self.settle(obj, out)
            else:
                self._forget_if_unneeded_on_disk(obj, out)
                self.drop_unrequested(obj, out)

    def settle(self, obj: StoredObject, out: list[Effect]) -> None:
        """An idle object goes if it was freed; otherwise it may be evicted or spilled."""
        if obj.freed and obj.unneeded:
            self.freed += 1
            self._forget(obj, out)
        elif obj.overflows:
            if not obj.preserved:
                self._forget(obj, out)  # no copy is worth so much disk
        elif obj.preserved and obj.spill_slot is None:
            self.spills.add_candidate(obj)
        else:
            if not obj.preserved and obj.spill_slot is not None:
                self.spills.drop_from_disk(obj, out)  # the last replica pin is gone: an ordinary copy
            self.eviction.add_candidate(obj)
            self.queue.note_room()

    def _forget(self, obj: StoredObject, out: list[Effect]) -> None:
        """The object leaves the store; its block goes when the last send is over."""
        del self.objects[obj.id]
        self.clients.remove_object(obj)
        self.pulls.remove_pull(obj)
        self.spills.drop_from_disk(obj, out)
        if obj.io_reads:
            obj.forgotten = True
        elif obj.overflows:
            self.overflow.release(obj, out)
        if obj.offset < 0 or not (obj.io_reads or obj.overflows):
            self.queue.withdraw(obj)

    def fail(self, obj: StoredObject, kind: str, reason: str, out: list[Effect]) -> None:
        """An object will not come to be here: every process and node that waits for it is sent the reason."""
        self.failed += 1
        full, waiters = kind == "full", list(obj.openers)
        if obj.creator is not None and obj.spill_slot is None and full and obj.creator not in obj.openers:
            waiters.append(obj.creator)
        out.extend(Send(proc, m.StoreError(obj.id, kind, reason)) for proc in waiters)
        if obj.spill_slot is None:
            out.extend(Send(proc, m.ReplicaPinned(obj.id, reason)) for proc in sorted(obj.replica_pinners))
        self.refuse_waiting_nodes(obj, reason, out, full)
        if obj.spill_slot is None:
            self._forget(obj, out)
        else:
            obj.openers.clear()
            for proc in waiters:
                self.clients.drop_client(proc, obj)
            self._return_to_disk(obj, out)

    def full_reason(self, obj: StoredObject, why: str) -> str:
        """Why an object got no block, with the largest objects that hold blocks."""
        held = [other for other in self.objects.values() if other.offset >= 0 and not self.eviction.is_candidate(other)]
        return full_reason(self._node, obj, why, self.blocks, held, self.spills.report())

    # ------------------------------------------------------------ disk

    def request_restore(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """The object is requested: if it lies on disk only, it gets a block again."""
        if obj.state is not StoredObjectState.SPILLED:
            return
        if self.spills.disk.reads_stalled:
            # One more read that does not end would only take one more block.
            self.fail_on_stalled_disk(obj, self.spills.disk.stall_reason, out)
            return
        obj.change_state(StoredObjectState.WAITING)
        obj.since = now
        self._enqueue(now, obj, out)

    def restore_early(self, now: float, obj: StoredObject, out: list[Effect], spare: int = 0) -> bool:
        """Bring a spilled object back that no process waits for; False: there are no `spare` bytes beside it."""
        if not self.queue.has_room(obj.size + spare):
            return False
        self.request_restore(now, obj, out)
        self.drop_unrequested(obj, out)
        return obj.state is StoredObjectState.RESTORING

    def read_ahead_of(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """An object on disk, and perhaps in memory, was requested: those written after it may come back early."""
        if obj.spill_slot is None:
            return
        # What was read ahead must not be driven out by more of the same.
        window = self.spills.read_ahead.window
        for following in self.spills.read_ahead.next_restores(obj):
            if not self.restore_early(now, following, out, window):
                break

    def read_ended(self, now: float, ident: bytes, error: str | None, out: list[Effect]) -> None:
        """The ReadSpill of an object into its block is over."""
        obj = self.objects[ident]
        self.spills.restores.ended(now, obj.size, error)
        if error is None:
            self.seal_object(obj, out)
        elif not obj.requested:
            self._return_to_disk(obj, out)
        else:
            self.replace_unreadable(now, obj, error, out)

    def replace_unreadable(self, now: float, obj: StoredObject, error: str, out: list[Effect]) -> None:
        """The bytes on disk cannot be read: whatever waits for the object gets another node's copy, if any."""
        reason = f"node {self._node}: reading from disk failed: {error}"
        if obj.state is StoredObjectState.SPILLED:
            obj.change_state(StoredObjectState.WAITING)
            obj.since = now
        self.refuse_waiting_nodes(obj, reason, out)
        for ended in self.spilled_pushes.abandon_object(obj, reason, out):
            self.push_ended(ended, out)
        self.spills.drop_from_disk(obj, out)
        obj.creator, obj.promoted = None, obj.promoted or obj.creator is not None
        pull = self.pulls.add_sources(obj, [])
        pull.failures.append(reason)
        if obj.state is StoredObjectState.WAITING and not self.dead_nodes.issuperset(pull.sources_left):
            if obj.id not in self.queue.pending:
                self._enqueue(now, obj, out)
            return
        obj.change_state(StoredObjectState.PULLING)
        self.continue_pull(now, obj, out)

    def lend_from_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """There is no room to bring an object back from disk: processes of this node read its file, other nodes are
        sent it from there. A process of a neighbor gets an error: its own node pulls the object then."""
        reason = self.full_reason(obj, "finds no room")
        for proc in list(obj.openers):
            del obj.openers[proc]
            self.clients.drop_client(proc, obj)
            if node_of(proc) != self._node:
                out.append(Send(proc, m.StoreError(obj.id, "full", NO_ROOM_TO_RESTORE)))
            else:
                self.spills.loans.lend_slot(obj, proc, out)
        for node, msg in self.clients.take_waiting_pulls(obj):
            if self.spilled_pushes.can_serve(obj, msg):
                self.spilled_pushes.start_push(obj, node, msg, out)
            else:
                self.clients.add_waiting_pull(obj, node, msg)
        self.refuse_waiting_nodes(obj, reason, out, full=True)
        self._return_to_disk(obj, out)

    def disk_stalled(self, stuck: list[bytes], what: str, out: list[Effect]) -> None:
        """The WriteSpill (b"") and ReadSpills of these names have not moved for long; none: the disk answers again."""
        stuck = [b"" if self.overflow.owns(name) else name for name in stuck]
        for obj in self.overflow.reserving() if b"" in stuck else ():  # one thread writes and reserves
            reason = f"object {obj.id.hex()} does not fit into memory, and {what}; {_STALL_HINT}"
            self.fail(obj, "full", reason, out)
        reads = [ident for ident in stuck if ident]
        self.spills.disk.set_stall(len(reads) < len(stuck), bool(reads), what)
        if not reads:
            return
        for obj in self.spilled_pushes.reads_stalled(reads, f"node {self._node}: {what}; {_STALL_HINT}", out):
            self.push_ended(obj, out)
        on_disk = [obj for obj in self.queue.pending.values() if obj.spill_slot is not None]
        for obj in [self.objects[ident] for ident in reads if ident in self.objects] + on_disk:
            self.fail_on_stalled_disk(obj, what, out)

    def fail_on_stalled_disk(self, obj: StoredObject, what: str, out: list[Effect]) -> None:
        """All requests for this object fail. A block that is being read into stays its own."""
        reason = (
            f"object {obj.id.hex()} of {format_size(obj.size)} lies on disk on node {self._node}, "
            f"and {what}; {_STALL_HINT}"
        )
        if obj.state is StoredObjectState.WAITING:
            self.fail(obj, "full", reason, out)
            return
        waiters = list(obj.openers)
        self.failed += bool(waiters)
        out.extend(Send(proc, m.StoreError(obj.id, "full", reason)) for proc in waiters)
        obj.openers.clear()
        for proc in waiters:
            self.clients.drop_client(proc, obj)
        self.refuse_waiting_nodes(obj, reason, out, full=True)

    def _return_to_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """An object on disk gives up its block, or its request for one."""
        self.queue.withdraw(obj)
        obj.change_state(StoredObjectState.SPILLED)
        self._forget_if_unneeded_on_disk(obj, out)

    def _forget_if_unneeded_on_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        if obj.state is StoredObjectState.SPILLED and not obj.io_reads and (obj.unneeded or not obj.preserved):
            self._forget(obj, out)
