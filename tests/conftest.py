"""Fixtures of all tests."""

from __future__ import annotations

import compileall
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers.leaks import LeakCheck, leak_checked

# `.venv/bin/pytest` finds the environment's mpirun as in an activated environment: no test is skipped for that.
_SCRIPTS = os.path.dirname(sys.executable)
if _SCRIPTS not in os.environ.get("PATH", os.defpath).split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join([_SCRIPTS, os.environ.get("PATH", os.defpath)])


# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("no times", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("no times")

# Tests ask for made-up GPUs, also where the machine has some; those marked `gpu` use these.
os.environ.setdefault("HPCRAY_MADE_UP_GPUS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not os.path.isdir("/proc/driver/nvidia/gpus"):
        pytest.skip("no GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package and the tests once. Where PYTHONDONTWRITEBYTECODE is set, each process of each test would do
    so again, which is half of what the start of a job costs."""
    gc.disable()  # until all tests are collected, half of whose time it took: they are a million objects that stay
    if not hasattr(config, "workerinput"):  # not in each of xdist's workers
        tests = Path(__file__).parent
        for directory in (tests.parent / "hpcray", tests):
            compileall.compile_dir(directory, quiet=2)


_LONG = ("compat", "durable", "history", "mpi", "process", "security", "simulation")
"""Directories whose tests take long."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with long tests first, those of each directory evenly spread. xdist hands them out in this order: no
    worker is left with a long one while the others have nothing to do any more, nor do three start MPI jobs at once."""
    files: dict[str, list[Path]] = {}
    for path in dict.fromkeys(item.path for item in items):
        files.setdefault(path.relative_to(Path(__file__).parent).parts[0], []).append(path)
    places = {
        path: number / len(paths) if directory in _LONG or "model" in path.stem else 1.0
        for directory, paths in files.items()
        for number, path in enumerate(paths)
    }
    items.sort(key=lambda item: places[item.path])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave the tests themselves, more than a million objects, out of all later garbage collections in this process:
    each took 0.3 s, and hundreds of tests collect."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write down which tests were skipped, one a line, where a file for them is named: `.ci/run` runs these once more
    when it has installed further packages."""
    if file := os.environ.get("HPCRAY_TEST_SKIPPED"):
        skipped = {report.nodeid: None for report in terminalreporter.stats.get("skipped", ())}
        Path(file).write_text("".join(f"{nodeid}\n" for nodeid in skipped))


@pytest.fixture(scope="module", autouse=True)
def forget_module() -> Iterator[None]:
    """Forget the syntax trees of the package that a file of tests has made, and leave whatever else it has left out of
    later garbage collections."""
    yield
    if sources := sys.modules.get("helpers.source_laws"):
        sources.tree.cache_clear()
    if pages := sys.modules.get("generate"):
        pages.modules.cache_clear()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def own_sessions() -> Iterator[None]:
    """Sessions of this test run live in a directory of its own: `address="auto"` must not find somebody else's."""
    with tempfile.TemporaryDirectory(prefix="hct-", dir="/tmp") as directory:
        os.environ["HPCRAY_TMPDIR"] = directory
        os.environ["HPCRAY_START_DIR"] = f"{directory}/clusters"  # nor join a cluster that somebody's `ray start` made
        os.environ["HPCRAY_HISTORY_DIR"] = f"{directory}/history"  # nor leave histories in the home
        os.environ["HPCRAY_DURABLE_DIR"] = f"{directory}/durable"  # nor find results that somebody has kept
        yield
        for name in ("TMPDIR", "START_DIR", "HISTORY_DIR", "DURABLE_DIR"):
            del os.environ[f"HPCRAY_{name}"]


@pytest.fixture
def leak_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[LeakCheck]:
    """Everything that the test starts carries a mark; the test fails when something is left of it in the end."""
    with leak_checked(monkeypatch.setenv) as leaks:
        yield leaks
