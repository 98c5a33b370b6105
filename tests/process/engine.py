"""Which engine the API tests run on: hpcray, or real Ray, which says whether a test asks for the right thing.

HPCRAY_TEST_ENGINE=ray python -m pytest --confcutdir tests/process tests/process -k test_api
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAME = os.environ.get("HPCRAY_TEST_ENGINE", "hpcray")
IS_HPCRAY = NAME == "hpcray"
PATIENCE = 60.0
"""Seconds after which a test gives up on something that must come."""

ROOT = Path(__file__).resolve().parents[2]

if not IS_HPCRAY:
    # hpcray's workers import from wherever the driver does; Ray's only from beside its script.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

ray: Any = importlib.import_module(NAME)
exceptions: Any = importlib.import_module(f"{NAME}.exceptions")
exit_actor: Any = importlib.import_module(f"{NAME}.actor").exit_actor

hpcray_only = pytest.mark.skipif(not IS_HPCRAY, reason="a promise that Ray does not make")


ATTACHED = bool(os.environ.get("HPCRAY_TEST_ATTACHED"))
"""The tests are drivers outside of their job, which they reach through one pipe."""
_elsewhere: list[Any] = []


def start(**options: Any) -> Any:
    """`init` with what every test wants."""
    if not ATTACHED:
        return ray.init(include_dashboard=False, **options)
    from helpers.attached import OF_DRIVERS, JobElsewhere

    while _elsewhere:
        _elsewhere.pop().end()
    _elsewhere.append(JobElsewhere(**{name: value for name, value in options.items() if name not in OF_DRIVERS}))
    mine = {name: value for name, value in options.items() if name in OF_DRIVERS}
    return ray.init(_elsewhere[0].attach(), **mine)


def eventually(condition: Callable[[], Any], what: str = "", patience: float = PATIENCE) -> Any:
    """Poll until the condition is true and return it; fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what or condition}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: zombies do not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_script(path: Path, *args: str, timeout: float = 3 * PATIENCE, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script that says `import engine_under_test as ray` and wait for its end."""
    (path.parent / "engine_under_test.py").write_text(
        f"import importlib, sys\nsys.modules[__name__] = importlib.import_module({NAME!r})\n"
    )
    return subprocess.run(
        [sys.executable, str(path), *args],
        cwd=path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **env},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Marks:
    """Counts across processes: every `add` appends a line to a file."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def add(self, text: str = "x") -> int:
        """Add a line; returns how many there are now."""
        with open(self._path, "a") as file:
            file.write(f"{text}\n")
        return len(self.lines())

    def lines(self) -> list[str]:
        """All lines so far."""
        try:
            return Path(self._path).read_text().split()
        except FileNotFoundError:
            return []
