"""`ray`, which is hpcray, in one job of one node for all tests of this directory that this process runs.

With HPCRAY_TEST_ENGINE=ray it is the real one, which says whether the tests ask for the right thing (those of rows that
differ, and of what is missing, fail then).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.as_ray import imported_ray

PATIENCE = 60.0
CPUS, GPUS = 4, 2


@pytest.fixture(scope="package")
def as_ray() -> Iterator[Any]:
    """The module `ray`, not initialized."""
    yield from imported_ray()


@pytest.fixture(scope="package")
def job(as_ray: Any) -> Iterator[Any]:
    """The module `ray` in a running job."""
    as_ray.init(num_cpus=CPUS, num_gpus=GPUS, resources={"disk": 2}, namespace="table", include_dashboard=False)
    yield as_ray
    as_ray.shutdown()


@pytest.fixture
def ray(job: Any) -> Any:
    """The module `ray`; the job runs."""
    return job


@pytest.fixture
def until() -> Callable[..., Any]:
    """Poll until a condition is true, and give what it gave."""

    def wait(condition: Callable[[], Any], what: str = "") -> Any:
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited in vain for {what or condition}"
            time.sleep(0.01)
        return found

    return wait
