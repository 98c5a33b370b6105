"""Tasks and calls that die with their process count as failed wherever tasks are counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from engine import PATIENCE, eventually, exceptions, ray

from hpcray.state import attached
from hpcray.state.node_metrics import own_metrics

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


@ray.remote(max_retries=0)
def leaves() -> None:
    os._exit(3)


@ray.remote(max_retries=0)
def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@ray.remote
def fine() -> int:
    return 1


@ray.remote(num_cpus=0)
class Actor:
    def leaves(self) -> None:
        os._exit(3)


DIED = {"leaves": 2, "killed": 1, "Actor.leaves": 1}
"""By the end of the name, how often it dies."""


def command(*words: str) -> Any:
    address = ray.init(ignore_reinit_error=True)["address"]
    line = [sys.executable, "-m", "hpcray.cli", *words, "--job", address, "--json"]
    return json.loads(subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout)


def short(name: str) -> str:
    """The name of a function or method, without that of the module or of the test around it."""
    return "Actor.leaves" if name.endswith("Actor.leaves") else name.rpartition(".")[2]


def failed_of_top() -> dict[str, int]:
    return {short(row["name"]): row["failed"] for row in command("top", "--interval", "0.2")["functions"]}


def failed_of_summary() -> dict[str, int]:
    rows = command("summary", "tasks")["summary"].items()
    return {short(name): row["state_counts"].get("FAILED", 0) for name, row in rows}


def failed_of_metrics() -> dict[str, int]:
    with attached(ray.init(ignore_reinit_error=True)["address"]) as process:
        rows = next(row for row in own_metrics(process) if row["name"].endswith("tasks"))
    found = [(dict(map(tuple, tags)), value) for tags, value in rows["samples"]]
    return {short(tags["Name"]): value for tags, value in found if tags["State"] == "FAILED"}


def test_a_task_or_call_that_dies_with_its_process_has_failed_everywhere():
    assert ray.get(fine.remote(), timeout=PATIENCE) == 1
    actor = Actor.remote()
    refs = [leaves.remote(), leaves.remote(), killed.remote(), actor.leaves.remote()]
    for ref in refs:
        with pytest.raises(exceptions.RayError):
            ray.get(ref, timeout=PATIENCE)
    for failed in (failed_of_summary, failed_of_top, failed_of_metrics):

        def agrees(failed=failed) -> bool:
            found = failed()
            return {name: found.get(name) for name in DIED} == DIED and not found.get("fine")

        eventually(agrees, f"{failed.__name__} counts them")


def test_what_died_has_no_time_and_is_counted_once():
    with pytest.raises(exceptions.RayError):
        ray.get(killed.remote(), timeout=PATIENCE)

    def rows() -> list[dict[str, Any]]:
        return [row for row in command("top", "--interval", "0.2")["functions"] if short(row["name"]) == "killed"]

    eventually(lambda: bool(rows()), "it is counted")
    before, after = rows(), rows()
    assert [row["failed"] for row in before] == [row["failed"] for row in after]
    assert all(row["p50"] == row["p99"] == row["seconds"] == 0 and not row["buckets"] for row in after)
