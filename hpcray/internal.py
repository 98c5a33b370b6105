"""Objects created in place and freed before their last ref is gone. `free` is Ray's, `create` is hpcray's own."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcray.api.session import require_session
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.core_worker.object_writer import ObjectBuffer

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Buffer", "create", "free"]

_MAX_BYTES = 1 << 62


class Buffer:
    """An array in this node's object store that the program fills before it becomes an object; `create` makes it.

    As a context manager, a buffer that is not sealed at the end of the block is abandoned.
    """

    def __init__(self, inner: ObjectBuffer) -> None:
        self._inner = inner

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The writable NumPy array, with undefined content at first.

        Raises:
            ValueError: the buffer was sealed or abandoned.
        """
        array: np.ndarray[Any, Any] | None = self._inner.array
        if array is None:
            raise ValueError("this buffer was sealed or abandoned; hint: hpcray.get its ref, or create another one")
        return array

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(self.array.nbytes)

    def seal(self) -> ObjectRef[Any]:
        """Make the array an object, without a copy. `get` of the ref returns a read-only array.

        The array becomes read-only. Slices taken before stay writable; do not write to them, since other processes may
        read the object now.

        Returns:
            The ref of the object.

        Raises:
            ValueError: the buffer was sealed or abandoned. RaySystemError: the session has ended; the content is lost.
        """
        return self._inner.seal()

    def abandon(self) -> None:
        """Discard the buffer. Its memory is freed with the last array that refers to it."""
        self._inner.abandon()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def create(shape: int | Sequence[int], dtype: Any = "uint8", order: str = "C") -> Buffer:
    """Allocate an array in this node's object store, to be filled in place and become an object without a copy.

        with hpcray.internal.create((1000, 1000), "float32") as buffer:
            read_into(buffer.array)
            ref = buffer.seal()

    Args:
        shape: shape of the array; without a dtype, its size in bytes.
        dtype: any dtype of NumPy without Python objects.
        order: memory order, "C" or "F".

    Raises:
        TypeError: `shape` or `dtype` is not valid, or the dtype holds Python objects.
        ValueError: a length is negative, the array is too big, or the order is unknown.
        ObjectStoreFullError: no room became free within ten seconds, or the array is larger than the store.
    """
    import numpy as np

    lengths = tuple(map(operator.index, shape)) if isinstance(shape, Sequence) else (operator.index(shape),)
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise TypeError(f"dtype {kind} holds Python objects, which cannot lie in shared memory; hint: use hpcray.put")
    if order not in ("C", "F"):
        raise ValueError(f"order must be 'C' or 'F', not {order!r}")
    size = kind.itemsize
    for length in lengths:
        if length < 0:
            raise ValueError(f"negative lengths are not allowed: shape {lengths}")
        size *= length
    if size > _MAX_BYTES:
        raise ValueError(f"an array of shape {lengths} and dtype {kind} is too big: {size} bytes")
    process = current.process or require_session()
    return Buffer(ObjectBuffer(process, process.stores.writer, lengths, kind, order))


def free(object_refs: ObjectRef[Any] | Sequence[ObjectRef[Any]], local_only: bool = False) -> None:
    """Free the values of refs while refs still exist. Reading them raises `ObjectFreedError` afterwards.

    Views of a value that exist stay valid, and its memory is freed with the last of them. A running task continues, and
    its result is dropped. In other processes with a ref the error may be `ObjectLostError`.

    Args:
        object_refs: a ref or a list of refs.
        local_only: free only the copies on this node. Copies elsewhere can still be read; where none is left, the
            object is reconstructed if possible.

    Raises:
        TypeError: `object_refs` is neither a ref nor a list of refs; nothing was freed.
    """
    refs = [object_refs] if isinstance(object_refs, ObjectRef) else object_refs
    if not isinstance(refs, list):
        raise TypeError(f"free() expects a list of ObjectRef, got {type(object_refs)}")
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"Attempting to call `free` on the value {ref}, which is not an ray.ObjectRef.")
    (current.process or require_session()).diagnostics.free(refs, local_only)
