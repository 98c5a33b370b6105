"""GPUs of several ranks on one host: those that srun bound to a rank are its own, a list that all see is divided."""

from __future__ import annotations

import pytest
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm

PROGRAM = """\
import os
import hpcray as ray
ray.init()
@ray.remote(num_cpus=0, num_gpus=1)
class Model:
    def look(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]
models = [Model.remote() for _ in range(2)]
print("each", [node["Resources"].get("GPU") for node in ray.nodes()])
print("seen", sorted(ray.get([model.look.remote() for model in models])))
"""


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(["--gpus-per-task=1"], id="per task"),
        pytest.param(["--gpus-per-node=2"], id="per node", marks=pytest.mark.slow),
        pytest.param(["--gpus-per-node=2", "--gpu-bind=single:1"], id="bound", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_on_a_host_never_share_a_device(slurm: Slurm, given: list[str]) -> None:
    script = slurm.write(PROGRAM)
    ranks = ["srun", "--mpi=pmix", "-N1", "-n2", *given, "python", "-m", "hpcray", "--num-cpus", "1"]
    ended = slurm.run(*ranks, script)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines() == ["each [1.0, 1.0]", "seen ['0', '1']"]
