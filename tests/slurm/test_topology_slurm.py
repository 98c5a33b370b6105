"""A Slurm that knows its switches: labels of nodes, groups within one switch, and what crosses the link between two."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from helpers.slurm import Cluster, Slurm, boot, leak_checked
from testcluster.cluster import ClusterError, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PROGRAM = """\
import json, os, subprocess, sys, time
import numpy as np
import hpcray as ray
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
    return int(open(TRAFFIC).read())


def hosts():
    return {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def on(host):
    (node,) = [node for node, name in hosts().items() if name == host]
    return NodeAffinitySchedulingStrategy(node, soft=False)


@ray.remote
def make():
    return np.ones(32 << 20)


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

before, ref = crossed(), make.options(scheduling_strategy=on("n1")).remote()
ray.wait([ref], fetch_local=False)
sizes = ray.get([read.options(scheduling_strategy=on(host), num_cpus=0).remote(ref) for host in ("n3", "n2")])
show(broadcast=(crossed() - before) / sizes[0])

(job,) = cluster.scale(1, sbatch={"nodelist": "n4"}, wait=True)
label = {node["NodeManagerHostname"]: node["Labels"].get("hpcray.io/switch") for node in ray.nodes()}
before = crossed()
show(joined=label["n4"], size=ray.get(read.options(scheduling_strategy=on("n4"), num_cpus=0).remote(ref)) / sizes[0])
show(again=(crossed() - before) / sizes[0])
"""


@pytest.fixture(scope="module")
def switches() -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    found = boot(4, "switches", topology="s1=n1-n2,s2=n3-n4")
    yield found
    found.down()


def test_a_job_uses_what_slurm_knows_of_the_network(switches: Cluster) -> None:
    with leak_checked(switches, "topology") as slurm:
        answers = slurm.place / "traffic"
        script = slurm.source / "slurm" / "cpu.sbatch"
        job = slurm.sbatch("-N3", "--nodelist", "n1,n2,n3", "-c4", script, slurm.write(PROGRAM), answers)

        def ended() -> bool:
            if (ask := answers.with_suffix(".ask")).exists():
                answers.write_text(str(switches.traffic()["s2"]))
                ask.unlink()
            return slurm.job(job)["JobState"] not in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING")

        slurm.wait(ended, "the end of the job", 120)
        told = slurm.complete(job)
        facts = {}
        for line in told.splitlines():
            if line.startswith("facts "):
                facts |= json.loads(line[6:])
        assert facts["switches"] == {"n1": "s1", "n2": "s1", "n3": "s2"}, told
        assert facts["drawn"] == ["s0", "├─ s1", "│  ├─ n1 (node 0)", "│  └─ n2 (node 1)", "└─ s2", "   └─ n3 (node 2)"]
        assert facts["known"] and facts["ranks"] == ["n1", "n2", "n3"]
        assert facts["packed"] == ["n1", "n2"], told
        assert facts["spread"] == ["n1", "n2"], "two nodes of one switch"
        assert 1 <= facts["broadcast"] <= 1.1, told
        assert (facts["joined"], facts["size"]) == ("s2", 1.0), told
        assert facts["again"] <= 0.1, "from n3, behind the same switch"


def test_a_cluster_without_a_topology_gives_no_labels(slurm: Slurm) -> None:
    program = "import hpcray as ray\nray.init()\nprint([sorted(node['Labels']) for node in ray.nodes()], flush=True)\n"
    told = slurm.complete(slurm.sbatch("-N2", slurm.source / "slurm" / "cpu.sbatch", slurm.write(program)))
    assert str([["ray.io/node-id"]] * 2) in told.splitlines()


@pytest.mark.parametrize("topology", ["s1=n1", "s1=n1-n2,s2=n2", "n1", "s0=n1-n2", "s1=nodes"])
def test_a_topology_that_leaves_a_node_out_is_refused(topology: str) -> None:
    with pytest.raises(ClusterError, match="--topology"):
        Cluster.up("refused", 2, topology=topology)
