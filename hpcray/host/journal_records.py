"""Records of bytes, one behind the other in a file: what of it can be read, and whether that is all.

A death cuts off the last record, or the system fills it with zeros: that is as it should be. Whole records behind one
that cannot be read are not: the file was damaged.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass

_HEAD = struct.Struct("<II")
_HIGHEST = 3  # the last byte of a length
_MOST_LOOKS = 1 << 20
_MOST_BYTES = 1 << 28
"""Where one record has got lost, others are looked for in so many places, and bytes: half a second."""


@dataclass(frozen=True)
class Damage:
    """What cannot be read of a file. at, size: in bytes, up to its end.

    Attributes:
        records: whole ones that lie there, as far as they were looked for. all: whether they were.
    """

    at: int
    size: int
    records: int
    all: bool

    def __str__(self) -> str:
        least = "" if self.all else "at least "
        return f"{least}{self.records} whole record{'s' * (self.records != 1)}"


def pack(record: bytes) -> bytes:
    """A record as it is written; it is not empty.

    Raises:
        struct.error: it is larger than 4 GB.
    """
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def split(data: bytes, start: int) -> tuple[list[bytes], Damage | None]:
    """The records from `start` on, up to the first that is not whole; and what follows, where it is more than that."""
    records = []
    pos = start
    while end := _end_of(data, pos):
        records.append(data[pos + _HEAD.size : end])
        pos = end
    found, complete = _Later(data).count(pos)
    if found or _goes_on(data, pos):
        return records, Damage(pos, len(data) - pos, found, complete)
    return records, None


def _end_of(data: bytes, pos: int) -> int:
    """Where the record ends that begins here; 0: none does."""
    if pos + _HEAD.size > len(data):
        return 0
    size, check = _HEAD.unpack_from(data, pos)
    end: int = pos + _HEAD.size + size
    if not size or end > len(data) or zlib.crc32(memoryview(data)[pos + _HEAD.size : end]) != check:
        return 0
    return end


def _goes_on(data: bytes, pos: int) -> bool:
    """Whether there is anything behind what claims to be a record here."""
    if pos + _HEAD.size > len(data):
        return False
    size, _ = _HEAD.unpack_from(data, pos)
    end = pos + _HEAD.size + size
    return bool(size) and bool(data[end:].strip(b"\0"))


class _Later:
    """Looks for whole records behind damage."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._looks = _MOST_LOOKS
        self._bytes = _MOST_BYTES

    def count(self, pos: int) -> tuple[int, bool]:
        """How many there are behind this position; whether all of it was looked through."""
        found = 0
        while pos := self._next(pos):
            while end := _end_of(self._data, pos):
                pos, found = end, found + 1
        return found, self._looks > 0 and self._bytes > 0

    def _next(self, pos: int) -> int:
        """Where the next record begins, behind this position; 0: nowhere."""
        data, size = self._data, len(self._data)
        # The highest byte of its length cannot be more than that of what is left.
        highest = re.escape(bytes([min(255, max(0, size - pos) >> 24)]))
        for match in re.compile(b"[\0-%b]" % highest).finditer(data, pos + 1 + _HIGHEST):
            at = match.start() - _HIGHEST
            if at + _HEAD.size > size or self._looks <= 0 or self._bytes <= 0:
                return 0
            self._looks -= 1
            claimed, _ = _HEAD.unpack_from(data, at)
            if 0 < claimed <= size - at - _HEAD.size:
                self._bytes -= claimed
                if _end_of(data, at):
                    return at
        return 0
