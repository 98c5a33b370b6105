"""Neighbors in the ownership simulation: processes that read in the stores of other nodes of their host.

A connection to a neighbor's store keeps its own order and none with anything else. It may never come to be, or end
while both live: what the store has said is lost then. What the process has said is not: a store reads all of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m

if TYPE_CHECKING:
    from ownership_parts import Frame, Ref
    from ownership_process import Process
    from ownership_store import Store

MEETING, OPEN, CUT, OVER = range(4)
ANSWERS = {m.Opened: "on_opened", m.StoreError: "on_store_error"}


class Way:
    """From one process to one neighbor's store.

    state: MEETING, OPEN, CUT (it has ended, which the process has not seen yet), OVER. there, back: what is on it.
    """

    def __init__(self) -> None:
        self.state = MEETING
        self.there: deque[bytes] = deque()
        self.back: deque[bytes] = deque()

    def end(self, state: int) -> None:
        self.state = state
        self.back.clear()


class Visiting:
    """What a process has for `core.core_worker.object_pins.NeighborStores`."""

    def __init__(self, process: Process) -> None:
        self.process, self.world = process, process.world
        self.ways: dict[int, Way] = {}
        self.left: set[int] = set()
        self.reading: list[tuple[Frame, Ref]] = []  # files of our own store

    def meet(self, node: int) -> None:
        assert node not in self.ways, "it is met twice"
        self.ways[node] = Way()

    def send(self, node: int, msg: m.Message) -> None:
        way = self.ways[node]
        self.world.visit_sent(self.process.id, node, msg)
        assert way.state in (OPEN, CUT), "nobody is met"
        if self.world.stores[node].alive:
            way.there.append(m.encode([msg]))

    def leave(self, node: int) -> None:
        process = self.process
        assert node in process.table.dead_nodes and node not in self.left
        assert not [view for frame in process.frames for view in frame.views if view.node == node]
        self.left.add(node)
        self.ways.pop(node, None)

    def on_answer(self, node: int, msg: Any) -> None:
        """Another store than ours answers: what `runtime.core_worker.object_writer` does."""
        table = self.process.table
        if table.pins.awaits(msg.id, node):
            self.world.unanswered.discard((self.process.id, node, msg.id))
            getattr(table, ANSWERS[type(msg)])(msg)

    def begin_file(self, frame: Frame, ref: Ref) -> None:
        """A thread begins to read a file that is lent."""
        self.process.table.pins.begin_file(ref.id)
        self.reading.append((frame, ref))

    def end_file(self, index: int, fails: bool) -> None:
        """It has read it, or cannot."""
        process = self.process
        frame, ref = self.reading.pop(index)
        store = self.world.stores[process.node]
        assert not store.alive or store.lent[process.id, ref.id] > 0, "what is read there is not lent any more"
        if fails:
            self.world.near["file failed"] += 1
            process.table.pins.file_failed(ref.id, "broken")
            process.get(frame, ref)
        else:
            self.world.near["file read"] += 1
            contained = store.content[ref.id]
            self.world.oracle.about_to_read(ref.id, contained)
            process.table.pins.end_file(ref.id)
            process.unpack(frame, contained)

    def lost(self, node: int) -> None:
        """The node is dead: nothing of it is heard any more."""
        if node in self.ways:
            self.ways[node].end(OVER)


class Neighbors:
    """The part of a world in which nodes are neighbors.

    Attributes:
        host: so many nodes each share one. cuts: so many connections will end while both ends live. full: a
            neighbor's store may have no room.
        near: what happened between neighbors. cut_ways: processes and nodes between which that was so.
    """

    pick: Callable[[int], int]
    one: Any
    stores: list[Store]
    processes: dict[bytes, Process]
    living: list[Process]
    unanswered: set[tuple[bytes, int, bytes]]
    sent: Counter[str]

    def __init__(self, host: int, cuts: int) -> None:
        self.host, self.cuts = host, cuts
        self.near: Counter[str] = Counter()
        self.cut_ways: set[tuple[bytes, int]] = set()

    def neighbors(self, node: int) -> list[int]:
        return [
            other.node for other in self.stores if other.node != node and other.node // self.host == node // self.host
        ]

    def is_full(self) -> bool:
        return self.pick(8) == 0

    def answer(self, node: int, proc: bytes, msg: m.Message) -> bool:
        """A store answers on a visitor's connection; False: there is none."""
        way = self.processes[proc].visiting.ways.get(node)
        if way is None or way.state != OPEN:
            return False
        if self.processes[proc].alive:
            self.sent[type(msg).__name__] += 1
            way.back.append(m.encode([msg]))
        return True

    def visit_sent(self, proc: bytes, node: int, msg: m.Message) -> None:
        self.near[type(msg).__name__] += 1
        if type(msg) is m.Open:
            assert not msg.pin_replica
            self.note_open(proc, node, msg.id)
        elif type(msg) is m.Release:
            assert not msg.unpin_replica and not any((proc, node, oid) in self.unanswered for oid in msg.ids)

    def note_open(self, proc: bytes, node: int, oid: bytes) -> None:
        waiting = [key for key in self.unanswered if key[0] == proc and key[2] == oid]
        assert not waiting, "a second Open while the first has no answer"
        self.unanswered.add((proc, node, oid))

    def kept_elsewhere(self, process: Process) -> list[tuple[Frame, Ref]]:
        """Refs of a process to what its own node's store does not have, as far as it knows."""
        entries = process.table.entries
        known = [(frame, ref, entries[ref.id].nodes) for frame in process.frames for ref in frame.vars]
        return [(frame, ref) for frame, ref, nodes in known if nodes and process.node not in nodes]

    # ------------------------------------------------------------ what is under way

    def visits_under_way(self) -> list[Callable[[], None]]:
        """One delivery each."""
        found: list[Callable[[], None]] = []
        for process in self.living:
            if process.visiting.reading:
                found.append(lambda p=process: self.end_reading(p))  # type: ignore[misc]
        for process in self.processes.values():
            for node, way in process.visiting.ways.items():
                if way.there:
                    found.append(lambda p=process, n=node: self.deliver_there(p, n))  # type: ignore[misc]
                if process.alive and way.back:
                    found.append(lambda p=process, n=node: self.deliver_back(p, n))  # type: ignore[misc]
                elif process.alive and way.state in (MEETING, CUT):
                    found.append(lambda p=process, n=node: self.decide(p, n))  # type: ignore[misc]
        return found

    def end_reading(self, process: Process) -> None:
        process.visiting.end_file(self.pick(len(process.visiting.reading)), self.pick(3) == 0)
        process.turn()

    def deliver_there(self, process: Process, node: int) -> None:
        (msg,) = m.decode(process.visiting.ways[node].there.popleft())
        self.stores[node].receive(process.id, msg, visit=True)

    def deliver_back(self, process: Process, node: int) -> None:
        (msg,) = m.decode(process.visiting.ways[node].back.popleft())
        process.drain() if self.pick(2) else None
        process.receive(raylet_of(node), msg)
        process.turn()

    def decide(self, process: Process, node: int) -> None:
        """A connection comes to be, or not; or its end is seen."""
        way = process.visiting.ways[node]
        if way.state == MEETING and self.stores[node].alive and self.pick(6):
            way.state = OPEN
            self.near["met"] += 1
            process.table.pins.met(node)
        else:
            self.near["unmet" if way.state == MEETING else "cut"] += 1
            while way.there:
                self.deliver_there(process, node)
            way.end(OVER)
            self.forget_answers(process, node)
            process.table.recovery.neighbor_lost(node)
        process.turn()

    def forget_answers(self, process: Process, node: int) -> None:
        self.unanswered -= {key for key in self.unanswered if key[:2] == (process.id, node)}

    # ------------------------------------------------------------ losses

    def cut(self) -> None:
        """A connection ends while both live."""
        ways = [(p, node) for p in self.living for node, way in p.visiting.ways.items() if way.state == OPEN]
        if ways:
            self.cuts -= 1
            process, node = self.one(ways)
            self.cut_ways.add((process.id, node))
            process.visiting.ways[node].end(CUT)

    def lose_visits(self, store: Store) -> None:
        """A node dies: what was on its way there is lost, and a part of what was on its way from there."""
        for process in self.processes.values():
            way = process.visiting.ways.get(store.node)
            if way is not None and way.state == OPEN:
                way.there.clear()
                way.back = deque(list(way.back)[: self.pick(len(way.back) + 1)])
                way.state = CUT
            if process.node == store.node:
                for node, other in process.visiting.ways.items():
                    if node != store.node:
                        other.there = deque(list(other.there)[: self.pick(len(other.there) + 1)])

    def check_unread(self, store: Store, oid: bytes) -> None:
        """The block of an object is given back."""
        for process in self.living:
            for frame in process.frames:
                for view in frame.views:
                    assert view.id != oid or view.node != store.node, (
                        f"{process.id.hex()} still reads {oid.hex()} in the store of node {store.node}"
                    )

    def check_readable(self, process: Process, oid: bytes) -> None:
        """What a process reads stays where it is: it has a pin, or the node is dead and its memory still mapped."""
        entry = process.table.entries.get(oid)
        mapping = (entry.mapping if entry is not None else None) or process.table.pins.views_without_entry[oid]
        store = self.stores[mapping.node]
        pinned = process.id in store.pins.get(oid, ()) if store.alive else store.node not in process.visiting.left
        assert pinned, f"{process.id.hex()} reads {oid.hex()} at node {mapping.node} without a pin"
        assert mapping.offset >= 0
