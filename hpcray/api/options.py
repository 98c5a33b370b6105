"""Options of tasks, actors and methods: their rules, as in Ray 2.60, and the resource shapes that they become."""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct

from hpcray.api.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
    with_labels,
)
from hpcray.common import labels
from hpcray.common.exceptions import RayDeprecationWarning, did_you_mean
from hpcray.common.labels import conditions, to_strategy
from hpcray.common.ray_version import RAY_VERSION
from hpcray.common.resources import ACCELERATOR_TYPE, ACCELERATOR_TYPE_SHARE, UNIT, Resources, to_units
from hpcray.platform.accelerators import KINDS, Accelerator
from hpcray.platform.config_files import configured_environment
from hpcray.protocol.messages import Shape
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.extensions import read_extensions
from hpcray.runtime_env.runtime_env import unsupported_field_error, validated_runtime_env

if TYPE_CHECKING:
    from typing_extensions import Self

_ALL_STREAMS = "_actor_generator_backpressure_num_objects"
_NONE = type(None)
STREAMS = -1
"""Internal value of `num_returns` for generators."""
PER_YIELD = "_num_objects_per_yield"


class Rule(Struct, frozen=True):
    """Rule of one option, with the names of Ray's `Option`.

    `value_constraint` returns the text of a ValueError for a value that is not allowed, else None; for other errors it
    raises.
    """

    type_constraint: tuple[type, ...] = ()
    value_constraint: Callable[[Any], str | None] | None = None
    default_value: Any = None

    def validate(self, keyword: str, value: Any) -> None:
        """Raise TypeError or ValueError if `value` is not allowed."""
        types = self.type_constraint
        if types and not isinstance(value, types):
            raise TypeError(
                f"The type of keyword '{keyword}' must be {types if len(types) > 1 else types[0]}, but received type "
                f"{type(value)}; it is {value!r}"
            )
        problem = self.value_constraint(value) if self.value_constraint else None
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
        return f"The keyword '{name}' only accepts {allowed}. Got {value}."

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


def _resources_problem(resources: Any, kinds: Mapping[str, Accelerator] = KINDS) -> str | None:
    for name, amount in (resources or {}).items():
        if not isinstance(name, str) or not name:
            return f"A resource name must be a non-empty str, but is {name!r}"
        if name in ("CPU", "GPU"):
            return "Use the 'num_cpus' and 'num_gpus' keyword instead of 'CPU' and 'GPU' in 'resources' keyword"
        if name in ("memory", "object_store_memory"):
            return f"Use the '{name}' keyword instead of '{name}' in 'resources' keyword"
        problem = _amount_problem(name, amount)
        if problem is None and name in kinds:
            problem = kinds[name].amount_problem(amount)
        if problem:
            return problem
    return None


def problem_at_submission(given: Mapping[str, Any]) -> str:
    """Return the error text for options that `.remote()` refuses but `.options()` accepts, as in Ray; "" for none."""
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


_GROUP_DEPRECATED = (
    "placement_group parameter is deprecated. Use scheduling_strategy=PlacementGroupSchedulingStrategy(...) instead, "
    "see the usage at https://docs.ray.io/en/releases-{}/ray-core/package-ref.html#ray-remote."
)


def _group_problem(value: Any) -> str | None:
    """Check `placement_group`. The class is compared by name, since its module imports this one."""
    if value is None or isinstance(value, str) or type(value).__name__ == "PlacementGroup":
        return None
    raise TypeError(
        "The type of keyword 'placement_group' is wrong: it must be a PlacementGroup, 'default' or None, but is "
        f"{value!r} of type {type(value)}"
    )


def _num_returns_problem(value: Any) -> str | None:
    if value is None or value in ("dynamic", "streaming") or (isinstance(value, int) and value >= 0):
        return None
    return (
        "The keyword 'num_returns' only accepts None, a non-negative integer, 'streaming' (for generators), or "
        f"'dynamic', which is deprecated. Got {value!r}."
    )


def _retry_problem(value: Any) -> str | None:
    if isinstance(value, bool) or all(isinstance(cls, type) and issubclass(cls, Exception) for cls in value):
        return None
    return f"retry_exceptions must be either a boolean or a list of exceptions; got {value!r}"


def _runtime_env_problem(env: Any) -> str | None:
    validated_runtime_env(env)
    return None


def _groups_problem(value: Any) -> str | None:
    rows = value if isinstance(value, list) else ({"name": k, "max_concurrency": v} for k, v in (value or {}).items())
    for row in rows:
        name, limit = (row.get("name"), row.get("max_concurrency")) if isinstance(row, dict) else (row, None)
        if not isinstance(name, str) or not name or isinstance(limit, bool) or not isinstance(limit, int):
            return (
                "concurrency_groups must give each group, a non-empty name, its max_concurrency, a positive integer, "
                f'as in {{"io": 2}}; got {value!r}'
            )
    return None


def _lifetime_problem(value: Any) -> str | None:
    if value in (None, "detached", "non_detached"):
        return None
    return f"actor `lifetime` argument must be one of 'detached', 'non_detached' and 'None'; got {value!r}."


def _actor_name_problem(value: Any) -> str | None:
    return "Actor name cannot be an empty string." if value == "" else None


def _backpressure(name: str) -> Rule:
    def problem(value: Any) -> str | None:
        if value is None or value > 0 or value == -1:
            return None
        return (
            f"{name}={value} is not allowed. Use a value > 0: it must be > 0 to make a generator wait while so many of "
            "its values have not been taken. Use -1 to disable this feature."
        )

    return Rule((int, _NONE), problem)


def _seconds(name: str) -> Rule:
    def problem(value: Any) -> str | None:
        if value is None or (not isinstance(value, bool) and 0 < value < math.inf):
            return None
        return f"The keyword '{name}' only accepts None or a positive number of seconds; got {value!r}."

    return Rule((float, int, _NONE), problem)


_COMMON: dict[str, Rule] = {
    "label_selector": Rule((dict, _NONE), labels.selector_problem),
    "fallback_strategy": Rule((list, _NONE), labels.fallback_problem),
    "accelerator_type": Rule((str, _NONE)),
    "memory": _amount("memory"),
    "name": Rule((str, _NONE)),
    "num_cpus": _amount("num_cpus"),
    "num_gpus": _amount("num_gpus"),
    "object_store_memory": _count("object_store_memory", minimum=0),
    "placement_group": Rule(value_constraint=_group_problem, default_value="default"),
    "placement_group_bundle_index": Rule((int,), default_value=-1),
    "placement_group_capture_child_tasks": Rule((bool, _NONE)),
    "resources": Rule((dict, _NONE), _resources_problem),
    "runtime_env": Rule((dict, _NONE), _runtime_env_problem),
    "scheduling_strategy": Rule(
        (_NONE, str, PlacementGroupSchedulingStrategy, NodeAffinitySchedulingStrategy, NodeLabelSchedulingStrategy)
    ),
    "enable_task_events": Rule((bool,), default_value=True),
    "_labels": Rule((dict, _NONE)),
    "max_runtime": _seconds("max_runtime"),  # hpcray's own: longest run time in seconds
}

_EXTENSIONS = "HPCRAY_EXTENSIONS"
TRANSPORTS = ("auto", "cuda_ipc", "gloo", "nccl", "nixl", "object_store", "ucx")
"""Ways of the tensors in a value between processes, beside registered ones. By "object_store" they go with the value,
as ever."""


def transport_of(name: str | None) -> str:
    """Return the name of a tensor transport as workers get it; "" for that of all objects.

    Raises:
        ValueError: there is no such transport.
    """
    if name is None:
        return ""
    if (problem := _transport_problem(name)) is not None:
        raise ValueError(problem)
    return "" if name.lower() == "object_store" else name.lower()


def _transport_problem(name: str | None) -> str | None:
    if name is None or name.lower() in TRANSPORTS:
        return None
    from hpcray.tensors.tensor_transports import is_registered  # few programs have their own

    own = current.process.config.extensions if current.process is not None else _configured_extensions()
    if is_registered(name.lower()) or name.lower() in read_extensions(own):
        return None
    return f"Invalid tensor transport: {name.upper()}. hint: it is one of {', '.join(TRANSPORTS)}"


def _configured_extensions() -> str:
    return os.environ.get(_EXTENSIONS) or configured_environment(os.environ).get(_EXTENSIONS, "")


def _durable_problem(value: Any) -> str | None:
    if value:
        from hpcray.durable import read_durable  # few programs keep results

        read_durable(value)
    return None


TASK_RULES: Mapping[str, Rule] = {
    **_COMMON,
    "_expected_time": _seconds("_expected_time"),  # hpcray's own: seconds that its node should last
    "durable": Rule(value_constraint=_durable_problem),  # hpcray's own: results outlive the job
    "max_calls": _count("max_calls", minimum=0, default=0),
    "max_retries": _count("max_retries", minimum=-1, default=3),
    "num_cpus": _amount("num_cpus", default=1),
    "num_returns": Rule((int, str, _NONE), _num_returns_problem),
    "object_store_memory": Rule(
        (int, _NONE),
        lambda value: None if value is None else "Setting 'object_store_memory' is not implemented for tasks",
    ),
    "retry_exceptions": Rule((bool, list, tuple), _retry_problem, default_value=False),
    "tensor_transport": Rule((str, _NONE), _transport_problem),
    "_generator_backpressure_num_objects": _backpressure("_generator_backpressure_num_objects"),
    PER_YIELD: _count(PER_YIELD, minimum=1, default=1),
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
    "get_if_exists": Rule((bool,), default_value=False),
    "allow_out_of_order_execution": Rule((bool, _NONE)),
    "_actor_generator_backpressure_num_objects": _backpressure("_actor_generator_backpressure_num_objects"),
}


NODE_RULES = {**ACTOR_RULES, "resources": Rule((dict, _NONE), lambda value: _resources_problem(value, {}))}
"""Rules of what `init` gives a node: any number of chips, of which tasks ask for some numbers only."""


METHOD_RULES: Mapping[str, Rule] = {
    "num_returns": TASK_RULES["num_returns"],
    "concurrency_group": Rule((str, _NONE)),
    "max_task_retries": ACTOR_RULES["max_task_retries"],
    "retry_exceptions": Rule(
        (bool, list, tuple, _NONE), lambda value: None if value is None else _retry_problem(value)
    ),
    "enable_task_events": Rule((bool, _NONE)),
    "tensor_transport": Rule((str, _NONE), _transport_problem),
    "_generator_backpressure_num_objects": TASK_RULES["_generator_backpressure_num_objects"],
    PER_YIELD: TASK_RULES[PER_YIELD],
}


def stream_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ExtraOptions` that say how a generator's values are sent."""
    dynamic = given.get("num_returns") == "dynamic"
    return {
        "dynamic": dynamic,
        "window": given.get("_generator_backpressure_num_objects") or -1,
        "per_yield": 1 if dynamic else given.get(PER_YIELD) or 1,
    }


def yields(function: Any) -> bool:
    """Return True if what a function, or an object that is called, makes is a generator."""
    return any(
        inspect.isgeneratorfunction(made) or inspect.isasyncgenfunction(made)
        for made in (function, getattr(function, "__call__", None))  # noqa: B004  # of an object; functions have none
    )


def check_generator(num_returns: Any, is_generator: bool, stacklevel: int = 3) -> None:
    """Check what a program gave as `num_returns` of a function or method. Warns of "dynamic", which Ray will drop.

    Args:
        stacklevel: of that warning.

    Raises:
        ValueError: it wants the values of a generator from what is none.
    """
    if not isinstance(num_returns, str):
        return
    if num_returns == "dynamic":
        warnings.warn(
            "num_returns='dynamic' is deprecated and will be removed in a future release of Ray. hint: use "
            "num_returns='streaming' instead",
            RayDeprecationWarning,
            stacklevel=stacklevel,
        )
    if not is_generator:
        raise ValueError(
            f"num_returns='{num_returns}' can only be used with generator functions (functions that use 'yield'). The "
            "function is not a generator function."
        )


def check_num_returns(value: Any) -> int:
    """Convert `num_returns`: None to 1, "streaming" and "dynamic" to `STREAMS`.

    Raises:
        TypeError, ValueError: the value is none of these, nor a non-negative integer.
    """
    TASK_RULES["num_returns"].validate("num_returns", value)
    if isinstance(value, str):
        return STREAMS
    return 1 if value is None else int(value)


def requested_amounts(option: Callable[[str], Any]) -> dict[str, float]:
    """Return the requested amounts by resource name, zeros included.

    Args:
        option: returns the value of an option, None for one that is not given.
    """
    requested = dict(option("resources") or {})
    for keyword, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
        value = option(keyword)
        if value is not None:
            requested[resource] = int(value) if keyword == "memory" else value
    if (kind := option("accelerator_type")) is not None:
        requested[f"{ACCELERATOR_TYPE}{kind}"] = ACCELERATOR_TYPE_SHARE
    return requested


class _OptionsBase:
    """Base class of the options of tasks and actors.

    Options that are valid but not supported are accepted, so that programs can be imported. The shapes then stay unset,
    and reading one to submit work raises NotImplementedError. In the same way options that Ray refuses only at
    submission raise ValueError.
    """

    RULES: ClassVar[Mapping[str, Rule]]
    KIND: ClassVar[str]
    DECORATOR_ONLY: ClassVar[str]

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        self.given: Mapping[str, Any] = {} if given is None else given
        for keyword, value in self.given.items():
            rule = self.RULES.get(keyword)
            if rule is None:
                raise ValueError(
                    f"Invalid option keyword {keyword} for {self.KIND}. Valid ones are {list(self.RULES)}."
                    f"{did_you_mean([keyword], self.RULES)}"
                )
            rule.validate(keyword, value)
        if self.given.get("placement_group") not in (None, "default"):
            if self._option("scheduling_strategy"):
                raise ValueError(
                    "Placement groups should be specified via the scheduling_strategy option. "
                    "The placement_group option is deprecated."
                )
            version = getattr(sys.modules.get("ray"), "__version__", RAY_VERSION)  # a program may set it
            warnings.warn(_GROUP_DEPRECATED.format(version), DeprecationWarning, stacklevel=5)
        self.name: str = self._option("name") or ""
        self.unsupported: str = self._find_unsupported()
        self.wrong: str = problem_at_submission(self.given)

    def merged(self, **overrides: Any) -> Self:
        """These options with some replaced, as `.options()` does.

        Raises:
            TypeError, ValueError: as for the decorator; and for options that only the decorator takes.
        """
        if self.DECORATOR_ONLY in overrides:
            raise ValueError(f"Setting '{self.DECORATOR_ONLY}' is not supported in '.options()'.")
        if PER_YIELD in overrides and overrides[PER_YIELD] != (self.given.get(PER_YIELD) or 1):
            raise ValueError(
                f"{PER_YIELD} cannot be overridden per task call. Use @ray.remote({PER_YIELD}=...) instead."
            )
        return type(self)({**self.given, **overrides})

    def __getattr__(self, attribute: str) -> Any:
        # Called for unset attributes only: the shapes of unsupported options.
        if attribute in ("shape", "place", "hold"):
            if wrong := self.__dict__.get("wrong"):
                raise ValueError(wrong)
            if unsupported := self.__dict__.get("unsupported"):
                raise NotImplementedError(unsupported)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.given == other.given

    def _option(self, keyword: str) -> Any:
        value = self.given.get(keyword)
        return self.RULES[keyword].default_value if value is None else value

    def _find_unsupported(self) -> str:
        if self.given.get(_ALL_STREAMS):
            return f"the option {_ALL_STREAMS} is not supported yet; hint: leave it out"
        return unsupported_field_error(self.given.get("runtime_env"))

    def _shape(self, amounts: Mapping[str, float]) -> Shape:
        env_vars = (self.given.get("runtime_env") or {}).get("env_vars") or {}
        strategy = strategy_text(*map(self.given.get, ("scheduling_strategy", "label_selector", "fallback_strategy")))
        if (seconds := self.given.get("_expected_time")) is not None:
            strategy = labels.lasting(strategy, seconds)
        units = tuple(sorted(exact_units(amounts).items()))
        return Shape(resources=units, strategy=strategy, env=tuple(sorted(env_vars.items())))


class TaskOptions(_OptionsBase):
    """Options of a remote function.

    Args:
        given: the options of the user, by Ray's names.

    Attributes:
        shape: resources and placement of a lease. Raises NotImplementedError where an option is not supported.
        num_returns: number of results; -1 for a generator.
        retry_exceptions: True (all), False (none), or the exception classes that are retried.
        max_calls: number of calls after which a worker exits; 0 for no limit. By default 1 for GPU tasks, since
            libraries keep memory of the device while their process lives.

    Raises:
        ValueError: an unknown option, or a value out of range.
        TypeError: a value of the wrong type.
    """

    shape: Shape
    RULES = TASK_RULES
    KIND = "remote functions"
    DECORATOR_ONLY = "max_calls"

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        self.num_returns: int = check_num_returns(self._option("num_returns"))
        retry = self._option("retry_exceptions")
        self.retry_exceptions: bool | tuple[type[Exception], ...] = retry if isinstance(retry, bool) else tuple(retry)
        gpu_task = (self.given.get("num_gpus") or 0) > 0 and self.given.get("max_calls") is None
        self.max_calls: int = 1 if gpu_task else self._option("max_calls")
        if not (self.unsupported or self.wrong):
            self.shape = self._shape(requested_amounts(self._option))

    @property
    def max_retries(self) -> int:
        """Number of retries, -1 for no limit. By default what RAY_TASK_MAX_RETRIES says in this process now.

        Raises:
            ValueError: that variable is no number of retries.
        """
        given: Any = self.given.get("max_retries")
        given = os.environ.get("RAY_TASK_MAX_RETRIES", 3) if given is None else given
        if not re.fullmatch(r"-1|\d+", str(given)):
            raise ValueError(f"RAY_TASK_MAX_RETRIES={given!r} is not -1, 0 or a positive integer. hint: unset it for 3")
        return int(given)


class ActorOptions(_OptionsBase):
    """Options of an actor class.

    Args:
        given: the options of the user, by Ray's names.

    Attributes:
        place: resources that a node must have free when the actor starts, at least one CPU by default.
        hold: resources that the actor holds while it lives; by default none. An actor that requests any resource but
            memory holds its whole request, with one CPU unless `num_cpus` differs.
        namespace: "" for the namespace of the job.
        max_concurrency: None for 1, or for 1000 where the actor has async methods.
        concurrency_groups: largest number of concurrent calls of each group.
        out_of_order: True if a call may overtake one that waits for its arguments; None: if calls may overlap.

    Raises:
        ValueError: an unknown option, or a value out of range.
        TypeError: a value of the wrong type.
    """

    place: Shape
    hold: Shape
    RULES = ACTOR_RULES
    KIND = "actors"
    DECORATOR_ONLY = "concurrency_groups"

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        super().__init__(given)
        if self.given.get("get_if_exists") and not self.name:
            raise ValueError("The actor name must be specified to use `get_if_exists`.")
        if self.given.get("object_store_memory") is not None:
            warn_of_object_store_memory("actors")
        self.namespace: str = self._option("namespace") or ""
        groups = self._option("concurrency_groups") or {}
        if isinstance(groups, list):
            groups = {row["name"]: row["max_concurrency"] for row in groups}
        self.concurrency_groups: dict[str, int] = dict(groups)
        self.out_of_order: bool | None = self._option("allow_out_of_order_execution")
        self.get_if_exists: bool = self._option("get_if_exists")
        self.max_restarts: int = self._option("max_restarts")
        self.max_task_retries: int = self._option("max_task_retries")
        self.max_concurrency: int | None = self._option("max_concurrency")
        self.max_pending_calls: int = self._option("max_pending_calls")
        if not (self.unsupported or self.wrong):
            requested = requested_amounts(self._option)
            simple = not set(requested) - {"memory"}
            self.hold = self._shape(requested if simple else {"CPU": 1, **requested})
            self.place = self._shape({"CPU": 1, **requested})


def warn_of_object_store_memory(what: str) -> None:
    """Warn of the resource `object_store_memory` of `what`: the caller's caller has written it."""
    text = f"Setting 'object_store_memory' for {what} is deprecated: it reserves nothing. hint: leave it out"
    warnings.warn(text, DeprecationWarning, stacklevel=4)


def strategy_text(
    strategy: Any, selector: Mapping[str, str] | None = None, fallbacks: list[dict[str, Any]] | None = None
) -> str:
    """Convert a scheduling strategy to the text of `Shape.strategy`. A node affinity keeps the node id."""
    alternatives = [conditions(selector)]
    alternatives += [conditions(fallback.get("label_selector")) for fallback in fallbacks or ()]
    if isinstance(strategy, NodeLabelSchedulingStrategy):
        return to_strategy(with_labels(strategy, alternatives))
    if selector and isinstance(strategy, NodeAffinitySchedulingStrategy):
        there = [((labels.NODE_ID, labels.IN, (strategy.node_id,)), *one) for one in alternatives]
        return to_strategy([*there, *alternatives] if strategy.soft or strategy._spill_on_unavailable else there)
    if selector:
        return to_strategy(alternatives, spread=strategy == "SPREAD")
    if isinstance(strategy, NodeAffinitySchedulingStrategy):
        if strategy._spill_on_unavailable:
            return to_strategy([((labels.NODE_ID, labels.IN, (strategy.node_id,)),), ()])
        manner = labels.SOFT if strategy.soft else labels.FAIL if strategy._fail_on_unavailable else ""
        return f"node_id:{strategy.node_id}" + f":{manner}" * bool(manner)
    return "SPREAD" if strategy == "SPREAD" else ""


def exact_units(amounts: Mapping[str, float]) -> Resources:
    """Convert amounts to exact units, rounded down so that k requests of 1/k fit into one."""
    return to_units({name: math.floor(amount * UNIT + 1e-6) / UNIT for name, amount in amounts.items()})
