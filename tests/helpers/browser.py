"""A headless Chromium, where there is one and Playwright to drive it."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = "HPCRAY_SCREENSHOTS"
"""Variable: the directory into which tests of pages write the pictures of the documentation."""
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
