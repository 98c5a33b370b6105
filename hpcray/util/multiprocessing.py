"""`multiprocessing.Pool` over the nodes of the job, with actors for processes."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import sys
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing import JoinableQueue, TimeoutError
from time import monotonic
from typing import Any, NoReturn

from hpcray.api.actor import ActorHandle
from hpcray.api.objects import get, put
from hpcray.api.runtime_context import cluster_resources
from hpcray.api.session import init, is_initialized
from hpcray.common.exceptions import ActorDiedError
from hpcray.platform.job_variables import session_of_parent
from hpcray.transport.startup import read_launch
from hpcray.util.dispatcher import (
    CALL,
    MAP,
    STARMAP,
    ActorWorkers,
    CallFailure,
    DispatchedCall,
    DispatchFuture,
    chunks_of,
    values_or_raise,
)

__all__ = [
    "AsyncResult",
    "IMapIterator",
    "JoinableQueue",
    "OrderedIMapIterator",
    "Pool",
    "TimeoutError",
    "UnorderedIMapIterator",
]

Callback = Callable[[Any], object]

_CHUNKS_PER_PROCESS = 4
_CHUNKS_AHEAD = 2  # per process, of lazy maps
_JOIN_TIMEOUT = 5.0  # seconds until actors are killed
_RUNNING, _CLOSED, _TERMINATED = "RUNNING", "CLOSED", "TERMINATED"

pool = sys.modules[f"{__name__}.pool"] = sys.modules[__name__]  # Ray's module of this name


class AsyncResult:
    """Result of an asynchronous call or map. Where several items failed, `get` raises the error of the first."""

    def __init__(
        self,
        workers: ActorWorkers,
        futures: list[DispatchFuture],
        read: Callable[[list[Any]], Any],
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> None:
        """
        Args:
            workers: the dispatcher of the calls.
            futures: futures of the calls; each has the list of its outcomes as result.
            read: converts the list of all values to the result.
            callback, error_callback: called with the result or the exception in the thread that completes futures, so
                they must not wait for other results.
        """
        self._workers, self._futures, self._read = workers, futures, read
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
        """Wait until the result is available, at most `timeout` seconds."""
        self._done.wait(self._workers.wait_lending_cpu(self._done.is_set, timeout))

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result and return it, or raise the exception of the function.

        Raises:
            multiprocessing.TimeoutError: the result did not arrive within `timeout` seconds.
            RayActorError: the process died, or the pool was terminated.
        """
        self.wait(timeout)
        if not self._done.is_set():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def ready(self) -> bool:
        """Return True if the result is available."""
        return self._done.is_set()

    def successful(self) -> bool:
        """Return True if the function raised no exception.

        Raises:
            ValueError: the result is not available yet.
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
            self._value = self._read(values_or_raise(outcomes))
        except concurrent.futures.CancelledError:
            self._error = ActorDiedError("the pool was terminated before the call started")
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
    """Results of a lazy map. A few chunks per process are in flight; each result taken admits another.

    The exception of an item takes the place of its result; the RayActorError of a chunk whose process died, that of the
    results of the chunk.
    """

    def __init__(self, workers: ActorWorkers, calls: Iterator[Callable[[], DispatchFuture]], ahead: int) -> None:
        """
        Args:
            workers: the dispatcher of the calls.
            calls: functions that each submit one call and return its future.
            ahead: number of calls to submit before their results are taken.
        """
        self._workers, self._calls, self._ahead = workers, calls, ahead
        self._futures: deque[DispatchFuture] = deque()
        self._outcomes: deque[Any] = deque()
        self._lock = threading.RLock()
        self._fill()

    def __iter__(self) -> IMapIterator:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, timeout: float | None = None) -> Any:
        """Return the next result, or the exception of the function.

        Raises:
            multiprocessing.TimeoutError: the result did not arrive within `timeout` seconds; call `next` again.
            StopIteration: there are no more results.
        """
        with self._lock:
            if not self._outcomes:
                if not self._futures:
                    raise StopIteration
                future = self._wait(timeout)
                self._futures.remove(future)
                self._fill()
                try:
                    self._outcomes.extend(future.result())
                except Exception as error:
                    return error
            outcome = self._outcomes.popleft()
        return outcome.error() if isinstance(outcome, CallFailure) else outcome

    @abstractmethod
    def _wait(self, timeout: float | None) -> DispatchFuture:
        """Wait for the future whose results come next."""

    def _fill(self) -> None:
        while len(self._futures) < self._ahead:
            submit = next(self._calls, None)
            if submit is None:
                return
            self._futures.append(submit())


class OrderedIMapIterator(IMapIterator):
    """Results of a lazy map in the order of the items."""

    def _wait(self, timeout: float | None) -> DispatchFuture:
        future = self._futures[0]
        try:
            future.exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError from None
        except concurrent.futures.CancelledError:
            pass
        return future


class UnorderedIMapIterator(IMapIterator):
    """Results of a lazy map in the order in which they become ready."""

    def _wait(self, timeout: float | None) -> DispatchFuture:
        deadline = None if timeout is None else monotonic() + timeout

        def ready() -> bool:
            return any(future.done() for future in self._futures)

        left = self._workers.wait_lending_cpu(ready, timeout)
        if not ready():
            concurrent.futures.wait(self._futures, left, concurrent.futures.FIRST_COMPLETED)
        for future in self._futures:
            if future.done():
                return future
        assert deadline is not None
        raise TimeoutError


class Pool:
    """A `multiprocessing.Pool` whose processes are actors on the nodes of the job.

    Unlike in the standard library, functions and values are pickled by cloudpickle, arrays arrive read-only, and the
    result of a process that dies is a `RayActorError`.

    Args:
        processes: number of processes; None: one per CPU of the cluster.
        initializer, initargs: function that each process calls first, and its arguments.
        maxtasksperchild: number of chunks after which a new process replaces a process.
        context: without effect.
        ray_address: `address` of `hpcray.init`, where that was not called.
        ray_remote_args: options of the actors, as for `@remote`. By default an actor holds no CPU.

    Raises:
        ValueError: `processes` or `maxtasksperchild` is not positive, or the cluster has fewer CPUs.
        TypeError: the initializer is not callable. RayActorError: it failed.
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
        maxtasksperchild: int | None = None,
        context: Any = None,
        ray_address: str | None = None,
        ray_remote_args: dict[str, Any] | None = None,
    ) -> None:
        if processes is not None and processes <= 0:
            raise ValueError("Processes in the pool must be >0.")
        if maxtasksperchild is not None and (not isinstance(maxtasksperchild, int) or maxtasksperchild <= 0):
            raise ValueError("maxtasksperchild must be a positive int or None")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        self._processes = _connect(processes, ray_address)
        self._state = _RUNNING
        self._workers = ActorWorkers(self._processes, initializer, initargs or (), maxtasksperchild, ray_remote_args)
        try:
            get([actor.__ray_ready__.remote() for actor in self._workers.start_all()])
        except BaseException:
            self.terminate()
            raise

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        kwds: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return `func(*args, **kwargs)`, called in a process. `kwds`: the standard library's name of `kwargs`."""
        return self.apply_async(func, args, kwargs, kwds=kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
        *,
        kwds: Mapping[str, Any] | None = None,
    ) -> AsyncResult:
        """Start `func(*args, **kwargs)`.

        Args:
            callback, error_callback: called in this process with the result or the exception.
        """
        self._check_running()
        future = self._submit(func, [(tuple(args or ()), dict(kwargs or kwds or {}))], CALL)
        return AsyncResult(self._workers, [future], lambda values: values[0], callback, error_callback)

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """Return `[func(item) for item in iterable]`. The chunks are dealt to the processes in turn.

        Args:
            chunksize: number of items per chunk; None: four chunks per process.
        """
        return self.map_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def map_async(
        self,
        func: Callable[[Any], Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Start a `map`. The result is the list."""
        return self._map(func, iterable, chunksize, MAP, callback, error_callback)

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """Return `[func(*args) for args in iterable]`, computed by all processes."""
        return self.starmap_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Start a `starmap`. The result is the list."""
        return self._map(func, iterable, chunksize, STARMAP, callback, error_callback)

    def imap(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1) -> IMapIterator:
        """Iterate over the results of `func(item)`, or the exceptions it raised, in order.

        Items are read as results are taken, so the iterable may be endless.
        """
        return OrderedIMapIterator(*self._lazily(func, iterable, chunksize))

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1
    ) -> UnorderedIMapIterator:
        """Iterate over the results of `imap` in the order in which they become ready."""
        return UnorderedIMapIterator(*self._lazily(func, iterable, chunksize))

    def close(self) -> None:
        """Refuse further work. The processes end when all work is done."""
        if self._state == _RUNNING:
            self._state = _CLOSED
            self._workers.close()

    def terminate(self) -> None:
        """Kill the processes. Pending results become errors."""
        self._state = _TERMINATED
        self._workers.close()
        self._workers.cancel_queued()
        self._workers.stop(0)

    def join(self) -> None:
        """Wait until all work is done, and end the processes.

        Raises:
            ValueError: neither `close` nor `terminate` was called.
        """
        if self._state == _RUNNING:
            raise ValueError("Pool is still running")
        self._workers.join()
        self._workers.stop(_JOIN_TIMEOUT)

    @property
    def _actor_pool(self) -> list[tuple[ActorHandle, int]]:
        """Ray's list of (actor, number of chunks it has served)."""
        return self._workers.served()

    def __enter__(self) -> Pool:
        self._check_running()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def _check_running(self) -> None:
        if self._state != _RUNNING:
            raise ValueError("Pool not running")

    def _map(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        kind: str,
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> AsyncResult:
        self._check_running()
        items = list(iterable)
        size = chunksize or max(1, -(-len(items) // (self._processes * _CHUNKS_PER_PROCESS)))
        shared = put(func) if len(items) > size else func
        futures = [
            self._submit(shared, chunk, kind, number % self._processes)
            for number, chunk in enumerate(chunks_of(items, size))
        ]
        return AsyncResult(self._workers, futures, lambda values: values, callback, error_callback)

    def _lazily(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int
    ) -> tuple[ActorWorkers, Iterator[Callable[[], DispatchFuture]], int]:
        self._check_running()
        if chunksize < 1:
            raise ValueError(f"Chunksize must be 1+, not {chunksize:n}")
        shared = put(func)
        calls = (functools.partial(self._submit, shared, chunk, MAP) for chunk in chunks_of(iterable, chunksize))
        return self._workers, calls, self._processes * _CHUNKS_AHEAD

    def _submit(self, func: Any, items: list[Any], kind: str, place: int | None = None) -> DispatchFuture:
        return self._workers.submit(DispatchedCall((func, items, kind), place=place))


def _connect(processes: int | None, address: str | None) -> int:
    """Start or join a session unless there is one; returns the number of processes of the pool."""
    if not is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or None
        alone = (
            address is None
            and not read_launch(os.environ).kind
            and "HPCRAY_ADDRESS" not in os.environ
            and session_of_parent(os.environ) is None
        )
        init(address, num_cpus=processes if alone else None)
    cpus = int(cluster_resources().get("CPU", 0))
    if processes is None:
        return max(1, cpus)
    if processes > cpus:
        raise ValueError(
            f"Tried to start a pool with {processes} processes on an existing ray cluster, but there are only {cpus} "
            "CPUs in the ray cluster."
        )
    return processes
