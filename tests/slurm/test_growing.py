"""A job of one node grows by batch jobs of further nodes, and shrinks again."""

from __future__ import annotations

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

GROWING = """\
import socket, subprocess, time
import numpy as np
import hpcray as ray
from hpcray import cluster

ray.init()

@ray.remote(num_cpus=1)
def work(number, array):
    time.sleep(0.2)
    return socket.gethostname(), array + number

@ray.remote(num_cpus=1, max_restarts=-1, max_task_retries=-1)
class Counter:
    def up(self):
        return socket.gethostname()

def alive():
    return [row for row in ray.nodes() if row["Alive"]]

given = ray.put(np.zeros(1 << 18))
before = [work.remote(number, given) for number in range(60)]
(job,) = cluster.scale(3, cpus=2, time=10, wait=True)
print("grown", len(alive()), flush=True)
counters = [Counter.options(scheduling_strategy="SPREAD").remote() for _ in range(4)]
hosts = set(ray.get([counter.up.remote() for counter in counters]))
after = [work.remote(number, given) for number in range(60, 120)]
hosts |= {host for host, _ in ray.get(before + after)}
print("hosts", *sorted(hosts), flush=True)
del counters
time.sleep(1)
cluster.remove_nodes([alive()[-1]["NodeID"]])
print("shrunk", len(alive()), flush=True)
more = [work.remote(number, given) for number in range(20)]
subprocess.run(["scancel", job], check=True)  # SIGTERM: the other two leave in good order
while len(alive()) > 1:
    time.sleep(0.1)
print("alone", flush=True)
total = sum(int(array[0]) for _, array in ray.get(before + after)) + sum(int(array[0]) for _, array in ray.get(more))
print("digest", total == sum(range(120)) + sum(range(20)), flush=True)
"""


def test_a_job_grows_by_a_batch_job_and_shrinks_without_losing_work(slurm: Slurm) -> None:
    script = slurm.write(GROWING)
    job = slurm.sbatch("-N1", "-c2", slurm.source / "slurm" / "cpu.sbatch", script)
    shown = slurm.complete(job, 300.0)
    lines = [line for line in shown.splitlines() if line.split()[0:1] and not line.startswith("hpcray:")]
    assert "grown 4" in lines and "hosts n1 n2 n3 n4" in lines and "shrunk 3" in lines, shown
    assert "digest True" in lines, shown
    assert "this node has left the job" in "".join(path.read_text() for path in slurm.place.rglob("nodes-*.out"))


LEAVING_ONE = """\
import os, sys, time
import hpcray as ray
from hpcray import cluster
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

# Slurm's slurmstepd lives on for a second after each task, as on a node under load.
os.environ["SLURM_TASK_EPILOG"] = sys.argv[1]
ray.init()

@ray.remote(num_cpus=0)
class Stays:
    def pid(self):
        return os.getpid()

for leaves, stays in ((1, 2), (4, 3)):
    cluster.scale(2, cpus=2, time=10, sbatch={"exclusive": True}, wait=True)
    rows = ray.nodes()
    actor = Stays.options(scheduling_strategy=On(rows[stays]["NodeID"], soft=False)).remote()
    pid = ray.get(actor.pid.remote())
    cluster.remove_nodes([leaves])
    time.sleep(6)
    print("stays", ray.nodes()[stays]["Alive"], ray.get(actor.pid.remote()) == pid, flush=True)
    cluster.remove_nodes([stays])
"""


def test_a_node_that_leaves_does_not_take_the_others_of_its_world_with_it(slurm: Slurm) -> None:
    """Slurm's PMIx kills a whole step when it learns that one task is gone without a word. First the world's rank 0
    leaves, then its rank 1."""
    epilog, script = slurm.write("#!/bin/sh\nsleep 2\n", "epilog.sh"), slurm.write(LEAVING_ONE)
    job = slurm.sbatch("-N1", "-c2", slurm.source / "slurm" / "cpu.sbatch", script, epilog)
    facts = slurm.finish(job, 200.0)
    shown = slurm.output() + "".join(path.read_text() for path in slurm.place.rglob("nodes-*.out"))
    print(shown)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), shown
    assert slurm.output().splitlines().count("stays True True") == 2, shown
    slurm.wait(lambda: not slurm.said("squeue", "-h"), "the end of all batch jobs")


WAITING = """\
import subprocess, threading
import hpcray as ray
from hpcray import cluster
from hpcray.exceptions import SubmitError

ray.init()

def add(**options):
    try:
        cluster.scale(1, cpus=2, time=10, sbatch=options, wait=True)
    except SubmitError as error:
        print("told", error, flush=True)

done = subprocess.run(["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "true"], capture_output=True, text=True)
add(dependency=f"afternotok:{done.stdout.strip()}", comment="never")
timer = threading.Timer(3, subprocess.run, [["scancel", "--state=PENDING", "--me"]])
timer.start()
add(begin="now+1hour")
cluster.scale(1, cpus=2, time=10, sbatch={"begin": "now+1hour"})
pending = subprocess.run(["squeue", "-h", "-t", "PENDING"], capture_output=True, text=True).stdout.strip()
print("waits", pending, flush=True)
"""


def test_who_waits_for_nodes_that_slurm_will_not_give_is_told_why_and_nothing_stays_in_the_queue(slurm: Slurm) -> None:
    script = slurm.write(WAITING)
    job = slurm.sbatch("-N1", "-c2", slurm.source / "slurm" / "cpu.sbatch", script)
    shown = slurm.complete(job, 200.0)
    told = [line for line in shown.splitlines() if line.startswith("told")]
    assert len(told) == 2 and "will not start: DependencyNeverSatisfied; hint:" in told[0], shown
    assert "is CANCELLED" in told[1] and "waits " in shown, shown
    slurm.wait(lambda: not slurm.said("squeue", "-h"), "the end of all batch jobs")
