"""One actor inside its worker: constructor, calls (one by one, or in lanes), end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import ActorDiedError, RuntimeEnvSetupError, TaskCancelledError
from hpcray.base.ids import HEAD
from hpcray.core.owner.table import Waiter
from hpcray.runtime.actor_kinds import ExitActor, has_async_method
from hpcray.runtime.actor_lanes import AsyncLane, Lane, ThreadLane
from hpcray.runtime.arguments import NO_ARGS
from hpcray.runtime.replies import task_error
from hpcray.wire import messages as m
from hpcray.wire.serialization import deserialize, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.worker import Worker

perf_counter = time.perf_counter


class ActorHost:
    """The actor that this worker is for the rest of its life.

    Attributes:
        call: starts one call, in the order of arrival.
    """

    def __init__(self, worker: Worker, msg: m.BecomeActor) -> None:
        self.worker = worker
        self.spec = msg.spec
        self.restarts = msg.restarts
        self.cls: Any = None
        self.instance: Any = None
        self.is_async = False
        self.call: Callable[[bytes, m.ActorCall], None] = self.run
        self._lanes: dict[str, Lane] = {}
        self._groups: dict[str, str] = {}
        self._heeds = False
        self._label: tuple[str, str] | None = None
        self._names: dict[str, str] = {}

    # ------------------------------------------------------------ life

    def construct(self) -> None:
        """Run the constructor and tell the GCS."""
        worker, spec = self.worker, self.spec
        process = worker.process
        local = process.local
        local.task, local.name, local.since = m.ActorCall(spec.actor, "__init__", b""), spec.class_name, perf_counter()
        error = b""
        try:
            self.cls = deserialize(spec.cls)
            self.is_async = has_async_method(self.cls)
            self._open_lanes()
            args, kwargs = worker.arguments(spec.args, spec.inline, spec.refs)
            self.instance = self.cls(*args, **kwargs)
            del args, kwargs
            worker.end.restore(self)
        except BaseException as raised:
            label = (spec.class_name, spec.actor.hex())
            cause = task_error(raised, f"{spec.class_name}.__init__", label)
            error = serialize_error(ActorDiedError(cause, actor_id=spec.actor.hex()))
            if worker.environment.problem and isinstance(raised, RuntimeEnvSetupError):
                error = serialize_error(raised)
        local.task = None
        engine = process.engine
        with engine.lock:
            # The creator lets go of the arguments once it hears that we are up: our own borrows must be known by then.
            while process.table.unacked:
                engine.wait(Waiter(), time.monotonic() + 0.01)
            engine.send(HEAD, m.ActorReady(spec.actor, error, []))
            engine.flush()

    def _open_lanes(self) -> None:
        spec = self.spec
        if self.is_async or spec.max_concurrency > 1 or spec.concurrency_groups:
            self.worker.engine.spinning.stop()  # calls run in threads, which need the interpreter
            self._lanes[""] = self._lane("", spec.max_concurrency)
            self.call = self._lanes[""].call
        for group, limit in spec.concurrency_groups.items():
            self._lanes[group] = self._lane(group, limit)
        if spec.concurrency_groups:
            self.route_by_group()

    def _lane(self, group: str, limit: int) -> Lane:
        name = f"{self.spec.class_name}:{group}" if group else self.spec.class_name
        return AsyncLane(self, name, limit) if self.is_async else ThreadLane(self, name, limit)

    def finish(self, reason: str) -> None:
        """Leave once everything that was accepted has run."""
        self.worker.end.before_leaving(self)
        while not self.idle():
            time.sleep(0.002)
        self.worker.leave(reason)

    def idle(self) -> bool:
        """Whether every call that was accepted has run (but for one on the calling thread)."""
        return all(lane.idle() for lane in self._lanes.values())

    def loops(self) -> list[asyncio.AbstractEventLoop]:
        """The event loops of an async actor, one per concurrency group."""
        return [lane.loop for lane in list(self._lanes.values()) if isinstance(lane, AsyncLane)]

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of an async actor's default group."""
        lane = self._lanes.get("")
        return lane.loop if isinstance(lane, AsyncLane) else None

    # ------------------------------------------------------------ calls

    def cancel(self, task: bytes) -> None:
        """Cancel a call: a coroutine is interrupted; a plain method that runs can only ask, its value is dropped."""
        if not self._heeds:
            self._heeds = True
            self.worker.reply = partial(self._reply_unless_cancelled, self.worker.reply)
        for lane in self._lanes.values():
            lane.cancel(task)
        if not self._lanes:
            self.worker.cancelled.add(task)

    def _reply_unless_cancelled(
        self, reply: Callable[..., None], src: bytes, task: bytes, num_returns: int, value: Any,
        error: BaseException | None, name: str, *rest: Any,
    ) -> None:  # fmt: skip
        if error is None and task in self.worker.cancelled:
            value, error = None, TaskCancelledError(error_message=f"{name} was cancelled while it ran")
        reply(src, task, num_returns, value, error, name, *rest)

    def route_by_group(self) -> None:
        """From now on look at each call's concurrency group: there are some, or a caller believes so."""
        named = ((name, options.get("concurrency_group")) for name, options in self.spec.methods.items())
        self._groups = {name: group for name, group in named if group}
        self.call = self._route

    def _route(self, src: bytes, msg: m.ActorCall) -> None:
        own = self.worker.options.get(msg.task)
        group = (own.group if own is not None else "") or self._groups.get(msg.method, "")
        lane = self._lanes.get(group)
        if lane is not None:
            lane.call(src, msg)
        elif not group:
            self.run(src, msg)
        else:
            text = f"the actor {self.spec.class_name} has no concurrency group {group!r}, only {list(self._lanes)[1:]}"
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
        leaving = ""
        try:
            if msg.args == NO_ARGS:
                value = self.method(msg.method)()
            else:
                args, kwargs = worker.arguments(msg.args, msg.inline, msg.refs)
                value = self.method(msg.method)(*args, **kwargs)
                del args, kwargs
            if msg.num_returns < 0:
                worker.yielding.run(src, msg, value)
                value = None
        except SystemExit as exit_:
            error, leaving = self.left(exit_)
        except BaseException as raised:
            error = raised
        us = int((perf_counter() - started) * 1e6)
        name = self._names.get(msg.method) or self.name_of(msg.method)
        label = self.described() if error is not None else None
        held = hold is not None and hold()
        worker.reply(src, msg.task, msg.num_returns, value, error, name, us, protected, label, held)
        del value, error
        local["protected"] = local["task"] = None
        if worker.options or worker.cancelled:
            worker.forget(msg.task)
        if leaving:
            worker.leave(leaving)

    def name_of(self, method: str) -> str:
        """What people call a call of this method."""
        return self._names.setdefault(method, f"{self.spec.class_name}.{method}")

    def method(self, name: str) -> Callable[..., Any]:
        """What a call of this name runs."""
        if name.startswith("__ray_"):
            if name == "__ray_ready__":
                return lambda: True
            if name == "__ray_call__":
                return lambda function, *args, **kwargs: function(self.instance, *args, **kwargs)
            if name == "__ray_terminate__":
                return _exit
        found: Callable[..., Any] = getattr(self.instance, name)
        return found

    def left(self, exit_: BaseException) -> tuple[ActorDiedError, str]:
        """A method ended the actor: what its caller gets, and the reason in words.

        Any exit code but 0 means a crash, as in Ray: the process ends, and the actor is restarted if it may be.
        """
        if isinstance(exit_, SystemExit) and exit_.code != 0:
            print(f"hpcray: actor {self.spec.class_name} raised SystemExit({exit_.code!r})", file=sys.stderr)
            self.worker.leave("", (exit_.code & 0xFF or 1) if isinstance(exit_.code, int) else 1)
        reason = "exit_actor() was called"
        if isinstance(exit_, SystemExit) and not isinstance(exit_, ExitActor):
            reason = f"it raised SystemExit({exit_.code})"
        spec = self.spec
        died = ActorDiedError(
            f"The actor exited: {reason}", actor_id=spec.actor.hex(), class_name=spec.class_name, name=spec.name
        )
        return died, reason

    def described(self) -> tuple[str, str]:
        """The actor's repr and id, for errors."""
        if self._label is None:
            # The default repr holds an address; a user's own __repr__ is what people want to see.
            own = getattr(type(self.instance), "__repr__", None) is not object.__repr__
            text = self.spec.class_name
            if own:
                with contextlib.suppress(Exception):  # of the user's; the caller must get its answer all the same
                    text = repr(self.instance)
            self._label = (text, self.spec.actor.hex())
        return self._label


def _exit() -> None:
    raise ExitActor(0)
