"""Frames: the unit that sockets and MPI carry, and that raylets forward without decoding.

    length u32 (of what follows) | destination proc id, 8 B | source proc id, 8 B | body

The body is one msgpack array of messages (`encode` and `decode` in `protocol.messages`). Integers are little endian,
except inside ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from hpcray.common.memory import BufferPool
from hpcray.protocol.messages import Message, ObjectReady, encode

HEADER = 20
ROUTE = 16
LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 31
LONG = 1 << 16
"""Bytes of a frame from which on a copy of it costs more than another system call."""
SLOT_BYTES = 1 << 20
"""Bytes of a slot of the memory in which processes and their raylet share long frames (`core.raylet.frame_slots`)."""
LONG_BATCH = 1 << 19
"""Bytes of long messages for one peer that travel together: while the next ones are made, these are on their way."""

Frame = tuple[bytes, bytes, memoryview]


class FrameError(Exception):
    """A stream holds something that is not a frame: the peer is broken or not ours."""


def pack(dest: bytes, src: bytes, body: bytes) -> bytes:
    """One frame, ready for a socket."""
    return LENGTH.pack(len(body) + ROUTE) + dest + src + body


class FrameReader:
    """Cuts a byte stream into frames. `feed` takes what a socket gave; a partial frame waits for its rest.

    Args:
        pool: memory for long frames; their rests are received in place. None: all goes through `feed`.

    Attributes:
        buffered: bytes of a partial frame.
        vacancy: where the rest of a long frame belongs; what is received there goes to `filled`, not to `feed`.
    """

    __slots__ = ("_long", "_need", "_parts", "_pool", "buffered", "vacancy")

    def __init__(self, pool: BufferPool | None = None) -> None:
        self._parts: list[bytes] = []
        self.buffered = 0
        self._need = 4
        self._pool = pool
        self._long: memoryview | None = None
        self.vacancy: memoryview | None = None

    def filled(self, count: int) -> memoryview | None:
        """Take note of `count` more bytes at the start of `vacancy`. Returns the long frame once it is complete."""
        frame = self._long
        assert frame is not None
        self.buffered += count
        if self.buffered < len(frame):
            self.vacancy = frame[self.buffered :]
            return None
        self._long = self.vacancy = None
        self.buffered, self._need = 0, 4
        return frame.toreadonly()

    def feed(self, data: bytes) -> Iterator[memoryview]:
        """Yield each complete frame (header included) as a view of an immutable buffer."""
        if self.buffered:
            self._parts.append(data)
            self.buffered += len(data)
            if self.buffered < self._need:
                return
            data = b"".join(self._parts)
            self._parts = []
            self.buffered = 0
        view = memoryview(data)
        pos, end = 0, len(data)
        while end - pos >= 4:
            size: int = LENGTH.unpack_from(data, pos)[0] + 4
            if size < HEADER or size > MAX_FRAME:
                raise FrameError(f"frame length {size} out of range {HEADER}..{MAX_FRAME}")
            if end - pos < size:
                self._need = size
                break
            yield view[pos : pos + size]
            pos += size
        else:
            self._need = 4
        if pos < end:
            self.buffered = end - pos
            if self._pool is not None and self._need > LONG:
                self._long = self._pool.take(self._need)
                self._long[: self.buffered] = view[pos:]
                self.vacancy = self._long[self.buffered :]
            else:
                self._parts = [bytes(view[pos:])]


# ------------------------------------------------------------ pieces
# Messages as pieces of a frame: long values stay where they are until a socket, or shared memory, takes them.


LONG_VALUE = 1 << 14
"""Bytes of a value from which on it is a piece of its own."""

_LIST_16, _LIST_32, _BINARY_16, _BINARY_32 = b"\xdc", b"\xdd", b"\xc5", b"\xc6"  # msgpack's types
_SHORT, _WORD = struct.Struct(">H"), struct.Struct(">I")
_LENGTH_OF_LIST, _TYPE_OF_LIST = 0x0F, 0x90
_BEFORE_ID, _STATUS, _NO_VALUE = 4, 1, 2  # bytes: list, tag, type and length of the id; status; type and length of b""


def encode_pieces(messages: Sequence[Message]) -> list[bytes]:
    """Encode messages in pieces: joined, they are the bytes that `encode` makes."""
    pieces: list[bytes] = []
    short = bytearray(_list_header(len(messages)))
    for msg in messages:
        if type(msg) is not ObjectReady or len(msg.value) < LONG_VALUE:
            short += encode(msg)
            continue
        rest = encode(ObjectReady(msg.id, msg.status, b"", msg.size, msg.nodes, msg.remake_count))
        at = _BEFORE_ID + len(msg.id) + _STATUS
        short += rest[:at]
        short += _binary_header(len(msg.value))
        pieces += (bytes(short), msg.value)
        short = bytearray(rest[at + _NO_VALUE :])
    pieces.append(bytes(short))
    return pieces


def _list_header(count: int) -> bytes:
    if count <= _LENGTH_OF_LIST:
        return bytes((_TYPE_OF_LIST | count,))
    return _LIST_16 + _SHORT.pack(count) if count < 1 << 16 else _LIST_32 + _WORD.pack(count)


def _binary_header(size: int) -> bytes:
    return _BINARY_16 + _SHORT.pack(size) if size < 1 << 16 else _BINARY_32 + _WORD.pack(size)
