"""Protocols through which the parts of a worker see its `TaskExecutor` and `ActorExecutor`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from hpcray.common.exceptions import RayError
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import IoEngine

if TYPE_CHECKING:
    import asyncio  # drivers load this module too, and asyncio takes 12 ms


class WorkerContext(Protocol):
    """`TaskExecutor` as its parts see it; described there."""

    process: CoreWorker
    engine: IoEngine
    queue: deque[tuple[bytes, Any]]
    options: dict[bytes, m.CallOptions]
    reply: Callable[..., None]

    @property
    def forked(self) -> bool:
        """True in a child process that a task has forked, which is not the worker."""

    @property
    def actor(self) -> ActorContext | None: ...

    @property
    def env_problem(self) -> str: ...

    def env_error(self, actor_id: str = "") -> RayError: ...

    def arguments(
        self, blob: bytes, inline: list[bytes] | None, refs: list[m.ArgRef] | None
    ) -> tuple[Sequence[Any], dict[str, Any]]: ...

    def check_values(self) -> None: ...

    def display_name(self, task: bytes, name: str) -> str: ...

    def forget_options(self, task: bytes) -> None: ...

    def register_thread(self) -> None: ...

    @property
    def cancelled(self) -> set[bytes]: ...

    def reply_cancelled(self, src: bytes, msg: m.PushTask | m.ActorCall) -> None: ...

    def running_call(self) -> bytes: ...

    def enqueue_first(self, msg: Any) -> None: ...

    def queue_calls(self) -> None: ...

    def leave(self, reason: str, code: int = 0) -> NoReturn: ...


class WorkerEnvironment(Protocol):
    """The runtime_env of a worker, which it has for life (`runtime_env.worker_runtime_env.WorkerRuntimeEnv`).

    Attributes:
        problem: why it cannot be had; "" if it can.
        since: when it began to be set up (`perf_counter`); 0 before and after that.
    """

    problem: str
    since: float

    @property
    def job(self) -> m.JobInfo | None:
        """The job's own description of itself, where the environment replaces it."""

    def error(self, actor_id: str) -> RayError:
        """Return the error of tasks, or of an actor's calls, because of `problem`."""

    def variables(self, given: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return variables as they are set in this process."""

    def enter(self) -> None:
        """Have this process in the environment, after it has taken over what its job has."""


class ActorContext(Protocol):
    """`ActorExecutor` as its parts see it; described there."""

    spec: m.ActorSpec
    cls: Any
    instance: Any
    call: Callable[[bytes, m.ActorCall], None]

    @property
    def worker(self) -> WorkerContext: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def loops(self) -> list[asyncio.AbstractEventLoop]: ...

    def idle(self) -> bool: ...

    def run(self, src: bytes, msg: m.ActorCall, hold: Callable[[], bool] | None = None) -> None: ...

    def method(self, name: str) -> Callable[..., Any]: ...

    def name_of(self, method: str) -> str: ...

    def exit(self) -> BaseException: ...

    def exit_error(self, exit_: BaseException) -> Exception: ...

    def error_label(self) -> tuple[str, str]: ...

    def route_by_group(self) -> None: ...

    def refuse_calls(self, refuse: Callable[[bytes, m.ActorCall], None]) -> None: ...


class LogParts(Protocol):
    """The log files of a worker, see `log_output.WorkerLogParts`."""

    def find(self, task: bytes, suffix: str) -> dict[str, Any]:
        """Return the "name" of the file "out" or "err", and the "parts" of it that a task wrote."""
