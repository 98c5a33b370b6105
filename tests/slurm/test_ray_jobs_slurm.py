"""Ray's jobs, submitted from the login node into a cluster that a batch job keeps up."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from typing import Any

import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

_COUNT = "import hpcray as ray; ray.init(); print('nodes', len(ray.nodes()))"


def test_a_job_goes_into_a_batch_job_and_its_output_comes_back(slurm: Slurm) -> None:
    command = ["salloc", "-N2", "-J", "holder", *SRUN, "-N2", "python", "-m", "hpcray", "-m", "hpcray.job_submission"]
    with slurm.start(*command) as holder:
        while not (line := holder.line()).startswith("ready for jobs: "):
            assert line or holder.wait().code == 0, line
        job = slurm.said("squeue", "-h", "-n", "holder", "-o", "%A")
        ray = ["python", "-m", "hpcray.cli.ray", "job"]
        into = ["--address", f"slurm://{job}"]
        done = slurm.run(*ray, "submit", *into, "--submission-id", "count", "--", "python", "-c", _COUNT)
        assert done.code == 0, done.out + done.err
        assert "nodes 2" in done.out.splitlines() and "Job 'count' succeeded" in done.out
        failed = slurm.run(*ray, "submit", *into, "--", "sh", "-c", "exit 3")
        assert failed.code == 1 and "failed with exit code 3" in failed.out, failed.err
        assert "count" in slurm.said(*ray, "list", *into)
        slurm.said("scancel", job)
        holder.wait()
    wrong = slurm.run(*ray, "list", "--address", f"slurm://{job}")
    assert wrong.code != 0
    deadline = time.monotonic() + 60
    while slurm.said("squeue", "-h", "-n", "holder") and time.monotonic() < deadline:
        time.sleep(0.5)
    slurm.check()


@pytest.mark.slow
def test_commands_on_a_login_node_find_the_job_through_slurm(slurm: Slurm) -> None:
    def command(*words: str) -> Any:
        return slurm.run("python", "-m", "hpcray.cli", *words)

    assert "no running hpcray node" in command("status").err
    hold = [*SRUN, "-N2", "python", "-m", "hpcray", "-m", "hpcray.job_submission"]
    names = ("first", "second")
    with ExitStack() as stack:
        first, second = (stack.enter_context(slurm.start("salloc", "-N2", "-J", name, *hold)) for name in names)
        for holder in (first, second):
            while not (line := holder.line()).startswith("ready for jobs: "):
                assert line or holder.wait().code == 0, line
        ids = [slurm.said("squeue", "-h", "-n", name, "-o", "%A") for name in names]
        unclear = command("status")
        assert unclear.code == 2 and all(f"--job {ident}" in unclear.err for ident in ids), unclear.err
        for ident in ids:
            seen = command("status", "--json", "--job", ident)
            assert seen.code == 0 and len(json.loads(seen.out)["nodes"]) == 2, seen.err
            assert f"job {ident}" in seen.err and "through srun --overlap" in seen.err
        rows = {row["job_id"]: row for row in json.loads(command("jobs", "--json").out)}
        assert [rows[ident]["name"] for ident in ids] == list(names)
        slurm.said("scancel", ids[1])
        second.wait()
        only = command("list", "nodes", "--json")
        assert only.code == 0 and len(json.loads(only.out)) == 2, only.err
        slurm.said("scancel", ids[0])
        first.wait()
    slurm.check()


def test_every_address_of_the_heads_host_leads_to_the_cluster_from_every_node(slurm: Slurm) -> None:
    """Also one of another network, which the other nodes do not know; and from a host without a node, by a step."""
    ray = ["python", "-m", "hpcray.cli.ray"]
    words = ["job", "submit", "--", "python", "-c", _COUNT]
    slurm.said("ip", "address", "add", "10.77.0.1/24", "dev", "eth0", host="n1")
    try:
        hold = ["salloc", "-N2", "-w", "n1,n2", *SRUN, "-N2", "python", "-m", "hpcray", "-m", "hpcray.job_submission"]
        with slurm.start(*hold) as holder:
            while not (line := holder.line()).startswith("ready for jobs: "):
                assert line or holder.wait().code == 0, line
            (job,) = slurm.said("squeue", "-h", "-o", "%A").split()
            inside = {"SLURM_JOB_ID": job}
            for host, address in (
                ("n1", "http://127.0.0.1:8265"), ("n1", "http://10.77.0.1:8265"), ("n2", "http://n1:8265"),
                ("n2", "http://10.77.0.1:8265"), ("n2", "n1:6379"), ("n4", "http://n1:8265"),
            ):  # fmt: skip
                environ = {"RAY_ADDRESS": address, **(inside if host != "n4" else {})}
                done = slurm.run(*ray, *words, host=host, environ=environ)
                assert done.code == 0 and "nodes 2" in done.out.splitlines(), (host, address, done.out + done.err)
            for host, address in (("n1", "auto"), ("n2", "n1:6379"), ("n2", "10.77.0.1:6379")):
                text = slurm.run(*ray, "status", "--address", address, host=host, environ=inside)
                assert text.code == 0 and text.out.count(" 1 node_") == 2, text.err
            strange = slurm.run(*ray, "status", "--address", "10.77.0.9:6379", host="n2", environ=inside)
            assert strange.code == 1 and "10.77.0.9" in strange.err
            began = time.monotonic()
            nowhere = slurm.run(*ray, "status", host="n3", environ=inside)
            assert nowhere.code == 1 and "Could not find any running Ray instance" in nowhere.err
            assert time.monotonic() - began < 5.0  # a step of Slurm's took longer
            slurm.said("scancel", job)
            holder.wait()
    finally:
        slurm.said("ip", "address", "del", "10.77.0.1/24", "dev", "eth0", host="n1")
    slurm.wait(lambda: not slurm.said("squeue", "-h"), "the end of the job")
    slurm.check()
