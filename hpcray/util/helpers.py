"""Iteration over results in the order in which they become ready, and the order of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcray.api.objects import get, wait
from hpcray.api.remote_function import RemoteFunction
from hpcray.api.runtime_context import nodes
from hpcray.common.labels import place_of
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.topology.node_order import in_order


def as_completed(
    refs: Sequence[ObjectRef[Any]], *, chunk_size: int = 10, yield_obj_refs: bool = False, **kwargs: Any
) -> Iterator[Any | ObjectRef[Any]]:
    """Iterate over the values of refs as they become ready.

    Args:
        refs: distinct refs.
        chunk_size: number of refs to wait for at a time; those that are ready come in the order of `refs`.
        yield_obj_refs: yield the ready refs instead of their values.
        kwargs: further arguments of `wait`, `timeout` or `fetch_local`.

    Raises:
        ValueError: `chunk_size` is below 1, or `num_returns` is given. The iteration raises the exception of a task at
            its turn, and ends.
    """
    _check(chunk_size, kwargs)
    return _completed(list(refs), chunk_size, yield_obj_refs, kwargs)


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
        fn: remote function of an item.
        items: the items, read one by one as results are taken.
        backpressure_size: number of tasks in flight from which on results are awaited; None for no limit.
        chunk_size, yield_obj_refs, kwargs: as for `as_completed`.

    Raises:
        ValueError: backpressure_size or chunk_size is too small, or `num_returns` is given.
    """
    _check(chunk_size, kwargs)
    if backpressure_size is not None and backpressure_size < 1:
        raise ValueError("backpressure_size must be positive.")
    return _mapped(fn, items, backpressure_size, chunk_size, yield_obj_refs, kwargs)


def _check(chunk_size: int, kwargs: dict[str, Any]) -> None:
    if chunk_size < 1:
        raise ValueError("`chunk_size` must be >= 1")
    if "num_returns" in kwargs:
        raise ValueError("Use the `chunk_size` argument instead of `num_returns`.")


def _completed(pending: list[ObjectRef[Any]], chunk_size: int, as_refs: bool, kwargs: dict[str, Any]) -> Iterator[Any]:
    while pending:
        ready, pending = wait(pending, num_returns=min(chunk_size, len(pending)), **kwargs)
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
        pending.append(fn.remote(item))
        if limit is not None and len(pending) >= limit:
            ready, pending = wait(pending, num_returns=min(chunk_size, len(pending)), **kwargs)
            yield from ready if as_refs else (get(ref) for ref in ready)
    yield from _completed(pending, chunk_size, as_refs, kwargs)


def rank_order(node_ids: Iterable[str] | None = None) -> list[str]:
    """Return nodes in the order in which ranks should be numbered, so that neighbours have successive ranks.

    Collective operations of NCCL, gloo and MPI talk most between successive ranks: in this order the rings and trees
    cross each switch as few times as possible. Nodes of the same switch, and all nodes where nothing is known of the
    network, stay in the order in which they were given.

    Args:
        node_ids: ids as in `ray.nodes()` ("NodeID"), each perhaps several times (for several workers of one node);
            None: all living nodes of the job. Ids that the job does not know come last.

    Example:
        >>> ranks = {node: rank for rank, node in enumerate(rank_order())}
    """
    rows = nodes()
    places = {row["NodeID"]: place_of(row["Labels"]) for row in rows}
    given = [row["NodeID"] for row in rows if row["Alive"]] if node_ids is None else list(node_ids)
    return in_order(given, places)
