"""The questions of docs/how-to/observe.md about examples/five_faults.py on four nodes, each with the commands that
somebody who does not know hpcray would try first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time

import pytest
from helpers.jobs import ROOT, Job, as_module
from helpers.leaks import LeakCheck

pytestmark = pytest.mark.slow


def hpcray(*words: str) -> str:
    """What a command prints, in a pipe."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
    line = [sys.executable, "-m", "hpcray.cli", *words]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_question_is_answered_by_the_first_commands(
    leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    with Job(as_module(4, ROOT / "examples" / "five_faults.py", "--seconds", "60", "--tables", "8")) as job:
        assert job.line() == "ready", job.wait(60)
        deadline = time.monotonic() + 60
        while "node 2 is slow (2" not in (status := hpcray("status")):
            assert time.monotonic() < deadline, status

        # Which function eats the time?
        top = hpcray("top", "--once", "--interval", "0.5")
        functions = top[top.index("function ") :].splitlines()[1:]
        assert functions[0].startswith("align ") and re.search(r"7\d%$", functions[0]), top

        # Why is this task not running?
        for text in (hpcray("why", "solve"), hpcray("why")):
            assert "solve: 3 PENDING_NODE_ASSIGNMENT" in text, text
            assert text.count("can never serve it: licence: 1 wanted, 0 there") == 4, text
        assert "x {CPU: 0.1, licence: 1} for tasks of 1 process, which no node can ever serve" in status

        # Who holds the memory?
        memory = hpcray("memory")
        owners = memory.partition("by owner")[2].splitlines()
        assert re.search(r"64\.0 MiB +8 +worker 1\.\d+ \(actor Cache 'cache', pid \d+\)", owners[2]), memory
        largest = memory.partition("processes with most memory")[2].splitlines()[2]
        assert re.search(r"^node 1 +\d+ +Cache ", largest), memory

        # Which node is slow?
        assert "node 2 is slow (2." in top
        slow = [node["index"] for node in json.loads(hpcray("top", "--json"))["nodes"] if node["slowness"] > 1.5]
        assert slow == [2]

        # What happened to the actor that died?
        assert re.search(r"^actors: 1 ALIVE, 1 DEAD$", status, re.MULTILINE), status
        told = re.search(r"Collector 'collector' died at (\d\d:\d\d:\d\d) on node 3: .*signal 9", status)
        assert told, status
        (row,) = [line for line in hpcray("list", "actors").splitlines() if "Collector" in line]
        assert re.search(rf"collector +DEAD +{told[1]} +node 3 .*signal 9", row), row
        why = hpcray("why", "collector")
        assert f"is DEAD on node 3 since {told[1]}" in why and "hint: hpcray logs --actor" in why, why
        lines = hpcray("logs", "--actor", "collector").splitlines()
        assert lines[-1].endswith("cannot map 96 GiB: giving up"), lines
