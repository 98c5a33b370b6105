"""`hpcray dump` and `hpcray replay`: inputs and decisions of a job's cores in a file, and the decisions repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hpcray.common.ids import raylet_of, show_proc
from hpcray.diagnostics.cluster_query import ATTACHED, ClusterQuery
from hpcray.diagnostics.record_replay import Record, Replay
from hpcray.platform.private_files import write_private_file

_FORMAT = "hpcray record 1"


class RecordingFile(msgspec.Struct):
    """The content of a file."""

    format: str
    records: list[Record]


def fetch(diagnosis: ClusterQuery) -> tuple[list[Record], list[str]]:
    """Fetch the records of all raylets, drivers and workers.

    Returns:
        The records, and a text for each process that did not answer and has not ended meanwhile.
    """
    found: list[Record] = []
    missing: list[str] = []
    for node in diagnosis.nodes():
        raylet = raylet_of(node.index)
        people = {one.proc: one for one in node.processes if one.kind != ATTACHED}
        answers = diagnosis.ask([raylet, *people], "log") if not node.problem else {}
        if raylet not in answers:
            missing.append(f"node {node.index}: {node.problem or 'it does not record; hint: HPCRAY_RECORD=1'}")
            continue
        silent = [one for one in people.values() if one.proc not in answers and one.proc not in diagnosis.gone]
        missing += [f"node {node.index}: {one.title} did not answer" for one in silent]
        for proc, names in answers.items():
            for name in names:
                record = _fetch_one(diagnosis, proc, name)
                if record is not None:
                    found.append(record)
                elif proc not in diagnosis.gone:
                    missing.append(f"node {node.index}: no answer while the {name} core of {show_proc(proc)} was read")
    return found, missing


def _fetch_one(diagnosis: ClusterQuery, proc: bytes, name: str) -> Record | None:
    whole: Record | None = None
    while True:
        start = len(whole.inputs) if whole is not None else 0
        answer = diagnosis.ask([proc], "log", name, start).get(proc)
        if answer is None:
            return None
        part = msgspec.convert(answer, Record)
        if whole is None:
            whole = part
        elif part.inputs:
            whole.inputs += part.inputs
            whole.forgotten = part.forgotten
        if not part.inputs or len(part.inputs) < 2:
            return whole


def write(path: Path, records: list[Record]) -> None:
    """Write all records to one file, which only this user can read: arguments of calls are in it."""
    write_private_file(str(path), msgspec.msgpack.encode(RecordingFile(_FORMAT, records)))


def read(path: Path) -> list[Record]:
    """The records of a file.

    Raises:
        ValueError: the file is no recording of hpcray, or of another version.
    """
    try:
        file = msgspec.msgpack.decode(path.read_bytes(), type=RecordingFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no record of hpcray: {error}") from None
    if file.format != _FORMAT:
        raise ValueError(f"{path} has the format {file.format!r}, this version reads {_FORMAT!r}")
    return file.records


def show(results: list[Replay]) -> Iterator[str]:
    """A line per core, and three per difference."""
    for done in results:
        verdict = f"{len(done.differences)} differences" if done.differences else "the same decisions"
        yield f"{done.name}: {done.steps} inputs, {verdict}{'; ' + done.error if done.error else ''}"
        for found in done.differences:
            yield f"  input {found.step}: {found.method}{found.args}"
            yield f"    then: {found.then or 'nothing'}"
            yield f"    now:  {found.now or 'nothing'}"
