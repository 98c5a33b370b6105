"""Options of @remote and .options(): Ray's names, defaults and refusals; the shapes they ask for."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.api.options import STREAMS, ActorOptions, TaskOptions, check_num_returns
from hpcray.api.placement_group import PlacementGroup
from hpcray.common.resources import UNIT
from hpcray.protocol.messages import Shape
from hpcray.util.scheduling_strategies import (
    DoesNotExist,
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    NotIn,
    PlacementGroupSchedulingStrategy,
)

NODE = "0123abcd" * 7


def held(**options: Any) -> dict[str, int]:
    return dict(ActorOptions(options).hold.resources)


def placed(**options: Any) -> dict[str, int]:
    return dict(ActorOptions(options).place.resources)


def asked(**options: Any) -> dict[str, int]:
    return dict(TaskOptions(options).shape.resources)


def test_tasks_have_the_default_options_of_ray() -> None:
    options = TaskOptions()
    assert options.shape == Shape(resources=(("CPU", UNIT),))
    assert (options.num_returns, options.max_retries, options.name) == (1, 3, "")
    assert options.retry_exceptions is False
    assert options.max_calls == 0


def test_actors_have_the_default_options_of_ray() -> None:
    options = ActorOptions()
    assert options.place == Shape(resources=(("CPU", UNIT),))
    assert options.hold == Shape(resources=())
    assert (options.name, options.namespace, options.get_if_exists) == ("", "", False)
    assert (options.max_restarts, options.max_task_retries, options.max_pending_calls) == (0, 0, -1)
    assert options.max_concurrency is None


def test_resource_options_become_the_shape_of_a_task() -> None:
    shape = TaskOptions({"num_cpus": 0.5, "num_gpus": 2, "memory": 1000, "resources": {"acc": 1e-4, "b": 0}}).shape
    assert shape.resources == (("CPU", 5_000), ("GPU", 20_000), ("acc", 1), ("memory", 10_000_000))
    assert asked(num_cpus=0) == {}
    assert asked(accelerator_type="A100") == {"CPU": UNIT, "accelerator_type:A100": 10}


def test_equal_options_in_another_order_share_a_shape() -> None:
    first = TaskOptions({"resources": {"a": 1, "b": 2}, "runtime_env": {"env_vars": {"X": "1", "Y": "2"}}})
    second = TaskOptions({"runtime_env": {"env_vars": {"Y": "2", "X": "1"}}, "resources": {"b": 2, "a": 1}})
    assert first.shape == second.shape
    assert hash(first.shape) == hash(second.shape)
    assert first.shape.env == (("X", "1"), ("Y", "2"))


@pytest.mark.parametrize(
    ("options", "place", "hold"),
    [
        ({}, {"CPU": 1}, {}),
        ({"num_cpus": 0}, {}, {}),
        ({"num_cpus": 2}, {"CPU": 2}, {"CPU": 2}),
        ({"num_gpus": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}),
        ({"num_gpus": 1, "num_cpus": 0}, {"GPU": 1}, {"GPU": 1}),
        ({"resources": {"a": 1}}, {"CPU": 1, "a": 1}, {"CPU": 1, "a": 1}),
        ({"memory": 5}, {"CPU": 1, "memory": 5}, {"memory": 5}),
    ],
)
def test_actors_are_placed_by_more_than_they_hold(
    options: dict[str, Any], place: dict[str, int], hold: dict[str, int]
) -> None:
    assert placed(**options) == {name: amount * UNIT for name, amount in place.items()}
    assert held(**options) == {name: amount * UNIT for name, amount in hold.items()}


@given(st.integers(min_value=1, max_value=UNIT))
def test_k_requests_of_one_kth_fit_into_one_unit(k: int) -> None:
    share = asked(num_gpus=1 / k)["GPU"]
    assert share * k <= UNIT < (share + 1) * k


@given(st.decimals(min_value=0, max_value=1000, places=4))
def test_amounts_with_four_decimals_are_exact(amount: Any) -> None:
    assert asked(num_cpus=float(amount)).get("CPU", 0) == int(amount * UNIT)
    if amount <= 1:
        assert asked(num_cpus=0, num_gpus=float(amount)).get("GPU", 0) == int(amount * UNIT)


@pytest.mark.parametrize("kind", [TaskOptions, ActorOptions])
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_cpu": 1}, ValueError, "Invalid option keyword num_cpu for .*'num_cpus'"),
        ({"num_cpus": "2"}, TypeError, "type of keyword 'num_cpus' .*float.*int.*NoneType.*str"),
        ({"num_cpus": -1}, ValueError, "num_cpus cannot be negative"),
        ({"num_gpus": 1e-5}, ValueError, "num_gpus cannot go beyond 0.0001"),
        ({"num_cpus": float("nan")}, ValueError, "num_cpus must be finite"),
        ({"num_cpus": float("inf")}, ValueError, "num_cpus must be finite"),
        ({"resources": {"CPU": 1}}, ValueError, "'num_cpus' and 'num_gpus' keyword instead"),
        ({"resources": {"GPU": 1}}, ValueError, "'num_cpus' and 'num_gpus' keyword instead"),
        ({"resources": {"memory": 1}}, ValueError, "'memory' keyword instead"),
        ({"resources": {"a": -1}}, ValueError, "a cannot be negative"),
        ({"resources": {"a": "x"}}, ValueError, "a must be a number"),
        ({"resources": {1: 1}}, ValueError, "non-empty str"),
        ({"resources": [1]}, TypeError, "resources"),
        ({"scheduling_strategy": 3}, TypeError, "scheduling_strategy"),
        ({"runtime_env": {"env_vars": {"A": 1}}}, TypeError, "Dict.str, str.*value 1 is of type.*in 'A'"),
        ({"runtime_env": {"env_vars": ["A"]}}, TypeError, "env_vars"),
        ({"runtime_env": "x"}, TypeError, "runtime_env"),
        ({"name": 3}, TypeError, "name"),
        ({"placement_group": PlacementGroup.empty(), "scheduling_strategy": "SPREAD"}, ValueError, "deprecated"),
        ({"placement_group": object()}, TypeError, "placement_group"),
    ],
)
def test_invalid_options_of_tasks_and_actors_are_refused(
    kind: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_gpus": 1.5}, "GPU resource quantities >1 must be whole numbers"),
        ({"scheduling_strategy": "FOO"}, "Invalid scheduling_strategy value FOO"),
    ],
)
def test_some_invalid_options_are_refused_only_at_submission(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _ = TaskOptions(options).shape
    for shape in ("place", "hold"):
        with pytest.raises(ValueError, match=text):
            getattr(ActorOptions(options), shape)


@pytest.mark.parametrize(
    ("kind", "options", "error", "text"),
    [
        (TaskOptions, {"max_restarts": 1}, ValueError, "max_restarts for remote functions"),
        (TaskOptions, {"max_retries": -2}, ValueError, "'max_retries' only accepts .*-1 represents infinity"),
        (TaskOptions, {"num_returns": -1}, ValueError, "num_returns"),
        (TaskOptions, {"num_returns": 2.5}, TypeError, "num_returns"),
        (TaskOptions, {"num_returns": "many"}, ValueError, "'streaming' .*or 'dynamic'"),
        (TaskOptions, {"retry_exceptions": [int]}, ValueError, "boolean or a list of exceptions"),
        (TaskOptions, {"object_store_memory": 1}, ValueError, "not implemented for tasks"),
        (TaskOptions, {"max_calls": -1}, ValueError, "max_calls"),
        (ActorOptions, {"max_retries": 1}, ValueError, "max_retries for actors"),
        (ActorOptions, {"num_returns": 1}, ValueError, "num_returns for actors"),
        (ActorOptions, {"name": ""}, ValueError, "empty string"),
        (ActorOptions, {"lifetime": "long"}, ValueError, "'detached'"),
        (ActorOptions, {"get_if_exists": True}, ValueError, "name must be specified"),
        (ActorOptions, {"max_concurrency": 0}, ValueError, "max_concurrency"),
        (ActorOptions, {"max_restarts": -2}, ValueError, "max_restarts"),
    ],
)
def test_invalid_options_of_tasks_or_actors_are_refused(
    kind: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(options)


def test_merging_options_leaves_the_original_unchanged() -> None:
    base = TaskOptions({"num_cpus": 2, "num_returns": 2, "name": "a"})
    other = base.merged(num_cpus=1, max_retries=-1)
    assert dict(other.shape.resources) == {"CPU": UNIT}
    assert (other.num_returns, other.max_retries, other.name) == (2, -1, "a")
    assert dict(base.shape.resources) == {"CPU": 2 * UNIT}
    assert type(ActorOptions().merged(max_restarts=3)) is ActorOptions
    with pytest.raises(ValueError, match="no_such"):
        base.merged(no_such=1)


def test_options_of_the_decorator_alone_are_refused_by_options() -> None:
    assert TaskOptions({"max_calls": 1}).max_calls == 1
    with pytest.raises(ValueError, match="max_calls"):
        TaskOptions().merged(max_calls=1)
    with pytest.raises(ValueError, match="concurrency_groups"):
        ActorOptions().merged(concurrency_groups={"io": 1})


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (None, ""),
        ("DEFAULT", ""),
        ("SPREAD", "SPREAD"),
        (NodeAffinitySchedulingStrategy(NODE, False), f"node_id:{NODE}"),
        (NodeAffinitySchedulingStrategy(NODE, soft=True), f"node_id:{NODE}:soft"),
        (NodeAffinitySchedulingStrategy(bytes.fromhex(NODE), soft=True), f"node_id:{NODE}:soft"),
        (NodeAffinitySchedulingStrategy(NODE, False, _fail_on_unavailable=True), f"node_id:{NODE}:fail"),
        (
            NodeAffinitySchedulingStrategy(NODE, True, _spill_on_unavailable=True),
            f'labels:[false,[[["ray.io/node-id","in",["{NODE}"]]],[]]]',
        ),
        (PlacementGroupSchedulingStrategy(None), ""),
    ],
)
def test_scheduling_strategies_become_strategy_texts(strategy: Any, text: str) -> None:
    assert TaskOptions({"scheduling_strategy": strategy}).shape.strategy == text
    actor = ActorOptions({"scheduling_strategy": strategy})
    assert (actor.place.strategy, actor.hold.strategy) == (text, text)


UNSUPPORTED: list[dict[str, Any]] = [
    {"runtime_env": {"conda": "base", "env_vars": {"A": "1"}}},
    {"runtime_env": {"container": {"image": "i"}}},
]


@pytest.mark.parametrize("options", UNSUPPORTED, ids=lambda options: next(iter(options)))
def test_unsupported_options_are_refused_when_used_not_before(options: dict[str, Any]) -> None:
    task, actor = TaskOptions(options), ActorOptions(options)
    for holder, shape in ((task, "shape"), (actor, "place"), (actor, "hold"), (task.merged(num_cpus=2), "shape")):
        with pytest.raises(NotImplementedError, match=r"not supported.*hint:"):
            getattr(holder, shape)
    assert task.merged(**dict.fromkeys(options)).shape == TaskOptions().shape
    assert task.num_returns == 1


def test_num_returns_becomes_a_number() -> None:
    for how in ("streaming", "dynamic"):
        assert TaskOptions({"num_returns": how}).num_returns == STREAMS == check_num_returns(how)
    assert (check_num_returns(None), check_num_returns(0), check_num_returns(3)) == (1, 0, 3)
    with pytest.raises(ValueError, match="num_returns"):
        check_num_returns(-1)


def test_gpu_tasks_have_max_calls_one() -> None:
    assert TaskOptions({"num_gpus": 1}).max_calls == 1
    assert TaskOptions({"num_gpus": 0}).max_calls == 0
    assert TaskOptions({"num_gpus": 1, "max_calls": 0}).max_calls == 0


@pytest.mark.parametrize("groups", [{"io": 2}, [{"name": "io", "max_concurrency": 2}]], ids=str)
def test_concurrency_groups_become_limits_by_name(groups: Any) -> None:
    assert ActorOptions({"concurrency_groups": groups}).concurrency_groups == {"io": 2}
    assert ActorOptions().concurrency_groups == {}


@pytest.mark.parametrize("groups", [{"io": True}, {"": 1}, {1: 1}, ["io"], [{"name": "io"}]], ids=str)
def test_invalid_concurrency_groups_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match="concurrency_groups"):
        ActorOptions({"concurrency_groups": groups})


@pytest.mark.parametrize("env", [None, {}, {"pip": None, "working_dir": ""}, {"env_vars": {}}, {"config": {"t": 1}}])
def test_empty_runtime_envs_are_accepted(env: Any) -> None:
    assert TaskOptions({"runtime_env": env}).shape == TaskOptions().shape


def test_actor_object_store_memory_warns() -> None:
    with pytest.warns(DeprecationWarning, match="Setting 'object_store_memory' for actors is deprecated"):
        assert ActorOptions({"object_store_memory": 10}).hold.resources == ()


def test_unknown_attributes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = TaskOptions().nonsense
    with pytest.raises(AttributeError):
        _ = TaskOptions().place


@pytest.mark.parametrize("options", [TaskOptions({"num_cpus": 2}), TaskOptions(UNSUPPORTED[-1]), ActorOptions()])
def test_options_can_be_pickled(options: Any) -> None:
    assert pickle.loads(pickle.dumps(options)) == options


def test_scheduling_strategies_check_their_arguments() -> None:
    for node in ("", "xyz", "abc", "f" * 56):
        with pytest.raises(ValueError, match="Invalid node_id"):
            NodeAffinitySchedulingStrategy(node, False)
    with pytest.raises(ValueError, match="cannot be set when soft is False"):
        NodeAffinitySchedulingStrategy(NODE, False, _spill_on_unavailable=True)
    with pytest.raises(ValueError, match="cannot be set when soft is True"):
        NodeAffinitySchedulingStrategy(NODE, True, _fail_on_unavailable=True)
    for operator in (In, NotIn):
        with pytest.raises(ValueError, match="must be a non-empty tuple"):
            operator()
        with pytest.raises(ValueError, match="Type of value in position 1 for the .*In operator must be str"):
            operator("a", 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot both be empty"):
        NodeLabelSchedulingStrategy({})
    with pytest.raises(ValueError, match="must be one of the `In`, `NotIn`, `Exists` or `DoesNotExist` operator"):
        NodeLabelSchedulingStrategy({"a": "b"})  # type: ignore[dict-item]
    strategy = NodeLabelSchedulingStrategy({"a": Exists()}, soft={"b": DoesNotExist()})
    assert [expression.key for expression in strategy.hard + strategy.soft] == ["a", "b"]


def test_the_error_for_a_mistyped_option_suggests_the_right_one() -> None:
    with pytest.raises(ValueError, match=r"Invalid option keyword num_cpu for .*\. Did you mean num_cpus\?"):
        TaskOptions({"num_cpu": 1})
