"""Objects that are built where they stay: an array in our node's store, to be filled, then sealed.

Until the seal nobody else knows of the object. Its block is pinned by the writer's views, as any block is by its
readers' (`Pins.lingering`), so an array that is dropped, however that comes about, gives it back.
"""

from __future__ import annotations

import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import RaySystemError
from hpcray.base.ids import PUT_INDEX, raylet_of
from hpcray.core.owner.table import Mapping
from hpcray.runtime.process import Process
from hpcray.runtime.refs import ObjectRef, current, died, new_ref
from hpcray.wire import messages as m
from hpcray.wire.serialization import Serialized

if TYPE_CHECKING:
    import numpy as np


class InPlace:
    """One object in the making.

    Args:
        process: who makes it.
        dtype: without Python objects in it.
        order: "C" or "F".

    Raises:
        ObjectStoreFullError: there is no room, and none came in time.

    Attributes:
        array: writable, with whatever the memory held before; None once it was sealed or given up.
    """

    def __init__(self, process: Process, shape: tuple[int, ...], dtype: np.dtype[Any], order: str) -> None:
        self.array: Any = None
        self._process = process
        self._layout = _Layout(shape, dtype, order)
        content = _Content(self._layout.nbytes)
        self._blob = Serialized(pickle.dumps(self._layout, 5, buffer_callback=lambda _: None), [content])
        with process.engine.lock:
            self._id = process.next_task_id() + PUT_INDEX
        self._offset = process.store.create(self._id, self._blob.size)
        mapping = Mapping(self._offset, self._blob.size, process.node)
        try:
            view = process.arena.filled_view(self._offset, self._blob.size, partial(died, (self._id,)))
            with process.engine.lock:
                mapping.views = 1
                process.table.pins.lingering[self._id] = mapping
            self.array = _array(view[: content.nbytes], shape, dtype, order)
        except BaseException:
            if not mapping.views:
                with process.engine.lock:
                    process.engine.send(raylet_of(process.node), m.Release([self._id]))
                    process.engine.flush()
            raise

    def abandon(self) -> None:
        """Give the object up; its block goes with the last view."""
        self.array = None

    def seal(self) -> ObjectRef[Any]:
        """End the writing.

        Raises:
            ValueError: it was sealed or given up before. RaySystemError: the session is over; nothing was sealed.
        """
        process = self._process
        with process.engine.lock:
            array, self.array = self.array, None
        if array is None:
            raise ValueError("this buffer was sealed or given up before; hint: create another one")
        if current.process is not process:
            raise RaySystemError("this buffer is of a session that is over; hint: create another one")
        process.check_alive()
        self._blob.write_end(lambda at, piece: process.arena.write(self._offset + at, piece))
        array.flags.writeable = False
        with process.engine.lock:
            process.check_alive()
            mapping = process.table.pins.lingering.pop(self._id)
            entry = process.table.create(self._id)
            entry.local = 1
            process.engine.send(raylet_of(process.node), m.Seal(self._id))
            process.table.created_here(self._id, self._offset, self._blob.size, process.node, None)
            assert entry.mapping is not None
            entry.mapping.views = mapping.views  # the writer's, until they die
            process.engine.flush()
        return new_ref(self._id)


class _Content:
    """Stands for a buffer that is filled in place."""

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
