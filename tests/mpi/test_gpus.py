"""GPUs on several nodes: made-up ones, so only the environment tells who got which."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job, as_module
from helpers.leaks import LeakCheck
from helpers.scripts import write

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="no mpirun"),
]

ACTORS = """\
import json, os, sys
import hpcray as ray
ray.init()
@ray.remote(num_cpus=0)
class Model:
    def where(self):
        context = ray.get_runtime_context()
        return context.get_node_id(), ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"]
share, count = float(sys.argv[1]), int(sys.argv[2])
models = [Model.options(num_gpus=share).remote() for _ in range(count)]
print("where", json.dumps(ray.get([model.where.remote() for model in models])))
print("total", json.dumps([node["Resources"].get("GPU", 0) for node in ray.nodes()]))
one_more = Model.options(num_gpus=share).remote()
waiting = one_more.where.remote()
print("full", ray.wait([waiting], timeout=0.5)[0] == [])
node, ids, _ = ray.get(models[0].where.remote())
ray.kill(models[0])
print("again", ray.get(waiting)[:2] == [node, ids] or ray.get(waiting)[:2] == (node, ids))
"""


def run(directory: Path, command: list[str], environ: dict[str, str] | None = None) -> dict[str, object]:
    """What the program printed, by its first words."""
    with Job(command, environ) as job:
        ended = job.wait(150)
    assert ended.code == 0, ended.err
    found: dict[str, object] = {}
    for line in ended.out.splitlines():
        name, _, text = line.partition(" ")
        found[name] = {"True": True, "False": False}[text] if text in ("True", "False") else json.loads(text)
    return found


def launched(script: Path, *args: str) -> list[str]:
    """On this host as four nodes with two GPUs each."""
    launch = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--cpus-per-node", "1"]
    return [*launch, "--gpus-per-node", "2", str(script), *args]


def test_eight_actors_on_four_nodes_have_devices_of_their_own(leak_check: LeakCheck, tmp_path: Path) -> None:
    found = run(tmp_path, launched(write(tmp_path, ACTORS), "1", "8"))
    where = found["where"]
    assert isinstance(where, list)
    assert len({(node, *ids) for node, ids, _ in where}) == 8 and len({node for node, _, _ in where}) == 4
    assert all(len(ids) == 1 and visible == str(ids[0]) for _, ids, visible in where)
    assert found["total"] == [2.0] * 4 and found["full"] is True and found["again"] is True


def test_quarters_fill_every_device(leak_check: LeakCheck, tmp_path: Path) -> None:
    found = run(tmp_path, launched(write(tmp_path, ACTORS), "0.25", "32"))
    where = found["where"]
    assert isinstance(where, list)
    held = [(node, *ids) for node, ids, _ in where]
    assert len(set(held)) == 8 and all(held.count(device) == 4 for device in held)
    assert found["full"] is True


def test_ranks_of_a_host_share_what_the_host_was_given(leak_check: LeakCheck, tmp_path: Path) -> None:
    found = run(tmp_path, as_module(2, write(tmp_path, ACTORS), "1", "3"), {"CUDA_VISIBLE_DEVICES": "5,6,7"})
    where = found["where"]
    assert isinstance(where, list)
    assert sorted(visible for _, _, visible in where) == ["5", "6", "7"]
    assert found["total"] == [2.0, 1.0]
