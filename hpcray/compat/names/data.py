"""`ray.data`: the names that packages import at their start and use only where somebody asks for a Ray dataset."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["from_pandas_refs"]


def from_pandas_refs(dfs: Any, *_: Any, **__: Any) -> NoReturn:
    """Refused.

    Raises:
        NotImplementedError: always: Ray Data is not part of hpcray.
    """
    raise NotImplementedError("hpcray does not have ray.data.from_pandas_refs: Ray Data is no part of hpcray")
