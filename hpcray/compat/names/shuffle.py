"""`run()` of `ray.experimental.shuffle`: a shuffle of arrays, as an example and a benchmark."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcray.api.objects import get, wait
from hpcray.api.session import init
from hpcray.compat.cluster_utils import Cluster
from hpcray.compat.names.internal_api import memory_summary
from hpcray.experimental.shuffle import (
    ObjectStoreWriter,
    ObjectStoreWriterNonStreaming,
    _StatusTracker,
    simple_shuffle,
)

_ROW_BYTES = 16


def build_cluster(num_nodes: int, num_cpus: int, object_store_memory: float) -> Cluster:
    """Start several nodes on this host."""
    cluster = Cluster()
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=num_cpus, object_store_memory=object_store_memory)
    cluster.wait_for_nodes()
    return cluster


def run(
    ray_address: str | None = None,
    object_store_memory: float = 1e9,
    num_partitions: int = 5,
    partition_size: float = 200e6,
    num_nodes: int | None = None,
    num_cpus: int = 8,
    no_streaming: bool = False,
    use_wait: bool = False,
    tracker: Any = None,
) -> None:
    """Shuffle arrays, and print the state of the stores and the time it took.

    Args:
        ray_address: `address` of `init()`; None: a session of its own.
        object_store_memory: of a node, in bytes.
        num_partitions: number of input and of output partitions.
        partition_size: in bytes.
        num_nodes: number of nodes to start on this host; None: one.
        num_cpus: of a node.
        no_streaming: one object for each pair of partitions instead of one for each array.
        use_wait: read the arrays in the order in which they become ready.
        tracker: actor that counts finished tasks; None: a new one.
    """
    if ray_address:
        init(address=ray_address, ignore_reinit_error=True)
    elif num_nodes:
        init(address=build_cluster(num_nodes, num_cpus, object_store_memory).address)
    else:
        init(num_cpus=num_cpus, object_store_memory=int(object_store_memory))
    rows = int(partition_size) // _ROW_BYTES // num_partitions

    def read(_: int) -> Iterator[Any]:
        for _ in range(num_partitions):
            yield np.ones((rows, 2), dtype=np.int64)

    def write(_: int, items: list[Any]) -> int:
        total = 0
        while items:
            if no_streaming:
                value = items.pop()
            else:
                [ready], items = wait(items) if use_wait else (items[:1], items[1:])
                value = get(ready)
            total += value.nbytes
        return total

    start = time.monotonic()
    sizes = simple_shuffle(
        input_reader=read,
        input_num_partitions=num_partitions,
        output_num_partitions=num_partitions,
        output_writer=write,
        object_store_writer=ObjectStoreWriterNonStreaming if no_streaming else ObjectStoreWriter,
        tracker=_StatusTracker.remote() if tracker is None else tracker,
    )
    seconds = time.monotonic() - start
    print(f"\n{memory_summary()}\n\nShuffled {sum(sizes) >> 20} MiB in {seconds} seconds")
