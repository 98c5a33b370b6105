"""A dashboard of 1,000 nodes with 64 workers each: pages stay small, and few processes are asked one by one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette")

from helpers.asgi import Answered, request

from hpcray.common.ids import make_proc, node_of
from hpcray.dashboard.access import DashboardAccess
from hpcray.dashboard.app import DashboardApp
from hpcray.dashboard.job_pages import JobPages, totals
from hpcray.state.overview import FunctionUse, JobUse, NodeUse

NODES, WORKERS = 1000, 64
STORE = {"capacity": 1 << 30, "used": 1 << 29, "on_disk": 0, "objects": 10}
WORKER = {"kind": "worker", "state": "busy", "actor": b"", "class": ""}
GPU = {"index": 0, "name": "H200", "uuid": "g", "busy": 0.5, "used": 1, "total": 2}


def node(index: int) -> NodeUse:
    problem = {7: "no answer", 8: "dead: its raylet ended"}.get(index, "")
    if problem:
        return NodeUse(index, f"n{index}", f"{index:056x}", problem)
    return NodeUse(
        index, f"n{index}", f"{index:056x}", cpu=0.5, cpu_count=64, cores=32.0, memory=(1, 2), store=STORE,
        gpus=[GPU] * 4, workers={"busy": 60, "idle": 4}, latency=0.001,
        resources={"CPU": (60.0, 64.0), f"node:{index}": (0.0, 1.0)},
    )  # fmt: skip


class FakeGcs:
    """The head of the job; it counts the processes that are asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "Index": index, "NodeID": f"{index:056x}", "NodeManagerHostname": f"n{index}", "Alive": index != 8,
                "NodeManagerAddress": "", "DeathReason": "", "Labels": {},
            }
            for index in range(NODES)
        ]  # fmt: skip

    def call(self, method: str) -> Any:
        if method == "actors":
            return [
                {
                    "actor": make_proc(number % NODES, number) + bytes(5), "class_name": "Model", "name": f"a{number}",
                    "state": "ALIVE", "node": number % NODES, "pid": 0, "worker": make_proc(number % NODES, number),
                    "restarts": 0, "namespace": "", "detached": False, "resources": {}, "reason": "", "dead_for": None,
                }
                for number in range(NODES * WORKERS)
            ]  # fmt: skip
        return {
            "unmet": [], "waiting_actors": [], "actors": {"ALIVE": 64_000}, "draining": {}, "autoscaler": None,
            "dead_nodes": [],
        }  # fmt: skip

    def ask_many(self, questions: dict[bytes, Any], *_: Any) -> dict[bytes, Any]:
        self.asked += questions
        answers: dict[bytes, Any] = {}
        for proc, make in questions.items():
            what = make(1).what
            rows = [
                {"proc": make_proc(node_of(proc), one + 1), "pid": one, **WORKER}
                for one in range(WORKERS)
            ]  # fmt: skip
            if what == "node":
                answers[proc] = {
                    "proc": proc,
                    "pid": 1,
                    "template": 2,
                    "processes": rows,
                    "ended": [],
                    "ended_drivers": [],
                    "preloaded": {},
                }
            elif what == "events":
                ended = [(b"t", "f", at / 100, 9_000, False) for at in range(1, 1000)]
                answers[proc] = {
                    "pid": proc[5], "offset": 1e9, "now": 10.0, "ended": ended, "running": [], "full": False,
                }  # fmt: skip
        return answers


class FakeProcess:
    """A process in the job."""

    node = 0
    me = make_proc(0, 9)
    place = SimpleNamespace(head=0, kind="attached")
    dead = None

    def __init__(self) -> None:
        self.gcs = FakeGcs()


class FakeLive:
    """Samples of the job."""

    def sample(self) -> JobUse:
        functions = [
            FunctionUse(f"f{number}", 300, 20, 10**6, 3, 100.0, 1e5, 0.1, 0.2, {1: 5}) for number in range(200)
        ]
        return JobUse(time.time(), 0.1, [node(index) for index in range(NODES)], functions, False, "p.py", "1", None)


class Large:
    """The dashboard of the job."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        pages = JobPages(self.process)  # type: ignore[arg-type]
        pages._live = FakeLive()  # type: ignore[assignment]
        links: list[str] = []
        access = DashboardAccess(links.append)
        access.open()
        self.app = DashboardApp(pages, access, "/s", False)
        self.key = access.enter(links[0])

    def ask(self, path: str, **params: Any) -> Answered:
        answer = request(self.app, f"/api/{path}", {"authorization": f"Bearer {self.key}"}, **params)
        assert answer.status == 200, answer.body
        return answer


@pytest.fixture(scope="module")
def large() -> Iterator[Large]:
    made = Large()
    yield made
    made.app.cache.close()


def test_the_overview_adds_up_and_is_small(large: Large) -> None:
    began = time.process_time()
    answer = large.ask("overview")
    assert time.process_time() - began < 2.0 and len(answer.body) < 60_000
    found = answer.json
    assert (found["nodes"]["alive"], found["nodes"]["silent"], found["nodes"]["dead"]) == (998, 1, 1)
    assert found["now"]["workers"] == {"busy": 998 * 60, "idle": 998 * 4} and found["now"]["gpus"] == 998 * 4
    assert found["now"]["cpu"] == 0.5 and found["now"]["cores"] == 998 * 32
    assert found["now"]["resources"] == {"CPU": [998 * 60, 998 * 64]}


def test_what_nodes_of_a_host_share_counts_once() -> None:
    nodes = [node(0), node(1)]
    nodes[1].host = nodes[0].host
    use = JobUse(0.0, 0.1, [*nodes, node(2)], [], False, "", "", None)
    found = totals(use)
    assert (found["cpu_count"], found["cores"], found["memory_limit"]) == (128, 96.0, 4)


def test_tables_of_nodes_and_actors_are_pages(large: Large) -> None:
    answer = large.ask("nodes", sort="node", desc=1)
    assert len(answer.body) < 80_000 and answer.json["matching"] == NODES
    assert answer.json["rows"][0]["node"] == NODES - 1
    assert [row["node"] for row in large.ask("nodes", q="dead").json["rows"]] == [8]
    answer = large.ask("actors", q="a6399")
    assert len(answer.body) < 60_000 and answer.json["total"] == 64_000 and answer.json["matching"] == 11


def test_a_timeline_asks_few_processes_and_is_small(large: Large) -> None:
    large.process.gcs.asked.clear()
    answer = large.ask("timeline", width=1500)
    assert "7 of 998 nodes" in answer.json["note"] and answer.json["total"] == 7 * WORKERS
    assert len(large.process.gcs.asked) <= 512 + 7 and len(answer.body) < 1_000_000
    assert len(answer.json["workers"]) == 32
    assert {one["node"] for one in large.ask("timeline", nodes="999", width=100).json["workers"]} == {999}
