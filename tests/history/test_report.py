"""The report: one page, whatever the job's size, in which nothing of the job's is markup."""

from __future__ import annotations

import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from helpers.browser import Visit, chromium, picture
from helpers.dashboards import Dashboard

from hpcray.dashboard.report import _duration, report_page
from hpcray.history.block_file import FIRST_LINE, pack
from hpcray.history.job_history import JobHistory
from hpcray.history.node_history import FREE, OFF_CPU, ON_CPU, WITHOUT_CORE
from hpcray.history.outcome import outcome
from hpcray.history.records import (
    Began,
    ClusterState,
    CoreTime,
    Ended,
    Figures,
    FunctionCoreTime,
    Functions,
    Line,
    Process,
    Reason,
    Tasks,
    encode,
)
from hpcray.history.runs import file_name, find_runs

EVIL = "<script>alert('x')</script>\"onmouseover=alert(1) &amp; \u202e"
BEGAN = 1_790_000_000.0


def figures(share: float) -> dict[str, Any]:
    return {
        "resources": {"CPU": [4.0, 8.0]},
        "cpu": {"job": 100 * share, "host_count": 8, "host_busy": 300 * share, "host_all": 800 * share},
        "memory": {"used": int(share * 2**34), "limit": 2**35, "rss": int(share * 2**33)},
        "store": {
            "used": int(share * 2**30), "capacity": 2**33, "on_disk": int(share * 2**28), "objects": 3,
            "spilled_bytes": int(share * 2**28), "loaded_bytes": 0, "pulled_bytes": int(share * 2**30), "sent_bytes": 0,
        },
        "wire": {"sent": [10, 1000], "received": [10, 1000]},
        "network": {"received": int(share * 2**31), "sent": int(share * 2**30)},
        "gpus": [], "workers": {"busy": 4, "idle": 4}, "actors": 1, "waiting": 0,
    }  # fmt: skip


def write_history(root: Path, nodes: int, workers: int, rows: int, text: str, tasks: int = 1000) -> str:
    """Write the history of a made-up job; returns the name of its run."""
    run = "0123456789abcdef"
    directory = root / run / run
    directory.mkdir(parents=True, mode=0o700)
    for node in range(nodes):
        records: list[Any] = [
            Began(BEGAN, run, run, node, nodes, f"{text}host{node}", 1, 1, "", f"/home/{text}/t.py", {"CPU": 8.0})
        ]
        for worker in range(workers):
            ended = [
                (b"%12d" % row, 0, BEGAN + 100 * (row + 1) / rows, int(50e6 / rows), row % 50 == 0)
                for row in range(rows)
            ]
            errors = [(b"%12d" % row, f"{text}Error", f"{text} number {row % 60}") for row in range(0, rows, 50)]
            records.append(Tasks(BEGAN + 100, b"%8d" % worker, worker, b"", [f"{text}.f"], ended, rows, errors))
            records.append(Process(BEGAN + 99, b"%8d" % worker, worker, "worker", "gone", text, "SYSTEM_ERROR"))
        count = tasks // nodes
        records += [Figures(BEGAN + 10 * step, figures(step / 10)) for step in range(11)]
        records += [
            CoreTime(
                BEGAN + 100,
                {ON_CPU: 300.0, OFF_CPU: 100.0, FREE: 400.0},
                {WITHOUT_CORE: 7.5},
                {f"{text}.f0": FunctionCoreTime(300.0, 100.0, beside=7.5)},
            )
        ]
        records += [Functions(BEGAN + 100, {f"{text}.f{n}": [count, 1, 1000 * count, {30: count}] for n in range(20)})]
        records += [Line(BEGAN + n, "WARNING", text) for n in range(20)]
        records += [ClusterState(BEGAN, {b"%8d" % node: {"class_name": text, "state": "DEAD", "reason": text}})]
        records += [Reason(BEGAN + 100, "exception", text), Ended(BEGAN + 100, 1)]
        (directory / file_name(node, 0)).write_bytes(FIRST_LINE + pack(encode(records)))
    return run


def page_of(root: Path, run: str, **options: Any) -> str:
    (found,) = find_runs(str(root), run)
    history = JobHistory(found)
    return report_page(history, outcome(history), **options)


class Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.attributes.update(name for name, _ in attrs)


def test_nothing_of_the_job_is_markup(tmp_path: Path) -> None:
    page = page_of(tmp_path, write_history(tmp_path, 2, 2, 100, EVIL))
    elements = Elements(page)
    assert not elements.found & {"script", "iframe", "img", "link", "object", "a", "form"}
    assert not {name for name in elements.attributes if name.startswith("on")}
    assert "&lt;script&gt;" in page
    assert ">None<" not in page, "an actor without a name, that has no node any more"
    assert f"CPU time beside it, which is in none of these rows: {WITHOUT_CORE} 15 s." in page
    table = page.partition("Core time by function")[2].partition("</table>")[0]
    cells = [cell.partition("<")[0] for cell in table.split("<td class=right>")[1:]]
    assert "alert(1)" in table and cells == [_duration(600.0), _duration(200.0), _duration(0.0), _duration(0.0), "15 s"]


def test_redacted(tmp_path: Path) -> None:
    run = write_history(tmp_path, 2, 1, 10, "cluster-a")
    page = page_of(tmp_path, run, redact=True)
    assert "cluster-ahost" not in page and "host-0" in page and "/home/" not in page


def test_compared(tmp_path: Path) -> None:
    run = write_history(tmp_path, 1, 1, 10, "x")
    (found,) = find_runs(str(tmp_path), run)
    page = page_of(tmp_path, run, against=JobHistory(found))
    assert f"Against job {run}" in page and "+0 %" in page


def test_a_thousand_nodes_and_a_million_tasks(tmp_path: Path) -> None:
    run = write_history(tmp_path, 1000, 4, 100, "name_of_a_function_" * 3, tasks=1_000_000)
    began = time.monotonic()
    page = page_of(tmp_path, run)
    print(f"{time.monotonic() - began:.1f} s, {len(page)} bytes")
    assert len(page.encode()) < 5_000_000
    assert "1,000 nodes" in page.replace("1000 nodes", "1,000 nodes")


def test_in_a_browser(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(page_of(tmp_path, write_history(tmp_path, 4, 3, 60, "train.step")))
    with chromium() as browser:
        shades = []
        for scheme in ("light", "dark"):
            page = browser.new_context(viewport={"width": 1240, "height": 1000}, color_scheme=scheme).new_page()
            complaints: list[str] = []
            page.on("console", lambda message, into=complaints: into.append(message.text))
            page.on("request", lambda request, into=complaints: into.append(request.url))
            page.goto((tmp_path / "page.html").as_uri())
            page.locator("summary").first.click()
            assert page.locator("pre").first.is_visible()
            assert complaints == [(tmp_path / "page.html").as_uri()]
            shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert len(set(shades)) == 2
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != shades[1]
        page.emulate_media(media="screen", color_scheme="light")
        picture(page, "report")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["train.step", EVIL[:-2]])
def test_the_dashboard_of_an_ended_job_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setenv("HPCRAY_HISTORY_DIR", str(tmp_path))
    with Dashboard(write_history(tmp_path, 4, 3, 60, text), "--port", "0") as board, chromium() as browser:
        visit = Visit(browser, f"http://{board.place}", board.links[-1])
        banner = visit.page.locator("#banner")
        visit.sees("Why it ended", "4 nodes", f"{text}.f0", re.compile("the program raised an exception"))
        visit.sees("Where the core time went", ON_CPU, OFF_CPU, f"{WITHOUT_CORE} 30 s")
        assert "FAILED: the program raised" in banner.inner_text() and "from its history" in banner.inner_text()
        assert visit.page.locator("#pause").is_hidden()
        if text == "train.step":
            picture(visit.page, "dashboard-ended")
        visit.click("Nodes")
        visit.sees(f"{text}host3", "ended")
        visit.page.get_by_role("cell", name=f"{text}host0", exact=True).click()
        visit.sees(f"Node 0, {text}host0", "Processes", re.compile("SYSTEM_ERROR at"))
        visit.click("Tasks")
        visit.page.get_by_role("searchbox").first.fill("FAILED")
        visit.page.get_by_role("cell", name="FAILED").first.click()
        visit.sees(re.compile(re.escape(text) + r" number \d+"))
        visit.click("Timeline")
        visit.page.get_by_role("button", name="Zoom in").click()
        visit.page.keyboard.press("8")
        visit.sees("Why it ended")
        for name in ("Actors", "Objects", "Stacks", "Logs", "Placement groups", "Slurm"):
            visit.click(name)
        assert "from its history" in banner.inner_text()
        assert not visit.complaints and visit.page.locator("main script, main [onmouseover]").count() == 0


@pytest.mark.parametrize("cut", [10, 200, 1000])
def test_of_a_damaged_history(tmp_path: Path, cut: int) -> None:
    run = write_history(tmp_path, 1, 1, 10, "x")
    path = tmp_path / run / run / file_name(0, 0)
    path.write_bytes(path.read_bytes()[:cut])
    assert re.search("What is missing", page_of(tmp_path, run))
