"""`ray._private.auto_init_hook`: `init()` at the first use."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hpcray.api.session import init, is_initialized

R = TypeVar("R")

auto_init_lock = threading.Lock()
enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0"


def auto_init_ray() -> None:
    """Call `init()` unless there is a session, or RAY_ENABLE_AUTO_CONNECT is 0."""
    if enable_auto_connect and not is_initialized():
        with auto_init_lock:
            if not is_initialized():
                init()


def wrap_auto_init(fn: Callable[..., R]) -> Callable[..., R]:
    """Return the function with `auto_init_ray()` before it."""

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> R:
        auto_init_ray()
        return fn(*args, **kwargs)

    return wrapper
