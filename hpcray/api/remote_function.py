"""Remote functions: `@remote` on a def."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar, overload

from hpcray.api.environments import dressed
from hpcray.api.grouping import placed
from hpcray.api.option_rules import NO_GRAPHS, STREAMS
from hpcray.api.options import TaskOptions
from hpcray.api.session import ensure
from hpcray.api.signature import Arity, arity, describe
from hpcray.core.owner.tasks import Function
from hpcray.runtime.own_options import Own
from hpcray.runtime.process import Process
from hpcray.runtime.refs import ObjectRef, current
from hpcray.runtime.refusals import timed
from hpcray.wire.serialization import Serialized, serialize

P = ParamSpec("P")
R = TypeVar("R")

MAX_FUNCTION = 95 << 20


class _Export:
    """A function as one session knows it. Shared by all `.options()` of it, so that it is pickled once."""

    __slots__ = ("arity", "function", "keep", "max_calls", "process", "record")

    def __init__(self, function: Callable[..., Any], max_calls: int) -> None:
        self.function = function
        self.max_calls = max_calls
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
        ident = hashlib.blake2b(data, digest_size=16, salt=self.max_calls.to_bytes(8, "big")).digest()
        self.record = Function(ident, name, data, self.max_calls)
        self.process = process


class RemoteFunction(Generic[P, R]):
    """What `@remote` makes of a function. Call it with `.remote(...)`.

    For type checkers P are the function's parameters and R what it returns. Where one of the first four positional
    arguments is a ref, they take all arguments as they are.
    """

    def __init__(self, function: Callable[..., Any], options: TaskOptions, export: _Export | None = None) -> None:
        self._function = function
        self._options = options
        self._export = export or _Export(function, options.max_calls)
        self._process: Process | None = None
        self._shape: Any = None
        self._klass: Any = None
        self._low: float = 0
        self._high: float = 0
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self._function, "__name__", "f")
        raise TypeError(
            f"Remote functions cannot be called directly. Instead of running '{name}()', try '{name}.remote()'."
        )

    @overload
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]: ...

    @overload
    def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R]: ...

    @overload
    def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R]: ...

    @overload
    def remote(self, a: Any, b: Any, c: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R]: ...

    @overload
    def remote(self, a: Any, b: Any, c: Any, d: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R]: ...

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Submit the function as a task. Returns an `ObjectRef`, or as many as `num_returns` says.

        Raises:
            TypeError: the arguments do not fit the function, or cannot be pickled.
            NotImplementedError: an option is not supported yet.
        """
        process = current.process
        if process is None or process is not self._process:
            process = self._bind()
        options, export = self._options, self._export
        if kwargs or not self._low <= len(args) <= self._high:
            export.arity.check(export.record.name, args, kwargs)
        return process.submitter.submit(
            export.record, self._klass, options.num_returns, options.max_retries, options.retry_exceptions,
            args, kwargs,
        )  # fmt: skip

    @overload
    def options(self, *, num_returns: int | str, **overrides: Any) -> RemoteFunction[..., Any]: ...

    @overload
    def options(self, **overrides: Any) -> RemoteFunction[P, R]: ...

    def options(self, **overrides: Any) -> RemoteFunction[..., Any]:
        """The same function with some options replaced."""
        return make_remote_function(self._function, self._options.merged(**overrides), self._export)

    @property
    def bind(self) -> NoReturn:
        """Refused, with an AttributeError: there are no graphs."""
        raise AttributeError(NO_GRAPHS)

    @property
    def _default_options(self) -> dict[str, Any]:
        """The options that were given."""
        return dict(self._options.given)

    @property
    def _function_name(self) -> str:
        """Module and name of the function."""
        return f"{self._function.__module__}.{getattr(self._function, '__qualname__', '')}"

    def _bind(self) -> Process:
        process = ensure()
        given, shape = self._options.given, self._options.shape
        shape, _ = placed(process, given, shape, shape, getattr(self._function, "__name__", "the task"))
        shape = timed(process, dressed(process, given.get("runtime_env"), shape), given.get("max_runtime"))
        if process.kind == "worker":
            process.groups.bound.add(self)
        if self._export.process is not process:
            self._export.to(process)
        self._shape, self._klass = shape, process.submitter.klass(shape)
        self._low, self._high = self._export.arity.low, self._export.arity.high
        self._process = process
        return process

    def unbind(self) -> None:
        """Find out again what its tasks ask for: this process runs in another placement group now."""
        self._process = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._function, dict(self._options.given))


class _WithOwnOptions(RemoteFunction[P, R]):
    """A remote function with options that few have: its calls leave the fast path."""

    def __init__(self, function: Callable[..., Any], options: TaskOptions, export: _Export | None = None) -> None:
        super().__init__(function, options, export)
        self._num_returns = STREAMS if streams(function, options) else options.num_returns
        self._own = Own(
            name=options.name,
            stream=self._num_returns == STREAMS,
            dynamic=options.given.get("num_returns") == "dynamic",
            window=options.given.get("_generator_backpressure_num_objects") or -1,
        )

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        process = current.process
        if process is None or process is not self._process:
            process = self._bind()
        options, export = self._options, self._export
        export.arity.check(export.record.name, args, kwargs)
        return process.submitter.submit_with(
            self._own, export.record, self._shape, self._num_returns, options.max_retries, options.retry_exceptions,
            args, kwargs,
        )  # fmt: skip


def make_remote_function(
    function: Callable[..., Any], options: TaskOptions, export: _Export | None = None
) -> RemoteFunction[..., Any]:
    """The remote function for these options."""
    kind = _WithOwnOptions if options.name or streams(function, options) else RemoteFunction
    return kind(function, options, export)


def streams(function: Callable[..., Any], options: TaskOptions) -> bool:
    """Whether the function's values are sent as it yields them: by default those of generators."""
    return options.num_returns == STREAMS or (
        options.given.get("num_returns") is None and inspect.isgeneratorfunction(function)
    )


def _rebuild(function: Callable[..., Any], given: dict[str, Any]) -> RemoteFunction[..., Any]:
    return make_remote_function(function, TaskOptions(given))
