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

from hpcray.core.effects import Send
from hpcray.core.gcs.head import HeadCore
from hpcray.core.raylet import RayletCore
from hpcray.core.recording import Record, inputs_of, make
from hpcray.core.store.node_store import NodeStore

FILES = sorted((Path(__file__).parents[1] / "replays").glob("*.replay"))


def decisions(told: dict[str, Any]) -> list[list[list[str]]]:
    """What a core sends after each input: [type, destination]."""
    core = make(Record(told["core"], 0, told["made"]))
    kinds = inputs_of(told["core"])
    found = []
    for method, given in told["inputs"]:
        args = msgspec.json.decode(json.dumps(given), type=kinds[method])
        effects = getattr(core, method)(*args)
        found.append(sorted([type(e.msg).__name__, e.dest.hex()] for e in effects if isinstance(e, Send)))
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_decided_wrongly_once(file: Path) -> None:
    told = json.loads(file.read_text())
    assert told["why"]
    assert decisions(told)[-1] == told["decides"]


def test_no_input_of_a_core_is_forgotten() -> None:
    """Whoever gives a core another method that tells it something adds it to `recording`, or to the questions here."""
    questions = {"available", "snapshot", "listing"}
    unrecorded = {"restore"}  # a head that took over from another one
    for name, core in (("raylet", RayletCore), ("head", HeadCore), ("store", NodeStore)):
        methods = {one for one in dir(core) if not one.startswith("_") and callable(getattr(core, one))}
        assert methods - questions - unrecorded == set(inputs_of(name)) - {"new_number"}, name


def test_there_are_some() -> None:
    assert len(FILES) >= 2
