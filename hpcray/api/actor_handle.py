"""Handles of actors and their methods."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, overload

import cloudpickle

from hpcray.api.export import ANYTHING, Arity, arity, unserializable_argument
from hpcray.api.options import METHOD_RULES, PER_YIELD, check_generator, check_num_returns, stream_options, transport_of
from hpcray.api.session import require_session
from hpcray.common.exceptions import did_you_mean
from hpcray.common.ids import ActorID
from hpcray.core.core_worker.task import ExtraOptions
from hpcray.protocol.out_of_band import pickling
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.object_refs import ObjectRef

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    from hpcray.runtime.core_worker.generators import ObjectRefGenerator

_BUILT_IN = ("__ray_ready__", "__ray_call__", "__ray_terminate__")
METHOD = "__hpcray_method__"
SIGNATURE = "signature"
GENERATOR = "generator"
"""Keys of a method's description beside its options: what its arguments may be, and that it yields."""
RETRY = "retry_exceptions"
_CALL_OPTIONS = {"name", "_labels"}
"""Options of calls that no method has of its own."""
DECORATOR = "decorator"


P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
if TYPE_CHECKING:  # Python's own has no default before 3.13
    C = TypeVarWithDefault("C", default=Any)
else:
    C = TypeVar("C")


def travelling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a method as handles and the GCS store them, with pickled exception classes."""
    retry = options.get(RETRY)
    return options if retry is None or isinstance(retry, bool) else {**options, RETRY: cloudpickle.dumps(tuple(retry))}


class _Plan:
    """Options and signature of one method, shared by its calls.

    Attributes:
        extra: options that need the slow path: `name`, generators, retries.
        decorator: what wraps each call on the caller's side (Ray's `__ray_invocation_decorator__`); None for nothing.
        slow: True if calls need the slow path.
        low, high: numbers of positional arguments of the fast path; none where `slow` is True.
    """

    __slots__ = ("arity", "decorator", "extra", "given", "high", "low", "num_returns", "retries", "slow")

    def __init__(self, given: dict[str, Any], retries: int) -> None:
        retry = given.get(RETRY) or False
        self.given = given
        own_retries = given.get("max_task_retries")
        self.retries: int = retries if own_retries is None else own_retries
        self.arity: Arity = arity(given.get(SIGNATURE, ANYTHING))
        self.extra = ExtraOptions(
            name=given.get("name") or "",
            labels=given.get("_labels"),
            group=given.get("call_group") or "",
            retry_exceptions=cloudpickle.loads(retry) if isinstance(retry, bytes) else retry,
            stream=isinstance(given.get("num_returns"), str),
            transport=transport_of(given.get("tensor_transport")),
            **stream_options(given),
        )
        self.num_returns = check_num_returns(given.get("num_returns"))
        self.decorator = cloudpickle.loads(given[DECORATOR]) if DECORATOR in given else None
        self.slow = bool(self.extra or self.decorator)
        self.low, self.high = float("inf") if self.slow else self.arity.low, self.arity.high


class ActorMethod(Generic[P, R_co]):
    """A method of an actor handle. Call it with `.remote(...)`.

    For type checkers P are the parameters and R is the result of the method. Where one of the first four positional
    arguments is a ref, the arguments are not checked, except by `hpcray.mypy_plugin`.
    """

    __slots__ = ("_handle", "_name", "_plan")

    def __init__(self, handle: ActorHandle, name: str, plan: _Plan) -> None:
        self._handle, self._name, self._plan = handle, name, plan

    @overload
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: Any, c: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: Any, c: Any, d: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
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

    @overload
    def options(self, *, num_returns: int | str, **overrides: Any) -> AnyMethod: ...

    @overload
    def options(self, **overrides: Any) -> ActorMethod[P, R_co]: ...

    def options(self, **overrides: Any) -> ActorMethod[..., Any]:
        """Return the method with some options replaced.

        Args:
            overrides: `num_returns`, `name`, `concurrency_group`, `max_task_retries`, `retry_exceptions`.

        Raises:
            ValueError, TypeError: an option is unknown, or its value is not allowed.
        """
        if overrides.keys() - METHOD_RULES.keys() - _CALL_OPTIONS:
            known = sorted({*_CALL_OPTIONS, *METHOD_RULES})
            raise ValueError(
                f"Invalid option keywords {sorted(overrides)} for actor methods. Valid ones are {known}."
                f"{did_you_mean(overrides.keys() - set(known), known)}"
            )
        for keyword, value in overrides.items():
            if keyword not in _CALL_OPTIONS:
                METHOD_RULES[keyword].validate(keyword, value)
        if PER_YIELD in overrides:
            raise ValueError(
                f"{PER_YIELD} cannot be overridden per actor method call. Use @ray.method({PER_YIELD}=...) instead."
            )
        check_generator(overrides.get("num_returns"), GENERATOR in self._plan.given)
        given = {keyword: value for keyword, value in travelling(overrides).items() if value is not None}
        if "concurrency_group" in given:
            given["call_group"] = given.pop("concurrency_group")
        plan = _Plan({**self._plan.given, **given}, self._plan.retries)
        return ActorMethod(self._handle, self._name, plan)

    def _call_with_own_options(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self._plan  # a decorator may give the method other arguments than its caller has
        return self._submit(args, kwargs) if plan.decorator is None else plan.decorator(self._submit)(args, kwargs)

    def _submit(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        plan = self._plan
        plan.arity.check(self._name, args, kwargs)
        try:
            return (current.process or require_session()).submitter.actors.call_with(
                plan.extra, self._handle, self._name, plan.num_returns, plan.retries, tuple(args), kwargs
            )
        except SerializationError as error:
            raise unserializable_argument(error, f"{self._handle._class_name}.{self._name}") from error

    def _remote(self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Call the method with options, as in Ray."""
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def bind(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make a node of a graph that calls the method; nodes among the arguments stand for their results.

        Returns:
            The node; a tuple with one for each value where `num_returns` is above 1.

        Raises:
            TypeError: the arguments do not match the method.
        """
        from hpcray.graphs.nodes import bind_method

        plan = self._plan
        try:
            plan.arity.check(self._name, args, kwargs)
        except TypeError as error:
            raise TypeError(
                f"{error}. The given arguments to `bind` don't match the function `{self._name}`. args: {args}. "
                f"kwargs: {kwargs}."
            ) from None
        options = {
            "name": plan.given.get("name", ""),
            "num_returns": self._num_returns,
            "concurrency_group": plan.given.get("call_group"),
            "_generator_backpressure_num_objects": plan.given.get("_generator_backpressure_num_objects"),
        }
        return bind_method(self._handle, self._name, args, kwargs, options)

    @property
    def _method_name(self) -> str:
        return self._name

    @property
    def _num_returns(self) -> int | str:
        given: int | str | None = self._plan.given.get("num_returns")
        return 1 if given is None else given

    if not TYPE_CHECKING:  # so that type checkers refuse the call

        def __call__(self, /, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError(
                f"Actor methods cannot be called directly. Instead of running 'object.{self._name}()', "
                f"try 'object.{self._name}.remote()'."
            )


if TYPE_CHECKING:
    ActorProxy = type[C]

    class AnyMethod(ActorMethod[..., Any]):
        """A method of which type checkers know nothing."""

        def remote(self, /, *args: Any, **kwargs: Any) -> Any: ...

    class StreamingMethod(ActorMethod[P, R_co]):
        """A method that is a generator."""

        @overload  # type: ignore[override]
        def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRefGenerator[R_co]: ...

        @overload
        def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRefGenerator[R_co]: ...

        @overload
        def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRefGenerator[R_co]: ...

        def remote(self, /, *args: Any, **kwargs: Any) -> Any: ...

        @overload
        def options(self, *, num_returns: int | str, **overrides: Any) -> AnyMethod: ...

        @overload
        def options(self, **overrides: Any) -> StreamingMethod[P, R_co]: ...

        def options(self, **overrides: Any) -> Any: ...
else:

    class ActorProxy(Generic[C]):
        """In annotations: the handle of an actor of this class.

        For type checkers it is the class itself, of which a method that `@method` marks has `.remote`, while the same
        method of an instance, as inside of the actor, is a plain one.
        """


class ActorHandle(Generic[C]):
    """A reference to an actor. Handles can be passed to tasks and actors; the actor ends with its last handle."""

    if TYPE_CHECKING:
        __ray_ready__: AnyMethod
        __ray_call__: AnyMethod
        __ray_terminate__: AnyMethod

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

    def __getattr__(self, name: str) -> AnyMethod:
        plan = self._plans.get(name) or self._planned(name)
        return ActorMethod(self, name, plan)  # type: ignore[return-value]

    def _planned(self, name: str) -> _Plan:
        options = self.__dict__.get("_methods", {}).get(name)
        if options is None:
            if name not in _BUILT_IN or "_methods" not in self.__dict__:
                raise AttributeError(
                    f"'ActorHandle' object has no attribute {name!r}: the actor class "
                    f"{self.__dict__.get('_class_name', '?')!r} has no method of this name."
                    f"{did_you_mean([name], self.__dict__.get('_methods', ()))}"
                )
            options = {}
        plan = self._plans[name] = _Plan(options, self._retries)
        return plan

    def __dir__(self) -> list[str]:
        return ["__init__", *self._methods, *_BUILT_IN]

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

    def _get_local_state(self) -> int | None:
        """Return the state of the actor as this process knows it, by Ray's numbers: 1 pending, 2 alive, 3 restarting, 4
        dead; None if this process has not used the handle."""
        state = require_session().submitter.actors.state_of(self._actor)
        return None if state is None else 1 + ("PENDING", "ALIVE", "RESTARTING", "DEAD").index(state)

    def _repr_html_(self) -> str:
        from hpcray.notebooks import actor_html

        return actor_html(self)

    def __hash__(self) -> int:
        return hash(self._actor)

    def __eq__(self, other: object) -> bool:
        return self._actor == other._actor if isinstance(other, ActorHandle) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        keep = (
            self._keep if pickling.refs is not None else None
        )  # elsewhere it is not counted, as in Ray: the actor may end
        return ActorHandle, (
            self._actor, self._class_name, self._methods, self._retries, self._limit, keep, self._out_of_order,
        )  # fmt: skip

    def __copy__(self) -> ActorHandle:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ActorHandle:
        return self
