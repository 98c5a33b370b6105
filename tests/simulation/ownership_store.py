"""The node stores of the ownership simulation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ownership_parts import LARGE

from hpcray.common.ids import node_of, number_of, owner_of, raylet_of
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from ownership_world import World


class Pull:
    """A copy on its way. openers: who waits to read it; keepers: to have it kept. Each gets an answer of its own."""

    def __init__(self) -> None:
        self.sources: list[int] = []
        self.openers: dict[bytes, None] = {}
        self.keepers: dict[bytes, None] = {}


class Store:
    """The raylet of a node as processes see it: one pull per object, pins by process; never full for its own ones."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        self.alive = True
        self.pins: dict[bytes, set[bytes]] = {}  # who reads
        self.keepers: dict[bytes, set[bytes]] = {}  # for whom a copy stays
        self.content: dict[bytes, tuple[bytes, ...]] = {}
        self.copies: set[bytes] = set()
        self.kept: set[bytes] = set()  # of the copies, those that took a primary's place
        self.announcers: dict[bytes, bytes | None] = {}
        self.freed: set[bytes] = set()
        self.known_dead: set[bytes] = set()
        self.pulls: dict[bytes, Pull] = {}
        self.lent: Counter[tuple[bytes, bytes]] = Counter()  # files that a process may read by itself

    def created(self, oid: bytes, pin: bytes | None, content: tuple[bytes, ...]) -> None:
        self.content[oid] = content
        self.announcers.pop(oid, None)
        self.pins[oid] = set() if pin is None else {pin}
        self.keepers.pop(oid, None)
        self.copies.discard(oid)
        self.kept.discard(oid)
        self.freed.discard(oid)
        if owner_of(oid) in self.known_dead:
            self.free(oid)

    def receive(self, src: bytes, msg: Any, visit: bool = False) -> None:
        """visit: it came on the connection of a process of a neighbor."""
        if not self.alive or (visit and src in self.known_dead):
            return
        if type(msg) is m.Open:
            if src not in self.known_dead:
                self.open(src, msg, visit)
        elif type(msg) is m.Release:
            for oid in msg.ids:
                if msg.unpin_replica:
                    self.keep_no_more(oid, src)
                else:
                    here = src in self.pins.get(oid, ())
                    # Who has lost touch with us does not know what we have heard.
                    assert here or not (visit or node_of(src) == self.node), (
                        f"{src.hex()} releases {oid.hex()}, which it has not pinned"
                    )
                    self.let_go(oid, src)
        elif type(msg) is m.ObjectGet:
            found = msg.id in self.pins
            ready = m.ObjectReady(msg.id, 0 if found else 2, b"", LARGE if found else 0, [self.node] if found else [])
            self.world.send(raylet_of(self.node), src, ready)
        elif type(msg) is m.DiskRead:
            if self.lent[src, msg.id]:
                self.lent[src, msg.id] -= 1
            if msg.error:
                self.open(src, m.Open(msg.id, msg.size, msg.nodes), visit)
        elif type(msg) is m.Free:
            for oid in msg.ids:
                self.free(oid)
            if number_of(src):
                for node in msg.nodes:
                    if node != self.node:
                        self.world.send(raylet_of(self.node), raylet_of(node), m.Free(msg.ids, []))

    def open(self, src: bytes, msg: m.Open, visit: bool) -> None:
        oid = msg.id
        if msg.pin_replica and not msg.nodes and node_of(src) == self.node:
            assert src in self.pins.get(oid, ()), f"{src.hex()} keeps {oid.hex()}, which it has not pinned"
            self.kept.add(oid)
        elif visit and self.world.is_full():
            self.say(src, m.StoreError(oid, "full", "no room"))
        elif self.world.host > 1 and not (visit or msg.pin_replica) and self.stays(oid) and self.world.is_full():
            self.lent[src, oid] += 1
            self.say(src, m.OnDisk(oid, "a file", 0, LARGE))
        elif oid in self.pins:
            if msg.pin_replica:
                self.keepers.setdefault(oid, set()).add(src)
            self.pin(oid, src, not msg.pin_replica)
        else:
            sources = [node for node in msg.nodes if node != self.node]
            pull = self.pulls.get(oid)
            if pull is None:
                if not sources:
                    self.turn_away(
                        oid, () if msg.pin_replica else (src,), (src,) if msg.pin_replica else (), "it is not here"
                    )
                    return
                pull = self.pulls[oid] = Pull()
            pull.sources += [node for node in sources if node not in pull.sources]
            (pull.keepers if msg.pin_replica else pull.openers)[src] = None

    def say(self, proc: bytes, msg: Any) -> None:
        """Answer, on the connection of a visitor where there is one."""
        if not self.world.answer(self.node, proc, msg):
            self.world.send(raylet_of(self.node), proc, msg)

    def pin(self, oid: bytes, proc: bytes, reads: bool) -> None:
        pulled = oid in self.copies and self.announcers.get(oid) is None and (reads or proc == owner_of(oid))
        if pulled:
            self.announcers[oid] = proc
        if not reads:
            self.world.send(raylet_of(self.node), proc, m.ReplicaPinned(oid))
            return
        assert proc not in self.pins[oid], f"{proc.hex()} pins {oid.hex()} twice"
        self.pins[oid].add(proc)
        self.say(proc, m.Opened(oid, 64, LARGE, pulled))

    def pulled(self, oid: bytes) -> None:
        """A pull ends: with a copy, where a source still has the object."""
        pull = self.pulls.pop(oid)
        found = [node for node in pull.sources if oid in self.world.stores[node].pins]
        if found:
            self.pins[oid] = set()
            self.content[oid] = self.world.stores[found[0]].content[oid]
            self.copies.add(oid)
            self.keepers[oid] = set(pull.keepers)
            if owner_of(oid) in self.known_dead:
                self.freed.add(oid)
            for proc in pull.openers:
                self.pin(oid, proc, True)
            for proc in pull.keepers:
                self.pin(oid, proc, False)
            self.settle(oid)
        else:
            self.turn_away(oid, pull.openers, pull.keepers, "no node has it")

    def turn_away(self, oid: bytes, openers: Iterable[bytes], keepers: Iterable[bytes], why: str) -> None:
        for proc in openers:
            self.say(proc, m.StoreError(oid, "lost", why))
        for proc in keepers:
            self.world.send(raylet_of(self.node), proc, m.ReplicaPinned(oid, why))

    def evictable(self, oid: bytes) -> bool:
        """Whether it is a copy of which its owner never heard, and nobody reads it: it goes when room is short."""
        return self.untold(oid) and not self.pins[oid] and not self.stays(oid)

    def untold(self, oid: bytes) -> bool:
        """Whether it is a copy of which its owner may never have heard: who pulled it died, or is cut off."""
        announcer = self.announcers.get(oid)
        return oid in self.copies and (announcer is None or (announcer, self.node) in self.world.cut_ways)

    def stays(self, oid: bytes) -> bool:
        """Whether it is here, and is not evicted."""
        return oid in self.pins and (oid not in self.copies or oid in self.kept or bool(self.keepers.get(oid)))

    def kept_for_borrowers(self, oid: bytes) -> bool:
        """Whether a process keeps it here whose owner leaves, or has left."""
        return any(proc != owner_of(oid) for proc in self.keepers.get(oid, ()))

    def free(self, oid: bytes) -> None:
        if oid in self.pins:
            self.freed.add(oid)
            self.settle(oid)

    def settle(self, oid: bytes) -> None:
        if not self.pins[oid] and oid in self.freed and not self.kept_for_borrowers(oid):
            self.world.check_unread(self, oid)
            del self.pins[oid]
            self.keepers.pop(oid, None)
            self.copies.discard(oid)
            self.kept.discard(oid)
            self.freed.discard(oid)
            self.announcers.pop(oid, None)

    def let_go(self, oid: bytes, proc: bytes) -> None:
        """A process does not read it any more, or does not want to."""
        if oid in self.pins:
            self.pins[oid].discard(proc)
            self.settle(oid)
        elif oid in self.pulls:
            self.pulls[oid].openers.pop(proc, None)
            self.stop(oid)

    def keep_no_more(self, oid: bytes, proc: bytes) -> None:
        """A process does not need its copy here."""
        self.keepers.get(oid, set()).discard(proc)
        if oid in self.pins:
            self.settle(oid)
        if oid in self.pulls:
            self.pulls[oid].keepers.pop(proc, None)
            self.stop(oid)

    def stop(self, oid: bytes) -> None:
        """Perhaps nobody wants it any more."""
        if oid in self.pulls and not (self.pulls[oid].openers or self.pulls[oid].keepers):
            del self.pulls[oid]

    def process_died(self, proc: bytes) -> None:
        self.known_dead.add(proc)
        for reader in [reader for reader in self.lent if reader[0] == proc]:
            del self.lent[reader]
        for oid in [*self.pins, *self.pulls]:
            if self.announcers.get(oid) == proc:
                self.announcers[oid] = None
            self.keep_no_more(oid, proc)
            if owner_of(oid) == proc and oid in self.pins:
                self.freed.add(oid)
            self.let_go(oid, proc)

    def node_died(self, node: int) -> None:
        found = {proc for pins in self.pins.values() for proc in pins} | {owner_of(oid) for oid in self.pins}
        found |= {proc for proc, _ in self.lent}
        found |= {proc for keepers in self.keepers.values() for proc in keepers}
        found |= {proc for pull in self.pulls.values() for proc in [*pull.openers, *pull.keepers]}
        found |= {proc for proc in self.world.processes if node_of(proc) == node}
        for proc in sorted(found):
            if node_of(proc) == node:
                self.process_died(proc)

    def lose_power(self) -> None:
        """`content` is in memory that others have mapped."""
        self.alive = False
        for book in (
            self.pins,
            self.keepers,
            self.copies,
            self.kept,
            self.announcers,
            self.freed,
            self.pulls,
            self.lent,
        ):
            book.clear()
