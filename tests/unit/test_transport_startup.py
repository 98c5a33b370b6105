"""What launchers say, the report of a failed start, what UCX says it found, and the back-off."""

from __future__ import annotations

import pytest

from hpcray.transport.base import Backoff
from hpcray.transport.startup import Launch, RollCall, read_launch, singleton_hint
from hpcray.transport.ucx_engine import has_rdma, resources_of

SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "c[1-4]",
}


def test_no_launcher() -> None:
    assert read_launch({"HOME": "/root"}) == Launch()


def test_a_batch_script_outside_srun_has_no_launcher() -> None:
    assert read_launch({"SLURM_JOB_ID": "42", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}).size == 1


def test_srun() -> None:
    assert read_launch(SLURM) == Launch("srun", 2, 4, "slurm-42.3", 1, "c[1-4]")


def test_srun_with_uneven_nodes_does_not_guess_how_many_are_here() -> None:
    assert read_launch({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}).here == 0


def test_mpirun_within_slurm_is_mpirun() -> None:
    launch = read_launch(
        {
            **SLURM,
            "OMPI_COMM_WORLD_SIZE": "3",
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
            "PMIX_NAMESPACE": "prterun-a-1@1",
        }
    )
    assert launch == Launch("mpirun", 1, 3, "prterun-a-1@1", 3)


def test_hydra() -> None:
    assert read_launch({"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_JOBID": "j"}) == Launch("pmi", 1, 2, "j")


def test_the_hint_for_singletons_names_the_flag_of_the_launcher() -> None:
    assert "--mpi=pmix" in singleton_hint(Launch("srun"))
    assert "mpirun of the MPI" in singleton_hint(Launch("mpirun"))


@pytest.mark.parametrize(
    "launch, came, line",
    [
        (Launch("mpirun", 0, 8, "j", 8), [0, 1, 2, 5], "ranks 3-4, 6-7"),
        (Launch("mpirun", 0, 2, "j", 2), [0, 1], "all ranks came"),
        (Launch("srun", 2, 4, "j", 1, "c[1-4]"), [2], "missing on another host (of c[1-4]), some of:\n  ranks 0-1, 3"),
        (Launch("pmi", 0, 3, "j"), [0], "ranks 1-2; hosts of the job: unknown"),
    ],
)
def test_report(launch: Launch, came: list[int], line: str) -> None:
    report = RollCall(launch, 5.0).report(came)
    assert line in report
    assert f"rank {launch.rank} of {launch.size}" in report and "hint:" in report


def test_ranks_of_one_job_see_each_other_and_nobody_else() -> None:
    other, foreign = RollCall(Launch("pmi", 12, 4, "one"), 60), RollCall(Launch("pmi", 1, 4, "two"), 60)
    with RollCall(Launch("pmi", 3, 4, "one"), 60) as three, other, foreign:
        assert three.came() == [3, 12]
    assert three.came() == []


INFO = """\
#     component 4  :  cma
#            md 1  :  component 1  tcp
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 5  :  md 4  dev 0  flags -- cma/memory
"""


def test_resources_of_a_context() -> None:
    assert resources_of(INFO) == ["tcp/eth0", "cma/memory"]


@pytest.mark.parametrize(
    "resource, rdma",
    [
        ("rc_mlx5/mlx5_0:1", True),
        ("dc_mlx5/mlx5_1:1", True),
        ("rc_verbs/hfi1_0:1", True),
        ("ud_verbs/mlx5_0:1", True),
        ("srd/rdmap0s6:1", True),
        ("tcp/hsn0", False),
        ("rdmacm/rdmacm", False),
        ("cma/memory", False),
        ("cuda_copy/cuda", False),
    ],
)
def test_rdma(resource: str, rdma: bool) -> None:
    assert has_rdma(["self/memory", resource]) is rdma


def test_backoff_grows_with_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    backoff = Backoff()
    delays = []
    for silence in (0.0, 0.05, 0.5, 2.0):
        now[0] = 100.0 + silence
        delays.append(backoff.delay())
    assert delays[0] == 0.0 and delays == sorted(delays) and delays[-1] == Backoff.LONGEST
    backoff.touch()
    assert backoff.delay() == 0.0


def test_spinning_ends_soon_and_at_once_where_the_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("hpcray.transport.base.time.monotonic", lambda: now[0])
    monkeypatch.setattr("hpcray.transport.base.os.sched_yield", lambda: None)
    backoff = Backoff()
    backoff.touch()
    assert backoff.lively()
    now[0] += 2 * Backoff.SPIN
    assert not backoff.lively()
    backoff.touch()
    monkeypatch.setattr("hpcray.transport.base.os.sched_yield", lambda: now.__setitem__(0, now[0] + 2 * Backoff.ALONE))
    assert not backoff.lively(), "somebody else ran meanwhile"
