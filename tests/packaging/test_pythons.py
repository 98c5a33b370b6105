"""The wheel with each supported version of Python that is installed here: a fresh environment, and a program in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import blocks
from test_recipes import project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
VERSIONS = [line.rpartition(" ")[2] for line in project()["project"]["classifiers"] if ":: 3." in line]
HERE = "{}.{}".format(*sys.version_info[:2])


def interpreter(version: str) -> str:
    """A Python of this version that makes environments: on PATH, or one of pyenv's."""
    found = [
        shutil.which(f"python{version}"),
        *sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")),
    ]
    for path in filter(None, found):
        code = f"import ensurepip, sys, venv; assert sys.version.startswith('{version}.')"
        if subprocess.run([path, "-c", code], capture_output=True).returncode == 0:
            return str(path)
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != HERE])
def test_a_program_runs_on_another_python(version: str, wheel: Path, tmp_path: Path) -> None:
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{wheel}[mpi]"], check=True, timeout=500)
    program = tmp_path / "program.py"
    program.write_text(next(block.text for block in blocks() if block.page == "README.md" and block.output))
    launch = [python.with_name("hpcray-launch"), "-n", "2"]
    for line in ([python], launch):
        done = subprocess.run([*line, program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "285\n"), done.stdout + done.stderr
    doctor = subprocess.run([python.with_name("hpcray"), "doctor"], cwd=tmp_path, capture_output=True, text=True)
    assert "wheel, by pip in a virtual environment" in doctor.stdout, doctor.stdout + doctor.stderr
