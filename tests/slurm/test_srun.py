"""`srun … python -m hpcray script.py`, typed as anyone would: no variable of MPI, UCX or hpcray is set by hand."""

from __future__ import annotations

import programs
import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm
ALL = "hosts n1 n2 n3 n4"


def test_srun_starts_python_m_hpcray_on_all_nodes(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    line = [*SRUN, "-Q", "-N4", "python", "-m", "hpcray", script, "one", "two words"]
    ended = slurm.run("env", "-u", "HOME", *line)
    assert (ended.code, ended.err) == (0, ""), "it starts and ends without a word of its own"
    assert ended.out.splitlines()[0].endswith("task None one two words")
    assert ended.out.splitlines()[-1] == ALL


def test_srun_starts_a_script_that_calls_init(slurm: Slurm) -> None:
    script = slurm.write(programs.HOSTS)
    ended = slurm.run(*SRUN, "-N2", "python", script)
    assert ended.code == 0, ended.err
    assert ended.out.count("hosts") == 1
    assert ended.out.splitlines()[-1] == "hosts n1 n2"


@pytest.mark.slow
def test_srun_exits_with_the_programs_code(slurm: Slurm) -> None:
    script = slurm.write(programs.ENDING)
    ended = slurm.run(*SRUN, "-N2", "python", "-m", "hpcray", script, "raise")
    assert ended.code == 1, ended.err
    assert "ValueError: as the test wants it" in ended.err


@pytest.mark.parametrize("mpi", ["pmi2", "none"])
def test_a_wrong_mpi_option_of_srun_is_reported(slurm: Slurm, mpi: str) -> None:
    script = slurm.write(programs.HOSTS)
    ended = slurm.run("srun", f"--mpi={mpi}", "--ntasks-per-node=1", "-N2", "python", "-m", "hpcray", script)
    assert ended.code != 0
    assert "hosts" not in ended.out, "it must not run twice, each on one node"
    assert "each of them would be alone" in ended.err
    assert "--mpi=pmix" in ended.err


def test_scancel_of_a_step_leaves_nothing(slurm: Slurm) -> None:
    script = slurm.write(programs.BUSY)
    with slurm.start(*SRUN, "-N4", "-J", "busy", "python", "-m", "hpcray", script) as started:
        assert started.line() == "ready 4", started.wait()
        slurm.said("scancel", "-n", "busy")
        assert started.wait().code != 0
    slurm.check()
