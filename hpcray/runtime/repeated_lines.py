"""Lines that many workers of a node print alike are shown once (`RAY_DEDUP_LOGS=1`), and how often they came.

Workers write to the terminal themselves, so there is nobody who sees the lines of all: they keep a table in memory that
they share since their fork. It is never locked. What two do to one row at the same moment may show a line twice; none
is lost that was not counted.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from hashlib import blake2b

VARIABLE = "RAY_DEDUP_LOGS"
_WINDOW = "RAY_DEDUP_LOGS_AGG_WINDOW_S"
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_ROW = struct.Struct("=8sdII")
_ROWS = 4096
_HINT = f"set {VARIABLE}=0 to see all"


class RepeatedLines:
    """One worker's view.

    Args:
        table: shared by all workers of the node. emit: writes a line. window: seconds in which a line that another
            worker has printed is only counted.
    """

    def __init__(self, table: mmap.mmap, emit: Callable[[str], None], window: float) -> None:
        self._table = table
        self._emit = emit
        self._window = window
        self._lock = threading.Lock()
        self._mine: dict[int, str] = {}

    def shows(self, line: str) -> bool:
        """Whether this line is to be printed; else it was counted, and what was counted is told later."""
        key = blake2b(_NUMBERS.sub("", line).encode("utf-8", "replace"), digest_size=8).digest()
        place = int.from_bytes(key[:4], "big") % _ROWS
        now = time.monotonic()
        known, since, pid, count = self._read(place)
        if known != key or now - since >= self._window:
            if not count or now - since >= 3 * self._window:  # else who counted it has still to tell
                self._write(place, key, now, os.getpid(), 0)
            return True
        if pid == os.getpid():
            return True  # what one worker prints several times it means several times
        self._write(place, known, since, pid, count + 1)
        with self._lock:
            first = place not in self._mine
            self._mine[place] = line
        if count == 0 or first:
            timer = threading.Timer(max(0.0, since + self._window - now), self._tell, (place,))
            timer.daemon = True
            timer.start()
        return False

    def finish(self) -> None:
        """Tell at once what this worker has counted: it leaves."""
        for place in list(self._mine):
            self._tell(place)

    def _tell(self, place: int) -> None:
        with self._lock:
            line = self._mine.pop(place, None)
        known, since, pid, count = self._read(place)
        if line is None or not count:
            return  # another one that counted has told
        self._write(place, known, since, pid, 0)
        self._emit(f"{line} [repeated {count}x across this node; {_HINT}]" if count > 1 else line)

    def _read(self, place: int) -> tuple[bytes, float, int, int]:
        key, since, pid, count = _ROW.unpack_from(self._table, place * _ROW.size)
        return key, since, pid, count

    def _write(self, place: int, key: bytes, since: float, pid: int, count: int) -> None:
        _ROW.pack_into(self._table, place * _ROW.size, key, since, pid, count)


def wanted() -> float:
    """The window in seconds; 0 when lines are shown as often as they come, which is the default."""
    if os.environ.get(VARIABLE, "0") != "1":
        return 0.0
    try:
        return float(os.environ.get(_WINDOW, "5"))
    except ValueError:
        return 5.0


TABLE: mmap.mmap | None = None
"""Made where this module is loaded first, or in the raylet: whose template's workers inherit it."""


def open_table() -> None:
    """Make the table, if lines are counted and there is none yet."""
    global TABLE
    if TABLE is None and wanted():
        TABLE = mmap.mmap(-1, _ROWS * _ROW.size)


open_table()
