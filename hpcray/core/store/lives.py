"""What becomes of an object in a node store: placed, sealed, pinned, let go of, settled, forgotten."""

from __future__ import annotations

from hpcray.base.ids import node_of, owner_of, raylet_of
from hpcray.core.effects import Effect, Piece, ReadSpill, Send
from hpcray.core.store.admission import Admission
from hpcray.core.store.holdings import Holdings
from hpcray.core.store.lent import Lent
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.pulls import CHUNK
from hpcray.core.store.read_ahead import ReadAhead
from hpcray.core.store.receives import Receives
from hpcray.core.store.report import full_reason
from hpcray.core.store.room import RoomMaker
from hpcray.core.store.sends import TREE_MIN, Sends
from hpcray.core.store.space import Space
from hpcray.core.store.straight import Straight
from hpcray.wire import messages as m


class ObjectLives:
    """The objects of one node and the steps from state to state, without who asks for them: see `NodeStore`.

    Args:
        node: index of this node.
        size: bytes of its arena.
        full_timeout: seconds a request waits for room, while nothing is being spilled, before it fails.
        spill_threshold: share of the arena beyond which what nobody reads is spilled; 0: nothing is ever spilled.
        chunk: objects larger than this travel between nodes in pieces of so many bytes.
        slots: places of `chunk` bytes behind the arena, for what is sent straight from disk.
    """

    def __init__(
        self,
        node: int,
        size: int,
        full_timeout: float = 10.0,
        spill_threshold: float = 0.0,
        chunk: int = CHUNK,
        slots: int = 0,
    ) -> None:
        self._node = node
        self._full_timeout = full_timeout
        self._space = Space(size, full_timeout / 2, self._evict, self._placed)
        self._blocks = self._space.blocks
        self._objects: dict[bytes, StoredObject] = {}
        self._holdings = Holdings()
        self._room = RoomMaker(self._space, self._holdings, spill_threshold, self._settle)
        self._spiller = self._room.spiller
        self._read_ahead = ReadAhead(size, self._spiller.on_disk)
        self._dead_procs: set[bytes] = set()
        self._dead_nodes: set[int] = set()
        self._sends = Sends(node, self._dead_nodes, self._room.keep, self._unread, min(TREE_MIN, chunk))
        self._receives = Receives(node, self._sends, self._sealed, self._fail, self._dead_nodes, chunk)
        self._straight = Straight(range(size, size + slots * chunk, chunk), chunk, self._dead_nodes, self._unread)
        self._lent = Lent(self._spiller.give_back)
        self._admission = Admission()
        self._counts = {"created": 0, "freed": 0, "failed": 0}

    def _add(self, obj: StoredObject) -> StoredObject:
        obj.freed = owner_of(obj.id) in self._dead_procs or node_of(obj.id) in self._dead_nodes
        self._holdings.add(obj)
        return self._objects.setdefault(obj.id, obj)

    def _place(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give a new object its block, or queue it behind those that wait."""
        if obj.ahead and not (obj.openers or obj.keeping):
            if self._space.has_room(obj.size):
                self._space.place(now, obj, out)
            if obj.state is State.WAITING:
                self._forget(obj, out)  # what is fetched ahead makes nobody wait, and has nothing written to disk
        elif self._blocks.could_hold(obj.size):
            self._space.place(now, obj, out)
        else:
            self._fail(obj, "full", self._full_reason(obj, "is larger than the whole store"), out)

    def _want_back(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Somebody asks for the object: if it lies on disk only, it gets a block again."""
        if obj.state is State.SPILLED:
            obj.state = State.WAITING
            obj.since = now
            self._space.place(now, obj, out)

    def _asked_on_disk(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Somebody asks for an object that is on disk, and perhaps in memory: the next ones may come back early."""
        # What was read ahead must not be driven out by more of the same.
        self._read_ahead.asked(obj, lambda other: self._back_early(now, other, out, self._read_ahead.window))

    def _back_early(self, now: float, obj: StoredObject, out: list[Effect], spare: int = 0) -> bool:
        """Bring an object back that nobody waits for; False: there are no `spare` bytes beside it."""
        if not self._space.has_room(obj.size + spare):
            return False
        self._want_back(now, obj, out)
        self._drop_request(obj, out)
        return obj.state is State.RESTORING

    def _placed(self, obj: StoredObject, out: list[Effect]) -> None:
        if obj.disk is not None:
            obj.state = State.RESTORING
            out.append(ReadSpill(obj.id, obj.disk.segment, Piece(obj.offset, obj.size, obj.disk.offset)))
        elif obj.creator is not None:
            obj.state = State.CREATING
            obj.pins.add(obj.creator)
            out.append(Send(obj.creator, m.Created(obj.id, obj.offset, obj.size)))
        else:
            obj.state = State.PULLING
            self._receives.ask_next(obj, out)

    def _sealed(self, obj: StoredObject, out: list[Effect]) -> None:
        """The bytes are there: serve everybody who waited for them."""
        obj.state = State.SEALED
        obj.pull = None
        self._admission.leave(obj)
        for proc in obj.openers:
            self._pin(obj, proc, out)
        for proc in obj.keeping:
            self._tell_kept(obj, proc, out)
        obj.ahead = False
        if obj.creator is None and obj.announcer is None and not obj.freed:
            # Fetched ahead, or nobody wants it any more: its owner hears of this copy from us.
            obj.announcer = raylet_of(self._node)
            out.append(Send(owner_of(obj.id), m.AddLocation(obj.id, self._node)))
        obj.openers.clear()
        obj.keeping.clear()
        self._sends.grown(obj, out)
        for node, msg in obj.asking:
            self._sends.serve(obj, node, msg, out)
        obj.asking.clear()
        if obj.idle:
            self._settle(obj, out)

    def _pin(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        obj.pins.add(proc)
        self._room.keep(obj)
        self._holdings.hold(proc, obj)
        out.append(Send(proc, m.Opened(obj.id, obj.offset, obj.size, self._announces(obj, proc))))

    def _tell_kept(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        self._announces(obj, proc)
        self._holdings.hold(proc, obj)
        out.append(Send(proc, m.Kept(obj.id)))

    @staticmethod
    def _announces(obj: StoredObject, proc: bytes) -> bool:
        """Whether it is this process that tells the owner of this copy."""
        pulled = obj.creator is None and obj.announcer is None
        if pulled:
            obj.announcer = proc
        return pulled

    def _keep_no_more(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process gives up a copy that stayed for it."""
        if proc not in obj.keepers:
            return
        obj.keepers.discard(proc)
        obj.keeping.pop(proc, None)
        self._not_kept(obj, out)
        self._drop_request(obj, out)
        self._holdings.let_go(proc, obj)

    def _let_go(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process gives up its pin, its request to open, or (before the seal) its creation."""
        obj.openers.pop(proc, None)
        if proc in obj.pins:
            obj.pins.discard(proc)
            if obj.idle:
                self._settle(obj, out)
        if obj.unfinished and obj.creator == proc:
            self._creator_left(obj, out)
        else:
            self._drop_request(obj, out)
        self._holdings.let_go(proc, obj)

    def _not_kept(self, obj: StoredObject, out: list[Effect]) -> None:
        """Somebody gave up a copy that stayed for him; where it stays for nobody it is one like any other."""
        if obj.stays:
            return
        if obj.idle:
            self._room.keep(obj)
            self._settle(obj, out)
        else:
            self._off_disk(obj, out)

    def _creator_left(self, obj: StoredObject, out: list[Effect]) -> None:
        """An object will not be sealed by its creator: those who wait for it get another node's copy, if any."""
        reason = f"object {obj.id.hex()} was not finished: its creator left or died"
        self._turn_away(obj, reason, out)
        if obj.pull is None or not obj.pull.untried or not obj.wanted:
            self._fail(obj, "lost", reason, out)
            return
        obj.creator = None
        if obj.state is State.CREATING:
            obj.state = State.PULLING
            self._receives.ask_next(obj, out)

    def _turn_away(self, obj: StoredObject, reason: str, out: list[Effect], full: bool = False) -> None:
        """Nodes that wait for the object must look elsewhere. They must not wait until it is pulled from another one,
        which may wait for them."""
        for node, msg in obj.asking:
            hints = obj.pull.sources() if obj.pull is not None else []
            out.append(Send(raylet_of(node), m.PullRefused(obj.id, msg.tag, reason, full, hints)))
        obj.asking.clear()
        self._sends.refuse(obj, reason, out, full)

    def _drop_request(self, obj: StoredObject, out: list[Effect]) -> None:
        """Nobody may be left who wants a block for this object."""
        if obj.state is not State.WAITING or obj.wanted:
            return
        if obj.disk is not None:
            self._back_to_disk(obj, out)
        elif obj.creator is None:
            self._forget(obj, out)

    def _back_to_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """It gives up its block, or its wish for one."""
        self._space.withdraw(obj)
        obj.state = State.SPILLED
        self._off_disk(obj, out)

    def _off_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """What is on disk only is forgotten where nobody needs it there."""
        if obj.state is State.SPILLED and not obj.reads and (obj.freed or not obj.stays):
            self._forget(obj, out)

    def _leave_disk(self, obj: StoredObject, out: list[Effect]) -> None:
        """What the disk has of it matters no more. Who was lent its place there may still read it."""
        slot = self._spiller.drop(obj)
        if slot is not None:
            self._lent.leave(slot, out)

    def _unreadable(self, now: float, obj: StoredObject, error: str, out: list[Effect]) -> None:
        """What the disk has of an object cannot be read: who waits for it gets another node's copy, if any."""
        reason = f"node {self._node}: reading from disk failed: {error}"
        if obj.state is State.SPILLED:
            obj.state, obj.since = State.WAITING, now
        self._turn_away(obj, reason, out)
        self._straight.stop(obj, reason, out)
        self._leave_disk(obj, out)
        obj.creator, obj.kept = None, obj.kept or obj.creator is not None
        pull = self._receives.add(obj, [])
        pull.failures.append(reason)
        if obj.state is State.WAITING and not self._dead_nodes.issuperset(pull.untried):
            if obj.id not in self._space.waiting:
                self._space.place(now, obj, out)
            return
        obj.state = State.PULLING
        self._receives.ask_next(obj, out)

    def _free_one(self, ident: bytes, out: list[Effect]) -> None:
        obj = self._objects.get(ident)
        if obj is not None:
            obj.freed = True
            obj.ahead = False
            if obj.idle:
                self._settle(obj, out)
            else:
                self._off_disk(obj, out)
                self._drop_request(obj, out)

    def _settle(self, obj: StoredObject, out: list[Effect]) -> None:
        """An idle object goes if it was freed; otherwise it may make way for others."""
        if obj.freed:
            self._counts["freed"] += 1
            self._forget(obj, out)
        elif obj.stays and obj.disk is None:
            self._spiller.may_spill(obj)
        else:
            if not obj.stays and obj.disk is not None:
                self._leave_disk(obj, out)  # who had it kept here gave it up: it is a copy like any other
            self._space.may_evict(obj)

    def _unread(self, obj: StoredObject, out: list[Effect]) -> None:
        """One node less is being sent the object."""
        if obj.gone:
            if not obj.reads and obj.offset >= 0:
                self._space.give_back(obj)
        elif obj.idle:
            self._settle(obj, out)
        else:
            self._off_disk(obj, out)

    def _evict(self, obj: StoredObject, out: list[Effect]) -> None:
        if obj.disk is None:
            self._forget(obj, out)
        else:
            self._back_to_disk(obj, out)

    def _forget(self, obj: StoredObject, out: list[Effect]) -> None:
        del self._objects[obj.id]
        self._holdings.remove(obj)
        self._admission.leave(obj)
        self._leave_disk(obj, out)
        if obj.reads:
            obj.gone = True  # chunks of it are still being sent
        if not obj.reads or obj.offset < 0:
            self._space.withdraw(obj)

    def _fail(self, obj: StoredObject, kind: str, reason: str, out: list[Effect]) -> None:
        """An object will not come to be here: everybody who waits for it hears why."""
        self._counts["failed"] += 1
        full, waiters = kind == "full", list(obj.openers)
        if obj.creator is not None and obj.disk is None and full and obj.creator not in obj.openers:
            waiters.append(obj.creator)
        out.extend(Send(proc, m.StoreError(obj.id, kind, reason)) for proc in waiters)
        if obj.disk is None:
            out.extend(Send(proc, m.Kept(obj.id, reason)) for proc in sorted(obj.keepers))
        self._turn_away(obj, reason, out, full)
        if obj.disk is None:
            self._forget(obj, out)
        else:
            obj.openers.clear()
            for proc in waiters:
                self._holdings.let_go(proc, obj)
            self._back_to_disk(obj, out)

    def _full_reason(self, obj: StoredObject, why: str) -> str:
        held = [other for other in self._objects.values() if other.offset >= 0 and not self._space.can_evict(other)]
        return full_reason(self._node, obj, why, self._blocks, held, self._room.report())
