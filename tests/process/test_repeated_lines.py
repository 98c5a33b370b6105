"""RAY_DEDUP_LOGS=1: what several workers of the cluster print alike is shown once, with how often it came."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from helpers.leaks import LeakCheck

PROGRAM = """\
import os, time
import hpcray as ray
from hpcray.compat.cluster_utils import Cluster
cluster = Cluster()
for _ in range({nodes}):
    cluster.add_node(num_cpus=2)
ray.init(cluster.address)

@ray.remote(scheduling_strategy="SPREAD", num_cpus=1)
class A:
    def warn(self, i):
        print(f"step {{i}}: careful")
        print(f"only from {{os.getpid()}} " + "abc"[i])

actors = [A.remote() for _ in range(3)]
for i, actor in enumerate(actors):
    ray.get(actor.warn.remote(i))
ray.shutdown()
cluster.shutdown()
"""


def run(tmp_path: Path, value: str) -> list[str]:
    script = tmp_path / "p.py"
    script.write_text(PROGRAM.format(nodes=2))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": value}
    done = subprocess.run(
        [sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


def test_a_line_that_differs_in_numbers_only_is_shown_once_and_counted(tmp_path: Path, leak_check: LeakCheck) -> None:
    lines = run(tmp_path, "1")
    careful = [line for line in lines if "careful" in line]
    assert len(careful) == 2 and "[repeated 2x across cluster] (Ray deduplicates logs" in careful[1], lines
    assert len([line for line in lines if "only from" in line]) == 3


@pytest.mark.slow
def test_by_default_every_line_is_shown(tmp_path: Path, leak_check: LeakCheck) -> None:
    lines = run(tmp_path, "0")
    assert len([line for line in lines if ": careful" in line]) == 3
