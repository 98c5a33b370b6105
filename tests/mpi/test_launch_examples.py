"""The examples on four nodes of this host."""

from __future__ import annotations

import re
import sys

import pytest
from helpers.jobs import ROOT, Ended, Job
from helpers.leaks import LeakCheck

EXAMPLES = ROOT / "examples"


def run(*args: str) -> Ended:
    with Job([sys.executable, "-m", "hpcray.cli.launch", "-n", "4", *args]) as job:
        ended = job.wait(110)
    assert ended.code == 0, ended.err
    return ended


def test_digits_uses_all_nodes_and_learns(leak_check: LeakCheck) -> None:
    pytest.importorskip("sklearn")
    shown = run(str(EXAMPLES / "digits.py")).out
    accuracy = re.search(r"accuracy: (\S+) on 360 held-out images", shown)
    assert accuracy is not None, shown
    assert float(accuracy[1]) >= 0.95
    workers = re.findall(r"node (\d) +pid (\d+) +([\d,]+) gradients", shown)
    assert [node for node, _, _ in workers] == ["0", "1", "2", "3"], shown
    assert len({pid for _, pid, _ in workers}) == 4
    assert sum(int(done.replace(",", "")) for _, _, done in workers) == 43_110


def test_sort_of_more_than_a_node_can_hold(leak_check: LeakCheck) -> None:
    shown = run("--object-store", "128m", str(EXAMPLES / "sort.py")).out
    assert "4 nodes, 128 MiB of object store each" in shown
    assert "data: 141 MiB" in shown
    assert "order, count and checksum are right" in shown
