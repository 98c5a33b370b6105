"""The wheel with uv: run without an installation, and as a tool that has an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.documents import blocks
from test_recipes import check, tool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_uvx_runs_the_commands_and_a_tool_runs_programs(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uv = tool("uv")
    bin_dir = tmp_path / "bin"
    for name, path in (("UV_TOOL_DIR", tmp_path / "tools"), ("UV_TOOL_BIN_DIR", bin_dir)):
        monkeypatch.setenv(name, str(path))
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def output(*line: object) -> str:
        words = [str(word) for word in line]
        done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    what = ("--python", sys.executable, "--from", f"{wheel}[all]")
    assert output(uv, "tool", "run", *what, "hpcray", "--version").startswith("hpcray ")
    assert "digits" in output(uv, "tool", "run", *what, "hpcray", "copy")
    check(uv, "tool", "install", "--quiet", "--python", sys.executable, f"{wheel}[all]")
    assert {path.name for path in bin_dir.iterdir()} >= {"hpcray", "hpcray-launch"}
    program = tmp_path / "program.py"
    program.write_text(next(block.text for block in blocks() if block.page == "README.md" and block.output))
    assert output(bin_dir / "hpcray-launch", "-n", "2", program) == "285\n"
    doctor = subprocess.run([bin_dir / "hpcray", "doctor"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert "wheel, by uv in a virtual environment" in doctor.stdout, doctor.stdout + doctor.stderr
