"""The tasks and calls of one process by function: those that have run here, that run, and that it waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

from hpcray.common.figures import FunctionRow, add_functions, bucket_of, count_names
from hpcray.core.core_worker.object_table import PENDING
from hpcray.core.core_worker.task import PendingTask
from hpcray.runtime.core_worker.actor_submitter import ActorClient
from hpcray.runtime.core_worker.core_worker import CoreWorker, current

_COUNTED = itemgetter(1, 3, 4)
_MOST_COUNTED = 2000
"""Queued tasks of one scheduling class that are looked at; their names stand for those of all."""
_MOST_SEARCHED = 20_000
"""Objects among which tasks that wait for their arguments are looked for, at most."""


class TaskFigures:
    """Counts what a worker has run since its start, as far as its ring of ended tasks has it at the next question.

    Nothing is counted between questions: each reads what has come into the ring since the last one.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._functions: dict[str, FunctionRow] = {}
        self._last = 0.0
        self._partial = False

    def answer(self, running: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply to "figures" (lock held).

        Args:
            running: the calls that run here.
        """
        self._count_ended()
        elapsed: dict[str, int] = {}
        for call in running:
            elapsed[call["name"]] = elapsed.get(call["name"], 0) + round(1e6 * call["seconds"])
        return {
            "functions": self._functions,
            "running": count_names(call["name"] for call in running),
            "elapsed": elapsed,
            "queued": self._queued(),
            "partial": self._partial,
        }

    def _count_ended(self) -> None:
        worker = current.worker
        record = worker.replies.record if worker is not None else None
        if record is None:
            return
        new, overflowed = record.since(self._last), record.overflowed
        if not new:
            return
        self._partial = self._partial or (overflowed and record.first > self._last)
        self._last = new[-1][2]
        record.trim()
        found: dict[str, FunctionRow] = {}
        for (name, us, failed), count in Counter(map(_COUNTED, new)).items():
            row = found.get(name)
            if row is None:
                row = found[name] = [0, 0, 0, {}]
            row[0] += count
            row[1] += count * failed
            row[2] += count * us
            bucket = bucket_of(us)
            row[3][bucket] = row[3].get(bucket, 0) + count
        add_functions(self._functions, found)

    def _queued(self) -> dict[str, int]:
        """Tasks and calls of ours that have not been sent, by name."""
        submitter, entries = self._process.submitter, self._process.table.entries
        counts: dict[str, int] = {}
        for scheduling_class in submitter.leases.by_index:
            queue = scheduling_class.queue
            sample = count_names(task.name for task in islice(submitter.leases.queued(scheduling_class), _MOST_COUNTED))
            for name, count in sample.items():
                counts[name] = counts.get(name, 0) + round(count * len(queue) / min(len(queue), _MOST_COUNTED))
        for client in submitter.actors._clients.values():
            if client.queue:
                name = f"{client.class_name}.{client.queue[0].method}"
                counts[name] = counts.get(name, 0) + len(client.queue)
        for name in self._without_arguments() if len(entries) <= _MOST_SEARCHED else ():
            counts[name] = counts.get(name, 0) + 1
        return counts

    def _without_arguments(self) -> Iterator[str]:
        seen: set[bytes] = set()
        for entry in self._process.table.entries.values():
            task = entry.task
            if entry.state == PENDING and isinstance(task, PendingTask) and task.waiting > 0 and task.id not in seen:
                seen.add(task.id)
                if not isinstance(task.scheduling_class, ActorClient):  # the calls of an actor are in its queue
                    yield task.name
