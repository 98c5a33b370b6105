"""`hpcray dashboard` typed on the login host: it runs on the job's first node, and says where."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest
from helpers.browser import Visit, chromium, picture
from helpers.slurm import LOGIN, SRUN, Slurm
from helpers.terminal import Terminal

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

PROGRAM = """\
import time
import hpcray as ray

ray.init()
print("ready", flush=True)
time.sleep(600)
"""

# What a browser at the end of the tunnel does: the token for a key, then questions.
CLIENT = """\
import http.client, json, socket, sys

def ask(method, path, bearer):
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(sys.argv[1])
    connection.request(method, path, headers={"Authorization": "Bearer " + bearer})
    answer = connection.getresponse()
    assert answer.status == 200, (path, answer.status, answer.read())
    return json.loads(answer.read())

key = ask("POST", "/api/enter", sys.argv[2])["key"]
print(json.dumps([ask("GET", "/api/" + path, key) for path in ("about", "overview", "slurm")]))
"""


def look_at_slurm(path: str, token: str, job: str) -> None:
    """The page about Slurm in a browser at the end of a tunnel to the dashboard's socket."""
    with tunnel(path) as port, chromium() as browser:
        seen = Visit(browser, f"http://localhost:{port}/", token, color_scheme="light")
        seen.page.keyboard.press("s")
        seen.sees("JobState", "RUNNING", "Nodes by Slurm", "TimeLimit", re.compile(r"in 2\d:\d\d|in 30:00"))
        assert seen.page.get_by_role("cell", name="n2", exact=True).count() == 1
        assert seen.page.get_by_text(job, exact=True).count() >= 1
        picture(seen.page, "dashboard-slurm")
        said = seen.page.locator("main").inner_text()
        assert re.search(r"drains\n\S+ \S+, in \d+:\d\d\n", said) and "requeued\n0 times" in said, said
        assert not seen.complaints, seen.complaints


@contextlib.contextmanager
def tunnel(path: str) -> Iterator[int]:
    """A TCP port of this machine whose connections lead to a Unix socket, as `ssh -L` makes one."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as far:
                far.connect(path)
                back = threading.Thread(target=copy, args=(far, self.request), daemon=True)
                back.start()
                copy(self.request, far)
                back.join()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


def copy(source: socket.socket, target: socket.socket) -> None:
    """Pass bytes on until the end of `source`."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_the_dashboard_runs_on_the_jobs_first_node(slurm: Slurm) -> None:
    with slurm.start(*SRUN, "-N2", "-t", "30", "-J", "seen", "python", "-m", "hpcray", slurm.write(PROGRAM)) as program:
        assert program.line() == "ready", program.wait()
        job = slurm.said("squeue", "-h", "-n", "seen", "-o", "%A")
        client = slurm.write(CLIENT, "client.py")
        words = [slurm.python, "-m", "hpcray.cli", "dashboard", "--job", job]
        line = slurm.cluster.command(LOGIN, words, "root", str(slurm.place))
        with Terminal(line, slurm.environ(), width=200) as board:
            shown = board.shows("ssh -N -L", "LOGIN_NODE", "#token=").splitlines()
            tunnel = next(line for line in shown if "ssh -N -L" in line).split()
            place, host = tunnel[-2].partition(":")[2], tunnel[-1]
            token = next(line for line in shown if "#token=" in line).partition("#token=")[2].strip()
            assert host == "n1" and place.endswith("/dashboard.s"), shown
            said = slurm.said("python", client, place, token, host=host)
            about, overview, state = json.loads(said)
            assert about["job"] == job and overview["nodes"]["alive"] == 2 and overview["left"] > 60
            assert dict(state["fields"])["JobState"] == "RUNNING" and not state["problem"]
            assert [node["name"] for node in state["nodes"]] == ["n1", "n2"]
            there = slurm.tmp(host) / place.removeprefix("/tmp/")
            assert there.exists()
            if shutil.which("chromium") and importlib.util.find_spec("playwright"):
                board.shows("#token=")
                while len(tokens := re.findall(r"#token=(\S+)", board.printed)) < 2:  # the first one was used
                    assert board.read()
                look_at_slurm(str(there), tokens[-1], job)
            board.press("\x03")
            assert board.ends() == 0
            assert not (slurm.tmp(host) / place.removeprefix("/tmp/")).exists()
        slurm.said("scancel", job)
        program.wait()
    slurm.check()
