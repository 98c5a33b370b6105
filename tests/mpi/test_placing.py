"""Where tasks run on four nodes: where their bytes are, and where the labels say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job, under_mpirun
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
]

LOCALITY = """\
import collections, json, time
import numpy as np
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On
ray.init()
nodes = [node["NodeID"] for node in ray.nodes()]
@ray.remote
def make(number):
    return np.full(60_000, number)
@ray.remote
def look(block, *more):
    time.sleep(0.02)
    return int(block[0]), ray.get_runtime_context().get_node_id()
home = [nodes[number % 4] for number in range(80)]
blocks = [make.options(scheduling_strategy=On(node, False)).remote(number) for number, node in enumerate(home)]
ray.wait(blocks, num_returns=len(blocks), timeout=60, fetch_local=False)
mapped = ray.get([look.remote(block) for block in blocks], timeout=60)
print("mapped", sum(node == home[number] for number, node in mapped))
# What all tasks share decides nothing.
model = ray.put(np.zeros(100_000))
shared = ray.get([look.remote(block, model) for block in blocks], timeout=60)
print("shared", sum(node == home[number] for number, node in shared))
once = ray.put(np.zeros(1_000_000))
everywhere = ray.get([look.remote(once) for _ in range(80)], timeout=60)
print("everywhere", json.dumps(sorted(collections.Counter(node for _, node in everywhere).values())))
"""


def lines(ended_out: str) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in ended_out.splitlines())


def test_map_tasks_run_where_their_bytes_are(leak_check: LeakCheck, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--cpus-per-node", "1"]
    # A machine that has other work to do as well may hold one rank up while the others are idle.
    with Job([*launch, str(write(tmp_path, LOCALITY))], {"HPCRAY_LOCALITY_WAIT": "30"}) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    found = lines(ended.out)
    assert int(found["mapped"]) >= 76, "95 % of 80"
    assert int(found["shared"]) >= 76, "the larger argument is the one that all share"
    counts = json.loads(found["everywhere"])
    assert sum(counts) - max(counts) >= 5, "a shared argument keeps nobody on its node"


LABELS = """\
import json, os, time
import hpcray as ray
from hpcray.util.placement_group import placement_group, placement_group_table
from hpcray.util.scheduling_strategies import Exists, In, NodeLabelSchedulingStrategy as Labels
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In_group
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
ray.init(num_cpus=3, labels={"rank": str(rank), **({"odd": "yes"} if rank % 2 else {})})
labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
@ray.remote
class Where:
    def labels(self):
        return ray.get_runtime_context().get_node_labels()["rank"]
@ray.remote
def where():
    return ray.get_runtime_context().get_node_labels()["rank"]
def run(**options):
    return sorted(set(ray.get([where.options(**options).remote() for _ in range(8)], timeout=60)))
def preferred(strategy):
    until = time.monotonic() + 30
    while True:  # leases of what ran before may still idle there
        found = ray.get(where.options(scheduling_strategy=strategy).remote(), timeout=60)
        if found == "2" or time.monotonic() > until:
            return found
        time.sleep(0.2)
fallback = [{"label_selector": {"rank": "1"}}]
group = placement_group([{"CPU": 1}] * 2, bundle_label_selector=[{"rank": "3"}, {"odd": "!yes"}])
assert group.wait(60)
chosen = placement_group_table(group)["bundles_to_node_id"]
everywhere = placement_group([{"CPU": 1}] * 4, "STRICT_SPREAD")
assert everywhere.wait(60)
inside = {"scheduling_strategy": In_group(everywhere, placement_group_capture_child_tasks=True), "num_cpus": 1}
print(json.dumps({
    "shown": sorted(found["rank"] for found in labels.values()),
    "own": all(node == found["ray.io/node-id"] for node, found in labels.items()),
    "one": run(label_selector={"rank": "2"}),
    "not": set(run(label_selector={"rank": "!in(0,1,2)"})) == {"3"},
    "hard": set(run(scheduling_strategy=Labels({"odd": Exists()}))) <= {"1", "3"},
    "soft": preferred(Labels(None, soft={"rank": In("2")})),
    "unmet": set(run(scheduling_strategy=Labels({"odd": Exists()}, soft={"rank": In("7")}))) <= {"1", "3"},
    "fallback": run(label_selector={"rank": "moon"}, fallback_strategy=fallback),
    "actor": ray.get(Where.options(label_selector={"rank": "3"}).remote().labels.remote(), timeout=60),
    "inside": [run(label_selector={"rank": rank}, **inside) for rank in ("1", "2")],
    "actor inside": ray.get(Where.options(label_selector={"rank": "1"}, **inside).remote().labels.remote(), timeout=60),
    "group": [labels[chosen[0]]["rank"], "odd" in labels[chosen[1]]],
}))
"""


def test_labels_of_four_nodes(leak_check: LeakCheck, tmp_path: Path) -> None:
    script = write(tmp_path, LABELS)
    with Job(under_mpirun(4, script), {}) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1]) == {
        "shown": ["0", "1", "2", "3"],
        "own": True,
        "one": ["2"],
        "not": True,
        "hard": True,
        "soft": "2",
        "unmet": True,
        "fallback": ["1"],
        "actor": "3",
        "inside": [["1"], ["2"]],
        "actor inside": "1",
        "group": ["3", False],
    }
