"""`hpcray top` with Textual's pilot: what it shows of a job, and where its keys lead."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rich.text import Text

from hpcray.cli import top_cells
from hpcray.common.figures import bucket_of
from hpcray.state.overview import FunctionUse, JobUse, NodeUse

textual = pytest.importorskip("textual")

from hpcray.cli.top_app import KeptTable, TopApp  # noqa: E402
from hpcray.cli.top_cells import node_cells, node_columns  # noqa: E402

STORE = {"capacity": 1000, "used": 900, "on_disk": 5_000_000}


def job(nodes: int = 3) -> JobUse:
    found = [
        NodeUse(
            i, f"host{i}", f"id{i}", cpu=0.75, cpu_count=8, cores=2.0 * i, memory=(50, 100),
            resources={"CPU": (i, 8.0), "GPU": (1.0, 1.0)},
            store=STORE, gpus=[{"index": 0, "name": "H200", "busy": 0.5, "used": 10**9, "total": 10**10}],
            workers={"busy": 1}, latency=0.002 * i,
        )
        for i in range(nodes)
    ]  # fmt: skip
    found[-1].problem = "dead: its host is gone"
    slow = FunctionUse("slow", 3, 40, 100, 2, 5.0, 200.0, 2.0, 4.0, {bucket_of(2e6): 90, bucket_of(4e6): 10})
    quick = FunctionUse("quick", 0, 0, 5000, 0, 100.0, 1.0, 0.0002, 0.001, {bucket_of(200): 5000})
    return JobUse(1e9, 0.1, found, [slow, quick], False, "train.py --fast", "4711", 3723.0)


def test_the_account_of_core_time_is_a_line_with_the_most_first() -> None:
    use = job()
    assert top_cells.core_time(use) == "", "a job without a history has none"
    use.core_time = {"running": 30.0, "free": 69.9, "blocked": 0.1}
    assert top_cells.core_time(use) == "cores: 70% free; 30% running"


class FakeJob:
    """A job of three nodes, of which one is dead."""

    problem = ""
    ended = ""

    def sample(self) -> JobUse:
        if self.problem:
            raise ConnectionError(self.problem)
        return job()

    def functions_of(self, node: int) -> JobUse:
        use = job()
        use.nodes = [use.nodes[node]]
        return use

    def processes(self, node: int) -> list[dict[str, Any]]:
        calls = [{"name": "slow", "seconds": 12.0}]
        return [
            {"proc": bytes([number] * 8), "pid": 100 + number, "kind": "worker", "class": "", "state": "busy",
             "cpu": 1.0, "rss": 10**9, "calls": calls if number else None}
            for number in range(2)
        ]  # fmt: skip

    def actors(self) -> list[dict[str, Any]]:
        common = {"node": 1, "pid": 9, "restarts": 0, "name": "", "proc": "01" * 8}
        return [
            {**common, "actor": "a1", "class": "Alive", "state": "ALIVE", "reason": "", "ended": None},
            {**common, "actor": "a2", "class": "Dead", "state": "DEAD", "reason": "killed by signal 9", "ended": 1e9},
        ]

    def stack(self, node: int, proc: bytes) -> list[str]:
        return [f"stack of {proc.hex()} on {node}", "  train.py:12 in step"]

    def transfers(self) -> list[dict[str, Any]]:
        return [{"object": "0a1b", "size": 4 * 10**9, "done": 10**9, "from": 0, "to": 1, "state": "receives"}]

    def tail(self, node: int) -> list[tuple[str, str]]:
        return [("101", f"epoch 7 on node {node}")]


def screen_text(app: TopApp) -> str:
    """The screen as a terminal shows it."""
    height = app.size.height
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in lines[:height])


def drive(what: Callable[[TopApp, Any, Callable[[str], Awaitable[str]]], Awaitable[None]], width: int = 80) -> None:
    async def main() -> None:
        app = TopApp(FakeJob(), 0.2)
        async with app.run_test(size=(width, 24)) as pilot:

            async def shows(text: str) -> str:
                for _ in range(200):
                    await pilot.pause(0.05)
                    if text in screen_text(app):
                        return screen_text(app)
                raise AssertionError(f"{text!r} is not shown:\n{screen_text(app)}")

            await what(app, pilot, shows)

    asyncio.run(main())


def test_square_brackets_in_names_and_errors_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    use = job()
    use.functions[0].name = "map[int] f[/x]"
    monkeypatch.setattr(FakeJob, "sample", lambda self: use)

    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("map[int] f[/x]")

        def fails(self: FakeJob) -> JobUse:
            raise ConnectionError("no answer from f[/x]")

        monkeypatch.setattr(FakeJob, "sample", fails)
        await shows("no answer from f[/x]")

    drive(look)


def test_it_shows_nodes_functions_the_clock_and_the_log_in_80_columns() -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("slow")
        text = await shows("q Quit")
        for part in ("4711", "2 nodes, 1 lost", "CPU 1/16", "1:02:03 left", "dead ", "90%", "25%",
                     "4.8M", "3:20", "epoch 7 on node 0", "functions by total time", "q Quit"):  # fmt: skip
            assert part in text, f"{part!r}\n{text}"
        assert "round trip" not in text and max(map(len, text.splitlines())) <= 80

    drive(look)


def test_a_wide_terminal_shows_more_columns() -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        text = await shows("round trip")
        assert "host1" in text and "share of time" in text and "2 ms" in text

    drive(look, 140)


def test_keys_lead_to_a_node_a_process_a_function_and_the_actors_and_back() -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("slow")
        await pilot.press("down", "enter")
        text = await shows("node 1 (host1)")
        assert "GPU 0 50%" in text
        await shows("slow 12 s")
        await pilot.press("down", "enter")
        await shows("stack of 0101010101010101 on 1")
        await pilot.press("escape", "escape")
        await shows("functions by total time")
        await pilot.press("a")
        text = await shows("killed by signal 9")
        assert ("2 actors, 1 of them alive" in text and "01:46:40" in text) or ":46:40" in text
        await pilot.press("enter")
        text = await shows("stack of 0101010101010101 on 1")
        assert "actor Alive, stacks at" in text and "actor: a1" in text
        await pilot.press("escape", "escape")
        await shows("functions by total time")
        await pilot.press("t")
        text = await shows("0a1b")
        assert "1 transfers, 2.8 GiB to come" in text and "25%" in text and "receives" in text
        await pilot.press("escape")
        await shows("functions by total time")
        await pilot.press("tab", "enter")
        text = await shows("run times of slow")
        assert "40 are queued" in text and "█ 90" in text

    drive(look)


def test_the_order_of_functions_changes_and_the_cursor_stays_with_its_row() -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("slow")
        await pilot.press("tab", "down")
        table = app.screen.query_one("#functions", KeptTable)
        assert table.chosen == "quick"
        await pilot.press("o")
        await shows("functions by running")
        await pilot.pause(0.5)
        assert table.chosen == "quick"

    drive(look)


def test_a_job_that_does_not_answer_is_said_to() -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("slow")
        FakeJob.problem = "the raylet of node 0 did not answer"
        try:
            await shows("the raylet of node 0 did not answer")
        finally:
            FakeJob.problem = ""
        await shows("4711")

    drive(look)


def test_a_job_that_has_ended_is_said_to_have_and_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(app: TopApp, pilot: Any, shows: Callable[[str], Awaitable[str]]) -> None:
        await shows("slow")
        monkeypatch.setattr(FakeJob, "problem", "the raylet of this node is gone")
        monkeypatch.setattr(FakeJob, "ended", "the raylet of this node is gone")
        text = await shows("the job has ended at ")
        assert "slow" in text and "q quits" in text, "its last figures stay"
        monkeypatch.setattr(FakeJob, "actors", lambda self: pytest.fail("it asks on"))
        await pilot.press("a")
        await shows("esc Back")
        await shows("the job has ended at ")
        await pilot.press("escape", "q")

    drive(look)


@pytest.mark.parametrize("width", [80, 140])
def test_cells_are_as_wide_as_their_columns(width: int) -> None:
    use = job()
    rows = [(top_cells.node_columns(width), top_cells.node_cells(one, width)) for one in use.nodes[:2]]
    rows += [(top_cells.function_columns(width), top_cells.function_cells(one, width, 201)) for one in use.functions]
    for columns, cells in rows:
        assert len(columns) == len(cells)
        for (name, most), cell in zip(columns, cells, strict=True):
            assert len(cell.plain if isinstance(cell, Text) else cell) <= most, name
    assert sum(most + 2 for _, most in top_cells.node_columns(80)) <= 80
    assert sum(most + 2 for _, most in top_cells.function_columns(80)) <= 80


def test_the_large_figure_is_the_cpu_of_the_job_and_a_busy_one_is_not_wrong() -> None:
    use = job().nodes[1]
    use.cores, use.memory, use.gpus[0]["busy"] = 7.9, (96, 100), 1.0
    cells = dict(zip([name for name, _ in node_columns(200)], node_cells(use, 200), strict=True))
    assert str(cells["CPU"]).endswith(" 99%") and cells["host CPU"] == "75%"
    colours = {name: str(cells[name].spans[0].style) for name in ("CPU", "memory", "GPU", "store")}
    assert colours == {"CPU": "green", "memory": "red", "GPU": "green", "store": "green"}
