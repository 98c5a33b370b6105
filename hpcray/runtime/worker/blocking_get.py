"""A warning of `get` inside of coroutines of async actors. Other processes do not pay for it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from hpcray.runtime.core_worker.core_worker import CoreWorker

_SWITCH = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"


def is_expected() -> bool:
    """True if the program says that it blocks on purpose. `ray._private.worker` puts another function here."""
    return False


def warn_of_blocking_get(process: CoreWorker) -> None:
    """Log a warning at the first `get` of this process that blocks an event loop."""
    if os.environ.get(_SWITCH, "1") not in ("1", "true", "True"):
        return
    plain = process.get_one, process.get

    def watched(get: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if (
                asyncio._get_running_loop() is not None and asyncio.current_task() is not None
            ):  # else: the `get` of an `await`
                process.get_one, process.get = plain
                if is_expected():
                    return get(*args)
                logging.getLogger("hpcray").warning(
                    "Using blocking ray.get inside async actor. This blocks the event loop. Please use `await` on "
                    "object ref with asyncio.gather if you want to yield execution to the event loop instead."
                )
            return get(*args)

        return call

    process.get_one, process.get = watched(plain[0]), watched(plain[1])
