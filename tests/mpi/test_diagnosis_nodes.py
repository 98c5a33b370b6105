"""`hpcray stack`, `why`, the state API and the timeline reach every node of a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = pytest.mark.slow

PROGRAM = """\
import json, os, re, subprocess, sys, time
import hpcray as ray
from hpcray.util import state
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [node["NodeID"] for node in sorted(ray.nodes(), key=lambda node: node["Index"])]


@ray.remote(num_cpus=0)
def sleeper(seconds):
    time.sleep(seconds)


@ray.remote(num_cpus=0)
def outer(refs):
    return ray.get(refs)


def cli(*args):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
    command = [sys.executable, "-m", "hpcray.cli", *args, "--address", os.environ["HPCRAY_ADDRESS"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


inner = sleeper.options(scheduling_strategy=On(nodes[2], False)).remote(600)
ref = outer.options(scheduling_strategy=On(nodes[1], False)).remote([inner])
deadline = time.monotonic() + 60
while sorted(row.state for row in state.list_tasks()) != ["RUNNING", "RUNNING"]:
    assert time.monotonic() < deadline
    time.sleep(0.1)
rows = json.loads(cli("stack", "--json"))
runs = {row["node"]: [call["name"] for one in row["processes"] for call in one["calls"]] for row in rows}
assert runs == {0: [], 1: ["outer"], 2: ["sleeper"]}, runs
text = cli("why", ref.hex())
path = r"process 1\\.\\d+ .*runs outer.*\\n.*waits in get.*\\n.*\\n.*process 2\\.\\d+ .* runs sleeper"
assert re.search(path, text), text
assert {row.name: row.node_id for row in state.list_tasks()} == {"outer": nodes[1], "sleeper": nodes[2]}
spans = [event for event in ray.timeline() if event["ph"] == "X"]
assert sorted(event["pid"].split(" (")[0] for event in spans) == ["Node 1", "Node 2"], spans
print("all of it", flush=True)
"""


def test_stack_why_and_list_cover_all_nodes(tmp_path: Path, leak_check: LeakCheck) -> None:
    with Job(as_module(3, write(tmp_path, PROGRAM))) as job:
        ended = job.wait(120)
    assert ended.code == 0 and "all of it" in ended.out, ended.out + ended.err
