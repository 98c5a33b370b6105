"""Tasks under way: the submitter's view of each until its reply, and of the workers that run them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cached_property
from typing import Any

from msgspec import Struct

from hpcray.common.ids import TASK_BYTES
from hpcray.core.core_worker.object_entry import PENDING, ObjectEntry
from hpcray.protocol.messages import CallOptions, Message, Shape


class FunctionDescriptor:
    """A remote function as its submitter knows it: `blob` is what workers need to run it.

    us: running mean of the run time in microseconds, -1 until the first reply. It decides on pipelining.
    max_calls: a worker leaves after so many calls of it; 0 means never. template: see `template_for`.
    """

    __slots__ = ("blob", "id", "max_calls", "name", "template", "us")

    def __init__(self, ident: bytes, name: str, blob: bytes, max_calls: int = 0) -> None:
        self.id, self.name, self.blob, self.max_calls = ident, name, blob, max_calls
        self.us = -1.0
        self.template: TaskTemplate | None = None

    def template_for(self, scheduling_class: SchedulingClass, retries: int, extra: ExtraOptions) -> TaskTemplate:
        """Return the template for tasks with these options; it is made once, as long as they stay the same."""
        template = self.template
        if (
            template is None
            or template.scheduling_class is not scheduling_class
            or template.retries != retries
            or template.extra is not extra
        ):
            template = self.template = TaskTemplate(self, scheduling_class, retries, extra)
        return template


class ExtraOptions(Struct, frozen=True, dict=True):
    """Options that few tasks and actor calls have. They travel in a message of their own (`CallOptions`).

    name: for people, "" means that of the function. group: concurrency group, "" means the method's. stream: values
    that it yields are sent as they come, `window` values ahead at most (-1: any number); per_yield: how many values a
    `yield` gives, in a list or tuple; dynamic: all of them are one return value. retry_exceptions: True (all), False
    (none) or the classes after which it runs again. labels: what the submitter calls it by, None for nothing.
    transport: name of the tensor transport of its values, "" means that of all objects.
    """

    name: str = ""
    group: str = ""
    retry_exceptions: Any = False
    stream: bool = False
    dynamic: bool = False
    window: int = -1
    labels: Any = None
    per_yield: int = 1
    transport: str = ""

    def __bool__(self) -> bool:
        return bool(self.announced or self.retry_exceptions or self.labels)

    @cached_property
    def announced(self) -> bool:
        """True when the worker must know of these options before the task comes."""
        return bool(self.name or self.group or self.stream or self.transport)

    def announcement(self, task: bytes, skip: int, want: list[int] | None) -> CallOptions:
        """Return what the worker must know. skip: values of a stream that came already; want: the returns that its
        owner lacks, None for all."""
        return CallOptions(task, self.name, self.group, skip, self.window, want, self.per_yield, self.transport)


NO_EXTRA_OPTIONS = ExtraOptions()


class PendingTask:
    """One submitted task or actor call: enough to send it again.

    keep: the object refs that its arguments mention; they protect those objects until the reply.
    slots: the object ids of its top-level ref arguments, in slot order. attempt: runs beyond the first.
    parent: the call that submitted it; set in actors alone (`ObjectTable.record_parents`).
    scheduling_class: of a task, its `SchedulingClass`; of an actor call, its `ActorClient`.
    waiting: of an actor call, 1 while its arguments are not ready, 0 when they are, -1 when it was cancelled or one of
    them failed: it is passed over when its turn comes.
    """

    __slots__ = (
        "args", "attempt", "cancelled", "cost", "extra", "fn", "id", "keep", "method", "num_returns", "parent",
        "retries", "scheduling_class", "slots", "waiting", "worker",
    )  # fmt: skip

    parent: bytes

    def __init__(
        self,
        ident: bytes,
        fn: FunctionDescriptor | None,
        method: str,
        args: bytes,
        num_returns: int,
        keep: list[Any] | None,
        slots: list[bytes] | None,
        retries: int,
        extra: ExtraOptions = NO_EXTRA_OPTIONS,
    ) -> None:
        self.id = ident
        self.fn = fn
        self.method = method
        self.args = args
        self.num_returns = num_returns
        self.keep = keep
        self.slots = slots
        self.retries = retries
        self.extra = extra
        self.attempt = 0
        self.cost = 0.0
        self.waiting = 0
        self.cancelled = False
        self.scheduling_class: Any = None
        self.worker: bytes | None = None

    @property
    def name(self) -> str:
        """Function or method name, for people."""
        return self.fn.name if self.fn is not None else self.method


class TaskTemplate:
    """Shared by the packed tasks of a function (`PackedTasks`): all but their ids and arguments."""

    __slots__ = ("extra", "fn", "retries", "scheduling_class")

    def __init__(
        self, fn: FunctionDescriptor, scheduling_class: SchedulingClass, retries: int, extra: ExtraOptions
    ) -> None:
        self.fn, self.scheduling_class, self.retries, self.extra = fn, scheduling_class, retries, extra

    @property
    def name(self) -> str:
        """Function name, for people."""
        return self.fn.name

    def task(self, object_id: bytes, args: bytes) -> PendingTask:
        """Make the task that returns this object."""
        task = PendingTask(object_id[:TASK_BYTES], self.fn, "", args, 1, None, None, self.retries, self.extra)
        task.scheduling_class = self.scheduling_class
        return task


class LeasedWorker:
    """A worker that we hold a lease on.

    inflight: tasks sent and not answered, in order. load: their expected time in microseconds. reclaimed: others wait
    for its node, so it goes back once it has done the tasks sent to it. contended: others wait, so it never idles.
    leaving: it ends after the call that runs; no other process can use it, so its lease ends with it. progress: time of
    its last answer in seconds, -1 where not known. asked_back: a ReturnTasks for the tasks not started is under way.
    position: in the rotation of its class.
    """

    __slots__ = (
        "asked_back", "contended", "idle_since", "inflight", "lease", "leaving", "load", "position", "proc",
        "progress", "reclaimed", "scheduling_class",
    )  # fmt: skip

    def __init__(self, proc: bytes, lease: bytes, scheduling_class: SchedulingClass, now: float) -> None:
        self.proc, self.lease, self.scheduling_class = proc, lease, scheduling_class
        self.inflight: dict[bytes, PendingTask] = {}
        self.load = 0.0
        self.position = -1
        self.idle_since = now
        self.progress = now
        self.asked_back = False
        self.reclaimed = self.leaving = self.contended = False


class SchedulingClass:
    """Tasks that ask for the same resources and placement, and the workers leased for them.

    queue: tasks, packed ones (`PackedTasks`) by the ids of their returns.
    idle: workers with nothing to do, the one used last at the end. rotation: all, tried in turn; turn: the position of
    the one tried last. prefetch_node: for some queued tasks the node to which their arguments are being fetched.
    passed: times that other tasks were taken instead of the first one. granted_local, granted_elsewhere: leases ever
    received from our own raylet, and from others; unreported: of the latter, those that our raylet does not know of.
    """

    __slots__ = (
        "granted_elsewhere", "granted_local", "idle", "index", "passed", "prefetch_node", "queue", "rotation",
        "sent_total", "shape", "turn", "unreported",
    )  # fmt: skip

    def __init__(self, index: int, shape: Shape) -> None:
        self.index, self.shape = index, shape
        self.queue: deque[Any] = deque()  # PendingTask or bytes
        self.idle: dict[bytes, LeasedWorker] = {}
        self.rotation: list[LeasedWorker] = []
        self.turn = -1
        self.prefetch_node: dict[bytes, int] = {}
        self.passed = 0
        self.granted_local = self.granted_elsewhere = self.unreported = 0
        self.sent_total = 0

    def add_worker(self, worker: LeasedWorker) -> None:
        """Count a worker among those of the class; it idles."""
        worker.position = len(self.rotation)
        self.rotation.append(worker)
        self.idle[worker.proc] = worker

    def remove_worker(self, worker: LeasedWorker) -> None:
        """Forget a worker. The last one of the rotation takes its place: a class may have 100,000."""
        self.idle.pop(worker.proc, None)
        last = self.rotation.pop()
        if last is not worker:
            self.rotation[worker.position] = last
            last.position = worker.position


Push = Callable[[PendingTask, bytes], None]
Send = Callable[[bytes, Message], None]


# ------------------------------------------------------------ packed tasks
# Waiting tasks in as little memory as they need. Pure.
#
# A program may queue millions of tasks. One that has a single return, and no refs among its arguments, is *packed*
# while it waits: the entry of its return has its arguments and a `TaskTemplate`, which it shares with others, and the
# queue has the id of its return. The `PendingTask` is made when the task leaves its queue, or when something is decided
# for it alone.


class PackedTasks:
    """The packed tasks of one process.

    Args:
        entries: the table's objects.

    Attributes:
        unpacked: tasks that are not packed any more, though their queues still have the ids of their returns.
    """

    def __init__(self, entries: dict[bytes, ObjectEntry]) -> None:
        self.unpacked: dict[bytes, PendingTask] = {}
        self._entries = entries

    def create(self, oid: bytes, template: TaskTemplate, args: bytes) -> None:
        """Add a pending object that we own, with one local ref, and the packed task that makes it.

        Args:
            args: the task's arguments, which mention no refs.
        """
        self._entries[oid] = ObjectEntry(template, 1, PENDING, args)

    def take(self, oid: bytes) -> PendingTask:
        """Return the task that makes this object as it leaves its queue."""
        if self.unpacked:
            unpacked = self.unpacked.pop(oid, None)
            if unpacked is not None:
                return unpacked
        entry = self._entries[oid]
        task: PendingTask = entry.task.task(oid, entry.value)
        entry.task, entry.value = task, b""
        return task

    def show(self, oid: bytes) -> PendingTask:
        """Return the queued task that makes this object, or a copy: to look at, not to change."""
        if oid in self.unpacked:
            return self.unpacked[oid]
        entry = self._entries[oid]
        task: PendingTask = entry.task.task(oid, entry.value)
        return task

    def unpack(self, oid: bytes) -> PendingTask:
        """Return the queued task that makes this object; from here on it is not packed."""
        task = self.unpacked.get(oid)
        if task is None:
            task = self.unpacked[oid] = self.take(oid)
        return task

    def task_of(self, oid: bytes) -> PendingTask | None:
        """Return the task that makes an object of ours, or may make it again, unpacked; None where there is none."""
        entry = self._entries.get(oid)
        task = entry.task if entry is not None else None
        if type(task) is TaskTemplate:
            return self.unpack(oid)
        return None if isinstance(task, str) else task
