"""The benchmarks of the wires and of the disk run, and measure what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job
from helpers.leaks import LeakCheck

OSU = str(ROOT / "benchmarks" / "osu" / "run.py")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_osu_measures_every_row_on_both_planes(tmp_path: Path, leak_check: LeakCheck) -> None:
    figures, picture = tmp_path / "osu.json", tmp_path / "osu.png"
    flags = ["--quick", "--max", "4096", "--json", str(figures), "--picture", str(picture)]
    with Job([sys.executable, OSU, *flags]) as job:
        ended = job.wait(390)
    found = json.loads(figures.read_text())
    for row in ("latency", "fetch", "bw", "bibw", "mbw_mr"):
        columns = {"control", "data (ucx)", "data (mpi)", "objects (ucx)", "objects (mpi)", "mpi4py"}
        columns |= {"objects (same host)"}
        assert columns | {"ucxx", "ucxx (defaults)"} <= set(found[row]), row
    assert {"objects (ucx), of an actor's", "objects (same host), copied"} <= set(found["fetch"])
    for row in ("bcast", "allgather", "alltoall"):
        assert {"objects (ucx)", "objects (mpi)", "objects (same host)", "mpi4py"} <= set(found[row]), row
    for row in ("latency", "fetch", "bw", "bibw", "mbw_mr", "bcast", "allgather", "alltoall"):
        assert all(value > 0 for column in found[row].values() for value in column.values())
    # Only what this machine lacks may be missing, and is named.
    assert set(found["failed"]) <= {"ucx_perftest", "plots"}, ended.err
    assert ("plots" in found["failed"]) != picture.exists()
    assert len(found["ratios"]) == 4 and all(set(sizes) == {"8", "4096"} for sizes in found["ratios"].values())
    assert ("ucx_perftest" in found["failed"]) != ("ucx_perftest" in found["latency"])


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="there is a GPU")
def test_osu_without_a_gpu_says_so() -> None:
    ended = subprocess.run([sys.executable, OSU, "--device", "cuda"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "--device cuda: " in ended.stderr and "nothing was measured" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_spill_benchmark_compares_every_bit(tmp_path: Path, leak_check: LeakCheck) -> None:
    figures = tmp_path / "spill.json"
    script = str(ROOT / "benchmarks" / "spill.py")
    with Job([sys.executable, script, "--store", "32", "--dir", str(tmp_path), "--json", str(figures)]) as job:
        ended = job.wait(190)
    assert ended.code == 0, ended.out + ended.err
    found = json.loads(figures.read_text())
    assert found["wrong"] == 0 and found["blocks"] == 80
    assert found["spilled_bytes"] >= 3 * 4 * (32 << 20)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_mixed_workload_is_right_and_gives_all_back(tmp_path: Path, leak_check: LeakCheck) -> None:
    figures = tmp_path / "mixed.json"
    line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "4", "--cpus-per-node", "2", "--gpus-per-node", "1"]
    with Job([*line, str(ROOT / "benchmarks" / "mixed.py"), "--json", str(figures)]) as job:
        ended = job.wait(190)
    assert ended.code == 0, ended.out + ended.err
    found = json.loads(figures.read_text())
    assert found["right"] and not found["missing"]
    assert len(found["busy"]) == 4 and all(0 < share <= 1 for share in found["busy"].values())
