"""What a dashboard's answers are made of: tables, parts of large jobs, the timeline, waits, Slurm's words."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from hpcray.dashboard.app import AnswerCache, NoAnswerError, TableQuery, table_page
from hpcray.dashboard.job_pages import (
    alerts,
    alike,
    by_place,
    by_site,
    choose_nodes,
    fold_empty,
    fold_stacks,
    node_row,
    node_states,
    parse_node,
    parse_nodes,
    wait_graph,
)
from hpcray.dashboard.task_timeline import TaskTimeline
from hpcray.diagnostics.wait_graph import WaitReason
from hpcray.state.overview import FunctionUse, JobUse, NodeUse
from hpcray.state.reports import never_first

# ------------------------------------------------------------ answers


def test_one_question_serves_all_who_ask_meanwhile() -> None:
    calls: list[int] = []

    def gather() -> int:
        time.sleep(0.05)
        calls.append(1)
        return len(calls)

    async def many() -> list[int]:
        cache = AnswerCache()
        try:
            first = await asyncio.gather(*(cache.get("k", gather, 10.0) for _ in range(20)))
            return [*first, await cache.get("k", gather, 10.0), await cache.get("other", gather, 10.0)]
        finally:
            cache.close()

    assert asyncio.run(many()) == [1] * 21 + [2]


def test_an_answer_that_took_long_serves_longer() -> None:
    async def scenario() -> list[int]:
        cache, calls = AnswerCache(), []

        def gather() -> int:
            time.sleep(0.05)
            calls.append(1)
            return len(calls)

        found = [await cache.get("k", gather, 0.0)]
        await asyncio.sleep(0.1)
        found.append(await cache.get("k", gather, 0.0))
        await asyncio.sleep(0.6)
        found.append(await cache.get("k", gather, 0.0))
        cache.close()
        return found

    assert asyncio.run(scenario()) == [1, 1, 2]


def test_a_job_that_is_silent_holds_nobody_up_for_ever_and_errors_are_not_kept() -> None:
    async def scenario() -> None:
        cache, free = AnswerCache(threads=1, patience=0.1), threading.Event()
        with pytest.raises(NoAnswerError, match="not answered within"):
            await cache.get("k", free.wait, 1.0)
        free.set()

        def fail() -> None:
            raise ConnectionError("gone")

        for _ in range(2):
            with pytest.raises(ConnectionError):
                await cache.get("e", fail, 100.0)
        assert await cache.get("e", lambda: 3, 1.0) == 3
        cache.close()

    asyncio.run(scenario())


# ------------------------------------------------------------ tables

ROWS: list[dict[str, Any]] = [
    {"name": f"f{number % 7}", "node": number % 5 if number % 9 else None, "n": number} for number in range(1000)
]


def query(**given: str) -> dict[str, Any]:
    return table_page(ROWS, TableQuery.parse(given))


def test_a_table_is_searched_sorted_and_cut() -> None:
    assert query()["matching"] == 1000 and len(query()["rows"]) == 100
    assert [row["n"] for row in query(sort="n", desc="1", limit="3", offset="1")["rows"]] == [998, 997, 996]
    found = query(q="F3", limit="500")
    assert found["matching"] == sum(row["name"] == "f3" for row in ROWS) and found["total"] == 1000
    assert {row["node"] for row in query(**{"is.node": "2", "limit": "500"})["rows"]} == {2}
    ordered = query(sort="node", limit="500", offset="500")["rows"]
    assert ordered[-1]["node"] is None, "what is not known comes last"
    assert query(offset="5000")["rows"] == []


@pytest.mark.parametrize("wrong", [{"limit": "0"}, {"limit": "501"}, {"limit": "x"}, {"offset": "-1"}])
def test_a_browser_gets_no_more_than_a_page(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError):
        query(**wrong)


def test_64_000_rows_are_a_page_within_a_second() -> None:
    rows = [{"id": f"{number:026x}", "class": "A", "state": "ALIVE", "node": number % 1000} for number in range(64_000)]
    began = time.process_time()
    found = table_page(rows, TableQuery.parse({"q": "ff", "sort": "node", "desc": "1"}))
    assert time.process_time() - began < 1.0 and len(found["rows"]) == 100 <= found["matching"]


# ------------------------------------------------------------ large jobs


def test_nodes_that_left_in_good_order_are_neither_lost_nor_dead() -> None:
    nodes = [
        node(0, 1), node(1, 0, "left: it was removed"), node(2, 0, "dead: its host is gone"), node(3, 0, "no answer"),
    ]  # fmt: skip
    found = node_states(nodes)
    assert (found["alive"], found["silent"], found["dead"]) == (1, 1, 1)
    assert [row["node"] for row in found["problems"]] == [2, 3]


def node(index: int, workers: int, problem: str = "") -> NodeUse:
    return NodeUse(index, f"n{index}", f"id{index}", problem, workers={"busy": workers})


def test_in_a_large_job_so_many_nodes_are_asked_as_have_so_many_processes() -> None:
    nodes = [node(index, 64, "dead" if index == 1 else "") for index in range(1000)]
    scope = choose_nodes(nodes, "")
    assert scope.nodes == (0, 2, 3, 4, 5, 6, 7) and "7 of 999 nodes" in scope.note
    assert choose_nodes(nodes, "500-502").nodes == (500, 501, 502) and not choose_nodes(nodes, "500").note
    assert choose_nodes([node(0, 10_000)], "").nodes == (0,)
    assert choose_nodes(nodes[:4], "").nodes == (0, 2, 3) and not choose_nodes(nodes[:4], "").note


def test_nodes_are_named_by_numbers_and_ranges() -> None:
    assert parse_nodes(" ") is None and parse_nodes("0-2, 7") == {0, 1, 2, 7}
    for wrong in ("a", "1-", "-1", "1;2", "1-2-3", "1" * 9):
        with pytest.raises(ValueError, match="names no nodes"):
            parse_nodes(wrong)


# ------------------------------------------------------------ timeline


def events(first: float, count: int, seconds: float, name: str = "f", failed: int = -1) -> dict[str, Any]:
    """An answer of a worker that has run so many tasks, one after the other; its clock is 1000 s behind."""
    ended = [
        (b"t", name, first + (place + 1) * seconds, round(1e6 * seconds), place == failed) for place in range(count)
    ]
    return {"pid": 7, "offset": 1000.0, "now": first + count * seconds, "ended": ended, "running": [], "full": False}


def test_tasks_that_can_be_seen_are_shown_one_by_one() -> None:
    line = TaskTimeline()
    line.add(b"w", 0, "", events(10.0, 4, 1.0, failed=2))
    found = line.view([0], 0, 0, 1000, 0, 10)
    assert (found["start"], found["end"]) == (1010.0, 1014.0) and found["names"] == ["f"]
    (lane,) = found["workers"][0]["lanes"]
    assert [piece[:2] for piece in lane] == [[0, 1], [1, 2], [2, 3], [3, 4]] and [piece[5] for piece in lane] == [
        0,
        0,
        1,
        0,
    ]
    assert line.seen(b"w") == 14.0
    line.add(b"w", 0, "", events(14.0, 1, 1.0))
    assert len(line.view([0], 0, 0, 1000, 0, 10)["workers"][0]["lanes"][0]) == 5
    zoomed = line.view([0], 1011.5, 1012.5, 1000, 0, 10)["workers"][0]["lanes"][0]
    assert [piece[:2] for piece in zoomed] == [[-0.5, 0.5], [0.5, 1.5]]


def test_thousands_of_tasks_per_second_are_no_more_than_the_pixels() -> None:
    line = TaskTimeline()
    for worker in range(32):
        line.add(bytes([worker]), worker // 8, "", {**events(0.0, 5000, 0.0002), "pid": worker})
    began = time.process_time()
    found = line.view(range(4), 0, 0, 1500, 0, 32)
    assert time.process_time() - began < 3.0 and found["total"] == 32 == len(found["workers"])
    assert len(json.dumps(found)) < 500_000
    for worker in found["workers"]:
        pieces = [piece for lane in worker["lanes"] for piece in lane]
        assert sum(piece[3] for piece in pieces) == 5000, "each task counts"
        assert all(piece[4] > 0.5 for piece in pieces[:-1]), "it was busy all the time"


def test_a_failure_among_many_short_tasks_is_seen() -> None:
    line = TaskTimeline()
    line.add(b"w", 0, "", events(0.0, 5000, 0.0002, failed=2500))
    pieces = [piece for lane in line.view([0], 0, 0, 500, 0, 1)["workers"][0]["lanes"] for piece in lane]
    assert sum(piece[5] for piece in pieces) == 1


def test_calls_that_run_at_once_have_rows_of_their_own() -> None:
    line = TaskTimeline()
    answer = events(0.0, 1, 1.0)
    answer["ended"] = [(b"a", "f", 1.0, 1_000_000, False), (b"b", "f", 1.5, 1_000_000, False)]
    line.add(b"w", 0, "", answer)
    assert len(line.view([0], 0, 0, 100, 0, 10)["workers"][0]["lanes"]) == 2


def test_the_memory_of_a_timeline_is_bounded() -> None:
    line = TaskTimeline()
    for round_ in range(8):
        line.add(b"w", 0, "", events(round_ * 1.0, 5000, 0.0002))
    worker = line.view([0], 0, 0, 100, 0, 1)["workers"][0]
    assert worker["forgotten"] and sum(piece[3] for lane in worker["lanes"] for piece in lane) == 20_000


# ------------------------------------------------------------ others


def test_waits_are_a_graph_in_which_a_circle_is_one() -> None:
    found = wait_graph([
        WaitReason(0, "driver waits", "d0"), WaitReason(1, "o1 (owner driver)", "o1"), WaitReason(2, "w1 runs f", "w1"),
        WaitReason(3, "it waits in get for one object"), WaitReason(4, "o2", "o2"), WaitReason(5, "w2 runs g", "w2"),
        WaitReason(6, "o1: see above", "o1"),
    ])  # fmt: skip
    assert [one["text"] for one in found["nodes"]] == [
        "driver waits", "o1 (owner driver)", "w1 runs f", "it waits in get for one object", "o2", "w2 runs g",
    ]  # fmt: skip
    assert found["edges"] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 1)] and not found["more"]
    assert wait_graph(WaitReason(0, f"line {number}") for number in range(1000))["more"] == 700


def test_memory_is_added_up_by_site_or_owner() -> None:
    row = {"size": 10, "pins": "", "state": "memory", "copy": False, "owner": "driver", "site": ""}
    found = by_site([row, {**row, "size": 5, "site": "a.py:3", "pins": "w"}, {**row, "state": "spilled"}])
    assert [(one["site"], one["owner"], one["bytes"], one["objects"]) for one in found] == [
        ("(not recorded)", "driver", 20, 2), ("a.py:3", "", 5, 1),
    ]  # fmt: skip
    assert found[0]["on_disk"] == 10 and found[1]["pinned"] == 5


def test_the_reason_of_a_drained_node_is_read_whole() -> None:
    line = "NodeName=n1 Arch=x86_64 State=IDLE+DRAIN ThreadsPerCore=1 Reason=bad fan [root@2026-11-23] Comment=x"
    found = parse_node(line)
    assert (found["name"], found["state"]) == ("n1", "IDLE+DRAIN") and found["reason"].startswith("bad fan [root@")


def test_nodes_of_a_switch_follow_each_other() -> None:
    """As the page shows them, in groups; those whose place is not known come last, and without places nothing moves."""
    places = [("s0", "s1"), ("s0", "s2"), (), ("s0", "s1")]
    nodes = [NodeUse(index, "h", f"{index:02x}", place=place) for index, place in enumerate(places)]
    assert [node_row(node)["place"] for node in by_place(nodes)] == ["s0 › s1", "s0 › s1", "s0 › s2", ""]
    assert [node.index for node in by_place(nodes)] == [0, 3, 1, 2]
    bare = [NodeUse(index, "h", f"{index:02x}") for index in (2, 0, 1)]
    assert by_place(bare) == bare


# ------------------------------------------------------------ what is wrong


def found_alerts(*nodes: NodeUse, **more: Any) -> dict[str, dict[str, Any]]:
    functions = more.pop("functions", [])
    use = JobUse(1.0, 0.1, list(nodes), functions, False, "train.py", "4711", None)
    return {row["title"]: row for row in alerts(use, more.pop("waiting", []), **more)}


def test_a_job_in_which_nothing_is_wrong_has_no_alerts() -> None:
    quiet = node(0, 4)
    quiet.slowness, quiet.store = 1.2, {"on_disk": 0}
    functions = [FunctionUse("f", ended=9)]
    ended = [{"class": "A", "name": "", "id": "a1", "reason": "it was killed by `ray.kill`."}]
    waiting = ["  2 x {CPU: 8} for tasks of 1 process"]
    assert not found_alerts(
        quiet, node(1, 0, "left: it was idle"), functions=functions, waiting=waiting, dead_actors=ended
    )


def test_what_is_wrong_has_a_card_that_leads_to_its_cause() -> None:
    slow = node(1, 4)
    slow.slowness, slow.row, slow.store = 2.47, {"memory": {"killed": 3}}, {"on_disk": 3 << 30}
    died = {"class": "Collector", "name": "collector", "id": "a2", "reason": "its worker process has died: signal 9"}
    found = found_alerts(
        node(0, 4), slow, node(2, 0, "dead: its host is gone"), dead_actors=[died],
        functions=[FunctionUse("f", ended=9, failed=2), FunctionUse("g", ended=4, failed=4)],
        waiting=["  3 x {licence: 1} for tasks of 1 process, which no node can ever serve"],
    )  # fmt: skip
    assert {title: (row["text"], row["level"], row["page"]) for title, row in found.items()} == {
        "Can never run": ("3 x {licence: 1} for tasks of 1 process", "bad", "waits"),
        "Lost nodes": ("node 2 (n2)", "bad", "nodes"),
        "Out of memory": ("workers, node 1: 3 ended", "bad", "tasks?state=FAILED"),
        "Failed": ("g: 4 of 4; and 1 more", "bad", "tasks?state=FAILED"),
        "Dead actors": ("Collector collector: its worker process has died: signal 9", "bad", "actor?id=a2"),
        "Slow nodes": ("node 1 (n1): runs take 2.5 times as long", "warn", "node?node=1"),
        "Spilling": ("3.0 GiB on disk, of 1 node", "warn", "objects"),
    }  # fmt: skip


def test_what_can_never_run_comes_first() -> None:
    lines = [
        WaitReason(0, "driver waits in get"), WaitReason(1, "task g runs"), WaitReason(0, "solve: 3 PENDING"),
        WaitReason(1, "task solve waits"), WaitReason(2, "node 0 can never serve it: licence: 1 wanted, 0 there"),
    ]  # fmt: skip
    ordered = never_first(lines)
    assert ordered[0].text == "solve: 3 PENDING" and sorted(map(id, ordered)) == sorted(map(id, lines))
    assert [one["never"] for one in wait_graph(ordered)["nodes"]] == [True, True, True, False, False]


def test_objects_that_differ_in_their_ids_are_one_row() -> None:
    row = {"id": "a", "node": 1, "size": 8, "state": "memory", "owner": "driver", "pins": "", "reads": 0, "site": ""}
    rows = alike([row, {**row, "id": "b"}, {**row, "id": "c", "node": 2, "size": 20}])
    assert [(one["id"], one["count"], one["bytes"]) for one in rows] == [("c", 1, 20), ("a", 2, 16)]


def test_processes_at_the_same_place_are_one_entry() -> None:
    stack = ["    thread 'MainThread' runs f for {} s", "      train.py:7 in f: time.sleep(1)"]
    lines = ["node 0 (n0)", "  raylet 0 (raylet, pid 1)", "  process 0.1 (worker, pid 2, busy)"]
    lines += [one.format(0.1) for one in stack] + ["  process 0.2 (worker, pid 3, idle)"]
    lines += ["  process 0.3 (worker, pid 4, busy)", *(one.format(2.5) for one in stack)]
    lines += ["  process 0.4 (worker, pid 5, idle)", "node 1 (n1)", "  process 1.1 (worker, pid 6, idle)", "5 threads"]
    assert fold_stacks(lines) == [
        "node 0 (n0)", "  raylet 0 (raylet, pid 1)",
        "  process 0.1 (worker, pid 2, busy), and 1 alike: 0.3 (pid 4)", *(one.format(0.1) for one in stack),
        "  process 0.2 (worker, pid 3, idle), and 1 alike: 0.4 (pid 5)",
        "node 1 (n1)", "  process 1.1 (worker, pid 6, idle)", "5 threads",
    ]  # fmt: skip


def test_empty_log_files_are_a_line() -> None:
    rows = [{"name": "a", "size": 0}, {"name": "b", "size": 5}, {"name": "c", "size": 0}]
    assert fold_empty(rows) == ([rows[1]], "2 more files: nothing printed") and fold_empty(rows[1:2]) == ([rows[1]], "")
