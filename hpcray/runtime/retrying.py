"""Tasks that run again: their worker died, they raised what is worth another try, or what they made was lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from hpcray.base.errors import RayTaskError, StreamingGeneratorReplayInconsistentError, UserCodeException
from hpcray.base.ids import TASK_BYTES, node_of, return_index
from hpcray.core.owner.lineage import DEPENDENCY, Kept
from hpcray.core.owner.table import PENDING
from hpcray.core.owner.tasks import Task
from hpcray.runtime.engine import monotonic
from hpcray.runtime.refs import new_ref
from hpcray.wire import messages as m
from hpcray.wire.serialization import deserialize, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process
    from hpcray.runtime.submission import Submitter

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0


def pause_before(crashes: int) -> float:
    """Seconds before the next run of a task, after so many crashes of its workers in a row."""
    return 0.0 if crashes <= 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(crashes - 2, 30))


class Retrying:
    """The second and later runs of the tasks of one process. All methods want the engine's lock held.

    Attributes:
        paused: tasks whose workers died again and again, with the time (monotonic) of their next run.
    """

    def __init__(self, process: Process, submitter: Submitter) -> None:
        self.paused: dict[bytes, float] = {}
        self._engine = process.engine
        self._table = process.table
        self._lineage = process.table.lineage
        self._submitter = submitter
        self._crashes: dict[bytes, int] = {}
        self._lost: deque[Task] = deque()
        self._busy = False
        self._held: list[Task] | None = None
        process.table.remake = self.remake

    # ------------------------------------------------------------ workers that die

    def crashed(self, task: Task) -> None:
        """The worker that ran it died: it runs again, the first time at once, then after longer and longer pauses."""
        self._count(task)
        crashes = self._crashes[task.id] = self._crashes.get(task.id, 0) + 1
        pause = pause_before(crashes)
        if pause <= 0.0:
            self.submit(task)
            return
        when = self.paused[task.id] = monotonic() + pause
        self._engine.add_timer(when, lambda now: self._resume(task))

    def _resume(self, task: Task) -> None:
        if self.paused.pop(task.id, None) is not None and not task.cancelled:
            self.submit(task)

    def withdraw(self, task: Task) -> None:
        """It was cancelled."""
        self.paused.pop(task.id, None)

    def submit(self, task: Task) -> None:
        """Send a task again once its arguments are there."""
        if self._held is not None:
            self._held.append(task)
            return
        task.waiting = 0
        if task.fn is None:
            self._submitter.actors.again(task)
        elif task.slots is None or self._submitter.resolve(task, partial(self._submitter.ready, task, task.klass)):
            self._submitter.leases.submit(task, task.klass)

    def hold(self) -> None:
        """A node died: nothing runs again before all that went with it is known."""
        self._held = []

    def go_on(self) -> None:
        """All is known."""
        held, self._held = self._held, None
        for task in held or ():
            self.submit(task)

    def _count(self, task: Task) -> None:
        if task.retries > 0:
            task.retries -= 1
        task.attempt += 1
        task.worker = None

    # ------------------------------------------------------------ exceptions

    def raised(self, task: Task, msg: m.TaskReply) -> None:
        """A task that has `retry_exceptions` raised something (lock not held: this runs the user's code)."""
        error = deserialize(msg.returns[-1].value) if msg.returns else None
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, UserCodeException) and cause.__cause__ is not None:
            cause = cause.__cause__
        wanted = task.retry_exceptions is True or isinstance(cause, tuple(task.retry_exceptions))
        with self._engine.lock:
            if wanted and not task.cancelled:
                self._submitter.drop_returns(task.worker or b"", msg)
                for index, item in enumerate(msg.returns):
                    if item.size and task.worker is not None:  # of a generator, which raised after it
                        self._table.left_behind(task.id + return_index(index), node_of(task.worker))
                self._count(task)
                self.submit(task)
            else:
                self._submitter.finish(task, task.worker or b"", msg)
            self._engine.flush()

    # ------------------------------------------------------------ objects that are lost

    def keep(self, task: Task, returns: Sequence[bytes], running: bool = False) -> None:
        """`task` made these returns, each in a node's store or with refs in it: they may have to be made again."""
        entries = self._table.entries
        fresh = [oid for oid in returns if (entry := entries.get(oid)) is not None and entry.state == PENDING]
        self._table.keep_task(task, fresh, [ref._id for ref in task.keep or ()], len(task.args))
        kept = self._lineage.kept.get(task.id)
        if kept is not None:
            kept.running = kept.running or running
            if kept.wanted is not None:
                kept.wanted = kept.wanted.difference(returns)  # what is lost after this is another matter

    def remake(self, task: Task) -> None:
        """Something that `task` made is lost: run it again, and before it what made its arguments, if they are gone."""
        self._lost.append(task)
        if self._busy:
            return  # a chain of any length: no recursion
        self._busy = True
        try:
            while self._lost:
                self._remake(self._lost.popleft())
        finally:
            self._busy = False

    def _remake(self, task: Task) -> None:
        kept = self._lineage.kept.get(task.id)
        if kept is None or kept.running:
            return  # the end of its run finds what is still missing
        kept.running = True
        self._count(task)
        self._table.take_again(kept.args)
        task.keep = [new_ref(oid) for oid in kept.args]
        self.submit(task)

    def wanted(self, task: Task) -> list[int] | None:
        """Which of its returns the coming run of a task is to make; None: all."""
        kept = self._lineage.kept.get(task.id)
        if kept is None or not kept.running or task.num_returns == 1:
            return None
        kept.wanted = frozenset(oid for oid in kept.live if self._table.entries[oid].state == PENDING)
        return sorted(map(return_number, kept.wanted))

    def ended(self, task: Task, error: bytes | None = None) -> None:
        """A run of a task is over; `error`: it failed."""
        self._crashes.pop(task.id, None)
        self._submitter.crashes.ended(task.id)
        kept = self._lineage.kept.get(task.id)
        if kept is not None:
            again = self._settle(task, kept, error)
            self._lineage.ended(kept)
            if again:
                self.remake(task)
        if self._lineage.used > self._lineage.limit:
            self._lineage.trim()

    def _settle(self, task: Task, kept: Kept, error: bytes | None) -> bool:
        """What of a task's returns was lost while it ran, or has not come, fails; whether something is to be made."""
        table = self._table
        again = False
        wanted, kept.wanted = kept.wanted, None
        for oid in sorted(kept.live):
            entry = table.entries.get(oid)
            if entry is None or entry.state != PENDING:
                continue
            why = self._lineage.why_not(task)
            if error is not None:
                table.set_inline(oid, error)
            elif wanted is not None and oid in wanted:
                text = f"{task.name} ran again, and did not yield value {return_number(oid)} this time"
                table.set_inline(oid, serialize_error(StreamingGeneratorReplayInconsistentError(text)))
            elif why:
                table.settle_lost(oid, entry, "it was lost while the task that makes it ran", why)
            else:
                again = True
        return again

    def argument_lost(self, task: Task, argument: bytes) -> None:
        """A task that was to run again for what is lost cannot: an argument of it is lost for good."""
        table = self._table
        kept = self._lineage.kept.get(task.id)
        why = table.why_lost.get(argument)
        if kept is None or why is None:
            return
        for oid in sorted(kept.live):
            entry = table.entries.get(oid)
            if entry is not None and entry.state == PENDING:
                table.settle_lost(oid, entry, f"its argument {argument.hex()} cannot be had: {why}", DEPENDENCY)


def return_number(oid: bytes) -> int:
    """Which return of its task an object is, counted from 0."""
    return int.from_bytes(oid[TASK_BYTES:], "big") - 1
