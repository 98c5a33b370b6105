"""Worlds of several ranks: a job of one node grows to six by three batch jobs, and shrinks to two under load."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.slurm import Slurm, boot, leak_checked
from testcluster.cluster import why_not

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """\
import os, random, sys, time
import numpy as np
import hpcray as ray
from hpcray import cluster

grows, seed, size = sys.argv[1] == "grow", int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
ray.init()

@ray.remote(num_cpus=1, max_retries=-1)
def make(number):
    time.sleep(0.1)
    return np.full(size, number)

@ray.remote(num_cpus=1, max_retries=-1)
def add(one, other):
    return int(one[0]) + int(other[-1])

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Sum:
    "Its state is an object that the driver owns: a restart begins with that."
    def __init__(self, box):
        self.total = 0
        self.box = box
    def fold(self, array, number):
        return int(ray.get(self.box[0]).sum() % 1000 + array[0] + number)

def alive():
    return [row for row in ray.nodes() if row["Alive"]]

def pause():
    time.sleep(rng.uniform(0.0, 1.5))

kept = [make.remote(number) for number in range(40)]
sums = [Sum.options(scheduling_strategy="SPREAD").remote([ray.put(np.ones(1 << 16))]) for _ in range(4)]
if grows:
    for count in (2, 2, 1):
        cluster.scale(count, cpus=2, time=20)
        pause()
    while len(alive()) < 6:
        time.sleep(0.1)
    sums += [Sum.options(scheduling_strategy="SPREAD").remote([ray.put(np.ones(1 << 16))]) for _ in range(4)]
    print("grown", len(alive()), flush=True)
else:
    sums += sums
kept += [make.remote(number) for number in range(40, 120)]
added = [add.remote(one, other) for one, other in zip(kept, kept[1:])]
folded = [sums[number % 8].fold.remote(ref, number) for number, ref in enumerate(kept)]
if grows:
    pause()
    victims = [row["NodeID"] for row in alive()[1:]]
    rng.shuffle(victims)
    for node in victims[:4]:
        cluster.remove_nodes([node], seconds=60)
        pause()
    print("shrunk", len(alive()), flush=True)
folded += [sums[number % 8].fold.remote(ref, number) for number, ref in enumerate(kept)]
total = sum(ray.get(added)) + sum(ray.get(folded))
for ref in kept:
    total = (total * 31 + int(ray.get(ref).sum())) % (1 << 61)
print("digest", total, flush=True)
"""
TIMES = int(os.environ.get("HPCRAY_TEST_TIMES", "2"))
SIZE = int(os.environ.get("HPCRAY_TEST_BYTES", str(300 << 20))) // (120 * 8)


@pytest.fixture(scope="module")
def six() -> Iterator[Slurm]:
    """A cluster of six nodes."""
    if reason := why_not():
        pytest.skip(reason)
    cluster = boot(6, "six")
    try:
        with leak_checked(cluster, "worlds") as found:
            yield found
    finally:
        cluster.down()


def digest_of(six: Slurm, *arguments: object) -> str:
    """Run the program as a batch job of one node."""
    script = six.write(PROGRAM)
    job = six.sbatch("-N1", "-c2", "-t", "20", six.source / "slurm" / "cpu.sbatch", script, *arguments)
    facts = six.finish(job, 400.0)
    shown = "".join(path.read_text() for path in six.place.glob(f"*{job}*.out"))
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), six.output()
    if arguments[0] == "grow":
        assert "grown 6" in shown and "shrunk 2" in shown, shown
    (digest,) = [line for line in shown.splitlines() if line.startswith("digest")]
    return digest


def test_growing_and_shrinking_changes_nothing(six: Slurm) -> None:
    expected = digest_of(six, "fixed", 0, SIZE)
    for seed in range(TIMES):
        assert digest_of(six, "grow", seed, SIZE) == expected, f"seed {seed}"
    logs = "".join(path.read_text() for path in six.place.rglob("nodes-*.out"))
    assert logs.count("this node has left the job") == 4 * TIMES, logs
    six.wait(lambda: not six.run("squeue", "--noheader").out.strip(), "the end of all batch jobs")
