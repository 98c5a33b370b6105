"""`hpcray.progress`: how far a number of refs, or any iteration, has come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from hpcray.api.objects import WaitableRefs
from hpcray.api.session import require_session
from hpcray.common.exceptions import GetTimeoutError
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.core_worker.ready_queue import ReadyQueue
from hpcray.runtime.core_worker.worker_output import RAY_TQDM_MAGIC, line_filters

if TYPE_CHECKING:
    from hpcray.progress_bars.progress_display import ProgressDisplay, ProgressState

T = TypeVar("T")

_SHORTEST = 0.01
"""Seconds that a look for ready refs may take at least."""


def _show_bar(line: str) -> str:
    """Show the bar that a line of a worker is about, in a driver that may have made none itself."""
    from hpcray.experimental.tqdm_ray import show_line  # needed by those who show a bar only

    return show_line(line)


line_filters[RAY_TQDM_MAGIC] = _show_bar


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
        from hpcray.progress_bars.progress_display import ProgressState

        return ProgressState(self._desc, self.done, self.total, self.failed, first_error)

    def _choose_display(self) -> ProgressDisplay:
        from hpcray.progress_bars.progress_display import choose_display  # imported by those who show progress only

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
