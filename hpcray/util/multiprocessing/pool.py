"""`multiprocessing.Pool` with actors for processes."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hpcray.api.context import cluster_resources
from hpcray.api.objects import put
from hpcray.api.session import init, is_initialized
from hpcray.transport.startup import read_launch
from hpcray.util.crew import CALL, MAP, STARMAP, Crew
from hpcray.util.dispatch import DispatchFuture, Job
from hpcray.util.multiprocessing.results import AsyncResult, Callback, IMapIterator, UnorderedIMapIterator
from hpcray.util.task_dispatch import chunks_of

_CHUNKS = 4
_AHEAD = 2
_PATIENCE = 5.0
_RUNNING, _CLOSED, _TERMINATED = "RUNNING", "CLOSED", "TERMINATED"


class Pool:
    """A `multiprocessing.Pool` whose processes are actors on the nodes of the job.

    It differs from that of the standard library in what tasks and actors differ in: functions and values are pickled by
    cloudpickle, and arrays arrive read-only. The result of a process that dies is a `RayActorError`.

    Args:
        processes: how many; None: one per CPU of the cluster.
        initializer, initargs: called first in each process.
        maxtasksperchild: after so many chunks of work a process is replaced.
        context: ignored.
        ray_address: `address` of `hpcray.init`, if that was not called.
        ray_remote_args: options of the actors, as for `@remote`. By default they hold no CPU.

    Raises:
        ValueError: processes or maxtasksperchild is not positive, or there are not so many CPUs.
        TypeError: the initializer cannot be called.
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
        self._crew = Crew(self._processes, initializer, initargs or (), maxtasksperchild, ray_remote_args)
        self._crew.boot()

    def apply(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        kwds: Mapping[str, Any] | None = None,
    ) -> Any:
        """`func(*args, **kwargs)` in one of the processes. `kwds` is the standard library's word for `kwargs`."""
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
            callback, error_callback: called here with the result or the exception.
        """
        self._check_running()
        future = self._submit(func, [(tuple(args or ()), dict(kwargs or kwds or {}))], CALL)
        return AsyncResult(self._crew, [future], lambda values: values[0], callback, error_callback)

    def map(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """`[func(item) for item in iterable]`, spread over the processes.

        Args:
            chunksize: items per piece of work; None: four pieces per process.
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
        """Start a `map`; its result is the list."""
        return self._map(func, iterable, chunksize, MAP, callback, error_callback)

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """`[func(*args) for args in iterable]`, spread over the processes."""
        return self.starmap_async(func, iterable, chunksize).get()  # type: ignore[no-any-return]

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult:
        """Start a `starmap`; its result is the list."""
        return self._map(func, iterable, chunksize, STARMAP, callback, error_callback)

    def imap(self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1) -> IMapIterator:
        """An iterator over `func(item)` in order. Items are taken as results are, so the iterable may be endless."""
        return IMapIterator(*self._lazily(func, iterable, chunksize))

    def imap_unordered(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int = 1
    ) -> UnorderedIMapIterator:
        """As `imap`, with results as they are ready."""
        return UnorderedIMapIterator(*self._lazily(func, iterable, chunksize))

    def close(self) -> None:
        """Take no more work; the processes end when all is done."""
        if self._state == _RUNNING:
            self._state = _CLOSED
            self._crew.close()

    def terminate(self) -> None:
        """Kill the processes. Results that are not there become errors."""
        self._state = _TERMINATED
        self._crew.close()
        self._crew.withdraw()
        self._crew.end(0)

    def join(self) -> None:
        """Wait until all work is done and the processes have ended.

        Raises:
            ValueError: neither `close` nor `terminate` was called.
        """
        if self._state == _RUNNING:
            raise ValueError("Pool is still running")
        self._crew.join()
        self._crew.end(_PATIENCE)

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
        size = chunksize or max(1, -(-len(items) // (self._processes * _CHUNKS)))
        shared = _shared(func) if len(items) > size else func
        futures = [self._submit(shared, chunk, kind) for chunk in chunks_of(items, size)]
        return AsyncResult(self._crew, futures, lambda values: values, callback, error_callback)

    def _lazily(
        self, func: Callable[[Any], Any], iterable: Iterable[Any], chunksize: int
    ) -> tuple[Crew, Iterator[Callable[[], DispatchFuture]], int]:
        self._check_running()
        if chunksize < 1:
            raise ValueError(f"Chunksize must be 1+, not {chunksize:n}")
        shared = _shared(func)
        jobs = (functools.partial(self._submit, shared, chunk, MAP) for chunk in chunks_of(iterable, chunksize))
        return self._crew, jobs, self._processes * _AHEAD

    def _submit(self, func: Any, items: list[Any], kind: str) -> DispatchFuture:
        return self._crew.submit(Job((func, items, kind)))


def _shared(func: Any) -> Any:
    """A ref to the function, so that it is pickled once."""
    return put(func)


def _connect(processes: int | None, address: str | None) -> int:
    """Start or join a session if need be; how many processes there are to be."""
    if not is_initialized():
        address = address or os.environ.get("RAY_ADDRESS") or None
        alone = address is None and not read_launch(os.environ).kind and "HPCRAY_ADDRESS" not in os.environ
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


__all__ = ["AsyncResult", "IMapIterator", "Pool", "UnorderedIMapIterator"]
