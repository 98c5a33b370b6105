"""The object store of one node, as a pure state machine: messages and ends of transfers in, effects out.

An object is created by a process of the node (its *primary* copy) or pulled from another node (a *copy*). It is WAITING
for a block, then CREATING or PULLING, then SEALED. Processes, of this node or of neighbouring ones, pin it with Create
and Open and unpin it with Release; the creator's Release before the seal takes the creation back. A process has at most
one Open of an object under way to read it, and one to have it kept here; it gets an answer to each, and gives up each
by itself. Copies nobody pins may be evicted; primaries stay until their owner frees them or dies, in memory or, when
room is short, SPILLED to disk (`spill`), from where they are RESTORED when somebody asks.

Who runs it must report the end of every StartReceive, StartSend, WriteSpill and ReadSpill, once, whatever happened (a
CancelReceive or the death of the other node included): the store reuses a block only after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from hpcray.base.ids import node_of, number_of, raylet_of
from hpcray.core.effects import Effect, Send
from hpcray.core.store.admission import URGENCIES
from hpcray.core.store.objects import State, StoredObject
from hpcray.core.store.report import absent_reason, list_objects, show_objects, show_space, show_transfers
from hpcray.core.store.stalls import StallingLives
from hpcray.wire import messages as m

_RECEIVING = "it is still being received here"
_PATIENCE = 10
_LEND_AFTER = 1.0
"""Seconds for which a request for an object on disk waits where nothing can be spilled: pins are being asked for."""
_LEND_ON = 5.0
"""Seconds after such a wait in which others do not wait again, if the store is as full as before."""
_LAST = URGENCIES - 1
_NOT_BACK = "there is no room to bring it back from disk"


class NodeStore(StallingLives):
    """Objects of one node: created, sealed, pinned by processes, pulled from and sent to other nodes, freed."""

    # ------------------------------------------------------------ events

    def handle(self, now: float, src: bytes, msg: m.Message) -> list[Effect]:
        """React to a message of `HANDLES` from `src`.

        Raises:
            KeyError: the message is none of these.
        """
        out: list[Effect] = []
        _HANDLERS[type(msg)](self, now, src, msg, out)
        return self._finish(now, out)

    def received(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The receive with this tag is over; on an error (or a cancellation) its part of the block holds nothing."""
        out: list[Effect] = []
        self._receives.ended(now, tag, error, out)
        return self._finish(now, out)

    def sent(self, now: float, tag: int, error: str | None) -> list[Effect]:
        """The send with this tag is over. A failed one is reported to the receiver, which tries elsewhere."""
        out: list[Effect] = []
        if not self._straight.sent(tag, error, out):
            self._sends.ended(tag, error, out)
        return self._finish(now, out)

    def spilled(self, now: float, error: str | None) -> list[Effect]:
        """The WriteSpill is over; on an error the objects are where they were, and the next try comes later."""
        out: list[Effect] = []
        self._spiller.ended(now, error, out)
        return self._finish(now, out)

    def restored(self, now: float, ident: bytes, error: str | None) -> list[Effect]:
        """The ReadSpill with this name is over; what cannot be read is looked for on other nodes."""
        out: list[Effect] = []
        if self._straight.read(ident, error, out):
            return self._finish(now, out)
        obj = self._objects[ident]
        if error is None:
            self._spiller.restored += 1
            self._spiller.loaded += obj.size
            self._sealed(obj, out)
        elif not obj.wanted:
            self._back_to_disk(obj, out)
        else:
            self._unreadable(now, obj, error, out)
        return self._finish(now, out)

    def process_died(self, now: float, proc: bytes) -> list[Effect]:
        """A process of this node or of another is gone: its pins, what it had not sealed, and what it owned, go."""
        self._dead_procs.add(proc)
        out: list[Effect] = []
        for obj in self._holdings.held_by(proc):
            if obj.announcer == proc:
                obj.announcer = None  # its owner may never have heard of this copy: the next opener tells it again
            self._keep_no_more(obj, proc, out)
            if self._objects.get(obj.id) is obj:
                self._let_go(obj, proc, out)
        self._lent.process_died(proc, out)
        for obj in self._holdings.owned_by(proc):
            self._free_one(obj.id, out)
        return self._finish(now, out)

    def node_died(self, now: float, node: int, guests: Collection[bytes] = ()) -> list[Effect]:
        """A node is gone: transfers from it are taken up elsewhere, objects owned there are freed when unpinned.

        Args:
            guests: processes of that node which may still read here; `process_died` is told of each.
        """
        self._dead_nodes.add(node)
        out: list[Effect] = []
        self._sends.node_died(node, out)
        self._straight.node_died(node, out)
        for obj in list(self._objects.values()):
            obj.asking = [(asker, msg) for asker, msg in obj.asking if asker != node]
            self._receives.node_died(obj, node, out)
            if node_of(obj.id) == node:
                self._free_one(obj.id, out)
            if self._objects.get(obj.id) is obj:
                self._drop_request(obj, out)
        for proc in sorted(self._holdings.procs()):
            if node_of(proc) == node and proc not in guests:
                out += self.process_died(now, proc)
        return self._finish(now, out)

    def tick(self, now: float) -> list[Effect]:
        """Fail the requests that have waited for room too long. Call it a few times within `full_timeout`."""
        out: list[Effect] = []
        hopeless = not self._room.may_come(now - self._full_timeout)
        for obj in list(self._space.waiting.values()):
            waited = now - obj.since
            if obj.disk is not None and obj.openers and not self._room.stalled:
                if waited >= self._full_timeout if hopeless else self._room.stuck and waited >= _LEND_AFTER:
                    self._lent.last = (now, self._blocks.used)
                    self._lend(obj, out)
            elif hopeless and waited >= self._full_timeout and not self._may_fit_soon(now, obj):
                self._fail(obj, "full", self._full_reason(obj, f"waited {waited:.1f} s for room"), out)
        return self._finish(now, out)

    def _as_full_as_before(self, now: float) -> bool:
        """Whether a request for room has just waited in vain, and this one would, too."""
        at, used = self._lent.last
        return self._room.stuck and now - at < _LEND_ON and self._blocks.used >= used

    def _lend(self, obj: StoredObject, out: list[Effect]) -> None:
        """There is no room to bring an object back from disk: processes of this node read its file, other nodes are
        sent it from there. A guest is told that there is no room: its own node pulls it then."""
        reason = self._full_reason(obj, "finds no room")
        for proc in list(obj.openers):
            del obj.openers[proc]
            self._holdings.let_go(proc, obj)
            if self._is_guest(proc):
                out.append(Send(proc, m.StoreError(obj.id, "full", _NOT_BACK)))
            else:
                self._lent.lend(obj, proc, out)
        asking, obj.asking = obj.asking, []
        for node, msg in asking:
            if self._straight.takes(obj, msg):
                self._straight.start(obj, node, msg, out)
            else:
                obj.asking.append((node, msg))
        self._turn_away(obj, reason, out, full=True)
        self._back_to_disk(obj, out)

    def snapshot(self) -> dict[str, Any]:
        """Numbers for people and tests: bytes, objects by state, waiting requests, transfers, counters."""
        return {
            "node": self._node,
            **show_space(self._space),
            **show_objects(self._objects.values()),
            **show_transfers(self._receives, self._sends),
            "queued": len(self._admission),
            "from_disk": self._straight.ok,
            "lent": self._lent.count,
            **self._spiller.snapshot(self._straight.loaded),
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
        if msg.keep and node_of(src) == self._node:
            if obj is not None and src in obj.pins:
                obj.kept = True
            return
        if msg.keep and obj is not None and (obj.state is State.SEALED or obj.disk is not None):
            self._keep_for(obj, src, out)
            return
        if obj is not None and obj.state is State.SEALED:
            self._pin(obj, src, out)
            if obj.disk is not None:
                self._asked_on_disk(now, obj, out)
            return
        if obj is None:
            sources = [node for node in msg.nodes if node != self._node and node not in self._dead_nodes]
            if not sources:
                reason = absent_reason(self._node, msg.id, msg.nodes, self._dead_nodes)
                out.append(Send(src, m.Kept(msg.id, reason) if msg.keep else m.StoreError(msg.id, "lost", reason)))
                return
            obj = self._add(StoredObject(msg.id, msg.size, None, now, priority=_urgency(msg.priority)))
            self._wait_for(obj, src, sources, msg.keep)
            if not self._blocks.could_hold(obj.size) or self._admission.ask(obj):
                self._place(now, obj, out)
            return
        if self._is_guest(src) and self._lies_on_disk(obj) and not self._space.has_room(obj.size):
            # Its own node can read it straight from the disk, into a store that may be less full.
            out.append(Send(src, m.StoreError(obj.id, "full", _NOT_BACK)))
            return
        self._wait_for(obj, src, msg.nodes, msg.keep)
        self._admission.hurry(obj, _urgency(msg.priority))
        self._want_back(now, obj, out)
        if obj.disk is not None:
            self._asked_on_disk(now, obj, out)
            if obj.state is State.WAITING and self._as_full_as_before(now):
                self._lend(obj, out)

    def _keep_for(self, obj: StoredObject, proc: bytes, out: list[Effect]) -> None:
        """What is here already stays for this process."""
        self._room.keep(obj)
        obj.keepers.add(proc)
        self._tell_kept(obj, proc, out)
        if obj.idle:
            self._settle(obj, out)

    def _hurry(self, now: float, src: bytes, msg: m.Hurry, out: list[Effect]) -> None:
        obj = self._objects.get(msg.id)
        if obj is not None and src in obj.openers:
            self._admission.hurry(obj, _urgency(msg.priority))

    def _prefetch(self, now: float, src: bytes, msg: m.Prefetch, out: list[Effect]) -> None:
        for ref in msg.refs:
            obj = self._objects.get(ref.id)
            if obj is not None:
                if obj.state is State.SPILLED:
                    self._back_early(now, obj, out)
                continue
            sources = [node for node in ref.nodes if node != self._node and node not in self._dead_nodes]
            if not sources or not self._space.has_room(ref.size):
                continue
            obj = self._add(StoredObject(ref.id, ref.size, None, now, priority=_LAST, ahead=True))
            if obj.freed:
                self._forget(obj, out)
                continue
            self._receives.add(obj, sources)
            if self._admission.ask(obj):
                self._place(now, obj, out)

    def _disk_read(self, now: float, src: bytes, msg: m.DiskRead, out: list[Effect]) -> None:
        slot = self._lent.done(src, msg.id, out)
        if not msg.error:
            return
        obj = self._objects.get(msg.id)
        if obj is None or obj.disk is None or obj.disk != slot or not self._lies_on_disk(obj):
            self._open(now, src, m.Open(msg.id, msg.size, msg.nodes), out)  # it is not what could not be read
        else:
            self._wait_for(obj, src, msg.nodes, False)
            self._unreadable(now, obj, msg.error, out)

    def _release(self, now: float, src: bytes, msg: m.Release, out: list[Effect]) -> None:
        give_up = self._keep_no_more if msg.keep else self._let_go
        for ident in msg.ids:
            obj = self._objects.get(ident)
            if obj is not None:
                give_up(obj, src, out)

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
        hints: list[int] = []
        if obj is None:
            reason = "it is not here"
        elif obj.size != msg.size:
            reason = f"it has {obj.size} bytes here, not {msg.size}"
        elif obj.state is State.SEALED:
            self._sends.serve(obj, node, msg, out)
            if obj.disk is not None:
                self._asked_on_disk(now, obj, out)
            return
        elif self._lies_on_disk(obj) and self._straight.takes(obj, msg) and not self._space.has_room(obj.size):
            self._straight.start(obj, node, msg, out)
            return
        elif obj.creator is not None or obj.disk is not None:
            obj.asking.append((node, msg))
            self._want_back(now, obj, out)
            if obj.disk is not None:
                self._asked_on_disk(now, obj, out)
            return
        elif obj.pull is not None and obj.pull.passes_on(msg):
            self._sends.start(obj, node, msg, out)
            return
        else:
            reason = _RECEIVING
            hints = obj.pull.sources() if obj.pull is not None else []
        out.append(Send(src, m.PullRefused(msg.id, msg.tag, reason, False, hints)))

    def _refused(self, now: float, src: bytes, msg: m.PullRefused, out: list[Effect]) -> None:
        self._receives.refused(msg, out)

    def _sent_on(self, now: float, src: bytes, msg: m.PullElsewhere, out: list[Effect]) -> None:
        self._receives.sent_on(msg, out)

    # ------------------------------------------------------------ after each event

    def _finish(self, now: float, out: list[Effect]) -> list[Effect]:
        while (obj := self._admission.ready()) is not None:
            obj.since = now
            self._place(now, obj, out)
        return self._room.make(now, out)

    def _wait_for(self, obj: StoredObject, proc: bytes, nodes: list[int], keep: bool) -> None:
        """A process wants to read an object that is not here yet, or have it kept; `nodes`: where it could be pulled
        from."""
        if keep:
            obj.keepers.add(proc)
            obj.keeping[proc] = None
        else:
            obj.openers[proc] = None
        self._holdings.hold(proc, obj)
        self._receives.add(obj, nodes)

    def _is_guest(self, proc: bytes) -> bool:
        return node_of(proc) != self._node

    @staticmethod
    def _lies_on_disk(obj: StoredObject) -> bool:
        return obj.disk is not None and obj.state in (State.SPILLED, State.WAITING)

    def _may_fit_soon(self, now: float, obj: StoredObject) -> bool:
        """Whether a pull lacks room only because of others that are on their way: when these are here, and have been
        read, they can be evicted. There is an end to this patience, as their readers may keep them."""
        timeout = self._full_timeout
        if obj.creator is not None or self._receives.progress <= now - timeout or now - obj.since > _PATIENCE * timeout:
            return False
        return self._blocks.free_bytes + self._space.evictable_bytes + self._admission.coming() >= obj.size


def _urgency(priority: int) -> int:
    return max(0, min(priority, _LAST))


_HANDLERS: dict[type, Callable[[NodeStore, float, bytes, Any, list[Effect]], None]] = {
    m.Create: NodeStore._create,
    m.Seal: NodeStore._seal,
    m.Open: NodeStore._open,
    m.Release: NodeStore._release,
    m.Free: NodeStore._free,
    m.Pull: NodeStore._asked,
    m.PullRefused: NodeStore._refused,
    m.PullElsewhere: NodeStore._sent_on,
    m.Hurry: NodeStore._hurry,
    m.Prefetch: NodeStore._prefetch,
    m.DiskRead: NodeStore._disk_read,
}
HANDLES = tuple(_HANDLERS)
"""Message types for `NodeStore.handle`."""
