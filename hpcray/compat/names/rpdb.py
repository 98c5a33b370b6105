"""`ray.util.rpdb`, also `ray.util.pdb`: breakpoints in tasks and actors, to which `hpcray debug` attaches."""

from __future__ import annotations

import os
import sys
from typing import Any

from hpcray.diagnostics import debugger

__all__ = ["set_trace"]


def set_trace(breakpoint_uuid: Any = None) -> None:
    """Stop here until `hpcray debug` (or `ray debug`) lets the task go on; in a driver, pdb on its terminal."""
    debugger.set_trace(sys._getframe(1))


def _driver_set_trace() -> None:
    debugger.set_trace(sys._getframe(1))


def _post_mortem() -> None:
    error = sys.exc_info()[1]
    if error is not None:
        debugger.post_mortem(error)


def _is_ray_debugger_post_mortem_enabled() -> bool:
    return os.environ.get("RAY_DEBUG_POST_MORTEM", "0") == "1"
