"""A world of two nodes is cut off, or its hosts crash, while it starts, joins, works and leaves: the job goes on, and
another world joins it.

    HPCRAY_TEST_TIMES=5 pytest -m slow tests/slurm/test_worlds_lost.py

does it five times, at other moments each time.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]

TIMES = int(os.environ.get("HPCRAY_TEST_TIMES", "1"))
FIRST = int(os.environ.get("HPCRAY_TEST_SEED", "0"))

PROGRAM = """\
import contextlib, os, sys, threading, time
import numpy as np
import hpcray as ray
from hpcray import cluster
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

when, struck = sys.argv[1:]
ray.init()

@ray.remote(num_cpus=1, max_retries=-1, scheduling_strategy="SPREAD")
def make(number):
    time.sleep(0.05)
    return np.full(1 << 18, number)

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Adder:
    def add(self, array, number):
        return int(array[0]) + number

@ray.remote(num_cpus=0, max_retries=-1)
def slow():
    time.sleep(4)
    return 1

@ray.remote(num_cpus=0)
class Mortal:
    def live(self):
        return True

def alive():
    return [row for row in ray.nodes() if row["Alive"]]

over, done, first = threading.Event(), 0, len(ray.nodes())

def load():
    "Tasks and calls all the time."
    global done
    while not over.is_set():
        refs = [make.remote(number) for number in range(12)]
        sums = [adders[number % len(adders)].add.remote(ref, done) for number, ref in enumerate(refs)]
        assert ray.get(sums) == [number + done for number in range(12)]
        done += 12

def leave(row):
    with contextlib.suppress(ValueError):
        cluster.remove_nodes([row["NodeID"]])

adders = [Adder.options(scheduling_strategy="SPREAD").remote()]
loader = threading.Thread(target=load, daemon=True)
loader.start()
cluster.scale(2, cpus=2, time=10, sbatch={"exclusive": True})
kept, mortals, waits = [], [], []
if when in ("works", "leaves"):
    while len(alive()) < first + 2:
        time.sleep(0.05)
    adders += [Adder.options(scheduling_strategy="SPREAD").remote() for _ in range(3)]
    kept = [make.remote(number) for number in range(40)]
    ray.wait(kept, num_returns=len(kept), fetch_local=False)
    mortals = [Mortal.options(scheduling_strategy=On(row["NodeID"], soft=False)).remote() for row in alive()[first:]]
    assert all(ray.get([mortal.live.remote() for mortal in mortals]))
if when == "leaves":
    for row in alive()[first:]:  # it leaves when this task has ended
        waits.append(slow.options(scheduling_strategy=On(row["NodeID"], soft=True)).remote())
    time.sleep(0.3)
    for row in alive()[first:]:
        threading.Thread(target=leave, args=(row,), daemon=True).start()
print("ready", flush=True)
while not os.path.exists(struck):
    time.sleep(0.02)
began = time.monotonic()
if when in ("starts", "joins"):  # the last node that hangs, or the first that is lost, may be in a moment later
    time.sleep(10)
while len(alive()) > first:
    time.sleep(0.02)
reasons = [row["DeathReasonMessage"] for row in ray.nodes()[first:]]
print("noticed", round(time.monotonic() - began, 1), reasons, flush=True)
for mortal in mortals:
    try:
        print("mortal", ray.get(mortal.live.remote()), flush=True)
    except ray.exceptions.ActorDiedError as error:
        print("mortal died", flush=True)
before = done
cluster.scale(1, cpus=2, executor="local", wait=True)
print("another", round(time.monotonic() - began, 1), len(alive()) - first, flush=True)
while done < before + 60:
    time.sleep(0.02)
over.set()
loader.join()
assert [int(array[0]) for array in ray.get(kept)] == list(range(len(kept))) and all(ray.get(waits))
print("right", done, flush=True)
"""


@pytest.mark.parametrize("seed", range(FIRST, FIRST + TIMES))
@pytest.mark.parametrize("what", ["cut off", "crashed"])
@pytest.mark.parametrize("when", ["starts", "joins", "works", "leaves"])
def test_the_job_goes_on_without_a_world(slurm: Slurm, when: str, what: str, seed: int) -> None:
    """All of its hosts at once, as when a rack loses its switch or its power. The job has the hosts n1 and n2."""
    rng = random.Random(f"{when} {what} {seed}")
    struck, world = slurm.place / "struck", ("n3", "n4")
    job = slurm.sbatch(
        "-N2",
        "-c2",
        slurm.source / "slurm" / "cpu.sbatch",
        slurm.write(PROGRAM),
        when,
        struck,
        environ={"HPCRAY_NODE_TIMEOUT": "8" if when == "joins" else "4"},
    )
    slurm.wait_output(job, "ready")
    lost, stopped = [], []
    try:
        if when in ("starts", "joins"):
            slurm.wait(lambda: all(slurm.processes("hpcray-raylet").get(host) for host in world), "the world's nodes")
        if when == "joins":  # all know it but one, which cannot answer now: it is not in
            stopped = slurm.processes("hpcray-raylet")["n2"]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(rng.uniform(4.0, 6.0))
        else:
            time.sleep(rng.uniform(0.0, 3.5 if when == "leaves" else 2.5))
        for host in world:
            (slurm.cluster.cut if what == "cut off" else lambda one: slurm.cluster.crash(one, silent=True))(host)
            lost.append(host)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        struck.touch()
        facts = slurm.finish(job, 150.0)
    finally:
        for host in lost:
            if what == "cut off":
                slurm.cluster.heal(host)
            else:
                slurm.run("scontrol", "update", f"nodename={host}", "state=down", "reason=crashed")
        slurm.wait(lambda: not slurm.said("squeue", "-h"), "the end of all batch jobs")
        if what == "crashed":
            slurm.cluster.boot(*lost)
    logs = "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(slurm.place.rglob("nodes-*.out")))
    shown = f"{slurm.output()}{logs}"
    print(shown)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), shown
    lines = slurm.output().splitlines()
    assert any(line.startswith("another") and line.endswith(" 1") for line in lines), shown
    assert any(line.startswith("right") for line in lines), shown
    assert lines.count("mortal died") == (2 if when in ("works", "leaves") else 0), shown
    if when == "joins":
        assert "node 2 died: host n" in shown and "node 3 died: host n" in shown, f"they were not on their way\n{shown}"
    assert "Traceback" not in shown, shown
    slurm.cluster.wait_idle()
    slurm.check()
