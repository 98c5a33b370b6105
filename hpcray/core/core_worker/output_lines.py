"""The output of workers as lines: put together from pieces, with the task or actor that they come from.

A piece is what was added to a worker's log file. A line `:task_name:f` in it says that task `f` writes what follows;
for a notebook also `:task_id:<hex>`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcray.common.log_names import (
    LOG_PREFIX_ACTOR_NAME,
    LOG_PREFIX_JOB_ID,
    LOG_PREFIX_TASK_ID,
    LOG_PREFIX_TASK_NAME,
)
from hpcray.protocol.messages import WorkerOutput

LogBatch = dict[str, Any]
"""Lines of one worker: `lines`, `is_err`, `pid`, `ip`, `job`, `actor_name`, `task_name`; None for a name not known.
`task_id`, in hex, where the driver is a notebook."""

_WRITERS = ("actor_name", "task_name", "task_id")
PATIENCE = 1.0
"""Seconds after which a line that has not ended is shown as it is."""
LONGEST_LINE = 1 << 20
"""Bytes of a line, without its end, that are shown as a line."""


@dataclass(slots=True)
class _Stream:
    """One output of one worker.

    Attributes:
        batch: its facts, without lines.
        partial: a line that has not ended. since: when its last piece came.
    """

    batch: LogBatch
    partial: bytearray = field(default_factory=bytearray)
    since: float = 0.0


class OutputLines:
    """The streams of all workers of a job."""

    def __init__(self) -> None:
        self._streams: dict[tuple[bytes, bool], _Stream] = {}

    def feed(self, now: float, msg: WorkerOutput) -> list[LogBatch]:
        """Take a piece. Returns the lines that it completes, in order; a batch for each name."""
        key = msg.worker, msg.error
        stream = self._streams.get(key)
        if stream is None:
            batch = {"ip": msg.ip, "pid": msg.pid, "job": None, "is_err": msg.error}
            stream = self._streams[key] = _Stream({**batch, "actor_name": None, "task_name": None})
        stream.partial += msg.data
        stream.since = now
        found: list[LogBatch] = []
        end = len(stream.partial) if msg.last else stream.partial.rfind(b"\n") + 1
        if not end and len(stream.partial) >= LONGEST_LINE:
            end = len(stream.partial)
        if end:
            complete = bytes(stream.partial[:end])
            del stream.partial[:end]
            found = _batches(stream.batch, complete)
            self._name(key, found)
        if msg.last:
            del self._streams[key]
        return found

    def _name(self, key: tuple[bytes, bool], found: list[LogBatch]) -> None:
        """Name the writer of lines before which there is no name, as child processes write them: the other stream's."""
        other = self._streams.get((key[0], not key[1]))
        for batch in found if other is not None else ():
            if other is not None and batch["task_name"] is None and batch["actor_name"] is None:
                batch |= {name: other.batch[name] for name in _WRITERS if name in other.batch}

    def overdue(self, now: float) -> list[LogBatch]:
        """Return the lines that have waited too long for their end."""
        found: list[LogBatch] = []
        for stream in self._streams.values():
            if stream.partial and now - stream.since >= PATIENCE:
                found += _batches(stream.batch, bytes(stream.partial))
                stream.partial.clear()
        return found

    def next_overdue(self) -> float | None:
        """Return the time at which `overdue` has something to return; None if no line waits."""
        times = [stream.since + PATIENCE for stream in self._streams.values() if stream.partial]
        return min(times, default=None)


def _batches(facts: LogBatch, data: bytes) -> list[LogBatch]:
    """Split whole lines, and note in `facts` who writes."""
    found: list[LogBatch] = []
    lines: list[str] = []

    def cut() -> None:
        nonlocal lines
        if lines:
            found.append({**facts, "lines": lines})
            lines = []

    for line in data.decode("utf-8", "replace").removesuffix("\n").split("\n"):
        if line.startswith(LOG_PREFIX_TASK_NAME):
            cut()
            facts["task_name"], facts["actor_name"] = line[len(LOG_PREFIX_TASK_NAME) :], None
        elif line.startswith(LOG_PREFIX_ACTOR_NAME):
            cut()
            facts["actor_name"], facts["task_name"] = line[len(LOG_PREFIX_ACTOR_NAME) :], None
        elif line.startswith(LOG_PREFIX_TASK_ID):
            cut()
            facts["task_id"] = line[len(LOG_PREFIX_TASK_ID) :]
        elif line.startswith(LOG_PREFIX_JOB_ID):
            facts["job"] = line[len(LOG_PREFIX_JOB_ID) :]
        else:
            lines.append(_last_drawn(line))
    cut()
    return found


def _last_drawn(line: str) -> str:
    """Return what a terminal would show of a line that was drawn several times, as progress bars do."""
    return line if "\r" not in line else next((part for part in reversed(line.split("\r")) if part), "")
