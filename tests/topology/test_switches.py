"""What Slurm says about the network, in each form in which it says it, and the labels that follow from it."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.labels import labels_problem
from hpcray.platform import numa_binding
from hpcray.topology import node_labels as labels_module
from hpcray.topology.node_labels import (
    Network,
    NodePlace,
    label_value,
    node_labels,
    parse_topology,
    parse_topology_yaml,
    path_value,
    read_address,
    read_topology_file,
)

TREE = """\
# topology.conf(5): a tree of two levels
SwitchName=s0 Nodes=dev[0-5]
SwitchName=s1 Nodes=dev[6-11]
SwitchName=s2 Nodes=dev-[12-17] \\
   LinkSpeed=100
SwitchName=s3 Switches=s[0-2]
"""
SCONTROL_TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=dev[0-5]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=dev[6-11]
SwitchName=s3 Level=1 LinkSpeed=1 Nodes=dev[0-11] Switches=s[0-1]
"""
SCONTROL_BLOCK = """\
BlockName=b1 BlockIndex=0 Nodes=node[01-18] BlockSize=18
BlockName=b2 BlockIndex=1 Nodes=node[19-36] BlockSize=18
AggregatedBlock=b[1-2] BlockIndex=2 Nodes=node[01-36] BlockSize=36
"""
BLOCK = "BlockName=b1 Nodes=node[01-18]\nBlockName=b2 Nodes=node[19-36]\nBlockSizes=18,36\n"
# topology.yaml(5), shortened.
YAML = """\
---
- topology: topo1
  cluster_default: true
  tree:
    switches:
      - switch: sw_root
        children: s[1-2]
      - switch: s1
        nodes: node[01-02]
      - switch: s2
        nodes: node[03-04]
- topology: topo2
  cluster_default: false
  block:
    block_sizes:
      - 4
      - 16
    blocks:
      - block: b1
        nodes: node[01-04]
      - block: b2
        nodes: node[05-08]
- topology: topo3
  flat: true
"""


@pytest.mark.parametrize(
    ("address", "pattern", "node", "expected"),
    [
        ("s0.s4.s8.tux1", "switch.switch.switch.node", "tux1", NodePlace(("s0", "s4", "s8"))),
        ("s0.s[4-5].tux1", "switch.switch.node", "", NodePlace(("s0", "s4"))),
        ("b7.tux1", "block.node", "tux1", NodePlace((), "b7")),
        ("tux1", "node", "tux1", NodePlace()),
        ("s0.s4.tux1", "switch.switch.node", "tux2", NodePlace()),  # inherited from another node
        ("s0.tux1", "switch.switch.node", "tux1", NodePlace()),
        ("", "", "", NodePlace()),
        ("s0.s4.tux1", "", "tux1", NodePlace()),
        # Taken from Slurm 22.05 with a tree of uneven depth, with nodes behind several switches, and with one switch.
        ("s0..s1.n1", "switch.switch.switch.node", "n1", NodePlace(("s0", "s1"))),
        ("s0.spine[2,1].edge-b,aleaf7.n1", "switch.switch.switch.node", "n1", NodePlace(("s0", "spine2", "edge-b"))),
        ("s0.s[01,03].n3", "switch.switch.node", "n3", NodePlace(("s0", "s01"))),
        ("only.n4", "switch.node", "n4", NodePlace(("only",))),
        ("..n9", "switch.switch.node", "n9", NodePlace()),  # behind no switch, as topology_tree.c writes it
        ("b1.10.140.71.103", "block.node", "10.140.71.103", NodePlace((), "b1")),
        ("b1.n1.site", "block.node", "n1", NodePlace()),
        ("s0.n1", "switch.switch.node", "n2", NodePlace()),
    ],
)
def test_addresses_of_slurm(address: str, pattern: str, node: str, expected: NodePlace) -> None:
    assert read_address(address, pattern, node) == expected


def test_topology_conf() -> None:
    network = parse_topology(TREE)
    assert network.path_of("dev7") == ("s3", "s1")
    assert network.path_of("dev-17") == ("s3", "s2")
    assert network.path_of("unknown") == ()
    assert not network.block_of


def test_output_of_scontrol() -> None:
    network = parse_topology(SCONTROL_TREE)
    assert network.path_of("dev7") == ("s3", "s1")
    blocks = parse_topology(SCONTROL_BLOCK)
    assert (blocks.block_of["node18"], blocks.block_of["node19"], blocks.path_of("node18")) == ("b1", "b2", ())
    assert parse_topology(BLOCK).block_of == blocks.block_of
    assert parse_topology("") == parse_topology("No topology information available\n") == Network()


def test_empty_fields_and_quotation_marks() -> None:
    """A switch or a block whose nodes were all removed has an empty field; topology.conf may quote."""
    found = parse_topology('SwitchName=s0 Level=1 LinkSpeed=1 Nodes= Switches=s1\nSwitchName=s1 Nodes = "n[08-10]"\n')
    assert (found.path_of("n09"), list(found.switch_of)) == (("s0", "s1"), ["n08", "n09", "n10"])
    assert parse_topology("BlockName=b1 BlockIndex=0 Nodes= BlockSize=4\n") == Network()


def test_of_several_parents_in_topology_yaml_the_first_one_counts() -> None:
    switches = (
        "[{switch: l1, nodes: n1}, {switch: l2, nodes: n1}, {switch: p2, children: l1}, {switch: p1, children: l1}]"
    )
    blocks = "[{block: b2, nodes: n1}, {block: b1, nodes: n1}]"
    found = parse_topology_yaml(f"- tree: {{switches: {switches}}}\n- block: {{blocks: {blocks}}}\n")
    assert (found.path_of("n1"), found.block_of) == (("p2", "l1"), {"n1": "b2"})
    for wrong in ("{switches: 7}", "{switches: {l1: n1}}"):
        with pytest.raises(ValueError, match="another form"):
            parse_topology_yaml(f"- tree: {wrong}\n")


SEVERAL = [
    # (output of scontrol, {node: address}), both of Slurm 22.05: the first of several parents and leaves counts.
    (
        "SwitchName=l1 Level=0 LinkSpeed=1 Nodes=n1,n2\nSwitchName=l2 Level=0 LinkSpeed=1 Nodes=n3,n4\n"
        "SwitchName=sp2 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=l[1-2]\n"
        "SwitchName=sp1 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=l[1-2]\n",
        {"n1": "sp[2,1].l1.n1", "n4": "sp[2,1].l2.n4"},
    ),
    (
        "SwitchName=edge-b Level=0 LinkSpeed=1 Nodes=n1,n2\nSwitchName=aleaf7 Level=0 LinkSpeed=1 Nodes=n1,n3,n4\n"
        "SwitchName=spine2 Level=1 LinkSpeed=1 Nodes=n[1-2] Switches=edge-b\n"
        "SwitchName=spine1 Level=1 LinkSpeed=1 Nodes=n[1,3-4] Switches=aleaf7\n"
        "SwitchName=s0 Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=spine[1-2]\n",
        {"n1": "s0.spine[2,1].edge-b,aleaf7.n1", "n3": "s0.spine1.aleaf7.n3"},
    ),
    (
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n1,n2\nSwitchName=s2 Level=0 LinkSpeed=1 Nodes=n3,n4\n"
        "SwitchName=s3 Level=1 LinkSpeed=1 Nodes=n[3-4] Switches=s2\n"
        "SwitchName=s0 Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=s1,s3\n",
        {"n1": "s0..s1.n1", "n3": "s0.s3.s2.n3"},
    ),
    (
        "SwitchName=leaf01 Level=0 LinkSpeed=1 Nodes=n1\nSwitchName=leaf02 Level=0 LinkSpeed=1 Nodes=n2\n"
        "SwitchName=leaf03 Level=0 LinkSpeed=1 Nodes=n[3-4]\n"
        "SwitchName=pod-1 Level=1 LinkSpeed=1 Nodes=n[1-2] Switches=leaf[01-02]\n"
        "SwitchName=pod-2 Level=1 LinkSpeed=1 Nodes=n[3-4] Switches=leaf03\n"
        "SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-4] Switches=pod-[1-2]\n",
        {"n2": "core.pod-1.leaf02.n2", "n4": "core.pod-2.leaf03.n4"},
    ),
]


@pytest.mark.parametrize(("told", "addresses"), SEVERAL)
def test_who_asks_finds_the_same_place_as_who_was_told(told: str, addresses: dict[str, str]) -> None:
    """Else a node that joins by ssh would not be near those behind its own switch."""
    network = parse_topology(told)
    for node, address in addresses.items():
        pattern = "switch." * (address.count(".")) + "node"
        assert read_address(address, pattern, node).path == network.path_of(node), node


def test_nothing_cuts_the_answer_of_scontrol_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SLURM_TOPO_LEN` is the length of its lines: "SwitchName=s1 Nodes=n[1-12]" would be no list of nodes."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\nprintf "%.${SLURM_TOPO_LEN:-999}s\\n" "SwitchName=s1 Level=0 Nodes=n[1-12]"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_TOPO_LEN", "32")
    assert node_labels({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "n12"})["hpcray.io/switch"] == "s1"


def test_topology_yaml() -> None:
    network = parse_topology_yaml(YAML)
    assert network.path_of("node03") == ("sw_root", "s2")
    assert (network.block_of["node04"], network.block_of["node05"]) == ("b1", "b2")


def test_the_default_of_the_cluster_counts_before_other_trees() -> None:
    """topology.yaml(5): a topology may be that of a few partitions alone."""
    other = "- topology: gpu\n  tree:\n    switches:\n      - {switch: g1, nodes: 'node[01-04]'}\n"
    network = parse_topology_yaml(other + YAML.removeprefix("---\n"))
    assert network.path_of("node03") == ("sw_root", "s2")
    one = "- topology: topo1\n  tree:\n    switches:\n    - switch: sw_root\n      nodes: node[01-04]\n"
    assert parse_topology_yaml(one).path_of("node02") == ("sw_root",)
    assert parse_topology_yaml("- block: {blocks: [{block: b1, nodes: }]}\n") == Network()


def test_a_circle_of_switches_ends() -> None:
    network = parse_topology("SwitchName=a Switches=b\nSwitchName=b Switches=a\nSwitchName=c Nodes=n1\n")
    network.parents["c"] = "a"
    assert network.path_of("n1") == ("b", "a", "c")


@pytest.mark.parametrize("line", ["Nodes=n1", "SwitchName=s1 Nodes=n[1-"])
def test_a_wrong_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(f"SwitchName=s0 Nodes=n9\n{line}\n")
    with pytest.raises(ValueError, match=r"topology\.conf: line 2 .*hint: lines as in Slurm's topology\.conf"):
        read_topology_file(str(path))


def test_a_missing_file_and_wrong_yaml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: No such file.*HPCRAY_TOPOLOGY"):
        read_topology_file("/nowhere")
    for text in ("- tree: 7\n", "a: [", "- tree: {switches: [{}]}\n"):
        path = tmp_path / "t.yaml"
        path.write_text(text)
        with pytest.raises(ValueError, match="t.yaml"):
            read_topology_file(str(path))


@given(st.text(max_size=100))
def test_no_text_makes_a_label_that_is_not_valid(text: str) -> None:
    value = label_value(text)
    assert labels_problem({"a/b": value}) is None
    assert labels_problem({"a/b": path_value([text, "s0", text, text])}) is None
    read_address(text, text)


def test_a_long_path_loses_its_top() -> None:
    value = path_value([f"switch-number-{i}" for i in range(9)])
    assert value.endswith(".switch-number-7.switch-number-8") and not value.startswith("switch-number-0")


HERE = socket.gethostname().partition(".")[0]


@pytest.fixture(autouse=True)
def plain_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NUMA nodes and adapters of the machine that runs the tests do not show."""
    monkeypatch.setattr(numa_binding, "ROOT", tmp_path / "nothing")


def refuse() -> str:
    raise AssertionError("scontrol is not called")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {}),
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_TOPOLOGY_ADDR": "n1",
             "SLURM_TOPOLOGY_ADDR_PATTERN": "node", "SLURMD_NODENAME": "n1"}, {},
        ),
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_TOPOLOGY_ADDR": "s0.s1.n1",
             "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node", "SLURMD_NODENAME": "n1"},
            {"hpcray.io/switch": "s1", "hpcray.io/switch-path": "s0.s1", "hpcray.io/host": HERE},
        ),
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_TOPOLOGY_ADDR": "b1.n1",
             "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node", "SLURMD_NODENAME": "n1"},
            {"hpcray.io/block": "b1", "hpcray.io/host": HERE},
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {}),
        (
            {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_TOPOLOGY_ADDR": "s0..s1.n1",
             "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node", "SLURMD_NODENAME": "n1"},
            {"hpcray.io/switch": "s1", "hpcray.io/switch-path": "s0.s1", "hpcray.io/host": HERE},
        ),
    ],
)  # fmt: skip
def test_srun_says_it_and_nobody_is_asked(environ: dict[str, str], expected: dict[str, str]) -> None:
    assert node_labels(environ, ask_slurm=refuse) == expected


@pytest.mark.parametrize(
    "inherited", [{}, {"SLURM_TOPOLOGY_ADDR": "s3.s0.dev1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}]
)
def test_a_node_that_was_not_started_by_srun_asks(inherited: dict[str, str]) -> None:
    environ = {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "dev7", **inherited}
    found = node_labels(environ, ask_slurm=lambda: SCONTROL_TREE)
    assert found == {"hpcray.io/switch": "s1", "hpcray.io/switch-path": "s3.s1", "hpcray.io/host": HERE}
    assert node_labels(environ, ask_slurm=lambda: "what is this = ?") == {}
    assert node_labels(environ, ask_slurm=lambda: "") == {}


def test_a_node_that_joins_by_ssh_asks_although_its_environment_says_nothing_of_slurm() -> None:
    environ = {"SLURMD_NODENAME": "dev7"}
    found = node_labels(environ, joins=True, ask_slurm=lambda: SCONTROL_TREE)
    assert found == {"hpcray.io/switch": "s1", "hpcray.io/switch-path": "s3.s1", "hpcray.io/host": HERE}
    assert node_labels(environ, ask_slurm=refuse) == {}, "a node of the beginning, outside of Slurm"
    by_srun = {
        "SLURM_PROCID": "0", "SLURM_TOPOLOGY_ADDR": "s0.s2.dev7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }  # fmt: skip
    assert node_labels({**environ, **by_srun}, joins=True, ask_slurm=refuse)["hpcray.io/switch"] == "s2"


@pytest.mark.parametrize(
    "answer",
    [
        "RingName=ring0 RingSize=8 Nodes=node[01-08]",
        "",
        "slurm_load_topo error: Unspecified error",
        "No topology information available",
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=other[1-4]",
    ],
)
def test_a_slurm_that_does_not_know_the_node_gives_no_label(answer: str) -> None:
    assert node_labels({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "dev7"}, ask_slurm=lambda: answer) == {}
    assert node_labels({"SLURMD_NODENAME": "dev7"}, joins=True, ask_slurm=lambda: answer) == {}
    environ = {
        "SLURM_PROCID": "0",
        "SLURM_TOPOLOGY_ADDR": "..dev7",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    assert node_labels({"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "dev7", **environ}, ask_slurm=lambda: answer) == {}


@pytest.mark.parametrize(
    "environ",
    [
        {"PBS_JOBID": "7.server", "PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2",
         "PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        {"FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1",
         "FLUX_JOB_NNODES": "2"},
    ],
)  # fmt: skip
def test_pbs_and_flux_say_nothing_of_the_network(environ: dict[str, str], tmp_path: Path) -> None:
    """What they say is the ranks of a host; the site's file says the rest."""
    assert node_labels(environ, ask_slurm=refuse) == {}
    assert node_labels(environ, ranks_here=2, ask_slurm=refuse) == {"hpcray.io/host": HERE}
    path = tmp_path / "topology.conf"
    path.write_text(f"SwitchName=s7 Nodes={HERE}\nSwitchName=top Switches=s[1-9]\n")
    assert node_labels(environ, file=str(path), ask_slurm=refuse)["hpcray.io/switch-path"] == "top.s7"


def machine(root: Path, distances: dict[int, str], cpus: dict[int, str], adapters: dict[str, int]) -> None:
    for node, text in distances.items():
        directory = root / f"sys/devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "distance").write_text(text + "\n")
        (directory / "cpulist").write_text(cpus[node] + "\n")
    for name, node in adapters.items():
        directory = root / "sys/class" / name / "device"
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{node}\n")


def test_numa_nodes_and_the_nearest_adapters_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two NUMA nodes each; the rank has the cores of the second half."""
    distances = {0: "10 12 32 32", 1: "12 10 32 32", 4: "32 32 10 12", 5: "32 32 12 10"}
    cpus = {0: "0-3", 1: "4-7", 4: "8-11", 5: "12-15"}
    machine(tmp_path, distances, cpus, {"infiniband/mlx5_0": 0, "infiniband/mlx5_1": 4, "cxi/cxi0": 1})
    monkeypatch.setattr(numa_binding, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8, 16)))
    half = node_labels({}, ranks_here=2, ask_slurm=refuse)
    assert half == {
        "hpcray.io/host": HERE,
        "hpcray.io/numa": "4-5",
        "hpcray.io/adapters": "mlx5_1.mlx5_0.cxi0",
        "hpcray.io/adapter-distances": "10.32.32",
    }
    assert labels_problem(half) is None
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 8})
    assert node_labels({}, ranks_here=2)["hpcray.io/numa"] == "0-1.4"
    assert node_labels({}) == {}, "one rank of an unknown network"


def test_a_machine_that_does_not_say_its_distances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {0: "10"}, {0: "0-3"}, {"infiniband/mlx5_0": -1})
    monkeypatch.setattr(numa_binding, "ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert node_labels({}, ranks_here=2) == {"hpcray.io/host": HERE, "hpcray.io/adapters": "mlx5_0"}


def test_a_file_counts_before_slurm(tmp_path: Path) -> None:
    path = tmp_path / "topology.conf"
    path.write_text(f"SwitchName=mine Nodes={HERE}\nBlockName=b3 Nodes={HERE}\n")
    environ = {"SLURM_TOPOLOGY_ADDR": f"s0.s1.{HERE}", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    found = node_labels(environ, file=str(path), ask_slurm=refuse)
    assert (found["hpcray.io/switch-path"], found["hpcray.io/block"]) == ("mine", "b3")


def test_racks_and_several_ranks_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "x1000r12n3.site")
    assert node_labels({}, rack_pattern="(r[0-9]+)") == {"hpcray.io/rack": "r12", "hpcray.io/host": "x1000r12n3"}
    assert node_labels({}, rack_pattern="^y") == {}
    assert node_labels({}, ranks_here=2) == {"hpcray.io/host": "x1000r12n3"}
    with pytest.raises(ValueError, match="rack_pattern '\\('.*hint"):
        node_labels({}, rack_pattern="(")


class FakeNvml:
    """GPUs by index: (UUID of the NVLink cluster, clique, state of the fabric)."""

    def __init__(self, gpus: dict[str, tuple[bytes, int, int]]) -> None:
        self.gpus, self.open = gpus, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0 if str(index.value) in self.gpus else 2

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        device._obj.value = [*self.gpus].index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, device: ctypes.c_void_p, info: Any) -> int:
        assert device.value is not None
        uuid, clique, state = [*self.gpus.values()][device.value - 1]
        info._obj.clusterUuid[:] = uuid
        info._obj.cliqueId, info._obj.state = clique, state
        return 0


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ({"0": (b"\1" * 16, 7, 3), "1": (b"\1" * 16, 7, 3)}, f"{'01' * 16}.7"),
        ({"GPU-a": (b"\1" * 16, 7, 3)}, f"{'01' * 16}.7"),
        ({"0": (b"\1" * 16, 7, 3), "1": (b"\1" * 16, 8, 3)}, ""),  # the node is in two domains
        ({"0": (b"\0" * 16, 0, 3)}, ""),
        ({"0": (b"\1" * 16, 7, 1)}, ""),  # not a member of a fabric
    ],
)
def test_nvlink_domains(
    gpus: dict[str, tuple[bytes, int, int]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(gpus)
    monkeypatch.setattr(labels_module.ctypes, "CDLL", lambda name: nvml)
    monkeypatch.setattr(labels_module.os.path, "exists", lambda path: True)
    assert node_labels({}, gpus=[*gpus]).get("ray.io/gpu-domain", "") == expected
    assert nvml.open == 0
