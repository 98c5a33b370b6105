"""A fixed set of actors that share a stream of work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcray.api.actor import ActorHandle
from hpcray.api.objects import get, wait
from hpcray.runtime.refs import ObjectRef

V = TypeVar("V")
Call = Callable[[ActorHandle, Any], Any]


@dataclass
class _Running:
    """A call that an actor of the pool works on. `result` is a ref, or the list of refs of several returns."""

    actor: ActorHandle
    result: Any

    @property
    def last(self) -> ObjectRef[Any]:
        """One ref of it: all returns of a call are there together."""
        ref: ObjectRef[Any] = self.result[-1] if isinstance(self.result, list) else self.result
        return ref


class ActorPool:
    """Hands values to whichever of its actors is free.

    Not to be used by several threads at once.

    Args:
        actors: handles. They stay the caller's: the pool neither starts nor ends actors.
    """

    def __init__(self, actors: Iterable[ActorHandle]) -> None:
        self._idle_actors: list[ActorHandle] = list(actors)
        self._running: dict[int, _Running] = {}
        self._queue: deque[tuple[Call, Any]] = deque()
        self._started = 0
        self._cursor = 0

    def map(self, fn: Callable[[ActorHandle, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """Apply `fn` to all values; an iterator over the results in the order of the values.

        What was submitted before is waited for and dropped. The calls start at once, each as an actor becomes free;
        results must be taken for the rest to start.

        Args:
            fn: takes (actor, value), returns the ref of a call of that actor.
        """
        self._submit_all(fn, values)
        return self._results(self.get_next)

    def map_unordered(self, fn: Callable[[ActorHandle, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """As `map`, but results come as they are ready."""
        self._submit_all(fn, values)
        return self._results(self.get_next_unordered)

    def submit(self, fn: Callable[[ActorHandle, V], Any], value: V) -> None:
        """Start `fn(actor, value)` on a free actor, or once one is free.

        Raises:
            TypeError: `fn` returned neither a ref nor a list of refs; the actor stays in the pool.
        """
        if not self._idle_actors:
            self._queue.append((fn, value))
            return
        actor = self._idle_actors.pop()
        try:
            result = fn(actor, value)
            _check_result(result)
        except BaseException:
            self._idle_actors.append(actor)
            raise
        self._running[self._started] = _Running(actor, result)
        self._started += 1

    def has_next(self) -> bool:
        """Whether there is a result to be taken, now or later."""
        return bool(self._running)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """The next result in the order of submission.

        Args:
            timeout: seconds; None waits for ever.
            ignore_if_timedout: give up a result that is late. Its actor counts as free again, though it still works.

        Raises:
            StopIteration: there is none. TimeoutError: not ready in time; the next call returns it, unless it was given
                up. ValueError: get_next_unordered() has gone past it. Whatever the call raised.
        """
        if not self._running:
            raise StopIteration("No more results to get")
        if self._cursor >= self._started:
            raise ValueError("It is not allowed to call get_next() after get_next_unordered().")
        late = timeout is not None and not wait([self._running[self._cursor].last], timeout=timeout)[0]
        if late and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        return self._take(self._cursor, late)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Any result that is ready; the arguments and errors are those of `get_next`.

        With `ignore_if_timedout` it is the oldest call that is given up.
        """
        if not self._running:
            raise StopIteration("No more results to get")
        by_ref = {running.last: index for index, running in self._running.items()}
        ready, late = wait(list(by_ref), num_returns=1, timeout=timeout)
        if not ready and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        return self._take(by_ref[(ready or late)[0]], not ready)

    def has_free(self) -> bool:
        """Whether an actor is free and nothing waits for it."""
        return bool(self._idle_actors) and not self._queue

    def pop_idle(self) -> ActorHandle | None:
        """Take a free actor out of the pool; None when there is none."""
        return self._idle_actors.pop() if self.has_free() else None

    def push(self, actor: ActorHandle) -> None:
        """Add an actor.

        Raises:
            ValueError: it is in the pool.
        """
        if actor in self._idle_actors or any(running.actor == actor for running in self._running.values()):
            raise ValueError("Actor already belongs to current ActorPool")
        self._free(actor)

    def _submit_all(self, fn: Callable[[ActorHandle, V], Any], values: Iterable[V]) -> None:
        while self._running:
            index = next(iter(self._running))
            wait([self._running[index].last])
            self._release(index)
        for value in values:
            self.submit(fn, value)

    def _results(self, take: Callable[[], Any]) -> Iterator[Any]:
        while self._running:
            yield take()

    def _take(self, index: int, late: bool) -> Any:
        result = self._release(index)
        if late:
            raise TimeoutError(f"Timed out waiting for result. The task {result} has been ignored.")
        return get(result)

    def _release(self, index: int) -> Any:
        """Forget a call and let its actor go on; returns its ref or refs."""
        running = self._running.pop(index)
        self._cursor = max(self._cursor, index + 1)
        self._free(running.actor)
        return running.result

    def _free(self, actor: ActorHandle) -> None:
        self._idle_actors.append(actor)
        if self._queue:
            self.submit(*self._queue.popleft())


def _check_result(result: Any) -> None:
    if isinstance(result, ObjectRef):
        return
    if not isinstance(result, list) or not result or not all(isinstance(ref, ObjectRef) for ref in result):
        raise TypeError(
            f"the function of an ActorPool returned {type(result)}, not an ObjectRef; "
            "hint: lambda actor, value: actor.method.remote(value)"
        )
