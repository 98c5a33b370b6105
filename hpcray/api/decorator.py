"""The decorator `@remote`."""

from __future__ import annotations

import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, Protocol, TypeVar, get_origin, overload

from hpcray.api.actor import ActorClass, make_actor_class
from hpcray.api.options import ACTOR_RULES, TASK_RULES, ActorOptions, TaskOptions, check_generator, yields
from hpcray.api.remote_function import RemoteFunction

if TYPE_CHECKING:
    from hpcray.api.remote_function import StreamingFunction

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")
_ALIASES = (types.GenericAlias, type(Generic[C]))  # type: ignore[index]
_ALL_OPTIONS = list({**TASK_RULES, **ACTOR_RULES})


class Decorate(Protocol):
    """`@remote(...)` with options."""

    @overload
    def __call__(self, target: type[C], /) -> ActorClass[C]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Callable[P, Generator[R, Any, Any]], /) -> StreamingFunction[P, R]: ...

    @overload
    def __call__(self, target: Callable[P, AsyncGenerator[R, Any]], /) -> StreamingFunction[P, R]: ...

    @overload
    def __call__(self, target: Callable[P, R], /) -> RemoteFunction[P, R]: ...


class DecorateMany(Protocol):
    """`@remote(num_returns=...)`: the result type of `.remote` is not known."""

    def __call__(self, target: Callable[..., Any], /) -> Any:
        """Decorate a function."""


@overload
def remote(target: type[C], /) -> ActorClass[C]: ...  # type: ignore[overload-overlap]


@overload
def remote(target: Callable[P, Generator[R, Any, Any]], /) -> StreamingFunction[P, R]: ...


@overload
def remote(target: Callable[P, AsyncGenerator[R, Any]], /) -> StreamingFunction[P, R]: ...


@overload
def remote(target: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(*, num_returns: Literal[1] | None = None, **options: Any) -> Decorate: ...


@overload
def remote(*, num_returns: int | str, **options: Any) -> DecorateMany: ...


def remote(*args: Any, **options: Any) -> Any:
    """Make a function a remote function, or a class an actor class.

    Use the decorator without options (`@remote`) or with options (`@remote(num_cpus=2)`).

    Args:
        options: `num_cpus`, `num_gpus`, `resources`, `num_returns`, `max_retries`, `name` and others of Ray.

    Returns:
        A `RemoteFunction` or an `ActorClass`.

    Raises:
        TypeError: the target is no function or class, or is remote already.
        ValueError: an option is unknown or out of range, or the function is `async def`.
        AssertionError: positional arguments, as in Ray.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return _make(args[0], {})
    if args or not options:
        raise AssertionError(
            "The @ray.remote decorator must be applied either with no arguments and no parentheses, for example "
            f"'@ray.remote', or it must be applied using some of the arguments in the list {_ALL_OPTIONS}, for example "
            "'@ray.remote(num_returns=2, resources={\"CustomResource\": 1})'."
        )
    return lambda target: _make(target, options)


def _make(target: Any, options: dict[str, Any]) -> Any:
    target = _plain_class(target)
    if inspect.isclass(target):
        return make_actor_class(target, ActorOptions(options))
    if inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        raise ValueError(
            "'async def' should not be used for remote tasks. You can wrap the async function with `asyncio.run(f())`. "
            "hint: or make it a method of an actor"
        )
    if callable(target) and not isinstance(target, (RemoteFunction, ActorClass)):
        made: RemoteFunction[..., Any] = RemoteFunction(target, TaskOptions(options))
        check_generator(options.get("num_returns"), yields(target), stacklevel=4)
        return made
    raise TypeError("The @ray.remote decorator must be applied to either a function or a class.")


def _plain_class(target: Any) -> Any:
    """Return the class of `Class[int]`; other targets are returned unchanged."""
    origin = get_origin(target)
    return origin if isinstance(origin, type) and isinstance(target, _ALIASES) else target
