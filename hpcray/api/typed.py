"""What type checkers are told of `@remote` and `@method`. Nothing here exists at run time but the names.

A remote function keeps its parameters: `f.remote(...)` is checked, and gives `ObjectRef[R]`. Of an actor handle types
cannot say "the methods of T, each with `.remote`"; but methods that `@method` marks know both ways to be called, so a
handle that is annotated as `ActorProxy[T]` is checked as far as its methods are marked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

from hpcray.api.actor import ActorClass
from hpcray.api.remote_function import RemoteFunction
from hpcray.runtime.refs import ObjectRef
from hpcray.runtime.streams import ObjectRefGenerator

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
C = TypeVar("C")

if TYPE_CHECKING:
    ActorProxy = Annotated[C, "an actor of this class"]
else:

    class ActorProxy(Generic[C]):
        """In annotations: the handle of an actor of this class."""


class StreamingFunction(Protocol[P, R]):
    """A remote function that yields."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRefGenerator[R]:
        """Submit it."""

    def options(self, **overrides: Any) -> StreamingFunction[P, R]:
        """With some options replaced."""


class RemoteMethod(Protocol[P, R]):
    """A method of an actor: called inside as it is, from outside with `.remote`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it, inside the actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call it, from outside."""

    def options(self, **overrides: Any) -> Any:
        """With some options replaced."""


class AsyncRemoteMethod(Protocol[P, R]):
    """A coroutine method of an actor."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call it, inside the actor."""

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call it, from outside."""

    def options(self, **overrides: Any) -> Any:
        """With some options replaced."""


class Method(Protocol[P, R]):
    """What `@method` makes of a method."""

    def __get__(self, instance: Any, owner: Any = None) -> RemoteMethod[P, R]:
        """Of an instance."""


class AsyncMethod(Protocol[P, R]):
    """What `@method` makes of a coroutine method."""

    def __get__(self, instance: Any, owner: Any = None) -> AsyncRemoteMethod[P, R]:
        """Of an instance."""


class Decorate(Protocol):
    """`@remote(...)` with options."""

    @overload
    def __call__(self, target: type[C], /) -> ActorClass[C]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Callable[P, Generator[R, Any, Any]], /) -> StreamingFunction[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Callable[P, AsyncGenerator[R, Any]], /) -> StreamingFunction[P, R]: ...  # type: ignore[overload-overlap]

    @overload
    def __call__(self, target: Callable[P, R], /) -> RemoteFunction[P, R]: ...


class DecorateMany(Protocol):
    """`@remote(num_returns=...)`: what `.remote` returns is not known."""

    def __call__(self, target: Callable[..., Any], /) -> Any:
        """Decorate."""


class DecorateMethod(Protocol):
    """`@method(...)` with options."""

    @overload
    def __call__(self, target: Callable[Concatenate[S, P], Coroutine[Any, Any, R]], /) -> AsyncMethod[P, R]: ...

    @overload
    def __call__(self, target: Callable[Concatenate[S, P], R], /) -> Method[P, R]: ...
