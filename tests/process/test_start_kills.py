"""Any process of a job is killed while the job starts: it ends soon, and nothing of it is left.

    START_KILLS=300 pytest -m slow tests/process/test_start_kills.py

Needs root: each job gets a `/dev/shm` of its own, so that what it leaves there is known to be its.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

KILLS = int(os.environ.get("START_KILLS", "12"))
FIRST, LIMIT = 3.0, 15.0
"""Seconds after the start within which a process is killed, and those that the job then has to end."""

PROGRAM = """\
import os, subprocess, time
import hpcray as ray

ray.init()


@ray.remote(num_cpus=0.1, scheduling_strategy="SPREAD")
def work():
    subprocess.Popen(["sleep", "600.75"], start_new_session=True)
    time.sleep(0.05)
    return os.getpid()


ray.get([work.remote() for _ in range(8)])
time.sleep(3)
"""
IN_OWN_MEMORY = "mount -t tmpfs -o size=2g none /dev/shm && echo && exec sleep 86400"


@dataclass
class Start:
    """One job, and the processes that have its mark in their environment: those that it started, and no others."""

    ranks: int
    driver_rank: int
    place: Path
    keeper: int
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def begin(self, text: str = PROGRAM) -> None:
        program = self.place / "program.py"
        program.write_text(text)
        self.tmp = self.place / "t"
        self.tmp.mkdir(mode=0o700)
        environ = {
            **os.environ,
            "START_MARK": self.mark,
            "HPCRAY_TMPDIR": str(self.tmp),
            "TMPDIR": str(self.tmp),
            "HPCRAY_START_TIMEOUT": "60",
        }
        options = ["--driver-rank", str(self.driver_rank)] if self.driver_rank else []
        launcher = [str(Path(sys.executable).with_name("hpcray-launch")), "-n", str(self.ranks), *options]
        start = launcher if self.ranks else [sys.executable]
        line = ["nsenter", f"--mount=/proc/{self.keeper}/ns/mnt", "--", *start]
        self.out = (self.place / "out").open("w+")
        self.job = subprocess.Popen(
            [*line, str(program)], env=environ, cwd=self.place, stdin=subprocess.DEVNULL,
            stdout=self.out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def processes(self) -> dict[int, str]:
        mark = f"START_MARK={self.mark}".encode()
        found = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if mark not in Path("/proc", name, "environ").read_bytes():
                        continue
                    state = Path("/proc", name, "stat").read_text()
                except OSError:
                    continue
                if state.rpartition(")")[2].split()[0] not in "ZX":
                    found[int(name)] = state[state.index("(") + 1 : state.rindex(")")]
        return found

    def left(self) -> list[str]:
        memory = Path(f"/proc/{self.keeper}/root/dev/shm")
        processes = [f"{pid} {name}" for pid, name in self.processes().items()]
        return [*processes, *map(str, memory.iterdir()), *map(str, self.tmp.iterdir())]

    def said(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def end(self) -> None:
        while found := self.processes():
            for pid in found:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        self.job.kill()
        self.job.wait()
        self.out.close()


@pytest.fixture
def keeper() -> Iterator[int]:
    """A process in a mount namespace whose /dev/shm is empty."""
    if os.getuid():
        pytest.skip("needs root")
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", IN_OWN_MEMORY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def kill_at(start: Start, when: float, choose: random.Random, names: Sequence[str] = ()) -> str:
    """Start, kill one process after so many seconds (or one of those with these names), and return who that was."""
    start.begin()
    began = time.monotonic()
    time.sleep(max(0.0, began + when - time.monotonic()))
    found = start.processes()
    chosen = [pid for pid, name in sorted(found.items()) if not names or name in names]
    if not chosen:
        return ""
    pid = choose.choice(chosen)
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return ""
    return f"{pid} {found[pid]}"


def ends(start: Start) -> list[str]:
    """What is left of it after the time that it has."""
    deadline = time.monotonic() + LIMIT
    while (left := start.left()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_what_is_left_after_a_kill_while_the_job_starts(tmp_path: Path, keeper: int) -> None:
    seed = int(os.environ.get("START_SEED", "0")) or random.randrange(1 << 30)
    choose = random.Random(seed)
    problems, slowest = [], 0.0
    for number in range(KILLS):
        ranks = choose.choice((1, 2, 3))
        driver_rank = choose.randrange(ranks) if choose.random() < 0.5 else 0
        place = tmp_path / str(number)
        place.mkdir()
        start = Start(ranks, driver_rank, place, keeper)
        when = choose.uniform(0.0, FIRST)
        try:
            who = kill_at(start, when, choose)
            killed = time.monotonic()
            # A worker's death may leave the job running; then it ends by itself.
            left = ends(start)
            took = time.monotonic() - killed
            slowest = max(slowest, took)
            how = f"{number}: {ranks} ranks, --driver-rank {driver_rank}, {who} at {when:.2f} s, {took:.1f} s"
            if os.environ.get("START_KILLS"):
                print(how, "LEFT " + str(left) if left else "", flush=True)
            if left:
                problems.append(f"{how}: {left}\n{start.said()[-2000:]}")
        finally:
            start.end()
        for path in Path(f"/proc/{keeper}/root/dev/shm").iterdir():
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
    assert not problems, f"seed {seed}, the slowest {slowest:.1f} s\n" + "\n".join(problems)


ORPHANS = """\
import os, subprocess, time
import hpcray as ray

ray.init(num_cpus=1)


@ray.remote
def work():
    subprocess.Popen(["sleep", "600.75"], start_new_session=True)
    return os.getpid()


ray.get(work.remote())
print("it works", flush=True)
ray.get(ray.remote(time.sleep).remote(600))
"""


@pytest.mark.parametrize("ranks", [0, 1, 2])  # 0: without a launcher
def test_what_tasks_have_started_ends_with_a_raylet_and_its_fork_server(
    ranks: int, tmp_path: Path, keeper: int
) -> None:
    """Nothing of the node is left that could tidy up."""
    start = Start(ranks, 0, tmp_path, keeper)
    start.begin(ORPHANS)
    try:
        deadline = time.monotonic() + 60
        while "it works" not in start.said() and time.monotonic() < deadline:
            time.sleep(0.05)
        found = start.processes()
        assert "sleep" in found.values(), start.said()
        for name in ("hpcray-raylet", "hpcray-template"):
            for pid in (pid for pid, its in found.items() if its == name):
                os.kill(pid, signal.SIGKILL)
        assert not (left := ends(start)), f"{left}\n{start.said()}"
    finally:
        start.end()


@pytest.mark.parametrize("name", ["hpcray-raylet", "hpcray-template", "hpcray-ranks", "hpcray-launch"])
def test_a_job_whose_process_is_killed_while_it_starts_ends(name: str, tmp_path: Path, keeper: int) -> None:
    """The others waited for a minute, in MPI or for the head."""
    start = Start(2, 0, tmp_path, keeper)
    start.begin()
    try:
        deadline = time.monotonic() + 30
        while not (chosen := [pid for pid, its in start.processes().items() if its == name]):
            assert time.monotonic() < deadline, start.said()
            time.sleep(0.01)
        os.kill(min(chosen), signal.SIGKILL)
        assert not (left := ends(start)), f"{left}\n{start.said()}"
    finally:
        start.end()
