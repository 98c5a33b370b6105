"""Work that a submitter does not start because the job is about to end, or because the time left is too short for it.

Nothing here is on the path of a task: what a submitter does is replaced when there is something to refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpcray.base.drain_errors import JobDrainingError, NotEnoughTimeError
from hpcray.core.owner.tasks import LeaseClass, Task
from hpcray.runtime.engine import monotonic
from hpcray.wire.messages import Shape, TakeBack
from hpcray.wire.serialization import serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

Refusal = Callable[[Task], BaseException]


class TimedShape(Shape, array_like=True, frozen=True):
    """The shape of tasks that have a `max_runtime`: they are leased apart from others. Raylets see a plain `Shape`."""

    max_runtime: float = 0.0


class Refusals:
    """Of one process. All methods want the engine's lock held.

    Attributes:
        on_refused: called with each task that was refused.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._leases = process.submitter.leases
        self._all: Refusal | None = None
        self._closed: dict[LeaseClass, Refusal] = {}
        self._limited: set[LeaseClass] = set()
        self._replaced = False
        self.on_refused: Callable[[], None] = lambda: None

    def all_tasks(self, reason: str, left: Callable[[], float]) -> None:
        """The job drains: what has not been sent to a worker fails, and so does all that comes."""
        self._all = lambda task: JobDrainingError(
            f"task {task.name!r} was not started: the job drains ({reason}), {left():.0f} s are left; hint: end the "
            "program, or catch this; what on_drain callbacks and __hpcray_checkpoint__ save is there in the next run"
        )
        self._stand_between()
        for klass in self._leases.by_index:
            self._close(klass)

    def _fail(self, task: Task, refusal: Refusal) -> None:
        self._process.submitter.fail(task, serialize_error(refusal(task)))
        self.on_refused()

    def limit(self, shape: TimedShape) -> None:
        """Tasks of this shape are started only while there is time for them."""
        drain_at = self._process.run.drain_at
        klass = self._leases.klass(shape)
        if not drain_at or klass in self._limited:
            return
        self._limited.add(klass)
        needed = shape.max_runtime

        def refusal(task: Task) -> BaseException:
            return NotEnoughTimeError(f"task {task.name!r}", needed, max(0.0, drain_at - time.time()))

        def close(now: float) -> None:
            self._closed[klass] = refusal
            self._close(klass)

        last = monotonic() + (drain_at - time.time()) - needed
        if last <= monotonic():
            close(monotonic())
        else:
            self._process.engine.add_timer(last, close)

    def close(self, klass: LeaseClass, refusal: Refusal) -> None:
        """No task of this class is started any more."""
        self._closed[klass] = refusal
        self._close(klass)

    def _close(self, klass: LeaseClass) -> None:
        """Fail what waits, and take back what was sent ahead."""
        self._stand_between()
        self._checked_pump(klass)
        for worker in klass.ring:
            if len(worker.inflight) > 1 and not worker.asked_back:
                worker.asked_back = True
                self._process.engine.send(worker.proc, TakeBack())

    def _stand_between(self) -> None:
        if not self._replaced:
            self._replaced = True
            leases = self._leases
            self._submit, self._pump = leases.submit, leases.pump
            leases.submit = self._checked_submit  # type: ignore[method-assign]
            leases.pump = self._checked_pump  # type: ignore[method-assign]

    def _refusal(self, klass: LeaseClass) -> Refusal | None:
        return self._all or self._closed.get(klass)

    def _checked_submit(self, task: Task, klass: LeaseClass) -> bool:
        refusal = self._refusal(klass)
        if refusal is None:
            return self._submit(task, klass)
        task.klass = klass
        self._fail(task, refusal)
        return True

    def _checked_pump(self, klass: LeaseClass) -> None:
        refusal = self._refusal(klass)
        if refusal is None:
            self._pump(klass)
            return
        while klass.queue:
            self._fail(klass.queue.popleft(), refusal)
        self._leases.give_up_all(klass)


def timed(process: Process, shape: Shape, seconds: float | None) -> Shape:
    """The shape of tasks that take at most so many seconds; None: nobody knows."""
    if seconds is None:
        return shape
    made = TimedShape(shape.resources, shape.strategy, shape.env, max_runtime=float(seconds))
    with process.engine.lock:
        process.ending.refusals.limit(made)
        process.engine.flush()
    return made
