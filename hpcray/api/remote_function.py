"""Remote functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar, cast, overload

from hpcray.api.export import Arity, arity, check_size, describe, exported, full_name, unserializable_argument
from hpcray.api.options import STREAMS, TaskOptions, check_generator, stream_options, transport_of, yields
from hpcray.api.placement_group import with_placement
from hpcray.api.scheduling_strategies import task_hooks
from hpcray.api.session import require_session
from hpcray.common.keyed_hash import blake2b
from hpcray.core.core_worker.task import ExtraOptions, FunctionDescriptor
from hpcray.protocol.serialization import SerializationError
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime_env.submitted_runtime_env import environment_of, with_runtime_env

if TYPE_CHECKING:
    from hpcray.durable.durable_tasks import DurableFunction
    from hpcray.graphs.nodes import FunctionNode
    from hpcray.runtime.core_worker.generators import ObjectRefGenerator

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class _ExportedFunction:
    """The pickled function, shared by all `.options()` of a remote function so that a session pickles it once."""

    __slots__ = ("arity", "function", "keep", "max_calls", "process", "record")

    def __init__(self, function: Callable[..., Any], max_calls: int) -> None:
        self.function = function
        self.max_calls = max_calls
        self.process: CoreWorker | None = None
        self.record: FunctionDescriptor
        self.arity: Arity
        self.keep: list[Any] = []

    def to(self, process: CoreWorker) -> None:
        name = getattr(self.function, "__name__", type(self.function).__name__)
        data, self.keep = exported(self.function, f"the function {full_name(self.function)}")
        check_size(data, "remote function", f"{self.function.__module__}.{name}")
        # Not before the first call: a function that is being unpickled has no defaults yet.
        self.arity = arity(describe(self.function))
        ident = blake2b(data, digest_size=16, salt=self.max_calls.to_bytes(8, "big")).digest()
        self.record = FunctionDescriptor(ident, name, data, self.max_calls)
        self.process = process


class RemoteFunction(Generic[P, R_co]):
    """A remote function, the result of `@remote` on a function. Call it with `.remote(...)`.

    For type checkers P are the parameters and R is the result of the function. Where one of the first four positional
    arguments is a ref, the arguments are not checked, except by `hpcray.mypy_plugin`.
    """

    def __init__(
        self, function: Callable[..., Any], options: TaskOptions, export: _ExportedFunction | None = None
    ) -> None:
        self._function = function
        self._options = options
        self._export = export or _ExportedFunction(function, options.max_calls)
        self._process: CoreWorker | None = None
        self._shape: Any = None
        self._scheduling_class: Any = None
        self._max_retries = 0
        self._low: float = 0
        self._high: float = 0
        self._bound: CoreWorker | None = None
        self._num_returns = STREAMS if streams(function, options) else options.num_returns
        self._extra = ExtraOptions(
            name=options.name, labels=options.given.get("_labels"), retry_exceptions=options.retry_exceptions,
            stream=self._num_returns == STREAMS, transport=transport_of(options.given.get("tensor_transport")),
            **stream_options(options.given),
        )  # fmt: skip
        self._durable: DurableFunction | None = None
        self._without: RemoteFunction[P, R_co] | None = None  # where nothing can be kept
        self._decorator = getattr(function, "__ray_invocation_decorator__", None)
        self._slow = self._extra.announced or bool(options.given.get("durable")) or self._decorator is not None
        functools.update_wrapper(cast(Any, self), function, updated=())

    if not TYPE_CHECKING:  # so that type checkers refuse the call

        def __call__(self, /, *args: Any, **kwargs: Any) -> NoReturn:
            name = f"{self._function.__module__}.{getattr(self._function, '__name__', 'f')}"
            raise TypeError(
                f"Remote functions cannot be called directly. Instead of running '{name}()', try '{name}.remote()'."
            )

    @overload
    def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: Any, c: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    @overload
    def remote(self, a: Any, b: Any, c: Any, d: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRef[R_co]: ...

    def remote(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit the function as a task.

        Args:
            args, kwargs: arguments of the function; refs among them are replaced by their values.

        Returns:
            An `ObjectRef`; a list of them where `num_returns` is above 1; a generator of refs for a generator function.

        Raises:
            TypeError: the arguments do not match the function, or do not pickle.
            NotImplementedError: an option is not supported.
            ValueError: the placement cannot be satisfied, or the function pickles to more than 95 MiB.
        """
        process = current.process
        if process is None or process is not self._process:
            if self._slow:
                return self._submit_with_extra_options(args, kwargs)
            process = self._bind()
        options, export = self._options, self._export
        if kwargs or not self._low <= len(args) <= self._high:
            export.arity.check(export.record.name, args, kwargs)
        try:
            return process.submitter.submit(
                export.record, self._scheduling_class, options.num_returns, self._max_retries, self._extra, args,
                kwargs,
            )  # fmt: skip
        except SerializationError as error:
            raise unserializable_argument(error, self._function_name) from error

    @overload
    def options(self, *, num_returns: int | str, **overrides: Any) -> RemoteFunction[..., Any]: ...

    @overload
    def options(self, **overrides: Any) -> RemoteFunction[P, R_co]: ...

    def options(self, **overrides: Any) -> RemoteFunction[..., Any]:
        """Return the function with some options replaced.

        Raises:
            ValueError, TypeError: an option is unknown, or its value is not allowed.
        """
        options = self._options.merged(**overrides)
        check_generator(overrides.get("num_returns"), yields(self._function))
        return RemoteFunction(self._function, options, self._export)

    def bind(self, /, *args: Any, **kwargs: Any) -> FunctionNode:
        """Make a node of a graph that runs the function as a task.

        Nodes among the arguments stand for their results.
        """
        from hpcray.graphs.nodes import FunctionNode

        return FunctionNode(self._function, args, kwargs, self._default_options, remote=self)

    @property
    def _default_options(self) -> dict[str, Any]:
        given = dict(self._options.given)
        return {"max_calls": self._options.max_calls, **given} if self._options.max_calls else given

    @functools.cached_property
    def _function_name(self) -> str:
        """Name of the function in errors. Programs set it, as in Ray."""
        return full_name(self._function)

    def _remote(self, args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None, **options: Any) -> Any:
        """Submit a task with options, as in Ray."""
        return self.options(**options).remote(*(args or ()), **(kwargs or {}))

    def _bind(self) -> CoreWorker:
        process = require_session()
        given, shape = self._options.given, self._options.shape
        shape, _ = with_placement(process, given, shape, shape, self._function, task_hooks)
        shape = process.drain_client.admission.with_max_runtime(
            with_runtime_env(process, given.get("runtime_env"), shape), given.get("max_runtime")
        )
        process.placement_groups.bound.add(self)
        if self._export.process is not process:
            self._export.to(process)
        self._shape, self._scheduling_class = shape, process.submitter.scheduling_class(shape)
        self._low, self._high = self._export.arity.low, self._export.arity.high
        self._max_retries = self._options.max_retries
        # A slow function leaves `_process` at None, so that each call finds out that it is slow. With a hook each call
        # binds the function again.
        hooked = bool(task_hooks)
        self._bound, self._process = None if hooked else process, None if self._slow or hooked else process
        return process

    def _submit_with_extra_options(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Submit on the slow path. A decorator of Ray's kind may give the function other arguments than its caller."""
        return self._submit(args, kwargs) if self._decorator is None else self._decorator(self._submit)(args, kwargs)

    def _submit(self, given: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args = tuple(given)
        process = current.process
        if process is None or process is not self._bound:
            process = self._bind()
            self._durable = None
        options, export = self._options, self._export
        export.arity.check(export.record.name, args, kwargs)
        if options.given.get("durable"):
            return self._submit_durably(process, args, kwargs)
        try:
            return process.submitter.submit_with(
                self._extra, export.record, self._shape, self._num_returns, self._max_retries, args, kwargs,
            )  # fmt: skip
        except SerializationError as error:
            raise unserializable_argument(error, self._function_name) from error

    def _submit_durably(self, process: CoreWorker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._durable is not None and not self._durable.extension.io.off:
            return self._durable.extension.submit(self._durable, args, kwargs)
        from hpcray.durable import read_durable
        from hpcray.durable.durable_tasks import DurableFunction, DurableTasks

        extension = DurableTasks.of(process)
        given = {name: value for name, value in self._options.given.items() if name != "durable"}
        if extension.io.off:
            self._without = self._without or RemoteFunction(self._function, TaskOptions(given), self._export)
            return self._without.remote(*args, **kwargs)
        if self._durable is None:
            environment = environment_of(process, given.get("runtime_env"))

            def make(function: Callable[..., Any], light: bool) -> RemoteFunction[..., Any]:
                kept = {name: value for name, value in given.items() if name in ("num_returns", "runtime_env")}
                return RemoteFunction(function, TaskOptions({**kept, "num_cpus": 0} if light else given))

            options = read_durable(self._options.given["durable"])
            assert options is not None
            self._durable = DurableFunction(extension, self._function, options, self._num_returns, environment, make)
        return extension.submit(self._durable, args, kwargs)

    def unbind(self) -> None:
        """Resolve the placement again at the next call: this process now runs in another placement group."""
        self._bound = self._process = None

    def _repr_html_(self) -> str:
        from hpcray.notebooks import remote_html

        return remote_html("Remote function", self._function, self._options.given)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._function, dict(self._options.given))


if TYPE_CHECKING:

    class StreamingFunction(RemoteFunction[P, R_co]):
        """A remote generator function."""

        @overload  # type: ignore[override]
        def remote(self, /, *args: P.args, **kwargs: P.kwargs) -> ObjectRefGenerator[R_co]: ...

        @overload
        def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRefGenerator[R_co]: ...

        @overload
        def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> ObjectRefGenerator[R_co]: ...

        def remote(self, /, *args: Any, **kwargs: Any) -> Any: ...

        @overload
        def options(self, *, num_returns: int | str, **overrides: Any) -> RemoteFunction[..., Any]: ...

        @overload
        def options(self, **overrides: Any) -> StreamingFunction[P, R_co]: ...

        def options(self, **overrides: Any) -> Any: ...


def streams(function: Callable[..., Any], options: TaskOptions) -> bool:
    """Return True if the values of the function are sent as it yields them, by default those of a generator."""
    return options.num_returns == STREAMS or (options.given.get("num_returns") is None and yields(function))


def _rebuild(function: Callable[..., Any], given: dict[str, Any]) -> RemoteFunction[..., Any]:
    return RemoteFunction(function, TaskOptions(given))
