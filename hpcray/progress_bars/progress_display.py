"""How `hpcray.progress` is shown: a bar on a terminal, a part of a notebook's cell, or a line now and then."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcray.common.terminal_text import plain
from hpcray.notebooks.notebook import notebook_shell
from hpcray.runtime.core_worker.core_worker import current

_TERMINAL, _NOTEBOOK, _LINES = 0.1, 0.5, 10.0
"""Seconds between two updates."""


@dataclass(frozen=True)
class ProgressState:
    """How far it is. error: the first one, in a line, once all is over."""

    desc: str
    done: int
    total: int | None
    failed: int = 0
    error: str = ""

    def text(self, seconds: float) -> str:
        """`load: 40 of 100 (40%), 2 failed, 0:12, 3.3/s`."""
        what = f"{plain(self.desc)}: " if self.desc else ""
        known = f" of {self.total} ({self.done / self.total:.0%})" if self.total else ""
        failed = f", {self.failed} failed" if self.failed else ""
        minutes, rest = divmod(int(seconds), 60)
        took = f", {minutes}:{rest:02}, {self.done / seconds:.3g}/s" if seconds > 0 else ""
        error = f"; first error: {plain(self.error)}" if self.error else ""
        return f"{what}{self.done}{known}{failed}{took}{error}"


class ProgressDisplay(Protocol):
    """A place where progress is shown. interval: seconds between two updates."""

    interval: float

    def due(self) -> bool:
        """True if the next update may be shown."""

    def show(self, state: ProgressState) -> None:
        """Show it."""

    def close(self, state: ProgressState, ended: bool) -> None:
        """Show the last state, which stays. ended: False where the iteration was broken off."""


@dataclass
class _Clock:
    """The times of updates. shown: that of the last one; began: the start."""

    interval: float
    began: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def due(self) -> bool:
        return time.monotonic() - self.shown >= self.interval

    def tick(self) -> float:
        """Note an update. Returns the seconds since the start."""
        self.shown = time.monotonic()
        return self.shown - self.began


class ProgressLines:
    """A line on standard error now and then, and one at the end."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._clock = _Clock(interval)
        self.due = self._clock.due
        self._last = 0

    def show(self, state: ProgressState) -> None:
        """See `ProgressDisplay`."""
        if state.done != self._last:
            self._last = state.done
            self._print(state.text(self._clock.tick()))

    def close(self, state: ProgressState, ended: bool) -> None:
        """See `ProgressDisplay`."""
        self._print(state.text(self._clock.tick()) + ("" if ended else "; broken off"))

    @staticmethod
    def _print(text: str) -> None:
        if sys.stderr is not None:
            print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """A bar on the driver's terminal, beside those of `tqdm_ray`; in a worker it moves there too."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._clock = _Clock(interval)
        self.due = self._clock.due
        self._bar: Any = None

    def show(self, state: ProgressState) -> None:
        """See `ProgressDisplay`."""
        self._clock.tick()
        if self._bar is None:
            from hpcray.experimental.tqdm_ray import tqdm  # needed by those who show a bar only

            self._bar = tqdm(total=state.total, flush_interval_s=0.0)
        self._bar.n = state.done
        self._bar.set_description(plain(state.desc) + (f" ({state.failed} failed)" if state.failed else ""))

    def close(self, state: ProgressState, ended: bool) -> None:
        """See `ProgressDisplay`."""
        self.show(state)
        self._bar.close()
        if state.error:
            print(f"{state.failed} failed; first error: {plain(state.error)}", file=sys.stderr, flush=True)


class ProgressCell:
    """A bar in a notebook, in the output of the cell that iterates."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._clock = _Clock(interval)
        self.due = self._clock.due
        self._handle: Any = None

    def show(self, state: ProgressState) -> None:
        """See `ProgressDisplay`."""
        import html  # here: it takes a millisecond to load

        text = state.text(self._clock.tick())
        bar = f"value={state.done} max={state.total}" if state.total else "value=0" if state.total == 0 else ""
        shown = {"text/plain": text, "text/html": f"<progress {bar}></progress> {html.escape(text)}"}
        if self._handle is None:
            self._handle = importlib.import_module("IPython.display").display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def close(self, state: ProgressState, ended: bool) -> None:
        """See `ProgressDisplay`."""
        self.show(state)


def choose_display(interval: float | None) -> ProgressDisplay:
    """The display that suits where this process prints."""
    if notebook_shell() is not None:
        return ProgressCell(_NOTEBOOK if interval is None else interval)
    terminal = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    if (terminal or current.worker is not None) and importlib.util.find_spec("tqdm") is not None:
        return ProgressBar(_TERMINAL if interval is None else interval)
    return ProgressLines(_LINES if interval is None else interval)
