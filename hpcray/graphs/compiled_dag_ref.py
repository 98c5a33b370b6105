"""Results of executions of compiled graphs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Protocol

from hpcray.common.task_errors import RayTaskError
from hpcray.graphs.channels import Failed
from hpcray.protocol.out_of_band import pickling
from hpcray.runtime.core_worker.object_refs import LateRelease, collecting, is_referred


class _Graph(Protocol):
    """The part of a `CompiledDAG` that its results use."""

    def get_id(self) -> str: ...

    def _result(self, index: int, output: int, timeout: float | None) -> Any: ...

    def _drop(self, index: int, output: int) -> None: ...


class _Result:
    """One output of one execution. It cannot be copied or passed on."""

    def __init__(self, dag: _Graph, execution_index: int, channel_index: int | None = None) -> None:
        self._dag = dag
        self._execution_index = execution_index
        self._channel_index = channel_index

    def _dropping(self) -> Callable[[], None]:
        """Return a function that drops the result, without a reference to this object."""
        return partial(self._dag._drop, self._execution_index, self._channel_index or 0)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}({self._dag.get_id()}, execution_index={self._execution_index}, "
            f"channel_index={self._channel_index})"
        )

    def __copy__(self) -> NoReturn:
        raise ValueError(f"{type(self).__name__} cannot be copied.")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(f"{type(self).__name__} cannot be deep copied.")

    def __reduce__(self) -> NoReturn:
        if pickling.refs is not None:  # in an argument or a value
            raise TypeError(f"Serialization of {type(self).__name__} is not supported.")
        raise ValueError(f"{type(self).__name__} cannot be pickled.")


class CompiledDAGRef(_Result):
    """A result of `CompiledDAG.execute`, for `ray.get`, which may be called once. It cannot be copied or passed on."""

    _ray_get_called = False

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the result, which `ray.get` returns.

        Args:
            timeout: in seconds; None: the context's `get_timeout`, -1: any time.

        Raises:
            ValueError: it was called before. RayChannelTimeoutError: the result did not come in time.
            RayTaskError: a method raised an exception. RayActorError: an actor died. RayChannelError: the graph was
                torn down.
        """
        if self._ray_get_called:
            raise ValueError("ray.get() can only be called once on a CompiledDAGRef, and it was already called.")
        found = self._dag._result(self._execution_index, self._channel_index or 0, timeout)
        self._ray_get_called = True  # not before: what came too late can be had later
        return unwrapped(found)

    def __del__(self) -> None:
        if not self._ray_get_called and "_dag" in self.__dict__:
            if collecting and is_referred(self):
                self._late = LateRelease.of(self._dropping())
                return
            self._dropping()()


class CompiledDAGFuture(_Result):
    """A result of `CompiledDAG.execute_async`, to be awaited once. It cannot be copied or passed on."""

    def __init__(
        self, dag: _Graph, execution_index: int, fut: asyncio.Future[list[Any]], channel_index: int | None = None
    ) -> None:
        super().__init__(dag, execution_index, channel_index)
        self._fut: asyncio.Future[list[Any]] | None = fut

    def __await__(self) -> Generator[Any, None, Any]:
        fut = self._fut
        if fut is None:
            raise ValueError("CompiledDAGFuture can only be awaited upon once, and it has already been awaited upon.")
        self._fut = None
        try:
            values = yield from asyncio.shield(fut).__await__()
        finally:
            self._dropping()()
        return unwrapped(values[self._channel_index or 0])

    def __del__(self) -> None:
        if self.__dict__.get("_fut") is not None:
            if collecting and is_referred(self):
                self._late = LateRelease.of(self._dropping())
                return
            self._dropping()()


def unwrapped(value: Any) -> Any:
    """Return a value that was read; raise the error if it is one."""
    if type(value) is not Failed:
        return value
    error = value.error
    raise error.as_instanceof_cause() if type(error) is RayTaskError else error


def as_in_ray(values: list[Any]) -> list[Any]:
    """Return the outputs of an execution: where a method failed, each is the first such error."""
    for value in values:
        if type(value) is Failed and isinstance(value.error, RayTaskError):
            return [value] * len(values)
    return values


# ------------------------------------------------------------ context
# Settings of compiled graphs.


def _setting(name: str, default: float, kind: type = int) -> Any:
    return field(default_factory=lambda: kind(float(os.environ.get(f"RAY_CGRAPH_{name}", default))))


@dataclass
class DAGContext:
    """Settings of the graphs that this process compiles. The variables `RAY_CGRAPH_<name>` set them at the start.

    Attributes:
        submit_timeout: seconds for which `execute` waits for room; -1 for any time.
        get_timeout: seconds for which `ray.get` waits for a result where it is given no timeout; -1 for any time.
        teardown_timeout: seconds for which `teardown` waits for methods that still run.
        read_iteration_timeout: without effect here; at most `get_timeout`, as in Ray.
        buffer_size_bytes: size from which a value gets memory of its own. Larger values need no setting.
        max_inflight_executions: executions that may be submitted and not finished.
        max_buffered_results: results that may wait in this process because a later one was asked for.
        overlap_gpu_communication: without effect: there are no GPU channels.
    """

    submit_timeout: float = _setting("submit_timeout", 10)
    get_timeout: float = _setting("get_timeout", 10)
    teardown_timeout: float = _setting("teardown_timeout", 30)
    read_iteration_timeout: float = _setting("read_iteration_timeout_s", 0.1, float)
    buffer_size_bytes: int = _setting("buffer_size_bytes", 1_000_000)
    max_inflight_executions: int = _setting("max_inflight_executions", 10)
    max_buffered_results: int = _setting("max_buffered_results", 1000)
    overlap_gpu_communication: bool = _setting("overlap_gpu_communication", 0, bool)

    def __post_init__(self) -> None:
        if self.read_iteration_timeout > self.get_timeout >= 0:
            raise ValueError(
                f"RAY_CGRAPH_read_iteration_timeout_s ({self.read_iteration_timeout}) must be less than or equal to "
                f"RAY_CGRAPH_get_timeout ({self.get_timeout})"
            )

    @staticmethod
    def get_current() -> DAGContext:
        """Return the settings of this process, which may be changed."""
        if not _current:
            _current.append(DAGContext())
        return _current[0]


_current: list[DAGContext] = []
