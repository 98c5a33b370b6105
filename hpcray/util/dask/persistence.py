"""`persist` of Dask's collections: what is computed stays in the object store, and the collection has refs to it.

And the optimisation of data frames, of which nothing is left to be done.
"""

from __future__ import annotations

import functools
import warnings
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
    """A scheduler is not given the difference between `compute` and `persist` by Dask, only by this, as in Ray."""

    @functools.wraps(persist)
    def keep_refs(*args: Any, **kwargs: Any) -> Any:
        scheduler = kwargs.get("scheduler") or dask.config.get("scheduler", None)
        if callable(scheduler):  # not one of Dask's own, which have names, nor a client of dask.distributed
            kwargs.setdefault("ray_persist", True)
        return persist(*args, **kwargs)

    return keep_refs


def dataframe_optimize(dsk: Any, keys: Any, **kwargs: Any) -> None:
    """Warn, as Ray does, and leave the graph as it is: the shuffle that Ray rewrites is gone from Dask since 2025.1."""
    warnings.warn(
        "Custom dataframe shuffle optimization only works on dask>=2024.11.0,<2025.1.0, you are on version "
        f"{dask.__version__}. Doing no additional optimization aside from the default one.",
        stacklevel=2,
    )


dask.persist = _keeping_refs(_dask_persist)
dask.base.DaskMethodsMixin.persist = _keeping_refs(dask.base.DaskMethodsMixin.persist)
