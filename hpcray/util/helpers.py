"""Iteration over results in the order in which they become ready."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcray.api.objects import get, wait
from hpcray.api.remote_function import RemoteFunction
from hpcray.runtime.core_worker.object_refs import ObjectRef


def as_completed(
    refs: Sequence[ObjectRef[Any]], *, chunk_size: int = 10, yield_obj_refs: bool = False
) -> Iterator[Any | ObjectRef[Any]]:
    """Iterate over the values of refs as they become ready.

    Args:
        refs: distinct refs.
        chunk_size: largest number of ready refs to take at a time.
        yield_obj_refs: yield the ready refs instead of their values.

    Raises:
        ValueError: `chunk_size` is below 1. The iteration raises the exception of a task at its turn, and ends.
    """
    if chunk_size < 1:
        raise ValueError("`chunk_size` must be >= 1")
    return _completed(list(refs), chunk_size, yield_obj_refs)


def map_unordered(
    fn: RemoteFunction[..., Any],
    items: Iterable[Any],
    *,
    backpressure_size: int | None = 100,
    chunk_size: int = 10,
    yield_obj_refs: bool = False,
    **kwargs: Any,
) -> Iterator[Any | ObjectRef[Any]]:
    """Apply a remote function to items, and iterate over the results as they become ready.

    Args:
        fn: remote function of an item and `kwargs`.
        items: the items, read one by one as results are taken.
        backpressure_size: largest number of tasks in flight; None for no limit.
        chunk_size, yield_obj_refs: as for `as_completed`.
        kwargs: further arguments of `fn`.

    Raises:
        ValueError: backpressure_size or chunk_size is too small.
    """
    if chunk_size < 1:
        raise ValueError("`chunk_size` must be >= 1")
    if backpressure_size is not None and backpressure_size < 1:
        raise ValueError("`backpressure_size` must be >= 1, or None")
    return _mapped(fn, items, backpressure_size, chunk_size, yield_obj_refs, kwargs)


def _completed(pending: list[ObjectRef[Any]], chunk_size: int, as_refs: bool) -> Iterator[Any]:
    while pending:
        ready, pending = _take(pending, chunk_size)
        yield from ready if as_refs else (get(ref) for ref in ready)


def _mapped(
    fn: RemoteFunction[..., Any],
    items: Iterable[Any],
    limit: int | None,
    chunk_size: int,
    as_refs: bool,
    kwargs: dict[str, Any],
) -> Iterator[Any]:
    pending: list[ObjectRef[Any]] = []
    for item in items:
        while limit is not None and len(pending) >= limit:
            ready, pending = _take(pending, chunk_size)
            yield from ready if as_refs else (get(ref) for ref in ready)
        pending.append(fn.remote(item, **kwargs))
    yield from _completed(pending, chunk_size, as_refs)


def _take(pending: list[ObjectRef[Any]], most: int) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
    """Wait; returns (ready refs, at least one and at most `most`; the other refs)."""
    ready, rest = wait(pending, num_returns=1)
    if most > 1 and rest:
        more, rest = wait(rest, num_returns=min(most - 1, len(rest)), timeout=0)
        ready += more
    return ready, rest
