"""Objects of mixed sizes come and go on several nodes: does the store stay whole?

    python benchmarks/churn.py                       # 200,000 objects on 4 ranks of this machine
    python benchmarks/churn.py --objects 2000        # a short one
    python benchmarks/churn.py --spill               # three times as much is alive as the stores hold

It starts the job itself (`hpcray-launch`). On every node an actor puts objects of 1 KB to 4 MB, drops others at random,
and reads some of its neighbor's, checked bit by bit; twice it fills the store until an object does not fit. At the end
everything is dropped. It prints, and judges:

- utilisation: the share of the arena that was in use when an object did not fit (fragmentation takes the rest);
- held: objects and bytes in all stores after everything was dropped, which must be 0;
- private memory and descriptors of all processes, and names in /dev/shm, early and late, which must not grow.

Spilling is switched off: an object that does not fit must not go to disk instead. With `--spill` it is on, objects have
at most 1 MB, nothing is filled, and what was spilled must be gone from disk in the end, too (`held`, and descriptors
beyond those of the files that hold what is alive). Exit code 1 when a figure is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import hpcray as ray

KB, MB = 1 << 10, 1 << 20
SMALLEST, LARGEST = KB, 4 * MB
WANTED = 0.9
GROWTH = 32 * MB  # per node: what Python's and the system's allocators may keep beyond what they had early
FULL = 0.75  # of the arena: how much is alive while it churns
SPILLED = 3.0  # the same, with spilling
FILLS = 2
PATIENCE = 60.0


def content(seed: int, size: int) -> np.ndarray:
    """The bytes of one object: cheap to make, and no two are alike."""
    data = np.arange(seed, seed + -(-size // 8), dtype="u8").view("u1")
    return data[:size]


class Churner:
    """Lives on one node and does what a busy program does there."""

    def __init__(self, node: int, capacity: int, spill: bool) -> None:
        self._node = node
        self._random = random.Random(node)
        self._seed = node << 40
        self._largest = MB if spill else LARGEST
        self._limit = int(capacity * (SPILLED if spill else FULL)) - self._largest
        self._live: list[tuple[Any, int, int]] = []
        self._bytes = 0

    def churn(self, count: int) -> list[tuple[list[Any], int, int]]:
        """Make `count` objects, dropping others. Some of them, for a neighbor to read."""
        for _ in range(count):
            self._drop(self._limit)
            self._put()
            if self._random.random() < 0.3:
                self._drop_one()
        picked = self._random.sample(self._live, min(4, len(self._live)))
        return [([ref], seed, size) for ref, seed, size in picked]

    def read(self, others: list[tuple[list[Any], int, int]]) -> int:
        """Read objects of other nodes; how many were not as they were written."""
        wrong = 0
        for (ref,), seed, size in others:
            wrong += not np.array_equal(ray.get(ref), content(seed, size))
        return wrong

    def check(self) -> int:
        """How many of the living objects are not as they were written."""
        return sum(not np.array_equal(ray.get(ref), content(seed, size)) for ref, seed, size in self._live)

    def fill(self) -> tuple[float, int, str]:
        """Put until an object does not fit: the share of the arena that is in use then, its size, and the error."""
        while True:
            size = self._size()
            try:
                self._put(size)
            except ray.exceptions.ObjectStoreFullError as error:
                (row,) = [row for row in stores() if row["node"] == self._node]
                return row["used"] / row["capacity"], size, str(error)

    def clear(self) -> None:
        """Drop everything."""
        self._live.clear()
        self._bytes = 0

    def _size(self) -> int:
        low, high = np.log(SMALLEST), np.log(self._largest)
        return int(np.exp(self._random.uniform(low, high)))

    def _put(self, size: int = 0) -> None:
        size = size or self._size()
        self._seed += size
        self._live.append((ray.put(content(self._seed, size)), self._seed, size))
        self._bytes += size

    def _drop(self, limit: int) -> None:
        while self._bytes > limit:
            self._drop_one()

    def _drop_one(self) -> None:
        if self._live:
            at = self._random.randrange(len(self._live))
            self._live[at], self._live[-1] = self._live[-1], self._live[at]
            self._bytes -= self._live.pop()[2]


def process_numbers() -> dict[str, int]:
    """Of all processes of this job: private memory in bytes, descriptors; and how many names are in /dev/shm."""
    mark = f"HPCRAY_CHURN={os.environ['HPCRAY_CHURN']}".encode()
    private = descriptors = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                status = Path(f"/proc/{name}/status").read_text()
                private += KB * int(status.partition("RssAnon:")[2].split()[0])
                descriptors += len(os.listdir(f"/proc/{name}/fd"))
        except (OSError, IndexError):  # it is gone
            pass
    return {"rss": private, "fds": descriptors, "shm": len(os.listdir("/dev/shm"))}


def stores() -> list[dict[str, Any]]:
    """What the nodes' stores say of themselves."""
    from hpcray.runtime.core_worker.core_worker import need_process

    return need_process().diagnostics.list_stores(0, PATIENCE)


def held() -> dict[str, int]:
    """What all stores have, in memory and on disk; `files`: on disk, open in the raylets."""
    rows = stores()
    return {
        "objects": sum(row["objects"] for row in rows),
        "bytes": sum(row["used"] for row in rows),
        "on_disk": sum(row["on_disk"] for row in rows),
        "files": sum(row["segments"] for row in rows),
        "spilled": sum(row["spilled_bytes"] for row in rows),
        "restored": sum(row["restored"] for row in rows),
    }


def inside(objects: int, spill: bool) -> dict[str, Any]:
    """The driver."""
    ray.init()
    nodes = stores()
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    kind = ray.remote(Churner)
    where = {node["Index"]: node["NodeID"] for node in ray.nodes()}
    actors = [
        kind.options(num_cpus=0, scheduling_strategy=strategy(where[node["node"]], soft=False)).remote(
            node["node"], node["capacity"], spill
        )
        for node in nodes
    ]
    rounds = 20
    each = max(1, objects // len(actors) // rounds)
    before: dict[str, int] = {}
    wrong, used, peak = 0, [], 0
    begun = time.monotonic()
    for turn in range(rounds):
        offered = ray.get([actor.churn.remote(each) for actor in actors])
        shifted = offered[1:] + offered[:1]
        wrong += sum(ray.get([actor.read.remote(some) for actor, some in zip(actors, shifted, strict=True)]))
        del offered, shifted
        if turn == rounds // 10:
            before = process_numbers()
            before["fds"] -= held()["files"]
        if spill:
            continue
        if turn % (rounds // FILLS) == rounds // FILLS - 1:
            used += ray.get([actor.fill.remote() for actor in actors])
            wrong += sum(ray.get([actor.check.remote() for actor in actors]))
    if spill:
        wrong += sum(ray.get([actor.check.remote() for actor in actors]))
    seconds = time.monotonic() - begun
    after, full = process_numbers(), held()
    after["fds"] -= full["files"]
    peak = max(row["high_water"] for row in stores())
    ray.get([actor.clear.remote() for actor in actors])
    deadline = time.monotonic() + PATIENCE
    while (left := held())["objects"] + left["on_disk"] and time.monotonic() < deadline:
        time.sleep(0.05)
    # The disk takes a while to give up what was on it.
    while (cleared := process_numbers())["fds"] > before["fds"] and time.monotonic() < deadline:
        time.sleep(0.2)
    return {
        "nodes": len(actors),
        "objects": each * rounds * len(actors),
        "seconds": seconds,
        "wrong": wrong,
        "utilisation": sorted(used),
        "held_objects": left["objects"],
        "held_bytes": left["bytes"] + left["on_disk"] + left["files"],
        "high_water": peak,
        "full": full,
        "early": before,
        "late": after,
        "cleared": cleared,
    }


def judge(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    early, late = found["early"], found["late"]
    bad = []
    if found["wrong"]:
        bad.append(f"{found['wrong']} objects were not as they were written")
    used, size, error = found["utilisation"][0] if found["utilisation"] else (1.0, 0, "")
    if used < WANTED:
        bad.append(f"an object of {size} bytes did not fit when {used:.1%} of the arena were in use: {error}")
    if found["held_bytes"] or found["held_objects"]:
        bad.append(f"{found['held_objects']} objects of {found['held_bytes']} bytes are left")
    if late["rss"] > early["rss"] + GROWTH * found["nodes"]:
        bad.append(f"private memory grew from {early['rss'] / MB:.0f} to {late['rss'] / MB:.0f} MB")
    if late["fds"] > early["fds"] + found["nodes"]:
        bad.append(f"descriptors grew from {early['fds']} to {late['fds']}")
    if found["cleared"]["fds"] > early["fds"] + found["nodes"]:
        bad.append(f"{found['cleared']['fds']} descriptors are left of {early['fds']} early on")
    return bad


def show(found: dict[str, Any]) -> None:
    """Print the figures."""
    early, late, used = found["early"], found["late"], found["utilisation"]
    rate = found["objects"] / found["seconds"]
    print(f"{found['objects']} objects on {found['nodes']} nodes in {found['seconds']:.1f} s ({rate:.0f} /s)")
    print(f"not as written        {found['wrong']}")
    if used:
        print(f"utilisation at failure to fit   {used[0][0]:.1%} to {used[-1][0]:.1%}")
    if found["full"]["spilled"]:
        full = found["full"]
        print(f"written to disk       {full['spilled'] / MB / KB:.1f} GB, {full['restored']} objects read back")
        print(f"on disk before the end   {full['on_disk'] / MB:.0f} MB in {full['files']} files")
    print(f"held at the end       {found['held_objects']} objects, {found['held_bytes']} bytes")
    print(f"private memory        {early['rss'] / MB:.1f} -> {late['rss'] / MB:.1f} MB, all processes")
    print(f"descriptors           {early['fds']} -> {late['fds']}; when all was dropped {found['cleared']['fds']}")
    print(f"names in /dev/shm     {early['shm']} -> {late['shm']}; after the job {found['shm_left']}")


def outside(args: argparse.Namespace) -> int:
    """Start the job, and look at what it leaves."""
    mark = f"{os.getpid()}.{time.time_ns()}"
    root = str(Path(__file__).resolve().parent.parent)
    environ = {
        **os.environ,
        "HPCRAY_CHURN": mark,
        "HPCRAY_OBJECT_STORE_MEMORY": str(args.store * MB),
        "HPCRAY_SPILL_THRESHOLD": "0.8" if args.spill else "0",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    shm = set(os.listdir("/dev/shm"))
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(args.nodes), __file__]
    command += ["--inside", "--objects", str(args.objects), *(["--spill"] if args.spill else [])]
    ended = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode or not lines:
        print(ended.stdout, f"the job ended with code {ended.returncode}", file=sys.stderr)
        return 1
    found = json.loads(lines[-1])
    found["shm_left"] = len(set(os.listdir("/dev/shm")) - shm)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    show(found)
    bad = judge(found)
    for text in bad:
        print(f"NOT MET: {text}")
    return int(bool(bad))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=200_000, help="how many objects, on all nodes together")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--store", type=int, default=512, help="MB of each node's store")
    parser.add_argument("--spill", action="store_true", help="let more be alive than the stores hold")
    parser.add_argument("--json", default="", help="write the figures there")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(inside(args.objects, args.spill)), flush=True)
        return 0
    return outside(args)


if __name__ == "__main__":
    sys.exit(main())
