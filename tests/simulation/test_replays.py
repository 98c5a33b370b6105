"""Defects that were found once: what a core was told then, told again (tests/replays).

A file has the inputs of one core, as few as show the defect, and what it has to decide at the last of them: the
messages that it sends, by type and destination. They were cut out of records (`hpcray dump`) and simulations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hpcray.common.ids import make_proc
from hpcray.core.effects import Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.diagnostics.record_replay import Record, Recorder, inputs_of, make, replay

FILES = sorted((Path(__file__).parents[1] / "replays").glob("*.replay"))


def decisions(record: dict[str, Any]) -> list[list[list[str]]]:
    """What a core sends after each input: [type, destination]."""
    core = make(Record(record["core"], 0, record["made"]))
    kinds = inputs_of(record["core"])
    found = []
    for method, given in record["inputs"]:
        args = msgspec.json.decode(json.dumps(given), type=kinds[method])
        effects = getattr(core, method)(*args)
        found.append(sorted([type(e.msg).__name__, e.dest.hex()] for e in effects if isinstance(e, Send)))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_core_decides_right_what_it_once_decided_wrongly(file: Path) -> None:
    record = json.loads(file.read_text())
    assert record["why"]
    assert decisions(record)[-1] == record["decides"]


def test_every_method_of_a_core_that_takes_an_input_is_recorded() -> None:
    """A new method of a core is added to the inputs of `record_replay`, or to the queries here."""
    queries = {"available", "snapshot", "largest_objects", "check_invariants", "runs_tasks"}
    queries |= {"evicts", "has_workers", "transfers", "waiting_since"}
    # Of a head that took over from another one, or of a run that goes on from a journal:
    unrecorded = {"restore", "begin_run", "reconcile", "place_waiting"}
    for name, core in (("raylet", LocalLeaseManager), ("head", Gcs), ("store", ObjectStore)):
        methods = {one for one in dir(core) if not one.startswith("_") and callable(getattr(core, one))}
        assert methods - queries - unrecorded == set(inputs_of(name)) - {"pool.new_number"}, name


def test_there_are_replay_files() -> None:
    assert len(FILES) >= 2


def test_a_replay_gives_a_store_the_guests_of_a_dead_node() -> None:
    store, guest = ObjectStore(0, 1 << 20), make_proc(1, 7)
    recorder = Recorder("store", 0, {"config": {}, "store": {"size": 1 << 20}})
    recorder.wrap_all(store)
    store.node_died(1.0, 1, {guest: "its connection"})
    done = replay(recorder.record)
    assert (done.steps, done.differences) == (1, [])
