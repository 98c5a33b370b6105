"""Arguments of tasks that wait for a busy worker are fetched to its node meanwhile, so that it need not wait for them.

Pure. As many waiting tasks of a class as it has workers are promised to a node each, whose raylet is asked to fetch
what they need (`Prefetch`). A promise binds nobody: it says which of the first few tasks a worker had better take next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from hpcray.base.ids import node_of, raylet_of
from hpcray.core.owner.entries import STORED, Entry
from hpcray.core.owner.tasks import LeaseClass, LeasedWorker, Send, Task
from hpcray.wire.messages import ArgRef, Prefetch

_LOOK = 16
"""So many tasks at the front of a queue are looked at."""
_PASSES = 8
"""So often the first one may be passed over for others."""


class FetchAhead:
    """What one process has fetched ahead.

    Args:
        entries: of all objects that it knows.
        send: queues a message.
    """

    def __init__(self, entries: Mapping[bytes, Entry], send: Send) -> None:
        self._entries = entries
        self._send = send

    def queued(self, task: Task, klass: LeaseClass) -> None:
        """A task with objects among its arguments has just been queued."""
        promised = len(klass.promised)
        if promised < len(klass.ring) and len(klass.queue) <= _LOOK:
            self._promise(task, klass, node_of(klass.ring[promised].proc))

    def take(self, klass: LeaseClass, worker: LeasedWorker) -> Task:
        """The task of the queue for a worker that has room: the first that is not promised to another node.

        It is the first one's turn to be sent behind another task, and it is short: others only if they are like it.
        """
        queue, promised, node = klass.queue, klass.promised, node_of(worker.proc)
        at = 0
        if klass.passed < _PASSES:
            only = queue[0].fn if worker.inflight else None
            for index, task in enumerate(islice(queue, _LOOK)):
                # What must not run twice (retries 0) is never sent ahead: nobody could tell whether it had started.
                if promised.get(task.id, node) == node and (only is None or (task.fn is only and task.retries)):
                    at = index
                    break
        task = queue[at]
        del queue[at]
        klass.passed = klass.passed + 1 if at else 0
        promised.pop(task.id, None)
        if not queue:
            promised.clear()  # of tasks that were cancelled, if any
        else:
            self.top_up(klass, node)
        return task

    def top_up(self, klass: LeaseClass, node: int) -> None:
        """A worker of this node is busy from now on: promise it one more task."""
        promised = klass.promised
        if len(promised) < len(klass.ring):
            for task in islice(klass.queue, _LOOK):
                if task.slots is not None and task.id not in promised and self._promise(task, klass, node):
                    return

    def _promise(self, task: Task, klass: LeaseClass, node: int) -> bool:
        refs = self._elsewhere(task.slots or (), node)
        if refs:
            klass.promised[task.id] = node
            self._send(raylet_of(node), Prefetch(refs))
        return bool(refs)

    def _elsewhere(self, slots: Sequence[bytes], node: int) -> list[ArgRef]:
        """Those of the objects that are in stores, but not in that of this node."""
        refs = []
        for object_id in slots:
            entry: Any = self._entries.get(object_id)
            if entry is not None and entry.state == STORED and entry.nodes and node not in entry.nodes:
                refs.append(ArgRef(object_id, entry.size, list(entry.nodes)))
        return refs
