"""`ray.util.debug`: the search for code that keeps more memory at each call. RLlib's algorithms call it on request."""

from __future__ import annotations

import gc
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_FRAMES = 20
_LARGEST = 100  # places of allocation that are followed
_SHOWN = 10
_INCREASE = 1000  # bytes; less is no leak
_GROWTH = ((60.0, 0.875), (20.0, 0.9), (10.0, 0.95))  # bytes for each call, correlation: the steeper, the less steady


class Suspect(NamedTuple):
    """A place that allocates more and more.

    Attributes:
        traceback: the place, as its last frames.
        memory_increase: bytes that came from the first call to the last one.
        slope: bytes for each call, by linear regression.
        rvalue: correlation of the number of calls with the bytes.
        hist: bytes after each call.
    """

    traceback: tracemalloc.Traceback
    memory_increase: float
    slope: float
    rvalue: float
    hist: list[int]


def _test_some_code_for_memory_leaks(
    desc: str,
    init: Callable[[], None] | None,
    code: Callable[[], None],
    repeats: int,
    max_num_trials: int = 1,
    min_memory_increase: int = 0,
) -> list[Suspect]:
    """Call a function many times, and find the places whose memory grows with the number of calls.

    Args:
        desc: what the function does, for the output.
        init: called before each trial.
        code: the function.
        repeats: number of calls in the first trial; the k-th trial has k times as many.
        max_num_trials: a trial follows on one that found something, and looks at what that found only.
        min_memory_increase: smaller increases, in bytes, are no leaks.

    Returns:
        What the last trial found, the largest increase first; empty for no leak.
    """
    suspects: list[Suspect] = []
    for trial in range(1, max_num_trials + 1):
        print(f"{desc}: {repeats * trial} calls")
        sizes = _sizes(init, code, repeats * trial, {suspect.traceback for suspect in suspects})
        found = [suspect for place, hist in sizes.items() if (suspect := _judge(place, hist)) is not None]
        suspects = sorted(
            (suspect for suspect in found if suspect.memory_increase >= min_memory_increase),
            key=lambda suspect: -suspect.memory_increase,
        )
        for suspect in suspects[:_SHOWN]:
            print(f"  {suspect.traceback[-1]}: {suspect.memory_increase} bytes more, {suspect.slope:.1f} for each call")
        if not suspects:
            break
    return suspects


def _sizes(
    init: Callable[[], None] | None, code: Callable[[], None], repeats: int, only: set[tracemalloc.Traceback]
) -> dict[tracemalloc.Traceback, list[int]]:
    """Return the bytes that are allocated after each call, by place."""
    sizes: dict[tracemalloc.Traceback, list[int]] = defaultdict(list)
    tracemalloc.start(_FRAMES)
    try:
        if init is not None:
            init()
        for _ in range(repeats):
            gc.collect()
            code()
            gc.collect()
            snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
            for place in snapshot.statistics("traceback")[:_LARGEST]:
                if not only or place.traceback in only:
                    sizes[place.traceback].append(place.size)
    finally:
        tracemalloc.stop()
    return sizes


def _judge(place: tracemalloc.Traceback, hist: list[int]) -> Suspect | None:
    """Return a suspect where the growth is steep, or steady; None where there is none, or it is this module's own."""
    increase = hist[-1] - hist[0]
    if increase <= _INCREASE or place[-1].filename == __file__:
        return None
    calls = np.arange(len(hist))
    slope = float(np.polyfit(calls, hist, 1)[0])
    correlation = float(np.corrcoef(calls, hist)[0, 1])
    if any(slope > steepness and correlation > steadiness for steepness, steadiness in _GROWTH):
        return Suspect(place, increase, slope, correlation, hist)
    return None
