"""What a task costs that waits: memory and CPU time of one driver that submits many more tasks than can run.

    python benchmarks/queued.py                      # a million, without arguments and with one
    python benchmarks/queued.py --tasks 100000 --json OUT

The only CPU of the node is busy until all are queued. Counted is the driver's resident memory and CPU time between the
first submission and the last one, the program's own list of refs included, and the memory (Pss) and CPU time of all
processes of the job. Then the tasks run, or are cancelled by the end of the session.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import hpcray as ray

_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Each row in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--run", action="store_true", help="let them run, and get every value")
    given = parser.parse_args()
    if given.row:
        print(json.dumps(measure(given.row, given.tasks, given.run)))
        return
    rows = []
    for row in ROWS:
        command = [sys.executable, __file__, "--row", row, "--tasks", str(given.tasks), *(["--run"] * given.run)]
        rows.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        print(json.dumps(rows[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


ROWS: dict[str, Any] = {
    "no argument": lambda task, count: [task.remote() for _ in range(count)],
    "one integer": lambda task, count: [task.remote(i) for i in range(count)],
}


def measure(row: str, tasks: int, run: bool) -> dict[str, Any]:
    """Bytes and microseconds per queued task."""
    with tempfile.TemporaryDirectory() as directory:
        gate = Path(directory, "gate")
        ray.init(num_cpus=1)

        @ray.remote
        def hold(path: str) -> None:
            while not os.path.exists(path):
                time.sleep(0.01)

        @ray.remote
        def task(x: int = 0) -> int:
            return x

        ray.get(task.remote())
        held = hold.remote(str(gate))
        refs = ROWS[row](task, 100)  # what is made once is made now
        gc.collect()
        resident, used = _resident(), time.process_time()
        all_memory, all_used = _job()
        refs += ROWS[row](task, tasks)
        used, resident = time.process_time() - used, _resident() - resident
        found = {
            "row": row,
            "tasks": tasks,
            "driver_bytes": round(resident / tasks),
            "driver_us": round(used / tasks * 1e6, 2),
        }
        memory, cpu = _job()
        found["job_bytes"] = round((memory - all_memory) / tasks)
        found["job_us"] = round((cpu - all_used) / tasks * 1e6, 2)
        if run:
            gate.touch()
            began = time.monotonic()
            values = ray.get(refs)
            assert len(values) == tasks + 100
            found["run_us"] = round((time.monotonic() - began) / tasks * 1e6, 2)
        else:
            gate.touch()
            ray.get(held)
        ray.shutdown()
    return found


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _job() -> tuple[int, float]:
    """Bytes (Pss) and seconds of CPU of this process and all its descendants."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            seconds[int(entry.name)] = (int(fields[11]) + int(fields[12])) / _TICKS
    ours, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in ours} - ours
        ours |= more
        grew = bool(more)
    memory = 0
    for pid in ours:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        memory += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")) * 1024
    return memory, sum(seconds[pid] for pid in ours)


if __name__ == "__main__":
    main()
