"""The recorded inputs of an object table, given again: the same decisions; and those of a table with a defect."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from ownership_world import World

from hpcray.core.core_worker.object_entry import ValueHints
from hpcray.core.core_worker.object_pins import ObjectPins
from hpcray.core.core_worker.object_recovery import KeptCopies, Lineage, ObjectRecovery, Replication
from hpcray.core.core_worker.object_table import ObjectTable
from hpcray.core.core_worker.reference_counter import ReferenceCounter
from hpcray.diagnostics import record_replay
from hpcray.diagnostics.record_replay import Record, Recorder, inputs_of, record_table, replay


class RecordedWorld(World):
    """The object table of every process is recorded."""

    def __init__(self, *args: Any) -> None:
        self.recorders: list[Recorder] = []
        super().__init__(*args)

    def make_table(self, *args: Any, **more: Any) -> ObjectTable:  # type: ignore[override]
        table, recorder = record_table(*args, **more)
        self.recorders.append(recorder)
        return table


def history(seed: int, steps: int, losses: int = 0, lineage: int = 1 << 30, host: int = 1) -> list[Record]:
    """The records of all processes of a world that has come to its end."""
    random = Random(seed)
    world = RecordedWorld(
        random.randrange, 3 + seed % 4, 1 + max(seed % 3, host - 1), seed % 3, losses, lineage, host, 4 * (host > 1)
    )
    for _ in range(steps):
        world.step()
    world.end()
    return [recorder.record for recorder in world.recorders]


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_of_an_object_table_makes_the_same_decisions(seed: int) -> None:
    records = history(seed, 900, 3 * (seed % 2), 3000 if seed == 5 else 1 << 30)
    for record in records:
        done = replay(record)
        assert done.steps == len(record.inputs)
        assert not done.differences, done.differences[0]
    assert sum(len(record.inputs) for record in records) > 600
    nested = any(given.depth for record in records for given in record.inputs)
    assert nested or not seed % 2, "nothing came while a table was at work"


def test_a_replay_of_an_object_table_with_neighbors_makes_the_same_decisions() -> None:
    told: set[str] = set()
    for seed in range(8):
        records = history(seed, 900, 3 * (seed % 2), host=3)
        for record in records:
            done = replay(record)
            assert done.steps == len(record.inputs)
            assert not done.differences, done.differences[0]
            told.update(given.method for given in record.inputs)
    assert {"pins.use_neighbors", "pins.met", "recovery.neighbor_lost", "pins.give_up"} <= told


PARTS: dict[str, type] = {
    "": ObjectTable, "refs.": ReferenceCounter, "pins.": ObjectPins, "recovery.": ObjectRecovery, "lineage.": Lineage,
    "replicas.": Replication, "hints.": ValueHints, "copies.": KeptCopies,
}  # fmt: skip
QUESTIONS = {
    "known_locations", "refs.borrowers_on", "refs.lent_beyond", "pins.requested_node", "pins.awaits",
    "recovery.is_unsure", "recovery.processes_of", "copies.has", "recovery.all_contained", "lineage.why_not",
}  # fmt: skip
INSIDE = {
    "recovery.on_replica", "copies.answered", "copies.entry_dropped", "copies.seek", "copies.hold",
    "copies.process_died", "refs.register", "refs.end_borrow", "refs.add_borrower",
    "pins.open", "pins.open_here", "pins.unmet", "pins.opened",
    "pins.give_back", "pins.map_block", "pins.answered", "pins.lent", "pins.end_write", "pins.view_died",
    "pins.entry_gone", "pins.node_died", "refs.process_died", "recovery.process_died", "recovery.not_found",
    "recovery.not_found_at_neighbor", "recovery.lose", "recovery.revive", "recovery.set_lost", "recovery.forget_task",
    "recovery.hibernate", "recovery.set_inline_again", "recovery.free_copies", "recovery.entry_dropped",
    "recovery.found_copy", "lineage.keep", "lineage.return_gone", "replicas.pin_copy", "replicas.refuse",
    "replicas.answered", "replicas.object_gone", "replicas.fail_all", "replicas.node_died", "hints.add", "hints.adopt",
    "hints.forget",
    "hints.owner_died",
}  # fmt: skip
"""Methods that only the table and its parts call; `record_creation_sites` decides nothing."""


def test_every_method_that_takes_an_input_of_an_object_table_is_recorded() -> None:
    methods = {
        prefix + name
        for prefix, part in PARTS.items()
        for name in dir(part)
        if not name.startswith("_") and callable(getattr(part, name)) and name != "check_invariants"
    }
    bound = {"pins.begin_read", "pins.end_read"}  # attributes: a list's own methods
    no_decisions = {"record_creation_sites", "record_parents", "recovery.forget_tasks"}  # the last: after all inputs
    assert methods - QUESTIONS - INSIDE - no_decisions | bound == set(inputs_of("owner"))


def test_a_replay_finds_a_defect_of_the_reference_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    records = history(1, 600, 3)

    def forgets(self: ReferenceCounter, msg: object) -> None:
        """A borrower's end is not heard."""

    monkeypatch.setattr(ReferenceCounter, "on_borrow_drop", forgets)
    found = [difference for record in records for difference in replay(record).differences]
    assert found and any(one.method == "refs.on_borrow_drop" and "Free" in one.then for one in found)


def test_a_full_record_names_the_missing_inputs_and_the_table_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_replay, "MOST_INPUTS", 60)
    records = history(3, 600, 3)
    full = [record for record in records if record.forgotten]
    assert full and all(len(record.inputs) < 120 for record in records)
    assert "inputs are not in the record" in replay(full[0]).error
    assert not replay(full[0]).differences
