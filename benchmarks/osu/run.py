"""The OSU micro-benchmarks for hpcray: its wires and objects, beside raw mpi4py, raw ucxx and UCX's own ucx_perftest.

    python benchmarks/osu/run.py                                   # starts mpirun by itself
    python benchmarks/osu/run.py --json OUT --plots DIR --max 67108864 --mpirun "mpirun --map-by node"
    python benchmarks/osu/run.py --rows latency,bw --no-objects
    python benchmarks/osu/run.py --quick                           # less than a minute

Rows: `latency`, `fetch`, `bw`, `bibw` (both ways at once) between two ranks, `mbw_mr` (pairs at once), `bcast`,
`allgather` and `alltoall` among `--ranks`. Columns: `control` is hpcray's control wire; `data (ucx)` and `data (mpi)`
its two data planes, from arena to arena; `objects (ucx)` and `objects (mpi)` the same through the API, whole `get`s of
objects of other nodes, over these wires even if the nodes share a host (`HPCRAY_SAME_HOST=0`); `objects (same host)`
what they do there otherwise: read in each other's stores; `copied`: and copied into memory of the reader's own; `of an
actor's`: put by an actor of the other node, where the program puts the others. `ucxx` is ucxx used directly, set up as
hpcray sets up UCX, `ucxx (defaults)` as UCX does by itself.

Latency is half a round trip for messages. What a `get` does is a request and its answer, the row `fetch`; the objects
stand in it as in `latency`, with the time of one whole `get`. `sleeping peer` is the control wire to a raylet that
sleeps in epoll, which is what an idle one does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import perftest
import plots
import table
from effort import FULL, QUICK

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POINT_TO_POINT = ("latency", "fetch", "bw", "bibw")
TOGETHER = ("mbw_mr", "bcast", "allgather", "alltoall")
UNITS = {"latency": "us", "fetch": "us", "bcast": "us", "allgather": "us", "alltoall": "us"}
PLANES = ("ucx", "mpi")

Tables = dict[str, dict[str, table.Column]]


def launch(mpirun: str, ranks: int, command: list[str], plane: str, same_host: bool) -> None:
    """Run `command` in so many ranks; the JSON file it writes is the result."""
    words = shlex.split(mpirun)
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    if (os.cpu_count() or 1) < 2 * ranks:
        words.append("--oversubscribe")
    path = os.pathsep.join([str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "HPCRAY_DATA_PLANE": plane, "HPCRAY_SAME_HOST": str(int(same_host))}
    subprocess.run([*words, "-n", str(ranks), sys.executable, *command], check=True, env=environ)


class Suite:
    """Runs the parts and gathers their figures.

    Attributes:
        tables: row to wire to size to figure.
        extra: figures that are no table.
        failed: what could not be measured, and why.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.tables: Tables = {row: {} for row in arguments.rows}
        self.extra: dict[str, float] = {}
        self.failed: dict[str, str] = {}
        self._arguments = arguments
        self._effort = QUICK if arguments.quick else FULL

    def measure(self) -> None:
        """All of it."""
        arguments = self._arguments
        for ranks, rows in ((2, POINT_TO_POINT), (arguments.ranks, TOGETHER)):
            if not set(rows) & set(arguments.rows):
                continue
            for plane in arguments.planes:
                self._part(f"wires, {plane}, {ranks} ranks", ranks, plane, wires=True)
                if not arguments.no_objects:
                    self._part(f"objects, {plane}, {ranks} ranks", ranks, plane, wires=False)
            if not arguments.no_objects:
                self._part(f"objects, same host, {ranks} ranks", ranks, arguments.planes[0], False, same_host=True)
        self.perftest("host")

    def perftest(self, memory: str) -> None:
        """UCX without Python."""
        sizes = [size for size in self._effort.sizes if size <= self._arguments.max][::2]
        name = "ucx_perftest" if memory == "host" else f"ucx_perftest ({memory})"
        try:
            latency, bandwidth = perftest.columns(sizes, self._effort, memory)
        except (perftest.NoPerftestError, OSError) as error:
            self.failed[name] = str(error)
            return
        self._add("latency", name, latency)
        self._add("bw", name, bandwidth)

    def _part(self, what: str, ranks: int, plane: str, wires: bool, same_host: bool = False) -> None:
        arguments = self._arguments
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "figures.json"
            command = ["-m", "hpcray", str(HERE / "object_rows.py")] if not wires else [str(HERE / "wire_rows.py")]
            command += [str(file), str(arguments.max), *(["--quick"] if arguments.quick else [])]
            if wires and plane != arguments.planes[0]:
                command.append("--data-only")  # the others are the same as before
            try:
                launch(arguments.mpirun, ranks, command, plane, same_host)
                figures: dict[str, Any] = json.loads(file.read_text())
            except (subprocess.CalledProcessError, OSError) as error:
                self.failed[what] = str(error)
                return
        for name, found in figures.items():
            if isinstance(found, float):
                self.extra[name] = found
                continue
            row, _, how = name.partition(" ")
            objects = table.SAME_HOST if same_host else f"objects ({plane})"
            columns = found if wires else {f"{objects}, {how}" if how else objects: found}
            for wire, column in columns.items():
                self._add(row, wire, column)
                if row == "latency" and not wires:
                    self._add("fetch", wire, column)

    def _add(self, row: str, name: str, column: dict[Any, float]) -> None:
        if row in self.tables:
            self.tables[row][name] = {int(size): value for size, value in column.items()}


def gpu_problem() -> str:
    """Why nothing can be measured in GPU memory; "" when it can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "there is no NVIDIA driver on this host (no libcuda.so.1)"
    count = ctypes.c_int(0)
    if (code := cuda.cuInit(0)) or (code := cuda.cuDeviceGetCount(ctypes.byref(count))):
        return f"the NVIDIA driver gives error {code}"
    return "" if count.value else "this host has no GPU"


def parse() -> argparse.Namespace:
    """The command line."""
    rows = [*POINT_TO_POINT, *TOGETHER]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    parser.add_argument("--plots", metavar="DIR", help="draw a PNG for each row there (needs the extra `bench`)")
    parser.add_argument("--picture", metavar="FILE", help="draw one PNG of the rows fetch and bw")
    parser.add_argument("--max", type=int, default=256 << 20, help="largest size in bytes (default: 256 MiB)")
    parser.add_argument("--mpirun", default="mpirun", help="launcher and its flags (default: mpirun)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the rows with more than two (default: 4)")
    parser.add_argument("--rows", type=lambda text: text.split(","), default=rows, help=f"of {','.join(rows)}")
    parser.add_argument("--planes", type=lambda text: text.split(","), default=list(PLANES), help="ucx,mpi")
    parser.add_argument("--quick", action="store_true", help="few sizes, few repetitions: less than a minute")
    parser.add_argument("--no-objects", action="store_true", help="only the wires, not the API")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: what UCX alone does between GPU buffers; hpcray's objects live in host memory",
    )
    arguments = parser.parse_args()
    if unknown := (set(arguments.rows) - set(rows)) | (set(arguments.planes) - set(PLANES)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    """Measure, print, write."""
    arguments = parse()
    suite = Suite(arguments)
    if arguments.device == "cuda":
        if problem := gpu_problem():
            print(f"--device cuda: {problem}; nothing was measured", file=sys.stderr)
            return 2
        suite.perftest("cuda")
    else:
        suite.measure()
    about = f"host {platform.node()}, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    print(f"# {about}, load {os.getloadavg()[0]:.1f}")
    for row, columns in suite.tables.items():
        if columns:
            print(table.show(f"osu_{row}", UNITS.get(row, "MB/s"), columns) + "\n")
    ratios = {
        f"{row} / ucxx{where}": table.ratios(suite.tables.get(row, {}), column, "ucxx")
        for where, column in (
            ("", "objects (ucx)"),
            (", same host", table.SAME_HOST),
            (", same host, copied", f"{table.SAME_HOST}, copied"),
        )
        for row in ("fetch", "bw")
    }
    if any(ratios.values()):
        print(table.show("objects (ucx, same host)", "1 = as ucxx", ratios) + "\n")
    if "asleep_us" in suite.extra:
        print(f"# control, sleeping peer, 8 B: {suite.extra['asleep_us']:.1f} us one way")
    if arguments.json:
        found = {
            "about": about,
            "load": os.getloadavg(),
            **suite.tables,
            **suite.extra,
            "ratios": ratios,
            "failed": suite.failed,
        }
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    if arguments.plots or arguments.picture:
        try:
            if arguments.plots:
                print("# " + " ".join(plots.draw(arguments.plots, suite.tables, about)))
            if arguments.picture:
                plots.summary(arguments.picture, suite.tables, about)
        except ImportError:
            suite.failed["plots"] = "there is no matplotlib; hint: pip install 'hpcray[bench]'"
    for what, why in suite.failed.items():
        print(f"# {what} failed: {why}", file=sys.stderr)
    return 1 if suite.failed else 0


if __name__ == "__main__":
    sys.exit(main())
