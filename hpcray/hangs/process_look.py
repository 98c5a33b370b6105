"""The threads and coroutines of this process, and the objects that they wait for: one process's part of a look.

Nothing is kept for it while the program runs: the stacks say which `get` or `wait` a thread is in, and the variables of
its frame say for what. A look costs a stack walk per thread, and is made only where a job may hang.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import thread as futures_thread
from time import perf_counter
from types import CodeType, FrameType
from typing import Any

from hpcray.diagnostics.process_activity import kernel_wait
from hpcray.diagnostics.wait_kinds import MESSAGE, OTHER, TIMED, KernelWait
from hpcray.hangs.messages import (
    COROUTINE,
    DEBUGGER,
    LOOP,
    OUTSIDE,
    QUEUE,
    SUBPROCESS,
    CallLook,
    ProcessLook,
    ThreadLook,
    WaitLook,
)
from hpcray.platform.stacks import after_fork, frames_of, is_users, part_of_hpcray
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.io_engine import IoEngine
from hpcray.runtime.core_worker.object_reader import ObjectReader
from hpcray.runtime.core_worker.object_refs import awaited_object
from hpcray.runtime.core_worker.wait_manager import WaitManager
from hpcray.runtime.worker.concurrency_groups import AsyncioCallRunner

_GET, _WAIT = ObjectReader._await_local.__code__, WaitManager._wait.__code__
_NEXT = ObjectRefGenerator.__next__.__code__
_ENGINE = IoEngine.wait.__code__
_POOL_THREAD = futures_thread._worker.__code__
_TIMER = threading.Timer.run.__code__
_MONITORS = (os.sep + os.path.join("tqdm", "_monitor.py"),)
"""Files of threads that libraries keep for themselves, and that end no wait of a program."""
_LOOPS = {base.run_forever.__code__ for base in (asyncio.BaseEventLoop,)}
_SELECTORS = (os.sep + "selectors.py", os.sep + os.path.join("worker", "actor_event_loop.py"))
_DEBUGGERS = ("bdb.py", "pdb.py", "debugger.py", "code.py", "codeop.py", "debugpy", "pydevd.py", "pydevd_runpy.py")
_QUEUE_FILE = os.path.join("util", "queue.py")
_UNKNOWN_TIME = 3600.0
"""Seconds after which a wait ends at the latest that a timer may end at any time."""
_MOST_OBJECTS = 1_000
"""Objects of one wait that are looked at."""
_MOST_COROUTINES = 2_000


def look_at_process(process: CoreWorker, kernel: bool = False) -> ProcessLook:
    """Look at this process (engine's lock held).

    Args:
        kernel: also at what the kernel knows of its threads; that reads files.
    """
    found = _Look(process, kernel)
    for ident, frame in sys._current_frames().items():
        found.thread(ident, frame)
    worker = current.worker
    spec = worker.actor.spec if worker is not None and worker.actor is not None else None
    slots = 1 if spec is None else 0 if spec.concurrency_groups else max(1, spec.max_concurrency)
    if found.loop_is_blocked and slots:
        slots = max(1, len(found.calls))  # no further call begins
    return ProcessLook(
        process.me,
        os.getpid(),
        process.kind,
        process.is_driver,
        process.task_counter,
        found.waits,
        found.calls,
        found.others,
        slots,
        spec.actor if spec is not None else b"",
        spec.class_name if spec is not None else "",
        list(process.submitter.actors._clients) if found.others else [],
        process.is_driver and _handles_signals(),
    )


class _Look:
    """Collects what the threads of one process do."""

    def __init__(self, process: CoreWorker, kernel: bool) -> None:
        self._process = process
        self._kernel = kernel
        self._worker = current.worker
        self._threads = {thread.ident: thread for thread in threading.enumerate()}
        self._coroutines = 0
        self.loop_is_blocked = False
        self.waits: list[WaitLook] = []
        self.calls: list[CallLook] = []
        self.others: list[ThreadLook] = []

    def thread(self, ident: int, frame: FrameType) -> None:
        frames = list(_outwards(frame))
        call = self._call_of(ident)
        place = _place(frames)
        users = any(map(is_users, after_fork(frames_of(frame))))
        blocked = next((one for one in frames if one.f_code in (_GET, _WAIT, _NEXT)), None)
        loop = next((one.f_locals.get("self") for one in frames if one.f_code in _LOOPS), None)
        self.loop_is_blocked = self.loop_is_blocked or (loop is not None and blocked is not None)
        current_call = self._coroutines_of(loop, ident if blocked is not None else 0)
        if blocked is not None:
            task = call.task if call is not None else current_call
            self.waits.append(self._wait(blocked, ident, task, place))
            if call is not None:
                call.thread = ident
        elif loop is not None and frames[0].f_code.co_filename.endswith(_SELECTORS):
            pass  # its coroutines were looked at
        elif (users and not _is_monitor(frames)) or call is not None or self._acts(frames):
            engine = next((number for number, one in enumerate(frames) if one.f_code is _ENGINE), -1)
            if engine >= 0:
                place = _place(frames[engine + 1 :])  # it may be this thread that looks, out of its wait
            seen = _message_wait(frames[engine]) if engine >= 0 else self._kernel_wait(ident)
            self.others.append(
                ThreadLook(seen.kind, seen.target, seen.descriptor, seen.switches, what_of(frames), place)
            )
        if call is not None:
            call.place = place
            self.calls.append(call)

    def _kernel_wait(self, ident: int) -> KernelWait:
        thread = self._threads.get(ident)
        native = (thread.native_id or 0) if thread is not None else 0
        if thread is threading.main_thread():
            native = os.getpid()  # of a worker, which was forked, Python knows that of its parent
        return kernel_wait(os.getpid(), native) if self._kernel else KernelWait(OTHER)

    def _call_of(self, ident: int) -> CallLook | None:
        local = self._worker.thread_locals.get(ident) if self._worker is not None else None
        msg = local.get("task") if local is not None else None
        return self._call(msg, local.get("since", 0.0)) if local is not None and msg is not None else None

    def _call(self, msg: Any, since: float) -> CallLook:
        return CallLook(msg.task, self._worker.running_name(msg), perf_counter() - since, 0)

    def _wait(self, frame: FrameType, ident: int, call: bytes, place: str) -> WaitLook:
        local, entries = frame.f_locals, self._process.table.entries
        if frame.f_code is _NEXT:
            item = local.get("oid", b"")
            missing = [item] if item in entries and not entries[item].available else []
            return WaitLook(ident, len(missing), missing, -1.0, call, place)
        limit = local.get("timeout")
        timeout = -1.0 if limit is None else max(0.0, float(limit))
        oids = local.get("oids") or ()
        if frame.f_code is _GET:
            missing = [oid for oid in oids if oid in entries and not entries[oid].available]
            return WaitLook(
                ident, len(missing), missing[:_MOST_OBJECTS], timeout, call, place, len(missing) <= _MOST_OBJECTS
            )
        there = len(local.get("ready") or ())
        missing = [oid for oid in oids if oid in entries and not entries[oid].available]
        wanted = max(1, int(local.get("num_returns") or 1) - max(there, len(oids) - len(missing)))
        return WaitLook(ident, wanted, missing[:_MOST_OBJECTS], timeout, call, place, len(missing) <= _MOST_OBJECTS)

    def _coroutines_of(self, loop: Any, blocked_by: int) -> bytes:
        """Note the coroutines of an event loop. blocked_by: the thread, if a `get` on it keeps them all from going on.

        Returns:
            The call that the loop's thread executes; b"" for none.
        """
        executing = b""
        if not isinstance(loop, asyncio.AbstractEventLoop):
            return executing
        try:
            tasks = asyncio.all_tasks(loop)
        except RuntimeError:  # the loop changes its set faster than it can be copied
            self.others.append(ThreadLook(COROUTINE, "", -1, 0, OUTSIDE, "an event loop"))
            return executing
        outside = _waits_for_the_outside(loop)
        busy = asyncio.tasks._current_tasks.get(loop)  # type: ignore[attr-defined]
        for task in list(tasks)[:_MOST_COROUTINES]:
            coroutine: Any = task.get_coro()
            frame = getattr(coroutine, "cr_frame", None)
            local = frame.f_locals if frame is not None and frame.f_code is AsyncioCallRunner._run.__code__ else {}
            msg, since = local.get("msg"), local.get("started")
            call = self._call(msg, since) if isinstance(msg, m.ActorCall) and since is not None else None
            if isinstance(msg, m.ActorCall) and call is None:
                continue  # it waits for its turn
            if task is busy:
                executing = call.task if call is not None else b""
            self._coroutine(task, coroutine, call, blocked_by, outside)
        return executing

    def _coroutine(self, task: Any, coroutine: Any, call: CallLook | None, blocked_by: int, outside: bool) -> None:
        self._coroutines += 1
        number = -self._coroutines
        place = _place(list(_awaited_frames(coroutine))[::-1])
        waits_for = awaited_object(getattr(task, "_fut_waiter", None), self._process.table.entries)
        if waits_for and not blocked_by:
            self.waits.append(
                WaitLook(
                    number,
                    1,
                    [waits_for],
                    _UNKNOWN_TIME if outside else -1.0,
                    call.task if call is not None else b"",
                    place,
                )
            )
        elif not blocked_by:
            files = {part_of_hpcray(frame.f_code.co_filename) for frame in _awaited_frames(coroutine)}
            what = OUTSIDE if outside else QUEUE if _QUEUE_FILE in files else ""
            self.others.append(ThreadLook(COROUTINE, "", -1, 0, what, place))
        if call is not None:
            call.thread = blocked_by or (number if waits_for else 0)
            call.place = place
            self.calls.append(call)

    def _acts(self, frames: list[FrameType]) -> bool:
        """Return whether a thread without code of the program may do something for it."""
        ours = any(part_of_hpcray(frame.f_code.co_filename) for frame in frames)
        pool = frames[0].f_code is _POOL_THREAD
        return not (ours or pool) or any(frame.f_code is _TIMER for frame in frames)


def _message_wait(frame: FrameType) -> KernelWait:
    """Return the wait of `IoEngine.wait`: a message of the job ends it, or a time."""
    return KernelWait(MESSAGE if frame.f_locals.get("deadline") in (None, math.inf) else TIMED)


def what_of(frames: list[FrameType]) -> str:
    """Return what a thread is at work for, by its frames: one of the words in `hpcray.hangs.messages`, or ""."""
    for frame in frames:
        code: CodeType = frame.f_code
        if code in _LOOPS:
            return LOOP
        base = os.path.basename(code.co_filename)
        if base in _DEBUGGERS:
            return DEBUGGER
        if base == "subprocess.py":
            return SUBPROCESS
    return ""


def _waits_for_the_outside(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if an event loop has timers, or sockets beside the one that wakes it.

    `asyncio.timeout` cancels what a coroutine awaits: where a timer runs, each wait may end by itself.
    """
    if any(not handle.cancelled() for handle in getattr(loop, "_scheduled", ())):
        return True
    selector = getattr(loop, "_selector", None)
    registered = selector.get_map() if selector is not None else None
    return registered is None or len(registered) > 1


def _handles_signals() -> bool:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        handler = signal.getsignal(number)
        code = getattr(getattr(handler, "handler", handler), "__code__", None)
        ours = code is not None and part_of_hpcray(code.co_filename)
        if callable(handler) and handler is not signal.default_int_handler and not ours:
            return True
    return False


def _is_monitor(frames: list[FrameType]) -> bool:
    return any(frame.f_code.co_filename.endswith(_MONITORS) for frame in frames)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _awaited_frames(awaited: Any) -> Iterator[FrameType]:
    while awaited is not None:
        for name in ("cr_frame", "gi_frame", "ag_frame"):
            frame = getattr(awaited, name, None)
            if isinstance(frame, FrameType):
                yield frame
        awaited = next(
            (getattr(awaited, name) for name in ("cr_await", "gi_yieldfrom", "ag_await") if hasattr(awaited, name)),
            None,
        )


def _place(frames: list[FrameType]) -> str:
    """`file.py:12 in f`: the innermost line of the user's, else the innermost one."""
    for frame in frames:
        name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        if is_users([frame.f_code.co_filename, frame.f_lineno or 0, name]):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {name}"
    if not frames:
        return ""
    return f"{frames[0].f_code.co_filename}:{frames[0].f_lineno} in {frames[0].f_code.co_name}"
