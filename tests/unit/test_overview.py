"""Samples of a job: rates between two of them, nodes that do not answer, and what they look like as metrics."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.cli.progress import progress_text
from hpcray.cli.top_cells import headline, node_cells
from hpcray.common.figures import bucket_of
from hpcray.diagnostics.metrics_endpoint import OPENMETRICS, metrics_text
from hpcray.state import overview
from hpcray.state.node_metrics import metric_rows
from hpcray.state.overview import JobOverview, JobUse, NodeUse

STORE = {
    "capacity": 1000, "used": 250, "on_disk": 40, "spilled_bytes": 100, "loaded_bytes": 0, "objects": 3, "waiting": 0,
    "pulled": 2, "sent": 1, "pulled_bytes": 5000, "sent_bytes": 700,
}  # fmt: skip


def node_row(node: int, time: float, **more: Any) -> dict[str, Any]:
    """What a raylet says of its node."""
    row = {
        "node": node, "host": f"n{node}", "time": time, "resources": {"CPU": [1.0, 4.0]},
        "cpu": {"host_busy": 10.0, "host_all": 100.0, "host_count": 4, "job": 5.0},
        "memory": {"used": 3, "limit": 4, "source": "", "rss": 2}, "store": STORE,
        "network": {"received": 0, "sent": 0},
        "wire": {"sent": [5, 700], "received": [6, 800]}, "workers": {"busy": 1, "idle": 1}, "actors": 1, "leases": 1,
        "waiting": 0, "gpus": [],
    }  # fmt: skip
    return {**row, **more}


class FakeProcess:
    """A process whose job has two nodes, of which the second may say nothing."""

    node = 0
    place = SimpleNamespace(session_dir="/s")

    def __init__(self) -> None:
        self.gcs = self

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Index": i, "NodeID": f"id{i}", "NodeManagerHostname": f"n{i}", "Alive": True, "DeathReason": "",
                "Labels": {},
            }
            for i in range(2)
        ]  # fmt: skip


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> tuple[JobOverview, dict[str, Any]]:
    report: dict[str, Any] = {"functions": {}, "running": {}, "queued": {}, "elapsed": {}}
    report |= {"latency": {1: 0.002}, "partial": False}

    class Session:
        program, session, slurm_job, end = "train.py  --fast", "s1", "", 0.0

    class Query:
        def __init__(self, *_: Any) -> None: ...

        def ask(self, procs: list[bytes], what: str, *args: Any) -> dict[bytes, Any]:
            return {procs[0]: report}

    monkeypatch.setattr(overview, "read_session", lambda path: Session)
    monkeypatch.setattr(overview, "ClusterQuery", Query)
    return JobOverview(FakeProcess()), report  # type: ignore[arg-type]


def test_a_node_is_slow_where_the_same_functions_take_longer_than_elsewhere() -> None:
    slowness, functions = overview._slowness, {"f": [33, 3, 50_000, {46: 30}], "alone": [5, 0, 9_000, {40: 5}]}
    assert slowness({"times": {"f": [10, 30_000], "alone": [5, 9_000]}}, functions) == 3.0
    assert slowness({"times": {"f": [20, 20_000]}}, functions) == 1 / 3
    assert slowness({"times": {"alone": [5, 9_000]}}, functions) is None and slowness({}, functions) is None


def test_rates_are_those_between_two_samples(job: tuple[JobOverview, dict[str, Any]]) -> None:
    view, report = job
    report["nodes"] = [node_row(0, 100.0), node_row(1, 100.0)]
    report["functions"] = {"f": [10, 0, 10_000_000, {bucket_of(1e6): 10}]}
    first = view.sample()
    assert [node.spilling for node in first.nodes] == [0.0, 0.0] and first.program == "train.py --fast"
    cpu = {"host_busy": 18.0, "host_all": 108.0, "host_count": 4, "job": 9.0}
    report["nodes"][0] = node_row(
        0, 102.0, cpu=cpu, store={**STORE, "spilled_bytes": 1100, "pulled_bytes": 9000, "sent_bytes": 1700},
        network={"received": 4000, "sent": 0},
    )  # fmt: skip
    report["functions"] = {"f": [30, 2, 30_000_000, {bucket_of(1e6): 30}], "g": [1, 0, 5, {0: 1}]}
    report["running"], report["queued"], report["elapsed"] = {"f": 2, "long": 1}, {"h": 7}, {"f": 500_000, "long": 9**9}
    second = view.sample()
    one, other = second.nodes
    assert (one.cores, one.spilling, one.receiving) == (2.0, 500.0, 2000.0) and one.cpu == 1.0
    assert (one.pulling, one.pushing) == (2000.0, 500.0)
    assert (other.cores, other.latency) == (0.0, 0.002), "it has said nothing new"
    assert [(each.name, each.running, each.queued, each.failed) for each in second.functions] == [
        ("long", 1, 0, 0), ("f", 2, 0, 2), ("g", 0, 0, 0), ("h", 0, 7, 0),
    ], "one that has not ended yet may have taken most time"  # fmt: skip
    long, f = second.functions[:2]
    assert (long.seconds, long.total) == (0.0, 9**9 / 1e6) and (f.seconds, f.total) == (30.0, 30.5)
    assert f.rate > 0 and f.p50 == pytest.approx(1.0, rel=0.15)


def test_a_node_that_does_not_answer_is_shown_as_such(job: tuple[JobOverview, dict[str, Any]]) -> None:
    view, report = job
    report["nodes"] = [node_row(0, 1.0)]
    assert [node.problem for node in view.sample().nodes] == ["", "no answer"]


@pytest.mark.parametrize(
    ("reason", "state", "lost"),
    [
        ("it was removed", "left", False),
        ("it was idle", "left", False),
        ("it was sent SIGTERM", "left", False),
        ("it was not heard of for 5.0 s", "dead", True),
        ("", "dead", True),
    ],
)
def test_a_node_that_left_because_it_was_asked_to_is_not_lost(
    job: tuple[JobOverview, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, reason: str, state: str, lost: bool
) -> None:
    view, report = job
    report["nodes"] = [node_row(0, 1.0)]
    rows = FakeProcess().nodes()
    rows[1] |= {"Alive": False, "DeathReason": reason}
    monkeypatch.setattr(FakeProcess, "nodes", lambda self: rows)
    use = view.sample()
    assert use.nodes[1].problem.startswith(f"{state}: ") and use.nodes[1].left is not lost
    assert ("1 lost" in headline(use).plain) is lost
    assert ("1 of 2 nodes lost" in progress_text(use, 1.0, None)) is lost
    assert str(node_cells(use.nodes[1], 80)[1]) == state


def sample(job: tuple[JobOverview, dict[str, Any]]) -> tuple[JobUse, NodeUse]:
    view, report = job
    gpu = {"index": 0, "name": "H200", "uuid": "GPU-1", "busy": 0.5, "used": 10**9, "total": 4 * 10**9}
    report["nodes"] = [node_row(0, 1.0, gpus=[gpu])]
    report["functions"] = {"f": [3, 1, 1_020_000, {bucket_of(10_000): 2, bucket_of(1e6): 1}]}
    report["running"] = {"f": 4}
    use = view.sample()
    use.nodes[0].latency = 0.001
    return use, use.nodes[0]


def test_the_figures_are_metrics_with_rays_names(job: tuple[JobOverview, dict[str, Any]]) -> None:
    use, node = sample(job)
    text, kind = metrics_text(metric_rows(node, use.functions), {"NodeId": "x"})
    assert kind.startswith("text/plain")
    for line in (
        'ray_node_cpu_utilization{NodeId="x",ip="n0"} 10',
        'ray_node_gpus_utilization{GpuDeviceName="H200",GpuIndex="0",NodeId="x"} 50',
        'ray_object_store_memory{Location="SPILLED",NodeId="x"} 40',
        'ray_resources{Name="CPU",NodeId="x",State="AVAILABLE"} 3',
        'ray_wire_bytes_total{NodeId="x",State="Received",Wire="control"} 800',
        'ray_wire_messages_total{NodeId="x",State="Sent",Wire="control"} 5',
        'ray_wire_bytes_total{NodeId="x",State="Received",Wire="objects"} 5000',
        'ray_node_message_round_trip_seconds{NodeId="x"} 0.001',
        'ray_tasks{Name="f",NodeId="x",State="RUNNING"} 4',
        'ray_tasks{Name="f",NodeId="x",State="FINISHED"} 2',
        'ray_task_duration_seconds_bucket{Name="f",NodeId="x",le="0.01"} 0',
        'ray_task_duration_seconds_bucket{Name="f",NodeId="x",le="0.1"} 2',
        'ray_task_duration_seconds_bucket{Name="f",NodeId="x",le="10"} 3',
        'ray_task_duration_seconds_count{Name="f",NodeId="x"} 3',
    ):
        assert line in text.splitlines(), line


def test_the_account_of_core_time_is_that_of_all_nodes_and_a_metric_of_each(
    job: tuple[JobOverview, dict[str, Any]],
) -> None:
    view, report = job
    report["nodes"] = [
        node_row(index, 1.0, core_time={"on": 2.5, "free": 1.5}, cpu_time_beside={"the raylet": 0.25})
        for index in range(2)
    ]
    use = view.sample()
    assert (use.core_time, use.cpu_time_beside) == ({"on": 5.0, "free": 3.0}, {"the raylet": 0.5})
    text, _ = metrics_text(metric_rows(use.nodes[0], []), {})
    assert 'ray_core_time_seconds{State="on"} 2.5' in text.splitlines()
    assert 'ray_cpu_time_beside_seconds{State="the raylet"} 0.25' in text.splitlines()
    report["nodes"] = [node_row(0, 1.0)]  # a job without a history
    use = view.sample()
    assert use.core_time == {} and "core_time" not in metrics_text(metric_rows(use.nodes[0], []), {})[0]


def test_the_openmetrics_text_is_one_that_its_parser_reads(job: tuple[JobOverview, dict[str, Any]]) -> None:
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    use, node = sample(job)
    text, kind = metrics_text(metric_rows(node, use.functions), {}, OPENMETRICS)
    assert kind.startswith(OPENMETRICS) and text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["ray_object_transfers"].type == "counter"
    assert families["ray_task_duration_seconds"].type == "histogram"


def test_the_dashboard_asks_for_metrics_that_exist(job: tuple[JobOverview, dict[str, Any]]) -> None:
    use, node = sample(job)
    names = {f"ray_{row['name']}" for row in metric_rows(node, use.functions)}
    names |= {"ray_task_duration_seconds_bucket", "ray_task_duration_seconds_sum", "ray_object_transfers_total"}
    path = Path(__file__).parents[2] / "docs" / "how-to" / "grafana.json"
    board = json.loads(path.read_text())
    asked = {
        word
        for panel in board["panels"]
        for target in panel.get("targets", ())
        for word in target["expr"].replace("(", " ").replace("{", " ").replace("[", " ").split()
        if word.startswith("ray_")
    }
    assert asked and asked <= names, asked - names
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
