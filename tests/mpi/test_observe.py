"""The commands that look at a job, beside a program on four ranks: figures of all nodes, and metrics of each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.jobs import MPIRUN, Job
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = pytest.mark.slow

PROGRAM = """\
import glob, json, os, subprocess, sys, time
import numpy as np
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()
nodes = [node["NodeID"] for node in sorted(ray.nodes(), key=lambda node: node["Index"])]


@ray.remote(num_cpus=0)
def work(number):
    print("working on", number)
    return np.zeros(1 << 17)


@ray.remote(num_cpus=0)
def sleeper():
    time.sleep(600)


def cli(*args):
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
    command = [sys.executable, "-m", "hpcray.cli", *args, "--job", os.environ["HPCRAY_ADDRESS"]]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


blocks = [work.options(scheduling_strategy=On(node, False)).remote(i) for node in nodes for i in range(5)]
assert len(ray.wait(blocks, num_returns=20, timeout=60)[0]) == 20
sleepers = [sleeper.options(scheduling_strategy=On(node, False)).remote() for node in nodes]
use = {}
deadline = time.monotonic() + 60
while {row["name"]: row["running"] for row in use.get("functions", ())}.get("sleeper") != 4:
    assert time.monotonic() < deadline, use
    use = json.loads(cli("top", "--json", "--interval", "0.5"))
assert [node["index"] for node in use["nodes"]] == [0, 1, 2, 3] and not any(node["problem"] for node in use["nodes"])
assert all(node["store"]["used"] >= 5 << 20 for node in use["nodes"]), use["nodes"]
assert [node["latency"] is None for node in use["nodes"]] == [True, False, False, False]
work_row = next(row for row in use["functions"] if row["name"] == "work")
assert (work_row["ended"], work_row["failed"]) == (20, 0) and work_row["p50"] > 0, work_row
text = cli("top", "--once", "--interval", "0.5")
assert "sleeper" in text and "node 3" in text, text
before = json.loads(cli("status", "--json"))["stores"]
extra = ray.put(np.zeros(1 << 20))
after = json.loads(cli("status", "--json"))["stores"]
assert after["0"]["used"] - before["0"]["used"] >= 8 << 20, (before, after)
assert "node 2" in cli("status")
mine = cli("metrics")
assert 'ray_tasks{Name="work"' in mine and "ray_object_store_used_memory" in mine, mine
sent = [line for line in mine.splitlines() if "ray_wire_bytes_total" in line and 'Sent",Wire="control"' in line]
assert float(sent[0].split()[-1]) > 1000, sent
assert cli("metrics", "--openmetrics").endswith("# EOF\\n")
directory = os.environ["HPCRAY_METRICS_EXPORT"]
files = []
while len(files) < 4:
    assert time.monotonic() < deadline
    files = glob.glob(directory + "/hpcray-*.prom")
    time.sleep(0.1)
texts = [open(path).read() for path in files]
assert all("ray_node_cpu_count" in text for text in texts) and len({t.split('NodeId="')[1][:56] for t in texts}) == 4
assert all(os.stat(path).st_mode & 0o777 == 0o644 for path in files)
print("all of it", flush=True)
"""


def test_figures_and_metrics_of_four_nodes(
    tmp_path: Path, leak_check: LeakCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    monkeypatch.setenv("HPCRAY_METRICS_EXPORT", str(metrics))
    script = [sys.executable, "-m", "hpcray", "--log-dir", str(tmp_path / "logs"), str(write(tmp_path, PROGRAM))]
    with Job([*MPIRUN, "-n", "4", *script]) as job:
        ended = job.wait(180)
    assert ended.code == 0 and "all of it" in ended.out, ended.out + ended.err
    assert not list(metrics.iterdir()), "the files are gone with the job"
    for node in range(4):
        files = sorted((tmp_path / "logs" / f"node-{node}").glob("worker-*.out"))
        told = "".join(file.read_text() for file in files)
        assert all(f"working on {number}\n" in told for number in range(5)), (node, files)
