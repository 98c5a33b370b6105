"""What `mkdocs build` does beside its plug-ins.

- Navigation: the headings of docs/README.md, and below each the pages that it links there.
- Files of the repository outside docs/ that a page links (job scripts, programs, other pages) become pages of the site,
  below repository/, so that no link leads out of it. Pictures are copied.
- Search: pages that people read come before the lists that are made from the code.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BELOW = "repository"
INDEX = "docs/README.md"
PICTURES = (".png", ".svg")
LANGUAGES = {
    ".py": "python",
    ".sbatch": "bash",
    ".toml": "toml",
    ".ipynb": "json",
    ".json": "json",
    ".sh": "bash",
    "": "bash",
}
BOOSTS = {
    "how-to/resume.md": 4.0,
    "faq.md": 3.0,
    "explain/why": 3.0,
    "how-to/": 2.0,
    "migrate/": 2.0,
    "reference/": 0.5,
    "decisions/": 0.5,
    "glossary.md": 0.5,
}
"""By the beginning of a page's path."""
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = navigation((ROOT / INDEX).read_text())
    return config


def navigation(index: str) -> list[Any]:
    """The site's navigation: the index itself, then a section for each heading of its second level."""
    found: list[Any] = ["README.md"]
    before, *sections = re.split(r"^## (.+)$", index, flags=re.MULTILINE)
    found += _linked_pages(before)
    found += [{title: _linked_pages(text)} for title, text in zip(sections[::2], sections[1::2], strict=True)]
    return found


def _linked_pages(text: str) -> list[str]:
    pages = [site_path(path) for path in linked_files(INDEX, text) if kind_of(path) != "picture"]
    return list(dict.fromkeys(pages))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages link outside of docs/, and what those link in turn."""
    waiting = [f"docs/{file.src_uri}" for file in files if file.is_documentation_page()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in linked_files(page, source(page)):
            if path in seen or path.startswith("docs/"):
                continue
            seen.add(path)
            if kind_of(path) == "picture":
                made = File.generated(config, site_path(path), abs_src_path=str(ROOT / path))
            else:
                made = File.generated(config, site_path(path), content=source(path))
                made.inclusion = InclusionLevel.NOT_IN_NAV  # a page leads there; those that the index links are in it
                waiting.append(path)
            files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri
    if uri.startswith(f"{BELOW}/"):
        path = repository_path(uri)
        if kind_of(path) in ("text", "directory"):
            page.meta["search"] = {"exclude": True}
    else:
        path = f"docs/{uri}"
        boost = next((boost for beginning, boost in BOOSTS.items() if uri.startswith(beginning)), 1.0)
        page.meta["search"] = {"boost": boost}
    return relinked(path, markdown)


# ------------------------------------------------------------ files of the repository as pages


def kind_of(path: str) -> str:
    if (ROOT / path).is_dir():
        return "directory"
    suffix = Path(path).suffix
    return "picture" if suffix in PICTURES else "page" if suffix == ".md" else "text"


def site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    kind = kind_of(path)
    if kind == "directory":
        return f"{BELOW}/{path}/README.md"
    return f"{BELOW}/{path}.md" if kind == "text" else f"{BELOW}/{path}"


def repository_path(uri: str) -> str:
    """The inverse of `site_path`, for pages below repository/."""
    path = uri.removeprefix(f"{BELOW}/")
    if (ROOT / path).exists():
        return path
    return path.removesuffix("/README.md") if path.endswith("/README.md") else path.removesuffix(".md")


def source(path: str) -> str:
    """The Markdown of a page: that of the file, or a page that shows the file or lists the directory."""
    kind, file = kind_of(path), ROOT / path
    if kind == "page":
        return file.read_text()
    if kind == "directory":
        names = [each.name for each in sorted(file.iterdir()) if each.is_file()]
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = file.read_text()
    fence = "`" * (3 + max((len(ticks) for ticks in re.findall("`{3,}", text)), default=0))
    return f"# {path}\n\n{fence}{LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


# ------------------------------------------------------------ links


def _outside_fences(text: str) -> Iterator[tuple[bool, str]]:
    """The parts of a page, in order, and whether each is outside of code blocks."""
    at = 0
    for fence in _FENCE.finditer(text):
        yield True, text[at : fence.start()]
        yield False, fence[0]
        at = fence.end()
    yield True, text[at:]


def target_of(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page leads to; None for an address elsewhere.

    A directory with a README.md is that page.
    """
    if ":" in link:
        return None
    directory = page if kind_of(page) == "directory" else os.path.dirname(page)
    path = os.path.normpath(os.path.join(directory, link))
    if path.startswith("..") or not (ROOT / path).exists():
        return None
    return f"{path}/README.md" if (ROOT / path / "README.md").exists() else path


def linked_files(page: str, text: str) -> list[str]:
    """The files of the repository that the text of a page links."""
    links = [link[2] for prose, part in _outside_fences(text) if prose for link in _LINK.finditer(part)]
    return [path for link in links if (path := target_of(page, link)) is not None]


def relinked(page: str, text: str) -> str:
    """The text with every link to a file as the site has it."""

    def replaced(found: re.Match[str]) -> str:
        path = target_of(page, found[2])
        if path is None:
            return found[0]
        link = os.path.relpath(site_path(path), os.path.dirname(site_path(page)))
        return f"{found[1]}{link}{found[3]}"

    return "".join(_LINK.sub(replaced, part) if prose else part for prose, part in _outside_fences(text))
