"""Options of `@remote` and `.options()`: checked once, turned into what the scheduler asks for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar

from hpcray.api import option_rules as rules
from hpcray.api.option_rules import ACTOR_RULES, TASK_RULES
from hpcray.api.scheduling import (
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
    with_labels,
)
from hpcray.base.labels import conditions, to_strategy
from hpcray.base.resources import UNIT, Resources, to_units
from hpcray.host.runtime_env import refusal
from hpcray.wire.messages import Shape

if TYPE_CHECKING:
    from typing_extensions import Self


_ALL_STREAMS = "_actor_generator_backpressure_num_objects"


@dataclass(frozen=True)
class _OptionsBase:
    """What both kinds share.

    Options that are valid but not supported yet are accepted, so that a program can be imported; the shapes are then
    left unset, and whoever reads one to submit work gets the NotImplementedError. So it is, with a ValueError, with
    what Ray refuses only when work is submitted.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(init=False, compare=False, default="")
    unsupported: str = field(init=False, compare=False, default="")
    wrong: str = field(init=False, compare=False, default="")

    RULES: ClassVar[Mapping[str, rules.Rule]] = {}
    KIND: ClassVar[str] = ""
    DECORATOR_ONLY: ClassVar[str] = ""

    def merged(self, **overrides: Any) -> Self:
        """These options with some replaced, as `.options()` does.

        Raises:
            TypeError, ValueError: as for the decorator; and for options that only the decorator takes.
        """
        if self.DECORATOR_ONLY in overrides:
            raise ValueError(f"Setting '{self.DECORATOR_ONLY}' is not supported in '.options()'.")
        return type(self)({**self.given, **overrides})

    def __post_init__(self) -> None:
        for keyword, value in self.given.items():
            rule = self.RULES.get(keyword)
            if rule is None:
                near = get_close_matches(keyword, self.RULES, 1)
                raise ValueError(
                    f"Invalid option keyword {keyword} for {self.KIND}. Valid ones are {list(self.RULES)}."
                    + (f" hint: {near[0]}?" if near else "")
                )
            rule.check(keyword, value)
        if self.given.get("placement_group") not in (None, "default") and self._option("scheduling_strategy"):
            raise ValueError(
                "Give the placement group in scheduling_strategy; the placement_group option is deprecated."
            )
        self._set("name", self._option("name") or "")
        self._set("unsupported", self._find_unsupported())
        self._set("wrong", rules.problem_at_submission(self.given))

    def __getattr__(self, attribute: str) -> Any:
        # Only reached for attributes that are not set: the shapes of unsupported options.
        if attribute in ("shape", "place", "hold"):
            if wrong := self.__dict__.get("wrong"):
                raise ValueError(wrong)
            if unsupported := self.__dict__.get("unsupported"):
                raise NotImplementedError(unsupported)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {attribute!r}")

    def _set(self, attribute: str, value: Any) -> None:
        object.__setattr__(self, attribute, value)

    def _option(self, keyword: str) -> Any:
        value = self.given.get(keyword)
        return self.RULES[keyword].default if value is None else value

    def _find_unsupported(self) -> str:
        strategy = self.given.get("scheduling_strategy")
        if self.given.get("label_selector") and isinstance(
            strategy, (NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy)
        ):
            return (
                f"label_selector together with a {type(strategy).__name__} is not supported; hint: leave one of them "
                "out; bundles take conditions by placement_group(bundle_label_selector=...)"
            )
        if isinstance(strategy, NodeAffinitySchedulingStrategy) and (
            strategy._spill_on_unavailable or strategy._fail_on_unavailable
        ):
            return "_spill_on_unavailable and _fail_on_unavailable are not supported yet; hint: leave them out"
        for keyword in ("enable_tensor_transport", _ALL_STREAMS):
            if self.given.get(keyword):
                return f"the option {keyword} is not supported yet; hint: leave it out"
        return refusal(self.given.get("runtime_env"))

    def _asked(self) -> dict[str, float]:
        """Amounts that the user gave, zeros included."""
        asked = dict(self.given.get("resources") or {})
        for keyword, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU"), ("memory", "memory")):
            value = self._option(keyword)
            if value is not None:
                asked[resource] = int(value) if keyword == "memory" else value
        if self.given.get("accelerator_type") is not None:
            asked[f"accelerator_type:{self.given['accelerator_type']}"] = 0.001
        return asked

    def _shape(self, amounts: Mapping[str, float]) -> Shape:
        env_vars = (self.given.get("runtime_env") or {}).get("env_vars") or {}
        return Shape(
            resources=tuple(sorted(exact_units(amounts).items())),
            strategy=strategy_text(
                self.given.get("scheduling_strategy"),
                self.given.get("label_selector"),
                self.given.get("fallback_strategy"),
            ),
            env=tuple(sorted(env_vars.items())),
        )


@dataclass(frozen=True)
class TaskOptions(_OptionsBase):
    """Options of a remote function.

    Args:
        given: what the user wrote, by Ray's names.

    Attributes:
        shape: what a lease for it asks; reading it raises NotImplementedError where the options are not supported yet.
        num_returns, max_retries: -1 retries mean without end, -1 returns a generator.
        retry_exceptions: True (all), False (none) or the classes that are worth another try.
        max_calls: a worker leaves after so many calls; 0 means never. Of a GPU task one, unless it says otherwise:
            libraries keep memory of the device as long as their process lives.

    Raises:
        ValueError: an unknown option, or a value out of range.
        TypeError: a value of the wrong type.
    """

    shape: Shape = field(init=False, compare=False, repr=False)
    num_returns: int = field(init=False, compare=False, repr=False)
    max_retries: int = field(init=False, compare=False, repr=False)
    retry_exceptions: bool | tuple[type[Exception], ...] = field(init=False, compare=False, repr=False)
    max_calls: int = field(init=False, compare=False, repr=False)

    RULES = TASK_RULES
    KIND = "remote functions"
    DECORATOR_ONLY = "max_calls"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("num_returns", rules.check_num_returns(self._option("num_returns")))
        self._set("max_retries", self._option("max_retries"))
        retry = self._option("retry_exceptions")
        self._set("retry_exceptions", retry if isinstance(retry, bool) else tuple(retry))
        gpu_task = (self.given.get("num_gpus") or 0) > 0 and self.given.get("max_calls") is None
        self._set("max_calls", 1 if gpu_task else self._option("max_calls"))
        if not (self.unsupported or self.wrong):
            self._set("shape", self._shape(self._asked()))

    def _find_unsupported(self) -> str:
        if self._option("_num_objects_per_yield") != 1:
            return rules.NO_YIELDS_OF_MANY
        return super()._find_unsupported()


@dataclass(frozen=True)
class ActorOptions(_OptionsBase):
    """Options of an actor class.

    Args:
        given: what the user wrote, by Ray's names.

    Attributes:
        place: what a node must have free when the actor starts.
        hold: what it keeps. By default nothing: a CPU to be placed, none to stay. An actor that asks for any resource
            but memory holds all of it for life, one CPU included unless `num_cpus` says otherwise.
        namespace: "" means that of the job.
        max_concurrency: None means 1, or 1000 for an actor with async methods.
        concurrency_groups: how many calls of each group may run at a time.
        out_of_order: whether a call may overtake one that waits for its arguments; None: if calls may overlap anyway.

    Raises:
        ValueError: an unknown option, or a value out of range.
        TypeError: a value of the wrong type.
    """

    place: Shape = field(init=False, compare=False, repr=False)
    hold: Shape = field(init=False, compare=False, repr=False)
    namespace: str = field(init=False, compare=False, repr=False)
    get_if_exists: bool = field(init=False, compare=False, repr=False)
    detached: bool = field(init=False, compare=False, repr=False)
    max_restarts: int = field(init=False, compare=False, repr=False)
    max_task_retries: int = field(init=False, compare=False, repr=False)
    max_concurrency: int | None = field(init=False, compare=False, repr=False)
    max_pending_calls: int = field(init=False, compare=False, repr=False)
    concurrency_groups: dict[str, int] = field(init=False, compare=False, repr=False)
    out_of_order: bool | None = field(init=False, compare=False, repr=False)

    RULES = ACTOR_RULES
    KIND = "actors"
    DECORATOR_ONLY = "concurrency_groups"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.given.get("get_if_exists") and not self.name:
            raise ValueError("The actor name must be specified to use `get_if_exists`.")
        if self.given.get("object_store_memory") is not None:
            warnings.warn(
                "object_store_memory of an actor reserves nothing; objects that do not fit are spilled",
                DeprecationWarning,
                stacklevel=4,
            )
        self._set("namespace", self._option("namespace") or "")
        groups = self._option("concurrency_groups") or {}
        if isinstance(groups, list):
            groups = {row["name"]: row["max_concurrency"] for row in groups}
        self._set("concurrency_groups", dict(groups))
        self._set("out_of_order", self._option("allow_out_of_order_execution"))
        self._set("detached", self.given.get("lifetime") == "detached")
        for keyword in ("get_if_exists", "max_restarts", "max_task_retries", "max_concurrency", "max_pending_calls"):
            self._set(keyword, self._option(keyword))
        if not (self.unsupported or self.wrong):
            asked = self._asked()
            simple = not set(asked) - {"memory"}
            self._set("hold", self._shape(asked if simple else {"CPU": 1, **asked}))
            self._set("place", self._shape({"CPU": 1, **asked}))


def strategy_text(
    strategy: Any, selector: Mapping[str, str] | None = None, fallbacks: list[dict[str, Any]] | None = None
) -> str:
    """A scheduling strategy as `Shape.strategy` has it; of a node the id, which the runtime maps to its index."""
    wanted = [conditions(selector)]
    wanted += [conditions(fallback.get("label_selector")) for fallback in fallbacks or ()]
    if isinstance(strategy, NodeLabelSchedulingStrategy):
        return to_strategy(with_labels(strategy, wanted))
    if selector:
        return to_strategy(wanted, spread=strategy == "SPREAD")
    if isinstance(strategy, NodeAffinitySchedulingStrategy):
        return f"node_id:{strategy.node_id}" + (":soft" if strategy.soft else "")
    return "SPREAD" if strategy == "SPREAD" else ""


def exact_units(amounts: Mapping[str, float]) -> Resources:
    """Exact units, rounded down: k tasks that ask for 1/k each must fit in one."""
    return to_units({name: math.floor(amount * UNIT + 1e-6) / UNIT for name, amount in amounts.items()})
