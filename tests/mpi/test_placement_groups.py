"""Placement groups on four nodes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
]

SCRIPT = """\
import json, time
import hpcray as ray
from hpcray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from hpcray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In
ray.init()
@ray.remote(num_cpus=0)
class Actor:
    def where(self):
        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_placement_group_id(), ray.get_gpu_ids()
@ray.remote
def where():
    return ray.get_runtime_context().get_node_id()
def nodes_of(group):
    return list(placement_group_table(group)["bundles_to_node_id"].values())
def whole():
    return {"CPU": 8.0, "GPU": 8.0}.items() <= ray.available_resources().items()
def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, ray.available_resources()
        time.sleep(0.02)
    return True
for strategy in ("STRICT_PACK", "STRICT_SPREAD", "PACK", "SPREAD"):
    count = 2 if strategy == "STRICT_PACK" else 4
    group = placement_group([{"CPU": 1, "GPU": 1}] * count, strategy=strategy)
    assert group.wait(60)
    nodes = nodes_of(group)
    actors = [Actor.options(num_gpus=1, scheduling_strategy=In(group, i)).remote() for i in range(count)]
    found = ray.get([actor.where.remote() for actor in actors], timeout=60)
    tasks = [where.options(scheduling_strategy=In(group, i)).remote() for i in range(count) for _ in range(5)]
    rows = {
        "nodes": len(set(nodes)),
        "in place": [node for node, _, _ in found] == nodes and {g for _, g, _ in found} == {group.id.hex()},
        "devices": len({(node, *ids) for node, _, ids in found}),
        "tasks": ray.get(tasks, timeout=60) == [node for node in nodes for _ in range(5)],
        "any": set(ray.get([where.options(scheduling_strategy=In(group)).remote() for _ in range(20)], timeout=60))
        <= set(nodes),
    }
    remove_placement_group(group)
    rows["back"] = eventually(whole)
    print(strategy, json.dumps(rows))
first = placement_group([{"CPU": 2}] * 3, strategy="SPREAD")
second = placement_group([{"CPU": 2}] * 3, strategy="SPREAD")
late = where.options(scheduling_strategy=In(second, 2)).remote()
print("waits", first.wait(60) and not second.wait(0.3))
remove_placement_group(first)
print("comes", second.wait(60) and ray.get(late, timeout=60) == nodes_of(second)[2])
remove_placement_group(second)
print("whole", eventually(whole))
"""


def test_four_strategies_and_a_group_that_waits_for_another(leak_check: LeakCheck, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--cpus-per-node", "2"]
    with Job([*launch, "--gpus-per-node", "2", str(write(tmp_path, SCRIPT))], {}) as job:
        ended = job.wait(150)
    assert ended.code == 0, ended.err
    found = dict(line.split(" ", 1) for line in ended.out.splitlines())
    for strategy, nodes in (("STRICT_PACK", 1), ("STRICT_SPREAD", 4), ("PACK", 2), ("SPREAD", 4)):
        rows = json.loads(found[strategy])
        count = 2 if strategy == "STRICT_PACK" else 4
        wanted = {"nodes": nodes, "in place": True, "devices": count, "tasks": True, "any": True, "back": True}
        assert rows == wanted, strategy
    assert (found["waits"], found["comes"], found["whole"]) == ("True", "True", "True")
