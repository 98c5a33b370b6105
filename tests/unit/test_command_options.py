"""`--version` and completion of `hpcray` and `hpcray-launch`; sizes in their options."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
def test_version(command: str) -> None:
    assert run(COMMANDS[command], "--version").strip() == __version__


def test_completion_of_hpcray_launch_offers_its_options() -> None:
    environ = {"_HPCRAY_LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "hpcray-launch --object", "COMP_CWORD": "1"}
    assert run("hpcray.cli.launch", **environ).split() == ["plain,--object-store-memory", "plain,--object-store"]


@pytest.mark.parametrize("option", ["--object-store", "--object-store-memory"])
def test_hpcray_launch_takes_sizes(option: str) -> None:
    assert parse_options([option, "2g", "p.py"]).node.config["object_store_memory"] == 2 << 30


def test_a_node_takes_sizes() -> None:
    assert NodeOptions.from_argv(["--memory", "0", "p.py"]).memory == 0
    options = NodeOptions.from_argv(["--memory", "16g", "--object-store-memory", "512m", "p.py"])
    assert options.memory == 16 << 30 and options.config["object_store_memory"] == 512 << 20
    assert NodeOptions.from_argv(options.to_argv()) == options
