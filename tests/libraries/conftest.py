"""Ray's own libraries, lent from a real wheel, on hpcray.

The wheel is what HPCRAY_RAY_LIBRARIES names, or is downloaded once, into the user's cache; without a network the tests
are skipped. With HPCRAY_TEST_ENGINE=ray the real Ray runs them, which says whether they ask for the right thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.as_ray import imported_ray, lent_libraries

from hpcray.compat.finder import LENT

ROOT = Path(__file__).resolve().parents[2]
CPUS = 4
PATIENCE = 300.0
REAL = os.environ.get("HPCRAY_TEST_ENGINE") == "ray"


@pytest.fixture(scope="session")
def libraries() -> str:
    """The directory that lends Ray's libraries."""
    return os.environ.get(LENT, "") if REAL else lent_libraries()


@pytest.fixture(scope="module")
def job(libraries: str) -> Iterator[Any]:
    """The module `ray` in a running job of one node, which the tests of a file share. It ends with the file: one of
    another directory may follow in the same process."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("HPCRAY_PRELOAD", "ray.data,ray.tune")
        for ray in imported_ray(libraries):
            try:
                ray.init(num_cpus=CPUS, include_dashboard=False, object_store_memory=400 << 20)
                yield ray
            finally:
                ray.shutdown()


@pytest.fixture
def ray(job: Any) -> Any:
    """The module `ray`; the job runs."""
    return job


@pytest.fixture
def run(libraries: str) -> Callable[..., str]:
    """Run a program that says `import ray` in a process of its own. Gives its output; fails with its errors."""

    def program(
        script: str | Path, *arguments: str, options: tuple[str, ...] = (), env: dict[str, str] | None = None
    ) -> str:
        """`options`: of `python -m hpcray`, such as `--num-cpus 2`."""
        ours = () if REAL else ("-m", "hpcray", "--as-ray", *options)
        ended = subprocess.run(
            [sys.executable, *ours, str(script), *arguments],
            env={**os.environ, LENT: libraries, "PYTHONPATH": str(ROOT), **(env or {})},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{ended.stdout[-4000:]}\n{ended.stderr[-8000:]}"
        return ended.stdout

    return program
