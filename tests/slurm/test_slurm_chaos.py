"""Two thousand dependent tasks and twenty actors while workers are killed and nodes are lost: the same result.

By hand, longer or harder: CHAOS_SECONDS=180 CHAOS_NODES=6 pytest -m slurm tests/slurm/test_slurm_chaos.py
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
from helpers.leaks import wait_until
from helpers.slurm import Slurm, boot, leak_checked

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]

SECONDS = float(os.environ.get("CHAOS_SECONDS", "60"))
NODES = int(os.environ.get("CHAOS_NODES", "6"))
LOST = ("n3", "n5")

# Prints a digest of all results, which depend on nothing but the program.
CHAOS = """\
import hashlib, sys, time
import numpy as np
import hpcray as ray

pause = float(sys.argv[1])
ray.init()


@ray.remote(max_retries=-1, scheduling_strategy="SPREAD")
def source(seed):
    time.sleep(pause)
    return np.random.default_rng(seed).integers(0, 1 << 30, 100_000)


@ray.remote(max_retries=-1)
def mix(left, right):
    time.sleep(pause)
    return (left * 3 + np.roll(right, 1)) % (1 << 30)


@ray.remote(max_retries=-1)
def total(value):
    time.sleep(pause)
    return int(value.sum())


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0, scheduling_strategy="SPREAD")
class Turner:
    def __init__(self, shift, table):
        self.shift = shift + int(table[0])

    def turn(self, value):
        time.sleep(pause)
        return np.roll(value, self.shift)


table = ray.put(np.full(200_000, 5))
turners = [Turner.remote(shift, table) for shift in range(20)]
layer = [source.remote(seed) for seed in range(400)]
print("ready", flush=True)
sums = []
for depth in range(3):
    mixed = [mix.remote(layer[i], layer[(i * 7 + depth + 1) % 400]) for i in range(400)]
    for i in range(0, 400, 10):
        mixed[i] = turners[(i // 10) % 20].turn.remote(mixed[i])
    sums += [total.remote(value) for value in mixed[:133]]
    layer = mixed
digest = hashlib.sha256()
for ref in sums:
    digest.update(str(ray.get(ref)).encode())
for ref in layer:
    digest.update(ray.get(ref).tobytes())
print("digest", digest.hexdigest(), sum(node["Alive"] for node in ray.nodes()), flush=True)
"""


@pytest.fixture(scope="module")
def many() -> Iterator[Slurm]:
    """A cluster of its own."""
    cluster = boot(NODES, name="chaos")
    try:
        with leak_checked(cluster, "chaos") as found:
            yield found
    finally:
        cluster.down()


def digest(slurm: Slurm, pause: float, harm: bool) -> list[str]:
    """Run the program; what it says at the end."""
    for path in slurm.place.glob("*.out"):
        path.unlink()
    job = slurm.sbatch(f"-N{NODES}", slurm.source / "slurm" / "cpu.sbatch", slurm.write(CHAOS), pause)
    slurm.wait_output(job, "ready")
    if harm:
        plague(slurm, job)
    slurm.complete(job, timeout=600)
    (line,) = (line for line in slurm.output().splitlines() if line.startswith("digest"))
    return line.split()[1:]


def plague(slurm: Slurm, job: str) -> None:
    """Kill a random worker every second, and lose two nodes on the way."""
    rng = random.Random(1)
    began = time.monotonic()
    crashes = [(SECONDS * 0.35, LOST[0]), (SECONDS * 0.65, LOST[1])]
    killed = 0
    while (elapsed := time.monotonic() - began) < SECONDS and slurm.job(job)["JobState"] == "RUNNING":
        if crashes and elapsed > crashes[0][0]:
            slurm.cluster.crash(crashes.pop(0)[1])
        workers = [pid for pids in slurm.processes("hpcray-worker").values() for pid in pids]
        if workers:
            with contextlib.suppress(OSError):
                os.kill(rng.choice(workers), signal.SIGKILL)
                killed += 1
        time.sleep(1.0)
    assert killed > SECONDS / 4, f"the program ended too early: {killed} kills"


def test_the_result_is_that_of_a_quiet_run(many: Slurm) -> None:
    quiet, alive = digest(many, 0.0, harm=False)
    assert int(alive) == NODES
    try:
        troubled, left = digest(many, SECONDS / 80, harm=True)
    finally:
        for host in LOST:
            if not many.cluster.is_up(host):
                many.run("scontrol", "update", f"nodename={host}", "state=down", "reason=crashed")
        wait_until(lambda: not many.said("squeue", "-h"), "the end of the job")
        many.cluster.boot(*(host for host in LOST if not many.cluster.is_up(host)))
        many.cluster.wait_idle()
    assert troubled == quiet
    assert int(left) == NODES - 2
