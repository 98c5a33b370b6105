"""The head's journal on disk, for the next run of the same job: records of bytes, opaque to this module.

    <directory>/journal       a header line, then records: length u32, CRC-32 u32 (little endian), bytes
    <directory>/journal.new   the next journal while it is written; a rename makes it the journal
    <directory>/lock          held while a job uses the directory

    <directory>/journal.damaged   a journal in which the last job found damage, unchanged

A death cuts off the last record, or the system fills it with zeros: such a record is dropped silently. Whole records
after one that cannot be read mean that the file was damaged: they are dropped with a warning. The next job runs what
the journal contains, so nothing is read that another user could have written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.platform.private_files import CLOSED, PrivateDirectory, UntrustedPathError

_HEADER = b"hpcray-journal 1\n"
_NAME, _NEW, _LOCK, _DAMAGED = "journal", "journal.new", "lock", "journal.damaged"
_CLOSE_TIMEOUT = 10.0  # seconds


class JournalFile:
    """One job's journal. Writes and fsync happen in threads: a shared file system may be slow. Written records survive
    the death of this process, synced records that of its machine.

    Args:
        directory: made (0700) if it is not there.
        warn: called once, from such a thread, with the reason when writing stops; and when the journal that is read is
            damaged.

    Attributes:
        path: the directory.

    Raises:
        StartupError: the directory, or what is in it, is not this user's alone, is in use, or cannot be used.
    """

    def __init__(self, directory: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.path = os.path.abspath(os.path.expanduser(directory))
        self._jobs: queue.SimpleQueue[tuple[list[bytes], bool] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unsynced = threading.Event()
        self._file_kept = threading.Lock()
        self._ended = False
        self._file = -1
        self._failed = False
        try:
            self._directory = PrivateDirectory.open(self.path, True, CLOSED)
        except UntrustedPathError as error:
            raise StartupError(str(error)) from None
        except OSError as error:
            raise StartupError(
                f"HPCRAY_JOURNAL_DIR {self.path}: {error.strerror}; hint: a directory of yours"
            ) from None
        try:
            self._lock = self._locked()
        except BaseException:
            self._directory.close()
            raise

    def read(self) -> list[bytes]:
        """The records of an earlier run, up to the first damage; none where there is no journal.

        Raises:
            StartupError: the journal is not this user's alone, or is no journal, or is damaged from the beginning.
        """
        where = os.path.join(self.path, _NAME)
        try:
            data = self._directory.read(_NAME, CLOSED)
        except FileNotFoundError:
            return []
        except UntrustedPathError as error:
            raise StartupError(f"the journal cannot be read: {error}") from None
        except OSError as error:
            raise StartupError(f"the journal {where} cannot be read: {error.strerror}; hint: remove it") from None
        if not data.startswith(_HEADER):
            raise StartupError(f"{where} is no journal of this version of hpcray; hint: remove it")
        records, damage = split_records(data, len(_HEADER))
        if damage is not None:
            self._warn_of_damage(where, len(records), damage, data)
        return records

    def append(self, record: bytes) -> None:
        """Add one record; it is on the disk soon."""
        self._hand_over(([record], False))

    def rewrite(self, records: list[bytes]) -> None:
        """Replace all records by these."""
        self._hand_over((records, True))

    def close(self, remove: bool = False) -> None:
        """Write the remaining records.

        A file system that does not answer is not waited for: its files close, and its lock ends, with this process.

        Args:
            remove: True if the job is done: the journal is removed.
        """
        if self._threads:
            self._jobs.put(None)
            deadline = time.monotonic() + _CLOSE_TIMEOUT
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if any(thread.is_alive() for thread in self._threads):
                what = "is not removed" if remove else "lacks its end"
                silent = f"the file system has not answered for {_CLOSE_TIMEOUT} s"
                self._warn(f"the journal in {self.path} {what}: {silent}")
                return
        if remove:
            for name in (_NAME, _NEW):
                with contextlib.suppress(OSError):
                    self._directory.remove(name)
        for fd in (self._file, self._lock):
            if fd >= 0:
                os.close(fd)
        self._file = self._lock = -1
        self._directory.close()

    def _warn_of_damage(self, where: str, read: int, damage: JournalDamage, data: bytes) -> None:
        dropped = f"{damage.size} bytes, with {damage}"
        if not read:
            raise StartupError(
                f"the journal {where} is damaged from its first record on ({dropped} in them); hint: remove it, and "
                "the job begins anew"
            )
        text = f"the journal {where} is damaged at byte {damage.at}: its last {dropped} in them, are not read; the job "
        text += f"goes on from the {f'{read} records' if read > 1 else 'record'} before; hint: look at its file system"
        with contextlib.suppress(OSError):
            self._directory.write(_DAMAGED, data)
            text += f"; what was there stays as {os.path.join(self.path, _DAMAGED)}"
        self._warn(text)

    def _hand_over(self, job: tuple[list[bytes], bool]) -> None:
        if job[1]:  # drops what is queued: a slow disk does not make it pile up
            with contextlib.suppress(queue.Empty):
                while True:
                    self._jobs.get_nowait()
        if not self._threads:
            for run in (self._run, self._sync):
                self._threads.append(threading.Thread(target=run, name="hpcray-journal", daemon=True))
                self._threads[-1].start()
        self._jobs.put(job)

    def _run(self) -> None:
        ended = False
        while not ended:
            jobs = [self._jobs.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    jobs.append(self._jobs.get_nowait())
            ended = None in jobs
            if not self._failed:
                try:
                    self._write([job for job in jobs if job is not None])
                except (OSError, MemoryError, struct.error) as error:
                    self._fail(error)
        self._ended = True
        self._unsynced.set()

    def _sync(self) -> None:
        ended = False
        while not ended:
            self._unsynced.wait()
            self._unsynced.clear()
            ended = self._ended  # with this, nothing more is written
            with self._file_kept:
                try:
                    if self._file >= 0 and not self._failed:
                        os.fsync(self._file)
                except OSError as error:
                    self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
            self._warn(f"the journal in {self.path} is not written any more: {why}")

    def _write(self, jobs: list[tuple[list[bytes], bool]]) -> None:
        latest = max((place for place, (_, whole) in enumerate(jobs) if whole), default=-1)
        if latest >= 0:
            self._replace(jobs[latest][0])
        following = b"".join(pack_record(record) for records, _ in jobs[latest + 1 :] for record in records)
        if following and self._file >= 0:
            _write_all(self._file, following)
            self._unsynced.set()

    def _replace(self, records: list[bytes]) -> None:
        self._directory.remove(_NEW)
        fd = self._directory.open_file(_NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL, CLOSED)
        try:
            _write_all(fd, _HEADER)
            for record in records:
                _write_all(fd, pack_record(record))
            os.fsync(fd)
            self._directory.rename(_NEW, _NAME)
            os.fsync(self._directory.fd)
        except BaseException:
            os.close(fd)
            raise
        with self._file_kept:
            self._file, old = fd, self._file
            if old >= 0:
                os.close(old)

    def _locked(self) -> int:
        """The lock's descriptor, -1 on file systems without locks."""
        try:
            fd = self._directory.open_file(_LOCK, os.O_RDWR | os.O_CREAT, CLOSED)
        except UntrustedPathError as error:
            raise StartupError(f"the journal's lock {error}") from None
        except OSError as error:
            raise StartupError(f"HPCRAY_JOURNAL_DIR {self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StartupError(
                    f"HPCRAY_JOURNAL_DIR {self.path} is in use by another job; hint: one directory per job, as in "
                    "HPCRAY_JOURNAL_DIR=$HOME/journals/%j"
                ) from None
            return -1
        return fd


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


_HEAD = struct.Struct("<II")
_HIGHEST = 3  # offset of the most significant byte of a length
_MAX_SEARCH_PLACES = 1 << 20  # with the next constant: a search for records after damage takes half a second at most
_MAX_SEARCH_BYTES = 1 << 28


class JournalDamage(Struct, frozen=True):
    """The part of a journal that cannot be read.

    Attributes:
        at, size: in bytes; the part extends to the end of the file.
        records: number of whole records in that part, as far as it was searched.
        all: True if all of it was searched.
    """

    at: int
    size: int
    records: int
    all: bool

    def __str__(self) -> str:
        least = "" if self.all else "at least "
        return f"{least}{self.records} whole record{'s' * (self.records != 1)}"


def pack_record(record: bytes) -> bytes:
    """A record as it is written. A record is not empty.

    Raises:
        struct.error: it is larger than 4 GB.
    """
    return _HEAD.pack(len(record), zlib.crc32(record)) + record


def split_records(data: bytes, start: int) -> tuple[list[bytes], JournalDamage | None]:
    """The whole records from `start` on, and the damage, if whole records follow one that is not whole."""
    records = []
    pos = start
    while end := _end_of(data, pos):
        records.append(data[pos + _HEAD.size : end])
        pos = end
    found, complete = _Later(data).count(pos)
    if found or _goes_on(data, pos):
        return records, JournalDamage(pos, len(data) - pos, found, complete)
    return records, None


def _end_of(data: bytes, pos: int) -> int:
    """The end of the record that begins here; 0 if there is no whole one."""
    if pos + _HEAD.size > len(data):
        return 0
    size, check = _HEAD.unpack_from(data, pos)
    end: int = pos + _HEAD.size + size
    if not size or end > len(data) or zlib.crc32(memoryview(data)[pos + _HEAD.size : end]) != check:
        return 0
    return end


def _goes_on(data: bytes, pos: int) -> bool:
    """True if bytes other than zeros follow the record that seems to begin here."""
    if pos + _HEAD.size > len(data):
        return False
    size, _ = _HEAD.unpack_from(data, pos)
    end = pos + _HEAD.size + size
    return bool(size) and bool(data[end:].strip(b"\0"))


class _Later:
    """Searches for whole records after damage."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._places = _MAX_SEARCH_PLACES
        self._bytes = _MAX_SEARCH_BYTES

    def count(self, pos: int) -> tuple[int, bool]:
        """The number of records after this position; and True if all of it was searched."""
        found = 0
        while pos := self._next(pos):
            while end := _end_of(self._data, pos):
                pos, found = end, found + 1
        return found, self._places > 0 and self._bytes > 0

    def _next(self, pos: int) -> int:
        """Start of the next record after this position; 0 if there is none."""
        data, size = self._data, len(self._data)
        # The highest byte of its length cannot be more than that of what is left.
        highest = re.escape(bytes([min(255, max(0, size - pos) >> 24)]))
        for match in re.compile(b"[\0-%b]" % highest).finditer(data, pos + 1 + _HIGHEST):
            at = match.start() - _HIGHEST
            if at + _HEAD.size > size or self._places <= 0 or self._bytes <= 0:
                return 0
            self._places -= 1
            claimed, _ = _HEAD.unpack_from(data, at)
            if 0 < claimed <= size - at - _HEAD.size:
                self._bytes -= claimed
                if _end_of(data, at):
                    return at
        return 0
