"""Values to bytes and back: cloudpickle with protocol 5, buffers out of band.

A *blob* ends in a one-byte kind, so that the common case needs no slicing (`pickle.loads` stops at its STOP opcode):

    PLAIN  pickle | 0
    MULTI  buffer 0 | pad | buffer 1 | pad | ... | pickle | table (offset u64, length u64 per buffer) |
           pickle offset u64 | buffer count u32 | 1
    ERROR  pickle of an exception | 2

Buffers start at multiples of 64 from the start of the blob, and blobs in the arena start at multiples of 64. Values
read from a blob are read-only views of it, as in Ray, and one that came inside a message is copied where its buffers
would not be aligned. `protocol.out_of_band` adds kinds of values with such buffers.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from hpcray.common.memory import DeferredBytes, aligned_copy, is_aligned
from hpcray.common.task_errors import make_argument_error
from hpcray.protocol.messages.objects import ERROR, MULTI, PLAIN
from hpcray.protocol.out_of_band import COPIED, ErrorPickler, Pickler, end_storages, pickling

ALIGN = 64
_ALIGNED_SIZES = range(2048, 1 << 20)
"""Lengths of a blob that came inside of a message whose buffers are aligned by a copy. Ray aligns from 2 KiB on; longer
ones are in the arena."""
SMALL = 1 << 16

_TAIL = struct.Struct("<QIB")
_SLOT = struct.Struct("<QQ")
SCALARS = frozenset({int, float, bool, type(None), complex})
_MAX_CHAIN = 32
"""Errors of arguments of tasks whose errors are arguments of tasks..., at most; below the code of `pickle.STOP`."""
PLAIN_END = bytes([PLAIN])

_FRAME_END = 11
"""Bytes of a pickle up to the end of the header of its first frame."""
_FRAME = b"\x95"[0]

NONE_BLOB = pickle.dumps(None, 5) + b"\0"


class SerializationError(TypeError):
    """A value does not pickle.

    Attributes:
        value: the value.
    """

    def __init__(self, message: str, value: Any) -> None:
        super().__init__(message)
        self.value = value


class Serialized:
    """A value that has buffers: size known, bytes not yet laid out. `write` puts them where they belong, once.

    Args:
        stream: the pickle. buffers: what it left out; of those that are filled in place only `nbytes` is looked at.
    """

    __slots__ = ("_buffers", "_offsets", "_pickle_at", "pickle", "size")

    def __init__(self, stream: bytes, buffers: Sequence[Any]) -> None:
        at = 0
        offsets = []
        for buffer in buffers:
            offsets.append(at)
            at += -(-buffer.nbytes // ALIGN) * ALIGN
        self.pickle, self._buffers, self._offsets, self._pickle_at = stream, buffers, offsets, at
        self.size = at + len(stream) + _SLOT.size * len(buffers) + _TAIL.size

    def with_pickle(self, stream: bytes) -> Serialized:
        """The same buffers, left out of another pickle."""
        return Serialized(stream, self._buffers)

    def write(self, put: Callable[[int, Any], object]) -> None:
        """Call `put(offset, buffer)` for every piece; offsets are relative to the start of the blob."""
        for offset, buffer in zip(self._offsets, self._buffers, strict=True):
            put(offset, buffer)
        self.write_end(put)

    def pieces(self) -> list[tuple[int, Any]]:
        """Return offset and buffer of every piece, as `write` puts them."""
        return [*zip(self._offsets, self._buffers, strict=True), (self._pickle_at, self.pickle + self._table())]

    def write_end(self, put: Callable[[int, Any], object]) -> None:
        """Like `write`, without the buffers, which were filled in place."""
        put(self._pickle_at, self.pickle + self._table())

    def join(self) -> bytes:
        """The whole blob as bytes (one copy)."""
        parts: list[Any] = []
        for buffer in self._buffers:
            parts.append(buffer)
            parts.append(bytes(-buffer.nbytes % ALIGN))
        parts.append(self.pickle)
        parts.append(self._table())
        try:
            return b"".join(parts)
        except TypeError:
            return b"".join([_to_host(part) if isinstance(part, DeferredBytes) else part for part in parts])

    def _table(self) -> bytes:
        slots = [_SLOT.pack(o, b.nbytes) for o, b in zip(self._offsets, self._buffers, strict=True)]
        return b"".join(slots) + _TAIL.pack(self._pickle_at, len(slots), MULTI)


def serialize(value: Any) -> tuple[bytes | Serialized, list[Any]]:
    """Turn a value into a blob, or into a `Serialized` when it has out-of-band buffers.

    Returns:
        The blob, and the object refs found inside the value (in order, with repetition).

    Raises:
        SerializationError: the value cannot be pickled; the message says which value.
    """
    kind = type(value)
    if kind in SCALARS or ((kind is str or kind is bytes) and len(value) < SMALL):
        return pickle.dumps(value, 5) + PLAIN_END, []
    if kind in COPIED and len(value) >= SMALL:
        return Serialized(COPIED[kind], [memoryview(value)]), []
    outer = pickling.refs
    refs: list[Any] = []
    pickling.refs = refs
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
    except RecursionError as error:
        raise SerializationError(
            f"could not serialize a {kind.__name__}: it is nested too deeply ({error}); hint: sys.setrecursionlimit, "
            "or a flat form of the same data",
            value,
        ) from error
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SerializationError(
            f"could not serialize {_shown(value)}: {error}; hint: open such objects inside the task or actor instead "
            "of passing them",
            value,
        ) from error
    finally:
        pickling.refs = outer
        if buffers:
            end_storages(refs, buffers)
    if not buffers:
        return file.getvalue() + PLAIN_END, refs
    return Serialized(file.getvalue(), [_contiguous(b) for b in buffers]), refs


def _shown(value: Any) -> str:
    """Return the beginning of the repr of a value, which is code of the user and may fail."""
    try:
        return repr(value)[:200]
    except Exception as error:
        return f"<{type(value).__name__} whose repr raises {type(error).__name__}>"


def without_frame(blob: bytes) -> bytes:
    """The same blob without the frame of a short pickle, which takes 9 bytes and helps readers of files alone."""
    if _FRAME_END < len(blob) < ALIGN and blob[-1] == PLAIN and blob[2] == _FRAME:
        return blob[:2] + blob[_FRAME_END:]
    return blob


def dumps_in_band(value: Any) -> bytes:
    """The pickle of a value, alone and whole."""
    file = io.BytesIO()
    ErrorPickler(file, protocol=5).dump(value)
    return file.getvalue()


def serialize_error(error: BaseException) -> bytes:
    """Blob of an exception. Never fails: what cannot be pickled is replaced by the caller beforehand."""
    blob, _ = serialize(error)
    joined = blob.join() if isinstance(blob, Serialized) else blob
    # An ERROR blob is re-pickled in band: it is small, and its reader need not know the MULTI layout.
    return (joined[:-1] if joined[-1] == PLAIN else cloudpickle.dumps(deserialize(joined), 5)) + b"\2"


def serialize_argument_error(blob: bytes | memoryview, name: str, pid: int, ip: str) -> bytes:
    """Blob of the error of a task `name` that did not run, as one of its arguments is an error, which has this blob.

    It is not unpickled here, as that runs code of users. Of a long chain of such tasks the first ones are named.
    """
    depth = blob[-2] if blob[-2] < _MAX_CHAIN else 0  # between the pickle, which ends in ".", and the kind
    if depth + 1 == _MAX_CHAIN:
        return bytes(blob)
    return pickle.dumps(_ArgumentError(name, pid, ip, bytes(blob)), 5) + bytes([depth + 1, ERROR])


class _ArgumentError(NamedTuple):
    """Unpickles as the error of the task."""

    name: str
    pid: int
    ip: str
    blob: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_argument_error, tuple(self)


def _load_argument_error(name: str, pid: int, ip: str, blob: bytes) -> BaseException:
    return make_argument_error(name, deserialize(blob), pid, ip)


def has_buffers(blob: bytes) -> bool:
    """True for a blob with buffers out of band, which the value then uses as its memory."""
    if len(blob) < _TAIL.size:
        return False
    pickle_at, count, kind = _TAIL.unpack_from(blob, len(blob) - _TAIL.size)
    table = len(blob) - _TAIL.size - count * _SLOT.size
    return bool(kind == MULTI and count and 0 <= pickle_at < table)


def deserialize(blob: bytes | memoryview, load: Callable[..., Any] = pickle.loads) -> Any:
    """The value of a blob; of an ERROR blob, the exception (see `protocol.messages.objects.is_error`).

    Args:
        load: unpickles; called as `pickle.loads`.
    """
    if blob[-1] != MULTI:
        return load(blob)
    if type(blob) is bytes and len(blob) in _ALIGNED_SIZES and not is_aligned(blob, ALIGN):
        blob = aligned_copy(blob, ALIGN)
    view = memoryview(blob).toreadonly()
    end = len(view) - _TAIL.size
    pickle_at, count, _ = _TAIL.unpack_from(view, end)
    table = end - count * _SLOT.size
    buffers = []
    for slot in range(count):
        offset, length = _SLOT.unpack_from(view, table + slot * _SLOT.size)
        buffers.append(view[offset : offset + length])
    return load(view[pickle_at:table], buffers=buffers)


def note_ref(ref: Any) -> int:
    """Called by a ref that is being pickled.

    Returns:
        Its number among the refs in the value, from 1. 0: not by us, so the copy is out of band and must be pinned.
    """
    refs = pickling.refs
    if refs is None:
        return 0
    refs.append(ref)
    return len(refs)


def _to_host(part: DeferredBytes) -> bytearray:
    content = bytearray(part.nbytes)
    part.copy_to(memoryview(content))
    return content


def _contiguous(buffer: pickle.PickleBuffer) -> memoryview:
    try:
        return buffer.raw()
    except BufferError:  # not contiguous: one copy makes it so
        return memoryview(bytes(memoryview(buffer)))
