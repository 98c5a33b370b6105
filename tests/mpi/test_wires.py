"""Control transport and data plane between real ranks on this host, over UCX and over MPI alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import MPIRUN, Job
from helpers.leaks import LeakCheck

# Not the mark `mpi`: that is for tests that pytest-mpi runs inside of mpirun; these start mpirun themselves.
pytestmark = pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun")

SCENARIOS = Path(__file__).parent / "wire_scenarios.py"
PML_UCX = ("--mca", "pml", "ucx", "--mca", "osc", "^ucx")
PML_UCX += ("--mca", "opal_common_ucx_tls", "any", "--mca", "opal_common_ucx_devices", "any")


def run(name: str, ranks: int, flags: tuple[str, ...] = (), **environ: str) -> tuple[int, str, str]:
    command = [*MPIRUN, *flags, "-n", str(ranks), sys.executable, str(SCENARIOS), name]
    with Job(command, {"PYTHONPATH": f"{SCENARIOS.parents[1]}:{SCENARIOS.parents[2]}", **environ}) as job:
        end = job.wait(100)
    return end.code, end.out, end.err


@pytest.mark.parametrize("plane", ["ucx", "mpi"])
@pytest.mark.parametrize("name, ranks", [("control", 3), ("asleep", 2), ("burst", 2), ("data", 2), ("cancel", 2)])
def test_messages_and_objects_arrive_whole_over_each_plane(
    name: str, ranks: int, plane: str, leak_check: LeakCheck
) -> None:
    code, out, err = run(name, ranks, HPCRAY_DATA_PLANE=plane)
    assert code == 0, err
    assert out.count(f"{name} ok") == ranks, out + err


@pytest.mark.parametrize("name", ["asleep", "data"])
def test_sleepers_wake_and_objects_arrive_over_tcp_as_between_hosts(name: str, leak_check: LeakCheck) -> None:
    code, out, err = run(name, 2, HPCRAY_DATA_PLANE="ucx", UCX_TLS="tcp,self")
    assert code == 0, err
    assert out.count(f"{name} ok") == 2, out + err


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tls"), [("links", "tcp,self"), ("links", "posix,self"), ("underway", "tcp,self")])
def test_a_broken_link_between_living_ranks_is_made_anew(name: str, tls: str, leak_check: LeakCheck) -> None:
    code, out, err = run(name, 2, HPCRAY_DATA_PLANE="ucx", UCX_TLS=tls)
    assert code == 0, err
    assert out.count(f"{name} ok") == 2, out + err


@pytest.mark.slow
def test_control_messages_arrive_where_mpi_itself_uses_ucx(leak_check: LeakCheck) -> None:
    code, out, err = run("control", 3, PML_UCX, HPCRAY_DATA_PLANE="ucx")
    assert code == 0, err
    assert out.count("control ok") == 3, out + err


@pytest.mark.parametrize("flags", [("--with-ft", "ulfm"), ("--enable-recovery", *PML_UCX)], ids=["ulfm", "ucx"])
def test_the_death_of_a_rank_amid_transfers_ends_them_and_nothing_else(
    flags: tuple[str, ...], leak_check: LeakCheck
) -> None:
    _, out, err = run("death", 3, flags, HPCRAY_DATA_PLANE="ucx")
    assert out.count("death ok") == 2, out + err
