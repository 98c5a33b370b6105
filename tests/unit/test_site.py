"""The documentation as a web site: builds without a warning, its links lead somewhere, its search box answers."""

from __future__ import annotations

import re
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from helpers.browser import chromium
from helpers.documents import links, pages
from helpers.jobs import ROOT
from helpers.site_search import SiteSearch

import hpcray

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
sys.path.insert(0, str(ROOT / "docs"))
single_entries = pytest.importorskip("site_docstrings").single_entries


def test_an_entry_about_several_parameters_becomes_one_for_each() -> None:
    text = "Do.\n\nArgs:\n    a: one.\n    b, *c: two,\n        in two lines.\n\nReturns:\n    x, y: a pair.\n"
    got = single_entries(text)
    assert "    b: two,\n        in two lines.\n    *c: two,\n        in two lines.\n" in got
    assert got.endswith("Returns:\n    x, y: a pair.\n") and "    a: one.\n" in got


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("site")
    # Without --quiet: with it warnings are not counted, and the build of a page with one succeeds.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "WARNING -" not in done.stderr, done.stderr
    return found


class _Targets(HTMLParser):
    """What a page links and loads, and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site: Path) -> None:
    found = {page: _Targets(page) for page in site.rglob("*.html")}
    assert len(found) > 50
    wrong = []
    for page, targets in found.items():
        for link in targets.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or page.name == "404.html":
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            known = found[target].anchors if target in found else set()
            if not target.exists() or (parts.fragment and target in found and unquote(parts.fragment) not in known):
                wrong.append(f"{page.relative_to(site)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_the_site_loads_nothing_from_another_host(site: Path) -> None:
    """A cluster may have no internet. Diagrams are the exception: the theme loads Mermaid where a page has one."""
    loaded = [
        tag
        for page in site.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", page.read_text())
    ]
    assert not loaded


def test_addresses_elsewhere_are_whole() -> None:
    elsewhere = [(page, link) for page in pages() for link in links(page) if ":" in link]
    assert len(elsewhere) > 3
    for page, link in elsewhere:
        parts = urlsplit(link)
        assert parts.scheme in ("https", "mailto") and (parts.netloc.count(".") or parts.scheme == "mailto"), (
            page,
            link,
        )
        assert not re.search(r"[\s<>]|TODO|example\.", link), (page, link)


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    known = _Targets(site / "reference" / "api" / "index.html").anchors
    names = [name for name in hpcray.__all__ if not isinstance(getattr(hpcray, name), ModuleType)]
    assert [name for name in names if f"hpcray.{name}" not in known] == []


def test_every_command_has_a_section(site: Path) -> None:
    from hpcray.cli.__main__ import GROUPS

    page = (site / "reference" / "commands" / "index.html").read_text()
    shown = [name for rows in GROUPS.values() for name, (_, text) in rows.items() if text]
    assert [name for name in shown if f'id="hpcray-{name}' not in page] == []


QUESTIONS = {
    "how do I use my site's MPI": "how-to/site-mpi/",
    "use system MPI": "how-to/site-mpi/",
    "site mpi": "how-to/site-mpi/",
    "how do I resume after the time limit": "how-to/resume/",
    "resume after time limit": "how-to/resume/",
    "how do I port my Ray script": "migrate/ray/",
    "port ray script": "migrate/ray/",
    "migrate from Ray": "migrate/ray/",
    "dask jobqueue": "migrate/dask/",
    "mpi4py futures": "migrate/mpi4py/",
    "submitit": "migrate/submitit/",
    "parsl": "migrate/parsl/",
    "tutorial": "tutorial/",
    "why not Ray on Slurm": "explain/why-not-ray-on-slurm/",
    # What Ray's users on Slurm ask.
    "ray start address already in use": "faq/",
    "could not connect to head node": "faq/",
    "ports collide with another user": "faq/",
    "cpus per task": "faq/",
    "CUDA_VISIBLE_DEVICES slurm": "faq/",
    "gpu per task": "faq/",
    "/tmp is full": "faq/",
    "job killed out of memory": "faq/",
    "infiniband": "faq/",
    "ssh dashboard": "faq/",
    "apptainer container": "faq/",
    "add nodes to a running job": "faq/",
    "nodes die during the job": "faq/",
    "multiple jobs on one node": "faq/",
    "job array": "faq/",
    "preemption requeue": "how-to/preemption/",
    "conda environment on all nodes": "how-to/runtime-env/",
    "ray tune on slurm": "how-to/ray-libraries/",
    "pytorch distributed training": "how-to/train-and-serve/",
    "autoscaling slurm": "how-to/elastic/",
    "mpi inside a task": "how-to/mpi/",
    "debug a task": "how-to/debug/",
    "logs of workers": "how-to/logs/",
    "jupyter notebook": "how-to/notebooks/",
    "PBS": "how-to/site/",
}
"""What a stranger types, and the page that the first hit has to be."""


@pytest.fixture(scope="module")
def search(site: Path) -> SiteSearch:
    pytest.importorskip("py_mini_racer")
    return SiteSearch(site)


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_hit_of_the_search_box_answers(question: str, search: SiteSearch) -> None:
    assert search.pages(question)[:1] == [QUESTIONS[question]], search.pages(question)[:4]


def first_words(message: str) -> str:
    """A message as it is typed into the search box: its first words, without names, numbers and short words."""
    return " ".join(re.findall(r"[A-Za-z][a-z]{4,}", message.replace("…", " "))[:12])


QUOTED = [
    query
    for line in (ROOT / "docs" / "reference" / "errors.md").read_text().splitlines()
    if line.startswith("### ") and len((query := first_words(line)).split()) >= 4
]


@pytest.mark.parametrize("query", QUOTED[::3])
def test_a_message_with_a_hint_is_found(query: str, search: SiteSearch) -> None:
    assert "reference/errors/" in search.pages(query)[:10], search.pages(query)


@pytest.mark.parametrize("letter", string.ascii_lowercase)
def test_no_word_breaks_the_search(letter: str, search: SiteSearch) -> None:
    """lunr looks up every word that begins so; one that it has mixed up with another ends the search without a hit."""
    assert search.pages(letter)


def test_a_query_without_an_answer_has_no_hit(search: SiteSearch) -> None:
    assert search.pages("xylophone") == []


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    """The address at which this machine serves the site."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_first_hit_is_the_same_in_a_browser(served: str) -> None:
    with chromium() as browser:
        page = browser.new_page()
        for question in list(QUESTIONS)[::3]:
            page.goto(served)
            page.fill("input.md-search__input", question, timeout=60_000)
            first = page.locator("a.md-search-result__link").first
            first.wait_for(timeout=60_000)
            assert first.get_attribute("href").removeprefix(served).split("?")[0] == QUESTIONS[question]
