"""Many nodes get the same object at once: how long until all have it, on networks larger than any we can try.

    python benchmarks/simulate_broadcast.py                          # 1 GB to 2 ... 1,000 nodes
    python benchmarks/simulate_broadcast.py --size 1048576 --nodes 50,1000 --json OUT
    python benchmarks/simulate_broadcast.py --deaths 20              # and 20 nodes die in the middle

The object stores are the real ones (`hpcray.core.object_store`): they decide who asks whom, and react to every message
and to the end of every chunk. Around them is a model. A network adapter sends one chunk after the other at full speed,
and receives likewise, both at once. A message takes `--latency`. A raylet needs `--handling` for each message that it
reads and each chunk whose end it hears of, one after the other.

The unit of the ratios is the time that one node alone takes. `direct` is what it would be if the first holder sent to
everybody: its adapter is the limit.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

from hpcray.common.ids import PUT_INDEX, make_proc, node_of, number_of, raylet_of
from hpcray.core import effects as fx
from hpcray.core.object_store.object_store import ObjectStore
from hpcray.protocol import messages as m


@dataclass
class Network:
    """What the model is told: bytes per second of an adapter each way, seconds."""

    bandwidth: float
    latency: float
    handling: float
    chunk: int


@dataclass
class Host:
    """One node: its store, when its raylet is free again, and its adapter each way."""

    store: ObjectStore
    raylet: float = 0.0
    out: float = 0.0
    into: float = 0.0
    receiving: dict[int, int] = field(default_factory=dict)


class Job:
    """Nodes on a network, in virtual time."""

    def __init__(self, nodes: int, size: int, network: Network) -> None:
        self.now = 0.0
        self.network = network
        self.hosts = [Host(ObjectStore(node, 2 * size + (1 << 20), chunk=network.chunk)) for node in range(nodes)]
        self.dead: set[int] = set()
        self.opened: dict[int, float] = {}
        self.bytes_out = [0] * nodes
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call it then."""
        self._count += 1
        heappush(self._queue, (when, self._count, call))

    def tell(self, when: float, node: int, event: Callable[[ObjectStore, float], list[fx.Effect]]) -> None:
        """The raylet of `node` hears of something then, and sees to it as soon as it has time."""
        self.at(when, lambda: self._handle(node, event))

    def run(self) -> None:
        """Until nothing moves any more."""
        while self._queue:
            self.now, _, call = heappop(self._queue)
            call()

    def kill(self, node: int, notice: float) -> None:
        """The node is gone; the others hear of it after `notice` seconds."""
        self.dead.add(node)
        for other in range(len(self.hosts)):
            self.tell(self.now + notice, other, lambda store, now: store.node_died(now, node))

    def _handle(self, node: int, event: Callable[[ObjectStore, float], list[fx.Effect]]) -> None:
        host = self.hosts[node]
        if node in self.dead:
            return
        host.raylet = max(host.raylet, self.now) + self.network.handling
        self.at(host.raylet, lambda: self._carry_out(node, event(host.store, self.now)))

    def _carry_out(self, node: int, effects: list[fx.Effect]) -> None:
        if node in self.dead:
            return
        host = self.hosts[node]
        for effect in effects:
            if isinstance(effect, fx.Send):
                self._message(node, effect.dest, effect.msg)
            elif isinstance(effect, fx.StartReceive):
                host.receiving[effect.tag] = effect.node
            elif isinstance(effect, fx.CancelReceive):
                if host.receiving.pop(effect.tag, None) is not None:  # else its end is about to be told
                    self._carry_out(node, host.store.receive_ended(self.now, effect.tag, "cancelled"))
            elif isinstance(effect, fx.StartSend):
                self._transfer(node, effect)

    def _message(self, node: int, dest: bytes, msg: m.Message) -> None:
        if number_of(dest):
            if isinstance(msg, m.Opened):
                self.opened[node] = self.now
            elif isinstance(msg, m.StoreError):
                raise RuntimeError(f"node {node}: {msg.reason}")
            return
        src = raylet_of(node)
        self.tell(self.now + self.network.latency, node_of(dest), lambda store, now: store.handle(now, src, msg))

    def _transfer(self, node: int, effect: fx.StartSend) -> None:
        source, dest = self.hosts[node], self.hosts[effect.node]
        seconds = effect.size / self.network.bandwidth
        start = max(self.now, source.out)
        source.out = start + seconds
        arrived = dest.into = max(start, dest.into) + seconds
        self.bytes_out[node] += effect.size
        self.at(arrived + self.network.latency, lambda: self._arrive(node, effect))

    def _arrive(self, node: int, effect: fx.StartSend) -> None:
        tag, dest = effect.tag, effect.node
        error = "the peer is gone" if dest in self.dead or node in self.dead else None
        if error is None and self.hosts[dest].receiving.pop(tag, -1) == node:
            self._handle(dest, lambda store, now: store.receive_ended(now, tag, None))
        self._handle(node, lambda store, now: store.send_ended(now, tag, error))


def broadcast(nodes: int, size: int, network: Network, seed: int, deaths: int = 0) -> tuple[float, Job]:
    """All other nodes open an object of node 0, in any order, within a tenth of a millisecond.

    Returns:
        Seconds until the last living one has it.
    """
    draw = random.Random(seed)
    job = Job(nodes, size, network)
    owner = make_proc(0, 1)
    ident = owner + (1).to_bytes(5, "big") + PUT_INDEX
    first = job.hosts[0].store
    for msg in (m.Create(ident, size), m.Seal(ident)):
        first.handle(0.0, owner, msg)
    for node in range(1, nodes):
        proc = make_proc(node, 1)
        open_ = m.Open(ident, size, [0])
        job.tell(
            draw.uniform(0.0, 1e-4), node, lambda store, now, proc=proc, open_=open_: store.handle(now, proc, open_)
        )
    middle = size / network.bandwidth / 2
    for node in draw.sample(range(1, nodes), deaths):
        job.at(middle * (1 + draw.random()), partial(job.kill, node, 0.01))
    job.run()
    living = [node for node in range(1, nodes) if node not in job.dead]
    missing = [node for node in living if node not in job.opened]
    if missing:
        raise RuntimeError(f"nodes {missing[:5]} never got the object")
    return max(job.opened[node] for node in living), job


def _open(proc: bytes, msg: m.Open, store: ObjectStore, now: float) -> list[fx.Effect]:
    return store.handle(now, proc, msg)


def measure(nodes: int, size: int, network: Network, deaths: int, seeds: int) -> dict[str, Any]:
    """Figures for so many readers; the median of several orders of asking."""
    alone, _ = broadcast(2, size, network, 0)
    times, job = [], None
    for seed in range(seeds):
        seconds, job = broadcast(nodes + 1, size, network, seed, min(deaths, nodes - 1))
        times.append(seconds)
    assert job is not None
    return {
        "nodes": nodes,
        "seconds": sorted(times)[len(times) // 2],
        "slowest": max(times),
        "alone": alone,
        "ratio": sorted(times)[len(times) // 2] / alone,
        "direct_ratio": max(1.0, nodes * size / network.bandwidth / alone),
        "most_sent": max(job.bytes_out) / size,
    }


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1,2,8,50,100,300,1000", help="numbers of readers (default: %(default)s)")
    parser.add_argument("--size", type=int, default=1 << 30, help="bytes of the object (default: 1 GiB)")
    parser.add_argument("--chunk", type=int, default=4 << 20, help="bytes of a chunk (default: 4 MiB)")
    parser.add_argument("--bandwidth", type=float, default=12.5e9, help="bytes/s each way (default: 100 Gbit/s)")
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds of a message (default: 20e-6)")
    parser.add_argument("--handling", type=float, default=30e-6, help="seconds a raylet needs per event (30e-6)")
    parser.add_argument("--deaths", type=int, default=0, help="so many nodes die in the middle")
    parser.add_argument("--seeds", type=int, default=3, help="orders of asking (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    network = Network(arguments.bandwidth, arguments.latency, arguments.handling, arguments.chunk)
    print(f"# {arguments.size} bytes, chunks of {arguments.chunk}, {arguments.bandwidth / 1e9:.1f} GB/s each way")
    print(f"{'nodes':>6} {'seconds':>10} {'x one':>7} {'x one, direct':>14} {'most sent by one':>17}")
    rows = []
    for nodes in map(int, arguments.nodes.split(",")):
        row = measure(nodes, arguments.size, network, arguments.deaths, arguments.seeds)
        rows.append(row)
        print(
            f"{nodes:>6} {row['seconds']:>10.4f} {row['ratio']:>7.2f} {row['direct_ratio']:>14.1f} "
            f"{row['most_sent']:>15.1f} x",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
