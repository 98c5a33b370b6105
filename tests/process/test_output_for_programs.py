"""What commands print for programs: with `--json` one value, or one a line, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine import PATIENCE, eventually, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


@ray.remote
def talks(number: int) -> int:
    print("number", number)
    print("complaint", number, file=sys.stderr)
    return number


@ray.remote
def writes() -> int:
    print("written")
    return os.getpid()


def line(*words: str) -> list[str]:
    address = ray.init(ignore_reinit_error=True)["address"]
    return [sys.executable, "-m", "hpcray.cli", words[0], "--job", address, *words[1:]]


def values(words: list[str]) -> list[Any]:
    """The values that a command prints; its standard output has nothing else."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    if words[3] == "logs" or "--pid" in words:  # a stream
        return [json.loads(text) for text in done.stdout.splitlines()]
    return [json.loads(done.stdout)]


@pytest.mark.parametrize(
    "words",
    [
        ["status"], ["memory"], ["metrics"], ["stack"], ["why"], ["list", "tasks"], ["summary", "tasks"], ["topology"],
        ["top", "--interval", "0.2"], ["timeline"], ["profile", "--seconds", "0.2"], ["debug"],
        ["worker-logs", "*"], ["nodes", "remove", "--idle"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_each_command_about_a_job_prints_json_and_nothing_else(words: list[str]) -> None:
    assert ray.get(talks.remote(1), timeout=PATIENCE) == 1
    if words[0] == "nodes":
        address = ray.init(ignore_reinit_error=True)["address"]
        assert values([*line("nodes")[:3], *words, "--job", address, "--json"]) == [[]]
        return
    (found,) = values([*line(*words), "--json"])
    if words[0] == "timeline":
        assert any(row["name"].endswith("talks") for row in found)
    if words[0] == "metrics":
        assert {"name", "type", "labels", "value"} == set(found[0])


def test_a_log_file_is_a_stream_of_lines() -> None:
    pid = ray.get(writes.remote(), timeout=PATIENCE)

    def seen() -> bool:
        return {"text": "written"} in values([*line("worker-logs", "--pid", str(pid)), "--json"])

    eventually(seen, "the line is there")


def test_lines_of_workers_are_records_of_both_streams() -> None:
    assert ray.get(talks.remote(41), timeout=PATIENCE) == 41

    def seen() -> bool:
        rows = values([*line("logs"), "--json"])
        texts = {(row["text"], row["stream"]) for row in rows}
        assert all({"text", "stream", "who", "pid", "node", "file"} == set(row) for row in rows)
        return {("number 41", "out"), ("complaint 41", "err")} <= texts

    eventually(seen, "the lines are there")


def test_progress_prints_records_on_standard_output() -> None:
    assert ray.get([talks.remote(one) for one in range(3)], timeout=PATIENCE) == [0, 1, 2]
    words = [*line("progress"), "--json", "--interval", "0.2"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    first = json.loads(child.stdout.readline())
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=PATIENCE)
    assert first["done"] >= 3 and first["failed"] == 0 and first["lost"] == 0
    (of_function,) = [one for one in first["functions"] if one["name"].endswith("talks")]
    assert of_function["done"] >= 3
    assert all(json.loads(text)["time"] >= first["time"] for text in out.splitlines())
    assert "done" not in err


def test_a_timeline_goes_to_its_file_too(tmp_path: Path) -> None:
    assert ray.get(talks.remote(1), timeout=PATIENCE) == 1
    file = tmp_path / "out.json"
    (shown,) = values([*line("timeline", str(file)), "--json"])
    assert json.loads(file.read_text()) == shown
    done = subprocess.run(line("timeline"), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2 and "hint: hpcray timeline out.json" in done.stderr
