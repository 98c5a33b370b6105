"""Durable results in whole jobs: what one job has computed is found by the next."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcray.cli.durable import show_argument
from hpcray.durable.canonical import Canonical, plain_form

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


def test_progress_and_top_show_what_was_found(runs: Runs) -> None:
    program = """\
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import current

ray.init(num_cpus=1)


@ray.remote(durable=True)
def square(x):
    return x * x


ray.get([square.remote(x) for x in range(5)])
with current.process.engine.lock:
    found = current.process.diagnostics.introspect("figures", ())["functions"]
print(found.get("square (found)", [0])[0], flush=True)
"""
    assert runs.run(program)[0] == ["0"]
    assert runs.run(program)[0] == ["5"]


def test_the_commands_list_explain_and_remove(runs: Runs) -> None:
    first = """\
import hpcray as ray
ray.init(num_cpus=1)
LIMIT = 1


def helper(x):
    return x + LIMIT


@ray.remote(durable=True)
def simulate(x):
    return helper(x)


print(ray.get(simulate.remote(3)), flush=True)
"""
    assert runs.run(first)[0] == ["4"]
    assert runs.run(first.replace("LIMIT = 1", "LIMIT = 2"))[0] == ["5"]

    def command(*given: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "hpcray.cli", "durable", *given],
            env={**os.environ, "HPCRAY_DURABLE_DIR": str(runs.store)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert command("du").startswith("4 results")
    assert [show_argument(Canonical().of(value)) for value in (3, "a", 0.5)] == ["3", "'a'", "0.5"]
    assert show_argument(plain_form([1, ("a", None), {"b": 0.5}])) == "[1, ('a', None), {'b': 0.5}]"
    listed = json.loads(command("ls", "simulate", "--json"))
    assert [(row["function"], row["arguments"]) for row in listed] == [("simulate", "x=3")] * 2
    why = command("why", listed[0]["key"][:16])
    assert "argument   x = 3" in why
    assert "part       function helper: " in why
    assert re.search(r"of which differ:\n  global LIMIT: \w+, there \w+\n$", why)
    assert "the nearest other result" in command("why", "simulate")
    assert command("rm", "simulate", "--dry-run").startswith("2 results would go")
    for pack in runs.store.glob("*.pack"):
        os.utime(pack, (time.time() - 3600, time.time() - 3600))
    assert command("rm", "simulate").startswith("2 results are removed")
    assert json.loads(command("ls", "--json")) == []


@pytest.mark.slow
def test_options_and_the_environment_are_part_of_the_key(runs: Runs) -> None:
    table = runs.tmp_path / "table"
    table.write_text("1")
    program = f"""\
import os, time
import hpcray as ray
from hpcray.durable import DurableOptions
ray.init(num_cpus=1)


def note(name):
    with open(os.environ["RUNS"], "a") as file:
        file.write(name + "\\n")


def base(x=0):
    note("ran")
    return x


def once(options, *args, **more):
    function = ray.remote(base).options(durable=options, **more)
    return ray.get(function.remote(*args))


once(True)
once("a name")
once(DurableOptions(version=1))
once(DurableOptions(version=2))
once(DurableOptions(inputs=[{str(table)!r}]))
once(True, runtime_env={{"env_vars": {{"A": "1"}}}})
once(True, runtime_env={{"env_vars": {{"A": "2"}}}})
once(DurableOptions(ignore=["x"]), 1)
once(DurableOptions(ignore=["x"]), 2)
time.sleep(0.6)  # what the run before has kept has expired
once(DurableOptions(expires=0.5), 7)
time.sleep(1)
once(DurableOptions(expires=0.5), 7)
"""
    _, ran, _ = runs.run(program)
    assert len(ran) == 10  # one for each line but the second with another ignored argument
    _, ran, _ = runs.run(program)
    assert len(ran) == 2  # those that have expired
    table.write_text("2")
    _, ran, _ = runs.run(program)
    assert len(ran) == 3


def test_a_program_without_durable_tasks_loads_nothing_of_it(runs: Runs) -> None:
    program = """\
import sys
import hpcray as ray

ray.init(num_cpus=1)


def loaded():
    return any(name.startswith("hpcray.durable") for name in sys.modules)


print(loaded(), ray.get(ray.remote(loaded).remote()), flush=True)
"""
    assert runs.run(program)[0] == ["False False"]
    assert not runs.store.exists()


@pytest.mark.slow
def test_a_full_disk_costs_a_line_and_nothing_else(runs: Runs) -> None:
    if os.geteuid():
        pytest.skip("needs root, to mount a small file system")
    runs.store.mkdir(mode=0o700)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(runs.store)])
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    program = """\
import hpcray as ray
ray.init(num_cpus=2)


@ray.remote(durable=True)
def text(x):
    return str(x) * 1000


print(len(ray.get([text.remote(x) for x in range(200)])), len(ray.get([text.remote(x) for x in range(200)])))
"""
    try:
        for _ in range(2):
            out, _, err = runs.run(program)
            assert out == ["200 200"]
            assert err.count("durable results are off") == 1 and "No space left" in err
    finally:
        subprocess.run(["umount", str(runs.store)], check=True)


def test_a_cell_that_is_run_again_finds_its_result_and_a_changed_class_is_noticed(runs: Runs) -> None:
    program = """\
import os
import hpcray as ray
ray.init(num_cpus=1)

CELL = r'''
class Point:
    def __init__(self, x):
        self.x = x
    def shown(self):
        return SHOWN % self.x
SHOWN = "({})%d"

@ray.remote(durable=True)
def point(x):
    with open(os.environ["RUNS"], "a") as file:
        file.write("ran\\n")
    return Point(x)

found = ray.get(point.remote(3))
print(type(found) is Point, found.shown(), flush=True)
\'\'\'
for version in "a", "a", "b", "a":
    exec(CELL.replace("({})", version))
"""
    out, ran, err = runs.run(program)
    assert out == ["True a3", "True a3", "True b3", "True a3"], err
    assert len(ran) == 2


def test_what_a_worker_computed_by_other_code_is_not_kept_nor_what_was_made_of_it(runs: Runs) -> None:
    program = """\
import os, pathlib
import hpcray as ray
import other
if os.environ.get("EDIT"):
    pathlib.Path(other.__file__).write_text("def helper(x):\\n    return x + 2\\n")
ray.init(num_cpus=1)


def note(name):
    with open(os.environ["RUNS"], "a") as file:
        file.write(name + "\\n")


@ray.remote(durable=True)
def first(x):
    note("first")
    return other.helper(x)


@ray.remote(durable=True, num_returns=2)
def two(x):
    note("two")
    return other.helper(x), 0


@ray.remote(durable=True)
def times(x, y=1):
    note("times")
    return x * y


found = [times.remote(times.remote(first.remote(1), 10)), times.remote(two.remote(1)[0], 100)]
print(*ray.get(found), flush=True)
"""
    module = runs.tmp_path / "other.py"
    old = "def helper(x):\n    return x + 1\n"
    calls = ["first", "times", "times", "times", "two"]
    module.write_text(old)
    out, ran, err = runs.run(program, EDIT="1")
    assert (out, ran) == (["30 300"], calls)
    assert "results of first are not kept" in err
    module.write_text(old)
    for again in (calls, []):
        out, ran, _ = runs.run(program)
        assert (out, ran) == (["20 200"], again)


def test_a_result_of_files_that_changed_while_the_job_ran_is_not_kept_nor_what_was_made_of_it(runs: Runs) -> None:
    table = runs.tmp_path / "table"
    program = """\
import os
import hpcray as ray
from hpcray.durable import DurableOptions
ray.init(num_cpus=1)


def note(name):
    with open(os.environ["RUNS"], "a") as file:
        file.write(name + "\\n")


@ray.remote(durable=DurableOptions(inputs=["path"]))
def content(path):
    note("content")
    if os.environ.get("NEW"):
        open(path, "w").write("new")
    return open(path).read()


@ray.remote(durable=True)
def twice(text):
    note("twice")
    return text * 2


print(ray.get(twice.remote(content.remote("table"))), flush=True)
"""
    table.write_text("old")
    out, ran, err = runs.run(program, NEW="1")
    assert (out, ran) == (["newnew"], ["content", "twice"])
    assert "a file that it reads has changed since it was submitted" in err
    table.write_text("old")
    for again in (["content", "twice"], []):
        out, ran, err = runs.run(program)
        assert (out, ran, err) == (["oldold"], again, "")
    table.write_text("third")
    assert runs.run(program)[:2] == (["thirdthird"], ["content", "twice"])


def test_equal_calls_in_flight_are_computed_once(runs: Runs) -> None:
    program = """\
import os, time
import hpcray as ray
ray.init(num_cpus=2)


def note(name):
    with open(os.environ["RUNS"], "a") as file:
        file.write(name + "\\n")


@ray.remote(durable=True)
def slow(x):
    time.sleep(0.3)
    note("slow")
    return x


@ray.remote(durable=True, num_returns=2)
def two(x):
    time.sleep(0.3)
    note("two")
    return x, [x]


@ray.remote(durable=True, max_retries=0)
def fails():
    time.sleep(0.3)
    note("fails")
    raise ValueError("once")


refs = [slow.remote(b"a" * 1_000_000) for _ in range(5)]
pairs = [two.remote(i // 2) for i in range(4)]
print(len(ray.wait(refs, num_returns=5)[0]), {len(value) for value in ray.get(refs)})
print([ray.get(pair) for pair in pairs])
for ref in [fails.remote() for _ in range(2)]:
    try:
        ray.get(ref)
    except ValueError as error:
        print(str(error).splitlines()[-1], flush=True)
"""
    out, ran, err = runs.run(program)
    assert out == ["5 {1000000}", "[[0, [0]], [0, [0]], [1, [1]], [1, [1]]]", *["ValueError: once"] * 2], err
    assert ran == ["fails", "slow", "two", "two"]


def test_two_jobs_that_make_the_same_results_at_once_do_not_disturb_each_other(runs: Runs) -> None:
    both = [runs.start(PROGRAM) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=90)
        assert (process.returncode, out.split("\n")[:-1], err) == (0, ANSWERS, "")
    out, ran, err = runs.run(PROGRAM)
    assert (out, ran, err) == (ANSWERS, ["square 1"], "")
