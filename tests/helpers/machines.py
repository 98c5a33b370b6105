"""A machine with two NUMA nodes, as its files would show it: 16 cores, four GPUs, two RDMA adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcray.platform import numa_binding

_GPUS = ("0000:17:00.0", "0000:31:00.0", "0000:B1:00.0", "0000:CA:00.0")
_ADAPTERS = (("mlx5_0", 0), ("mlx5_1", 1))


def machine(root: Path, monkeypatch: pytest.MonkeyPatch | None = None, cores: Sequence[str] = ("0-7", "8-15")) -> None:
    """Write its files below `root`; with `monkeypatch`, let topology look there.

    Args:
        cores: the CPUs of each NUMA node. Half of the GPUs and one adapter hang on each of two nodes.
    """
    for node, cpus in enumerate(cores):
        write(root / f"sys/devices/system/node/node{node}/cpulist", cpus)
    for minor, address in enumerate(_GPUS):
        facts = f"Model: \t NVIDIA H100 80GB HBM3\nIRQ:   \t 42\nGPU UUID: \t GPU-{minor}abc\nDevice Minor: \t {minor}"
        write(root / f"proc/driver/nvidia/gpus/{address}/information", facts)
        write(root / f"sys/bus/pci/devices/{address.lower()}/numa_node", str(minor // 2))
        write(root / f"dev/nvidia{minor}", "")
    for name, node in _ADAPTERS:
        adapter(root, name, node)
    if monkeypatch is not None:
        monkeypatch.setattr(numa_binding, "ROOT", root)


def adapter(root: Path, name: str, node: int, subnet: str = "fe80:0000:0000:0001", state: str = "4: ACTIVE") -> None:
    """Write the files of one RDMA adapter."""
    place = root / f"sys/class/infiniband/{name}"
    write(place / "device/numa_node", str(node))
    port = {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    for file, text in {**port, "gids/0": f"{subnet}:0000:0000:0000:000{node}"}.items():
        write(place / "ports/1" / file, text)


def write(path: Path, text: str) -> None:
    """A file, with the directories above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
