"""The log of events on a node that people should know of, for `list_cluster_events`."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_MAX_EVENTS = 1000


class NodeEventLog:
    """The latest events of one node; each is also printed.

    Args:
        log: prints a line.
    """

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)

    def report(self, severity: str, text: str) -> None:
        """Add an event. severity: "INFO", "WARNING" or "ERROR"."""
        self._log(text)
        event = {"severity": severity, "time": time.time(), "message": text, "event_id": os.urandom(18).hex()}
        self._events.append(event)

    def rows(self) -> list[dict[str, Any]]:
        """The events, oldest first; "time" is Unix time."""
        return list(self._events)
