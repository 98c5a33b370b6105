"""Drivers outside of their job, on one host: the bridge is a child process, and there is one pipe to it.

HPCRAY_TEST_ATTACHED=1 runs the tests of the API in the same way (`engine.start`).
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import eventually
from helpers.attached import BRIDGE, JobElsewhere
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck
from helpers.ssh import SshServer

PROLOGUE = """\
import json, os, sys, time
import numpy as np
import hpcray as ray
from hpcray.attach.carrier import JobPlace
from hpcray.attach.client import attach_to

place = JobPlace("pipe://here", job="", session=sys.argv[1], bridge=tuple(json.loads(sys.argv[2])))
ray.init(attach_to(place, os.environ), namespace="here")
"""
STEPS = """\
runs = sys.argv[3]

@ray.remote(max_retries=0)
def step(i, block):
    with open(runs, "a") as file:
        file.write("%d\\n" % i)
    return i + int(block[0])

total = 0
for i in range(60):
    print("step", i, flush=True)
    total += ray.get(step.remote(i, ray.put(np.full(100_000, i))))
    time.sleep(0.05)
print("total", total)
"""


@pytest.fixture
def job(leak_check: LeakCheck) -> Iterator[JobElsewhere]:
    with JobElsewhere(num_cpus=4, object_store_memory=1 << 30) as found:
        yield found


class _Driver:
    """A program that attaches to a job. A context manager: it does not outlive the test."""

    def __init__(self, job: JobElsewhere, text: str, *words: str, bridge: tuple[str, ...] = BRIDGE, **variables: str):
        line = [sys.executable, "-c", PROLOGUE + text, job.session_dir, json.dumps(bridge), *words]
        self.child = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )  # fmt: skip

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def wait(self) -> tuple[int, str, str]:
        out, err = self.child.communicate(timeout=120)
        return self.child.returncode, out, err

    def __enter__(self) -> _Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        self.child.communicate()


def _children(pid: int, name: str) -> list[int]:
    """Processes below another one whose command line has a word."""
    rows = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    parents = {int(row.split()[0]): int(row.split()[1]) for row in rows.splitlines()}
    named = {int(row.split()[0]) for row in rows.splitlines() if name in row}

    def below(one: int) -> bool:
        while one in parents and one != pid:
            one = parents[one]
        return one == pid

    return sorted(one for one in named if one != pid and below(one))


def _far_ends(job: JobElsewhere) -> list[str]:
    return [name for name in os.listdir(job.session_dir) if re.fullmatch(r"a[0-9a-f]+\.s", name)]


def _run(job: JobElsewhere, text: str, *words: str, **variables: str) -> str:
    with _Driver(job, text, *words, **variables) as driver:
        code, out, err = driver.wait()
    assert code == 0, out + err
    return out


def test_values_of_any_size_go_both_ways_and_nothing_stays(job: JobElsewhere) -> None:
    text = """
@ray.remote
def mirrored(block):
    return block[::-1].copy()

for size in (1, 100, 8_000, 8_192, 20_000, 1_000_000, 9_999_999):
    block = np.arange(size)
    ref = ray.put(block)
    assert (ray.get(mirrored.remote(ref)) == block[::-1]).all(), size
    assert (ray.get(ref) == block).all()
refs = [ray.put(np.full(200_000, i)) for i in range(200)]
assert [int(block[-1]) for block in ray.get(refs)] == list(range(200))
del refs, ref
buffers = ray.get([mirrored.remote(np.full(150_000, i)) for i in range(50)])
assert [int(block[0]) for block in buffers] == list(range(50))
"""
    _run(job, text)
    eventually(lambda: not _far_ends(job), "the end of the far end")


def test_the_driver_needs_neither_mpi_nor_ucx(job: JobElsewhere) -> None:
    text = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("mpi4py", "ucxx", "ucp"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
assert ray.get(ray.remote(lambda: 7).remote()) == 7
print("modules", [name for name in sys.modules if name.partition(".")[0] in ("mpi4py", "ucxx", "ucp")])
"""
    assert "modules []" in _run(job, text)


def test_the_bridge_is_killed_again_and_again_and_no_task_runs_twice(job: JobElsewhere, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with _Driver(job, STEPS, str(runs)) as driver:
        for kill_at in (5, 15, 30, 45):
            while driver.line() != f"step {kill_at}":
                assert driver.child.poll() is None
            for pid in _children(driver.child.pid, "serve_bridge"):
                os.kill(pid, signal.SIGKILL)
        code, out, err = driver.wait()
    assert code == 0 and out.splitlines()[-1] == f"total {2 * sum(range(60))}", err
    assert sorted(map(int, runs.read_text().split())) == list(range(60))
    assert err.count("is open again") == 4
    eventually(lambda: not _far_ends(job), "the end of the far end")


@pytest.mark.slow
def test_a_bridge_that_hangs_is_replaced(job: JobElsewhere, tmp_path: Path) -> None:
    """As after a cable was pulled: nothing ends, and nothing comes. The far end ends the old bridge."""
    runs = tmp_path / "runs"
    with _Driver(job, STEPS, str(runs)) as driver:
        while driver.line() != "step 5":
            assert driver.child.poll() is None
        (old,) = _children(driver.child.pid, "serve_bridge")
        os.kill(old, signal.SIGSTOP)
        code, out, err = driver.wait()
    assert code == 0 and out.splitlines()[-1] == f"total {2 * sum(range(60))}", err
    assert sorted(map(int, runs.read_text().split())) == list(range(60))
    assert "nothing has come for too long" in err and "is open again" in err


@pytest.mark.slow
def test_after_the_time_to_wait_there_is_one_clear_error(job: JobElsewhere, tmp_path: Path) -> None:
    flag = tmp_path / "closed"
    gate = tmp_path / "gate"
    gate.write_text(f'#!/bin/sh\n[ -e {flag} ] && exit 7\nexec {" ".join(BRIDGE)} "$@"\n')
    gate.chmod(0o755)
    text = """
kept = ray.put(1)
print("ready", flush=True)
try:
    while True:
        ray.get(ray.remote(lambda: 1).remote())
        time.sleep(0.1)
except ray.exceptions.RayError as error:
    print("error", error)
"""
    with _Driver(job, text, bridge=(str(gate),), HPCRAY_ATTACH_WAIT="3") as driver:
        assert driver.line() == "ready"
        flag.touch()
        for pid in _children(driver.child.pid, "serve_bridge"):
            os.kill(pid, signal.SIGKILL)
        code, out, err = driver.wait()
    assert code == 0 and "error" in out, out + err
    assert "HPCRAY_ATTACH_WAIT=3" in err and "hint: init() again" in err
    eventually(lambda: not _far_ends(job), "the end of the far end")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_driver_that_is_killed_leaves_nothing_but_detached_actors(job: JobElsewhere, number: signal.Signals) -> None:
    text = """
class Named:
    def pid(self):
        return os.getpid()

mine = ray.remote(Named).options(num_cpus=0).remote()
kept = ray.remote(Named).options(num_cpus=0, name="kept", lifetime="detached", get_if_exists=True).remote()
print(*ray.get([mine.pid.remote(), kept.pid.remote()]), flush=True)
ray.get(ray.remote(time.sleep).remote(600))
"""
    with _Driver(job, text) as driver:
        mine, kept = map(int, driver.line().split())
        near = _children(driver.child.pid, "hpcray.attach")
        driver.child.send_signal(number)
        driver.wait()
    eventually(lambda: not _far_ends(job), "the end of the far end")
    eventually(lambda: not os.path.exists(f"/proc/{mine}"), "the end of its actor")
    assert os.path.exists(f"/proc/{kept}")
    eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in near), "the end of the near end")
    out = _run(job, 'print(ray.get(ray.get_actor("kept").pid.remote())); ray.kill(ray.get_actor("kept"))')
    assert int(out) == kept


@pytest.mark.slow
def test_a_driver_that_is_stopped_goes_on(job: JobElsewhere, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with _Driver(job, STEPS, str(runs)) as driver:
        while driver.line() != "step 5":
            assert driver.child.poll() is None
        driver.child.send_signal(signal.SIGSTOP)
        time.sleep(12)  # longer than the silence that an end takes for a broken pipe
        driver.child.send_signal(signal.SIGCONT)
        code, out, err = driver.wait()
    assert code == 0 and out.splitlines()[-1] == f"total {2 * sum(range(60))}", err
    assert "broken" not in err


def test_the_end_of_the_job_is_one_error(job: JobElsewhere) -> None:
    text = """
print("ready", flush=True)
try:
    ray.get(ray.remote(time.sleep).remote(600))
except ray.exceptions.RayError as error:
    print("error", type(error).__name__)
"""
    with _Driver(job, text) as driver:
        assert driver.line() == "ready"
        job.end()
        code, out, err = driver.wait()
    assert code == 0 and "error" in out, out + err
    assert "no live session" in err or "node of the job has ended" in err


@pytest.mark.slow
def test_a_small_task_is_answered_while_a_long_value_travels_slowly(job: JobElsewhere, tmp_path: Path) -> None:
    """The bridge behind a line of 20 MB/s."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        """
import os, subprocess, sys, threading, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
def copy(source, target):
    begun, done = time.monotonic(), 0
    while data := os.read(source, 1 << 15):
        os.write(target, data)
        done += len(data)
        now = time.monotonic()
        begun = max(begun, now - done / 20e6 - 0.05)
        time.sleep(max(0.0, begun + done / 20e6 - now))
    os._exit(0)
threading.Thread(target=copy, args=(0, child.stdin.fileno())).start()
copy(child.stdout.fileno(), 1)
"""
    )
    text = """
import threading
small = ray.remote(lambda: 1)
ray.get([small.remote() for _ in range(8)])
block = np.zeros(10_000_000)
for what in ("put", "get"):
    if what == "put":
        thread = threading.Thread(target=lambda: ray.get(ray.remote(len).remote(ray.put(block))))
    else:
        thread = threading.Thread(target=lambda: ray.get(ray.remote(lambda: np.zeros(10_000_000)).remote()))
    begun = time.time()
    thread.start()
    times = []
    while thread.is_alive():
        at = time.time()
        ray.get(small.remote())
        times.append(time.time() - at)
        time.sleep(0.02)
    print(what, time.time() - begun, len(times), sorted(times)[len(times) * 9 // 10], flush=True)
"""
    with _Driver(job, text, bridge=(sys.executable, str(slow), *BRIDGE)) as driver:
        code, out, err = driver.wait()
    assert code == 0, err
    for row in out.splitlines():
        _, whole, count, longest = row.split()
        assert float(whole) > 2.5 and int(count) > 5, row
        assert float(longest) < 1.0, row  # 0.5 s, and what other tests take of this machine


def test_nothing_of_an_attachment_is_in_command_lines_or_variables(job: JobElsewhere) -> None:
    with _Driver(job, "print('ready', flush=True); time.sleep(60)") as driver:
        assert driver.line() == "ready"
        (ident,) = [name[1:-2] for name in _far_ends(job)]
        assert os.stat(f"{job.session_dir}/a{ident}.s").st_mode & 0o077 == 0
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
            for kind in ("cmdline", "environ"):
                try:
                    assert ident.encode() not in Path(f"/proc/{pid}/{kind}").read_bytes(), (pid, kind)
                except OSError:
                    continue


def test_another_version_is_refused_with_what_to_install(job: JobElsewhere, tmp_path: Path) -> None:
    for field, text, expected in (
        ("version", "9.9.9", "pip install hpcray==9.9.9"),
        ("python", "3.99.0", "runs Python 3.99.0"),
    ):
        other = tmp_path / f"{field}.sh"
        said = json.dumps({"protocol": 1, "version": _version(), "python": sys.version.split()[0], field: text})
        other.write_text(f"#!/bin/sh\necho welcome to this machine\nprintf '\\036hpcray-bridge %s\\n' '{said}'\ncat\n")
        other.chmod(0o755)
        with _Driver(job, "", bridge=(str(other),)) as driver:
            code, _, err = driver.wait()
        assert code == 1 and "ConnectionError" in err and expected in err, err


def _version() -> str:
    from hpcray.attach.carrier import own_version

    return own_version()


def test_through_ssh_and_a_profile_that_prints(job: JobElsewhere, tmp_path: Path) -> None:
    """A laptop: ssh with the user's own configuration; what the login prints is skipped."""
    tmp_path.chmod(0o700)
    with SshServer(tmp_path) as server:
        there = tmp_path / "there"
        there.write_text(
            f'#!/bin/sh\necho "You have 3 quota warnings"; head -c 3000 /dev/zero | tr "\\0" x\n'
            f'exec {" ".join(BRIDGE)} --session {job.session_dir} --job "" \n'
        )
        there.chmod(0o755)
        text = """
assert ray.get(ray.remote(lambda: 7).remote()) == 7
assert ray.get(ray.remote(lambda: np.arange(3_000_000)).remote()).sum() == 4499998500000
print("well")
"""
        prologue = f"""
import os, sys, time
import numpy as np
import hpcray as ray
from hpcray.attach.carrier import JobPlace
from hpcray.attach.client import attach_to
ray.init(attach_to(JobPlace("ssh://here/1", "127.0.0.1", "1", {str(there)!r}, {tuple(server.options)!r}), os.environ))
"""
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            [sys.executable, "-c", prologue + text], capture_output=True, text=True, env=environ, timeout=120
        )
        assert ended.returncode == 0 and ended.stdout == "well\n", ended.stderr
        wrong = subprocess.run(
            [sys.executable, "-c", prologue.replace("127.0.0.1", "127.0.0.2")],
            capture_output=True, text=True, env=environ, timeout=120,
        )  # fmt: skip
        assert wrong.returncode == 1 and "ConnectionError" in wrong.stderr, wrong.stderr
