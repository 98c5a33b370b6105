"""`ray`, which is hpcray, in one job of one node for all tests of this directory that this process runs.

With HPCRAY_TEST_ENGINE=ray it is the real one, which says whether the tests ask for the right thing (those of rows that
differ, and of what is missing, fail then).
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

PATIENCE = 60.0
CPUS, GPUS = 4, 2


def _without_ray() -> None:
    from hpcray.compat.finder import FINDER, STANDIN

    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not FINDER]
    sys.path[:] = [path for path in sys.path if path != STANDIN]
    for name in [name for name in sys.modules if name == "ray" or name.startswith("ray.")]:
        del sys.modules[name]
    sys.modules.pop("hpcray.compat.ray", None)
    logging.getLogger("hpcray").parent = logging.getLogger()


@pytest.fixture(scope="package")
def as_ray() -> Iterator[Any]:
    """The module `ray`, not initialized."""
    if os.environ.get("HPCRAY_TEST_ENGINE") == "ray":
        yield importlib.import_module("ray")
        return
    given = os.environ.get("RAY_DEDUP_LOGS")
    yield importlib.import_module("hpcray.compat.ray")  # not `import`: linters sort that behind `import ray`
    _without_ray()
    if given is None:
        os.environ.pop("RAY_DEDUP_LOGS", None)  # `install` has set it


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
