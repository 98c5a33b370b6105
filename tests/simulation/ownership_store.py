"""The node stores of the ownership simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ownership_parts import LARGE

from hpcray.base.ids import node_of, number_of, owner_of, raylet_of
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from ownership_world import World


class Store:
    """The raylet of a node as processes see it: never full, one pull per object, pins by process."""

    def __init__(self, world: World, node: int) -> None:
        self.world, self.node = world, node
        self.alive = True
        self.pins: dict[bytes, set[bytes]] = {}
        self.content: dict[bytes, tuple[bytes, ...]] = {}
        self.copies: set[bytes] = set()
        self.kept: set[bytes] = set()  # of the copies, those that took a primary's place
        self.announcers: dict[bytes, bytes | None] = {}
        self.freed: set[bytes] = set()
        self.known_dead: set[bytes] = set()
        self.pulls: dict[bytes, tuple[list[int], dict[bytes, None]]] = {}

    def created(self, oid: bytes, pin: bytes | None, content: tuple[bytes, ...]) -> None:
        self.content[oid] = content
        self.announcers.pop(oid, None)
        self.pins[oid] = set() if pin is None else {pin}
        self.copies.discard(oid)
        self.kept.discard(oid)
        self.freed.discard(oid)
        if owner_of(oid) in self.known_dead:
            self.free(oid)

    def receive(self, src: bytes, msg: Any) -> None:
        if not self.alive:
            return
        if type(msg) is m.Open:
            if src in self.known_dead:
                return
            if msg.keep and node_of(src) == self.node:
                assert src in self.pins.get(msg.id, ()), f"{src.hex()} keeps {msg.id.hex()}, which it has not pinned"
                self.kept.add(msg.id)
            elif msg.id in self.pins:
                self.pin(msg.id, src)
            elif msg.id in self.pulls:
                self.pulls[msg.id][1][src] = None
            else:
                self.pulls[msg.id] = ([node for node in msg.nodes if node != self.node], {src: None})
        elif type(msg) is m.Release:
            for oid in msg.ids:
                if node_of(src) != self.node and src not in self.pins.get(oid, ()):
                    self.withdraw(oid, src)  # a second copy that its owner gives up before it is there
                    continue
                assert src in self.pins.get(oid, ()), f"{src.hex()} releases {oid.hex()}, which it has not pinned"
                self.pins[oid].discard(src)
                self.settle(oid)
        elif type(msg) is m.Free:
            for oid in msg.ids:
                self.free(oid)
            if number_of(src):
                for node in msg.nodes:
                    if node != self.node:
                        self.world.send(raylet_of(self.node), raylet_of(node), m.Free(msg.ids, []))

    def pin(self, oid: bytes, proc: bytes) -> None:
        assert proc not in self.pins[oid], f"{proc.hex()} pins {oid.hex()} twice"
        self.pins[oid].add(proc)
        pulled = oid in self.copies and self.announcers.get(oid) is None
        if pulled:
            self.announcers[oid] = proc
        self.world.send(raylet_of(self.node), proc, m.Opened(oid, 64, LARGE, pulled))

    def pulled(self, oid: bytes) -> None:
        """A pull ends: with a copy, where a source still has the object."""
        sources, openers = self.pulls.pop(oid)
        found = [node for node in sources if oid in self.world.stores[node].pins]
        if found:
            self.pins[oid] = set()
            self.content[oid] = self.world.stores[found[0]].content[oid]
            self.copies.add(oid)
            if owner_of(oid) in self.known_dead:
                self.freed.add(oid)
            for proc in openers:
                self.pin(oid, proc)
            self.settle(oid)
        else:
            for proc in openers:
                self.world.send(raylet_of(self.node), proc, m.StoreError(oid, "lost", "no node has it"))

    def evictable(self, oid: bytes) -> bool:
        """Whether it is a copy of which its owner never heard, and nobody reads it: it goes when room is short."""
        return self.untold(oid) and not self.pins[oid]

    def untold(self, oid: bytes) -> bool:
        """Whether it is a copy of which its owner may never have heard: who pulled it died."""
        return oid in self.copies and self.announcers.get(oid) is None

    def stays(self, oid: bytes) -> bool:
        """Whether it is here, and is not evicted."""
        if oid not in self.pins:
            return False
        return oid not in self.copies or oid in self.kept or any(node_of(proc) != self.node for proc in self.pins[oid])

    def free(self, oid: bytes) -> None:
        if oid in self.pins:
            self.freed.add(oid)
            self.settle(oid)

    def settle(self, oid: bytes) -> None:
        if not self.pins[oid] and oid in self.freed:
            del self.pins[oid]
            self.copies.discard(oid)
            self.kept.discard(oid)
            self.freed.discard(oid)
            self.announcers.pop(oid, None)

    def process_died(self, proc: bytes) -> None:
        self.known_dead.add(proc)
        for oid in list(self.pins):
            if self.announcers.get(oid) == proc:
                self.announcers[oid] = None
            self.pins[oid].discard(proc)
            if owner_of(oid) == proc:
                self.freed.add(oid)
            self.settle(oid)
        for oid in list(self.pulls):
            self.withdraw(oid, proc)

    def node_died(self, node: int) -> None:
        found = {proc for pins in self.pins.values() for proc in pins} | {owner_of(oid) for oid in self.pins}
        found |= {proc for _, openers in self.pulls.values() for proc in openers}
        found |= {proc for proc in self.world.processes if node_of(proc) == node}
        for proc in sorted(found):
            if node_of(proc) == node:
                self.process_died(proc)

    def withdraw(self, oid: bytes, proc: bytes) -> None:
        """A process does not want it any more."""
        if oid in self.pulls:
            self.pulls[oid][1].pop(proc, None)
            if not self.pulls[oid][1]:
                del self.pulls[oid]

    def lose_power(self) -> None:
        self.alive = False
        for book in (self.pins, self.content, self.copies, self.kept, self.announcers, self.freed, self.pulls):
            book.clear()
