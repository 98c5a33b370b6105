"""What a user has on his own machine, of a job here: the dashboard through `ssh -L`, `hpcray top` in its terminal."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import eventually, hpcray_only, ray
from helpers.dashboards import Dashboard
from helpers.jobs import ROOT
from helpers.ssh import SshServer
from helpers.terminal import Terminal

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


@ray.remote
def quick(number):
    return number


def address() -> str:
    return ray.init(ignore_reinit_error=True)["address"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(tmp_path) as server:
        yield server


def overview(port: int, key: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("localhost", port, timeout=30)
    try:
        connection.request("GET", "/api/overview", headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("options", [(), ("--port", "0")], ids=["unix socket", "port"])
def test_the_printed_line_for_ssh_leads_to_the_dashboard(server: SshServer, options: tuple[str, ...]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    ray.get([quick.remote(number) for number in range(20)])
    with Dashboard(address(), *options) as board:
        key = board.enter()
        line = next(line for line in board.printed if "ssh -N" in line)
        found = re.search(r"ssh (-N -L )(\d+):(\S+) (\S+)", line)
        assert found and found[4] == socket.gethostname()
        with socket.socket() as free:  # the other end is on this machine, too, where the port is taken or may be
            free.bind(("127.0.0.1", 0))
            local = free.getsockname()[1]
        command = ["ssh", *server.options, "-N", "-L", f"{local}:{found[3]}", "127.0.0.1"]
        tunnel = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        try:
            status, answer = eventually(lambda: reached(local, key))
            assert status == 200 and json.loads(answer)["functions"][0]["name"] == "quick"
            assert overview(local, "wrong")[0] in (401, 403)
        finally:
            tunnel.terminate()
            tunnel.wait(30)


def reached(port: int, key: str) -> tuple[int, bytes] | None:
    try:
        return overview(port, key)
    except OSError:
        return None


def test_top_runs_in_a_terminal_of_80_columns_over_ssh(server: SshServer) -> None:
    pytest.importorskip("textual")
    ray.get([quick.remote(number) for number in range(300)])
    top = shlex.join([sys.executable, "-m", "hpcray.cli", "top", "--interval", "0.5", "--job", address()])
    command = ["ssh", "-tt", *server.options, "127.0.0.1", f"PYTHONPATH={shlex.quote(str(ROOT))} {top}"]
    with Terminal(command) as terminal:
        text = terminal.shows("quick", "ended", "q Quit")
        assert max(map(len, text.splitlines())) <= 80
        terminal.press("a")
        terminal.shows("0 of them alive")
        terminal.press("\x1b")
        terminal.shows("functions by total time")
        terminal.press("q")
        assert terminal.ends() == 0
        assert terminal.left_alternate_screen
