"""The tasks and calls that have ended in a worker, for `timeline` and `list_tasks`, and the names they have there."""

from __future__ import annotations

import contextlib
import inspect
from bisect import bisect_right
from collections import deque
from itertools import islice
from operator import itemgetter
from typing import Any

MAX_ERROR_TEXT = 10_000
"""Characters of an error's text that are remembered, at most."""
_END = itemgetter(2)
_MAX_ERRORS = 1000
"""Errors of failed tasks that a worker remembers, at most."""


class TaskEventBuffer:
    """The last tasks and calls of one worker, a bounded ring: one append per task or call, when it ends.

    Args:
        size: how many are remembered.
        uncounted: how many more there may be until they are counted (`trim`).

    Attributes:
        add: takes one (task id, name, end, microseconds, whether it failed); end by `perf_counter`.
            `explain` says why it failed.
    """

    __slots__ = ("_ended", "_errors", "_size", "add")

    def __init__(self, size: int, uncounted: int = 0) -> None:
        self._size = size
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=size + uncounted)
        self._errors: deque[tuple[bytes, str, str]] = deque(maxlen=min(size, _MAX_ERRORS))
        self.add = self._ended.append

    def explain(self, task: bytes, error: BaseException) -> None:
        """Remember the class and text of a failed task's error."""
        with contextlib.suppress(Exception):  # the text may be a program's
            self._errors.append((task, type(error).__name__, str(error)[:MAX_ERROR_TEXT]))

    @property
    def full(self) -> bool:
        """True if earlier ones may be forgotten."""
        return len(self._ended) >= self._size

    @property
    def overflowed(self) -> bool:
        """True if some may be forgotten that were not counted."""
        return len(self._ended) == self._ended.maxlen

    @property
    def first(self) -> float:
        """The end of the earliest one that is there, by `perf_counter`; 0.0 where there is none."""
        return self._ended[0][2] if self._ended else 0.0

    @property
    def last(self) -> float:
        """The end of the last one, by `perf_counter`; 0.0 where there is none."""
        return self._ended[-1][2] if self._ended else 0.0

    def ended_last(self, most: int) -> set[bytes]:
        """The ids of those that ended last."""
        return {row[0] for row in islice(reversed(self._ended), most)}

    def since(self, end: float) -> list[tuple[Any, ...]]:
        """All that are there and have ended later than this, by `perf_counter`, the earliest end first."""
        rows = list(self._ended)
        return rows[bisect_right(rows, end, key=_END) :]

    def trim(self) -> None:
        """Forget those beyond the size: all have been counted."""
        if len(self._ended) > self._size:
            kept = list(self._ended)[-self._size :]  # one by one they would take twice as long
            self._ended.clear()
            self._ended.extend(kept)

    def dump(self, limit: int = 0, since: float = 0.0) -> list[tuple[Any, ...]]:
        """Return what is remembered, the earliest end first.

        Args:
            limit: most rows, the last ones; 0: all.
            since: only those that have ended later, by `perf_counter`.
        """
        rows = (self.since(since) if since else list(self._ended))[-self._size :]
        return rows[-limit:]

    def dump_errors(self, limit: int = 0) -> list[tuple[bytes, str, str]]:
        """(task id, class, text) of the last errors, the earliest first; at most `limit`, 0: all."""
        return list(self._errors)[-limit:]


def qualified_name(called: Any, last: int = 0) -> str:
    """Module and qualified name of a function or class; of those in a script, the script's name for `__main__`.

    Args:
        called: the function or class.
        last: number of components of the qualified name to keep; 0: all.
    """
    module = getattr(called, "__module__", "") or ""
    if module == "__main__":
        with contextlib.suppress(TypeError, OSError):
            module = inspect.getmodulename(inspect.getfile(inspect.unwrap(called))) or module
    name: str = getattr(called, "__qualname__", type(called).__qualname__)
    return f"{module}.{'.'.join(name.split('.')[-last:])}"
