"""Four node stores, their processes and a data plane, in one thread, and a simple model of what must hold.

All nodes are of one host: processes read in the stores of others too, in place (as guests), each over a link of its
own; all else that they say there goes through their raylets, another way. The process of a node that is dead for the
cluster may read on where it is a guest, until its link ends.

No block that somebody reads or writes is handed out again; whoever opened an object sees that object's bytes for as
long as it is pinned, however often they went to disk and back; nothing is lost or refused without a reason. And at the
end: every request was answered, and when all references are dropped nothing but evictable copies is left.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcray.base.ids import PUT_INDEX, make_proc, node_of, number_of, raylet_of
from hpcray.core.effects import (
    CancelReceive,
    DiscardSpilled,
    Effect,
    LendSpilled,
    ReadSpill,
    Send,
    StartReceive,
    StartSend,
    WriteSpill,
)
from hpcray.core.store.node_store import NodeStore
from hpcray.wire import messages as m

NODES = 4
PROCS = 2  # per node
UNIT = 64
CHUNK = 2 * UNIT
CAPACITY = 8 * UNIT
SLOTS = 2
WHOLE = CAPACITY + SLOTS * CHUNK
SIZES = (1, 1, 1, 2, 2, 3, 4, 8, 9)  # the last one can never fit
TIMEOUT = 10.0


Link = tuple[bytes, int]
"""A process, and a node in whose store it reads."""
Part = tuple[bytes, int, bytes]
"""A process, a node, and an object in the store of that node."""


@dataclass
class Object:
    """What the test knows of an object. excused: something went wrong with it, so it may be lost."""

    id: bytes
    size: int
    owner: bytes
    locations: list[int] = field(default_factory=list)
    freed: bool = False
    excused: bool = False


@dataclass
class Transfer:
    """One receive, or one send, that the data plane has."""

    id: bytes
    node: int
    peer: int
    offset: int
    size: int


class Cluster:
    """Everything is a step that takes a number to choose with; a step that cannot be taken does nothing.

    Args:
        spill_threshold: as for `NodeStore`.
        nodes: how many there are.
        chunk: bytes of a chunk, at most CHUNK.
    """

    def __init__(self, spill_threshold: float = 0.0, nodes: int = NODES, chunk: int = CHUNK) -> None:
        self.now = 0.0
        self.nodes = nodes
        self.stores = {node: NodeStore(node, CAPACITY, TIMEOUT, spill_threshold, chunk, SLOTS) for node in range(nodes)}
        self.writes: dict[int, WriteSpill] = {}  # by node: a store has one under way
        self.reads: dict[tuple[int, bytes], ReadSpill] = {}
        self.read_ids: dict[tuple[int, bytes], bytes] = {}  # which object it is: not every read is named after it
        self.disks: dict[int, dict[tuple[int, int], bytes]] = {node: {} for node in range(nodes)}
        self.unpins: set[Link] = set()  # processes that were asked to let go, and by whom
        self.procs = [make_proc(node, number) for node in range(nodes) for number in range(1, PROCS + 1)]
        self.dead: set[bytes] = set()
        self.channels: dict[tuple[bytes, bytes, int], deque[object]] = {}
        self.objects: dict[bytes, Object] = {}
        self.memory: dict[int, dict[int, bytes]] = {node: {} for node in range(nodes)}  # unit -> object written there
        self.creating: dict[tuple[bytes, bytes], float] = {}  # (proc, object) -> asked at
        self.opening: dict[Part, float] = {}
        self.unanswered: set[Part] = set()  # of `opening`, what the store has heard and not answered
        self.unsealed: dict[tuple[bytes, bytes], int] = {}  # (proc, object) -> offset
        self.pinned: dict[Part, int] = {}
        self.granted: dict[Part, int] = {}  # as `pinned`, from when the store said so
        self.links: set[Link] = set()  # guests, and where
        self.ghosts: set[Link] = set()  # guests of dead nodes that may still read
        self.sent_home: set[Part] = set()  # asked for, since there was no room where it lies on disk
        self.buried: set[tuple[int, int]] = set()  # (node, dead node that it has heard of)
        self.stalled: set[int] = set()  # nodes whose disk does not answer
        self.stalls = 0
        self.keeping: set[Part] = set()  # asked to keep a copy there
        self.kept: set[Part] = set()
        self.unkept: set[Part] = set()  # of `keeping`, what the store has heard and not answered
        self.promised: set[Part] = set()  # as `kept`, from when the store said so until it hears the contrary
        self.lent: dict[Part, int] = {}  # files that may be read
        self.receives: dict[int, Transfer] = {}
        self.sends: dict[int, Transfer] = {}
        self.cancelled: set[int] = set()
        self.moved: set[int] = set()
        self.counter = 0
        self.deaths = 0
        self.relayed = 0  # sends of what is itself still being received
        self.broken = 0  # files that a process could not read
        self.visits: Counter[str] = Counter()  # what guests have come to

    # ------------------------------------------------------------ helpers

    def alive(self) -> list[bytes]:
        return [proc for proc in self.procs if proc not in self.dead]

    def living_nodes(self) -> list[int]:
        return sorted(self.stores)

    def say(self, src: bytes, dest: bytes, msg: object, way: int = 0) -> None:
        """way: 0 on a link, or between raylets; 1 through a raylet that stands between them."""
        self.channels.setdefault((src, dest, way), deque()).append(msg)

    def to_raylet(self, proc: bytes, msg: m.Message) -> None:
        self.say(proc, raylet_of(node_of(proc)), msg)

    def tell(self, part: Part, msg: m.Message) -> None:
        """What a reader says to the store in which it reads."""
        self.say(part[0], raylet_of(part[1]), msg)

    def reads_at(self, proc: bytes, node: int) -> bool:
        """Whether it can still read there."""
        return proc not in self.dead or (proc, node) in self.ghosts

    def units(self, offset: int, size: int) -> range:
        assert offset % UNIT == 0 and offset >= 0 and offset + size <= WHOLE
        return range(offset // UNIT, (offset + size) // UNIT)

    def holds(self, node: int, offset: int, size: int, ident: bytes) -> bool:
        return all(self.memory[node].get(unit) == ident for unit in self.units(offset, size))

    def claim(self, node: int, ident: bytes, offset: int, size: int) -> None:
        """A block was handed out: nobody may be using it for anything else."""
        wanted = set(self.units(offset, size))
        used: list[tuple[bytes, int, int]] = [
            (other, at, self.objects[other].size) for (_, where, other), at in self.granted.items() if where == node
        ]
        used += [(t.id, t.offset, t.size) for t in (*self.receives.values(), *self.sends.values()) if t.node == node]
        used += [
            (self.read_ids[job], read.piece.offset, read.piece.size)
            for job, read in self.reads.items()
            if job[0] == node
        ]
        for other, at, length in used:
            if other != ident:
                overlap = wanted & set(self.units(at, length))
                assert not overlap, f"units {overlap} of {other.hex()} were handed out while in use"
        if node in self.writes:
            for piece in self.writes[node].pieces:
                assert not wanted & set(self.units(piece.offset, piece.size)), "handed out while it is being spilled"
        for unit in wanted:
            self.memory[node].pop(unit, None)

    # ------------------------------------------------------------ effects

    def send(self, node: int, dest: bytes, msg: m.Message) -> None:
        """A store says something. It answers each Open once."""
        if number_of(dest) and not self.reads_at(dest, node):
            return  # the store has not heard of its death yet
        way = int(bool(number_of(dest)) and node_of(dest) != node and (dest, node) not in self.links)
        if isinstance(msg, m.Unpin):
            self.unpins.add((dest, node))
            return
        if isinstance(msg, m.Created):
            self.claim(node, msg.id, msg.offset, msg.size)
            self.granted[dest, node, msg.id] = msg.offset
        elif isinstance(msg, m.Opened | m.StoreError):
            part = (dest, node, msg.id)
            if isinstance(msg, m.Opened):
                self.unanswered.remove(part)
                assert self.holds(node, msg.offset, msg.size, msg.id), "opened, but its bytes are not there"
                assert part not in self.granted
                self.granted[part] = msg.offset
            else:
                self.unanswered.discard(part)  # a Create may have failed
                if msg.kind == "full" and node_of(dest) != node:
                    held = self.stores[node]._objects.get(msg.id)  # it may have been freed, and go with this
                    assert self.waited(msg.id) or held is None or held.disk is not None, "full, and it is not on disk"
        elif isinstance(msg, m.Kept):
            part = (dest, node, msg.id)
            assert part in self.unkept or (msg.reason and part in self.promised), "said twice"
            self.unkept.discard(part)
            self.promised.discard(part)
            if not msg.reason:
                self.promised.add(part)
            way = 0
        self.say(raylet_of(node), dest, msg, way)

    def apply(self, node: int, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.send(node, effect.dest, effect.msg)
            elif isinstance(effect, WriteSpill):
                assert node not in self.writes, "two writes at a time"
                for piece in effect.pieces:
                    for position in range(piece.position, piece.position + piece.size, UNIT):
                        assert (effect.segment, position) not in self.disks[node], "over something that is alive"
                self.writes[node] = effect
            elif isinstance(effect, ReadSpill):
                ident = self.disks[node][effect.segment, effect.piece.position]
                assert ident == effect.id or effect.piece.offset >= CAPACITY
                self.claim(node, ident, effect.piece.offset, effect.piece.size)
                self.reads[node, effect.id] = effect
                self.read_ids[node, effect.id] = ident
            elif isinstance(effect, LendSpilled):
                assert node not in self.stalled, "lent, and its disk does not answer"
                assert node_of(effect.proc) == node, "a guest has no way to the file"
                if effect.proc not in self.dead:
                    key = (effect.proc, node, effect.id)
                    self.unanswered.remove(key)
                    self.lent[key] = self.lent.get(key, 0) + 1
                    msg = m.OnDisk(effect.id, str(effect.segment), effect.position, effect.size)
                    self.say(raylet_of(node), effect.proc, msg)
            elif isinstance(effect, DiscardSpilled):
                for position in range(effect.position, effect.position + effect.size, UNIT):
                    self.disks[node].pop((effect.segment, position), None)
                if effect.last:
                    assert not any(segment == effect.segment for segment, _ in self.disks[node]), "it is not the last"
            elif isinstance(effect, StartReceive):
                assert effect.tag not in self.receives and effect.node in range(self.nodes) and effect.node != node
                self.claim(node, effect.id, effect.offset, effect.size)
                self.receives[effect.tag] = Transfer(effect.id, node, effect.node, effect.offset, effect.size)
            elif isinstance(effect, StartSend):
                assert effect.tag not in self.sends
                self.relayed += any(t.node == node and t.id == effect.id for t in self.receives.values())
                assert self.holds(node, effect.offset, effect.size, effect.id), "sends bytes that are not the object's"
                self.sends[effect.tag] = Transfer(effect.id, node, effect.node, effect.offset, effect.size)
            else:
                assert isinstance(effect, CancelReceive)
                assert effect.tag in self.receives and effect.tag not in self.cancelled
                self.cancelled.add(effect.tag)
        self.audit(node)

    def audit(self, node: int) -> None:
        """What the store has promised it holds, though the same process may have given up something else there."""
        if node not in self.stores:
            return
        objects = self.stores[node]._objects
        for (proc, where, ident), offset in self.granted.items():
            if where == node:
                assert proc in objects[ident].pins and objects[ident].offset == offset, "a pin is gone"
        for proc, where, ident in self.promised:
            if where == node and not self.objects[ident].freed and proc not in self.dead:
                assert ident in objects and proc in objects[ident].keepers, "a kept copy is gone, or not kept any more"

    # ------------------------------------------------------------ steps; each takes a number to choose with

    def create(self, pick: int) -> None:
        alive = self.alive()
        proc, owner = alive[pick % len(alive)], self.procs[-1 - pick // 7 % min(len(self.procs), 10)]
        self.counter += 1
        ident = owner + self.counter.to_bytes(5, "big") + PUT_INDEX
        size = SIZES[pick % len(SIZES)] * UNIT
        self.objects[ident] = Object(ident, size, owner, excused=owner in self.dead)
        self.creating[proc, ident] = self.now
        self.to_raylet(proc, m.Create(ident, size))

    def seal(self, pick: int) -> None:
        if self.unsealed:
            proc, ident = list(self.unsealed)[pick % len(self.unsealed)]
            offset = self.unsealed.pop((proc, ident))
            obj = self.objects[ident]
            for unit in self.units(offset, obj.size):
                self.memory[node_of(proc)][unit] = ident
            self.pinned[proc, node_of(proc), ident] = offset
            obj.locations.append(node_of(proc))
            self.to_raylet(proc, m.Seal(ident))

    def open(self, pick: int) -> None:
        proc = self.alive()[pick % len(self.alive())]
        known = self.readable(proc, node_of(proc))
        if known:
            obj = known[pick // 5 % len(known)]
            part = (proc, node_of(proc), obj.id)
            self.opening[part] = self.now
            self.tell(part, m.Open(obj.id, obj.size, list(obj.locations), pick // 3 % 3))

    def readable(self, proc: bytes, node: int) -> list[Object]:
        """What it may open there."""
        busy = self.opening.keys() | self.pinned.keys()
        return [
            obj for obj in self.objects.values() if obj.locations and not obj.freed and (proc, node, obj.id) not in busy
        ]

    def visit(self, pick: int) -> None:
        """A process opens in another node's store what is there, comes there, or has been there."""
        guests = [(proc, node) for proc in self.alive() for node in self.stores if node != node_of(proc)]
        guests += sorted(self.ghosts)
        if not guests:
            return
        proc, node = guests[pick % len(guests)]
        known = self.readable(proc, node)
        own = [obj for obj in known if {(proc, node, obj.id)} & (self.kept | self.keeping)]
        there = [obj for obj in known if node in obj.locations or obj.id in self.stores[node]._objects]
        known = (own or there or known) if pick // 3 % 3 == 0 else (there or known) if pick // 3 % 3 == 1 else known
        if known:
            obj = known[pick // 9 % len(known)]
            self.links.add((proc, node))
            self.opening[proc, node, obj.id] = self.now
            self.tell((proc, node, obj.id), m.Open(obj.id, obj.size, [], pick // 2 % 3))

    def keep_what_is_read(self, pick: int) -> None:
        """An owner that reads its object in another store, or is about to, has it kept there."""
        parts = [
            part
            for part in [*self.opening, *self.pinned]
            if part[1] != node_of(part[0]) and part[0] not in self.dead and self.objects[part[2]].owner == part[0]
        ]
        parts = [part for part in parts if part not in self.kept | self.keeping and not self.objects[part[2]].freed]
        if parts:
            self.have_kept(parts[pick % len(parts)])

    def leave(self, pick: int) -> None:
        """The guest of a dead node ends."""
        if self.ghosts and pick % 4 == 0:
            proc, node = sorted(self.ghosts)[pick // 4 % len(self.ghosts)]
            self.close_link(proc, node)

    def close_link(self, proc: bytes, node: int) -> None:
        self.ghosts.discard((proc, node))
        self.forget_parts(lambda part: part[:2] == (proc, node))
        self.channels.pop((raylet_of(node), proc, 0), None)

        def closed(store: NodeStore) -> list[Effect]:
            self.links.discard((proc, node))
            if (node, node_of(proc)) in self.buried:
                return store.process_died(self.now, proc)
            return []

        self.say(proc, raylet_of(node), closed)

    def prefetch(self, pick: int) -> None:
        """Somebody has a node fetch an object."""
        known = [obj for obj in self.objects.values() if obj.locations and not obj.freed]
        if known:
            obj, node = known[pick // 5 % len(known)], self.living_nodes()[pick % len(self.stores)]
            proc = self.alive()[pick // 3 % len(self.alive())]
            self.say(proc, raylet_of(node), m.Prefetch([m.ArgRef(obj.id, obj.size, list(obj.locations))]))

    def keep(self, pick: int) -> None:
        """An owner has another node keep a copy; or gives up one that is kept."""
        node = self.living_nodes()[pick % len(self.stores)]
        known = [
            obj
            for obj in self.objects.values()
            if obj.locations and not obj.freed and obj.owner in self.alive() and node_of(obj.owner) != node
        ]
        if known:
            obj = known[pick // 5 % len(known)]
            key = (obj.owner, node, obj.id)
            if key in self.kept:
                self.kept.discard(key)
                self.say(obj.owner, raylet_of(node), m.Release([obj.id], keep=True), 1)
            elif key not in self.keeping:
                self.have_kept(key)

    def have_kept(self, part: Part) -> None:
        proc, node, ident = part
        obj = self.objects[ident]
        self.keeping.add(part)
        self.say(proc, raylet_of(node), m.Open(ident, obj.size, list(obj.locations), keep=True), 1)

    def hurry(self, pick: int) -> None:
        """Somebody needs more urgently what it has asked for."""
        if self.opening:
            part = list(self.opening)[pick % len(self.opening)]
            self.tell(part, m.Hurry(part[2], 0))

    def read_file(self, pick: int) -> None:
        """A process reads what was lent to it on disk."""
        if self.lent:
            _, node, ident = key = list(self.lent)[pick % len(self.lent)]
            if key in self.opening:
                return  # it has not heard of it yet
            assert ident in self.disks[node].values(), "what was lent is not on disk any more"
            self.lent[key] -= 1
            if not self.lent[key]:
                del self.lent[key]
            self.tell(key, m.DiskRead(ident))

    def break_file(self, pick: int) -> None:
        """It cannot read it."""
        if self.lent:
            key = list(self.lent)[pick % len(self.lent)]
            ident = key[2]
            if {key} & (self.opening.keys() | self.pinned.keys()):
                return
            self.lent[key] -= 1
            if not self.lent[key]:
                del self.lent[key]
            obj = self.objects[ident]
            obj.excused = True
            self.broken += 1
            self.opening[key] = self.now
            self.tell(key, m.DiskRead(ident, "input/output error", obj.size, list(obj.locations)))

    def release(self, pick: int) -> None:
        if self.pinned:
            self.let_go(list(self.pinned)[pick % len(self.pinned)])

    def let_go(self, part: Part) -> None:
        proc, node, ident = part
        offset = self.pinned.pop(part)
        assert self.holds(node, offset, self.objects[ident].size, ident), "a pinned object was overwritten"
        del self.granted[part]
        self.visits["read"] += node != node_of(proc)
        self.visits["read and kept"] += part in self.kept
        self.visits["read by a ghost"] += proc in self.dead
        self.tell(part, m.Release([ident]))

    def abort(self, pick: int) -> None:
        """A creator gives up before the seal."""
        if self.unsealed:
            proc, ident = list(self.unsealed)[pick % len(self.unsealed)]
            del self.unsealed[proc, ident], self.granted[proc, node_of(proc), ident]
            self.to_raylet(proc, m.Release([ident]))

    def free(self, pick: int) -> None:
        ready = [obj for obj in self.objects.values() if obj.locations and not obj.freed and obj.owner not in self.dead]
        if ready:
            self.drop(ready[pick % len(ready)])

    def drop(self, obj: Object) -> None:
        obj.freed = True
        for key in [key for key in self.kept | self.keeping if key[0] == obj.owner and key[2] == obj.id]:
            self.kept.discard(key)
            self.keeping.discard(key)
            self.say(obj.owner, raylet_of(key[1]), m.Release([obj.id], keep=True), 1)
        self.to_raylet(obj.owner, m.Free([obj.id], list(obj.locations)))

    def deliver(self, pick: int) -> None:
        busy = [key for key, channel in self.channels.items() if channel]
        if busy:
            key = busy[pick % len(busy)]
            msg = self.channels[key].popleft()
            if not key[2] or (node_of(key[1]), node_of(key[0])) not in self.buried:
                self.arrive(key[0], key[1], msg)

    def arrive(self, src: bytes, dest: bytes, msg: object) -> None:
        node = node_of(dest)
        if number_of(dest):
            if isinstance(msg, m.Kept):
                self.answered_keep(dest, node_of(src), msg)
            else:
                self.answered(dest, node_of(src), msg)
        elif node in self.stores:
            store = self.stores[node]
            if isinstance(msg, Callable):  # type: ignore[arg-type]
                self.apply(node, msg(store))  # type: ignore[operator]
            else:
                self.heard(node, src, msg)
                self.apply(node, store.handle(self.now, src, msg))  # type: ignore[arg-type]

    def heard(self, node: int, src: bytes, msg: object) -> None:
        """A store is about to react to this; what it owes from now on, and no more."""
        if isinstance(msg, m.Open):
            if self.reads_at(src, node):
                (self.unkept if msg.keep else self.unanswered).add((src, node, msg.id))
        elif isinstance(msg, m.DiskRead) and msg.error and (src, node, msg.id) in self.opening:
            self.unanswered.add((src, node, msg.id))
        elif isinstance(msg, m.Release) and msg.keep:
            parts = {(src, node, ident) for ident in msg.ids}
            self.unkept -= parts
            self.promised -= parts

    def answered_keep(self, proc: bytes, node: int, msg: m.Kept) -> None:
        """A node keeps a copy for its owner, or cannot, or cannot any more."""
        key = (proc, node, msg.id)
        asked = key in self.keeping
        self.keeping.discard(key)
        obj = self.objects[msg.id]
        if msg.reason:
            self.kept.discard(key)
            known = obj.excused or obj.freed or proc in self.dead
            assert known or "object store of node" in msg.reason, f"not kept, without a reason: {msg.reason}"
        elif proc not in self.dead and node in self.stores:  # else it was said before the node died
            assert asked or obj.freed
            if node not in obj.locations:
                obj.locations.append(node)
            if obj.freed:
                self.to_raylet(proc, m.Free([obj.id], [node]))
            else:
                self.kept.add(key)

    def answered(self, proc: bytes, node: int, msg: object) -> None:
        """A process hears from the store of a node."""
        if not self.reads_at(proc, node) or node not in self.stores:
            return
        if isinstance(msg, m.AddLocation):
            obj = self.objects[msg.id]
            if obj.freed:
                self.to_raylet(proc, m.Free([obj.id], [msg.node]))
            elif msg.node not in obj.locations and msg.node in self.stores:
                obj.locations.append(msg.node)
            return
        if isinstance(msg, m.OnDisk):
            del self.opening[proc, node, msg.id]
            return
        if isinstance(msg, m.Created):
            del self.creating[proc, msg.id]
            self.unsealed[proc, msg.id] = msg.offset
        elif isinstance(msg, m.Opened):
            del self.opening[proc, node, msg.id]
            self.pinned[proc, node, msg.id] = msg.offset
            obj = self.objects[msg.id]
            self.visits["had it pulled"] += (proc, node, msg.id) in self.sent_home
            self.sent_home.discard((proc, node, msg.id))
            if msg.pulled and proc not in self.dead:
                if node not in obj.locations:
                    obj.locations.append(node)
                if obj.freed and obj.owner not in self.dead:
                    self.to_raylet(obj.owner, m.Free([obj.id], [node]))
        else:
            assert isinstance(msg, m.StoreError)
            asked = self.opening.pop((proc, node, msg.id), None)
            if asked is None:
                asked = self.creating.pop((proc, msg.id))
            obj = self.objects[msg.id]
            if msg.kind == "full" and node != node_of(proc):
                self.goes_home(proc, obj)
            elif msg.kind == "full":
                assert self.now - asked >= 0 and self.waited(msg.id), "full, but did not wait"
            else:
                assert msg.kind == "lost"
                self.visits["nothing there"] += node != node_of(proc)
                assert node != node_of(proc) or obj.excused or obj.freed or obj.owner in self.dead, (
                    f"lost without a reason: {msg.reason}"
                )

    def waited(self, ident: bytes) -> bool:
        """Whether somebody may have waited for room in vain."""
        too_large = self.objects[ident].size > CAPACITY
        return too_large or self.now >= TIMEOUT or bool(self.stalls)

    def goes_home(self, proc: bytes, obj: Object) -> None:
        """A guest has heard that there is no room for what lies on disk there: it has its own node pull that."""
        part = (proc, node_of(proc), obj.id)
        if proc not in self.dead and obj in self.readable(proc, node_of(proc)):
            self.visits["no room there"] += 1
            self.sent_home.add(part)
            self.opening[part] = self.now
            self.tell(part, m.Open(obj.id, obj.size, list(obj.locations)))

    def move(self, pick: int) -> None:
        """Both sides of a transfer are there: the bytes go over."""
        both = [tag for tag in self.receives if tag in self.sends and tag not in self.moved]
        if both:
            tag = both[pick % len(both)]
            receive, send = self.receives[tag], self.sends[tag]
            assert (receive.id, receive.size, receive.peer) == (send.id, send.size, send.node)
            assert self.holds(send.node, send.offset, send.size, send.id), "the source was overwritten meanwhile"
            for unit in self.units(receive.offset, receive.size):
                self.memory[receive.node][unit] = receive.id
            self.moved.add(tag)

    def report(self, pick: int) -> None:
        """The data plane tells the end of a receive or of a send."""
        over = [(True, tag) for tag in self.receives if tag in self.moved or tag in self.cancelled]
        over += [
            (False, tag)
            for tag, send in self.sends.items()
            if tag in self.moved or send.peer not in self.stores or tag not in self.receives
        ]
        if over:
            receiving, tag = over[pick % len(over)]
            if receiving:
                self.end_receive(tag, None if tag in self.moved else "cancelled")
            else:
                self.end_send(tag, None if tag in self.moved or pick & 1 else "the peer is gone")

    def break_transfer(self, pick: int) -> None:
        """A transfer fails, noticed by both sides or by one."""
        open_ = [tag for tag in {**self.receives, **self.sends} if tag not in self.moved]
        if open_:
            tag = open_[pick % len(open_)]
            self.objects[(self.receives.get(tag) or self.sends[tag]).id].excused = True
            if tag in self.sends and (pick & 1 or tag not in self.receives):
                self.end_send(tag, "broken")
            elif tag in self.receives:
                self.end_receive(tag, "broken")

    def unpin(self, pick: int) -> None:
        """A process that was asked to gives up what it has pinned."""
        if self.unpins:
            link = sorted(self.unpins)[pick % len(self.unpins)]
            self.unpins.discard(link)
            for part in list(self.pinned):
                if part[:2] == link:
                    self.visits["unpinned"] += link[1] != node_of(link[0])
                    self.let_go(part)

    def disk(self, pick: int) -> None:
        """A write to disk, or a read, is done."""
        jobs = [*self.writes, *self.reads]
        if jobs:
            job = jobs[pick % len(jobs)]
            if isinstance(job, int):
                self.end_write(job, None)
            else:
                self.end_read(job, None)

    def break_disk(self, pick: int) -> None:
        """A write to disk, or a read, fails."""
        jobs = [*self.writes, *self.reads]
        if jobs and pick % 2 == 0:
            job = jobs[pick // 2 % len(jobs)]
            if isinstance(job, int):
                self.end_write(job, "no space left on device")
            else:
                self.objects[self.read_ids[job]].excused = True
                self.end_read(job, "input/output error")

    def stall(self, pick: int) -> None:
        """Some of what a disk was told to do does not end for long; or it answers again."""
        node = self.living_nodes()[pick % len(self.stores)]
        jobs = [b""] * (node in self.writes) + [name for at, name in self.reads if at == node]
        stuck = [job for at, job in enumerate(jobs) if pick // 8 >> at & 1]
        self.stalls += bool(stuck)
        self.tell_stalled(node, stuck)

    def tell_stalled(self, node: int, stuck: list[bytes]) -> None:
        if stuck:
            self.stalled.add(node)
        else:
            self.stalled.discard(node)
        self.apply(node, self.stores[node].stalled(self.now, stuck, "the disk has not answered" if stuck else ""))

    def end_write(self, node: int, error: str | None) -> None:
        write = self.writes.pop(node)
        for piece in write.pieces:
            for at in range(0, piece.size, UNIT) if error is None else ():
                self.disks[node][write.segment, piece.position + at] = self.memory[node][(piece.offset + at) // UNIT]
        self.apply(node, self.stores[node].spilled(self.now, error))

    def end_read(self, job: tuple[int, bytes], error: str | None) -> None:
        node, name = job
        read, ident = self.reads.pop(job), self.read_ids.pop(job)
        for at in range(0, read.piece.size, UNIT) if error is None else ():
            found = self.disks[node].get((read.segment, read.piece.position + at))
            # What is read for another node may have been given up meanwhile; then it must not be sent.
            assert found == ident or (found is None and name != ident), "the disk does not hold what is read from it"
            self.memory[node][(read.piece.offset + at) // UNIT] = found or b"nothing"
        self.apply(node, self.stores[node].restored(self.now, name, error))

    def end_receive(self, tag: int, error: str | None) -> None:
        node = self.receives.pop(tag).node
        self.cancelled.discard(tag)
        self.apply(node, self.stores[node].received(self.now, tag, error))

    def end_send(self, tag: int, error: str | None) -> None:
        node = self.sends.pop(tag).node
        self.apply(node, self.stores[node].sent(self.now, tag, error))

    def kill(self, pick: int) -> None:
        """A process dies, and another one takes its place."""
        if pick % 4 == 0:
            proc = self.alive()[pick // 4 % len(self.alive())]
            self.forget_proc(proc)
            self.procs.append(make_proc(node_of(proc), len(self.procs) + 1))
            for node in self.stores:
                # To its own raylet it is the end of its connection; to the others, a message of that raylet.
                src = proc if node == node_of(proc) else raylet_of(node_of(proc))
                self.say(src, raylet_of(node), lambda store, proc=proc: store.process_died(self.now, proc))

    def forget_proc(self, proc: bytes) -> None:
        self.dead.add(proc)
        for link in sorted(link for link in self.links - self.ghosts if link[0] == proc):
            self.close_link(*link)
        self.deaths += 1
        for _, ident in [*self.creating, *self.unsealed]:
            if _ == proc:
                self.objects[ident].excused = True
        for parts in (self.keeping, self.kept):
            parts -= {part for part in parts if part[0] == proc}
        self.lent = {part: count for part, count in self.lent.items() if part[0] != proc}
        for book in (self.creating, self.unsealed):
            for key in [key for key in book if key[0] == proc]:
                del book[key]
        self.forget_parts(lambda part: part[0] == proc and not self.reads_at(proc, part[1]))

    def forget_parts(self, gone: Callable[[Part], bool]) -> None:
        """Nobody reads, or waits to read, these any more."""
        for book in (self.opening, self.pinned, self.granted):
            for part in [part for part in book if gone(part)]:
                del book[part]
        for parts in (self.unanswered, self.unkept, self.promised):
            parts -= {part for part in parts if gone(part)}
        self.unpins = {link for link in self.unpins if self.reads_at(*link)}

    def crash(self, pick: int) -> None:
        """A node goes with all it had; the others hear of it sooner or later."""
        if len(self.stores) > 1 and pick % 128 == 0:
            node = self.living_nodes()[pick // 128 % len(self.stores)]
            del self.stores[node]
            for number, proc in enumerate(self.procs):
                if node_of(proc) == node and proc not in self.dead:
                    for link in [link for link in self.links if link[0] == proc and link[1] in self.stores]:
                        if pick // 1000 >> number % 3 & 1:
                            self.ghosts.add(link)
                    self.forget_proc(proc)
            for obj in self.objects.values():
                if node in obj.locations:
                    obj.locations.remove(node)
                    obj.excused = True
            for parts in (self.keeping, self.kept, self.unkept, self.promised):
                parts -= {part for part in parts if part[1] == node}
            self.lent = {part: count for part, count in self.lent.items() if part[1] != node}
            self.ghosts = {link for link in self.ghosts if link[1] != node}
            self.links = {link for link in self.links if link[1] != node}
            self.forget_parts(lambda part: part[1] == node)
            self.writes.pop(node, None)
            self.stalled.discard(node)
            for job in [job for job in self.reads if job[0] == node]:
                del self.reads[job], self.read_ids[job]
            for book in (self.receives, self.sends):
                for tag in [tag for tag, transfer in book.items() if transfer.node == node]:
                    del book[tag]
                    if book is self.receives:  # a receive elsewhere, of what it sent, stays cancelled
                        self.cancelled.discard(tag)
            for key in [key for key in self.channels if node_of(key[1]) == node]:
                if (key[1], node_of(key[0])) not in self.ghosts or key[2]:
                    del self.channels[key]
            for other in self.stores:
                self.say(raylet_of(node), raylet_of(other), lambda store, other=other: self.bury(other, node))

    def bury(self, node: int, dead: int) -> list[Effect]:
        """A store hears that a node is dead, from which some may still read here."""
        self.buried.add((node, dead))
        guests = {proc for proc, where in self.links if where == node and node_of(proc) == dead}
        self.visits["stayed"] += len(guests)
        return self.stores[node].node_died(self.now, dead, guests)

    def wait(self, pick: int) -> None:
        self.now += pick % 5
        for node, store in list(self.stores.items()):
            self.apply(node, store.tick(self.now))

    # ------------------------------------------------------------ the end

    def settle(self) -> None:
        """Everything that is under way ends."""
        for _ in range(100_000):
            if any(self.channels.values()):
                self.deliver(0)
            elif any(tag in self.sends and tag not in self.moved for tag in self.receives):
                self.move(0)
            elif any(tag in self.moved or tag in self.cancelled for tag in self.receives) or self.sends:
                self.report(0)
            elif self.writes or self.reads:
                self.disk(0)
            else:
                return
        raise AssertionError("it never settles")

    def finish(self) -> None:
        for node in list(self.stalled):
            self.tell_stalled(node, [])
        for link in sorted(self.ghosts):
            self.close_link(*link)
        self.settle()
        for _ in range(4):
            for proc, ident in list(self.unsealed):
                self.seal(list(self.unsealed).index((proc, ident)))
            self.settle()
            self.now += TIMEOUT
            self.wait(0)
            self.settle()
        assert not self.creating, "a Create was never answered"
        assert not self.opening, "an Open was never answered"
        assert not self.unanswered and not self.unkept
        assert not self.receives and not self.sends
        for proc, ident in list(self.unsealed):
            self.seal(list(self.unsealed).index((proc, ident)))
        for part in list(self.pinned):
            self.let_go(part)
        while self.lent:
            self.read_file(0)
        self.settle()
        assert not self.keeping, "a node that is to keep a copy never answered"
        for _, node, ident in self.kept:
            held = self.stores[node]._objects.get(ident)
            assert held is not None and (held.offset >= 0 or held.disk is not None), "a kept copy is gone"
        for store in self.stores.values():
            assert all(held.disk is None or held.stays for held in store._objects.values()), "on disk for nobody"
            parts = set(store._holdings.procs()) | set(store._lent._lent)
            for held in store._objects.values():
                parts |= {*held.pins, *held.openers, *held.keepers, *held.keeping}
            assert not parts & self.dead, "the dead hold something"
        for obj in self.objects.values():
            if obj.owner not in self.dead and obj.locations and not obj.freed:
                self.drop(obj)
        self.settle()
        for store in self.stores.values():
            left = store.snapshot()
            assert left["used"] == left["evictable"], f"leaked: {left}"
            assert left["spilled"] == left["restoring"] == left["on_disk"] == left["segments"] == 0, f"on disk: {left}"
            assert not self.disks[left["node"]]
            assert left["waiting"] == left["creating"] == left["pulling"] == left["pinned"] == 0
            assert self.deaths or left["objects"] == 0, f"copies nobody knows of: {left}"
