"""The thread through which a process reads and writes its directory of kept results, so that no file system, however
slow or full, can hold up a job: what takes too long, or fails, turns durability off, and is reported once."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from hpcray.durable.result_store import ResultStore

T = TypeVar("T")
_SYNC_PERIOD = 1.0
"""Seconds after which what was written is on the disk, at the latest."""
_GROUP = 0.02
"""Seconds between two writes; what comes in between is written together."""
_MOST_WAITING = 64 << 20
"""Bytes of records that may wait to be written."""


def state_directory(configured: str) -> str:
    """The directory of kept results: that of the setting, or one in the user's home."""
    if configured:
        return os.path.abspath(os.path.expanduser(configured))
    home = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(home, "hpcray", "durable")


class ResultIo:
    """Reads and writes kept results for one process.

    Args:
        path: of the directory. node: names the packs of this node.
        timeout: seconds that a call may take. complain: called, once, with why durability is off.

    Attributes:
        off: why nothing is read or written any more; "" while all is well.
    """

    def __init__(self, path: str, node: str, timeout: float, complain: Callable[[str], object]) -> None:
        self.path = path
        self.off = ""
        self._node, self._timeout, self._complain = node, timeout, complain
        self._store: ResultStore | None = None
        self._work: deque[tuple[Callable[[ResultStore], Any], _Answer | None]] = deque()
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._wake = threading.Event()
        self._hurry = threading.Event()
        self._progress = threading.Condition()
        self._given = self._done = 0
        self._start = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._closing = False

    @property
    def store(self) -> ResultStore | None:
        """The directory, for lookups in memory; None before it was opened, and where it cannot be."""
        return self._store

    def call(self, what: Callable[[ResultStore], T], extra: float = 0.0) -> T | None:
        """Call a function with the directory in the thread, and return its result; None where durability is off.

        Args:
            extra: seconds that it may take beyond the timeout.
        """
        if self.off or os.getpid() != self._pid:
            return None
        answer = _Answer()
        self._work.append((what, answer))
        self._hurry.set()
        self._notify()
        if not answer.done.wait(self._timeout + extra):
            answer.abandoned = True
            self.turn_off(f"{self.path} has not answered for {self._timeout + extra:g} s")
            return None
        value: T = answer.value
        return value

    def post(self, what: Callable[[ResultStore], Any]) -> None:
        """Call a function with the directory soon."""
        if not self.off and os.getpid() == self._pid:
            self._work.append((what, None))
            self._notify()

    def write(self, record: bytes) -> None:
        """Write a record soon, together with others."""
        if self.off or os.getpid() != self._pid:
            return
        self._records.append(record)
        self._given += 1
        self._bytes += len(record)
        if self._bytes > _MOST_WAITING:
            self.turn_off(f"{self.path} is too slow: {self._bytes >> 20} MiB wait to be written")
            return
        self._notify()

    def written(self, timeout: float) -> bool:
        """Wait until all records are with the file system; False if it takes longer."""
        if self.off or os.getpid() != self._pid:
            return True
        wanted = self._given
        self._hurry.set()
        with self._progress:
            return self._progress.wait_for(lambda: self._done >= wanted or bool(self.off), timeout)

    def close(self, timeout: float = 2.0) -> None:
        """Write what waits, and end the thread."""
        self._closing = True
        if self._thread is not None and os.getpid() == self._pid:
            self._hurry.set()
            self._wake.set()
            self._thread.join(timeout)

    def turn_off(self, why: str) -> None:
        """Go on as if nothing were durable."""
        if not self.off:
            self.off = why
            self._records.clear()
            self._bytes = 0
            with self._progress:
                self._progress.notify_all()
            self._complain(why)

    def _notify(self) -> None:
        if self._thread is None:
            with self._start:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hpcray-durable", daemon=True)
                    self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        synced = time.monotonic()
        dirty = False
        while True:
            limit = 1.0 if self._closing else None
            self._wake.wait(max(0.0, synced + _SYNC_PERIOD - time.monotonic()) if dirty else limit)
            self._wake.clear()
            try:
                store = self._opened()
                while self._work:
                    what, answer = self._work.popleft()
                    try:
                        value = what(store)
                        if answer is not None:
                            answer.value = value
                    finally:
                        if answer is not None:
                            answer.done.set()
                    if answer is not None and answer.abandoned:
                        return
                records = []
                while self._records:
                    records.append(self._records.popleft())
                if records:
                    store.append(records)
                    self._bytes -= sum(map(len, records))
                    dirty = True
                    with self._progress:
                        self._done += len(records)
                        self._progress.notify_all()
                if dirty and (self._closing or time.monotonic() - synced >= _SYNC_PERIOD):
                    store.sync()
                    synced, dirty = time.monotonic(), False
            except OSError as error:
                self.turn_off(str(error) if error.filename else f"{self.path}: {error.strerror or error}")
            except Exception as error:  # what is broken there must not end the job
                self.turn_off(f"{self.path}: {type(error).__name__}: {error}")
            if self.off:
                while self._work:
                    _, answer = self._work.popleft()
                    if answer is not None:
                        answer.done.set()
                return
            if not self._work and not self._records:
                if self._closing:
                    return
                if records:
                    self._hurry.clear()
                    self._hurry.wait(_GROUP)

    def _opened(self) -> ResultStore:
        if self._store is None:
            store = ResultStore(self.path, self._node)
            store.refresh()
            self._store = store
        return self._store


class _Answer:
    def __init__(self) -> None:
        self.value: Any = None
        self.done = threading.Event()
        self.abandoned = False
