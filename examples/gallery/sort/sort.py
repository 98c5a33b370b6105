"""An out-of-core sort: files of records that together are larger than the nodes' object stores.

    hpcray-launch -n 4 --object-store 128m examples/gallery/sort/sort.py --directory /scratch/me --picture ranges.png

Tasks write unsorted files, as another program would have done. A sample of each gives the boundaries of as many ranges
as there are files. Partition tasks read a file, sort it and cut it at the boundaries, one return per range; merge tasks
put the pieces of a range together and write it. What does not fit into the stores in between, they spill to disk.
The directory has to be on a file system that all nodes share.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcray as ray

RECORD = np.dtype([("key", np.uint64), ("payload", np.uint64, 15)])  # 128 bytes
ODD = np.uint64(0x9E3779B97F4A7C15)
SAMPLES = 500
Summary = tuple[int, int, int, int]  # records, exclusive or of the keys, first and last key


def payload_of(keys: np.ndarray) -> np.ndarray:
    """What stands behind each key, so that a lost or exchanged record is seen."""
    return keys[:, None] * ODD + np.arange(15, dtype=np.uint64)


def summary_of(records: np.ndarray) -> Summary:
    keys = records["key"]
    return len(keys), int(np.bitwise_xor.reduce(keys)), int(keys.min()), int(keys.max())


@ray.remote
def make(path: str, seed: int, count: int) -> Summary:
    """Write a file of records in random order. Small keys are more frequent."""
    records = np.empty(count, RECORD)
    records["key"] = (np.random.default_rng(seed).random(count) ** 3 * 2.0**63).astype(np.uint64)
    records["payload"] = payload_of(records["key"])
    records.tofile(path)
    return summary_of(records)


@ray.remote
def sample(path: str) -> np.ndarray:
    keys = np.memmap(path, RECORD, "r")["key"]
    return np.array(keys[:: max(1, len(keys) // SAMPLES)])


@ray.remote
def partition(path: str, boundaries: np.ndarray) -> Any:
    """The records of a file, sorted and cut at the boundaries."""
    records = np.fromfile(path, RECORD)
    records = records[np.argsort(records["key"])]
    pieces = np.split(records, np.searchsorted(records["key"], boundaries))
    return pieces if len(pieces) > 1 else pieces[0]


@ray.remote
def merge(path: str, *pieces: np.ndarray) -> Summary:
    """Write one range, and check what is in it."""
    records = np.concatenate(pieces)
    records = records[np.argsort(records["key"], kind="stable")]
    records.tofile(path)
    written = np.fromfile(path, RECORD)
    assert (written["payload"] == payload_of(written["key"])).all() and (
        np.diff(written["key"].astype(np.int64)) >= 0
    ).all()
    return summary_of(written)


def draw(before: list[Summary], after: list[Summary], path: str) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(6, 3.5), sharex=True, sharey=True, layout="constrained")
    for axes, summaries, title in zip(panels, (before, after), ("before", "after"), strict=True):
        for number, (_, _, first, last) in enumerate(summaries):
            axes.plot([first, last], [number, number], "C0", lw=4)
        axes.set(title=title, xlabel="keys")
    panels[0].set_ylabel("file")
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=2048)
    parser.add_argument("--files", type=int, default=32)
    parser.add_argument("--directory", default=".", help="shared by all nodes; the files are removed at the end")
    parser.add_argument("--quick", action="store_true", help="128 MiB in 8 files")
    parser.add_argument("--picture", metavar="FILE", help="draw which keys each file holds")
    given = parser.parse_args()
    megabytes, files = (128, 8) if given.quick else (given.mb, given.files)

    ray.init()
    with tempfile.TemporaryDirectory(prefix="sort-", dir=given.directory) as name:
        unsorted = [str(Path(name, f"unsorted-{number}").resolve()) for number in range(files)]
        count = megabytes * (1 << 20) // files // RECORD.itemsize
        before = ray.get([make.remote(path, seed, count) for seed, path in enumerate(unsorted)])
        begin = time.perf_counter()
        samples = np.sort(np.concatenate(ray.get([sample.remote(path) for path in unsorted])))
        boundaries = samples[np.linspace(0, len(samples), files + 1).astype(int)[1:-1]]
        pieces = [partition.options(num_returns=files).remote(path, boundaries) for path in unsorted]
        targets = [path.replace("unsorted", "sorted") for path in unsorted]
        ranges = [merge.remote(path, *parts) for path, parts in zip(targets, zip(*pieces, strict=True), strict=True)]
        del pieces  # a piece goes when it is merged
        after = ray.get(ranges)
        seconds = time.perf_counter() - begin
    store = ray.cluster_resources()["object_store_memory"] / (1 << 20)
    print(f"{megabytes} MiB through stores of {store:.0f} MiB in {seconds:.1f} s: {megabytes / seconds:.0f} MiB/s")
    assert sum(each[0] for each in before) == sum(each[0] for each in after), "records were lost"
    assert np.bitwise_xor.reduce([each[1] for each in before + after]) == 0, "keys were changed"
    assert all(one[3] <= other[2] for one, other in itertools.pairwise(after)), "ranges overlap"
    if given.picture:
        draw(before, after, given.picture)
    print("checked")


if __name__ == "__main__":
    main()
