"""The examples on one node, as `python examples/....py` runs them."""

from __future__ import annotations

import re

import pytest
from helpers.jobs import ROOT, Ended, Job, embedded
from helpers.leaks import LeakCheck

EXAMPLES = ROOT / "examples"
ROLLOUT = ("--samplers", "2", "--iterations", "60")


def run(name: str, *args: str) -> Ended:
    with Job(embedded(EXAMPLES / name, *args)) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    return ended


def test_digits(leak_check: LeakCheck) -> None:
    pytest.importorskip("sklearn")
    shown = run("digits.py").out
    accuracy = re.search(r"accuracy: (\S+) on 360 held-out images", shown)
    assert accuracy is not None, shown
    assert float(accuracy[1]) >= 0.95
    assert re.search(r"node 0 +pid \d+ +43,110 gradients", shown), shown


def test_sort(leak_check: LeakCheck) -> None:
    shown = run("sort.py", "--mb", "40").out
    assert "data: 40 MiB" in shown
    assert "order, count and checksum are right" in shown


def test_rollout(leak_check: LeakCheck) -> None:
    pytest.importorskip("torch")
    shown = run("rollout.py", *ROLLOUT).out
    reward = re.search(r"batch +60 +mean reward +(\S+)", shown)
    assert reward is not None, shown
    assert float(reward[1]) > -0.2, "it is about -0.5 at first"


@pytest.mark.slow
def test_device_objects_change_no_weight(leak_check: LeakCheck) -> None:
    pytest.importorskip("torch")
    shown = run("rollout.py", *ROLLOUT).out
    assert re.search(r"weights [0-9a-f]{16}", shown)
    assert run("rollout.py", *ROLLOUT, "--device-objects").out == shown


@pytest.mark.slow
def test_the_rows_of_a_gpu_are_measured_on_a_cpu_too(leak_check: LeakCheck) -> None:
    pytest.importorskip("torch")
    small = ("--device", "cpu", "--seconds", "0.05", "--churn", "100", "--largest", "1000000")
    with Job(embedded(ROOT / "benchmarks" / "gpu_rows.py", *small)) as job:
        ended = job.wait(100)
    assert ended.code == 0, ended.err
    for row in (
        "second actor", "auto: known allocation, 1 MB", "auto: new allocation, 4 KB", "get of a host tensor",
        "get of a host NumPy array", "put of a device tensor", "allreduce of 2 ranks, 1 MB", "one that has moved",
    ):  # fmt: skip
        assert row in ended.out, ended.out
    growth = re.findall(r"growth of (.+?) +(-?[\d.]+) ", ended.out)
    assert {name for name, _ in growth} >= {"maker: descriptors", "reader: descriptors", "/dev/shm files"}
    assert all(float(value) <= 2 for name, value in growth if "descriptors" in name), growth
