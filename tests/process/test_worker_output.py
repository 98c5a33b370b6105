"""What workers print, on its way to the driver's `sys.stdout` and `sys.stderr`."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcray as ray


@contextlib.contextmanager
def driver(**options: object) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """A session of this process, and what is printed until its end."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        ray.init("local", **options)  # type: ignore[arg-type]
        try:
            yield out, err
        finally:
            ray.shutdown()


def test_output_reaches_what_the_driver_has_in_place_of_its_streams() -> None:
    @ray.remote
    def loud() -> None:
        print("to out")
        print("to err", file=sys.stderr)
        os.write(1, b"of native code\n")
        subprocess.run(["echo", "of a child"], check=True)
        os._exit(7)

    @ray.remote
    class Named:
        def __init__(self, name: str) -> None:
            print("in the constructor")
            self.name = name

        def __repr__(self) -> str:
            return f"Named({self.name})"

        def speak(self) -> int:
            print("in a call", end="", flush=True)
            return os.getpid()

    with driver(num_cpus=2) as (out, err):
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(loud.options(name="renamed", max_retries=0).remote())
        actor = Named.remote("x")
        pid = ray.get(actor.speak.remote())
    lines = out.getvalue().splitlines()
    assert [line.split(") ")[1] for line in lines if line.startswith("(renamed pid=")] == [
        "to out", "of native code", "of a child",
    ], lines  # fmt: skip
    assert f"(Named pid={pid}) in the constructor" in lines and f"(Named(x) pid={pid}) in a call" in lines
    assert [line.split(") ")[1] for line in err.getvalue().splitlines() if "renamed" in line] == ["to err"]


def test_a_line_without_an_end_is_shown_also_when_its_worker_dies_or_goes_on() -> None:
    def write(what: str) -> None:
        print(f"printed_{what}", end="")
        sys.stderr.write(f"written_{what}")

    @ray.remote
    def returns() -> None:
        write("returns")

    @ray.remote(max_retries=0)
    def exits() -> None:
        write("exits")
        os._exit(3)

    @ray.remote(max_retries=0)
    def killed() -> None:
        write("killed")
        os.kill(os.getpid(), 9)

    @ray.remote
    class Runs:
        def runs(self) -> None:
            write("runs")
            time.sleep(1000)

    with driver(num_cpus=1) as (out, err):
        ray.get(returns.remote())
        for task in (exits, killed):
            with pytest.raises(ray.exceptions.WorkerCrashedError):
                ray.get(task.remote())
        actor = Runs.remote()
        held = actor.runs.remote()
        deadline = time.monotonic() + 30
        while "written_runs" not in err.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        for what in ("returns", "exits", "killed", "runs"):
            assert f"printed_{what}" in out.getvalue() and f"written_{what}" in err.getvalue(), what
        del held


def test_lines_of_threads_do_not_mix() -> None:
    @ray.remote
    def prints() -> None:
        def lines(number: int) -> None:
            for _ in range(200):
                print("a", number, "z")

        threads = [threading.Thread(target=lines, args=[number]) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with driver(num_cpus=1) as (out, _):
        ray.get(prints.remote())
    lines = [line.split(") ")[1] for line in out.getvalue().splitlines() if ") a " in line]
    assert sorted(lines) == sorted(f"a {number} z" for number in range(4) for _ in range(200))


@pytest.mark.parametrize(("variable", "option", "shown"), [("0", None, False), ("0", True, True), ("1", None, True)])
def test_a_variable_says_whether_output_is_shown_unless_the_program_does(
    variable: str, option: bool | None, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @ray.remote
    def speak() -> None:
        print("printed")

    monkeypatch.setenv("RAY_LOG_TO_DRIVER", variable)
    with driver(num_cpus=1, log_to_driver=option) as (out, _):
        ray.get(speak.remote())
    assert ("printed" in out.getvalue()) is shown


def test_lines_of_a_job_with_a_logging_config_have_no_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    @ray.remote
    def speak() -> None:
        print("printed")
        logging.getLogger("of_the_task").warning("logged")

    def lines_of(**options: object) -> tuple[str, str]:
        root, out, err = logging.getLogger(), "", ""
        handlers, level = root.handlers[:], root.level
        try:
            with driver(num_cpus=1, **options) as streams:
                ray.get(speak.remote())
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
        out, err = (stream.getvalue() for stream in streams)
        return next(x for x in out.splitlines() if "printed" in x), next(x for x in err.splitlines() if "logged" in x)

    printed, logged = lines_of(logging_config=ray.LoggingConfig(encoding="TEXT"))
    assert printed == "printed"
    assert "job_id=" in logged
    assert "pid=" not in logged
    printed, logged = lines_of()
    assert printed.startswith("(speak pid=")
    assert logged.startswith("(speak pid=")
    monkeypatch.setenv("RAY_LOGGING_CONFIG_ENCODING", "JSON")
    printed, logged = lines_of()
    assert printed == "printed"
    assert json.loads(logged)["message"] == "logged"


UNAWAITED = """
import time, hpcray as ray

ray.init("local", num_cpus=1)

@ray.remote
def told(ref, seconds):
    time.sleep(seconds)
    print("told", ref, flush=True)

ray.get(told.remote("began", 0))  # a worker is up
"""


@pytest.mark.parametrize(
    ("last", "printed"),
    [('told.remote(told.remote("last", 0), 0.05)', ["last", "None"]), ('told.remote("too late", 30)', [])],
)
def test_a_program_that_does_not_wait_for_its_last_tasks_shows_what_they_print_at_once(
    last: str, printed: list[str]
) -> None:
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", UNAWAITED + last], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert [line.split(") told ")[1] for line in ran.stdout.splitlines()] == ["began", *printed]
    assert time.monotonic() - began < 25


def test_the_output_of_a_worker_that_died_long_ago_is_shown_once() -> None:
    @ray.remote(max_retries=0)
    def ends() -> None:
        print("the only line", flush=True)
        os._exit(7)

    with driver(num_cpus=1) as (out, _):
        with pytest.raises(ray.exceptions.WorkerCrashedError):
            ray.get(ends.remote())
        deadline = time.monotonic() + 60
        while "the only line" not in out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)  # past the death of its worker
    assert out.getvalue().count("the only line") == 1


def test_a_lot_of_output_arrives_whole_and_in_order() -> None:
    count = 60_000

    @ray.remote
    def chatter() -> None:
        for number in range(count):
            print(f"line {number} {'x' * 50}")

    with driver(num_cpus=1) as (out, _):
        ray.get(chatter.remote())
    numbers = [int(line.split("line ")[1].split()[0]) for line in out.getvalue().splitlines() if "line " in line]
    assert numbers == list(range(count))


def test_a_large_log_file_is_rotated_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ROTATION_MAX_BYTES", "20000")
    monkeypatch.setenv("RAY_ROTATION_BACKUP_COUNT", "2")

    @ray.remote
    def chatter(begin: int) -> None:
        for number in range(begin, begin + 400):
            print(f"line {number} {'x' * 50}")

    with driver(num_cpus=1) as (out, _):
        for begin in range(0, 4000, 400):
            ray.get(chatter.remote(begin))
            time.sleep(0.2)
        from hpcray.compat.names import worker

        logs = Path(worker.__getattr__("_global_node").get_logs_dir_path())
        files = [path for path in logs.iterdir() if ".out" in path.name and path.stat().st_size]
        assert sorted(path.name.partition(".out")[2] for path in files) == ["", ".1", ".2"]
        assert all(path.stat().st_size <= 20000 for path in files)
    numbers = [int(line.split("line ")[1].split()[0]) for line in out.getvalue().splitlines() if "line " in line]
    assert numbers == list(range(4000))


SECOND = """
import sys
import hpcray as ray
ray.init({address!r}, log_to_driver={shown})

@ray.remote
def f():
    print("said by the second one")

ray.get(f.remote())
"""


@pytest.mark.parametrize("shown", [True, False])
def test_each_driver_shows_what_its_own_workers_print(shown: bool) -> None:
    @ray.remote
    def f() -> None:
        print("said by the first one")

    with driver(num_cpus=2) as (out, _):
        ray.get(f.remote())
        program = SECOND.format(address=ray.get_runtime_context().gcs_address, shown=shown)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "said by the first one" in out.getvalue() and "second" not in out.getvalue()
    assert ("said by the second one" in done.stdout) is shown and "first" not in done.stdout, done
