"""What waiting costs: an idle job's share of a core, and what polling costs where other programs need the processors.

    python benchmarks/idle.py                         # both parts
    python benchmarks/idle.py --only idle --ranks 1,2,4
    python benchmarks/idle.py --only busy --loops 0,1,2,4 --rounds 3

`idle`: jobs of so many ranks on this host, each with two actors that have been called a moment ago; then nothing
happens. The figure is the processor time of all processes of the job, the launcher too, as a share of one core.

`busy`: a job of two ranks beside so many busy loops, in turns with and without polling (`HPCRAY_SPIN=0`), also as if
the ranks were on two hosts (`HPCRAY_SAME_HOST=0`). Medians of single calls in microseconds, the median over the rounds,
and the ratio: above 1, polling is slower than sleeping at once. `--again` puts another turn with the same settings in
place of the one without polling: how much two equal runs differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SETTLED = 1.0
"""Seconds after the last call before the processor time counts."""
_TICK = os.sysconf("SC_CLK_TCK")
_BUSY = "while True: pass"

_IDLE = """\
import sys, time
import hpcray as ray
ray.init()

@ray.remote(num_cpus=0)
class Actor:
    def call(self):
        return 1

here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
actors = [Actor.options(scheduling_strategy=here(node["NodeID"], soft=False)).remote()
          for node in ray.nodes() for _ in range(2)]
for _ in range(100):
    ray.get([actor.call.remote() for actor in actors])
open(sys.argv[1], "w").close()
time.sleep(float(sys.argv[2]))
"""

_CALLS = """\
import json, statistics, sys, time
import hpcray as ray
ray.init()
path, seconds = sys.argv[1], float(sys.argv[2])
other = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != ray.get_runtime_context().get_node_id()][0]
there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(other, soft=False)

@ray.remote(num_cpus=0)
class Actor:
    def call(self):
        return 1
    def put(self):
        self.ref = ray.put(bytes(20_000))
        return [self.ref]

@ray.remote(num_cpus=0)
def task():
    return 1

near, far = Actor.remote(), Actor.options(scheduling_strategy=there).remote()

def median(call, before=lambda: None):
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        given = before()
        began = time.perf_counter()
        call(given)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6

rows = {
    "task": (lambda _: ray.get(task.remote()),),
    "actor call": (lambda _: ray.get(near.call.remote()),),
    "actor call to the other node": (lambda _: ray.get(far.call.remote()),),
    "get of 20 KB of an actor there": (lambda refs: ray.get(refs[0]), lambda: ray.get(far.put.remote())),
}
for row in rows.values():
    row[0](row[1]() if len(row) > 1 else None)
with open(path, "w") as file:
    json.dump({name: median(*row) for name, row in rows.items()}, file)
"""


def _descendants(root: int) -> list[int]:
    """The process and all that it has started, directly or not."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                after_name = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(after_name[1]), []).append(int(name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def _processor_time(pids: list[int]) -> float:
    """Seconds that these processes have computed; of those that have ended, nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(after_name[11]) + int(after_name[12])
    return total / _TICK


@contextlib.contextmanager
def _job(ranks: int, program: str, words: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "program.py"
        script.write_text(program)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        line = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(ranks), str(script), *words]
        job = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": path, **environ})
        try:
            yield job
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()


def idle(ranks: int, seconds: float) -> dict[str, float]:
    """An idle job's processes, and their share of a core in percent."""
    with tempfile.TemporaryDirectory() as directory:
        ready = Path(directory) / "ready"
        with _job(ranks, _IDLE, [str(ready), str(seconds + 60)], {}) as job:
            until = time.monotonic() + 60
            while not ready.exists():
                if job.poll() is not None or time.monotonic() > until:
                    sys.exit(f"the job of {ranks} ranks did not come up")
                time.sleep(0.05)
            time.sleep(SETTLED)
            pids = _descendants(job.pid)
            began, before = time.monotonic(), _processor_time(pids)
            time.sleep(seconds)
            share = 100 * (_processor_time(pids) - before) / (time.monotonic() - began)
    return {"processes": len(pids), "percent of a core": share}


def _calls(environ: dict[str, str], seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "rows.json"
        with _job(2, _CALLS, [str(out), str(seconds)], environ) as job:
            if job.wait():
                sys.exit(f"the job ended with {job.returncode}")
        rows: dict[str, float] = json.loads(out.read_text())
    return rows


def busy(loops: int, rounds: int, seconds: float, same_host: bool, again: bool) -> dict[str, dict[str, float]]:
    """Row to median with polling, without, and their ratio."""
    apart = {} if same_host else {"HPCRAY_SAME_HOST": "0"}
    other = {} if again else {"HPCRAY_SPIN": "0"}
    burners = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(loops)]
    turns: list[tuple[dict[str, float], dict[str, float]]] = []
    try:
        for _ in range(rounds):
            turns.append((_calls(apart, seconds), _calls({**apart, **other}, seconds)))
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    found = {}
    for row in turns[0][0]:
        with_polling, without = (statistics.median(turn[side][row] for turn in turns) for side in (0, 1))
        ratio = statistics.median(turn[0][row] / turn[1][row] for turn in turns)
        found[row] = {"polling": with_polling, "without": without, "ratio": ratio}
    return found


def main() -> None:
    """Measure, print, and write JSON where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(word) for word in text.split(",")]  # noqa: E731
    parser.add_argument("--only", choices=["idle", "busy"], help="one part")
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4], help="of idle jobs (default: 1,2,4)")
    parser.add_argument("--loops", type=numbers, default=[0, 1, 2, 4], help="busy loops (default: 0,1,2,4)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each setting (default: 3)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a row of busy; of idle, ten times as many")
    parser.add_argument("--again", action="store_true", help="compare polling with itself")
    parser.add_argument("--json", metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"cpus": os.cpu_count(), "load": os.getloadavg(), "idle": {}, "busy": {}}
    if arguments.only != "busy":
        for ranks in arguments.ranks:
            found["idle"][ranks] = row = idle(ranks, 10 * arguments.seconds)
            share, count = row["percent of a core"], row["processes"]
            print(f"idle job of {ranks} ranks: {share:.2f} % of a core, {count} processes", flush=True)
    if arguments.only != "idle":
        for loops in arguments.loops:
            for same_host in (True, False):
                where = "one host" if same_host else "as if on two hosts"
                rows = busy(loops, arguments.rounds, arguments.seconds, same_host, arguments.again)
                found["busy"][f"{loops}, {where}"] = rows
                for name, row in rows.items():
                    print(
                        f"{loops} busy loops, {where}: {name}: {row['polling']:.0f} us, without polling "
                        f"{row['without']:.0f} us, ratio {row['ratio']:.2f}",
                        flush=True,
                    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
