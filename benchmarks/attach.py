"""How fast a driver outside of its job is, beside what the same pipe carries raw.

    python benchmarks/attach.py slurm://JOBID        on a login node
    python benchmarks/attach.py ssh://HOST/JOBID     on a laptop

Raw: `cat` at the far end of the same srun or ssh line, in writes of 1 MB; its round trip is that of one byte.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import threading
import time

import numpy as np

import hpcray as ray
from hpcray.attach.client import parse_place

_MB = 1_000_000


def raw_line(address: str) -> list[str]:
    """The command that has `cat` at the far end."""
    place = parse_place(address, os.environ)
    srun = f"srun --jobid={place.job} --overlap --unbuffered --quiet --mpi=none -N1 -n1 cat"
    return ["ssh", "-T", *place.options, place.host, srun] if place.host else srun.split()


def raw(address: str, size: int) -> tuple[float, float]:
    """Seconds of a round trip, and bytes per second there and back again at once."""
    with subprocess.Popen(raw_line(address), stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin is not None and child.stdout is not None
        trips = []
        for _ in range(100):
            begun = time.perf_counter()
            child.stdin.write(b"\n")
            child.stdout.read(1)
            trips.append(time.perf_counter() - begun)

        def write() -> None:
            piece, left = memoryview(bytes(_MB)), size
            while left > 0:
                left -= child.stdin.write(piece[: min(left, _MB)]) or 0  # type: ignore[union-attr]

        begun = time.perf_counter()
        threading.Thread(target=write).start()
        got = 0
        while got < size:
            got += len(child.stdout.read(_MB))
        rate = size / (time.perf_counter() - begun)
        child.stdin.close()
    return statistics.median(trips[10:]), rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("--megabytes", type=int, default=1000)
    options = parser.parse_args()
    size = options.megabytes * _MB
    trip, rate = raw(options.address, size)
    print(f"raw round trip                  {trip * 1e3:9.2f} ms")
    print(f"raw, there and back             {rate / _MB:9.0f} MB/s")
    ray.init(options.address)

    @ray.remote(num_cpus=0.1)
    def small(x: int) -> int:
        return x

    @ray.remote(num_cpus=0.1)
    def length(block: object) -> int:
        return len(block)  # type: ignore[arg-type]

    @ray.remote(num_cpus=0.1)
    def made(count: int) -> np.ndarray:
        return np.zeros(count, np.uint8)

    ray.get([small.remote(i) for i in range(200)])
    begun = time.perf_counter()
    ray.get([small.remote(i) for i in range(10_000)])
    print(f"10,000 small tasks              {10_000 / (time.perf_counter() - begun):9.0f} /s")
    trips = []
    for i in range(100):
        begun = time.perf_counter()
        ray.get(small.remote(i))
        trips.append(time.perf_counter() - begun)
    print(f"a small task, there and back    {statistics.median(trips) * 1e3:9.2f} ms")
    block = np.ones(size, np.uint8)
    begun = time.perf_counter()
    ref = ray.put(block)
    ray.get(length.remote(ref))
    print(f"put, until a task has it        {size / (time.perf_counter() - begun) / _MB:9.0f} MB/s")
    del ref
    ref = made.remote(size)
    ray.wait([ref], fetch_local=False)
    begun = time.perf_counter()
    assert len(ray.get(ref)) == size
    print(f"get                             {size / (time.perf_counter() - begun) / _MB:9.0f} MB/s")


if __name__ == "__main__":
    main()
