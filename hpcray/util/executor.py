"""A `concurrent.futures.Executor` on tasks."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any


class Executor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` whose calls are tasks anywhere in the job.

    Arguments and results are those of tasks: refs as top-level arguments are replaced by their values, arrays arrive
    read-only, and an exception is also a `RayTaskError`. The future of a call that is not submitted to the cluster yet
    can be cancelled; by default a few calls per CPU are submitted in advance.

    Args:
        max_workers: largest number of concurrent calls; None: as many as the cluster has room for.
        options: options of the tasks, as for `@remote`: num_cpus, num_gpus, resources, runtime_env, max_retries, ...

    Raises:
        ValueError, TypeError: `max_workers` is not positive, or an option is not valid.
    """

    def __init__(self, max_workers: int | None = None, **options: Any) -> None:
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if options.get("num_returns") not in (None, 1):
            raise ValueError("the calls of an Executor have one result; hint: leave out num_returns")
        # Imported here, since every worker and every command imports `hpcray`.
        from hpcray.util.dispatcher import TaskDispatcher

        self._tasks = TaskDispatcher(max_workers, options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call `fn(*args, **kwargs)` as a task.

        Returns:
            The future of the result.

        Raises:
            RuntimeError: after `shutdown`.
        """
        return self._tasks.run(fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        **more: Any,
    ) -> Iterator[Any]:
        """Return an iterator over the results of `map(fn, *iterables)`, in order. All calls are submitted at once.

        Args:
            timeout: seconds from now until TimeoutError is raised for a pending result; None for no limit.
            chunksize: number of calls per task.

        Raises:
            ValueError: `chunksize` is below 1.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        from hpcray.util.dispatcher import call_each, chained, chunks_of

        chunks = chunks_of(zip(*iterables, strict=False), chunksize)
        return chained(super().map(call_each, repeat(fn), chunks, timeout=timeout, **more))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse further calls.

        Args:
            wait: wait until all calls have ended.
            cancel_futures: cancel the calls that are not submitted to the cluster yet.
        """
        self._tasks.close()
        if cancel_futures:
            self._tasks.cancel_queued()
        if wait:
            self._tasks.join()

    def terminate(self) -> None:
        """Refuse further calls, cancel queued calls, and interrupt running ones, as `cancel` does."""
        self.shutdown(wait=False, cancel_futures=True)
        self._tasks.cancel_started()
