"""`ray.util.timer`: how long something takes, on average."""

from __future__ import annotations

import time
from collections import deque
from typing import Any


class _Timer:
    """A stopwatch: `with timer: ...` adds a measurement; `push` and `push_units_processed` do by hand.

    Args:
        window_size: how many measurements count for the means.
    """

    def __init__(self, window_size: int = 10) -> None:
        self._window_size = window_size
        self._samples: deque[float] = deque(maxlen=window_size)
        self._units: deque[float] = deque(maxlen=window_size)
        self._started: float | None = None
        self._total = 0.0
        self.count = 0

    def __enter__(self) -> _Timer:
        if self._started is not None:
            raise AssertionError("concurrent updates not supported")
        self._started = time.time()
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._started is not None
        self.push(time.time() - self._started)
        self._started = None

    def push(self, sample: float) -> None:
        """Add a measurement in seconds."""
        self._samples.append(sample)
        self._total += sample
        self.count += 1

    def push_units_processed(self, n: float) -> None:
        """Add how much the last measurement processed."""
        self._units.append(n)

    def has_units_processed(self) -> bool:
        """Whether any was added."""
        return bool(self._units)

    @property
    def mean(self) -> float:
        """Mean of the last measurements, seconds; 0 without any."""
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def mean_units_processed(self) -> float:
        """Mean of what was processed."""
        return sum(self._units) / len(self._units) if self._units else 0.0

    @property
    def mean_throughput(self) -> float:
        """Units per second, over the last measurements."""
        seconds = sum(self._samples)
        return sum(self._units) / seconds if seconds else 0.0
