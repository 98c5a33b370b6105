"""`concurrent.futures` on tasks."""

from __future__ import annotations

import concurrent.futures
import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpcray.api.context import cluster_resources
from hpcray.api.decorator import remote
from hpcray.api.remote_function import RemoteFunction
from hpcray.runtime.refs import ObjectRef
from hpcray.util.dispatch import Dispatcher, Job

_KNOWN_FUNCTIONS = 64
_AHEAD = 4
_AT_LEAST = 64


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
        self._options = options
        self._width = max_workers
        self._dispatcher = _Tasks(max_workers or _AT_LEAST, options)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """Call `fn(*args, **kwargs)` as a task.

        Raises:
            RuntimeError: after `shutdown`.
        """
        if self._width is None:
            self._width = self._dispatcher.width = _enough(self._options)
        return self._dispatcher.submit(Job((fn, args, kwargs)))

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
        chunks = chunks_of(zip(*iterables, strict=False), chunksize)
        return chained(super().map(_call_each, _repeat(fn), chunks, timeout=timeout, **more))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls.

        Args:
            wait: until all have ended.
            cancel_futures: cancel those that have not been handed over.
        """
        self._dispatcher.close()
        if cancel_futures:
            self._dispatcher.withdraw()
        if wait:
            self._dispatcher.join()

    def terminate(self) -> None:
        """Take no more calls, cancel those that wait, and interrupt those that run, as `cancel` does."""
        self.shutdown(wait=False, cancel_futures=True)
        self._dispatcher.cancel_started()


class _Tasks(Dispatcher):
    def __init__(self, width: int, options: dict[str, Any]) -> None:
        super().__init__(width)
        self._options = {"num_returns": 1, **options}
        self._any: RemoteFunction = remote(**self._options)(_call)
        self._functions: OrderedDict[int, tuple[Any, RemoteFunction]] = OrderedDict()

    def start(self, job: Job) -> ObjectRef[Any]:
        fn, args, kwargs = job.call
        if not isinstance(fn, types.FunctionType):
            return self._any.remote(fn, *args, **kwargs)  # type: ignore[no-any-return]
        known = self._functions.get(id(fn))
        if known is None:
            known = self._functions[id(fn)] = (fn, remote(**self._options)(fn))
            if len(self._functions) > _KNOWN_FUNCTIONS:
                self._functions.popitem(last=False)
        return known[1].remote(*args, **kwargs)  # type: ignore[no-any-return]


def _enough(options: dict[str, Any]) -> int:
    """How many calls keep all CPUs busy, with some in advance."""
    each = options.get("num_cpus")
    cpus = cluster_resources().get("CPU", 1)
    return max(_AT_LEAST, _AHEAD * math.ceil(cpus / (each or 1)))


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _call_each(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(*args) for args in chunk]


def _repeat(fn: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    while True:
        yield fn


def chunks_of(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` items, the last one maybe shorter."""
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def chained(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    """The items of all chunks."""
    for chunk in chunks:
        yield from chunk
