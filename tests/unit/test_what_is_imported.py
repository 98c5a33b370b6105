"""What is imported, and so what it costs to start: users' programs, and the raylet of one that starts its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcray.runtime.bootstrap import _COMMAND

ROOT = Path(__file__).resolve().parents[2]
TELL = "; import json; print(json.dumps(sorted(sys.modules)))"
RAYLET = _COMMAND.format(root=str(ROOT)).removesuffix("; main()")
SLOW = {"asyncio", "ssl", "venv", "tarfile", "numpy", "mpi4py", "ucxx", "multiprocessing", "unittest", "pandas"}
"""What takes long, and few programs need, or not at first: whoever needs it imports it then."""


def modules(code: str) -> set[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code + TELL], env=environ, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("code", ["import sys, hpcray", RAYLET], ids=["program", "raylet"])
def test_nothing_that_takes_long(code: str) -> None:
    assert modules(code) & SLOW == set()


def test_a_raylet_does_without_the_api() -> None:
    assert RAYLET.endswith("import main"), "it would run the raylet"
    found = modules(RAYLET)
    assert "hpcray.core.raylet" in found
    assert {name for name in found if name.startswith(("hpcray.api", "hpcray.util"))} == set()
