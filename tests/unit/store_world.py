"""The state of the model in `store_model`: node stores, what each process has of which object, what lies where."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcray.common.ids import make_proc, node_of, number_of, raylet_of
from hpcray.core.effects import (
    CancelReceive,
    DiscardSpilled,
    Effect,
    LendSpilled,
    ReadSpill,
    ReleaseOverflow,
    ReserveOverflow,
    Send,
    StartReceive,
    StartSend,
    WriteSpill,
)
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import OVERFLOW

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


class Stores:
    """What is known of all nodes, and what becomes of the effects of their stores."""

    def __init__(self, spill_threshold: float = 0.0, nodes: int = NODES, chunk: int = CHUNK, overflow: int = 0) -> None:
        self.now = 0.0
        self.nodes = nodes
        self.stores = {
            node: ObjectStore(node, CAPACITY, TIMEOUT, spill_threshold, chunk, SLOTS, overflow) for node in range(nodes)
        }
        self.writes: dict[int, WriteSpill] = {}  # by node: a store has one under way
        self.reserves: dict[tuple[int, bytes], ReserveOverflow] = {}
        self.overflowed = 0
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
        self.sent_to_own_node: set[Part] = set()  # asked for, since there was no room where it lies on disk
        self.buried: set[tuple[int, int]] = set()  # (node, dead node that it has heard of)
        self.stalled: set[int] = set()  # nodes whose disk does not answer
        self.stalls = 0
        self.pinning_replicas: set[Part] = set()  # asked to keep a copy there
        self.pinned_replicas: set[Part] = set()
        self.unanswered_replica_pins: set[Part] = set()  # of `keeping`, what the store has heard and not answered
        self.confirmed_replica_pins: set[Part] = (
            set()
        )  # as `kept`, from when the store said so until it hears the contrary
        self.lent: dict[Part, int] = {}  # files that may be read
        self.receives: dict[int, Transfer] = {}
        self.sends: dict[int, Transfer] = {}
        self.cancelled: set[int] = set()
        self.moved: set[int] = set()
        self.link_breaks: Counter[tuple[int, bytes]] = Counter()  # by receiving node and object, between living nodes
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
        assert offset % UNIT == 0 and offset >= 0 and (offset + size <= WHOLE or offset >= OVERFLOW)
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

    def waited(self, ident: bytes) -> bool:
        """Whether somebody may have waited for room in vain."""
        too_large = self.objects[ident].size > CAPACITY
        return too_large or self.now >= TIMEOUT or bool(self.stalls)

    def forget_parts(self, gone: Callable[[Part], bool]) -> None:
        """Nobody reads, or waits to read, these any more."""
        for book in (self.opening, self.pinned, self.granted):
            for part in [part for part in book if gone(part)]:
                del book[part]
        for parts in (self.unanswered, self.unanswered_replica_pins, self.confirmed_replica_pins):
            parts -= {part for part in parts if gone(part)}
        self.unpins = {link for link in self.unpins if self.reads_at(*link)}

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
                    held = self.stores[node].lifecycle.objects.get(msg.id)  # it may have been freed, and go with this
                    assert self.waited(msg.id) or held is None or held.spill_slot is not None or held.overflows, (
                        "full, and it is not on disk"
                    )
        elif isinstance(msg, m.ReplicaPinned):
            part = (dest, node, msg.id)
            assert part in self.unanswered_replica_pins or (msg.reason and part in self.confirmed_replica_pins), (
                "said twice"
            )
            self.unanswered_replica_pins.discard(part)
            self.confirmed_replica_pins.discard(part)
            if not msg.reason:
                self.confirmed_replica_pins.add(part)
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
            elif isinstance(effect, ReserveOverflow):
                assert (node, effect.id) not in self.reserves
                self.reserves[node, effect.id] = effect
                self.overflowed += 1
            elif isinstance(effect, ReleaseOverflow):
                begin, end = OVERFLOW + effect.position, OVERFLOW + effect.position + effect.size
                for (_, where, ident), offset in self.granted.items():
                    assert where != node or not begin <= offset < end, f"{ident.hex()} is in use"
                for transfer in [*self.sends.values(), *self.receives.values()]:
                    assert transfer.node != node or not begin <= transfer.offset < end, "it is being transferred"
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
        self.stores[node].check_invariants()
        objects = self.stores[node].lifecycle.objects
        for (proc, where, ident), offset in self.granted.items():
            if where == node:
                assert proc in objects[ident].pins and objects[ident].offset == offset, "a pin is gone"
        for proc, where, ident in self.confirmed_replica_pins:
            if where == node and not self.objects[ident].freed and proc not in self.dead:
                assert ident in objects and proc in objects[ident].replica_pinners, (
                    "a kept copy is gone, or not kept any more"
                )
