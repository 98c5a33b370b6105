"""Submission to a real Slurm, from Python and from the command line. The cluster has no accounting."""

from __future__ import annotations

import json
from typing import Any

import pytest
from helpers.leaks import wait_until
from helpers.slurm import Slurm

pytest.importorskip("submitit")
pytestmark = pytest.mark.slurm

# A function's result, its typed error, and the states on the way, on two nodes.
FUNCTIONS = """\
import socket
import hpcray as ray
from hpcray.cluster import submit
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On


class Refused(Exception):
    def __init__(self, code, why):
        super().__init__(why)
        self.code = code


def hosts(greeting):
    @ray.remote
    def where():
        return socket.gethostname()

    ray.init()
    nodes = ray.nodes()
    refs = [where.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote() for node in nodes]
    print(greeting, "from", socket.gethostname(), flush=True)
    return sorted(ray.get(refs)), ray.cluster_resources()["CPU"]


def refuse():
    raise Refused(7, "as the test wants it")


job = submit(hosts, "hello", nodes=2, cpus_per_node=2, time="10:00", mem="500m")
assert job.executor == "slurm", job
print("result", job.result(timeout=90), job.state)
print("said", job.stdout().strip())
failed = submit(refuse)
try:
    failed.result(timeout=90)
except Refused as error:
    print("refused", error.code, failed.state)
"""


def test_functions_run_as_slurm_jobs(slurm: Slurm) -> None:
    ended = slurm.run("python", slurm.write(FUNCTIONS), timeout=200)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == [
        "result (['n1', 'n2'], 4.0) COMPLETED",
        "said hello from n1",
        "refused 7 FAILED",
    ]


SCRIPT = """\
import os, socket, sys, time
import hpcray as ray

ray.init()
print("on", len(ray.nodes()), "with", *sys.argv[1:], os.environ["COLOUR"], flush=True)
if sys.argv[1] == "stay":
    time.sleep(600)
sys.exit(int(sys.argv[1]))
"""


def hpcray(slurm: Slurm, *argv: object) -> Any:
    return slurm.run("python", "-m", "hpcray.cli", *argv)


def printed(slurm: Slurm, text: str) -> None:
    """Wait until a job has printed it. (`hpcray logs` again and again would be all that this machine does.)"""
    folder = slurm.place / ".hpcray-jobs"
    slurm.wait(lambda: any(text in path.read_text() for path in folder.rglob("*.out")), repr(text))


def jobs(slurm: Slurm) -> dict[str, str]:
    return {row["job_id"]: row["state"] for row in json.loads(hpcray(slurm, "jobs", "--json").out)}


def test_jobs_are_submitted_and_listed_on_the_command_line(slurm: Slurm) -> None:
    script = slurm.write(SCRIPT)
    ended = hpcray(slurm, "submit", "-N", 1, "-x", "COLOUR=red", "--wait", script, 3, "--nodes")
    assert ended.code == 3, ended.err
    first = ended.out.strip()
    assert hpcray(slurm, "logs", first).out == "on 1 with 3 --nodes red\n"
    facts = slurm.finish(first)
    assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "3:0"), "Slurm knows it too"

    long = hpcray(slurm, "submit", "-N", 2, "-J", "long", "-x", "COLOUR=red", script, "stay").out.strip()
    printed(slurm, "on 2 with stay")
    known = {job: state for job, state in jobs(slurm).items() if job in (first, long)}  # and the history of others
    assert known == {first: "FAILED", long: "RUNNING"}
    ended = hpcray(slurm, "cancel", "long")
    assert (ended.code, ended.out) == (0, f"{long} CANCELLED\n"), ended.err
    slurm.finish(long)
    slurm.check()


@pytest.mark.slow
def test_a_job_cancelled_by_scancel_is_cancelled(slurm: Slurm) -> None:
    script = slurm.write(SCRIPT)
    job = hpcray(slurm, "submit", "-x", "COLOUR=red", script, "stay").out.strip()
    printed(slurm, "on 1 with stay")
    slurm.said("scancel", job)
    slurm.finish(job)
    wait_until(lambda: jobs(slurm).get(job) == "CANCELLED", "the state")


@pytest.mark.slow
def test_a_refusal_of_sbatch_is_reported(slurm: Slurm) -> None:
    script = slurm.write(SCRIPT)
    ended = hpcray(slurm, "submit", "-p", "absent", script, "0")
    assert ended.code == 1
    assert "invalid partition specified: absent" in ended.err
    assert hpcray(slurm, "jobs", "--json").out.strip() == "[]"


LIVES = """\
import os, time
import hpcray as ray

ray.init()
life = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
print("life", life, flush=True)
time.sleep(0 if life else 600)
"""


@pytest.mark.slow
def test_a_preempted_job_starts_again(slurm: Slurm) -> None:
    script = slurm.write(LIVES)
    job = hpcray(slurm, "submit", "-p", "scavenge", "-N", 4, "--requeue", 1, "-t", "30", script).out.strip()
    printed(slurm, "life 0")
    assert slurm.run("srun", "-p", "main", "-N4", "--exclusive", "true", timeout=120).code == 0
    slurm.wait_state(job, "PENDING", "RUNNING")
    printed(slurm, "life 1")
    wait_until(lambda: jobs(slurm)[job] == "COMPLETED", "its end")


# Counts to twenty in two lives: the checkpoint of the first is what the second starts from.
REQUEUED = """\
import sys, time
from pathlib import Path
import hpcray as ray
from hpcray.cluster import submit
from submitit.helpers import DelayedSubmission


class Count:
    def __init__(self):
        self.count, self.lives = 0, 0

    def __call__(self):
        ray.init()
        self.lives += 1
        while self.count < 10 * self.lives:
            self.count += 1
        print("ready", self.lives, flush=True)
        while self.lives < 2:
            time.sleep(0.01)
        return self.count, self.lives

    def checkpoint(self):
        return DelayedSubmission(self)


job = submit(Count(), nodes=2, time=30, requeue=1)
print(job.job_id, flush=True)
print("result", job.result(timeout=150), job.state)
"""


@pytest.mark.slow
def test_a_job_whose_time_is_up_starts_again_where_it_was(slurm: Slurm) -> None:
    with slurm.start("python", slurm.write(REQUEUED)) as started:
        job = started.line()
        printed(slurm, "ready 1")
        slurm.said("scancel", "--batch", "--signal=USR2", job)  # what Slurm sends before the end
        # Not started earlier by hand (StartTime=now): slurmd refuses a start within the second of the requeue ("Job
        # credential revoked"), and Slurm then ends the job as FAILED. It starts by itself after cred_expire (conf.py).
        slurm.wait_state(job, "PENDING")
        ended = started.wait(200)
    assert ended.code == 0, ended.err
    assert ended.out.strip() == "result (20, 2) COMPLETED"
