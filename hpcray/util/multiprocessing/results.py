"""What the methods of a `Pool` return."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import TimeoutError
from time import monotonic
from typing import Any

from hpcray.util.crew import Failure, checked
from hpcray.util.dispatch import Dispatcher, DispatchFuture

Callback = Callable[[Any], object]
_GLANCE = 0.05


class AsyncResult:
    """The result of a call, or of a map, that goes on. Of several errors the first item's counts."""

    def __init__(
        self,
        crew: Dispatcher,
        futures: list[DispatchFuture],
        read: Callable[[list[Any]], Any],
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> None:
        """
        Args:
            futures: of all jobs; each gives the list of its outcomes.
            read: turns the list of all values into the result.
            callback, error_callback: called with the result or the exception, in a thread of their own kind: they must
                not wait for other results.
        """
        self._crew, self._futures, self._read = crew, futures, read
        self._callback, self._error_callback = callback, error_callback
        self._left = len(futures)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None
        for future in futures:
            future.add_done_callback(self._one_done)
        if not futures:
            self._finish()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is there, or `timeout` seconds."""
        self._done.wait(self._crew.lend(self._done.is_set, timeout))

    def get(self, timeout: float | None = None) -> Any:
        """The result.

        Raises:
            multiprocessing.TimeoutError: not there within `timeout` seconds. Whatever the call raised.
            RayActorError: its process died. concurrent.futures.CancelledError: the pool was terminated.
        """
        self.wait(timeout)
        if not self._done.is_set():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def ready(self) -> bool:
        """Whether it is there."""
        return self._done.is_set()

    def successful(self) -> bool:
        """Whether nothing was raised.

        Raises:
            ValueError: it is not there yet.
        """
        if not self.ready():
            raise ValueError(f"{self!r} not ready")
        return self._error is None

    def _one_done(self, _future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._finish()

    def _finish(self) -> None:
        try:
            outcomes = [outcome for future in self._futures for outcome in future.result()]
            self._value = self._read(checked(outcomes))
        except BaseException as error:
            self._error = error
        self._futures = []
        try:
            if self._error is None and self._callback is not None:
                self._callback(self._value)
            elif self._error is not None and self._error_callback is not None:
                self._error_callback(self._error)
        finally:
            self._done.set()


class IMapIterator(Iterator[Any]):
    """Results of a lazy map. Chunks are taken from the iterable as results are: a few per process are under way.

    An item that raised is raised at its turn; the iteration can go on after it.
    """

    def __init__(self, crew: Dispatcher, jobs: Iterator[Callable[[], DispatchFuture]], ahead: int) -> None:
        """
        Args:
            jobs: each submits one job and returns its future.
            ahead: how many are submitted before their results are taken.
        """
        self._crew, self._jobs, self._ahead = crew, jobs, ahead
        self._futures: deque[DispatchFuture] = deque()
        self._outcomes: deque[Any] = deque()
        self._lock = threading.RLock()
        self._fill()

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """The next result.

        Raises:
            multiprocessing.TimeoutError: not there within `timeout` seconds; it can be asked for again.
            StopIteration: there are no more. Whatever the call raised.
        """
        with self._lock:
            if not self._outcomes:
                if not self._futures:
                    raise StopIteration
                future = self._wait(timeout)
                self._futures.remove(future)
                self._fill()
                self._outcomes.extend(future.result())
            outcome = self._outcomes.popleft()
        if isinstance(outcome, Failure):
            raise outcome.error()
        return outcome

    def _wait(self, timeout: float | None) -> DispatchFuture:
        future = self._futures[0]
        try:
            future.exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError from None
        except concurrent.futures.CancelledError:
            pass
        return future

    def _fill(self) -> None:
        while len(self._futures) < self._ahead:
            submit = next(self._jobs, None)
            if submit is None:
                return
            self._futures.append(submit())


class UnorderedIMapIterator(IMapIterator):
    """The same, with results as they are ready."""

    def _wait(self, timeout: float | None) -> DispatchFuture:
        deadline = None if timeout is None else monotonic() + timeout

        def ready() -> bool:
            return any(future.done() for future in self._futures)

        left = self._crew.lend(ready, timeout)
        if not ready():
            concurrent.futures.wait(self._futures, left, concurrent.futures.FIRST_COMPLETED)
        for future in self._futures:
            if future.done():
                return future
        assert deadline is not None
        raise TimeoutError
