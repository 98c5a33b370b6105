"""Starts that cannot work end with one error that tells what to do: rank 0 speaks, the others leave."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, as_module, under_mpirun
from helpers.leaks import LeakCheck
from helpers.scripts import IDLE, write

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
    pytest.mark.timeout(180),
]


@pytest.mark.parametrize("start", [as_module, under_mpirun])
def test_mpi_that_a_site_imports_before_ucx(leak_check: LeakCheck, tmp_path: Path, start: object) -> None:
    pytest.importorskip("ucxx")
    write(tmp_path, "import mpi4py\nmpi4py.rc.initialize = False\nfrom mpi4py import MPI\n", "sitecustomize.py")
    line = start(3, write(tmp_path, IDLE))  # type: ignore[operator]
    with Job(line, {"PYTHONPATH": f"{tmp_path}:{ROOT}"}) as job:
        ended = job.wait()
    if "ready" in ended.out:
        pytest.skip("this MPI and this UCX fit in any order")
    assert ended.code != 0
    assert ended.err.count("hint: a sitecustomize module or a .pth file imports it") == 1, ended.err


def test_a_program_that_starts_mpi_itself(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, "from mpi4py import MPI\n" + IDLE)
    with Job(under_mpirun(2, script)) as job:
        ended = job.wait()
    assert ended.code != 0
    assert ended.err.count("this program has started MPI itself") == 1, ended.err


def test_rdma_that_is_not_there(leak_check: LeakCheck, tmp_path: Path) -> None:
    if os.path.isdir("/sys/class/infiniband"):
        pytest.skip("there is an adapter")
    with Job(as_module(3, Path("--require-rdma"), str(write(tmp_path, IDLE)))) as job:
        ended = job.wait()
    assert ended.code != 0
    assert ended.err.count("RDMA is required, but rank 0") == 1, ended.err
