"""`ray._private.worker._wait_generators_bulk`: the next values of several generators, in batches."""

from __future__ import annotations

import time
from typing import Any

from hpcray.api.objects import wait
from hpcray.runtime.core_worker.generators import ObjectRefGenerator
from hpcray.runtime.core_worker.object_refs import ObjectRef

_NAME = "_wait_generators_bulk()"
Batch = tuple[ObjectRefGenerator[Any], list[bool]]


def wait_for_batches(
    ray_generators: list[Batch], *, num_return: int = 1, timeout: float | None = None
) -> list[tuple[ObjectRefGenerator[Any], list[ObjectRef[Any]]]]:
    """Wait until batches of next values are there, and take them.

    Args:
        ray_generators: pairs of a generator and, for each value of its batch, whether that must be on this node.
        num_return: number of batches that are returned at most.
        timeout: in seconds; None waits without limit.

    Returns:
        Pairs of a generator and the refs of its whole batch.

    Raises:
        TypeError, ValueError: wrong arguments.
    """
    _check(ray_generators, num_return, timeout)
    if not ray_generators:
        return []
    deadline = None if timeout is None else time.monotonic() + timeout
    batches = [(generator, generator._get_next_ref_n(len(fetch)), fetch) for generator, fetch in ray_generators]
    ready, _ = wait([refs[-1] for _, refs, _ in batches], num_returns=num_return, timeout=timeout, fetch_local=False)
    here = set(ready)
    found = [batch for batch in batches if batch[1][-1] in here]
    wanted = {id(refs): [ref for ref, local in zip(refs, fetch, strict=True) if local] for _, refs, fetch in found}
    fetched: set[ObjectRef[Any]] = set()
    if any(wanted.values()):
        refs = [ref for batch in wanted.values() for ref in batch]
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        fetched.update(wait(refs, num_returns=len(refs), timeout=left)[0])
    result = []
    for generator, batch, _ in found:
        if fetched.issuperset(wanted[id(batch)]):
            generator._consume_next_ref_n(len(batch))
            result.append((generator, batch))
    return result


def _check(batches: Any, num_return: int, timeout: float | None) -> None:
    if not isinstance(batches, list):
        raise TypeError(f"{_NAME} expected a list of (ray.ObjectRefGenerator, list[bool]) tuples, got {type(batches)}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    for index, pair in enumerate(batches):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(
                f"{_NAME} expected each element to be a (generator, fetch_local_per_ref) tuple; got {type(pair)} at "
                f"index {index}"
            )
        generator, fetch = pair
        if not isinstance(generator, ObjectRefGenerator):
            raise TypeError(
                f"{_NAME} tuple first element must be ray.ObjectRefGenerator, got {type(generator)} at index {index}"
            )
        if not isinstance(fetch, list):
            raise TypeError(f"{_NAME} tuple second element must be list[bool], got {type(fetch)} at index {index}")
        if not fetch:
            raise ValueError(f"{_NAME} fetch_local_per_ref must be non-empty at index {index}")
        for place, local in enumerate(fetch):
            if not isinstance(local, bool):
                raise TypeError(
                    f"{_NAME} fetch_local_per_ref entries must be bool, got {type(local)} at index {index}, ref {place}"
                )
    if not batches:
        return
    if len({id(generator) for generator, _ in batches}) != len(batches):
        raise ValueError("_wait_generators_bulk requires a list of unique generators.")
    if num_return <= 0:
        raise ValueError(f"Invalid number of generators to return {num_return}.")
    if num_return > len(batches):
        raise ValueError(
            "num_return cannot be greater than the number of generators provided to _wait_generators_bulk."
        )
