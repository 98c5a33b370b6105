"""`hpcray memory` and `hpcray.internal` on several nodes; the store under churn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job
from helpers.leaks import LeakCheck

SCRIPT = """
import json, os, signal, subprocess, sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

session = ray.init()["session_dir"]
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes()]

def memory(*args):
    command = [sys.executable, "-m", "hpcray.cli", "memory", "--address", session, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)

@ray.remote
class Reader:
    def read(self, refs):
        self.view = ray.get(refs[0])
        return float(self.view.sum())
    def build(self):
        with ray.internal.create(300_000) as buffer:
            buffer.array[:] = 3
            self.mine = buffer.seal()
        return [self.mine]
    def raylet(self):
        template = open(f"/proc/{os.getppid()}/stat").read()
        return int(template.rpartition(")")[2].split()[1])
    def drop(self):
        self.view = None

readers = [Reader.options(scheduling_strategy=one).remote() for one in where]
ref = ray.put(np.ones(1_000_000))
sums = ray.get([reader.read.remote([ref]) for reader in readers[1:]])
(built,) = ray.get(readers[2].build.remote())
total = int(ray.get(built).sum())
shown = memory("--json")
plain = memory().stdout

ray.get([reader.drop.remote() for reader in readers])
ray.internal.free([ref])
def held():
    return sum(node["objects"] for node in need_process().diagnostics.list_stores(0, 60.0))
deadline = time.monotonic() + 60
while (left := held()) > int(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.05)

stopped = ray.get(readers[1].raylet.remote())
os.kill(stopped, signal.SIGSTOP)
try:
    mute = memory("--timeout", "2")
finally:
    os.kill(stopped, signal.SIGCONT)
print(json.dumps({"sums": sums, "total": total, "shown": json.loads(shown.stdout), "plain": plain, "left": left,
                  "mute": [mute.returncode, mute.stdout],
                  "ref": ref.hex(), "built": built.hex()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_memory_of_all_nodes(tmp_path: Path, leak_check: LeakCheck, in_place: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {"HPCRAY_RECORD_REF_CREATION_SITES": "1", "HPCRAY_SAME_HOST": str(int(in_place))}
    with Job(
        [sys.executable, "-m", "hpcray.cli.launch", "-n", "3", str(script), "1" if in_place else "2"], environ
    ) as job:
        ended = job.wait(110)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    assert found["sums"] == [1e6, 1e6] and found["total"] == 900_000
    nodes = found["shown"]["nodes"]
    assert [node["node"] for node in nodes] == [0, 1, 2] and not any(node["problem"] for node in nodes)
    copies = [[obj for obj in node["list"] if obj["id"] == found["ref"]] for node in nodes]
    pins = [[pin.partition(".")[0] for obj in node for pin in sorted(obj["pins"])] for node in copies]
    if in_place:
        assert pins == [["driver 0", "worker 1", "worker 2"], [], []]
    else:
        assert pins == [["driver 0"], ["worker 1"], ["worker 2"]]
    assert [obj["copy"] for node in copies for obj in node] == [False, True, True][: 1 if in_place else 3]
    for obj in (obj for node in copies for obj in node):
        assert obj["owner"].startswith("driver 0.") and obj["refs"] == 1
        assert "script.py:" in obj["site"] and "<module>" in obj["site"]
    (mine,) = [obj for obj in nodes[2]["list"] if obj["id"] == found["built"]]
    assert mine["owner"].startswith("worker 2.") and mine["borrowers"] == 1
    assert "in build" in mine["site"]
    count = 2 if in_place else 5  # the driver reads what a worker has built
    assert found["plain"].count(found["ref"]) == len(copies[0] + copies[1] + copies[2])
    assert f"all 3 nodes: {count} objects" in found["plain"]
    assert found["left"] == (1 if in_place else 2), "what was freed by hand is still there"
    code, said = found["mute"]
    assert code == 1 and "no answer within 2 s" in said and "all 2 nodes" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_store_stays_whole_under_churn(leak_check: LeakCheck, tmp_path: Path) -> None:
    figures = tmp_path / "churn.json"
    script = str(ROOT / "benchmarks" / "churn.py")
    with Job([sys.executable, script, "--objects", "4000", "--json", str(figures)]) as job:
        ended = job.wait(390)
    assert ended.code == 0, ended.out + ended.err
    found = json.loads(figures.read_text())
    assert found["objects"] == 4000 and found["wrong"] == 0
    assert found["held_objects"] == found["held_bytes"] == 0
    assert min(used for used, _, _ in found["utilisation"]) >= 0.9
