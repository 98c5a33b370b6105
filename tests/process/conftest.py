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


@pytest.fixture
def devices(tmp_path: Path) -> Iterator[str]:
    """The directory of made-up devices (`helpers.fake_device_driver`), which nothing misuses."""
    yield str(tmp_path)
    misuse = tmp_path / "misuse"
    assert not misuse.exists(), misuse.read_text()
