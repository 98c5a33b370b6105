"""The programs of examples/gallery on hpcray and beside it on Ray (of MPI ranks: under `mpirun`), in turns.

    python benchmarks/gallery.py --ray-python /path/to/python --rounds 3 --json gallery.json --write

A time is that of the whole command, from its start to the end of its process: what a user waits for. The time of the
work itself is what the program prints. `--write` puts the medians into the pages of examples/gallery.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GALLERY = Path(__file__).resolve().parent.parent / "examples" / "gallery"
TIMEOUT = 600.0  # seconds for one command
_WORK = re.compile(r"\b([\d.]+) s\b")


@dataclass(frozen=True)
class Program:
    """One program of the gallery.

    Attributes:
        name: that of its directory.
        arguments: its command's.
        beside: what its time stands beside.
    """

    name: str
    arguments: tuple[str, ...] = ("--quick",)
    beside: str = "Ray"

    def command_line(self) -> str:
        """The command as its page shows it."""
        if self.name == "notebook":
            return "jupyter execute bootstrap.ipynb"
        return " ".join(["python", f"{self.name}.py", *self.arguments])


PROGRAMS = (
    Program("search"),
    Program("crossval"),
    Program("rollouts", ()),
    Program("ising", beside="mpirun"),
    Program("sort", ("--mb", "256", "--files", "8")),
    Program("nbody"),
    Program("stream", ("--frames", "300")),
    Program("notebook", ()),
)
ISING_UNDER_MPIRUN = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ising", sys.argv[1])
ising = importlib.util.module_from_spec(spec)
spec.loader.exec_module(ising)
from mpi4py import MPI
for temperature in (1.6, 2.0, 3.2):
    value = ising.simulate(MPI.COMM_WORLD, temperature, 64, 400)
    assert abs(value - ising.exact(temperature)) < 0.06
if MPI.COMM_WORLD.rank == 0:
    print("checked")
"""


def prepare(program: Program, engine: str, place: Path, pythons: dict[str, str]) -> list[str]:
    """Write what the command needs to `place`, and return the command."""
    source = GALLERY / program.name
    python = pythons[engine]
    if program.name == "notebook":
        text = (source / "bootstrap.ipynb").read_text()
        if engine == "Ray":
            text = text.replace("from hpcray.cluster import", "from gallery_on_ray import").replace("hpcray", "ray")
            shutil.copy(Path(__file__).with_name("gallery_on_ray.py"), place)
        (place / "bootstrap.ipynb").write_text(text)
        return [str(Path(python).with_name("jupyter-execute")), "--output=executed.ipynb", "bootstrap.ipynb"]
    if engine == "mpirun":
        (place / "alone.py").write_text(ISING_UNDER_MPIRUN)
        options = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "--allow-run-as-root"]
        mpirun = str(Path(python).with_name("mpirun"))
        # One run of the ranks after the other, as there are no tasks that could run side by side.
        return [mpirun, "-n", "2", *options, python, "alone.py", str(source / "ising.py")]
    text = (source / f"{program.name}.py").read_text()
    (place / "program.py").write_text(text.replace("hpcray", "ray") if engine == "Ray" else text)
    return [python, "program.py", *program.arguments]


def measure(program: Program, engine: str, pythons: dict[str, str]) -> tuple[float, float | None]:
    """Seconds of the command, and of the work, where the program says it.

    Raises:
        RuntimeError: the program has failed, or has not checked its result.
    """
    # A short path: Ray puts its sockets below it.
    with tempfile.TemporaryDirectory(prefix="gallery-", ignore_cleanup_errors=True) as directory:
        place = Path(directory)
        command = prepare(program, engine, place, pythons)
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": directory,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        }
        environ["HPCRAY_JOBS"] = str(place / "jobs")
        begin = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=place,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
        )
        took = time.perf_counter() - begin
        shown = done.stdout
        if program.name == "notebook" and (place / "executed.ipynb").exists():
            shown += (place / "executed.ipynb").read_text()
        if done.returncode or "checked" not in shown:
            raise RuntimeError(f"{program.name} on {engine}: exit code {done.returncode}\n{shown[-4000:]}")
        said = None if engine == "mpirun" or program.name == "notebook" else _WORK.search(done.stdout)
        return took, float(said[1]) if said else None


def full_name(engine: str, ray: str) -> str:
    """The engine as the tables call it."""
    return {"Ray": f"Ray {ray}", "mpirun": "`mpirun` by itself"}.get(engine, engine)


def write_pages(found: dict[str, dict[str, dict[str, list[float]]]], ray: str) -> None:
    """Put the medians into the page of each program, and into the table of the gallery's own page."""
    rows = []
    for program in PROGRAMS:
        if program.name not in found:
            continue
        page = GALLERY / program.name / "README.md"
        table = ["| | the work itself | from the start of the command to its end |", "| --- | ---: | ---: |"]
        totals = {}
        for engine in ("hpcray", program.beside):
            figures = found[program.name][engine]
            totals[engine] = round(statistics.median(figures["total"]), 1)  # as shown, for the ratio
            work = f" {statistics.median(figures['work']):.1f} s" if figures["work"] else ""
            table.append(f"| {full_name(engine, ray)} |{work} | {totals[engine]:.1f} s |")
        text = page.read_text()
        new = re.sub(r"^\| \| the work itself.*?(?=\n\n)", lambda _, t=table: "\n".join(t), text, flags=re.M | re.S)
        if new == text and table[0] not in text:
            raise RuntimeError(f"{page}: no table to write to")
        page.write_text(new)
        ratio = totals[program.beside] / totals["hpcray"]
        rows.append(
            f"| [{program.name}]({program.name}/README.md) | `{program.command_line()}` | {totals['hpcray']:.1f} s "
            f"| {full_name(program.beside, ray)}: {totals[program.beside]:.1f} s | {ratio:.1f} |"
        )
    page = GALLERY / "README.md"
    head = "| program | command | hpcray | beside it | ratio |\n| --- | --- | ---: | ---: | ---: |\n"
    text = re.sub(
        r"^\| program \| command .*?(?=\n\n|\Z)", lambda _: head + "\n".join(rows), page.read_text(), flags=re.M | re.S
    )
    page.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", metavar="PROGRAM", help="only these (default: all)")
    add("--ray-python", default=sys.executable, metavar="PATH", help="interpreter that has Ray (default: this one)")
    add("--rounds", type=int, default=3, help="turns of each engine (default 3)")
    add("--json", metavar="FILE", help="keep all figures here, beside those that it has of other programs")
    add("--write", action="store_true", help="write the medians to the pages of the gallery")
    given = parser.parse_args()
    names = [program.name for program in PROGRAMS]
    if unknown := set(given.names) - set(names):
        parser.error(f"no program {', '.join(sorted(unknown))}; hint: {', '.join(names)}")
    pythons = {"hpcray": sys.executable, "mpirun": sys.executable, "Ray": given.ray_python}
    version = subprocess.run(
        [given.ray_python, "-c", "import ray; print(ray.__version__)"], capture_output=True, text=True
    ).stdout.rpartition(".")[0]
    kept = Path(given.json) if given.json else None
    found: dict[str, dict[str, dict[str, list[float]]]] = json.loads(kept.read_text()) if kept and kept.exists() else {}
    for program in PROGRAMS:
        if given.names and program.name not in given.names:
            continue
        engines = ("hpcray", program.beside)
        found[program.name] = {engine: {"total": [], "work": []} for engine in engines}
        for turn in range(given.rounds):
            for engine in engines if turn % 2 == 0 else reversed(engines):
                total, work = measure(program, engine, pythons)
                found[program.name][engine]["total"].append(total)
                found[program.name][engine]["work"] += [work] if work is not None else []
                load = os.getloadavg()[0]
                shown = f"{total:6.1f} s, work {work if work is not None else '':>5}, load {load:.1f}"
                print(f"{program.name:<9} {engine:<7} {shown}", flush=True)
        if kept:
            kept.write_text(json.dumps(found, indent=1))
    if given.write:
        write_pages(found, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
