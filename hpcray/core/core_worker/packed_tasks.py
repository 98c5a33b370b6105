"""Waiting tasks in as little memory as they need. Pure.

A program may queue millions of tasks. One that has a single return, and no refs among its arguments, is *packed* while
it waits: the entry of its return has its arguments and a `TaskTemplate`, which it shares with others, and the queue has
the id of its return. The `PendingTask` is made when the task leaves its queue, or when something is decided for it
alone.
"""

from __future__ import annotations

from hpcray.core.core_worker.object_entry import PENDING, ObjectEntry
from hpcray.core.core_worker.task import PendingTask, TaskTemplate


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
