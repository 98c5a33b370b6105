"""One object to all other ranks at once, for real, beside a transfer to one of them.

    python benchmarks/broadcast.py                               # 8 ranks of this host, shared memory
    python benchmarks/broadcast.py --rate 800mbit --json OUT     # each rank behind a network adapter of that speed

Nodes of one host would read the object where it is; here each gets a copy (`HPCRAY_SAME_HOST=0`), as on a host of its
own. Ranks of one host share its memory bus and its cores, so seven copies cost seven times the work of one, however
they are made. With `--rate` (root, Linux, `ip` and `tc`) each rank lives in a network namespace of its own, behind a
virtual adapter that lets through so much each way (tbf), and UCX uses TCP: as between hosts, the adapters are the
limit. All of it is gone when the benchmark ends.

Readers compare every byte, outside of the measured time. `one` and `all` take turns; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

STEP = 1 << 20
ROOT = Path(__file__).resolve().parents[1]
PASSED_ON = (
    "UCX_TLS",
    "UCX_NET_DEVICES",
    "HPCRAY_SAME_HOST",
    "HPCRAY_OBJECT_STORE_MEMORY",
    "HPCRAY_PRESTART",
    "PYTHONPATH",
    "PATH",
)
SUBNET = "10.213.0"


def inside(size: int, rounds: int, path: str) -> None:
    """The job; figures go to the file."""
    import hpcray as ray

    ray.init()
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy

    class Reader:
        def ready(self) -> bool:
            return True

        def read(self, refs: list[Any], seed: int) -> tuple[float, bool]:
            started = time.perf_counter()
            value = ray.get(refs[0])
            spent = time.perf_counter() - started
            pieces = range(0, value.size, STEP)
            good = all(np.array_equal(value[at : at + STEP], content(seed, at, value.size)) for at in pieces)
            return spent, good

    here = ray.get_runtime_context().get_node_id()
    others = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
    readers = [
        ray.remote(Reader).options(num_cpus=0, scheduling_strategy=affinity(one, soft=False)).remote() for one in others
    ]
    ray.get([reader.ready.remote() for reader in readers])
    times: dict[str, list[float]] = {"one": [], "all": []}
    wrong = 0
    for number in range(2 * (rounds + 1)):
        name, asked = ("one", readers[:1]) if number % 2 == 0 else ("all", readers)
        ref = ray.put(np.concatenate([content(number, at, size // 8) for at in range(0, size // 8, STEP)]))
        got = ray.get([reader.read.remote([ref], number) for reader in asked])
        wrong += sum(not good for _, good in got)
        if number >= 2:  # the first ones connect, and touch new memory
            times[name].append(max(spent for spent, _ in got))
        del ref
    medians = {name: statistics.median(each) for name, each in times.items()}
    figures = {**medians, "ratio": medians["all"] / medians["one"], "times": times, "wrong": wrong, "bytes": size}
    Path(path).write_text(json.dumps({**figures, "readers": len(readers)}))
    ray.shutdown()


def content(seed: int, at: int, total: int) -> np.ndarray[Any, Any]:
    """Numbers `at` to `at + STEP` of an object of `total` numbers."""
    return np.arange(at, min(at + STEP, total)) * 2654435761 + seed


def make_network(ranks: int, rate: str, scratch: Path) -> list[str]:
    """Namespaces with adapters on a bridge, in this process's own network namespace. Returns the start of an mpirun."""
    run("mount", "-t", "tmpfs", "none", "/run/netns")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge0", "type", "bridge")
    run("ip", "addr", "add", f"{SUBNET}.254/24", "dev", "bridge0")
    run("ip", "link", "set", "bridge0", "up")
    names = [f"rank{rank}" for rank in range(ranks)]
    hosts = scratch / "hosts"
    lines = [f"{SUBNET}.{rank + 1} {name}" for rank, name in enumerate(names)]
    hosts.write_text("\n".join([Path("/etc/hosts").read_text(), *lines, ""]))
    run("mount", "--bind", str(hosts), "/etc/hosts")
    for rank, name in enumerate(names):
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"port{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"port{rank}", "master", "bridge0", "up")
        within = ("ip", "netns", "exec", name)
        run(*within, "ip", "link", "set", "lo", "up")
        run(*within, "ip", "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "eth0")
        run(*within, "ip", "link", "set", "eth0", "up")
        limit = ("root", "tbf", "rate", rate, "burst", "1mb", "latency", "50ms")
        run("tc", "qdisc", "add", "dev", f"port{rank}", *limit)
        run(*within, "tc", "qdisc", "add", "dev", "eth0", *limit)
    agent = scratch / "agent"
    agent.write_text(
        '#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts sh -c "hostname $host; $*"\n', "utf-8"
    )
    agent.chmod(0o700)
    os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--prtemca", "plm_ssh_agent", str(agent)]
    command += ["--host", ",".join(f"{name}:1" for name in names), "-n", str(ranks)]
    for name in PASSED_ON:
        command += ["-x", name] if name in os.environ else []
    return [*command, sys.executable, "-m", "hpcray"]


def run(*command: str) -> None:
    """Run it; it must succeed."""
    subprocess.run(command, check=True)


def main() -> int:
    """Start the job, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--size", type=int, default=1_000_000_000, help="bytes of the object (default: 1e9)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", help="speed of each rank's adapter, as tc has it: 800mbit")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.size, arguments.rounds, arguments.inside)
        return 0
    if arguments.rate and not arguments.apart:
        missing = [tool for tool in ("ip", "tc", "unshare", "mpirun") if shutil.which(tool) is None]
        if os.geteuid() or missing:
            sys.exit(f"--rate needs root and {', '.join(missing) or 'nothing else'}; hint: leave it out")
        os.makedirs("/run/netns", exist_ok=True)
        os.execvp("unshare", ["unshare", "-n", "-m", sys.executable, *sys.argv, "--apart"])
    store = str(2 * arguments.size + (64 << 20))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ |= {
        "HPCRAY_SAME_HOST": "0",
        "HPCRAY_OBJECT_STORE_MEMORY": store,
        "HPCRAY_PRESTART": "1",
        "PYTHONPATH": path,
    }
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        start = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(arguments.ranks)]
        if arguments.rate:
            start = make_network(arguments.ranks, arguments.rate, Path(scratch))
        script = [str(Path(__file__).resolve()), "--inside", str(file)]
        run(*start, *script, "--size", str(arguments.size), "--rounds", str(arguments.rounds))
        if arguments.rate:
            run("umount", "/etc/hosts")
        figures: dict[str, Any] = json.loads(file.read_text())
    where = f"adapters of {arguments.rate}" if arguments.rate else "shared memory of one host"
    print(f"# {figures['bytes'] / 1e9:g} GB, {where}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"to one reader           {figures['one']:>8.2f} s")
    print(f"to {figures['readers']} readers at once    {figures['all']:>8.2f} s   {figures['ratio']:.2f} x")
    print(f"wrong                   {figures['wrong']:>8}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**figures, "rate": arguments.rate}, indent=1))
    return 1 if figures["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
