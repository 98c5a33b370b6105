"""Copying large buffers by several threads."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

_PAGE = mmap.PAGESIZE
PARALLEL_COPY_SIZE = 64 << 20
"""Bytes above which several threads pay off: they cost about 0.1 ms, one core copies as much in about 5 ms."""
_MAX_COPY_THREADS = 4


def copy_thread_count() -> int:
    """Number of threads of this process that copy a large buffer. One core does not reach the bandwidth of a socket's
    memory, a few do; with two or three cores, the others have other work."""
    return max(1, min(_MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


def parallel_copy(copy: Callable[[Any, Any], object], target: Any, source: Any, threads: int) -> None:
    """Copy a part in each of several threads. When this returns or raises, no thread copies any more.

    Args:
        copy: `copy(target, source)` of equally long parts; releases the GIL.
        target, source: equally long, and can be sliced.
    """
    copy_in_parallel(copy, [(target, source)], threads)


def copy_in_parallel(copy: Callable[[Any, Any], object], pairs: Sequence[tuple[Any, Any]], threads: int) -> None:
    """Copy several targets and sources as `parallel_copy` does one of each: each thread copies as many bytes."""
    shares = _equal_shares(pairs, threads)
    helpers = [threading.Thread(target=_copy_share, args=(copy, share), name="hpcray-copy") for share in shares[1:]]
    interrupted: BaseException | None = None
    own = shares[:1]
    try:
        for helper, share in zip(helpers, shares[1:], strict=True):
            try:
                helper.start()
            except RuntimeError:  # a limit on processes or threads
                own.append(share)
        for share in own:
            _copy_share(copy, share)
    finally:
        for helper in helpers:
            while helper.is_alive():
                try:
                    helper.join()
                except KeyboardInterrupt as error:  # the threads write into memory that the caller may free after this
                    interrupted = error
    if interrupted is not None:
        raise interrupted


def _equal_shares(pairs: Sequence[tuple[Any, Any]], count: int) -> list[list[tuple[Any, Any]]]:
    """Split targets and sources into at most `count` lists of as many bytes, at multiples of a page of each."""
    size = sum(len(source) for _, source in pairs)
    step = -(-size // count // _PAGE) * _PAGE
    shares: list[list[tuple[Any, Any]]] = [[]]
    room = step
    for target, source in pairs:
        at = 0
        while at < len(source):
            if room <= 0:
                shares.append([])
                room = step
            end = min(len(source), at + room)
            shares[-1].append((target[at:end], source[at:end]))
            room -= end - at
            at = end
    return shares


def _copy_share(copy: Callable[[Any, Any], object], share: Sequence[tuple[Any, Any]]) -> None:
    for target, source in share:
        copy(target, source)
