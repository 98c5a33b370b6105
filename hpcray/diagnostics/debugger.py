"""`breakpoint()` in a task or actor: pdb in the worker, at whose prompt `hpcray debug` types, from any node of the job.

The debugged thread waits at the prompt; another thread of the worker answers the questions of the command, over the
job's own connections: there is no socket. What waits is listed where Ray lists it, in the key-value store.
"""

from __future__ import annotations

import code
import contextlib
import ctypes
import inspect
import json
import os
import pdb
import sys
import threading
import time
import traceback
import uuid
from bdb import BdbQuit
from collections import deque
from collections.abc import Callable, Collection, Iterator
from types import FrameType, TracebackType
from typing import Any

import msgspec

from hpcray.common.ids import show_proc
from hpcray.diagnostics.cluster_query import PAUSED_THREADS
from hpcray.platform.private_files import read_private_file
from hpcray.platform.stacks import part_of_hpcray
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.core_worker.core_worker import CoreWorker, current, need_process

KEY, NAMESPACE = "RAY_PDB_", "ray_pdb"
"""Names of the breakpoints that wait, in the key-value store."""
PROMPT, BUSY, RUNS, ENDED, TAKEN = "prompt", "busy", "runs", "ended", "taken"
"""States: it waits for a line; works on one, or steps; runs to its next breakpoint; is over; has another client."""
_MOST_OUTPUT = 1 << 20

Send = Callable[[bytes, m.GcsReply], None]


class DebuggerConsole:
    """All that a debugger writes and reads: a file to pdb, and the other end of `hpcray debug`.

    Args:
        send: sends a reply, from any thread.
        complete: returns completions, in the debugged thread.

    Attributes:
        state: one of the states above.
    """

    encoding = "utf-8"

    def __init__(self, send: Send, complete: Callable[[str, str, int, int], list[str]]) -> None:
        self.state = BUSY
        self._complete = complete
        self._send = send
        self._changed = threading.Condition()
        self._output = ""
        self._forgotten = 0  # characters before `_output`
        self._lines: deque[str] = deque()
        self._completions: deque[tuple[bytes, int, list[Any]]] = deque()
        self._poll: tuple[bytes, int, int, float] | None = None  # who waits for what comes after `seen`, since when
        self._client = ""

    # ------------------------------------------------------------ the debugged thread

    def write(self, text: str) -> int:
        """Take in output."""
        with self._changed:
            self._output += text
            if len(self._output) > _MOST_OUTPUT:
                self._forgotten += len(self._output) - _MOST_OUTPUT
                self._output = self._output[-_MOST_OUTPUT:]
            reply = self._ready("\n" in text)
        self._answer(reply)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""

    def isatty(self) -> bool:
        """Never."""
        return False

    def readline(self) -> str:
        """Wait for a line of the client."""
        self.enter(PROMPT)
        while True:
            with self._changed:
                while not self._lines and not self._completions:
                    self._changed.wait()
                wanted = self._completions.popleft() if self._completions else None
                if wanted is None:
                    self.state = BUSY
                    return self._lines.popleft()
            src, req, words = wanted
            found: list[str] = []
            with contextlib.suppress(Exception):  # the program's `__dir__`
                found = self._complete(*words)
            self._answer((src, req, {"state": PROMPT, "completions": found}))

    def enter(self, state: str) -> None:
        """Be in another state from now on."""
        with self._changed:
            self.state = state
            reply = self._ready(True)
        self._answer(reply)

    # ------------------------------------------------------------ who drives the engine

    def ask(self, src: bytes, req: int, word: str, client: str, seen: int, words: list[Any]) -> None:
        """A question of a client: it attaches, sends a line, wants completions, or what is new after `seen`."""
        reply: tuple[bytes, int, dict[str, Any]] | None = None
        taken: tuple[bytes, int, dict[str, Any]] | None = None
        with self._changed:
            if word == "attach" and client != self._client:
                if self._poll is not None:
                    taken = (*self._poll[:2], {"state": TAKEN})
                    self._poll = None
                self._client = client
            if client != self._client:
                reply = src, req, {"state": TAKEN}
            elif word == "complete" and self.state == PROMPT:
                self._completions.append((src, req, words))
                self._changed.notify_all()
            elif word == "poll":
                self._poll = src, req, seen, time.monotonic()
                reply = self._ready(seen < self._forgotten + len(self._output) or self.state in (PROMPT, ENDED))
            else:
                if word == "line" and self.state == PROMPT:
                    self._lines.append(words[0] + "\n")
                    self.state = BUSY
                    self._changed.notify_all()
                reply = src, req, {"state": self.state}
        self._answer(taken)
        self._answer(reply)

    def _ready(self, ready: bool) -> tuple[bytes, int, dict[str, Any]] | None:
        """The reply to who waits for news, if there are any."""
        if not ready or self._poll is None:
            return None
        src, req, seen, _ = self._poll
        self._poll = None
        news = self._output[max(0, seen - self._forgotten) :]
        return src, req, {"state": self.state, "output": news, "seen": self._forgotten + len(self._output)}

    def _answer(self, reply: tuple[bytes, int, dict[str, Any]] | None) -> None:
        if reply is not None:
            self._send(reply[0], m.GcsReply(reply[1], True, msgspec.msgpack.encode(reply[2])))


class WorkerDebugger(pdb.Pdb):
    """pdb at the other end of a console.

    Args:
        process: the worker. send: sends replies, from any thread.
    """

    def __init__(self, process: CoreWorker, send: Send) -> None:
        self.token = os.urandom(4).hex()
        self.console = DebuggerConsole(send, self.completions)
        super().__init__(None, self.console, self.console, ["hpcray", "hpcray.*"], True, readrc=False)  # type: ignore[arg-type]
        _read_settings(self)
        self._process = process
        self._thread = threading.get_ident()
        self._task = _running_task(process)
        self._outermost: FrameType | None = None
        self._evaluates = self._listed = False
        self._error = ""

    # ------------------------------------------------------------ its life

    def stop_at(self, frame: FrameType) -> None:
        """Stop the calling thread at the next line of a frame of the user's."""
        self._begin()
        outermost = frame
        while outermost.f_back is not None and not part_of_hpcray(outermost.f_back.f_code.co_filename):
            outermost = outermost.f_back
        self._outermost = outermost
        self.set_trace(frame)

    def post_mortem(self, error: BaseException) -> None:
        """Stop the calling thread where an error was raised."""
        trace: TracebackType | None = error.__traceback__
        while trace is not None and part_of_hpcray(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        if trace is None:  # it is none of the user's code
            return
        self._begin()
        self._error = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        self.reset()
        try:
            self.interaction(None, trace)
        finally:
            self._end()

    def interaction(self, frame: FrameType | None, traceback: Any) -> None:
        """Stop here, list this breakpoint, and do what the client says, until it lets the task go on."""
        if _running_task(self._process) != self._task:  # it has ended while it was stepped through
            self._let_go()
            return
        if not self._listed:
            self._list(frame if frame is not None else _last_frame(traceback))
        try:
            super().interaction(frame, traceback)
        except BaseException:  # the task was cancelled, or is to end
            self._end()
            raise
        self._evaluates = False
        if self.quitting:
            self._end()
        elif self.stoplineno == -1 and self.stopframe is self.botframe:  # "continue"
            if not self.breaks:
                self._outermost = None  # the task's variables live no longer than without a debugger
            if self.breaks or (self._task and not self._error):
                self._unlist()
                self.console.enter(RUNS)
            else:
                self._end()

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Let the task go when its function returns. (Coroutines return at each `await`.)"""
        found = super().dispatch_return(frame, arg)
        waits = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
        if frame is self._outermost and not frame.f_code.co_flags & waits:
            self._let_go()
            return None
        return found

    def is_of(self, task: bytes) -> bool:
        """True if this is the debugger of a task that may stop again."""
        return self._task == task and self.console.state != ENDED

    @property
    def evaluates(self) -> bool:
        """True while a command at the prompt runs code of the program."""
        return self._evaluates

    def runs(self, tasks: Collection[bytes]) -> bool:
        """True unless its task is none of those that run in this process."""
        return self.console.state == PROMPT or not self._task or self._task in tasks

    def _begin(self) -> None:
        before = _debuggers.get(self._thread)
        if before is not None and before is not self:
            before._end()
        _debuggers[self._thread] = self

    def _let_go(self) -> None:
        self.clear_all_breaks()
        self.set_continue()
        self._end()

    def _end(self) -> None:
        if _debuggers.get(self._thread) is self:
            del _debuggers[self._thread]
        self._unlist()
        self.console.enter(ENDED)

    def _list(self, frame: FrameType) -> None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        worker, process, place = current.worker, self._process, self._process.place
        task = async_task.get() or process.local.task
        name = worker.running_name(task) if worker is not None and task is not None else ""
        actor = worker.actor.spec.actor.hex() if worker is not None and worker.actor is not None else ""
        said = {
            "proctitle": f"ray::{name}" if name else threading.current_thread().name, "name": name,
            "pdb_address": f"{process.me.hex()}/{self.token}", "filename": file, "lineno": line,
            "traceback": self._error or "NoneType: None\n", "timestamp": time.time(),
            "job_id": place.job_id, "node": process.node,
            "pid": os.getpid(), "node_id": place.node_id, "worker_id": process.me.hex(), "actor_id": actor,
            "task_id": self._task.hex(),
        }  # fmt: skip
        self._listed = True
        process.gcs.call("kv_put", (KEY + self.token).encode(), json.dumps(said).encode(), True, NAMESPACE)
        what = "an error" if self._error else "a breakpoint"
        where = f"{file}:{line}, {show_proc(process.me)} of node {process.node}"
        print(f"{name or 'a thread'} waits at {what}, {where}; hint: hpcray debug", file=sys.stderr, flush=True)

    def _unlist(self) -> None:
        if self._listed:
            self._listed = False
            with contextlib.suppress(Exception):  # the job is over
                self._process.gcs.call("kv_del", (KEY + self.token).encode(), NAMESPACE)

    # ------------------------------------------------------------ the prompt

    def _cmdloop(self) -> None:
        while True:
            try:
                self.cmdloop()
                return
            except KeyboardInterrupt:
                self._evaluates = False
                if current.worker is not None and self._task in current.worker.cancelled:
                    raise
                self.message("--KeyboardInterrupt--")

    def precmd(self, line: str) -> str:
        """A command begins."""
        self._evaluates = True
        return super().precmd(line)

    def postcmd(self, stop: bool, line: str) -> bool:
        """A command has ended."""
        self._evaluates = False
        return super().postcmd(stop, line)

    def interrupt(self) -> None:
        """Interrupt a command, or stop what runs or steps at the next chance. Called by another thread."""
        if self._evaluates:
            raised = ctypes.py_object(KeyboardInterrupt)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), raised)
        elif self.console.state != PROMPT:
            self.set_step()

    def completions(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return what a word at the prompt could become."""
        if begin > 0:
            command = self.parseline(line)[0]
            complete = getattr(self, f"complete_{command}", self._complete_expression) if command else None
            return list((complete or self._complete_expression)(text, line, begin, end))
        return [*self.completenames(text, line, begin, end), *self._complete_expression(text, line, begin, end)]

    def do_interact(self, arg: str) -> None:
        """interact

        An interpreter with the variables of this frame. exit() leaves it.
        """
        console = code.InteractiveConsole({**self.curframe.f_globals, **self.curframe_locals})  # type: ignore[union-attr]

        def read(prompt: str = "") -> str:
            self.console.write(prompt)
            return self.console.readline().rstrip("\n")

        console.raw_input = read  # type: ignore[method-assign]
        console.write = lambda data: (self.console.write(data), None)[1]  # type: ignore[method-assign]
        with contextlib.redirect_stdout(self.console), contextlib.suppress(SystemExit):
            console.interact("*interactive*; exit() goes back", "")

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[tuple[FrameType, int]], int]:
        """The user's part of the stack: what of hpcray's is below it is left out."""
        stack, place = super().get_stack(f, t)
        first = next((at for at, (frame, _) in enumerate(stack) if frame is self._outermost), 0)
        return stack[first:], place - first


def _read_settings(debugger: pdb.Pdb) -> None:
    """Give a debugger the commands in the user's `.pdbrc` files. They are code: the one in the working directory counts
    only where it is this user's, and no other could have written it."""
    for path in (os.path.realpath(os.path.expanduser("~/.pdbrc")), os.path.abspath(".pdbrc")):
        with contextlib.suppress(OSError):
            debugger.rcLines += read_private_file(path).decode(errors="replace").splitlines(True)


_debuggers: dict[int, WorkerDebugger] = {}
"""The debuggers of this process, by thread: each waits at its prompt, or its task runs and may stop again."""


def set_trace(frame: FrameType | None, header: str = "") -> None:
    """Stop the calling thread of a worker in the debugger; in other processes, in pdb on the terminal.

    Args:
        frame: where; hpcray's frames are left out. header: what is printed first.
    """
    while frame is not None and part_of_hpcray(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or os.environ.get("RAY_DEBUG") == "0":
        return
    if (worker := current.worker) is None:
        terminal = pdb.Pdb(readrc=False)
        _read_settings(terminal)
        if header:
            terminal.message(header)
        terminal.set_trace(frame)
        return
    if (debugger := _debuggers.get(threading.get_ident())) is not None and debugger.evaluates:
        return  # a command at its prompt has come here
    if debugger is None or not debugger.is_of(_running_task(worker.process)):
        debugger = _new_debugger(worker)
    if header:
        debugger.message(header)
    debugger.stop_at(frame)


def post_mortem(error: BaseException) -> None:
    """Stop where an error of a task was raised, before it is sent to who waits for the task."""
    if (worker := current.worker) is not None and not isinstance(error, BdbQuit):
        _new_debugger(worker).post_mortem(error)


def answer(
    src: bytes, req: int, token: str, words: list[Any], send: Send, running: Callable[[], Collection[bytes]]
) -> None:
    """Answer a client of `hpcray debug` (lock held).

    Args:
        src, req: who asks. token: of the breakpoint. words: of the question, see `DebuggerConsole.ask`.
        send: sends the reply. running: returns the tasks and calls that run in this process.
    """
    debugger = next((one for one in _debuggers.values() if one.token == token), None)
    if debugger is None or not debugger.runs(running()):
        send(src, m.GcsReply(req, True, msgspec.msgpack.encode({"state": ENDED})))
        return
    if words[0] == "interrupt":
        debugger.interrupt()
    debugger.console.ask(src, req, *words)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Have `list_workers` and `list_tasks` say that this thread waits in a debugger, while it does."""
    process = need_process()
    key = f"{PAUSED_THREADS}{process.me.hex()}_{uuid.uuid4().hex}".encode()
    facts = json.dumps({"worker_id": process.me.hex(), "task_id": _running_task(process).hex()})
    process.gcs.call("kv_put", key, facts.encode(), True, NAMESPACE)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the job is over
            process.gcs.call("kv_del", key, NAMESPACE)


def _new_debugger(worker: Any) -> WorkerDebugger:
    process = worker.process

    def send(dest: bytes, reply: m.GcsReply) -> None:
        with process.engine.lock:
            process.engine.send(dest, reply)
            process.engine.flush()

    worker.let_interrupt(DebuggerConsole.readline.__code__)
    return WorkerDebugger(process, send)


def _running_task(process: CoreWorker) -> bytes:
    task = async_task.get() or process.local.task
    return task.task if task is not None else b""


def _last_frame(traceback: Any) -> FrameType:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    frame: FrameType = traceback.tb_frame
    return frame
