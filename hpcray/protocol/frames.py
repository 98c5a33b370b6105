"""Frames: the unit that sockets and MPI carry, and that raylets forward without decoding.

    length u32 (of what follows) | destination proc id, 8 B | source proc id, 8 B | body

The body is one msgpack array of messages (`encode` and `decode` in `protocol.messages`). Integers are little endian,
except inside ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

HEADER = 20
ROUTE = 16
LENGTH = struct.Struct("<I")
MAX_FRAME = 1 << 31

Frame = tuple[bytes, bytes, memoryview]


class FrameError(Exception):
    """A stream holds something that is not a frame: the peer is broken or not ours."""


def pack(dest: bytes, src: bytes, body: bytes) -> bytes:
    """One frame, ready for a socket."""
    return LENGTH.pack(len(body) + ROUTE) + dest + src + body


class FrameReader:
    """Cuts a byte stream into frames. `feed` takes what a socket gave; a partial frame waits for its rest.

    Attributes:
        buffered: bytes of a partial frame.
    """

    __slots__ = ("_need", "_parts", "buffered")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.buffered = 0
        self._need = 4

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
            self._parts = [bytes(view[pos:])]
            self.buffered = end - pos
