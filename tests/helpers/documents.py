"""The project's Markdown pages: their headings, links and code blocks.

A code block has a language. Tests run `python`, `bash` and `console` blocks; `text` blocks are output, `text` and
`mermaid` blocks are diagrams. An
HTML comment directly before a block decides how it runs:

    <!-- run: MODE -->         one of `MODES`; the blocks `cell` of a page are one program
    <!-- not run: REASON -->   not at all
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from helpers.jobs import ROOT

RUN = "run: "
NOT_RUN = "not run: "
DEFAULT, CELL, BESIDE, DRAINED, DRY, OPTIONS = "", "cell", "beside a job", "drained", "dry", "options"
SLURM, ALLOCATION, TESTCLUSTER = "slurm", "slurm allocation", "testcluster"
MODES = (CELL, BESIDE, DRAINED, DRY, OPTIONS, SLURM, ALLOCATION, TESTCLUSTER)
ON_SLURM = (SLURM, ALLOCATION, TESTCLUSTER)
EXAMPLES = ("python", "bash", "console")
LANGUAGES = (*EXAMPLES, "text", "toml", "mermaid")
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.DOTALL)
_OUTPUT = re.compile(r"^print\(.*\)  # (.+)$", re.MULTILINE)
_parser = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced code block. page: relative to the checkout. marker: the comment before it, "" for none."""

    page: str
    line: int
    language: str
    marker: str
    text: str

    @property
    def mode(self) -> str | None:
        """How a test runs the block: `DEFAULT` or one of `MODES`; None where no test runs it."""
        if self.language not in EXAMPLES or self.marker.startswith(NOT_RUN):
            return None
        return self.marker.removeprefix(RUN) if self.marker.startswith(RUN) else DEFAULT

    @property
    def commands(self) -> str:
        """A shell script: of a `console` block the lines after the prompt `$`."""
        if self.language != "console":
            return self.text
        return "".join(f"{line[2:]}\n" for line in self.text.splitlines() if line.startswith("$ "))

    @property
    def output(self) -> list[str]:
        """The lines that a program prints, as the comments behind its `print` calls give them."""
        return _OUTPUT.findall(self.text)

    def __str__(self) -> str:
        return f"{self.page}-line-{self.line}"


def pages() -> list[Path]:
    """Every Markdown page of the project; those at the top that a checkout has and an sdist may lack too."""
    rest = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", ROOT / "packaging" / "README.md"]
    return [
        ROOT / "README.md",
        *(page for page in rest if page.exists()),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
        ROOT / "launch" / "README.md",
        ROOT / "slurm" / "testcluster" / "README.md",
    ]


def blocks(*modes: str) -> list[Block]:
    """The code blocks of all pages; with `modes`, those that run in one of them."""
    found = [block for page in pages() for block in _blocks(page)]
    return [block for block in found if block.mode in modes] if modes else found


def _blocks(page: Path) -> Iterator[Block]:
    marker = ""
    for token in _tokens(page.read_text()):
        if token.type in ("fence", "code_block") and token.map is not None:
            yield Block(str(page.relative_to(ROOT)), token.map[0] + 1, token.info.strip(), marker, token.content)
        comment = _COMMENT.fullmatch(token.content.strip()) if token.type == "html_block" else None
        marker = comment[1] if comment else ""


def inline_code(page: Path) -> list[str]:
    """The code spans of a page, outside of its code blocks."""
    return [child.content for child in _inline(page) if child.type == "code_inline"]


def links(page: Path) -> list[str]:
    """The targets of a page's links and pictures."""
    targets = [child.attrGet("href") or child.attrGet("src") for child in _inline(page)]
    return [str(target) for target in targets if target]


def anchors(page: Path) -> set[str]:
    """The names under which the page's headings can be linked, as GitHub makes them."""
    tokens = _tokens(page.read_text())
    titles = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def _inline(page: Path) -> list[Token]:
    return [child for token in _tokens(page.read_text()) for child in token.children or ()]


@cache
def _tokens(text: str) -> list[Token]:
    return _parser.parse(text)
