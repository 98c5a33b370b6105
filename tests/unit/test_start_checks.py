"""Set-ups that cannot work are named before MPI starts, with what to do; those that can are let through."""

from __future__ import annotations

import os
import sys
import types
from collections import namedtuple
from pathlib import Path

import pytest

from hpcray.platform import launcher_environment
from hpcray.platform.launcher_environment import mpi_settings_under_srun, set_mpi_variables, strip_launcher_variables
from hpcray.processes import bootstrap
from hpcray.transport.base import StartError
from hpcray.transport.startup import (
    Launch,
    check_fault_tolerance,
    check_import_order,
    check_protocol,
    check_shared_memory,
    few_cores,
    require,
    several_tasks,
    threads_of_a_core,
)

SRUN = Launch("srun", 0, 2, "slurm-1.0", 1)
OPEN_MPI = "Open MPI v5.0.11, package: Open MPI root@x Distribution\0"
OPEN_MPI_4 = "Open MPI v4.1.6, package: Debian OpenMPI"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi"
MVAPICH = "MVAPICH2 Version      :\t2.3.7\nMVAPICH2 Release date  :\tWed March 02"
PMIX = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0"}
PMI2 = {"PMI_RANK": "0", "PMI_FD": "11", "PMI_SIZE": "2"}


@pytest.mark.parametrize(
    ("library", "environ", "flag"),
    [
        (OPEN_MPI, PMIX, ""),
        (OPEN_MPI, PMI2, "--mpi=pmix"),
        (OPEN_MPI, {}, "--mpi=pmix"),
        (OPEN_MPI_4, PMI2, ""),
        (OPEN_MPI_4, {}, "--mpi=pmix"),
        (MPICH, PMI2, ""),
        (MPICH, PMIX, "--mpi=pmi2"),
        (MPICH, {}, "--mpi=pmi2"),
        (MPICH + " --with-pmix=/usr", PMIX, ""),
        (MVAPICH, PMI2, ""),
        (MVAPICH, PMIX, "--mpi=pmi2"),
        (MVAPICH, {}, "--mpi=pmi2"),
        ("Intel(R) MPI Library 2021.11", {}, ""),
    ],
)
def test_what_srun_offers_and_what_the_library_speaks(library: str, environ: dict[str, str], flag: str) -> None:
    found = check_protocol(SRUN, library, environ)
    assert bool(found) is bool(flag)
    if flag:
        assert f"hint: srun {flag} " in found and "its 2 tasks" in found


def test_only_srun_with_several_tasks_is_judged() -> None:
    assert check_protocol(Launch("mpirun", 0, 4), OPEN_MPI, {}) == ""
    assert check_protocol(Launch("srun", 0, 1), OPEN_MPI, {}) == ""


@pytest.mark.parametrize(("value", "refused"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_ulfm_under_srun(value: str, refused: bool) -> None:
    environ = {"OMPI_MCA_mpi_ft_enable": value}
    assert bool(check_fault_tolerance(SRUN, environ)) is refused
    assert not check_fault_tolerance(Launch("mpirun", 0, 4), environ)


Statvfs = namedtuple("Statvfs", "f_bavail f_frsize f_blocks")


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: Statvfs(100, 4096, 16384))
    assert "has 400 KiB free of 65536 KiB" in check_shared_memory()
    monkeypatch.setattr(os, "statvfs", lambda path: Statvfs(16384, 4096, 16384))
    assert check_shared_memory() == ""
    monkeypatch.undo()
    assert "cannot be used (No such file" in check_shared_memory(str(tmp_path / "none"))


def test_mpi_that_was_imported_before_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ucxx", raising=False)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert check_import_order() == ""
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    assert "let that import ucxx first" in check_import_order()


def test_several_tasks_on_a_host_are_said() -> None:
    assert "--ntasks-per-node=1" in several_tasks(Launch("srun", 0, 8, "", 4))
    assert several_tasks(SRUN) == several_tasks(Launch("mpirun", 0, 8, "", 8)) == ""


@pytest.mark.parametrize(
    ("launch", "cpus", "mask", "threads", "told"),
    [
        (SRUN, 8, 1, 1, True),
        (SRUN, 8, 1, 2, True),
        (SRUN, 8, 8, 1, False),
        (SRUN, 8, 4, 2, False),  # --hint=nomultithread
        (SRUN, None, 1, 1, False),
        (Launch("srun", 0, 2, "", 2), 8, 4, 1, False),  # each of two tasks has its half
        (Launch("mpirun", 0, 2, "", 1), 8, 1, 1, False),
    ],
)
def test_a_task_that_is_bound_to_a_part_of_its_node(
    launch: Launch, cpus: int | None, mask: int, threads: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    said = few_cores(launch, cpus, range(mask), threads)
    assert bool(said) is told
    if told:
        assert f"may use {mask} of the {cpus} CPUs" in said and f"--cpus-per-task={cpus}" in said
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert few_cores(launch, cpus, range(mask), threads) == "", "there are no more, whatever Slurm was told"


def test_threads_of_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    siblings = tmp_path / "thread_siblings_list"
    monkeypatch.setattr("hpcray.transport.startup._SIBLINGS", str(siblings))
    assert threads_of_a_core() == 1
    for text, count in (("0\n", 1), ("0,64\n", 2), ("0-3\n", 4)):
        siblings.write_text(text)
        assert threads_of_a_core() == count


def test_what_all_ranks_have_is_told_by_rank_0() -> None:
    require("", SRUN, everywhere=True)
    with pytest.raises(StartError) as first:
        require("wrong", SRUN, everywhere=True)
    assert (first.value.reported_by, first.value.others_wait) == ("self", False)
    with pytest.raises(StartError) as second:
        require("wrong", Launch("srun", 1, 2), everywhere=True)
    assert second.value.reported_by == "rank0"
    with pytest.raises(StartError, match="wrong") as own:
        require("wrong", Launch("srun", 1, 2), everywhere=False)
    assert (own.value.reported_by, own.value.others_wait) == ("self", True)


def test_a_program_that_has_started_mpi_itself_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(Is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    with pytest.raises(bootstrap.StartupError, match=r"started MPI itself.*hint: python -m hpcray"):
        bootstrap._refuse_second_mpi(SRUN)
    module.Is_initialized = lambda: False
    bootstrap._refuse_second_mpi(SRUN)


# ---------------------------------------------------------------- what srun does not set


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI from PyPI in /env."""
    monkeypatch.setattr(launcher_environment, "open_mpi_wheel_prefix", lambda: "/env")
    monkeypatch.setattr(launcher_environment, "_added", set())


def test_srun_with_the_wheel_adds_what_is_missing_and_takes_it_from_user_processes(wheel: None) -> None:
    environ = {"HOME": "/nowhere", "OMPI_MCA_pml": "cm", "PATH": "/bin"}
    before = dict(environ)
    set_mpi_variables(environ, under_srun=True)
    assert environ["OPAL_PREFIX"] == "/env"
    assert environ["OMPI_MCA_pml"] == "cm", "what the site or the user has set stays"
    assert environ["OMPI_MCA_osc"] == "^ucx"
    child = dict(environ)
    strip_launcher_variables(child)
    assert child == {name: value for name, value in before.items() if not name.startswith("OMPI_")}


def test_nothing_is_added_under_mpirun_or_to_a_sites_mpi(wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HOME": "/nowhere"}
    set_mpi_variables(environ, under_srun=False)
    monkeypatch.setattr(launcher_environment, "open_mpi_wheel_prefix", lambda: "")
    set_mpi_variables(environ, under_srun=True)
    assert environ == {"HOME": "/nowhere"}


def test_a_users_parameter_file_counts_as_set(tmp_path: Path) -> None:
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("# mine\npml = ob1\n# osc = rdma\n")
    added = mpi_settings_under_srun("/env", {"HOME": str(tmp_path)})
    assert "OMPI_MCA_pml" not in added and "OMPI_MCA_osc" in added


def test_home_is_there_for_mpi(wheel: None) -> None:
    for environ in ({}, {"HOME": ""}):
        set_mpi_variables(environ, under_srun=False)
        assert os.path.isabs(environ["HOME"])
