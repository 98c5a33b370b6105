"""A job whose data is several times what its object stores hold: how fast it goes to disk and back, beside the disk.

    python benchmarks/spill.py                                   # 4 ranks, stores of 256 MB, five times as much data
    python benchmarks/spill.py --store 1024 --times 5 --json OUT

Every rank puts blocks until the stores together are asked to hold `--times` their size (*written*); then each reads the
blocks of the next rank, one by one, which come from that rank's disk (*read*); then each reads them all again and
compares every bit (*compared*). The bytes of a block are random, and each sector of 512 bytes has the block's number
and its own in it, so that nothing can be mistaken for anything else.

The disk by itself is measured in the same run, before the job and after it: as many processes as there are ranks, each
writing and then reading as many bytes as a rank puts, past the page cache, in pieces of one block, in that directory.

The ranks of this host share one disk. A part of what the ranks put and get never needs it, so the share of the disk's
speed is taken from what did: `spilled` was written to disk by all of them, `loaded` was read from it.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 8 << 20
SECTOR = 512 // 8
WANTED = 0.5


def disk_itself(directory: str, ranks: int, size: int) -> dict[str, float]:
    """MB/s of direct writes and of direct reads by `ranks` processes, `size` bytes each; nothing where the file system
    has no direct access."""
    barrier, queue = multiprocessing.Barrier(ranks), multiprocessing.SimpleQueue()
    writers = [
        multiprocessing.Process(target=_use_disk, args=(directory, size, barrier, queue), daemon=True)
        for _ in range(ranks)
    ]
    for writer in writers:
        writer.start()
    times = [queue.get() for _ in writers]
    for writer in writers:
        writer.join()
    if None in times:
        return {}
    speeds = {}
    for at, name in ((0, "write"), (2, "read")):
        seconds = max(one[at + 1] for one in times) - min(one[at] for one in times)
        speeds[name] = ranks * size / seconds / 1e6
    return speeds


def _use_disk(directory: str, size: int, barrier: Any, queue: Any) -> None:
    piece = mmap.mmap(-1, BLOCK)
    piece.write(np.random.default_rng(0).bytes(BLOCK))
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    except OSError:
        queue.put(None)
        return
    times = []
    for call in (os.pwritev, os.preadv):
        barrier.wait()
        times.append(time.monotonic())
        for at in range(0, size, BLOCK):
            call(fd, [piece], at)
        os.fsync(fd)
        times.append(time.monotonic())
    queue.put(times)


def inside(blocks: int, path: str) -> None:
    """The job; figures go to the file."""
    import hpcray as ray
    from hpcray.runtime.core_worker.core_worker import need_process

    ray.init()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    class Keeper:
        def __init__(self) -> None:
            self.block = np.random.default_rng(0).integers(0, 1 << 62, BLOCK // 8)
            self.stamps = self.block[::SECTOR]

        def stamp(self, seed: int) -> Any:
            self.stamps[:] = np.arange(seed << 32, (seed << 32) + len(self.stamps))
            return self.block

        def fill(self, seeds: list[int]) -> list[Any]:
            return [ray.put(self.stamp(seed)) for seed in seeds]

        def read(self, seeds: list[int], refs: list[Any]) -> int:
            """Read one by one; only the stamps are looked at."""
            good = 0
            for seed, ref in zip(seeds, refs, strict=True):
                self.stamp(seed)
                good += bool(np.array_equal(ray.get(ref)[::SECTOR], self.stamps))
            return good

        def compare(self, seeds: list[int], refs: list[Any]) -> int:
            """Read one by one, and look at every bit."""
            return sum(
                bool(np.array_equal(ray.get(ref), self.stamp(seed))) for seed, ref in zip(seeds, refs, strict=True)
            )

    where = [affinity(node["NodeID"], soft=False) for node in ray.nodes()]
    keepers = [ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=one).remote() for one in where]
    ray.get([keeper.stamp.remote(0) for keeper in keepers])
    seeds = [list(range(number * blocks, (number + 1) * blocks)) for number in range(len(keepers))]
    figures: dict[str, Any] = {"blocks": blocks * len(keepers)}

    def stores(name: str) -> int:
        return sum(node[name] for node in need_process().diagnostics.list_stores(0, 60.0))

    started = time.perf_counter()
    filled = ray.get([keeper.fill.remote(mine) for keeper, mine in zip(keepers, seeds, strict=True)])
    figures["write_seconds"] = time.perf_counter() - started
    figures["spilled_bytes"] = stores("spilled_bytes")
    turned = [filled[(number + 1) % len(keepers)] for number in range(len(keepers))]
    theirs = [seeds[(number + 1) % len(keepers)] for number in range(len(keepers))]
    for method in ("read", "compare"):
        before = stores("loaded_bytes")
        started = time.perf_counter()
        jobs = [
            getattr(keeper, method).remote(some, refs)
            for keeper, some, refs in zip(keepers, theirs, turned, strict=True)
        ]
        figures[f"{method}_wrong"] = figures["blocks"] - sum(ray.get(jobs))
        figures[f"{method}_seconds"] = time.perf_counter() - started
        figures[f"{method}_loaded_bytes"] = stores("loaded_bytes") - before
    Path(path).write_text(json.dumps(figures))
    ray.shutdown()


def run_job(arguments: argparse.Namespace, directory: str) -> dict[str, Any]:
    """The job's figures, from its own launch."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        store = str(arguments.store << 20)
        environ = {**os.environ, "HPCRAY_OBJECT_STORE_MEMORY": store, "HPCRAY_SPILL_DIR": directory}
        command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(arguments.ranks)]
        command += [str(Path(__file__).resolve()), "--inside", str(blocks_of(arguments)), str(file)]
        subprocess.run(command, check=True, env=environ)
        figures: dict[str, Any] = json.loads(file.read_text())
    size = figures["blocks"] * BLOCK
    figures["written"] = size / figures["write_seconds"] / 1e6
    figures["spilled"] = figures["spilled_bytes"] / figures["write_seconds"] / 1e6
    for method in ("read", "compare"):
        figures[method] = size / figures[f"{method}_seconds"] / 1e6
        figures[f"{method}_loaded"] = figures[f"{method}_loaded_bytes"] / figures[f"{method}_seconds"] / 1e6
    return figures


def blocks_of(arguments: argparse.Namespace) -> int:
    """Blocks that each rank puts."""
    return int((arguments.store << 20) * arguments.times) // BLOCK


def show(figures: dict[str, Any]) -> None:
    """Print what was found."""
    for name, value in figures["disk"].items():
        parts = ", ".join(f"{one[name]:.0f}" for one in figures["disk_runs"])
        print(f"disk itself, {name:<6} {value:>20.0f} MB/s  ({parts})")
    for name, on_disk, kind in (("written", "spilled", "write"), ("read", "read_loaded", "read")):
        share = f"{figures['share'][kind]:.2f} of the disk" if kind in figures["share"] else ""
        print(f"{name:<20} {figures[name]:>20.0f} MB/s  (disk part {figures[on_disk]:.0f} MB/s: {share})")
    print(f"read and compared    {figures['compare']:>20.0f} MB/s  (disk part {figures['compare_loaded']:.0f} MB/s)")
    print(f"blocks that were wrong {figures['wrong']:>18}")


def main() -> int:
    """Measure the disk, run the job, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--store", type=int, default=256, help="MB of each rank's store (default: 256)")
    parser.add_argument("--times", type=float, default=5.0, help="data, in sizes of all stores (default: 5)")
    parser.add_argument("--dir", help="where to spill (default: as hpcray chooses)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--inside", nargs=2, metavar=("BLOCKS", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(int(arguments.inside[0]), arguments.inside[1])
        return 0
    from hpcray.platform.spill_files import spill_directory

    directory = spill_directory(arguments.dir or os.environ.get("HPCRAY_SPILL_DIR", ""))
    each = blocks_of(arguments) * BLOCK
    runs = [disk_itself(directory, arguments.ranks, each)]
    figures = run_job(arguments, directory)
    runs.append(disk_itself(directory, arguments.ranks, each))
    disk = {name: sum(run[name] for run in runs) / len(runs) for name in runs[0]}
    figures |= {"directory": directory, "disk": disk, "disk_runs": runs}
    figures["wrong"] = figures["read_wrong"] + figures["compare_wrong"]
    parts = {"write": figures["spilled"], "read": figures["read_loaded"]}
    figures["share"] = {kind: parts[kind] / speed for kind, speed in disk.items()}
    size = figures["blocks"] * BLOCK / 1e9
    print(f"# {arguments.ranks} ranks, {arguments.store} MB of store each, {size:.1f} GB of data in {directory}")
    show(figures)
    slow = [kind for kind, share in figures["share"].items() if share < WANTED]
    for kind in slow:
        print(f"NOT MET: {kind} reaches less than {WANTED} of the disk's own speed")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))
    return 1 if figures["wrong"] or slow else 0


if __name__ == "__main__":
    sys.exit(main())
