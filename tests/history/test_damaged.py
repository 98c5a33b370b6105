"""Histories that are cut, damaged, planted by another user or of another version: commands answer, or say why not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from helpers.strangers import plant

from hpcray.cli import history as commands
from hpcray.dashboard.job_pages import EndedJobPages
from hpcray.dashboard.report import report_page
from hpcray.history.block_file import FIRST_LINE, Damage, blocks, pack
from hpcray.history.job_history import JobHistory
from hpcray.history.outcome import explain, outcome
from hpcray.history.records import (
    Began,
    ClusterState,
    CoreTime,
    Ended,
    Figures,
    Functions,
    Gap,
    Line,
    NodeDeath,
    Process,
    Reason,
    Running,
    Tasks,
    decode,
    encode,
)
from hpcray.history.runs import file_name, find_runs

RUN = "0123456789abcdef"
AT = 1_790_000_000.0
FIGURES = {
    "resources": {"CPU": [4.0, 8.0], "GPU": [1.0, 2.0]},
    "cpu": {"job": 100.0, "host_count": 8},
    "memory": {"used": 2**30, "limit": 2**35},
    "store": {"used": 2**20, "capacity": 2**33, "on_disk": 2**10},
    "wire": {"sent": [10, 1000], "received": [10, 1000]},
}
RECORDS: list[Any] = [
    Began(AT, RUN, RUN, 0, 2, "host", 1, 1, "boot", "train.py", {"CPU": 8.0, "GPU": 2.0}, slurm={"SLURM_JOB_ID": "1"}),
    Process(AT, b"worker-1", 11, "worker", "joined"),
    Functions(AT + 1, {"train.step": [10, 1, 1000, {30: 9, 40: 1}]}),
    Tasks(AT + 1, b"worker-1", 11, b"", ["train.step"], [(b"t" * 12, 0, AT + 1, 100, True)], 10,
          [(b"t" * 12, "ValueError", "the planted message")]),
    Running(AT + 2, b"worker-1", 11, [(b"u" * 12, "train.step", 1.0)], {"train.step": 3}, 1),
    Figures(AT + 1, FIGURES),
    Figures(AT + 2, FIGURES),
    CoreTime(AT + 2, {"free, nothing to do": 16.0}),
    ClusterState(AT + 2, {b"actor-01": {"class_name": "train.Model", "name": "m", "state": "DEAD", "reason": "killed"}},
                 {b"group-01": {"name": "", "strategy": "PACK", "state": "CREATED", "bundles": [], "nodes": []}}, []),
    Line(AT + 2, "WARNING", "a line"),
    NodeDeath(AT + 2, 1, "no heartbeat"),
    Process(AT + 3, b"worker-1", 11, "worker", "gone", "killed", "SYSTEM_ERROR"),
    Reason(AT + 3, "exception", "RuntimeError: 815"),
    Ended(AT + 3, 1),
]  # fmt: skip
WHOLE = FIRST_LINE + b"".join(pack(encode([record])) for record in RECORDS)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only file of the only history."""
    monkeypatch.setattr(commands, "ask_slurm", lambda history: None)
    directory = tmp_path / RUN / RUN
    directory.mkdir(parents=True, mode=0o700)
    path = directory / file_name(0, 0)
    path.write_bytes(WHOLE)
    return path


def read(file: Path) -> JobHistory:
    (run,) = find_runs(str(file.parents[2]), RUN)
    return JobHistory(run)


def run_all(history: JobHistory, directory: Path) -> None:
    """Every command on a history. They may refuse, with a message; any other error is a crash."""

    def call(command: Callable[..., object], *given: object) -> None:
        try:
            command(history, *given)
        except click.ClickException as refusal:
            assert refusal.message

    for as_json in (False, True):
        for what in (None, "train.step", "train.Model"):
            call(commands.print_why, what, as_json)
        for command in (commands.print_status, commands.print_memory, commands.print_running):
            call(command, as_json)
        for kind in ("tasks", "actors"):
            call(commands.print_summary, kind, as_json)
        for kind in ("actors", "nodes", "placement-groups", "workers", "cluster-events", "tasks"):
            call(commands.print_list, kind, [], 50, as_json)
    call(commands.print_timeline, str(directory / "timeline.json"))
    call(commands.print_logs, "")
    ask_dashboard(history)
    for redact in (False, True):
        report_page(history, outcome(history), history, redact)


def ask_dashboard(history: JobHistory) -> None:
    """Every question of the pages. They may refuse with the errors that are answered as such."""
    pages = EndedJobPages(history, outcome(history))
    window = (0.0, 0.0, 100, 0, 10)
    for question, given in (
        (pages.about, ()), (pages.overview, ()), (pages.history, (0.0,)), (pages.node, (0,)), (pages.node, (1,)),
        (pages.tasks, ("",)), (pages.tasks, ("0",)), (pages.actors, ()), (pages.pids, ([0],)), (pages.objects, ("",)),
        (pages.groups, ()), (pages.timeline, ("", *window)), (pages.stacks, ("", True)), (pages.waits, ("",)),
        (pages.log_files, ("",)), (pages.log_search, ("", "x", "", "")), (pages.slurm, ()),
    ):  # fmt: skip
        try:
            msgspec.json.encode(question(*given))
        except ValueError as refusal:
            assert str(refusal)


def test_a_history_cut_at_any_byte_is_read_and_says_what_is_missing(file: Path) -> None:
    ends = [len(FIRST_LINE)]
    for record in RECORDS:
        ends.append(ends[-1] + len(pack(encode([record]))))
    for cut in range(len(WHOLE)):
        file.write_bytes(WHOLE[:cut])
        history = read(file)
        assert explain(history, outcome(history))
        whole = cut in ends or cut == 0
        assert whole or history.complaints(), cut
        if cut % 40 == 0:
            run_all(history, file.parent)


def test_a_flipped_byte_at_a_thousand_places_costs_a_part_and_no_command(file: Path) -> None:
    chance = random.Random(45)
    known = {encode(record) for record in RECORDS}
    for number in range(1000):
        data = bytearray(WHOLE)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        for content in blocks(bytes(data), Damage()):
            assert {encode(record) for record in decode(content)[0]} <= known
        file.write_bytes(data)
        history = read(file)
        assert explain(history, outcome(history))
        if number % 25 == 0:
            run_all(history, file.parent)


VALUES = (None, {}, [], "x", -1, 1e300, float("nan"), 2**63, b"b", True, {"a": 1}, [1, 2])


def parts(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The places in a record, from the outside in."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [path, *(place for name, item in items for place in parts(item, (*path, name)))]


def test_records_of_another_version_are_counted_and_end_no_command(file: Path) -> None:
    chance = random.Random(4)
    for number in range(150):
        changed = msgspec.msgpack.decode(encode(RECORDS))
        *path, last = chance.choice(parts(changed)[1:])
        holder = changed
        for step in path:
            holder = holder[step]
        if isinstance(holder, dict) and number % 2:
            del holder[last]
        else:
            holder[last] = chance.choice(VALUES)
        file.write_bytes(FIRST_LINE + pack(msgspec.msgpack.encode(changed)))
        run_all(read(file), file.parent)


@pytest.mark.parametrize("place", ["cpu", "memory", "store", "wire", "resources"])
def test_figures_without_a_part_are_said_to_be_of_another_version(file: Path, place: str) -> None:
    lesser = {name: part for name, part in FIGURES.items() if name != place}
    file.write_bytes(FIRST_LINE + pack(encode([*RECORDS, Figures(AT + 4, lesser)])))
    history = read(file)
    assert history.nodes[0].unknown == 1 and len(history.nodes[0].figures) == 2
    assert any("version" in text for text in history.complaints())
    run_all(history, file.parent)


def test_a_file_of_another_format_is_said_to_be_damaged(file: Path) -> None:
    file.write_bytes(b"hpcray-history 2\n" + os.urandom(1000))
    history = read(file)
    assert history.complaints()
    run_all(history, file.parent)


@pytest.mark.parametrize("how", ["cut", "gap"])
def test_a_job_on_a_full_disk_is_not_said_to_have_been_killed(
    file: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are gone without a word, since there was no room for one."""
    monkeypatch.setattr("hpcray.history.outcome.socket.gethostname", lambda: "host")
    records = [RECORDS[0], *RECORDS[2:6]]
    file.write_bytes(FIRST_LINE + pack(encode(records)))
    assert outcome(read(file)).state == "KILLED"
    more = pack(encode([Gap(AT + 9, "No space left on device")])) if how == "gap" else pack(encode(RECORDS))[:-1]
    file.write_bytes(FIRST_LINE + pack(encode(records)) + more)
    history = read(file)
    found, listed = outcome(history), outcome(JobHistory(history.run, whole=False))
    assert found.state == listed.state == "LAST_SEEN" and "how it ended is not known" in found.cause
    assert any("could not be written" in text or "cut off" in text for text in history.complaints())
    run_all(history, file.parent)


@pytest.mark.parametrize("how", ["owner", "link", "symbolic link", "directory"])
def test_what_another_user_has_planted_is_not_read(file: Path, tmp_path: Path, how: str) -> None:
    planted = tmp_path / "planted"
    planted.write_bytes(FIRST_LINE + pack(encode([Line(AT, "WARNING", "planted text")])))
    second = file.with_name(file_name(1, 0))
    plant(how, planted, second)
    if how == "directory":
        assert find_runs(str(tmp_path), RUN) == []
        return
    history = read(file)
    assert [line.text for _, line in history.lines] == ["a line"]
    assert how == "owner" or any(second.name in text for text in history.complaints())
    run_all(history, tmp_path)
