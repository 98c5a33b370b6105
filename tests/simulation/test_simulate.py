"""`benchmarks/simulate.py` on a small scale: every task runs, nothing leaks, and a seed says all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import simulate
import simulate_mixed
from mixed_work import PLAIN, Run, shares, slots_of


def test_a_seed_gives_the_same_course_again() -> None:
    first, again, other = (simulate.Work(8, 4, 400, seed).run() for seed in (1, 1, 2))
    assert first["tasks"] >= 400
    assert first["digest"] == again["digest"] and first["head_messages"] == again["head_messages"]
    assert first["digest"] != other["digest"]


@pytest.mark.slow
def test_a_hundred_nodes_waste_little_and_nobody_starves() -> None:
    found = simulate.Work(100, 8, 20_000, 3).run()
    assert found["seconds"] < 6 * found["ideal_seconds"] + 2.0
    assert max(found["longest_wait"].values()) < found["seconds"]
    assert found["where their data is"] >= 0.9


def test_the_head_hears_little_of_nodes_that_work_for_themselves() -> None:
    small, large = simulate.local(4, 4, 1, seconds=2.0), simulate.local(16, 4, 1, seconds=2.0)
    assert small["busy"] == large["busy"] == 1.0
    assert large["head_messages_per_second"] <= 16 * 8, "a few of every node, whatever its tasks are"
    json.dumps([small, large])


def test_a_choice_reads_a_handful_of_nodes_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    fits = simulate.NodeResources.fits

    def counted(self: simulate.NodeResources, wanted: simulate.m.Shape) -> bool:
        nonlocal looked
        looked += 1
        return fits(self, wanted)

    monkeypatch.setattr(simulate.NodeResources, "fits", counted)
    counts = []
    for nodes in (64, 1024):
        looked = 0
        simulate.decisions(nodes, 1, count=200)
        # Each kind of request is ranked in full once.
        counts.append((looked - 7 * nodes) / 200)
    assert counts[1] < 2 * counts[0] < 200, counts


def test_mixed_work_keeps_every_node_busy() -> None:
    """Virtual time, so this is no measurement: the policy leaves no CPU idle for which there is work."""
    found = simulate_mixed.Mixed(4, 2, 1, 1, simulate_mixed.WITHIN, simulate_mixed.BETWEEN).run()
    assert min(found["busy"].values()) >= 0.95, found
    assert found["seconds"] < 1.1 * found["ideal_seconds"]


def test_idle_cpus_count_only_where_there_is_work_for_them() -> None:
    slots = slots_of({0: 2.0, 1: 1.0}, [("group", {1: 1.0}, 0.0, 4.0)], 0.0, 10.0)
    runs = [
        Run(PLAIN, 0.0, 0, 0.0, 4.0),
        Run(PLAIN, 0.0, 0, 2.0, 4.0),  # waits for 2 s beside an idle CPU
        Run("group", 0.0, 1, 0.0, 1.0),
        Run("group", 0.0, 1, 2.0, 3.0),  # its bundle idles for 1 s; then nothing of the group waits
        Run(PLAIN, 5.0, 1, 6.0, 7.0),  # a third of it could have run on node 1, the rest on node 0
    ]
    demand, share = shares(runs, slots)
    assert demand == 3.0
    assert share == {0: 6 / (6 + 2 + 2 / 3), 1: 3 / (3 + 1 + 1 / 3)}
