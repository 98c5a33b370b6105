"""The hooks of Ray that are called at each launch of a task or actor, with which Tune checks what its trials start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


class Refused(Exception):
    pass


@pytest.fixture
def launches(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    import ray.actor
    import ray.remote_function

    seen: list[Any] = []

    def hook(function: Any, resources: dict[str, float], strategy: Any) -> None:
        if resources.get("CPU") == 3:
            raise Refused
        kind = type(strategy).__name__ if not isinstance(strategy, str) else strategy
        seen.append((function.class_name, function.function_name, {k: v for k, v in resources.items() if v}, kind))

    with monkeypatch.context() as patched:
        patched.setattr(ray.remote_function, "_task_launch_hook", hook)
        patched.setattr(ray.actor, "_actor_launch_hook", hook)
        yield seen
    before = len(seen)
    assert ray.get(ray.remote(lambda: 1).remote()) == 1
    assert len(seen) == before and ray.remote_function._task_launch_hook is None


def one() -> int:
    return 1


class Actor:
    def one(self) -> int:
        return 1


def test_each_launch_of_a_task_is_seen(ray: Any, launches: list[Any]) -> None:
    task = ray.remote(one)
    assert ray.get([task.remote(), task.remote(), task.options(num_cpus=0.5, name="x").remote()]) == [1, 1, 1]
    assert launches == [("", "one", {"CPU": 1}, "DEFAULT")] * 2 + [("", "one", {"CPU": 0.5}, "DEFAULT")]


def test_a_function_used_before_the_hook_was_set_is_seen_too(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.remote_function

    task, seen = ray.remote(one), []
    assert ray.get(task.remote()) == 1
    with monkeypatch.context() as patched:
        patched.setattr(ray.remote_function, "_task_launch_hook", lambda *given: seen.append(given))
        assert ray.get(task.remote()) == 1
    assert ray.get(task.remote()) == 1 and len(seen) == 1


def test_launches_of_actors_are_seen_and_calls_are_not(ray: Any, launches: list[Any]) -> None:
    actor = ray.remote(num_cpus=1)(Actor).remote()
    assert ray.get(actor.one.remote()) == 1
    assert launches == [("Actor", "__init__", {"CPU": 1}, "DEFAULT")]


def test_the_group_in_force_is_the_strategy(ray: Any, launches: list[Any]) -> None:
    group = ray.util.placement_group([{"CPU": 1}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
    assert ray.get(ray.remote(one).options(scheduling_strategy=strategy).remote(), timeout=30) == 1
    assert launches == [("", "one", {"CPU": 1}, "PlacementGroupSchedulingStrategy")]
    ray.util.remove_placement_group(group)


def test_what_a_hook_raises_is_raised_by_the_launch(ray: Any, launches: list[Any]) -> None:
    with pytest.raises(Refused):
        ray.remote(num_cpus=3)(one).remote()
    with pytest.raises(Refused):
        ray.remote(num_cpus=3)(Actor).remote()


def test_a_worker_sets_hooks_of_its_own(ray: Any) -> None:
    @ray.remote(num_cpus=0)
    def trial() -> Any:
        import ray.remote_function

        def refuse(function: Any, resources: Any, strategy: Any) -> None:
            raise RuntimeError(f"no room for {function.function_name}")

        ray.remote_function._task_launch_hook = refuse
        try:
            return ray.remote(one).remote()
        except RuntimeError as error:
            return str(error)
        finally:
            ray.remote_function._task_launch_hook = None

    assert ray.get(trial.remote()) == "no room for one"
