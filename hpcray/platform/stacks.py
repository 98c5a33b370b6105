"""Stacks of threads and coroutines. Frames are [file, line, function].

A process reads its own without a look at any disk: the one that shows a stack looks up the text of its lines
(`linecache`), so a process that answers never waits for a file system. A process that cannot answer, because C code of
the user's holds the GIL, dumps them: a signal handler written in C (`faulthandler`) writes into a memfd, which the
sender of the signal reads through /proc.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from hpcray.platform.process_tree import handles_signal

if TYPE_CHECKING:
    import asyncio

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE = os.sep + "hpcray" + os.sep
TEMPLATE = os.path.join("platform", "fork_server.py")
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_MAX_FRAMES = 100
_MAX_COROUTINES = 1_000
STACK_DUMP_SIGNAL = signal.SIGRTMAX - 4
_MEMFD_NAME = "hpcray-stacks"
_MAX_DUMP = 1 << 16  # bytes


def thread_stacks(skip: Iterable[int] = ()) -> list[dict[str, Any]]:
    """One row per thread of Python: "ident", "native" (its id for the kernel), "name", "frames" (innermost last).

    Args:
        skip: threads that are left out.
    """
    known = {thread.ident: thread for thread in threading.enumerate()}
    rows = []
    for ident, frame in sys._current_frames().items():
        if ident in skip:
            continue
        thread = known.get(ident)
        rows.append({
            "ident": ident,
            "native": (thread.native_id or 0) if thread is not None else 0,
            "name": thread.name if thread is not None else "not of Python",
            "frames": frames_of(frame),
        })  # fmt: skip
    main = threading.main_thread().ident
    return sorted(rows, key=lambda row: row["ident"] != main)


def frames_of(frame: FrameType | None) -> list[list[Any]]:
    """The frames of a stack, innermost last; of a very deep one the innermost."""
    found: list[list[Any]] = []
    while frame is not None and len(found) < _MAX_FRAMES:
        found.append(_show(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def coroutine_stacks(loop: asyncio.AbstractEventLoop, frames: bool = True) -> list[dict[str, Any]]:
    """One row per asyncio task of a loop that runs in another thread: "name", "frames" (innermost last; without
    `frames` none), and "local", the variables of its outermost frame."""
    import asyncio

    rows: list[dict[str, Any]] = []
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the loop changes its set faster than it can be copied
        return rows
    for task in list(tasks)[:_MAX_COROUTINES]:
        coroutine = task.get_coro()
        frame = _frame_of(coroutine)
        rows.append({
            "name": task.get_name(),
            "frames": await_chain(coroutine) if frames else [],
            "local": dict(frame.f_locals) if frame is not None else {},
        })  # fmt: skip
    return rows


def await_chain(awaited: Any) -> list[list[Any]]:
    """From a coroutine to what it waits for in the end: the frames that `Task.get_stack` does not give."""
    found: list[list[Any]] = []
    while awaited is not None and len(found) < _MAX_FRAMES:
        frame = _frame_of(awaited)
        if frame is not None:
            found.append(_show(frame.f_code, frame.f_lineno))
        awaited = next(
            (getattr(awaited, name) for name in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(awaited, name)),
            None,
        )
    return found


@cache
def part_of_hpcray(file: str) -> str:
    """Where in the package a file is; "" if it is not hpcray's. Who looks may have another copy than who is seen."""
    if file.startswith(_HERE):
        return file[len(_HERE) :]
    part = file.rpartition(_PACKAGE)[2]
    return part if part != file and os.path.exists(_HERE + part) else ""


def is_users(frame: list[Any]) -> bool:
    """Whether a frame is of the user's program or its packages: not of hpcray, not of Python's library."""
    file = frame[0]
    if file.startswith("<frozen") or part_of_hpcray(file):
        return False
    return not file.startswith(_LIBRARY) or any(mark in file for mark in _PACKAGES)


def after_fork(frames: list[list[Any]]) -> list[list[Any]]:
    """The frames without those of the template process that the worker was forked from."""
    last = max((place for place, frame in enumerate(frames) if part_of_hpcray(frame[0]) == TEMPLATE), default=-1)
    return frames[last + 1 :]


def interesting_frames(frames: list[list[Any]]) -> Iterator[list[Any]]:
    """The frames from the user's first on; of hpcray's frames only those that the user's code calls directly."""
    first = next((place for place, frame in enumerate(frames) if is_users(frame)), 0)
    follows_users = True
    for frame in frames[first:]:
        ours = bool(part_of_hpcray(frame[0]))
        if not ours or follows_users:
            yield frame
        follows_users = not ours


def _frame_of(awaited: Any) -> FrameType | None:
    for name in ("cr_frame", "gi_frame", "ag_frame"):
        frame = getattr(awaited, name, None)
        if isinstance(frame, FrameType):
            return frame
    return None


def _show(code: CodeType, line: int | None) -> list[Any]:
    return [code.co_filename, line or 0, getattr(code, "co_qualname", code.co_name)]


class _StackMemory:
    """State of this process: the descriptor of its memfd; -1: none."""

    fd = -1


def enable_stack_dump() -> None:
    """Enable `request_stack_dumps` for this process, until `disable_stack_dump`. A forked child enables it again."""
    disable_stack_dump()
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        _StackMemory.fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
        fcntl.fcntl(_StackMemory.fd, fcntl.F_SETFL, os.O_APPEND)
        faulthandler.register(STACK_DUMP_SIGNAL, _StackMemory.fd, all_threads=True)


def disable_stack_dump() -> None:
    """Undo `enable_stack_dump`."""
    if _StackMemory.fd >= 0:
        faulthandler.unregister(STACK_DUMP_SIGNAL)
        with contextlib.suppress(OSError):
            os.close(_StackMemory.fd)
        _StackMemory.fd = -1


def request_stack_dumps(pids: Iterable[int]) -> dict[int, str]:
    """Have processes write their stacks.

    Returns:
        By pid, the path for `read_stack_dump` a moment later. Processes that cannot write theirs are left out.
    """
    requested: dict[int, str] = {}
    for pid in pids:
        memory = _memory_of(pid)
        if memory and handles_signal(pid, STACK_DUMP_SIGNAL):
            with contextlib.suppress(OSError):
                os.truncate(memory, 0)
                os.kill(pid, STACK_DUMP_SIGNAL)
                requested[pid] = memory
    return requested


def read_stack_dump(memory: str) -> str:
    """The stacks that a process has written since the request; the innermost frames come first."""
    try:
        with open(memory, "rb") as file:
            return file.read(_MAX_DUMP).decode("utf-8", "replace")
    except OSError:
        return ""


def _memory_of(pid: int) -> str:
    directory = f"/proc/{pid}/fd"
    try:
        for name in os.listdir(directory):
            if os.readlink(f"{directory}/{name}").startswith(f"/memfd:{_MEMFD_NAME} "):
                return f"{directory}/{name}"
    except OSError:
        pass  # the process is gone
    return ""
