"""The variables by which what a program starts finds the program's job, and not another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine import PATIENCE

NAMES = ("HPCRAY_SESSION", "HPCRAY_ADDRESS")
# A shell that the program or one of its tasks starts: which job does a command see there, which one does init() join?
LOOK = """
import json, os, subprocess, sys
import hpcray as ray

def job():
    return ray.get_runtime_context().get_node_id()

def variables():
    return {name: os.environ.get(name) for name in ("HPCRAY_SESSION", "HPCRAY_ADDRESS")}

def command():
    words = [sys.executable, "-m", "hpcray.cli", "status", "--json"]
    done = subprocess.run(words, capture_output=True, text=True)
    return json.loads(done.stdout)["nodes"][0]["NodeID"] if not done.returncode else done.stderr

def child_init():
    code = "import hpcray as r; r.init(num_cpus=1); print(r.get_runtime_context().get_node_id())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip()

"""
INNER = """
before = variables()
ray.init(ADDRESS)
own, within = job(), variables()
found = {"before": before, "within": within, "own": own, "command": command(), "child": child_init()}
found["task"] = ray.get(ray.remote(num_cpus=1)(lambda: (command(), child_init())).remote())
ray.shutdown()
found["after"] = variables()
if before["HPCRAY_ADDRESS"]:
    ray.init()
    found["again"] = job()
print(json.dumps(found))
"""
HOLDER = """
import os, sys
import hpcray as ray
ray.init("local", num_cpus=1)
print(os.environ["HPCRAY_SESSION"], ray.get_runtime_context().get_node_id(), flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.usefixtures("leak_check")


def run(directory: Path, address: str | None, **variables: str) -> dict[str, object]:
    """Run a program that joins or starts a job, and return what it and its children have seen."""
    program = directory / "program.py"
    program.write_text(LOOK + INNER.replace("ADDRESS", repr(address), 1))
    clean = {name: text for name, text in os.environ.items() if name not in (*NAMES, "RAY_ADDRESS")}
    done = subprocess.run(
        [sys.executable, str(program)], env={**clean, **variables}, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    assert found["after"] == found["before"] == {name: variables.get(name) for name in NAMES}
    return found


def test_children_look_at_the_programs_own_job_and_start_their_own(tmp_path: Path) -> None:
    found = run(tmp_path, None)
    assert found["within"]["HPCRAY_SESSION"] and found["within"]["HPCRAY_ADDRESS"] is None
    assert found["command"] == found["task"][0] == found["own"]
    assert len({found["own"], found["child"], found["task"][1]}) == 3 and found["child"]  # as in Ray


def test_an_outer_job_is_hidden_until_shutdown(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    outer, node = holder.stdout.readline().split()
    try:
        nested = run(tmp_path, "local", HPCRAY_ADDRESS=outer, HPCRAY_SESSION=outer)
        assert nested["own"] != node and nested["within"]["HPCRAY_SESSION"] != outer
        assert nested["within"]["HPCRAY_ADDRESS"] == outer  # what init() of a child joins, as with RAY_ADDRESS in Ray
        assert nested["command"] == nested["own"] and nested["child"] == nested["again"] == node
        assert nested["task"] == [nested["own"], node]
        attached = run(tmp_path, outer, HPCRAY_SESSION="/of/another/job")
        assert attached["within"] == {"HPCRAY_SESSION": outer, "HPCRAY_ADDRESS": None}
        assert attached["own"] == attached["command"] == attached["task"][0] == node
    finally:
        holder.communicate(timeout=PATIENCE)
