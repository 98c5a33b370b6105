"""A directory as one tar stream: read once, several files at a time, and unpacked elsewhere."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_READER_THREADS = 8
_MAX_READS_AHEAD = 64  # files
_SMALL_FILE = 1 << 20  # bytes; larger files are streamed


def pack_directory(directory: str, write: Callable[[bytes], object]) -> int:
    """Write `directory` as a tar stream. On a slow file system latency dominates: small files are read several at a
    time, each of them once.

    Returns:
        How many files, directories and links it holds. Sockets, pipes and devices are left out.

    Raises:
        OSError: something in it cannot be read, or `write` raises it.
    """
    count = 0
    with (
        ThreadPoolExecutor(_READER_THREADS, thread_name_prefix="hpcray-pack") as readers,
        io.BufferedWriter(_Sink(write), _SMALL_FILE) as sink,
        tarfile.open(fileobj=sink, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        ahead: deque[Future[tuple[tarfile.TarInfo | None, bytes | None, str]]] = deque()
        paths = _walk(directory)
        while True:
            while len(ahead) < _MAX_READS_AHEAD and (found := next(paths, None)) is not None:
                ahead.append(readers.submit(_load, *found))
            if not ahead:
                return count
            info, data, path = ahead.popleft().result()
            if info is None:
                continue
            count += 1
            if data is not None:
                tar.addfile(info, io.BytesIO(data))
            elif info.isreg():
                with open(path, "rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)


def unpack_directory(fd: int, directory: str, progress: Callable[[], object]) -> int:
    """Unpack such a stream into `directory`, which is made, 0700.

    Args:
        fd: a file that holds the stream.
        progress: called after every file.

    Returns:
        How many files, directories and links there were.

    Raises:
        OSError: there is no space, or a file cannot be written.
        tarfile.TarError: the stream is damaged, or would write outside of `directory`.
    """
    os.mkdir(directory, 0o700)
    count = 0
    os.lseek(fd, 0, os.SEEK_SET)
    with open(fd, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r:", errorlevel=2) as tar:
        if hasattr(tarfile, "tar_filter"):
            tar.extraction_filter = tarfile.tar_filter
        for info in tar:
            tar.extract(info, directory, set_attrs=not info.isdir(), numeric_owner=True)
            count += 1
            progress()
    return count


def _walk(directory: str) -> Iterator[tuple[str, str]]:
    """Absolute path and name in the archive of everything below, directories before what is in them."""
    todo = [("", directory)]
    while todo:
        name, path = todo.pop()
        with os.scandir(path) as entries:
            for entry in entries:
                inner = f"{name}/{entry.name}" if name else entry.name
                yield entry.path, inner
                if entry.is_dir(follow_symlinks=False):
                    todo.append((inner, entry.path))


def _load(path: str, name: str) -> tuple[tarfile.TarInfo | None, bytes | None, str]:
    state = os.lstat(path)
    info = tarfile.TarInfo(name)
    # Whole seconds are what a .pyc remembers of its source; fractions would cost a second header for each file.
    info.mode, info.mtime = stat.S_IMODE(state.st_mode), int(state.st_mtime)
    info.uid, info.gid = os.getuid(), os.getgid()
    if stat.S_ISLNK(state.st_mode):
        info.type, info.linkname = tarfile.SYMTYPE, os.readlink(path)
    elif stat.S_ISDIR(state.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISREG(state.st_mode):
        info.size = state.st_size
        if state.st_size <= _SMALL_FILE:
            with open(path, "rb") as file:
                data = file.read()
            info.size = len(data)
            return info, data, path
    else:
        return None, None, path
    return info, None, path


class _Sink(io.RawIOBase):
    def __init__(self, write: Callable[[bytes], object]) -> None:
        super().__init__()
        self._write = write
        self._at = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._write(bytes(data))
        self._at += len(data)
        return len(data)

    def tell(self) -> int:
        return self._at
