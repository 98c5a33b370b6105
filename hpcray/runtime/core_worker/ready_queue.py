"""Refs in the order in which their objects become ready. Each costs its own share, however many others wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

from hpcray.core.core_worker.object_table import INLINE, Waiter
from hpcray.protocol.messages.objects import ERROR
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_reader import unknown_ref
from hpcray.runtime.core_worker.object_refs import ObjectRef


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
        self._pending: dict[Waiter, bytes] = {}
        self._sleeper: Waiter | None = None
        self.arrived = self.failed = 0
        self.error = b""
        table, engine = process.table, process.engine
        with engine.lock:
            process.check_alive()
            process.drain()
            for ref in refs:
                if ref._id not in table.entries:
                    self._withdraw()
                    raise unknown_ref(ref._id)
                waiter = Waiter()
                waiter.callback = partial(self._arrive, ref, waiter)
                self._pending[waiter] = ref._id
                if table.wait_ready(ref._id, waiter):
                    self._arrive(ref, waiter)
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
        return list(self._pending.values())

    def close(self) -> None:
        """Wait for nothing any more."""
        with self._process.engine.lock:
            self._withdraw()
            if self in self._process.reader.ready_queues:
                self._process.reader.ready_queues.remove(self)

    def _withdraw(self) -> None:
        for waiter, oid in self._pending.items():
            self._process.table.remove_waiter((oid,), waiter)
        self._pending.clear()

    def _arrive(self, ref: ObjectRef[Any], waiter: Waiter) -> None:
        """An object is ready (lock held)."""
        del self._pending[waiter]
        self._ready.append(ref)
        self.arrived += 1
        entry = self._process.table.entries.get(ref._id)
        if entry is not None and entry.state == INLINE and entry.value[-1] == ERROR:
            self.failed += 1
            self.error = self.error or entry.value
        if self._sleeper is not None and self._sleeper.count > 0:
            self._sleeper.count = 0
            self._process.engine.notify(self._sleeper)
