"""Binding, from end to end: a node that takes this machine for one with two NUMA nodes, a core each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck
from helpers.machines import machine

pytestmark = pytest.mark.skipif(not {0, 1} <= os.sched_getaffinity(0), reason="cores 0 and 1 are not ours")

RANK = """\
import sys
from pathlib import Path
from hpcray.platform import numa_binding
numa_binding.ROOT = Path(sys.argv.pop(1))
from hpcray.__main__ import main
main()
"""
PROGRAM = """\
import os
import hpcray as ray
ray.init()

@ray.remote(num_cpus=0, num_gpus=1)
class Model:
    def look(self):
        return ray.get_gpu_ids()[0], sorted(os.sched_getaffinity(0))

def cores():
    return sorted(os.sched_getaffinity(0))

models = [Model.remote() for _ in range(4)]
print(sorted(ray.get([model.look.remote() for model in models])))
for model in models:
    ray.kill(model)
near = ray.remote(num_gpus=1)(cores)
print(len(ray.get(near.remote())), ray.get(near.options(num_cpus=2).remote()), len(ray.get(near.remote())))
print(ray.get(ray.remote(cores).remote()), cores())
"""


def job(tmp_path: Path, environ: dict[str, str]) -> list[str]:
    machine(tmp_path / "machine", cores=("0", "1"))
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-c", RANK, str(tmp_path / "machine"), "--num-gpus", "4", "--num-cpus", "2", str(script)]
    with Job(command, environ) as started:
        ended = started.wait()
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


def test_workers_with_gpus_run_where_these_are(leak_check: LeakCheck, tmp_path: Path) -> None:
    models, tasks, others = job(tmp_path, {})
    assert models == "[(0, [0]), (1, [0]), (2, [1]), (3, [1])]"
    assert tasks == "1 [0, 1] 1", "a task with two CPUs has two cores, and the next one of its worker is near again"
    assert others == "[0, 1] [0, 1]", "other workers and the program have the cores of the rank"


def test_it_can_be_switched_off(leak_check: LeakCheck, tmp_path: Path) -> None:
    models, tasks, _ = job(tmp_path, {"HPCRAY_BIND": "0"})
    assert models == "[(0, [0, 1]), (1, [0, 1]), (2, [0, 1]), (3, [0, 1])]"
    assert tasks == "2 [0, 1] 2"
