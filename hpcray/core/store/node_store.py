"""The object store of one node, as a pure state machine: messages and ends of transfers in, effects out.

An object is created by a process of the node (its *primary* copy) or pulled from another node (a *copy*). It is
WAITING for a block, then CREATING or PULLING, then SEALED. Processes pin it with Create and Open and unpin it with
Release; the creator's Release before the seal takes the creation back. A process has at most one Open of an object
under way, and gets one answer to it. Copies nobody pins may be evicted; primaries stay until their owner frees them or
dies.

Who runs it must report the end of every StartReceive and StartSend, once, whatever happened (a CancelReceive or the
death of the other node included): the store reuses a block only after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.base.ids import node_of, number_of, owner_of, raylet_of
from hpcray.core.effects import Effect, Send, StartSend
from hpcray.core.store.holdings import Holdings
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.pulls import Asker, Pull
from hpcray.core.store.report import absent_reason, full_reason
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
        full_timeout: seconds a request waits for room before it fails.
    """

    def __init__(self, node: int, size: int, full_timeout: float = 10.0) -> None:
        self._node = node
        self._full_timeout = full_timeout
        self._space = Space(size, self._forget)
        self._blocks = self._space.blocks
        self._objects: dict[bytes, StoredObject] = {}
        self._holdings = Holdings()
        self._waiting: dict[bytes, StoredObject] = {}
        self._receiving: dict[int, StoredObject] = {}
        self._sending: dict[int, tuple[StoredObject, int]] = {}
        self._room_changed = False
        self._dead_procs: set[bytes] = set()
        self._asker = Asker(node)
        self._dead_nodes = self._asker.dead_nodes
        self._counts = {"created": 0, "pulled": 0, "freed": 0, "sent": 0, "failed": 0}
        self._handlers: dict[type, Callable[[float, bytes, Any, list[Effect]], None]] = {
            m.Create: self._create,
            m.Seal: self._seal,
            m.Open: self._open,
            m.Release: self._release,
            m.Free: self._free,
            m.Pull: self._asked,
            m.PullRefused: self._refused,
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
        obj = self._receiving.pop(tag, None)
        if obj is not None:
            assert obj.pull is not None
            obj.pull.ended(error)
            if error is None:
                self._counts["pulled"] += 1
                self._sealed(obj, out)
            else:
                self._ask_next(obj, out)
        return self._finish(now, out)

    def sent(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The send with this tag is over. A failed one is reported to the receiver, which tries elsewhere."""
        out: list[Effect] = []
        obj, node = self._sending.pop(tag, (None, -1))
        if obj is not None:
            obj.sends -= 1
            self._counts["sent"] += error is None
            if error is not None and node not in self._dead_nodes:
                out.append(Send(raylet_of(node), m.PullRefused(obj.id, tag, f"sending failed: {error}")))
            if obj.idle:
                self._settle(obj)
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
            self._free_one(obj.id)
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
                self._free_one(obj.id)
            if obj.state is State.WAITING and obj.creator is None and not obj.wanted:
                self._forget(obj)
        return self._finish(now, out)

    def tick(self, now: float) -> list[Effect]:
        """Fail the requests that have waited for room too long. Call it a few times within `full_timeout`."""
        out: list[Effect] = []
        for obj in list(self._waiting.values()):
            if now - obj.since >= self._full_timeout:
                self._fail(obj, "full", self._full_reason(obj, f"waited {now - obj.since:.1f} s for room"), out)
        return self._finish(now, out)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for people and tests: bytes, objects by state, waiting requests, transfers, counters."""
        states = dict.fromkeys((state.value for state in State), 0)
        for obj in self._objects.values():
            states[obj.state.value] += 1
        return {
            "node": self._node,
            "capacity": self._blocks.size,
            "used": self._blocks.used,
            "largest_free": self._blocks.largest_free,
            "high_water": self._blocks.high_water,
            "evictable": self._space.evictable_bytes,
            "objects": len(self._objects),
            "pinned": sum(1 for obj in self._objects.values() if obj.pins),
            **states,
            "receiving": len(self._receiving),
            "sending": len(self._sending),
            "evicted": self._space.evicted,
            **self._counts,
        }

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

    def _release(self, now: float, src: bytes, msg: m.Release, out: list[Effect]) -> None:
        for ident in msg.ids:
            obj = self._objects.get(ident)
            if obj is not None:
                self._let_go(obj, src, out)

    def _free(self, now: float, src: bytes, msg: m.Free, out: list[Effect]) -> None:
        for ident in msg.ids:
            self._free_one(ident)
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
            self._start_send(obj, node, msg.tag, out)
            return
        elif obj.creator is None and node < self._node:
            reason = _RECEIVING
        else:
            obj.asking.append((node, msg.tag))
            return
        out.append(Send(src, m.PullRefused(msg.id, msg.tag, reason)))

    def _refused(self, now: float, src: bytes, msg: m.PullRefused, out: list[Effect]) -> None:
        obj = self._receiving.get(msg.tag)
        if obj is not None and obj.pull is not None:
            obj.pull.cancel(msg.reason, out)

    # ------------------------------------------------------------ life of an object

    def _add(self, obj: StoredObject) -> StoredObject:
        obj.freed = owner_of(obj.id) in self._dead_procs or node_of(obj.id) in self._dead_nodes
        self._holdings.add(obj)
        return self._objects.setdefault(obj.id, obj)

    def _place(self, now: float, obj: StoredObject, out: list[Effect]) -> None:
        """Give a new object its block, or queue it behind those that wait."""
        if not self._blocks.could_hold(obj.size):
            self._fail(obj, "full", self._full_reason(obj, "is larger than the whole store"), out)
            return
        if self._waiting:
            self._waiting[obj.id] = obj
            self._place_waiting(now, out)
            return
        offset = self._space.allocate(obj.size)
        if offset is None:
            self._waiting[obj.id] = obj
        else:
            self._placed(obj, offset, out)

    def _placed(self, obj: StoredObject, offset: int, out: list[Effect]) -> None:
        obj.offset = offset
        if obj.creator is not None:
            obj.state = State.CREATING
            obj.pins.add(obj.creator)
            out.append(Send(obj.creator, m.Created(obj.id, offset, obj.size)))
        else:
            obj.state = State.PULLING
            self._ask_next(obj, out)

    def _place_waiting(self, now: float, out: list[Effect]) -> None:
        """Serve waiting requests, oldest first. A small one may overtake a large one that does not fit, but only
        until the large one has waited for half its time: then room is kept for it."""
        self._room_changed = False
        for obj in list(self._waiting.values()):
            offset = self._space.allocate(obj.size)
            if offset is not None:
                del self._waiting[obj.id]
                self._placed(obj, offset, out)
            elif now - obj.since >= self._full_timeout / 2:
                break

    def _sealed(self, obj: StoredObject, out: list[Effect]) -> None:
        """The bytes are there: serve everybody who waited for them."""
        obj.state = State.SEALED
        obj.pull = None
        for proc in obj.openers:
            self._pin(obj, proc, out)
        obj.openers.clear()
        for node, tag in obj.asking:
            self._start_send(obj, node, tag, out)
        obj.asking.clear()
        if obj.idle:
            self._settle(obj)

    def _pin(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        pulled = obj.creator is None and obj.announcer is None
        if pulled:
            obj.announcer = proc
        obj.pins.add(proc)
        self._holdings.hold(proc, obj)
        self._space.keep(obj)
        out.append(Send(proc, m.Opened(obj.id, obj.offset, obj.size, pulled)))

    def _start_send(self, obj: StoredObject, node: int, tag: int, out: list[Effect]) -> None:
        obj.sends += 1
        self._space.keep(obj)
        self._sending[tag] = (obj, node)
        out.append(StartSend(obj.id, node, tag, obj.offset, obj.size))

    def _let_go(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """A process gives up its pin, its request to open, or (before the seal) its creation."""
        obj.openers.pop(proc, None)
        if proc in obj.pins:
            obj.pins.discard(proc)
            if obj.idle:
                self._settle(obj)
        if obj.state is State.WAITING or obj.state is State.CREATING:
            if obj.creator == proc:
                self._creator_left(obj, out)
            elif obj.creator is None and not obj.wanted:
                self._forget(obj)
        self._holdings.let_go(proc, obj)

    def _creator_left(self, obj: StoredObject, out: list[Effect]) -> None:
        """An object will not be sealed by its creator: those who wait for it get another node's copy, if any."""
        if obj.pull is not None:
            for node, tag in obj.asking:
                if node < self._node:
                    out.append(Send(raylet_of(node), m.PullRefused(obj.id, tag, _RECEIVING)))
            obj.asking = [(node, tag) for node, tag in obj.asking if node > self._node]
        if obj.pull is None or not obj.pull.untried or not obj.wanted:
            self._fail(obj, "lost", f"object {obj.id.hex()} was not finished: its creator left or died", out)
            return
        obj.creator = None
        if obj.state is State.CREATING:
            obj.state = State.PULLING
            self._ask_next(obj, out)

    def _free_one(self, ident: bytes) -> None:
        obj = self._objects.get(ident)
        if obj is not None:
            obj.freed = True
            if obj.idle:
                self._settle(obj)

    def _settle(self, obj: StoredObject) -> None:
        """An idle object goes if it was freed; a copy becomes evictable."""
        if obj.freed:
            self._counts["freed"] += 1
            self._forget(obj)
        elif obj.creator is None:
            self._space.may_evict(obj)
            self._room_changed = bool(self._waiting)

    def _forget(self, obj: StoredObject) -> None:
        del self._objects[obj.id]
        self._holdings.remove(obj)
        self._waiting.pop(obj.id, None)
        self._space.release(obj)
        self._room_changed = bool(self._waiting)

    def _fail(self, obj: StoredObject, kind: str, reason: str, out: list[Effect]) -> None:
        """An object will not come to be here: everybody who waits for it hears why."""
        self._counts["failed"] += 1
        waiters = dict(obj.openers)
        if obj.creator is not None and kind == "full":
            waiters[obj.creator] = None
        out.extend(Send(proc, m.StoreError(obj.id, kind, reason)) for proc in waiters)
        out.extend(Send(raylet_of(node), m.PullRefused(obj.id, tag, reason)) for node, tag in obj.asking)
        self._forget(obj)

    def _finish(self, now: float, out: list[Effect]) -> list[Effect]:
        while self._room_changed:
            self._place_waiting(now, out)
        return out

    def _wait_for(self, obj: StoredObject, proc: bytes, nodes: list[int]) -> None:
        """A process wants an object that is not here yet; `nodes`: where it could be pulled from."""
        obj.openers[proc] = None
        self._holdings.hold(proc, obj)
        obj.pull = obj.pull or Pull()
        obj.pull.offer([node for node in nodes if node != self._node], self._asker.start(obj.id))

    def _ask_next(self, obj: StoredObject, out: list[Effect]) -> None:
        """Ask the next node for the object; give up when nobody waits any more or nobody is left to ask."""
        pull = obj.pull
        assert pull is not None
        if obj.wanted and pull.ask_next(obj.id, obj.size, obj.offset, self._asker, out):
            self._receiving[pull.tag] = obj
            return
        failures = "; ".join(pull.failures) or "none has it"
        self._fail(obj, "lost", f"object {obj.id.hex()} could not be read from any node ({failures})", out)

    def _full_reason(self, obj: StoredObject, why: str) -> str:
        held = [other for other in self._objects.values() if other in self._space]
        return full_reason(self._node, obj, why, self._blocks, held)
