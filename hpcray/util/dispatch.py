"""Futures over tasks and actor calls, a limited number of which is under way at a time."""

from __future__ import annotations

import concurrent.futures
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from hpcray.api.objects import cancel, wait
from hpcray.runtime.refs import ObjectRef, current

_GLANCE = 0.02
"""Seconds between two looks at a future whose call has ended and whose result is about to be told."""


class DispatchFuture(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future` that can be waited for inside of a task: its CPU is lent meanwhile."""

    _dispatcher: Dispatcher | None = None

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._lend(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._lend(timeout))

    def _lend(self, timeout: float | None) -> float | None:
        dispatcher = self._dispatcher
        return timeout if dispatcher is None or self.done() else dispatcher.lend(self.done, timeout)


class Job:
    """What is to be run, and where its outcome goes."""

    __slots__ = ("call", "future", "read")

    def __init__(self, call: tuple[Any, ...], read: Callable[[Any], Any] | None = None) -> None:
        """
        Args:
            call: what `start` of the dispatcher makes the call from.
            read: turns the call's value into the future's; it may raise.
        """
        self.call, self.read = call, read
        self.future = DispatchFuture()


class Dispatcher(ABC):
    """Starts queued jobs in their order, at most `width` at a time. Until a job starts its future can be cancelled."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._queue: deque[Job] = deque()
        self._refs: dict[Job, ObjectRef[Any]] = {}
        self._open = 0
        self._filling = False
        self._closed = False
        # Reentrant: the callback of a future that is done already is called at once.
        self._idle = threading.Condition(threading.RLock())

    @abstractmethod
    def start(self, job: Job) -> ObjectRef[Any]:
        """Make the call of a job (lock held)."""

    def ended(self, job: Job, error: BaseException | None) -> None:  # noqa: B027 - tasks need nothing
        """The call of a job has ended, with an error or without; called before the next one starts (lock held)."""

    def submit(self, job: Job) -> DispatchFuture:
        """Queue a job.

        Raises:
            RuntimeError: closed.
        """
        job.future._dispatcher = self
        with self._idle:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._open += 1
            self._queue.append(job)
            self._fill()
        return job.future

    def close(self) -> None:
        """Take no more jobs."""
        with self._idle:
            self._closed = True

    def withdraw(self) -> None:
        """Cancel what has not started."""
        with self._idle:
            jobs, self._queue = list(self._queue), deque()
        for job in jobs:
            job.future.cancel()
            if not job.future.set_running_or_notify_cancel():
                self._settled()

    def cancel_started(self) -> None:
        """Ask the tasks that are under way to stop."""
        for ref in self._started():
            cancel(ref)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all jobs have ended and their futures are told; False if they have not in time."""
        deadline = None if timeout is None else monotonic() + timeout
        self.lend(lambda: not self._open, timeout)
        with self._idle:
            return self._idle.wait_for(lambda: not self._open, _left(deadline))

    def lend(self, done: Callable[[], bool], timeout: float | None) -> float | None:
        """In a task or actor: wait as `wait` does, so that its CPU is lent, until something is done or the timeout.

        Returns:
            How many seconds are left for waiting in another way: all of them in a driver.
        """
        if current.worker is None:
            return timeout
        deadline = None if timeout is None else monotonic() + timeout
        while not done() and (deadline is None or monotonic() < deadline):
            refs = self._started()
            if refs:
                wait(refs, num_returns=1, timeout=_left(deadline), fetch_local=False)
            with self._idle:  # the thread that tells futures needs a moment
                self._idle.wait_for(done, _GLANCE)
        return _left(deadline)

    def _started(self) -> list[ObjectRef[Any]]:
        with self._idle:
            return list(self._refs.values())

    def _fill(self) -> None:
        with self._idle:
            if self._filling:
                return
            self._filling = True
            try:
                while self._queue and len(self._refs) < self.width:
                    self._launch(self._queue.popleft())
            finally:
                self._filling = False

    def _launch(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            self._settled()
            return
        try:
            ref = self._refs[job] = self.start(job)
            outcome = ref.future()
        except Exception as error:  # the arguments do not fit or do not pickle, or the session has ended
            self._tell(job, None, self._after(job, error))
            return
        outcome.add_done_callback(lambda outcome: self._on_end(job, outcome))

    def _on_end(self, job: Job, outcome: concurrent.futures.Future[Any]) -> None:
        error = outcome.exception()
        value = None if error else outcome.result()
        error = self._after(job, error)
        self._fill()
        self._tell(job, value, error)

    def _after(self, job: Job, error: BaseException | None) -> BaseException | None:
        with self._idle:
            self._refs.pop(job, None)
            try:
                self.ended(job, error)
            except Exception as failure:  # no new actor can be made: the session has ended
                return error or failure
        return error

    def _tell(self, job: Job, value: Any, error: BaseException | None) -> None:
        try:
            if error is None and job.read is not None:
                value = job.read(value)
        except Exception as failure:
            error = failure
        try:
            if error is None:
                job.future.set_result(value)
            else:
                job.future.set_exception(error)
        finally:
            self._settled()

    def _settled(self) -> None:
        with self._idle:
            self._open -= 1
            self._idle.notify_all()


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())
