"""The pages of `hpcray dashboard` in headless Chromium, beside a program on four nodes: real clicks, keys, pictures.

HPCRAY_SCREENSHOTS=docs/how-to pytest -m slow tests/mpi/test_dashboard_browser.py   writes the pictures of the docs.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from helpers.browser import PATIENCE, SCREENSHOTS, Visit, chromium, picture
from helpers.dashboards import Dashboard
from helpers.jobs import ROOT, Job, as_module
from helpers.scripts import write
from playwright.sync_api import expect

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Names that are markup. The pictures of the docs show an ordinary name instead.
PICTURES = bool(os.environ.get(SCREENSHOTS))
EVIL = "report" if PICTURES else '<img src=x onerror="document.title=1">'

# Short tasks, longer ones, an actor that was killed, objects, a group, waits; names that are markup; until it is ended.
PROGRAM = """\
import os, random, signal, sys, time
import numpy as np
import hpcray as ray
from hpcray.util.placement_group import placement_group

ray.init(log_to_driver=False)
EVIL = os.environ["EVIL"]


@ray.remote(num_cpus=0.5)
def simulate(number):
    end = time.perf_counter() + random.uniform(0.05, 0.4)
    while time.perf_counter() < end:
        sum(range(5000))
        time.sleep(0.02)
    return np.zeros(1 << 17)


@ray.remote(num_cpus=0.5)
def tiny():
    pass


@ray.remote(num_cpus=0.1)
def evil():
    print(EVIL, "\\x1b[31mred\\x1b[0m", flush=True)


@ray.remote(num_cpus=0.1)
def reduce(blocks):
    return ray.get(blocks)


@ray.remote(num_cpus=0)
class Trainer:
    def pid(self):
        return os.getpid()

    def step(self, epoch):
        print(f"epoch {epoch}, loss {1 / (1 + epoch):.3f}", flush=True)
        time.sleep(0.3)


@ray.remote(num_cpus=0.1)
def barrier():
    time.sleep(600)


@ray.remote(num_cpus=0.1, resources={"licence": 1})
def unserved():
    pass


@ray.remote(num_cpus=0.1)
def grow():
    kept = []
    while True:
        kept.append(bytearray(100_000))
        time.sleep(0.1)


trainers = [Trainer.options(name=name).remote() for name in ("trainer-0", "trainer-1", EVIL, "spare")]
victim = Trainer.options(name="victim").remote()
os.kill(ray.get(victim.pid.remote()), signal.SIGKILL)
group = placement_group([{"CPU": 0.1}] * 4, strategy="SPREAD", name="spread")
ray.get(group.ready())
kept = [ray.put(np.zeros(1 << 20)) for _ in range(8)]
ray.get([evil.options(name=EVIL).remote() for _ in range(4)])
held = reduce.remote([barrier.remote()])
never = unserved.remote()
growing = grow.remote()
print("ready", os.environ["HPCRAY_ADDRESS"], flush=True)
epoch = 0
while True:
    epoch += 1
    evil.options(name=EVIL).remote()
    calls = [trainer.step.remote(epoch) for trainer in trainers[:2]]
    ray.get([simulate.remote(i) for i in range(8)] + [tiny.remote() for _ in range(400)])
    ray.get(calls)
"""


# In place of NVIDIA's library: two GPUs that are busy.
NVML = """\
from types import SimpleNamespace


class NVMLError(Exception):
    pass


def nvmlInit():
    pass


nvmlShutdown = nvmlInit


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(used=(40 + 20 * handle) * 10**9, total=141 * 10**9, free=0)


def nvmlDeviceGetName(handle):
    return "NVIDIA H200"


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=93 - 20 * handle)
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The session directory of the program's node."""
    script = write(tmp_path_factory.mktemp("program"), PROGRAM, "train.py")
    write(script.parent, NVML, "pynvml.py")
    environ = {"HPCRAY_RECORD_REF_CREATION_SITES": "1", "OMP_NUM_THREADS": "1", "EVIL": EVIL}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(script.parent)])
    if not PICTURES:
        topology = f"SwitchName=leaf1 Nodes={socket.gethostname()}\nSwitchName=top Switches=leaf1\n"
        environ["HPCRAY_TOPOLOGY"] = str(write(script.parent, topology, "topology.conf"))
    line = as_module(4, script)
    line[-1:-1] = ["--num-gpus", "2"]
    with Job(line, environ) as running:
        ready = running.line().split()
        assert ready[:1] == ["ready"], running.wait().err
        yield ready[1]


@pytest.fixture(scope="module")
def board(job: str) -> Iterator[Dashboard]:
    with Dashboard(job, "--port", "0", "--allow-actions") as board:
        yield board


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def come_in(browser: Any, board: Dashboard, **options: Any) -> Visit:
    """A browser that comes in by the link that the dashboard has printed last."""
    link = board.links[-1]
    visit = Visit(browser, f"http://localhost:{board.place.rpartition(':')[2]}/", link, **options)
    deadline = time.monotonic() + 30
    while board.links[-1] == link:  # the next one is printed when this one was used
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return visit


@pytest.fixture
def visit(browser: Any, board: Dashboard) -> Iterator[Callable[..., Visit]]:
    made: list[Visit] = []

    def come(**options: Any) -> Visit:
        made.append(come_in(browser, board, **options))
        return made[-1]

    yield come
    for one in made:
        assert not one.complaints, one.complaints
        one.context.close()


def test_the_overview_shows_the_job_and_goes_on(visit: Callable[..., Visit]) -> None:
    seen = visit(color_scheme="light")
    page = seen.page
    assert "token" not in page.url, "the address of the page has no token any more"
    seen.sees("Functions by time", "simulate", "4 nodes")
    assert page.locator(".card canvas").count() >= 5
    tasks = page.get_by_label("Tasks").locator(".small")
    first = tasks.inner_text()
    expect(tasks).not_to_have_text(first, timeout=PATIENCE)
    page.wait_for_timeout(60_000 if PICTURES else 6000)
    picture(page, "dashboard")
    page.get_by_role("button", name="Pause").click()
    page.wait_for_timeout(2500)
    held = tasks.inner_text()
    page.wait_for_timeout(4500)
    assert tasks.inner_text() == held, "a page that is paused asks nothing"
    page.keyboard.press("p")
    expect(tasks).not_to_have_text(held, timeout=PATIENCE)
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.wait_for_timeout(2500)
    picture(page, "dashboard-dark")
    page.keyboard.press("d")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog").get_by_text("Dark or light")).to_be_visible()
    page.keyboard.press("Escape")
    page.reload()
    seen.sees("Functions by time")


def test_what_is_wrong_is_a_click_from_its_cause(visit: Callable[..., Visit]) -> None:
    seen = visit()
    card = seen.page.get_by_label("What is wrong").get_by_role("listitem")
    expect(card.filter(has_text="Can never run")).to_contain_text("licence: 1")
    card.filter(has_text="Dead actors").click()
    seen.sees("DEAD", "signal 9")
    seen.page.keyboard.press("Escape")
    card.filter(has_text="Can never run").click()
    first = seen.page.locator(".graph .box").first
    expect(first).to_contain_text("unserved", timeout=PATIENCE)
    red, other = first.evaluate(
        "box => [getComputedStyle(box).borderLeftColor, getComputedStyle([...document.querySelectorAll('.box')]"
        ".find(one => one.textContent.includes('waits in get'))).borderLeftColor]"
    )
    assert red != other, "what can never run is red, what waits is not"


@pytest.mark.parametrize("width", [1360, 2400])
def test_no_column_is_cut(visit: Callable[..., Visit], width: int) -> None:
    seen = visit()
    seen.page.set_viewport_size({"width": width, "height": 900})
    for name in ("Overview", "Nodes", "Tasks", "Actors", "Objects", "Logs", "Placement groups"):
        seen.click(name)
        expect(seen.page.locator("main table tbody tr").first).to_be_visible(timeout=PATIENCE)
        seen.page.wait_for_timeout(500)
        tables = "[...document.querySelectorAll('main .table')].map(one => one.scrollWidth - one.clientWidth)"
        assert max(seen.page.evaluate(tables)) <= 0, name


def test_functions_have_one_colour_each_on_all_pages(visit: Callable[..., Visit]) -> None:
    seen = visit()
    pair = "one => [one.parentElement.textContent, one.firstChild.getAttribute('fill')]"
    colours = f"[...document.querySelectorAll('{{}}')].map({pair})"
    seen.sees("simulate")
    shown = dict(seen.page.evaluate(colours.format("td.name .swatch")))
    assert len(shown) >= 4 and len(set(shown.values())) == len(shown)
    seen.click("Timeline")
    expect(seen.page.locator(".legend")).to_contain_text("simulate", timeout=PATIENCE)
    legend = dict(seen.page.evaluate(colours.format(".legend .swatch")))
    assert {name: colour for name, colour in legend.items() if name in shown}.items() <= shown.items()
    assert "simulate" in legend


def test_a_chart_has_a_hole_where_nobody_looked(visit: Callable[..., Visit]) -> None:
    seen = visit()
    pair = "one => [one.time, !!one.gap]"
    times = f"import('./js/plots.js').then(one => one.withGaps({{}}.map(time => ({{{{ time }}}}))).map({pair}))"
    assert seen.page.evaluate(times.format([0, 2, 4, 30, 32])) == [
        [0, False], [2, False], [4, False], [17, True], [30, False], [32, False],
    ]  # fmt: skip
    assert not any(gap for _, gap in seen.page.evaluate(times.format([0, 2, 4, 7, 9])))


def test_nodes_lead_to_processes(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.click("Nodes")
    rows = seen.page.locator("tbody tr.open")
    expect(rows).to_have_count(4)
    groups = seen.page.locator("tbody tr.group")
    if not PICTURES:
        expect(groups).to_have_text(["top › leaf1"])
    seen.page.get_by_role("button", name=re.compile("^node")).click()
    expect(groups).to_have_count(0)
    expect(rows.first.locator("td").first).to_have_text("3")
    rows.first.focus()
    seen.page.keyboard.press("ArrowDown")
    seen.page.keyboard.press("Enter")
    expect(seen.page.get_by_role("heading", name=re.compile("Node 2"))).to_be_visible()
    seen.sees("Processes", "simulate")
    seen.sees("GPUs", re.compile(r"NVIDIA H200.*93\s*%"), re.compile("55.9 GiB of 131"))
    picture(seen.page, "dashboard-node")
    seen.page.keyboard.press("Escape")
    expect(rows).to_have_count(4)


@pytest.mark.skipif(PICTURES, reason="the names are ordinary where pictures are made")
def test_markup_in_names_is_text(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.click("Tasks")
    seen.sees(EVIL)
    search = seen.page.get_by_label("Search tasks")
    search.fill("onerror")
    rows = seen.page.get_by_label("tasks", exact=True).locator("tbody tr")
    expect(rows.first).to_contain_text("onerror")
    rows.first.click()
    seen.sees("NORMAL_TASK")
    seen.click("Actors")
    seen.sees(EVIL)
    seen.click("Logs")
    seen.page.get_by_label("regular expression").fill("onerror")
    seen.page.get_by_role("button", name="Search").click()
    expect(seen.page.get_by_label("Lines").locator("mark").first).to_have_text("onerror")
    assert "\x1b" not in seen.page.get_by_label("Lines").inner_text()
    assert seen.page.locator("img").count() == 0 and seen.page.title().startswith("Logs")


def test_an_actor_that_was_killed_says_when_and_why(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.keyboard.press("4")
    seen.page.get_by_label("Search actors").fill("victim")
    expect(seen.page.locator("tbody tr")).to_have_count(1)
    seen.page.locator("tbody tr").click()
    seen.sees("DEAD", "signal 9", time.strftime("%Y-%m-%d"))


def test_the_timeline_is_zoomed_and_read(visit: Callable[..., Visit]) -> None:
    seen = visit(color_scheme="light")
    seen.click("Timeline")
    page, canvas = seen.page, seen.page.locator("canvas")
    expect(page.locator(".legend")).to_contain_text("simulate")
    page.get_by_role("button", name="Last 10 s").click()
    page.wait_for_timeout(4000)
    picture(page, "dashboard-timeline")
    box = canvas.bounding_box()
    found = ""
    for step in range(60):
        page.mouse.move(box["x"] + 200 + 15 * step, box["y"] + 30)
        tip = page.locator(".tip")
        if tip.is_visible() and "\n" in tip.inner_text():
            found = tip.inner_text()
            page.mouse.down()
            page.mouse.up()
            break
    assert found
    expect(page.get_by_role("status").last).to_contain_text("node ")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.mouse.wheel(0, -400)
    canvas.focus()
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    page.wait_for_timeout(1500)
    windows = [re.search(r"start=([\d.]+)&end=([\d.]+)", url) for url in requests]
    spans = [float(one[2]) - float(one[1]) for one in windows if one]
    assert spans and min(spans) < 8.0, spans
    page.get_by_role("button", name="All").click()


def test_objects_groups_slurm_and_waits(visit: Callable[..., Visit]) -> None:
    seen = visit(color_scheme="light")
    seen.click("Objects")
    seen.sees("train.py:", "8.0 MiB")
    picture(seen.page, "dashboard-objects")
    seen.click("Placement groups")
    seen.sees("spread", "CREATED", "SPREAD")
    seen.click("Slurm")
    seen.sees("not of Slurm")
    seen.page.keyboard.press("8")
    seen.sees("waits in get", "runs barrier", "waits for")
    assert seen.page.locator(".graph path").count() >= 3
    picture(seen.page, "dashboard-waits")


def test_stacks_are_shown_and_sampled(visit: Callable[..., Visit]) -> None:
    seen = visit(color_scheme="light")
    seen.click("Stacks")
    expect(seen.page.get_by_label("Stacks")).to_contain_text("in barrier", timeout=PATIENCE)
    seen.page.get_by_label("Seconds").select_option("5")
    seen.page.get_by_role("button", name="Sample").click()
    flame = seen.page.get_by_label("Flame graph")
    frame = flame.get_by_role("button", name=re.compile("^simulate$")).first
    expect(frame).to_be_visible(timeout=PATIENCE)
    picture(seen.page, "dashboard-flame")
    whole = flame.get_by_role("button").count()
    frame.click()
    expect(seen.page.get_by_role("status").last).to_contain_text(re.compile(r"simulate: .*%"))
    assert 2 <= flame.get_by_role("button").count() < whole
    seen.page.get_by_label("What").select_option("1")
    seen.page.get_by_role("button", name="Sample").click()
    line = 1 + PROGRAM[: PROGRAM.index("kept.append")].count("\n")
    grown = flame.get_by_role("button", name=f"train.py:{line}", exact=True).first
    expect(grown).to_be_visible(timeout=PATIENCE)
    grown.click()
    expect(seen.page.get_by_role("status").last).to_contain_text(re.compile(rf"train\.py:{line}: .*[KM]iB"))


def test_two_browsers_at_once_and_links_that_are_good_once(
    visit: Callable[..., Visit], browser: Any, board: Dashboard
) -> None:
    used = board.links[-1]
    one, other = visit(), visit()
    for seen in (one, other):
        seen.click("Nodes")
        expect(seen.page.locator("tbody tr.open")).to_have_count(4)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{one.root}#token={used}")
    expect(page.get_by_text("this link was used")).to_be_visible()
    page.goto(one.root)
    page.reload()
    expect(page.get_by_label("Link or token")).to_be_visible()
    context.close()


def test_an_actor_is_killed_by_a_button(visit: Callable[..., Visit]) -> None:
    seen = visit()
    seen.page.keyboard.press("4")
    seen.page.get_by_label("Search actors").fill("spare")
    expect(seen.page.locator("tbody tr")).to_have_count(1)
    seen.page.locator("tbody tr").click()
    seen.sees("ALIVE")
    seen.page.on("dialog", lambda dialog: dialog.accept())
    seen.page.get_by_role("button", name="Kill this actor").click()
    seen.sees("DEAD", "killed from the dashboard")


def test_zz_the_page_says_that_the_job_has_ended(tmp_path: Path, browser: Any) -> None:
    program = "import os, sys, hpcray as ray\nray.init()\nprint('ready', os.environ['HPCRAY_ADDRESS'], flush=True)\n"
    script = write(tmp_path, program + "import time; time.sleep(600)\n")
    with Job(as_module(1, script)) as job, Dashboard(job.line().split()[1], "--port", "0") as board:
        seen = come_in(browser, board)
        job.child.terminate()
        expect(seen.page.locator("#banner")).to_contain_text(re.compile("has ended"), timeout=PATIENCE)
        assert board.ended().code == 0
        seen.context.close()
