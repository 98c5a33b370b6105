"""The part of a driver or worker in a drain, the announced end of its job.

Callbacks run in a thread of their own: the main thread may sit in `get`, or in a task, and shall go on meanwhile.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from hpcray.common.exceptions import JobDrainingError, NotEnoughTimeError
from hpcray.common.ids import HEAD
from hpcray.core.core_worker.lease_manager import LeaseManager, Refuse
from hpcray.core.core_worker.task import PendingTask, SchedulingClass
from hpcray.protocol import messages as m
from hpcray.protocol.messages import Shape
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic

Callback = Callable[[float], object]
callbacks: list[Callback] = []
"""Registered by `on_drain` in this interpreter, in that order."""

_DEAD_CHECK = 0.05
"""Seconds between two checks for the end of the session while the program waits."""
_DEADLINE_GRACE = 1.0
"""Seconds after the deadline at which such a wait ends."""


class DrainClient:
    """The state of the drain in one process, and the callbacks of its program.

    Attributes:
        reason: why the job drains; "" while it does not.
        deadline: monotonic time at which the job is ended.
        admission: the work that is not started for it.
        on_begin: called once, with the engine's lock held, when the drain begins.
        takes_part: whether this program takes part in the drain: it is then given time.
    """

    def __init__(self, context: CoreWorkerContext, admission: DrainAdmission) -> None:
        self.reason = ""
        self.deadline = 0.0
        self.takes_part = False
        self.admission = admission
        admission.refusal_listeners.append(self.take_part)
        self.on_begin: list[Callable[[], object]] = []
        self._context = context
        self._pending: list[Callback] = []
        self._called: list[Callback] = []
        self._running = False
        self._ready = threading.Event()
        self._over = threading.Event()

    def on_drain_over(self, src: bytes, msg: m.DrainOver) -> None:
        """End `wait_for_checkpoints`: all that can be written are written (lock held)."""
        self._over.set()

    def seconds_left(self) -> float:
        """Seconds until the job is ended, not below 0."""
        return max(0.0, self.deadline - monotonic())

    def register(self, callback: Callback) -> None:
        """Call `callback` when the job drains; soon, if it drains already."""
        with self._context.engine.lock:
            if self.reason:
                self._start([callback])

    def take_part(self) -> None:
        """Note that the program knows of the drain: it called `draining()`, or got an error of it (lock held)."""
        if not self.takes_part:
            self.takes_part = True
            if self._ready.is_set():
                self._send_ready()

    def wait_for_checkpoints(self) -> None:
        """Before the program ends while the job drains: let callbacks end, and actors write their checkpoints."""
        if not self.reason or self._context.kind == "worker":
            return
        self._wait(self._ready)
        self._wait(self._over)

    # ------------------------------------------------------------ inside

    def on_drain(self, src: bytes, msg: m.Drain) -> None:
        """Begin the drain that the head announces (lock held)."""
        first = not self.reason
        self.reason = msg.reason
        self.deadline = monotonic() + msg.seconds
        if first:
            self.admission.all_tasks(msg.reason, self.seconds_left)
            for call in self.on_begin:
                call()
            self._start(list(callbacks))

    def _start(self, more: list[Callback]) -> None:
        """Run callbacks that have not run yet (lock held)."""
        self._pending += [callback for callback in more if callback not in self._called]
        self._called += more
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="hpcray-drain", daemon=True).start()

    def _run(self) -> None:
        context = self._context
        while True:
            with context.engine.lock:
                if not self._pending:
                    self._running = False
                    self._ready.set()
                    self._send_ready()
                    return
                callback = self._pending.pop(0)
            run_callback(callback, self.seconds_left())

    def _send_ready(self) -> None:
        context = self._context
        if context.kind != "worker":
            context.engine.send(HEAD, m.DrainReady(self.takes_part or bool(self._called)))
            context.engine.flush()

    def _wait(self, event: threading.Event) -> None:
        asleep, me = self._context.engine.asleep, threading.get_ident()
        asleep.add(me)  # a KeyboardInterrupt is let through
        try:
            while not event.wait(_DEAD_CHECK):
                if self._context.dead is not None or monotonic() > self.deadline + _DEADLINE_GRACE:
                    return
        finally:
            asleep.discard(me)


def run_callback(callback: Callback, seconds: float) -> None:
    """Run one callback; its errors are printed, others still run."""
    try:
        callback(seconds)
    except BaseException:
        traceback.print_exc()


def check_callback(callback: Any) -> None:
    """Raise TypeError for what cannot be a callback."""
    if not callable(callback):
        raise TypeError(f"on_drain takes a function of one argument (seconds left), not {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_drain takes no coroutine function ({callback!r}); hint: a method of an actor may be one")


def time_left(run: m.RunInfo) -> float | None:
    """Seconds until the batch system ends the job, not below 0; None when that is not known."""
    return max(0.0, run.end - time.time()) if run.end else None


Refusal = Callable[[PendingTask], BaseException]


class TimedShape(Shape, array_like=True, frozen=True):
    """The shape of tasks that have a `max_runtime`: they are leased apart from others. Raylets see a plain `Shape`."""

    max_runtime: float = 0.0


class DrainAdmission:
    """Refuses the tasks of one process that must not start any more. All methods want the engine's lock held.

    Attributes:
        refusal_listeners: called, in this order, when a task was refused.
    """

    def __init__(
        self, context: CoreWorkerContext, leases: LeaseManager, fail: Callable[[PendingTask, bytes], None]
    ) -> None:
        self._context = context
        self._leases = leases
        self._fail_task = fail
        self._all: Refusal | None = None
        self._closed: dict[SchedulingClass, Refusal] = {}
        self._limited: set[SchedulingClass] = set()
        self.refusal_listeners: list[Callable[[], None]] = []

    def with_max_runtime(self, shape: Shape, seconds: float | None) -> Shape:
        """Return the shape of tasks that take at most `seconds` (None: unknown). Lock not held."""
        if seconds is None:
            return shape
        made = TimedShape(shape.resources, shape.strategy, shape.env, max_runtime=float(seconds))
        with self._context.engine.lock:
            self.limit(made)
            self._context.engine.flush()
        return made

    def all_tasks(self, reason: str, left: Callable[[], float]) -> None:
        """The job drains: what has not been sent to a worker fails, and so does all that comes."""
        self._all = lambda task: JobDrainingError(
            f"task {task.name!r} was not started: the job drains ({reason}), {left():.0f} s are left; hint: end the "
            "program, or catch this; what on_drain callbacks and __hpcray_checkpoint__ save is there in the next run"
        )
        self._leases.admit_through(self._refusal)
        for scheduling_class in self._leases.by_index:
            self._close(scheduling_class)

    def _fail(self, refusal: Refusal, task: PendingTask) -> None:
        self._fail_task(task, serialize_error(refusal(task)))
        for listener in self.refusal_listeners:
            listener()

    def limit(self, shape: TimedShape) -> None:
        """Tasks of this shape are started only while there is time for them."""
        drain_at = self._context.run.drain_at
        scheduling_class = self._leases.scheduling_class(shape)
        if not drain_at or scheduling_class in self._limited:
            return
        self._limited.add(scheduling_class)
        needed = shape.max_runtime

        def refusal(task: PendingTask) -> BaseException:
            return NotEnoughTimeError(f"task {task.name!r}", needed, max(0.0, drain_at - time.time()))

        def close(now: float) -> None:
            self._closed[scheduling_class] = refusal
            self._close(scheduling_class)

        last = monotonic() + (drain_at - time.time()) - needed
        if last <= monotonic():
            close(monotonic())
        else:
            self._context.engine.add_timer(last, close)

    def close(self, scheduling_class: SchedulingClass, refusal: Refusal) -> None:
        """No task of this class is started any more."""
        self._closed[scheduling_class] = refusal
        self._close(scheduling_class)

    def close_where(self, matches: Callable[[Shape], bool], refusal: Refusal) -> None:
        """Close every class whose shape matches."""
        for scheduling_class in self._leases.by_index:
            if matches(scheduling_class.shape):
                self.close(scheduling_class, refusal)

    def _close(self, scheduling_class: SchedulingClass) -> None:
        """Fail what waits, and take back what was sent ahead."""
        self._leases.admit_through(self._refusal)
        self._leases.pump(scheduling_class)
        self._leases.take_back_ahead(scheduling_class)

    def _refusal(self, scheduling_class: SchedulingClass) -> Refuse | None:
        refusal = self._all or self._closed.get(scheduling_class)
        return None if refusal is None else partial(self._fail, refusal)
