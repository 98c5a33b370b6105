"""hpcray.mpi.run in a Slurm job: the ranks are a step of the allocation."""

from __future__ import annotations

import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

PROGRAM = """\
import os, socket, sys, time
import hpcray as ray

ray.init()


class Unhappy(Exception):
    pass


def where(comm):
    return socket.gethostname(), comm.allreduce(1), comm.rank


def fail(comm):
    if comm.rank == comm.size - 1:
        raise Unhappy("as the test wants it")
    comm.barrier()


def stay(comm):
    comm.barrier()
    if not comm.rank:
        print("ready", flush=True)
    time.sleep(600)


@ray.remote
def outer():
    return ray.mpi.run(where, 5, timeout=60)


def free():
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, ray.available_resources()
        time.sleep(0.05)


if sys.argv[1] == "stay":
    ray.mpi.run(stay, 5)
print("from a task", ray.get(outer.remote()))
free()
try:
    ray.mpi.run(fail, 3, timeout=60)
except Unhappy as error:
    print("unhappy", error.rank, isinstance(error, ray.exceptions.RayTaskError))
free()
"""
LINE = (*SRUN, "-N3", "-c2", "python", "-m", "hpcray", "--num-cpus", "2")


def test_ranks_are_where_their_cpus_are(slurm: Slurm) -> None:
    ended = slurm.run(*LINE, slurm.write(PROGRAM), "end", timeout=200)
    assert ended.code == 0, ended.err
    task, unhappy = [line for line in ended.out.splitlines() if "UCX" not in line]
    seen = eval(task.removeprefix("from a task "))
    assert [(size, rank) for _, size, rank in seen] == [(5, rank) for rank in range(5)]
    hosts = sorted(host for host, _, _ in seen)
    assert hosts in (["n1", "n1", "n2", "n2", "n3"], ["n1", "n1", "n2", "n3", "n3"], ["n1", "n2", "n2", "n3", "n3"])
    assert unhappy == "unhappy 2 True"


@pytest.mark.slow
def test_scancel_ends_the_step_too(slurm: Slurm) -> None:
    line = ("srun", "-J", "nested", *LINE[1:])
    with slurm.start(*line, slurm.write(PROGRAM), "stay") as started:
        assert "ready" in started.line(), started.wait()
        slurm.said("scancel", "-n", "nested")
        assert started.wait().code != 0
    slurm.check()
