"""Checkpoints on a shared file system: directories that are complete, or absent.

    <root>/<name>/000001/     a complete checkpoint: renamed to this when every byte of it is on the disk
    <root>/<name>/.new-…      a checkpoint that is being written, or whose writer died

The newest two are kept: the older one remains if the newest is damaged.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from urllib.parse import quote

CHECKPOINTS_KEPT = 2
_COMPLETE = re.compile(r"\d{6,}")
_PARTIAL = re.compile(r"\.new-(\d{6,})-.*")
_MAX_RENAMES = 100


def directory_name(name: str, namespace: str = "") -> str:
    """Directory of the checkpoints of `name`: the name, with characters escaped that file names cannot have."""
    text = quote(name, safe=" +=,@()[]{}")
    if text.startswith("."):
        text = "%2E" + text[1:]
    return f"{quote(namespace, safe='')}:{text}" if namespace else text


def latest(root: str, directory: str) -> str | None:
    """Path of the newest complete checkpoint; None where there is none.

    Args:
        root: the job's checkpoint directory; "" for none.
        directory: `directory_name` of the owner.
    """
    numbers = _numbers(os.path.join(root, directory)) if root else []
    return os.path.join(root, directory, f"{numbers[-1]:06d}") if numbers else None


@contextlib.contextmanager
def writing(root: str, directory: str) -> Iterator[str]:
    """Context manager with an empty directory to write to. If the block succeeds, the directory becomes the newest
    checkpoint; else it is removed.

    Raises:
        OSError: the file system refuses. Older checkpoints stay complete.
    """
    home = os.path.join(root, directory)
    os.makedirs(home, mode=0o700, exist_ok=True)
    number = (_numbers(home) or [0])[-1] + 1
    partial = os.path.join(home, f".new-{number:06d}-{socket.gethostname()}-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    os.mkdir(partial, 0o700)
    try:
        yield partial
        _sync(partial)
        _name(partial, home, number)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _prune(home)


def _name(partial: str, home: str, number: int) -> None:
    """Rename the directory to the first free number: another process may have written the same name meanwhile."""
    for taken in range(_MAX_RENAMES):
        try:
            os.rename(partial, os.path.join(home, f"{number + taken:06d}"))
        except OSError:
            if taken == _MAX_RENAMES - 1 or not os.path.isdir(os.path.join(home, f"{number + taken:06d}")):
                raise
        else:
            _sync_entry(home)
            return


def _sync(top: str) -> None:
    for directory, _, files in os.walk(top):
        for file in files:
            path = os.path.join(directory, file)
            if not os.path.islink(path):
                _sync_entry(path)
        _sync_entry(directory)


def _sync_entry(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _numbers(home: str) -> list[int]:
    try:
        names = os.listdir(home)
    except OSError:
        return []
    return sorted(int(name) for name in names if _COMPLETE.fullmatch(name))


def _prune(home: str) -> None:
    """Remove old checkpoints, and partial ones of writers that died."""
    numbers = _numbers(home)
    for number in numbers[:-CHECKPOINTS_KEPT]:
        shutil.rmtree(os.path.join(home, f"{number:06d}"), ignore_errors=True)
    for name in os.listdir(home):
        partial = _PARTIAL.fullmatch(name)
        if partial is not None and int(partial[1]) < numbers[-1]:
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)
