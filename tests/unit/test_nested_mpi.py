"""hpcray.mpi without MPI: where ranks go, and the lines that start them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import hpcray
from hpcray.common.exceptions import StartupError
from hpcray.mpi import place
from hpcray.mpi.nested_job import NestedMpiSite, RankShare, compose, hostfile, launch_environ
from hpcray.mpi.processes import find_directory
from hpcray.platform.process_control import module_line


@pytest.mark.parametrize(
    ("ranks", "free", "total", "placed"),
    [
        (4, [4, 4], [4, 4], [(None, 4)]),  # one node has room: the scheduler chooses
        (4, [2, 3], [4, 4], [("a", 1), ("b", 3)]),  # no node has room for all now, two together have
        (4, [1, 2], [4, 4], [(None, 4)]),  # waiting for one node
        (6, [4, 0], [4, 4], [("a", 4), ("b", 2)]),  # waiting for both, in the order of the nodes
        (5, [1, 4, 4], [4, 4, 4], [("b", 4), ("c", 1)]),  # as few nodes as possible
        (9, [4, 4], [4, 4], []),
    ],
)
def test_ranks_of_a_nested_job_are_placed_on_as_few_nodes_as_possible(
    ranks: int, free: list[int], total: list[int], placed: list[tuple[str | None, int]]
) -> None:
    worlds = dict.fromkeys("abc", 0)
    assert place(ranks, dict(zip("abc", free, strict=False)), dict(zip("abc", total, strict=False)), worlds) == placed


@pytest.mark.parametrize(
    ("ranks", "free", "total", "placed"),
    [
        (4, [1, 1, 4, 0], [4, 4, 4, 4], [(None, 4)]),  # any world will do for one node
        (6, [4, 0, 4, 2], [4, 4, 4, 4], [("c", 4), ("d", 2)]),  # the second world has room
        (6, [4, 0, 0, 0], [4, 4, 4, 4], [("a", 4), ("b", 2)]),  # neither has: the first is waited for
        (9, [4, 4, 4, 4], [4, 4, 4, 4], []),
    ],
)
def test_ranks_of_a_nested_job_are_placed_in_one_world(
    ranks: int, free: list[int], total: list[int], placed: list[tuple[str | None, int]]
) -> None:
    worlds = dict(zip("abcd", (0, 0, 2, 2), strict=True))
    assert place(ranks, dict(zip("abcd", free, strict=True)), dict(zip("abcd", total, strict=True)), worlds) == placed


SHARES = [RankShare("n1", "/s/1", 0, 2), RankShare("n2", "/s/2", 2, 1)]


def site(**given: Any) -> NestedMpiSite:
    return NestedMpiSite(**{"python": "/p", "environ": {}, "host": "n1", "mpirun": "/m/mpirun", **given})


def test_mpirun_starts_the_ranks_of_one_host_on_localhost() -> None:
    line = compose([RankShare("n1", "/s/1", 0, 2), RankShare("n1", "/s/2", 2, 1)], site())
    assert line[:7] == ["/m/mpirun", "--host", "localhost", "-n", "3", "--map-by", "node:OVERSUBSCRIBE"]
    rank = module_line("hpcray.mpi.processes", "rank", python="/p")
    assert line[-len(rank) - 1 : -1] == rank
    assert json.loads(line[-1]) == {"shares": [["/s/1", 0, 2], ["/s/2", 2, 1]], "srun": False, "one_host": True}
    assert line[line.index("prte_tmpdir_base") + 1] == "/s/1"


def test_mpirun_gets_hosts_with_slots_and_exports_for_several_hosts() -> None:
    environ = {"HPCRAY_TICK": "1", "PYTHONPATH": "/x", "SECRET": "y", "HPCRAY_CONSOLE": "z"}
    line = compose(SHARES, site(environ=environ, root=True, export=("MINE",)))
    assert line[:4] == ["/m/mpirun", "--allow-run-as-root", "--host", "n1:2,n2:1"]
    assert [line[at + 1] for at, word in enumerate(line) if word == "-x"] == ["HPCRAY_TICK", "MINE", "PYTHONPATH"]


def test_srun_places_ranks_where_their_cpus_are_reserved() -> None:
    line = compose(SHARES, site(mpirun="", srun="pmix"))
    assert line[:7] == ["srun", "--mpi=pmix", "--overlap", "-N", "2", "-n", "3"]
    assert {"--distribution=arbitrary", "--kill-on-bad-exit=1"} <= set(line)
    assert hostfile(SHARES) == "n1\nn1\nn2\n"


@pytest.mark.parametrize(
    ("environ", "unbound"),
    [
        ({}, True),  # mpirun inside an allocation: nobody knows
        ({"SLURM_STEP_ID": "0"}, False),  # srun would say "cluster configuration lacks support for cpu binding"
        ({"SLURM_STEP_ID": "0", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1"}, True),
    ],
)
def test_srun_does_not_bind_nested_ranks(environ: dict[str, str], unbound: bool) -> None:
    line = compose(SHARES, site(mpirun="", srun="pmix", environ=environ))
    assert ("--cpu-bind=none" in line) is unbound


def test_a_nested_jobs_environment_has_no_variables_of_the_outer_launcher() -> None:
    outer = {
        "PMIX_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "PRTE_X": "1",
        "HPCRAY_CONSOLE": "c",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/c",
        "PATH": "/bin",
    }
    found = launch_environ(outer, {"A": "b"}, 2.5)
    assert found == {"SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "PATH": "/bin", "OMP_NUM_THREADS": "2", "A": "b"}


def test_a_nested_rank_finds_the_directory_of_its_node(tmp_path: Path) -> None:
    here, other = tmp_path / "1", tmp_path / "2"
    here.mkdir()
    shares: list[list[Any]] = [[str(here), 0, 2], [str(other), 2, 1]]
    assert find_directory(shares, {"PMIX_RANK": "1"}) == here
    assert find_directory(shares, {"SLURM_PROCID": "2"}) == here, "another node's share, on the same host"
    other.mkdir()
    assert find_directory(shares, {"OMPI_COMM_WORLD_RANK": "2"}) == other
    with pytest.raises(StartupError, match="MPI rank 0 runs on"):
        find_directory([[str(tmp_path / "3"), 0, 1]], {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": 0}, "ranks=0 is not a positive whole number"),
        ({"ranks": True}, "ranks=True"),
        ({"ranks": 1, "cpus_per_rank": -1}, "cpus_per_rank=-1"),
        ({"ranks": 1, "timeout": -1}, "timeout=-1"),
        ({"ranks": 1, "env": {"A": 1}}, "env has 'A': 1"),
    ],
)
def test_wrong_arguments_of_mpi_run_are_refused_before_anything_starts(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hpcray.mpi.run(os.getpid, **given)
    with pytest.raises(TypeError, match="42 is not callable"):
        hpcray.mpi.run(42, 1)  # type: ignore[arg-type]
    assert not hpcray.is_initialized()
