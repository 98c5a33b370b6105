"""Threads that copy memory while the thread that gave them the work goes on with other things."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar


class Job(Protocol):
    """What is to be copied, by addresses in this process."""

    target: int
    source: int
    size: int


J = TypeVar("J", bound=Job)


def copy(job: Job) -> None:
    """Do it here. Other threads run meanwhile."""
    ctypes.memmove(job.target, job.source, job.size)


class Copiers(Generic[J]):
    """Up to `most` threads. They start when there is work for them, and stay. All calls come from one thread.

    Args:
        most: threads, at least one.

    Attributes:
        outstanding: jobs that were started and not yet seen in `finished`.
        most: as given.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.outstanding = 0
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._todo: SimpleQueue[J | None] = SimpleQueue()
        self._done: deque[J] = deque()
        self._threads: list[threading.Thread] = []

    def fileno(self) -> int:
        """Turns readable when a job has ended; call `woke` then."""
        return self._fd

    def woke(self) -> None:
        """Make the descriptor unreadable until the next job ends."""
        try:
            os.eventfd_read(self._fd)
        except BlockingIOError:
            pass

    def start(self, job: J) -> None:
        """Have it copied. Its memory must stay until it was in `finished`, or after `close`."""
        self.outstanding += 1
        if len(self._threads) < min(self.most, self.outstanding):
            thread = threading.Thread(target=self._run, name="hpcray-copier", daemon=True)
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # a limit on processes or threads
                if not self._threads:
                    copy(job)
                    self._end(job)
                    return
        self._todo.put(job)

    def finished(self) -> list[J]:
        """The jobs that have ended since it was asked last."""
        ended: list[J] = []
        while self._done:
            ended.append(self._done.popleft())
        self.outstanding -= len(ended)
        return ended

    def close(self) -> None:
        """Wait for the jobs under way, and end the threads."""
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            copy(job)
            self._end(job)
            job = None  # while it waits, it holds nothing

    def _end(self, job: J) -> None:
        self._done.append(job)
        os.eventfd_write(self._fd, 1)
