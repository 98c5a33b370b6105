"""A rank that cannot start, or gets SIGTERM while it starts: it ends the others, and leaves nothing behind."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

import pytest

from hpcray.runtime.node.raylet_signals import ended_by_sigterm
from hpcray.runtime.node.slurm_job import end_step
from hpcray.transport.startup import Launch

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3"}


def test_a_rank_of_srun_that_cannot_start_prints_why_and_ends_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked"
    program = tmp_path / "scancel"
    program.write_text(f'#!/bin/sh\necho "$@" >{asked}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert end_step(Launch("srun", 2, 4), ValueError("no room; hint: make some"), STEP)
    assert asked.read_text().split() == ["--signal=TERM", "7.3"], "with SIGTERM, so that they tidy up"
    said = capsys.readouterr().err
    assert said.startswith("hpcray: rank 2 on ")
    assert said.endswith(" does not start, and so the job does not: no room; hint: make some\n")


@pytest.mark.parametrize("launch", [Launch(), Launch("mpirun", 1, 4), Launch("srun", 0, 1)], ids=str)
def test_a_failing_rank_ends_no_step_where_no_rank_waits_for_it(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not end_step(launch, ValueError("no room"), STEP)
    assert capsys.readouterr().err == "", "who started it tells the error"


def test_a_failing_rank_prints_why_without_scancel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert end_step(Launch("srun", 1, 2), ValueError("no room"), STEP)


def test_sigterm_inside_mpi_removes_the_session_directory(tmp_path: Path) -> None:
    mark = tmp_path / "session"
    mark.mkdir()
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        with ended_by_sigterm(mark.rmdir):
            os.write(told, b"1")
            while True:
                ctypes.CDLL(None).sleep(600)  # as MPI_Init: no handler of Python's runs before it returns
    os.read(ready, 1)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    for fd in (ready, told):
        os.close(fd)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM
    assert not mark.exists()


def test_ended_by_sigterm_restores_the_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ended_by_sigterm(lambda: None):
        pass
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
