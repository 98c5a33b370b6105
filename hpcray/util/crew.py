"""Actors that stay and run whatever function comes: what pools of processes are made of."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from hpcray.api.actor import ActorClass, ActorHandle
from hpcray.api.decorator import remote
from hpcray.base.errors import RayActorError, RayTaskError, make_task_error
from hpcray.host.address import node_ip_address
from hpcray.runtime.refs import ObjectRef
from hpcray.util.actor_group import end_actors
from hpcray.util.dispatch import Dispatcher, Job

CALL, MAP, STARMAP = "call", "map", "starmap"
"""What the items of a job are: (args, kwargs), one argument, or args."""


class Failure:
    """Stands in for the result of a call that raised."""

    def __init__(self, error: RayTaskError) -> None:
        self._error = error

    def error(self) -> BaseException:
        """The exception as it was raised; its cause shows where."""
        cause = self._error.cause
        cause.__cause__ = self._error
        return cause


def only(outcomes: list[Any]) -> Any:
    """The value of a job of one item; raises what it raised."""
    return checked(outcomes)[0]


def checked(outcomes: list[Any]) -> list[Any]:
    """The values of a job; raises the first thing that its calls raised."""
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise outcome.error()
    return outcomes


class Crew(Dispatcher):
    """A number of actors, each of which runs one job at a time. One that dies is replaced; its job gets the error.

    The call of a job is (function, items, kind of items); its value is a list with a result or a `Failure` per item.

    Args:
        size: how many actors at most; they are made as they are needed.
        initializer, initargs: called first in each of them. What it assigns to globals of the program, functions that
            come later see.
        jobs_per_actor: after so many jobs an actor is replaced; None: never.
        options: of the actors, as for `@remote`. By default they hold nothing and are spread over the nodes.
    """

    def __init__(
        self,
        size: int,
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
        jobs_per_actor: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(size)
        given = {"num_cpus": 0, "scheduling_strategy": "SPREAD", **(options or {})}
        self._class: ActorClass[Any] = remote(**given)(_Member)
        self._init = (initializer, tuple(initargs))
        self._limit = jobs_per_actor
        self._idle_actors: list[ActorHandle] = []
        self._busy: dict[Job, ActorHandle] = {}
        self._served: dict[ActorHandle, int] = {}

    def boot(self) -> list[ActorHandle]:
        """Make all actors now."""
        with self._idle:
            while len(self._served) < self.width and not self._closed:
                self._idle_actors.append(self._hire())
            return list(self._served)

    def end(self, patience: float) -> None:
        """End all actors: at once, or when they have nothing to do, if `patience` (seconds) allows it."""
        with self._idle:
            self._closed = True
            actors = list(self._served)
            self._served.clear()
            self._idle_actors.clear()
        end_actors(actors, patience)

    def start(self, job: Job) -> ObjectRef[Any]:
        actor = self._busy[job] = self._idle_actors.pop() if self._idle_actors else self._hire()
        return actor.run.remote(*job.call)  # type: ignore[no-any-return]

    def ended(self, job: Job, error: BaseException | None) -> None:
        actor = self._busy.pop(job, None)
        if actor is None or actor not in self._served:
            return
        self._served[actor] += 1
        if isinstance(error, RayActorError) or self._served[actor] == self._limit:
            del self._served[actor]
        else:
            self._idle_actors.append(actor)

    def _hire(self) -> ActorHandle:
        actor: ActorHandle = self._class.remote(*self._init)
        self._served[actor] = 0
        return actor


class _Member:
    """One of the crew."""

    def __init__(self, initializer: Callable[..., Any] | None, initargs: tuple[Any, ...]) -> None:
        self._globals: dict[str, dict[str, Any]] = {}
        if initializer is not None:
            self._at_home(initializer)(*initargs)

    def run(self, fn: Callable[..., Any], items: list[Any], kind: str) -> list[Any]:
        fn = self._at_home(fn)
        return [self._one(fn, item, kind) for item in items]

    def _one(self, fn: Callable[..., Any], item: Any, kind: str) -> Any:
        try:
            if kind == MAP:
                return fn(item)
            if kind == STARMAP:
                return fn(*item)
            args, kwargs = item
            return fn(*args, **kwargs)
        except Exception as error:
            name = getattr(fn, "__qualname__", type(fn).__name__)
            return Failure(make_task_error(name, error, os.getpid(), node_ip_address(), dumps=cloudpickle.dumps))

    def _at_home(self, fn: Any) -> Any:
        """The function among the globals of its module as this process has them.

        A function of a script travels with copies of its globals. Without this, each would have its own, and none would
        see what the initializer has assigned, as functions in a process that was forked do.
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
            shared.setdefault(name, _moved(value, own, shared))
        return _moved(fn, own, shared)


def _moved(fn: Any, own: dict[str, Any], shared: dict[str, Any]) -> Any:
    if not isinstance(fn, types.FunctionType) or fn.__globals__ is not own:
        return fn
    moved = types.FunctionType(fn.__code__, shared, fn.__name__, fn.__defaults__, fn.__closure__)
    moved.__kwdefaults__ = fn.__kwdefaults__
    moved.__qualname__, moved.__module__, moved.__doc__ = fn.__qualname__, fn.__module__, fn.__doc__
    moved.__dict__.update(fn.__dict__)
    return moved
