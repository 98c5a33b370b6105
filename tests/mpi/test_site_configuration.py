"""The settings of a site's and a user's file take effect in a job of two nodes: places, launcher, network devices."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers.jobs import Job
from helpers.leaks import LeakCheck

MPIRUN = next(
    (str(path) for path in (Path(sys.executable).with_name("mpirun"),) if path.exists()), shutil.which("mpirun") or ""
)
pytestmark = pytest.mark.skipif(not MPIRUN, reason="no mpirun")

PROGRAM = """\
import json
import os

import numpy as np

import hpcray as ray

ray.init()
kept = [ray.put(np.zeros(5_000_000)) for _ in range(4)]  # 160 MB, in a store of 100
nodes = [node["Resources"]["object_store_memory"] for node in ray.nodes()]
print(json.dumps([nodes, str(ray.checkpoint_dir()), os.listdir("t")]))
"""


def test_files_of_a_site_and_a_user_take_effect(tmp_path: Path, leak_check: LeakCheck) -> None:
    for name in ("t", "spilled", "user/hpcray"):
        (tmp_path / name).mkdir(parents=True)
    mpirun = tmp_path / "sites-mpirun"
    mpirun.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/lines\nexec {MPIRUN} "$@"\n')
    mpirun.chmod(0o755)
    (tmp_path / "site.toml").write_text(
        f"""\
mpirun = "{mpirun}"
tmpdir = "{tmp_path}/t"
spill_dir = "$PLACE/spilled"
checkpoint_dir = "/nowhere"
network_devices = "adapter-of-the-site"
object_store_memory = "50m"
[partitions.gpu]
checkpoint_dir = "$PLACE/checkpoints"
"""
    )
    (tmp_path / "user" / "hpcray" / "config.toml").write_text('object_store_memory = "100m"\n')
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {
        "HPCRAY_CONFIG": f"{tmp_path}/site.toml", "XDG_CONFIG_HOME": f"{tmp_path}/user", "PLACE": str(tmp_path),
        "PBS_QUEUE": "gpu",
    }  # fmt: skip
    removed = [name for name in os.environ if name.startswith(("SLURM_", "UCX_NET", "HPCRAY_TMPDIR"))]
    line = ["env", *(word for name in removed for word in ("-u", name)), "-C", str(tmp_path)]
    with Job([*line, sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "program.py"], environ) as job:
        ended = job.wait(60)
    assert ended.code == 0, ended.err
    stores, checkpoints, in_tmpdir = json.loads(next(line for line in ended.out.splitlines() if line.startswith("[[")))
    assert stores == [100 << 20] * 2, "the user's file comes after the site's"
    assert checkpoints == f"{tmp_path}/checkpoints", "the partition's"
    assert in_tmpdir == [f"hpcray-{os.getuid()}"]
    assert f"objects are spilled to {tmp_path}/spilled" in ended.err
    assert "-m hpcray" in (tmp_path / "lines").read_text()
    if importlib.util.find_spec("ucxx") is not None:  # UCX warns of a device that it does not have
        assert "adapter-of-the-site" in ended.out
