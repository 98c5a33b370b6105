"""A job without a program outlives the allocations it began with: its head moves from world to world."""

from __future__ import annotations

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

PROGRAM = """\
import sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init("auto")
process = need_process()

@ray.remote(num_cpus=1, max_retries=-1)
def add(number, array):
    time.sleep(0.05)
    return number + int(array[0])

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Echo:
    def say(self, word):
        return word

echo, given, old = Echo.remote(), ray.put(np.ones(1 << 18)), process.place.head
assert ray.get(echo.say.remote(1)) == 1
print("head", old, flush=True)
refs, count = [], 0
while process.place.head == old or count < 50:
    refs.append(add.remote(count, given))
    count += 1
    time.sleep(0.05)
assert sum(ray.get(refs)) == sum(range(1, count + 1))
assert ray.get(echo.say.remote(2)) == 2
print("moved", process.place.head != old, flush=True)
"""


def start_on(slurm: Slurm, job: str) -> str:
    """The first node of a running batch job."""
    nodes = slurm.wait_state(job, "RUNNING")["NodeList"]
    return slurm.said("scontrol", "show", "hostnames", nodes).splitlines()[0]


def add_nodes(slurm: Slurm, host: str, count: int) -> str:
    """A batch job of further nodes, which are in the job. host: of one that is. Each has a host for itself, so that a
    program there attaches to it, and not to one that will leave."""
    line = [slurm.python, "-m", "hpcray.cli", "nodes", "add", "-N", count, "--cpus-per-node", 4, "-t", 10, "--wait"]
    ended = slurm.run(*line, host=host)
    assert ended.code == 0, f"{ended.err}\n{slurm.output()}"
    return ended.out.split()[-1]


def test_a_job_outlives_the_allocations_it_began_with(slurm: Slurm) -> None:
    script = slurm.write("#!/bin/sh\nexec hpcray-launch --no-program\n", "empty.sh")
    program = slurm.write(PROGRAM)
    jobs = [slurm.sbatch("-N1", "-c4", "-t", "10", script)]
    host = start_on(slurm, jobs[0])
    status = [slurm.python, "-m", "hpcray.cli", "status"]
    slurm.wait(lambda: slurm.run(*status, host=host).code == 0, "the first node")
    for count in (2, 1):
        jobs.append(add_nodes(slurm, host, count))
        host = start_on(slurm, jobs[-1])
        with slurm.start(slurm.python, program, host=host) as running:
            assert running.line().startswith("head")
            slurm.said("scancel", jobs.pop(0))
            ended = running.wait(120)
        assert (ended.code, ended.out.strip()) == (0, "moved True"), f"{ended.err}\n{slurm.output()}"
    slurm.said("scancel", *jobs)
    slurm.wait(lambda: not slurm.run("squeue", "--noheader").out.strip(), "the end of the job")
