"""The wheel that the tests of this directory install; it is built once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from test_recipes import check


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    check(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, ROOT)
    (found,) = out.iterdir()
    return found
