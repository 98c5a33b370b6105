"""`hpcray-launch` inside an allocation."""

from __future__ import annotations

import os
from collections.abc import Iterator

import programs
import pytest
from helpers.slurm import SRUN, Slurm, boot, leak_checked
from testcluster.cluster import why_not

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_it_uses_every_node_of_the_allocation(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    ended = slurm.run("salloc", "-Q", "-N3", "hpcray-launch", "--srun", script, "an argument")
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1].count(" n") == 3, ended.out
    assert ended.out.splitlines()[0].endswith(" an argument")


def test_dry_run_prints_the_line_that_would_run(slurm: Slurm) -> None:
    ended = slurm.run("salloc", "-Q", "-N2", "hpcray-launch", "--srun", "--dry-run", "program.py", "x y")
    assert ended.code == 0, ended.err
    line = ended.out.strip()
    assert line.endswith("-m hpcray program.py 'x y'")
    for option in ("srun --mpi=pmix", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0"):
        assert option in line
    assert not slurm.run("squeue", "-h", "-s").out


def test_srun_outside_an_allocation_is_refused(slurm: Slurm) -> None:
    ended = slurm.run("hpcray-launch", "--srun", "program.py")
    assert ended.code == 2
    assert "hint: salloc" in ended.err


@pytest.fixture
def binding() -> Iterator[Slurm]:
    """A Slurm that binds tasks, as most sites have it."""
    if reason := why_not():
        pytest.skip(reason)
    if (os.cpu_count() or 1) < 2:
        pytest.skip("one CPU")
    cluster = boot(1, "binding", binding=True)
    try:
        with leak_checked(cluster, "binding") as slurm:
            yield slurm
    finally:
        cluster.down()


def test_the_ranks_are_not_bound_to_one_core(binding: Slurm) -> None:
    script = binding.write(programs.CPUS)
    ended = binding.run("salloc", "-Q", "-N1", "--exclusive", "hpcray-launch", script)
    assert ended.out.split() == [f"{os.cpu_count():.1f}", str(os.cpu_count())], ended.err
    ended = binding.run(*SRUN, "-N1", "--exclusive", "python", "-m", "hpcray", script)
    assert ended.out.split() == ["1.0", "1"], "srun gives a task one core of a whole node"
    assert f"may use 1 of the {os.cpu_count()} CPUs" in ended.err


@pytest.mark.slow
def test_a_job_with_one_core_has_one(binding: Slurm) -> None:
    ended = binding.run("salloc", "-Q", "-N1", "-n1", "-c1", "hpcray-launch", binding.write(programs.CPUS))
    assert ended.out.split() == ["1.0", "1"], ended.err
