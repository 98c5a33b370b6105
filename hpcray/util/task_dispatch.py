"""Functions as tasks, for what looks like a pool."""

from __future__ import annotations

import math
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpcray.api.context import cluster_resources
from hpcray.api.decorator import remote
from hpcray.api.remote_function import RemoteFunction
from hpcray.runtime.refs import ObjectRef
from hpcray.util.dispatch import Dispatcher, DispatchFuture, Job

_KNOWN_FUNCTIONS = 64
_AHEAD = 4
_AT_LEAST = 64


class Tasks(Dispatcher):
    """Starts jobs as tasks. The call of a job is (function, args, kwargs).

    Args:
        width: how many at a time; None: what keeps all CPUs busy, and some in advance.
        options: of the tasks.
    """

    def __init__(self, width: int | None, options: dict[str, Any]) -> None:
        super().__init__(width or _AT_LEAST)
        self._given = width
        self._options = {"num_returns": 1, **options}
        self._any: RemoteFunction[..., Any] = remote(**self._options)(_call)
        self._functions: OrderedDict[int, tuple[Any, RemoteFunction[..., Any]]] = OrderedDict()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchFuture:
        """Submit a job."""
        if self._given is None:  # not sooner: it may start a session
            self._given = self.width = _enough(self._options)
        return self.submit(Job((fn, args, kwargs)))

    def start(self, job: Job) -> ObjectRef[Any]:
        fn, args, kwargs = job.call
        if not isinstance(fn, types.FunctionType):
            return self._any.remote(fn, *args, **kwargs)
        known = self._functions.get(id(fn))
        if known is None:
            known = self._functions[id(fn)] = (fn, remote(**self._options)(fn))
            if len(self._functions) > _KNOWN_FUNCTIONS:
                self._functions.popitem(last=False)
        return known[1].remote(*args, **kwargs)


def _enough(options: dict[str, Any]) -> int:
    """How many calls keep all CPUs busy, with some in advance."""
    each = options.get("num_cpus")
    cpus = cluster_resources().get("CPU", 1)
    return max(_AT_LEAST, _AHEAD * math.ceil(cpus / (each or 1)))


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def call_each(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """The results of a chunk of calls."""
    return [fn(*args) for args in chunk]


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
