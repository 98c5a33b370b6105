"""Figures of tasks by function, as they travel: counts, times, and how the times are distributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

FunctionRow = list[Any]
"""[ended, failed, microseconds in all, {bucket: runs}]; see `bucket_of`."""
OTHERS = "(other names)"
"""Stands for the names beyond `MOST_NAMES`: a program may give each task its own."""
MOST_NAMES = 200
_PER_DECADE = 10


def bucket_of(us: float) -> int:
    """The number of the bucket of a run time in microseconds; ten buckets make a factor of ten."""
    return int(_PER_DECADE * math.log10(us)) if us > 1 else 0


def lower_bound(bucket: int) -> float:
    """The time in seconds from which on run times are in a bucket."""
    return float(10 ** (bucket / _PER_DECADE) / 1e6)


def upper_bound(bucket: int) -> float:
    """The time in seconds below which all run times of a bucket are."""
    return float(10 ** ((bucket + 1) / _PER_DECADE) / 1e6)


def add_functions(into: dict[str, FunctionRow], more: Mapping[str, FunctionRow]) -> None:
    """Add the rows of functions to those of the same names."""
    for name, (ended, failed, us, buckets) in more.items():
        row = into.get(name)
        if row is None:
            if len(into) >= MOST_NAMES:
                name = OTHERS
                row = into.get(name)
            if row is None:
                into[name] = [ended, failed, us, dict(buckets)]
                continue
        row[0] += ended
        row[1] += failed
        row[2] += us
        for bucket, runs in buckets.items():
            row[3][bucket] = row[3].get(bucket, 0) + runs


def add_counts(into: dict[str, int], more: Mapping[str, int]) -> None:
    """Add counts to those of the same names."""
    for name, count in more.items():
        if name not in into and len(into) >= MOST_NAMES:
            name = OTHERS
        into[name] = into.get(name, 0) + count


def count_names(names: Iterable[str]) -> dict[str, int]:
    """How often each name occurs."""
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found
