"""Remote functions: `@remote` on a def."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any

from hpcray.api.option_rules import check_num_returns
from hpcray.api.options import TaskOptions
from hpcray.api.placing import resolved
from hpcray.api.session import ensure
from hpcray.api.signature import Arity, arity, describe
from hpcray.core.owner.tasks import Function
from hpcray.runtime.process import Process
from hpcray.runtime.refs import current
from hpcray.wire.serialization import Serialized, serialize

MAX_FUNCTION = 95 << 20


class _Export:
    """A function as one session knows it. Shared by all `.options()` of it, so that it is pickled once."""

    __slots__ = ("arity", "function", "keep", "process", "record")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.process: Process | None = None
        self.record: Function
        self.arity: Arity
        self.keep: list[Any] = []

    def to(self, process: Process) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        blob, self.keep = serialize(self.function)
        data = blob.join() if isinstance(blob, Serialized) else blob
        if len(data) > MAX_FUNCTION:
            raise ValueError(
                f"the function {name} pickles to {len(data) >> 20} MiB, more than {MAX_FUNCTION >> 20} MiB; "
                "hint: it captures a large object; put() that and pass the ref"
            )
        # Not before the first call: a function that is being unpickled has no defaults yet.
        self.arity = arity(describe(self.function))
        self.record = Function(hashlib.blake2b(data, digest_size=16).digest(), name, data)
        self.process = process


class RemoteFunction:
    """What `@remote` makes of a function. Call it with `.remote(...)`."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions, export: _Export | None = None) -> None:
        self._function = function
        self._options = options
        self._export = export or _Export(function)
        self._process: Process | None = None
        self._shape: Any = None
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self._function, "__name__", "f")
        raise TypeError(
            f"Remote functions cannot be called directly. Instead of running '{name}()', try '{name}.remote()'."
        )

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Submit the function as a task. Returns an `ObjectRef`, or as many as `num_returns` says.

        Raises:
            TypeError: the arguments do not fit the function, or cannot be pickled.
            NotImplementedError: an option is not supported yet, or the function is a generator without `num_returns`.
        """
        process = current.process
        if process is None or process is not self._process:
            process = self._bind()
        options, check = self._options, self._export.arity
        if kwargs or not check.low <= len(args) <= check.high:
            check.check(self._export.record.name, args, kwargs)
        return process.submitter.submit(
            self._export.record, self._shape, options.num_returns, options.max_retries, options.retry_exceptions,
            args, kwargs,
        )  # fmt: skip

    def options(self, **overrides: Any) -> RemoteFunction:
        """The same function with some options replaced."""
        return RemoteFunction(self._function, self._options.merged(**overrides), self._export)

    def _bind(self) -> Process:
        if self._options.given.get("num_returns") is None and (
            inspect.isgeneratorfunction(self._function) or inspect.isasyncgenfunction(self._function)
        ):
            check_num_returns("streaming")
        process = ensure()
        shape = resolved(process, self._options.shape)
        if self._export.process is not process:
            self._export.to(process)
        self._shape = shape
        self._process = process
        return process

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._function, dict(self._options.given))


def _rebuild(function: Callable[..., Any], given: dict[str, Any]) -> RemoteFunction:
    return RemoteFunction(function, TaskOptions(given))
