"""Losses in the ownership simulation: nodes that die, copies that vanish, and what may be said to be lost for good."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from hpcray.common.ids import PUT_INDEX, node_of, number_of, raylet_of
from hpcray.core.core_worker.object_recovery import (
    DEPENDENCY,
    LINEAGE_EVICTED,
    LOST,
    MAX_ATTEMPTS_EXCEEDED,
    OWNER_DIED,
    PUT,
    RETRIES_DISABLED,
    TASK_CANCELLED,
)

if TYPE_CHECKING:
    from ownership_oracle import Oracle
    from ownership_parts import Submitted
    from ownership_process import Process
    from ownership_store import Store

NODE_DIED = object()


class Losing:
    """The part of a world that loses things.

    Attributes:
        losses, vanishing, evicting: so many nodes will die, so many copies vanish, or are evicted. lineage_limit: in
            bytes, of every process.
        retries: of each task, when it was submitted. runs: how often it was started. remade: runs for what was lost.
        verdicts: why objects were said to be lost. lost_copies: objects of which a copy was lost; vanished: those
            of which their owner need not know it.
    """

    channels: dict[tuple[bytes, bytes], deque[Any]]
    processes: dict[bytes, Process]
    stores: list[Store]
    oracle: Oracle
    living: list[Process]
    pick: Any
    one: Any
    end_of: Any
    born: Any
    lose_visits: Any
    check_kept: Any
    kept_at: dict[int, list[int]]
    leaving: set[int]
    host: int

    def __init__(self, losses: int, lineage_limit: int) -> None:
        self.losses, self.vanishing, self.evicting = losses, 15 * losses, 100 * losses
        self.lineage_limit = lineage_limit
        self.retries: dict[bytes, int] = {}
        self.runs: Counter[bytes] = Counter()
        self.submitted: dict[bytes, Submitted] = {}
        self.remade = 0
        self.evicted = 0
        self.verdicts: Counter[str] = Counter()
        self.lost_copies: set[bytes] = set()
        self.vanished: set[bytes] = set()

    def check_loss(self, process: Process, oid: bytes, reason: str, why: str) -> None:
        """An owner says that an object cannot be had any more; or anybody, that it cannot ask."""
        self.verdicts[why] += 1
        self.check_kept(process, oid, reason)
        task = oid[:-3]
        if why == PUT:
            assert oid[-3:] == PUT_INDEX and (oid in self.lost_copies or "was referred to" in reason), oid.hex()
        elif why == RETRIES_DISABLED:
            assert self.retries[task] == 0
        elif why == MAX_ATTEMPTS_EXCEEDED:
            assert 0 < self.retries[task] == self.submitted[task].attempt
        elif why == TASK_CANCELLED:
            assert self.submitted[task].cancelled
        elif why == LINEAGE_EVICTED:
            assert self.lineage_limit < 1 << 30
        else:
            assert why in (DEPENDENCY, LOST, OWNER_DIED), why

    def draw_retries(self) -> int:
        return (0, 1, 2, 3, 5, -1)[self.pick(6)]

    def lose_something(self) -> None:
        """Perhaps."""
        if self.losses and self.pick(300) == 0:
            self.losses -= 1
            self.kill_node()
        if self.vanishing and self.pick(20) == 0:
            self.vanishing -= 1
            self.vanish()
        if self.evicting and self.pick(8) == 0:
            self.evicting -= 1
            self.evict()

    def told_of_node(self, node: int, dest: bytes) -> None:
        """From now on nothing of that node is let through."""
        for src, to in list(self.channels):
            if to == dest and node_of(src) == node:
                del self.channels[src, to]
        if not number_of(dest):
            self.stores[node_of(dest)].node_died(node)
        elif self.processes[dest].alive:
            self.processes[dest].node_died(node, self.kept_at.get(node, []))
            self.processes[dest].turn()

    def kill_node(self) -> None:
        """All of a node goes at once, with a part of what was on its way from there. Node 0 lives."""
        alive = [store for store in self.stores[1:] if store.alive and store.node not in self.leaving]
        if not alive or len(self.living) < 3:
            return
        store = self.one(alive)
        self.lost_copies.update(store.pins)
        self.lose_visits(store)
        gone = [process for process in self.living if process.node == store.node]
        for process in gone:
            self.oracle.about_to_die(process)
        for process in gone:
            self.end_of(process)
        store.lose_power()
        for channel, queue in self.channels.items():
            if node_of(channel[0]) == store.node and queue:
                self.channels[channel] = deque(list(queue)[: self.pick(len(queue) + 1)])
        for process in self.living:
            self.channels.setdefault((raylet_of(store.node), process.id), deque()).append(NODE_DIED)
        for other in self.stores:
            if other.alive:
                self.channels.setdefault((raylet_of(store.node), raylet_of(other.node)), deque()).append(NODE_DIED)
        for _ in range(2):
            self.born(self.one([store.node for store in self.stores if store.alive]) if self.host > 1 else 0)

    def vanish(self) -> None:
        """A copy that nobody reads is gone: its file on disk cannot be read."""
        found = [
            (store, oid)
            for store in self.stores
            for oid, pins in store.pins.items()
            if not pins and not store.keepers.get(oid)
        ]
        if found:
            store, oid = self.one(found)
            self.lost_copies.add(oid)
            self.vanished.add(oid)
            store.freed.add(oid)
            store.settle(oid)

    def evict(self) -> None:
        """Room is short: a copy that need not stay goes. Nothing is lost by that."""
        found = [
            (store, oid)
            for store in self.stores
            for oid, pins in store.pins.items()
            if not pins and not store.stays(oid)
        ]
        if found:
            store, oid = self.one(found)
            self.evicted += 1
            store.freed.add(oid)
            store.settle(oid)
