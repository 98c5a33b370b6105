"""CPUs and custom resources: who gets them, what is left, what never fits."""

from __future__ import annotations

import importlib
import time

import pytest
from engine import IS_HPCRAY, NAME, PATIENCE, Marks, eventually, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "resources": {"licence": 2, "slot/with:odd name": 1}}


@ray.remote
class Gate:
    def __init__(self):
        self._open = False

    def open(self):
        self._open = True

    def is_open(self):
        return self._open


@ray.remote
def hold(marks, gate):
    marks.add()
    while not ray.get(gate.is_open.remote()):
        time.sleep(0.02)
    return "held"


@pytest.fixture
def gate():
    gate = Gate.options(num_cpus=0).remote()
    ray.get(gate.__ray_ready__.remote())
    eventually(lambda: free("CPU") == 4 and free("licence") == 2, "everything free before the test")
    yield gate
    gate.open.remote()


def free(name):
    return ray.available_resources().get(name, 0)


@ray.remote
def interval(seconds=0.1):
    start = time.time()
    time.sleep(seconds)
    return start, time.time()


def most_at_once(intervals):
    return max(sum(start <= moment < end for start, end in intervals) for moment, _ in intervals)


class TestTotals:
    def test_cluster_resources(self):
        total = ray.cluster_resources()
        assert (total["CPU"], total["licence"], total["slot/with:odd name"]) == (4, 2, 1)
        assert isinstance(total["CPU"], float)
        assert total["memory"] > 0
        assert total["object_store_memory"] > 0
        assert any(name.startswith("node:") for name in total)
        assert "GPU" not in total or total["GPU"] > 0

    def test_all_is_available_when_nothing_runs(self):
        eventually(lambda: free("CPU") == 4 and free("licence") == 2)

    def test_nodes(self):
        (node,) = ray.nodes()
        assert node["Alive"] is True
        assert node["Resources"]["CPU"] == 4
        assert node["NodeID"] == ray.get_runtime_context().get_node_id()
        assert {"NodeManagerAddress", "NodeManagerHostname", "NodeName", "Labels"} <= set(node)
        assert ray.cluster_resources()[f"node:{node['NodeManagerAddress']}"] == 1


class TestTasks:
    def test_custom_resources_during_and_after(self, marks: Marks, gate):
        ref = hold.options(resources={"licence": 1.5}, num_cpus=2).remote(marks, gate)
        eventually(marks.lines)
        eventually(lambda: free("licence") == 0.5)
        gate.open.remote()
        assert ray.get(ref) == "held"
        eventually(lambda: free("licence") == 2 and free("CPU") == 4)

    @pytest.mark.parametrize(
        ("options", "most"),
        [({"num_cpus": 2}, 2), ({"num_cpus": 4}, 1), ({"num_cpus": 0, "resources": {"licence": 1}}, 2),
         ({"num_cpus": 0.1, "resources": {"licence": 2}}, 1), ({"num_cpus": 3}, 1)],
        ids=str,
    )  # fmt: skip
    def test_never_more_at_once_than_fit(self, options, most):
        intervals = ray.get([interval.options(**options).remote() for _ in range(6)])
        assert most_at_once(intervals) <= most

    def test_fractions_share_a_cpu(self, marks: Marks, gate):
        refs = [hold.options(num_cpus=0, resources={"licence": 0.5}).remote(marks, gate) for _ in range(4)]
        eventually(lambda: len(marks.lines()) == 4)
        gate.open.remote()
        assert ray.get(refs) == ["held"] * 4

    def test_thirds_add_up(self, marks: Marks, gate):
        refs = [hold.options(num_cpus=0, resources={"licence": 2 / 3}).remote(marks, gate) for _ in range(3)]
        eventually(lambda: len(marks.lines()) == 3)
        gate.open.remote()
        ray.get(refs)
        eventually(lambda: free("licence") == 2)

    def test_odd_names(self):
        assert ray.get(interval.options(resources={"slot/with:odd name": 1}).remote(0))

    def test_a_large_one_is_not_starved_for_ever(self):
        small = [interval.options(num_cpus=1).remote(0.05) for _ in range(20)]
        large = interval.options(num_cpus=4).remote(0)
        ray.get([*small, large])

    def test_assigned_resources(self):
        ask = ray.remote(lambda: ray.get_runtime_context().get_assigned_resources())
        assert ray.get(ask.remote()) == {"CPU": 1}
        assert ray.get(ask.options(num_cpus=2, resources={"licence": 0.5}).remote()) == {"CPU": 2, "licence": 0.5}

    def test_given_back_after_a_crash(self):
        import os

        crash = ray.remote(max_retries=0, resources={"licence": 2})(lambda: os._exit(1))
        with pytest.raises(exceptions.WorkerCrashedError):
            ray.get(crash.remote())
        eventually(lambda: free("licence") == 2 and free("CPU") == 4)

    def test_given_back_after_an_exception(self):
        fail = ray.remote(resources={"licence": 2})(lambda: 1 / 0)
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                ray.get(fail.remote())
        eventually(lambda: free("licence") == 2)


class TestInfeasible:
    @pytest.mark.parametrize(
        "options", [{"num_cpus": 1000}, {"resources": {"unheard of": 1}}, {"resources": {"licence": 3}}]
    )
    def test_stays_pending(self, options):
        ref = interval.options(**options).remote(0)
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(ref, timeout=0.5)
        assert ray.wait([ref], timeout=0) == ([], [ref])
        ray.cancel(ref)

    def test_holds_up_nobody_else(self):
        never = interval.options(resources={"unheard of": 1}).remote(0)
        ray.get([interval.remote(0) for _ in range(20)])
        ray.cancel(never)

    def test_an_actor_too(self):
        actor = Gate.options(resources={"unheard of": 1}).remote()
        ref = actor.is_open.remote()
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(ref, timeout=0.5)


class TestActors:
    def test_hold_what_they_ask_for_until_they_die(self, gate):
        actor = Gate.options(num_cpus=1.5, resources={"licence": 1}).remote()
        ray.get(actor.is_open.remote())
        eventually(lambda: free("CPU") == 2.5 and free("licence") == 1)
        ray.kill(actor)
        eventually(lambda: free("CPU") == 4 and free("licence") == 2)

    def test_hold_no_cpu_by_default(self, gate):
        actors = [Gate.remote() for _ in range(6)]
        ray.get([actor.is_open.remote() for actor in actors])
        eventually(lambda: free("CPU") == 4)

    def test_wait_for_their_place(self, gate):
        first = Gate.options(resources={"licence": 2}).remote()
        ray.get(first.is_open.remote())
        second = Gate.options(resources={"licence": 2}).remote()
        ref = second.is_open.remote()
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(ref, timeout=0.3)
        del first
        assert ray.get(ref, timeout=PATIENCE) is False

    def test_tasks_wait_for_what_they_hold(self, marks: Marks, gate):
        actor = Gate.options(num_cpus=4).remote()
        ray.get(actor.is_open.remote())
        ref = interval.remote(0)
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(ref, timeout=0.3)
        ray.kill(actor)
        ray.get(ref, timeout=PATIENCE)

    def test_a_failed_constructor_gives_back(self):
        @ray.remote(resources={"licence": 2})
        class Broken:
            def __init__(self):
                raise ValueError

            def call(self): ...

        with pytest.raises(exceptions.ActorDiedError):
            ray.get(Broken.remote().call.remote())
        eventually(lambda: free("licence") == 2)

    def test_assigned_resources(self):
        ask = lambda self: ray.get_runtime_context().get_assigned_resources()  # noqa: E731
        assert ray.get(Gate.remote().__ray_call__.remote(ask)) == {}
        assert ray.get(Gate.options(num_cpus=2).remote().__ray_call__.remote(ask)) == {"CPU": 2}
        custom = Gate.options(resources={"licence": 1}).remote()
        assert ray.get(custom.__ray_call__.remote(ask)) == {"CPU": 1, "licence": 1}


class TestPlacing:
    def test_on_a_node_by_its_id(self):
        strategies = importlib.import_module(f"{NAME}.util.scheduling_strategies")
        node = ray.get_runtime_context().get_node_id()
        here = ray.remote(lambda: ray.get_runtime_context().get_node_id())
        for soft in (False, True):
            there = here.options(scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=soft))
            assert ray.get(there.remote()) == node
        assert ray.get(here.options(scheduling_strategy="SPREAD").remote()) == node
        actor = Gate.options(scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        assert ray.get(actor.is_open.remote()) is False

    def test_on_a_node_by_its_address(self):
        (node,) = ray.nodes()
        pinned = interval.options(resources={f"node:{node['NodeManagerAddress']}": 0.01})
        assert ray.get(pinned.remote(0))


def test_zero_cpus_run_beside_everything(marks, gate):
    refs = [hold.remote(marks, gate) for _ in range(4)]
    eventually(lambda: len(marks.lines()) == 4)
    if IS_HPCRAY:  # where a task that waits for the gate's answer has lent its CPU, others may run
        assert ray.get(interval.options(num_cpus=0).remote(0), timeout=PATIENCE)
    gate.open.remote()
    ray.get(refs)


class TestWaiting:
    def test_a_task_that_waits_lends_its_cpus_and_an_actor_does_not(self, gate, tmp_path):
        @ray.remote(num_cpus=4)
        class Whole:
            def wait_for(self, gate):
                while not ray.get(gate.is_open.remote()):
                    time.sleep(0.02)

        @ray.remote(num_cpus=4)
        def whole(inner):
            return ray.get(inner.options(num_cpus=4).remote(0.0))

        assert ray.get(whole.remote(interval), timeout=PATIENCE)
        actor = Whole.remote()
        ray.get(actor.__ray_ready__.remote(), timeout=PATIENCE)
        waits = actor.wait_for.remote(gate)
        later = interval.remote(0.0)
        assert ray.wait([later], timeout=1.0) == ([], [later])
        ray.get(gate.open.remote())
        ray.get(waits, timeout=PATIENCE)
        ray.kill(actor)
        assert ray.get(later, timeout=PATIENCE)


def test_a_task_that_has_ended_holds_no_cpu(gate):
    task = ray.remote(lambda: None)
    for _ in range(5):
        ray.get(task.remote())
        # The head's view of the node is a moment old. The lease itself is returned after 0.1 s (idle_lease_timeout).
        deadline = time.monotonic() + 0.09
        while free("CPU") < 4:
            assert time.monotonic() < deadline, "its worker is kept for tasks that may come, its CPU is not"


def test_a_resource_that_serve_makes_up_is_there_once_on_every_node():
    """With it, Serve limits the replicas of a deployment on a node."""
    name = "node:__internal_implicit_resource_app#deployment"

    @ray.remote(num_cpus=0, resources={name: 0.5})
    class Replica:
        def ping(self):
            return "pong"

    first, second, third = [Replica.remote() for _ in range(3)]
    assert ray.get([first.ping.remote(), second.ping.remote()]) == ["pong"] * 2
    waiting = third.ping.remote()
    assert ray.wait([waiting], timeout=0.5) == ([], [waiting])
    assert name not in ray.cluster_resources() and name not in ray.available_resources()
    ray.kill(first)
    assert ray.get(waiting, timeout=30) == "pong"
