"""The output of workers as lines: put together from pieces, with the task or actor that they come from.

A piece is what was added to a worker's log file. A line `:task_name:f` in it says that task `f` writes what follows;
for a notebook also `:task_id:<hex>`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from hpcray.common.job_names import LOG_PREFIX_ACTOR_NAME, LOG_PREFIX_JOB_ID, LOG_PREFIX_TASK_ID, LOG_PREFIX_TASK_NAME
from hpcray.protocol.messages import WorkerOutput

LogBatch = dict[str, Any]
"""Lines of one worker: `lines`, `is_err`, `pid`, `ip`, `job`, `actor_name`, `task_name`; None for a name not known.
`task_id`, in hex, where the driver is a notebook."""

_WRITERS = ("actor_name", "task_name", "task_id")
PATIENCE = 0.5
"""Seconds after which a line that has not ended is shown as it is."""
LONGEST_LINE = 1 << 20
"""Bytes of a line, without its end, that are shown as a line."""


class _Stream(Struct):
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


# ------------------------------------------------------------ log deduplicator
# Lines that several workers print alike: the first is shown at once, the others are counted for a while.


_EXPLANATION = (
    " (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0 to disable log deduplication, or see "
    "https://docs.ray.io/en/master/ray-observability/user-guides/configure-logging.html#log-deduplication "
    "for more options.)"
)


class _Pattern(Struct):
    """Lines that differ in words with digits only.

    Attributes:
        since: when counting began. sources: who printed such a line: ip and pid.
        count: how many were not shown. line: the last of these, with the facts of its batch.
    """

    since: float
    sources: set[tuple[object, object]]
    count: int = 0
    line: str = ""
    facts: LogBatch = field(default_factory=dict)


class LogDeduplicator:
    """Counts the lines of one output.

    Args:
        window: seconds for which lines are counted after the first.
        always: returns whether a line is shown in any case. never: whether, of the others, it never is.
    """

    def __init__(self, window: float, always: Callable[[str], object], never: Callable[[str], object]) -> None:
        self._window = window
        self._always = always
        self._never = never
        self._recent: dict[str, _Pattern] = {}
        self._explained = False

    def deduplicate(self, now: float, batch: LogBatch) -> list[LogBatch]:
        """Return what to show now: of this batch, and of lines that were counted before."""
        facts = {name: value for name, value in batch.items() if name != "lines"}
        shown = [line for line in batch["lines"] if self._is_shown(now, line, facts)]
        return [*([{**facts, "lines": shown}] if shown else []), *self.expired(now)]

    def expired(self, now: float) -> list[LogBatch]:
        """Return the counts of lines whose time is over. Those that came more than once are counted on."""
        found: list[LogBatch] = []
        for key, state in list(self._recent.items()):
            if now - state.since < self._window:
                break  # they are in the order of their times
            del self._recent[key]
            found += self._counted(state)
            if state.count > 1:
                state.since, state.count = now, 0
                self._recent[key] = state
        return found

    def next_expiry(self) -> float | None:
        """Return when `expired` has something to return; None if nothing is counted."""
        return next((state.since + self._window for state in self._recent.values()), None)

    def flush(self) -> list[LogBatch]:
        """Return all counts; it begins anew."""
        found = [batch for state in self._recent.values() for batch in self._counted(state)]
        self._recent.clear()
        return found

    def _is_shown(self, now: float, line: str, facts: LogBatch) -> bool:
        if self._always(line):
            return True
        if self._never(line):
            return False
        key = " ".join(word for word in line.split() if not any(map(str.isdigit, word)))
        if not key:
            return True
        source = facts.get("ip"), facts.get("pid")
        state = self._recent.get(key)
        if state is None:
            self._recent[key] = _Pattern(now, {source})
            return True
        state.sources.add(source)
        if len(state.sources) == 1 and facts.get("pid") != "raylet":
            return True  # what one worker prints several times it means several times
        state.count += 1
        state.line, state.facts = line, facts
        return False

    def _counted(self, state: _Pattern) -> list[LogBatch]:
        if not state.count:
            return []
        line = state.line
        if state.count > 1:
            line += f" [repeated {state.count}x across cluster]{'' if self._explained else _EXPLANATION}"
            self._explained = True
        return [{**state.facts, "lines": [line]}]
