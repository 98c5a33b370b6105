"""The figures of a whole job, gathered down a tree of raylets: 1,000 nodes of 64 workers, on virtual time."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from hpcray.common.figures import add_counts, add_functions, bucket_of
from hpcray.common.ids import make_proc, node_of
from hpcray.core.effects import Send
from hpcray.diagnostics.figures_gathering import FANOUT, FIGURES, FiguresGathering, FiguresReport, quantile
from hpcray.protocol import messages as m

LINK = 0.0005  # seconds on the wire
WORKERS = 64
OBSERVER = make_proc(0, 9)


class SimJob:
    """Raylets that gather figures. silent: nodes that answer nothing."""

    def __init__(self, nodes: int, silent: Iterable[int] = (), own_time: float = 0.05) -> None:
        self.now = 0.0
        self.cores = [FiguresGathering(node) for node in range(nodes)]
        self.silent = set(silent)
        self.own_time = own_time
        self.answers: list[FiguresReport] = []
        self.heard: Counter[int] = Counter()
        self.head_cpu = 0.0
        self._events: list[tuple[float, int, int, Any]] = []
        self._count = 0
        self.report = node_report()

    def at(self, when: float, node: int, what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, node, what))

    def carry_out(self, effects: Iterable[Send], src: int) -> None:
        for effect in effects:
            if effect.dest == OBSERVER:
                assert isinstance(effect.msg, m.GcsReply) and effect.msg.ok
                self.answers.append(msgspec.msgpack.decode(effect.msg.value, type=FiguresReport))
            else:
                self.at(self.now + LINK, node_of(effect.dest), (src, effect.msg))

    def ask(self, nodes: list[int], patience: float = 2.0) -> None:
        self.at(self.now, 0, (-1, m.Introspect(7, FIGURES, msgspec.msgpack.encode((nodes, patience)))))

    def run(self) -> None:
        while self._events:
            self.now, _, node, what = heapq.heappop(self._events)
            if node in self.silent:
                continue
            began = time.process_time()
            self._handle(node, what)
            if node == 0:
                self.head_cpu += time.process_time() - began

    def _handle(self, node: int, what: Any) -> None:
        core = self.cores[node]
        if what == "own":
            row = msgspec.Raw(
                msgspec.msgpack.encode({"node": node, "host": f"n{node}", "store": {"used": 1, "capacity": 2}})
            )
            own = msgspec.structs.replace(self.report, nodes=[row])
            self.carry_out(core.own(self.now, own), node)
        elif what == "tick":
            self.carry_out(core.tick(self.now), node)
        elif what[0] == "died":
            self.carry_out(core.node_died(self.now, what[1]), node)
        elif isinstance(what[1], m.Introspect):
            src, msg = what
            nodes, patience = msgspec.msgpack.decode(msg.args)
            proc = OBSERVER if src < 0 else make_proc(src, 0)
            self.carry_out(core.ask(self.now, proc, msg.req, nodes, patience), node)
            self.at(self.now + patience, node, "tick")
            if core.waits_for_own:
                self.at(self.now + self.own_time, node, "own")
        else:
            self.heard[node] += 1
            report = msgspec.msgpack.decode(what[1].value, type=FiguresReport)
            self.carry_out(core.answered(self.now, what[1].req, report), node)


def node_report() -> FiguresReport:
    """What 64 workers of a node say, added up as a raylet does."""
    report = FiguresReport()
    for _ in range(WORKERS):
        worker = {f"f{i}": [10, 1, 10_000, {20: 5, 30: 5}] for i in range(20)}
        add_functions(report.functions, worker)
        add_counts(report.running, {"f0": 1})
        add_counts(report.elapsed, {"f0": 5})
    return report


def test_the_figures_of_1000_nodes_and_64000_workers_are_right_and_cost_the_head_little() -> None:
    job = SimJob(1000)
    looks, period = 5, 2.0
    for _ in range(looks):
        began = job.now
        job.ask(list(range(1000)))
        job.run()
        assert job.now - began < 5.0
    for answer in job.answers:
        assert not answer.missing and {msgspec.msgpack.decode(row)["node"] for row in answer.nodes} == set(range(1000))
        assert answer.running == {"f0": 64_000} and answer.elapsed == {"f0": 320_000}
        assert answer.functions["f7"] == [640_000, 64_000, 640_000_000, {20: 320_000, 30: 320_000}]
        assert max(answer.latency.values()) < 0.01 and len(answer.latency) == 999
    assert len(job.answers) == looks
    assert job.heard[0] <= looks * FANOUT and max(job.heard.values()) <= looks * FANOUT
    share = job.head_cpu / (looks * period)
    assert share < 0.05, f"the head spends {share:.1%} of a core"


def test_a_node_that_dies_meanwhile_takes_no_other_with_it() -> None:
    job = SimJob(200, silent={1, 8})
    job.ask(list(range(200)))
    for dead in (1, 8):
        for node in range(200):
            job.at(0.2, node, ("died", dead))
    job.run()
    (answer,) = job.answers
    assert sorted(answer.missing) == [1, 8]
    assert len(answer.nodes) == 198 and answer.running == {"f0": 198 * WORKERS}


def test_what_does_not_come_in_time_is_missing_and_the_rest_is_there() -> None:
    job = SimJob(100, silent={5})
    job.ask(list(range(100)), 1.0)
    job.run()
    (answer,) = job.answers
    assert (
        5 in answer.missing
        and len(answer.missing) + len(answer.nodes) == 100
        and len(answer.missing) <= 100 / FANOUT + 1
    )
    assert job.now <= 1.1


def test_nothing_is_sent_or_kept_when_nobody_asks() -> None:
    core = FiguresGathering(0)
    assert core.tick(9.0) == [] and core.node_died(1.0, 3) == []


def test_questions_of_several_observers_are_answered_each() -> None:
    job = SimJob(4)
    for _ in range(3):
        job.ask([0, 1, 2, 3])
    job.run()
    assert [len(answer.nodes) for answer in job.answers] == [4, 4, 4]
    assert all(answer.running == {"f0": 4 * WORKERS} for answer in job.answers)


@pytest.mark.parametrize(("us", "share"), [(1500, 0.5), (2e6, 0.99)])
def test_quantiles_are_right_to_about_a_tenth(us: float, share: float) -> None:
    assert quantile([100, 0, 100 * us, {bucket_of(us): 100}], share) == pytest.approx(us / 1e6, rel=0.15)


@pytest.mark.parametrize("times", [[1.0e6], [1.0e6] * 3, [10.0, 1.0e6], [1000.0, 1100.0, 1.02e6]])
def test_no_quantile_exceeds_the_longest_run(times: list[float]) -> None:
    buckets = Counter(map(bucket_of, times))
    found = [quantile([len(times), 0, sum(times), buckets], share) for share in (0.5, 0.99)]
    assert found[0] <= found[1] <= 1.01 * max(times) / 1e6
    assert found[1] == pytest.approx(max(times) / 1e6, rel=0.15)


def test_runs_without_a_time_have_no_quantile_and_change_none() -> None:
    assert quantile([3, 3, 0, {}], 0.5) == 0.0
    assert quantile([4, 3, 2e6, {bucket_of(2e6): 1}], 0.99) == 2.0
