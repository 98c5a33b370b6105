"""`persist` of Dask's collections: what is computed stays in the object store, and the collection has refs to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import dask

_dask_persist = dask.persist


def ray_dask_persist(*args: Any, **kwargs: Any) -> Any:
    """Compute collections, leave their parts in the object store, and return collections of refs to them.

    As `dask.persist`, which does the same where a scheduler of hpcray's is in force.
    """
    return _dask_persist(*args, **{**kwargs, "ray_persist": True})


def _keeping_refs(persist: Callable[..., Any]) -> Callable[..., Any]:
    """Dask does not tell a scheduler whether it computes or persists, so this does, as in Ray."""

    @functools.wraps(persist)
    def keep_refs(*args: Any, **kwargs: Any) -> Any:
        scheduler = kwargs.get("scheduler") or dask.config.get("scheduler", None)
        if callable(scheduler):  # not one of Dask's own, which have names, nor a client of dask.distributed
            kwargs.setdefault("ray_persist", True)
        return persist(*args, **kwargs)

    return keep_refs


dask.persist = _keeping_refs(_dask_persist)
dask.base.DaskMethodsMixin.persist = _keeping_refs(dask.base.DaskMethodsMixin.persist)
