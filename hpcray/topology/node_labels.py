"""The labels that a node gives itself when it starts: its place in the network and on its host.

No command is run where the environment says it: `srun` gives each task the address of its node. A node that
came another way (by ssh, say) asks `scontrol show topology` once. Where nothing is known, there is no label.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcray.common.terminal_text import plain
from hpcray.platform import numa_binding
from hpcray.platform.allocation import expand_nodes, run_command

SWITCH, SWITCH_PATH, BLOCK = "hpcray.io/switch", "hpcray.io/switch-path", "hpcray.io/block"
HOST, RACK = "hpcray.io/host", "hpcray.io/rack"
NUMA, ADAPTERS, DISTANCES = "hpcray.io/numa", "hpcray.io/adapters", "hpcray.io/adapter-distances"
GPU_DOMAIN = "ray.io/gpu-domain"
_SCONTROL_TIMEOUT = 10.0  # seconds; a slow controller does not hold up the start for longer
_ADAPTER_CLASSES = ("infiniband", "cxi")  # InfiniBand and RoCE; Slingshot
_FABRIC_COMPLETED = 3  # NVML_GPU_FABRIC_STATE_COMPLETED


def node_labels(
    environ: Mapping[str, str],
    *,
    file: str = "",
    rack_pattern: str = "",
    ranks_here: int = 1,
    gpus: Sequence[str] = (),
    joins: bool = False,
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
        joins: whether it joins a running job: by ssh, where nothing of Slurm is in `environ`.
        ask_slurm: returns the output of `scontrol show topology`.

    Raises:
        ValueError: the file or the pattern cannot be read.
    """
    host = socket.gethostname().partition(".")[0]
    node = environ.get("SLURMD_NODENAME") or host
    place = _place(environ, node, file, joins, ask_slurm or _show_topology)
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
        labels |= _machine_labels()
    return {key: value for key, value in labels.items() if value}


def _machine_labels() -> dict[str, str]:
    """Where in its host a node is: the NUMA nodes of its cores, and the adapters of fast networks, nearest first."""
    nodes = numa_binding.numa_nodes()
    mine = numa_binding.numa_nodes_of(os.sched_getaffinity(0), nodes)
    labels = {NUMA: _ranges(sorted(mine))} if len(nodes) > 1 else {}
    found: dict[str, float] = {}
    for kind in _ADAPTER_CLASSES:
        for adapter in sorted((numa_binding.ROOT / "sys/class" / kind).glob("*")):
            there = numa_binding.numa_node_of_device(adapter / "device")
            found[adapter.name] = min((_distance(node, there) for node in mine), default=math.inf)
    names = sorted(found, key=lambda name: found[name])
    labels[ADAPTERS] = label_value(".".join(name.replace(".", "-") for name in names))
    if all(math.isfinite(distance) for distance in found.values()):
        labels[DISTANCES] = label_value(".".join(f"{found[name]:g}" for name in names))
    return labels


def _distance(node: int, other: int) -> float:
    """The distance of two NUMA nodes as Linux has it: 10 within one. Infinite where it is not known."""
    directory = numa_binding.ROOT / "sys/devices/system/node"
    try:
        names = sorted(directory.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
        distances = (directory / f"node{node}/distance").read_text().split()
        return float(distances[[path.name for path in names].index(f"node{other}")])
    except (OSError, ValueError, IndexError):
        return math.inf


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3.8` for 0, 1, 2, 3, 8: a list as in Linux, with the characters of a label."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ".".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _place(environ: Mapping[str, str], node: str, file: str, joins: bool, ask_slurm: Callable[[], str]) -> NodePlace:
    if file:
        return _place_in(read_topology_file(file), node, file)
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    if address and environ.get("SLURM_TOPOLOGY_ADDR_PATTERN") == "node":
        return NodePlace()  # the cluster has no topology
    place = read_address(address, environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""), node)
    if place != NodePlace():
        return place
    if ("SLURM_JOB_ID" in environ or joins) and (address or "SLURM_PROCID" not in environ):
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
    name = f"the topology file {plain(path)}"
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; hint: HPCRAY_TOPOLOGY names a file that all nodes see") from None
    try:
        if path.endswith((".yaml", ".yml")):
            return parse_topology_yaml(text)
        return parse_topology(text)
    except ImportError:
        raise ValueError(
            f"{name}: PyYAML is not installed; hint: pip install pyyaml, or write a topology.conf"
        ) from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _show_topology() -> str:
    """The output of `scontrol show topology`; "" where it does not work."""
    environ = {name: value for name, value in os.environ.items() if name != "SLURM_TOPO_LEN"}  # it cuts lines off
    try:
        done = run_command(["scontrol", "show", "topology"], _SCONTROL_TIMEOUT, environ)
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


# ------------------------------------------------------------ switches
# The switches and blocks of a network as Slurm describes them: `topology.conf`, `topology.yaml`, the output of
# `scontrol show topology`, and the address of one node in `SLURM_TOPOLOGY_ADDR`.
#
# The forms are documented in topology.conf(5), topology.yaml(5), scontrol(1) and, for the address, srun(1).

# A name and its value, which may stand in quotation marks; none where the next name follows: `Nodes= Switches=s1`.
_FIELD = re.compile(r'(\w+)\s*=\s*(?!\w+=)"?([^\s"]+)')
_NO_CHARACTERS = re.compile(r"[^A-Za-z0-9_.-]+")
_LABEL_LENGTH = 63
_OTHER_LINES = {"aggregatedblock", "blocksizes"}


@dataclass
class Network:
    """The switches and blocks of a site.

    Attributes:
        parents: for each switch, the switch above it, where there is one.
        switch_of: for each node, the leaf switch that it is connected to.
        block_of: for each node, its block.
    """

    parents: dict[str, str] = field(default_factory=dict)
    switch_of: dict[str, str] = field(default_factory=dict)
    block_of: dict[str, str] = field(default_factory=dict)

    def path_of(self, node: str) -> tuple[str, ...]:
        """The switches from the top of the network down to the leaf of a node; () for an unknown one."""
        path: list[str] = []
        switch = self.switch_of.get(node, "")
        while switch and switch not in path:  # a circle would be a mistake in the file
            path.append(switch)
            switch = self.parents.get(switch, "")
        return tuple(reversed(path))


@dataclass(frozen=True)
class NodePlace:
    """The place of one node.

    Attributes:
        path: the switches from the top of the network down to the leaf; () where there is none.
        block: its block; "" where there is none.
    """

    path: tuple[str, ...] = ()
    block: str = ""


def read_address(address: str, pattern: str, node: str = "") -> NodePlace:
    """Read the address that Slurm gives to a task's node: `s0.s1.n1` by the pattern `switch.switch.node`.

    A node behind several leaf switches has them in brackets (`s0.s[1-2].n1`): the first one counts. A node at fewer
    levels than others has empty names in between (`s0..s1.n1`), one behind no switch nothing else (`..n1`).

    Args:
        address, pattern: `SLURM_TOPOLOGY_ADDR` and `SLURM_TOPOLOGY_ADDR_PATTERN`.
        node: name of the node, if it is known: an address of another node, which was inherited, says nothing.
    """
    kinds, end = _split(pattern), f".{node}" if node else ""
    names = [*_split(address.removesuffix(end)), node] if node else _split(address)  # its name may have dots
    if len(names) != len(kinds) or not names or kinds[-1] != "node" or not address.endswith(end):
        return NodePlace()
    path = tuple(_first(name) for name, kind in zip(names, kinds, strict=True) if kind == "switch" and name)
    blocks = [_first(name) for name, kind in zip(names, kinds, strict=True) if kind == "block"]
    return NodePlace(path, blocks[-1] if blocks else "")


def parse_topology(text: str) -> Network:
    """Read `topology.conf`, or the output of `scontrol show topology`, which has the same fields.

    Raises:
        ValueError: a line has another form; the message has its number.
    """
    network = Network()
    # Of several parents, switches or blocks the first one counts, as in the address of a node: it comes last here.
    for number, line in reversed([*enumerate(_joined(text), 1)]):
        found = {key.lower(): value for key, value in _FIELD.findall(line)}
        name = found.get("switchname") or found.get("blockname") or ""
        try:
            if not found or _OTHER_LINES & found.keys():
                continue
            if not name:
                raise ValueError("it names neither a switch nor a block")
            nodes = expand_nodes(found.get("nodes", ""))
            if "blockname" in found:
                network.block_of.update(dict.fromkeys(nodes, name))
                continue
            below = expand_nodes(found.get("switches", ""))
        except ValueError as error:
            raise ValueError(
                f"line {number} of the topology, {line[:200]!r}: {error}; "
                "hint: lines as in Slurm's topology.conf: SwitchName=s1 Nodes=n[1-4], or SwitchName=s0 Switches=s[1-2]"
            ) from None
        network.parents.update(dict.fromkeys(below, name))
        if not below:  # the output of scontrol lists a higher switch's nodes, too
            network.switch_of.update(dict.fromkeys(nodes, name))
    return network


def parse_topology_yaml(text: str) -> Network:
    """Read `topology.yaml`: the tree and the blocks that are the cluster's default, else the first ones in it.

    Raises:
        ValueError: it has another form.
        ImportError: PyYAML is not installed.
    """
    import yaml

    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the topology is no YAML: {error}") from None
    network = Network()
    try:
        for one in sorted(found or [], key=lambda one: not one.get("cluster_default")):
            tree, block = one.get("tree") or {}, one.get("block") or {}
            if tree and not network.switch_of:
                _add_tree(network, tree["switches"])
            if block and not network.block_of:
                for entry in reversed(block["blocks"]):
                    network.block_of.update(dict.fromkeys(expand_nodes(entry.get("nodes") or ""), str(entry["block"])))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"the topology has another form than Slurm's topology.yaml: {type(error).__name__}: {error}"
        ) from None
    return network


def _add_tree(network: Network, switches: Sequence[Mapping[str, Any]]) -> None:
    for entry in reversed(switches):
        name = str(entry["switch"])
        network.parents.update(dict.fromkeys(expand_nodes(entry.get("children") or ""), name))
        network.switch_of.update(dict.fromkeys(expand_nodes(entry.get("nodes") or ""), name))


def label_value(name: str) -> str:
    """Return a name as the value of a label: letters, digits, dashes, underscores and dots, at most 63 of them."""
    return _NO_CHARACTERS.sub("-", name).strip("-_.")[:_LABEL_LENGTH].strip("-_.")


def path_value(path: Iterable[str]) -> str:
    """Return the value of `hpcray.io/switch-path`. Where it would be too long, the top of the network is left out."""
    names = [label_value(name).replace(".", "-") for name in path]
    while len(".".join(names)) > _LABEL_LENGTH and len(names) > 1:
        del names[0]
    return label_value(".".join(names))


def _joined(text: str) -> list[str]:
    """The lines without comments; those that end in a backslash go on in the next one."""
    lines: list[str] = []
    open_line = ""
    for line in text.splitlines():
        line = open_line + line.partition("#")[0].strip()
        open_line = line[:-1] + " " if line.endswith("\\") else ""
        if not open_line:
            lines.append(line)
    return [*lines, open_line] if open_line else lines


def _split(text: str) -> list[str]:
    """Split at dots, but not at those in brackets."""
    return re.split(r"\.(?![^\[]*\])", text) if text else []


def _first(name: str) -> str:
    if "[" not in name:
        return name.partition(",")[0]
    try:
        return expand_nodes(name)[0]
    except ValueError:
        return name
