"""Durable tasks in a job that is queued again, at any moment, or whose processes are all killed: none runs twice."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from helpers.slurm import Slurm

TASKS = 10_000
PATIENCE = 900.0

PROGRAM = """\
import hashlib, os, sys, time
import hpcray as ray

ray.init()
tasks, runs = int(sys.argv[1]), sys.argv[2]
log = os.path.join(runs, f"driver-{os.getpid()}-{time.time()}")
open(log, "w").close()


def note(name):
    with open(os.path.join(runs, f"tasks-{os.uname().nodename}-{os.getpid()}"), "a") as file:
        file.write(f"{name} {time.time():.3f}\\n")


@ray.remote(durable=True, num_cpus=0.4)
def leaf(number):
    time.sleep(0.05)
    note(f"leaf-{number}")
    return number


@ray.remote(durable=True, num_cpus=0.4)
def following(value, step):
    time.sleep(0.05)
    note(f"step-{step}")
    return value * 3 + step


@ray.remote(durable=True, num_cpus=0.4)
def joined(group, *values):
    time.sleep(0.05)
    note(f"joined-{group}")
    return hashlib.sha256(repr(values).encode()).hexdigest()


# Of ten tasks six are leaves, three form a chain behind the first leaf, and one joins them all.
groups = []
for group in range(tasks // 10):
    leaves = [leaf.remote(10 * group + index) for index in range(6)]
    last = leaves[0]
    for step in range(3):
        last = following.remote(last, 10 * group + step)
    groups.append(joined.remote(group, *leaves, last))
print("digest", hashlib.sha256("".join(ray.get(groups)).encode()).hexdigest(), flush=True)
"""


def expected(tasks: int) -> str:
    """The digest that the program prints."""
    groups = []
    for group in range(tasks // 10):
        leaves = [10 * group + index for index in range(6)]
        last = leaves[0]
        for step in range(3):
            last = last * 3 + 10 * group + step
        groups.append(hashlib.sha256(repr((*leaves, last)).encode()).hexdigest())
    return hashlib.sha256("".join(groups).encode()).hexdigest()


def ends(runs: Path) -> dict[str, list[float]]:
    """When each task has ended, in all runs of the job."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in runs.glob("tasks-*"):
        for line in path.read_text().splitlines():
            if len(parts := line.split()) == 2:
                found[parts[0]].append(float(parts[1]))
    return found


def interrupt_and_finish(slurm: Slurm, tasks: int, seed: int) -> None:
    chance = random.Random(seed)
    kept = slurm.place / f"kept-{seed}"
    runs = slurm.place / f"runs-{seed}"
    runs.mkdir()
    environ = {**slurm.environ(), "HPCRAY_DURABLE_DIR": str(kept), "HPCRAY_DRAIN_SIGNALS": "none"}
    script = slurm.source / "slurm" / "cpu.sbatch"
    given = ("-N3", "--requeue", "--open-mode=append", script, slurm.write(PROGRAM), tasks, runs)
    job = slurm.sbatch(*given, environ=environ)
    share = chance.uniform(0.1, 0.8)
    slurm.wait(lambda: len(ends(runs)) > share * tasks, "the moment of the kill", PATIENCE)
    killed = time.time()
    if seed % 4 == 3:
        for pids in slurm.processes("hpcray").values():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        slurm.finish(job, PATIENCE)
        job = slurm.sbatch(*given, environ=environ)
    else:
        slurm.said("scontrol", "requeue", job)
        slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "the requeue", PATIENCE)
    facts = slurm.finish(job, PATIENCE)
    assert facts["JobState"] == "COMPLETED", slurm.output()
    assert f"digest {expected(tasks)}" in slurm.output().splitlines(), slurm.output()
    found = ends(runs)
    assert len(found) == tasks
    again = {name: times for name, times in found.items() if len(times) > 1}
    early = {name: times for name, times in again.items() if min(times) < killed - 1}
    print(f"seed {seed}: killed at {share:.0%}, {len(again)} of {tasks} ran twice, {len(early)} of them needlessly")
    assert not early, f"seed {seed}: killed at {killed}"


@pytest.mark.slurm
@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(20))
def test_of_ten_thousand_tasks_only_those_of_the_last_second_run_again(slurm: Slurm, seed: int) -> None:
    interrupt_and_finish(slurm, TASKS, seed)
    slurm.check()


@pytest.mark.slurm
@pytest.mark.timeout(300)
def test_a_requeued_job_runs_no_task_twice(slurm: Slurm) -> None:
    interrupt_and_finish(slurm, 400, 0)
    slurm.check()
