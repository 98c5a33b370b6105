"""The log files of a worker: the names that stand in them, whichever of the two is read first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.core.core_worker.output_lines import OutputLines
from hpcray.protocol.messages import WorkerOutput
from hpcray.runtime.worker.log_output import WorkerLogFile


class Worker:
    """Two log files, and who writes to them now."""

    def __init__(self, directory: Path) -> None:
        self.name, self.task = "", b""
        self.paths = {kind: directory / f"worker.{kind}" for kind in ("out", "err")}
        self.files = {kind: WorkerLogFile(os.open(os.devnull, os.O_WRONLY)) for kind in self.paths}
        for kind, file in self.files.items():
            other = self.files["err" if kind == "out" else "out"]
            file.open(str(self.paths[kind]), lambda: (self.name, (self.task, 1.0)), other)

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
