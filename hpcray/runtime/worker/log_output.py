"""The output of a worker: two log files, with the name of the task or actor before what it prints.

The files also get what native code and child processes print. The raylet passes their contents on to the driver
(`runtime.raylet.log_monitor`).
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct

from hpcray.common.ids import raylet_of
from hpcray.common.job_names import (
    FIRST_JOB,
    LOG_PREFIX_ACTOR_NAME,
    LOG_PREFIX_TASK_ID,
    LOG_PREFIX_TASK_NAME,
    logs_directory,
    worker_log_name,
)
from hpcray.common.terminal_text import plain
from hpcray.platform.log_format import configure_loggers, rotation_limits
from hpcray.platform.private_files import append_private_file
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.core_worker import CoreWorker, current

if TYPE_CHECKING:  # programs configure their log lines, and execute nothing
    from hpcray.runtime.worker.task_executor import TaskExecutor

_PARTS_KEPT = 5000
_NO_RUN = b"", 0.0
_PATIENCE = 0.02
"""Seconds that a thread waits for the end of another one's line; then its own output goes on in that line."""
_RETRY_INTERVAL = 1.0
"""Seconds between two tries to write where that has failed."""


class _Part(Struct):
    """The part of a file that one run of a task has written: from `start` to `end`; None: it was the last to write."""

    task: bytes
    start: int
    end: int | None = None


class LogOwner:
    """A worker, as its log files see it.

    Attributes:
        speaker: returns the line that names who writes ("" if it is not known), and which run of which task it is.
        complain: called with the reason when output begins to be lost: the disk is full, or the directory is gone.
    """

    def __init__(
        self,
        speaker: Callable[[], tuple[str, tuple[bytes, float]]] = lambda: ("", _NO_RUN),
        complain: Callable[[str], object] = lambda problem: None,
    ) -> None:
        self.speaker, self.complain = speaker, complain


class WorkerLogFile(io.RawIOBase):
    """One log file of this worker, behind descriptor 1 or 2. It is rotated before it becomes too large.

    Args:
        fd: the descriptor. Until `open` it is what it was before.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._path = ""
        self._owner = LogOwner()
        self._named = ""
        self._line = threading.Lock()  # held by the thread whose line has not ended
        self._writer = 0
        self._other: WorkerLogFile | None = None
        self._run = _NO_RUN
        self._parts: deque[_Part] = deque(maxlen=_PARTS_KEPT)
        self._at_line_start = True
        self._size = 0
        self._problem = ""  # why nothing can be written now
        self._opened = False
        self._lost = 0
        self._retry_at = 0.0

    def open(self, path: str, owner: LogOwner, other: WorkerLogFile | None = None) -> None:
        """Begin the file.

        Args:
            path: of the file.
            owner: the worker.
            other: the file with this worker's other output. A name that is written here is written there too: child
                processes of a task write to either without one, and the two files are read one after the other.
        """
        self._path = path
        self._owner = owner
        self._other = other
        self._open()

    @cached_property
    def _limits(self) -> tuple[int, int]:
        return rotation_limits()

    def writable(self) -> bool:
        """Always."""
        return True

    def fileno(self) -> int:
        """The descriptor written to."""
        return self._fd

    def write(self, data: Any) -> int:
        """Write all of it, after a line with the name of the writer where that is another one than before."""
        text = bytes(data)
        if not text:
            return 0
        size = len(text)
        if self._writer != (thread := get_ident()):
            self._line.acquire(timeout=_PATIENCE)  # `print` writes the end of its line for itself
            self._writer = thread
        if self._at_line_start:
            name, run = self._owner.speaker()
            if 0 < self._limits[0] < self._size + len(name) + size and self._size:
                self._rotate()
                name, self._named = name or self._named, ""  # it stands in the older file, which may be deleted soon
            if name and name != self._named:
                self._named = name
                line = name.encode("utf-8", "backslashreplace")
                text = line + text
                if self._other is not None:
                    self._other.take_name(name, line)
            if run[0] and run != self._run:
                self._run = run
                self._begin_part(run[0], len(text) - size)
        self._at_line_start = text.endswith(b"\n")
        self._size += len(text)
        self._write(text)
        if self._at_line_start and self._writer == thread:
            self._writer = 0
            with contextlib.suppress(RuntimeError):  # another thread has waited long enough, and released it
                self._line.release()
        return size

    def take_name(self, name: str, line: bytes) -> None:
        """Name the writer of what follows, as the other file does; not within a line."""
        if self._path and self._at_line_start and name != self._named:
            self._named = name
            self._end_part(os.lseek(self._fd, 0, os.SEEK_END))
            self._run = _NO_RUN
            self._size += len(line)
            self._write(line)

    def _write(self, text: bytes) -> None:
        """Write all of it, or count the lines that are lost: a full disk is no reason to fail the task."""
        if self._problem:
            if not self._recovers():
                self._lost += text.count(b"\n")
                return
        elif self._opened and len(text) > 1 and not os.fstat(self._fd).st_nlink:  # not for the end of a line
            self._begin_again()
        view = memoryview(text)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                self._lose(error)
                self._lost += bytes(view).count(b"\n")
                return

    def _lose(self, error: OSError) -> None:
        self._retry_at = time.monotonic() + _RETRY_INTERVAL
        if not self._problem:
            self._problem = error.strerror or str(error)
            self._owner.complain(self._problem)

    def _recovers(self) -> bool:
        """True if lines can be written again, after one that says how many are missing."""
        if time.monotonic() < self._retry_at:
            return False
        self._retry_at = time.monotonic() + _RETRY_INTERVAL
        if not self._opened:
            self._open()
            if not self._opened:
                return False
        said = f"\nhpcray: {self._lost} lines of output are lost here: {self._problem}\n".encode()
        try:
            if os.write(self._fd, said) < len(said):
                return False
        except OSError:
            return False
        self._problem, self._lost, self._named = "", 0, ""
        return True

    def _begin_again(self) -> None:
        """The file was removed, by a cleaner of temporary files: write to a new one of its name.

        Until the raylet has made the directory again, it reads what is written to the file without a name.
        """
        with contextlib.suppress(OSError):
            self._take(append_private_file(self._path))
            self._parts.clear()
            self._run, self._named = _NO_RUN, ""

    def say_what_is_lost(self) -> None:
        """Write how many lines are missing, if that can be written by now: this process ends."""
        if self._lost:
            self._retry_at = 0.0
            self._recovers()

    def parts(self, task: bytes) -> list[tuple[int, int | None]]:
        """Return where a task has written: from where to where, for each of its runs; None: to the end of the file."""
        return [(part.start, part.end) for part in self._parts if part.task == task]

    def _begin_part(self, task: bytes, before: int) -> None:
        """Another task writes from here on, after so many bytes."""
        here = os.lseek(self._fd, 0, os.SEEK_END)  # native code and child processes write too
        self._end_part(here)
        self._parts.append(_Part(task, here + before))

    def _end_part(self, here: int) -> None:
        if self._parts and self._parts[-1].end is None:
            self._parts[-1].end = here

    def _open(self) -> None:
        try:
            fd = append_private_file(self._path)
        except OSError as error:
            self._opened = False
            self._lose(error)
            fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        else:
            self._opened = True
        self._take(fd)

    def _take(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        os.dup2(fd, self._fd)
        os.close(fd)

    def _rotate(self) -> None:
        with contextlib.suppress(OSError):
            backups = self._limits[1]
            for number in range(backups, 0, -1):
                source = f"{self._path}.{number - 1}" if number > 1 else self._path
                with contextlib.suppress(FileNotFoundError):
                    os.replace(source, f"{self._path}.{number}")
            if backups <= 0:
                os.unlink(self._path)
            self._parts.clear()
            self._run = _NO_RUN
            self._open()


def write_to_log_files(process: CoreWorker, worker: TaskExecutor) -> Callable[[], None]:
    """Send what this worker prints, native code included, to its log files.

    Returns:
        A function that reports to the raylet that they cannot be written; for when the worker has started.
    """
    directory = logs_directory(process.place.session_dir)
    job = process.place.job.job_id if process.place.job is not None else FIRST_JOB
    name = worker_log_name(process.me, job, os.getpid())
    path = os.path.join(directory, name)

    def speaker() -> tuple[str, tuple[bytes, float]]:
        task = async_task.get() or process.local.task
        run = (task.task, process.local.since) if task is not None else _NO_RUN
        if worker.actor is not None:
            name = f"{LOG_PREFIX_ACTOR_NAME}{plain(worker.actor.shown_name)}\n"
        else:
            name = f"{LOG_PREFIX_TASK_NAME}{plain(worker.running_name(task))}\n" if task is not None else ""
        if task is not None and process.place.job is not None and process.place.job.names_tasks:
            name += f"{LOG_PREFIX_TASK_ID}{task.task.hex()}\n"
        return name, run

    early: list[str] = []
    started = False

    def complain(problem: str) -> None:
        where = os.path.realpath(directory)  # where the files stay, if they do
        text = f"what workers print cannot be written in {where}, and is lost: {problem}"
        if started:
            tell(text)
        else:
            early.append(text)

    def tell(text: str) -> None:
        def send() -> None:
            with process.engine.lock:
                process.engine.send(raylet_of(process.node), m.OutputLost(text))
                process.engine.flush()

        # This thread may hold the lock.
        threading.Thread(target=send, name="hpcray-output-lost", daemon=True).start()

    def tell_early() -> None:
        nonlocal started
        started = True
        for text in early[:1]:
            tell(text)

    sys.stdout.flush()
    sys.stderr.flush()
    for suffix, file in _FILES.items():
        file.open(f"{path}.{suffix}", LogOwner(speaker, complain), _FILES["err" if suffix == "out" else "out"])
    sys.stdout, sys.stderr = _STREAMS
    worker.log_parts = WorkerLogParts(name)
    return tell_early


class WorkerLogParts:
    """The parts of this worker's log files that its tasks wrote. name: of the files, without the suffix."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find(self, task: bytes, suffix: str) -> dict[str, Any]:
        """Return the "name" of the file "out" or "err", and the "parts" of it that a task wrote."""
        return {"name": f"{self._name}.{suffix}", "parts": _FILES[suffix].parts(task)}


def finish_output() -> None:
    """Write what is still in memory: this process ends now."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    for file in _FILES.values():
        file.say_what_is_lost()


def _text(file: WorkerLogFile) -> io.TextIOWrapper:
    # Nothing stays in memory: it would be lost with a worker that dies, and a line without its end is output too.
    return io.TextIOWrapper(cast(Any, file), "utf-8", "backslashreplace", write_through=True)


# Made when this module is imported, in the template process: a forked worker only opens the files.
_FILES = {"out": WorkerLogFile(1), "err": WorkerLogFile(2)}
_STREAMS = _text(_FILES["out"]), _text(_FILES["err"])


# ------------------------------------------------------------ log context
# The context of log lines: the job, process, node, task and actor that they come from.


def log_context() -> dict[str, Any]:
    """Return the job, process and node, and the task and actor where there is one, of this line; {} outside a job."""
    process = None if current.postponed else current.process
    if process is None:
        return {}
    known: dict[str, Any] = {
        "job_id": process.place.job_id,
        "worker_id": process.me.hex(),
        "node_id": process.place.node_id,
    }
    worker = current.worker
    if worker is None:
        return known
    if worker.actor is not None:
        known["actor_id"] = worker.actor.spec.actor.hex()
    running = async_task.get() or process.local.task
    if running is not None:
        known["task_id"] = running.task.hex()
        known["task_name"], known["task_func_name"] = worker.names_of(running)
    if worker.actor is not None:
        known["actor_name"] = worker.actor.spec.name
    return known


def log_as(config: Mapping[str, Any]) -> None:
    """Apply the fields of a `LoggingConfig` to this process."""
    configure_loggers(config["encoding"], config["log_level"], config["additional_log_standard_attrs"], log_context)
