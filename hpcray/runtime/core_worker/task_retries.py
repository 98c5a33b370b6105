"""Tasks that run again: their worker died, they raised what is worth another try, or what they made was lost."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from hpcray.common.exceptions import (
    ActorDiedError,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    ObjectReconstructionFailedError,
    ObjectReconstructionFailedLineageEvictedError,
    ObjectReconstructionFailedMaxAttemptsExceededError,
    OutOfMemoryError,
    OwnerDiedError,
    RayError,
    StreamingGeneratorReplayInconsistentError,
    TaskCancelledError,
    WorkerCrashedError,
)
from hpcray.common.ids import TASK_BYTES, TaskID, node_of, return_index, show_proc
from hpcray.common.labels import UNSCHEDULABLE
from hpcray.common.task_errors import RayTaskError
from hpcray.core.core_worker import object_recovery as recovery
from hpcray.core.core_worker.lease_manager import LeaseManager
from hpcray.core.core_worker.object_recovery import DEPENDENCY, LineageRecord
from hpcray.core.core_worker.object_table import PENDING
from hpcray.core.core_worker.task import PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext, TaskSubmission
from hpcray.runtime.core_worker.io_engine import IoEngine, monotonic
from hpcray.runtime.core_worker.object_refs import new_ref

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 10.0
"""Seconds before the run after the second crash, and at most."""
_NODE_DIED = "Task failed because the node it was running on is dead or unavailable"
_WORKER_DIED = "The worker died unexpectedly while executing this task"
_LONGEST_CAUSE = 200
"""Characters of an error in the warning of a retry."""


def pause_before(crashes: int) -> float:
    """Seconds before the next run of a task, after so many crashes of its workers in a row."""
    return 0.0 if crashes <= 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(crashes - 2, 30))


def _in_a_line(error: BaseException | None) -> str:
    """`ValueError: 3 is odd`."""
    try:
        text = str(error).strip()
    except Exception:  # it is the user's
        text = ""
    return f"{type(error).__name__}: {text.splitlines()[0][:_LONGEST_CAUSE]}" if text else type(error).__name__


class TaskRetries:
    """The second and later runs of the tasks of one process. All methods want the engine's lock held.

    Attributes:
        paused: tasks whose workers died again and again, with the time (monotonic) of their next run.
    """

    def __init__(
        self, context: CoreWorkerContext, submission: TaskSubmission, leases: LeaseManager, crashes: CrashRetries
    ) -> None:
        self.paused: dict[bytes, float] = {}
        self._engine = context.engine
        self._table = context.table
        self._lineage = context.table.lineage
        self._submission = submission
        self._leases = leases
        self._crash_retries = crashes
        self._crashes: dict[bytes, int] = {}
        self._to_reconstruct: deque[PendingTask] = deque()
        self._reconstructing = False
        self._held: list[PendingTask] | None = None

    # ------------------------------------------------------------ workers that die

    def worker_crashed(self, task: PendingTask, why: str) -> None:
        """The worker that ran it died: it runs again, the first time at once, then after longer and longer pauses."""
        self._count(task)
        self._submission.retry_warnings.task_runs_again(task, why)
        crashes = self._crashes[task.id] = self._crashes.get(task.id, 0) + 1
        pause = pause_before(crashes)
        if pause <= 0.0:
            self.submit(task)
            return
        when = self.paused[task.id] = monotonic() + pause
        self._engine.add_timer(when, lambda now: self._resume(task))

    def _resume(self, task: PendingTask) -> None:
        if self.paused.pop(task.id, None) is not None and not task.cancelled:
            self.submit(task)

    def cancel_paused(self, task: PendingTask) -> None:
        """Forget the next run of a cancelled task."""
        self.paused.pop(task.id, None)

    def submit(self, task: PendingTask) -> None:
        """Send a task again once its arguments are there."""
        if self._held is not None:
            self._held.append(task)
            return
        task.waiting = 0
        if task.fn is None:
            self._submission.resubmit_call(task)
        elif task.slots is None or self._submission.resolve(
            task, partial(self._submission.ready, task, task.scheduling_class)
        ):
            self._leases.submit(task, task.scheduling_class)

    def hold(self) -> None:
        """Hold resubmissions until all losses of a dead node are known."""
        self._held = []

    def submit_held(self) -> None:
        """Submit what `hold` has held."""
        held, self._held = self._held, None
        for task in held or ():
            self.submit(task)

    def _count(self, task: PendingTask) -> None:
        if task.retries > 0:
            task.retries -= 1
        task.attempt += 1
        task.worker = None

    # ------------------------------------------------------------ exceptions

    def task_raised(self, task: PendingTask, msg: m.TaskReply) -> None:
        """A task that has `retry_exceptions` has raised something (lock not held: this runs the user's code)."""
        error = deserialize(msg.returns[-1].value) if msg.returns else None
        cause = error.retry_cause() if isinstance(error, RayTaskError) else error
        retriable = task.extra.retry_exceptions
        run_again = retriable is True or isinstance(cause, tuple(retriable))
        with self._engine.lock:
            if run_again and not task.cancelled:
                self._submission.drop_returns(task.worker or b"", msg)
                for index, item in enumerate(msg.returns):
                    if item.size and task.worker is not None:  # of a generator, which raised after it
                        self._table.may_be_left_at(task.id + return_index(index), node_of(task.worker))
                where = f" (node {node_of(task.worker)})" if task.worker is not None else ""
                self._count(task)
                self._submission.retry_warnings.task_runs_again(task, f"it raised {_in_a_line(cause)}{where}")
                self.submit(task)
            else:
                self._submission.unhandled_errors.watch_reply(task, msg)
                self._submission.finish(task, task.worker or b"", msg)
            self._engine.flush()

    # ------------------------------------------------------------ objects that are lost

    def keep(self, task: PendingTask, returns: Sequence[bytes], running: bool = False) -> None:
        """`task` made these returns, each in a node's store or with refs in it: they may have to be made again."""
        entries = self._table.entries
        fresh = [oid for oid in returns if (entry := entries.get(oid)) is not None and entry.state == PENDING]
        self._table.recovery.keep_task(task, fresh, [ref._id for ref in task.keep or ()], len(task.args))
        if running:
            self._lineage.run_begun(task.id)
        self._lineage.run_made(task.id, returns)

    def reconstruct(self, task: PendingTask) -> None:
        """Something that `task` made is lost: run it again, and before it what made its arguments, if they are gone."""
        self._to_reconstruct.append(task)
        if self._reconstructing:
            return  # a chain of any length: no recursion
        self._reconstructing = True
        try:
            while self._to_reconstruct:
                self._reconstruct(self._to_reconstruct.popleft())
        finally:
            self._reconstructing = False

    def _reconstruct(self, task: PendingTask) -> None:
        kept = self._lineage.kept.get(task.id)
        if kept is None or kept.running:
            return  # the end of its run finds what is still missing
        self._lineage.run_begun(task.id)
        self._count(task)
        self._table.recovery.recount_args(kept.args)
        task.keep = [new_ref(oid) for oid in kept.args]
        self.submit(task)

    def reconstructing(self, first_run: Callable[[bytes], bool]) -> Iterator[PendingTask]:
        """The tasks that run again because something that they made is lost.

        Args:
            first_run: returns True for the id of a task that has never ended.
        """
        for ident, kept in self._lineage.kept.items():
            if kept.running and not first_run(ident):
                yield kept.task

    def missing_returns(self, task: PendingTask) -> list[int] | None:
        """Which of its returns the coming run of a task is to make; None: all."""
        kept = self._lineage.kept.get(task.id)
        if kept is None or not kept.running or task.num_returns == 1:
            return None
        expected = [oid for oid in kept.live if self._table.entries[oid].state == PENDING]
        self._lineage.expect(task.id, expected)
        return sorted(map(return_position, expected))

    def run_ended(self, task: PendingTask, error: bytes | None = None) -> None:
        """A run of a task is over; `error`: it failed."""
        self._crashes.pop(task.id, None)
        self._crash_retries.run_ended(task.id)
        kept = self._lineage.kept.get(task.id)
        if kept is not None:
            again = self._settle(task, kept, error)
            self._lineage.run_ended(task.id)
            if again:
                self.reconstruct(task)
        if self._lineage.used > self._lineage.limit:
            self._lineage.trim()

    def _settle(self, task: PendingTask, kept: LineageRecord, error: bytes | None) -> bool:
        """Fail the returns that a run did not make. Returns True if one was lost meanwhile that can be made again."""
        table = self._table
        again = False
        expected = self._lineage.take_expected(task.id)
        for oid in sorted(kept.live):
            entry = table.entries.get(oid)
            if entry is None or entry.state != PENDING:
                continue
            why = self._lineage.why_not(task)
            if error is not None:
                table.set_inline(oid, error)
            elif expected is not None and oid in expected:
                text = f"{task.name} ran again, and did not yield value {return_position(oid)} this time"
                table.set_inline(oid, serialize_error(StreamingGeneratorReplayInconsistentError(text)))
            elif why:
                table.recovery.settle_lost(oid, "it was lost while the task that makes it ran", why)
            else:
                again = True
        return again

    def on_argument_lost(self, task: PendingTask, argument: bytes) -> None:
        """A task that was to run again for what is lost cannot: an argument of it is lost for good."""
        table = self._table
        kept = self._lineage.kept.get(task.id)
        why = table.recovery.why_lost.get(argument)
        if kept is None or why is None:
            return
        for oid in sorted(kept.live):
            entry = table.entries.get(oid)
            if entry is not None and entry.state == PENDING:
                table.recovery.settle_lost(oid, f"its argument {argument.hex()} cannot be had: {why}", DEPENDENCY)


def return_position(oid: bytes) -> int:
    """Which return of its task an object is, counted from 0."""
    return int.from_bytes(oid[TASK_BYTES:], "big") - 1


HOPELESS_RUNS = 10
"""A task that was ended so often for lack of memory, while nothing else could have made room, would be so for ever."""


class CrashRetries:
    """The tasks of one process whose workers died.

    Args:
        oom_retries: how often a task that may run again does so after lack of memory; -1: as long as there is hope,
            see `HOPELESS_RUNS`. These do not count against its `max_retries`.
    """

    def __init__(self, oom_retries: int) -> None:
        self._limit = oom_retries
        self._counts: dict[bytes, tuple[int, int]] = {}

    def run_ended(self, task: bytes) -> None:
        """A task that had run more than once is over."""
        self._counts.pop(task, None)

    def verdict(self, task: PendingTask, where: str, reason: str, node_died: bool = False) -> RayError | None:
        """The error in which a task ends that was running; None: it is to run again.

        Args:
            task: its `retries` are those left. where: the worker, for people. reason: how that died. node_died: with
                its node.
        """
        memory = m.out_of_memory(reason)
        if not memory and task.retries:
            return None
        if not memory:
            kind, what = (NodeDiedError, _NODE_DIED) if node_died else (WorkerCrashedError, _WORKER_DIED)
            return kind(f"{what}. The worker that ran {task.name!r} died: {reason or where}")
        count, alone = self._counts.pop(task.id, (0, 0))
        count, alone = count + 1, alone + (m.NOTHING_BESIDE in memory)
        if task.retries == 0:
            why = "; hint: max_retries above 0 lets a task run again"
        elif 0 <= self._limit < count:
            why = f", as often as task_oom_retries={self._limit} allows (RAY_task_oom_retries)"
        elif self._limit < 0 and alone >= HOPELESS_RUNS:
            why = (
                f", {alone} times alone: it needs more memory than the node has for it; hint: a job with more memory, "
                "a higher HPCRAY_MEMORY_USAGE_THRESHOLD; HPCRAY_TASK_OOM_RETRIES above 0 lets it run as often"
            )
        else:
            why = ""
        if why:
            return OutOfMemoryError(f"{memory}\nThe task is {task.name!r}; it ran {count} times{why}")
        self._counts[task.id] = count, alone
        if task.retries > 0:
            task.retries += 1  # the next run takes one
        return None


def cancelled_blob(task: PendingTask) -> bytes:
    """The error of a task or call that was cancelled before it ran."""
    return serialize_error(TaskCancelledError(TaskID(task.id), f"{task.name} was cancelled"))


def actor_error(actor: bytes, class_name: str, reason: str, where: Mapping[str, Any] | None = None) -> RayError:
    """The error of a call to an actor that is dead for this reason. where: pid, name, namespace and ip, if known."""
    if reason.startswith(UNSCHEDULABLE):
        return ActorUnschedulableError(reason.removeprefix(UNSCHEDULABLE))
    memory = m.out_of_memory(reason)
    if memory:
        return OutOfMemoryError(f"{memory}\nThe actor is {class_name} {actor.hex()}")
    return ActorDiedError(reason, actor_id=actor.hex(), class_name=class_name, **(where or {}))


_WORDS = {
    recovery.PUT: "it was created by ray.put(), which has no task lineage; hint: put(value, replicas=2) keeps a copy "
    "on a second node",
    recovery.RETRIES_DISABLED: "the task was created with max_retries=0 (or max_task_retries=0 of an actor), and must "
    "not run twice; hint: raise it",
    recovery.MAX_ATTEMPTS_EXCEEDED: "the maximum number of task retries has been exceeded; hint: raise max_retries",
    recovery.LINEAGE_EVICTED: "its lineage, the description of the task that made it, has been evicted to save memory; "
    "hint: raise HPCRAY_LINEAGE_LIMIT",
    recovery.LINEAGE_DISABLED: "lineage reconstruction is disabled (HPCRAY_LINEAGE_LIMIT is 0)",
    recovery.TASK_CANCELLED: "the task that would produce it was cancelled",
}
_KINDS = {
    recovery.MAX_ATTEMPTS_EXCEEDED: ObjectReconstructionFailedMaxAttemptsExceededError,
    recovery.LINEAGE_EVICTED: ObjectReconstructionFailedLineageEvictedError,
}


def lost_blob(oid: bytes, reason: str, why: str, dead: str | None, site: str = "") -> bytes:
    """The error that a lost object is from now on.

    Args:
        reason: how it was lost. why: why it cannot be made again, a word of `core.core_worker.object_recovery`.
        dead: why this process can ask for nothing any more. site: where its ref was created.
    """
    if dead is not None:
        return serialize_error(LocalRayletDiedError(dead))
    ident, owner = oid.hex(), show_proc(oid)
    if why == recovery.OWNER_DIED:
        return serialize_error(OwnerDiedError(ident, owner, site, reason))
    if why == recovery.LOST:
        return serialize_error(ObjectLostError(ident, owner, site, reason))
    kind = _KINDS.get(why, ObjectReconstructionFailedError)
    because = f"The object cannot be reconstructed because {_WORDS[why]}." if why in _WORDS else ""
    return serialize_error(kind(ident, why, f"{because} It is lost: {reason}." if because else reason, owner, site))


# ------------------------------------------------------------ retry warnings
# Warnings of tasks that run again and of actors that restart.


_BURST = 5.0
"""Seconds in which one function or class is named once; the next line counts the rest."""


class RetryWarnings:
    """The warnings of one process (lock held)."""

    def __init__(self, engine: IoEngine) -> None:
        self._engine = engine
        self._named: dict[str, tuple[float, int]] = {}

    def task_runs_again(self, task: PendingTask, why: str) -> None:
        """A task is about to run again. Its `attempt` counts that run, its `retries` do not."""
        self._warn(f"task {task.name} runs again", f"retry {_of(task.attempt, task.retries)}", why)

    def actor_restarts(self, class_name: str, actor: bytes, restarts: int, limit: int, why: str) -> None:
        """An actor of this process restarts for the `restarts`-th time."""
        left = limit if limit < 0 else limit - restarts
        self._warn(f"actor {class_name} restarts", f"{actor.hex()}, restart {_of(restarts, left)}", why)

    def _warn(self, what: str, which: str, why: str) -> None:
        now = monotonic()
        last, more = self._named.get(what, (now - _BURST, 0))
        if now - last < _BURST:
            self._named[what] = last, more + 1
            return
        self._named[what] = now, 0
        rest = f" ({more} more since the last such line)" if more else ""
        self._engine.call_soon(
            lambda: logging.getLogger("hpcray").warning("hpcray: %s (%s): %s%s", what, which, why, rest)
        )


def _of(done: int, left: int) -> str:
    return f"{done} of {done + left}" if left >= 0 else f"{done}, no limit"
