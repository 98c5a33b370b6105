"""The labels that a node gives itself when it starts: its switch, block, NVLink domain, rack and host.

No command is run where the environment says it: `srun` gives each task the address of its node. A node that
came another way (by ssh, say) asks `scontrol show topology` once. Where nothing is known, there is no label.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcray.platform.allocation import run_command
from hpcray.topology.switches import (
    Network,
    NodePlace,
    label_value,
    parse_topology,
    parse_topology_yaml,
    path_value,
    read_address,
)

SWITCH, SWITCH_PATH, BLOCK = "hpcray.io/switch", "hpcray.io/switch-path", "hpcray.io/block"
HOST, RACK = "hpcray.io/host", "hpcray.io/rack"
GPU_DOMAIN = "ray.io/gpu-domain"
_SCONTROL_TIMEOUT = 10.0  # seconds; a slow controller does not hold up the start for longer
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def node_labels(
    environ: Mapping[str, str],
    *,
    file: str = "",
    rack_pattern: str = "",
    ranks_here: int = 1,
    gpus: Sequence[str] = (),
    ask_slurm: Callable[[], str] | None = None,
) -> dict[str, str]:
    """Return the labels of this node.

    Args:
        environ: of its process.
        file: the setting `topology`: lines as in Slurm's topology.conf, or a topology.yaml. It counts before all else.
        rack_pattern: the setting `rack_pattern`: a regular expression whose first group, in the host's name, is the
            rack.
        ranks_here: count of ranks on this host.
        gpus: the GPUs of this node, as NVML knows them (index or UUID).
        ask_slurm: returns the output of `scontrol show topology`.

    Raises:
        ValueError: the file or the pattern cannot be read.
    """
    host = socket.gethostname().partition(".")[0]
    node = environ.get("SLURMD_NODENAME") or host
    place = _place(environ, node, file, ask_slurm or _show_topology)
    labels: dict[str, str] = {}
    if place.path:
        labels[SWITCH] = label_value(place.path[-1])
        labels[SWITCH_PATH] = path_value(place.path)
    if place.block:
        labels[BLOCK] = label_value(place.block)
    if domain := _gpu_domain(gpus):
        labels[GPU_DOMAIN] = domain
    if rack_pattern and (rack := _rack(host, rack_pattern)):
        labels[RACK] = label_value(rack)
    if ranks_here > 1 or labels:
        labels[HOST] = label_value(host)
    return {key: value for key, value in labels.items() if value}


def _place(environ: Mapping[str, str], node: str, file: str, ask_slurm: Callable[[], str]) -> NodePlace:
    if file:
        return _place_in(read_topology_file(file), node, file)
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    if address and environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") == "node":
        return NodePlace()  # the cluster has no topology
    place = read_address(address, environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), node)
    if place != NodePlace():
        return place
    if "SLURM_JOB_ID" in environ and (address or "SLURM_PROCID" not in environ):
        # Inherited from another node, or not started by srun.
        try:
            return _place_in(parse_topology(ask_slurm()), node, "")
        except ValueError:
            return NodePlace()
    return NodePlace()


def _place_in(network: Network, node: str, file: str) -> NodePlace:
    names = (node, node.partition(".")[0], socket.gethostname())
    known = next((name for name in names if name in network.switch_of or name in network.block_of), "")
    return NodePlace(network.path_of(known), network.block_of.get(known, ""))


def read_topology_file(path: str) -> Network:
    """Read a file of the setting `topology`.

    Raises:
        ValueError: it cannot be read, or has another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(
            f"the topology file {path}: {error.strerror}; hint: HPCRAY_TOPOLOGY names a file that all nodes see"
        ) from None
    try:
        if path.endswith((".yaml", ".yml")):
            return parse_topology_yaml(text)
        return parse_topology(text)
    except ImportError:
        raise ValueError(
            f"the topology file {path}: PyYAML is not installed; hint: pip install pyyaml, or write a topology.conf"
        ) from None
    except ValueError as error:
        raise ValueError(f"the topology file {path}: {error}") from None


def _show_topology() -> str:
    """The output of `scontrol show topology`; "" where it does not work."""
    try:
        done = run_command(["scontrol", "show", "topology"], _SCONTROL_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _rack(host: str, pattern: str) -> str:
    try:
        found = re.search(pattern, host)
    except re.error as error:
        raise ValueError(
            f"rack_pattern {pattern!r} is no regular expression: {error}; hint: rack_pattern=(r[0-9]+)"
        ) from None
    return "" if found is None else (found[1] if found.re.groups else found[0]) or ""


class _FabricInfo(ctypes.Structure):
    """`nvmlGpuFabricInfo_t` of nvml.h."""

    _fields_ = [
        ("clusterUuid", ctypes.c_ubyte * 16),
        ("status", ctypes.c_int),
        ("cliqueId", ctypes.c_uint),
        ("state", ctypes.c_ubyte),
    ]


def _gpu_domain(gpus: Sequence[str]) -> str:
    """The NVLink domain that all GPUs of this node belong to: `<cluster UUID>.<clique>`; "" where there is none."""
    if not gpus or not os.path.exists("/proc/driver/nvidia/version"):
        return ""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return ""
        found = {_domain_of(nvml, gpu) for gpu in gpus}
        nvml.nvmlShutdown()
    except (AttributeError, OSError):
        return ""
    return found.pop() if len(found) == 1 else ""


def _domain_of(nvml: ctypes.CDLL, gpu: str) -> str:
    device, info = ctypes.c_void_p(), _FabricInfo()
    if gpu.isdigit():
        missing = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(gpu)), ctypes.byref(device))
    else:
        missing = nvml.nvmlDeviceGetHandleByUUID(gpu.encode(), ctypes.byref(device))
    if missing or nvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info)):
        return ""
    uuid = bytes(info.clusterUuid)
    return f"{uuid.hex()}.{info.cliqueId}" if info.state == _FABRIC_COMPLETED and any(uuid) else ""
