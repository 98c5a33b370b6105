"""Copies of large buffers, by several threads where that is faster than one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

LARGE = 64 << 20
"""Bytes from which on it is worth the threads: they cost about 0.1 ms, one core copies so much in some 5 ms."""
_MOST = 4
_PAGE = 4096


def threads_for_copies() -> int:
    """How many threads of this process copy a large buffer. One core does not reach the bandwidth of a socket's memory,
    a few do; where there are two cores or three, the others have something else to do."""
    return max(1, min(_MOST, len(os.sched_getaffinity(0)) // 2))


def copy_together(copy: Callable[[Any, Any], object], target: Any, source: Any, threads: int) -> None:
    """Copy a part in each of several threads. However this ends, no thread is at it any more.

    Args:
        copy: `copy(target, source)` of equally long parts; it lets other threads run meanwhile.
        target, source: equally long, and can be sliced.
    """
    size = len(source)
    step = -(-size // threads // _PAGE) * _PAGE
    parts = [(target[at : at + step], source[at : at + step]) for at in range(0, size, step)]
    helpers = [threading.Thread(target=copy, args=part, name="hpcray-copy") for part in parts[1:]]
    interrupted: BaseException | None = None
    own = parts[:1]
    try:
        for helper, part in zip(helpers, parts[1:], strict=True):
            try:
                helper.start()
            except RuntimeError:  # a limit on processes or threads
                own.append(part)
        for part in own:
            copy(*part)
    finally:
        for helper in helpers:
            while helper.is_alive():
                try:
                    helper.join()
                except KeyboardInterrupt as error:  # they write into memory that must not be given up under them
                    interrupted = error
    if interrupted is not None:
        raise interrupted
