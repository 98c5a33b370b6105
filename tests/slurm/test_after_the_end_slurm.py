"""Jobs of Slurm that have ended: what the commands say of them on the login host, when no node is left to ask."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.slurm import Cluster, Slurm, boot, leak_checked
from testcluster.cluster import why_not

from hpcray.history.job_history import JobHistory
from hpcray.history.node_history import BETWEEN, BLOCKED, FREE, MOVING, OFF_CPU, ON_CPU, UNKNOWN
from hpcray.history.runs import find_runs

pytestmark = pytest.mark.slurm

PAYLOAD = 1448 / 1514
"""The share of the bytes on an Ethernet that are those of TCP's user."""

PROGRAM = """\
import sys, time
import hpcray as ray

ray.init()


@ray.remote
def short():
    return 1


@ray.remote
def failing():
    raise ValueError("the planted message 4711")


@ray.remote
def endless():
    time.sleep(600)


ray.get([short.remote() for _ in range(30)])
ray.wait([failing.remote()])
refs = [endless.remote() for _ in range(2)]
time.sleep(4)
print("runs", flush=True)
ray.get(refs)
"""


@pytest.fixture
def histories(slurm: Slurm) -> Path:
    return slurm.place / "histories"


def submit(slurm: Slurm, histories: Path, *options: str) -> str:
    """Submit the program on two nodes; returns the job's id when its tasks run."""
    program = slurm.write(PROGRAM)
    line = f"srun --mpi=pmix --ntasks-per-node=1 {slurm.python} -m hpcray {program}"
    script = slurm.write(f"#!/bin/bash\nexport HPCRAY_HISTORY_DIR={histories}\n{line}\n", "job.sh")
    job = slurm.sbatch("-N", "2", "--no-requeue", *options, "-o", slurm.place / "job-%j.out", script)
    output = slurm.place / f"job-{job}.out"
    slurm.wait(lambda: output.exists() and "runs" in output.read_text(), f"the tasks of job {job}")
    return job


def said(slurm: Slurm, histories: Path, *words: object) -> str:
    """What a command prints on the login host."""
    ended = slurm.run(
        slurm.python, "-m", "hpcray.cli", *words, environ={"HPCRAY_HISTORY_DIR": str(histories)}, timeout=60
    )
    assert ended.code == 0, (words, ended.out, ended.err)
    return ended.out


def test_cancelled_and_killed(slurm: Slurm, histories: Path) -> None:
    cancelled = submit(slurm, histories)
    slurm.said("scancel", cancelled)
    slurm.finish(cancelled)
    killed = submit(slurm, histories)
    for host in slurm.processes():
        slurm.kill(host)
    slurm.finish(killed)
    listed = said(slurm, histories, "jobs")
    assert re.search(rf"^{cancelled} .*CANCELLED", listed, re.M), listed
    assert re.search(rf"^{killed} .*(FAILED|NODE_FAIL|COMPLETED)", listed, re.M), listed
    for job, words in ((cancelled, ("Slurm: CANCELLED", "SIGTERM")), (killed, ("Slurm: ", "history: ", "heard"))):
        why = said(slurm, histories, "why", "--job", job)
        assert all(word in why for word in words), why
        assert "ValueError: the planted message 4711" in why and "2 nodes" in why, why
        counts = said(slurm, histories, "summary", "tasks", "--job", job)
        assert re.search(r"short +FINISHED: 30 ", counts) and re.search(r"endless +RUNNING: 2\b", counts), counts
        page = slurm.place / "report.html"
        said(slurm, histories, "report", "--job", job, page)
        assert "endless" in page.read_text() and "4711" in page.read_text()


@pytest.mark.slow
def test_time_limit_and_requeue(slurm: Slurm, histories: Path) -> None:
    job = submit(slurm, histories, "-t", "1", "--requeue")
    slurm.said("scontrol", "requeue", job)
    slurm.wait(lambda: len(list(histories.glob(f"{job}/*"))) == 2, "a second run", 200)
    facts = slurm.finish(job, 200)
    why = said(slurm, histories, "why", "--job", job)
    if facts["JobState"] == "TIMEOUT":
        assert "Slurm: TIMEOUT: it reached its time limit" in why, why
    else:  # the job has drained before, and has ended its program itself
        assert re.search(r"history: CANCELLED: the job drains \(.*time", why), why
    earlier = min(histories.glob(f"{job}/*"), key=lambda path: path.stat().st_mtime).name
    assert "put it back into the queue" in said(slurm, histories, "why", "--job", earlier)


ENDS = """\
import os, signal, sys, time
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

how = sys.argv[1]
ray.init()
(other,) = (node["NodeID"] for node in ray.nodes() if node["NodeManagerHostname"] == "n2")


@ray.remote(max_retries=0)
def work(how):
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "memory":
        kept = []
        while True:
            kept.append(bytearray(b"x" * (32 << 20)))
            time.sleep(0.02)
    if how in ("node", "head", "kill", "cancel"):
        print("runs", flush=True)
        time.sleep(600)
    return 1


@ray.remote
class Model:
    def __init__(self):
        raise ValueError("no weights of 4711")

    def step(self):
        return 1


if how == "actor":
    ray.get(Model.remote().step.remote())
if how == "raise":
    raise RuntimeError("the planted end 815")
if how == "exit":
    sys.exit(7)
if how == "program":
    os.kill(os.getpid(), signal.SIGKILL)
ray.get(work.options(scheduling_strategy=On(other, soft=False)).remote(how))
"""
PLANTED = {
    "end": (r"COMPLETED", r"the program ended by itself, without an uncaught exception"),
    "raise": (r"FAILED", r"the program raised an exception: RuntimeError: the planted end 815"),
    "exit": (r"FAILED", r"the program ended with exit code 7"),
    "actor": (r"FAILED", r"ValueError: no weights of 4711"),
    "crash": (r"FAILED", r"node 1: worker, pid \d+, died: .*SIGSEGV"),
    "memory": (r"FAILED", r"node 1: worker, pid \d+, died: .*memory"),
    "node": (r"FAILED", r"node 1 was declared dead at"),
    "head": (r"FAILED|NODE_FAIL", r"node 0"),
    "kill": (r"FAILED|NODE_FAIL", r"nothing was heard of it since|was killed|were killed"),
    "program": (r"FAILED", r"signal SIGKILL"),
    "cancel": (r"CANCELLED", r"SIGTERM"),
}
"""Ends, by what the program is told: Slurm's word, and the cause that `hpcray why` names."""
_number = itertools.count(1)


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """A cluster with accounting."""
    if reason := why_not(accounting=True):
        pytest.skip(reason)
    found = boot(2, "accounted", accounting=True)
    yield found
    found.down()


@pytest.fixture(params=["cluster", pytest.param("accounted", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A cluster without, and one with accounting."""
    with leak_checked(request.getfixturevalue(request.param), f"end{next(_number)}") as found:
        yield found


@pytest.mark.parametrize(
    "how",
    ["crash", "node", *(pytest.param(one, marks=pytest.mark.slow) for one in PLANTED if one not in ("crash", "node"))],
)
def test_the_cause_of_a_planted_end_is_named_on_the_login_host(either: Slurm, how: str) -> None:
    slurm, histories = either, either.place / "histories"
    limit = "export HPCRAY_MEMORY_LIMIT=700000000" if how == "memory" else ""
    line = (
        f"srun --mpi=pmix --ntasks-per-node=1 --kill-on-bad-exit=0 {slurm.python} -m hpcray {slurm.write(ENDS)} {how}"
    )
    text = f"#!/bin/bash\nexport HPCRAY_HISTORY_DIR={histories}\n{limit}\n{line}\n"
    output = slurm.place / "job.out"
    job = slurm.sbatch("-N", "2", "-w", "n[1-2]", "--no-requeue", "-o", output, slurm.write(text, "job.sh"))
    if how in ("node", "head", "kill", "cancel"):
        slurm.wait(lambda: output.exists() and "runs" in output.read_text(), f"the task of job {job}")
    match how:
        case "node" | "head":
            os.kill(slurm.processes("hpcray-raylet")["n2" if how == "node" else "n1"][0], signal.SIGKILL)
        case "kill":
            for host in slurm.processes():
                slurm.kill(host)
        case "cancel":
            slurm.said("scancel", job)
    slurm.finish(job)
    state, cause = PLANTED[how]
    said_state = re.search(rf"^{job} .*", said(slurm, histories, "jobs"), re.M)
    why = said(slurm, histories, "why", "--job", job)
    print(said_state and said_state[0])
    print(why)
    assert said_state is not None and re.search(state, said_state[0]), said_state
    assert re.search(cause, why), why


OVER_A_LINK = """\
import sys
import numpy as np
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

count, size = map(int, sys.argv[1:])
ray.init()
(far,) = (node for node in ray.nodes() if node["NodeManagerHostname"] == "n2")


@ray.remote(num_cpus=far["Resources"]["CPU"], scheduling_strategy=On(far["NodeID"], soft=False))
def takes(value):
    return len(value)


for number in range(count):
    assert ray.get(takes.remote(ray.put(np.full(size, number, "u1")))) == size
"""


@pytest.mark.slow
def test_arguments_over_a_slow_link_are_the_core_time_of_who_waits_for_them(slurm: Slurm, histories: Path) -> None:
    """So long as the link takes for their bytes, within 5 % of cores × wall; and that stands out."""
    count, size, rate = 4, 40 << 20, 100e6 / 8
    line = f"srun --mpi=pmix --ntasks-per-node=1 {slurm.python} -m hpcray {slurm.write(OVER_A_LINK)} {count} {size}"
    script = slurm.write(f"#!/bin/bash\nexport HPCRAY_HISTORY_DIR={histories}\n{line}\n", "job.sh")
    slurm.cluster.rate("n2", "100mbit")
    try:
        job = slurm.sbatch("-N", "2", "-w", "n[1-2]", "-o", slurm.place / "job.out", script)
        slurm.complete(job, 120)
    finally:
        slurm.cluster.rate("n2", "off")
    (run,) = find_runs(str(histories), job)
    node = JobHistory(run).nodes[1]
    assert node.began is not None
    cores, rows = node.began.total["CPU"], node.account
    whole = cores * (node.last - node.began.at)
    truth = cores * count * size / (rate * PAYLOAD)
    print({name: round(seconds / whole, 3) for name, seconds in rows.items()}, round(truth / whole, 3))
    assert sum(rows.values()) == pytest.approx(whole, rel=0.05)
    assert rows[MOVING] == pytest.approx(truth, abs=0.05 * whole), rows
    for name in (ON_CPU, OFF_CPU, BLOCKED, BETWEEN, UNKNOWN):
        assert rows[name] <= 0.05 * whole, rows
    assert max(rows.keys() - {FREE}, key=rows.__getitem__) == MOVING, rows


ENDLESS = """\
import os, sys, time
import hpcray as ray

place = sys.argv[1]
ray.init()


@ray.remote(scheduling_strategy="SPREAD")
def step(seconds):
    time.sleep(seconds)
    with open(f"{place}/{os.uname().nodename}.{os.getpid()}", "a") as file:
        file.write(f"{time.time()}\\n")


flying = [step.remote(0.05) for _ in range(8)]
while True:
    done, flying = ray.wait(flying)
    flying.append(step.remote(0.05))
    print("runs", flush=True)
"""
COMMANDS = (
    ("list", "tasks"),
    ("list", "nodes"),
    ("list", "workers"),
    ("timeline", "trace.json"),
    ("top",),
    ("status",),
    ("memory",),
    ("stack",),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_job_that_was_killed_everywhere_at_once_is_known_up_to_five_seconds_before(
    slurm: Slurm, histories: Path, seed: int
) -> None:
    """At a random moment; and each command answers on the login host."""
    ends = slurm.place / "ends"
    ends.mkdir(mode=0o777)
    line = f"srun --mpi=pmix --ntasks-per-node=1 {slurm.python} -m hpcray {slurm.write(ENDLESS)} {ends}"
    script = slurm.write(f"#!/bin/bash\nexport HPCRAY_HISTORY_DIR={histories}\n{line}\n", "job.sh")
    output = slurm.place / "job.out"
    job = slurm.sbatch("-N", "2", "--no-requeue", "-o", output, script)
    slurm.wait(lambda: output.exists() and "runs" in output.read_text(), f"the tasks of job {job}")
    time.sleep(random.Random(seed).uniform(3.0, 12.0))
    pids = [pid for pids in slurm.processes().values() for pid in pids]
    killed = time.time()
    for pid in pids:
        with contextlib.suppress(OSError):
            if not Path(f"/proc/{pid}/comm").read_text().startswith("slurm"):
                os.kill(pid, signal.SIGKILL)
    for host in slurm.processes():
        slurm.kill(host)
    slurm.finish(job)
    (run,) = find_runs(str(histories), job)
    history = JobHistory(run)
    late = {number: killed - node.last for number, node in history.nodes.items()}
    times = [float(text) for path in ends.iterdir() for text in path.read_text().split()]
    known = sum(row[0] for row in history.functions().values())
    least, most = sum(at < killed - 5.0 for at in times), len(times)
    print(f"{late} s, {known} tasks of {most}; {least} had ended 5 s before")
    assert sorted(history.nodes) == [0, 1] and all(seconds <= 5.0 for seconds in late.values()), late
    assert least <= known <= most
    why = said(slurm, histories, "why", "--job", job)
    assert "Slurm: " in why and "heard" in why, why
    counts = said(slurm, histories, "summary", "tasks", "--job", job)
    assert known == 0 or re.search(rf"step +FINISHED: {known}\b", counts), counts
    for words in COMMANDS[seed % 2 :: 2]:
        assert said(slurm, histories, *words, "--job", job)
    page = slurm.place / "report.html"
    said(slurm, histories, "report", "--job", job, page)
    assert "step" in page.read_text()
