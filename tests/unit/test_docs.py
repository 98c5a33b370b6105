"""The documentation's form: links, code blocks, names and figures that the code can confirm."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.documents import LANGUAGES, MODES, NOT_RUN, RUN, anchors, blocks, inline_code, links, pages
from helpers.jobs import ROOT
from helpers.source_laws import CONVERSATIONAL
from msgspec import structs

sys.path.insert(0, str(ROOT / "benchmarks"))

import draw_comparison

from hpcray.common.config import Config

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
REFERENCE = ROOT / "docs" / "reference"
"""Generated pages; their sentences are docstrings, see tests/unit/test_laws.py."""
VARIABLE = re.compile(r"HPCRAY_[A-Z][A-Z_]*[A-Z]")
DECIMAL_SIZE = re.compile(r"\d\s?[kKMGT]B\b")
NUMBER = re.compile(r"-?\d+(\.\d+)?")
CODE_PATH = re.compile(r"(?<!\.config/)(?<!CONFIG_HOME/)(?:hpcray|tests|benchmarks|examples|slurm|launch)/[\w./-]+")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_to_files_and_headings(page: Path) -> None:
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_is_listed_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    missing = [page for page in pages() if page not in listed]
    assert [str(page.relative_to(ROOT)) for page in missing] == ["README.md", "docs/README.md"]


@pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in blocks()])
def test_code_blocks_have_a_language_and_a_known_marker(block) -> None:
    assert block.language in LANGUAGES, f"not a fenced block in one of the languages {LANGUAGES}"
    if block.marker.startswith(RUN):
        assert block.mode in MODES, f"{block.marker!r} is none of the modes {MODES}"
    elif block.marker.startswith(NOT_RUN):
        assert len(block.marker) > len(NOT_RUN) + 10, "the marker needs a reason"


def test_the_readme_is_for_the_first_minute() -> None:
    """`.ci/run` takes the two commands from it, word for word: nothing that installs or starts comes before them."""
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 110
    commands = [block for block in blocks() if block.page == "README.md" and block.language == "bash"]
    assert [block.text.count("\n") for block in commands] == [1, 1]
    assert [section.partition("\n")[0] for section in text.split("\n## ") if "```bash" in section] == ["Quick start"]
    install, tests = (text.index(block.text) for block in commands)
    before = [block for block in blocks() if block.page == "README.md" and text.index(block.text) < install]
    assert not [block for block in before if "pip install" in block.text or "hpcray-launch" in block.text]
    assert "clone" in text[text.index("## Quick start") : install] and install < tests


def test_the_readme_claims_no_speed_that_the_page_on_performance_lacks() -> None:
    measured = (ROOT / "docs" / "performance.md").read_text()
    speeds = re.findall(r"\d[\d.,]*(?: times|x| µs| ms| s|/s| /s| GB/s)\b", (ROOT / "README.md").read_text())
    assert not [speed for speed in speeds if speed not in measured]


def test_every_variable_in_the_docs_is_read_by_the_code() -> None:
    settings = {f"HPCRAY_{name.upper()}" for name in Config.__struct_fields__}
    code = "".join(path.read_text() for path in [*(ROOT / "hpcray").rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    named = {name for page in pages() for name in VARIABLE.findall(page.read_text())}
    unknown = {name for name in named - settings if name not in code}
    unknown -= {name for name in unknown if name.removeprefix("HPCRAY_").lower() in code}
    assert not unknown


def test_defaults_in_the_tables_of_settings_are_those_of_the_code() -> None:
    defaults = {f"HPCRAY_{name.upper()}": value for name, value in structs.asdict(Config()).items()}
    checked = 0
    for page in pages():
        for line in page.read_text().splitlines():
            cells = [cell.strip().strip("`") for cell in line.strip("|").split("|")]
            if line.startswith("| `HPCRAY_") and cells[0] in defaults and NUMBER.fullmatch(cells[1]):
                assert float(cells[1]) == float(defaults[cells[0]]), f"{page.name}: {line}"
                checked += 1
    assert checked >= 5


def test_the_picture_of_the_readme_shows_the_table_of_results() -> None:
    drawn = draw_comparison.draw(draw_comparison.results(draw_comparison.TABLE.read_text()))
    assert draw_comparison.PICTURE.read_text() == drawn, "run: python benchmarks/draw_comparison.py"


def test_figures_beside_rays_are_those_of_the_page_on_performance() -> None:
    measured = (ROOT / "docs" / "performance.md").read_text()
    page = (ROOT / "docs" / "explain" / "why-not-ray-on-slurm.md").read_text().partition("## Figures")[2]
    rows = [line.split("|")[2:5] for line in page.splitlines() if re.match(r"\| .* \| +[\d,.]+ ", line)]
    assert len(rows) == 10
    assert not [row for row in rows if "|{}|{}|{}|".format(*row) not in measured]


def test_sizes_in_guides_have_the_unit_of_the_commands() -> None:
    guides = [page for page in pages() if {"how-to", "reference", "examples", "launch"} & set(page.parts)]
    guides += [ROOT / "README.md", ROOT / "docs" / "tutorial.md"]
    assert len(guides) > 30
    found = [
        (page.name, line) for page in guides for line in page.read_text().splitlines() if DECIMAL_SIZE.search(line)
    ]
    assert not found, (
        "KiB, MiB, GiB; decimal units are for measured throughput, in docs/explain and docs/performance.md"
    )


def test_files_that_the_docs_name_exist() -> None:
    named = {
        (str(page.relative_to(ROOT)), path.rstrip("/"))
        for page in pages()
        for span in inline_code(page)
        for path in CODE_PATH.findall(span)
        if "-line-" not in path
    }
    assert not [(page, path) for page, path in sorted(named) if not (ROOT / path).exists()]


@pytest.mark.parametrize("page", [param for param in PAGES if REFERENCE not in param.values[0].parents])
def test_pages_use_technical_english(page: Path) -> None:
    found = [line for line in page.read_text().splitlines() if CONVERSATIONAL.search(line)]
    assert not found
