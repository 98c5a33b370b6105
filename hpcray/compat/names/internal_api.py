"""`ray._private.internal_api`: what the object stores hold, for people, beside `free`."""

from __future__ import annotations

from typing import Any

from hpcray.api.by_hand import free
from hpcray.runtime.refs import need_process
from hpcray.state.memory import show_stores

__all__ = ["free", "memory_summary"]

_LIMIT = 100
_TIMEOUT = 10.0


def memory_summary(address: str | None = None, *_: Any, **__: Any) -> str:
    """What `hpcray memory` prints of the job that this process is in.

    Args:
        address: no effect: another job cannot be asked from here. Nor has how Ray would sort and group.

    Raises:
        RaySystemError: hpcray is not initialized.
    """
    return "\n".join(show_stores(need_process().survey.look(_LIMIT, _TIMEOUT)))
