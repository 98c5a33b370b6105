"""Train, on hpcray alone: where workers listen, and workers that are the ranks of an MPI job, also after a failure."""

import json
import os
import socket
import struct
import tempfile

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from hpcray.train import MPIConfig


def listening():
    """The addresses that this process listens at, over TCP."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/self/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                    digits = fields[1].partition(":")[0]
                    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
                    found.add(socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)))
    return sorted(found)


def torch_loop():
    import torch

    rank = ray.train.get_context().get_world_rank()
    total = torch.tensor([float(rank)])
    torch.distributed.all_reduce(total)
    subgroup = torch.distributed.new_group([0, 1])
    torch.distributed.all_reduce(total, group=subgroup)
    everywhere = [None] * 2
    torch.distributed.all_gather_object(everywhere, listening())
    return {"total": total.item(), "listening": everywhere, "master": os.environ["MASTER_ADDR"]}


def mpi_loop(config):
    import torch
    from mpi4py import MPI

    comm, context = MPI.COMM_WORLD, ray.train.get_context()
    assert (comm.rank, comm.size) == (context.get_world_rank(), context.get_world_size())
    assert not [name for name in os.environ if name.startswith(("PMIX_", "OMPI_"))]
    if not os.path.exists(config["marker"]):
        comm.Barrier()
        if comm.rank == 1:
            open(config["marker"], "w").close()
            if config["how"] == "exit":
                os._exit(5)
            raise RuntimeError("once")
        comm.recv(source=1)  # never comes
    total = torch.tensor([float(comm.rank)])
    torch.distributed.all_reduce(total)
    pids = comm.allgather(os.getpid())
    ray.train.report({"sum": comm.allreduce(comm.rank)})
    return {"sum": comm.allreduce(comm.rank), "torch": total.item(), "processes": len(set(pids)), "ports": listening()}


def main(storage):
    ray.init(num_cpus=4)
    config = RunConfig(name="torch", storage_path=storage)
    found = {"torch": TorchTrainer(torch_loop, scaling_config=ScalingConfig(num_workers=2), run_config=config).fit()}
    for how in ("exit", "raise"):
        found[how] = DataParallelTrainer(
            mpi_loop, train_loop_config={"marker": os.path.join(storage, how), "how": how},
            backend_config=MPIConfig(torch_config=TorchConfig(backend="gloo")),
            scaling_config=ScalingConfig(num_workers=3),
            run_config=RunConfig(name=how, storage_path=storage, failure_config=FailureConfig(max_failures=1)),
        ).fit()  # fmt: skip
    print(json.dumps({name: result.return_value for name, result in found.items()}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(folder)
