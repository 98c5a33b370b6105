"""`ray.util.debug`: say something once."""

from __future__ import annotations

import time

__all__ = ["disable_log_once_globally", "enable_periodic_logging", "log_once", "reset_log_once"]

_PERIOD = 60.0


class _Said:
    keys: dict[str, float] = {}  # noqa: RUF012
    disabled = False
    periodic = False


def log_once(key: str) -> bool:
    """Whether it is the first time (with `enable_periodic_logging`: in a minute) that this key is asked about."""
    if _Said.disabled:
        return False
    now = time.monotonic()
    last = _Said.keys.get(key)
    if last is None or (_Said.periodic and now - last > _PERIOD):
        _Said.keys[key] = now
        return True
    return False


def reset_log_once(key: str | None = None) -> None:
    """Forget one key, or all."""
    if key is None:
        _Said.keys.clear()
    else:
        _Said.keys.pop(key, None)


def disable_log_once_globally() -> None:
    """`log_once` is False from now on."""
    _Said.disabled = True


def enable_periodic_logging() -> None:
    """`log_once` is True once a minute for each key."""
    _Said.periodic = True
