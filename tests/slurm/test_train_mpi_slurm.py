"""Ray Train over several nodes: its workers as the ranks of one MPI job, and gloo between them."""

from __future__ import annotations

import json
import time

import pytest
from helpers.slurm import Slurm

pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(900)]
_PATIENCE = 400.0

TRAINING = """\
import json, os, socket, sys, time
import ray, ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from hpcray.train import MPIConfig

PLACE, HOW = sys.argv[1:]
MARKER = os.path.join(PLACE, "once")


def loop():
    import numpy, torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm, context = MPI.COMM_WORLD, ray.train.get_context()
    assert (comm.rank, comm.size) == (context.get_world_rank(), context.get_world_size())
    hosts = comm.allgather(socket.gethostname())
    if HOW != "well" and not os.path.exists(MARKER):
        comm.Barrier()
        if HOW == "raise" and comm.rank == comm.size - 1:
            open(MARKER, "w").close()
            raise RuntimeError("once")
        if HOW == "lose" and comm.rank == 0:
            print("ready", flush=True)
        comm.recv(source=(comm.rank + 1) % comm.size)  # never comes
    large = numpy.full(1 << 20, comm.rank, dtype=numpy.float64)  # 8 MB: not sent eagerly
    total = numpy.empty_like(large)
    comm.Allreduce(large, total)
    tensor = torch.full((1 << 18,), float(comm.rank))
    torch.distributed.all_reduce(tensor)
    ray.train.report({"sum": float(total[-1])})
    if comm.rank == 0:
        found = {
            "hosts": sorted(set(hosts)), "size": comm.size, "sum": [float(total[0]), float(total[-1])],
            "torch": tensor[-1].item(), "master": os.environ["MASTER_ADDR"], "gloo": os.environ["GLOO_SOCKET_IFNAME"],
        }
        with open(os.path.join(PLACE, "found"), "w") as file:
            json.dump(found, file)
    return float(total[-1])


ray.init()
result = DataParallelTrainer(
    loop,
    backend_config=MPIConfig(torch_config=TorchConfig(backend="gloo")),
    scaling_config=ScalingConfig(num_workers=4, placement_strategy="SPREAD"),
    run_config=RunConfig(name="mpi", storage_path=PLACE, failure_config=FailureConfig(max_failures=2)),
).fit()
print("result", result.return_value, flush=True)
"""


@pytest.mark.parametrize("how", ["well", "raise", "lose"])
def test_workers_on_several_nodes_are_ranks_of_one_mpi_job(slurm: Slurm, lent: dict[str, str], how: str) -> None:
    """Two nodes have room for the workers, so that there is room for all without a third one that is lost."""
    script, nodes = slurm.write(TRAINING), 2 if how == "well" else 3
    environ = {**lent, "HPCRAY_PRELOAD": "torch,ray.train"}
    batch = slurm.source / "slurm" / "cpu.sbatch"
    job = slurm.sbatch(f"-N{nodes}", batch, "--as-ray", script, slurm.place, how, environ=environ)
    if how == "lose":
        slurm.wait_output(job, "ready", _PATIENCE)
        slurm.write("", "once")
        lost = time.time()
        slurm.kill("n2")
    slurm.complete(job, _PATIENCE)
    found = json.loads((slurm.place / "found").read_text())
    if how == "lose":
        print(f"went on and ended {time.time() - lost:.1f} s after the loss")
        assert "n2" not in found["hosts"] and len(found["hosts"]) == 2
    assert len(found["hosts"]) >= 2
    assert (found["size"], found["sum"], found["torch"]) == (4, [6.0, 6.0], 6.0)
    assert found["master"].startswith("10.99.0.") and found["gloo"] not in ("", "lo")
    assert "result 6.0" in slurm.output()
    slurm.check()
