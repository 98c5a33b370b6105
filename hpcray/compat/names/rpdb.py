"""`ray.util.rpdb`, also `ray.util.pdb`: Ray's debugger, which hpcray does not have."""

from __future__ import annotations

from typing import Any, NoReturn


def set_trace(breakpoint_uuid: Any = None) -> NoReturn:
    """Refused.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "hpcray has no debugger for tasks and actors; hint: `hpcray stack` shows what they do, and "
        "breakpoint() works where the function is called without .remote()"
    )


_post_mortem = set_trace


def _is_ray_debugger_post_mortem_enabled() -> bool:
    return False
