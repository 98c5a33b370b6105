"""Futures over tasks and actor calls with a limit on the calls in flight, and reusable actors that run any function."""

from __future__ import annotations

import concurrent.futures
import math
import os
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

import cloudpickle

from hpcray.api.actor import ActorClass, ActorHandle
from hpcray.api.decorator import remote
from hpcray.api.objects import cancel, wait
from hpcray.api.remote_function import RemoteFunction
from hpcray.api.runtime_context import cluster_resources
from hpcray.api.session import require_session
from hpcray.common.exceptions import RayActorError
from hpcray.common.task_errors import RayTaskError, happened_inside, make_task_error
from hpcray.platform.sockets import node_ip_address
from hpcray.runtime.core_worker.core_worker import current
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.actor_pool import end_actors

_COMPLETION_POLL = 0.02
"""Seconds between two checks of a future whose call has ended and whose result is about to be set."""
_KNOWN_FUNCTIONS = 64  # remote functions to keep
_CALLS_PER_CPU = 4
_MIN_WIDTH = 64


class DispatchFuture(concurrent.futures.Future[Any]):
    """A `concurrent.futures.Future`. A task that waits for it lends its CPU meanwhile."""

    _dispatcher: Dispatcher | None = None

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._wait_lending_cpu(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._wait_lending_cpu(timeout))

    def _wait_lending_cpu(self, timeout: float | None) -> float | None:
        dispatcher = self._dispatcher
        return timeout if dispatcher is None or self.done() else dispatcher.wait_lending_cpu(self.done, timeout)


class DispatchedCall:
    """A queued call and the future of its result."""

    __slots__ = ("future", "payload", "place", "read")

    def __init__(
        self, payload: tuple[Any, ...], read: Callable[[Any], Any] | None = None, place: int | None = None
    ) -> None:
        """
        Args:
            payload: argument of the dispatcher's `start`.
            read: converts the value of the call to the result of the future; may raise.
            place: number of the actor that has to run it, of `ActorWorkers`; None: any.
        """
        self.payload, self.read, self.place = payload, read, place
        self.future = DispatchFuture()


class Dispatcher(ABC):
    """Starts queued calls in order, at most `width` at a time. Futures of queued calls can be cancelled."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._queue: deque[DispatchedCall] = deque()
        self._refs: dict[DispatchedCall, ObjectRef[Any]] = {}
        self._unfinished = 0
        self._starting = False
        self._closed = False
        # Reentrant: the callback of a future that is done already is called at once.
        self._idle = threading.Condition(threading.RLock())

    @abstractmethod
    def start(self, call: DispatchedCall) -> ObjectRef[Any]:
        """Submit the task or actor call. The caller holds the lock."""

    def call_ended(self, call: DispatchedCall, error: BaseException | None) -> None:  # noqa: B027 - tasks need nothing
        """Hook: a call has ended; the next one has not started. The caller holds the lock."""

    def enqueue(self, call: DispatchedCall) -> None:
        """Append a call to the queue. The caller holds the lock, as for the next two methods."""
        self._queue.append(call)

    def dequeue(self) -> DispatchedCall | None:
        """Remove and return the call to start next; None where none can start."""
        return self._queue.popleft() if self._queue and len(self._refs) < self.width else None

    def dequeue_all(self) -> list[DispatchedCall]:
        """Remove and return all queued calls."""
        calls, self._queue = list(self._queue), deque()
        return calls

    def submit(self, call: DispatchedCall) -> DispatchFuture:
        """Queue a call.

        Raises:
            RuntimeError: closed.
        """
        call.future._dispatcher = self
        with self._idle:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._unfinished += 1
            self.enqueue(call)
            self._start_queued()
        return call.future

    def close(self) -> None:
        """Refuse further calls."""
        with self._idle:
            self._closed = True

    def cancel_queued(self) -> None:
        """Cancel the calls that have not started."""
        with self._idle:
            calls = self.dequeue_all()
        for call in calls:
            call.future.cancel()
            if not call.future.set_running_or_notify_cancel():
                self._finish()

    def cancel_started(self) -> None:
        """Cancel the tasks in flight."""
        for ref in self._started():
            cancel(ref)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all futures are done. Returns False after `timeout` seconds."""
        deadline = None if timeout is None else monotonic() + timeout
        self.wait_lending_cpu(lambda: not self._unfinished, timeout)
        with self._idle:
            return self._idle.wait_for(lambda: not self._unfinished, _left(deadline))

    def wait_lending_cpu(self, done: Callable[[], bool], timeout: float | None) -> float | None:
        """Wait for a condition with `hpcray.wait`, so that a task or actor lends its CPU. A driver returns at once.

        Args:
            done: the condition.
            timeout: in seconds; None: no limit.

        Returns:
            The seconds that are left of `timeout`.
        """
        if current.worker is None:
            return timeout
        deadline = None if timeout is None else monotonic() + timeout
        while not done() and (deadline is None or monotonic() < deadline):
            refs = self._started()
            if refs:
                wait(refs, num_returns=1, timeout=_left(deadline), fetch_local=False)
            with self._idle:  # the thread that completes futures needs a moment
                self._idle.wait_for(done, _COMPLETION_POLL)
        return _left(deadline)

    def _started(self) -> list[ObjectRef[Any]]:
        with self._idle:
            return list(self._refs.values())

    def _start_queued(self) -> None:
        with self._idle:
            if self._starting:
                return
            self._starting = True
            try:
                while (call := self.dequeue()) is not None:
                    self._start_call(call)
            finally:
                self._starting = False

    def _start_call(self, call: DispatchedCall) -> None:
        if not call.future.set_running_or_notify_cancel():
            self._finish()
            return
        try:
            ref = self._refs[call] = self.start(call)
            outcome = ref.future()
        except Exception as error:  # the arguments do not fit or do not pickle, or the session has ended
            self._complete(call, None, self._release(call, error))
            return
        outcome.add_done_callback(lambda outcome: self._on_end(call, outcome))

    def _on_end(self, call: DispatchedCall, outcome: concurrent.futures.Future[Any]) -> None:
        error = outcome.exception()
        value = None if error else outcome.result()
        error = self._release(call, error)
        self._start_queued()
        self._complete(call, value, error)

    def _release(self, call: DispatchedCall, error: BaseException | None) -> BaseException | None:
        with self._idle:
            self._refs.pop(call, None)
            try:
                self.call_ended(call, error)
            except Exception as failure:  # no new actor can be made: the session has ended
                return error or failure
        return error

    def _complete(self, call: DispatchedCall, value: Any, error: BaseException | None) -> None:
        try:
            if error is None and call.read is not None:
                value = call.read(value)
        except Exception as failure:
            error = failure
        try:
            if error is None:
                call.future.set_result(value)
            else:
                call.future.set_exception(error)
        finally:
            self._finish()

    def _finish(self) -> None:
        with self._idle:
            self._unfinished -= 1
            self._idle.notify_all()


class TaskDispatcher(Dispatcher):
    """Starts calls as tasks. The payload of a call is (function, args, kwargs).

    Args:
        width: largest number of tasks in flight; None: enough to keep all CPUs busy, with some queued.
        options: options of the tasks, as for `@remote`.
    """

    def __init__(self, width: int | None, options: dict[str, Any]) -> None:
        super().__init__(width or _MIN_WIDTH)
        self._requested_width = width
        self._options = {"num_returns": 1, **options}
        self._any: RemoteFunction[..., Any] = remote(**self._options)(_call)
        self._functions: OrderedDict[int, tuple[Any, RemoteFunction[..., Any]]] = OrderedDict()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DispatchFuture:
        """Queue the call `fn(*args, **kwargs)`."""
        if self._requested_width is None:  # not sooner: it may start a session
            self._requested_width = self.width = _default_width(self._options)
        return self.submit(DispatchedCall((fn, args, kwargs)))

    def start(self, call: DispatchedCall) -> ObjectRef[Any]:
        fn, args, kwargs = call.payload
        if not isinstance(fn, types.FunctionType):
            return self._any.remote(fn, *args, **kwargs)
        known = self._functions.get(id(fn))
        if known is None:
            known = self._functions[id(fn)] = (fn, remote(**self._options)(fn))
            if len(self._functions) > _KNOWN_FUNCTIONS:
                self._functions.popitem(last=False)
        return known[1].remote(*args, **kwargs)


def total_cpus() -> float:
    """Return the number of CPUs of the cluster; without a session, start one."""
    require_session()
    return cluster_resources().get("CPU", 1)


def _default_width(options: dict[str, Any]) -> int:
    """Return the number of calls that keeps all CPUs busy, with some queued."""
    each = options.get("num_cpus")
    cpus = total_cpus()
    return max(_MIN_WIDTH, _CALLS_PER_CPU * math.ceil(cpus / (each or 1)))


def _call(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def call_each(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    """Call a function once for each tuple of arguments; returns the results."""
    return [fn(*args) for args in chunk]


def chunks_of(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Split an iterable into lists of `size` items; the last one may be shorter."""
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def chained(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    """Iterate over the items of all chunks."""
    for chunk in chunks:
        yield from chunk


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - monotonic())


CALL, MAP, STARMAP = "call", "map", "starmap"
"""Kinds of items of a call: (args, kwargs), one argument, or args."""


class CallFailure:
    """Result of an item whose function raised an exception."""

    def __init__(self, error: RayTaskError) -> None:
        self._error = error

    def error(self) -> BaseException:
        """Return the exception that the function raised, with the remote traceback as its cause."""
        cause = self._error.cause
        cause.__cause__ = self._error
        return cause


def single_value(outcomes: list[Any]) -> Any:
    """Return the value of a call of one item, or raise its exception."""
    return values_or_raise(outcomes)[0]


def values_or_raise(outcomes: list[Any]) -> list[Any]:
    """Return the values of a call, or raise the exception of its first failed item."""
    for outcome in outcomes:
        if isinstance(outcome, CallFailure):
            raise outcome.error()
    return outcomes


class ActorWorkers(Dispatcher):
    """Actors that each run one call at a time. A new actor replaces one that died; its call fails with RayActorError.

    The payload of a call is (function, items, kind of items). Its value is a list with a result or a `CallFailure` for
    each item.

    Args:
        size: largest number of actors. An actor starts when a call needs it.
        initializer, initargs: function that each actor calls first, and its arguments. Functions of later calls see
            what the initializer assigns to globals of the program.
        calls_per_actor: number of calls after which a new actor replaces an actor; None: no limit.
        options: options of the actors, as for `@remote`. By default an actor holds no CPU and is spread over the nodes.
    """

    def __init__(
        self,
        size: int,
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
        calls_per_actor: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(size)
        given = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **(options or {})}
        self._class: ActorClass[Any] = remote(**given)(_Slot)
        self._init = (initializer, tuple(initargs))
        self._limit = calls_per_actor
        self._actors: dict[int, ActorHandle] = {}
        self._served: dict[int, int] = {}
        self._idle_places = list(range(size - 1, -1, -1))  # the last one is used first: that of a started actor
        self._busy: dict[DispatchedCall, int] = {}
        self._own_queues: dict[int, deque[DispatchedCall]] = {}

    def start_all(self) -> list[ActorHandle]:
        """Start the actors that do not run yet. Returns the handles of all."""
        with self._idle:
            for place in range(self.width):
                if not self._closed:
                    self._actor(place)
            return list(self._actors.values())

    def served(self) -> list[tuple[ActorHandle, int]]:
        """Return (actor, number of calls that it has served) of each actor."""
        with self._idle:
            return [(actor, self._served[place]) for place, actor in sorted(self._actors.items())]

    def stop(self, timeout: float) -> None:
        """End all actors after their current calls. Actors that have not ended after `timeout` seconds are killed."""
        with self._idle:
            self._closed = True
            actors = list(self._actors.values())
            self._actors.clear()
        end_actors(actors, timeout)

    def enqueue(self, call: DispatchedCall) -> None:
        if call.place is None:
            super().enqueue(call)
        else:
            self._own_queues.setdefault(call.place, deque()).append(call)

    def dequeue(self) -> DispatchedCall | None:
        if self._own_queues:
            for place in self._idle_places:
                if own := self._own_queues.get(place):
                    call = own.popleft()
                    if not own:
                        del self._own_queues[place]
                    return call
        return super().dequeue()

    def dequeue_all(self) -> list[DispatchedCall]:
        pinned = [call for own in self._own_queues.values() for call in own]
        self._own_queues.clear()
        return super().dequeue_all() + pinned

    def start(self, call: DispatchedCall) -> ObjectRef[Any]:
        place = self._idle_places[-1] if call.place is None else call.place
        self._idle_places.remove(place)
        self._busy[call] = place
        return self._actor(place).run.remote(*call.payload)  # type: ignore[no-any-return]

    def call_ended(self, call: DispatchedCall, error: BaseException | None) -> None:
        place = self._busy.pop(call, None)
        if place is None:
            return
        self._idle_places.append(place)
        if place in self._actors:
            self._served[place] += 1
            died = isinstance(error, RayActorError) and not happened_inside(error)
            if died or self._served[place] == self._limit:
                del self._actors[place]

    def _actor(self, place: int) -> ActorHandle:
        actor = self._actors.get(place)
        if actor is None:
            actor = self._actors[place] = self._class.remote(*self._init)
            self._served[place] = 0
        return actor


class _Slot:
    """The actor class: runs one call at a time."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]) -> None:
        self._globals: dict[str, dict[str, Any]] = {}
        if initializer is not None:
            self._with_shared_globals(initializer)(*initargs)

    def run(self, fn: Callable[..., Any], items: list[Any], kind: str) -> list[Any]:
        fn = self._with_shared_globals(fn)
        return [self._call_one(fn, item, kind) for item in items]

    def _call_one(self, fn: Callable[..., Any], item: Any, kind: str) -> Any:
        try:
            if kind == MAP:
                return fn(item)
            if kind == STARMAP:
                return fn(*item)
            args, kwargs = item
            return fn(*args, **kwargs)
        except Exception as error:
            name = getattr(fn, "__qualname__", type(fn).__name__)
            return CallFailure(make_task_error(name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps))

    def _with_shared_globals(self, fn: Any) -> Any:
        """Bind a function to the globals that this process has for the function's module.

        A function of a script is pickled with copies of its globals. Sharing one copy lets functions see what the
        initializer assigned, as functions in a forked process do.
        """
        if not isinstance(fn, types.FunctionType):
            return fn
        own, module = fn.__globals__, sys.modules.get(fn.__module__)
        if module is not None and vars(module) is own:
            return fn
        shared = self._globals.setdefault(fn.__module__, own)
        if shared is own:
            return fn
        for name, value in own.items():
            shared.setdefault(name, _rebind_globals(value, own, shared))
        return _rebind_globals(fn, own, shared)


def _rebind_globals(fn: Any, own: dict[str, Any], shared: dict[str, Any]) -> Any:
    if not isinstance(fn, types.FunctionType) or fn.__globals__ is not own:
        return fn
    moved = types.FunctionType(fn.__code__, shared, fn.__name__, fn.__defaults__, fn.__closure__)
    moved.__kwdefaults__ = fn.__kwdefaults__
    moved.__qualname__, moved.__module__, moved.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    moved.__dict__.update(fn.__dict__)
    return moved
