"""Where things are on this machine: the CPUs of each NUMA node, and the nodes that GPUs and RDMA ports hang on.

Source: Linux, Documentation/ABI/stable/sysfs-devices-node, sysfs-bus-pci, sysfs-class-infiniband; NVIDIA's driver,
/proc/driver/nvidia; CUDA programming guide, CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
UNKNOWN = -1
_PREFIX = 19
"""Characters of a GID that name its subnet: four groups of four digits with colons between."""


@dataclass(frozen=True)
class Port:
    """A port of an RDMA adapter that is up.

    Attributes:
        name: as UCX calls it, `mlx5_0:1`.
        node: its NUMA node, UNKNOWN where the system does not tell.
        fabric: link layer, rate and subnet: what two ports must have in common to be of equal use.
    """

    name: str
    node: int
    fabric: tuple[str, str, str]


def numa_nodes() -> dict[int, frozenset[int]]:
    """The CPUs of each NUMA node that has any; empty where the system does not tell."""
    found = {}
    for directory in (ROOT / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _cpulist(_text(directory / "cpulist"))
        if cpus:
            found[int(directory.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def nodes_of(cpus: Iterable[int], nodes: Mapping[int, frozenset[int]]) -> set[int]:
    """The NUMA nodes that these CPUs belong to."""
    wanted = set(cpus)
    return {node for node, own in nodes.items() if wanted & own}


def device_node(device: Path) -> int:
    """The NUMA node of a device, by its directory in /sys."""
    try:
        return int(_text(device / "numa_node"))
    except ValueError:
        return UNKNOWN


def rdma_ports() -> list[Port]:
    """The ports of RDMA adapters that are up."""
    found = []
    for adapter in sorted((ROOT / "sys/class/infiniband").glob("*")):
        for port in sorted((adapter / "ports").glob("[0-9]*")):
            if not _text(port / "state").startswith("4"):  # "4: ACTIVE"
                continue
            fabric = (_text(port / "link_layer"), _text(port / "rate"), _subnet(port))
            found.append(Port(f"{adapter.name}:{port.name}", device_node(adapter / "device"), fabric))
    return found


def gpu_nodes(ids: Sequence[str], amd: bool, environ: Mapping[str, str]) -> dict[str, int]:
    """The NUMA node of each of these GPUs, as far as it can be told for certain.

    Args:
        ids: as `allocation_gpus.accelerators` gives them: numbers of the devices that this process may open, or UUIDs.
            A part of a GPU (MIG) is not looked for.
        amd: whether they are AMD's.
        environ: the environment, which may change the order in which CUDA counts.
    """
    devices = _amd() if amd else _nvidia()
    # CUDA counts the fastest first. Only among equals is that for certain the order of the bus.
    counted = amd or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.model for gpu in devices}) == 1
    found = {}
    for ident in ids:
        if ident.isdecimal():
            mine = devices[int(ident) : int(ident) + 1] if counted else []
        else:
            mine = [gpu for gpu in devices if gpu.uuid.startswith(ident)]
        if len(mine) == 1 and mine[0].node != UNKNOWN:
            found[ident] = mine[0].node
    return found


@dataclass(frozen=True)
class _Gpu:
    uuid: str
    model: str
    node: int


def _nvidia() -> list[_Gpu]:
    """NVIDIA's GPUs that this process may open, in the order of the bus. A cgroup or a container holds others back."""
    found = []
    for directory in sorted((ROOT / "proc/driver/nvidia/gpus").glob("*")):
        facts = _facts(directory / "information", ":")
        if os.access(ROOT / "dev" / f"nvidia{facts.get('Device Minor', '')}", os.R_OK | os.W_OK):
            node = device_node(ROOT / "sys/bus/pci/devices" / directory.name.lower())
            found.append(_Gpu(facts.get("GPU UUID", ""), facts.get("Model", ""), node))
    return found


def _amd() -> list[_Gpu]:
    """AMD's GPUs that this process may see, in the order of the kernel's list."""
    found = []
    places = (ROOT / "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    for directory in sorted(places, key=lambda path: int(path.name)):
        if _text(directory / "gpu_id") in ("", "0"):
            continue  # a CPU, or not ours
        facts = _facts(directory / "properties", None)
        try:
            place, domain = int(facts["location_id"]), int(facts.get("domain", "0"))
            address = f"{domain:04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"
            unique = f"GPU-{int(facts['unique_id']):016x}" if int(facts.get("unique_id", "0")) else ""
        except (KeyError, ValueError):
            address = unique = ""
        node = device_node(ROOT / "sys/bus/pci/devices" / address) if address else UNKNOWN
        found.append(_Gpu(unique, "", node))
    return found


def _facts(path: Path, separator: str | None) -> dict[str, str]:
    """Lines of `name: value` (or `name value`)."""
    pairs = (line.split(separator, 1) for line in _text(path).splitlines())
    return {pair[0].strip(): pair[1].strip() for pair in pairs if len(pair) == 2}


def _subnet(port: Path) -> str:
    """The subnet of a port on InfiniBand. Elsewhere the first GID is the adapter's own address."""
    return _text(port / "gids/0")[:_PREFIX] if _text(port / "link_layer") == "InfiniBand" else ""


def _cpulist(text: str) -> frozenset[int]:
    """The numbers of `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
