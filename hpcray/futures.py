"""`mpi4py.futures` on actors: `from hpcray.futures import MPIPoolExecutor` instead of `from mpi4py.futures import …`.

The workers of an `MPIPoolExecutor` are actors on the nodes of the job, so that no rank is reserved for them and a new
worker replaces one that dies. They are no MPI ranks: functions that use MPI are for `hpcray.mpi.run`.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    ALL_COMPLETED,
    FIRST_COMPLETED,
    FIRST_EXCEPTION,
    BrokenExecutor,
    CancelledError,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    TimeoutError,
    as_completed,
    wait,
)
from time import monotonic
from typing import Any

from hpcray.api.objects import put
from hpcray.api.objects import wait as wait_for_refs
from hpcray.util.dispatcher import (
    CALL,
    STARMAP,
    ActorWorkers,
    DispatchedCall,
    DispatchFuture,
    chained,
    chunks_of,
    single_value,
    total_cpus,
    values_or_raise,
)
from hpcray.util.executor import Executor

__all__ = [
    "ALL_COMPLETED",
    "FIRST_COMPLETED",
    "FIRST_EXCEPTION",
    "ActorPoolExecutor",
    "BrokenExecutor",
    "CancelledError",
    "Executor",
    "Future",
    "MPICommExecutor",
    "MPIPoolExecutor",
    "ProcessPoolExecutor",
    "ThreadPoolExecutor",
    "TimeoutError",
    "as_completed",
    "wait",
]

_OF_SPAWNING = {"backoff", "main", "mpi_info", "python_args", "python_exe", "use_pkl5"}
_JOIN_TIMEOUT = 5.0  # seconds until actors are killed


class ActorPoolExecutor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` whose workers are actors, which keep the state that the initializer made.

    Args:
        max_workers: number of workers; None: one per CPU of the cluster.
        initializer, initargs: function that each worker calls first, and its arguments.
        env, wdir, path, globals: variables, working directory, entries of `sys.path` and names of `__main__` in each
            worker.
        options: options of the actors, as for `@remote`. By default an actor holds no CPU.
        of_mpi: the other keywords of mpi4py's class, for the spawning of ranks; without effect.

    Raises:
        ValueError: `max_workers` is not positive. TypeError: a keyword is unknown, or the initializer is not callable.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
        *,
        env: Mapping[str, str] | None = None,
        wdir: str | None = None,
        path: Sequence[str] = (),
        globals: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        **of_mpi: Any,
    ) -> None:
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        unknown = sorted(of_mpi.keys() - _OF_SPAWNING)
        if unknown:
            raise TypeError(f"unknown keywords {unknown}; hint: options of the actors go into options={{...}}")
        given = dict(options or {})
        if env:
            runtime_env = given.get("runtime_env") or {}
            given["runtime_env"] = {**runtime_env, "env_vars": {**(runtime_env.get("env_vars") or {}), **env}}
        setup = _Setup(wdir, tuple(path), dict(globals or {}), initializer)
        plain = not (wdir or path or globals)
        self._workers = ActorWorkers(
            max_workers or max(1, int(total_cpus())),
            initializer if plain else setup,
            tuple(initargs),
            options=given,
        )

    @property
    def num_workers(self) -> int:
        """Largest number of workers."""
        return self._workers.width

    def bootup(self, wait: bool = True) -> ActorPoolExecutor:
        """Start all workers now instead of with the first calls.

        Args:
            wait: wait until they have started.
        """
        ready = [actor.__ray_ready__.remote() for actor in self._workers.start_all()]
        if wait and ready:
            wait_for_refs(ready, num_returns=len(ready))
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> DispatchFuture:
        """Call `fn(*args, **kwargs)` in a worker.

        Returns:
            The future of the result.

        Raises:
            RuntimeError: after `shutdown`.
        """
        return self._workers.submit(DispatchedCall((fn, [(args, kwargs)], CALL), single_value))

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        unordered: bool = False,
        **_: Any,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `map(fn, *iterables)`. All calls are submitted at once.

        Args:
            timeout: seconds from now until TimeoutError is raised for a pending result; None for no limit.
            chunksize: number of calls that a worker gets at a time.
            unordered: yield results in the order in which they become ready.

        Raises:
            ValueError: `chunksize` is below 1.
        """
        return self.starmap(fn, zip(*iterables, strict=False), timeout, chunksize, unordered)

    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        timeout: float | None = None,
        chunksize: int = 1,
        unordered: bool = False,
        **_: Any,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `itertools.starmap(fn, iterable)`, as `map`."""
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        shared = put(fn)
        chunks = ([tuple(args) for args in chunk] for chunk in chunks_of(iterable, chunksize))
        futures = [self._workers.submit(DispatchedCall((shared, chunk, STARMAP), values_or_raise)) for chunk in chunks]
        deadline = None if timeout is None else monotonic() + timeout
        return chained(_results(futures, deadline, unordered))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls. The workers end after the last call.

        Args:
            wait: wait until the workers have ended.
            cancel_futures: cancel the calls that have not started.
        """
        self._workers.close()
        if cancel_futures:
            self._workers.cancel_queued()
        if wait:
            self._workers.join()
            self._workers.stop(_JOIN_TIMEOUT)


MPIPoolExecutor = ActorPoolExecutor


class MPICommExecutor:
    """A context manager over an `MPIPoolExecutor`, as mpi4py's on the root of a communicator.

    The driver of an hpcray job is always the root.

    Args:
        comm, root: without effect.
        options: arguments of `MPIPoolExecutor`.
    """

    def __init__(self, comm: Any = None, root: int = 0, **options: Any) -> None:
        self._executor = MPIPoolExecutor(**options)

    def __enter__(self) -> ActorPoolExecutor:
        return self._executor.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._executor.__exit__(*error)


class _Setup:
    """Initializer of a worker: sets directory, path and globals, then calls the user's initializer."""

    def __init__(
        self, wdir: str | None, path: tuple[str, ...], names: dict[str, Any], initializer: Callable[..., Any] | None
    ) -> None:
        self._wdir, self._path, self._names, self._initializer = wdir, path, names, initializer

    def __call__(self, *args: Any) -> None:
        if self._wdir:
            os.chdir(self._wdir)
        sys.path[:0] = self._path
        vars(sys.modules["__main__"]).update(self._names)
        if self._initializer is not None:
            self._initializer(*args)


def _results(futures: list[DispatchFuture], deadline: float | None, unordered: bool) -> Iterator[Any]:
    left = None if deadline is None else deadline - monotonic()
    try:
        if unordered:
            yield from (future.result() for future in as_completed(futures, left))
            return
        while futures:
            left = None if deadline is None else deadline - monotonic()
            yield futures.pop(0).result(left)
    finally:
        for future in futures:
            future.cancel()
