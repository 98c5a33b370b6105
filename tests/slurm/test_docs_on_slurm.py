"""The examples of the documentation that need Slurm run on the test cluster as they stand."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.documents import ALLOCATION, SLURM, TESTCLUSTER, Block, blocks
from helpers.jobs import ROOT, Job
from helpers.slurm import Slurm

pytestmark = pytest.mark.slurm

NODES = 4
PROGRAM = """\
import sys

import hpcray as ray

ray.init()
print(len(ray.nodes()), "nodes", sys.argv[1:], flush=True)
"""
# A batch job's command returns when the job is over, with its exit code.
WAIT = 'sbatch() { command sbatch --wait --output=batch.out "$@"; }\n'


def examples(*languages: str, mode: str) -> pytest.MarkDecorator:
    found = [block for block in blocks(mode) if block.language in languages]
    assert found, f"no example of {languages} in the mode {mode!r}"
    return pytest.mark.parametrize("block", [pytest.param(block, id=str(block)) for block in found])


def prepare(slurm: Slurm) -> dict[str, str]:
    """The files and directories that examples name, in the directory where they run, which is also their HOME."""
    for name in ("examples", "slurm", "benchmarks"):
        (slurm.place / name).symlink_to(slurm.source / name)
    (slurm.place / "project").mkdir()
    (slurm.place / "journals").mkdir()
    for name in ("program.py", "script.py", "train.py", "one.py", "two.py", "project/script.py"):
        slurm.write(PROGRAM, name)
    (slurm.place / "bin").mkdir()
    slurm.write('#!/bin/sh\nexec "$PYTHON" -m hpcray.cli "$@"\n', "bin/hpcray")  # the installed one names another path
    return {"HOME": str(slurm.place), "PATH": f"{slurm.place}/bin:{slurm.environ()['PATH']}"}


@examples("bash", "console", mode=SLURM)
def test_commands_run_on_the_login_host(block: Block, slurm: Slurm) -> None:
    environ = prepare(slurm)
    ended = slurm.run("bash", "-euo", "pipefail", "-c", WAIT + block.commands, environ=environ)
    assert ended.code == 0, f"{ended.code}\n{ended.out}\n{ended.err}\n{slurm.output()}"


@examples("bash", mode=ALLOCATION)
def test_commands_run_inside_an_allocation(block: Block, slurm: Slurm) -> None:
    environ = prepare(slurm)
    script = slurm.write(f"set -euo pipefail\n{block.commands}", "commands.sh")
    ended = slurm.run("salloc", "-Q", "-N", NODES, "-c", 4, "bash", script, environ=environ)
    assert ended.code == 0, f"{ended.code}\n{ended.out}\n{ended.err}"
    assert ended.out.count(f"{NODES} nodes") == block.commands.count("python -m hpcray"), ended.out


@examples("python", mode=SLURM)
def test_a_program_runs_on_the_login_host(block: Block, slurm: Slurm) -> None:
    pytest.importorskip("submitit")
    environ = prepare(slurm)
    ended = slurm.run(slurm.python, slurm.write(block.text, "example.py"), environ=environ)
    assert ended.code == 0, f"{ended.code}\n{ended.out}\n{ended.err}"


@examples("bash", mode=TESTCLUSTER)
def test_commands_of_the_test_cluster_run(block: Block, slurm: Slurm, tmp_path: Path) -> None:
    """In a cluster of its own name, beside the one of the other tests."""
    name = f"docs-{os.getpid()}"
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    commands = block.commands.replace("python slurm/testcluster", f"python {ROOT}/slurm/testcluster --name {name}")
    assert name in commands
    script = f"cd /\n{commands}"  # a directory that all users of the cluster may enter
    with Job(["bash", "-euo", "pipefail", "-c", script], {"PATH": path}) as job:
        ended = job.wait(100)
    assert ended.code == 0, f"{ended.code}\n{ended.out}\n{ended.err}"
    assert "4 nodes are idle" in ended.out
