"""`hpcray dump` and `hpcray replay`: what the cores of a job were told, in a file, and the same decisions again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcray.base.ids import raylet_of, show_proc
from hpcray.core.recording import Record, Replay, replay
from hpcray.runtime.diagnosis import ATTACHED, Diagnosis

_FORMAT = "hpcray record 1"


class RecordFile(msgspec.Struct):
    """What a file holds."""

    format: str
    records: list[Record]


def fetch(diagnosis: Diagnosis) -> tuple[list[Record], list[str]]:
    """The records of all raylets, drivers and workers that answer, and what the others lack but who ends meanwhile."""
    found: list[Record] = []
    missing: list[str] = []
    for node in diagnosis.roll():
        raylet = raylet_of(node.index)
        people = {one.proc: one for one in node.people if one.kind != ATTACHED}
        told = diagnosis.ask([raylet, *people], "log") if not node.problem else {}
        if raylet not in told:
            missing.append(f"node {node.index}: {node.problem or 'it does not record; hint: HPCRAY_RECORD=1'}")
            continue
        mute = [one for one in people.values() if one.proc not in told and one.proc not in diagnosis.gone]
        missing += [f"node {node.index}: {one.title} did not answer" for one in mute]
        for proc, names in told.items():
            for name in names:
                record = _fetch_one(diagnosis, proc, name)
                if record is not None:
                    found.append(record)
                elif proc not in diagnosis.gone:
                    missing.append(f"node {node.index}: no answer while the {name} core of {show_proc(proc)} was read")
    return found, missing


def _fetch_one(diagnosis: Diagnosis, proc: bytes, name: str) -> Record | None:
    whole: Record | None = None
    while True:
        start = len(whole.inputs) if whole is not None else 0
        told = diagnosis.ask([proc], "log", name, start).get(proc)
        if told is None:
            return None
        part = msgspec.convert(told, Record)
        if whole is None:
            whole = part
        elif part.inputs:
            whole.inputs += part.inputs
            whole.forgotten = part.forgotten
        if not part.inputs or len(part.inputs) < 2:
            return whole


def write(path: Path, records: list[Record]) -> None:
    """One file for all."""
    path.write_bytes(msgspec.msgpack.encode(RecordFile(_FORMAT, records)))


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: it is none of ours, or of another version.
    """
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=RecordFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no record of hpcray: {error}") from None
    if file.format != _FORMAT:
        raise ValueError(f"{path} has the format {file.format!r}, this version reads {_FORMAT!r}")
    return file.records


def replay_all(records: list[Record]) -> list[Replay]:
    """Each core again, from its first input on."""
    return [replay(record) for record in records]


def show(results: list[Replay]) -> Iterator[str]:
    """Lines for people."""
    for done in results:
        verdict = f"{len(done.differences)} differences" if done.differences else "the same decisions"
        yield f"{done.name}: {done.steps} inputs, {verdict}{'; ' + done.error if done.error else ''}"
        for found in done.differences:
            yield f"  input {found.step}: {found.method}{found.args}"
            yield f"    then: {found.then or 'nothing'}"
            yield f"    now:  {found.now or 'nothing'}"
