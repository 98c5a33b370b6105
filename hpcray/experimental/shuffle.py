"""Redistribution of partitions: tasks that split the input partitions, and tasks that gather the output partitions."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hpcray.api.actor_handle import ActorHandle
from hpcray.api.decorator import remote
from hpcray.api.objects import get, put, wait
from hpcray.runtime.core_worker.object_refs import ObjectRef

Partitioner = Callable[[Iterable[Any], int], Iterable[tuple[int, Any]]]

_PROGRESS_INTERVAL = 0.1  # seconds
_PROGRESS_WAIT = 1.0  # seconds that the tracker waits for the tasks of a stage


class ObjectStoreWriter:
    """Collects the items of a map task for one output partition. Each item becomes an object of its own.

    Subclass it to write several small items as one object.
    """

    def __init__(self) -> None:
        self.results: list[Any] = []

    def add(self, item: Any) -> None:
        """Add an item."""
        self.results.append(put(item))

    def finish(self) -> list[Any]:
        """Return what the reduce task gets: refs of the items."""
        return self.results


class ObjectStoreWriterNonStreaming(ObjectStoreWriter):
    """Collects the items themselves, so that all items of a map task for one output partition are one object."""

    def add(self, item: Any) -> None:
        """Add an item."""
        self.results.append(item)


def round_robin_partitioner(input_stream: Iterable[Any], num_partitions: int) -> Iterator[tuple[int, Any]]:
    """Deal items to the output partitions in turn. Yields (number of the output partition, item)."""
    return zip(itertools.cycle(range(num_partitions)), input_stream)


class StatusTracker:
    """Counts the finished tasks of a shuffle, in an actor."""

    def __init__(self) -> None:
        self._pending: list[list[ObjectRef[Any]]] = [[], []]
        self._done = [0, 0]

    def register_objectrefs(self, map_refs: list[ObjectRef[Any]], reduce_refs: list[ObjectRef[Any]]) -> None:
        """Set the refs of the tasks of both stages."""
        self._pending = [map_refs, reduce_refs]

    def get_progress(self) -> tuple[int, int]:
        """Wait a second for tasks of the present stage. Returns the numbers of finished map and reduce tasks."""
        for stage, refs in enumerate(self._pending):
            if refs:
                ready, self._pending[stage] = wait(
                    refs, num_returns=len(refs), timeout=_PROGRESS_WAIT, fetch_local=False
                )
                self._done[stage] += len(ready)
                break
        return self._done[0], self._done[1]


_StatusTracker = remote(StatusTracker)


def render_progress_bar(tracker: ActorHandle, input_num_partitions: int, output_num_partitions: int) -> None:
    """Show the progress of a shuffle until it ends, with tqdm.

    Raises:
        ImportError: tqdm is not installed.
    """
    from tqdm import tqdm

    totals = (input_num_partitions, output_num_partitions)
    bars = [
        tqdm(total=total, position=place, desc=f"{name} Progress.")
        for place, (name, total) in enumerate(zip(("Map", "Reduce"), totals, strict=True))
    ]
    while any(bar.n < bar.total for bar in bars):
        for bar, done in zip(bars, get(tracker.get_progress.remote()), strict=True):
            bar.update(done - bar.n)
        time.sleep(_PROGRESS_INTERVAL)
    for bar in bars:
        bar.close()


def simple_shuffle(
    *,
    input_reader: Callable[[int], Iterable[Any]],
    input_num_partitions: int,
    output_num_partitions: int,
    output_writer: Callable[[int, list[Any]], Any],
    partitioner: Partitioner = round_robin_partitioner,
    object_store_writer: Callable[[], ObjectStoreWriter] = ObjectStoreWriter,
    tracker: ActorHandle | None = None,
    streaming: bool = True,
) -> list[Any]:
    """Redistribute the items of input partitions to output partitions.

    Args:
        input_reader: returns the items of an input partition, by its number.
        input_num_partitions, output_num_partitions: numbers of partitions.
        output_writer: gets the number of an output partition and its items, as the writer left them (refs by default),
            and returns a result.
        partitioner: gets the items of an input partition and the number of output partitions; yields (number of the
            output partition, item).
        object_store_writer: class of the writers, one for each pair of input and output partition.
        tracker: a `StatusTracker` actor, for progress bars.
        streaming: without effect, as in Ray; the writer decides.

    Returns:
        The results of the output partitions.
    """
    split = remote(num_returns=output_num_partitions)(
        functools.partial(_split, input_reader, partitioner, object_store_writer, output_num_partitions)
    )
    gather = remote(functools.partial(_gather, output_writer))
    parts = [split.remote(number) for number in range(input_num_partitions)]
    if output_num_partitions == 1:
        parts = [[part] for part in parts]
    results = [gather.remote(number, *(part[number] for part in parts)) for number in range(output_num_partitions)]
    if tracker is not None:
        tracker.register_objectrefs.remote([part[0] for part in parts], results)
        render_progress_bar(tracker, input_num_partitions, output_num_partitions)
    return get(results)


def _split(
    reader: Callable[[int], Iterable[Any]],
    partitioner: Partitioner,
    new_writer: Callable[[], ObjectStoreWriter],
    outputs: int,
    number: int,
) -> Any:
    writers = [new_writer() for _ in range(outputs)]
    for output, item in partitioner(reader(number), outputs):
        writers[output].add(item)
    parts = [writer.finish() for writer in writers]
    return parts if outputs > 1 else parts[0]


def _gather(writer: Callable[[int, list[Any]], Any], number: int, *parts: list[Any]) -> Any:
    return writer(number, [item for part in parts for item in part])
