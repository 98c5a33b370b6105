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

from hpcray.base.errors import TaskCancelledError
from hpcray.base.ids import raylet_of
from hpcray.core.owner.table import Waiter
from hpcray.host.accelerators import confine
from hpcray.host.relocation import Relocation
from hpcray.host.runtime_env import VARIABLE
from hpcray.host.threads import changes, use_cpus
from hpcray.runtime.actor_end import URGENT, ActorEnd
from hpcray.runtime.actor_host import ActorHost
from hpcray.runtime.arguments import NO_ARGS, ArgumentsAhead, fill
from hpcray.runtime.engine import monotonic
from hpcray.runtime.environment import Environment, expanded
from hpcray.runtime.names import qualified_name
from hpcray.runtime.process import Process
from hpcray.runtime.replies import Replies
from hpcray.runtime.retiring import COUNTED, Retire, counted, finish
from hpcray.runtime.yielding import Yielding, drive
from hpcray.wire import messages as m
from hpcray.wire.serialization import deserialize, serialize_error

_LEND_AFTER = 0.001
_AGAIN = 0.001
_LAST_WORDS = 5.0
"""Seconds in which those to whom a leaving worker owes answers should read them."""
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
perf_counter = time.perf_counter


class Worker:
    """Executes what submitters push. The main thread runs tasks and drives the engine in between.

    Attributes:
        queue: what came and has not started. lessee: who holds the lease. holds, env: what goes with it; a worker has
            one environment for life.
        environment: the rest of its runtime_env. options: of tasks that have their own.
        cancelled: tasks that were told to stop while they ran.
    """

    def __init__(self, process: Process, environment: Environment) -> None:
        self.process = process
        self.engine = process.engine
        self.actor: ActorHost | None = None
        self.running: bytes | None = None
        self.thread_locals: dict[int, dict[str, Any]] = {}
        self.enter_thread()
        self.lessee = b""
        self.holds: dict[str, int] = {}
        self.env: dict[str, str] = {}
        self.environment = environment
        self.queue: deque[tuple[bytes, Any]] = deque()
        self.options: dict[bytes, m.CallOptions] = {}
        self.cancelled: set[bytes] = set()
        self.replies = Replies(self, process)
        self.yielding = Yielding(self)
        self.end = ActorEnd(self)
        self.reply = self.replies.reply
        self._idle: Waiter | None = None
        self._ahead = ArgumentsAhead(process)
        self._blobs: dict[bytes, m.FunctionDef] = {}
        self._functions: dict[bytes, tuple[str, Callable[..., Any]]] = {}
        self._blocked = 0
        self._interruptible = False
        self._children_from = 0
        self._raylet = raylet_of(process.node)
        process.blocker = self._block
        process.on_exit = os._exit
        process.handlers.update({
            m.FunctionDef: self._on_function, m.CallOptions: self._on_options,
            m.StreamTaken: self.yielding.on_taken,
            m.PushTask: self._on_call, m.ActorCall: self._on_call,
            m.BecomeActor: self._on_work, m.TerminateActor: self._on_work,
            m.TakeBack: lambda src, msg: self.give_back(src, True),
            m.CancelTask: self._on_cancel,
            m.SetJob: lambda src, msg: self.apply_job(msg.job),
            m.Leased: self._on_leased,
            m.SaveActor: self.end.asked,
        })  # fmt: skip
        if process.job is not None:
            self.apply_job(process.job)

    # ------------------------------------------------------------ messages (lock held)

    def _on_function(self, _: bytes, msg: m.FunctionDef) -> None:
        self._blobs[msg.id] = msg

    def _on_options(self, _: bytes, msg: m.CallOptions) -> None:
        self.options[msg.task] = msg
        if msg.group and self.actor is not None:
            self.actor.route_by_group()

    def forget(self, task: bytes) -> None:
        """A task or call has ended."""
        self.options.pop(task, None)
        self.cancelled.discard(task)

    def _on_leased(self, src: bytes, msg: m.Leased) -> None:
        self.lessee = src
        self.holds = self.process.groups.enter(msg.resources, msg.strategy)
        if changes(self.holds.get("CPU", 0)):
            self._on_work(src, msg)
        if msg.env:
            self._take_env(msg.env)

    def _take_env(self, env: Sequence[tuple[str, str]]) -> None:
        """The variables of a task or actor go before those of its job."""
        self.env = expanded((name, value) for name, value in env if name != VARIABLE)
        os.environ.update(self.env)
        confine(os.environ)

    def _on_call(self, src: bytes, msg: m.PushTask | m.ActorCall) -> None:
        idle = self._idle
        if msg.refs is not None and (idle is None or self.queue):
            self._ahead.fetch(msg.refs)
        self.queue.append((src, msg))
        if idle is not None and idle.count:  # `_wake`, without a call
            idle.count = 0
            self.engine.notify(idle)

    def _on_work(self, src: bytes, msg: Any) -> None:
        self.queue.append((src, msg))
        self._wake()

    def urgent(self, msg: m.Message) -> None:
        """What comes before all that waits (lock held)."""
        self.queue.appendleft((b"", msg))
        self._wake()

    def _wake(self) -> None:
        idle = self._idle
        if idle is not None and idle.count:
            idle.count = 0
            self.engine.notify(idle)

    def give_back(self, src: bytes | None, asked: bool) -> None:
        """Return what has not started: to one submitter that asked, or to all because we block."""
        back: dict[bytes, list[bytes]] = {src: []} if src is not None else {}
        kept: deque[tuple[bytes, Any]] = deque()
        for item in self.queue:
            if type(item[1]) is m.PushTask and (src is None or item[0] == src):
                back.setdefault(item[0], []).append(item[1].task)
                self.options.pop(item[1].task, None)
            else:
                kept.append(item)
        self.queue = kept
        for submitter, tasks in back.items():
            self.engine.send(submitter, m.TakenBack(tasks, asked))

    def _on_cancel(self, src: bytes, msg: m.CancelTask) -> None:
        for item in self.queue:
            if getattr(item[1], "task", None) == msg.task:
                self.queue.remove(item)
                self.options.pop(msg.task, None)
                error = serialize_error(TaskCancelledError(error_message="cancelled before it started"))
                returns = [m.Returned(error) for _ in range(abs(item[1].num_returns))]
                self.engine.send(src, m.TaskReply(msg.task, 2, returns, 0))
                return
        if self.actor is not None:
            self.actor.cancel(msg.task)
        elif self.running == msg.task:
            if msg.recursive:
                self.process.submitter.cancelling.since(self._children_from, msg.force)
            if msg.force:
                self.engine.flush()
                os._exit(1)
            self.cancelled.add(msg.task)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def apply_job(self, job: m.JobInfo) -> None:
        """Take over the driver's working directory, import path and environment."""
        self.process.job = job
        for path in map(Relocation.of(os.environ).copy, reversed(job.sys_path)):
            if path not in sys.path:
                sys.path.insert(0, path)
        with contextlib.suppress(OSError):
            os.chdir(job.cwd)
        os.environ.update(expanded(job.env))
        os.environ.update(self.env)
        confine(os.environ)
        self.environment.enter()

    def interrupted(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT comes from ourselves only (`_on_cancel`): it interrupts the task it was meant for, nothing else.

        And not the middle of a table update of ours either: then the signal is sent again a moment later.
        """
        if self.running not in self.cancelled or not self._interruptible:
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
                    while not self.queue:
                        waiter.count = 1
                        self._idle = waiter
                        self.engine.wait(waiter)
                        self._idle = None
                        self.replies.since_flush = 0
                    src, msg = self.queue.popleft()
                    kind = type(msg)
                    if kind is m.PushTask:
                        self.running = msg.task
                        self._children_from = self.process._counter
                if kind is m.PushTask:
                    self._run_task(src, msg)
                elif kind is m.ActorCall:
                    assert self.actor is not None
                    self.actor.call(src, msg)
                elif kind is m.Leased:
                    use_cpus(self.holds.get("CPU", 0))
                elif kind in URGENT:
                    self.end.take(msg)
                elif kind is Retire:
                    finish(self)
                elif kind is m.BecomeActor:
                    hold = msg.spec.hold
                    use_cpus(self.process.groups.enter(hold.resources, hold.strategy).get("CPU", 0))
                    self._take_env(msg.spec.hold.env)
                    self.actor = ActorHost(self, msg)
                    self.actor.construct()
                elif self.actor is not None:
                    self.actor.finish("it was terminated: no handle was left, or it was asked to end")
            except KeyboardInterrupt:
                continue  # a cancellation that came after its task had ended

    def _run_task(self, src: bytes, msg: m.PushTask) -> None:
        started = perf_counter()
        local = vars(self.process.local)  # several times faster than its attributes
        protected: list[bytes] = []
        local["protected"] = protected
        local["since"] = started
        local["task"] = msg
        error: BaseException | None = None
        value: Any = None
        name = ""
        try:
            self._interruptible = True
            if self.cancelled and msg.task in self.cancelled:
                raise KeyboardInterrupt  # since it left the queue
            found = self._functions.get(msg.fn) or self._load(msg.fn)
            name, function = found
            local["name"] = name
            if msg.args == NO_ARGS:
                value = function()
            else:
                args, kwargs = self.arguments(msg.args, msg.inline, msg.refs)
                value = function(*args, **kwargs)
                del args, kwargs
            if msg.num_returns < 0:
                self.yielding.run(src, msg, value)
                value = None
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
        local["protected"] = local["task"] = None
        if self.options or self.cancelled:
            self.forget(msg.task)

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
        function = deserialize(definition.blob)
        if definition.max_calls:
            function = counted(self, function, definition.max_calls)
        found = self._functions[ident] = (definition.name, function)
        del self._blobs[ident]
        return found

    def enter_thread(self) -> None:
        """The calling thread will run tasks or calls: `thread_locals` shows to others what it runs."""
        self.thread_locals[threading.get_ident()] = vars(self.process.local)

    def called(self, task: bytes, name: str) -> str:
        """What people call a task: by its option `name`, else `name`."""
        own = self.options.get(task)
        return own.name if own is not None and own.name else name

    def label(self, msg: m.PushTask | m.ActorCall) -> str:
        """What people call a task or call that runs. Runs no code of the user."""
        if own := self.called(msg.task, ""):
            return own
        if isinstance(msg, m.ActorCall):
            return f"{self.actor.spec.class_name}.{msg.method}" if self.actor is not None else msg.method
        found = self._functions.get(msg.fn)
        blob = self._blobs.get(msg.fn)
        return found[0] if found is not None else blob.name if blob is not None else ""

    def names_of(self, msg: m.PushTask | m.ActorCall) -> tuple[str, str]:
        """The names of a running task, for people: its own (or what it calls), and that of the function."""
        if isinstance(msg, m.PushTask):
            name, function = self._functions.get(msg.fn) or ("", None)
            called = qualified_name(function)
        else:
            assert self.actor is not None
            name = f"{self.actor.spec.class_name}.{msg.method}"
            cls, method = self.actor.cls, getattr(self.actor.cls, msg.method, None)
            called = qualified_name(method)  # of a class sent by value only its functions remember where it was defined
            if not called.endswith(f"{cls.__name__}.{msg.method}"):
                called = f"{qualified_name(cls)}.{msg.method}"
        return self.called(msg.task, name), called

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
            self.give_back(None, False)
            self.lend()
        try:
            return engine.wait(waiter, deadline)
        finally:
            self._blocked -= 1
            if self._blocked == 0:
                engine.send(self._raylet, m.Unblocked())
                engine.flush()

    def lend(self) -> None:
        """Our CPU may be used by others while we wait (lock held)."""
        self.engine.send(self._raylet, m.Blocked())

    # ------------------------------------------------------------ leaving

    def leave(self, reason: str, code: int = 0) -> NoReturn:
        """End this worker on purpose (without a `reason`: as if it crashed); buffers are written, exit handlers run."""
        with self.engine.lock:
            if self.actor is not None and reason:
                self.engine.send(self._raylet, m.ActorLeaving(self.actor.spec.actor, reason))
            self.engine.flush()
            self.engine.write_rest(_LAST_WORDS)
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            for stream in (sys.stdout, sys.stderr):
                getattr(stream, "finish", stream.flush)()
        os._exit(code)


_CALLS_USERS = {Worker._run_task.__code__, drive.__code__}


def in_user_code(frame: FrameType | None) -> bool:
    """Whether none of our code is at work: the innermost frame of ours is the one that called the task's function."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return frame.f_code in _CALLS_USERS or frame.f_code in COUNTED
        frame = frame.f_back
    return False
