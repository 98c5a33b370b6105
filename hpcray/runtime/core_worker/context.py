"""Protocols through which the parts of a core worker see the whole, and the core worker of this interpreter.

`CoreWorker` is composed of parts (submitter, reader, writer, clients) that need its engine, its object table and its
identity. They depend on the `CoreWorkerContext` protocol of this module and never on `core_worker.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from threading import get_ident
from time import clock_gettime, perf_counter, pthread_getcpuclockid, thread_time
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import RaySystemError
from hpcray.core.core_worker.object_table import Hint, ObjectTable, Waiter
from hpcray.core.core_worker.task import PendingTask, SchedulingClass
from hpcray.protocol import messages as m
from hpcray.protocol.messages import ActorCall, JobInfo, PushTask, RunInfo
from hpcray.protocol.serialization import Serialized
from hpcray.runtime.core_worker.extensions import Extensions
from hpcray.runtime.core_worker.io_engine import IoEngine

# ------------------------------------------------------------ handler tables
# Handlers of the messages that a core worker gets, bound one by one.


Handler = Callable[[bytes, Any], None]
"""Called with (source, message)."""
HandlerTable = tuple[Any, Mapping[type, Callable[[Any], Handler]]]
"""An object, and its handlers by message: each entry binds its handler to the object."""


class BoundHandlers(dict[type, Handler]):
    """The handlers of one process, by message. A handler is bound to its object when its first message comes.

    A new worker gets few kinds of messages; binding all of them would copy the page of each function and of each
    message class that the forked process shares with its template.
    """

    def __init__(self, *tables: HandlerTable) -> None:
        """tables: where several have a message, the last one counts."""
        super().__init__()
        self._tables = tables

    def __missing__(self, kind: type) -> Handler:
        for target, table in reversed(self._tables):
            if (bind := table.get(kind)) is not None:
                handler = self[kind] = bind(target)
                return handler
        raise KeyError(kind)

    def use(self, kind: type, handler: Handler) -> None:
        """Have another handler get the messages of a kind from now on."""
        self[kind] = handler


# ------------------------------------------------------------ time spent on objects


class ObjectTime:
    """Seconds that the threads of this process spend on objects, for the account of core time (`hpcray.history`).

    Only what is slow by its nature is timed: values in a node's store, and waits for which a worker lends its CPU. The
    small values of messages are not.

    Attributes:
        counts: whether this process is a worker: others reserve no core, and take no notice.
        moving: fetching, unpickling and storing within tasks and calls, but for the time for which the CPU was lent.
        moving_cpu: the CPU time of it, and of `after`. after: storing what a task or call has returned.
        lent: while the CPU was lent. fetching: the part of it in which all that was waited for existed already.
    """

    def __init__(self) -> None:
        self.counts = False
        self.moving = self.moving_cpu = self.after = self.lent = self.fetching = 0.0
        self._open: dict[int, tuple[float, float, float, bool]] = {}  # thread: time, CPU time, `lent`, for `after`
        self._lent_at = self._stored_at = 0.0
        self._fetches = False

    def begin(self, call_ended: float = 0.0) -> bool:
        """The calling thread moves objects from now on.

        Args:
            call_ended: since when it stores what a call has returned, by `perf_counter`; 0.0: it does not.

        Returns:
            False where it did before, or nothing counts: `end` is not to be called.
        """
        thread = get_ident()
        if not self.counts or thread in self._open:
            return False
        now, cpu = perf_counter(), thread_time()
        if call_ended:  # pickled since then, or since another value was stored
            call_ended = max(call_ended, self._stored_at)
            cpu -= now - call_ended
        self._open[thread] = (call_ended or now, cpu, self.lent, bool(call_ended))
        return True

    def end(self) -> None:
        """The calling thread moves no objects any more."""
        began, cpu, lent, after = self._open.pop(get_ident())
        now = perf_counter()
        seconds = now - began - (self.lent - lent)
        self.moving_cpu += thread_time() - cpu
        if after:
            self.after += seconds
            self._stored_at = now
        else:
            self.moving += seconds

    def lend(self, fetches: bool) -> None:
        """The CPU is lent from now on. fetches: what is waited for exists."""
        self._lent_at, self._fetches = perf_counter(), fetches

    def take_back(self) -> None:
        """The CPU is lent no more."""
        if self._lent_at:
            self._settle(self._fetches)
            self._lent_at = 0.0

    def so_far(self, fetches: Callable[[], bool]) -> tuple[float, float, float, float, float]:
        """`moving`, `moving_cpu`, `after`, `lent`, `fetching`, with what has not ended.

        Args:
            fetches: whether all that is waited for exists.
        """
        if self._lent_at:
            self._settle(fetches())
        moving, moving_cpu, after = self.moving, self.moving_cpu, self.after
        for thread, (began, cpu, lent, is_after) in list(self._open.items()):
            seconds = perf_counter() - began - (self.lent - lent)
            moving_cpu += clock_gettime(pthread_getcpuclockid(thread)) - cpu
            if is_after:
                after += seconds
            else:
                moving += seconds
        return moving, moving_cpu, after, self.lent, self.fetching

    def _settle(self, fetches: bool) -> None:
        now = perf_counter()
        self.lent += now - self._lent_at
        self.fetching += (now - self._lent_at) * (self._fetches + fetches) / 2
        self._lent_at, self._fetches = now, fetches


object_time = ObjectTime()
"""The times of this process."""


# ------------------------------------------------------------ context


BEHIND_CHECK = 0.5
"""Seconds between two looks whether the call that makes what is waited for waits itself, behind this one."""


class ThreadState(threading.local):
    """The task or call that this thread executes.

    Attributes:
        task: the message of the task or call; None outside of tasks.
        protected: refs that came in its arguments; None outside of tasks.
        since: `time.time()` at which it began.
        reading: a `get` with options is under way. deadline: of that `get`, `time.monotonic()`; None for no limit.
        read_as: how a value of which a part stays in its process is read: "" as it is, "copies" with a copy of that
            part from the object store; extensions have words of their own.
        plain_views: what is read from the store is in the memory of the arena, not in another view of it.
        read_target: where an extension is to put what it reads next; None: anywhere.
        loading: the calls that make the arguments of the task or call, while these are being read: its function has not
            begun. None: it has, or nothing runs.
    """

    protected: list[bytes] | None = None
    task: PushTask | ActorCall | None = None
    name: str = ""
    since: float = 0.0
    reading: bool = False
    deadline: float | None = None
    read_as: str = ""
    plain_views: bool = False
    read_target: Any = None
    loading: Sequence[bytes] | None = None


class ProcessPlace(msgspec.Struct, eq=False):
    """The job that this process belongs to, and its place in it."""

    kind: str
    """"driver", "attached" or "worker"."""
    session_dir: str
    """Directory of the session on this node."""
    node_id: str
    """Id of this node, as in `ray.nodes()`."""
    host: str
    """Name of this node's host."""
    head: int
    """Index of the node where the GCS is."""
    cluster_size: int
    """Number of nodes that have belonged to the job."""
    run: RunInfo
    """This run of the job, as the head knows it."""
    job: JobInfo | None
    """Settings of the driver for all workers; None before it has sent them."""
    is_driver: bool = False
    """True once a program has begun in this process."""

    @property
    def namespace(self) -> str:
        """Namespace of the job's named actors and groups; "" before the job is known."""
        return self.job.namespace if self.job is not None else ""

    @property
    def job_id(self) -> str:
        """Id of the job, in hex; "" before it is known."""
        return self.job.job_id if self.job is not None else ""


class RefReader(Protocol):
    """The part of `ObjectReader` that other parts use."""

    def get(self, refs: Sequence[Any], timeout: float | None) -> list[Any]:
        """Return the values of `refs`; see `ObjectReader.get`."""

    def when_ready_here(self, ref: Any, call: Callable[[], object]) -> None:
        """Call `call()` once the value of `ref` can be read in this process."""

    def when_available(self, ref: Any, call: Callable[[Any, BaseException | None], object]) -> None:
        """Call `call(value, error)` in a thread for callbacks once the value of `ref` or its error is known."""

    def when_ready(self, ref: Any, call: Callable[[BaseException | None], object]) -> Callable[[], None]:
        """Call `call(None)` once the object of `ref` exists; see `ObjectReader.when_ready`."""


class RefWaits(Protocol):
    """The part of `WaitManager` that other parts use."""

    def wait(
        self, refs: list[Any], num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[list[Any], list[Any]]:
        """Split `refs` into ready ones and the rest; see `WaitManager.wait`."""


class CoreWorkerContext(Protocol):
    """The part of `CoreWorker` that its own parts use.

    Attributes:
        me: proc id of this process. node: index of its node.
        task_counter: number in the last task id (engine's lock held); hot paths add to it without a call.
        local: what the calling thread executes.
        dead: the reason why nothing can be requested any more; None while everything works.
        handlers: of messages. extensions: see `CoreWorker`.
    """

    me: bytes
    node: int
    config: Config
    engine: IoEngine
    table: ObjectTable
    local: ThreadState
    dead: str | None
    place: ProcessPlace
    task_counter: int
    handlers: BoundHandlers
    extensions: Extensions

    @property
    def reader(self) -> RefReader:
        """Turns refs into values."""

    @property
    def waits(self) -> RefWaits:
        """Waits for refs."""

    def check_alive(self) -> None:
        """Raise LocalRayletDiedError if `dead`."""

    def warn_once(self, key: str) -> bool:
        """Return True for the first call with this key (engine's lock held)."""

    def drain(self) -> None:
        """Apply the deferred destructors of refs and views to the table (engine's lock held)."""

    def next_task_id(self) -> bytes:
        """Return a fresh task id (engine's lock held)."""

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait for `waiter` (engine's lock held); False if `deadline` (monotonic seconds) passed first."""

    def put(self, value: Any) -> Any:
        """Store a value and return its ref."""

    def put_serialized(self, blob: bytes | Serialized, refs: list[Any] | None) -> Any:
        """Store a serialized value, which holds `refs`, in this node's store and return its ref."""

    def hint_arrived(self, oid: bytes, hint: Hint) -> None:
        """Note what came with another copy of a ref that this process has."""

    def ref_arrived(self, oid: bytes, hint: Hint | None) -> None:
        """Count a deserialized ref; `hint` is what came with it about its object."""

    def pin_forever(self, ref: Any) -> None:
        """Keep the object of a ref that was pickled outside of arguments and values."""


class ErrorWatch(Protocol):
    """`UnhandledErrors` as retries see it."""

    def watch_reply(self, task: PendingTask, msg: m.TaskReply) -> None: ...


class TaskRetryWarnings(Protocol):
    """`RetryWarnings` as retries see it."""

    def task_runs_again(self, task: PendingTask, why: str) -> None: ...

    def actor_restarts(self, class_name: str, actor: bytes, restarts: int, limit: int, why: str) -> None: ...


class TaskSubmission(Protocol):
    """`TaskSubmitter` as its parts see it; described there. The engine's lock is held in all methods."""

    @property
    def unhandled_errors(self) -> ErrorWatch: ...

    @property
    def retry_warnings(self) -> TaskRetryWarnings: ...

    def returns(self, task: PendingTask) -> Any: ...

    def resolve(self, task: PendingTask, then: Callable[[], None]) -> bool: ...

    def ready(self, task: PendingTask, scheduling_class: SchedulingClass) -> None: ...

    def failed_argument(self, task: PendingTask) -> bool: ...

    def note_failure(self, task: PendingTask, worker: bytes, error: bytes | str) -> None: ...

    def slot_values(self, task: PendingTask) -> tuple[list[m.ArgRef] | None, list[bytes] | None]: ...

    def announce_missing_returns(self, task: PendingTask, proc: bytes) -> None: ...

    def finish(self, task: PendingTask, src: bytes, msg: m.TaskReply) -> None: ...

    def drop_returns(self, src: bytes, msg: m.TaskReply) -> None: ...

    def fail(self, task: PendingTask, blob: bytes, argument: bytes | None = None) -> None: ...

    def fail_cancelled(self, task: PendingTask) -> None: ...

    def left_behind(self, task: PendingTask, proc: bytes) -> None: ...

    def resubmit_call(self, task: PendingTask) -> None: ...


W = TypeVar("W", bound=CoreWorkerContext)


class CurrentProcess(Generic[W]):
    """The core worker that this interpreter is, while it takes part in a job.

    Attributes:
        process: the core worker; None outside of a job.
        worker: the `TaskExecutor` of a worker process; None in a driver.
    """

    __slots__ = ("_joining", "_joins", "_lock", "process", "worker")

    def __init__(self) -> None:
        self.process: W | None = None
        self.worker: Any = None
        self._joins: list[Callable[[], None]] = []
        self._joining = False
        self._lock = threading.RLock()

    def postpone(self, join: Callable[[], None]) -> None:
        """Call `join` at the first use of `process`, which it sets. Until then the attribute is missing, so that the
        hot paths, which read it, need not ask."""
        self._joins.append(join)
        del self.process

    @property
    def postponed(self) -> bool:
        """True if the first use of `process` joins a job."""
        return bool(self._joins)

    def forget_postponed(self) -> None:
        """Join no job at the first use of `process`."""
        if self._joins:
            self._joins.clear()
            self.process = None

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name != "process":
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            with self._lock:
                if self._joining or not self._joins:  # this thread joins, or another one has
                    return None if self._joining else self.process
                join, self._joining = self._joins[-1], True
                try:
                    join()
                    return self.process
                except BaseException:
                    self.process = None
                    raise
                finally:
                    self._joins.clear()
                    self._joining = False


current: CurrentProcess[CoreWorkerContext] = CurrentProcess()
async_task: ContextVar[ActorCall | None] = ContextVar("async_task", default=None)
"""The call that the running asyncio task of an async actor executes."""


def require_context() -> CoreWorkerContext:
    """Return the core worker of this interpreter.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    process = current.process
    if process is None:
        raise RaySystemError("hpcray is not initialized; hint: call hpcray.init() first")
    return process
