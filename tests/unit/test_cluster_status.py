"""The text of `ray status`, and what scripts in public use take out of it."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime
from typing import Any

import pytest

from hpcray.state.cluster_status import ClusterStatus, EndedNode, NodeUsage, show_status, usage_of, waiting_tasks

GIB = float(1 << 30)
WHEN = datetime(2026, 11, 28, 18, 40, 42, 611893).timestamp()
FIRST, SECOND = "ca" * 28, "db" * 28
TOTAL = {"CPU": 4.0, "GPU": 2.0, "memory": 15.44 * GIB, "object_store_memory": 6.62 * GIB, "worker_units": 8.0}
ALWAYS = {"node:10.0.0.1": 1.0, "node:__internal_head__": 1.0, "accelerator_type:H100": 1.0}


def node(node_id: str = FIRST, **given: Any) -> NodeUsage:
    total = given.pop("total", {**TOTAL, **ALWAYS})
    return NodeUsage(node_id, total=total, available=given.pop("available", total), **given)


def test_the_text_is_that_of_ray() -> None:
    """What `ray status` of Ray 2.60 has printed for a cluster of one node."""
    assert (
        show_status(ClusterStatus(WHEN, 0.001, [node()]))
        == f"""\
======== Autoscaler status: 2026-11-28 18:40:42.611893 ========
Node status
---------------------------------------------------------------
Active:
 1 node_{FIRST}
Pending:
 (no pending nodes)
Recent failures:
 (no failures)

Resources
---------------------------------------------------------------
Total Usage:
 0.0/4.0 CPU
 0.0/2.0 GPU
 0B/15.44GiB memory
 0B/6.62GiB object_store_memory
 0.0/8.0 worker_units

From request_resources:
 (none)
Pending Demands:
 (no resource demands)"""
    )


def test_what_waits_is_there_in_the_words_of_ray() -> None:
    tasks = {(("CPU", 1.0),): (4, 1), (("CPU", 1.0), ("GPU", 5.0)): (3, 0)}
    groups = [(((("CPU", 1.0), ("worker_units", 1.0)),), "PACK"), (((("CPU", 10.0),),) * 2, "STRICT_PACK")]
    text = show_status(ClusterStatus(WHEN, 0.001, [node()], tasks, groups))
    assert text.endswith(
        "Pending Demands:\n"
        " {'CPU': 1.0}: 4+ pending tasks/actors (1+ using placement groups)\n"
        " {'CPU': 1.0, 'GPU': 5.0}: 3+ pending tasks/actors\n"
        " {'CPU': 1.0, 'worker_units': 1.0} * 1 (PACK): 1+ pending placement groups\n"
        " {'CPU': 10.0} * 2 (STRICT_PACK): 1+ pending placement groups"
    )


def test_what_placement_groups_hold_is_used_where_it_is_used() -> None:
    free = {"CPU": 0.5, "GPU": 2.0, "worker_units": 6.0}
    one = node(
        total={"CPU": 4.0, "GPU": 2.0, "worker_units": 8.0}, available=free,
        held={"CPU": 2.0, "worker_units": 2.0}, free={"CPU": 1.0, "worker_units": 2.0},
    )  # fmt: skip
    text = show_status(ClusterStatus(WHEN, 0.001, [one, node(SECOND, total={"CPU": 4.0})]))
    assert " 2.5/8.0 CPU (1.0 used of 2.0 reserved in placement groups)\n" in text
    assert " 0.0/8.0 worker_units (0.0 used of 2.0 reserved in placement groups)\n" in text
    assert usage_of([one])["GPU"] == (0.0, 2.0, 0.0, 0.0)


def test_sums_of_fractions_are_shown_as_the_numbers_they_are() -> None:
    nodes = [node(f"{number:056x}", total={"GPU": 0.1}, available={"GPU": 0.0}) for number in range(3)]
    assert " 0.3/0.3 GPU\n" in show_status(ClusterStatus(WHEN, 0.001, nodes))


def test_verbose_has_each_node_and_its_accelerators() -> None:
    text = show_status(ClusterStatus(WHEN, 0.002466, [node(), node(SECOND)]), verbose=True)
    assert "GCS request time: 0.002466s\n\nNode status\n" in text
    assert f"\n\nNode: {SECOND} (node_{SECOND})\n Usage:\n  0.0/4.0 CPU\n" in text
    assert " 0.0/2.0 accelerator_type:H100\n" in text and "node:10" not in text


def test_an_autoscaler_has_types_idle_nodes_launches_and_failures() -> None:
    scaling = {
        "pending": [
            {"type": "gpu", "state": "REQUESTED", "instance": "", "age": 0.0},
            {"type": "gpu", "state": "REQUESTED", "instance": "", "age": 0.0},
            {"type": "gpu", "state": "QUEUED", "instance": "4711", "age": 9.0},
        ],
        "failures": [{"type": "big", "reason": "no such partition", "age": 2.0}],
        "requested": [[{"CPU": 4.0}, 2]],
    }
    nodes = [node(), node(SECOND, node_type="gpu"), node("ee" * 28, node_type="gpu", idle=True)]
    text = show_status(ClusterStatus(WHEN, 0.001, nodes, autoscaler=scaling), verbose=True)
    assert f"Active:\n 1 node_{FIRST}\n 1 gpu\nIdle:\n 1 gpu\nPending:\n gpu, 2 launching\n 4711: gpu, queued\n" in text
    assert " big: LaunchFailed (latest_attempt: 18:40:40) - no such partition\n" in text
    assert "From request_resources:\n {'CPU': 4}: 2 from request_resources()\n" in text


@pytest.mark.skipif(shutil.which("awk") is None, reason="there is no awk")
@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("grep -c node_", "3"),
        ("grep -c ' 1 node_'", "3"),
        ("grep GPU | awk '{print $1}' | cut -d/ -f1", "3.0"),
        ("grep 'GPU' | awk -F'[/ ]' '{print $3}'", "6.0"),
        ("grep worker_units | awk -F'[/. ]' '{print $4}'", "24"),
        ("sed -n '/Active:/,/Pending:/p' | grep -c node", "3"),
    ],
)
def test_the_parsers_of_public_scripts_read_it(parser: str, said: str) -> None:
    used = {**TOTAL, "GPU": 1.0, "worker_units": 7.0}
    status = ClusterStatus(WHEN, 0.001, [node(f"{number:056x}", available=used) for number in range(3)])
    done = subprocess.run(["sh", "-c", parser], input=show_status(status) + "\n", capture_output=True, text=True)
    assert done.stdout.strip() == said


def queued(count: int, actor: str = "", group: str = "", **resources: float) -> dict[str, Any]:
    return {"resources": resources, "missing": count, "actor": actor, "group": group}


def test_what_waits_is_counted_once() -> None:
    """A request that no node can serve waits in its raylet's queue and at the head; an actor that starts on a node is
    in its queue and in the head's table."""
    unmet = [{"resources": {"CPU": 1.0, "GPU": 5.0}, "count": 3}, {"resources": {"TPU": 1.0}, "count": 2}]
    rows = [queued(2, CPU=1.0, GPU=5.0), queued(2, CPU=1.0), queued(1, CPU=1.0, group="ab"), queued(1, "A", CPU=1.0)]
    actors = [
        {"state": "PENDING", "resources": {"CPU": 1.0}, "group": ""},
        {"state": "RESTARTING", "resources": {}, "group": "ab"},
        {"state": "ALIVE", "resources": {"CPU": 1.0}, "group": ""},
        {"state": "DEAD", "resources": {"CPU": 1.0}, "group": ""},
    ]
    assert waiting_tasks(unmet, rows, actors) == {
        (("CPU", 1.0), ("GPU", 5.0)): (3, 0),
        (("TPU", 1.0),): (2, 0),
        (("CPU", 1.0),): (5, 2),
    }


def test_nodes_that_have_ended_are_failures_which_scripts_do_not_count_as_nodes() -> None:
    ended = [EndedNode("n2", "10.99.0.2", "UCX: its process has ended")]
    lines = show_status(ClusterStatus(WHEN, 0.001, [node()], ended=ended)).splitlines()
    assert " n2: NodeTerminated (ip: 10.99.0.2) - UCX: its process has ended" in lines
    assert sum("node_" in line for line in lines) == 1
