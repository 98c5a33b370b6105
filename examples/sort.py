"""A distributed sample sort of more data than one node can hold, and a check of the result.

    hpcray-launch -n 4 --object-store 128m examples/sort.py

Load tasks make blocks of skewed keys. A sample of every block gives the boundaries of as many ranges as there are
blocks; partition tasks sort a block and cut it at the boundaries (one return per range); merge tasks put the pieces of
one range together. Blocks and ranges are assigned to the nodes in turn, so that each holds its share; a block is freed
as soon as it is cut, a piece as soon as it is merged. Last, tasks check every range: ascending, not overlapping, no key
lost, none changed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np

import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MB = 1 << 20
BLOCK = 8 * MB
KEY = np.dtype(np.float64).itemsize
SAMPLES = 1000


@dataclass(frozen=True)
class Summary:
    """Properties that a sort keeps. `total` and `mixed`: sum (modulo 2**64) and exclusive or of the keys' bits."""

    count: int
    total: int
    mixed: int

    @classmethod
    def of(cls, keys: np.ndarray) -> Summary:
        bits = keys.view(np.uint64)
        return cls(len(keys), int(bits.sum(dtype=np.uint64)), int(np.bitwise_xor.reduce(bits)))

    def __add__(self, other: Summary) -> Summary:
        return Summary(self.count + other.count, (self.total + other.total) % (1 << 64), self.mixed ^ other.mixed)


@ray.remote(num_returns=3)
def load(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, Summary]:
    """One block of keys (log-normal: most are small, a few are huge), a sample of it, and its summary."""
    rng = np.random.default_rng(seed)
    keys = rng.lognormal(sigma=2.0, size=count)
    return keys, rng.choice(keys, min(SAMPLES, count)), Summary.of(keys)


@ray.remote
def partition(keys: np.ndarray, boundaries: np.ndarray) -> list[np.ndarray]:
    """The sorted block, cut at the boundaries."""
    keys = np.sort(keys)
    return np.split(keys, np.searchsorted(keys, boundaries))


@ray.remote
def merge(*pieces: np.ndarray) -> np.ndarray:
    """One range, sorted. The stable sort finds the runs that are there already."""
    keys = np.concatenate(pieces)
    keys.sort(kind="stable")
    return keys


@ray.remote
def inspect(keys: np.ndarray) -> tuple[bool, float, float, Summary]:
    """Check that the keys ascend. Returns the result, the first key, the last key, and their summary."""
    ascending = bool((keys[1:] >= keys[:-1]).all())
    return ascending, *((float(keys[0]), float(keys[-1])) if len(keys) else (np.inf, -np.inf)), Summary.of(keys)


def on(nodes: list[str], number: int) -> NodeAffinitySchedulingStrategy:
    """The strategy for tasks on the node that holds block or range `number`."""
    return NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)


def sample_sort(blocks: list[ray.ObjectRef], samples: list[ray.ObjectRef], nodes: list[str]) -> list[ray.ObjectRef]:
    """References to the ranges of the sorted data, in order. Takes the blocks: the list is empty afterwards."""
    ranges = len(blocks)
    sample = np.sort(np.concatenate(ray.get(samples)))
    boundaries = ray.put(sample[np.linspace(0, len(sample) - 1, ranges + 1).astype(int)[1:-1]])
    pieces: list[list[ray.ObjectRef]] = []
    for number in range(ranges):
        cut = partition.options(num_returns=ranges, scheduling_strategy=on(nodes, number))
        pieces.append(cut.remote(blocks.pop(0), boundaries))
    merged = []
    for number in range(ranges):
        put_together = merge.options(scheduling_strategy=on(nodes, number))
        merged.append(put_together.remote(*(row[number] for row in pieces)))
        for row in pieces:
            row[number] = None
    ray.wait(merged, num_returns=len(merged), fetch_local=False)
    return merged


def check(merged: list[ray.ObjectRef], expected: Summary) -> None:
    """Raises AssertionError when the data is not sorted or not complete."""
    found = Summary(0, 0, 0)
    end = -np.inf
    for number, (ascending, first, last, summary) in enumerate(ray.get([inspect.remote(keys) for keys in merged])):
        assert ascending, f"range {number} is not sorted"
        if summary.count:
            assert end <= first, f"range {number} starts with {first}, before {end}, the end of the last one"
            end = last
        found += summary
    assert found == expected, f"keys were lost or changed: {found}, expected {expected}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=int, help="megabytes to sort (default: 1.1 of a node's store, 512 at most)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.mb is not None and options.mb < 1:
        parser.error("--mb: at least 1")

    ray.init()
    alive = [node for node in ray.nodes() if node["Alive"]]
    share = int(min(node["Resources"].get("object_store_memory", 0) for node in alive))
    # One node alone has to hold everything, with room for what is being merged.
    size = options.mb * MB if options.mb else min(512 * MB, int(share * (1.1 if len(alive) > 2 else 0.3)))
    count = max(2 * len(alive), -(-size // BLOCK))
    nodes = [node["NodeID"] for node in alive]
    print(f"cluster: {len(alive)} nodes, {share / MB:.0f} MiB of object store each")

    per_block = size // KEY // count
    loaded = []
    for number in range(count):
        load_there = load.options(scheduling_strategy=on(nodes, number))
        loaded.append(load_there.remote(options.seed + number, per_block))
    expected = sum(ray.get([summary for _, _, summary in loaded]), Summary(0, 0, 0))
    print(f"data: {expected.count * KEY / MB:.0f} MiB, {expected.count:,} keys in {count} blocks")
    blocks, samples = [block for block, _, _ in loaded], [sample for _, sample, _ in loaded]
    del loaded

    started = time.perf_counter()
    merged = sample_sort(blocks, samples, nodes)
    took = time.perf_counter() - started
    check(merged, expected)
    print(f"sorted: {expected.count * KEY / MB / took:.0f} MiB/s ({took:.2f} s); order, count and checksum are right")


if __name__ == "__main__":
    main()
