"""Writing objects into our node's store: Create, one memcpy, Seal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import LocalRayletDiedError, ObjectStoreFullError, RaySystemError
from hpcray.base.ids import raylet_of
from hpcray.core.owner.table import Waiter
from hpcray.wire import messages as m
from hpcray.wire.serialization import Serialized

if TYPE_CHECKING:
    from hpcray.runtime.process import Process


class StoreClient:
    """One process's requests to its node's store; answers for objects that it only reads go on to its table."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._engine = process.engine
        self._raylet = raylet_of(process.node)
        self._creating: dict[bytes, Any] = {}

    def handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        """Message handlers, for the engine."""
        return {
            m.Created: lambda _, msg: self._answer(msg.id, msg),
            m.Opened: lambda _, msg: self._on_opened(msg),
            m.StoreError: lambda _, msg: self._on_error(msg),
        }

    def write(self, oid: bytes, blob: bytes | Serialized) -> tuple[int, int]:
        """Write and seal a blob in our node's store; the creator's pin is held. Lock not held.

        Returns:
            Offset and size in the arena.

        Raises:
            ObjectStoreFullError: there is no room, and none came in time.
        """
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        answer = self._ask(oid, m.Create(oid, size))
        while isinstance(answer, m.StoreError) and answer.kind == "exists":
            # An earlier attempt of the same task was here. If it got as far as sealing, its bytes are as good as ours.
            answer = self._ask(oid, m.Open(oid, size, []))
            if isinstance(answer, m.Opened):
                return answer.offset, answer.size
            answer = self._ask(oid, m.Create(oid, size))
        if isinstance(answer, m.StoreError):
            raise ObjectStoreFullError(answer.reason) if answer.kind == "full" else RaySystemError(answer.reason)
        base: int = answer.offset
        try:
            if isinstance(blob, Serialized):
                blob.write(lambda at, piece: self._process.arena.write(base + at, piece))
            else:
                self._process.arena.write(base, blob)
        except BaseException:
            with self._engine.lock:
                self._engine.send(self._raylet, m.Release([oid]))
                self._engine.flush()
            raise
        with self._engine.lock:
            self._engine.send(self._raylet, m.Seal(oid))
        return base, size

    def _ask(self, oid: bytes, request: m.Create | m.Open) -> Any:
        """Created, Opened or StoreError, in answer to a request about an object that we are to write."""
        engine = self._engine
        with engine.lock:
            self._process.check_alive()
            self._process.drain()
            waiter = self._creating[oid] = Waiter()
            engine.send(self._raylet, request)
            try:
                engine.wait(waiter)
            finally:
                answer = self._creating.pop(oid)
        if isinstance(answer, Waiter):
            raise LocalRayletDiedError(self._process.dead or "the raylet is gone")
        return answer

    def _answer(self, oid: bytes, answer: Any) -> None:
        waiter = self._creating.get(oid)
        if isinstance(waiter, Waiter):
            self._creating[oid] = answer
            waiter.count = 0
            self._engine.notify(waiter)
        elif isinstance(answer, m.Created):
            # Whoever asked was interrupted meanwhile.
            self._engine.send(self._raylet, m.Release([oid]))

    def _on_opened(self, msg: m.Opened) -> None:
        if msg.id in self._creating:
            self._answer(msg.id, msg)
        else:
            self._process.table.on_opened(msg)

    def _on_error(self, msg: m.StoreError) -> None:
        if msg.id in self._creating:
            self._answer(msg.id, msg)
        else:
            self._process.table.on_store_error(msg)

    def fail(self) -> None:
        """Our raylet is gone: whoever waits for it wakes (lock held)."""
        for waiter in self._creating.values():
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)
