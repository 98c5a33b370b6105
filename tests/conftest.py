"""Fixtures of all tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.leaks import LeakCheck, leak_checked


@pytest.fixture
def leak_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeakCheck]:
    """Everything that the test starts carries a mark; the test fails when something is left of it in the end."""
    with leak_checked(monkeypatch.setenv) as leaks:
        yield leaks
