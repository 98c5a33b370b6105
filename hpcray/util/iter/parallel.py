"""An iterator over items that several actors produce."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NoReturn, TypeVar

from hpcray.api.actor_handle import ActorHandle
from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.util.iter.local import LocalIterator, _NextValueNotReady
from hpcray.util.iter.metrics import SharedMetrics
from hpcray.util.iter.worker import ParallelIteratorWorker

T = TypeVar("T")
U = TypeVar("U")
Transform = Callable[[LocalIterator[Any]], LocalIterator[Any]]


class ActorSet:
    """Actors whose items go through the same operators."""

    def __init__(self, actors: Sequence[ActorHandle], transforms: Sequence[Transform]) -> None:
        self.actors = list(actors)
        self.transforms = list(transforms)


class ParallelIterator(Generic[T]):
    """A lazy iterator over the items of several actors, its shards. Operators run in the actors.

    `gather_sync()`, `gather_async()`, `batch_across_shards()` and `get_shard(i)` give iterators to read it with. It can
    be pickled; one process reads a shard at a time.
    """

    def __init__(
        self, actor_sets: Sequence[ActorSet], name: str, parent_iterators: Sequence[ParallelIterator[Any]]
    ) -> None:
        self.actor_sets = list(actor_sets)
        self.name = name
        self.parent_iterators = list(parent_iterators)  # their actors have to live as long as this iterator

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "You must use it.gather_sync() or it.gather_async() to iterate over the results of a ParallelIterator."
        )

    def __repr__(self) -> str:
        return f"ParallelIterator[{self.name}]"

    def _and(self, transform: Transform, name: str) -> ParallelIterator[Any]:
        sets = [ActorSet(one.actors, [*one.transforms, transform]) for one in self.actor_sets]
        return ParallelIterator(sets, self.name + name, self.parent_iterators)

    def transform(self, fn: Callable[[Iterable[T]], Iterable[U]]) -> ParallelIterator[U]:
        """Apply a generator function to the stream of the items of each shard."""
        return self._and(operator.methodcaller("transform", fn), ".transform()")

    def for_each(
        self, fn: Callable[[T], U], max_concurrency: int = 1, resources: dict[str, Any] | None = None
    ) -> ParallelIterator[U]:
        """Apply a function to each item; arguments as for `LocalIterator.for_each`.

        Raises:
            AssertionError: `max_concurrency` is negative.
        """
        assert max_concurrency >= 0, "max_concurrency must be non-negative."
        return self._and(operator.methodcaller("for_each", fn, max_concurrency, resources), ".for_each()")

    def filter(self, fn: Callable[[T], bool]) -> ParallelIterator[T]:
        """Drop the items for which the function is false."""
        return self._and(operator.methodcaller("filter", fn), ".filter()")

    def batch(self, n: int) -> ParallelIterator[list[T]]:
        """Gather the items of each shard in lists of `n`; its last list may be shorter."""
        return self._and(operator.methodcaller("batch", n), f".batch({n})")

    def flatten(self) -> ParallelIterator[Any]:
        """Yield the items of each item."""
        return self._and(operator.methodcaller("flatten"), ".flatten()")

    def combine(self, fn: Callable[[T], list[U]]) -> ParallelIterator[U]:
        """Apply a function that returns a list to each item, and yield the items of the lists."""
        combined = self.for_each(fn).flatten()
        combined.name = self.name + ".combine()"
        return combined

    def local_shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> ParallelIterator[T]:
        """Yield the items of each shard in a random order; arguments as for `LocalIterator.shuffle`."""
        return self._and(
            operator.methodcaller("shuffle", shuffle_buffer_size, seed),
            f".local_shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})",
        )

    def repartition(self, num_partitions: int, batch_ms: int = 0) -> ParallelIterator[T]:
        """Deal the items of each shard in turn to `num_partitions` new actors, the shards of the returned iterator.

        Args:
            num_partitions: number of new shards.
            batch_ms: milliseconds for which a shard gathers items before it sends them.
        """
        actors = self._started()
        shards = [
            functools.partial(_as_ready, actors, "par_iter_slice_batch", (num_partitions, place, batch_ms))
            for place in range(num_partitions)
        ]
        name = f"{self.name}.repartition[num_partitions={num_partitions}]"
        return ParallelIterator([ActorSet(_shard_actors(shards, False), [])], name, [self])

    def gather_sync(self) -> LocalIterator[T]:
        """Return an iterator that takes one item of each shard in turn."""
        gathered = self.batch_across_shards().flatten()
        gathered.name = f"{self}.gather_sync()"
        return gathered

    def batch_across_shards(self) -> LocalIterator[list[T]]:
        """Return an iterator over lists of one item of each shard, those that have no more items left out."""
        return LocalIterator(self._rounds, SharedMetrics(), name=f"{self}.batch_across_shards()")

    def gather_async(self, batch_ms: int = 0, num_async: int = 1) -> LocalIterator[T]:
        """Return an iterator over the items of all shards as they become ready.

        Args:
            batch_ms: milliseconds for which a shard gathers items before it sends them; 0: it sends each at once.
            num_async: number of requests on the way to each shard.

        Raises:
            ValueError: an argument is too small.
        """
        _check(batch_ms, num_async)
        metrics = SharedMetrics()
        base = functools.partial(self._gathered, batch_ms, num_async, metrics)
        return LocalIterator(base, metrics, name=f"{self}.gather_async()")

    def take(self, n: int) -> list[T]:
        """Return the first `n` items of `gather_sync()`."""
        return self.gather_sync().take(n)

    def show(self, n: int = 20) -> None:
        """Print the first `n` items of `gather_sync()`."""
        self.gather_sync().show(n)

    def union(self, other: ParallelIterator[T]) -> ParallelIterator[T]:
        """Return an iterator over the shards of both.

        Raises:
            TypeError: the other is no ParallelIterator.
        """
        if not isinstance(other, ParallelIterator):
            raise TypeError(f"other must be of type ParallelIterator, got {type(other)}")
        return ParallelIterator(
            [*self.actor_sets, *other.actor_sets],
            f"ParallelUnion[{self}, {other}]",
            [*self.parent_iterators, *other.parent_iterators],
        )

    def select_shards(self, shards_to_keep: Sequence[int]) -> ParallelIterator[T]:
        """Return an iterator over some of the shards.

        Raises:
            ValueError: no shard is selected, or this is a union. AssertionError: there is no shard of that number.
        """
        if len(self.actor_sets) > 1:
            raise ValueError("select_shards() is not allowed after union()")
        if not shards_to_keep:
            raise ValueError("at least one shard must be selected")
        (every,) = self.actor_sets
        kept = [actor for place, actor in enumerate(every.actors) if place in shards_to_keep]
        assert len(kept) == len(shards_to_keep), "Invalid actor index"
        name = f"{self}.select_shards({len(kept)} total)"
        return ParallelIterator([ActorSet(kept, every.transforms)], name, self.parent_iterators)

    def num_shards(self) -> int:
        """Return the number of shards."""
        return sum(len(one.actors) for one in self.actor_sets)

    def shards(self) -> list[LocalIterator[T]]:
        """Return an iterator for each shard."""
        return [self.get_shard(place) for place in range(self.num_shards())]

    def get_shard(self, shard_index: int, batch_ms: int = 0, num_async: int = 1) -> LocalIterator[T]:
        """Return an iterator over the items of one shard, in their order; other arguments as for `gather_async`.

        Raises:
            ValueError: there is no shard of that number, or an argument is too small.
        """
        _check(batch_ms, num_async)
        shards = [(actor, one.transforms) for one in self.actor_sets for actor in one.actors]
        if shard_index >= len(shards):
            raise ValueError("Shard index out of range", shard_index, len(shards))
        base = functools.partial(_shard, *shards[shard_index], batch_ms, num_async)
        return LocalIterator(base, SharedMetrics(), name=f"{self.name}.shard[{shard_index}]")

    def _started(self) -> list[ActorHandle]:
        """Send the operators to the actors, and return these."""
        get([actor.par_iter_init.remote(one.transforms) for one in self.actor_sets for actor in one.actors])
        return [actor for one in self.actor_sets for actor in one.actors]

    def _rounds(self, timeout: float | None) -> Iterator[Any]:
        actors = self._started()
        while actors:
            refs = [actor.par_iter_next.remote() for actor in actors]
            if timeout is not None:
                while wait(refs, num_returns=len(refs), timeout=timeout)[1]:
                    yield _NextValueNotReady()
            values, going = [], []
            for actor, ref in zip(actors, refs, strict=True):
                try:
                    values.append(get(ref))
                except StopIteration:
                    continue
                going.append(actor)
            actors = going
            if values:
                yield values
            if timeout is not None:
                yield _NextValueNotReady()

    def _gathered(self, batch_ms: int, num_async: int, metrics: SharedMetrics, timeout: float | None) -> Iterator[Any]:
        return _as_ready(self._started(), "par_iter_next_batch", (batch_ms,), num_async, metrics, timeout)


def from_items(items: Sequence[T], num_shards: int = 2, repeat: bool = False) -> ParallelIterator[T]:
    """Return an iterator over items that are dealt in turn to `num_shards` actors; `repeat`: for ever."""
    kind = type(items[0]).__name__ if items else "None"
    name = f"from_items[{kind}, {len(items)}, shards={num_shards}{', repeat=True' if repeat else ''}]"
    return from_iterators([list(items[place::num_shards]) for place in range(num_shards)], repeat, name)


def from_range(n: int, num_shards: int = 2, repeat: bool = False) -> ParallelIterator[int]:
    """Return an iterator over 0 to `n` - 1, of which each actor has a contiguous part; `repeat`: for ever."""
    size = n // num_shards
    parts = [range(place * size, n if place == num_shards - 1 else (place + 1) * size) for place in range(num_shards)]
    name = f"from_range[{n}, shards={num_shards}{', repeat=True' if repeat else ''}]"
    return from_iterators(parts, repeat, name)


def from_iterators(generators: Sequence[Any], repeat: bool = False, name: str | None = None) -> ParallelIterator[Any]:
    """Return an iterator with one actor for each iterable.

    Args:
        generators: iterables that can be pickled, or functions that return iterables.
        repeat: begin again after the last item, for ever.
        name: name for `repr()`.
    """
    name = name or f"from_iterators[shards={len(generators)}{', repeat=True' if repeat else ''}]"
    return from_actors(_shard_actors(generators, repeat), name)


def from_actors(actors: Sequence[ActorHandle], name: str | None = None) -> ParallelIterator[Any]:
    """Return an iterator over the items of actors whose class is a subclass of `ParallelIteratorWorker`."""
    return ParallelIterator([ActorSet(actors, [])], name or f"from_actors[shards={len(actors)}]", [])


def _shard_actors(sources: Sequence[Any], repeat: bool) -> list[ActorHandle]:
    workers = remote(ParallelIteratorWorker)
    return [workers.remote(source, repeat) for source in sources]


def _check(batch_ms: int, num_async: int) -> None:
    if num_async < 1:
        raise ValueError("num_async must be positive")
    if batch_ms < 0:
        raise ValueError("batch time must be positive")


def _shard(
    actor: ActorHandle, transforms: list[Transform], batch_ms: int, num_async: int, timeout: float | None
) -> Iterator[Any]:
    get(actor.par_iter_init.remote(transforms))
    refs = deque(actor.par_iter_next_batch.remote(batch_ms) for _ in range(num_async))
    while True:
        if timeout is not None and not wait([refs[0]], timeout=timeout)[0]:
            yield _NextValueNotReady()
            continue
        try:
            batch = get(refs.popleft())
        except StopIteration:
            return
        refs.append(actor.par_iter_next_batch.remote(batch_ms))
        yield from batch
        if timeout is not None:
            yield _NextValueNotReady()


def _as_ready(
    actors: list[ActorHandle],
    method: str,
    args: tuple[Any, ...],
    num_async: int = 1,
    metrics: SharedMetrics | None = None,
    timeout: float | None = None,
) -> Iterator[Any]:
    """Yield the items of the batches that a method of the actors returns, as the batches become ready."""
    ask = operator.methodcaller("remote", *args)
    asked: dict[ObjectRef[Any], ActorHandle] = {}
    for _ in range(num_async):
        asked.update((ask(getattr(actor, method)), actor) for actor in actors)
    while asked:
        for ref in _ready(list(asked), timeout):
            actor = asked.pop(ref)
            if metrics is not None:
                metrics.get().current_actor = actor
            try:
                batch = get(ref)
            except StopIteration:
                continue
            asked[ask(getattr(actor, method))] = actor
            yield from batch
        if timeout is not None:
            yield _NextValueNotReady()


def _ready(refs: list[ObjectRef[Any]], timeout: float | None) -> list[ObjectRef[Any]]:
    ready: list[ObjectRef[Any]] = wait(refs, num_returns=len(refs), timeout=timeout or 0)[0]
    if not ready and timeout is None:
        ready, _ = wait(refs, num_returns=1)
    return ready
