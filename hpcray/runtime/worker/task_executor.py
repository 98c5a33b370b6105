"""The worker process: runs tasks, or one actor, in the order in which they come."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, NoReturn

import msgspec

from hpcray.common.exceptions import RayError, TaskCancelledError, remote_traceback
from hpcray.common.ids import TaskID, owner_of, raylet_of, task_of
from hpcray.core.core_worker.object_table import PENDING, Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.platform.accelerators import apply_device_visibility
from hpcray.platform.numa_binding import set_thread_count, thread_count_changes
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.session_directory import OWN_NAMESPACE
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.arguments import NO_ARGS, QueuedArgumentPrefetcher, fill_slot
from hpcray.runtime.core_worker.context import BEHIND_CHECK, Handler, HandlerTable, async_task, object_time
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.io_engine import IoEngine, monotonic
from hpcray.runtime.core_worker.object_reader import unreadable
from hpcray.runtime.worker.actor_drain import URGENT, ActorDrain
from hpcray.runtime.worker.actor_event_loop import wait_without_driving
from hpcray.runtime.worker.actor_executor import ActorExecutor
from hpcray.runtime.worker.context import LogParts, WorkerEnvironment
from hpcray.runtime.worker.replies import GeneratorExecutor, Replies, Verdict, drive
from hpcray.runtime.worker.task_events import qualified_name

_LEND_AFTER = 0.01
"""Seconds of waiting inside a task after which its CPU is lent to others: to read what lies in the node's store takes
less, also where other processes want the processor."""
_RESEND_DELAY = 0.001
"""Seconds after which an interrupt is sent again that came in the middle of our code."""
_LATE_INTERRUPT = 1.0
"""Seconds in which the interrupt of a task that was cancelled may still come when the task has ended."""
_EXIT_WRITE_TIMEOUT = 5.0
"""Seconds for which a worker that exits waits until its last replies are read."""
_CANCELLED = f"{m.USER_EXIT} The worker exits because its task has received a force ray.cancel request."
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
perf_counter = time.perf_counter


_NEEDED_CHECK = 0.02
"""Seconds between two checks of what keeps a worker that has had its `max_calls`."""


class _Retire:
    """In the queue of a worker behind its last call (`max_calls`)."""


class _Terminated:
    """In the queue of a worker that got a SIGTERM, before all that waits."""


class _ReturningQueue(deque[tuple[bytes, Any]]):
    """The queue of a worker that runs its last call: tasks that still come go back to their submitter at once."""

    def __init__(self, engine: IoEngine, items: Iterable[tuple[bytes, Any]]) -> None:
        super().__init__(items)
        self._engine = engine

    def append(self, item: tuple[bytes, Any]) -> None:
        src, msg = item
        if type(msg) is m.PushTask:
            self._engine.send(src, m.TasksReturned([msg.task], False))
        else:
            super().append(item)


def _end_forked_child(
    src: bytes, task: bytes, num_returns: int, value: Any, error: BaseException | None, *rest: Any
) -> NoReturn:
    """Take the place of `Replies.reply`."""
    try:
        if error is not None:
            traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0 if error is None else 1)


class CancellationTracker(set[bytes]):
    """The tasks that were cancelled while they ran, and how many of their interrupts have not come yet."""

    _interrupts = 0
    _last = 0.0
    _raised = 0

    def raise_early(self) -> None:
        """Raise the interrupt of the running task, which was cancelled, before its signal comes.

        Raises:
            KeyboardInterrupt: unless it was raised already.
        """
        if self._interrupts > self._raised:
            self._raised += 1
            raise KeyboardInterrupt

    def was_raised(self) -> bool:
        """Return True if the interrupt whose signal has come was raised before."""
        if not self._raised:
            return False
        self._raised -= 1
        self._interrupts -= 1
        return True

    def expect_interrupt(self) -> None:
        """Count the interrupt of a task that is sent now."""
        self._interrupts, self._last = self._interrupts + 1, monotonic()

    def take_interrupt(self) -> bool:
        """Return True if an interrupt that has come may be one of those: its task may have ended meanwhile."""
        if not self._interrupts or monotonic() - self._last > _LATE_INTERRUPT:
            self._interrupts = self._raised = 0
            return False
        self._interrupts -= 1
        return True


class WorkerLease:
    """What a worker has for its tasks or its actor.

    Attributes:
        holder: the submitter that has the lease. resources: that go with it. env: the variables of the environment; a
            worker has one environment for life.
    """

    def __init__(self) -> None:
        self.holder = b""
        self.resources: dict[str, int] = {}
        self.env: dict[str, str] = {}

    def attach(self, holder: bytes, resources: dict[str, int]) -> None:
        """Another lease goes with this worker."""
        self.holder, self.resources = holder, resources

    def take_env(self, env: dict[str, str]) -> None:
        """Set the variables of a task or actor, which go before those of its job."""
        self.env = env
        self.apply_env()

    def apply_env(self) -> None:
        """Set the variables again, over those of the job."""
        os.environ.update(self.env)
        apply_device_visibility(os.environ)


class ResourceLoans:
    """The CPU of a worker, which other processes may use while it waits. Lock held in all methods."""

    def __init__(self, engine: IoEngine, raylet: bytes) -> None:
        self._engine, self._raylet = engine, raylet
        self._waits = 0

    def begin_wait(self) -> bool:
        """One more thread waits. Returns True if it is the only one."""
        self._waits += 1
        return self._waits == 1

    def lend(self, fetches: bool = False) -> None:
        """Others may use it. fetches: what is waited for exists."""
        object_time.lend(fetches)
        self._engine.send(self._raylet, m.Blocked())

    def end_wait(self) -> None:
        """A thread goes on: the worker needs its CPU, if it was the last one that waited."""
        self._waits -= 1
        if self._waits == 0:
            object_time.take_back()
            self._engine.send(self._raylet, m.Unblocked())
            self._engine.flush()


class WorkerEnd:
    """The end of a worker's process.

    Attributes:
        forked: whether this is a child process that a task has forked, and not the worker.
        terminated: whether it got a SIGTERM.
    """

    def __init__(self) -> None:
        self.forked = self.terminated = False
        self._pid = os.getpid()
        self._leaving = threading.Lock()

    def is_here(self) -> bool:
        """Return False in a process that a task has forked."""
        return os.getpid() == self._pid

    def begin(self) -> None:
        """Let one thread end the process; any other one waits here for ever."""
        self._leaving.acquire()

    def exit(self, code: int) -> NoReturn:
        """End the process; after a SIGTERM by that signal."""
        if self.terminated:  # its raylet reads from the exit status what it died of
            with contextlib.suppress(ValueError):  # on another thread than the main one
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(self._pid, signal.SIGTERM)
                time.sleep(1)
        os._exit(code)


class TaskExecutor:
    """Executes what submitters push. The main thread runs tasks and drives the engine in between.

    Attributes:
        queue: what came and has not started. lease: what it has for that.
        environment: the rest of its runtime_env. options: of tasks that have their own.
        cancelled: tasks that were cancelled while they ran.
        log_parts: the parts of the log files that tasks wrote; None where the worker has none.
        end: of the process.
    """

    def __init__(self, process: CoreWorker, environment: WorkerEnvironment) -> None:
        object_time.counts = True
        self.process = process
        self.engine = process.engine
        self.end = WorkerEnd()
        self.actor: ActorExecutor | None = None
        self.running: bytes | None = None
        self.thread_locals: dict[int, dict[str, Any]] = {}
        self.register_thread()
        self.lease = WorkerLease()
        self.environment = environment
        self.queue: deque[tuple[bytes, Any]] = deque()
        self.options: dict[bytes, m.CallOptions] = {}
        self.cancelled: CancellationTracker = CancellationTracker()
        self.log_parts: LogParts | None = None
        self.replies = Replies(self, process)
        self.generators: GeneratorExecutor = GeneratorExecutor(self, self.replies)
        self.drain: ActorDrain = ActorDrain(self)
        self.reply: Callable[..., None] = self.replies.reply
        self._retirement: Waiter | None = None
        self._idle: Waiter | None = None
        self._await_work: Callable[[Waiter], object] = self.engine.wait
        self._prefetcher = QueuedArgumentPrefetcher(process)
        self._blobs: dict[bytes, m.FunctionDef] = {}
        self._functions: dict[bytes, tuple[str, Callable[..., Any]]] = {}
        self._interruptible = False
        self._children_from = 0
        self._loans = ResourceLoans(self.engine, self._raylet)
        process.place.job = environment.job or process.place.job
        if process.place.job is not None:
            self.apply_job(process.place.job)

    @property
    def _raylet(self) -> bytes:
        return raylet_of(self.process.node)

    @property
    def forked(self) -> bool:
        """True in a child process that a task has forked, which is not the worker."""
        return self.end.forked

    @property
    def handlers(self) -> HandlerTable:
        """Handlers of the messages that only workers get."""
        return self, HANDLERS

    @property
    def env_problem(self) -> str:
        """Why the runtime_env cannot be had; "" if it can."""
        return self.environment.problem

    def env_error(self, actor_id: str = "") -> RayError:
        """Return what tasks raise, or the calls of an actor, because of that problem."""
        return self.environment.error(actor_id)

    # ------------------------------------------------------------ messages (lock held)

    def _on_function(self, _: bytes, msg: m.FunctionDef) -> None:
        self._blobs[msg.id] = msg

    def _on_options(self, _: bytes, msg: m.CallOptions) -> None:
        self.options[msg.task] = msg
        if msg.group and self.actor is not None:
            self.actor.route_by_group()

    def forget_options(self, task: bytes) -> None:
        """Forget the options of a task or call that has ended."""
        self.options.pop(task, None)
        self.cancelled.discard(task)

    def _on_leased(self, src: bytes, msg: m.LeaseAttached) -> None:
        holds = self.process.placement_groups.enter(msg.resources, msg.strategy)
        self.lease.attach(src, holds)
        if thread_count_changes(holds.get("CPU", 0)):
            self._on_work(src, msg)
        if msg.env:
            self.lease.take_env(self.environment.variables(msg.env))

    def _on_call(self, src: bytes, msg: m.PushTask | m.ActorCall) -> None:
        idle = self._idle
        if msg.refs is not None and (idle is None or self.queue):
            self._prefetcher.fetch(msg.refs)
        self.queue.append((src, msg))
        if idle is not None and idle.count:  # `_wake`, without a call
            idle.count = 0
            self.engine.notify(idle)

    def _on_work(self, src: bytes, msg: Any) -> None:
        self.queue.append((src, msg))
        self._wake()

    def enqueue_first(self, msg: Any) -> None:
        """Queue a message before all that waits (lock held)."""
        self.queue.appendleft((b"", msg))
        self._wake()

    def _wake(self) -> None:
        idle = self._idle
        if idle is not None and idle.count:
            idle.count = 0
            self.engine.notify(idle)

    def return_tasks(self, src: bytes | None, asked: bool) -> None:
        """Return what has not started: to the submitter that requested it, or to all because we block."""
        back: dict[bytes, list[bytes]] = {src: []} if src is not None else {}
        kept: deque[tuple[bytes, Any]] = deque()
        for item in self.queue:
            if type(item[1]) is m.PushTask and (src is None or item[0] == src):
                back.setdefault(item[0], []).append(item[1].task)
                self.options.pop(item[1].task, None)
            else:
                kept.append(item)
        self.queue.clear()
        self.queue.extend(kept)  # in place: the queue of a worker that retires returns what comes
        for submitter, tasks in back.items():
            self.engine.send(submitter, m.TasksReturned(tasks, asked))

    def _on_cancel(self, src: bytes, msg: m.CancelTask) -> None:
        for item in self.queue:
            if getattr(item[1], "task", None) == msg.task:
                self.queue.remove(item)
                self.reply_cancelled(src, item[1])
                self.options.pop(msg.task, None)
                return
        if self.actor is not None:
            self.actor.cancel(msg.task, msg.recursive)
        elif self.running == msg.task:
            if msg.recursive:
                self.process.submitter.cancellation.cancel_children(self.is_child, msg.force)
            if msg.force:
                self.engine.send(self._raylet, m.ProcLeaving(_CANCELLED))
                self.engine.flush()
                os._exit(1)
            self.cancelled.add(msg.task)
            self.cancelled.expect_interrupt()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def reply_cancelled(self, src: bytes, msg: m.PushTask | m.ActorCall) -> None:
        """Reply to a task or call that was cancelled before it began. Nothing of a call is recorded."""
        error = TaskCancelledError(TaskID(msg.task), "It was cancelled before it started")
        if isinstance(msg, m.PushTask) and (record := self.replies.record) is not None:
            record.add((msg.task, self.running_name(msg), perf_counter(), 0, True))
            record.explain(msg.task, error)
        blob = serialize_error(error)
        returns = [m.Returned(blob) for _ in range(abs(msg.num_returns))]
        with self.engine.lock:
            self.engine.send(src, m.TaskReply(msg.task, 2, returns, 0))
            self.engine.flush()

    def is_child(self, task: PendingTask) -> bool:
        """Return True for what the task that runs has submitted, which is no actor's call."""
        return int.from_bytes(task.id[8:], "big") > self._children_from

    def _on_exit(self, src: bytes, msg: m.Exit) -> None:
        process = self.process
        if msg.if_unused:
            process.drain()
            movable = {oid for extension in process.extensions.loaded for oid in extension.movable_objects()}
            if self.queue or any(oid.startswith(process.me) and oid not in movable for oid in process.table.entries):
                self.engine.send(src, m.ExitRefused())
                return
        if msg.if_unused and any(extension.waits_at_exit for extension in process.extensions.loaded):
            self._on_work(src, msg)
            return
        self._send_last_messages()
        process.end(msg.code)

    def _on_set_job(self, _: bytes, msg: m.SetJob) -> None:
        if self.environment.job is None:
            self.apply_job(msg.job)

    def apply_job(self, job: m.JobInfo) -> None:
        """Take over the driver's working directory, import path and environment."""
        self.process.place.job = job
        for path in map(PathRelocation.of(os.environ).copy, reversed(job.sys_path)):
            if path not in sys.path:
                sys.path.insert(0, path)
        with contextlib.suppress(OSError):
            os.chdir(job.cwd)
        os.environ[OWN_NAMESPACE] = job.namespace
        os.environ.update(self.environment.variables(job.env))
        self.lease.apply_env()
        self.environment.enter()

    def interrupted(self, signum: int, frame: FrameType | None) -> None:
        """A SIGINT comes from ourselves (`_on_cancel`), for one task, or from the program: it has called
        `_thread.interrupt_main()` or `signal.raise_signal`. Either is a KeyboardInterrupt of the task or call that
        runs.

        And not the middle of a table update of ours: then the signal is sent again a moment later.
        """
        asleep = threading.get_ident() in self.engine.asleep
        if self.actor is None:
            if self.cancelled.was_raised():
                return
            cancelled = self._interruptible and self.running in self.cancelled
            if not cancelled and (self.cancelled.take_interrupt() or not self._interruptible):
                return
            if asleep or in_user_code(frame):
                self.cancelled.take_interrupt()
                raise KeyboardInterrupt
        elif in_user_code(frame):
            # Our own code that calls the user's looks so, too: behind the call an interrupt would cost the reply.
            if frame is not None and not frame.f_code.co_filename.startswith(_OURS):
                raise KeyboardInterrupt
        elif self.process.local.task is None:
            return
        elif asleep:
            raise KeyboardInterrupt
        _send_again(signum)

    def terminated(self, signum: int, frame: FrameType | None) -> None:
        """SIGTERM ends the process, as in Ray: a task, or a call of an actor that runs one at a time,
        gets a SystemExit; calls that run in threads and coroutines are finished first."""
        if not self.end.is_here():  # a process that a task has forked
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
            return
        self.end.terminated = True
        if self.process.local.task is None:
            self.engine.call_soon(self._end_soon)
        elif threading.get_ident() in self.engine.asleep or in_user_code(frame):
            raise SystemExit(1)
        else:
            _send_again(signum)

    def awaited(self) -> Waiter | None:
        """Return what the main thread waits for while the queue is empty; None while it works."""
        return self._idle

    def _end_soon(self) -> None:
        with self.engine.lock:
            self.enqueue_first(_Terminated())

    def let_interrupt(self, code: CodeType) -> None:
        """Let interrupts of a task through where this function of ours waits."""
        _COUNTED.add(code)

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
                        self._await_work(waiter)
                        self._idle = None
                        self.replies.since_flush = 0
                    src, msg = self.queue.popleft()
                    kind = type(msg)
                    if kind is m.PushTask:
                        self.running = msg.task
                        self._children_from = self.process.task_counter
                if kind is m.PushTask:
                    self._run_task(src, msg)
                elif kind is m.ActorCall:
                    assert self.actor is not None
                    self.actor.call(src, msg)
                elif kind is m.LeaseAttached:
                    set_thread_count(self.lease.resources.get("CPU", 0))
                elif kind in URGENT:
                    self.drain.run_urgent(msg)
                elif kind is m.Exit:
                    self.leave("", msg.code)
                elif kind is _Retire:
                    self._finish_retirement()
                elif kind is m.BecomeActor:
                    hold = msg.spec.hold
                    set_thread_count(self.process.placement_groups.enter(hold.resources, hold.strategy).get("CPU", 0))
                    self.lease.take_env(self.environment.variables(msg.spec.hold.env))
                    self.actor = ActorExecutor(self, msg, self.drain, self.generators)
                    self.actor.construct()
                    if self.actor.takes_calls:
                        self._leave_calls_to(self.actor)
                elif kind is _Terminated:
                    if self.actor is not None:
                        self.actor.stop_calls()
                    self.leave("", 1)
                elif self.actor is not None:
                    self.actor.finish("all references to the actor were removed")
            except KeyboardInterrupt:
                continue  # a cancellation that came after its task had ended
            except SystemExit:
                self.leave("", 1)  # a SIGTERM that came when its call had just ended

    def _leave_calls_to(self, actor: ActorExecutor) -> None:
        """The thread of the actor's event loop drives, and starts the calls that it reads; this one gets the rest."""
        with self.engine.lock:
            self._await_work = functools.partial(wait_without_driving, self.engine)
            if actor.takes_calls:
                waiting = [item for item in self.queue if type(item[1]) is m.ActorCall]
                for item in waiting:
                    self.queue.remove(item)
                    actor.call(*item)
                self.process.handlers.use(m.ActorCall, actor.call)

    def queue_calls(self) -> None:
        """Take calls in through the queue again: where each of them goes has to be looked at."""
        with self.engine.lock:
            if self.actor is not None and self.actor.takes_calls:
                self.actor.takes_calls = False
                self.process.handlers.use(m.ActorCall, self._on_call)

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
            found = self._functions.get(msg.fn) or self._load(msg.fn)
            name, function = found
            local["name"] = name
            if msg.args == NO_ARGS:
                if self.cancelled and msg.task in self.cancelled:
                    raise KeyboardInterrupt  # since it left the queue
                value = function()
            else:
                args, kwargs = self.arguments(msg.args, msg.inline, msg.refs)
                if self.cancelled and msg.task in self.cancelled:
                    raise KeyboardInterrupt  # since it left the queue; code of the user's has unpickled the arguments
                value = function(*args, **kwargs)
                del args, kwargs
            if msg.num_returns < 0:
                self.generators.run(src, msg, value)
                value = None
        except SystemExit as leaving:
            code = leaving.code
            self.leave("", code if isinstance(code, int) else 0 if code is None else 1)
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
            self.forget_options(msg.task)

    def check_values(self) -> None:
        """Ask the actor from now on before the value of a call is sent."""
        self.reply = self._reply_checked

    def _reply_checked(
        self, src: bytes, task: bytes, num_returns: int, value: Any, error: BaseException | None, name: str, *rest: Any
    ) -> None:
        if error is None and self.actor is not None and (error := self.actor.verdict(task, name)) is not None:
            value = None
        self.replies.reply(src, task, num_returns, value, error, name, *rest)

    def arguments(
        self, blob: bytes, inline: list[bytes] | None, refs: list[m.ArgRef] | None
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """Unpack the arguments of a task or call, fetching what is in node stores."""
        try:
            args, kwargs = deserialize(blob)
        except Exception as error:  # unpickling runs user code
            raise unreadable(error) from error
        if inline is not None:
            local = self.process.local
            local.loading = [task_of(ref.id) for ref in refs or ()]
            try:
                values = self.process.reader.load_slots(inline, refs)
            finally:
                local.loading = None
            args = [fill_slot(value, values) for value in args]
            kwargs = {key: fill_slot(value, values) for key, value in kwargs.items()}
        return args, kwargs

    def _load(self, ident: bytes) -> tuple[str, Callable[..., Any]]:
        if self.env_problem:  # checked once per function: without its environment this worker loads none
            raise Verdict(self.env_error())
        definition = self._blobs[ident]
        try:
            function = deserialize(definition.blob)
        except Exception as error:  # unpickling runs user code
            raise RuntimeError(
                "The remote function failed to import on the worker. This may be because needed library dependencies "
                f"are not installed in the worker environment or cannot be found from sys.path {sys.path}:\n\n"
                f"{remote_traceback(error)}"
            ) from None
        if definition.max_calls:
            function = self._counted(function, definition.max_calls)
        found = self._functions[ident] = (definition.name, function)
        del self._blobs[ident]
        return found

    def register_thread(self) -> None:
        """The calling thread will run tasks or calls: `thread_locals` shows to others what it runs."""
        self.thread_locals[threading.get_ident()] = vars(self.process.local)

    def running_call(self) -> bytes:
        """Return the id of the task or call that the calling thread or coroutine executes; b"" for none."""
        task = async_task.get() or self.process.local.task
        return task.task if task is not None else b""

    def display_name(self, task: bytes, name: str) -> str:
        """Return the name of a task for people: its option `name`, else `name`."""
        own = self.options.get(task)
        return own.name if own is not None and own.name else name

    def running_name(self, msg: m.PushTask | m.ActorCall) -> str:
        """Return the name, for people, of a task or call that runs. Runs no code of the user."""
        if own := self.display_name(msg.task, ""):
            return own
        if isinstance(msg, m.ActorCall):
            return f"{self.actor.spec.class_name}.{msg.method}" if self.actor is not None else msg.method
        found = self._functions.get(msg.fn)
        blob = self._blobs.get(msg.fn)
        return found[0] if found is not None else blob.name if blob is not None else ""

    def names_of(self, msg: m.PushTask | m.ActorCall) -> tuple[str, str]:
        """The names of a running task, for people: its own (or what it calls), and that of the function.

        The functions and classes around the latter are named in async actors only, as in Ray.
        """
        if isinstance(msg, m.PushTask):
            name, function = self._functions.get(msg.fn) or ("", None)
            called = qualified_name(function, last=1)
        else:
            assert self.actor is not None
            name = f"{self.actor.spec.class_name}.{msg.method}"
            cls, method = self.actor.cls, getattr(self.actor.cls, msg.method, None)
            last = 0 if self.actor.is_async else 1
            # Of a class sent by value only its functions remember where it was defined.
            called = qualified_name(method, last=last and last + 1)
            if not called.endswith(f"{cls.__name__}.{msg.method}"):
                called = f"{qualified_name(cls, last)}.{msg.method}"
        return self.display_name(msg.task, name), called

    # ------------------------------------------------------------ blocking

    def block(self, waiter: Waiter, deadline: float | None) -> bool:
        """Wait inside a task; if it takes long (or what we wait for needs a CPU), lend ours meanwhile.

        Raises:
            KeyboardInterrupt: the task was cancelled meanwhile.
        """
        done = self._block(waiter, deadline)
        # What is awaited may come before the signal of the cancellation does, and end the task.
        if self._interruptible and self.running in self.cancelled and _in_main_thread():
            self.cancelled.raise_early()
        return done

    def _block(self, waiter: Waiter, deadline: float | None) -> bool:
        engine = self.engine
        if self.environment.since:  # no task has started: there is nothing to lend or to give back
            return engine.wait(waiter, deadline)
        if not any(scheduling_class.queue for scheduling_class in self.process.submitter.leases.by_index):
            soon = monotonic() + _LEND_AFTER
            if deadline is not None and deadline <= soon:
                return engine.wait(waiter, deadline)
            if engine.wait(waiter, soon):
                return True
        makers = self.process.local.loading if self.actor is not None else None
        while True:
            until = min(deadline or math.inf, monotonic() + BEHIND_CHECK) if makers else deadline
            if self._loans.begin_wait():
                self.return_tasks(None, False)
                self._loans.lend(self.process.reader.only_fetches())
            try:
                done = engine.wait(waiter, until)
            finally:
                self._loans.end_wait()
            if done or until == deadline:
                return done
            if self.queue:
                engine.lock.release()
                try:
                    for call in makers or ():
                        self.run_earlier_calls(call)
                finally:
                    engine.lock.acquire()

    def process_died(self, proc: bytes) -> None:
        """Close the generators of a dead caller (lock held)."""
        self.generators.caller_died(proc)

    def save_state(self) -> Callable[[], bool]:
        """Save the state of an actor that restarts on another node, as `ActorDrain` does (lock held)."""
        return self.drain.save_state()

    def run_earlier_calls(self, wanted: bytes) -> bool:
        """Run the calls in the queue of an actor that runs again what was lost, while the call on this thread waits for
        its arguments: these may need what the others make. Its method has not begun, so only one runs at a time.

        Args:
            wanted: a call that runs again for certain; so do those that were made before this one by the same caller.

        Returns:
            True if one ran.
        """
        local, actor = self.process.local, self.actor
        this = local.task
        if (
            not _in_main_thread()
            or actor is None
            or not actor.runs_one_at_a_time
            or this is None
            or local.loading is None
        ):
            return False
        ran = False
        while (item := self._take_earlier(wanted, this.task)) is not None:
            ran = True
            state = dict(vars(local))
            vars(local).update(loading=None, reading=False, deadline=None, read_as="", read_target=None)
            try:
                actor.call(*item)
            finally:
                vars(local).clear()
                vars(local).update(state)
        return ran

    def _take_earlier(self, wanted: bytes, this: bytes) -> tuple[bytes, m.ActorCall] | None:
        with self.engine.lock:
            for item in self.queue:
                msg = item[1]
                if type(msg) is m.ActorCall and (
                    msg.task == wanted or (owner_of(msg.task) == owner_of(this) and msg.task < this)
                ):
                    self.queue.remove(item)
                    return item[0], msg
        return None

    def holds_up(self, call: bytes) -> bool:
        """Return True if a call waits here until the one on this thread, of an actor that runs one at a time, ends."""
        if threading.current_thread() is not threading.main_thread():
            return False
        with self.engine.lock:
            return any(type(msg) is m.ActorCall and msg.task == call for _, msg in self.queue)

    # ------------------------------------------------------------ max_calls

    def _retire(self) -> None:
        """Take no more tasks: the one that runs is the last (called by that task)."""
        with self.engine.lock:
            self.return_tasks(None, False)
            self.engine.send(self.lease.holder, m.TasksReturned([], True, True))
            self.queue = _ReturningQueue(self.engine, self.queue)
            self.queue.append((b"", _Retire()))
            self.engine.flush()

    def _finish_retirement(self) -> None:
        """The last reply is on its way: announce the exit, and exit when no other process needs this one any more."""
        engine, table = self.engine, self.process.table
        with engine.lock:
            engine.flush()
            while table.refs.unacked:  # the reply waits for them
                engine.wait(Waiter(), monotonic() + _NEEDED_CHECK)
            # Only the submitter's answer shows that it has read the replies: a broken connection would lose them.
            self._retirement = Waiter()
            engine.send(self.lease.holder, m.TasksReturned([], False, True))
            engine.wait(self._retirement)
        self._finish_extensions()
        with engine.lock:
            if self._is_needed():
                kept = any(extension.keeps_resources for extension in self.process.extensions.loaded)
                engine.send(self._raylet, m.Blocked(retired=not kept))
                while self._is_needed():
                    engine.wait(Waiter(), monotonic() + _NEEDED_CHECK)
        self.leave("it has had its max_calls")

    def _on_return_tasks(self, src: bytes, msg: m.ReturnTasks) -> None:
        if self._retirement is None:
            self.return_tasks(src, True)
        elif msg.leaving:
            self._retirement.count = 0
            self.engine.notify(self._retirement)

    def _is_needed(self) -> bool:
        """Return True if a task of ours is unfinished, or an object of ours is referred to elsewhere (lock held)."""
        self.process.drain()
        me = self.process.me
        entries = self.process.table.entries.items()
        return any(entry.borrowers or entry.state == PENDING for oid, entry in entries if oid[:8] == me)

    def _counted(self, function: Callable[..., Any], limit: int) -> Callable[..., Any]:
        """The function, with its calls counted: number `limit` is the last of this worker."""
        left = limit

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                self._retire()
            return function(*args, **kwargs)

        made: Any = call
        _COUNTED.add(made.__code__)
        return call

    def _finish_extensions(self) -> None:
        """Have features bring to safety what other processes need of this one. Not after a SIGTERM: all processes of a
        job may have got one."""
        if not self.end.terminated:
            for extension in self.process.extensions.loaded:
                extension.before_exit()

    # ------------------------------------------------------------ leaving

    def begin_forked_child(self) -> None:
        """This is a process that a task has forked: end it when that task's code returns or raises, as Python ends a
        program. The caller of the task hears from the parent alone."""
        self.end.forked = True
        self.reply = _end_forked_child

    def leave(self, reason: str, code: int = 0) -> NoReturn:
        """End this worker on purpose (without a `reason`: as if it crashed); buffers are written, exit handlers run."""
        if self.end.forked:
            os._exit(code)  # none of this is its own
        self.end.begin()
        self._leave_in_time(code)
        self._finish_extensions()
        if self.actor is not None:
            self.actor.shut_down()
        with self.engine.lock:
            self._await_own_tasks()
            self.process.submitter.leases.return_idle()  # their workers live on
            if self.actor is not None and reason:
                self.engine.send(self._raylet, m.ProcLeaving(reason))
            self._send_last_messages()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            for stream in (sys.stdout, sys.stderr):
                getattr(stream, "finish", stream.flush)()
        self.end.exit(code)

    def _send_last_messages(self) -> None:
        """Write everything queued, and what has run here, which the raylet counts from now on (lock held)."""
        with contextlib.suppress(Exception):  # user code may have changed what is counted: that must not stop the end
            figures = self.process.diagnostics.introspect("last", ())
            self.engine.send(self._raylet, m.LastFigures(msgspec.msgpack.encode(figures)))
        self.engine.flush()
        self.engine.links.write_all(_EXIT_WRITE_TIMEOUT)

    def _await_own_tasks(self) -> None:
        """The replies that wait for owners of refs leave first; and what an actor has submitted ends, as in Ray."""
        lent = False
        while self.process.table.refs.unacked or (self.actor is not None and self._has_open_tasks(self.actor)):
            if not lent:
                lent = True
                self._loans.lend()
                self.process.submitter.generator_streams.release_all()
            self.engine.wait(Waiter(), monotonic() + _NEEDED_CHECK)

    def _has_open_tasks(self, actor: ActorExecutor) -> bool:
        """Return True if a task or call of ours has no result yet, but for calls of ourselves."""
        me, own = self.process.me, actor.spec.actor
        return any(
            entry.state == PENDING
            and oid[:8] == me
            and getattr(getattr(entry.task, "scheduling_class", None), "actor", b"") != own
            for oid, entry in self.process.table.entries.items()
        )

    def _leave_in_time(self, code: int) -> None:
        """Limit the time of what the user's code does at the end, and of the tasks that it has left."""

        def give_up() -> None:
            print(f"hpcray: its end took longer than {seconds:g} s: the process is killed", file=sys.stderr, flush=True)
            os._exit(code)

        seconds = self.process.config.actor_graceful_shutdown_timeout
        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is left
            timer.start()


def _send_again(signum: int) -> None:
    """Send the main thread this signal again, when it is no longer in the middle of our code."""
    again = threading.Timer(_RESEND_DELAY, signal.pthread_kill, (threading.get_ident(), signum))
    again.daemon = True
    again.start()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_CALLS_USERS = {
    TaskExecutor._run_task.__code__, drive.__code__, ActorExecutor.run.__code__, ActorExecutor.construct.__code__
}  # fmt: skip
"""Code of ours between a task and its function: an interrupt there is one of user code (`in_user_code`)."""
_COUNTED: set[Any] = set()
"""The same, of functions with `max_calls`: what counts their calls; and where a debugger waits for a line."""


def in_user_code(frame: FrameType | None) -> bool:
    """Return True if none of our code is at work: our innermost frame is the one that called the task's function."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return frame.f_code in _CALLS_USERS or frame.f_code in _COUNTED
        frame = frame.f_back
    return False


HANDLERS: dict[type, Callable[[TaskExecutor], Handler]] = {
    m.FunctionDef: lambda w: w._on_function,
    m.CallOptions: lambda w: w._on_options,
    m.PushTask: lambda w: w._on_call,
    m.ActorCall: lambda w: w._on_call,
    m.LeaseAttached: lambda w: w._on_leased,
    m.ReturnTasks: lambda w: w._on_return_tasks,
    m.CancelTask: lambda w: w._on_cancel,
    m.StreamTaken: lambda w: w.generators.on_taken,
    m.BecomeActor: lambda w: w._on_work,
    m.TerminateActor: lambda w: w._on_work,
    m.SaveActor: lambda w: w.drain.on_save_actor,
    m.SetJob: lambda w: w._on_set_job,
    m.Exit: lambda w: w._on_exit,
}
"""The handlers of a worker, by message, beside `core_worker.HANDLERS`."""
