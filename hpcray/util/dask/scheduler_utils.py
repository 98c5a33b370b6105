"""Dask's own helpers of a scheduler, under the name of Ray's module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dask.local import (
    default_get_id,
    default_pack_exception,
    execute_task,
    finish_task,
    get_async,
    identity,
    nested_get,
    release_data,
    reraise,
    start_state_from_dask,
)

__all__ = [
    "apply_sync",
    "default_get_id",
    "default_pack_exception",
    "execute_task",
    "finish_task",
    "get_async",
    "identity",
    "nested_get",
    "release_data",
    "reraise",
    "start_state_from_dask",
]


def apply_sync(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwds: Mapping[str, Any] | None = None,
    callback: Callable[[Any], Any] | None = None,
) -> None:
    """Call a function in this thread, then `callback` with its result."""
    result = func(*args, **(kwds or {}))
    if callback is not None:
        callback(result)
