"""What must be true of reference counting, from a global view of who can still reach what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from hpcray.common.ids import FIRST_RETURN, PROC_BYTES, PUT_INDEX, owner_of
from hpcray.core.core_worker.object_entry import TRANSITIONS
from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, STORED, ObjectEntry

NAMES = {PENDING: "PENDING", INLINE: "INLINE", STORED: "STORED", LINEAGE_ONLY: "LINEAGE_ONLY"}

if TYPE_CHECKING:
    from ownership_process import Process
    from ownership_world import World


class CheckedState:
    """In place of `ObjectEntry.state`: each change of a state is one of `TRANSITIONS`."""

    def __init__(self, slot: Any) -> None:
        self.slot = slot

    def __get__(self, entry: Any, kind: Any = None) -> Any:
        return self.slot.__get__(entry, kind)

    def __set__(self, entry: Any, state: int) -> None:
        before = getattr(entry, "state", state)
        assert state == before or state in TRANSITIONS[before], f"a {NAMES[before]} object becomes {NAMES[state]}"
        self.slot.__set__(entry, state)


def kept_by_lineage(process: Process, oid: bytes) -> bool:
    """Whether a task may have to run again that took it, and nothing can make it again."""
    entry = process.table.entries.get(oid)
    kept = entry is not None and (oid.endswith(PUT_INDEX) or isinstance(entry.task, str))
    return kept and oid in process.table.lineage.remembered


@contextmanager
def checked_states() -> Iterator[None]:
    """Every object table of this process has its state changes checked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectEntry, "state", CheckedState(ObjectEntry.__dict__["state"]))
        yield


class Watched(dict[bytes, ObjectEntry]):
    """The entries of a table; tells the oracle what is freed."""

    def __init__(self, oracle: Oracle, process: Process) -> None:
        super().__init__()
        self.oracle, self.process = oracle, process

    def __delitem__(self, oid: bytes) -> None:
        super().__delitem__(oid)
        if owner_of(oid) == self.process.id:
            self.oracle.freed.append(oid)
            self.oracle.gone.add(oid)


class Oracle:
    """Watches one world.

    Attributes:
        excused: objects whose safety hung on a process that died: its own, what it held, what its tasks were given,
            and what is inside them. They may be lost, but must not leak. So may what is read out of a copy that was
            freed, as long as views keep that copy.
        gone: objects that their owners freed; who finds a ref to one of them later finds an error.
        forgotten: objects that were freed while lineage remembered them.
        frees: objects seen freed; a test that frees none is worth nothing.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.freed: list[bytes] = []
        self.frees = 0
        self.excused: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.forgotten: set[bytes] = set()

    def named_again(self, oids: Sequence[bytes], process: bytes) -> None:
        """A task that runs again mentions these; those of others may have been freed, ours until this moment."""
        self.freed = [oid for oid in self.freed if oid not in oids]
        self.excused |= self.closure({oid for oid in oids if owner_of(oid) != process})

    def about_to_read(self, oid: bytes, contained: Sequence[bytes]) -> None:
        """A copy is read that holds these refs; the owner holds only those of lives since it freed the object."""
        owner = self.world.processes[owner_of(oid)]
        if oid in self.forgotten and owner.alive:
            entry = owner.table.entries.get(oid)
            held = {ref.id for ref in (entry.contained if entry is not None else None) or ()}
            self.excused |= self.closure(set(contained) - held)

    # ------------------------------------------------------------ reachability

    def roots(self, process: Process) -> set[bytes]:
        """What the programs of one process can name, and what it has passed to tasks that are not done."""
        found = {ref.id for frame in process.frames for ref in frame.vars}
        found.update(ref.id for ref in process.pinned)
        found.update(get[1].id for get in process.gets)
        found.update(ref.id for _, ref in process.visiting.reading)
        for task in process.tasks.values():
            found.update(ref.id for ref in task.args + task.slots)
            made = process.table.entries.get(task.id + FIRST_RETURN)  # its earlier lives hold what they held
            found.update(ref.id for ref in (made.contained if made is not None else None) or ())
        found.update(oid for oid in process.table.lineage.remembered if kept_by_lineage(process, oid))
        return found

    def closure(self, found: set[bytes]) -> set[bytes]:
        """With everything inside, as far as a living owner still keeps it."""
        reached = set()
        stack = list(found)
        while stack:
            oid = stack.pop()
            if oid in reached:
                continue
            reached.add(oid)
            owner = self.world.processes[owner_of(oid)]
            lost = oid in self.excused and oid in self.gone
            if owner.alive and not lost:
                stack.extend(self.world.values.get(oid, ()))
                if oid in owner.table.recovery.remake_count:  # of earlier lives, too
                    stack.extend(ref.id for ref in owner.table.entries[oid].contained or ())
            for process in self.world.living if owner.node in self.world.leaving or not owner.alive else ():
                entry = process.table.entries.get(oid)  # held by who keeps it
                stack.extend(ref.id for ref in (entry.contained if entry is not None else None) or ())
        return reached

    def reachable(self) -> set[bytes]:
        return self.closure({oid for process in self.world.living for oid in self.roots(process)})

    # ------------------------------------------------------------ checks

    def after_step(self) -> None:
        """Nothing that can be reached was freed."""
        if not self.freed:
            return
        freed, self.freed = self.freed, []
        self.frees += len(freed)
        suspects = [o for o in freed if o not in self.excused and owner_of(o) not in self.world.dead]
        if suspects:
            kept = {oid for process in self.world.living for oid in process.table.copies.kept}
            early = self.reachable().intersection(suspects) - kept
            assert not early, f"freed while it can be reached: {[oid.hex() for oid in early]}"

    def about_to_die(self, process: Process) -> None:
        held = self.roots(process) | {oid for oid in process.table.entries if owner_of(oid) == process.id}
        self.excused |= self.closure(held)
        for task in process.tasks:
            self.excused.add(task + FIRST_RETURN)

    def at_rest(self) -> None:
        """Nothing is under way: every table says exactly what is so."""
        self.after_step()
        reachable = self.reachable()
        for process in self.world.living:
            self.check_table(process, reachable)
        self.check_stores()

    def check_table(self, process: Process, reachable: set[bytes]) -> None:
        table = process.table
        for name in ("unacked", "_held", "_end_reports"):
            assert not getattr(table.refs, name), f"{name} at rest: {getattr(table.refs, name)}"
        # What a store has on disk it keeps anyway, and will say so when it is asked for the object again.
        assert not table.pins.opening and not table.recovery._unsure - table.pins.files.keys()
        lent = set()
        for oid, entry in table.entries.items():
            assert entry.local == process.live[oid], (oid.hex(), entry.local, process.live[oid])
            if entry.borrowers:
                lent.add(oid)
            if owner_of(oid) == process.id:
                if oid in table.lineage.remembered and (oid not in reachable or self.was_freed(oid, entry)):
                    self.check_remembered(oid, entry)
                else:
                    self.check_owned(process, oid, entry, reachable)
            else:
                self.check_borrowed(process, oid, entry)
        assert set(table.refs._lent) == lent
        assert table.refs._unregistered <= set(table.entries)
        protected = {oid for frame in process.frames for oid in frame.protected or ()}
        assert table.refs._unregistered <= protected, "relies on a task that is done"
        self.check_lineage(process)
        missing = {oid for oid, count in process.live.items() if count and oid not in table.entries}
        assert not missing, f"{process.id.hex()} holds refs that its table does not know: {missing}"

    def check_copies(self, process: Process, oid: bytes) -> None:
        """One of the copies that the owner knows of is not evicted."""
        found = [store.node for store in self.world.stores if store.stays(oid)]
        entry = process.table.entries[oid]
        assert found or oid in self.world.vanished, f"{oid.hex()}: any copy may be evicted: {entry.nodes}"

    def check_lineage(self, process: Process) -> None:
        """What is kept to be made again is exactly what may have to be."""
        lineage, entries = process.table.lineage, process.table.entries
        mentioned: Counter[bytes] = Counter()
        for ident, kept in lineage.kept.items():
            assert kept.live or kept.running, "a task is kept for nothing"
            assert kept.running == (ident in process.tasks)
            for oid in kept.live:
                assert entries[oid].task is kept.task, (oid.hex(), entries[oid].state, entries[oid].task, kept.running)
            mentioned.update(oid for oid in kept.args if owner_of(oid) == process.id)
        assert lineage.remembered == mentioned
        assert lineage.used == sum(kept.cost for kept in lineage.kept.values())
        assert not lineage._dropping
        assert set(mentioned) <= set(entries)
        known = (
            set(process.table.recovery.remake_count)
            | set(process.table.recovery.why_lost)
            | set(process.table.replicas.held)
            | set(mentioned)
        )
        assert known <= process.table.has_side_records <= set(entries)

    def was_freed(self, oid: bytes, entry: ObjectEntry) -> bool:
        """Whether it is rightly held by nobody, though somebody can reach it: the last who held it died, and since then
        a ref to it was read out of a value that is still here, while the owner of that value is dead."""
        if not (oid in self.excused and oid in self.forgotten and entry.state in (LINEAGE_ONLY, INLINE)):
            return False
        others = [process.table for process in self.world.living if process.id != owner_of(oid)]
        known = oid not in self.gone and any(oid in t.entries and oid not in t.refs._unregistered for t in others)
        return not (entry.local or entry.borrowers or known)

    def check_remembered(self, oid: bytes, entry: ObjectEntry) -> None:
        """Kept for lineage alone."""
        mapping = entry.mapping
        if entry.state == PENDING and mapping is not None and mapping.views:
            mapping = None  # views of a node that is dead, while it is made again
        found = (entry.local, entry.borrowers, mapping, entry.nodes)
        assert entry.local <= 0 and not any(found[1:]), f"{oid.hex()} is held, but nobody can reach it: {found}"
        assert entry.state in (LINEAGE_ONLY, INLINE, PENDING), entry.state
        assert not entry.contained or entry.state == PENDING

    def check_owned(self, process: Process, oid: bytes, entry: ObjectEntry, reachable: set[bytes]) -> None:
        if entry.state == PENDING:
            assert oid[:-3] in process.tasks, f"{oid.hex()} waits for a task that is over"
            assert entry.task is process.tasks[oid[:-3]]
        else:
            if entry.state == STORED:
                self.check_copies(process, oid)
            assert oid in reachable, f"{oid.hex()} is kept, but nobody can reach it"
            held = entry.local or entry.borrowers or kept_by_lineage(process, oid)
            assert held, f"{oid.hex()} is kept for nobody"
        for borrower, count in (entry.borrowers or {}).items():
            assert len(borrower) == PROC_BYTES, f"a pledge at rest: {borrower.hex()}"
            other = self.world.processes[borrower]
            assert other.alive, f"{oid.hex()} is kept for a dead process"
            assert count == 1 and oid in other.table.entries, f"{oid.hex()} is counted {count} for {borrower.hex()}"
            assert oid not in other.table.refs._unregistered

    def check_borrowed(self, process: Process, oid: bytes, entry: ObjectEntry) -> None:
        assert entry.local > 0, f"{oid.hex()} is borrowed for nobody"
        owner = self.world.processes[owner_of(oid)]
        known = oid not in process.table.refs._unregistered and oid not in process.table.copies.kept
        if owner.alive and oid not in self.excused and known:
            kept = owner.table.entries.get(oid)
            assert kept is not None and process.id in (kept.borrowers or {}), f"{oid.hex()}: its owner does not know us"

    def check_left(self, process: Process) -> None:
        """Memory of dead nodes stays mapped as long as it is read, and no longer."""
        pins = process.table.pins
        read = {mapping.node for mapping in pins.views_without_entry.values()}
        read |= {entry.mapping.node for entry in pins.mapped.values() if entry.mapping is not None}
        assert pins.mapped == {oid: entry for oid, entry in process.table.entries.items() if entry.mapping is not None}
        assert process.visiting.left == process.table.dead_nodes - read
        assert not pins._parked and not pins._not_urgent

    def check_stores(self) -> None:
        for process in self.world.living:
            for view in [view for frame in process.frames for view in frame.views]:
                self.world.check_readable(process, view.id)
            self.check_left(process)
        for store in self.world.stores:
            for oid, pins in store.pins.items():
                for proc in pins:
                    process = self.world.processes[proc]
                    entry = process.table.entries.get(oid)
                    mapping = entry.mapping if entry is not None else None
                    mapping = mapping or process.table.pins.views_without_entry.get(oid)
                    mapped = mapping is not None and mapping.node == store.node
                    assert process.alive and mapped, f"{oid.hex()} is pinned by a process that does not read it"
                for proc in store.keepers.get(oid, ()):
                    process = self.world.processes[proc]
                    held = process.alive and store.node in process.table.replicas.held.get(oid, ())
                    held |= process.alive and store.node == process.node and oid in process.table.copies.kept
                    assert held, f"{oid.hex()} is kept at node {store.node} for nobody"
                owner = self.world.processes[owner_of(oid)]
                if owner.alive and oid in owner.table.entries and owner.table.entries[oid].state != LINEAGE_ONLY:
                    entry = owner.table.entries[oid]
                    known = [*(entry.nodes or ()), *(entry.left_at or ())]
                    unheard = entry.state == PENDING or store.untold(oid)
                    unheard = unheard or oid in store.freed  # somebody still reads an earlier life of it
                    assert unheard or store.node in known, f"{oid.hex()}: copy unknown"
                else:
                    assert pins or store.evictable(oid) or store.keepers.get(oid), (
                        f"{oid.hex()} stays in the store of node {store.node}"
                    )

    def all_gone(self) -> None:
        """No ref is left anywhere."""
        for process in self.world.living:
            assert not process.table.entries, [oid.hex() for oid in process.table.entries]
            assert not process.table.pins.views_without_entry
            assert not process.table.refs._lent
            assert not process.table.refs._unregistered
            assert not process.table.lineage.kept and not process.table.lineage.remembered
            assert not process.table.replicas.held and not process.table.replicas._waiters
            assert not process.table.copies.kept and not process.table.copies._asked
        for store in self.world.stores:
            assert not any(store.lent.values()), "a file is lent for good"
            left = [oid.hex() for oid in store.pins if not store.evictable(oid)]
            assert not left, left
