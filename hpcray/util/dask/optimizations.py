"""Optimisation of Dask data frames before they are computed."""

from __future__ import annotations

import warnings
from typing import Any

import dask


def dataframe_optimize(dsk: Any, keys: Any, **kwargs: Any) -> None:
    """Warn, as Ray does, and leave the graph as it is: the shuffle that Ray rewrites is gone from Dask since 2025.1."""
    warnings.warn(
        "Custom dataframe shuffle optimization only works on dask>=2024.11.0,<2025.1.0, you are on version "
        f"{dask.__version__}. Doing no additional optimization aside from the default one.",
        stacklevel=2,
    )
