"""The progress bars of this process and of its workers, in one terminal. tqdm draws them."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from hpcray.platform.sockets import node_ip_address
from hpcray.util.debug import log_once

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
        return f"\x1b[2m\x1b[36m{text}\x1b[0m" if sys.stderr is not None and sys.stderr.isatty() else text
