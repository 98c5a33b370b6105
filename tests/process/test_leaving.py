"""Leaving on one node: whatever ends the job, nothing is left of it, and the exit code is right."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, embedded
from helpers.leaks import LeakCheck, wait_until
from helpers.scripts import BUSY, COUNTING, IDLE, write

EMBEDDED, MODULE = "embedded", "python -m hpcray"


def start(mode: str, tmp_path: Path, how: str) -> Job:
    script = write(tmp_path, BUSY)
    if mode == MODULE:
        return Job([sys.executable, "-m", "hpcray", "--num-cpus", "2", str(script), how])
    return Job(embedded(script, how))


def wait_ready(job: Job) -> tuple[int, int]:
    """Pids of the driver and of the actor's worker, once the program is busy."""
    word, driver, actor = job.line().split() or ("", "0", "0")
    assert word == "ready"
    return int(driver), int(actor)


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
@pytest.mark.parametrize(("how", "code"), [("normal", 0), ("raise", 1), ("exit3", 3), ("exit0", 0)])
def test_end_of_the_driver(leak_check: LeakCheck, tmp_path: Path, mode: str, how: str, code: int) -> None:
    with start(mode, tmp_path, how) as job:
        wait_ready(job)
        ended = job.wait()
    assert ended.code == code, ended.err
    assert ("as the test wants it" in ended.err) is (how == "raise")
    leak_check.check()


@pytest.mark.parametrize(
    ("mode", "number", "codes"),
    [
        # A shell shows the signal of a dead process as 128 + n; a raylet that ran the driver passes that on as a code.
        (EMBEDDED, signal.SIGINT, {-signal.SIGINT, 1}),
        (EMBEDDED, signal.SIGTERM, {-signal.SIGTERM}),
        (EMBEDDED, signal.SIGKILL, {-signal.SIGKILL}),
        (MODULE, signal.SIGINT, {128 + signal.SIGINT, 1}),
        (MODULE, signal.SIGTERM, {128 + signal.SIGTERM}),
        (MODULE, signal.SIGKILL, {-signal.SIGKILL}),
    ],
)
def test_signal_to_the_command(
    leak_check: LeakCheck, tmp_path: Path, mode: str, number: signal.Signals, codes: set[int]
) -> None:
    with start(mode, tmp_path, "wait") as job:
        wait_ready(job)
        job.send(number)
        ended = job.wait()
    assert ended.code in codes, ended.err
    leak_check.check()


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
def test_ctrl_c_at_a_terminal(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    script = write(tmp_path, COUNTING)
    command = [sys.executable, "-m", "hpcray", str(script)] if mode == MODULE else embedded(script)
    keyboard, terminal = os.openpty()
    child = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.write(keyboard, b"\x03")
    out, _ = child.communicate(timeout=60)
    os.close(keyboard)
    os.close(terminal)
    assert (out, child.returncode) == ("interrupts 1\n", 5), "one Ctrl-C is one KeyboardInterrupt"
    leak_check.check()


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
def test_signals_that_are_the_users_end_nothing(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    with start(mode, tmp_path, "wait") as job:
        driver, _ = wait_ready(job)
        (raylet,) = leak_check.processes("hpcray-raylet")
        # A worker has this name too, until it has been forked for a moment.
        wait_until(lambda: len(leak_check.processes("hpcray-template")) == 1, "one fork server")
        (template,) = leak_check.processes("hpcray-template")
        for pid in (raylet, template):
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGUSR2)
        os.kill(template, signal.SIGHUP)
        wait_until(lambda: not pending(raylet), "the signals' delivery")  # the fork server blocks them
        assert {driver, raylet, template} <= leak_check.processes().keys()
        job.send(signal.SIGTERM)
        assert abs(job.wait().code) & 127 == signal.SIGTERM
    leak_check.check()


def pending(pid: int) -> int:
    """The signals that a process has been sent and not got yet; 0 when it is gone too."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except FileNotFoundError:
        return 0
    return sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:")))


def test_a_signal_that_the_driver_handles_is_passed_on_to_it(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import signal, time, hpcray as ray\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2):\n"
        "    signal.signal(number, lambda number, frame: print('got', number, flush=True))\n"
        "ray.init(num_cpus=1)\n"
        "print('ready', flush=True)\n"
        # Not signal.pause(): it would outlast a signal that comes just before it, while the main thread gives up the
        # interpreter to another one.
        "while True: time.sleep(0.05)\n",
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    with Job([sys.executable, "-m", "hpcray", str(script)]) as job:
        signal.signal(signal.SIGHUP, before)
        assert job.line() == "ready"
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            job.send(number)
            assert job.line() == f"got {int(number)}"
        job.send(signal.SIGHUP)
        assert job.wait().code == 128 + signal.SIGTERM, "what a closed terminal sends ends the job"
    leak_check.check()


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
def test_under_nohup_a_closed_terminal_is_no_end(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "hpcray"] if mode == MODULE else [sys.executable]
    with Job(["sh", "-c", 'trap "" HUP; exec "$0" "$@"', *command, str(write(tmp_path, BUSY)), "wait"]) as job:
        driver, _ = wait_ready(job)
        job.send(signal.SIGHUP)
        for pid in leak_check.processes("hpcray-raylet"):
            os.kill(pid, signal.SIGHUP)
            wait_until(lambda pid=pid: not pending(pid), "the signal's delivery")
        assert driver in leak_check.processes()
        os.kill(driver, signal.SIGTERM)
        job.wait()
    leak_check.check()


def test_signal_to_a_driver_child(leak_check: LeakCheck, tmp_path: Path) -> None:
    with start(MODULE, tmp_path, "wait") as job:
        driver, _ = wait_ready(job)
        os.kill(driver, signal.SIGKILL)
        assert job.wait().code == 128 + signal.SIGKILL
    leak_check.check()


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
@pytest.mark.parametrize("name", ["hpcray-raylet", "hpcray-template"])
def test_death_of_a_system_process(leak_check: LeakCheck, tmp_path: Path, mode: str, name: str) -> None:
    with start(mode, tmp_path, "wait") as job:
        wait_ready(job)
        (pid,) = leak_check.processes(name)
        os.kill(pid, signal.SIGKILL)
        ended = job.wait()
    assert ended.code != 0
    if name == "hpcray-template":
        assert "template process ended with signal 9 (SIGKILL)" in ended.err
    leak_check.check()


@pytest.mark.parametrize("mode", [EMBEDDED, MODULE])
def test_death_of_a_worker_is_no_end(leak_check: LeakCheck, tmp_path: Path, mode: str) -> None:
    with start(mode, tmp_path, "wait") as job:
        driver, actor = wait_ready(job)
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: actor not in leak_check.processes(), "the worker's end")
        assert driver in leak_check.processes()
        job.send(signal.SIGTERM)
        job.wait()
    leak_check.check()


def test_children_of_a_dead_worker_go_with_it(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import os, subprocess, sys, hpcray as ray\n"
        "ray.init(num_cpus=1)\n"
        "@ray.remote(max_retries=0)\n"
        "def crash():\n"
        "    subprocess.Popen(['sleep', '600'])\n"
        "    os._exit(7)\n"
        "try:\n"
        "    ray.get(crash.remote())\n"
        "except ray.exceptions.WorkerCrashedError:\n"
        "    print('crashed', flush=True)\n"
        "sys.stdin.read()\n",
    )
    job = Job(embedded(script))
    with job:
        assert job.line() == "crashed"
        wait_until(lambda: not leak_check.processes("sleep"), "the end of the worker's child")
        job.wait()
    leak_check.check()


def test_stale_session_is_swept(leak_check: LeakCheck, tmp_path: Path) -> None:
    with Job(embedded(write(tmp_path, IDLE))) as job:
        wait_ready(job)
        # A worker has this name too, until it has been forked for a moment.
        wait_until(lambda: len(leak_check.processes("hpcray-template")) == 1, "one fork server")
        (template,) = leak_check.processes("hpcray-template")
        (raylet,) = leak_check.processes("hpcray-raylet")
        os.kill(template, signal.SIGSTOP)
        os.kill(raylet, signal.SIGKILL)
        os.kill(template, signal.SIGKILL)
        job.send(signal.SIGKILL)
        job.wait()
    wait_until(lambda: not leak_check.processes(), "the end of all processes")
    assert leak_check.sessions(), "nobody was left to remove the session directory"
    with start(EMBEDDED, tmp_path, "normal") as job:
        wait_ready(job)
        assert job.wait().code == 0
    leak_check.check()
