"""`hpcray.progress`: how far a number of refs, or any iteration, has come, and how that is shown."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any, Protocol, TypeVar

from msgspec import Struct, field

from hpcray.api.objects import WaitableRefs
from hpcray.api.session import require_session
from hpcray.common.exceptions import GetTimeoutError
from hpcray.common.terminal_text import plain
from hpcray.core.core_worker.object_table import INLINE, Waiter
from hpcray.notebooks import notebook_shell
from hpcray.protocol.messages.objects import ERROR
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_reader import unknown_ref
from hpcray.runtime.core_worker.object_refs import ObjectRef

# ------------------------------------------------------------ ready queue
# Refs in the order in which their objects become ready. Each costs its own share, however many others wait.


class ReadyQueue:
    """Many refs, in the order in which their objects become ready, here or elsewhere. No value is fetched.

    Args:
        process: this process.
        refs: a ref that occurs several times comes as often.

    Attributes:
        arrived: objects that are ready, those not taken yet included. failed: of these, results that are errors.
        error: the first of them, serialized; b"" for none.

    Raises:
        RaySystemError: a ref is of an earlier session. LocalRayletDiedError: this node has ended.
    """

    def __init__(self, process: CoreWorker, refs: Iterable[ObjectRef[Any]]) -> None:
        self._process = process
        self._ready: deque[ObjectRef[Any]] = deque()
        self._pending: dict[int, tuple[Waiter, bytes]] = {}
        self._sleeper: Waiter | None = None
        self.arrived = self.failed = 0
        self.error = b""
        table, engine = process.table, process.engine
        with engine.lock:
            process.check_alive()
            process.drain()
            for number, ref in enumerate(refs):
                if ref._id not in table.entries:
                    self._withdraw()
                    raise unknown_ref(ref._id)
                waiter = Waiter(callback=partial(self._arrive, ref, number))
                self._pending[number] = waiter, ref._id
                if table.wait_ready(ref._id, waiter):
                    self._arrive(ref, number)
            process.reader.ready_queues.append(self)
            engine.flush()
        engine.run_pending_calls()

    def take(self, timeout: float) -> list[ObjectRef[Any]]:
        """Return the refs that have become ready since the last call; where there are none, wait for one.

        Args:
            timeout: seconds after which the result may be empty.

        Raises:
            LocalRayletDiedError, RaySystemError: this node, or this session, has ended.
        """
        process, engine = self._process, self._process.engine
        with engine.lock:
            process.drain()
            if not self._ready and self._pending:
                process.check_alive()
                self._sleeper = waiter = Waiter()
                try:
                    process.block(waiter, monotonic() + timeout)
                finally:
                    self._sleeper = None
            found = list(self._ready)
            self._ready.clear()
        engine.run_pending_calls()
        return found

    def waiting(self) -> list[bytes]:
        """Return the ids of the objects that are not ready (lock held)."""
        return [oid for _, oid in self._pending.values()]

    def close(self) -> None:
        """Wait for nothing any more."""
        with self._process.engine.lock:
            self._withdraw()
            if self in self._process.reader.ready_queues:
                self._process.reader.ready_queues.remove(self)

    def _withdraw(self) -> None:
        for waiter, oid in self._pending.values():
            self._process.table.remove_waiter((oid,), waiter)
        self._pending.clear()

    def _arrive(self, ref: ObjectRef[Any], number: int) -> None:
        """An object is ready (lock held)."""
        del self._pending[number]
        self._ready.append(ref)
        self.arrived += 1
        entry = self._process.table.entries.get(ref._id)
        if entry is not None and entry.state == INLINE and entry.value[-1] == ERROR:
            self.failed += 1
            self.error = self.error or entry.value
        if self._sleeper is not None and self._sleeper.count > 0:
            self._sleeper.count = 0
            self._process.engine.notify(self._sleeper)


# ------------------------------------------------------------ progress


T = TypeVar("T")

_SHORTEST = 0.01
"""Seconds that a look for ready refs may take at least."""


class Progress(WaitableRefs[T]):
    """An iteration with a progress bar. Of refs it yields each as soon as its object is ready, without fetching it.

    `get(progress)` returns the values of all refs in the order in which they were given. A failed task is counted and
    shown; its error is raised where its ref is got.

    Attributes:
        done: items so far; of refs those that are ready. failed: of these, tasks that ended in an error.
        total: number of items; None where that is not known.
    """

    def __init__(
        self, items: Iterable[T], desc: str = "", total: int | None = None, interval: float | None = None
    ) -> None:
        self._desc, self._interval = desc, interval
        self._items = items
        self.refs: list[ObjectRef[Any]] | None = None
        self.done = self.failed = 0
        self.total = total
        self._look()

    def _look(self) -> None:
        """Find out whether the items are refs. Of an iterator the first item is taken."""
        items: Any = self._items
        if isinstance(items, ObjectRefGenerator):
            return
        rest = iter(items)
        first = list(islice(rest, 1))
        if first and isinstance(first[0], ObjectRef):
            self.refs = list(chain(first, rest))
            for ref in self.refs:
                if not isinstance(ref, ObjectRef):
                    raise TypeError(f"progress() got both refs and other items, such as {type(ref)}")
            self.total = len(self.refs)
            return
        if rest is items:
            self._items = chain(first, rest)
        elif self.total is None and hasattr(items, "__len__"):
            self.total = len(items)

    def __iter__(self) -> Iterator[T]:
        if self.refs is not None:
            return self._ready_refs(self.refs, None)
        return self._counted()

    def wait(self, timeout: float | None = None) -> list[ObjectRef[Any]]:
        """Wait until all refs are ready.

        Args:
            timeout: in seconds; None waits without limit.

        Returns:
            The refs, in the order in which they were given.

        Raises:
            TypeError: the items are not refs. GetTimeoutError: not all were ready in time.
        """
        if self.refs is None:
            if not self.total:
                return []
            raise TypeError("the items of this progress are no refs; hint: iterate over it")
        for _ in self._ready_refs(self.refs, timeout):
            pass
        return list(self.refs)

    def __repr__(self) -> str:
        return f"Progress({self.state().text(0.0)})"

    def state(self, first_error: str = "") -> ProgressState:
        """Return what is known now."""

        return ProgressState(self._desc, self.done, self.total, self.failed, first_error)

    def _choose_display(self) -> ProgressDisplay:

        return choose_display(self._interval)

    def _counted(self) -> Iterator[T]:
        display = self._choose_display()
        self.done = 0
        ended = False
        try:
            display.show(self.state())
            for item in self._items:
                yield item
                self.done += 1
                if display.due():
                    display.show(self.state())
            ended = True
        finally:
            display.close(self.state(), ended)

    def _ready_refs(self, refs: list[ObjectRef[Any]], timeout: float | None) -> Iterator[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        queue = ReadyQueue(require_session(), refs)
        display = self._choose_display()
        try:
            self._update(display, queue)
            taken = 0
            while taken < len(refs):
                if deadline is not None and time.monotonic() >= deadline:
                    raise GetTimeoutError(
                        f"{len(refs) - self.done} of {len(refs)} refs are not ready after {timeout:g} s"
                    )
                left = display.interval if deadline is None else min(display.interval, deadline - time.monotonic())
                for ref in queue.take(max(_SHORTEST, left)):
                    taken += 1
                    if display.due():
                        self._update(display, queue)
                    yield ref
                if display.due():
                    self._update(display, queue)
        finally:
            queue.close()
            self.done, self.failed = queue.arrived, queue.failed
            display.close(self.state(_first_error(queue)), self.done == len(refs))

    def _update(self, display: ProgressDisplay, queue: ReadyQueue) -> None:
        self.done, self.failed = queue.arrived, queue.failed
        display.show(self.state())


def progress(
    items: Iterable[T], *, desc: str = "", total: int | None = None, interval: float | None = None
) -> Progress[T]:
    """Iterate with a progress bar: over refs in the order in which they become ready, or over anything else.

    On a terminal the bar moves (with tqdm; output of workers and bars of `tqdm_ray` go on beside it), in a notebook it
    is part of the cell, elsewhere, as in a batch job's log, there is a line now and then. It goes to standard error.
    Refs cost nothing while they are not ready, however many there are: 100,000 are no problem.

    Args:
        items: refs (a list, or an iterator, of which all are taken at once), a generator of refs, or any iterable.
        desc: text before the bar.
        total: number of items, where `items` has no length.
        interval: seconds between two updates; by default 0.1 on a terminal, 0.5 in a notebook, 10 elsewhere.

    Returns:
        An iteration; `list(...)` of refs has them as they became ready, `.wait()` and `get(...)` keep their order.

    Raises:
        TypeError: `items` cannot be iterated over, or has refs and other items.
    """
    return Progress(items, desc, total, interval)


def _first_error(queue: ReadyQueue) -> str:
    """The last line of the first error: `ValueError: 3 is odd`."""
    if not queue.error:
        return ""
    try:
        error = deserialize(queue.error)
        cause = getattr(error, "cause", None) or error
        text = str(cause).strip()
    except Exception:  # it does not unpickle here
        return ""
    return f"{type(cause).__name__}: {text.splitlines()[0]}" if text else type(cause).__name__


# ------------------------------------------------------------ progress display
# How `hpcray.progress` is shown: a bar on a terminal, a part of a notebook's cell, or a line now and then.


_TERMINAL, _NOTEBOOK, _LINES = 0.1, 0.5, 10.0
"""Seconds between two updates."""


class ProgressState(Struct, frozen=True):
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


class _Clock(Struct):
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
