"""What a worker has run: a bounded ring, for `timeline` and `list_tasks`. One append per task or call, when it ends."""

from __future__ import annotations

from collections import deque
from typing import Any


class Record:
    """The last tasks and calls of one worker.

    Args:
        size: how many are remembered.

    Attributes:
        add: takes one (task id, name, end, microseconds, whether it failed); end by `perf_counter`.
    """

    __slots__ = ("_ended", "add")

    def __init__(self, size: int) -> None:
        self._ended: deque[tuple[Any, ...]] = deque(maxlen=size)
        self.add = self._ended.append

    @property
    def full(self) -> bool:
        """Whether earlier ones may be forgotten."""
        return len(self._ended) == self._ended.maxlen

    def dump(self) -> list[tuple[Any, ...]]:
        """All that is remembered, the earliest end first."""
        return list(self._ended)
