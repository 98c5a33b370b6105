"""The head's journal on disk, for the next run of the same job: records of bytes that somebody else understands.

    <directory>/journal       a first line, then records: length u32, CRC-32 u32 (little endian), bytes
    <directory>/journal.new   the next one, while it is written; a rename makes it the journal
    <directory>/lock          held while a job uses the directory

    <directory>/journal.damaged   a journal in which the last job found damage, as it was

A record that was cut off by a death is not there, nor is what follows one that is damaged, which is told. What is in it
is run by the next job: so nothing is read that another user could have written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import stat
import struct
import threading
import time
from collections.abc import Callable

from hpcray.base.failures import StartupError
from hpcray.host.journal_records import Damage, pack, split

_FIRST = b"hpcray-journal 1\n"
_NAME, _NEW, _LOCK, _DAMAGED = "journal", "journal.new", "lock", "journal.damaged"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_CLOSE_TIME = 10.0


class JournalFile:
    """One job's journal. Writing and fsync happen in threads: a shared file system may take its time. What is written
    survives the death of this process, what is synced that of its machine.

    Args:
        directory: made (0700) if it is not there.
        warn: called once, from that thread, with the reason why nothing is written any more; and when what is read is
            damaged.

    Raises:
        StartupError: the directory, or what is in it, is not this user's alone, is in use, or cannot be used.
    """

    def __init__(self, directory: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._path = os.path.abspath(os.path.expanduser(directory))
        self._jobs: queue.SimpleQueue[tuple[list[bytes], bool] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._unsynced = threading.Event()
        self._file_kept = threading.Lock()
        self._ended = False
        self._file = -1
        self._failed = False
        try:
            os.makedirs(self._path, mode=0o700, exist_ok=True)
            self._dir = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StartupError(
                f"HPCRAY_JOURNAL_DIR {self._path}: {error.strerror}; hint: a directory of yours"
            ) from None
        try:
            _need_private(self._dir, self._path, "chmod 700")
            self._lock = self._locked()
        except BaseException:
            os.close(self._dir)
            raise

    @property
    def path(self) -> str:
        """The directory."""
        return self._path

    def read(self) -> list[bytes]:
        """The records of an earlier run, up to the first damage; none where there is no journal.

        Raises:
            StartupError: the journal is not this user's alone, or is no journal, or is damaged from the beginning.
        """
        where = os.path.join(self._path, _NAME)
        try:
            fd = os.open(_NAME, os.O_RDONLY | _FLAGS, dir_fd=self._dir)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StartupError(f"the journal {where} cannot be read: {error.strerror}; hint: remove it") from None
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StartupError(f"the journal {where} is no file; hint: remove it")
            _need_private(fd, where, "chmod 600")
            data = file.read()
        if not data.startswith(_FIRST):
            raise StartupError(f"{where} is no journal of this version of hpcray; hint: remove it")
        records, damage = split(data, len(_FIRST))
        if damage is not None:
            self._tell_damage(where, len(records), damage)
        return records

    def append(self, record: bytes) -> None:
        """One more record, soon on the disk."""
        self._hand_over(([record], False))

    def rewrite(self, records: list[bytes]) -> None:
        """From now on these records are all that there is."""
        self._hand_over((records, True))

    def close(self, remove: bool = False) -> None:
        """Write what is left. remove: the job is done, there is nothing to go on with.

        A file system that does not answer is not waited for: its files close, and its lock ends, with this process.
        """
        if self._threads:
            self._jobs.put(None)
            deadline = time.monotonic() + _CLOSE_TIME
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            if any(thread.is_alive() for thread in self._threads):
                what = "is not removed" if remove else "lacks its end"
                self._warn(f"the journal in {self._path} {what}: the file system has not answered for {_CLOSE_TIME} s")
                return
        if remove:
            for name in (_NAME, _NEW):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._dir)
        for fd in (self._file, self._lock, self._dir):
            if fd >= 0:
                os.close(fd)
        self._file = self._lock = self._dir = -1

    def _tell_damage(self, where: str, read: int, damage: Damage) -> None:
        dropped = f"{damage.size} bytes, with {damage}"
        if not read:
            raise StartupError(
                f"the journal {where} is damaged from its first record on ({dropped} in them); hint: remove it, and "
                "the job begins anew"
            )
        text = f"the journal {where} is damaged at byte {damage.at}: its last {dropped} in them, are not read; the job "
        text += f"goes on from the {f'{read} records' if read > 1 else 'record'} before; hint: look at its file system"
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_DAMAGED, dir_fd=self._dir)
            os.link(_NAME, _DAMAGED, src_dir_fd=self._dir, dst_dir_fd=self._dir)
            text += f"; what was there stays as {os.path.join(self._path, _DAMAGED)}"
        self._warn(text)

    # ------------------------------------------------------------ the thread

    def _hand_over(self, job: tuple[list[bytes], bool]) -> None:
        if job[1]:  # what was to be written before matters no more: where the disk is slow it does not pile up
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
            self._warn(f"the journal in {self._path} is not written any more: {why}")

    def _write(self, jobs: list[tuple[list[bytes], bool]]) -> None:
        latest = max((place for place, (_, whole) in enumerate(jobs) if whole), default=-1)
        if latest >= 0:
            self._replace(jobs[latest][0])
        following = b"".join(pack(record) for records, _ in jobs[latest + 1 :] for record in records)
        if following and self._file >= 0:
            _write_all(self._file, following)
            self._unsynced.set()

    def _replace(self, records: list[bytes]) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NEW, dir_fd=self._dir)
        fd = os.open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=self._dir)
        try:
            _write_all(fd, _FIRST)
            for record in records:
                _write_all(fd, pack(record))
            os.fsync(fd)
            os.rename(_NEW, _NAME, src_dir_fd=self._dir, dst_dir_fd=self._dir)
            os.fsync(self._dir)
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
            fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._dir)
        except OSError as error:
            raise StartupError(f"HPCRAY_JOURNAL_DIR {self._path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StartupError(
                    f"HPCRAY_JOURNAL_DIR {self._path} is in use by another job; hint: one directory per job, as in "
                    "HPCRAY_JOURNAL_DIR=$HOME/journals/%j"
                ) from None
            return -1
        return fd


def _need_private(fd: int, path: str, repair: str) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise StartupError(f"{path} belongs to user {found.st_uid}, not to this one; hint: take a directory of yours")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise StartupError(f"{path} is open to other users (mode {mode:o}); hint: {repair} {path}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
