"""Actor classes, and the functions that find, list and end actors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import cloudpickle

from hpcray.api.actor_handle import (
    DECORATOR,
    GENERATOR,
    METHOD,
    SIGNATURE,
    ActorHandle,
    ActorMethod,
    ActorProxy,
    travelling,
)
from hpcray.api.export import (
    ANYTHING,
    NOTHING,
    ChangedClass,
    arity,
    changed_methods,
    check_size,
    describe,
    exported,
    full_name,
    unserializable_argument,
)
from hpcray.api.options import METHOD_RULES, ActorOptions, check_generator, yields
from hpcray.api.placement_group import with_placement
from hpcray.api.scheduling_strategies import actor_hooks
from hpcray.api.session import check_namespace, require_session
from hpcray.common.exceptions import ActorHandleNotFoundError, did_you_mean
from hpcray.common.ids import HEAD, run_of
from hpcray.common.keyed_hash import blake2b
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.actor_submitter import SYSTEM_GROUPS, has_async_method
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime_env.submitted_runtime_env import ACTOR_LIFETIME, RuntimeEnvs, with_runtime_env

if TYPE_CHECKING:
    from hpcray.api.actor_handle import AnyMethod, StreamingMethod
    from hpcray.graphs.nodes import ClassNode


# ------------------------------------------------------------ method
# The decorator `@method`, and what type checkers make of a method that it marks.


P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
Plain_co = TypeVar("Plain_co", covariant=True)


class Method(Protocol[P, R_co, Plain_co]):
    """A marked method: with `.remote` on an actor's class, which stands for its handle; a plain one on an instance."""

    @overload
    def __get__(self, instance: None, owner: Any = None) -> ActorMethod[P, R_co]: ...

    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[P, Plain_co]: ...


class GeneratorMethod(Protocol[P, R_co, Plain_co]):
    """A marked method that is a generator."""

    @overload
    def __get__(self, instance: None, owner: Any = None) -> StreamingMethod[P, R_co]: ...

    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[P, Plain_co]: ...


class MethodOfMany(Protocol[P, Plain_co]):
    """A method marked with `num_returns`: how many refs a call gives is not known."""

    @overload
    def __get__(self, instance: None, owner: Any = None) -> AnyMethod: ...

    @overload
    def __get__(self, instance: object, owner: Any = None) -> Callable[P, Plain_co]: ...


class DecorateMethod(Protocol):
    """`@method(...)` with options."""

    @overload
    def __call__(
        self, target: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
    ) -> Method[P, R, Coroutine[Any, Any, R]]: ...

    @overload
    def __call__(
        self, target: Callable[Concatenate[S, P], Generator[R, Any, Any]], /
    ) -> GeneratorMethod[P, R, Generator[R, Any, Any]]: ...

    @overload
    def __call__(
        self, target: Callable[Concatenate[S, P], AsyncGenerator[R, Any]], /
    ) -> GeneratorMethod[P, R, AsyncGenerator[R, Any]]: ...

    @overload
    def __call__(self, target: Callable[Concatenate[S, P], R], /) -> Method[P, R, R]: ...


class DecorateMethodOfMany(Protocol):
    """`@method(num_returns=...)`."""

    def __call__(self, target: Callable[Concatenate[S, P], R], /) -> MethodOfMany[P, R]:
        """Decorate a method."""


@overload
def method(
    function: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /
) -> Method[P, R, Coroutine[Any, Any, R]]: ...


@overload
def method(
    function: Callable[Concatenate[S, P], Generator[R, Any, Any]], /
) -> GeneratorMethod[P, R, Generator[R, Any, Any]]: ...


@overload
def method(
    function: Callable[Concatenate[S, P], AsyncGenerator[R, Any]], /
) -> GeneratorMethod[P, R, AsyncGenerator[R, Any]]: ...


@overload
def method(function: Callable[Concatenate[S, P], R], /) -> Method[P, R, R]: ...


@overload
def method(*, num_returns: Literal[1] | None = None, **options: Any) -> DecorateMethod: ...


@overload
def method(*, num_returns: int | str, **options: Any) -> DecorateMethodOfMany: ...


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
            f"{list(METHOD_RULES)}.{did_you_mean([keyword], METHOD_RULES)}"
        )
    for keyword, value in options.items():
        METHOD_RULES[keyword].validate(keyword, value)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_generator(options.get("num_returns"), yields(function))
        setattr(function, METHOD, options)
        return function

    return decorate


# ------------------------------------------------------------ actor


__all__ = [
    "ActorClass",
    "ActorClassInheritanceException",
    "ActorHandle",
    "ActorMethod",
    "ActorProxy",
    "exit_actor",
    "get_actor",
    "kill",
    "make_actor_class",
    "method",
]

logger = logging.getLogger("hpcray")
_SPECIAL = ("__call__", "__enter__", "__exit__", "__len__", "__getitem__")
ASYNC_CONCURRENCY = 1000


class _ExportedClass:
    """The pickled class and its methods, shared by all `.options()` of an actor class so that it is pickled once."""

    __slots__ = ("_changed", "blob", "keep", "methods")

    def __init__(self, cls: type) -> None:
        self._changed = changed_methods(cls)  # as they are now: what the program changes later comes too late
        self.blob = b""
        self.keep: list[Any] = []
        self.methods: dict[str, dict[str, Any]] = {}

    def of(self, cls: type) -> None:
        """Pickle the class at its first use: a class that is being unpickled has no methods yet."""
        if not self.blob:
            self.methods = _methods_of(cls)
            blob, self.keep = self._pickled(cls)
            check_size(blob, "actor", cls.__name__)
            self.blob = blob

    def _pickled(self, cls: type) -> tuple[bytes, list[Any]]:
        what = f"the actor class {full_name(cls)}.__init__"
        if self._changed:
            with contextlib.suppress(TypeError):  # a decorator's function may hold anything: workers import their own
                return exported(ChangedClass(cls, self._changed), what)
        return exported(cls, what)


T = TypeVar("T")


class ActorClassInheritanceException(TypeError):
    """Raised for a class that inherits from an actor class."""


def _no_subclass(actor_class: str, subclass: str = "") -> ActorClassInheritanceException:
    what = f"define subclass '{subclass}' of" if subclass else "inherit from"
    return ActorClassInheritanceException(
        f"Attempted to {what} actor class '{actor_class}'. Inheriting from actor classes is not currently supported. "
        "You can instead inherit from a non-actor base class and make the derived class an actor class (with "
        "@ray.remote)."
    )


class ClassMetadata:
    """Metadata of an actor class, by Ray's names.

    Attributes:
        modified_class: the user's class.
        class_name: name of the class, as listings of actors have it.
        class_id: digest of the module and the qualified name, in hex.
        is_cross_language, language: always False and "PYTHON".
        method_meta: namespace whose `methods` maps names to functions.
    """

    is_cross_language = False
    language = "PYTHON"

    def __init__(self, cls: type) -> None:
        self.modified_class = cls
        self.class_name = cls.__name__
        name = f"{cls.__module__}.{cls.__qualname__}"
        self.class_id = blake2b(name.encode(), digest_size=14).hexdigest()
        methods = {name: getattr(cls, name) for name in _methods_of(cls)}
        self.method_meta = types.SimpleNamespace(methods=methods)


class ActorClass(Generic[T]):
    """An actor class, the result of `@remote` on a class. `.remote(...)` creates an actor.

    For type checkers T is the class, and the handle is an `ActorProxy[T]`, which has the methods that `@method` marks;
    with `hpcray.mypy_plugin` it is an `ActorHandle[T]`, which has all.
    """

    def __init__(self, cls: type, options: ActorOptions, export: _ExportedClass | None = None) -> None:
        if not isinstance(cls, type):
            # `class B(A)` where A is an actor class: Python makes the new class by calling A's type.
            raise _no_subclass(type(self).__name__[len("ActorClass(") : -1], cls)
        self.__ray_actor_class__ = cls
        self._options = options
        self._export = export or _ExportedClass(cls)
        functools.update_wrapper(cast(Any, self), cls, updated=())

    if not TYPE_CHECKING:  # so that type checkers refuse the call

        def __call__(self, /, *args: Any, **kwargs: Any) -> NoReturn:
            name = self.__ray_actor_class__.__name__
            raise TypeError(f"Actors cannot be instantiated directly. Instead of '{name}()', use '{name}.remote()'.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not kwargs.pop("_made_by_hpcray", False):
            raise _no_subclass(cls.__mro__[1].__name__[len("ActorClass(") : -1], cls.__name__)
        super().__init_subclass__(**kwargs)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        raise _no_subclass(self.__ray_actor_class__.__name__)

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_actor_class__":
            raise AttributeError(name)
        value = getattr(self.__ray_actor_class__, name)
        if inspect.isfunction(value):
            # Never the function itself: cloudpickle would pickle it by its qualified name, so that a class pickled by
            # value had methods (and a `super()`) of another class, the one that workers import.
            if isinstance(inspect.getattr_static(self.__ray_actor_class__, name), staticmethod):
                return functools.partial(value)
            return types.MethodType(value, self)
        return value

    def __getitem__(self, parameters: Any) -> ActorClass[T]:
        """Return the same actor class, for `Class[int]` of a generic class."""
        self.__ray_actor_class__[parameters]  # type: ignore[index]
        return self

    @property
    def _default_options(self) -> dict[str, Any]:
        return dict(self._options.given)

    @property
    def __ray_metadata__(self) -> ClassMetadata:
        """Metadata of the class, for tools that inspect Ray programs."""
        return ClassMetadata(self.__ray_actor_class__)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__ray_actor_class__)})

    def options(self, **overrides: Any) -> ActorClass[T]:
        """Return the actor class with some options replaced.

        Raises:
            ValueError, TypeError: an option is unknown, or its value is not allowed.
        """
        return make_actor_class(self.__ray_actor_class__, self._options.merged(**overrides), self._export)

    def remote(self, /, *args: Any, **kwargs: Any) -> ActorProxy[T]:
        """Create an actor.

        Args:
            args, kwargs: arguments of the constructor; refs among them are replaced by their values.

        Returns:
            The handle, at once. Calls wait until the actor has started.

        Raises:
            ValueError: the name is taken. TypeError: the arguments do not match the constructor, or do not pickle.
            NotImplementedError: an option is not supported.
        """
        process = require_session()
        options, cls = self._options, self.__ray_actor_class__
        namespace = options.namespace or process.place.namespace
        if options.get_if_exists:
            try:
                return get_actor(options.name, namespace)
            except ValueError:
                pass
        check_namespace(options.given.get("namespace"))
        arity(_constructor(cls)).check(cls.__name__, args, kwargs)
        export = self._export
        export.of(cls)
        is_async = has_async_method(cls)
        concurrency = options.max_concurrency or (ASYNC_CONCURRENCY if is_async else 1)
        out_of_order = _out_of_order(options, is_async, concurrency)
        _check_groups(cls, options, export.methods)
        hold, place = with_placement(process, options.given, options.hold, options.place, cls, actor_hooks)
        env = options.given.get("runtime_env")
        detached = _is_detached(process, options)
        hold, place = (with_runtime_env(process, env, shape, detached) for shape in (hold, place))
        spec = m.ActorSpec(
            actor=b"", class_name=cls.__name__, cls=export.blob, args=b"", refs=[], place=place, hold=hold,
            name=options.name, namespace=namespace, detached=detached,
            max_restarts=options.max_restarts, max_task_retries=options.max_task_retries, max_concurrency=concurrency,
            methods=export.methods, max_pending_calls=options.max_pending_calls,
            concurrency_groups=options.concurrency_groups, out_of_order=out_of_order,
            max_runtime=options.given.get("max_runtime") or 0.0,
        )  # fmt: skip
        try:
            keep = process.submitter.actors.create(spec, args, kwargs)
        except ValueError:
            if options.get_if_exists:
                return get_actor(options.name, namespace)
            raise
        except SerializationError as error:
            raise unserializable_argument(error, f"{full_name(cls)}.__init__") from error
        return ActorHandle(
            spec.actor, cls.__name__, export.methods, options.max_task_retries, options.max_pending_calls, keep,
            out_of_order,
        )  # fmt: skip

    def bind(self, /, *args: Any, **kwargs: Any) -> ClassNode:
        """Make a node of a graph that creates an actor; its methods can be bound in turn."""
        from hpcray.graphs.nodes import ClassNode

        return ClassNode(self.__ray_actor_class__, args, kwargs, self._default_options, remote=self)

    def _remote(self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Create an actor with options, as in Ray."""
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def _repr_html_(self) -> str:
        from hpcray.notebooks import remote_html

        return remote_html("Actor class", self.__ray_actor_class__, self._options.given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.__ray_actor_class__, dict(self._options.given))


def make_actor_class(cls: type[T], options: ActorOptions, export: _ExportedClass | None = None) -> ActorClass[T]:
    """Make an `ActorClass` whose type is named after the user's class, as tools that inspect Ray programs expect."""
    body = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    kind = type(f"ActorClass({cls.__name__})", (ActorClass,), body, _made_by_hpcray=True)
    made: ActorClass[T] = kind(cls, options, export)
    return made


def _rebuild(cls: type, given: dict[str, Any]) -> ActorClass[Any]:
    return make_actor_class(cls, ActorOptions(given))


def _methods_of(cls: type) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, member in inspect.getmembers(cls, inspect.isroutine):
        if name.startswith("__") and (name not in _SPECIAL or not inspect.isfunction(member)):
            continue
        bound = inspect.ismethod(member) or isinstance(inspect.getattr_static(cls, name), staticmethod)
        returns = {GENERATOR: True, "num_returns": "streaming"} if yields(member) else {}
        own = {keyword: value for keyword, value in getattr(member, METHOD, {}).items() if value is not None}
        found[name] = {SIGNATURE: describe(member, 0 if bound else 1), **returns, **travelling(own)}
        decorator = getattr(member, "__ray_invocation_decorator__", None)
        if decorator is not None:
            found[name][DECORATOR] = cloudpickle.dumps(decorator)
    return found


def _constructor(cls: type) -> str:
    if cls.__init__ is not object.__init__:  # type: ignore[misc]
        return describe(cls.__init__, 1)  # type: ignore[misc]
    return ANYTHING if any("__new__" in vars(base) for base in cls.__mro__[:-1]) else NOTHING


def _is_detached(process: CoreWorker, options: ActorOptions) -> bool:
    default = RuntimeEnvs.of(process).job.get(ACTOR_LIFETIME)
    return (options.given.get("lifetime") or default) == "detached"


def _out_of_order(options: ActorOptions, is_async: bool, concurrency: int) -> bool:
    """Return True if a call may overtake calls that wait for their arguments; by default if calls may overlap."""
    overlapping = is_async or concurrency > 1
    if overlapping and options.out_of_order is False:
        kind = "async" if is_async else "multi-threaded"
        raise ValueError(
            f"If you're using {kind} actors, calls can't be executed in order; hint: leave out "
            "allow_out_of_order_execution=False"
        )
    return overlapping if options.out_of_order is None else options.out_of_order


def _check_groups(cls: type, options: ActorOptions, methods: dict[str, dict[str, Any]]) -> None:
    """Check the concurrency groups. A limit below 1 ends the actor, as in Ray, and is only logged here."""
    for name, limit in options.concurrency_groups.items():
        if limit < 1:
            logger.error("%s: concurrency group %r: max_concurrency must be greater than 0", cls.__name__, name)
    for name, given in methods.items():
        group = given.get("concurrency_group")
        if group and group not in options.concurrency_groups and group not in SYSTEM_GROUPS:
            raise ValueError(
                f"the method {cls.__name__}.{name} is of the concurrency group {group!r}, but the actor has only "
                f'{list(options.concurrency_groups)}; hint: @remote(concurrency_groups={{"{group}": limit}})'
            )


def get_actor(name: str, namespace: str | None = None) -> ActorHandle:
    """Return the handle of a named actor. The handle does not keep the actor alive.

    Args:
        name: name of the actor.
        namespace: namespace of the name; by default that of the job.

    Raises:
        ValueError: no live actor has this name in the namespace.
    """
    if not name:
        raise ValueError("Please supply a non-empty value to get_actor")
    process = require_session()
    with process.engine.lock:
        process.drain()  # an actor of this name may end with a handle that was just dropped
    check_namespace(namespace)
    space = namespace or process.place.namespace
    try:
        found = process.gcs.call("named_actor", name, space)
    except ValueError:
        raise ValueError(
            f"Failed to look up actor with name '{name}' in namespace '{space}'. hint: it was never created, is in "
            "another namespace, or has died; util.list_named_actors() shows those that live"
        ) from None
    return ActorHandle(
        found["actor"], found["class_name"], found["methods"], found.get("max_task_retries", 0),
        found.get("max_pending_calls", -1), None, found.get("out_of_order", False),
    )  # fmt: skip


def list_named_actors(all_namespaces: bool = False) -> list[Any]:
    """List the live named actors.

    Args:
        all_namespaces: list the actors of all namespaces, not only of the namespace of the job.

    Returns:
        The names, or with `all_namespaces` rows `{"name": ..., "namespace": ...}`.
    """
    process = require_session()
    namespace = process.place.namespace
    rows: list[dict[str, str]] = process.gcs.call("list_named_actors", all_namespaces, namespace)
    return rows if all_namespaces else [row["name"] for row in rows]


def kill(actor: ActorHandle | ActorProxy[Any], *, no_restart: bool = True) -> None:
    """Kill the process of an actor. Its pending calls raise `ActorDiedError`.

    Args:
        actor: handle of the actor.
        no_restart: do not restart the actor, whatever its `max_restarts`.

    Raises:
        ValueError: `actor` is no actor handle. ActorHandleNotFoundError: it is one of another session.
    """
    process = require_session()
    if not isinstance(actor, ActorHandle):
        raise ValueError(f"ray.kill() only supported for actors. For tasks, try ray.cancel(). Got: {type(actor)}.")
    _check_session(process, actor)
    with process.engine.lock:
        process.submitter.actors.client(actor).kill()
        process.engine.send(HEAD, m.KillActor(actor._actor, no_restart, "it was killed by `ray.kill`."))
        process.engine.flush()


def _check_session(process: CoreWorker, actor: ActorHandle) -> None:
    if run_of(actor._actor) == run_of(process.me):
        return  # made in this run of the job
    if not any(row["actor"] == actor._actor for row in process.gcs.call("actors")):
        raise ActorHandleNotFoundError(
            "ActorHandle objects are not valid across Ray sessions. "
            f"{actor!r} belongs to an earlier session of this program, or to another job. hint: create the actor again "
            "after init()"
        )


def exit_actor() -> NoReturn:
    """End the calling actor, from a method or a thread of it. It does not restart.

    An exception is raised here, and the actor ends even if that is caught. Calls that run at the same time are finished
    first. The call that ends the actor, those that wait, and later ones raise `ActorDiedError`.

    Raises:
        TypeError: this process is no actor.
    """
    worker = current.worker
    if worker is None or worker.actor is None:
        kind = "driver" if worker is None else "worker"
        raise TypeError(
            f"exit_actor API is called on a non-actor worker, a {kind}; hint: call it inside of an actor's method"
        )
    raise worker.actor.exit()
