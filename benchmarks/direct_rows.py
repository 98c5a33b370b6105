"""Tensors from a GPU of one host to a GPU of another one, by UCX (GPUDirect): rows of `gpu_check.sh`, beside the way
through the hosts.

    srun -N 2 --ntasks-per-node 1 --gpus-per-node 1 python benchmarks/direct_rows.py
    hpcray-launch -n 2 benchmarks/direct_rows.py --device cpu --largest 10000000    (the same code without a GPU)

Without a GPU the tensors are on the tests' made-up devices, whose memory is that of the host, the two ranks count as
two hosts, and HPCRAY_DEVICE_TRANSPORTS=tcp has to be set. A figure is the median of whole calls: the reader gets the
ref, reads one element of the tensor on its device, and answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_rows import SIZES, median_of, row, untried

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

try:
    import torch
except ImportError:  # `--help` needs none
    torch = None


class Holder:
    """Makes tensors on the device, or reads them.

    Args:
        device: PyTorch's name of it. directory: of made-up devices; "": the device is a GPU. number: of the host.
    """

    def __init__(self, device: str, directory: str, number: int) -> None:
        self.device, self.driver, self.known = device, None, None
        if directory:
            sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
            from helpers.fake_device_driver import FakeDeviceDriver

            from hpcray.tensors import device_memory

            device_memory.running_kernel = lambda: f"host {number}"
            self.driver = FakeDeviceDriver(directory, visible=(f"gpu-{number}",))
            device_memory.use_driver(self.driver)

    def allocate(self, size: int) -> None:
        length = size // 4
        self.known = torch.ones(length, device=self.device) if self.driver is None else self.driver.tensor(length, 1.0)

    def give(self) -> Any:
        return self.known

    def read(self, tensor: Any) -> float:
        return float(tensor[-1])

    def read_through_hosts(self, refs: list[Any]) -> float:
        return float(ray.get(refs[0], _use_object_store=True).to(self.device)[-1])


def measure(options: argparse.Namespace, directory: str) -> dict[str, float]:
    """All rows."""
    ray.init()
    rows: dict[str, float] = {}
    nodes = sorted(ray.nodes(), key=lambda node: node["Index"])
    if len(nodes) < 2:
        untried("device to device between hosts, GPUDirect", "it needs two hosts with GPUs and RDMA")
        return rows
    gpus = 0 if directory else 1
    maker, reader = (
        ray.remote(num_cpus=0, num_gpus=gpus)(Holder)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[number]["NodeID"], soft=False))
        .remote(options.device, directory, number)
        for number in range(2)
    )
    for name, size in SIZES.items():
        if size > options.largest:
            continue
        ray.get(maker.allocate.remote(size))
        give, also = (maker.give.options(tensor_transport=transport) for transport in ("ucx", "auto"))
        try:
            seconds = median_of(lambda give=give: ray.get(reader.read.remote(give.remote())), options.seconds)
        except ray.exceptions.RaySystemError as error:
            untried(
                "device to device between hosts, GPUDirect", str(error).partition("process: ")[2].partition("; hint")[0]
            )
            break
        row(rows, f"device to device between hosts, GPUDirect, {name}", 1e3 * seconds, "ms", "-")
        row(rows, f"device to device between hosts, GPUDirect, {name}, rate", size / seconds / 1e9, "GB/s", "the NIC's")
        seconds = median_of(
            lambda also=also: ray.get(reader.read_through_hosts.remote([also.remote()])), options.seconds
        )
        row(rows, f"device to device through both hosts, {name}, rate", size / seconds / 1e9, "GB/s", "-")
    ray.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=SIZES["1 GB"], help="bytes of the largest tensor")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if torch is None:
        sys.exit("the rows need PyTorch; hint: pip install torch")
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(options, directory if options.device == "cpu" else "")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
