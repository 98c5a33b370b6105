"""hpcray.mpi.run outside Slurm: nested mpirun on this host."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import Job, on_two_nodes
from helpers.leaks import LeakCheck, leak_checked, wait_until
from helpers.pids import parent_of

import hpcray as ray
from hpcray.exceptions import (
    GetTimeoutError,
    RayTaskError,
    TaskCancelledError,
    TaskUnschedulableError,
    WorkerCrashedError,
)

pytestmark = pytest.mark.skipif(
    not (Path(sys.executable).with_name("mpirun").exists() or shutil.which("mpirun")), reason="no mpirun"
)
CPUS = 3


@pytest.fixture(scope="module")
def leaks() -> Iterator[LeakCheck]:
    """One node for all tests of the module; nothing may be left after it."""
    before = dict(os.environ)
    with leak_checked(os.environ.__setitem__) as found:
        ray.init(num_cpus=CPUS)
        yield found
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _directories(leaks: LeakCheck) -> list[str]:
    return [name for _, names, _ in os.walk(leaks.tmp) for name in names if name.startswith("mpi-")]


@pytest.fixture
def settled(leaks: LeakCheck) -> Iterator[LeakCheck]:
    """The test fails unless after it the CPUs are free, and no rank, guard or directory of a nested job is left."""
    yield leaks
    wait_until(lambda: ray.available_resources().get("CPU") == CPUS, "all CPUs free")
    wait_until(lambda: not nested(leaks), "no process of a nested job")
    wait_until(lambda: not _directories(leaks), "no directory of a nested job")


def nested(leaks: LeakCheck) -> dict[int, str]:
    """Processes of nested jobs: launchers, guards, ranks."""
    found = {}
    for pid in leaks.processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"mpi_guard" in line or b"mpi_rank" in line:
            found[pid] = line.decode()
    return found


def touch_then(marks: Path, what: Callable[[], object]) -> Callable[[Any], object]:
    """For a rank: leave a mark, then do as told."""

    def body(comm: Any) -> object:
        (marks / f"rank{comm.rank}").write_text(str(os.getpid()))
        return what()

    return body


class Unhappy(Exception):
    def __init__(self, rank: int, why: str) -> None:
        super().__init__(why)
        self.on = rank


def test_results_come_by_rank(settled: LeakCheck) -> None:
    def body(comm: Any, base: int, block: Any, *, name: str) -> Any:
        from mpi4py import MPI

        same = MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.IDENT
        where = os.environ["HPCRAY_ADDRESS"]
        total = comm.allreduce(comm.rank + base)
        return comm.rank, comm.size, total, sum(block), name, os.environ["COLOUR"], same, os.path.isdir(where)

    block = ray.put([1, 2, 3])
    found = ray.mpi.run(body, 3, args=(10, block), kwargs={"name": "x"}, env={"COLOUR": "red"}, timeout=60)
    assert found == [(rank, 3, 33, 6, "x", "red", True, True) for rank in range(3)]


def test_the_error_of_a_rank_ends_the_others(settled: LeakCheck) -> None:
    def body(comm: Any) -> None:
        if comm.rank == 1:
            raise Unhappy(comm.rank, "as the test wants it")
        comm.barrier()  # for ever

    with pytest.raises(Unhappy, match="as the test wants it") as caught:
        ray.mpi.run(body, 3, timeout=60)
    assert isinstance(caught.value, RayTaskError)
    assert (caught.value.on, caught.value.rank) == (1, 1)  # type: ignore[attr-defined]
    assert "body on MPI rank 1 of 3" in str(caught.value)
    assert "in body" in str(caught.value)


def test_a_result_that_does_not_pickle_is_an_error(settled: LeakCheck) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        ray.mpi.run(lambda comm: (x for x in []), 1, timeout=60)


@pytest.mark.slow
def test_a_timeout_ends_the_ranks(settled: LeakCheck, tmp_path: Path) -> None:
    with pytest.raises(GetTimeoutError, match="not done within 20 s: it was running; it was ended"):
        ray.mpi.run(touch_then(tmp_path, lambda: time.sleep(600)), 2, timeout=20)
    assert not nested(settled), "ended before the error is raised"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@ray.remote(num_cpus=CPUS)
class Hog:
    def ready(self) -> bool:
        return True


def test_cpus_are_reserved(settled: LeakCheck) -> None:
    with pytest.raises(
        TaskUnschedulableError, match="4 ranks with 1 CPUs each do not fit: the nodes have 3 CPUs; hint"
    ):
        ray.mpi.run(len, 4)
    with pytest.raises(TaskUnschedulableError, match="2 ranks with 2 CPUs each"):
        ray.mpi.run(len, 2, cpus_per_rank=2)
    hog = Hog.remote()
    assert ray.get(hog.ready.remote())
    with pytest.raises(GetTimeoutError, match="it was waiting for CPUs"):
        ray.mpi.run(lambda comm: comm.rank, 1, timeout=0.5)
    assert ray.mpi.run(lambda comm: comm.rank, 2, cpus_per_rank=0, timeout=60) == [0, 1], "these want none"
    ray.kill(hog)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_rank_that_dies_ends_the_others(settled: LeakCheck, how: str) -> None:
    def body(comm: Any) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(0)
        time.sleep(600)

    with pytest.raises(WorkerCrashedError, match=r"no result from rank 0, 1; the launcher ended with code"):
        ray.mpi.run(body, 2, timeout=60)


@pytest.mark.slow
def test_mpi_run_works_in_a_task_that_holds_every_cpu(settled: LeakCheck) -> None:
    @ray.remote(num_cpus=CPUS)
    def outer() -> list[int]:
        return ray.mpi.run(lambda comm: comm.allreduce(1), CPUS, timeout=60)

    assert ray.get(outer.remote(), timeout=90) == [CPUS] * CPUS


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
def test_cancelling_the_task_ends_the_ranks(settled: LeakCheck, tmp_path: Path, force: bool) -> None:
    body = touch_then(tmp_path, lambda: time.sleep(600))

    @ray.remote(num_cpus=0, max_retries=0)
    def outer() -> Any:
        return ray.mpi.run(body, 2)

    ref = outer.remote()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
    ray.cancel(ref, force=force)
    with pytest.raises((TaskCancelledError, WorkerCrashedError)):
        ray.get(ref, timeout=60)


@pytest.mark.slow
def test_the_death_of_the_holder_ends_the_ranks(settled: LeakCheck, tmp_path: Path) -> None:
    def parent_of_guard() -> None:
        guards = [pid for pid, line in nested(settled).items() if "mpi_guard" in line]
        parents = [parent_of(pid) for pid in guards]
        assert len(parents) == 1
        os.kill(parents[0], signal.SIGKILL)

    @ray.remote(num_cpus=0, max_retries=0)
    def outer() -> Any:
        return ray.mpi.run(touch_then(tmp_path, lambda: time.sleep(600)), 2)

    ref = outer.remote()
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks run")
    parent_of_guard()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ref, timeout=60)


# ---------------------------------------------------------------- whole jobs

DRIVER = """\
import os, sys, time
import hpcray as ray

ray.init()


def body(comm):
    print("rank", comm.rank, flush=True)
    if sys_argv == "stay":
        time.sleep(600)
    return comm.allreduce(comm.rank), "PMIX_RANK" in os.environ


sys_argv = sys.argv[1]
try:
    print("result", ray.mpi.run(body, 4, timeout=60 if sys_argv == "end" else None))
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def launched(script: Path, *args: str) -> Job:
    return Job(on_two_nodes(script, *args))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(DRIVER)
    return path


def test_nested_ranks_run_on_two_nodes_of_an_mpi_job(script: Path, leak_check: LeakCheck) -> None:
    with launched(script, "end") as job:
        ended = job.wait()
    assert ended.code == 0, ended.err
    assert "result [(6, True), (6, True), (6, True), (6, True)]" in ended.out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_of_a_nested_job_outlives_the_program(
    script: Path, leak_check: LeakCheck, number: signal.Signals
) -> None:
    with launched(script, "stay") as job:
        seen = {job.line() for _ in range(4)}
        assert all("rank" in line for line in seen), seen
        job.send(number)
        ended = job.wait()
    assert ended.code != 0
    assert ("interrupted" in ended.out) == (number == signal.SIGINT)
    leak_check.check()
