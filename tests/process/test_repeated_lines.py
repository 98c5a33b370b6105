"""RAY_DEDUP_LOGS=1: what several workers of a node print alike is shown once, with how often it came."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck

from hpcray.runtime.worker import log_output
from hpcray.runtime.worker.log_output import LogDeduplicator

PROGRAM = """\
import os, time
import hpcray as ray
ray.init(num_cpus=3)

@ray.remote
class A:
    def warn(self, i):
        print(f"step {i}: careful")
        print(f"only from {os.getpid()} " + "abc"[i])

actors = [A.options(num_cpus=1).remote() for _ in range(3)]
for i, actor in enumerate(actors):
    ray.get(actor.warn.remote(i))
"""


def run(tmp_path: Path, value: str) -> list[str]:
    script = tmp_path / "p.py"
    script.write_text(PROGRAM)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": value}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_line_that_differs_in_numbers_only_is_shown_once_and_counted(tmp_path: Path, leak_check: LeakCheck) -> None:
    lines = run(tmp_path, "1")
    careful = [line for line in lines if "careful" in line]
    assert careful[0].endswith("step 0: careful"), "the first one at once"
    assert len(careful) == 2 and "[repeated 2x across this node; set RAY_DEDUP_LOGS=0" in careful[1], careful
    assert len([line for line in lines if "only from" in line]) == 3


@pytest.mark.slow
def test_by_default_every_line_is_shown(tmp_path: Path, leak_check: LeakCheck) -> None:
    lines = run(tmp_path, "0")
    assert len([line for line in lines if line.endswith(": careful")]) == 3


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch):
    """Two workers that share a table, and what they have emitted."""
    table = mmap.mmap(-1, log_output._ROWS * log_output._ROW.size)
    told: list[str] = []
    made = [LogDeduplicator(table, told.append, 0.2) for _ in range(2)]

    def show(number: int, line: str) -> bool:
        monkeypatch.setattr(log_output.os, "getpid", lambda: number + 1)
        return made[number].shows(line)

    return show, told, made


def test_one_worker_may_repeat_itself(workers) -> None:
    show, told, _ = workers
    assert all(show(0, "again") for _ in range(5))
    assert not show(1, "again") and not show(1, "again")
    deadline = time.monotonic() + 30
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert told == [f"again [repeated 2x across this node; {log_output._HINT}]"]


def test_who_leaves_tells_at_once(workers) -> None:
    show, told, made = workers
    show(0, "x 1")
    show(1, "x 2")
    made[1].finish()
    assert told == ["x 2"], "what came once more only is told as it is"
    made[1].finish()
    assert len(told) == 1
