"""Fixtures of the tests that run real processes on one node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import engine
import pytest


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    """One session for all tests of a module; its attribute INIT holds the arguments of `init`."""
    engine.start(**getattr(request.module, "INIT", {"num_cpus": 4}))
    yield
    engine.ray.shutdown()


@pytest.fixture
def marks(tmp_path: Path) -> engine.Marks:
    """Counts what remote code did."""
    return engine.Marks(tmp_path / "marks")
