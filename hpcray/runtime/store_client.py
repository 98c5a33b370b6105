"""Writing objects into our node's store: Create, one memcpy, Seal; and what stores answer to readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import LocalRayletDiedError, RaySystemError
from hpcray.base.fullness import store_full
from hpcray.base.ids import node_of, raylet_of
from hpcray.core.owner.table import Waiter
from hpcray.runtime.engine import monotonic
from hpcray.wire import messages as m
from hpcray.wire.serialization import Serialized

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_LEFT_BEHIND = 1.0
_AGAIN = 0.005


class Occupied(RaySystemError):
    """An earlier life of the object is still being read on this node, so that no other can be written."""


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
            m.Opened: self._on_opened,
            m.StoreError: self._on_error,
            m.Kept: lambda src, msg: self._process.table.on_replica(msg.id, node_of(src), msg.reason),
            m.OnDisk: lambda _, msg: self._process.table.on_disk(msg),
            m.Unpin: lambda src, msg: self._process.table.pins.give_up(msg.size, node_of(src)),
            m.Welcome: lambda src, msg: self._process.visiting.on_welcome(src, msg),
        }

    def write(self, oid: bytes, blob: bytes | Serialized) -> tuple[int, int]:
        """Write and seal a blob in our node's store; the creator's pin is held. Lock not held.

        Returns:
            Offset and size in the arena.

        Raises:
            ObjectStoreFullError, OutOfDiskError: there is no room, and none came. RaySystemError: another writes it.
        """
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        base = self.create(oid, size)
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

    def create(self, oid: bytes, size: int) -> int:
        """Offset of a block for an object that is to be filled and sealed, pinned for us. Lock not held.

        Raises:
            ObjectStoreFullError, OutOfDiskError: there is no room, and none came. RaySystemError: another writes it.
        """
        answer = self._ask(oid, m.Create(oid, size))
        if isinstance(answer, m.StoreError) and answer.kind == "exists":
            answer = self._replace(oid, size)
        if isinstance(answer, m.StoreError):
            raise store_full(answer.reason) if answer.kind == "full" else Occupied(answer.reason)
        offset: int = answer.offset
        return offset

    def _replace(self, oid: bytes, size: int) -> Any:
        """Created or StoreError, after what an earlier attempt of the same task left is gone.

        It died before its reply, so nobody refers to what it left; and that need not be what we return.
        """
        engine = self._engine
        deadline = monotonic() + _LEFT_BEHIND
        while True:
            with engine.lock:
                engine.send(self._raylet, m.Free([oid], []))
            answer = self._ask(oid, m.Create(oid, size))
            if not isinstance(answer, m.StoreError) or answer.kind != "exists" or monotonic() > deadline:
                return answer
            with engine.lock:
                engine.wait(Waiter(), monotonic() + _AGAIN)  # its process has not been found dead yet

    def _ask(self, oid: bytes, request: m.Create) -> Any:
        """Created or StoreError, in answer to a request about an object that we are to write."""
        engine = self._engine
        with engine.lock:
            self._process.check_alive()
            self._process.drain()
            waiter = self._creating[oid] = Waiter()
            engine.send(self._raylet, request)
            try:
                engine.wait(waiter)
            except BaseException:
                # The answer may have come just before the interrupt; one that comes later is dealt with in `_answer`.
                if isinstance(self._creating.pop(oid), m.Created):
                    engine.send(self._raylet, m.Release([oid]))
                    engine.flush()
                raise
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

    def _awaited(self, src: bytes, oid: bytes) -> bool:
        """Whether this store's answer counts: of a neighbour we may have lost touch with, and asked another one."""
        return src == self._raylet or self._process.table.pins.asks(oid, node_of(src))

    def _on_opened(self, src: bytes, msg: m.Opened) -> None:
        if self._awaited(src, msg.id):
            self._process.table.on_opened(msg)

    def _on_error(self, src: bytes, msg: m.StoreError) -> None:
        if src == self._raylet and msg.id in self._creating:
            self._answer(msg.id, msg)
        elif self._awaited(src, msg.id):
            self._process.table.on_store_error(msg)

    def fail(self) -> None:
        """Our raylet is gone: whoever waits for it wakes (lock held)."""
        for waiter in self._creating.values():
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)
