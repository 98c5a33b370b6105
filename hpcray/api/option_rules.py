"""The options of tasks and actors by name: allowed types, allowed values, defaults. Those of Ray 2.60."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcray.api.scheduling import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from hpcray.base import labels
from hpcray.base.resources import UNIT
from hpcray.host.runtime_env import checked

_NONE = type(None)
STREAMS = -1
"""`num_returns` of generators, inside."""
NO_YIELDS_OF_MANY = (
    "the option _num_objects_per_yield is not supported; hint: leave it out, and yield one object at a time"
)

NO_GRAPHS = "hpcray does not have .bind(): (compiled) graphs are not supported; hint: call .remote() instead"


@dataclass(frozen=True)
class Rule:
    """What one option accepts. `problem` returns what is wrong with a value, or None."""

    types: tuple[type, ...] = ()
    problem: Callable[[Any], str | None] | None = None
    default: Any = None

    def check(self, keyword: str, value: Any) -> None:
        """Raise TypeError or ValueError if `value` is not allowed."""
        if self.types and not isinstance(value, self.types):
            names = ", ".join("None" if kind is _NONE else kind.__name__ for kind in self.types)
            raise TypeError(
                f"The type of keyword '{keyword}' must be one of ({names}), "
                f"but received {value!r} of type {type(value)}"
            )
        problem = self.problem(value) if self.problem else None
        if problem:
            raise ValueError(problem)


def _count(name: str, *, minimum: int, default: int | None = None) -> Rule:
    allowed = {
        -1: "None, 0, -1 or a positive integer, where -1 represents infinity",
        0: "None, 0 or a positive integer",
    }.get(minimum, "None or a positive integer")

    def problem(value: Any) -> str | None:
        if value is None or value >= minimum:
            return None
        return f"The keyword '{name}' only accepts {allowed}; got {value}."

    return Rule((int, _NONE), problem, default)


def _amount_problem(name: object, value: Any) -> str | None:
    if not isinstance(value, (int, float)):
        return f"The quantity of resource {name} must be a number, but is {value!r}"
    if not math.isfinite(value):
        return f"The quantity of resource {name} must be finite, but is {value!r}"
    if value < 0:
        return f"The quantity of resource {name} cannot be negative; got {value}"
    if 0 < value < 1 / UNIT:
        return f"The precision of the fractional quantity of resource {name} cannot go beyond {1 / UNIT}; got {value}"
    return None


def _amount(name: str, default: float | None = None) -> Rule:
    def problem(value: Any) -> str | None:
        return None if value is None else _amount_problem(name, value)

    return Rule((float, int, _NONE), problem, default)


def _resources_problem(resources: Any) -> str | None:
    for name, amount in (resources or {}).items():
        if not isinstance(name, str) or not name:
            return f"A resource name must be a non-empty str, but is {name!r}"
        if name in ("CPU", "GPU"):
            return "Use the 'num_cpus' and 'num_gpus' keyword instead of 'CPU' and 'GPU' in 'resources' keyword"
        if name in ("memory", "object_store_memory"):
            return f"Use the '{name}' keyword instead of '{name}' in 'resources' keyword"
        problem = _amount_problem(name, amount)
        if problem:
            return problem
    return None


def problem_at_submission(given: Mapping[str, Any]) -> str:
    """What is wrong with options that, as in Ray, `.remote()` refuses and not `.options()`; "" if nothing is."""
    gpus, strategy = given.get("num_gpus"), given.get("scheduling_strategy")
    if gpus is not None and gpus > 1 and gpus != int(gpus):
        return f"GPU resource quantities >1 must be whole numbers. The specified quantity {gpus} is invalid."
    if isinstance(strategy, str) and strategy not in ("DEFAULT", "SPREAD"):
        return (
            f"Invalid scheduling_strategy value {strategy}. Valid values are "
            '["DEFAULT" | "SPREAD" | PlacementGroupSchedulingStrategy | NodeAffinitySchedulingStrategy '
            "| NodeLabelSchedulingStrategy]"
        )
    return ""


def _group_problem(value: Any) -> str | None:
    """Its class needs the session, and that needs these rules: it is known by its name here."""
    if value is None or isinstance(value, str) or type(value).__name__ == "PlacementGroup":
        return None
    return f"it must be a PlacementGroup, 'default' or None, but is {value!r} of type {type(value)}"


def _num_returns_problem(value: Any) -> str | None:
    if value is None or value in ("dynamic", "streaming") or (isinstance(value, int) and value >= 0):
        return None
    return (
        f"The keyword 'num_returns' only accepts None, a non-negative integer, 'streaming' or 'dynamic'; got {value!r}"
    )


def _retry_problem(value: Any) -> str | None:
    if isinstance(value, bool) or all(isinstance(cls, type) and issubclass(cls, Exception) for cls in value):
        return None
    return f"retry_exceptions must be either a boolean or a list of exceptions; got {value!r}"


class _TypeRule(Rule):
    def check(self, keyword: str, value: Any) -> None:
        problem = self.problem(value) if self.problem else None
        if problem:
            raise TypeError(f"The type of keyword '{keyword}' is wrong: {problem}")


class _RuntimeEnvRule(Rule):
    def check(self, keyword: str, value: Any) -> None:
        super().check(keyword, value)
        checked(value)


def _groups_problem(value: Any) -> str | None:
    rows = value if isinstance(value, list) else ({"name": k, "max_concurrency": v} for k, v in (value or {}).items())
    for row in rows:
        name, limit = (row.get("name"), row.get("max_concurrency")) if isinstance(row, dict) else (row, None)
        if not isinstance(name, str) or not name or isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            return (
                "concurrency_groups must give each group, a non-empty name, its max_concurrency, an integer of at "
                f'least 1, as in {{"io": 2}}; got {value!r}'
            )
    return None


def _lifetime_problem(value: Any) -> str | None:
    if value in (None, "detached", "non_detached"):
        return None
    return f"actor `lifetime` argument must be one of 'detached', 'non_detached' and 'None'; got {value!r}."


def _actor_name_problem(value: Any) -> str | None:
    return "Actor name cannot be an empty string." if value == "" else None


def _backpressure_problem(value: Any) -> str | None:
    if value is None or value > 0 or value == -1:
        return None
    return f"generator backpressure must be a positive number of objects, or -1 to disable it; got {value}"


def _runtime_problem(value: Any) -> str | None:
    if value is None or (not isinstance(value, bool) and 0 < value < math.inf):
        return None
    return f"The keyword 'max_runtime' only accepts None or a positive number of seconds; got {value!r}."


_COMMON: dict[str, Rule] = {
    "label_selector": Rule((dict, _NONE), labels.selector_problem),
    "fallback_strategy": Rule((list, _NONE), labels.fallback_problem),
    "accelerator_type": Rule((str, _NONE)),
    "memory": _amount("memory"),
    "name": Rule((str, _NONE)),
    "num_cpus": _amount("num_cpus"),
    "num_gpus": _amount("num_gpus"),
    "object_store_memory": _count("object_store_memory", minimum=0),
    "placement_group": _TypeRule(problem=_group_problem, default="default"),
    "placement_group_bundle_index": Rule((int,), default=-1),
    "placement_group_capture_child_tasks": Rule((bool, _NONE)),
    "resources": Rule((dict, _NONE), _resources_problem),
    "runtime_env": _RuntimeEnvRule((dict, _NONE)),
    "scheduling_strategy": Rule(
        (
            _NONE,
            str,
            PlacementGroupSchedulingStrategy,
            NodeAffinitySchedulingStrategy,
            NodeLabelSchedulingStrategy,
        )
    ),
    "enable_task_events": Rule((bool,), default=True),
    "_labels": Rule((dict, _NONE)),
    "max_runtime": Rule((float, int, _NONE), _runtime_problem),  # hpcray's own: seconds that it takes at most
}

TASK_RULES: Mapping[str, Rule] = {
    **_COMMON,
    "max_calls": _count("max_calls", minimum=0, default=0),
    "max_retries": _count("max_retries", minimum=-1, default=3),
    "num_cpus": _amount("num_cpus", default=1),
    "num_returns": Rule((int, str, _NONE), _num_returns_problem),
    "object_store_memory": Rule(
        (int, _NONE),
        lambda value: None if value is None else "Setting 'object_store_memory' is not implemented for tasks",
    ),
    "retry_exceptions": Rule((bool, list, tuple), _retry_problem, default=False),
    "_generator_backpressure_num_objects": Rule((int, _NONE), _backpressure_problem),
    "_num_objects_per_yield": _count("_num_objects_per_yield", minimum=1, default=1),
}

ACTOR_RULES: Mapping[str, Rule] = {
    **_COMMON,
    "name": Rule((str, _NONE), _actor_name_problem),
    "concurrency_groups": Rule((list, dict, _NONE), _groups_problem),
    "enable_tensor_transport": Rule((bool, _NONE)),
    "lifetime": Rule((str, _NONE), _lifetime_problem),
    "max_concurrency": _count("max_concurrency", minimum=1),
    "max_restarts": _count("max_restarts", minimum=-1, default=0),
    "max_task_retries": _count("max_task_retries", minimum=-1, default=0),
    "max_pending_calls": _count("max_pending_calls", minimum=-1, default=-1),
    "namespace": Rule((str, _NONE)),
    "get_if_exists": Rule((bool,), default=False),
    "allow_out_of_order_execution": Rule((bool, _NONE)),
    "_actor_generator_backpressure_num_objects": Rule((int, _NONE), _backpressure_problem),
}


METHOD_RULES: Mapping[str, Rule] = {
    "num_returns": TASK_RULES["num_returns"],
    "concurrency_group": Rule((str, _NONE)),
    "max_task_retries": ACTOR_RULES["max_task_retries"],
    "retry_exceptions": Rule(
        (bool, list, tuple, _NONE), lambda value: None if value is None else _retry_problem(value)
    ),
    "enable_task_events": Rule((bool, _NONE)),
    "tensor_transport": Rule((str, _NONE)),
    "_generator_backpressure_num_objects": TASK_RULES["_generator_backpressure_num_objects"],
    "_num_objects_per_yield": TASK_RULES["_num_objects_per_yield"],
}


def unsupported_by_methods(given: Mapping[str, Any]) -> str:
    """Why calls of a method with these options are refused; "" if they are not."""
    if given.get("tensor_transport") not in (None, "object_store"):
        return f"tensor_transport={given['tensor_transport']!r} is not supported; hint: leave it out"
    return NO_YIELDS_OF_MANY if (given.get("_num_objects_per_yield") or 1) != 1 else ""


def check_num_returns(value: Any) -> int:
    """`num_returns` of a method: None means 1, "streaming" and "dynamic" are `STREAMS`.

    Raises:
        TypeError, ValueError: none of these, nor a non-negative integer.
    """
    TASK_RULES["num_returns"].check("num_returns", value)
    if isinstance(value, str):
        return STREAMS
    return 1 if value is None else int(value)
