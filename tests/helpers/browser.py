"""A headless Chromium, where there is one and Playwright to drive it."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = "HPCRAY_SCREENSHOTS"
"""Variable: the directory into which tests of pages write the pictures of the documentation."""
PATIENCE = 30_000
"""Milliseconds within which a page shows what it is to show."""
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright; the test is skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium; hint: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        try:
            yield browser
        finally:
            browser.close()


def picture(page: Any, name: str) -> None:
    """Write a picture of what the page shows, in 128 colours, if pictures are wanted."""
    if directory := os.environ.get(SCREENSHOTS):
        image = pytest.importorskip("PIL.Image")
        shown = image.open(io.BytesIO(page.screenshot())).convert("RGB")
        shown.quantize(128).save(Path(directory) / f"{name}.png", optimize=True)


class Visit:
    """One browser that has come in by a link, and what its console has complained of.

    Args:
        browser: of `chromium`.
        root: the address of the dashboard.
        token: of the link.
        options: of the browser's context.
    """

    def __init__(self, browser: Any, root: str, token: str, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1360, "height": 850}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.complaints: list[str] = []
        self.page.on("console", lambda said: said.type == "error" and self.complaints.append(said.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.root = root
        self.page.goto(f"{root}#token={token}")
        self.sees("Overview")

    def sees(self, *texts: Any) -> None:
        """Wait until the page shows these texts, or texts that match."""
        from playwright.sync_api import expect

        for text in texts:
            expect(self.page.locator("main").get_by_text(text).first).to_be_visible(timeout=PATIENCE)

    def click(self, name: str) -> None:
        """Go to the page of this name."""
        from playwright.sync_api import expect

        self.page.get_by_role("navigation").get_by_role("link", name=re.compile(name)).click()
        expect(self.page.get_by_role("heading", level=1, name=re.compile(name))).to_be_visible()
