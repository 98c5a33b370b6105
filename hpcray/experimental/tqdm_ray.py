"""Progress bars of workers, which move in the driver's terminal.

A worker prints the state of its bar as a line of JSON with a token in it, at most once in a while; the driver draws a
bar where it finds such a line in the output of a worker. So bars need `log_to_driver`, and, in the driver, tqdm.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from hpcray.experimental.bar_manager import BarManager, BarState
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.worker_output import RAY_TQDM_MAGIC, WorkerBars
from hpcray.util.debug import log_once

__all__ = ["RAY_TQDM_MAGIC", "instance", "safe_print", "tqdm"]

CHANGING = ("_manager",)
"""Names whose value the facade must not cache."""

_TOKEN = "__magic_token__"
_print = builtins.print
_manager: BarManager | None = None
_mgr_lock = threading.Lock()


def instance() -> BarManager:
    """Return what shows the bars of this process, and make it at the first call.

    From then on `print` is `safe_print`, unless RAY_TQDM_PATCH_PRINT is 0.
    """
    global _manager
    with _mgr_lock:
        if _manager is None:
            _manager = WorkerBars.manager = BarManager()
            if os.environ.get("RAY_TQDM_PATCH_PRINT", "1").lower() in ("1", "true"):
                builtins.print = safe_print
        return _manager


def safe_print(*args: Any, **kwargs: Any) -> None:
    """Print as `print` does; progress bars make room."""
    bars = instance()
    if bars.in_hidden_state or kwargs.get("file") not in (None, sys.stdout, sys.stderr):
        _print(*args, **kwargs)
        return
    bars.hide_bars()
    try:
        _print(*args, **kwargs)
    finally:
        bars.unhide_bars()


def show_line(line: str) -> str:
    """Show the bar of a line of a worker, and return what else is in the line."""
    start = line.find(f'{{"{_TOKEN}"')
    try:
        state, end = json.JSONDecoder().raw_decode(line, start)
        instance().process_state_update({name: state[name] for name in _FIELDS})
    except (ValueError, KeyError, IndexError):
        if log_once("tqdm_corruption"):
            safe_print(
                f"[tqdm_ray] Failed to decode {line}, this may be due to logging too fast. This warning will not be "
                "printed again."
            )
        return ""
    return line[:start] + line[end:]


class tqdm:
    """A progress bar that tasks, actors and drivers may update; the driver shows it.

    Args:
        iterable: items to iterate over, with the bar counting them.
        desc: text before the bar.
        total: number of items; taken from `iterable` where it has a length.
        unit: name of an item.
        position: the line of the bar among those of this process.
        flush_interval_s: seconds between two states that are sent to the driver.

    Attributes:
        total: number of items. n: how many are done. Both can be set.
    """

    DEFAULT_FLUSH_INTERVAL_SECONDS = 1.0

    def __init__(
        self,
        iterable: Iterable[Any] | None = None,
        desc: str | None = None,
        total: int | None = None,
        unit: str | None = None,
        position: int | None = None,
        flush_interval_s: float | None = None,
    ) -> None:
        if total is None and iterable is not None:
            try:
                total = len(iterable)  # type: ignore[arg-type]
            except (TypeError, AttributeError):
                total = None
        self.total, self.n = total, 0
        self._iterable, self._desc, self._unit, self._pos = iterable, desc or "", unit or "it", position or 0
        self._uuid, self._ip = uuid.uuid4().hex, node_ip_address()
        self._closed = False
        self._flush_interval_s = self.DEFAULT_FLUSH_INTERVAL_SECONDS if flush_interval_s is None else flush_interval_s
        self._last_flush_time = 0.0

    def set_description(self, desc: str) -> None:
        """Set the text before the bar."""
        self._desc = desc
        self._dump_state()

    def update(self, n: int = 1) -> None:
        """Add `n` to the count."""
        self.n += n
        self._dump_state()

    def refresh(self) -> None:
        """Send the state to the driver, unless that was done shortly before."""
        self._dump_state()

    def close(self) -> None:
        """Show the last state, which stays on the screen; the bar moves no more."""
        if not self._closed:
            self._closed = True
            self._dump_state(force_flush=True)

    def __iter__(self) -> Iterator[Any]:
        if self._iterable is None:
            raise ValueError("No iterable provided")
        try:
            for item in self._iterable:
                self.update(1)
                yield item
        finally:
            self.close()

    def _dump_state(self, force_flush: bool = False) -> None:
        now = time.monotonic()
        if not force_flush and (self._closed or now - self._last_flush_time < self._flush_interval_s):
            return
        self._last_flush_time = now
        if current.worker is not None:
            _print(json.dumps({_TOKEN: RAY_TQDM_MAGIC, **self._get_state()}) + "\n", end="")
        else:
            instance().process_state_update(self._get_state())

    def _get_state(self) -> BarState:
        values = (
            self.n, self._pos, self._desc, self.total, self._unit, self._ip, os.getpid(), self._uuid, self._closed,
        )  # fmt: skip
        return dict(zip(_FIELDS, values, strict=True))


_FIELDS = ("x", "pos", "desc", "total", "unit", "ip", "pid", "uuid", "closed")
