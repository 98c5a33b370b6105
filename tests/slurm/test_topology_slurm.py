"""A Slurm that knows its switches: labels of nodes, groups within one switch, and what crosses the link between two."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.slurm import SRUN, Cluster, Slurm, boot, leak_checked
from testcluster.cluster import ClusterError, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PROGRAM = """\
import json, os, subprocess, sys, time
import numpy as np
import hpcray as ray
import hpcray.mpi
from hpcray import cluster
from hpcray.util import rank_order
from hpcray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

ray.init()
TRAFFIC = sys.argv[1]


def command(*words):
    return subprocess.run([sys.executable, "-m", "hpcray.cli", *words], capture_output=True, text=True).stdout


def show(**facts):
    print("facts", json.dumps(facts), flush=True)


def crossed():
    open(TRAFFIC + ".ask", "w").close()
    while os.path.exists(TRAFFIC + ".ask"):
        time.sleep(0.02)
    return json.loads(open(TRAFFIC).read())


def hosts():
    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def on(host):
    (node,) = [node for node, name in hosts().items() if name == host]
    return NodeAffinitySchedulingStrategy(node, soft=False)


@ray.remote
def make(count=32 << 20):
    return np.ones(count)


@ray.remote
def read(value):
    time.sleep(0.2)
    return value.nbytes


listed = {row["node_id"]: row["labels"] for row in json.loads(command("list", "nodes", "--format", "json"))}
show(switches={hosts()[node]: labels.get("hpcray.io/switch") for node, labels in listed.items()})
show(drawn=command("topology").splitlines(), known=json.loads(command("topology", "--json"))["known"])
show(ranks=[hosts()[node] for node in rank_order(sorted(hosts(), key=hosts().get))])

group = placement_group([{"CPU": 1}] * 3, topology_strategy={"hpcray.io/switch": "STRICT_PACK"})
assert group.wait(30)
show(packed=sorted({hosts()[node] for node in placement_group_table(group)["bundles_to_node_id"].values()}))
remove_placement_group(group)
spread = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
assert spread.wait(30)
show(spread=sorted({hosts()[node] for node in placement_group_table(spread)["bundles_to_node_id"].values()}))
remove_placement_group(spread)

before, ref = crossed()["s2"], make.options(scheduling_strategy=on("n1")).remote()
ray.wait([ref], fetch_local=False)
sizes = ray.get([read.options(scheduling_strategy=on(host), num_cpus=0).remote(ref) for host in ("n3", "n2")])
show(broadcast=(crossed()["s2"] - before) / sizes[0])

(job,) = cluster.scale(1, sbatch={"nodelist": "n4"}, wait=True)
label = {node["NodeManagerHostname"]: node["Labels"].get("hpcray.io/switch") for node in ray.nodes()}
before = crossed()["s2"]
show(joined=label["n4"], size=ray.get(read.options(scheduling_strategy=on("n4"), num_cpus=0).remote(ref)) / sizes[0])
show(again=(crossed()["s2"] - before) / sizes[0])
"""
HELPERS = PROGRAM[: PROGRAM.index("listed = ")]

SHAPES = """
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.runtime.node.join_token import join_token_path, request_join_token, write_join_token


def paths():
    rows = [row for row in ray.nodes() if row["Alive"]]
    return {row["NodeManagerHostname"]: row["Labels"].get("hpcray.io/switch-path") for row in rows}


def at_switches(group):
    return sorted({paths()[hosts()[node]] for node in placement_group_table(group)["bundles_to_node_id"].values()})


def where(comm):
    return os.uname().nodename


show(first=paths())
cpus = int(min(row["Resources"]["CPU"] for row in ray.nodes()))
show(mpi=ray.mpi.run(where, 2 * cpus, timeout=60), cpus=cpus)
cluster.scale(1, sbatch={"nodelist": "n4"}, wait=True)
session = need_process().place.session_dir
path = join_token_path(os.path.basename(session))
write_join_token(path, request_join_token(session))
show(token=path)
while "n5" not in paths():
    time.sleep(0.05)
show(paths=paths())
for count, each in ((2, cpus), (2 * cpus, 1)):
    group = placement_group([{"CPU": each}] * count, topology_strategy={"hpcray.io/switch": "STRICT_PACK"})
    assert group.wait(30)
    show(**{f"packed{each}": at_switches(group)})
    remove_placement_group(group)
group = placement_group([{"CPU": cpus}] * 3, topology_strategy={"hpcray.io/switch": "STRICT_PACK"})
assert not group.wait(1), "no switch has three nodes"
show(group="\\n".join(str(row) for row in placement_group_table().values()))
remove_placement_group(group)
ref = make.options(scheduling_strategy=on("n1")).remote()
ray.wait([ref], fetch_local=False)
before = crossed()
ray.get([read.options(scheduling_strategy=on(host), num_cpus=0).remote(ref) for host in ("n5", "n4", "n3", "n2")])
show(broadcast={switch: (count - before[switch]) / (256 << 20) for switch, count in crossed().items()})
"""

DATA = """
@ray.remote
def part(count):
    return tuple(np.ones((count, 1 << 19)))


@ray.remote
def merge(*parts):
    return os.uname().nodename


@ray.remote
def use(block, seconds):
    time.sleep(seconds)
    return os.uname().nodename


def counted(ask):
    before = crossed()["s2"]
    return sorted(ray.get(ask())), (crossed()["s2"] - before) / (1 << 20)


for host in ("n1", "n2", "n3", "n4"):
    ray.get([use.options(scheduling_strategy=on(host)).remote(b"", 0.2) for _ in range(4)])
rows = [
    part.options(num_returns=4, scheduling_strategy=on(host)).remote(4)
    for host, count in (("n2", 4), ("n3", 3), ("n4", 3))
    for _ in range(count)
]
ray.wait([row[0] for row in rows], num_returns=len(rows), fetch_local=False)
show(shuffle=counted(lambda: [merge.remote(*column) for column in zip(*rows)]))
blocks = [make.options(scheduling_strategy=on("n3")).remote(1 << 20) for _ in range(12)]
ray.wait(blocks, num_returns=len(blocks), fetch_local=False)
time.sleep(1)
show(map=counted(lambda: [use.remote(block, 1.0) for block in blocks]))
"""


@pytest.fixture(scope="module")
def switches() -> Iterator[Cluster]:
    yield from booted(4, "s1=n1-n2,s2=n3-n4")


@pytest.fixture(scope="module")
def uneven() -> Iterator[Cluster]:
    """The first node is alone at its switch."""
    yield from booted(5, "s1=n1,s2=n2-n3,s3=n4-n5")


def booted(nodes: int, topology: str) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    found = boot(nodes, f"switches{nodes}", topology=topology)
    yield found
    found.down()


def facts_of(slurm: Slurm, job: str, answers: Path, act: Callable[[dict[str, Any]], None] = lambda facts: None) -> Any:
    """What a program has shown, when it has ended. act: called with what it has shown so far, again and again."""

    def ended() -> bool:
        if (ask := answers.with_suffix(".ask")).exists():
            answers.write_text(json.dumps(slurm.cluster.traffic()))
            ask.unlink()
        act(shown(slurm.output()))
        return slurm.job(job)["JobState"] not in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING")

    slurm.wait(ended, "the end of the job", 150)
    return shown(slurm.complete(job))


def shown(output: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"output": output}
    for line in output.splitlines():
        if line.startswith("facts ") and line.endswith("}"):
            facts |= json.loads(line[6:])
    return facts


def test_a_job_uses_what_slurm_knows_of_the_network(switches: Cluster) -> None:
    with leak_checked(switches, "topology") as slurm:
        answers = slurm.place / "traffic"
        script = slurm.source / "slurm" / "cpu.sbatch"
        job = slurm.sbatch("-N3", "--nodelist", "n1,n2,n3", "-c4", script, slurm.write(PROGRAM), answers)
        facts = facts_of(slurm, job, answers)
        told = facts["output"]
        assert facts["switches"] == {"n1": "s1", "n2": "s1", "n3": "s2"}, told
        assert facts["drawn"] == ["s0", "├─ s1", "│  ├─ n1 (node 0)", "│  └─ n2 (node 1)", "└─ s2", "   └─ n3 (node 2)"]
        assert facts["known"] and facts["ranks"] == ["n1", "n2", "n3"]
        assert facts["packed"] == ["n1", "n2"], told
        assert facts["spread"] == ["n1", "n2"], "two nodes of one switch"
        assert 1 <= facts["broadcast"] <= 1.1, told
        assert (facts["joined"], facts["size"]) == ("s2", 1.0), told
        assert facts["again"] <= 0.1, "from n3, behind the same switch"


def test_a_shuffle_and_a_map_put_less_on_the_link_than_without_places(switches: Cluster) -> None:
    """The version before places (9f4fa4c) puts 96 MB of the shuffle's 160 on it, as n2 alone has the largest part, and
    32 MB of the map's 96, as what n3 cannot begin soon goes to all others."""
    with leak_checked(switches, "data") as slurm:
        answers = slurm.place / "traffic"
        script, program = slurm.source / "slurm" / "cpu.sbatch", slurm.write(HELPERS + DATA)
        facts = facts_of(slurm, slurm.sbatch("-N4", "-c4", script, "--cpus-per-node", 4, program, answers), answers)
        told = facts["output"]
        (at, crossed), (ran, through) = facts["shuffle"], facts["map"]
        assert set(at) <= {"n3", "n4"} and 64 <= crossed <= 1.1 * 64, told
        assert set(ran) == {"n3", "n4"} and through <= 0.1 * 32, told


def test_nodes_that_join_in_either_way_know_their_switch(uneven: Cluster) -> None:
    """n4 joins as a batch job of its own, n5 from a shell on that host, in which nothing of Slurm is set, as by ssh."""
    with leak_checked(uneven, "shapes") as slurm:
        answers, joined = slurm.place / "traffic", list[Any]()

        def join(facts: dict[str, Any]) -> None:
            if "token" in facts and not joined:
                joined.append(slurm.start(slurm.python, "-m", "hpcray", "--join", facts["token"], host="n5"))

        script = slurm.source / "slurm" / "cpu.sbatch"
        program = slurm.write(HELPERS + SHAPES)
        job = slurm.sbatch("-N3", "--nodelist", "n1,n2,n3", "-c4", script, program, answers)
        try:
            facts = facts_of(slurm, job, answers, join)
        finally:
            for one in joined:
                with one:
                    assert one.wait(60).code == 0
        told, expected = facts["output"], {"n1": "s0.s1", "n2": "s0.s2", "n3": "s0.s2", "n4": "s0.s3", "n5": "s0.s3"}
        assert facts["first"] == {host: expected[host] for host in ("n1", "n2", "n3")}, told
        assert facts["mpi"] == ["n2"] * facts["cpus"] + ["n3"] * facts["cpus"], told
        assert facts["paths"] == expected, told
        packed = [texts for name, texts in facts.items() if name.startswith("packed")]
        assert len(packed) == 2 and all(texts in (["s0.s2"], ["s0.s3"]) for texts in packed), told
        assert all(1 <= facts["broadcast"][switch] <= 1.1 for switch in ("s2", "s3")), told


def test_several_ranks_of_a_host_share_its_switch(uneven: Cluster) -> None:
    program = """\
import hpcray as ray
ray.init()
names = ("host", "switch", "switch-path")
for row in sorted(ray.nodes(), key=lambda row: row["Index"]):
    print("at", *[row["Labels"]["hpcray.io/" + name] for name in names], flush=True)
"""
    with leak_checked(uneven, "ranks") as slurm:
        line = (*SRUN[:-1], "--ntasks-per-node=2", "-N2", "-n4", "--nodelist=n1,n2", "-c2", "python", "-m", "hpcray")
        ended = slurm.run(*line, "--num-cpus", "1", slurm.write(program))
        assert ended.code == 0, ended.err
        told = ended.out
        lines = [line for line in told.splitlines() if line.startswith("at ")]
        assert sorted(lines) == ["at n1 s1 s0.s1"] * 2 + ["at n2 s2 s0.s2"] * 2, told


def test_a_broadcast_environment_crosses_each_link_once(uneven: Cluster) -> None:
    with leak_checked(uneven, "environment") as slurm:
        directory = slurm.place / "package"
        directory.mkdir()
        directory.chmod(0o755)
        (directory / "large.bin").write_bytes(os.urandom(64 << 20))
        program = slurm.write("import hpcray as ray\nray.init()\nprint('ended', flush=True)\n", "package/program.py")
        before = uneven.traffic()
        script = slurm.source / "slurm" / "cpu.sbatch"
        told = slurm.complete(slurm.sbatch("-N5", "-c4", script, "--broadcast-env", directory, program))
        crossed = {switch: count - before[switch] for switch, count in uneven.traffic().items()}
        assert "ended" in told.splitlines(), told
        assert all((64 << 20) <= count <= 1.1 * (64 << 20) for count in crossed.values()), crossed


def test_a_cluster_without_a_topology_gives_no_labels(slurm: Slurm) -> None:
    program = "import hpcray as ray\nray.init()\nprint([sorted(node['Labels']) for node in ray.nodes()], flush=True)\n"
    told = slurm.complete(slurm.sbatch("-N2", slurm.source / "slurm" / "cpu.sbatch", slurm.write(program)))
    assert str([["ray.io/node-id"]] * 2) in told.splitlines()


@pytest.mark.parametrize("topology", ["s1=n1", "s1=n1-n2,s2=n2", "n1", "s0=n1-n2", "s1=nodes"])
def test_a_topology_that_leaves_a_node_out_is_refused(topology: str) -> None:
    with pytest.raises(ClusterError, match="--topology"):
        Cluster.up("refused", 2, topology=topology)
