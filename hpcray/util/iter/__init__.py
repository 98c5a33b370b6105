"""Parallel iterators: shards of a stream of items in actors, operators on them, and iterators that gather them.

it = from_range(10, num_shards=2).for_each(lambda x: x * 2).filter(lambda x: x > 4)
list(it.gather_sync())
"""

from __future__ import annotations

from hpcray.util.iter.local import LocalIterator, _NextValueNotReady
from hpcray.util.iter.metrics import MetricsContext, SharedMetrics
from hpcray.util.iter.parallel import ParallelIterator, from_actors, from_items, from_iterators, from_range
from hpcray.util.iter.worker import ParallelIteratorWorker

__all__ = [
    "LocalIterator",
    "MetricsContext",
    "ParallelIterator",
    "ParallelIteratorWorker",
    "SharedMetrics",
    "_NextValueNotReady",
    "from_actors",
    "from_items",
    "from_iterators",
    "from_range",
]
