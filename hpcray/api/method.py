"""The decorator `@method`, and what type checkers make of a method that it marks."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from hpcray.api.actor_handle import METHOD, ActorMethod
from hpcray.api.options import METHOD_RULES, check_generator, did_you_mean, yields

if TYPE_CHECKING:
    from hpcray.api.actor_handle import AnyMethod, StreamingMethod

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
