"""What the threads and coroutines of this process do now. Frames are [file, line, function]; nothing is read from disk.

Who shows a stack looks up the text of its lines (`linecache`): a process that answers must not wait for a file system.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from functools import cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PACKAGE = os.sep + "hpcray" + os.sep
TEMPLATE = os.path.join("host", "template.py")
_LIBRARY = os.path.dirname(os.__file__) + os.sep
_PACKAGES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_DEEPEST = 100
_MOST_COROUTINES = 1_000


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
    while frame is not None and len(found) < _DEEPEST:
        found.append(_show(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def coroutine_stacks(loop: asyncio.AbstractEventLoop) -> list[dict[str, Any]]:
    """One row per asyncio task of a loop that runs in another thread: "name", "frames" (innermost last), and "local",
    the variables of its outermost frame."""
    import asyncio

    rows: list[dict[str, Any]] = []
    try:
        tasks = asyncio.all_tasks(loop)
    except RuntimeError:  # the loop changes its set faster than it can be copied
        return rows
    for task in list(tasks)[:_MOST_COROUTINES]:
        coroutine = task.get_coro()
        frame = _frame_of(coroutine)
        rows.append({
            "name": task.get_name(),
            "frames": await_chain(coroutine),
            "local": dict(frame.f_locals) if frame is not None else {},
        })  # fmt: skip
    return rows


def await_chain(awaited: Any) -> list[list[Any]]:
    """From a coroutine to what it waits for in the end: the frames that `Task.get_stack` does not give."""
    found: list[list[Any]] = []
    while awaited is not None and len(found) < _DEEPEST:
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


def _frame_of(awaited: Any) -> FrameType | None:
    for name in ("cr_frame", "gi_frame", "ag_frame"):
        frame = getattr(awaited, name, None)
        if isinstance(frame, FrameType):
            return frame
    return None


def _show(code: CodeType, line: int | None) -> list[Any]:
    return [code.co_filename, line or 0, getattr(code, "co_qualname", code.co_name)]
