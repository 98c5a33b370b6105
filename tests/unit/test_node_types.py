"""Types of nodes from their configuration, and the batch scripts of nodes that join."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from hpcray.autoscaler.batch_systems import batch_script
from hpcray.common.labels import TIME_LEFT, from_strategy, lasting, show_strategy, tier, time_left_label
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.node_types import DEFAULT_TYPE, NodeTypeTable, parse_node_types
from hpcray.protocol.messages import NodeInfo, Shape
from hpcray.runtime.node.join_token import node_command
from hpcray.runtime.node.options import NodeOptions

TYPES = {
    "cpu": {"resources": {"CPU": 16}, "min_workers": 1},
    "gpu": {
        "resources": {"CPU": 8, "GPU": 4},
        "labels": {"region": "eu"},
        "max_workers": 4,
        "node_config": {"partition": "gpu", "constraint": "a100", "--mem_per_gpu": 10, "exclusive": True},
    },
}


def info(index: int, total: dict[str, int], **given: object) -> NodeInfo:
    return NodeInfo(index, "id", "host", "address", 1, total, b"", "", 0, **given)  # type: ignore[arg-type]


def test_types_are_read_as_ray_writes_them() -> None:
    found = parse_node_types(json.dumps({"available_node_types": TYPES}))
    assert found == parse_node_types(json.dumps(TYPES))
    assert found["cpu"].resources == {"CPU": 160_000} and found["cpu"].min_workers == 1
    gpu = found["gpu"]
    assert gpu.max_workers == 4 and gpu.all_labels == {"region": "eu", "ray.io/node-group": "gpu"}
    assert gpu.node_config == {"partition": "gpu", "constraint": "a100", "mem-per-gpu": "10", "exclusive": True}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "node types"),
        ("[]", "no JSON object"),
        ('{"a": {}}', 'it needs "resources"'),
        ('{"a": {"resources": {"CPU": -1}}}', "negative"),
        ('{"a": {"resources": {}, "max_worker": 1}}', "unknown max_worker"),
        ('{"a": {"resources": {}, "max_workers": -1}}', "no number of nodes"),
        ('{"a b": {"resources": {}}}', "a b"),
        ('{"a": {"resources": {}, "labels": {"x": 1}}}', "must be a str"),
        ('{"a": {"resources": {}, "node_config": {"x": [1]}}}', "options of sbatch"),
    ],
)
def test_types_that_are_not_valid_are_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_node_types(text)


def test_without_types_further_nodes_are_like_the_first() -> None:
    types = NodeTypeTable({}, True)
    assert not types.known
    types.nodes_joined([info(0, {"CPU": 40_000, "node:x": 10_000, "disk": 10_000, "memory": 5})])
    assert types.all()[DEFAULT_TYPE].resources == {"CPU": 40_000, "memory": 5}
    assert types.may_come(Shape((("CPU", 40_000),))) and not types.may_come(Shape((("CPU", 50_000),)))
    closed = NodeTypeTable({}, False)
    closed.nodes_joined([info(0, {"CPU": 40_000})])
    assert not closed.known and not closed.may_come(Shape((("CPU", 10_000),)))


def test_the_first_node_of_a_type_shows_what_its_nodes_have() -> None:
    types = NodeTypeTable(parse_node_types(json.dumps(TYPES)), True)
    shown = info(3, {"CPU": 20_000, "node:a": 1}, joined=True, labels={"ray.io/node-group": "cpu"})
    types.nodes_joined([shown])
    assert types.all()["cpu"].resources == {"CPU": 20_000} and list(types.all()) == ["cpu", "gpu"]
    assert not types.may_come(Shape((("CPU", 160_000),)))


def test_the_request_decides_which_nodes_may_come() -> None:
    types = NodeTypeTable(parse_node_types(json.dumps(TYPES)), True)
    europe = 'labels:[false,[[["region","in",["eu"]]]]]'
    assert types.may_come(Shape((("CPU", 80_000),), europe)) and not types.may_come(Shape((("CPU", 90_000),), europe))
    assert not types.may_come(Shape((("CPU", 10_000),), "node:0"))
    assert types.may_come(Shape((("CPU", 10_000),), "node:0:soft"))
    assert types.set_unavailable(["gpu"]) and not types.may_come(Shape((("GPU", 10_000),)))


def test_options_of_the_autoscaler_reach_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "types.yaml"
    path.write_text("available_node_types:\n  cpu:\n    resources: {CPU: 4}\n")
    given = ["--min-nodes", "1", "--max-nodes", "6", "--node-types", str(path), "--idle-node-timeout", "30", "a.py"]
    options = NodeOptions.from_argv(given)
    again = NodeOptions.from_argv(options.to_argv())
    assert again == options
    assert parse_node_types(again.settings().node_types)["cpu"].resources == {"CPU": 40_000}
    with pytest.raises(ValueError, match="more than max_nodes"):
        NodeOptions.from_argv(["--min-nodes", "3", "--max-nodes", "2", "a.py"]).settings()
    with pytest.raises(ValueError, match="nothing.json"):
        NodeOptions.from_argv(["--node-types", "nothing.json", "a.py"])


def test_the_batch_script_of_a_node_names_its_type_and_its_batch_job() -> None:
    line = node_command("/t/x.ticket", 2.0, None, {"disk": 1.0}, {"labels": "a=b", "node-types": ""})
    text = batch_script(
        {"nodes": 1, "array": "1-3", "cpus-per-task": 2, "mem": None, "no-requeue": True}, "/t", line, "cpu"
    )
    lines = text.splitlines()
    assert lines[:5] == [
        "#!/bin/sh",
        "#SBATCH --nodes=1",
        "#SBATCH --array=1-3",
        "#SBATCH --cpus-per-task=2",
        "#SBATCH --no-requeue",
    ]
    assert "export RAY_NODE_TYPE_NAME=cpu" in lines and "--cpus-per-task=2" in lines[-1]
    assert """--join /t/x.ticket --num-cpus 2 --resources '{"disk": 1.0}' --labels a=b""" in lines[-1]


def test_work_is_placed_where_it_can_end_if_there_is_such_a_node() -> None:
    long = Shape((("CPU", 10_000),), lasting("", 300))
    resources = ClusterResources(0.5, NodeTypeTable(parse_node_types(json.dumps(TYPES)), True))
    resources.nodes_joined([info(0, {"CPU": 10_000}), info(1, {"CPU": 10_000}, joined=True)])
    assert resources.feasible(long) == [0, 1], "nothing is known"
    resources.set_time_left({1: 299.0}, math.inf)
    assert resources.feasible(long) == [0] and resources.feasible(Shape(long.resources)) == [0, 1]
    resources.set_time_left({0: 100.0, 1: 250.0}, math.inf)
    assert resources.feasible(long) == [] and resources.node_types.may_come(long), "a further node is waited for"
    resources.set_time_left({0: 100.0, 1: 250.0}, 280.0)
    assert resources.feasible(long) == [0, 1], "none will last longer than the job: it may end in time nevertheless"
    assert "s left" in show_strategy(long.strategy)


def test_nodes_of_a_type_last_as_long_as_the_first_one_did() -> None:
    types = NodeTypeTable(parse_node_types(json.dumps(TYPES)), True)
    long = Shape((("CPU", 10_000),), lasting("SPREAD", 3600))
    assert types.may_come(long)
    assert types.set_time_left({"cpu": 600.0, "gpu": 600.0}, 1e6) and not types.may_come(long)
    assert not types.set_time_left({"cpu": 500.0, "gpu": 500.0}, 9e5), "that was the first"


@pytest.mark.parametrize("seconds", [2, 59.5, 60, 300, 86400, 1e7])
def test_a_node_that_counts_as_lasting_does_last(seconds: float) -> None:
    strategy = lasting("", seconds)
    _, alternatives = from_strategy(strategy)
    for left in (seconds * 0.99, seconds, seconds * 1.01, seconds * 1.5, seconds * 4):
        fits = tier(alternatives, {TIME_LEFT: time_left_label(left)}) is not None
        assert not fits or left >= seconds * 0.999
        assert fits or left < seconds * 2.1
