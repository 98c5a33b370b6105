"""The way between two nodes of a running job is cut, while both reach the head: one of them goes, the job goes on."""

from __future__ import annotations

import subprocess

import pytest
from helpers.leaks import wait_until
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm

# An actor on n2 calls one on n3 all the time; the program, on n1, reaches both.
TALK = """\
import time
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
on = {node["NodeManagerHostname"]: On(node["NodeID"], soft=True) for node in ray.nodes()}


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)
class Echo:
    def echo(self, value):
        return value


@ray.remote(num_cpus=0, max_restarts=1, max_task_retries=-1)
class Talker:
    def talk(self, other, times):
        return sum(ray.get(other.echo.remote(1)) for _ in range(times) if time.sleep(0.1) is None)


echo = Echo.options(scheduling_strategy=on["n3"]).remote()
talker = Talker.options(scheduling_strategy=on["n2"]).remote()
assert ray.get(talker.talk.remote(echo, 1)) == 1
said = talker.talk.remote(echo, 50)
print("ready", flush=True)
while all(node["Alive"] for node in ray.nodes()):
    time.sleep(0.02)
print("noticed", [node["DeathReasonMessage"] for node in ray.nodes() if not node["Alive"]], flush=True)
print("said", ray.get(said), flush=True)
"""


def cut_between(slurm: Slurm, one: str, other: str, on: bool = True) -> None:
    """From now on nothing arrives that one of the two sends to the other: it goes to an address that nobody has."""
    for here, there in ((one, other), (other, one)):
        enter = ["nsenter", "-t", str(slurm.cluster.pid_of(here)), "--net", "ip", "neigh"]
        address = slurm.said("getent", "hosts", there).split()[0]
        if on:
            where = ["replace", address, "lladdr", "02:00:00:00:99:99", "nud", "permanent", "dev", "eth0"]
        else:
            where = ["del", address, "dev", "eth0"]
        subprocess.run([*enter, *where], check=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_that_cannot_reach_each_other(slurm: Slurm) -> None:
    job = slurm.sbatch("-N4", slurm.source / "slurm" / "cpu.sbatch", slurm.write(TALK))
    slurm.wait_output(job, "ready")
    cut_between(slurm, "n2", "n3")
    try:
        slurm.wait_output(job, "noticed")
        facts = slurm.finish(job)
    finally:
        cut_between(slurm, "n2", "n3", on=False)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), f"{facts}\n{slurm.output()}"
    (said,) = [line for line in slurm.output().splitlines() if line.startswith("noticed")]
    assert "cannot reach it: it has not answered for" in said and ("host n2" in said or "host n3" in said), said
    assert "said 50" in slurm.output().splitlines()
    wait_until(lambda: not {"n2", "n3"} <= set(slurm.processes("hpcray-raylet")), "the end of one of them")
    slurm.check()
