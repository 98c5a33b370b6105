"""Handles of actors and their methods."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, overload

import cloudpickle

from hpcray.api.export import unserializable_argument
from hpcray.api.options import METHOD_RULES, NO_GRAPHS, check_num_returns, unsupported_by_methods
from hpcray.api.session import require_session
from hpcray.api.signature import ANYTHING, Arity, AsyncMethod, DecorateMethod, Method, arity
from hpcray.common.ids import ActorID
from hpcray.core.core_worker.task import ExtraOptions
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.object_refs import ObjectRef

_BUILT_IN = ("__ray_ready__", "__ray_call__", "__ray_terminate__")
METHOD = "__hpcray_method__"
SIGNATURE = "signature"
RETRY = "retry_exceptions"


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@overload
def method(function: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> AsyncMethod[P, R]: ...


@overload
def method(function: Callable[Concatenate[S, P], R], /) -> Method[P, R]: ...


@overload
def method(**options: Any) -> DecorateMethod: ...


def method(*args: Any, **options: Any) -> Any:
    """Set the options of an actor method: `@method(num_returns=2)`. Without options the decorator has no effect.

    Args:
        options: `num_returns`, `concurrency_group`, `max_task_retries`, `retry_exceptions` and others of Ray.

    Raises:
        AssertionError: an option is unknown, as in Ray. ValueError, TypeError: its value is not allowed.
    """
    if len(args) == 1 and callable(args[0]) and not options:
        return args[0]
    if args:
        raise AssertionError(
            "The @ray.method decorator must be applied using no arguments or at least one of the arguments in the list "
            f"{list(METHOD_RULES)}, for example '@ray.method(num_returns=2)'; got {args}"
        )
    for keyword in options.keys() - METHOD_RULES.keys():
        raise AssertionError(
            f"Unexpected keyword argument to @ray.method: '{keyword}'. The supported keyword arguments are "
            f"{list(METHOD_RULES)}"
        )
    for keyword, value in options.items():
        METHOD_RULES[keyword].check(keyword, value)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, METHOD, options)
        return function

    return decorate


def travelling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a method as handles and the GCS store them, with pickled exception classes."""
    retry = options.get(RETRY)
    return options if retry is None or isinstance(retry, bool) else {**options, RETRY: cloudpickle.dumps(tuple(retry))}


class _Plan:
    """Options and signature of one method, shared by its calls.

    Attributes:
        extra: options that need the slow path: `name`, generators, retries.
        unsupported: why calls are refused; "" for none.
        slow: True if calls need the slow path or are refused.
        low, high: numbers of positional arguments of the fast path; none where `slow` is True.
    """

    __slots__ = ("arity", "extra", "given", "high", "low", "num_returns", "retries", "slow", "unsupported")

    def __init__(self, given: dict[str, Any], retries: int) -> None:
        retry = given.get(RETRY) or False
        self.given = given
        own_retries = given.get("max_task_retries")
        self.retries: int = retries if own_retries is None else own_retries
        self.arity: Arity = arity(given.get(SIGNATURE, ANYTHING))
        self.extra = ExtraOptions(
            name=given.get("name") or "",
            group=given.get("call_group") or "",
            retry_exceptions=cloudpickle.loads(retry) if isinstance(retry, bytes) else retry,
            stream=isinstance(given.get("num_returns"), str),
            dynamic=given.get("num_returns") == "dynamic",
            window=given.get("_generator_backpressure_num_objects") or -1,
        )
        self.num_returns = check_num_returns(given.get("num_returns"))
        self.unsupported = unsupported_by_methods(given)
        self.slow = bool(self.extra or self.unsupported)
        self.low, self.high = float("inf") if self.slow else self.arity.low, self.arity.high


class ActorMethod:
    """A method of an actor handle. Call it with `.remote(...)`."""

    __slots__ = ("_handle", "_name", "_plan")

    def __init__(self, handle: ActorHandle, name: str, plan: _Plan) -> None:
        self._handle, self._name, self._plan = handle, name, plan

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method.

        Returns:
            An `ObjectRef`; a list of them where `num_returns` is above 1; a generator of refs for a generator method.

        Raises:
            TypeError: the arguments do not match the method, or do not pickle.
            NotImplementedError: an option is not supported.
            PendingCallsLimitExceeded: the actor has `max_pending_calls` pending calls of this process.
        """
        plan = self._plan
        if kwargs or not plan.low <= len(args) <= plan.high:
            if plan.slow:
                return self._call_with_own_options(args, kwargs)
            plan.arity.check(self._name, args, kwargs)
        try:
            return (current.process or require_session()).submitter.actors.call(
                self._handle, self._name, plan.num_returns, plan.retries, args, kwargs
            )
        except SerializationError as error:
            raise unserializable_argument(error, f"{self._handle._class_name}.{self._name}") from error

    def options(self, **overrides: Any) -> ActorMethod:
        """Return the method with some options replaced.

        Args:
            overrides: `num_returns`, `name`, `concurrency_group`, `max_task_retries`, `retry_exceptions`.

        Raises:
            ValueError, TypeError: an option is unknown, or its value is not allowed.
        """
        if overrides.keys() - METHOD_RULES.keys() - {"name"}:
            known = sorted({"name", *METHOD_RULES})
            raise ValueError(f"Invalid option keywords {sorted(overrides)} for actor methods. Valid ones are {known}.")
        for keyword, value in overrides.items():
            if keyword != "name":
                METHOD_RULES[keyword].check(keyword, value)
        given = {keyword: value for keyword, value in travelling(overrides).items() if value is not None}
        if "concurrency_group" in given:
            given["call_group"] = given.pop("concurrency_group")
        plan = _Plan({**self._plan.given, **given}, self._plan.retries)
        return ActorMethod(self._handle, self._name, plan)

    def _call_with_own_options(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self._plan
        if plan.unsupported:
            raise NotImplementedError(plan.unsupported)
        plan.arity.check(self._name, args, kwargs)
        try:
            return (current.process or require_session()).submitter.actors.call_with(
                plan.extra, self._handle, self._name, plan.num_returns, plan.retries, args, kwargs
            )
        except SerializationError as error:
            raise unserializable_argument(error, f"{self._handle._class_name}.{self._name}") from error

    @property
    def bind(self) -> NoReturn:
        """Raise AttributeError: compiled graphs are not supported."""
        raise AttributeError(NO_GRAPHS)

    @property
    def _method_name(self) -> str:
        return self._name

    @property
    def _num_returns(self) -> int | str:
        given: int | str | None = self._plan.given.get("num_returns")
        return 1 if given is None else given

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            f"Actor methods cannot be called directly. Instead of running 'object.{self._name}()', "
            f"try 'object.{self._name}.remote()'."
        )


class ActorHandle:
    """A reference to an actor. Handles can be passed to tasks and actors; the actor ends with its last handle."""

    _ray_is_cross_language = False
    _plans: dict[str, _Plan] = {}  # noqa: RUF012  # stays empty; read from handles that are being unpickled

    def __init__(
        self,
        actor: bytes,
        class_name: str,
        methods: dict[str, dict[str, Any]],
        retries: int,
        limit: int,
        keep: ObjectRef[Any] | None,
        out_of_order: bool = False,
    ) -> None:
        self._actor, self._class_name, self._methods = actor, class_name, methods
        self._retries, self._limit, self._keep, self._out_of_order = retries, limit, keep, out_of_order
        self._plans = {}

    def __class_getitem__(cls, parameters: Any) -> types.GenericAlias:
        """Return a generic alias, for the annotation `ActorHandle[Class]`."""
        return types.GenericAlias(cls, parameters)

    def __getattr__(self, name: str) -> ActorMethod:
        plan = self._plans.get(name) or self._planned(name)
        return ActorMethod(self, name, plan)

    def _planned(self, name: str) -> _Plan:
        options = self.__dict__.get("_methods", {}).get(name)
        if options is None:
            if name not in _BUILT_IN or "_methods" not in self.__dict__:
                raise AttributeError(
                    f"'ActorHandle' object has no attribute {name!r}: the actor class "
                    f"{self.__dict__.get('_class_name', '?')!r} has no method of this name"
                )
            options = {}
        plan = self._plans[name] = _Plan(options, self._retries)
        return plan

    def __dir__(self) -> list[str]:
        return [*self._methods, *_BUILT_IN]

    @property
    def _actor_id(self) -> Any:
        return ActorID(self._actor)

    @property
    def _ray_actor_id(self) -> Any:
        return ActorID(self._actor)

    @property
    def _ray_actor_creation_function_descriptor(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(class_name=self._class_name)

    def __repr__(self) -> str:
        return f"Actor({self._class_name}, {self._actor.hex()})"

    def __hash__(self) -> int:
        return hash(self._actor)

    def __eq__(self, other: object) -> bool:
        return self._actor == other._actor if isinstance(other, ActorHandle) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorHandle, (
            self._actor, self._class_name, self._methods, self._retries, self._limit, self._keep, self._out_of_order,
        )  # fmt: skip

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorHandle:
        return self
