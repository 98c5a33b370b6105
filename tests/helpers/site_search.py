"""The search box of the documentation's site: Material's own worker, on the index that the site has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SETUP, QUERY = 0, 2
"""Kinds of messages to the worker (`SearchMessageType` of Material)."""
_SHELL = """
var self = this, answers = [], listener = null;
self.location = {href: "https://localhost/"};
var location = self.location;
function postMessage(message) { answers.push(message); }
function addEventListener(kind, handler) { if (kind === "message") listener = handler; }
self.postMessage = postMessage; self.addEventListener = addEventListener;
"""


class SiteSearch:
    """Answers what a reader types into the search box.

    Args:
        site: the directory that `mkdocs build` has written.
    """

    def __init__(self, site: Path) -> None:
        from py_mini_racer import MiniRacer

        (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
        self._engine = MiniRacer()
        self._engine.eval(_SHELL)
        self._engine.eval(worker.read_text())
        index = json.loads((site / "search" / "search_index.json").read_text())
        self._ask(SETUP, {**index, "options": {"suggest": True}})

    def pages(self, query: str) -> list[str]:
        """The pages that the box lists for a query, best first."""
        result = self._ask(QUERY, query)["data"]
        return [group[0]["location"].partition("#")[0] for group in result["items"]]

    def _ask(self, kind: int, data: Any) -> dict[str, Any]:
        message = json.dumps({"data": {"type": kind, "data": data}})
        self._engine.eval(f"answers.length = 0; listener({message}); undefined")
        answers = json.loads(self._engine.eval("JSON.stringify(answers)"))
        assert len(answers) == 1, answers
        found: dict[str, Any] = answers[0]
        return found
