"""Tensors on a GPU between actors: the rows of `gpu_check.sh`, one a line, with what is wanted of each.

    python benchmarks/gpu_rows.py
    python benchmarks/gpu_rows.py --device cpu --seconds 0.2 --churn 200     (the same code without a GPU)
    python benchmarks/gpu_rows.py --engine ray --transports object_store cuda_ipc

A figure is the median. Times are those of a whole call: the reader gets the ref, reads one element of the tensor on the
device, and answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

try:
    import torch
except ImportError:  # `--help` needs none
    torch = None

SIZES = {"4 KB": 4_000, "1 MB": 1_000_000, "100 MB": 100_000_000, "1 GB": 1_000_000_000}


class Maker:
    """Makes tensors on the device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.known: Any = None

    def ready(self) -> bool:
        torch.zeros(1, device=self.device)
        return True

    def allocate(self, size: int) -> None:
        self.known = torch.ones(size // 4, device=self.device)

    def give_known(self) -> Any:
        return self.known

    def give_new(self, size: int) -> Any:
        return torch.ones(size // 4, device=self.device)

    def fill(self, value: float) -> None:
        self.known.fill_(value)
        if self.device != "cpu":
            torch.cuda.synchronize()

    def memory(self) -> dict[str, int]:
        """What may grow: bytes of the device, open descriptors."""
        used = 0
        if self.device != "cpu":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            used = total - free
        return {"device bytes": used, "descriptors": len(os.listdir("/proc/self/fd"))}


class Reader(Maker):
    """Reads tensors on the device."""

    def read(self, tensor: Any) -> float:
        return float(tensor.to(self.device)[-1])

    def read_private(self, refs: list[Any], ray_name: str) -> float:
        """Read a copy of this process's own: a known allocation of another process passes through the host."""
        ray = importlib.import_module(ray_name)
        return float(ray.get(refs[0], _use_object_store=True).to(self.device)[-1])

    def keep(self, tensor: Any) -> None:
        self.known = tensor

    def kept(self) -> float:
        return float(self.known[-1])

    def host_to_device(self, refs: list[Any], ray_name: str) -> float:
        """Seconds of the get of a host tensor or array, and of its copy to the device."""
        ray = importlib.import_module(ray_name)
        began = time.perf_counter()
        found = ray.get(refs[0])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            tensor = (found if isinstance(found, torch.Tensor) else torch.from_numpy(found)).to(self.device)
        float(tensor[-1])
        return time.perf_counter() - began

    def device_to_store(self, size: int, ray_name: str) -> float:
        """Seconds of the put of a tensor on the device, into the store."""
        ray = importlib.import_module(ray_name)
        if self.known is None or self.known.nbytes != size // 4 * 4:
            self.allocate(size)
            float(self.known[-1])
        began = time.perf_counter()
        ref = ray.put(self.known)
        took = time.perf_counter() - began
        del ref
        return took

    def join(self, size: int, rank: int, name: str) -> None:
        """Join a collective group on NCCL."""
        module = importlib.import_module(f"{name}.util.collective")
        module.init_collective_group(size, rank, "nccl" if self.device != "cpu" else "gloo", "rows")

    def reduce_all(self, size: int, count: int, name: str) -> float:
        """Seconds of one of `count` allreduces."""
        module = importlib.import_module(f"{name}.util.collective")
        tensor = torch.ones(size // 4, device=self.device)
        for number in range(count + 2):
            if number == 2:
                module.barrier("rows")
                began = time.perf_counter()
            module.allreduce(tensor, "rows")
        module.barrier("rows")
        return (time.perf_counter() - began) / count


def median_of(call: Callable[[], Any], seconds: float) -> float:
    """Seconds of the median call; two to warm up, then for so many seconds, five calls at least."""
    took: list[float] = []
    end = 0.0
    for number in range(10_000):
        if number == 2:
            end = time.perf_counter() + seconds
        began = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - began)
        del result
        if number >= 6 and time.perf_counter() > end:
            break
    return statistics.median(took[2:])


def row(rows: dict[str, float], name: str, value: float, unit: str, wanted: str) -> None:
    """Print a row, and keep it."""
    rows[f"{name} [{unit}]"] = value
    print(f"{name:58} {value:12.3f} {unit:5} wanted: {wanted}", flush=True)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """All rows."""
    ray = importlib.import_module(options.engine)
    device = options.device
    gpus = 0 if device == "cpu" else 0.25
    ours = {"preload": "torch"} if options.engine == "hpcray" else {}
    ray.init(num_cpus=4, object_store_memory=6 << 30, **({} if gpus else {"num_gpus": 0}), **ours)
    rows: dict[str, float] = {}
    started = []
    actors = []
    extra = {"enable_tensor_transport": True}
    for number in range(3):
        kind = ray.remote(num_cpus=0, num_gpus=gpus, **extra)(Reader if number else Maker)
        began = time.perf_counter()
        actors.append(kind.remote(device))
        ray.get(actors[-1].ready.remote())
        started.append(time.perf_counter() - began)
    row(rows, "first actor that uses the device is up", started[0], "s", "-")
    row(rows, "second actor that uses the device is up", started[1], "s", "<= 0.7")
    row(rows, "third actor that uses the device is up", started[2], "s", "<= 0.7")
    maker, reader, _ = actors
    for transport in options.transports:
        give, new = (getattr(maker, name).options(tensor_transport=transport) for name in ("give_known", "give_new"))
        for name, size in SIZES.items():
            if size > options.largest:
                continue
            ray.get(maker.allocate.remote(size))
            seconds = median_of(lambda give=give: ray.get(reader.read.remote(give.remote())), options.seconds)
            row(rows, f"{transport}: known allocation, {name}", 1e3 * seconds, "ms", "<= 0.5")
            row(rows, f"{transport}: known allocation, {name}, rate", size / seconds / 1e9, "GB/s", "-")
            ray.get(reader.keep.remote(give.remote()))
            ray.get(maker.fill.remote(2.0))
            in_place = ray.get(reader.kept.remote()) == 2.0
            mapped = not options.pool and options.device != "cpu" and transport != "object_store"
            row(rows, f"{transport}: read in place, {name}", in_place, "", str(int(mapped)))
            ray.get(reader.allocate.remote(4))
            seconds = median_of(
                lambda new=new, size=size: ray.get(reader.read.remote(new.remote(size))), options.seconds
            )
            row(rows, f"{transport}: new allocation, {name}", 1e3 * seconds, "ms", "<= 3 for 1 GB")
    through_host(ray, options, maker, reader, rows)
    size = min(SIZES["1 GB"], options.largest)
    ref = ray.put(torch.ones(size // 4))
    array = ray.put(np.ones(size // 4, np.float32))
    for name, one, wanted in (("tensor", ref, "-"), ("NumPy array", array, ">= 40")):
        took = [ray.get(reader.host_to_device.remote([one], options.engine)) for _ in range(9)]
        rate = size / statistics.median(took[4:]) / 1e9
        row(rows, f"get of a host {name} and its copy to the device", rate, "GB/s", wanted)
    del ref, array
    took = [ray.get(reader.device_to_store.remote(size, options.engine)) for _ in range(9)]
    row(rows, "put of a device tensor into the store", size / statistics.median(took[4:]) / 1e9, "GB/s", ">= 35")
    churn(ray, options, maker, reader, rows)
    for actor in actors:
        ray.kill(actor)
    other_gpus(ray, options, rows)
    collectives(ray, options, rows)
    ray.shutdown()
    if options.engine == "hpcray" and not options.pool:
        moved(ray, options, rows)
    return rows


def through_host(ray: Any, options: argparse.Namespace, maker: Any, reader: Any, rows: dict[str, float]) -> None:
    """The way to a GPU that cannot map the memory of the other one: each call returns the tensor as a new object, and
    the reader asks for a private copy, which passes through the store in pieces."""
    if options.engine != "hpcray" or options.transports[0] == "object_store":
        return
    give = maker.give_known.options(tensor_transport=options.transports[0])
    for name, size in SIZES.items():
        if size > options.largest:
            continue
        ray.get(maker.allocate.remote(size))
        seconds = median_of(
            lambda: ray.get(reader.read_private.remote([give.remote()], options.engine)), options.seconds
        )
        row(rows, f"device to device through the host, {name}", 1e3 * seconds, "ms", "-")
        wanted = ">= 35" if size >= SIZES["1 GB"] else "-"
        row(rows, f"device to device through the host, {name}, rate", size / seconds / 1e9, "GB/s", wanted)
    ray.get([maker.allocate.remote(4), reader.allocate.remote(4)])


def untried(name: str, why: str) -> None:
    """Print a row that this machine cannot measure."""
    print(f"{name:58} {'untried: ' + why}", flush=True)


def other_gpus(ray: Any, options: argparse.Namespace, rows: dict[str, float]) -> None:
    """A tensor of one GPU that a process with another GPU reads. Each sees its own GPU alone, so the tensor passes
    through the host."""
    count = torch.cuda.device_count() if options.device != "cpu" else 0
    size = min(SIZES["1 GB"], options.largest)
    if count < 2 or options.engine != "hpcray":
        untried("reader with another GPU, through the host", "it needs two GPUs")
        return
    kind = ray.remote(num_cpus=0, num_gpus=1)
    maker, reader = kind(Maker).remote(options.device), kind(Reader).remote(options.device)
    ray.get([maker.ready.remote(), reader.ready.remote(), maker.allocate.remote(size)])
    give = maker.give_known.options(tensor_transport="auto")
    seconds = median_of(lambda: ray.get(reader.read.remote(give.remote())), options.seconds)
    row(rows, "reader with another GPU, through the host, rate", size / seconds / 1e9, "GB/s", ">= 35")
    for actor in (maker, reader):
        ray.kill(actor)


def collectives(ray: Any, options: argparse.Namespace, rows: dict[str, float]) -> None:
    """An allreduce of as many ranks as there are GPUs. NCCL refuses two ranks on one GPU."""
    ranks = torch.cuda.device_count() if options.device != "cpu" else 2
    if ranks < 2:
        untried("NCCL: allreduce", "it needs two GPUs")
        return
    kind = ray.remote(num_cpus=0, num_gpus=1 if options.device != "cpu" else 0)(Reader)
    members = [kind.remote(options.device) for _ in range(ranks)]
    ray.get([member.join.remote(ranks, rank, options.engine) for rank, member in enumerate(members)])
    for name, size in SIZES.items():
        if size > options.largest:
            continue
        count = 20 if size <= 1_000_000 else 5
        seconds = max(ray.get([member.reduce_all.remote(size, count, options.engine) for member in members]))
        row(rows, f"allreduce of {ranks} ranks, {name}", 1e3 * seconds, "ms", "-")
        row(rows, f"allreduce of {ranks} ranks, {name}, rate", size / seconds / 1e9, "GB/s", "NCCL's own")
    for member in members:
        ray.kill(member)


def moved(ray: Any, options: argparse.Namespace, rows: dict[str, float]) -> None:
    """Device objects that exceed their budget: the first ones have moved to the store, and are read there."""
    size, count = min(SIZES["100 MB"], options.largest), 8
    ray.init(
        num_cpus=4, object_store_memory=6 << 30, device_object_memory=2 * size + 4096,
        **({} if options.device != "cpu" else {"num_gpus": 0}),
    )  # fmt: skip
    gpus = 0 if options.device == "cpu" else 0.25
    maker = ray.remote(num_cpus=0, num_gpus=gpus)(Maker).remote(options.device)
    reader = ray.remote(num_cpus=0, num_gpus=gpus)(Reader).remote(options.device)
    ray.get([maker.ready.remote(), reader.ready.remote()])
    new = maker.give_new.options(tensor_transport="auto")
    began, refs = time.perf_counter(), []
    for _ in range(count):
        refs.append(new.remote(size))
        ray.wait(refs[-1:])
    seconds = (time.perf_counter() - began) / count
    row(rows, f"{count} objects of {size // 10**6} MB with room for two: each", 1e3 * seconds, "ms", "-")
    took = []
    for ref in refs[:4]:
        began = time.perf_counter()
        assert ray.get(reader.read.remote(ref)) == 1.0
        took.append(time.perf_counter() - began)
    row(rows, "one that has moved is read, rate", size / statistics.median(took) / 1e9, "GB/s", ">= 35 through host")
    ray.shutdown()


def churn(ray: Any, options: argparse.Namespace, maker: Any, reader: Any, rows: dict[str, float]) -> None:
    """Many device objects, one after the other: nothing may grow."""
    give = maker.give_new.options(tensor_transport=options.transports[0])

    def some(count: int) -> None:
        for start in range(0, count, 50):
            ray.get([reader.read.remote(give.remote(4_000)) for _ in range(min(50, count - start))])

    def state() -> dict[str, int]:
        found = {f"{who}: {what}": value for who, actor in (("maker", maker), ("reader", reader))
                 for what, value in ray.get(actor.memory.remote()).items()}  # fmt: skip
        return found | {"/dev/shm files": len(os.listdir("/dev/shm"))}

    some(max(100, options.churn // 10))
    before, began = state(), time.perf_counter()
    some(options.churn)
    seconds, after = time.perf_counter() - began, state()
    row(rows, f"{options.churn} device objects of 4 KB", seconds, "s", "-")
    for name, value in after.items():
        row(rows, f"{options.churn} device objects: growth of {name}", value - before[name], "", "0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["hpcray", "ray"], default="hpcray")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--transports", nargs="+", default=["auto"])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=SIZES["1 GB"], help="bytes of the largest tensor")
    parser.add_argument("--churn", type=int, default=50_000, help="device objects (default: %(default)s)")
    parser.add_argument(
        "--pool", action="store_true", help="PyTorch's expandable segments, which cannot be exported: the pool's rows"
    )
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if torch is None:
        sys.exit("the rows need PyTorch; hint: pip install torch")
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU here; hint: --device cpu runs the same code without one")
    if options.pool:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        SIZES.pop("4 KB")
    rows = measure(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
