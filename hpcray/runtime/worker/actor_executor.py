"""One actor inside its worker: constructor, calls (one by one, or in lanes), end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hpcray.common.exceptions import ActorDiedError, AsyncioActorExit, TaskCancelledError, remote_traceback
from hpcray.common.ids import HEAD, TaskID, raylet_of
from hpcray.common.terminal_text import plain
from hpcray.core.core_worker.object_table import Waiter
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.actor_submitter import SYSTEM_GROUPS, ExitActor, has_async_method
from hpcray.runtime.core_worker.arguments import NO_ARGS
from hpcray.runtime.core_worker.context import async_task
from hpcray.runtime.worker.actor_drain import ActorDrain
from hpcray.runtime.worker.actor_event_loop import warn_of_blocking_get
from hpcray.runtime.worker.concurrency_groups import AsyncioCallRunner, CallRunner, ThreadedCallRunner
from hpcray.runtime.worker.context import WorkerContext
from hpcray.runtime.worker.replies import GeneratorExecutor, Verdict, task_error

perf_counter = time.perf_counter


class ActorExecutor:
    """The actor that this worker is for the rest of its life.

    Attributes:
        call: starts one call, in the order of arrival.
        shown_name: what the actor's output has as prefix: its repr, if its class has one.
        takes_calls: whether `call` may be made where a call is read, under the engine's lock: an event loop drives.
    """

    def __init__(
        self, worker: WorkerContext, msg: m.BecomeActor, drain: ActorDrain, generators: GeneratorExecutor
    ) -> None:
        self.worker = worker
        self._drain = drain
        self._generators = generators
        self._refusals: list[Callable[[bytes, m.ActorCall], None]] = []
        self.spec = msg.spec
        self.restarts = msg.restarts
        self.cls: Any = None
        self.instance: Any = None
        self.is_async = self.takes_calls = False
        self.call: Callable[[bytes, m.ActorCall], None] = self.run
        self._runners: dict[str, CallRunner] = {}
        self._groups: dict[str, str] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        self._replaces_values = False
        self._exiting: set[bytes] = set()
        self._end_reason = ""
        self.shown_name = self.spec.class_name
        self._names: dict[str, str] = {}

    # ------------------------------------------------------------ life

    def construct(self) -> None:
        """Run the constructor and report to the GCS."""
        worker, spec = self.worker, self.spec
        process = worker.process
        local = process.local
        local.task, local.name, local.since = m.ActorCall(spec.actor, "__init__", b""), spec.class_name, perf_counter()
        error = b""
        problem = worker.env_problem
        try:
            if problem:
                raise worker.env_error(spec.actor.hex())
            self.cls = self._load_class()
            self.is_async = has_async_method(self.cls)
            self._open_runners()
            process.submitter.leases.unpack_all()  # a packed task has no parent of its own
            process.table.record_parents(worker.running_call)
            args, kwargs = worker.arguments(spec.args, spec.inline, spec.refs)
            self.instance = self._instantiate(args, kwargs)
            del args, kwargs
            self._drain.restore(self)
            if getattr(type(self.instance), "__repr__", None) is not object.__repr__:
                with contextlib.suppress(Exception):
                    self.shown_name = repr(self.instance)
        except BaseException as raised:
            if isinstance(raised, (SystemExit, AsyncioActorExit)):
                self.exit_error(raised)
            elif not problem:
                label = (spec.class_name, spec.actor.hex())
                cause = task_error(raised, f"{spec.class_name}.__init__", label)
                raised = ActorDiedError(cause, actor_id=spec.actor.hex())
            error = serialize_error(raised)
        if self._end_reason:
            worker.leave(self._end_reason)
        local.task = None
        engine = process.engine
        with engine.lock:
            # The creator lets go of the arguments once it hears that we are up: our own borrows must be known by then.
            while process.table.refs.unacked:
                engine.wait(Waiter(), time.monotonic() + 0.01)
            if error:
                engine.send(raylet_of(process.node), m.ProcLeaving(m.CONSTRUCTOR_RAISED))
            name = "" if self.shown_name == spec.class_name else plain(self.shown_name)[:1000]
            engine.send(HEAD, m.ActorReady(spec.actor, error, [], os.getpid(), name))
            engine.flush()

    def _load_class(self) -> Any:
        try:
            return deserialize(self.spec.cls)
        except Exception as error:  # unpickling runs user code
            raise RuntimeError(
                f"The actor with name {self.spec.class_name} failed to import on the worker. This may be because "
                "needed library dependencies are not installed in the worker environment:\n\n"
                f"{remote_traceback(error)}"
            ) from None

    def _instantiate(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Make the instance; that of an async actor on its event loop."""
        loop = self.loop
        if loop is None:
            return self.cls(*args, **kwargs)
        instance, error = asyncio.run_coroutine_threadsafe(self._instantiate_on_loop(args, kwargs), loop).result()
        if error is not None:
            raise error
        return instance

    async def _instantiate_on_loop(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """Return the instance, or what its constructor raised: some exceptions would end the loop."""
        async_task.set(m.ActorCall(self.spec.actor, "__init__", b""))
        try:
            if not inspect.iscoroutinefunction(self.cls.__init__):
                return self.cls(*args, **kwargs), None
            instance = self.cls.__new__(self.cls, *args, **kwargs)
            await instance.__init__(*args, **kwargs)
            return instance, None
        except BaseException as raised:
            return None, raised

    def _open_runners(self) -> None:
        spec = self.spec
        if self.is_async:
            warn_of_blocking_get(self.worker.process)
        if self.is_async or spec.max_concurrency > 1 or spec.concurrency_groups:
            runner = self._runners[""] = self._runner("", spec.max_concurrency)
            self.call = runner.call
            self.takes_calls = isinstance(runner, AsyncioCallRunner) and runner.drives
            if not self.takes_calls:
                self.worker.engine.busy_poll.stop()  # calls run in threads, which need the interpreter
        for group, limit in spec.concurrency_groups.items():
            self._runners[group] = self._runner(group, limit)
        if spec.concurrency_groups:
            self.route_by_group()

    def _runner(self, group: str, limit: int) -> CallRunner:
        if limit < 1:
            raise ValueError(f"concurrency group {group!r}: max_concurrency must be greater than 0, not {limit}")
        name = f"{self.spec.class_name}:{group}" if group else self.spec.class_name
        if self.is_async:
            drives = not group and not self.spec.concurrency_groups
            return AsyncioCallRunner(self, self._generators, name, limit, drives)
        return ThreadedCallRunner(self, name, limit)

    @property
    def runs_one_at_a_time(self) -> bool:
        """True if all calls run on the main thread, one after the other."""
        return not self._runners and not self._refusals

    def finish(self, reason: str) -> None:
        """Leave once everything that was accepted has run."""
        self._drain.before_leaving(self)
        self._await_calls()
        self.worker.leave(self._end_reason or reason)

    def stop_calls(self) -> None:
        """Wait for the calls that run; those that have not begun never will."""
        self._close_runners()
        self._await_calls()

    def _close_runners(self) -> None:
        for runner in list(self._runners.values()):
            runner.close()

    def _await_calls(self) -> None:
        while not self.idle():
            time.sleep(0.002)

    def shut_down(self) -> None:
        """Let the user's object go, before the process ends."""
        instance, self.instance = self.instance, None
        self._methods.clear()
        try:
            shutdown = getattr(instance, "__ray_shutdown__", None)
            if callable(shutdown):
                shutdown()
        except BaseException:
            print("Error during actor __ray_shutdown__ method", file=sys.stderr)
            traceback.print_exc()

    def exit(self) -> BaseException:
        """End the actor once what runs now has ended: calls that wait never run. The call that asks for it dies with
        the actor, even if it catches the exception that is returned, which is to be raised in it."""
        task = self.worker.running_call()
        if task:
            self._exiting.add(task)
            self._replace_values()
        self._close(_EXIT_ACTOR)
        if not task and asyncio._get_running_loop() is None:
            return SystemExit(0)  # in a thread of the user's, which ends without a traceback
        return AsyncioActorExit() if self.is_async else ExitActor(0)

    def _close(self, reason: str) -> None:
        if self._end_reason:
            return
        self._end_reason = reason
        self._close_runners()
        with self.worker.engine.lock:
            self.worker.enqueue_first(m.TerminateActor(self.spec.actor))

    def idle(self) -> bool:
        """Return True if every call that was accepted has run (but for one on the calling thread, and those of the
        system's groups: a compiled graph's may run for ever)."""
        return all(runner.idle() for group, runner in list(self._runners.items()) if group not in SYSTEM_GROUPS)

    def loops(self) -> list[asyncio.AbstractEventLoop]:
        """The event loops of an async actor, one per concurrency group."""
        return [runner.loop for runner in list(self._runners.values()) if isinstance(runner, AsyncioCallRunner)]

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of an async actor's default group."""
        runner = self._runners.get("")
        return runner.loop if isinstance(runner, AsyncioCallRunner) else None

    # ------------------------------------------------------------ calls

    def cancel(self, task: bytes, recursive: bool) -> None:
        """Cancel a call: a coroutine is interrupted; a plain method that runs can only ask, its value is dropped."""
        self._replace_values()
        if recursive:  # before the call itself: what it waits for is not to end before it hears of its cancellation
            self.worker.process.submitter.cancellation.cancel_children(
                lambda child: getattr(child, "parent", b"") == task, False
            )
        for runner in list(self._runners.values()):
            runner.cancel(task)
        if "" not in self._runners:
            if not self._runners:
                self.worker.cancelled.clear()  # one call at a time: what is there has ended
            self.worker.cancelled.add(task)
        self._generators.cancel(task)

    def _replace_values(self) -> None:
        """Look from now on, before a call's value is sent, whether the call was cancelled or has called `exit`."""
        if not self._replaces_values:
            self._replaces_values = True
            self.worker.check_values()

    def verdict(self, task: bytes, name: str) -> BaseException | None:
        """Return the error that the caller of a call gets in place of its value; None for none."""
        if task in self.worker.cancelled:
            return Verdict(TaskCancelledError(TaskID(task), f"{name} was cancelled while it ran"))
        return self._died() if task in self._exiting else None

    def route_by_group(self) -> None:
        """Route each further call by its concurrency group: there are some, or a call names one."""
        if self._refusals:
            return
        named = ((name, options.get("concurrency_group")) for name, options in self.spec.methods.items())
        self._groups = {name: group for name, group in named if group}
        self.call = self._route
        self.worker.queue_calls()

    def refuse_calls(self, refuse: Callable[[bytes, m.ActorCall], None]) -> None:
        """Hand every further call to `refuse`: the state of the actor is saved, and must not change."""
        self._refusals.append(refuse)
        self.call = self._refuse
        self.worker.queue_calls()

    def _refuse(self, src: bytes, msg: m.ActorCall) -> None:
        self._refusals[-1](src, msg)

    def _route(self, src: bytes, msg: m.ActorCall) -> None:
        own = self.worker.options.get(msg.task)
        group = (own.group if own is not None else "") or self._groups.get(msg.method, "")
        runner = self._runners.get(group)
        if runner is None and group in SYSTEM_GROUPS:
            self.worker.engine.busy_poll.stop()
            runner = self._runners[group] = self._runner(group, SYSTEM_GROUPS[group])
        if runner is not None:
            runner.call(src, msg)
        elif not group:
            self.run(src, msg)
        else:
            text = (
                f"the actor {self.spec.class_name} has no concurrency group {group!r}, only "
                f"{list(self.spec.concurrency_groups)}"
            )
            hint = 'hint: declare it, @remote(concurrency_groups={"name": limit})'
            name = f"{self.spec.class_name}.{msg.method}"
            self.worker.reply(src, msg.task, msg.num_returns, None, ValueError(f"{text}; {hint}"), name, 0, None)

    def run(self, src: bytes, msg: m.ActorCall, hold: Callable[[], bool] | None = None) -> None:
        """One call, from its arguments to its reply. hold: whether that may wait a moment, for others."""
        started = perf_counter()
        worker = self.worker
        local = vars(worker.process.local)  # several times faster than its attributes
        protected: list[bytes] = []
        local["protected"] = protected
        local["since"] = started
        local["task"] = msg
        local["name"] = self.spec.class_name
        value: Any = None
        error: BaseException | None = None
        try:
            method = self._methods.get(msg.method) or self.method(msg.method)
            if msg.args == NO_ARGS:
                value = method()
            else:
                args, kwargs = worker.arguments(msg.args, msg.inline, msg.refs)
                value = method(*args, **kwargs)
                del args, kwargs
            if msg.num_returns < 0:
                self._generators.run(src, msg, value)
                value = None
        except (SystemExit, AsyncioActorExit) as exit_:
            error = self.exit_error(exit_)
        except BaseException as raised:
            error = raised
        us = int((perf_counter() - started) * 1e6)
        name = self._names.get(msg.method) or self.name_of(msg.method)
        label = self.error_label() if error is not None else None
        held = hold is not None and hold()
        worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label, held)
        del value, error
        local["protected"] = local["task"] = None
        if worker.options or worker.cancelled:
            worker.forget_options(msg.task)

    def name_of(self, method: str) -> str:
        """Return the name of a call of this method, for people."""
        return self._names.setdefault(method, f"{self.spec.class_name}.{method}")

    def method(self, name: str) -> Callable[..., Any]:
        """Return the function that a call of this name runs: that of the class, whatever the instance has of the name,
        as in Ray."""
        found = self._methods.get(name)
        if found is None:
            found = _BUILT_IN[name](self) if name in _BUILT_IN else self._bound(name)
            self._methods[name] = found
        return found

    def _bound(self, name: str) -> Any:
        member = next((vars(base)[name] for base in self.cls.__mro__ if name in vars(base)), None)
        if member is None:
            raise AttributeError(f"type object {self.cls.__name__!r} has no attribute {name!r}")
        return member.__get__(self.instance, self.cls) if hasattr(member, "__get__") else member

    def terminate(self) -> NoReturn:
        """The method `__ray_terminate__` of all actors."""
        raise self.exit()

    def exit_error(self, exit_: BaseException) -> Verdict:
        """A method ended the actor: return what its caller gets.

        Any exit code but 0 means a crash, as in Ray: the process ends, and the actor is restarted if it may be.
        """
        if self.worker.forked:
            self.worker.leave("", 1 if getattr(exit_, "code", 0) else 0)  # the child alone
        if isinstance(exit_, SystemExit) and exit_.code != 0:
            print(f"hpcray: actor {self.spec.class_name} raised SystemExit({exit_.code!r})", file=sys.stderr)
            self._close_runners()
            self.worker.leave("", (exit_.code & 0xFF or 1) if isinstance(exit_.code, int) else 1)
        self._close(_EXIT_ACTOR if isinstance(exit_, (ExitActor, AsyncioActorExit)) else _EXITED)
        return self._died()

    def _died(self) -> Verdict:
        spec = self.spec
        error = ActorDiedError(
            self._end_reason, actor_id=spec.actor.hex(), class_name=spec.class_name, pid=os.getpid(), name=spec.name,
            namespace=spec.namespace, ip=node_ip_address(),
        )  # fmt: skip
        return Verdict(error)

    def error_label(self) -> tuple[str, str]:
        """The actor's repr and id, for errors."""
        text = self.spec.class_name
        with contextlib.suppress(Exception):  # of the user's; the caller must get its answer all the same
            text = repr(self.instance)
        return text, self.spec.actor.hex()


_EXITED = (
    "its worker process has died. Worker exit type: INTENDED_USER_EXIT Worker exit detail: "
    f"{m.USER_EXIT} Worker exits with an exit code 0."
)
_EXIT_ACTOR = f"{_EXITED} exit_actor() is called."
_BUILT_IN: dict[str, Callable[[ActorExecutor], Callable[..., Any]]] = {
    "__ray_ready__": lambda actor: lambda: True,
    "__ray_call__": lambda actor: lambda function, *args, **kwargs: function(actor.instance, *args, **kwargs),
    "__ray_terminate__": lambda actor: actor.terminate,
}
"""The methods that all actors have."""
