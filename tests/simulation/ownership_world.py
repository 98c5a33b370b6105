"""Several processes that own and borrow, on nodes with stores, on a network where only a pair's own order is kept.

Every step is drawn: which channel delivers next, what a program does next, who dies. After each, `Oracle` looks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ownership_departures import Departing
from ownership_losses import NODE_DIED, Losing
from ownership_oracle import Oracle, Watched
from ownership_parts import LARGE, Frame, Ref
from ownership_process import Process
from ownership_store import Store
from ownership_visits import Neighbors

from hpcray.common.ids import FIRST_RETURN, PUT_INDEX, make_proc, node_of, number_of, owner_of, raylet_of
from hpcray.core.core_worker.object_table import Hint, ObjectTable
from hpcray.protocol import messages as m

Pick = Callable[[int], int]
DIED = object()
ALL_TABLES = 25
"""Events after which the tables of all processes are checked."""


class World(Losing, Neighbors, Departing):
    """All processes, all stores, the network. `pick(n)` draws a number below n.

    Attributes:
        make_table: makes the object table of a process.
    """

    make_table: Callable[..., ObjectTable] = ObjectTable

    def __init__(
        self,
        pick: Pick,
        processes: int = 4,
        nodes: int = 2,
        deaths: int = 0,
        losses: int = 0,
        lineage: int = 1 << 30,
        host: int = 1,
        cuts: int = 0,
        departures: int = 0,
    ) -> None:
        """losses: so many nodes die, and many more copies vanish; lineage: its limit, in bytes; host: so many nodes
        each share one; cuts: so many connections between neighbors end; departures: so many nodes leave."""
        Losing.__init__(self, losses, lineage)
        Neighbors.__init__(self, host, cuts)
        Departing.__init__(self, departures)
        self.pick = pick
        self.deaths = deaths
        self.dead: set[bytes] = set()
        self.values: dict[bytes, tuple[bytes, ...]] = {}
        self.channels: dict[tuple[bytes, bytes], deque[Any]] = {}
        self.met: dict[bytes, set[bytes]] = {}
        self.unanswered: set[tuple[bytes, int, bytes]] = set()
        self.kept_here = 0
        self.sent: Counter[str] = Counter()
        self.outside: list[bytes] = []
        self.places: dict[bytes, Hint] = {}
        self._tellings = 0
        self.steps = self.events = 0
        self.touched: set[bytes] = set()
        self.oracle = Oracle(self)
        self.stores = [Store(self, node) for node in range(nodes)]
        self.processes: dict[bytes, Process] = {}
        for number in range(processes):
            self.born(number % nodes)

    def make_store(self, node: int) -> Store:
        return Store(self, node)

    @property
    def living(self) -> list[Process]:  # type: ignore[override]
        return [process for process in self.processes.values() if process.alive]

    # ------------------------------------------------------------ what processes ask for

    def noted(self, table: ObjectTable, oid: bytes) -> None:
        """A ref is pickled; what its process knew of the object's places, or the value of one object in four, may be
        read much later."""
        places = table.known_locations(oid, 1 << 10 if oid[12] % 4 == 0 else 0, mortal=oid[12] % 8 == 0)
        if places is not None:
            self.places[oid] = places

    def tell(self, table: ObjectTable, oid: bytes) -> None:
        """Two of three refs say what somebody once knew of their object's places."""
        places = self.places.get(oid)
        if places is not None:
            self._tellings += 1
            if self._tellings % 3:
                table.hint_locations(oid, *places)

    def watched(self, process: Process) -> Watched:
        return Watched(self.oracle, process)

    def send(self, src: bytes, dest: bytes, msg: Any) -> None:
        if src in self.dead:
            return
        self.touched.add(src)
        if number_of(src) and number_of(dest):
            self.met.setdefault(src, set()).add(dest)
            self.met.setdefault(dest, set()).add(src)
        self.sent[type(msg).__name__] += 1
        if type(msg) is m.Open:
            if msg.pin_replica and node_of(src) == node_of(dest):
                self.kept_here += 1
            elif node_of(src) != node_of(dest):
                assert msg.pin_replica and msg.id in self.processes[src].table.replicas.held
            else:
                self.note_open(src, node_of(dest), msg.id)
        elif type(msg) is m.DiskRead and msg.error:
            self.note_open(src, node_of(dest), msg.id)
        elif type(msg) is m.Release and not msg.unpin_replica:
            node = node_of(dest)
            assert node == node_of(src) or node not in self.processes[src].table.pins._neighbors
            assert not any((src, node, oid) in self.unanswered for oid in msg.ids), "a Release ahead of the Opened"
        self.channels.setdefault((src, dest), deque()).append(m.encode([msg]))

    def check_error(self, process: Process, oid: bytes, blob: bytes) -> None:
        if blob.startswith((b"LOST", b"OWNER_DIED")):  # the others were looked at when they were pronounced
            excused = owner_of(oid) in self.dead or oid in self.oracle.excused
            assert excused, f"{process.id.hex()} cannot read {oid.hex()}, which it holds: {blob!r}"

    def returned(self, oid: bytes, contained: tuple[bytes, ...]) -> None:
        self.values[oid] = contained

    # ------------------------------------------------------------ steps

    def step(self) -> None:
        self.steps += 1
        choice = self.pick(100)
        if choice < 60 or not ACTIONS[choice % len(ACTIONS)](self):
            self.deliver()
        if self.deaths and len(self.living) > 2 and self.pick(250) == 0:
            self.deaths -= 1
            self.kill(self.victim())
            self.born(node_of((self.acting or self.living)[0].id))
        self.lose_something()
        if self.cuts and self.pick(100) == 0:
            self.cut()
        if self.departures and self.pick(150) == 0:
            self.begin_leaving()
        self.after_event()

    def after_event(self) -> None:
        """Nothing that can be reached was freed, and no table contradicts itself.

        Checked are the tables that sent or received something, and every few events all.
        """
        self.oracle.after_step()
        self.events += 1
        every = self.events % ALL_TABLES == 0
        for process in self.living:
            if every or process.id in self.touched:
                process.table.check_invariants()
        self.touched.clear()

    def deliver(self) -> bool:
        """One message of one channel arrives, or one pull ends; False when nothing is under way."""
        busy = [channel for channel, queue in self.channels.items() if queue]
        others: list[Callable[[], None]] = [partial(store.pulled, oid) for store in self.stores for oid in store.pulls]
        others += self.visits_under_way() if self.host > 1 else ()
        others += self.departures_under_way()
        if not busy and not others:
            return False
        which = self.pick(len(busy) + len(others))
        if which >= len(busy):
            others[which - len(busy)]()
            return True
        src, dest = busy[which]
        item = self.channels[src, dest].popleft()
        if item is DIED:
            self.told(src, dest)
            return True
        if item is NODE_DIED:
            self.told_of_node(node_of(src), dest)
            return True
        (msg,) = m.decode(item)
        if not number_of(dest):
            if type(msg) is m.ObjectGet and not self.stores[node_of(dest)].alive:
                self.told(dest, src)  # its frame comes back: it may be a process that came after that node's death
            self.stores[node_of(dest)].receive(src, msg)
        elif dest in self.dead:
            self.undeliverable(src, dest)
        else:
            process = self.processes[dest]
            self.touched.add(dest)
            if type(msg) in (m.Opened, m.StoreError, m.OnDisk) and node_of(src) == node_of(dest):
                self.unanswered.discard((dest, node_of(src), msg.id))
            process.drain() if self.pick(2) else None
            process.receive(src, msg)
            process.turn()
        return True

    def undeliverable(self, src: bytes, dest: bytes) -> None:
        if src in self.dead or not number_of(src):
            return
        if self.pick(2):
            self.channels.setdefault((dest, src), deque()).append(DIED)
        else:  # the raylet's word is faster than the connection, whose rest is thrown away
            self.channels.pop((dest, src), None)
            self.told(dest, src)

    def told(self, proc: bytes, dest: bytes) -> None:
        if not number_of(dest):
            self.stores[node_of(dest)].process_died(proc)
            return
        process = self.processes[dest]
        if not process.alive:
            return
        process.table.copies.node_left(node_of(proc), self.kept_at.get(node_of(proc), []))
        process.peer_died(proc)
        process.turn()

    def born(self, node: int) -> None:
        proc = make_proc(node, 1 + len(self.processes))
        self.processes[proc] = Process(self, proc)

    def victim(self) -> Process:
        """Often one that has just promised something to somebody."""
        promising = [p for p in self.living if p.table.refs._held]
        return self.one(promising if promising and self.pick(2) else self.living)

    def kill(self, process: Process) -> None:
        self.oracle.about_to_die(process)
        self.end_of(process)
        for other in sorted(self.met.get(process.id, ())):
            self.channels.setdefault((process.id, other), deque()).append(DIED)
        for store in self.stores:
            self.channels.setdefault((process.id, raylet_of(store.node)), deque()).append(DIED)

    def end_of(self, process: Process) -> None:
        process.alive = False
        for _, _, msg in process.table.refs._held:
            if isinstance(msg, m.TaskReply):
                self.values.pop(msg.task + FIRST_RETURN, None)  # its reply never left
        self.dead.add(process.id)
        self.unanswered = {key for key in self.unanswered if key[0] != process.id}

    # ------------------------------------------------------------ what a program does

    def one(self, items: list[Any]) -> Any:
        return items[self.pick(len(items))] if items else None

    def some(self, refs: list[Ref], most: int) -> list[Ref]:
        return [refs[self.pick(len(refs))] for _ in range(self.pick(most + 1))] if refs else []

    def anywhere(self) -> tuple[Process, Frame]:
        process = self.one(self.acting)
        return process, self.one(process.frames)

    def put(self) -> bool:
        process, frame = self.anywhere()
        process.put(frame, self.some(frame.vars, 2), self.pick(3) < (2 if self.host > 1 else 1))
        return True

    def submit(self) -> bool:
        process, frame = self.anywhere()
        worker = self.one([other for other in self.acting if other is not process])
        if worker is None or sum(len(p.frames) + len(p.tasks) for p in self.acting) > 40:
            return self.finish()
        process.submit(frame, worker.id, self.some(frame.vars, 3), self.some(frame.vars, 1))
        return True

    def finish(self) -> bool:
        process = self.one(self.acting)
        frame = self.one([frame for frame in process.frames if frame.task is not None])
        if frame is None:
            return False
        result = frame.task + FIRST_RETURN
        returned = [ref for ref in self.some(frame.vars, 3) if not self.contains(ref.id, result)]
        large = self.pick(4) < (3 if self.vanishing or self.host > 1 else 1)
        process.finish(frame, returned, large, bool(self.pick(2)))
        del returned, frame
        process.turn()
        return True

    def contains(self, outer: bytes, inner: bytes) -> bool:
        """Whether a value would hold itself: counting cannot free that."""
        seen: set[bytes] = set()
        stack = [outer]
        while stack:
            oid = stack.pop()
            if oid not in seen:
                seen.add(oid)
                stack.extend(self.values.get(oid, ()))
                owner = self.processes[owner_of(oid)]
                if owner.alive and oid in owner.table.entries:  # its earlier lives hold what they held
                    entry = owner.table.entries[oid]
                    stack.extend(ref.id for ref in entry.contained or ())
                    kept = owner.table.lineage.kept.get(oid[:-3])
                    stack.extend(kept.args if kept is not None else ())  # or its lineage
        return inner in seen

    def drop(self) -> bool:
        process, frame = self.anywhere()
        if frame.vars:
            frame.vars.pop(self.pick(len(frame.vars)))
        elif frame.views:
            frame.views.pop(self.pick(len(frame.views)))
        if self.pick(2):
            process.turn()
        return True

    def drop_many(self) -> bool:
        process, frame = self.anywhere()
        del frame.vars[self.pick(len(frame.vars) + 1) :]
        del frame.views[self.pick(len(frame.views) + 1) :]
        process.turn()
        return True

    def stash(self) -> bool:
        """Keep a ref beyond the task, in the state of the actor."""
        process, frame = self.anywhere()
        ref = self.one(frame.vars)
        if ref is not None:
            process.state.vars.append(ref)
        return True

    def get(self) -> bool:
        process, frame = self.anywhere()
        far = self.kept_elsewhere(process) if self.host > 1 and self.pick(3) else None
        frame, ref = self.one(far) if far else (frame, self.one(frame.vars))
        if ref is not None:
            process.get(frame, ref)
        return True

    def time_out(self) -> bool:
        process = self.one(self.acting)
        if process.gets:
            process.give_up(self.one(process.gets))
        return True

    def unpin(self) -> bool:
        """Room is short in a store: it asks for what is pinned and not read."""
        process = self.one(self.acting)
        node = self.one([process.node, *(n for n in self.neighbors(process.node) if self.stores[n].alive)])
        process.table.pins.give_up(LARGE * (1 + self.pick(3)), node)
        return True

    def replicate(self) -> bool:
        """put(value, replicas=2)."""
        process = self.one(self.acting)
        found = [
            oid
            for oid, entry in process.table.entries.items()
            if owner_of(oid) == process.id and oid.endswith(PUT_INDEX) and process.node in (entry.nodes or ())
        ]
        other = self.pick(len(self.stores))
        if found and other != process.node and other not in process.table.dead_nodes:
            oid = self.one(found)
            process.table.recovery.replicate(oid, other)
        return True

    def cancel(self) -> bool:
        process = self.one(self.acting)
        task = self.one(list(process.tasks.values()))
        if task is not None:
            process.cancel(task)
            process.turn()
        return True

    def pickle_outside(self) -> bool:
        """A copy that nobody counts: its process keeps the object for good."""
        process, frame = self.anywhere()
        ref = self.one(frame.vars)
        if ref is not None and len(self.outside) < 20:
            process.pinned.append(ref)
            self.outside.append(ref.id)
        return True

    def unpickle_outside(self) -> bool:
        process, frame = self.anywhere()
        oid = self.one([o for o in self.outside if o not in self.oracle.excused and owner_of(o) not in self.dead])
        if oid is not None:
            process.unpack(frame, (oid,))
        return True

    # ------------------------------------------------------------ ends

    def settle(self) -> None:
        """Let everything that is under way arrive; programs do nothing meanwhile."""
        for _ in range(200_000):
            if not self.deliver():
                for process in self.living:
                    process.turn()
                pulls = any(store.pulls for store in self.stores)
                if not any(self.channels.values()) and not pulls and not self.visits_under_way():
                    return
            self.after_event()
        raise AssertionError("it does not come to rest")

    def end(self) -> None:
        """Every task ends, every ref is dropped: nothing is left anywhere."""
        self.settle()
        self.oracle.at_rest()
        for _ in range(10_000):
            frames = [(p, f) for p in self.living for f in p.frames if f.task is not None]
            if not frames and not any(p.tasks for p in self.living):
                break
            for process, frame in frames:
                process.finish(frame, [], False, False)
                process.turn()
            del frames
            process = frame = None  # type: ignore[assignment]
            self.settle()
        for process in self.living:
            assert not process.gets, "a get that never ends"
            process.state.vars.clear()
            process.state.views.clear()
            process.pinned.clear()
        self.settle()
        self.oracle.at_rest()
        self.oracle.all_gone()


ACTIONS: tuple[Callable[[World], bool], ...] = (
    *[World.put] * 4, *[World.submit] * 6, *[World.finish] * 6, *[World.drop] * 8, World.drop_many, *[World.stash] * 2,
    *[World.get] * 7, World.time_out, World.cancel, World.unpin, World.pickle_outside, World.unpickle_outside,
    World.replicate,
)  # fmt: skip
