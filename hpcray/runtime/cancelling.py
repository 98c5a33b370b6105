"""Cancelling tasks and calls, as their owner or for another process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcray.base.ids import TASK_BYTES, owner_of
from hpcray.core.owner.table import PENDING
from hpcray.core.owner.tasks import Task
from hpcray.runtime.refs import ObjectRef
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process
    from hpcray.runtime.submission import Submitter


class Cancelling:
    """Cancels what one process has submitted, and asks owners to cancel what others have."""

    def __init__(self, process: Process, submitter: Submitter) -> None:
        self._process = process
        self._engine = process.engine
        self._table = process.table
        self._submitter = submitter

    def cancel(self, ref: ObjectRef[Any], force: bool, recursive: bool) -> None:
        """Cancel the task that makes `ref`: queued ones never run, running ones are told.

        Raises:
            ValueError: `force` with a call of an actor.
        """
        if self._engine.nested():
            self._engine.later(lambda: self.cancel(ref, force, recursive))
            return
        with self._engine.lock:
            entry = self._table.entries.get(ref._id)
            if force and entry is not None and isinstance(entry.task, Task) and entry.task.fn is None:
                raise ValueError("force=True is not supported for actor tasks. hint: kill() ends the actor")
            self.by_id(ref._id, force, recursive)
            self._engine.flush()

    def by_id(self, object_id: bytes, force: bool, recursive: bool) -> None:
        """Cancel, or ask the owner to (lock held)."""
        entry = self._table.entries.get(object_id)
        if entry is None or entry.state != PENDING:
            return
        if object_id[:8] != self._process.me:
            self._engine.send(owner_of(object_id), m.CancelRef(object_id, force, recursive))
        elif isinstance(entry.task, Task):
            self._task(entry.task, force and entry.task.fn is not None, recursive)

    def since(self, counter: int, force: bool) -> None:
        """Cancel what was submitted since our counter stood there: the children of one task (lock held)."""
        leases = self._submitter.leases
        entries = self._table.entries.items()
        children = {oid[:TASK_BYTES]: entry.task for oid, entry in entries if entry.state == PENDING and entry.task}
        for worker in leases.workers.values():
            children.update(worker.inflight)
        for klass in leases.by_index:
            children.update((task.id, task) for task in klass.queue)
        for ident, task in children.items():
            if isinstance(task, Task) and int.from_bytes(ident[8:], "big") > counter and not task.cancelled:
                self._task(task, force and task.fn is not None, True)

    def _task(self, task: Task, force: bool, recursive: bool) -> None:
        task.cancelled = True
        submitter = self._submitter
        queued = submitter.actors.withdraw(task) if task.fn is None else submitter.leases.cancel_queued(task)
        if queued or task.worker is None:
            submitter.retrying.withdraw(task)
            submitter.fail_cancelled(task)
        else:
            self._engine.send(task.worker, m.CancelTask(task.id, force, recursive))
