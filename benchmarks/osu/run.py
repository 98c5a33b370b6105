"""Point-to-point latency and bandwidth between two ranks, 8 B to 256 MB: hpcray's wires, objects, raw mpi4py and ucxx.

    python benchmarks/osu/run.py                          # starts mpirun by itself
    python benchmarks/osu/run.py --json table.json --max 67108864 --mpirun "mpirun --map-by node"

Latency is half a round trip for messages, the whole of one `get` for objects. `sleeping peer` is the control wire to
a raylet that sleeps in epoll, which is what an idle one does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def launch(mpirun: str, command: list[str]) -> None:
    """Run `command` in two ranks; the JSON file it writes is the result."""
    words = shlex.split(mpirun)
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if (os.cpu_count() or 1) < 4:
        words.append("--oversubscribe")
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path}
    subprocess.run([*words, "-n", "2", sys.executable, *command], check=True, env=environ)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures. Rows that could not be measured are missing, and why stands under "failed"."""
    figures: dict[str, Any] = {"latency": {}, "bandwidth": {}, "failed": {}}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        try:
            launch(arguments.mpirun, [str(HERE / "wire_rows.py"), str(file), str(arguments.max)])
            figures.update(json.loads(file.read_text()))
        except (subprocess.CalledProcessError, OSError) as error:
            figures["failed"]["wires"] = str(error)
        if not arguments.no_objects:
            try:
                launch(arguments.mpirun, ["-m", "hpcray", str(HERE / "object_rows.py"), str(file), str(arguments.max)])
                times = json.loads(file.read_text())
                figures["latency"]["object get"] = times
                figures["bandwidth"]["object get"] = {size: int(size) / us for size, us in times.items()}
            except (subprocess.CalledProcessError, OSError) as error:
                figures["failed"]["objects"] = str(error)
    for kind in ("latency", "bandwidth"):
        figures[kind] = {
            name: {int(size): value for size, value in column.items()} for name, column in figures[kind].items()
        }
    return figures


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--max", type=int, default=256 << 20, help="largest size in bytes (default: 256 MiB)")
    parser.add_argument("--mpirun", default="mpirun", help="launcher and its flags (default: mpirun)")
    parser.add_argument("--no-objects", action="store_true", help="only the wires, not the API")
    arguments = parser.parse_args()
    figures = measure(arguments)
    print(f"# host {platform.node()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(table.show("latency", "us", figures["latency"]) + "\n")
    print(table.show("bandwidth", "MB/s", figures["bandwidth"]))
    if "asleep_us" in figures:
        print(f"\n# control, sleeping peer, 8 B: {figures['asleep_us']:.1f} us one way")
    for what, why in figures["failed"].items():
        print(f"# {what} failed: {why}", file=sys.stderr)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))
    return 1 if figures["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
