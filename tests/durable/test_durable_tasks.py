"""Durable results in whole jobs: what one job has computed is found by the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """\
import dataclasses, os, sys
import numpy as np
import hpcray as ray
from hpcray.durable import DurableOptions

ray.init(num_cpus=2)


def note(name):
    with open(os.environ["RUNS"], "a") as file:
        file.write(name + "\\n")


@dataclasses.dataclass
class Point:
    x: int


@ray.remote(durable=True)
def square(x, y=0):
    note(f"square {x}")
    return x * x + y


@ray.remote(durable="large arrays")
def large(a):
    note("large")
    return np.full(1_000_000, a)


@ray.remote(durable=True)
def summary(array):
    note("summary")
    return Point(int(array.sum()))


@ray.remote(durable=True)
def count(n):
    note("count")
    yield from range(n)


@ray.remote(durable=True, num_returns=2)
def two(a):
    note("two")
    return a, [ray.put(a + 1)]


@ray.remote(durable=DurableOptions(errors=True), max_retries=0)
def fails():
    note("fails")
    raise ValueError("as always")


@ray.remote
def plain():
    return 7


print(ray.get([square.remote(i) for i in range(3)]))
point = ray.get(summary.remote(large.remote(square.remote(2))))
print(point, type(point) is Point)
print([ray.get(item) for item in count.remote(3)])
first, second = two.remote(5)
print(ray.get(first), ray.get(ray.get(second)[0]))
try:
    ray.get(fails.remote())
except ValueError as error:
    print(str(error).splitlines()[-1])
print(ray.get(square.remote(plain.remote())), ray.get(square.remote(ray.put(9))))
print(ray.get(square.options(durable=False).remote(1)), flush=True)
"""
ANSWERS = ["[0, 1, 4]", "Point(x=4000000) True", "[0, 1, 2]", "5 6", "ValueError: as always", "49 81", "1"]
CALLS = ["count", "fails", "large", "square 0", "square 1", "square 2", "square 7", "square 9", "summary", "two"]


class Runs:
    """Runs programs with one directory of kept results, and tells which of their tasks ran."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.store = tmp_path / "store"
        self.number = 0

    def start(self, program: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        self.number += 1
        script = (cwd or self.tmp_path) / "program.py"
        script.write_text(program)
        runs = self.tmp_path / f"runs-{self.number}"
        return subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "HPCRAY_DURABLE_DIR": str(self.store), "RUNS": str(runs), **environ},
            cwd=cwd or self.tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def calls(self) -> list[str]:
        """What ran in the last job, sorted."""
        runs = self.tmp_path / f"runs-{self.number}"
        return sorted(runs.read_text().split("\n")[:-1]) if runs.exists() else []

    def run(self, program: str, cwd: Path | None = None, **environ: str) -> tuple[list[str], list[str], str]:
        """Run a program to its end: the lines that it prints, what ran, and what went to standard error."""
        process = self.start(program, cwd, **environ)
        try:
            out, err = process.communicate(timeout=90)
        finally:
            process.kill()
        assert process.returncode == 0, err
        return out.split("\n")[:-1], self.calls(), err


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def test_a_second_job_computes_nothing_in_another_directory_and_with_another_hash_seed(runs: Runs) -> None:
    out, ran, _ = runs.run(PROGRAM, PYTHONHASHSEED="1")
    assert out == ANSWERS
    assert ran == sorted([*CALLS, "square 1"])  # once more, where durable=False
    elsewhere = runs.tmp_path / "elsewhere"
    elsewhere.mkdir()
    out, ran, err = runs.run(PROGRAM, elsewhere, PYTHONHASHSEED="2")
    assert out == ANSWERS
    assert ran == ["square 1"]
    assert err == ""
    assert runs.store.stat().st_mode & 0o777 == 0o700
    assert len(list(runs.store.glob("*.pack"))) == 1  # small results of a node are in one file


SLOW = """\
import os, sys, time
import hpcray as ray

ray.init(num_cpus=4)


@ray.remote(durable=True)
def slow(x):
    time.sleep(0.05)
    with open(os.environ["RUNS"], "a") as file:
        file.write(f"{x} {time.time()}\\n")
    return x


print(sum(ray.get([slow.remote(i) for i in range(200)])), flush=True)
"""


def test_after_a_kill_only_the_last_moments_are_computed_again(runs: Runs) -> None:
    process = runs.start(SLOW)
    deadline = time.monotonic() + 60
    while len(runs.calls()) < 60 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed = time.time()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    before = dict(line.split() for line in runs.calls())
    out, ran, _ = runs.run(SLOW)
    assert out == [str(sum(range(200)))]
    again = {line.split()[0] for line in ran} & set(before)
    assert len(before) >= 60
    assert all(float(before[x]) > killed - 1 for x in again)
    assert len({line.split()[0] for line in ran} | set(before)) == 200


def test_a_directory_of_others_is_not_used_and_that_is_said_once(runs: Runs) -> None:
    runs.store.mkdir(mode=0o777)
    runs.store.chmod(0o777)
    out, ran, err = runs.run(SLOW.replace("range(200)", "range(5)"))
    assert out == ["10"]
    assert len(ran) == 5
    assert err.count("durable results are off") == 1
    assert "hint: " in err


def test_a_dry_run_counts_what_would_be_skipped(runs: Runs) -> None:
    short = SLOW.replace("range(200)", "range(int(sys.argv[1]) if sys.argv[1:] else 5)")
    runs.run(short)
    longer = short.replace("else 5", "else 8").replace("print(sum", "print(len").replace("ray.get(", "(")
    out, ran, _ = runs.run(longer, HPCRAY_DURABLE_DRY_RUN="1")
    assert ran == []
    assert out[-1] == "hpcray: durable: would skip 5 of 8 tasks"


def test_a_share_of_the_results_is_computed_again_and_differences_are_told(runs: Runs) -> None:
    changing = """\
import os, hpcray as ray
ray.init(num_cpus=1)

@ray.remote(durable=True)
def outside(x):
    return os.environ["OUTSIDE"] + x

print(ray.get(outside.remote("!")), flush=True)
"""
    assert runs.run(changing, OUTSIDE="a")[0] == ["a!"]
    assert runs.run(changing, OUTSIDE="b")[0] == ["a!"]
    out, _, err = runs.run(changing, OUTSIDE="b", HPCRAY_DURABLE_VERIFY="1")
    assert out == ["b!"]
    assert "outside: the result kept under the key" in err
    assert runs.run(changing, OUTSIDE="c")[0] == ["b!"]
