"""Wires coming up, and not coming up."""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

import pytest
from helpers.jobs import MPIRUN, Job
from helpers.leaks import LeakCheck

pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")

PROGRAM = """\
import os
import sys
from hpcray.common.config import Config
from hpcray.transport.base import TransportError
from hpcray.transport.selection import describe, open_transports
try:
    control, data = open_transports(Config.from_env(os.environ))
except TransportError as error:
    sys.exit(f"{type(error).__name__}: {error}; reported by {getattr(error, 'reported_by', 'self')}")
facts = describe()
print(f"rank {control.rank} of {control.size}: {data.name}, because {facts['why']}", flush=True)
data.close()
control.close()
"""


def run(command: list[str], **environ: str) -> tuple[int, str, str]:
    with Job(command, environ) as job:
        end = job.wait(60)
    return end.code, end.out, end.err


def ranks(count: int, shell: str) -> list[str]:
    """`shell` in every rank; `$0` is Python, `$1` the program, `$R` the rank."""
    return [*MPIRUN, "-n", str(count), "sh", "-c", f"R=$OMPI_COMM_WORLD_RANK; {shell}", sys.executable, PROGRAM]


def without_ucx(directory: Path) -> str:
    """A PYTHONPATH on which ucxx does not import."""
    (directory / "ucxx" / "_lib").mkdir(parents=True)
    (directory / "ucxx" / "__init__.py").write_text("")
    (directory / "ucxx" / "_lib" / "__init__.py").write_text("raise ImportError('no libucp here')")
    return str(directory)


@pytest.mark.slow
def test_a_missing_rank_is_named_and_nothing_waits_for_ever(leak_check: LeakCheck) -> None:
    shell = '[ "$R" = 1 ] && exec sleep 600; exec "$0" -c "$1"'
    code, _, err = run(ranks(3, shell), HPCRAY_START_TIMEOUT="5")
    assert code == 78, err
    host = socket.gethostname()
    assert f"on {host}: the cluster was not up after 5 s, waiting in MPI_Init" in err
    assert "on this host came: ranks 0, 2 of 3 started here" in err
    assert f"missing on {host}: rank 1\n" in err
    assert "HPCRAY_START_TIMEOUT" in err


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "{rank}", "SLURM_STEP_NUM_TASKS": "4"},
            "srun gave its 4 tasks no start-up protocol: each of them would be alone; hint: srun --mpi=pmix",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_SIZE": "4"},
            "each of the 4 ranks is alone in an MPI world of its own",
        ),
    ],
    ids=["srun, before MPI_Init", "mpirun of another MPI, after it"],
)
def test_ranks_alone_in_their_own_worlds_are_told_what_to_do_by_rank_0(
    leak_check: LeakCheck, told: dict[str, str], said: str, rank: int
) -> None:
    environ = {name: value.format(rank=rank) for name, value in told.items()}
    code, _, err = run([sys.executable, "-c", PROGRAM], OMPI_MCA_ess_singleton_isolated="1", **environ)
    assert code == 1
    assert said in err and "hint: " in err
    assert ("reported by rank0" in err) == (rank == 1), "the raylets of the other ranks keep it to themselves"


def test_ucx_everywhere_is_chosen(leak_check: LeakCheck) -> None:
    code, out, err = run(ranks(2, 'exec "$0" -c "$1"'))
    assert code == 0, err
    assert out.count("ucx, because UCX works on every rank") == 2, out


def test_one_rank_without_ucx_takes_all_to_mpi(tmp_path: Path, leak_check: LeakCheck) -> None:
    shell = f'[ "$R" = 1 ] && export PYTHONPATH={without_ucx(tmp_path)}:$PYTHONPATH; exec "$0" -c "$1"'
    code, out, err = run(ranks(3, shell))
    assert code == 0, err
    assert out.count("mpi, because rank 1 on ") == 3 and out.count("no libucp here") == 3, out


def test_ucx_asked_for_and_missing_is_an_error(tmp_path: Path, leak_check: LeakCheck) -> None:
    shell = f'[ "$R" = 1 ] && export PYTHONPATH={without_ucx(tmp_path)}:$PYTHONPATH; exec "$0" -c "$1"'
    code, out, err = run(ranks(2, shell), HPCRAY_DATA_PLANE="ucx")
    assert code == 1 and not out
    assert "TransportError: data_plane=ucx was asked for, but rank 1 on " in err
    assert "HPCRAY_DATA_PLANE=mpi" in err


def test_an_unknown_data_plane_is_refused(leak_check: LeakCheck) -> None:
    code, _, err = run([sys.executable, "-c", PROGRAM], HPCRAY_DATA_PLANE="pigeon")
    assert code == 1
    assert "data_plane='pigeon': it is one of auto, ucx, mpi" in err


def test_the_sites_environment_stays_as_it_is(leak_check: LeakCheck) -> None:
    program = (
        "import os, hpcray.transport.ucx_engine as u; before = dict(os.environ); u.load(); "
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    code, _, err = run([sys.executable, "-c", program], UCX_RNDV_THRESH="123456")
    assert code == 0, err
