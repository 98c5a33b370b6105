"""Writing objects into our node's store: Create, one memcpy, Seal; and what stores answer to readers."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcray.common.exceptions import LocalRayletDiedError, RaySystemError, store_full_error
from hpcray.common.ids import PUT_INDEX, TASK_BYTES, node_of, raylet_of
from hpcray.core.core_worker.object_table import STORED, Waiter
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import Serialized
from hpcray.runtime.core_worker.context import CoreWorkerContext, current, object_time
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_refs import ObjectRef, defer_release, new_ref

if TYPE_CHECKING:
    import numpy as np

_REPLACE_TIMEOUT = 1.0
"""Seconds for which a write waits until the store has dropped what an earlier attempt of the same task left."""
_REPLACE_RETRY = 0.005
"""Seconds between two attempts to do so."""


class ObjectOccupied(RaySystemError):
    """An earlier life of the object is still being read on this node, so that no other can be written."""


class ObjectWriter:
    """One process's requests to its node's store; answers for objects that it only reads go on to its table.

    Args:
        arena: the store's shared memory.
    """

    def __init__(self, context: CoreWorkerContext, arena: Arena) -> None:
        self._context, self.arena = context, arena
        self._engine = context.engine
        self._raylet = raylet_of(context.node)
        self._creating: dict[bytes, Any] = {}

    def write(self, oid: bytes, blob: bytes | Serialized, base: int | None = None) -> tuple[int, int]:
        """Write and seal a blob in our node's store; the creator's pin is held. Lock not held.

        Args:
            base: offset of its block in the arena, where it has one already.

        Returns:
            Offset and size in the arena.

        Raises:
            ObjectStoreFullError, OutOfDiskError: there is no room, and none came. RaySystemError: another writes it.
        """
        outermost = object_time.begin()
        try:
            return self._write(oid, blob, base)
        finally:
            if outermost:
                object_time.end()

    def _write(self, oid: bytes, blob: bytes | Serialized, base: int | None) -> tuple[int, int]:
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        if base is None:
            base = self.create(oid, size)
        try:
            if isinstance(blob, Serialized):
                self.arena.write_all(base, blob.pieces())
            else:
                self.arena.write(base, blob)
        except BaseException:
            with self._engine.lock:
                self._engine.send(self._raylet, m.Release([oid]))
                self._engine.flush()
            raise
        with self._engine.lock:
            self._engine.send(self._raylet, m.Seal(oid))
        return base, size

    def write_unless_there(self, oid: bytes, blob: bytes) -> int | None:
        """Write and seal a blob as `write` does, but for an object that the store has already. Lock not held.

        Returns:
            Offset in the arena; None where the object was there.

        Raises:
            ObjectStoreFullError, OutOfDiskError: there is no room, and none came.
        """
        answer = self._ask(oid, m.Create(oid, len(blob)))
        if isinstance(answer, m.StoreError):
            if answer.kind == "exists":
                return None
            raise store_full_error(answer.reason)
        return self.write(oid, blob, answer.offset)[0]

    def create(self, oid: bytes, size: int) -> int:
        """Offset of a block for an object that is to be filled and sealed, pinned for us. Lock not held.

        Raises:
            ObjectStoreFullError, OutOfDiskError: there is no room, and none came. RaySystemError: another writes it.
        """
        answer = self._ask(oid, m.Create(oid, size))
        if isinstance(answer, m.StoreError) and answer.kind == "exists":
            answer = self._replace(oid, size)
        if isinstance(answer, m.StoreError):
            raise store_full_error(answer.reason) if answer.kind == "full" else ObjectOccupied(answer.reason)
        offset: int = answer.offset
        return offset

    def request(self, oid: bytes, size: int) -> None:
        """Send the request of `create`, which waits for the answer. Lock not held."""
        engine = self._engine
        with engine.lock:
            self._context.check_alive()
            self._creating[oid] = Waiter()
            engine.send(self._raylet, m.Create(oid, size))
            engine.flush()
            engine.listen()

    def withdraw(self, oid: bytes) -> None:
        """Give up a request that `create` has not waited for (lock held)."""
        if isinstance(self._creating.pop(oid, None), m.Created):
            self._engine.send(self._raylet, m.Release([oid]))

    def _replace(self, oid: bytes, size: int) -> Any:
        """Created or StoreError, after what an earlier attempt of the same task left is gone.

        The attempt died before its reply, so no ref to what it left exists; and that need not be what we return.
        """
        engine = self._engine
        deadline = monotonic() + _REPLACE_TIMEOUT
        while True:
            with engine.lock:
                engine.send(self._raylet, m.Free([oid], []))
            answer = self._ask(oid, m.Create(oid, size))
            if not isinstance(answer, m.StoreError) or answer.kind != "exists" or monotonic() > deadline:
                return answer
            with engine.lock:
                engine.wait(Waiter(), monotonic() + _REPLACE_RETRY)  # its process has not been found dead yet

    def _ask(self, oid: bytes, request: m.Create) -> Any:
        """Created or StoreError, in answer to a request about an object that we are to write."""
        engine = self._engine
        with engine.lock:
            self._context.check_alive()
            self._context.drain()
            waiter = self._creating.get(oid)
            if waiter is None:  # it was not requested before
                waiter = self._creating[oid] = Waiter()
                engine.send(self._raylet, request)
            try:
                if isinstance(waiter, Waiter):
                    engine.wait(waiter)
            except BaseException:
                # The answer may have come just before the interrupt; one that comes later is dealt with in `_answer`.
                if isinstance(self._creating.pop(oid), m.Created):
                    engine.send(self._raylet, m.Release([oid]))
                    engine.flush()
                raise
            answer = self._creating.pop(oid)
        if isinstance(answer, Waiter):
            raise LocalRayletDiedError(self._context.dead or "the raylet is gone")
        return answer

    def on_created(self, src: bytes, msg: m.Created) -> None:
        """The store has allocated a block (lock held)."""
        self._answer(msg.id, msg)

    def _answer(self, oid: bytes, answer: Any) -> None:
        waiter = self._creating.get(oid)
        if isinstance(waiter, Waiter):
            self._creating[oid] = answer
            waiter.count = 0
            self._engine.notify(waiter)
        elif isinstance(answer, m.Created):
            # The thread that requested it was interrupted meanwhile.
            self._engine.send(self._raylet, m.Release([oid]))

    def _awaited(self, src: bytes, oid: bytes) -> bool:
        """Return False for the late answer of a store whose connection broke: another store is used now."""
        return src == self._raylet or self._context.table.pins.awaits(oid, node_of(src))

    def on_opened(self, src: bytes, msg: m.Opened) -> None:
        if self._awaited(src, msg.id):
            self._context.table.on_opened(msg)

    def on_store_error(self, src: bytes, msg: m.StoreError) -> None:
        if src == self._raylet and msg.id in self._creating:
            self._answer(msg.id, msg)
        elif self._awaited(src, msg.id):
            self._context.table.on_store_error(msg)

    def fail(self) -> None:
        """Our raylet is gone: whoever waits for it wakes (lock held)."""
        for waiter in self._creating.values():
            if isinstance(waiter, Waiter):
                waiter.count = 0
                self._engine.notify(waiter)


class ObjectReplicator:
    """Copies the objects of one process to further nodes."""

    def __init__(self, context: CoreWorkerContext, gcs: GcsClient) -> None:
        self._context = context
        self._gcs = gcs

    def replicate(self, ref: ObjectRef[Any], copies: int) -> None:
        """Have an object that was just put kept on `copies` nodes, ours included, as far as nodes can take it."""
        context = self._context
        with context.engine.lock:
            if context.table.entries[ref._id].state != STORED:
                return  # it lives in this process, and with it
        others = [row["Index"] for row in self._gcs.nodes() if row["Alive"] and row["Index"] != context.node]
        start = int.from_bytes(ref._id[:TASK_BYTES], "big") % max(1, len(others))
        made, problem = 1, "there is no other node"
        for node in others[start:] + others[:start]:
            if made == copies:
                break
            problem = self._copy_to(ref._id, node)
            made += not problem
        if made < copies and context.warn_once("replicas"):
            text = f"hpcray: put(replicas={copies}): only {made} of {copies} copies could be made: {problem}"
            print(text, file=sys.stderr, flush=True)

    def _copy_to(self, oid: bytes, node: int) -> str:
        """Have `node` keep a copy; why it does not, "" when it does."""
        context, table = self._context, self._context.table
        waiter = Waiter()
        with context.engine.lock:
            try:
                table.recovery.replicate(oid, node, waiter)
                context.block(waiter, None)
            finally:  # an interrupt may come before the answer
                problem = table.replicas.take_failure(oid, node)
        return problem


class ObjectBuffer:
    """An object that is built where it stays: an array in our node's store, to be filled, then sealed.

    Until the seal no other process knows of the object. Its block is pinned by the writer's views, as any block is by
    its readers' (`ObjectPins.begin_write`), so an array that is dropped, however that comes about, gives it back.

    Args:
        dtype: without Python objects in it.
        order: "C" or "F".

    Raises:
        ObjectStoreFullError: there is no room, and none came in time.

    Attributes:
        array: writable, with whatever the memory held before; None once it was sealed or given up.
    """

    def __init__(
        self, context: CoreWorkerContext, writer: ObjectWriter, shape: tuple[int, ...], dtype: np.dtype[Any], order: str
    ) -> None:
        self.array: Any = None
        self._context = context
        self._arena = writer.arena
        self._layout = _Layout(shape, dtype, order)
        content = ReservedContent(self._layout.nbytes)
        self._blob = Serialized(pickle.dumps(self._layout, 5, buffer_callback=lambda _: None), [content])
        with context.engine.lock:
            self._id = context.next_task_id() + PUT_INDEX
        self._offset = writer.create(self._id, self._blob.size)
        viewed = False
        try:
            view = writer.arena.filled_view(self._offset, self._blob.size, partial(defer_release, (self._id,)))
            with context.engine.lock:
                context.table.pins.begin_write(self._id, self._offset, self._blob.size)
                viewed = True
            self.array = _array(view[: content.nbytes], shape, dtype, order)
        except BaseException:
            if not viewed:
                with context.engine.lock:
                    context.engine.send(raylet_of(context.node), m.Release([self._id]))
                    context.engine.flush()
            raise

    def abandon(self) -> None:
        """Give the object up; its block goes with the last view."""
        self.array = None

    def seal(self) -> ObjectRef[Any]:
        """End the writing.

        Raises:
            ValueError: it was sealed or given up before. RaySystemError: the session is over; nothing was sealed.
        """
        context = self._context
        with context.engine.lock:
            array, self.array = self.array, None
        if array is None:
            raise ValueError("this buffer was sealed or given up before; hint: create another one")
        if current.process is not context:
            raise RaySystemError("this buffer is of a session that is over; hint: create another one")
        context.check_alive()
        self._blob.write_end(lambda at, piece: self._arena.write(self._offset + at, piece))
        array.flags.writeable = False
        with context.engine.lock:
            context.check_alive()
            context.engine.send(raylet_of(context.node), m.Seal(self._id))
            context.table.put_in_place(self._id, self._blob.size)
            context.engine.flush()
        return new_ref(self._id)


class ReservedContent:
    """Stands for a buffer of a `Serialized` that is filled in place.

    Args:
        nbytes: its bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Layout:
    """Pickles as an array around the pickle's only buffer."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], order: str) -> None:
        self._args = shape, dtype, order
        self.nbytes = dtype.itemsize
        for length in shape:
            self.nbytes *= length

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _array, (pickle.PickleBuffer(b""), *self._args)


def _array(buffer: Any, shape: tuple[int, ...], dtype: np.dtype[Any], order: Any) -> Any:
    import numpy as np

    return np.ndarray(shape, dtype, buffer, order=order)
