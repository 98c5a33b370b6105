"""What a noted object table was told, told again: the same decisions; and what a table with a defect decides."""

from __future__ import annotations

from random import Random

import pytest
from ownership_world import World

from hpcray.core import recording
from hpcray.core.owner.noted import METHODS, NotedTable
from hpcray.core.owner.table import ObjectTable
from hpcray.core.recording import Record, replay


class NotedWorld(World):
    """Every process notes what it is told."""

    table = NotedTable


def history(seed: int, steps: int, losses: int = 0, lineage: int = 1 << 30, host: int = 1) -> list[Record]:
    """The records of all processes of a world that has come to its end."""
    random = Random(seed)
    world = NotedWorld(
        random.randrange, 3 + seed % 4, 1 + max(seed % 3, host - 1), seed % 3, losses, lineage, host, 4 * (host > 1)
    )
    for _ in range(steps):
        world.step()
    world.end()
    return [process.table.log.record for process in world.processes.values()]


@pytest.mark.parametrize("seed", range(6))
def test_the_same_decisions_again(seed: int) -> None:
    records = history(seed, 900, 3 * (seed % 2), 3000 if seed == 5 else 1 << 30)
    for record in records:
        done = replay(record)
        assert done.steps == len(record.inputs)
        assert not done.differences, done.differences[0]
    assert sum(len(record.inputs) for record in records) > 600
    nested = any(given.depth for record in records for given in record.inputs)
    assert nested or not seed % 2, "nothing came while a table was at work"


def test_the_same_decisions_again_with_neighbours() -> None:
    told: set[str] = set()
    for seed in range(8):
        records = history(seed, 900, 3 * (seed % 2), host=3)
        for record in records:
            done = replay(record)
            assert done.steps == len(record.inputs)
            assert not done.differences, done.differences[0]
            told.update(given.method for given in record.inputs)
    assert {"visit", "met", "unmet", "give_up"} <= told


def test_no_input_is_forgotten() -> None:
    """Whoever gives the table another method says here whether it is told something by it."""
    methods = {name for name in dir(ObjectTable) if not name.startswith("_") and callable(getattr(ObjectTable, name))}
    questions = {"places", "processes_of"}
    writes = {"bury", "create", "when_freed", "visit"}
    inside = {"all_held", "dropped", "forget_task", "hibernate", "lend", "lose", "made_inline", "revive"}
    assert methods - questions - inside - writes == {*METHODS}


def test_a_defect_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    records = history(1, 600, 3)

    def forgets(self: ObjectTable, msg: object) -> None:
        """A borrower's end is not heard."""

    monkeypatch.setattr(ObjectTable, "on_borrow_drop", forgets)
    found = [difference for record in records for difference in replay(record).differences]
    assert found and any(one.method == "on_borrow_drop" and "Free" in one.then for one in found)


def test_a_full_record_says_so_and_the_table_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_INPUTS", 60)
    records = history(3, 600, 3)
    full = [record for record in records if record.forgotten]
    assert full and all(len(record.inputs) < 120 for record in records)
    assert "inputs are not in the record" in replay(full[0]).error
    assert not replay(full[0]).differences
