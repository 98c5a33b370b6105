"""Values of the option `scheduling_strategy`, which users import from `hpcray.util.scheduling_strategies`, and the
hooks that each launch calls with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct

from hpcray.common.labels import DOES_NOT_EXIST, EXISTS, IN, NOT_IN, Condition, Conditions
from hpcray.runtime.core_worker.core_worker import current

_NODE_ID_BYTES = 28
_NIL = b"\xff" * _NODE_ID_BYTES


@dataclass(eq=False)
class PlacementGroupSchedulingStrategy:
    """Run in a bundle of a placement group.

    Args:
        placement_group: the group; None for no group.
        placement_group_bundle_index: index of the bundle; -1 for any bundle.
        placement_group_capture_child_tasks: run child tasks in the group too.
    """

    placement_group: Any
    placement_group_bundle_index: int = -1
    placement_group_capture_child_tasks: bool | None = None


class NodeAffinitySchedulingStrategy:
    """Run on one node.

    Args:
        node_id: id of the node in hex, as in `nodes()`.
        soft: use another node where this one is dead or can never run the task.
        _spill_on_unavailable: with `soft`, use another node also while this one is busy.
        _fail_on_unavailable: without `soft`, fail while the node is busy instead of waiting.

    Raises:
        ValueError: the id is not valid, or the private flags contradict `soft`.
    """

    def __init__(
        self, node_id: str | bytes, soft: bool, _spill_on_unavailable: bool = False, _fail_on_unavailable: bool = False
    ) -> None:
        text = node_id if isinstance(node_id, str) else node_id.hex()
        try:
            ident = bytes.fromhex(text)
        except ValueError:
            ident = b""
        if len(ident) != _NODE_ID_BYTES or ident == _NIL:
            raise ValueError(
                f"Invalid node_id '{text}'. Node ID must be a valid hex string. To get a list of all nodes and their "
                "IDs in your cluster, use ray.nodes()."
            )
        if _spill_on_unavailable and not soft:
            raise ValueError(
                "_spill_on_unavailable cannot be set when soft is False. Please set soft to True to use "
                "_spill_on_unavailable."
            )
        if _fail_on_unavailable and soft:
            raise ValueError(
                "_fail_on_unavailable cannot be set when soft is True. Please set soft to False to use "
                "_fail_on_unavailable."
            )
        self.node_id = text
        self.soft = soft
        self._spill_on_unavailable = _spill_on_unavailable
        self._fail_on_unavailable = _fail_on_unavailable

    def __repr__(self) -> str:
        return f"NodeAffinitySchedulingStrategy(node_id={self.node_id!r}, soft={self.soft})"


class _ValuesOperator:
    def __init__(self, *values: str) -> None:
        name = type(self).__name__
        if not values:
            raise ValueError(
                f"The variadic parameter of the {name} operator must be a non-empty tuple: "
                f'e.g. {name}("value1", "value2").'
            )
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise ValueError(
                    f"Type of value in position {index} for the {name} operator must be str "
                    f'(e.g. {name}("value1", "value2")) but got {value} of type {type(value)}.'
                )
        self.values = list(values)


class In(_ValuesOperator):
    """The node has the label with one of these values."""


class NotIn(_ValuesOperator):
    """The node does not have the label with any of these values."""


class Exists:
    """The node has the label."""


class DoesNotExist:
    """The node does not have the label."""


LabelOperator = In | NotIn | Exists | DoesNotExist
LabelMatchExpressionsT = Mapping[str, LabelOperator]


class LabelMatchExpression(Struct, frozen=True):
    """One condition on one label of a node."""

    key: str
    operator: LabelOperator


class NodeLabelSchedulingStrategy:
    """Run on a node whose labels match, for example `{"region": In("us"), "gpu_type": Exists()}`.

    Args:
        hard: conditions that must hold.
        soft: conditions that should hold.

    Raises:
        ValueError: both are empty, or one is no mapping from label to operator.
    """

    def __init__(self, hard: LabelMatchExpressionsT | None, *, soft: LabelMatchExpressionsT | None = None) -> None:
        self.hard = _expressions(hard, "hard")
        self.soft = _expressions(soft, "soft")
        if not (self.hard or self.soft):
            raise ValueError("The `hard` and `soft` parameter of NodeLabelSchedulingStrategy cannot both be empty.")


def _expressions(given: LabelMatchExpressionsT | None, what: str) -> list[LabelMatchExpression]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise ValueError(
            f'The {what} parameter must be a map (e.g. {{"key1": In("value1")}}) but got type {type(given)}.'
        )
    for key, operator in given.items():
        if not isinstance(key, str):
            raise ValueError(
                f'The map key of the {what} parameter must be of type str (e.g. {{"key1": In("value1")}}) '
                f"but got {key} of type {type(key)}."
            )
        if not isinstance(operator, (In, NotIn, Exists, DoesNotExist)):
            raise ValueError(
                f"The map value for key {key} of the {what} parameter must be one of the `In`, `NotIn`, `Exists` or "
                f'`DoesNotExist` operator (e.g. {{"key1": In("value1")}}) but got {operator} of type {type(operator)}.'
            )
    return [LabelMatchExpression(key, operator) for key, operator in given.items()]


def with_labels(strategy: NodeLabelSchedulingStrategy, alternatives: Sequence[Conditions]) -> list[Conditions]:
    """Add the conditions of a strategy to each alternative: first with the soft conditions, then without."""
    hard, soft = _conditions(strategy.hard), _conditions(strategy.soft)
    return [tuple(sorted({*alternative, *more})) for alternative in alternatives for more in ((*hard, *soft), hard)]


def _conditions(expressions: Sequence[LabelMatchExpression]) -> Conditions:
    return tuple(_condition(expression.key, expression.operator) for expression in expressions)


def _condition(key: str, operator: LabelOperator) -> Condition:
    if isinstance(operator, _ValuesOperator):
        return key, IN if isinstance(operator, In) else NOT_IN, tuple(sorted(set(operator.values)))
    return key, EXISTS if isinstance(operator, Exists) else DOES_NOT_EXIST, ()


SchedulingStrategyT = (
    str | PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy | NodeLabelSchedulingStrategy | None
)


# ------------------------------------------------------------ launch hooks
# Functions that are called at each launch of a task or actor from this process, before it is submitted. Ray's libraries
# set them: a trial of Tune refuses a task that none of its bundles has room for, which would wait for ever. Where there
# is none, launches cost nothing more.


class LaunchedFunction(NamedTuple):
    """The function of a task, or the constructor of an actor. class_name: of the actor; "" for a task."""

    module_name: str
    class_name: str
    function_name: str


LaunchHook = Callable[[LaunchedFunction, Mapping[str, float], Any], object]
"""Called with the function, the resources, and the scheduling strategy: that of a placement group too if it comes from
the caller. What it raises is raised by `remote()`."""


task_hooks: list[LaunchHook] = []
"""The hook of tasks, if there is one."""
actor_hooks: list[LaunchHook] = []
"""The hook of actors, if there is one."""


def set_task_launch_hook(hook: LaunchHook | None) -> None:
    """Have `hook` called at each launch of a task; None: no more."""
    task_hooks[:] = [hook] if hook is not None else []
    process = current.process
    for function in list(process.placement_groups.bound) if process is not None else ():
        function.unbind()  # their next calls find out that there is a hook


def set_actor_launch_hook(hook: LaunchHook | None) -> None:
    """Have `hook` called at each launch of an actor; None: no more."""
    actor_hooks[:] = [hook] if hook is not None else []


def launched(hooks: list[LaunchHook], what: Any, resources: Mapping[str, float], strategy: Any) -> None:
    """Call the hook.

    Args:
        what: the function, or the class of an actor.
    """
    module, name = getattr(what, "__module__", ""), getattr(what, "__qualname__", "")
    is_class = isinstance(what, type)
    function = LaunchedFunction(module, name if is_class else "", "__init__" if is_class else name)
    for hook in hooks:
        hook(function, resources, strategy)


def strategy_in_force(given: Mapping[str, Any], group: tuple[Any, int, bool] | None) -> Any:
    """Return the strategy of a launch with these options, in this group with its bundle and whether it captures."""
    if group is not None:
        return PlacementGroupSchedulingStrategy(*group)
    return given.get("scheduling_strategy") or "DEFAULT"
