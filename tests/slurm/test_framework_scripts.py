"""The job scripts of frameworks in slurm/ that start Ray node by node. What comes first on PATH and on Python's path
takes the trainer's place, and makes its calls of Ray without a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(300)]
STANDIN = '''\
import os, socket, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

def value(*names):
    """The number behind the first of these options, in one of the ways in which frameworks write them."""
    words = sys.argv[1:]
    for i, word in enumerate(words):
        for name in names:
            if word.startswith(name + "="):
                return int(word.partition("=")[2])
            if word == name:
                return int(words[i + 1])
    raise SystemExit(f"none of {names} in {words}")

@ray.remote
class Worker:
    def where(self):
        return socket.gethostname(), ray.util.get_node_ip_address(), len(ray.get_gpu_ids())
    def rank(self):
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

nodes = value("trainer.nnodes", "--actor.num_nodes", "cluster.num_nodes", "trainer.placement.policy_num_nodes",
              "--pipeline-parallel-size")
gpus = value("trainer.n_gpus_per_node", "--actor.num_gpus_per_node", "cluster.gpus_per_node",
             "trainer.placement.policy_num_gpus_per_node", "--tensor-parallel-size")
if not ray.is_initialized():
    ray.init(runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "true"}})
pools = [placement_group([{"CPU": 1, "GPU": 1}] * gpus, strategy="STRICT_PACK") for _ in range(nodes)]
ray.get([pool.ready() for pool in pools], timeout=60)
workers = []
for pool in pools:
    for bundle in range(gpus):
        variables = {"RANK": str(len(workers)), "WORLD_SIZE": str(nodes * gpus)}
        workers.append(Worker.options(num_cpus=1, num_gpus=1, runtime_env={"env_vars": variables},
                                      scheduling_strategy=Place(pool, bundle)).remote())
places = ray.get([worker.where.remote() for worker in workers], timeout=60)
assert ray.get([worker.rank.remote() for worker in workers]) == [(i, len(workers)) for i in range(len(workers))]
assert all(f"node:{address}" in ray.cluster_resources() for _, address, _ in places)
print("trained on", *sorted({host for host, _, _ in places}), "gpus", sum(gpu for _, _, gpu in places), flush=True)
ray.shutdown()
sys.exit(3 if "--fail" in sys.argv else 0)
'''
MODULES = (
    "verl/trainer/main_ppo.py",
    "openrlhf/cli/train_ppo_ray.py",
    "skyrl/train/entrypoints/main_base.py",
    "driver.py",
)

Submit = Callable[..., tuple[str, str]]


@pytest.fixture
def submit(slurm: Slurm) -> Submit:
    """Submit slurm/NAME.sbatch on three nodes; gives its exit code and what it printed."""
    (slurm.place / "slurm").symlink_to(slurm.source / "slurm")
    for name in MODULES:
        path = slurm.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(STANDIN)
    python = slurm.python
    for name, line in {"ray": f'{python} -m hpcray.cli.ray "$@"', "vllm": f'{python} driver.py "$@"'}.items():
        slurm.write(f"#!/bin/sh\nexec {line}\n", name)
    standin = slurm.source / "hpcray" / "compat" / "standin"
    environ = {
        "PATH": f"{slurm.place}:{slurm.environ()['PATH']}",
        "PYTHONPATH": f"{slurm.place}:{standin}:{slurm.environ()['PYTHONPATH']}",
        "HPCRAY_START_DIR": str(slurm.place.parent / f"clusters-{slurm.place.name}"),
        "HPCRAY_OBJECT_STORE_MEMORY": "64m",
    }

    def run(name: str, *arguments: str) -> tuple[str, str]:
        job = slurm.sbatch("-N3", "--gpus-per-node=2", f"slurm/{name}.sbatch", *arguments, environ=environ)
        facts = slurm.finish(job, 120.0)
        said = (slurm.place / f"hpcray-{name}-{job}.out").read_text()
        return facts["ExitCode"].split(":")[0], said

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("verl", ["data.train_batch_size=8"]),
        ("openrlhf", ["--actor.model_name_or_path", "none"]),
        ("nemo-rl", ["driver.py"]),
        ("skyrl", ["trainer.epochs=1"]),
        ("vllm-serve", ["none", "--port", "8000"]),
    ],
)
def test_the_trainer_has_all_nodes_and_the_job_has_its_exit_code(
    submit: Submit, name: str, arguments: list[str]
) -> None:
    code, said = submit(name, *arguments)
    assert "trained on n1 n2 n3 gpus 6" in said and code == "0", said
    code, said = submit(name, *arguments, "--fail")
    assert "trained on n1 n2 n3 gpus 6" in said and code == ("1" if name == "openrlhf" else "3"), said
