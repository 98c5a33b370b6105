"""Ray Serve, lent from Ray's wheel: whole programs, as its guides show them. The same programs run on Ray itself."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.strangers import needs_stranger

for needed in ("fastapi", "uvicorn", "aiohttp", "grpc", "requests", "yaml", "watchfiles"):
    pytest.importorskip(needed)

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def results(program: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Run a program of this directory; what it prints last."""

    def run(name: str) -> dict[str, Any]:
        shown = program(PROGRAMS / f"{name}.py", options=("--num-cpus", "8"))
        found: dict[str, Any] = json.loads([line for line in shown.splitlines() if line.startswith("{")][-1])
        return found

    return run


def test_handles_composition_streams_and_errors(results: Callable[..., Any]) -> None:
    assert results("serve_basics") == {
        "one": 8,
        "many": [2 * (number + 1) for number in range(20)],
        "stream": ["WORD 0", "WORD 1", "WORD 2"],
        "replicas": 2,
        "error": [True, True],
        "reconfigured": 206,
        "cancelled": "RequestCancelledError",
        "told": True,
        "timeout": True,
        "function": "A",
        "apps": {"front": "RUNNING", "shout": "RUNNING"},
        "deployments": ["Adder", "Doubler", "Front"],
        "left": ["front"],
        "after": [[], True],
    }


def test_http(results: Callable[..., Any]) -> None:
    pytest.importorskip("websockets")
    assert results("serve_http") == {
        "routes": {"/api": "api", "/plain": "plain", "/narrow": "narrow"},
        "healthy": "success",
        "missing": 404,
        "written": 1,
        "read": {"item": "a"},
        "invalid": 422,
        "lines": ["0", "1", "2", "3", "4"],
        "echo": ["cba", "ed"],
        "plain": {"method": "POST", "path": "/plain/x", "body": "hello"},
        "failed": 500,
        "nowhere": 404,
        "big": 3_000_000,
        "narrow": [[200, 503], True],
        "closed": True,
    }


def test_batches_multiplexing_and_autoscaling(results: Callable[..., Any]) -> None:
    found = results("serve_batching")
    assert found["squares"] == [number**2 for number in range(20)]
    assert found["largest"] > 1
    assert found["streams"] == [[0], [0, 1, 2], [0, 1]]
    assert found["models"] == ["a: hello", "b: hello", "a: hello", "c: hello"]
    assert (found["up"], found["several"], found["down"]) == (True, True, True)


def test_replicas_and_controller_that_die_are_replaced(results: Callable[..., Any]) -> None:
    assert results("serve_failures") == {
        "replicas": 2,
        "death": True,
        "after death": [2, 1],
        "after sickness": True,
        "controller": "RUNNING",
        "still": 2,
        "by value": 2,
        "broken": True,
        "status": "DEPLOY_FAILED",
    }


def test_ports_are_for_this_user_and_this_job(results: Callable[..., Any]) -> None:
    needs_stranger()
    found = results("serve_ports")
    assert found == {
        "http": ["127.0.0.1"], "everywhere": False, "own": "hello", "stranger": "", "grpc": ["UNAUTHENTICATED"],
    }  # fmt: skip


def test_the_example(program: Callable[..., str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = program(EXAMPLES / "serve_app.py", "--port", str(port), "--requests", "60", options=("--num-cpus", "8"))
    assert re.search(r"60 requests, 40 good, \d+ requests/s over HTTP", shown), shown
