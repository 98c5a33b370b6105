"""The object store of one node, as a pure state machine: messages and ends of transfers in, effects out.

An object is created by a process of the node (its *primary* copy) or pulled from another node (a *copy*). It is
WAITING for a block, then CREATING or PULLING, then SEALED. Processes pin it with Create and Open and unpin it with
Release; the creator's Release before the seal takes the creation back. A process has at most one Open of an object
under way, and gets one answer to it. Copies nobody pins may be evicted; primaries stay until their owner frees them or
dies, in memory or, when room is short, SPILLED to disk (`spill`), from where they are RESTORED when somebody asks.

Who runs it must report the end of every StartReceive, StartSend, WriteSpill and ReadSpill, once, whatever happened (a
CancelReceive or the death of the other node included): the store reuses a block only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.base.ids import node_of, number_of, owner_of, raylet_of
from hpcray.core.effects import Effect, Piece, ReadSpill, Send
from hpcray.core.store.holdings import Holdings
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.receives import Receives
from hpcray.core.store.report import absent_reason, full_reason, list_objects, show_objects, show_space, show_transfers
from hpcray.core.store.room import RoomMaker
from hpcray.core.store.sends import Sends
from hpcray.core.store.space import Space
from hpcray.wire import messages as m

# Only higher nodes may wait for a copy that is itself still coming: nodes that wait for each other in a circle, each
# sent to the next by an outdated location, would wait for ever.
_RECEIVING = "it is still being received here"


class NodeStore:
    """Objects of one node: created, sealed, pinned by processes, pulled from and sent to other nodes, freed.

    Args:
        node: index of this node.
        size: bytes of its arena.
        full_timeout: seconds a request waits for room, while nothing is being spilled, before it fails.
        spill_threshold: share of the arena beyond which what nobody reads is spilled; 0: nothing is ever spilled.
    """

    def __init__(self, node: int, size: int, full_timeout: float = 10.0, spill_threshold: float = 0.0) -> None:
        self._node = node
        self._full_timeout = full_timeout
        self._space = Space(size, full_timeout / 2, self._evict, self._placed)
        self._blocks = self._space.blocks
        self._objects: dict[bytes, StoredObject] = {}
        self._holdings = Holdings()
        self._room = RoomMaker(self._space, self._holdings, spill_threshold, self._settle)
        self._spiller = self._room.spiller
        self._dead_procs: set[bytes] = set()
        self._receives = Receives(node, self._sealed, self._fail)
        self._dead_nodes = self._receives.dead_nodes
        self._sends = Sends(self._dead_nodes, self._room.keep)
        self._counts = {"created": 0, "freed": 0, "failed": 0}
        self._handlers: dict[type, Callable[[float, bytes, Any, list[Effect]], None]] = {
            m.Create: self._create,
            m.Seal: self._seal,
            m.Open: self._open,
            m.Release: self._release,
            m.Free: self._free,
            m.Pull: self._asked,
            m.PullRefused: lambda now, src, msg, out: self._receives.refused(msg, out),
        }

    # ------------------------------------------------------------ events

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """React to Create, Seal, Open, Release, Free, Pull or PullRefused from `src`.

        Raises:
            KeyError: the message is none of these.
        """
        out: list[Effect] = []
        self._handlers[type(msg)](now, src, msg, out)
        return self._finish(now, out)

    def received(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The receive with this tag is over; on an error (or a cancellation) its block holds nothing."""
        out: list[Effect] = []
        self._receives.ended(tag, error, out)
        return self._finish(now, out)

    def sent(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The send with this tag is over. A failed one is reported to the receiver, which tries elsewhere."""
        out: list[Effect] = []
        obj = self._sends.ended(tag, error, out)
        if obj is not None and obj.idle:
            self._settle(obj, out)
        return self._finish(now, out)

    def spilled(self, now: float, error: str | None) -> list[Effect]:
        """The WriteSpill is over; on an error the objects are where they were, and the next try comes later."""
        out: list[Effect] = []
        self._spiller.ended(now, error, out)
        return self._finish(now, out)

    def restored(self, now: float, ident: bytes, error: str | None) -> list[Effect]:
        """The ReadSpill of this object is over; what cannot be read is looked for on other nodes."""
        out: list[Effect] = []
        obj = self._objects[ident]
        if error is None:
            self._spiller.restored += 1
            self._sealed(obj, out)
        else:
            self._spiller.drop(obj, out)
            obj.creator = None
            obj.state = State.PULLING
            self._receives.add(obj, []).failures.append(f"node {self._node}: reading from disk failed: {error}")
            self._receives.ask_next(obj, out)
        return self._finish(now, out)

    def process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process of this node or of another is gone: its pins, what it had not sealed, and what it owned, go."""
        self._dead_procs.add(proc)
        out: list[Effect] = []
        for obj in self._holdings.held_by(proc):
            if obj.announcer == proc:
                obj.announcer = None  # its owner may never have heard of this copy: the next opener tells it again
            self._let_go(obj, proc, out)
        for obj in self._holdings.owned_by(proc):
            self._free_one(obj.id, out)
        return self._finish(now, out)

    def node_died(self, now: float, node: int) -> list[Effect]:
        """A node is gone: transfers from it are taken up elsewhere, objects owned there are freed when unpinned."""
        self._dead_nodes.add(node)
        out: list[Effect] = []
        for obj in list(self._objects.values()):
            obj.asking = [(asker, tag) for asker, tag in obj.asking if asker != node]
            if obj.pull is not None and obj.pull.tag >= 0 and obj.pull.node == node:
                obj.pull.cancel("the node died", out)
            if node_of(obj.id) == node:
                self._free_one(obj.id, out)
            self._drop_request(obj, out)
        return self._finish(now, out)

    def tick(self, now: float) -> list[Effect]:
        """Fail the requests that have waited for room too long. Call it a few times within `full_timeout`."""
        out: list[Effect] = []
        hopeless = not self._room.may_come(now - self._full_timeout)
        for obj in list(self._space.waiting.values()) if hopeless else ():
            if now - obj.since >= self._full_timeout:
                self._fail(obj, "full", self._full_reason(obj, f"waited {now - obj.since:.1f} s for room"), out)
        return self._finish(now, out)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for people and tests: bytes, objects by state, waiting requests, transfers, counters."""
        return {
            "node": self._node,
            **show_space(self._space),
            **show_objects(self._objects.values()),
            **show_transfers(self._receives, self._sends),
            **self._spiller.snapshot(),
            **self._counts,
        }

    def listing(self, limit: int) -> list[dict[str, Any]]:
        """The largest objects, at most so many (see `list_objects`)."""
        return list_objects(self._objects.values(), limit)

    @property
    def high_water(self) -> int:
        """End of the part of the arena that was ever handed out."""
        return self._blocks.high_water

    # ------------------------------------------------------------ messages

    def _create(self, now: float, src: bytes, msg: m.Create, out: list[Effect]) -> None:
        if msg.id in self._objects:
            state = self._objects[msg.id].state.value
            out.append(Send(src, m.StoreError(msg.id, "exists", f"object {msg.id.hex()} is here already ({state})")))
            return
        if src in self._dead_procs:
            return
        self._place(now, self._add(StoredObject(msg.id, msg.size, src, now)), out)

    def _seal(self, now: float, src: bytes, msg: m.Seal, out: list[Effect]) -> None:
        obj = self._objects.get(msg.id)
        if obj is not None and obj.creator == src and obj.state is State.CREATING:
            self._counts["created"] += 1
            self._sealed(obj, out)

    def _open(self, now: float, src: bytes, msg: m.Open, out: list[Effect]) -> None:
        if src in self._dead_procs:
            return
        obj = self._objects.get(msg.id)
        if obj is not None and obj.state is State.SEALED:
            self._pin(obj, src, out)
            return
        if obj is None:
            sources = [node for node in msg.nodes if node != self._node and node not in self._dead_nodes]
            if not sources:
                reason = absent_reason(self._node, msg.id, msg.nodes, self._dead_nodes)
                out.append(Send(src, m.StoreError(msg.id, "lost", reason)))
                return
            obj = self._add(StoredObject(msg.id, msg.size, None, now))
            self._wait_for(obj, src, sources)
            self._place(now, obj, out)
            return
        self._wait_for(obj, src, msg.nodes)
        self._want_back(now, obj, out)

    def _release(self, now: float, src: bytes, msg: m.Release, out: list[Effect]) -> None:
        for ident in msg.ids:
            obj = self._objects.get(ident)
            if obj is not None:
                self._let_go(obj, src, out)

    def _free(self, now: float, src: bytes, msg: m.Free, out: list[Effect]) -> None:
        for ident in msg.ids:
            self._free_one(ident, out)
        if number_of(src):
            out.extend(
                Send(raylet_of(node), m.Free(msg.ids, []))
                for node in msg.nodes
                if node != self._node and node not in self._dead_nodes
            )

    def _asked(self, now: float, src: bytes, msg: m.Pull, out: list[Effect]) -> None:
        node = node_of(src)
        obj = self._objects.get(msg.id)
        if node in self._dead_nodes:
            return
        if obj is None:
            reason = "it is not here"
        elif obj.size != msg.size:
            reason = f"it has {obj.size} bytes here, not {msg.size}"
        elif obj.state is State.SEALED:
            self._sends.start(obj, node, msg.tag, out)
            return
        elif obj.creator is None and node < self._node:
            reason = _RECEIVING
        else:
            obj.asking.append((node, msg.tag))
            self._want_back(now, obj, out)
            return
        out.append(Send(src, m.PullRefused(msg.id, msg.tag, reason)))

    # ------------------------------------------------------------ life of an object

    def _add(self, obj: StoredObject) -> StoredObject:
        obj.freed = owner_of(obj.id) in self._dead_procs or node_of(obj.id) in self._dead_nodes
        self._holdings.add(obj)
        return self._objects.setdefault(obj.id, obj)

    def _place(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give a new object its block, or queue it behind those that wait."""
        if self._blocks.could_hold(obj.size):
            self._space.place(now, obj, out)
        else:
            self._fail(obj, "full", self._full_reason(obj, "is larger than the whole store"), out)

    def _want_back(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Somebody asks for the object: if it lies on disk only, it gets a block again."""
        if obj.state is State.SPILLED:
            obj.state = State.WAITING
            obj.since = now
            self._space.place(now, obj, out)

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
        for proc in obj.openers:
            self._pin(obj, proc, out)
        obj.openers.clear()
        for node, tag in obj.asking:
            self._sends.start(obj, node, tag, out)
        obj.asking.clear()
        if obj.idle:
            self._settle(obj, out)

    def _pin(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        pulled = obj.creator is None and obj.announcer is None
        if pulled:
            obj.announcer = proc
        obj.pins.add(proc)
        self._holdings.hold(proc, obj)
        self._room.keep(obj)
        out.append(Send(proc, m.Opened(obj.id, obj.offset, obj.size, pulled)))

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

    def _creator_left(self, obj: StoredObject, out: list[Effect]) -> None:
        """An object will not be sealed by its creator: those who wait for it get another node's copy, if any."""
        if obj.pull is not None:
            lower = [(node, tag) for node, tag in obj.asking if node < self._node]
            out.extend(Send(raylet_of(node), m.PullRefused(obj.id, tag, _RECEIVING)) for node, tag in lower)
            obj.asking = [(node, tag) for node, tag in obj.asking if node > self._node]
        if obj.pull is None or not obj.pull.untried or not obj.wanted:
            self._fail(obj, "lost", f"object {obj.id.hex()} was not finished: its creator left or died", out)
            return
        obj.creator = None
        if obj.state is State.CREATING:
            obj.state = State.PULLING
            self._receives.ask_next(obj, out)

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
        if obj.freed:
            self._forget(obj, out)

    def _free_one(self, ident: bytes, out: list[Effect]) -> None:
        obj = self._objects.get(ident)
        if obj is not None:
            obj.freed = True
            if obj.idle:
                self._settle(obj, out)
            elif obj.state is State.SPILLED:
                self._forget(obj, out)

    def _settle(self, obj: StoredObject, out: list[Effect]) -> None:
        """An idle object goes if it was freed; otherwise it may make way for others."""
        if obj.freed:
            self._counts["freed"] += 1
            self._forget(obj, out)
        elif obj.creator is None or obj.disk is not None:
            self._space.may_evict(obj)
        else:
            self._spiller.may_spill(obj)

    def _evict(self, obj: StoredObject, out: list[Effect]) -> None:
        if obj.disk is None:
            self._forget(obj, out)
        else:
            self._back_to_disk(obj, out)

    def _forget(self, obj: StoredObject, out: list[Effect]) -> None:
        del self._objects[obj.id]
        self._holdings.remove(obj)
        self._space.withdraw(obj)
        self._spiller.drop(obj, out)

    def _fail(self, obj: StoredObject, kind: str, reason: str, out: list[Effect]) -> None:
        """An object will not come to be here: everybody who waits for it hears why."""
        self._counts["failed"] += 1
        full, waiters = kind == "full", dict(obj.openers)
        if obj.creator is not None and obj.disk is None and full:
            waiters[obj.creator] = None
        out.extend(Send(proc, m.StoreError(obj.id, kind, reason)) for proc in waiters)
        out.extend(Send(raylet_of(node), m.PullRefused(obj.id, tag, reason, full)) for node, tag in obj.asking)
        if obj.disk is None:
            self._forget(obj, out)
        else:
            obj.openers.clear()
            obj.asking.clear()
            for proc in waiters:
                self._holdings.let_go(proc, obj)
            self._back_to_disk(obj, out)

    def _finish(self, now: float, out: list[Effect]) -> list[Effect]:
        return self._room.make(now, out)

    def _wait_for(self, obj: StoredObject, proc: bytes, nodes: list[int]) -> None:
        """A process wants an object that is not here yet; `nodes`: where it could be pulled from."""
        obj.openers[proc] = None
        self._holdings.hold(proc, obj)
        self._receives.add(obj, nodes)

    def _full_reason(self, obj: StoredObject, why: str) -> str:
        held = [other for other in self._objects.values() if other.offset >= 0 and not self._space.can_evict(other)]
        return full_reason(self._node, obj, why, self._blocks, held, self._room.report())
