"""Logging of a message once, and a stopwatch that averages its last measurements."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

__all__ = ["disable_log_once_globally", "enable_periodic_logging", "log_once", "reset_log_once"]

_PERIOD = 60.0  # seconds, of periodic logging


class _LogOnce:
    keys: dict[str, float] = {}  # noqa: RUF012
    disabled = False
    periodic = False


def log_once(key: str) -> bool:
    """Return True at the first call with a key; with `enable_periodic_logging`, once a minute."""
    if _LogOnce.disabled:
        return False
    now = time.monotonic()
    last = _LogOnce.keys.get(key)
    if last is None or (_LogOnce.periodic and now - last > _PERIOD):
        _LogOnce.keys[key] = now
        return True
    return False


def reset_log_once(key: str | None = None) -> None:
    """Make `log_once` return True again for one key, or for all."""
    if key is None:
        _LogOnce.keys.clear()
    else:
        _LogOnce.keys.pop(key, None)


def disable_log_once_globally() -> None:
    """Make `log_once` return False for every key."""
    _LogOnce.disabled = True


def enable_periodic_logging() -> None:
    """Make `log_once` return True once a minute for each key."""
    _LogOnce.periodic = True


class _Timer:
    """A stopwatch: `with timer: ...` adds a measurement, as `push` does.

    Args:
        window_size: number of measurements that the means cover.
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
        """Add the number of units that the last measurement processed."""
        self._units.append(n)

    def has_units_processed(self) -> bool:
        """Return True after `push_units_processed`."""
        return bool(self._units)

    @property
    def mean(self) -> float:
        """Mean of the last measurements in seconds; 0 without measurements."""
        return sum(self._samples) / len(self._samples) if self._samples else 0.0

    @property
    def mean_units_processed(self) -> float:
        """Mean number of units of the last measurements."""
        return sum(self._units) / len(self._units) if self._units else 0.0

    @property
    def mean_throughput(self) -> float:
        """Units per second over the last measurements."""
        seconds = sum(self._samples)
        return sum(self._units) / seconds if seconds else 0.0
