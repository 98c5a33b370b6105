"""The actor that holds one shard of a parallel iterator."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hpcray.util.iter.local import LocalIterator
from hpcray.util.iter.metrics import SharedMetrics


class ParallelIteratorWorker:
    """Base class of actors that `from_actors` takes. A subclass calls this constructor.

    Args:
        item_generator: the items of the shard: an iterable, or a function that returns one (a generator does not
            pickle, the function that makes it does).
        repeat: begin again after the last item, for ever.
    """

    def __init__(self, item_generator: Any, repeat: bool) -> None:
        self._source = item_generator
        self._items: Iterable[Any] = self._cycle() if repeat else self._once()
        self._transformed: Iterator[Any] | None = None
        self._slices: defaultdict[int, deque[Any]] = defaultdict(deque)

    def par_iter_init(self, transforms: Sequence[Callable[[LocalIterator[Any]], LocalIterator[Any]]]) -> None:
        """Set the operators. What is left of the items is read through them."""
        shard: LocalIterator[Any] = LocalIterator(lambda timeout: self._items, SharedMetrics())
        for transform in transforms:
            shard = transform(shard)
        self._transformed = iter(shard)

    def par_iter_next(self) -> Any:
        """Return the next item.

        Raises:
            StopIteration: there are no more.
        """
        assert self._transformed is not None, "must call par_iter_init()"
        return next(self._transformed)

    def par_iter_next_batch(self, batch_ms: float) -> list[Any]:
        """Return the items of the next `batch_ms` milliseconds, one if it is 0. Raises as `par_iter_next`."""
        return _batch(self.par_iter_next, batch_ms)

    def par_iter_slice(self, step: int, start: int) -> Any:
        """Return the next item of those whose index has remainder `start` by `step`. The others are kept for later.

        Raises:
            StopIteration: there are no more.
        """
        assert self._transformed is not None, "must call par_iter_init()"
        if not self._slices[start]:
            for place in range(step):
                try:
                    self._slices[place].append(next(self._transformed))
                except StopIteration:
                    break
        if not self._slices[start]:
            raise StopIteration
        return self._slices[start].popleft()

    def par_iter_slice_batch(self, step: int, start: int, batch_ms: float) -> list[Any]:
        """Return the items of a slice in the next `batch_ms` milliseconds, as `par_iter_next_batch`."""
        return _batch(lambda: self.par_iter_slice(step, start), batch_ms)

    def _once(self) -> Iterable[Any]:
        found: Iterable[Any] = self._source() if callable(self._source) else self._source
        return found

    def _cycle(self) -> Iterator[Any]:
        while True:
            items = iter(self._once())
            if items is self._source:
                raise ValueError(
                    f"Cannot iterate over {self._source} multiple times. Please pass in the base iterable or "
                    "a function that returns the iterator instead."
                )
            yield from items


def _batch(take: Callable[[], Any], batch_ms: float) -> list[Any]:
    batch = [take()]
    end = time.monotonic() + batch_ms / 1000
    while time.monotonic() < end:
        try:
            batch.append(take())
        except StopIteration:
            break  # the next call raises it again
    return batch
