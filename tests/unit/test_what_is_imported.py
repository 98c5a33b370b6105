"""What is imported, and so what it costs to start: users' programs, and the raylet of one that starts its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcray.processes.bootstrap import _COMMAND

ROOT = Path(__file__).resolve().parents[2]
PRINT_MODULES = "; import json; print(json.dumps(sorted(sys.modules)))"
RAYLET = _COMMAND.format(root=str(ROOT)).removesuffix("; main()")
SLOW = {"asyncio", "ssl", "venv", "tarfile", "numpy", "mpi4py", "ucxx", "multiprocessing", "unittest", "pandas"}
"""Packages that take long to import and that few programs need at once."""


def modules(code: str) -> set[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code + PRINT_MODULES], env=environ, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "code", ["import sys, hpcray", f"{RAYLET}; import hpcray.runtime.node.node"], ids=["program", "raylet"]
)
def test_import_hpcray_imports_no_slow_package(code: str) -> None:
    assert modules(code) & SLOW == set()


def test_a_raylet_imports_no_module_of_the_api() -> None:
    assert RAYLET.endswith("import main"), "it would run the raylet"
    found = modules(f"{RAYLET}; import hpcray.runtime.node.node")
    assert "hpcray.core.raylet" in found
    assert {name for name in found if name.startswith(("hpcray.api", "hpcray.util"))} == set()


@pytest.mark.parametrize("code", [RAYLET, "import sys, hpcray.__main__"], ids=["child of a program", "rank"])
def test_workers_inherit_no_module_of_the_raylet(code: str) -> None:
    """What is imported before the fork server is forked is in every worker."""
    found = modules(code)
    assert "hpcray.platform.fork_server" in found
    assert {name for name in found if name.startswith("hpcray.runtime.raylet")} == set()


def test_the_raylet_of_a_program_does_not_load_openssl() -> None:
    """It takes 5 ms of each `init()`."""
    assert "_hashlib" not in modules(f"{RAYLET}; import hpcray.runtime.node.node")


def test_a_rank_loads_no_command_line_library() -> None:
    """Its workers are forked from it, and would use the loaded versions instead of those of a task's environment."""
    assert modules("import sys, hpcray.__main__") & {"argparse", "click", "rich"} == set()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("hpcray.experimental.locations", "get_object_locations"),
        ("hpcray.util.actor_group", "ActorGroup"),
        ("hpcray.util.check_serialize", "FailureTuple"),
        ("hpcray.util.collective.collective", "allreduce"),
        ("hpcray.util.collective.types", "Backend"),
        ("hpcray.util.multiprocessing.pool", "AsyncResult"),
        ("hpcray.util.timer", "_Timer"),
    ],
)
def test_modules_of_ray_that_share_a_file_are_importable_by_their_names(module: str, name: str) -> None:
    code = f"import sys; from {module} import {name}; import {module}; assert {module}.{name} is {name}"
    assert module in modules(code)


def test_a_program_that_has_no_started_cluster_loads_nothing_of_ray_start_but_a_look(tmp_path: Path) -> None:
    environ = f"{{'HPCRAY_START_DIR': {str(tmp_path / 'none')!r}, 'HPCRAY_TMPDIR': {str(tmp_path)!r}}}"
    code = f"import sys, hpcray; from hpcray.api.session import _started_session as find; \
import os; os.environ.pop('RAY_ADDRESS', None); os.environ.update({environ}); assert find(None) is None is find('auto')"
    found = modules(code)
    assert {name for name in found if name.startswith("hpcray.ray_start")} == {
        "hpcray.ray_start",
        "hpcray.ray_start.presence",
    }


@pytest.mark.parametrize("command", ["start", "stop", "status", "health-check"])
def test_commands_that_scripts_call_again_and_again_load_nothing_of_a_program(command: str, tmp_path: Path) -> None:
    environ = {
        **os.environ, "PYTHONPATH": str(ROOT), "HPCRAY_START_DIR": str(tmp_path / "none"),
        "HPCRAY_TMPDIR": str(tmp_path), "SLURM_JOB_ID": "4294967280", "TMPDIR": str(tmp_path),
    }  # fmt: skip
    words = [sys.executable, "-X", "importtime", "-m", "hpcray.cli.ray", command]
    said = subprocess.run(words, env=environ, capture_output=True, text=True).stderr
    found = {line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")}
    assert "hpcray.ray_start.registry" in found
    kinds = ("hpcray.api", "hpcray.util", "hpcray.runtime.core_worker", "hpcray.job_submission", "cloudpickle")
    assert {name for name in found if name.startswith(kinds)} == set()
