"""Which hosts Slurm is to give to no other job: sinfo's answer, read beside the loop of a raylet."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcray.runtime.node.slurm_job import PERIOD, NodeQuery, leaving_hosts

SINFO = """#!/bin/sh
echo asked >> "$0.log"
echo "n1|host1|allocated"
echo "n2|host2.cluster|draining"
"""


class OneWatch:
    """Stands for the loop: calls what watches a descriptor until it is unwatched."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[int], None]] = {}

    def watch(self, fd: int, call: Callable[[int], None]) -> None:
        self.calls[fd] = call

    def unwatch(self, fd: int) -> None:
        del self.calls[fd]

    def run(self) -> None:
        while self.calls:
            for call in list(self.calls.values()):
                call(0)


def test_the_states_of_nodes_that_leave() -> None:
    text = "a|a|allocated\nb|B.x.org|draining@\nc|c|drained*\nd|d|mixed\ne|e|failing\nf|f|down\nnonsense\n"
    assert leaving_hosts(text) == {"b", "B", "c", "e"}


def test_one_question_at_a_time_and_not_too_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(SINFO)
    sinfo.chmod(sinfo.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    loop, found = OneWatch(), list[set[str]]()
    nodes = NodeQuery(loop, {"SLURM_JOB_NODELIST": "n[1-2]"})  # type: ignore[arg-type]
    for _ in range(3):
        nodes.query(found.append)
    loop.run()
    nodes.query(found.append)
    assert found == [{"n2", "host2"}] and not loop.calls
    assert (tmp_path / "sinfo.log").read_text() == "asked\n"
    later = time.monotonic() + PERIOD
    monkeypatch.setattr("hpcray.runtime.node.slurm_job.monotonic", lambda: later)
    nodes.query(found.append)
    nodes.close()
    assert len(found) == 1


def test_outside_of_slurm_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = OneWatch()
    NodeQuery(loop, {}).query(lambda hosts: None)  # type: ignore[arg-type]
    monkeypatch.setenv("PATH", "/nowhere")
    without = NodeQuery(loop, {"SLURM_JOB_NODELIST": "n1"})  # type: ignore[arg-type]
    without.query(lambda hosts: None)
    without.close()
    assert not loop.calls
