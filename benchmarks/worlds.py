"""Rows of `micro.py` between two nodes of this host: as two ranks of one world, and in two worlds, in turns.

    python benchmarks/worlds.py
    python benchmarks/worlds.py --wires --rounds 5 --json worlds.json

`one world`: two ranks of one mpirun. `two worlds`: a job of one node, and a node that has joined it. `joined`: two
ranks of one mpirun, and a node that has joined them. With `--wires` the nodes do not use that they are on one host:
what goes between them goes over MPI within a world, and over UCX between worlds. A row's figure is its median over the
rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from micro import Result, measure, ratio, show

SETUPS = {"one world": (2, False), "two worlds": (1, True), "joined": (2, True)}
"""Ranks of the first world, and whether the other node is one that joins."""
_CPUS = 2


def main() -> None:
    """Run all set-ups in turn and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", default="cross-node", metavar="REGEX", help="only rows whose name matches (default cross-node)")
    add("--setups", default=",".join(SETUPS), help="which set-ups (default all)")
    add("--seconds", type=float, default=2.0, help="measuring time of a row (default 2)")
    add("--rounds", type=int, default=3, help="turns of each set-up (default 3)")
    add("--wires", action="store_true", help="as on two hosts: no memory and no sockets in common")
    add("--json", metavar="OUT", help="write all figures to this file")
    add("--child", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        Path(given.json).write_text(json.dumps(measure_rows(given.child, given)))
        return
    found: dict[str, list[list[Result]]] = {name: [] for name in given.setups.split(",")}
    for turn in range(given.rounds):
        for name, turns in found.items():
            print(f"-- {name}, turn {turn + 1} of {given.rounds}", file=sys.stderr, flush=True)
            turns.append(run(name, given))
    rows = {name: [median_of(same) for same in zip(*turns, strict=True)] for name, turns in found.items()}
    first = next(iter(rows))
    print(f"{'':34}" + "".join(f"{name:>24}" for name in rows) + f"   load {os.getloadavg()[0]:.1f}")
    for number, row in enumerate(rows[first]):
        line = f"{row['name']:34}"
        for some in rows.values():
            share = f"({ratio(some[number], row):.2f}x)"
            line += f"{show(some[number]['value'], row['unit']) + ' ' + share:>24}"
        print(line)
    if given.json:
        Path(given.json).write_text(json.dumps({"load": os.getloadavg(), "wires": given.wires, "rows": rows}, indent=1))


def run(setup: str, given: argparse.Namespace) -> list[Result]:
    """The rows of one set-up, in a job of its own."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows.json"
        command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(SETUPS[setup][0]), "--cpus-per-node"]
        command += [str(_CPUS), __file__, "--child", setup, "--rows", given.rows]
        command += ["--seconds", str(given.seconds), "--json", str(out)]
        environ = {**os.environ, **({"HPCRAY_SAME_HOST": "0"} if given.wires else {})}
        subprocess.run(command, check=True, stdout=sys.stderr, env=environ)
        found: list[Result] = json.loads(out.read_text())
    return found


def measure_rows(setup: str, given: argparse.Namespace) -> list[Result]:
    """Measure the rows, in the program of the job."""
    from micro_rows import all_rows

    import hpcray as ray
    from hpcray import cluster

    ray.init()
    try:
        if SETUPS[setup][1]:
            cluster.scale(1, cpus=_CPUS, executor="local", wait=True)
        node: dict[str, Any] = ray.nodes()[-1]
        assert node["NodeID"] != ray.get_runtime_context().get_node_id(), "there is only one node"
        store = int(node["Resources"].get("object_store_memory", 0))
        rows = all_rows(importlib.import_module("hpcray"), 2, min(800_000_000, store // 3), node["NodeID"])
        wanted = re.compile(given.rows)
        return [measure(row, given.seconds) for row in rows if wanted.search(row.name)]
    finally:
        ray.shutdown()


def median_of(same: tuple[Result, ...]) -> Result:
    """One row over the rounds."""
    return {
        **same[0],
        "value": statistics.median(row["value"] for row in same),
        "turns": [row["value"] for row in same],
    }


if __name__ == "__main__":
    main()
