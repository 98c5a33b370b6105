"""A job of one node gets further nodes from Slurm as its work needs them, and gives them back."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator

import pytest
from helpers.slurm import Cluster, Slurm, boot, leak_checked

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(400)]

HEAD = """\
import json, os, subprocess, sys, time
import hpcray as ray

ray.init()

def alive():
    return [row for row in ray.nodes() if row["Alive"]]

def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said(sys.executable, "-m", "hpcray.cli", "status")
        time.sleep(0.1)

def said(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout

@ray.remote(num_cpus=1)
def work(number, seconds):
    begun = time.time()
    time.sleep(seconds)
    return number, ray.get_runtime_context().get_node_id(), begun
"""
_number = itertools.count(1)
BATCH = "#!/bin/sh\nexec hpcray-launch --srun {options} {script}\n"


@pytest.fixture(scope="module")
def six() -> Iterator[Cluster]:
    """A cluster of six nodes."""
    found = boot(6, "six")
    yield found
    found.down()


@pytest.fixture
def grown(six: Cluster) -> Iterator[Slurm]:
    """The cluster of six nodes, idle."""
    with leak_checked(six, f"a{next(_number)}") as found:
        yield found


def run(slurm: Slurm, body: str, options: str, *sbatch: object, seconds: float = 300.0, **environ: str) -> list[str]:
    """Run a program on one node whose job may grow; returns the lines that it printed."""
    script = slurm.write(HEAD + body)
    batch = slurm.write(BATCH.format(options=options, script=script), "batch.sh")
    job = slurm.sbatch("-N1", "-c4", "-t20", "-o", "job-%j.out", *sbatch, batch, environ=environ)
    slurm.complete(job, seconds)
    return [line for path in slurm.place.glob("job-*.out") for line in path.read_text().splitlines()]


def ideal(tasks: int, seconds: float, starts: list[float], slots: int) -> float:
    """When all tasks have ended if each runs as soon as a slot is free on a node that has started."""
    free = sorted(start for start in starts for _ in range(slots))
    for _ in range(tasks):
        free = sorted([free[0] + seconds, *free[1:]])
    return free[-1]


BURST = """
begun = time.time()
out = ray.get([work.remote(number, 2.0) for number in range(500)])
ended = time.time()
jobs = [row.split("|")[0] for row in said("squeue", "-h", "-r", "-t", "all", "--me", "-o", "%i|%j").split()
        if "hpcray-nodes" in row]
starts = []
for job in jobs:
    facts = said("scontrol", "show", "job", "-o", job)
    start = dict(part.split("=", 1) for part in facts.split() if "=" in part)["StartTime"]
    starts.append(time.mktime(time.strptime(start, "%Y-%m-%dT%H:%M:%S")))
grown = len(alive())
until(lambda: len(alive()) == 1, 10 + 30)
gone = time.time()
until(lambda: "hpcray-nodes" not in said("squeue", "-h", "--me", "-o", "%j"), 10)
print("facts", json.dumps({"begun": begun, "ended": ended, "starts": starts, "grown": grown, "gone": gone,
      "right": [number for number, _, _ in out] == list(range(500))}), flush=True)
"""


def test_a_burst_grows_to_six_nodes_and_ends_near_the_ideal_schedule(grown: Slurm) -> None:
    lines = run(grown, BURST, "--num-cpus 4 --min-nodes 1 --max-nodes 6 --idle-node-timeout 10")
    facts = json.loads(next(line for line in lines if line.startswith("facts")).partition(" ")[2])
    assert facts["right"] and facts["grown"] == 6 and len(facts["starts"]) == 5, lines
    best = ideal(500, 2.0, [facts["begun"], *facts["starts"]], 4) - facts["begun"]
    took, gone = facts["ended"] - facts["begun"], facts["gone"] - facts["ended"]
    print(f"{took / best:.2f} of the ideal; gone after {gone:.1f} s")
    assert took < 1.3 * best, "\n".join(map(str, [facts, best, *lines]))
    assert gone < 10 + 30


FULL = """
refs = [work.remote(number, 3.0) for number in range(40)]
def pending():
    shown = json.loads(said(sys.executable, "-m", "hpcray.cli", "status", "--json"))
    return shown["autoscaler"]["pending"]
until(lambda: len(pending()) == 2)
print("shown", said(sys.executable, "-m", "hpcray.cli", "status"), flush=True)
ray.get(refs)
until(lambda: not pending())
until(lambda: "hpcray-nodes" not in said("squeue", "-h", "--me", "-o", "%j"))
print("nodes", len(alive()), flush=True)
"""


def test_what_waits_in_a_full_queue_is_cancelled_when_the_demand_has_gone(grown: Slurm) -> None:
    blocker = grown.sbatch("-N5", "--exclusive", "-t20", "-o", "/dev/null", "--wrap", "sleep 1000")
    grown.wait_state(blocker, "RUNNING")
    lines = run(grown, FULL, "--max-nodes 3 --idle-node-timeout 5")
    grown.said("scancel", blocker)
    assert "nodes 1" in lines, lines
    text = "\n".join(lines)
    assert "Pending:" in text and "QUEUED" in text and re.search(r"\((Resources|Priority)\)", text), text


TYPES = """
@ray.remote(num_gpus=1, num_cpus=1)
def on_gpu():
    return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

@ray.remote(num_cpus=1, label_selector={"disk": "fast"})
def on_fast():
    return ray.get_runtime_context().get_node_id()

(node, gpus), fast = ray.get([on_gpu.remote(), on_fast.remote()], timeout=120)
labels = {row["NodeID"]: row["Labels"] for row in alive()}
print("types", labels[node]["ray.io/node-group"], gpus, labels[fast]["ray.io/node-group"], len(alive()), flush=True)
@ray.remote(resources={"nothing": 1})
def never():
    pass
begun = time.monotonic()
try:
    ray.get(never.remote(), timeout=60)
except ray.exceptions.TaskUnschedulableError as error:
    print("error", "nor any that may come" in str(error), time.monotonic() - begun < 10, flush=True)
"""


def test_types_of_nodes_come_for_those_who_need_them_and_what_none_has_is_an_error(grown: Slurm) -> None:
    types = {
        "fast": {"resources": {"CPU": 2}, "labels": {"disk": "fast"}, "node_config": {"partition": "main"}},
        "gpus": {"resources": {"CPU": 2, "GPU": 2}, "max_workers": 1, "node_config": {"time": 10}},
    }
    path = grown.write(json.dumps({"available_node_types": types}), "types.json")
    lines = run(grown, TYPES, f"--max-nodes 4 --node-types {path}")
    assert "types gpus 1 fast 3" in lines and "error True True" in lines, lines


FAILING = """
ref = work.options(num_cpus=8).remote(0, 0.1)
ready, _ = ray.wait([ref], timeout=45)
shown = json.loads(said(sys.executable, "-m", "hpcray.cli", "status", "--json"))
failures = shown["autoscaler"]["failures"]
print("facts", json.dumps([len(ready), len(failures), failures]), flush=True)
"""


def test_batch_jobs_that_end_at_once_are_not_submitted_without_end_and_are_reported_once(grown: Slurm) -> None:
    types = {
        "bad": {
            "resources": {"CPU": 8},
            "node_config": {"cpus-per-task": 1, "chdir": "/nowhere/at/all", "output": "/nowhere/x"},
        }
    }
    path = grown.write(json.dumps(types), "types.json")
    lines = run(grown, FAILING, f"--max-nodes 6 --node-types {path}")
    ready, failures, _ = json.loads(next(line for line in lines if line.startswith("facts")).partition(" ")[2])
    assert ready == 0 and 2 <= failures <= 4, lines
    assert sum("could be started" in line for line in lines) == 1, lines


CANCELLED = """
refs = [work.remote(number, 1.0) for number in range(60)]
until(lambda: len(alive()) == 3)
jobs = [row.split("|")[0] for row in said("squeue", "-h", "-r", "--me", "-o", "%i|%j").split() if "hpcray-nodes" in row]
subprocess.run(["scancel", jobs[0]], check=True)
until(lambda: len(alive()) == 2)
print("right", [number for number, _, _ in ray.get(refs)] == list(range(60)), len(alive()), flush=True)
"""


def test_work_goes_on_when_a_user_cancels_one_of_the_nodes(grown: Slurm) -> None:
    lines = run(grown, CANCELLED, "--max-nodes 3 --idle-node-timeout 60")
    assert "right True 2" in lines, lines
    assert sum("was cancelled: no further node" in line for line in lines) == 1, lines


ENDING = """
refs = [work.remote(number, 5.0) for number in range(60)]
until(lambda: len(alive()) == 2)
print("grown", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["scancel", "end"])
def test_the_end_of_the_job_ends_all_its_batch_jobs(grown: Slurm, how: str) -> None:
    blocker = grown.sbatch("-N4", "--exclusive", "-t20", "-o", "/dev/null", "--wrap", "sleep 1000")
    grown.wait_state(blocker, "RUNNING")
    text = ENDING if how == "scancel" else ENDING.replace("time.sleep(300)", "sys.exit(3)")
    script = grown.write(HEAD + text)
    batch = grown.write(BATCH.format(options="--max-nodes 4", script=script), "batch.sh")
    job = grown.sbatch("-N1", "-c4", "-t20", "-o", "job-%j.out", batch)
    grown.wait_output(job, "grown")
    if how == "scancel":
        grown.said("scancel", job)
    grown.finish(job)
    grown.wait(lambda: "hpcray-nodes" not in grown.said("squeue", "-h", "-o", "%j"), "no batch job of the nodes", 20)
    assert not list(grown.place.rglob("*.join-token"))
    grown.said("scancel", blocker)


HERE = """\
import socket, time
import hpcray as ray

ray.init()

@ray.remote(num_cpus=1)
def where():
    time.sleep(0.3)
    return socket.gethostname()

print("driver", socket.gethostname(), *sorted(set(ray.get([where.remote() for _ in range(40)]))), flush=True)
raise SystemExit(4)
"""


def test_the_program_may_run_on_the_login_node_and_its_nodes_in_batch_jobs(grown: Slurm) -> None:
    words = ["--driver", "here", "-N", "2", "--cpus-per-node", "4", "-t", "10", grown.write(HERE)]
    ended = grown.run(grown.python, "-m", "hpcray.cli", "submit", *words, timeout=200)
    assert ended.code == 4 and ended.out.startswith("driver ctl n"), ended
    assert "ctl n" in ended.out and ended.out.split().count("ctl") == 1, ended
    grown.wait(lambda: not grown.said("squeue", "-h"), "no batch job", 20)


TAKEOVER = """
refs = [work.remote(number, 2.0) for number in range(120)]
until(lambda: len(alive()) == 4)
(head,) = [row for row in alive() if row["Index"] == 0]
print("head", head["NodeManagerHostname"], flush=True)
until(lambda: len(alive()) == 3)
print("right", [number for number, _, _ in ray.get(refs)] == list(range(120)), flush=True)
until(lambda: len(alive()) == 1, 60)
print("alone", flush=True)
"""


def test_a_new_head_goes_on_with_the_nodes_that_the_old_one_had_started(grown: Slurm) -> None:
    script = grown.write(HEAD + TAKEOVER)
    options = "--driver-rank 1 --max-nodes 4 --idle-node-timeout 8"
    batch = grown.write(BATCH.format(options=options, script=script), "batch.sh")
    job = grown.sbatch("-N2", "-c4", "-t20", "--no-kill", "-o", "job-%j.out", batch)
    grown.wait_output(job, "head ")
    (host,) = re.findall(r"head (\w+)", grown.output())
    (pid,) = grown.processes("hpcray-raylet")[host]
    os.kill(pid, signal.SIGKILL)
    grown.wait_output(job, "alone", 120.0)
    grown.finish(job)
    lines = grown.output()
    assert "right True" in lines and "this node is the head from now on" in lines, lines
