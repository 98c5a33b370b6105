"""Start-up on a slow shared file system: how often it is read, and how long until every worker has its packages.

    python benchmarks/startup.py
    python benchmarks/startup.py --nodes 4 --workers 8 --modules 2000 --delay 0.002
    python benchmarks/startup.py --only join
    python benchmarks/startup.py --only ranks

Makes a package of `--modules` modules and starts a job in which the program and a task on every worker import it. Every
opening of a file below it takes `--delay` seconds longer, in whatever Python process: a `sitecustomize` in PYTHONPATH
puts the delay there, and counts. Four ways: as it is; with HPCRAY_PRELOAD; with --broadcast-env; with both.

Then the row "join": a job of one node is opened for further ones, and nodes join it, one after the other. Seconds from
the start of a node's process until it is in the job's tables; and how long the job's raylet was silent meanwhile.

And the rows "ranks": jobs of 1, 2 and 4 nodes on this machine, from the start of `hpcray-launch` to the answer of the
first task, and to its end; beside as many processes, started likewise, that do no more than start and end MPI.
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
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

_HOOK = """\
import os, sys, _thread, time

def _hook(event, args, busy=set()):
    me = _thread.get_ident()
    if event != "open" or me in busy:
        return
    path = args[0]
    if not isinstance(path, str) or not path.startswith({place!r}):
        return
    busy.add(me)
    try:
        time.sleep({delay})
        with open("/proc/self/comm") as file:
            name = file.read().strip()
        fd = os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, (name + "\\n").encode())
        os.close(fd)
    finally:
        busy.discard(me)

sys.addaudithook(_hook)
"""

_PROGRAM = """\
import os, sys, time
import hpcray as ray
import slow_package

workers = int(sys.argv[1])
ray.init()


@ray.remote
class Worker:
    def ready(self):
        import slow_package
        return os.getpid(), slow_package.total


actors = [Worker.options(scheduling_strategy="SPREAD").remote() for _ in range(workers)]
assert len({pid for pid, _ in ray.get([actor.ready.remote() for actor in actors])}) == workers
"""

_FIRST_TASK = """\
import time
import hpcray as ray

ray.init()


@ray.remote
def first():
    return 1


ray.get(first.remote())
print(time.monotonic())
"""


def main() -> None:
    """Run all four ways and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--workers", type=int, default=4, help="workers of each node (default 4)")
    parser.add_argument("--modules", type=int, default=300, help="modules of the package (default 300)")
    parser.add_argument("--delay", type=float, default=0.002, help="seconds per opening of a file (default 0.002)")
    parser.add_argument("--only", choices=["packages", "join", "ranks"], help="only this part")
    parser.add_argument("--joins", type=int, default=5, help="nodes that join (default 5)")
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each number of ranks (default 5)")
    parser.add_argument("--json", help="write the rows to this file")
    given = parser.parse_args()
    rows = packages(given) if given.only in (None, "packages") else []
    if given.only in (None, "join"):
        rows.append(join(given.joins))
    if given.only in (None, "ranks"):
        rows += ranks(given.rounds)
    if given.json:
        Path(given.json).write_text(json.dumps(rows, indent=1))


def packages(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows about packages, printed as a table."""
    with tempfile.TemporaryDirectory(prefix="hcs-", dir="/tmp") as directory:
        shared = make_package(Path(directory), given.modules)
        rows = [
            run(Path(directory), shared, given, broadcast=broadcast, preload=preload)
            for broadcast in (False, True)
            for preload in (False, True)
        ]
    what = f"{given.nodes} nodes, {given.workers} workers each, {given.modules} modules"
    print(f"{what}, {given.delay * 1000:g} ms a file, load {os.getloadavg()[0]:.1f}")
    columns = ("files opened", "by workers", "by templates", "by raylets", "by driver", "seconds")
    print(" " * 24 + "".join(f"{column:>14}" for column in columns))
    for row in rows:
        reads: dict[str, int] = row["reads"]
        ours = [reads.get(name, 0) for name in ("hpcray-worker", "hpcray-template", "hpcray-raylet")]
        counts = [sum(reads.values()), *ours, sum(reads.values()) - sum(ours)]
        print(f"{row['name']:24}" + "".join(f"{count:>14}" for count in counts) + f"{row['seconds']:>14.1f}")
    return rows


def join(count: int) -> dict[str, Any]:
    """The row "join", printed."""
    import hpcray as ray
    from hpcray.platform.private_files import write_private_file
    from hpcray.runtime.core_worker.core_worker import need_process
    from hpcray.runtime.node.join_token import request_join_token

    with tempfile.TemporaryDirectory(prefix="hcs-", dir="/tmp") as directory, ray.init("local", num_cpus=1):
        token = os.path.join(directory, "token")
        silences = [0.0]
        with _silence_noted(silences):
            started = time.perf_counter()
            write_private_file(token, request_join_token(need_process().place.session_dir))
            opened = time.perf_counter() - started
            took, cpu = list[float](), list[float]()
            for _ in range(count):
                there = len(ray.nodes())
                started = time.perf_counter()
                line = [sys.executable, "-m", "hpcray", "--num-cpus", "1", "--join", token]
                node = subprocess.Popen(line, stderr=subprocess.DEVNULL)
                while len(ray.nodes()) <= there:
                    time.sleep(0.005)
                took.append(time.perf_counter() - started)
                cpu.append(_cpu_seconds(node.pid))
    row = {"name": "join", "seconds": statistics.median(took), "cpu": statistics.median(cpu), "all": took}
    row |= {"opening": opened, "silence": max(silences)}
    print(
        f"join: {row['seconds']:.2f} s (of {count}: {min(took):.2f} to {max(took):.2f}), {row['cpu']:.2f} s of them "
        f"CPU time of its raylet; opening of the job {opened:.2f} s, longest silence of the job's raylet "
        f"{max(silences):.3f} s, load {os.getloadavg()[0]:.1f}"
    )
    return row


def ranks(rounds: int) -> list[dict[str, Any]]:
    """The rows "ranks", printed. Launches with and without hpcray alternate."""
    with tempfile.TemporaryDirectory(prefix="hcs-", dir="/tmp") as directory:
        program = Path(directory, "first.py")
        program.write_text(_FIRST_TASK)
        return _rank_rows(program, rounds)


def _rank_rows(program: Path, rounds: int) -> list[dict[str, Any]]:
    rows = []
    print(f"{'ranks':8}{'first answer':>14}{'end':>10}{'MPI alone':>12}   seconds, medians of {rounds}")
    for count in (1, 2, 4):
        answers, ends, bare = list[float](), list[float](), list[float]()
        for _ in range(rounds):
            started = time.monotonic()
            line = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(count)]
            done = subprocess.run([*line, str(program)], stdout=subprocess.PIPE, check=True)
            ends.append(time.monotonic() - started)
            answers.append(float(done.stdout) - started)
            bare.append(_mpi_alone(count))
        row = {"name": f"ranks {count}", "answer": statistics.median(answers), "end": statistics.median(ends)}
        rows.append(row | {"mpi": statistics.median(bare), "all": answers})
        print(f"{count:<8}{row['answer']:>14.2f}{row['end']:>10.2f}{statistics.median(bare):>12.2f}", flush=True)
    return rows


def _mpi_alone(count: int) -> float:
    """Seconds that what starts the ranks takes for processes that only start and end MPI."""
    from hpcray.launch.launch_line import LaunchOptions, compose, probe_site
    from hpcray.runtime.node.options import NodeOptions

    options = LaunchOptions(NodeOptions(), nodes=count)
    line = compose(options, probe_site(options))
    program = len(line) - 1 - line[::-1].index(sys.executable)  # what starts ranks of one host is Python, too
    line = [*line[:program], sys.executable, "-c", "from mpi4py import MPI"]
    started = time.monotonic()
    subprocess.run(line, check=True)
    return time.monotonic() - started


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _silence_noted(found: list[float]) -> Iterator[None]:
    """Note the longest answers of the raylet of this process, which is the head, to a question."""
    from hpcray.protocol.messages import GcsCall
    from hpcray.runtime.core_worker.core_worker import need_process
    from hpcray.runtime.node.join_token import REQUEST, ask_head

    place, over = need_process().place.session_dir, threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            asked = time.perf_counter()
            ask_head(place, GcsCall(REQUEST, "nodes", b"\x90"), 30.0)
            found.append(time.perf_counter() - asked)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def make_package(directory: Path, modules: int) -> Path:
    """The "shared" directory, with the package in it; its modules are compiled."""
    shared = directory / "shared"
    package = shared / "slow_package"
    package.mkdir(parents=True)
    for number in range(modules):
        (package / f"m{number}.py").write_text(f"x = {number}\n")
    imports = "".join(f"from slow_package.m{number} import x as x{number}\n" for number in range(modules))
    (package / "__init__.py").write_text(imports + f"total = {modules}\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(shared)], check=True)
    return shared


def run(directory: Path, shared: Path, given: argparse.Namespace, broadcast: bool, preload: bool) -> dict[str, Any]:
    """One job; its row."""
    name = " + ".join(["preload"] * preload + ["broadcast"] * broadcast) or "as it is"
    hooks = directory / name.replace(" ", "")
    hooks.mkdir()
    log = hooks / "log"
    (hooks / "sitecustomize.py").write_text(_HOOK.format(place=str(shared), delay=given.delay, log=str(log)))
    program = directory / "program.py"
    program.write_text(_PROGRAM)
    path = os.pathsep.join([str(hooks), str(shared), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "HPCRAY_PRELOAD": "slow_package" if preload else ""}
    command = [sys.executable, "-m", "hpcray.cli.launch", "-n", str(given.nodes)]
    command += ["--cpus-per-node", str(given.workers)] + (["--broadcast-env", str(shared)] if broadcast else [])
    started = time.perf_counter()
    subprocess.run([*command, str(program), str(given.nodes * given.workers)], env=environ, check=True)
    seconds = time.perf_counter() - started
    reads = Counter(log.read_text().splitlines()) if log.exists() else Counter[str]()
    return {"name": name, "seconds": seconds, "reads": dict(reads)}


if __name__ == "__main__":
    main()
