"""`--version` and completion of `hpcray` and `hpcray-launch`; sizes in their options."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT

from hpcray import __version__
from hpcray.cli.launch import parse_options
from hpcray.runtime.node.options import NodeOptions

COMMANDS = {"hpcray": "hpcray.cli", "hpcray-launch": "hpcray.cli.launch"}


def run(module: str, *args: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", module, *args], capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, **environ},
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_version_names_the_program(command: str) -> None:
    assert run(COMMANDS[command], "--version") == f"{command} {__version__}\n"


def test_completion_of_hpcray_launch_offers_its_options() -> None:
    environ = {"_HPCRAY_LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "hpcray-launch --object", "COMP_CWORD": "1"}
    assert run("hpcray.cli.launch", **environ).split() == ["plain,--object-store-memory", "plain,--object-store"]


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
@pytest.mark.parametrize(
    ("command", "typed", "offered"), [("hpcray", "sta", "stack status"), ("hpcray-launch", "--prog", "--progress")]
)
def test_the_documented_line_makes_bash_complete(tmp_path: Path, command: str, typed: str, offered: str) -> None:
    script = tmp_path / command
    module = {"hpcray": "hpcray.cli.__main__"}.get(command, COMMANDS[command])
    script.write_text(f"#!{sys.executable}\nfrom {module} import main\nmain()\n")
    script.chmod(0o755)
    (line,) = re.findall(rf'^eval "\$\(\S+ {command}\)"$', (ROOT / "docs/how-to/observe.md").read_text(), re.MULTILINE)
    asks = f"COMP_WORDS=({command} {typed}); COMP_CWORD=1; $(complete -p {command} | sed 's/.*-F //') {command}"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f'{line}; {asks}; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, timeout=60,
        env=environ, check=False,
    )  # fmt: skip
    assert done.stdout.split() == offered.split(), done.stderr


def test_hpcray_launch_passes_on_what_each_node_offers() -> None:
    node = parse_options(["--memory", "16g", "--resources", '{"licence": 1}', "--labels", "disk=fast", "p.py"]).node
    assert (node.memory, node.resources, node.config["labels"]) == (16 << 30, {"licence": 1}, "disk=fast")
    assert NodeOptions.from_argv(node.to_argv()) == node


@pytest.mark.parametrize("option", ["--object-store", "--object-store-memory"])
def test_hpcray_launch_takes_sizes(option: str) -> None:
    assert parse_options([option, "2g", "p.py"]).node.config["object_store_memory"] == 2 << 30


def test_a_node_takes_sizes() -> None:
    assert NodeOptions.from_argv(["--memory", "0", "p.py"]).memory == 0
    options = NodeOptions.from_argv(["--memory", "16g", "--object-store-memory", "512m", "p.py"])
    assert options.memory == 16 << 30 and options.config["object_store_memory"] == 512 << 20
    assert NodeOptions.from_argv(options.to_argv()) == options
