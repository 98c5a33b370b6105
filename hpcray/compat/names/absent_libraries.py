"""Names of Ray Data and Ray Train that packages import where no wheel of Ray lends these libraries."""

from __future__ import annotations

from typing import Any, NoReturn


def from_pandas_refs(dfs: Any, *_: Any, **__: Any) -> NoReturn:
    """Refused.

    Raises:
        NotImplementedError: always: Ray Data is no part of hpcray.
    """
    raise NotImplementedError("hpcray does not have ray.data.from_pandas_refs: Ray Data is no part of hpcray")


def get_session() -> None:
    """Return None, as Ray does outside of Train workers."""
