"""Memory for long messages that are received."""

from __future__ import annotations

from collections import deque

_UNIT = 1 << 18
_LARGEST_ON_HEAP = 8 << 20
RAYLET_ROOM = 32 << 20
"""Bytes that a raylet keeps: the long messages of all processes of its node pass it, and a node has one."""
PROCESS_ROOM = 8 << 20
"""Bytes that a driver or a worker keeps: only its own messages pass it, and a node has many."""


def keep_freed_memory() -> None:
    """Have the C library keep up to 16 MB of freed memory: messages come and go, and untouched pages are slow to fill.

    The GNU library takes what is shorter than the longest block that was ever mapped and freed from its heap, and keeps
    twice as much of that. The block itself costs nothing, as no page of it is used: `bytes` asks for zeroed memory, as
    a fresh mapping is already; `bytearray` would write the zeros, 2,048 page faults in each process that starts.
    """
    bytes(_LARGEST_ON_HEAP)


class BufferPool:
    """Buffers that are used again once no view of them is left: to fill untouched memory takes several times longer.

    Args:
        room: bytes of the buffers that are kept; of a larger one nothing is kept.
    """

    def __init__(self, room: int = RAYLET_ROOM) -> None:
        self._room = room
        self._kept = 0
        self._buffers: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview:
        """Return `size` writable bytes; they are the caller's while a view of them exists."""
        buffers = self._buffers
        for _ in range(len(buffers)):
            buffer = buffers.popleft()
            buffers.append(buffer)  # so the one that was taken first is the next to be tried
            if len(buffer) >= size and _is_unused(buffer):
                return memoryview(buffer)[:size]
        fresh = bytearray(-(-size // _UNIT) * _UNIT)
        if len(fresh) <= self._room:
            buffers.append(fresh)
            self._kept += len(fresh)
            while self._kept > self._room:
                self._kept -= len(buffers.popleft())
        return memoryview(fresh)[:size]


def _is_unused(buffer: bytearray) -> bool:
    """Return True if the buffer has no view: its length can be changed then, and only then."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
