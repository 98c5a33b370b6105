"""The autoscaler against a batch system whose queue takes minutes to hours, whose jobs fail, and whose users cancel."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from helpers.examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcray.autoscaler.autoscaler import (
    CANCEL_AFTER,
    END_TIMEOUT,
    HELD,
    PENDING,
    QUEUED,
    RUNNING,
    Action,
    Autoscaler,
    AutoscalerSpec,
    InstanceState,
    RemoveIdleNode,
    Report,
    StartNodes,
    Terminate,
)
from hpcray.autoscaler.resource_demand import Bin, NodeStatus, choose_types, pack
from hpcray.common.resources import to_units
from hpcray.core.gcs.node_types import NodeType, NodeTypeTable
from hpcray.core.gcs.placement_group_manager import Demand
from hpcray.protocol.messages import Shape

CPU = Shape((("CPU", 10_000),))
GPU = Shape((("GPU", 10_000),))
SMALL = NodeType("small", to_units({"CPU": 4}))
GPUS = NodeType("gpus", to_units({"CPU": 4, "GPU": 2}), max_workers=2)
IDLE = 60.0
SIM = settings(max_examples=examples(25))


@dataclass
class Job:
    node_type: str
    starts_at: float
    fails: bool
    state: str = PENDING
    node: int = -1


@dataclass
class World:
    """A batch system, the nodes that it has given to a job, and the tasks that the job runs on them."""

    limits: AutoscalerSpec
    types: dict[str, NodeType]
    waits: list[float]
    failing: float = 0.0
    refusals: int = 0
    held: int = 0
    seed: int = 0
    now: float = 1000.0
    jobs: dict[str, Job] = field(default_factory=dict)
    nodes: dict[int, NodeType] = field(default_factory=dict)
    instances: dict[int, str] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    running: list[tuple[int, float, Shape]] = field(default_factory=list)
    waiting: list[tuple[Shape, float]] = field(default_factory=list)
    floor: list[Demand] = field(default_factory=list)
    reports: list[str] = field(default_factory=list)
    submissions: list[float] = field(default_factory=list)
    most: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.nodes[0] = NodeType("", to_units({"CPU": 4}))
        self.next_node = 1
        self.autoscaler = self.new_head()
        self.autoscaler.polled(self.now, {})

    def new_head(self) -> Autoscaler:
        self.autoscaler = Autoscaler(self.limits, NodeTypeTable(self.types, True))
        return self.autoscaler

    def free(self, node: int) -> dict[str, int]:
        amounts = dict(self.nodes[node].resources)
        for at, _, shape in self.running:
            if at == node:
                for name, units in shape.resources:
                    amounts[name] -= units
        return amounts

    def uses(self) -> list[NodeStatus]:
        busy = {node for node, _, _ in self.running}
        return [
            NodeStatus(
                node, kind.name, self.instances.get(node, ""), kind.resources, self.free(node), {}, node not in busy,
                node in self.leaving,
            )
            for node, kind in self.nodes.items()
        ]  # fmt: skip

    def place(self) -> None:
        for node in self.nodes:
            if node in self.leaving:
                continue
            room = Bin(self.free(node), {})
            for task in list(self.waiting):
                if room.take(Demand(task[0], 1), 1):
                    self.waiting.remove(task)
                    self.running.append((node, self.now + task[1], task[0]))

    def demands(self) -> list[Demand]:
        counts: dict[Shape, int] = {}
        for shape, _ in self.waiting:
            counts[shape] = counts.get(shape, 0) + 1
        return [Demand(shape, count) for shape, count in counts.items()]

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartNodes):
                self.submissions.append(self.now)
                if self.refusals > 0:
                    self.refusals -= 1
                    self.act(self.autoscaler.launch_failed(self.now, action.request, "too many jobs"))
                    continue
                names = [f"{len(self.jobs) + index}" for index in range(action.count)]
                for name in names:
                    wait = self.rng.choice(self.waits)
                    self.jobs[name] = job = Job(action.node_type, self.now + wait, self.rng.random() < self.failing)
                    if self.held > 0:
                        self.held, job.state = self.held - 1, HELD
                self.autoscaler.launched(self.now, action.request, names)
            elif isinstance(action, Terminate):
                for name in action.instances:
                    self.end(name, "CANCELLED")
            elif isinstance(action, RemoveIdleNode):
                self.leaving.add(action.node)
            elif isinstance(action, Report):
                self.reports.append(action.text)

    def end(self, name: str, how: str) -> None:
        job = self.jobs[name]
        if job.state in (PENDING, RUNNING, HELD):
            job.state = how
            if job.node >= 0:
                self.lose(job.node)

    def lose(self, node: int) -> None:
        lost = [task for task in self.running if task[0] == node]
        self.running = [task for task in self.running if task[0] != node]
        self.waiting += [(shape, 2.0) for _, _, shape in lost]
        self.nodes.pop(node, None)
        self.leaving.discard(node)

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.running = [task for task in self.running if task[1] > self.now]
        for name, job in self.jobs.items():
            if job.state == PENDING and self.now >= job.starts_at:
                job.state = "FAILED" if job.fails else RUNNING
            elif job.state == RUNNING and job.node < 0:
                job.node, self.next_node = self.next_node, self.next_node + 1
                self.nodes[job.node] = self.types[job.node_type]
                self.instances[job.node] = name
        for node in list(self.leaving):
            if not any(at == node for at, _, _ in self.running):
                self.end(self.instances[node], "COMPLETED")
        self.place()
        if int(self.now) % 3 == 0:
            rows = {name: InstanceState(job.node_type, job.state) for name, job in self.jobs.items()}
            self.act(self.autoscaler.polled(self.now, rows))
        self.act(self.autoscaler.update(self.now, self.uses(), self.demands(), self.floor))
        self.autoscaler.check_invariants()
        alive = len(self.nodes) + sum(job.state in (PENDING, RUNNING) and job.node < 0 for job in self.jobs.values())
        self.most = max(self.most, alive)
        assert alive <= self.limits.max_nodes, "more nodes than allowed"

    def run(self, seconds: float, until_idle: bool = False) -> None:
        end = self.now + seconds
        while self.now < end and not (until_idle and not self.waiting and not self.running):
            self.step()

    def living_jobs(self) -> list[str]:
        return [name for name, job in self.jobs.items() if job.state in (PENDING, RUNNING, HELD)]


def world(waits: list[float], max_nodes: int = 6, **given: object) -> World:
    types = {"small": SMALL, "gpus": GPUS}
    return World(AutoscalerSpec(1, max_nodes, IDLE), types, waits, **given)  # type: ignore[arg-type]


@SIM
@example(waits=[7200.0], tasks=287, gpu_tasks=1, failing=0.0, refusals=0, seed=0)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 5.0, 60.0, 600.0, 7200.0]), min_size=1, max_size=5),
    st.integers(1, 300),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.0, 0.3]),
    st.integers(0, 3),
    st.integers(0, 2**32),
)
def test_all_work_is_done_and_all_that_was_asked_for_is_given_back(
    waits: list[float], tasks: int, gpu_tasks: int, failing: float, refusals: int, seed: int
) -> None:
    sim = world(waits, failing=failing, refusals=refusals, seed=seed)
    rng = random.Random(seed)
    sim.waiting = [(CPU, rng.choice([0.5, 2.0, 30.0])) for _ in range(tasks)] + [(GPU, 5.0)] * gpu_tasks
    for step in range(80):
        sim.run(1000.0, until_idle=True)
        disturbed = step < 40  # a job that waits for hours in the queue is never granted while others keep ending it
        if disturbed and rng.random() < 0.2 and sim.living_jobs():
            sim.end(rng.choice(sim.living_jobs()), rng.choice(["CANCELLED", "PREEMPTED", "NODE_FAIL"]))
        if disturbed and rng.random() < 0.2:
            sim.new_head()
        if not sim.waiting and not sim.running:
            break
    assert not sim.waiting and not sim.running
    sim.run(IDLE + CANCEL_AFTER + END_TIMEOUT + 30)
    assert not sim.living_jobs() and set(sim.nodes) == {0}
    assert not sim.autoscaler.instances


def test_a_burst_gets_all_nodes_at_once_and_they_go_back_after_the_idle_timeout() -> None:
    sim = world([3.0])
    sim.waiting = [(CPU, 2.0)] * 500
    sim.run(20)
    assert len(sim.nodes) == 6 and len(sim.submissions) == 1, "in one submission"
    sim.run(1000, until_idle=True)
    assert sim.now - 1000 < 1.1 * (4 + 500 * 2 / 24) + 3
    sim.run(IDLE - 5)
    assert len(sim.nodes) == 6
    sim.run(20)
    assert len(sim.nodes) == 1 and not sim.reports


def test_what_waits_in_the_queue_is_cancelled_when_the_demand_has_gone() -> None:
    sim = world([3600.0])
    sim.waiting = [(CPU, 1.0)] * 40
    sim.run(1)
    assert len(sim.living_jobs()) == 5
    sim.run(10 + CANCEL_AFTER)
    assert not sim.waiting and not sim.running
    sim.run(CANCEL_AFTER + 2)
    assert not sim.living_jobs() and not sim.reports


def test_a_short_gap_in_the_demand_cancels_nothing() -> None:
    sim = world([600.0])
    for _ in range(10):
        sim.waiting = [(CPU, 2.0)] * 4 + [(CPU, 2.0)] * 8
        sim.run(CANCEL_AFTER + 2)
    assert len(sim.jobs) == len(sim.living_jobs()), "the first submissions still wait"


def test_jobs_that_fail_are_not_submitted_without_end_and_are_reported_once() -> None:
    sim = world([1.0], failing=1.0)
    sim.waiting = [(GPU, 5.0)] * 8
    sim.run(3600)
    assert 3 <= len(sim.submissions) <= 10, sim.submissions
    gaps = [b - a for a, b in zip(sim.submissions, sim.submissions[1:], strict=False)]
    assert gaps == sorted(gaps) and gaps[-1] > 4 * gaps[0], "each later than the one before"
    assert len(sim.reports) == 1 and "gpus" in sim.reports[0]


def test_a_batch_job_that_will_not_start_is_cancelled_and_tried_again_later() -> None:
    """It would count for ever as the node that the demand gets."""
    sim = world([1.0], held=3)
    sim.waiting = [(GPU, 5.0)] * 8
    sim.run(300, until_idle=True)
    assert not sim.waiting and len(sim.submissions) <= 5 and len(sim.reports) == 1, sim.reports
    assert "will not start" in sim.reports[0]
    assert [job.state for job in sim.jobs.values()].count("CANCELLED") >= 3 and HELD not in {
        job.state for job in sim.jobs.values()
    }


def test_a_new_head_cancels_what_will_not_start() -> None:
    sim = world([1.0], held=1)
    sim.jobs["held"] = Job("gpus", sim.now, False, HELD)
    sim.new_head()
    sim.run(10)
    assert sim.jobs["held"].state == "CANCELLED"


def test_a_full_queue_is_tried_again_later_and_one_success_begins_anew() -> None:
    sim = world([1.0], refusals=3)
    sim.waiting = [(GPU, 5.0)] * 8
    sim.run(300, until_idle=True)
    assert not sim.waiting and len(sim.submissions) <= 6 and len(sim.reports) == 1
    described = sim.autoscaler.describe(sim.now)
    assert [row["reason"] for row in described["failures"]] == ["too many jobs"] * 3


def test_a_type_that_is_refused_for_good_is_not_tried_again_and_serves_nothing() -> None:
    types = NodeTypeTable({"small": SMALL, "gpus": GPUS}, True)
    autoscaler = Autoscaler(AutoscalerSpec(1, 6, IDLE), types)
    autoscaler.polled(0.0, {})
    uses = [NodeStatus(0, "", "", {}, {}, {}, False, False)]
    (launch,) = autoscaler.update(0.0, uses, [Demand(GPU, 1)], [])
    assert isinstance(launch, StartNodes) and types.may_come(GPU)
    (report,) = autoscaler.launch_failed(0.0, launch.request, "invalid partition", permanent=True)
    assert isinstance(report, Report) and "invalid partition" in report.text
    assert not types.may_come(GPU) and types.may_come(CPU)
    assert not autoscaler.update(5000.0, uses, [Demand(GPU, 1)], [])


def test_what_a_user_cancels_is_not_submitted_again_at_once() -> None:
    sim = world([600.0])
    sim.waiting = [(CPU, 100.0)] * 6
    sim.run(2)
    (job,) = sim.living_jobs()
    sim.end(job, "CANCELLED")
    sim.run(30)
    assert not sim.living_jobs() and len(sim.reports) == 1 and "was cancelled" in sim.reports[0]
    sim.run(60)
    assert len(sim.living_jobs()) == 1, "the work still waits"


def test_a_new_head_takes_over_what_there_is() -> None:
    sim = world([5.0, 600.0])
    sim.waiting = [(CPU, 60.0)] * 40
    sim.run(20)
    before = len(sim.jobs)
    assert before == 5
    sim.new_head()
    sim.run(30)
    assert len(sim.jobs) == before, "nothing is submitted twice"
    sim.run(3000, until_idle=True)
    sim.run(IDLE + CANCEL_AFTER + END_TIMEOUT + 10)
    assert set(sim.nodes) == {0} and not sim.living_jobs()


def test_nodes_without_gpus_come_for_those_who_need_none() -> None:
    types = {"gpus": GPUS, "small": SMALL}
    assert choose_types([Demand(CPU, 4)], {"gpus": 2, "small": 9}, types, 9) == ["small"]
    assert choose_types([Demand(CPU, 4), Demand(GPU, 2)], {"gpus": 2, "small": 9}, types, 9) == ["gpus"]
    assert choose_types([Demand(GPU, 9)], {"gpus": 2, "small": 9}, types, 9) == ["gpus", "gpus"]
    assert choose_types([Demand(CPU, 4)], {"gpus": 2, "small": 0}, types, 9) == ["gpus"], "better than none"
    spread = [Demand(CPU, 3, "a group")]
    assert choose_types(spread, {"small": 9}, types, 9) == ["small"] * 3
    assert pack(spread, [Bin(to_units({"CPU": 8}), {})])[0].count == 2


def test_a_floor_is_kept_until_it_is_taken_back() -> None:
    sim = world([1.0])
    sim.floor = [Demand(CPU, 12)]
    sim.run(3 * IDLE)
    assert len(sim.nodes) == 3, "12 CPUs in nodes of 4"
    sim.waiting = [(CPU, 10.0)] * 12
    sim.run(8)
    assert len(sim.nodes) == 3 and not sim.autoscaler.describe(sim.now)["pending"], "what is busy counts too"
    sim.floor = []
    sim.run(2 * IDLE + 30)
    assert set(sim.nodes) == {0}


def test_there_are_always_as_many_nodes_as_the_least() -> None:
    sim = World(AutoscalerSpec(3, 6, IDLE), {"small": SMALL}, [2.0])
    sim.run(3 * IDLE)
    assert len(sim.nodes) == 3
    sim.end(sim.living_jobs()[0], "PREEMPTED")
    sim.run(30)
    assert len(sim.nodes) == 3 and not any(one.state == QUEUED for one in sim.autoscaler.instances.values())


@pytest.mark.parametrize("shape", [CPU, GPU])
def test_a_node_that_says_it_is_of_use_stays(shape: Shape) -> None:
    sim = world([1.0])
    sim.waiting = [(shape, 5.0)] * 8
    sim.run(20, until_idle=True)
    sim.run(IDLE - 2)
    while not sim.leaving:
        sim.step()
    node = next(iter(sim.leaving))
    sim.leaving.clear()
    sim.autoscaler.stays(sim.now, node)
    sim.run(IDLE - 10)
    assert node in sim.nodes
