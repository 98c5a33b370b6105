"""A job whose data is several times what its object stores hold: how fast it goes to disk and back, beside the disk.

    python benchmarks/spill.py                                   # 4 ranks, stores of 256 MB, five times as much data
    python benchmarks/spill.py --store 1024 --times 5 --json OUT

Every rank puts blocks of random bytes until the stores together are asked to hold `--times` their size; then each reads
the blocks of the next rank, which come from that rank's disk, and compares every bit. The disk by itself is measured in
the same run, before the job, with direct writes and reads of 4 MB in the same directory: what `dd oflag=direct` does.

The ranks of this host share one disk. `written` and `read` count what the ranks put and got, so a part of it never
needs the disk; `spilled` is what was written to disk by all of them.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

PIECE = 4 << 20
BLOCK = 8 << 20


def disk_itself(directory: str, size: int) -> dict[str, float]:
    """MB/s of direct writes and of direct reads, in pieces; what of them is not possible is missing."""
    fd, path = tempfile.mkstemp(prefix="hpcray-bench-", dir=directory)
    os.close(fd)
    piece = mmap.mmap(-1, PIECE)
    piece.write(np.random.default_rng(0).bytes(PIECE))
    figures: dict[str, float] = {}
    try:
        for name, flags, call in (("write", os.O_WRONLY, os.pwritev), ("read", os.O_RDONLY, os.preadv)):
            try:
                fd = os.open(path, flags | os.O_DIRECT)
            except OSError:
                continue  # memory, for example, has no direct access
            started = time.perf_counter()
            for at in range(0, size, PIECE):
                call(fd, [piece], at)
            os.fsync(fd)
            figures[name] = size / (time.perf_counter() - started) / 1e6
            os.close(fd)
    finally:
        os.unlink(path)
    return figures


def inside(blocks: int, path: str) -> None:
    """The job; figures go to the file."""
    import hpcray as ray
    from hpcray.runtime.refs import need_process

    ray.init()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    class Keeper:
        def __init__(self) -> None:
            # To draw random numbers for each block would take longer than the disk does.
            self.random = np.random.default_rng(0).integers(0, 1 << 62, BLOCK // 8)

        def block(self, seed: int) -> np.ndarray[Any, Any]:
            return self.random ^ np.int64(seed * 0x9E3779B97F4A7 % (1 << 62))

        def fill(self, seeds: list[int]) -> tuple[list[Any], float]:
            refs, spent = [], 0.0
            for seed in seeds:
                made = self.block(seed)
                started = time.perf_counter()
                refs.append(ray.put(made))
                spent += time.perf_counter() - started
            return refs, spent

        def check(self, seeds: list[int], refs: list[Any]) -> tuple[int, float]:
            good, spent = 0, 0.0
            for seed, ref in zip(seeds, refs, strict=True):
                started = time.perf_counter()
                value = ray.get(ref)
                spent += time.perf_counter() - started
                good += bool(np.array_equal(value, self.block(seed)))
                del value
            return good, spent

    where = [affinity(node["NodeID"], soft=False) for node in ray.nodes()]
    keepers = [ray.remote(Keeper).options(num_cpus=0, scheduling_strategy=one).remote() for one in where]
    seeds = [list(range(number * blocks, (number + 1) * blocks)) for number in range(len(keepers))]
    started = time.perf_counter()
    filled = ray.get([keeper.fill.remote(mine) for keeper, mine in zip(keepers, seeds, strict=True)])
    fill = time.perf_counter() - started
    stores = need_process().survey.look(0, 60.0)
    started = time.perf_counter()
    jobs = []
    for number, keeper in enumerate(keepers):
        other = (number + 1) % len(keepers)
        jobs.append(keeper.check.remote(seeds[other], filled[other][0]))
    checked = ray.get(jobs)
    check = time.perf_counter() - started
    after = need_process().survey.look(0, 60.0)
    total = blocks * len(keepers)
    figures = {
        "blocks": total,
        "wrong": total - sum(good for good, _ in checked),
        "spilled_bytes": sum(node["spilled_bytes"] for node in stores),
        "from_disk": sum(node["from_disk"] for node in after),
        "restored": sum(node["restored"] for node in after),
        "fill_seconds": fill,
        "put_seconds": max(spent for _, spent in filled),
        "check_seconds": check,
        "get_seconds": max(spent for _, spent in checked),
    }
    Path(path).write_text(json.dumps(figures))
    ray.shutdown()


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
    from hpcray.host.spill_files import spill_directory

    directory = spill_directory(arguments.dir or os.environ.get("HPCRAY_SPILL_DIR", ""))
    store = arguments.store << 20
    disk = disk_itself(directory, max(256 << 20, store))
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        environ = {**os.environ, "HPCRAY_OBJECT_STORE_MEMORY": str(store), "HPCRAY_SPILL_DIR": directory}
        command = [
            sys.executable,
            "-m",
            "hpcray.cluster.launch",
            "-n",
            str(arguments.ranks),
            str(Path(__file__).resolve()),
        ]
        blocks = str(int(store * arguments.times) // BLOCK)
        subprocess.run([*command, "--inside", blocks, str(file)], check=True, env=environ)
        figures = json.loads(file.read_text())
    size = figures["blocks"] * BLOCK
    figures |= {
        "directory": directory,
        "disk": disk,
        "bytes": size,
        "write_mb_s": size / figures["fill_seconds"] / 1e6,
        "put_mb_s": size / figures["put_seconds"] / 1e6,
        "read_mb_s": size / figures["check_seconds"] / 1e6,
        "get_mb_s": size / figures["get_seconds"] / 1e6,
    }
    print(f"# {arguments.ranks} ranks, {arguments.store} MB of store each, {size / 1e9:.1f} GB of data in {directory}")
    for name, value in disk.items():
        print(f"disk itself, direct {name:<6} {value:>10.0f} MB/s")
    print(f"written (spilled {figures['spilled_bytes'] / 1e9:.1f} GB)   {figures['write_mb_s']:>10.0f} MB/s")
    print(f"    of that in put            {figures['put_mb_s']:>10.0f} MB/s")
    print(f"read by another rank          {figures['read_mb_s']:>10.0f} MB/s")
    print(f"    of that in get            {figures['get_mb_s']:>10.0f} MB/s")
    print(f"blocks that were wrong        {figures['wrong']:>10}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
