"""`concurrent.futures` on tasks."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import Any


class Executor(concurrent.futures.Executor):
    """A `concurrent.futures.Executor` whose calls are tasks anywhere in the job.

    Arguments and results are those of tasks: refs as top-level arguments are replaced by their values, arrays arrive
    read-only, and an exception is also a `RayTaskError`. Until a call is handed to the cluster its future can be
    cancelled; by default a few per CPU are handed over in advance.

    Args:
        max_workers: calls that run at a time at most; None: as many as the cluster has room for.
        options: of the tasks, as for `@remote`: num_cpus, num_gpus, resources, runtime_env, max_retries, ...

    Raises:
        ValueError, TypeError: max_workers is not positive, or an option is not valid.
    """

    def __init__(self, max_workers: int | None = None, **options: Any) -> None:
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if options.get("num_returns") not in (None, 1):
            raise ValueError("the calls of an Executor have one result; hint: leave out num_returns")
        # Not at the top: `import hpcray` is on the way of every worker and every command.
        from hpcray.util.task_dispatch import Tasks

        self._tasks = Tasks(max_workers, options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call `fn(*args, **kwargs)` as a task.

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
        """`map(fn, *iterables)`, with all calls submitted now and the results in order.

        Args:
            timeout: seconds from now for each result to be there, else TimeoutError.
            chunksize: calls per task.

        Raises:
            ValueError: chunksize is below 1.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout, **more)
        from hpcray.util.task_dispatch import call_each, chained, chunks_of

        chunks = chunks_of(zip(*iterables, strict=False), chunksize)
        return chained(super().map(call_each, repeat(fn), chunks, timeout=timeout, **more))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Args:
            wait: until all have ended.
            cancel_futures: cancel those that have not been handed over.
        """
        self._tasks.close()
        if cancel_futures:
            self._tasks.withdraw()
        if wait:
            self._tasks.join()

    def terminate(self) -> None:
        """Take no more calls, cancel those that wait, and interrupt those that run, as `cancel` does."""
        self.shutdown(wait=False, cancel_futures=True)
        self._tasks.cancel_started()
