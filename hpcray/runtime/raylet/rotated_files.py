"""Log files that are rotated while they are read: `f`, and the older `f.1`, `f.2`, ..., known by their inodes."""

from __future__ import annotations

import contextlib
import itertools
import os

from hpcray.platform.private_files import open_private_file


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
