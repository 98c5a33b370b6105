"""How often a slow shared file system is read when a job starts: counted, not timed. See docs/how-to/startup.md."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, as_module, embedded
from helpers.leaks import LeakCheck
from helpers.reads import Reads

MODULES = 5

PROGRAM = """\
import os, sys
import hpcray as ray
import shared_package

ray.init(**({"num_cpus": 3} if "HPCRAY_ADDRESS" not in os.environ else {}))


@ray.remote(scheduling_strategy="SPREAD")
def where():
    import time
    import shared_package.late
    time.sleep(0.1)
    return ray.get_runtime_context().get_node_id(), os.getpid(), shared_package.late.__file__, shared_package.total()


found = [ray.get(where.remote())] + ray.get([where.remote() for _ in range(24)])
assert {total for *_, total in found} == {10}
print("nodes", len({node for node, *_ in found}), "workers", len({pid for _, pid, *_ in found}))
print("driver", shared_package.__file__)
print("workers", *sorted({path for *_, path, _ in found}))
print("prefix", sys.prefix)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory with a package of a few modules and a data file."""
    package = tmp_path / "shared" / "shared_package"
    package.mkdir(parents=True)
    lines = [f"from shared_package import m{number}" for number in range(MODULES)]
    lines += ["import os", "def total(): return sum(getattr(sys.modules[__name__], f'm{n}').x for n in range(5))"]
    (package / "__init__.py").write_text("import sys\n" + "\n".join(lines))
    for number in range(MODULES):
        (package / f"m{number}.py").write_text(f"x = {number}")
    (package / "late.py").write_text("")
    return tmp_path / "shared"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "program.py"
    path.parent.mkdir()
    path.write_text(PROGRAM)
    return path


def run(command: list[str], reads: Reads, shared: Path, **environ: str) -> dict[str, str]:
    """The lines that the program printed, by their first word."""
    path = os.pathsep.join([reads.path, str(shared), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Job(command, {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environ}) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.out + ended.err
    return dict(line.split(" ", 1) for line in ended.out.splitlines() if " " in line)


def test_forked_worker_reads_nothing_of_ours(
    leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path
) -> None:
    places = [ROOT / "hpcray", sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"]]
    reads = Reads(tmp_path / "reads", *places)
    run(embedded(program), reads, shared)
    assert reads.by("hpcray-template"), "the hook sees what the template loads"
    assert reads.by("hpcray-worker") == []


def test_without_help_every_worker_reads_the_program_s_packages(
    leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path
) -> None:
    reads = Reads(tmp_path / "reads", shared)
    said = run(embedded(program), reads, shared)
    assert said["nodes"].startswith("1 workers 3")
    assert reads.files()[str(shared / "shared_package" / "m0.py")] == 1 + 3, "the driver and three workers"


def test_preloaded_packages_are_read_once_per_node(
    leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path
) -> None:
    reads = Reads(tmp_path / "reads", shared)
    run(embedded(program), reads, shared, HPCRAY_PRELOAD="shared_package,shared_package.late")
    assert reads.by("hpcray-worker") == []
    once = reads.by("hpcray-template")
    assert len(once) == len(set(once)) == MODULES + 2


def test_a_module_that_cannot_be_preloaded_is_a_warning(
    leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path
) -> None:
    (shared / "broken.py").write_text("raise ValueError('not on this node')")
    (shared / "leaves.py").write_text("raise SystemExit(3)")
    path = os.pathsep.join([str(shared), str(ROOT), os.environ.get("PYTHONPATH", "")])
    with Job(embedded(program), {"PYTHONPATH": path, "HPCRAY_PRELOAD": "broken,leaves,shared_package"}) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    for name, reason in (("broken", "ValueError: not on this node"), ("leaves", "SystemExit: 3")):
        assert f"warning: {name} of HPCRAY_PRELOAD cannot be imported: {reason}" in ended.err
    assert "shared_package of" not in ended.err


def test_broadcast_directory_is_read_once_per_job(
    leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path
) -> None:
    reads = Reads(tmp_path / "reads", shared)
    command = as_module(3, program)
    command[command.index("hpcray") + 1 : command.index("hpcray") + 1] = ["--broadcast-env", str(shared)]
    said = run(command, reads, shared)
    assert said["nodes"].startswith("3 workers")
    copies = said["workers"].split()
    assert len(copies) == 3 and len(set(copies)) == 3, "each node has its own"
    assert all(copy.startswith(str(leak_check.tmp)) and copy.endswith("env/shared_package/late.py") for copy in copies)
    assert said["driver"].startswith(str(leak_check.tmp))
    assert set(reads.files().values()) == {1} and len(reads.files()) == MODULES + 2
    assert set(reads.by("hpcray-raylet")) == set(reads.files()), "rank 0's raylet, and nobody else"


def test_broadcast_of_nothing_useful_is_refused(leak_check: LeakCheck, tmp_path: Path, program: Path) -> None:
    command = as_module(2, program)
    command[command.index("hpcray") + 1 : command.index("hpcray") + 1] = ["--broadcast-env", str(tmp_path / "reads")]
    with Job(command) as job:
        ended = job.wait(100)
    assert ended.code != 0
    assert "no such directory" in ended.err and "Traceback" not in ended.err


def test_launcher_passes_it_on() -> None:
    options = ["-n", "2", "--dry-run", "--broadcast-env", "d", "x.py"]
    with Job([sys.executable, "-m", "hpcray.cli.launch", *options]) as job:
        ended = job.wait(100)
    assert "-m hpcray --broadcast-env d x.py" in ended.out


@pytest.mark.slow
def test_broadcast_virtual_environment(leak_check: LeakCheck, tmp_path: Path, shared: Path, program: Path) -> None:
    """A venv of its own, started by its own Python: the driver and the workers run from the copies."""
    import venv

    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    packages = next(home.glob("lib/python*/site-packages"))
    beyond = [str(ROOT), *[path for path in sys.path if "site-packages" in path]]
    (packages / "beyond.pth").write_text("\n".join(beyond))
    os.rename(shared / "shared_package", packages / "shared_package")
    reads = Reads(tmp_path / "reads", packages / "shared_package")
    command = as_module(2, program)
    command[command.index(sys.executable)] = str(home / "bin" / "python")
    command[command.index("hpcray") + 1 : command.index("hpcray") + 1] = ["--broadcast-env", str(home)]
    said = run(command, reads, shared)
    assert said["prefix"].startswith(str(leak_check.tmp)) and said["prefix"].endswith("/env")
    assert said["driver"].startswith(said["prefix"])
    assert all(path.startswith(str(leak_check.tmp)) for path in said["workers"].split())
    assert set(reads.files().values()) == {1} and set(reads.by("hpcray-raylet")) == set(reads.files())
