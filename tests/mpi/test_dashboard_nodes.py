"""`hpcray dashboard` beside a program on four nodes: figures of all of them, a node that is lost, a head that moves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.dashboards import Dashboard
from helpers.jobs import Job
from helpers.leaks import LeakCheck
from helpers.scripts import write

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.session_directory import live_sessions

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

PROGRAM = """\
import os, sys, time
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [node["NodeID"] for node in sorted(ray.nodes(), key=lambda node: node["Index"])]


@ray.remote(num_cpus=0, max_retries=0)
def sleeper():
    print("it sleeps", flush=True)
    time.sleep(600)


held = [sleeper.options(scheduling_strategy=On(node, False)).remote() for node in nodes]
print("ready", os.environ["HPCRAY_ADDRESS"], flush=True)
sys.stdin.read()
time.sleep(600)
"""


def eventually(condition: Callable[[], Any], patience: float = 60.0) -> Any:
    deadline = time.monotonic() + patience
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {condition.__name__}"
        time.sleep(0.2)
    return found


@pytest.mark.slow
def test_nodes_are_lost_and_the_head_moves_while_somebody_looks(leak_check: LeakCheck, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--driver-rank", "1", "--cpus-per-node", "2"]
    with Job([*line, str(write(tmp_path, PROGRAM))]) as job:
        ready = job.line().split()
        assert ready[:1] == ["ready"], job.wait().err
        with Dashboard(ready[1]) as board:
            board.enter()

            def four_run() -> bool:
                functions = {one["name"]: one for one in board.ask("functions")["rows"]}
                return functions.get("program.sleeper", functions.get("sleeper", {})).get("running") == 4

            eventually(four_run)
            assert [row["state"] for row in board.ask("nodes", sort="node")["rows"]] == ["alive"] * 4
            assert {one["node"] for one in board.ask("timeline", width=500)["workers"]} == {0, 1, 2, 3}
            assert {one["node"] for one in board.ask("timeline", width=500, nodes="2-3")["workers"]} == {2, 3}
            assert len([one for one in board.ask("tasks")["rows"] if one["state"] == "RUNNING"]) == 4
            eventually(lambda: len(board.ask("logs/search", grep="sleeps")["lines"]) == 4)
            for node in (3, 0):  # a node, then the head
                (info,) = (info for info in live_sessions() if info.node == node)
                os.kill(info.pid, signal.SIGKILL)

                def is_dead(lost: int = node) -> bool:
                    status, _ = board.request("/api/overview", board.key)
                    if status == 503:
                        return False  # the head moves
                    rows = board.ask("nodes", sort="node")["rows"]
                    return str(rows[lost]["state"]).startswith("dead")

                eventually(is_dead)
            found = board.ask("overview")
            assert found["nodes"]["alive"] == 2 and found["nodes"]["dead"] == 2 and found["head"] != 0, found["nodes"]
            assert {one["state"] for one in board.ask("node", node=1)["processes"]}
            assert "node 3" in str(board.ask("slurm")["dead_nodes"]) or board.ask("slurm")["dead_nodes"]
            job.send(signal.SIGTERM)
            ended = board.ended()
            assert ended.code == 0 and "the job has ended" in ended.out and not os.path.exists(board.place)
        job.wait(120)
    leak_check.check()
