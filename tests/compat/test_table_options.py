"""The table's rows of options of tasks and actors, in its order."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

import pytest

from .rows import row


@row("num_cpus, num_gpus")
def test_tasks_hold_the_requested_cpus_and_gpus(ray: Any) -> None:
    @ray.remote
    def holds() -> dict[str, float]:
        return ray.get_runtime_context().get_assigned_resources()

    @ray.remote
    class Actor:
        def holds(self) -> dict[str, float]:
            return ray.get_runtime_context().get_assigned_resources()

    assert ray.get(holds.remote()) == {"CPU": 1}
    assert ray.get(holds.options(num_cpus=0.5, num_gpus=0.25).remote()) == {"CPU": 0.5, "GPU": 0.25}
    assert ray.get(Actor.remote().holds.remote()) == {}, "an actor takes a CPU to be placed, and none to run"
    assert ray.get(Actor.options(num_cpus=2).remote().holds.remote()) == {"CPU": 2}
    with pytest.raises(ValueError, match="GPU resource quantities >1 must"):
        holds.options(num_gpus=1.5).remote()
    with pytest.raises(ValueError, match="negative"):
        holds.options(num_cpus=-1)


@row("resources")
def test_tasks_hold_the_requested_custom_resources(ray: Any) -> None:
    @ray.remote(resources={"disk": 0.5}, num_cpus=0)
    def holds() -> dict[str, float]:
        return ray.get_runtime_context().get_assigned_resources()

    assert ray.get(holds.remote()) == {"disk": 0.5}
    with pytest.raises(ValueError, match="Use the 'num_cpus' and 'num_gpus' keyword"):
        holds.options(resources={"CPU": 1})


@row("memory, object_store_memory")
def test_tasks_hold_the_requested_memory(ray: Any) -> None:
    @ray.remote(memory=1 << 20)
    def holds() -> dict[str, float]:
        return ray.get_runtime_context().get_assigned_resources()

    assert ray.get(holds.remote())["memory"] == 1 << 20
    with pytest.raises(ValueError, match="not implemented for tasks"):
        holds.options(object_store_memory=1)


@row("accelerator_type")
def test_a_task_waits_for_a_node_with_its_accelerator_type(ray: Any) -> None:
    waiting = ray.remote(lambda: 1).options(accelerator_type="A100").remote()
    assert ray.wait([waiting], timeout=0.1) == ([], [waiting]), "no node here has one"
    ray.cancel(waiting)
    assert ray.util.accelerators.NVIDIA_A100 == "A100"


@row("name, namespace, get_if_exists, lifetime")
def test_actors_have_names_namespaces_and_lifetimes(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    class Actor:
        def pid(self) -> int:
            return os.getpid()

    options = {"name": "table.one", "namespace": "other", "lifetime": "detached", "get_if_exists": True}
    first, second = Actor.options(**options).remote(), Actor.options(**options).remote()
    assert ray.get(first.pid.remote()) == ray.get(second.pid.remote())
    assert ray.get_actor("table.one", namespace="other") == first
    with pytest.raises(ValueError, match="taken|already|exists"):
        Actor.options(name="table.one", namespace="other").remote()
    del first, second
    kept = ray.get_actor("table.one", namespace="other")
    assert ray.get(kept.pid.remote()) > 0, "detached: it lives without a handle"
    ray.kill(kept)
    with pytest.raises(ValueError, match="lifetime"):
        Actor.options(lifetime="for ever")


@row("scheduling_strategy")
def test_tasks_run_where_their_scheduling_strategy_allows(ray: Any) -> None:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    here = ray.get_runtime_context().get_node_id()
    group = ray.util.placement_group([{"CPU": 1}])
    for strategy in (
        "DEFAULT", "SPREAD", None, NodeAffinitySchedulingStrategy(here, soft=False),
        PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    ):  # fmt: skip
        assert ray.get(where.options(scheduling_strategy=strategy).remote()) == here
    ray.util.remove_placement_group(group)
    with pytest.raises(ValueError, match="Invalid scheduling_strategy value"):
        where.options(scheduling_strategy="NONSENSE").remote()


@row("placement_group, placement_group_bundle_index (legacy)")
def test_tasks_take_a_placement_group_as_legacy_option(ray: Any) -> None:
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    which = ray.remote(lambda: ray.get_runtime_context().get_placement_group_id())
    options = {"placement_group": group, "placement_group_bundle_index": 1, "placement_group_capture_child_tasks": True}
    assert ray.get(which.options(**options).remote()) == group.id.hex()
    ray.util.remove_placement_group(group)


@row("label_selector, fallback_strategy")
def test_tasks_run_on_nodes_whose_labels_match(ray: Any) -> None:
    here = ray.get_runtime_context().get_node_id()
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    chosen = where.options(label_selector={ray._raylet.RAY_NODE_ID_KEY: here})
    try:
        ref = chosen.remote()
    except NotImplementedError as error:
        pytest.xfail(str(error))
    assert ray.get(ref, timeout=30) == here
    fallback = where.options(label_selector={"region": "moon"}, fallback_strategy=[{"label_selector": {}}])
    try:
        ref = fallback.remote()
    except NotImplementedError as error:
        pytest.xfail(str(error))
    assert ray.get(ref, timeout=30) == here


@row("runtime_env")
def test_env_vars_of_a_runtime_env_reach_tasks_and_actors(ray: Any) -> None:
    @ray.remote(runtime_env={"env_vars": {"TABLE_A": "1"}})
    def task() -> str:
        return os.environ["TABLE_A"]

    @ray.remote(num_cpus=0)
    class Actor:
        def get(self) -> str | None:
            return os.environ.get("TABLE_A")

    assert ray.get(task.remote()) == "1"
    assert ray.get(Actor.options(runtime_env={"env_vars": {"TABLE_A": "2"}}).remote().get.remote()) == "2"
    assert ray.get(Actor.remote().get.remote()) is None
    with pytest.raises(TypeError, match="env_vars"):
        task.options(runtime_env={"env_vars": {"A": 1}})


@row("num_returns")
def test_num_returns_splits_the_result_of_a_task(ray: Any) -> None:
    @ray.remote(num_returns=3)
    def three() -> tuple[int, ...]:
        return 1, 2, 3

    assert ray.get(list(three.remote())) == [1, 2, 3]
    first, *_ = three.options(num_returns=3).remote()
    assert ray.get(first) == 1
    assert ray.get(three.options(num_returns=1).remote()) == (1, 2, 3)
    assert three.options(num_returns=0).remote() is None
    with pytest.raises(ValueError, match=r"2|3"):
        ray.get(three.options(num_returns=2).remote())


@row("max_retries, retry_exceptions")
def test_tasks_are_retried_after_crashes_and_listed_exceptions(ray: Any, tmp_path: Any) -> None:
    file = tmp_path / "tries"

    @ray.remote
    def fail_first(how: str) -> int:
        with open(file, "a") as out:
            out.write("x")
        tries = len(file.read_text())
        if tries < 3:
            if how == "raise":
                raise ZeroDivisionError
            os._exit(1)
        return tries

    assert ray.get(fail_first.options(max_retries=2).remote("exit")) == 3
    file.unlink()
    assert ray.get(fail_first.options(max_retries=2, retry_exceptions=[ZeroDivisionError]).remote("raise")) == 3
    file.unlink()
    with pytest.raises(ZeroDivisionError):
        ray.get(fail_first.options(max_retries=2).remote("raise"))
    with pytest.raises(ValueError, match="max_retries"):
        fail_first.options(max_retries=-2)


@row("max_calls")
def test_max_calls_ends_the_worker_after_that_many_calls(ray: Any) -> None:
    @ray.remote(max_calls=1)
    def pid() -> int:
        return os.getpid()

    assert ray.get(pid.remote()) != ray.get(pid.remote())


@row("max_restarts, max_task_retries")
def test_actors_restart_and_retry_their_calls(ray: Any, until: Any) -> None:
    @ray.remote(num_cpus=0, max_restarts=1, max_task_retries=1)
    class Actor:
        def pid(self) -> int:
            return os.getpid()

        def die_first(self) -> bool:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                os._exit(1)
            return True

    actor = Actor.remote()
    before = ray.get(actor.pid.remote())
    assert ray.get(actor.die_first.remote()) is True
    assert ray.get(actor.pid.remote()) != before
    ray.kill(actor, no_restart=False)

    def dead() -> bool:
        try:
            return ray.get(actor.pid.options(max_task_retries=0).remote()) is None
        except ray.exceptions.RayActorError:
            return True

    until(dead)  # its one restart is used up


@row("max_concurrency")
def test_max_concurrency_limits_the_calls_of_an_actor(ray: Any) -> None:
    @ray.remote(num_cpus=0, max_concurrency=2)
    class Threads:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)

        def meet(self) -> bool:
            self.barrier.wait(60)
            return True

    @ray.remote(num_cpus=0)
    class Async:
        def __init__(self) -> None:
            self.here = 0
            self.all = asyncio.Event()

        async def meet(self, number: int) -> bool:
            self.here += 1
            if self.here == number:
                self.all.set()
            await self.all.wait()
            return True

    threads = Threads.remote()
    assert ray.get([threads.meet.remote() for _ in range(2)]) == [True, True]
    actor = Async.remote()
    assert all(ray.get([actor.meet.remote(1000) for _ in range(1000)])), "1000 calls at once without being asked"


@row("concurrency_groups")
def test_concurrency_groups_have_limits_of_their_own(ray: Any) -> None:
    @ray.remote(num_cpus=0, concurrency_groups={"io": 2, "one": 1})
    class Actor:
        def __init__(self) -> None:
            self.barrier = threading.Barrier(2)

        @ray.method(concurrency_group="io")
        def meet(self) -> bool:
            self.barrier.wait(60)
            return True

        def plain(self) -> int:
            return 1

    actor = Actor.remote()
    assert ray.get([actor.meet.remote() for _ in range(2)]) == [True, True]
    waiting = actor.meet.remote()
    assert ray.get(actor.plain.remote()) == 1, "the default group does not wait for another"
    assert ray.get([waiting, actor.meet.options(concurrency_group="one").remote()]) == [True, True]


@row("max_pending_calls, allow_out_of_order_execution")
def test_max_pending_calls_limits_the_queue_of_an_actor(ray: Any) -> None:
    @ray.remote(num_cpus=0, max_pending_calls=2)
    class Actor:
        def sleep(self) -> None:
            time.sleep(0.2)

    actor = Actor.remote()
    with pytest.raises(ray.exceptions.PendingCallsLimitExceeded):
        [actor.sleep.remote() for _ in range(5)]
    ordered = Actor.options(max_pending_calls=-1, allow_out_of_order_execution=False).remote()
    assert ray.get(ordered.sleep.remote()) is None


@row("enable_task_events, _labels")
def test_options_without_effect_are_accepted(ray: Any) -> None:
    task = ray.remote(lambda: 1).options(enable_task_events=False, _labels={"a": "b"})
    assert ray.get(task.remote()) == 1


@row("_generator_backpressure_num_objects")
def test_backpressure_stops_a_generator_ahead_of_its_reader(ray: Any, tmp_path: Any, until: Any) -> None:
    file = tmp_path / "made"

    @ray.remote(_generator_backpressure_num_objects=2)
    def numbers() -> Any:
        for index in range(6):
            with open(file, "a") as out:
                out.write("x")
            yield index

    stream = numbers.remote()
    until(lambda: file.exists() and len(file.read_text()) >= 2)
    assert len(file.read_text()) <= 3
    assert [ray.get(ref) for ref in stream] == list(range(6))
