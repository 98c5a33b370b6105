"""Memory that a process has allocated since a moment and not freed, by the line that did it (`tracemalloc`).

Python's allocators are traced, those of NumPy's arrays too; other C and C++ code is not, PyTorch's tensors among it:
what the process has grown by in all says how much that is.
"""

from __future__ import annotations

import contextlib
import threading
import time
import tracemalloc
from typing import Any

from hpcray.platform.stacks import after_fork, interesting_frames

_DEPTH = 12
"""Frames of an allocation that are remembered. Each costs time and memory, at every allocation."""


class _Tracing:
    """State of this process: how many look on, and whether it was us that switched it on."""

    lock = threading.Lock()
    users = 0
    ours = False


class MemoryGrowth:
    """Memory that this process allocates from now on, until `answer` or `close`."""

    def __init__(self) -> None:
        with _Tracing.lock:
            if not _Tracing.users:
                _Tracing.ours = not tracemalloc.is_tracing()
                if _Tracing.ours:
                    tracemalloc.start(_DEPTH)
            _Tracing.users += 1
            self._open = True
            fresh = _Tracing.ours and _Tracing.users == 1
        self._before = None if fresh else tracemalloc.take_snapshot()
        self._began = time.perf_counter()
        self._rss = resident_bytes()

    def answer(self, everything: bool) -> dict[str, Any]:
        """Return what has been allocated since, and is still there. Ends the tracing; may take seconds.

        Args:
            everything: also hpcray's frames.

        Returns:
            "seconds", "traced" (bytes by which what is traced has grown), "before" and "after": bytes resident of the
            process, its own ("anonymous") and shared memory ("shared"); "stacks": rows ["", line of the innermost
            frame, bytes, 0.0, blocks, frames], those with most bytes first; frames are [file, line, ""].
        """
        seconds, after = time.perf_counter() - self._began, resident_bytes()
        snapshot = tracemalloc.take_snapshot()
        self.close()
        found = snapshot.compare_to(self._before, "traceback") if self._before else snapshot.statistics("traceback")
        merged: dict[tuple[Any, ...], list[int]] = {}
        for one in found:
            size = getattr(one, "size_diff", None) if self._before else one.size
            count = getattr(one, "count_diff", None) if self._before else one.count
            if size or count:
                frames = _shown([[frame.filename, frame.lineno, ""] for frame in one.traceback], everything)
                row = merged.setdefault(frames, [0, 0])
                row[0] += size or 0
                row[1] += count or 0
        rows = [["", frames[-1][1], size, 0.0, count, list(frames)] for frames, (size, count) in merged.items()]
        return {
            "seconds": seconds,
            "traced": sum(row[2] for row in rows),
            "before": self._rss,
            "after": after,
            "stacks": sorted(rows, key=lambda row: -row[2]),
        }

    def close(self) -> None:
        """End the tracing, unless others look on or the program has started it."""
        with _Tracing.lock:
            if self._open:
                self._open = False
                _Tracing.users -= 1
                if not _Tracing.users and _Tracing.ours:
                    tracemalloc.stop()


def resident_bytes() -> dict[str, int]:
    """The resident bytes of this process: its own ("anonymous"), and of shared memory ("shared")."""
    found = {"anonymous": 0, "shared": 0}
    names = {"RssAnon": "anonymous", "RssShmem": "shared"}
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in names:
                found[names[name]] = int(rest.split()[0]) << 10
    return found


def _shown(frames: list[list[Any]], everything: bool) -> tuple[tuple[str, int, str], ...]:
    if not everything:
        frames = list(interesting_frames(after_fork(frames))) or frames
    return tuple((file, line, function) for file, line, function in frames)
