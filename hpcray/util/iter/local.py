"""An iterator over items in this process, with operators that apply as the items are taken."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from hpcray.api.decorator import remote
from hpcray.api.objects import get, wait
from hpcray.util.iter.metrics import MetricsContext, SharedMetrics

T = TypeVar("T")
U = TypeVar("U")
Operator = Callable[[Iterator[Any]], Iterator[Any]]

_MOST_PULLED = 100  # items that a union takes in one turn from an iterator of weight "*"
_UNION_PAUSE = 0.001  # seconds, after a turn in which no iterator of a union had an item


class _NextValueNotReady(Exception):
    """Stands for an item that is not there yet, where an iterator may not block. Operators pass it on."""


class LocalIterator(Generic[T]):
    """A lazy iterator over items. Each operator returns a new iterator and leaves this one unread.

    Before its first item is read it can be pickled, and read in another process. One process reads it.

    Args:
        base_iterator: returns the iterator of the items, given a timeout.
        shared_metrics: the metrics that chained iterators have in common.
        local_transforms: operators to apply in turn.
        timeout: seconds after which `_NextValueNotReady` stands for an item; None: wait for the item.
        name: name for `repr()`.
    """

    ON_FETCH_START_HOOK_NAME = "_on_fetch_start"
    """A function given to `for_each` may have a method of this name, which is called before each item is fetched."""

    thread_local = threading.local()

    def __init__(
        self,
        base_iterator: Callable[[float | None], Iterable[Any]],
        shared_metrics: SharedMetrics,
        local_transforms: Sequence[Operator] | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        self.base_iterator = base_iterator
        self.shared_metrics = shared_metrics
        self.local_transforms = list(local_transforms or ())
        self.timeout = timeout
        self.name = name or "unknown"
        self.built_iterator: Iterator[T] | None = None

    @staticmethod
    def get_metrics() -> MetricsContext:
        """Return the metrics of the iterator whose operator calls.

        Raises:
            ValueError: no iterator has run in this thread.
        """
        metrics: MetricsContext | None = getattr(LocalIterator.thread_local, "metrics", None)
        if metrics is None:
            raise ValueError("Cannot access context outside an iterator.")
        return metrics

    def __iter__(self) -> Iterator[T]:
        return self._built()

    def __next__(self) -> T:
        return next(self._built())

    def __repr__(self) -> str:
        return f"LocalIterator[{self.name}]"

    def _built(self) -> Iterator[T]:
        if self.built_iterator is None:
            items = iter(self.base_iterator(self.timeout))
            for operator in self.local_transforms:
                items = operator(items)
            self.built_iterator = items
        return self.built_iterator

    def _and(self, operator: Operator, name: str) -> LocalIterator[Any]:
        return LocalIterator(
            self.base_iterator, self.shared_metrics, [*self.local_transforms, operator], name=self.name + name
        )

    def _enter(self) -> None:
        """Make this iterator's metrics those of the thread, for the operator that runs next."""
        self.thread_local.metrics = self.shared_metrics.get()

    def transform(self, fn: Callable[[Iterable[T]], Iterable[U]]) -> LocalIterator[U]:
        """Apply a generator function to the stream of all items. It has to pass `_NextValueNotReady` on."""
        return self._and(functools.partial(_transformed, fn), ".transform()")

    def for_each(
        self, fn: Callable[[T], U], max_concurrency: int = 1, resources: dict[str, Any] | None = None
    ) -> LocalIterator[U]:
        """Apply a function to each item.

        Args:
            fn: the function.
            max_concurrency: 1: call it here; other numbers: run so many tasks at a time, 0 for all at once, and yield
                their results as they become ready.
            resources: options of these tasks, as for `@remote`.
        """
        if max_concurrency == 1:
            operator: Operator = functools.partial(self._mapped, fn)
        else:
            operator = functools.partial(_mapped_by_tasks, fn, max_concurrency, resources or {})
        if hasattr(fn, self.ON_FETCH_START_HOOK_NAME):
            operator = functools.partial(self._hooked, fn, operator)
        return self._and(operator, ".for_each()")

    def filter(self, fn: Callable[[T], bool]) -> LocalIterator[T]:
        """Drop the items for which the function is false."""
        return self._and(functools.partial(self._filtered, fn), ".filter()")

    def batch(self, n: int) -> LocalIterator[list[T]]:
        """Gather items in lists of `n`; the last list may be shorter."""
        return self._and(functools.partial(_batched, n), f".batch({n})")

    def flatten(self) -> LocalIterator[Any]:
        """Yield the items of each item."""
        return self._and(_flattened, ".flatten()")

    def shuffle(self, shuffle_buffer_size: int, seed: int | None = None) -> LocalIterator[T]:
        """Yield the items in a random order.

        Args:
            shuffle_buffer_size: number of items to draw the next one from.
            seed: makes the order reproducible.
        """
        return self._and(
            functools.partial(_shuffled, shuffle_buffer_size, random.Random(seed)),
            f".shuffle(shuffle_buffer_size={shuffle_buffer_size}, seed={seed})",
        )

    def combine(self, fn: Callable[[T], list[U]]) -> LocalIterator[U]:
        """Apply a function that returns a list to each item, and yield the items of the lists."""
        combined = self.for_each(fn).flatten()
        combined.name = self.name + ".combine()"
        return combined

    def zip_with_source_actor(self) -> LocalIterator[Any]:
        """Yield (actor that produced it, item). Only after `gather_async`.

        Raises (while it is read):
            ValueError: the actor is not known.
        """
        zipped = self.for_each(_with_source)
        zipped.name = self.name + ".zip_with_source_actor()"
        return zipped

    def take(self, n: int) -> list[T]:
        """Return the next `n` items, or all where there are fewer. At least one is read."""
        taken = []
        for item in self:
            taken.append(item)
            if len(taken) >= n:
                break
        return taken

    def show(self, n: int = 20) -> None:
        """Print the next `n` items."""
        for item in self.take(n):
            print(item)

    def duplicate(self, n: int) -> list[LocalIterator[T]]:
        """Return `n` iterators over the same items; this one is read by them.

        An iterator that is ahead yields `_NextValueNotReady` until the others have caught up, so that few items are
        kept. So read them by way of `union`.

        Raises:
            ValueError: `n` is below 2.
        """
        if n < 2:
            raise ValueError("Number of copies must be >= 2")
        queues: list[deque[Any]] = [deque() for _ in range(n)]
        return [
            LocalIterator(
                functools.partial(self._copy, queues, place),
                self.shared_metrics,
                name=f"{self.name}.duplicate[{place}]",
            )
            for place in range(n)
        ]

    def union(
        self,
        *others: LocalIterator[T],
        deterministic: bool = False,
        round_robin_weights: Sequence[float | str] | None = None,
    ) -> LocalIterator[T]:
        """Return an iterator over the items of this and other iterators.

        Args:
            others: the other iterators.
            deterministic: take one item of each in turn; else take what is ready.
            round_robin_weights: number of items to take of each in its turn; "*": all that are ready. Fractions are
                rounded up or down at random. It overrides `deterministic`.

        Raises:
            ValueError: another iterator is no LocalIterator, or the number of weights is wrong.
        """
        for other in others:
            if not isinstance(other, LocalIterator):
                raise ValueError(f"other must be of type LocalIterator, got {type(other)}")
        parents = [self, *others]
        weights = list(round_robin_weights or [1] * len(parents))
        if len(weights) != len(parents):
            raise ValueError("Length of round robin weights must equal number of iterators total.")
        if round_robin_weights:
            timeouts = [0.0 if weight == "*" else None for weight in weights]
        else:
            timeouts = [None if deterministic else 0.0] * len(parents)
        metrics = SharedMetrics(parents=[parent.shared_metrics for parent in parents])
        members: list[tuple[float | str, LocalIterator[T]]] = [
            (weight, LocalIterator(parent.base_iterator, metrics, parent.local_transforms, timeout))
            for weight, parent, timeout in zip(weights, parents, timeouts, strict=True)
        ]
        name = f"LocalUnion[{self}, {', '.join(map(str, others))}]"
        return LocalIterator(functools.partial(_united, members), metrics, name=name)

    def _mapped(self, fn: Callable[[Any], Any], items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, _NextValueNotReady):
                yield item
                continue
            while True:  # the function may say that it has no value yet
                self._enter()
                result = fn(item)
                yield result
                if not isinstance(result, _NextValueNotReady):
                    break

    def _filtered(self, fn: Callable[[Any], bool], items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._enter()
            if isinstance(item, _NextValueNotReady) or fn(item):
                yield item

    def _hooked(self, fn: Any, operator: Operator, items: Iterator[Any]) -> Iterator[Any]:
        results = operator(items)
        fetching = False
        while True:
            if not fetching:
                self._enter()
                fn._on_fetch_start()
            try:
                result = next(results)
            except StopIteration:
                return
            fetching = isinstance(result, _NextValueNotReady)
            yield result

    def _copy(self, queues: list[deque[Any]], place: int, timeout: float | None) -> Iterator[Any]:
        own = queues[place]
        while True:
            if len(own) < max(map(len, queues)):
                yield _NextValueNotReady()
                continue
            if not own:
                self.timeout = timeout
                try:
                    item = next(self)
                except StopIteration:
                    return
                for queue in queues:
                    queue.append(item)
            yield own.popleft()


def _transformed(fn: Callable[[Iterable[Any]], Iterable[Any]], items: Iterator[Any]) -> Iterator[Any]:
    yield from fn(items)


def _mapped_by_tasks(
    fn: Callable[[Any], Any], most: int, options: dict[str, Any], items: Iterator[Any]
) -> Iterator[Any]:
    function = remote(fn).options(**options)
    pending: list[Any] = []
    for item in items:
        if isinstance(item, _NextValueNotReady):
            yield item
            continue
        if most and len(pending) >= most:
            ready, pending = wait(pending)
            yield from get(ready)
        pending.append(function.remote(item))
    while pending:
        ready, pending = wait(pending)
        yield from get(ready)


def _batched(n: int, items: Iterator[Any]) -> Iterator[Any]:
    batch: list[Any] = []
    for item in items:
        if isinstance(item, _NextValueNotReady):
            yield item
            continue
        batch.append(item)
        if len(batch) >= n:
            yield batch
            batch = []
    if batch:
        yield batch


def _flattened(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, _NextValueNotReady):
            yield item
        else:
            yield from item


def _shuffled(size: int, draw: random.Random, items: Iterator[Any]) -> Iterator[Any]:
    buffer: list[Any] = []
    for item in items:
        if isinstance(item, _NextValueNotReady):
            yield item
            continue
        buffer.append(item)
        if len(buffer) >= size:
            yield buffer.pop(draw.randrange(len(buffer)))
    while buffer:
        yield buffer.pop(draw.randrange(len(buffer)))


def _with_source(item: Any) -> tuple[Any, Any]:
    actor = LocalIterator.get_metrics().current_actor
    if actor is None:
        raise ValueError("Could not identify source actor of item")
    return actor, item


def _united(members: list[tuple[float | str, LocalIterator[Any]]], timeout: float | None) -> Iterator[Any]:
    active = list(members)
    while active:
        idle = True
        for member in list(active):
            weight, items = member
            try:
                for _ in range(_MOST_PULLED if isinstance(weight, str) else _rounded(weight)):
                    item = next(items)
                    if isinstance(item, _NextValueNotReady):
                        if timeout is not None:
                            yield item
                        break
                    idle = False
                    yield item
            except StopIteration:
                active.remove(member)
                idle = False
        if idle:
            time.sleep(_UNION_PAUSE)


def _rounded(weight: float) -> int:
    whole = int(weight)
    return whole + (random.random() < weight - whole)
