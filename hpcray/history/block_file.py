"""The files of a history: blocks that are appended, each with its length and checksum.

    hpcray-history 1\\n        the first line of the file
    mark (4 bytes)  flags (1)  length (4)  CRC-32 (4)  content          a block, again and again

The content is msgpack: a list of records (`hpcray.history.records`); flag 1: deflated. The checksum is of flags, length
and content. A reader who meets anything else goes on at the next mark whose checksum is right, and counts what it has
skipped: a file is readable whatever was cut off or overwritten. No byte of a block is looked at before its checksum.

Files are written by a thread, as a file system may hang: a raylet never waits for its history.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator

from msgspec import Struct

FIRST_LINE = b"hpcray-history 1\n"
MARK = b"\xf7hB\x1a"
_HEAD = struct.Struct("<4sBII")
_DEFLATED = 1
_WORTH_DEFLATING = 512  # bytes
_LEVEL = 1
LARGEST = 64 << 20
"""Bytes of a block's content, deflated or not, beyond which a reader takes it for damage."""
_MOST_WAITING = 8 << 20  # bytes that wait for a slow file system; what comes then is lost
_SLOW = 10.0  # seconds of one write after which the job is told
_RETRY = 30.0  # seconds after a failed write until the next attempt


def pack(content: bytes) -> bytes:
    """A block with this content."""
    flags = 0
    if len(content) >= _WORTH_DEFLATING:
        deflated = zlib.compress(content, _LEVEL)
        if len(deflated) < len(content):
            content, flags = deflated, _DEFLATED
    return _HEAD.pack(MARK, flags, len(content), _checksum(flags, content)) + content


def _checksum(flags: int, content: bytes | memoryview) -> int:
    return zlib.crc32(content, zlib.crc32(struct.pack("<BI", flags, len(content))))


class Damage(Struct):
    """The skipped parts of a file: places where blocks should be, and bytes. `cut`: the last block is not whole."""

    places: int = 0
    size: int = 0
    cut: bool = False

    def add(self, other: Damage) -> None:
        """Add that of another file."""
        self.places, self.size, self.cut = self.places + other.places, self.size + other.size, self.cut or other.cut


def blocks(data: bytes, damage: Damage, whole: bool = True) -> Iterator[bytes]:
    """The contents of the blocks of a file, in order.

    Args:
        data: of the file.
        damage: counts what is skipped.
        whole: whether `data` begins with the file's first byte; else with any.
    """
    place = 0
    if whole:
        if data.startswith(FIRST_LINE):
            place = len(FIRST_LINE)
        elif not FIRST_LINE.startswith(data):
            damage.places += 1
    else:
        place = max(0, data.find(MARK))
    view = memoryview(data)
    while place < len(data):
        found = _block_at(view, place)
        if found is not None:
            content, place = found
            yield content
            continue
        following = data.find(MARK, place + 1)
        while following >= 0 and _block_at(view, following) is None:
            following = data.find(MARK, following + 1)
        damage.size += (following if following >= 0 else len(data)) - place
        if following < 0:
            damage.cut = True
            return
        damage.places += 1
        place = following


def _block_at(view: memoryview, place: int) -> tuple[bytes, int] | None:
    """The content of the block that begins here, and where it ends; None: none does, or it is damaged."""
    if len(view) - place < _HEAD.size:
        return None
    mark, flags, size, checksum = _HEAD.unpack_from(view, place)
    start = place + _HEAD.size
    if mark != MARK or size > LARGEST or len(view) - start < size:
        return None
    content = view[start : start + size]
    if _checksum(flags, content) != checksum:
        return None
    if not flags & _DEFLATED:
        return bytes(content), start + size
    inflater = zlib.decompressobj()
    try:
        inflated = inflater.decompress(content, LARGEST)
    except zlib.error:
        return None
    return (inflated, start + size) if inflater.eof else None


class BlockWriter:
    """Appends blocks to files, in a thread of its own.

    Args:
        open_file: opens the file with this number and returns its descriptor; called in the thread. The first is 0.
        limit: bytes of a file beyond which the next one is begun.
        gap: the content of a block that says that something could not be written; its argument is why.
        idle: called in the thread now and then, for what else may have to wait for the file system.
    """

    def __init__(
        self,
        open_file: Callable[[int], int],
        limit: int,
        idle: Callable[[], None] = lambda: None,
        gap: Callable[[str], bytes] = lambda reason: b"",
    ) -> None:
        self._open_file = open_file
        self._gap = gap
        self._limit = limit
        self._idle = idle
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._ready = threading.Condition()
        self._closing = self._told = False
        self._fd, self._number, self._written, self._whole = -1, 0, 0, 0
        self._busy_since = 0.0
        self._not_before = 0.0
        self._full_at = limit
        self._problem = ""
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name="hpcray-history", daemon=True)
        self._thread.start()

    def add(self, content: bytes) -> None:
        """Append a block with this content, soon; it is lost where the file system does not keep up."""
        with self._ready:
            if self._size + len(content) > _MOST_WAITING:
                self.lost += 1
                return
            self._waiting.append(content)
            self._size += len(content)
            self._ready.notify()

    @property
    def full(self) -> bool:
        """True once after so much was written that the next file is due: `begin_file` then."""
        return self._written >= self._full_at

    def begin_file(self, content: bytes) -> None:
        """Begin the next file with this block."""
        with self._ready:
            self._full_at = 1 << 62  # until the thread has begun it
            self._waiting.append(b"")  # stands for the change
            self._waiting.append(content)
            self._size += len(content)
            self._ready.notify()

    def problem(self) -> str:
        """Why something was not written, the first time that there is such a reason; else ""."""
        if self._told:
            return ""
        slow = self._busy_since and time.monotonic() - self._busy_since > _SLOW
        found = self._problem or (f"it has not answered for {_SLOW:.0f} s" if slow else "")
        self._told = bool(found)
        return found

    def close(self, seconds: float) -> None:
        """Write what is there, if that takes no longer than this."""
        with self._ready:
            self._closing = True
            self._ready.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._waiting and not self._closing:
                    self._ready.wait()
                taken, self._waiting = list(self._waiting), deque()
                self._size = 0
            if not taken:
                break
            self._busy_since = time.monotonic()
            self._write(taken)
            with contextlib.suppress(OSError):
                self._idle()
            self._busy_since = 0.0
        if self._fd >= 0:
            os.close(self._fd)

    def _write(self, contents: list[bytes]) -> None:
        now = time.monotonic()
        if now < self._not_before:
            self.lost += len(contents)
            return
        try:
            run: list[bytes] = []
            for content in contents:
                if content:
                    run.append(pack(content))
                    continue
                self._append(b"".join(run))
                run = []
                self._next_file()
            self._append(b"".join(run))
        except OSError as error:
            self.lost += len(contents)
            reason = error.strerror or str(error)
            self._problem = self._problem or reason
            self._not_before = now + _RETRY
            with contextlib.suppress(OSError):
                self._say_gap(reason)

    def _say_gap(self, reason: str) -> None:
        """Give the room that the beginning of a block has taken on a full disk to the word that something is missing:
        without it the end of the file looks like the end of the job."""
        if self._fd >= 0 and (content := self._gap(reason)):
            os.ftruncate(self._fd, self._whole)
            self._written = self._whole
            self._append(pack(content))

    def _next_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._written, self._full_at = -1, 0, self._limit
        self._number += 1

    def _append(self, data: bytes) -> None:
        if not data:
            return
        if self._fd >= 0 and not os.fstat(self._fd).st_nlink:
            self._problem = self._problem or "its file was removed while the job ran; another one is begun"
            self._full_at = 0
        if self._fd < 0:
            self._fd = self._open_file(self._number)
            self._written = self._whole = os.fstat(self._fd).st_size
            if not self._written:
                data = FIRST_LINE + data
        view = memoryview(data)
        while view:
            written = os.write(self._fd, view)
            self._written += written
            view = view[written:]
        self._whole = self._written
