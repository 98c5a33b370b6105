"""Errors of tasks that were never looked at before their last ref went: they are logged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import ClassVar

from hpcray.common.exceptions import WorkerCrashedError
from hpcray.common.ids import return_index
from hpcray.common.task_errors import RayTaskError
from hpcray.core.core_worker.object_table import INLINE, PENDING
from hpcray.core.core_worker.task import PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import is_error
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.context import CoreWorkerContext

_SWITCH = "RAY_IGNORE_UNHANDLED_ERRORS"


def log_unhandled(error: BaseException) -> None:
    """Log an error that was never looked at."""
    logging.getLogger("hpcray").error("Unhandled error (suppress with '%s=1'): %s", _SWITCH, error)


class UnhandledErrors:
    """The objects of one process that are errors, and that nothing has looked at: no `get`, task or other process.

    All of it costs nothing where tasks do not fail.

    Attributes:
        reporters: called with each error that is freed unseen, without the lock.
    """

    reporters: ClassVar[list[Callable[[BaseException], None]]] = [log_unhandled]

    def __init__(self, context: CoreWorkerContext) -> None:
        self._table, self._engine = context.table, context.engine
        self._unseen: dict[bytes, bytes] = {}

    def watch(self, task: PendingTask, blob: bytes) -> None:
        """All returns of a task are about to become this error (lock held)."""
        for index in range(task.num_returns):
            self._watch(task.id + return_index(index), blob)

    def watch_reply(self, task: PendingTask, msg: m.TaskReply) -> None:
        """The returns of a task that raised are about to come. Those that a generator yielded before are no errors
        (lock held)."""
        for index, item in enumerate(msg.returns if task.num_returns > 0 else ()):
            if item.value and is_error(item.value):
                self._watch(task.id + return_index(index), item.value)

    def _watch(self, oid: bytes, blob: bytes) -> None:
        entry = self._table.entries.get(oid)
        awaited = entry is None or entry.state != PENDING or entry.subscribers
        if not awaited and oid not in self._unseen:
            self._unseen[oid] = blob
            self._table.when_freed(oid, lambda: self._freed(oid))

    def seen(self, oids: Iterable[bytes]) -> None:
        """Forget those of these objects that are errors: they were looked at (lock held)."""
        for oid in oids if self._unseen else ():
            entry = self._table.entries.get(oid)
            if entry is not None and entry.state == INLINE:
                self._unseen.pop(oid, None)

    def _freed(self, oid: bytes) -> None:
        blob = self._unseen.pop(oid, None)
        if blob is not None and _SWITCH not in os.environ:
            self._engine.call_soon(lambda: self._report(blob))

    def _report(self, blob: bytes) -> None:
        error = deserialize(blob)
        if isinstance(error, (RayTaskError, WorkerCrashedError)):
            for report in self.reporters:
                report(error)
