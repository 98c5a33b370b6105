"""GPUs that Slurm gives to a job: every actor that asks for one sees a device of its own."""

from __future__ import annotations

import programs
import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm
EACH = [f"n{node}:{device}" for node in (1, 2, 3, 4) for device in (0, 1)]


def devices(shown: str) -> list[str]:
    """What the line `devices …` lists."""
    lines = [line for line in shown.splitlines() if line.startswith("devices")]
    assert len(lines) == 1, shown
    return lines[0].split()[1:]


def test_eight_actors_see_eight_devices(slurm: Slurm) -> None:
    script = slurm.write(programs.GPUS)
    job = slurm.sbatch("-N4", "--gpus-per-node=2", slurm.source / "slurm" / "gpu.sbatch", script, "1")
    assert slurm.finish(job)["JobState"] == "COMPLETED", slurm.output()
    assert devices(slurm.output()) == EACH


def test_gpus_per_task_and_fractions(slurm: Slurm) -> None:
    script = slurm.write(programs.GPUS)
    ended = slurm.run(*SRUN, "-N2", "-n2", "--gpus-per-task=2", "python", "-m", "hpcray", script, "0.5")
    assert ended.code == 0, ended.err
    assert devices(ended.out) == sorted(EACH[:4] * 2)


def test_one_of_two_gpus_of_a_node(slurm: Slurm) -> None:
    """Two jobs on one node, a device each: neither sees the other's."""
    script = slurm.write(programs.GPUS)
    command = [*SRUN, "-w", "n1", "-c1", "--gpus-per-node=1", "python", "-m", "hpcray", script, "1"]
    with slurm.start(*command) as one, slurm.start(*command) as two:
        ends = [one.wait(), two.wait()]
    assert [end.code for end in ends] == [0, 0], ends
    assert sorted(devices(ends[0].out) + devices(ends[1].out)) == ["n1:0", "n1:1"]
