"""Tests that start jobs under mpirun, and tests that pytest-mpi runs inside of one (those bear the mark `mpi`)."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_SKIPPED_BY_PYTEST_MPI = "need --with-mpi option to run"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest-mpi takes the name of this directory for its mark, and skips everything in it: undo that."""
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("mpi") is None:
            item.own_markers = [
                mark for mark in item.own_markers if mark.kwargs.get("reason") != _SKIPPED_BY_PYTEST_MPI
            ]


@pytest.fixture(params=["1", "0"], ids=["direct", "by raylets"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as nodes of one host do it, once as if each had a host of its own."""
    monkeypatch.setenv("HPCRAY_SAME_HOST", request.param)
