"""Ray Serve, lent from Ray's wheel: whole programs, as its guides show them. The same programs run on Ray itself."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.strangers import needs_stranger

from hpcray.compat.finder import LENT

for needed in ("fastapi", "uvicorn", "aiohttp", "grpc", "requests", "yaml", "watchfiles"):
    pytest.importorskip(needed)

yaml = pytest.importorskip("yaml")
PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
hpcray_only = pytest.mark.skipif(os.environ.get("HPCRAY_TEST_ENGINE") == "ray", reason="not so on Ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def results(run: Callable[..., str]) -> Callable[..., dict[str, Any]]:
    """Run a program of this directory; what it prints last."""

    def result(name: str) -> dict[str, Any]:
        shown = run(PROGRAMS / f"{name}.py", options=("--num-cpus", "8"))
        found: dict[str, Any] = json.loads([line for line in shown.splitlines() if line.startswith("{")][-1])
        return found

    return result


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


def test_fastapi(results: Callable[..., Any]) -> None:
    tea = {"name": "tea", "price": 2.5, "tags": ["hot"]}
    assert results("serve_fastapi") == {
        "made": [201, tea, "/shop/items"],
        "bad": [422, ["float_parsing", "string_too_short"]],
        "list": {"names": ["tea", "ice/cream"], "currency": "EUR", "noted": ["nobody tea", "ann ice/cream"]},
        "tagged": ["tea"],
        "one": ["ice/cream", '"ice/cream"'],
        "none": {"detail": "no x"},
        "odd": [418, {"odd": "odd"}],
        "thief": 401,
        "free": {"who": "nobody"},
        "started": {"started": "before the first request", "root": "/shop"},
        "redirected": "pong",
        "method": 405,
        "openapi": ["/free", "/items", "/items/{name}", "/old", "/started", "/v2/ping"],
        "docs": 200,
        "asgi": "hi you",
        "built": 7,
        "id": "mine",
        "unknown": 404,
    }


def test_grpc(results: Callable[..., Any]) -> None:
    pytest.importorskip("grpc_reflection")
    assert results("serve_grpc") == {
        "healthy": "success",
        "applications": ["greeter", "stand"],
        "call": ["Hello Ann from here", 6, "mine"],
        "method1": ["method 1: Ann", "Ann"],
        "no name": ["INVALID_ARGUMENT", "who?", []],
        "method2": "model m7",
        "failed": ["INTERNAL", "RuntimeError: as asked", []],
        "stream": ["0: Ann", "1: Ann", "2: Ann"],
        "to": "ab cd ef",
        "both": ["ba", "dc", "fe"],
        "nowhere": ["NOT_FOUND", "Applications for available applications.", []],
        "which": ["NOT_FOUND"],
        "fruit": 32.0,
    }


def test_handles_and_contexts(results: Callable[..., Any]) -> None:
    assert results("serve_handles") == {
        "local": [8, [0, 1, 4]],
        "handle": [15, 18],
        "names": ["Renamed", "worker"],
        "context": {"app": "worker", "deployment": "Renamed", "same": True, "rank": 0, "size": 1, "colour": "blue"},
        "by name": 3,
        "other": "hello replica",
        "large": [1000000.0, 500000],
        "ref": 1000000.0,
        "error": ["RayTaskError", "LookupError: deep"],
        "no method": ["RayTaskError(RayServeException)"],
        "no app": ["RayServeException", "Application 'none' does not exist."],
        "stream": [True, []],
        "chain": [{"a": 60, "b": 120}, [0, 2, 4]],
        "deployments": ["A", "B", "Chain", "Worker"],
        "cancelled": ["RequestCancelledError"],
        "nested": ["cancelled"],
        "freed": "through",
        "full": "BackPressureError",
        "through": ["through", "through", "through"],
        "timeout": ["GetTimeoutError"],
        "loop": [0, 3, 6, 9, 12, 0, 1, 4, "timeout"],
        "deleted": "DeploymentUnavailableError",
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


def test_updates_ends_and_failures(results: Callable[..., Any]) -> None:
    assert results("serve_lifecycle") == {
        "update": [[1, 2], []],
        "ended": True,
        "reconfigured": [[2, 20], []],
        "three": [True, [[20], []]],
        "one": [True, [[20], []]],
        "in flight": [[20, 20, 20], True],
        "raise": True,
        "raise status": ["DEPLOY_FAILED", True],
        "exit": True,
        "exit status": ["DEPLOY_FAILED", False],
        "logged": [["logs_Logging", "logs", "DEBUG", "body", "debugged this"], True, "serve"],
        "zero": 0,
        "woken": "woken",
        "asleep": True,
    }


@hpcray_only
def test_ports_are_for_this_user_and_this_job(results: Callable[..., Any]) -> None:
    needs_stranger()
    found = results("serve_ports")
    assert found == {
        "http": ["127.0.0.1"], "everywhere": False, "own": "hello", "stranger": "", "grpc": ["UNAUTHENTICATED"],
        "proxy": [["::ffff:127.0.0.1"], "PERMISSION_DENIED", "OK"],
    }  # fmt: skip


@hpcray_only
def test_http_at_a_unix_socket_and_with_a_token(results: Callable[..., Any]) -> None:
    for needed in ("httpx", "websockets"):
        pytest.importorskip(needed)
    needs_stranger()
    found = results("serve_private")
    assert found["unix"] == {
        "healthy": "success", "size": 1000, "missing": 404, "quick": True, "echo": "cba", "modes": ["0o600", "0o700"],
        "stranger": "ConnectError", "stranger inside": "closed", "port": False, "status": True,
        "closed": "ConnectError", "again": "success",
    }  # fmt: skip
    assert found["token"] == {
        "name": "X-Serve-Token", "long": 64, "mode": "0o600", "none": 401, "wrong": 401, "short": 401, "empty": 401,
        "odd": 401, "right": 200, "bearer": 200, "the application's": 200, "stranger": [401, 200], "echo": "cba",
        "status": [True],
    }  # fmt: skip
    assert found["plain"] == [True, True]
    assert not os.path.exists(found["session"])


@hpcray_only
def test_the_command_line_of_serve_is_a_command_of_hpcray(libraries: str, tmp_path: Path) -> None:
    made = tmp_path / "serve.yaml"
    command = [sys.executable, "-m", "hpcray.cli", "serve", "build", "serve_text:app", "--app-dir", str(PROGRAMS)]
    subprocess.run([*command, "-o", str(made)], env={**os.environ, LENT: libraries}, timeout=300, check=True)
    config = yaml.safe_load(made.read_text())
    assert config["http_options"]["host"] == "127.0.0.1"
    assert [one["name"] for one in config["applications"][0]["deployments"]] == ["Reverser", "Ingress"]


def test_the_example(run: Callable[..., str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = run(EXAMPLES / "serve_app.py", "--port", str(port), "--requests", "60", options=("--num-cpus", "8"))
    assert re.search(r"60 requests, 40 good, \d+ requests/s over HTTP", shown), shown
