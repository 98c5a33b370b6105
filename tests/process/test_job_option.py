"""The option --job: two jobs on this machine, and the commands that look at one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import PATIENCE

PROGRAM = """
import os, sys
import hpcray as ray
ray.init(address="local", num_cpus=int(sys.argv[1]), log_to_driver=False)
print(os.environ["HPCRAY_SESSION"], ray.get_runtime_context().get_node_id(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A place of its own for sessions; no job is named."""
    own = {**os.environ, "HPCRAY_TMPDIR": str(tmp_path_factory.mktemp("s")), "COLUMNS": "200"}
    for name in ("HPCRAY_ADDRESS", "HPCRAY_SESSION", "RAY_ADDRESS", "SLURM_JOB_ID"):
        own.pop(name, None)
    return own


@pytest.fixture
def programs(environ: dict[str, str], tmp_path: Path) -> Iterator[list[tuple[str, str, int]]]:
    """Two programs with a job each: session directory, node id and pid."""
    path = tmp_path / "holds_a_job.py"
    path.write_text(PROGRAM)
    started = [
        subprocess.Popen(
            [sys.executable, str(path), cpus], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for cpus in ("1", "2")
    ]
    found = []
    for one in started:
        assert one.stdout is not None
        address, node = one.stdout.readline().split()
        found.append((address, node, one.pid))
    yield found
    for one in started:
        one.communicate(timeout=PATIENCE)
    assert os.listdir(environ["HPCRAY_TMPDIR"]) == []


def hpcray(environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell of its own, which is in no job."""
    command = [sys.executable, "-m", "hpcray.cli", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_command_never_guesses_between_two_jobs(environ: dict[str, str], programs) -> None:
    unclear = hpcray(environ, "status")
    assert unclear.returncode == 2 and unclear.stdout == ""
    assert all(address in unclear.stderr for address, _, _ in programs) and "hint: name one: --job" in unclear.stderr
    for words in (["init", "address='auto'"], ["init", "address='auto'", "num_cpus=None"]):
        code = f"import hpcray; hpcray.{words[0]}({', '.join(words[1:])})"
        joined = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
        assert joined.returncode == 1
        assert "2 jobs of this user run on this machine" in joined.stderr
    for address, node, pid in programs:
        seen = json.loads(hpcray(environ, "status", "--json", "--job", address).stdout)
        assert [row["NodeID"] for row in seen["nodes"]] == [node]
        own = hpcray({**environ, "HPCRAY_SESSION": address}, "status", "--json")
        assert [row["NodeID"] for row in json.loads(own.stdout)["nodes"]] == [node]
        rows = {row["session"]: row for row in json.loads(hpcray(environ, "jobs", "--json").stdout)}
        assert rows[address]["driver"] == pid and rows[address]["name"] == "holds_a_job.py"
        named = hpcray(environ, "status", "--json", "--job", rows[address]["job_id"])
        assert [row["NodeID"] for row in json.loads(named.stdout)["nodes"]] == [node]
    (listed,) = json.loads(hpcray(environ, "list", "jobs", "--json", "--job", programs[0][0]).stdout)
    assert "holds_a_job.py" in listed["entrypoint"] and listed["status"] == "RUNNING", "log_to_driver does not matter"
    table = hpcray(environ, "jobs").stdout
    assert table.count("holds_a_job.py") >= 2 and str(programs[0][2]) in table
    missing = hpcray(environ, "memory", "--job", "0123456789abcdef")
    assert missing.returncode == 1 and "no job '0123456789abcdef'" in missing.stderr
