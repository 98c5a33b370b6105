"""Submission to the local executor: this machine as several nodes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck, wait_until

from hpcray.cluster import Job, submit
from hpcray.exceptions import JobError, RayTaskError
from hpcray.platform.process_tree import descendants

pytest.importorskip("submitit")
pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")), reason="no mpirun"
)
Start = Callable[..., Job[Any]]


@pytest.fixture
def start(tmp_path: Path, leak_check: LeakCheck) -> Iterator[Start]:
    """Submits to a folder of the test; what runs at the end is cancelled. The test fails when it leaves anything."""
    jobs: list[Job[Any]] = []

    def start(task: Any, *args: Any, **options: Any) -> Job[Any]:
        options = {"executor": "local", "cpus_per_node": 1, "folder": tmp_path / "jobs", **options}
        jobs.append(submit(task, *args, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        if not job.done():
            job.cancel()
            job.wait(60)


class Refused(Exception):
    """Its constructor takes something else than its text."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code = code


def spread(count: int) -> tuple[int, int, list[int]]:
    import hpcray as ray
    from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    @ray.remote
    def square(x: int) -> tuple[str, int]:
        return ray.get_runtime_context().get_node_id(), x * x

    ray.init()
    nodes = [On(node["NodeID"], soft=False) for node in ray.nodes()]
    found = ray.get([square.options(scheduling_strategy=nodes[x % len(nodes)]).remote(x) for x in range(count)])
    print("on", len(ray.nodes()), "nodes", flush=True)
    return len(ray.nodes()), len({node for node, _ in found}), [value for _, value in found]


def refuse() -> None:
    import hpcray as ray

    ray.init()
    raise Refused(7, "as the test wants it")


def test_a_function_drives_a_job_of_two_nodes(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    job = start(spread, 12, nodes=2)
    nodes, used, squares = job.result(timeout=60)
    assert (nodes, used, squares) == (2, 2, [x * x for x in range(12)])
    assert (job.state, job.name, job.nodes) == ("COMPLETED", "spread", 2)
    assert job.stdout() == "on 2 nodes\n"
    assert capfd.readouterr() == ("", ""), "the job writes to its logs, not to our terminal"


def test_an_exception_of_the_function_is_raised_by_result(start: Start) -> None:
    job = start(refuse)
    with pytest.raises(Refused, match="7: as the test wants it") as caught:
        job.result(timeout=60)
    assert isinstance(caught.value, RayTaskError)
    assert caught.value.code == 7
    assert "in refuse" in str(caught.value)
    assert job.state == "FAILED"
    assert "Refused: 7" in (job.stderr() or "")


@pytest.mark.slow
def test_a_killed_driver_makes_the_job_fail(start: Start) -> None:
    job = start(os._exit, 9)
    with pytest.raises(JobError, match="its driver was killed; exit code 9"):
        job.result(timeout=60)
    assert job.state == "FAILED"


def command(*argv: object) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "hpcray.cli", *map(str, argv)]
    return subprocess.run(line, capture_output=True, text=True, timeout=90, env=environ)


@pytest.mark.slow
def test_a_script_is_submitted_listed_logged_and_cancelled_on_the_command_line(
    tmp_path: Path, leak_check: LeakCheck
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, time\nimport hpcray as ray\nray.init()\n"
        "print('args', *sys.argv[1:], os.environ['COLOUR'], len(ray.nodes()), flush=True)\n"
        "print('a complaint', file=sys.stderr, flush=True)\n"
        "time.sleep(600 if sys.argv[1] == 'stay' else 0)\nsys.exit(int(sys.argv[1]))\n"
    )
    options = ("--folder", tmp_path / "jobs")
    submit_line = ("submit", *options, "--executor", "local", "-N", "2", "--cpus-per-node", "1", "-x", "COLOUR=red")
    ended = command(*submit_line, "--wait", script, "3", "--nodes", "x")
    assert ended.returncode == 3, ended.stderr
    shown = command("logs", *options, ended.stdout.strip())
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "args 3 --nodes x red 2\n", "a complaint\n")

    job_id = command(*submit_line, "--name", "long", script, "stay").stdout.strip()
    log = next((tmp_path / "jobs").glob("*-long-*")) / f"{job_id}_0_log.out"
    wait_until(lambda: log.exists() and "args stay" in log.read_text(), "the job's first line")
    assert "RUNNING" in command("jobs", *options).stdout
    ended = command("cancel", *options, "long")
    assert (ended.returncode, ended.stdout) == (0, f"{job_id} CANCELLED\n"), ended.stderr
    assert command("cancel", *options, job_id).returncode == 0, "cancelling twice is harmless"


class Counter:
    """Counts until it has been started twice."""

    def __init__(self, marks: Path) -> None:
        self.marks = marks
        self.starts = 0

    def __call__(self, label: str) -> tuple[str, int]:
        import time

        import hpcray as ray

        ray.init()
        self.starts += 1
        (self.marks / str(self.starts)).touch()
        while self.starts < 2:
            time.sleep(0.01)
        return label, self.starts

    def checkpoint(self, label: str) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, f"{label} again")


def announce_the_end(job: Job[Any]) -> None:
    """What the controller sends before the time limit, sent now."""
    for pid in descendants(int(job.job_id)):
        if Path(f"/proc/{pid}/cmdline").read_bytes().find(b"submitit.core._submit") >= 0:
            os.kill(pid, signal.SIGUSR2)


@pytest.mark.slow
def test_a_checkpointable_function_continues_from_its_checkpoint(start: Start, tmp_path: Path) -> None:
    job = start(Counter(tmp_path), "once", requeue=1, time=10)
    wait_until((tmp_path / "1").exists, "the first start")
    announce_the_end(job)
    assert job.result(timeout=60) == ("once again", 2)
    assert job.state == "COMPLETED"


def stay(mark: Path) -> None:
    import time

    import hpcray as ray

    ray.init()
    mark.touch()
    time.sleep(600)


@pytest.mark.slow
def test_a_job_ends_at_its_time_limit(start: Start, tmp_path: Path) -> None:
    job = start(stay, tmp_path / "mark", time=0.1)
    with pytest.raises(JobError, match="is TIMEOUT") as caught:
        job.result(timeout=60)
    assert caught.value.state == job.state == "TIMEOUT"


@pytest.mark.slow
def test_nothing_outlives_a_controller_that_is_killed(start: Start, tmp_path: Path, leak_check: LeakCheck) -> None:
    job = start(stay, tmp_path / "mark", nodes=2)
    wait_until((tmp_path / "mark").exists, "the start")
    os.kill(int(job.job_id), signal.SIGKILL)
    with pytest.raises(JobError):
        job.result(timeout=60)
    assert job.state in ("FAILED", "CANCELLED")


def seen_labels() -> list[tuple[str, float]]:
    import hpcray as ray
    from hpcray.platform.config_files import node_config

    @ray.remote
    def seen() -> float:
        return node_config(os.environ).drain_margin

    ray.init()
    return [(node["Labels"].get("site", ""), ray.get(seen.remote())) for node in ray.nodes()]


def test_the_nodes_and_workers_of_a_job_see_the_configuration_of_its_submitter(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site.toml").write_text("labels = 'site=north'\ndrain_margin = 7\n")
    monkeypatch.setenv("HPCRAY_CONFIG", str(tmp_path / "site.toml"))
    assert start(seen_labels, nodes=2).result(60) == [("north", 7.0)] * 2
