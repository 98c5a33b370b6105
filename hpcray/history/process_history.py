"""The answers of a driver or worker to its raylet, which writes the history.

Nothing is noted for it between two questions: the answer is read from what the process keeps anyway, its ring of ended
tasks (`hpcray.runtime.worker.task_events`) and its tables.
"""

from __future__ import annotations

import os
import time
from heapq import nlargest
from itertools import compress
from operator import itemgetter
from time import perf_counter
from typing import Any, ClassVar

import msgspec

from hpcray.common.resources import UNIT
from hpcray.history.records import Ask, NewRecords, ProcessTime, Running, Tasks, encode
from hpcray.runtime.core_worker.context import object_time
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.extensions import Extension, ExtensionProcess

_ALL = 100
"""Ended tasks of one answer, up to which all are given."""
_FAILED, _SLOWEST, _OTHERS = 100, 20, 60
"""Beyond it: failed ones at most, slowest ones, and some of the others, evenly."""
_FAST = 10_000
"""Microseconds below which no task is slow: where all are faster, none is looked for."""
_MOST_ERRORS = 50
_MOST_RUNNING = 1000
"""Running calls that are given at most: the ones that have run longest."""
_RECENT = 200  # tasks that ended last, among which are those whose values are being stored
_ERROR_TEXT = 2000  # characters at the beginning and at the end of an error's text

_TIME, _FAILURE = itemgetter(3), itemgetter(4)
_Row = tuple[bytes, str, float, int, Any]


class ProcessHistory(Extension):
    """Answers `Ask` with what is new since the last one."""

    name: ClassVar[str] = "history"
    messages: ClassVar[Any] = Ask
    waits_at_exit: ClassVar[bool] = False

    def __init__(self, process: ExtensionProcess) -> None:
        super().__init__(process)
        self._counted: dict[str, int] = {}
        self._since = 0.0
        self._last_error: Any = None
        self._shown: tuple[Any, ...] = ()
        self._looked = 0.0

    def on_message(self, source: bytes, message: Any) -> None:
        """A raylet asks (lock held)."""
        self.send(source, self._report(message.work))

    def _report(self, work: bool) -> NewRecords:
        began = perf_counter()
        introspect = self.process.diagnostics.introspect
        ring = current.worker.replies.record if current.worker is not None else None
        rows = ring.since(self._since) if ring is not None else []  # before they are counted, and forgotten
        said = introspect("work" if work else "ended", ())
        functions = {name: row for name, row in said["functions"].items() if self._counted.get(name) != row[0]}
        self._counted.update((name, row[0]) for name, row in functions.items())
        records: list[msgspec.Raw] = []
        errors = self._new_errors(ring.dump_errors()) if ring is not None else []
        if rows:
            self._since = rows[-1][2]
        if rows or errors:
            records.append(msgspec.Raw(encode(self._tasks(rows, errors))))
        if not work:
            return NewRecords(functions, said["partial"], len(rows), records, not (records or functions), None, 0.0)
        running = nlargest(_MOST_RUNNING, said["calls"], itemgetter("seconds"))
        waits = len(self.process.table.pins.being_read)
        made = self.process.task_counter
        shown = (tuple(call["task"] for call in running), said["queued"], waits, said["lacking"], said["sent"], made)
        now = time.time()
        if shown != self._shown:
            self._shown = shown
            here = Running(
                now,
                self.process.me,
                os.getpid(),
                [(call["task"], call["name"], call["seconds"]) for call in running],
                said["queued"],
                waits,
                said["lacking"],
                said["sent"],
                made,
                self._looked,
            )
            records.append(msgspec.Raw(encode(here)))
        self._looked = now
        replies = ring.ended_last(_RECENT) if ring is not None else ()  # what they store is not of the calls any more
        elapsed: dict[str, float] = {}
        for call in said["calls"]:
            if call["task"] not in replies:
                elapsed[call["name"]] = elapsed.get(call["name"], 0.0) + call["seconds"]
        busy = sum(row[2] for row in said["functions"].values()) / 1e6 + sum(elapsed.values())
        worker = current.worker
        cores = worker.lease.resources.get("CPU", 0) / UNIT if worker is not None else 0.0
        objects = object_time.so_far(self.process.reader.only_fetches)
        spent = ProcessTime(busy, time.process_time(), *objects, cores=cores, elapsed=elapsed)
        quiet = not records and not functions and not said["queued"] and not said["sent"]
        took = perf_counter() - began
        return NewRecords(functions, said["partial"], len(rows), records, quiet, spent, took)

    def _new_errors(self, errors: list[Any]) -> list[tuple[bytes, str, str]]:
        new = []
        for row in reversed(errors):
            if row is self._last_error:
                break
            new.append(row)
        if new:
            self._last_error = new[0]
        return [(task, kind, shorten(text)) for task, kind, text in reversed(new[:_MOST_ERRORS])]

    def _tasks(self, rows: list[_Row], errors: list[tuple[bytes, str, str]]) -> Tasks:
        offset = time.time() - perf_counter()
        names: dict[str, int] = {}
        chosen = [
            (task, names.setdefault(name, len(names)), end + offset, us, bool(failed))
            for task, name, end, us, failed in sample(rows)
        ]
        worker = current.worker
        actor = worker.actor.spec.actor if worker is not None and worker.actor is not None else b""
        return Tasks(time.time(), self.process.me, os.getpid(), actor, list(names), chosen, len(rows), errors)


def sample(rows: list[_Row]) -> list[_Row]:
    """Some of many tasks, in their order: those that failed, the slowest, and every so manieth of the others."""
    if len(rows) <= _ALL:
        return rows
    chosen: list[int] = []
    if any(map(_FAILURE, rows)):
        chosen += list(compress(range(len(rows)), map(_FAILURE, rows)))[-_FAILED:]
    if max(map(_TIME, rows)) >= _FAST:
        times = list(map(_TIME, rows))
        slow = nlargest(_SLOWEST, times)[-1]
        chosen += [place for place, us in enumerate(times) if us > slow]
    chosen += range(0, len(rows), -(-len(rows) // _OTHERS))
    return [rows[place] for place in sorted(set(chosen))]


def shorten(text: str) -> str:
    """A long text without its middle."""
    if len(text) <= 2 * _ERROR_TEXT:
        return text
    return f"{text[:_ERROR_TEXT]}\n... ({len(text) - 2 * _ERROR_TEXT} characters) ...\n{text[-_ERROR_TEXT:]}"
