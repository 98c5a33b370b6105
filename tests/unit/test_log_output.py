"""The log files of a worker: the names that stand in them, whichever of the two is read first."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.core.core_worker.output_lines import OutputLines
from hpcray.protocol.messages import WorkerOutput
from hpcray.runtime.worker import log_output
from hpcray.runtime.worker.log_output import LogOwner, WorkerLogFile


class Worker:
    """Two log files, and who writes to them now."""

    def __init__(self, directory: Path) -> None:
        self.name, self.task = "", b""
        self.paths = {kind: directory / f"worker.{kind}" for kind in ("out", "err")}
        self.files = {kind: WorkerLogFile(os.open(os.devnull, os.O_WRONLY)) for kind in self.paths}
        for kind, file in self.files.items():
            other = self.files["err" if kind == "out" else "out"]
            file.open(str(self.paths[kind]), LogOwner(lambda: (self.name, (self.task, 1.0))), other)

    def run(self, task: str) -> None:
        self.name, self.task = f":task_name:{task}\n", task.encode()

    def prints(self, kind: str, text: str) -> None:
        assert self.files[kind].write(text.encode()) == len(text)

    def child(self, kind: str, text: str) -> None:
        os.write(self.files[kind].fileno(), text.encode())

    def shown(self, kind: str) -> list[tuple[str, str]]:
        """What a driver shows that has got this file alone."""
        data = self.paths[kind].read_bytes()
        batches = OutputLines().feed(0.0, WorkerOutput(b"worker", 7, "1.2.3.4", kind == "err", data, True))
        return [(one["task_name"] or "", line) for one in batches for line in one["lines"]]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path)
    yield made
    for file in made.files.values():
        os.close(file.fileno())


@pytest.mark.parametrize(("printed", "other"), [("out", "err"), ("err", "out")])
def test_what_children_write_has_the_name_of_the_task_that_has_printed(
    worker: Worker, printed: str, other: str
) -> None:
    for task in ("first", "second", "second"):
        worker.run(task)
        worker.prints(printed, "of Python\n")
        worker.child(other, "of a child\n")
    assert worker.shown(other) == [(task, "of a child") for task in ("first", "second", "second")]
    assert worker.shown(printed) == [(task, "of Python") for task in ("first", "second", "second")]
    assert worker.paths[other].read_text().count(":task_name:") == 2, "a name stands once"


def test_a_line_is_not_cut_by_a_name(worker: Worker) -> None:
    worker.run("bar")
    worker.prints("err", "50 %")
    worker.run("next")
    worker.prints("out", "printed\n")
    worker.prints("err", " 100 %\n")
    worker.prints("err", "done\n")
    assert worker.shown("err") == [("bar", "50 % 100 %"), ("next", "done")]


def test_the_part_of_a_task_ends_where_the_name_of_another_one_stands(worker: Worker) -> None:
    worker.run("first")
    worker.prints("err", "of the first\n")
    worker.run("second")
    worker.prints("out", "of the second\n")
    worker.run("third")
    worker.prints("err", "of the third\n")
    text = worker.paths["err"].read_text()
    parts = [worker.files["err"].parts(task) for task in (b"first", b"second", b"third")]
    assert [[text[start:end] for start, end in part] for part in parts] == [["of the first\n"], [], ["of the third\n"]]


# ---------------------------------------------------------------- output that cannot be written


@pytest.fixture
def full(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk that is full while the only element is True; a look whether that has changed takes no second."""
    state = [True]
    write = os.write

    def maybe(fd: int, data: bytes) -> int:
        if state[0] and fd in [file.fileno() for file in worker.files.values()]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(log_output.os, "write", maybe)
    monkeypatch.setattr(log_output, "_RETRY_INTERVAL", 0.0)
    return state


def test_lines_that_a_full_disk_takes_are_counted_and_said(worker: Worker, full: list[bool]) -> None:
    complaints: list[str] = []
    worker.files["out"]._owner.complain = complaints.append
    worker.run("first")
    for number in range(1000):
        worker.prints("out", f"line {number}\n")
    assert complaints == ["No space left on device"], "once"
    full[0] = False
    worker.prints("out", "again\n")
    lines = [line for _, line in worker.shown("out") if line]
    # The name of the task, which the driver does not show, is a line too.
    assert lines == ["hpcray: 1001 lines of output are lost here: No space left on device", "again"]


def test_lines_that_are_lost_at_the_end_are_said(worker: Worker, full: list[bool]) -> None:
    worker.prints("out", "one\ntwo\n")
    full[0] = False
    worker.files["out"].say_what_is_lost()
    assert worker.shown("out")[-1][1] == "hpcray: 2 lines of output are lost here: No space left on device"


def test_a_log_directory_that_is_gone_fails_nothing_and_is_used_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "_RETRY_INTERVAL", 0.0)
    complaints: list[str] = []
    file = WorkerLogFile(os.open(os.devnull, os.O_WRONLY))
    file.open(str(tmp_path / "logs" / "worker.out"), LogOwner(complain=complaints.append))
    file.write(b"lost\n")
    (tmp_path / "logs").mkdir()
    file.write(b"kept\n")
    text = (tmp_path / "logs" / "worker.out").read_text()
    assert text == "\nhpcray: 1 lines of output are lost here: No such file or directory\nkept\n"
    assert complaints == ["No such file or directory"]
    os.close(file.fileno())
