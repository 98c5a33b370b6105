"""Leaving under mpirun: the kills and ends of test_leaving, with two nodes, in both ways to start them."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from helpers.jobs import Job, as_module, under_mpirun
from helpers.leaks import LeakCheck, wait_until
from helpers.pids import parent_of, raylet_pid
from helpers.scripts import BUSY, write

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
    pytest.mark.timeout(180),
]

MODULE, SCRIPT = "python -m hpcray", "init() in every rank"
BOTH = pytest.mark.parametrize("mode", [MODULE, SCRIPT])


def start(mode: str, tmp_path: Path, how: str) -> Job:
    script = write(tmp_path, BUSY)
    return Job(as_module(2, script, how) if mode == MODULE else under_mpirun(2, script, how))


def wait_ready(job: Job) -> tuple[int, int]:
    """Pids of the driver and of the actor's worker, once the program is busy."""
    line = job.line()
    assert line.startswith("ready"), job.wait().err
    _, driver, actor = line.split()
    return int(driver), int(actor)


@BOTH
@pytest.mark.parametrize(("how", "code"), [("normal", 0), ("raise", 1), ("exit3", 3)])
def test_end_of_the_driver(leak_check: LeakCheck, tmp_path: Path, mode: str, how: str, code: int) -> None:
    with start(mode, tmp_path, how) as job:
        wait_ready(job)
        ended = job.wait()
    assert ended.code == code, ended.err
    leak_check.check()


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_mpirun(leak_check: LeakCheck, tmp_path: Path, mode: str, number: signal.Signals) -> None:
    with start(mode, tmp_path, "wait") as job:
        wait_ready(job)
        job.send(number)
        assert job.wait().code != 0
    leak_check.check()
    assert not Path(f"/tmp/ompi.{job.pid}").exists(), "a killed mpirun leaves its session directory to the ranks"


@BOTH
def test_user_signals_to_all_ranks_reach_the_program(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    script = write(
        tmp_path,
        "import signal, time, hpcray as ray\n"
        "ray.init()\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number) or print('got', number, flush=True))\n"
        "print('ready', flush=True)\n"
        "while not got: time.sleep(0.05)\n"  # signal.pause() would miss a signal that comes just before it
        "print(len(ray.nodes()), flush=True)\n",
    )
    with Job(as_module(2, script) if mode == MODULE else under_mpirun(2, script)) as job:
        assert job.line() == "ready"
        ranks = [pid for pid in leak_check.processes() if parent_of(pid) == job.pid]
        assert len(ranks) == 2
        for pid in sorted(ranks, reverse=True):
            os.kill(pid, signal.SIGUSR1)
        assert [job.line(), job.line()] == [f"got {int(signal.SIGUSR1)}", "2"]
        ended = job.wait()
    assert ended.code == 0, ended.err
    leak_check.check()


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signal_to_the_driver(leak_check: LeakCheck, tmp_path: Path, mode: str, number: signal.Signals) -> None:
    with start(mode, tmp_path, "wait") as job:
        driver, _ = wait_ready(job)
        os.kill(driver, number)
        ended = job.wait()
    assert ended.code in {128 + number, 1}, ended.err
    leak_check.check()


@BOTH
@pytest.mark.parametrize("node", [0, 1])
def test_death_of_a_raylet(leak_check: LeakCheck, tmp_path: Path, mode: str, node: int) -> None:
    with start(mode, tmp_path, "wait") as job:
        wait_ready(job)
        os.kill(raylet_pid(node), signal.SIGKILL)
        assert job.wait().code != 0
    leak_check.check()


@BOTH
@pytest.mark.parametrize("node", [0, 1])
def test_death_of_a_template(leak_check: LeakCheck, tmp_path: Path, mode: str, node: int) -> None:
    with start(mode, tmp_path, "wait") as job:
        wait_ready(job)
        parent = raylet_pid(node)
        (template,) = (pid for pid in leak_check.processes("hpcray-template") if parent_of(pid) == parent)
        os.kill(template, signal.SIGKILL)
        ended = job.wait()
    assert ended.code != 0
    assert "template process ended with signal 9 (SIGKILL)" in ended.err
    leak_check.check()


@BOTH
def test_death_of_a_worker_is_no_end(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    with start(mode, tmp_path, "wait") as job:
        driver, actor = wait_ready(job)
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: actor not in leak_check.processes(), "the worker's end")
        assert driver in leak_check.processes()
        os.kill(driver, signal.SIGTERM)
        job.wait()
    leak_check.check()
