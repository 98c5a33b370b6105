"""Pools of actors that share a stream of calls, and groups of actors of one class."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcray.api.actor import ActorClass, ActorHandle, kill
from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.common.exceptions import ActorDiedError
from hpcray.common.task_errors import happened_inside
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.annotations import Deprecated

V = TypeVar("V")
Call = Callable[[ActorHandle, Any], Any]


class ActorPool:
    """Distributes calls over idle actors. Not thread-safe.

    Args:
        actors: handles of the actors. The pool neither starts nor ends actors.
    """

    def __init__(self, actors: Iterable[ActorHandle]) -> None:
        # Subclasses and programs read these fields, so their names are Ray's.
        self._idle_actors: list[ActorHandle] = list(actors)
        self._index_to_future: dict[int, Any] = {}  # a ref, or the list of refs of several returns
        self._future_to_actor: dict[Any, tuple[int, ActorHandle]] = {}
        self._next_task_index = 0
        self._next_return_index = 0
        self._pending_submits: deque[tuple[Call, Any]] = deque()

    def map(self, fn: Callable[[ActorHandle, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """Apply `fn` to all values, and iterate over the results in the order of the values.

        Results of earlier calls are dropped, also those that are not ready: their actors count as idle. Calls start at
        once while actors are idle; each result taken starts another.

        Args:
            fn: takes (actor, value), and returns the ref of a call of the actor.
            values: the values.
        """
        self._drop_results(lambda: self.get_next(timeout=0, ignore_if_timedout=True))
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next)

    def map_unordered(self, fn: Callable[[ActorHandle, V], Any], values: Iterable[V]) -> Iterator[Any]:
        """Apply `fn` to all values, as `map`; results come in the order in which they become ready.

        Results of earlier calls are awaited and dropped.
        """
        self._drop_results(self.get_next_unordered)
        for value in values:
            self.submit(fn, value)
        return self._results(self.get_next_unordered)

    def submit(self, fn: Callable[[ActorHandle, V], Any], value: V) -> None:
        """Start `fn(actor, value)` on an idle actor; the call is queued while none is idle.

        Raises:
            TypeError: `fn` returned neither a ref nor a list of refs. The actor stays in the pool.
        """
        if not self._idle_actors:
            self._pending_submits.append((fn, value))
            return
        actor = self._idle_actors.pop()
        try:
            future = fn(actor, value)
            _check_result(future)
        except BaseException:
            self._idle_actors.append(actor)
            raise
        self._future_to_actor[_key(future)] = (self._next_task_index, actor)
        self._index_to_future[self._next_task_index] = future
        self._next_task_index += 1

    def has_next(self) -> bool:
        """Return True if a result is ready or pending."""
        return bool(self._future_to_actor)

    def get_next(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return the next result in the order of submission, or raise the exception of the call.

        An actor that died leaves the pool.

        Args:
            timeout: in seconds; None waits without limit.
            ignore_if_timedout: drop a late result. Its actor counts as idle, though it still runs the call.

        Raises:
            StopIteration: no calls are left. TimeoutError: the result is late; the next call returns it unless it was
                dropped. ValueError: get_next_unordered() was called before.
        """
        if not self.has_next():
            raise StopIteration("No more results to get")
        if self._next_return_index >= self._next_task_index:
            raise ValueError("It is not allowed to call get_next() after get_next_unordered().")
        future = self._index_to_future[self._next_return_index]
        late = timeout is not None and not wait([_last(future)], timeout=timeout)[0]
        if late and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        return self._take(future, late)

    def get_next_unordered(self, timeout: float | None = None, ignore_if_timedout: bool = False) -> Any:
        """Return any ready result. Arguments and errors are those of `get_next`.

        With `ignore_if_timedout` the result of the oldest call is dropped.
        """
        if not self.has_next():
            raise StopIteration("No more results to get")
        by_ref = {_last(future): future for future in self._index_to_future.values()}
        ready, late = wait(list(by_ref), num_returns=1, timeout=timeout)
        if not ready and not ignore_if_timedout:
            raise TimeoutError("Timed out waiting for result")
        return self._take(by_ref[(ready or late)[0]], not ready)

    def has_free(self) -> bool:
        """Return True if an actor is idle and no call is queued."""
        return bool(self._idle_actors) and not self._pending_submits

    def pop_idle(self) -> ActorHandle | None:
        """Remove an idle actor from the pool and return it; None where no actor is idle."""
        return self._idle_actors.pop() if self.has_free() else None

    def push(self, actor: ActorHandle) -> None:
        """Add an actor.

        Raises:
            ValueError: the actor is in the pool already.
        """
        if actor in self._idle_actors or any(busy == actor for _, busy in self._future_to_actor.values()):
            raise ValueError("Actor already belongs to current ActorPool")
        self._return_actor(actor)

    def _drop_results(self, take: Callable[[], Any]) -> None:
        while self.has_next():
            with contextlib.suppress(TimeoutError):
                take()

    def _results(self, take: Callable[[], Any]) -> Iterator[Any]:
        while self.has_next():
            yield take()

    def _take(self, future: Any, late: bool) -> Any:
        index, actor = self._future_to_actor.pop(_key(future))
        del self._index_to_future[index]
        self._next_return_index = max(self._next_return_index, index + 1)
        if late:
            self._return_actor(actor)
            raise TimeoutError(f"Timed out waiting for result. The task {future} has been ignored.")
        alive = True
        try:
            return get(future)
        except ActorDiedError as error:
            alive = happened_inside(error)
            raise
        finally:
            self._return_actor(actor, alive)

    def _return_actor(self, actor: ActorHandle, is_alive: bool = True) -> None:
        if is_alive:  # each call on a dead actor would fail
            self._idle_actors.append(actor)
        if self._pending_submits and self._idle_actors:
            self.submit(*self._pending_submits.popleft())


def _key(future: Any) -> Any:
    return tuple(future) if isinstance(future, list) else future


def _last(future: Any) -> ObjectRef[Any]:
    """One ref of a call: all of its returns become ready together."""
    ref: ObjectRef[Any] = future[-1] if isinstance(future, list) else future
    return ref


def _check_result(result: Any) -> None:
    if isinstance(result, ObjectRef):
        return
    if not isinstance(result, list) or not result or not all(isinstance(ref, ObjectRef) for ref in result):
        raise TypeError(
            f"the function of an ActorPool returned {type(result)}, not an ObjectRef; "
            "hint: lambda actor, value: actor.method.remote(value)"
        )


ActorMetadata = TypeVar("ActorMetadata")


@dataclass
class ActorWrapper:
    """An actor of a group.

    Attributes:
        metadata: what its method `get_actor_metadata` returned when it joined the group; None if it has none.
    """

    actor: ActorHandle
    metadata: Any


class ActorGroupMethod:
    """A method of every actor of a group."""

    def __init__(self, group: ActorGroup, name: str) -> None:
        self._group, self._name = group, name

    def remote(self, /, *args: Any, **kwargs: Any) -> list[ObjectRef[Any]]:
        """Call the method on every actor with the same arguments. Returns the refs in the order of the actors."""
        return [getattr(member.actor, self._name).remote(*args, **kwargs) for member in self._group.actors]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"ActorGroup methods cannot be called directly. Instead of running 'object.{self._name}()', try "
            f"'object.{self._name}.remote()'."
        )


@Deprecated(
    message="For calls without a state use ray.util.multiprocessing, for actors as workers of a data set "
    "ray.data.Dataset.map_batches.",
    warning=True,
)
class ActorGroup:
    """Actors of one class that are created, called and ended together: `group.method.remote(...)` calls all of them,
    and `group[0].actor` is the handle of one.

    Args:
        actor_cls: a plain class. If it has a method `get_actor_metadata`, the group keeps what that returns.
        num_actors: number of actors.
        num_cpus_per_actor, num_gpus_per_actor, resources_per_actor: resources that each actor holds.
        init_args, init_kwargs: arguments of every constructor.

    Attributes:
        actors: the members, as `ActorWrapper`s.
        num_actors: how many `start` creates.

    Raises:
        ValueError: `num_actors` is not positive, or a resource is negative. RayActorError: a constructor failed, and
            the class has `get_actor_metadata`.
    """

    def __init__(
        self,
        actor_cls: type,
        num_actors: int = 1,
        num_cpus_per_actor: float = 1,
        num_gpus_per_actor: float = 0,
        resources_per_actor: Mapping[str, float] | None = None,
        init_args: Sequence[Any] | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if num_actors <= 0:
            raise ValueError(
                f"The provided `num_actors` must be greater than 0. Received num_actors={num_actors} instead."
            )
        if num_cpus_per_actor < 0 or num_gpus_per_actor < 0:
            raise ValueError(
                "The number of CPUs and GPUs per actor must not be negative. Received "
                f"num_cpus_per_actor={num_cpus_per_actor} and num_gpus_per_actor={num_gpus_per_actor}."
            )
        self.num_actors = num_actors
        self.actors: list[ActorWrapper] = []
        self._args, self._kwargs = tuple(init_args or ()), dict(init_kwargs or {})
        self._remote_cls: ActorClass[Any] = remote(
            num_cpus=num_cpus_per_actor, num_gpus=num_gpus_per_actor, resources=dict(resources_per_actor or {})
        )(actor_cls)
        self.start()

    def start(self) -> None:
        """Create the actors.

        Raises:
            RuntimeError: the actors have been started already.
        """
        if self.actors:
            raise RuntimeError(
                "The actors have already been started. Please call `shutdown` first if you want to restart them."
            )
        self.add_actors(self.num_actors)

    def shutdown(self, patience_s: float = 5) -> None:
        """End all actors.

        Args:
            patience_s: seconds that running calls may take before the actors are killed; 0 kills them at once.
        """
        end_actors([member.actor for member in self.actors], patience_s)
        self.actors = []

    def add_actors(self, num_actors: int) -> None:
        """Create further actors, and wait for their metadata if the class has `get_actor_metadata`."""
        made = [self._remote_cls.remote(*self._args, **self._kwargs) for _ in range(num_actors)]
        has_metadata = hasattr(self._remote_cls.__ray_actor_class__, "get_actor_metadata")
        metadata = get([actor.get_actor_metadata.remote() for actor in made]) if has_metadata else [None] * len(made)
        self.actors += [ActorWrapper(actor, known) for actor, known in zip(made, metadata, strict=True)]

    def remove_actors(self, actor_indexes: Collection[int]) -> None:
        """Remove actors from the group. An actor without another handle ends."""
        self.actors = [member for index, member in enumerate(self.actors) if index not in actor_indexes]

    @property
    def actor_metadata(self) -> list[Any]:
        """The metadata of the actors."""
        return [member.metadata for member in self.actors]

    def __getattr__(self, name: str) -> ActorGroupMethod:
        if name.startswith("_") or name == "actors":  # also while the group is being unpickled
            raise AttributeError(name)
        if not self.actors:
            raise RuntimeError("This ActorGroup has been shutdown. Please start it again.")
        return ActorGroupMethod(self, name)

    def __getitem__(self, index: int) -> ActorWrapper:
        return self.actors[index]

    def __len__(self) -> int:
        return len(self.actors)


def end_actors(actors: Sequence[ActorHandle], timeout: float) -> None:
    """End actors after their current calls. Actors that have not ended after `timeout` seconds are killed."""
    left = list(actors)
    if left and timeout > 0:
        for actor in left:
            actor.__ray_terminate__.remote()  # answered at once, even if calls go on for ever
        ends = {actor.__ray_ready__.remote(): actor for actor in left}  # behind it: never run, and end with the actor
        _, late = wait(list(ends), num_returns=len(ends), timeout=timeout)
        left = [ends[ref] for ref in late]
    for actor in left:
        kill(actor)
