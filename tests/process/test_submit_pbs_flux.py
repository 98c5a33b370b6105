"""Submission to PBS and Flux, which programs imitate on this machine: `helpers/batch_stand_ins.py`."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import batch_stand_ins
from helpers.leaks import LeakCheck, wait_until

import hpcray as ray
from hpcray.cluster import find_job, scale, submit
from hpcray.exceptions import JobError, RayTaskError, SubmitError
from hpcray.jobs import batch_queues
from hpcray.jobs.submission import choose_executor
from hpcray.jobs.submitted_job import list_jobs, states

pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")), reason="no mpirun"
)
COMMANDS = {"pbs": ("qsub", "qstat", "qdel"), "flux": ("flux",)}


@pytest.fixture(params=["pbs", "flux"])
def kind(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A batch system of this name, in the place of all others."""
    programs = batch_stand_ins.install(tmp_path, *COMMANDS[request.param])
    beside = os.pathsep.join([str(programs), str(Path(sys.executable).parent), "/usr/bin", "/bin"])
    monkeypatch.setenv("PATH", beside)
    monkeypatch.setenv("HPCRAY_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setattr(batch_queues, "_CACHE_TIME", 0.0)
    return str(request.param)


def calls(tmp_path: Path) -> list[list[str]]:
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def double(x: int) -> tuple[int, int]:
    import hpcray as ray

    @ray.remote
    def twice(x: int) -> int:
        return 2 * x

    ray.init()
    print("doubling", flush=True)
    return len(ray.nodes()), ray.get(twice.remote(x))


def fail() -> None:
    raise LookupError("as the test wants it")


def sleep() -> None:
    import time

    print("asleep", flush=True)
    time.sleep(600)


def test_a_function_is_submitted_and_its_value_comes_back(kind: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    job = submit(double, 21, executor=kind, cpus_per_node=1, time=5, partition="fast", sbatch={"account": "a1"})
    assert job.result(60) == (1, 42)
    assert (job.state, job.executor, "doubling" in (job.stdout() or "")) == ("COMPLETED", kind, True)
    words = calls(tmp_path)[0]
    assert ("select=1:ncpus=1" if kind == "pbs" else "--cores-per-slot=1") in words
    assert ("walltime=00:05:00" if kind == "pbs" else "--time-limit=300s") in words
    assert ("a1" if kind == "pbs" else "--bank=a1") in words
    assert find_job(job.job_id).result(10) == (1, 42)
    assert [states([found])[found.folder.name] for found in list_jobs()] == ["COMPLETED"]


def test_the_error_and_the_exit_code_of_a_job_come_back(kind: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    failing = submit(fail, executor=kind, cpus_per_node=1)
    script = tmp_path / "program.py"
    script.write_text("import sys\nsys.exit(3)\n")
    exiting = submit(script, executor=kind, cpus_per_node=1)
    with pytest.raises(LookupError, match="as the test wants it") as caught:
        failing.result(60)
    assert isinstance(caught.value, RayTaskError)
    assert exiting.result(60) == 3
    assert (failing.state, exiting.state) == ("FAILED", "FAILED")
    wait_until((tmp_path / f"{exiting.job_id}.code").exists, "the exit code")
    assert (tmp_path / f"{exiting.job_id}.code").read_text() == "3\n", "the batch system has it too"


def test_a_job_is_cancelled(kind: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    job = submit(sleep, executor=kind, cpus_per_node=1)
    wait_until(lambda: "asleep" in (job.stdout() or "") or job.done(), "the driver")
    assert job.state == "RUNNING", job.stderr()
    job.cancel()
    job.wait(60)
    assert job.state == "CANCELLED"
    with pytest.raises(JobError, match="CANCELLED"):
        job.result(10)
    job.cancel()  # no effect


def test_what_cannot_be_submitted_leaves_nothing(kind: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    (tmp_path / "refuse").write_text("invalid queue")
    with pytest.raises(SubmitError, match="(qsub|flux) refused the job: .*invalid queue"):
        submit(fail, executor=kind)
    with pytest.raises(SubmitError, match=f"requeue needs Slurm, and this job would run in {kind}; hint: "):
        submit(fail, executor=kind, requeue=True)
    if kind == "flux":
        with pytest.raises(SubmitError, match="Flux does not schedule memory; hint: "):
            submit(fail, executor=kind, mem="2g")
    assert list((tmp_path / "jobs").iterdir()) == []


def test_a_python_that_does_not_start_is_reported(
    kind: str, tmp_path: Path, leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/python")
    job: Any = submit(fail, executor=kind)
    wait_until(lambda: job.state == "FAILED", "the end of the job")
    assert "/no/python" in (job.stderr() or "")


def test_the_executor_is_the_batch_system_that_is_here(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pbs.conf").touch()
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    if kind == "flux":
        monkeypatch.setenv("FLUX_URI", "local:///x")
    programs = tmp_path / "only"
    programs.mkdir()
    for name in COMMANDS[kind]:
        (programs / name).symlink_to(tmp_path / "bin" / name)
    monkeypatch.setenv("PATH", str(programs))
    assert choose_executor("auto") == kind


def test_nodes_are_added_by_a_batch_job(kind: str, tmp_path: Path, leak_check: LeakCheck) -> None:
    ray.init(num_cpus=1)
    try:
        (job,) = scale(1, cpus=1, executor=kind, wait=True)
        assert [node["Alive"] for node in ray.nodes()] == [True, True]
        assert calls(tmp_path)[0][1 if kind == "flux" else 0] == ("batch" if kind == "flux" else "qsub")
        (tmp_path / "refuse").write_text("queue is full")
        with pytest.raises(SubmitError, match="refused the job: .*queue is full"):
            scale(1, executor=kind)
    finally:
        ray.shutdown()
    wait_until((tmp_path / f"{job}.code").exists, "the end of the batch job")


def test_the_end_of_the_job_cancels_batch_jobs_of_nodes_that_have_not_come(
    kind: str, tmp_path: Path, leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcray.jobs.added_nodes.node_command", lambda *given: ["sleep", "600"])  # it never joins
    with ray.init(num_cpus=1):
        (job,) = scale(1, cpus=1, executor=kind)
    wait_until((tmp_path / f"{job}.code").exists, "the end of the batch job")
    assert calls(tmp_path)[-1] == (["qdel", job] if kind == "pbs" else ["flux", "cancel", job])
