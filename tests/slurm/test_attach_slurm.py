"""Drivers on the login node, attached to a batch job through `srun --overlap`: one pipe, no port."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

DRIVER = """\
import sys
import numpy as np
import hpcray as ray

ray.init(sys.argv[1], namespace="here")
print("nodes", len(ray.nodes()), flush=True)

@ray.remote(num_cpus=0.1, scheduling_strategy="SPREAD")
def where(x):
    import socket
    return socket.gethostname(), float(np.sum(x))

block = ray.put(np.ones(2_000_000))
answers = ray.get([where.remote(block) for _ in range(40)])
print("hosts", *sorted({host for host, _ in answers}), {total for _, total in answers})

@ray.remote
class Counter:
    def __init__(self):
        self.count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.options(name="counter", lifetime="detached", get_if_exists=True, num_cpus=0).remote()
print("count", ray.get([counter.add.remote() for _ in range(100)])[-1])

@ray.remote
def big():
    print("said on a node")
    return np.arange(3_000_000)

print("sum", int(ray.get(big.remote()).sum()))
print("modules", [name for name in ("mpi4py", "ucxx", "ucp") if name in sys.modules])
"""
BREAKING = """\
import hashlib, os, sys, time
import numpy as np
import hpcray as ray

ray.init(sys.argv[1])
runs = sys.argv[2]

@ray.remote(max_retries=0, num_cpus=0.2)
def step(i, block):
    with open(runs, "ab", buffering=0) as file:
        os.write(file.fileno(), b"%d\\n" % i)
    return hashlib.sha256(bytes(block) + str(i).encode()).digest()

digest = hashlib.sha256()
print("begun", flush=True)
for i in range(int(sys.argv[3])):
    block = ray.put(np.full(300_000, i))
    digest.update(ray.get(step.remote(i, block)))
    time.sleep(0.05)
print("digest", digest.hexdigest(), flush=True)
"""


@pytest.fixture
def held(slurm: Slurm) -> Iterator[str]:
    """The id of a job of two nodes that waits for drivers."""
    hold = [*SRUN, "-N2", "python", "-m", "hpcray", "-m", "hpcray.job_submission"]
    with slurm.start("salloc", "--no-kill", "-N2", "-J", "holder", *hold) as holder:
        while not (line := holder.line()).startswith("ready for jobs: "):
            assert line or holder.wait().code == 0, line
        job = slurm.said("squeue", "-h", "-n", "holder", "-o", "%A")
        yield job
        slurm.said("scancel", job)
        holder.wait()
    slurm.wait(lambda: not slurm.said("squeue", "-h", "-n", "holder"), "the end of the job")
    slurm.check()


def _is_settled(slurm: Slurm, job: str) -> bool:
    """True if no step of an attachment is left."""
    return len(slurm.said("squeue", "-h", "-s", "-j", job, "-o", "%i").split()) <= 2


def test_a_driver_on_the_login_node_is_a_driver_like_any_other(slurm: Slurm, held: str) -> None:
    script = slurm.write(DRIVER)
    for number, address in enumerate((f"slurm://{held}", "slurm://")):
        ended = slurm.run("python", script, address)
        assert ended.code == 0, ended.out + ended.err
        lines = ended.out.splitlines()
        assert lines[0] == "nodes 2"
        assert "hosts n1 n2 {2000000.0}" in lines
        assert f"count {100 * (number + 1)}" in lines, "the detached actor is there for the next driver"
        assert "sum 4499998500000" in lines and "modules []" in lines
        assert "said on a node" in ended.out + ended.err
    slurm.wait(lambda: _is_settled(slurm, held), "the end of the steps of both attachments")


def test_without_such_a_job_the_error_says_so(slurm: Slurm) -> None:
    script = slurm.write("import sys, hpcray; hpcray.init(sys.argv[1])")
    ended = slurm.run("python", script, "slurm://4711")
    assert ended.code == 1 and "ConnectionError" in ended.err and "job 4711 does not run" in ended.err, ended.err
    ended = slurm.run("python", script, "slurm://")
    assert ended.code == 1 and "no job of yours that runs hpcray" in ended.err, ended.err


def test_the_command_attaches_and_makes_a_job_of_its_own(slurm: Slurm, held: str) -> None:
    code = "print('nodes', len(ray.nodes()), ray.get(ray.remote(lambda: 7).remote()))"
    command = ["python", "-m", "hpcray.cli", "attach"]
    ended = slurm.run(*command, held, "-c", code)
    assert ended.code == 0 and "nodes 2 7" in ended.out.splitlines(), ended.out + ended.err
    ended = slurm.run(*command, "--new", "-N", 2, "-t", "5", "-c", code)
    assert ended.code == 0 and "nodes 2 7" in ended.out.splitlines(), ended.out + ended.err
    assert "waiting for 2 node(s)" in ended.err
    slurm.wait(lambda: not slurm.said("squeue", "-h", "-n", "attached", "-o", "%A"), "the end of the new job")


@pytest.mark.slow
def test_srun_is_killed_again_and_again_and_nothing_is_lost(slurm: Slurm, held: str) -> None:
    script, runs = slurm.write(BREAKING), slurm.place / "runs"
    with slurm.start("python", script, f"slurm://{held}", runs, 120) as driver:
        assert driver.line() == "begun", driver.wait()
        killed = 0
        while killed < 5:
            time.sleep(1.0)
            for pid in slurm.processes("srun").get("ctl", []):
                if _is_bridge(pid):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
                    break
        ended = driver.wait(120)
    alone = slurm.run("python", script, f"slurm://{held}", slurm.place / "runs-alone", 120)
    assert ended.code == 0 and alone.code == 0, ended.out + ended.err + alone.err
    assert ended.out.splitlines()[-1] == alone.out.splitlines()[-1]
    assert sorted(map(int, runs.read_text().split())) == list(range(120)), "no task has run twice"
    assert "is open again" in ended.err
    slurm.wait(lambda: _is_settled(slurm, held), "the end of all steps")


def _is_bridge(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    return b"--unbuffered" in command and b"attach" in Path(f"/proc/{parent}/comm").read_bytes()
