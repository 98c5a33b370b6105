"""`hpcray dashboard` typed on the login host: it runs on the job's first node, and says where."""

from __future__ import annotations

import json

import pytest
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
            assert (slurm.tmp(host) / place.removeprefix("/tmp/")).exists()
            board.press("\x03")
            assert board.ends() == 0
            assert not (slurm.tmp(host) / place.removeprefix("/tmp/")).exists()
        slurm.said("scancel", job)
        program.wait()
    slurm.check()
