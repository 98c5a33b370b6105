"""The threads and coroutines of this process, and the objects that they wait for: one process's part of a look.

Nothing is kept for it while the program runs: the stacks say which `get` or `wait` a thread is in, and the variables of
its frame say for what. A look costs a stack walk per thread, and is made only where a job may hang.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import functools
import inspect
import itertools
import linecache
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import thread as futures_thread
from time import perf_counter
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from hpcray.common.exceptions import GetTimeoutError
from hpcray.diagnostics.process_activity import kernel_wait
from hpcray.diagnostics.wait_kinds import MESSAGE, OTHER, TIMED, KernelWait
from hpcray.hangs.messages import (
    COROUTINE,
    DEBUGGER,
    LOOP,
    OUTSIDE,
    QUEUE,
    REPEATS,
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
_CHANNEL_FILE = os.sep + os.path.join("hpcray", "graphs", "channel_memory.py")
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
    if signal.getitimer(signal.ITIMER_REAL)[0] > 0.0:  # its handler may end any wait
        found.others.append(ThreadLook(TIMED, "", -1, 0, "", "setitimer"))
    worker = current.worker
    spec = worker.actor.spec if worker is not None and worker.actor is not None else None
    slots = 1 if spec is None else 0 if spec.concurrency_groups else max(1, spec.max_concurrency)
    if found.loop_is_blocked and slots:
        slots = max(1, len(found.calls))  # no further call begins
    return ProcessLook(
        process.me,
        os.getpid(),
        process.place.kind,
        process.place.is_driver,
        process.task_counter,
        found.waits,
        found.calls,
        found.others,
        slots,
        spec.actor if spec is not None else b"",
        spec.class_name if spec is not None else "",
        list(process.submitter.actors._clients) if found.others else [],
        _handles_signals(),
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
            wait = self._wait(blocked, ident, task, place)
            wait.repeats = self._kernel and wait.timeout >= 0 and (_is_library(frames) or polls_for_the_job(frames))
            self.waits.append(wait)
            if call is not None:
                call.thread = ident
        elif loop is not None and frames[0].f_code.co_filename.endswith(_SELECTORS):
            pass  # its coroutines were looked at
        elif (users and not _is_monitor(frames)) or call is not None or self._acts(frames):
            engine = next((number for number, one in enumerate(frames) if _waits_for_a_message(one.f_code)), -1)
            if engine >= 0:
                place = _place(frames[engine + 1 :])  # it may be this thread that looks, out of its wait
            seen = _message_wait(frames[engine]) if engine >= 0 else self._kernel_wait(ident)
            what = what_of(frames)
            if seen.kind == TIMED and what != DEBUGGER and polls_for_the_job(frames):
                what = REPEATS
            self.others.append(ThreadLook(seen.kind, seen.target, seen.descriptor, seen.switches, what, place))
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
            # Of an item nobody knows who makes it; of the end of its task, which comes after the item, one does.
            parts = [local.get("oid", b""), local["self"]._completed._id]
            missing = [oid for oid in parts if oid in entries and not entries[oid].available]
            return WaitLook(ident, min(1, len(missing)), missing[-1:], -1.0, call, place)
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


def _waits_for_a_message(code: CodeType) -> bool:
    """Return True for `IoEngine.wait`, and for the wait of a compiled graph's channel, which looks at its peers now and
    then and so seems to the kernel to sleep."""
    return code is _ENGINE or (
        code.co_name == "wait" and "deadline" in code.co_varnames and code.co_filename.endswith(_CHANNEL_FILE)
    )


def _message_wait(frame: FrameType) -> KernelWait:
    """Return the kind of a wait for a message of the job: the message ends it, or a time."""
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


# ------------------------------------------------------------ loops that poll
# A thread that sleeps, or waits with a timeout, again and again: what its loop looks at decides whether it can end. The
# source of the loop is read. Where it does nothing but sleep and look at what the job itself has (objects, events,
# queues, threads and children of this process, plain variables), it goes on for ever once nothing else in the job
# moves. A loop that counts, looks at a clock or at a file, or calls what is not known here may end by itself.

_LONGEST_SLEEP = 5.0
"""Seconds; loops with longer sleeps may not have gone round between two looks."""
_LIBRARIES = (os.sep + "site-packages" + os.sep, os.sep + "dist-packages" + os.sep)
_JOB_MODULES = (
    "hpcray", "threading", "_thread", "queue", "_queue", "concurrent", "multiprocessing", "subprocess", "logging",
)  # fmt: skip
"""Modules whose objects show nothing outside of the job."""
_PURE = frozenset(
    {all, any, bool, bytes, dict, enumerate, float, frozenset, int, isinstance, len, list, max, min, print, range, repr,
     reversed, set, sorted, str, sum, tuple, type, zip}
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, str, bytes, int, float, bool, type(None))
_DEFINITIONS = (type, FunctionType, BuiltinFunctionType, MethodType)
_READS = frozenset(
    {"copy", "count", "get", "index", "items", "join", "keys", "format", "startswith", "strip", "values"}
)
_GIVES_ANYTHING = frozenset({"get", "get_nowait", "recv", "result"})
"""Functions of the job's that return a program's own objects, whose operators may do anything."""
_EXTENDS = frozenset({"extend", "update"})
_DEEPEST_CALL = 4
_UNKNOWN: Any = object()
_PLAIN: Any = object()
"""A value of Python's own types, or of the job's, that is not known."""


class _MayEnd(Exception):
    """A loop may end by itself, or from outside."""


def polls_for_the_job(frames: list[FrameType]) -> bool:
    """Return True if a wait with a timeout is part of a loop that ends only if something else in the job moves.

    Args:
        frames: of the thread, the innermost first.
    """
    error = next((found for frame in frames if (found := _timeout_error(frame.f_code)) is not None), None)
    users = [frame for frame in frames if is_users([frame.f_code.co_filename, 0, ""])]
    try:
        for frame in users:
            if _LoopReader(frame, error).is_endless():
                return True
            error = None
    except (_MayEnd, OSError, SyntaxError, ValueError, RecursionError):
        pass
    return False


def _is_library(frames: list[FrameType]) -> bool:
    """Return True if a wait is a library's, such as those on Ray: its loops poll for what it waits for."""
    first = next((frame.f_code.co_filename for frame in frames if is_users([frame.f_code.co_filename, 0, ""])), "")
    return any(mark in first for mark in _LIBRARIES)


def _timeout_error(code: CodeType) -> type[BaseException] | None:
    """Return what a function that waits raises when its time is over."""
    if code is _GET:
        return GetTimeoutError
    base, name = os.path.basename(code.co_filename), code.co_name
    if base in ("queue.py", "queues.py") and name in ("get", "put"):
        return queue.Empty if name == "get" else queue.Full
    if base == "_base.py" and name in ("result", "exception"):
        return futures.TimeoutError
    if base == "subprocess.py" and name in ("wait", "communicate"):
        return subprocess.TimeoutExpired
    return None


@functools.lru_cache(16)
def _parsed(file: str) -> ast.Module:
    return ast.parse("".join(linecache.getlines(file)))


def _function_of(code: CodeType) -> ast.AST:
    tree = _parsed(code.co_filename)
    if code.co_name == "<module>" and tree.body:
        return tree
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.name == code.co_name
            and code.co_firstlineno in (node.lineno, *(one.lineno for one in node.decorator_list))
        ):
            return node
    raise _MayEnd


class _LoopReader:
    """Reads what one frame does around its wait.

    Args:
        error: what the wait raises when its time is over; None: it returns.
    """

    def __init__(self, frame: FrameType, error: type[BaseException] | None) -> None:
        self._frame = frame
        self._error = error
        self._names: dict[str, Any] = dict(frame.f_locals)
        self._globals = frame.f_globals
        self._changing: set[str] = set()
        self._tested: set[str] = set()
        self._depth = 0
        self._called = False

    def is_endless(self) -> bool:
        """Return True if the wait is in a loop without end, False if the function goes on to its end and returns."""
        function = _function_of(self._frame.f_code)
        chain: list[ast.AST] = [function]
        while (inner := self._at_work(chain[-1])) is not None:
            chain.append(inner)
        loops = [place for place, node in enumerate(chain) if self._goes_round(node)]
        start = loops[-1] if loops else 0
        if not loops and isinstance(function, ast.Module):
            raise _MayEnd
        self._depth = 0 if loops else 1
        node: Any = chain[start]
        if isinstance(node, ast.While):
            self._test(node.test)
        self._block(node.body)
        if self._changing & self._tested or self._error is not None:
            raise _MayEnd
        return bool(loops)

    def _at_work(self, node: ast.AST) -> ast.AST | None:
        """Return the statement directly within another one that is executed now."""
        line = self._frame.f_lineno or 0
        parts: list[ast.AST] = []
        for name in ("body", "orelse", "finalbody", "handlers"):
            found = getattr(node, name, None)
            parts += found if isinstance(found, list) else []
        return next((one for one in parts if getattr(one, "lineno", 0) <= line <= getattr(one, "end_lineno", 0)), None)

    def _goes_round(self, node: ast.AST) -> bool:
        return isinstance(node, ast.While) or (
            isinstance(node, ast.For)
            and isinstance(node.iter, ast.Call)
            and self._value(node.iter.func) is itertools.count
        )

    # -------------------------------------------------------- statements

    def _block(self, body: list[ast.stmt]) -> None:
        for one in body:
            if not self._statement(one):
                return

    def _statement(self, node: Any) -> bool:
        """Look at one statement. Returns whether the next one follows it."""
        if isinstance(node, ast.Expr):
            self._expression(node.value)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            self._assignment(node)
        elif isinstance(node, ast.If):
            return self._branch(node)
        elif isinstance(node, ast.While):
            self._test(node.test)
            self._block(node.body)
        elif isinstance(node, ast.For):
            if self._value(node.iter) in ([], (), {}, set()):
                return True
            self._expression(node.iter)
            self._bind(node.target, node.iter)
            self._block(node.body)
        elif isinstance(node, ast.Try):
            return self._try(node)
        elif isinstance(node, ast.With):
            for item in node.items:
                if not _is_of_the_job(self._value(item.context_expr)):
                    raise _MayEnd
            self._block(node.body)
        elif isinstance(node, ast.Continue):
            return False
        elif isinstance(node, ast.Return) and self._depth:
            if node.value is not None:
                self._expression(node.value)
            return False
        elif not isinstance(node, (ast.Pass, ast.Global, ast.Nonlocal)):
            raise _MayEnd
        return True

    def _assignment(self, node: Any) -> None:
        if node.value is None:
            return
        self._expression(node.value)
        grows = isinstance(node, ast.AugAssign) and not self._is_empty_length(node.value)
        if grows or any(isinstance(one, ast.BinOp) for one in ast.walk(node.value)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            self._changing |= {_dotted(one) for target in targets for one in _leaves(target)}
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for one in _leaves(target):
                if not isinstance(one, (ast.Name, ast.Attribute)):
                    raise _MayEnd
                if self._called and isinstance(one, ast.Name):  # there is no frame that knows it
                    self._names[one.id] = self._result(node.value)

    def _result(self, node: ast.expr) -> Any:
        """Return what is known of the value of an expression that a function assigns."""
        if isinstance(node, ast.Subscript):
            return self._result(node.value)
        if isinstance(node, (ast.Compare, ast.List, ast.Tuple, ast.Dict, ast.Set)):
            return _PLAIN
        if not isinstance(node, ast.Call):
            return self._value(node)
        called = self._value(node.func)
        name = getattr(called, "__name__", "")
        known = any(called is one for one in _PURE) or (_is_of_the_job(called) and name not in _GIVES_ANYTHING)
        return _PLAIN if known else _UNKNOWN

    def _branch(self, node: ast.If) -> bool:
        known = self._truth(node.test)
        self._test(node.test)
        follows = []
        for taken, body in ((True, node.body), (False, node.orelse)):
            if known is not None and known != taken:
                continue
            if known is None and body and self._leaves_the_loop(body[-1]):
                continue  # it would have left the loop when it went round before
            follows.append(self._follow(body))
        if not follows:
            raise _MayEnd
        return any(follows)

    def _follow(self, body: list[ast.stmt]) -> bool:
        return all(self._statement(one) for one in body)

    def _leaves_the_loop(self, node: ast.stmt) -> bool:
        return isinstance(node, (ast.Break, ast.Raise)) or (isinstance(node, ast.Return) and not self._depth)

    def _try(self, node: ast.Try) -> bool:
        raises = False
        follows = True
        for one in node.body:
            if self._error is not None and self._at_work(ast.Module([one], [])) is not None:
                raises = True
                self._calls_of(one)
                break
            follows = self._statement(one)
            if not follows:
                break
        caught = not raises
        for handler in node.handlers:
            kinds = self._kinds(handler)
            catches = raises and not caught and self._error is not None and issubclass(self._error, kinds)
            if catches:
                caught = True
                follows = self._follow(handler.body)
            elif handler.body and not self._leaves_the_loop(handler.body[-1]):
                self._block(handler.body)
        if not caught:
            raise _MayEnd
        if raises:
            self._error = None
        else:
            self._block(node.orelse)
        self._block(node.finalbody)
        return follows

    def _calls_of(self, node: ast.AST) -> None:
        for one in ast.walk(node):
            if isinstance(one, ast.Call):
                self._expression(one)

    def _kinds(self, handler: ast.ExceptHandler) -> tuple[type[BaseException], ...]:
        if handler.type is None:
            return (BaseException,)
        named = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        kinds = tuple(self._value(one) for one in named)
        if not all(isinstance(one, type) and issubclass(one, BaseException) for one in kinds):
            raise _MayEnd
        return kinds

    # -------------------------------------------------------- expressions

    def _test(self, node: ast.expr) -> None:
        self._expression(node)
        self._tested |= {_dotted(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute))}

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._call(node)
        elif isinstance(node, ast.Name):
            if not _is_plain(self._value(node)):
                raise _MayEnd  # its operators may do anything
        elif isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.NamedExpr):
            self._expression(node.value)
        elif isinstance(node, ast.Subscript):
            base = self._value(node.value)
            if not (isinstance(node.value, ast.Call) or base is _PLAIN or isinstance(base, _CONTAINERS)):
                raise _MayEnd
            self._expression(node.value)
            self._expression(node.slice)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            for one in node.generators:
                self._expression(one.iter)
                self._bind(one.target, one.iter)
                for test in one.ifs:
                    self._expression(test)
            self._expression(node.elt)
        elif isinstance(node, (ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.DictComp)):
            raise _MayEnd
        else:
            for part in ast.iter_child_nodes(node):
                if isinstance(part, (ast.expr, ast.keyword)):
                    self._expression(part)

    def _attribute(self, node: ast.Attribute) -> None:
        base = self._value(node.value)
        if base is _UNKNOWN:
            raise _MayEnd
        if _is_of_the_job(base) or isinstance(base, ModuleType):
            return
        if isinstance(inspect.getattr_static(base, node.attr, property()), (property, functools.cached_property)):
            raise _MayEnd
        if not _is_plain(self._value(node)):
            raise _MayEnd

    def _call(self, node: ast.Call) -> None:
        for part in (*node.args, *node.keywords):
            self._expression(part)
        function = node.func
        called = self._value(function)
        if called is time.sleep:
            seconds = self._value(node.args[0]) if node.args else _UNKNOWN
            if not isinstance(seconds, (int, float)) or seconds > _LONGEST_SLEEP:
                raise _MayEnd
            return
        if _is_of_the_job(called) or any(called is one for one in _PURE):
            return
        base = self._value(function.value) if isinstance(function, ast.Attribute) else _UNKNOWN
        name = function.attr if isinstance(function, ast.Attribute) else ""
        if isinstance(base, _CONTAINERS):
            same = name in _EXTENDS and all(self._value(one) in ([], (), {}, set()) for one in node.args)
            if name not in _READS and not same:
                raise _MayEnd
        elif not _is_of_the_job(base):
            self._users_function(called, [self._value(one) for one in node.args])

    def _users_function(self, called: Any, args: list[Any]) -> None:
        if isinstance(called, MethodType):
            called, args = called.__func__, [called.__self__, *args]
        if not isinstance(called, FunctionType) or self._depth >= _DEEPEST_CALL:
            raise _MayEnd
        node = _function_of(called.__code__)
        if not isinstance(node, ast.FunctionDef) or not is_users([called.__code__.co_filename, 0, ""]):
            raise _MayEnd
        names, outer, depth, was_called = self._names, self._globals, self._depth, self._called
        self._names = dict(zip((one.arg for one in node.args.args), args, strict=False))
        self._names |= dict.fromkeys((one.arg for one in node.args.args[len(args) :]), _UNKNOWN)
        with contextlib.suppress(ValueError):  # a cell that is empty yet
            cells = zip(called.__code__.co_freevars, called.__closure__ or (), strict=False)
            self._names |= {name: cell.cell_contents for name, cell in cells}
        self._globals, self._depth, self._called = called.__globals__, depth + 1, True
        self._block(node.body)
        self._names, self._globals, self._depth, self._called = names, outer, depth, was_called

    def _bind(self, target: ast.expr, source: ast.expr) -> None:
        """Note what a variable of a loop is: the first value stands for all."""
        values = self._value(source)
        first = next(iter(values), _UNKNOWN) if isinstance(values, (list, tuple, set, dict)) else _UNKNOWN
        alike = isinstance(values, (list, tuple, set, dict)) and len({type(one) for one in values}) == 1
        for one in _leaves(target):
            if isinstance(one, ast.Name):
                self._names[one.id] = first if alike and one is target else _UNKNOWN

    def _value(self, node: ast.AST) -> Any:
        """Return what an expression is now; `_UNKNOWN` if that cannot be known without a call."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            for names in (self._names, self._globals, vars(builtins)):
                if node.id in names:
                    return names[node.id]
        if isinstance(node, ast.Attribute):
            base = self._value(node.value)
            if isinstance(base, ModuleType):
                return getattr(base, node.attr, _UNKNOWN)
            found = inspect.getattr_static(base, node.attr, _UNKNOWN) if base is not _UNKNOWN else _UNKNOWN
            if isinstance(found, FunctionType) and not isinstance(base, type):
                return MethodType(found, base)
            return _UNKNOWN if hasattr(type(found), "__get__") and not isinstance(found, FunctionType) else found
        return _UNKNOWN

    def _truth(self, node: ast.expr) -> bool | None:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._truth(node.operand)
            return None if inner is None else not inner
        value = self._value(node)
        return bool(value) if isinstance(value, _CONTAINERS) else None

    def _is_empty_length(self, node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Call)
            and self._value(node.func) is len
            and self._value(node.args[0]) in ([], (), {}, set())
        )


def _is_plain(value: Any) -> bool:
    """Return True for values whose operators do nothing: those of Python, and of modules that show the job alone."""
    return value is _PLAIN or isinstance(value, (*_CONTAINERS, *_DEFINITIONS)) or _is_of_the_job(value)


def _is_of_the_job(value: Any) -> bool:
    """Return True for functions and objects of modules that show nothing outside of the job."""
    owner = value if isinstance(value, _DEFINITIONS) else type(value)
    return str(getattr(owner, "__module__", "")).partition(".")[0] in _JOB_MODULES


def _leaves(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for one in target.elts:
            yield from _leaves(one)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _dotted(node: ast.AST) -> str:
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")
