"""The worker process: runs tasks, or one actor, in the order in which they come."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

import cloudpickle

from hpcray.base.errors import (
    ActorDiedError,
    RayTaskError,
    TaskCancelledError,
    make_task_error,
)
from hpcray.base.ids import raylet_of, return_index
from hpcray.core.owner.table import Waiter
from hpcray.host.address import node_ip_address
from hpcray.runtime.actor_host import ActorHost
from hpcray.runtime.arguments import NO_ARGS, fill
from hpcray.runtime.engine import monotonic
from hpcray.runtime.links import listen
from hpcray.runtime.output import prefix_output, redirect_output
from hpcray.runtime.process import Process, connect
from hpcray.runtime.refs import current
from hpcray.wire import messages as m
from hpcray.wire.serialization import Serialized, deserialize, serialize, serialize_error

_LEND_AFTER = 0.001
_FLUSH_US = 1_000
_AGAIN = 0.001
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
perf_counter = time.perf_counter


class Worker:
    """Executes what submitters push. The main thread runs tasks and drives the engine in between."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.engine = process.engine
        self.actor: ActorHost | None = None
        self.running: bytes | None = None
        self.holds: dict[str, int] = {}
        self._queue: deque[tuple[bytes, Any]] = deque()
        self._idle: Waiter | None = None
        self._blobs: dict[bytes, m.FunctionDef] = {}
        self._functions: dict[bytes, tuple[str, Callable[..., Any]]] = {}
        self._blocked = 0
        self._held: list[tuple[bytes, m.Message]] = []
        self._cancelled: set[bytes] = set()
        self._interruptible = False
        self._since_flush = 0
        self._raylet = raylet_of(process.node)
        self._inline_limit = process.config.inline_limit
        process.blocker = self._block
        process.on_exit = os._exit
        process.submitter.acks_done = self._send_held  # type: ignore[method-assign]
        process.handlers.update({
            m.FunctionDef: self._on_function,
            m.PushTask: self._on_work,
            m.ActorCall: self._on_work,
            m.BecomeActor: self._on_work,
            m.TerminateActor: self._on_work,
            m.TakeBack: lambda src, msg: self._give_back(src, True),
            m.CancelTask: self._on_cancel,
            m.SetJob: lambda src, msg: self.apply_job(msg.job),
            m.Leased: self._on_leased,
        })  # fmt: skip
        if process.job is not None:
            self.apply_job(process.job)

    # ------------------------------------------------------------ messages (lock held)

    def _on_function(self, _: bytes, msg: m.FunctionDef) -> None:
        self._blobs[msg.id] = msg

    def _on_leased(self, _: bytes, msg: m.Leased) -> None:
        self.holds = dict(msg.resources)

    def _on_work(self, src: bytes, msg: Any) -> None:
        self._queue.append((src, msg))
        idle = self._idle
        if idle is not None and idle.count:
            idle.count = 0
            self.engine.notify(idle)

    def _give_back(self, src: bytes | None, asked: bool) -> None:
        """Return what has not started: to one submitter that asked, or to all because we block."""
        back: dict[bytes, list[bytes]] = {src: []} if src is not None else {}
        kept: deque[tuple[bytes, Any]] = deque()
        for item in self._queue:
            if type(item[1]) is m.PushTask and (src is None or item[0] == src):
                back.setdefault(item[0], []).append(item[1].task)
            else:
                kept.append(item)
        self._queue = kept
        for submitter, tasks in back.items():
            self.engine.send(submitter, m.TakenBack(tasks, asked))

    def _on_cancel(self, src: bytes, msg: m.CancelTask) -> None:
        for item in self._queue:
            if getattr(item[1], "task", None) == msg.task:
                self._queue.remove(item)
                error = serialize_error(TaskCancelledError(error_message="cancelled before it started"))
                returns = [m.Returned(error) for _ in range(item[1].num_returns)]
                self.engine.send(src, m.TaskReply(msg.task, 2, returns, 0))
                return
        if self.actor is not None and self.actor.cancel(msg.task):
            return
        if self.running == msg.task and self.actor is None:
            if msg.force:
                os._exit(1)
            self._cancelled.add(msg.task)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def apply_job(self, job: m.JobInfo) -> None:
        """Take over the driver's working directory, import path and environment."""
        self.process.job = job
        for path in reversed(job.sys_path):
            if path not in sys.path:
                sys.path.insert(0, path)
        with contextlib.suppress(OSError):
            os.chdir(job.cwd)
        os.environ.update(job.env)

    def interrupted(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT comes from ourselves only (`_on_cancel`): it interrupts the task it was meant for, nothing else.

        And not the middle of a table update of ours either: then the signal is sent again a moment later.
        """
        if self.running not in self._cancelled or not self._interruptible:
            return
        main = threading.get_ident()
        if main in self.engine.asleep or in_user_code(frame):
            raise KeyboardInterrupt
        again = threading.Timer(_AGAIN, signal.pthread_kill, (main, signum))
        again.daemon = True
        again.start()

    # ------------------------------------------------------------ the loop

    def serve(self) -> NoReturn:
        """Run what comes, for ever."""
        lock = self.engine.lock
        waiter = Waiter()
        while True:
            try:
                with lock:
                    while not self._queue:
                        waiter.count = 1
                        self._idle = waiter
                        self.engine.wait(waiter)
                        self._idle = None
                        self._since_flush = 0
                    src, msg = self._queue.popleft()
                    if type(msg) is m.PushTask:
                        self.running = msg.task
                if type(msg) is m.PushTask:
                    self._run_task(src, msg)
                elif type(msg) is m.ActorCall:
                    assert self.actor is not None
                    self.actor.call(src, msg)
                elif type(msg) is m.BecomeActor:
                    self.actor = ActorHost(self, msg)
                    self.actor.construct()
                elif self.actor is not None:
                    self.actor.finish("it was terminated: no handle was left, or it was asked to end")
            except KeyboardInterrupt:
                continue  # a cancellation that came after its task had ended

    def _run_task(self, src: bytes, msg: m.PushTask) -> None:
        started = perf_counter()
        local = self.process.local
        protected: list[bytes] = []
        local.protected = protected
        local.task = msg.task
        error: BaseException | None = None
        value: Any = None
        name = ""
        try:
            self._interruptible = True
            if msg.task in self._cancelled:
                raise KeyboardInterrupt  # since it left the queue
            found = self._functions.get(msg.fn) or self._load(msg.fn)
            name, function = found
            local.name = name
            if msg.args == NO_ARGS:
                value = function()
            else:
                args, kwargs = self.arguments(msg.args, msg.inline, msg.refs)
                value = function(*args, **kwargs)
                del args, kwargs
        except SystemExit as leaving:
            code = leaving.code
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)
        except BaseException as raised:
            error = raised
        # No call comes between the end of the try block and this: nothing can interrupt us before the reply.
        self.running = None
        self._interruptible = False
        us = int((perf_counter() - started) * 1e6)
        self.reply(src, msg.task, msg.num_returns, value, error, name, us, protected)
        del value, error
        local.protected = None
        local.task = None

    def arguments(
        self, blob: bytes, inline: list[bytes] | None, refs: list[m.ArgRef] | None
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Unpack the arguments of a task or call, fetching what is in node stores."""
        args, kwargs = deserialize(blob)
        if inline is not None:
            values = self.process.load_slots(inline, refs)
            args = [fill(value, values) for value in args]
            kwargs = {key: fill(value, values) for key, value in kwargs.items()}
        return args, kwargs

    def _load(self, ident: bytes) -> tuple[str, Callable[..., Any]]:
        definition = self._blobs[ident]
        found = self._functions[ident] = (definition.name, deserialize(definition.blob))
        del self._blobs[ident]
        return found

    # ------------------------------------------------------------ replies

    def reply(
        self,
        src: bytes,
        task: bytes,
        num_returns: int,
        value: Any,
        error: BaseException | None,
        name: str,
        us: int,
        protected: list[bytes] | None,
        actor: tuple[str, str] | None = None,
    ) -> None:
        """Send a result (or an exception) to the submitter; large values go into the node's store first."""
        returns: list[m.Returned] | None = None
        if error is None:
            try:
                if num_returns == 1:
                    blob, refs = serialize(value)
                    if type(blob) is bytes and len(blob) <= self._inline_limit and not refs and not protected:
                        self._send(src, m.TaskDone(task, blob, us), us)
                        return
                    returns = [self._returned(src, task, 0, blob, refs)]
                else:
                    returns = self._many(src, task, num_returns, value)
            except BaseException as raised:
                error = raised
        status = 0
        if error is not None:
            status = 1
            blob = self.error_blob(error, name, actor, task)
            returns = [m.Returned(blob) for _ in range(num_returns)]
        value = error = None
        borrowed: list[bytes] | None = None
        if protected:
            with self.engine.lock:
                self.process.drain()
                borrowed = self.process.table.keep(protected) or None
        self._send(src, m.TaskReply(task, status, returns or [], us, borrowed), us)

    def error_blob(self, error: BaseException, name: str, actor: tuple[str, str] | None, task: bytes) -> bytes:
        """The blob of an exception, as its `get` will raise it."""
        if isinstance(error, KeyboardInterrupt) and task in self._cancelled:
            self._cancelled.discard(task)
            return serialize_error(TaskCancelledError(error_message=f"{name} was cancelled while it ran"))
        if isinstance(error, (ActorDiedError, TaskCancelledError)) and not isinstance(error, RayTaskError):
            return serialize_error(error)
        return serialize_error(self.task_error(error, name, actor))

    def task_error(self, error: BaseException, name: str, actor: tuple[str, str] | None) -> RayTaskError:
        """What user code raised, wrapped to travel."""
        return make_task_error(name, error, os.getpid(), node_ip_address(), actor, cloudpickle.dumps)

    def _many(self, src: bytes, task: bytes, num_returns: int, value: Any) -> list[m.Returned]:
        if num_returns == 0:
            return []
        try:
            values = list(value)
        except TypeError:
            values = [value]
        if len(values) != num_returns:
            raise ValueError(f"Task returned {len(values)} objects, but num_returns={num_returns}.")
        return [self._returned(src, task, i, *serialize(item)) for i, item in enumerate(values)]

    def _returned(self, src: bytes, task: bytes, index: int, blob: bytes | Serialized, refs: list[Any]) -> m.Returned:
        contained: list[bytes] | None = None
        if refs:
            with self.engine.lock:
                for ref in refs:
                    self.process.table.give(ref._id, src)
            contained = [ref._id for ref in refs]
        size = blob.size if isinstance(blob, Serialized) else len(blob)
        if size <= self._inline_limit:
            return m.Returned(blob.join() if isinstance(blob, Serialized) else blob, 0, contained)
        object_id = task + return_index(index)
        self.process.store.write(object_id, blob)
        with self.engine.lock:
            self.engine.send(self._raylet, m.Release([object_id]))
        return m.Returned(b"", size, contained)

    def _send(self, dest: bytes, msg: m.Message, us: int) -> None:
        """Queue a reply. It leaves at once unless more short work waits (then after a millisecond of it at most)."""
        engine = self.engine
        with engine.lock:
            if self.process.table.unacked:
                self._held.append((dest, msg))
                engine.flush()
                return
            engine.send(dest, msg)
            self._since_flush += us + 10
            if not self._queue or self._since_flush > _FLUSH_US:
                self._since_flush = 0
                engine.flush()
            else:
                engine.buffered()

    def _send_held(self) -> None:
        held, self._held = self._held, []
        for dest, msg in held:
            self.engine.send(dest, msg)

    # ------------------------------------------------------------ blocking

    def _block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait inside a task; if it takes long (or what we wait for needs a CPU), lend ours meanwhile."""
        engine = self.engine
        if not any(klass.queue for klass in self.process.submitter.leases.by_index):
            soon = monotonic() + _LEND_AFTER
            if deadline is not None and deadline <= soon:
                return engine.wait(waiter, deadline)
            if engine.wait(waiter, soon):
                return True
        self._blocked += 1
        if self._blocked == 1:
            self._give_back(None, False)
            engine.send(self._raylet, m.Blocked())
        try:
            return engine.wait(waiter, deadline)
        finally:
            self._blocked -= 1
            if self._blocked == 0:
                engine.send(self._raylet, m.Unblocked())
                engine.flush()

    # ------------------------------------------------------------ leaving

    def leave(self, reason: str) -> NoReturn:
        """End this worker on purpose: what is buffered goes out, exit handlers run."""
        with self.engine.lock:
            if self.actor is not None:
                self.engine.send(self._raylet, m.ActorLeaving(self.actor.spec.actor, reason))
            self.engine.flush()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def in_user_code(frame: FrameType | None) -> bool:
    """Whether none of our code is at work: the innermost frame of ours is the one that called the task's function."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return frame.f_code is Worker._run_task.__code__
        frame = frame.f_back
    return False


def worker_main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
    """Body of a forked worker."""
    with contextlib.suppress(OSError):
        os.close(arena_fd)  # Welcome brings one
    # Peers may connect as soon as our raylet knows that we are up: the socket comes first.
    listener = listen(session_dir, number)
    process = connect(session_dir, "worker")
    worker = Worker(process)
    current.process = process
    current.worker = worker
    signal.signal(signal.SIGINT, worker.interrupted)
    if process.config.log_to_driver:
        prefix_output(process.local, process.node)
    else:
        redirect_output(f"{session_dir}/worker-{number}.log")
    process.start(listener)
    worker.serve()
