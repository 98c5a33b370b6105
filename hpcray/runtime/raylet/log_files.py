"""The log files of this node, for questions of `hpcray.util.state`. A raylet reads a piece at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

from hpcray.common.job_names import (
    LOG_PIECE,
    LOG_PREFIX_ACTOR_NAME,
    LOG_PREFIX_JOB_ID,
    LOG_PREFIX_TASK_ID,
    LOG_PREFIX_TASK_NAME,
    parse_worker_log_name,
)
from hpcray.platform.private_files import open_private_file

# ------------------------------------------------------------ rotated files
# Log files that are rotated while they are read: `f`, and the older `f.1`, `f.2`, ..., known by their inodes.


def read_on(path: str, inode: int, offset: int, size: int) -> tuple[bytes, int, int, bool]:
    """Read on in a log file, or in those that took its place.

    Args:
        path: of the present file. inode, offset: where the last call ended; inode 0: begin with the oldest file, or,
            with an offset below 0, so many bytes before the end of the present one. size: bytes at most.

    Returns:
        The bytes, the inode and offset where they end, and whether there may be more.
    """
    with contextlib.suppress(OSError):  # a file that is rotated right now: its next line is a change again
        while True:
            files = _generations(path)
            inodes = [file.st_ino for _, file in files]
            if not inodes:
                break
            if inode not in inodes:
                place = _holding(-offset, [file.st_size for _, file in files]) if offset < 0 else len(files) - 1
                before = sum(file.st_size for _, file in files[: place + 1])
                inode, offset = inodes[place], max(0, before + offset) if offset < 0 else 0
            place = inodes.index(inode)
            with os.fdopen(open_private_file(files[place][0]), "rb", buffering=0) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != inode:
                    continue
                offset = offset if offset <= found.st_size else 0  # a new file has the number of a deleted one
                file.seek(offset)
                data = file.read(size)
            if data or not place:
                return data, inode, offset + len(data), len(data) == size or place > 0
            inode, offset = inodes[place - 1], 0  # read to its end, and rotated away
    return b"", inode, offset, False


def _holding(count: int, sizes: list[int]) -> int:
    """Return the first of these files that has, with those before it, so many bytes; else the last."""
    sums = itertools.accumulate(sizes)
    return next((place for place, size in enumerate(sums) if size >= count), len(sizes) - 1)


def _generations(path: str) -> list[tuple[str, os.stat_result]]:
    """Return a log file and those that were rotated away, with their states, the newest first.

    While its worker rotates them one number is missing: each file moves up by one, the oldest first.
    """
    found = []
    numbers = itertools.count()
    missing = 0
    while missing < 2:
        number = next(numbers)
        source = f"{path}.{number}" if number else path
        try:
            found.append((source, os.stat(source)))
            missing = 0
        except FileNotFoundError:
            missing += 1
    return found


# ------------------------------------------------------------ log files


_MARKS = (LOG_PREFIX_ACTOR_NAME, LOG_PREFIX_JOB_ID, LOG_PREFIX_TASK_ID, LOG_PREFIX_TASK_NAME)
_TAILED, _TAIL_BYTES = 4, 8 << 10  # files, and bytes of each


class LogFiles:
    """The files in one directory.

    Args:
        directory: with the log files.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def find(self, pattern: str = "*") -> dict[str, Any]:
        """Return the "names" of the files that match a pattern, directories with a slash; or a "problem"."""
        path = PurePosixPath(pattern)
        if path.anchor or ".." in path.parts:
            text = f"Invalid glob filter: {pattern}. It must be a relative path and cannot contain '..'."
            return {"problem": text}
        try:
            found = [
                one.relative_to(self._directory).as_posix() + ("/" if one.is_dir() else "")
                for one in self._directory.glob(pattern)
            ]
        except (OSError, ValueError, NotImplementedError) as error:
            return {"problem": f"Invalid glob filter: {pattern}. {error}"}
        return {"names": sorted(found)}

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (size, inode) of the files of workers, by name, without those that are rotated at this moment."""
        found = {}
        for one in self._directory.glob("worker-*"):
            with contextlib.suppress(OSError):
                state = one.stat()
                if stat.S_ISREG(state.st_mode):
                    found[one.name] = state.st_size, state.st_ino
        return found

    def read_on(self, name: str, inode: int, offset: int) -> dict[str, Any]:
        """Return the next "data" of a worker's file, rotated or not, and "inode", "offset" and "more": `read_on`."""
        if parse_worker_log_name(name) is None or os.path.basename(name) != name:
            return {"problem": f"{name} is no log file of a worker"}
        data, inode, offset, more = read_on(str(self._directory / name), inode, offset, LOG_PIECE)
        return {"data": data, "inode": inode, "offset": offset, "more": more}

    def tail(self, lines: int) -> list[tuple[str, float, str]]:
        """Return the last lines of what was written to last: (name of the file, time of its last change, line)."""
        try:
            files = [(one.stat().st_mtime, one.name) for one in self._directory.glob("worker-*") if one.is_file()]
        except OSError:
            return []
        found: list[tuple[str, float, str]] = []
        for changed, name in sorted(files)[-_TAILED:]:
            path = str(self._directory / name)
            with contextlib.suppress(OSError), os.fdopen(open_private_file(path), "rb", buffering=0) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
                told = [line for line in text.splitlines() if line and not line.startswith(_MARKS)]
                found += [(name, changed, line) for line in told[-lines:]]
        return found[-lines:]

    def read(self, name: str, start: int, size: int) -> dict[str, Any]:
        """Return the "data" of a file from offset `start` on, at most `size` bytes, and its "size"; or a "problem"."""
        path = os.path.abspath(self._directory / name)
        if not os.path.isfile(path):
            return {"problem": f"A file is not found at: {path}"}
        if not Path(path).is_relative_to(self._directory):
            return {"problem": f"{path} not in {self._directory}"}
        try:
            with os.fdopen(open_private_file(str(path)), "rb", buffering=0) as file:
                file.seek(start)
                return {"data": file.read(min(size, LOG_PIECE)), "size": os.fstat(file.fileno()).st_size}
        except OSError as error:
            return {"problem": f"{path} cannot be read: {error}"}
