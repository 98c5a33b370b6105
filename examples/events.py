"""Ray Data on hpcray: events in Parquet files, more than the object stores hold, sorted by time and counted by user.

    HPCRAY_PRELOAD=ray.data hpcray-launch -n 2 --as-ray --object-store 256m examples/events.py /scratch/me/events

Needs Ray's own libraries (docs/how-to/ray-libraries.md). The first part makes the files in the directory, unless they
are there. The second reads them, sorts all events by time with each user's session beside it, writes them as Parquet,
and counts events and sums per user. What does not fit into the stores waits on disk. In the end the result is compared
with what the files must give: no event lost, none out of order.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import ray

MB = 1 << 20
USERS = 5000
ROWS = 100_000
BYTES = 8 + 8 + 8 + 64


def make(batch: dict[str, np.ndarray]) -> object:
    """Events of one file: what happened when, to whom, and 64 bytes that say more."""
    for number in batch["id"]:
        rng = np.random.default_rng(int(number))
        yield {
            "time": rng.integers(0, 1 << 40, ROWS),
            "user": rng.zipf(1.5, ROWS) % USERS,
            "amount": rng.integers(0, 1000, ROWS),
            "payload": rng.integers(0, 255, (ROWS, 64), dtype=np.uint8),
        }


def add_session(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A column that is computed."""
    batch["session"] = batch["time"] >> 24
    return batch


def check_order(directory: Path) -> int:
    """The number of events in sorted files; AssertionError if they are not sorted over all of them."""
    ends: list[tuple[int, int]] = []
    events = 0
    for file in directory.glob("*.parquet"):
        times = pq.read_table(file, columns=["time"])["time"].to_numpy()
        events += len(times)
        assert (times[1:] >= times[:-1]).all(), f"{file} is not sorted"
        if len(times):
            ends.append((int(times[0]), int(times[-1])))
    ends.sort()
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends)), "the files overlap"
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="where all nodes can read and write")
    parser.add_argument("--mb", type=int, default=1000, help="megabytes of events (default 1000)")
    options = parser.parse_args()
    raw, ordered = options.directory / "raw", options.directory / "sorted"
    files = max(1, options.mb * MB // (ROWS * BYTES))

    ray.init()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    stores = ray.cluster_resources()["object_store_memory"] / MB
    if not raw.exists():
        made = ray.data.range(files, override_num_blocks=files).map_batches(make, batch_size=1)
        made.write_parquet(str(raw))
    shutil.rmtree(ordered, ignore_errors=True)
    events = ray.data.read_parquet(str(raw)).map_batches(add_session)
    count = events.count()
    print(f"{count:,} events, {count * BYTES / MB:.0f} MiB; object stores of {stores:.0f} MiB", flush=True)

    started = time.perf_counter()
    events.sort("time").write_parquet(str(ordered))
    print(f"sorted and written in {time.perf_counter() - started:.1f} s", flush=True)
    started = time.perf_counter()
    users = events.groupby("user").aggregate(ray.data.aggregate.Count(), ray.data.aggregate.Sum("amount")).to_pandas()
    print(f"{len(users)} users counted in {time.perf_counter() - started:.1f} s", flush=True)

    assert check_order(ordered) == count == users["count()"].sum()
    assert users["sum(amount)"].sum() == events.sum("amount")
    busiest = users.sort_values("count()", ascending=False).iloc[0]
    print(
        f"the busiest user is {busiest['user']:.0f}, with {busiest['count()']:,.0f} events; nothing lost, all in order"
    )


if __name__ == "__main__":
    main()
