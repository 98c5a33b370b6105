"""Progress bars of workers, which move in the driver's terminal.

A worker prints the state of its bar as a line of JSON with a token in it, at most once in a while; the driver draws a
bar where it finds such a line in the output of a worker. So bars need `log_to_driver`, and, in the driver, tqdm.
"""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.worker_output import RAY_TQDM_MAGIC, WorkerBars
from hpcray.util.debug import log_once

# ------------------------------------------------------------ bar manager
# The progress bars of this process and of its workers, in one terminal. tqdm draws them.


logger = logging.getLogger("hpcray")

BarState = dict[str, Any]
"""The state of a bar, as it is sent: `uuid`, `x` (the count), `pos`, `desc`, `total`, `unit`, `ip`, `pid`, `closed`."""

_DRAWING_INTERVAL = 0.05
"""Seconds between two drawings: with many bars, what falls between is drawn with the next change of any of them."""


class _Bar:
    """One bar on the screen.

    Args:
        draw: tqdm's class of bars.

    Attributes:
        state: the newest one. bar: tqdm's.
        pos_offset: the lines below which the bars of its process begin.
    """

    def __init__(self, draw: Any, state: BarState, pos_offset: int) -> None:
        self.state, self.pos_offset = state, pos_offset
        self.bar = draw(
            desc=state["desc"],
            total=state["total"],
            unit=state["unit"],
            position=pos_offset + state["pos"],
            dynamic_ncols=True,
            unit_scale=True,
        )
        if state["x"]:
            self.bar.update(state["x"])

    def update(self, state: BarState) -> None:
        """Take in a newer state, without drawing it."""
        last, self.state = self.state, state
        if state["desc"] != last["desc"]:
            self.bar.set_description(state["desc"], refresh=False)
        self.bar.total = state["total"]
        if state["x"] != last["x"]:
            self.bar.update(state["x"] - last["x"])

    def move(self, pos_offset: int) -> None:
        """Draw it elsewhere."""
        self.pos_offset = pos_offset
        self.bar.clear()
        self.bar.pos = -(pos_offset + self.state["pos"])  # tqdm's sign of a place that was asked for
        self.bar.refresh()


class _BarGroup:
    """The bars of one process, one below the other.

    Attributes:
        pos_offset: the lines above them. bars_by_uuid: the bars.
    """

    def __init__(self, pos_offset: int) -> None:
        self.pos_offset = pos_offset
        self.bars_by_uuid: dict[str, _Bar] = {}

    def slots_required(self) -> int:
        """Return the number of lines down to the lowest bar."""
        return 1 + max((bar.state["pos"] for bar in self.bars_by_uuid.values()), default=-1)

    def move(self, pos_offset: int) -> None:
        """Draw the bars elsewhere."""
        if pos_offset != self.pos_offset:
            self.pos_offset = pos_offset
            for bar in self.bars_by_uuid.values():
                bar.move(pos_offset)


class BarManager:
    """All bars that this process shows: its own ones, and those of its workers.

    Attributes:
        bar_groups: the bars by address and pid of the process that counts.
        in_hidden_state: whether the bars are off the screen, because something is printed. num_hides: how often.
    """

    def __init__(self) -> None:
        self.ip, self.pid = node_ip_address(), os.getpid()
        self.bar_groups: dict[tuple[str, int], _BarGroup] = {}
        self.in_hidden_state = False
        self.num_hides = 0
        self.lock = threading.RLock()
        self._waiting: dict[str, BarState] = {}  # states that came while the bars were hidden
        self._not_drawn: set[_Bar] = set()
        self._drawn = 0.0

    def process_state_update(self, state: BarState) -> None:
        """Show a new state of a bar, or a new bar. Several threads may call it."""
        with self.lock:
            if self.in_hidden_state and not state["closed"]:
                self._waiting[state["uuid"]] = state
            else:
                self._show({**state, "desc": self._prefix(state) + state["desc"]})

    def hide_bars(self) -> None:
        """Take the bars off the screen: something else is printed."""
        with self.lock:
            if not self.in_hidden_state:
                self.in_hidden_state = True
                self.num_hides += 1
                for bar in self._bars():
                    bar.bar.clear()

    def unhide_bars(self) -> None:
        """Undo `hide_bars`."""
        with self.lock:
            if self.in_hidden_state:
                self.in_hidden_state = False
                for bar in self._bars():
                    bar.bar.refresh()
                self._not_drawn.clear()
                waiting, self._waiting = self._waiting, {}
                for state in waiting.values():
                    self.process_state_update(state)

    def forget(self, ip: str, pid: int) -> None:
        """A process has ended: close the bars that it left open."""
        with self.lock:
            group = self.bar_groups.get((ip, pid))
            for uuid in list(group.bars_by_uuid) if group is not None else ():
                self._close(group, uuid)
            self.bar_groups.pop((ip, pid), None)

    def close(self) -> None:
        """Close all bars, so that what is printed next begins on a line of its own."""
        with self.lock:
            for ip, pid in list(self.bar_groups):
                self.forget(ip, pid)

    def _show(self, state: BarState) -> None:
        try:
            draw = importlib.import_module("tqdm.auto").tqdm
        except ImportError:
            if log_once("no_tqdm"):
                logger.warning("tqdm is not installed. Progress bars will be disabled.")
            return
        key = state["ip"], state["pid"]
        group = self.bar_groups.get(key)
        if group is None:
            group = self.bar_groups[key] = _BarGroup(self._lines())
        bar = group.bars_by_uuid.get(state["uuid"])
        if bar is None:
            group.bars_by_uuid[state["uuid"]] = _Bar(draw, state, group.pos_offset)
            self._arrange()
        else:
            bar.update(state)
            self._draw(bar)
        if state["closed"]:
            self._close(group, state["uuid"])

    def _close(self, group: _BarGroup | None, uuid: str) -> None:
        assert group is not None
        self._waiting.pop(uuid, None)
        bar = group.bars_by_uuid.pop(uuid)
        self._not_drawn.discard(bar)
        self.hide_bars()  # so that none flashes where several are closed one after the other
        bar.bar.close()
        self.unhide_bars()
        self._arrange()

    def _draw(self, bar: _Bar) -> None:
        self._not_drawn.add(bar)
        now = time.monotonic()
        if now - self._drawn >= _DRAWING_INTERVAL:
            self._drawn = now
            for one in self._not_drawn:
                one.bar.refresh()
            self._not_drawn.clear()

    def _arrange(self) -> None:
        """Give every process as many lines as it needs."""
        lines = 0
        for group in self.bar_groups.values():
            group.move(lines)
            lines += group.slots_required()

    def _lines(self) -> int:
        return sum(group.slots_required() for group in self.bar_groups.values())

    def _bars(self) -> Iterator[_Bar]:
        for group in self.bar_groups.values():
            yield from group.bars_by_uuid.values()

    def _prefix(self, state: BarState) -> str:
        if (state["ip"], state["pid"]) == (self.ip, self.pid):
            return ""
        where = "" if state["ip"] == self.ip else f", ip={state['ip']}"
        text = f"(pid={state['pid']}{where}) "
        coloured = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        return f"\x1b[2m\x1b[36m{text}\x1b[0m" if coloured else text


# ------------------------------------------------------------ tqdm ray


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
