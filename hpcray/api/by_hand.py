"""What a program does to the object store by hand: `hpcray.internal`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hpcray.api.session import ensure
from hpcray.runtime.in_place import InPlace
from hpcray.runtime.refs import ObjectRef, current

if TYPE_CHECKING:
    import numpy as np

_MOST_BYTES = 1 << 62


class Buffer:
    """An array in this node's object store that is being filled. `create` makes it.

    A context manager: what was not sealed at its end is given up.
    """

    def __init__(self, inner: InPlace) -> None:
        self._inner = inner

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The writable NumPy array; what it holds at first is undefined.

        Raises:
            ValueError: the buffer was sealed or given up.
        """
        array: np.ndarray[Any, Any] | None = self._inner.array
        if array is None:
            raise ValueError("this buffer was sealed or given up; hint: hpcray.get its ref, or create another one")
        return array

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return int(self.array.nbytes)

    def seal(self) -> ObjectRef[Any]:
        """End the writing; nothing is copied. `get` of the ref gives a read-only array.

        The array itself becomes read-only. Slices that were made of it before stay writable: do not write to them any
        more, since others may read now.

        Raises:
            ValueError: it was sealed or given up before. RaySystemError: the session is over; the content is lost.
        """
        return self._inner.seal()

    def abandon(self) -> None:
        """Give it up: its memory is free again when the last array made of it is dropped."""
        self._inner.abandon()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


def create(shape: int | Sequence[int], dtype: Any = "uint8", order: str = "C") -> Buffer:
    """Room for an array in this node's object store, to be filled in place: an object without a copy.

        with hpcray.internal.create((1000, 1000), "float32") as buffer:
            read_into(buffer.array)
            ref = buffer.seal()

    Args:
        shape: of the array; a number of bytes where no dtype is given.
        dtype: anything that NumPy takes, without Python objects.
        order: "C" or "F".

    Raises:
        TypeError: `shape` or `dtype` is none, or the dtype holds Python objects. ValueError: a negative length, too
            many bytes, or another order. ObjectStoreFullError: no room, and none came within ten seconds; at once if it
            is larger than the store.
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
    if size > _MOST_BYTES:
        raise ValueError(f"an array of shape {lengths} and dtype {kind} is too big: {size} bytes")
    return Buffer(InPlace(current.process or ensure(), lengths, kind, order))


def free(object_refs: ObjectRef[Any] | Sequence[ObjectRef[Any]], local_only: bool = False) -> None:
    """Drop the values of refs now, though refs are left. Reading them raises `ObjectFreedError` from then on.

    Who reads a value already keeps it: its memory goes with the last view. A task that has not ended runs on, and its
    result is dropped. In another process that holds a ref too the error may be `ObjectLostError`.

    Args:
        local_only: drop only the copies on this node. Others can still be read; where there is none the object is made
            again when it is read, if it can be.

    Raises:
        TypeError: not a ref or a list of refs; nothing was freed.
    """
    refs = [object_refs] if isinstance(object_refs, ObjectRef) else object_refs
    if not isinstance(refs, list):
        raise TypeError(f"free() expects a list of ObjectRef, got {type(object_refs)}")
    for ref in refs:
        if not isinstance(ref, ObjectRef):
            raise TypeError(f"Attempting to call `free` on the value {ref}, which is not an ray.ObjectRef.")
    (current.process or ensure()).survey.free(refs, local_only)
