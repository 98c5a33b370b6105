"""The template process: forks workers, reports their ends, and cleans up when its raylet is gone."""

from __future__ import annotations

import errno
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from helpers.leaks import LeakCheck, wait_until

from hpcray.platform.fork_server import PACKET_SIZE, WorkerCode, WorkerMain, start_fork_server
from hpcray.platform.process_tree import descendants, describe_exit
from hpcray.platform.session_directory import SessionDirectory

PATIENCE = 60.0


def sleeping() -> WorkerMain:
    """A worker that only waits."""
    return _sleep


def _sleep(session_dir: str, number: int, arena_fd: int) -> NoReturn:
    time.sleep(600)
    os._exit(0)


def describing() -> WorkerMain:
    """A worker that writes down what it finds, then leaves with its number as exit code."""

    def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
        facts = {
            "pid": os.getpid(),
            "group": os.getpgrp(),
            "session": os.getsid(0),
            "environ": dict(os.environ),
            "descriptors": [path for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and (path := _target(fd))],
            "stdin": os.readlink("/proc/self/fd/0"),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "others": {
                name: signal.getsignal(getattr(signal, name)) is signal.SIG_DFL
                for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
            },
            "arena": os.pread(arena_fd, 5, 0).decode(),
        }
        Path(session_dir, f"{number}.new").write_text(json.dumps(facts))
        os.rename(f"{session_dir}/{number}.new", f"{session_dir}/{number}.json")
        sys.exit(number)

    return main


def _target(fd: str) -> str:
    """What a descriptor is; "" for the one that listed them."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


class Template:
    """A template process with what it needs, and its reports."""

    def __init__(self, load: Callable[[], WorkerMain]) -> None:
        self.session = SessionDirectory.create()
        self.arena = os.memfd_create("arena")
        os.write(self.arena, b"arena")
        self.link = start_fork_server(lambda: WorkerCode(load()), self.session.path, self.arena, self.session.lock_fd)
        self.link.load()
        self.seen: list[list[Any]] = []

    def wait_for(self, what: str, number: int | None = None) -> list[Any]:
        """The arguments of the first report of this kind, waiting for it if need be."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for report in self.seen:
                if report[0] == what and (number is None or report[1] == number):
                    return report[1:]
            assert time.monotonic() < deadline and not self.link.gone, f"no {what} {number}, only {self.seen}"
            select.select([self.link], [], [], 0.1)
            self.seen += self.link.reports()

    def wait_for_workers_end(self) -> None:
        """Until the template has begun to clean up, seen from outside."""
        wait_until(lambda: not descendants(self.link.pid), "the end of the workers")

    def stop(self) -> int:
        """Stop it; its wait status."""
        self.link.stop()
        wait_until(lambda: self.link.reports() or self.link.gone, "the template's end")
        return self.link.reap()

    def close(self) -> None:
        """Let go of everything here."""
        self.link.close()
        self.link.reap()
        os.close(self.arena)
        self.session.remove()


@pytest.fixture
def make(leak_check: LeakCheck) -> Iterator[Callable[[Callable[[], WorkerMain]], Template]]:
    made: list[Template] = []

    def start(load: Callable[[], WorkerMain]) -> Template:
        made.append(Template(load))
        return made[-1]

    yield start
    for template in made:
        template.close()


Make = Callable[[Callable[[], WorkerMain]], Template]


def test_forks_and_reports_the_end(make: Make) -> None:
    template = make(describing)
    for number in (1, 2, 3):
        template.link.fork(number, ())
    for number in (1, 2, 3):
        (_, pid), (_, status, _) = template.wait_for("forked", number), template.wait_for("exited", number)
        assert pid > 0
        assert describe_exit(status) == f"exit code {number}"


def test_what_a_worker_finds(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    monkeypatch.setenv("PMIX_RANK", "3")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    template = make(describing)
    template.link.fork(1, (("MINE", "yes"), ("OMP_NUM_THREADS", "1")))
    template.wait_for("exited", 1)
    facts = json.loads(Path(template.session.path, "1.json").read_text())
    environ = facts["environ"]
    assert (environ["MINE"], environ["OMP_NUM_THREADS"], environ["SLURM_JOB_ID"]) == ("yes", "1", "17")
    assert not [name for name in environ if name.startswith(("OMPI_", "PMIX_"))]
    assert facts["arena"] == "arena"
    assert facts["stdin"] == "/dev/null"
    assert facts["interrupt"] and all(facts["others"].values()), facts["others"]
    assert facts["group"] == facts["pid"]
    assert facts["session"] == template.link.pid
    # Nothing of the raylet, no lock, no socket of the template.
    assert len(facts["descriptors"]) == 1 and "arena" in facts["descriptors"][0]


def test_environments_do_not_mix(make: Make) -> None:
    template = make(describing)
    template.link.fork(1, (("ONLY_FIRST", "1"),))
    template.link.fork(2, ())
    template.wait_for("exited", 2)
    assert "ONLY_FIRST" not in json.loads(Path(template.session.path, "2.json").read_text())["environ"]


TORCH = """
import json, os
threads = os.cpu_count()
seeds = []
def set_num_threads(count):
    global threads
    threads = count
class default_generator:
    seed = staticmethod(lambda: seeds.append(os.getpid()))
"""


def test_a_preloaded_pytorch_has_one_thread_and_seeds_of_each_worker(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> WorkerMain:
        def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
            torch = sys.modules["torch"]
            found = {"pid": os.getpid(), "threads": torch.threads, "seeds": torch.seeds}
            Path(session_dir, f"{number}.json").write_text(json.dumps(found))
            sys.exit(0)

        return main

    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    template = make(load)
    template.link.prepare((), ["torch"])
    for number in (1, 2):
        template.link.fork(number, ())
        template.wait_for("exited", number)
        found = json.loads(Path(template.session.path, f"{number}.json").read_text())
        assert (found["threads"], found["seeds"]) == (1, [found["pid"]])


DRAWS = """
import os, random
own = random.Random()
hooked = random.Random()
os.register_at_fork(after_in_child=hooked.seed)
"""


def test_what_a_preloaded_module_registers_for_a_fork_runs_in_each_worker(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> WorkerMain:
        def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
            draws = sys.modules["draws"]
            found = [draws.hooked.random(), random.random(), draws.own.random()]
            Path(session_dir, f"{number}.json").write_text(json.dumps(found))
            sys.exit(0)

        return main

    (tmp_path / "draws.py").write_text(DRAWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    template = make(load)
    template.link.prepare((), ["draws", "no_such_module"])
    found = []
    for number in (1, 2, 3):
        template.link.fork(number, ())
        template.wait_for("exited", number)
        found.append(json.loads(Path(template.session.path, f"{number}.json").read_text()))
    hooked, random_, own = (set(drawn) for drawn in zip(*found, strict=True))
    assert len(hooked) == len(random_) == 3
    assert len(own) == 1, "docs/how-to/startup.md says so"
    (good, bad) = (report[1:] for report in template.seen if report[0] == "preloaded")
    assert good == ["draws", ""] and bad[0] == "no_such_module" and "ModuleNotFoundError" in bad[1]
    assert "draws" not in sys.modules, "the raylet has imported nothing"


def test_kill(make: Make) -> None:
    template = make(sleeping)
    template.link.fork(5, ())
    template.wait_for("forked", 5)
    template.link.kill(5)
    _, status, _ = template.wait_for("exited", 5)
    assert describe_exit(status) == "signal 9 (SIGKILL)"
    template.link.kill(5)  # gone already: no effect
    template.link.fork(6, ())
    template.wait_for("forked", 6)


def test_children_of_a_worker_die_with_it(make: Make) -> None:
    def load() -> WorkerMain:
        def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
            child = subprocess.Popen(["sleep", "600"])
            Path(session_dir, "child").write_text(str(child.pid))
            os._exit(0)

        return main

    template = make(load)
    template.link.fork(1, ())
    template.wait_for("exited", 1)
    child = int(Path(template.session.path, "child").read_text())
    wait_until(lambda: child not in descendants(template.link.pid), "the end of the worker's child")


def test_failed_fork_is_no_end(make: Make) -> None:
    def load() -> WorkerMain:
        real, failures = os.fork, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

        def fork() -> int:
            if failures:
                raise failures.pop()
            return real()

        os.fork = fork
        return _sleep

    template = make(load)
    template.link.fork(1, ())
    template.link.fork(2, ())
    assert "Resource temporarily unavailable" in template.wait_for("failed", 1)[1]
    template.wait_for("forked", 2)


def test_import_error_is_told(make: Make) -> None:
    def load() -> WorkerMain:
        raise ImportError("no such module as the test wants")

    template = make(load)
    assert "no such module as the test wants" in template.wait_for("broken")[0]
    template.link.fork(1, ())
    template.wait_for("failed", 1)


def test_environment_that_does_not_fit_fails_at_once(make: Make) -> None:
    template = make(sleeping)
    template.link.fork(1, (("BIG", "x" * PACKET_SIZE),))
    assert "too large" in template.wait_for("failed", 1)[1]


def test_many_requests_do_not_block(make: Make) -> None:
    template = make(describing)
    os.kill(template.link.pid, signal.SIGSTOP)
    for number in range(1, 41):
        template.link.fork(number, (("PADDING", "x" * 50_000),))
    assert not template.link.flush(), "the socket should be full by now"
    os.kill(template.link.pid, signal.SIGCONT)
    deadline = time.monotonic() + 60
    while len([1 for report in template.seen if report[0] == "exited"]) < 40:
        assert time.monotonic() < deadline
        template.link.flush()
        select.select([template.link], [], [], 0.01)
        template.seen += template.link.reports()


def test_stop_leaves_nothing(make: Make) -> None:
    def load() -> WorkerMain:
        def main(session_dir: str, number: int, arena_fd: int) -> NoReturn:
            subprocess.Popen(["sleep", "600"], start_new_session=True)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            Path(session_dir, f"up{number}").touch()
            time.sleep(600)
            os._exit(0)

        return main

    template = make(load)
    for number in range(1, 6):
        template.link.fork(number, ())
    wait_until(lambda: all(os.path.exists(f"{template.session.path}/up{n}") for n in range(1, 6)), "the workers")
    assert len(descendants(template.link.pid)) == 10
    below = descendants(template.link.pid)
    assert template.stop() == 0
    assert not os.path.exists(template.session.path)
    wait_until(lambda: not [pid for pid in below if os.path.exists(f"/proc/{pid}/exe")], "the end of all descendants")


RAYLET = """
import os, subprocess, sys, time
sys.path.insert(0, {tests!r})
from process.test_fork_server import Template, sleeping
template = Template(sleeping)
for number in (1, 2):
    template.link.fork(number, ())
    template.wait_for("forked", number)
driver = subprocess.Popen([sys.executable, "-c", {driver!r}], stdout=subprocess.PIPE)
driver.stdout.readline()
template.link.watch_driver(driver.pid)
print(template.session.path, driver.pid, flush=True)
if {slow}:
    sys.stdin.read()
    template.link.close()
    template.wait_for_workers_end()
    time.sleep(0.2)
    os._exit(1)
time.sleep(600)
"""
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print(1, flush=True)\nwhile 1: signal.pause()"
)
CIVIL = "import signal; print(1, flush=True); signal.pause()"


@pytest.mark.parametrize("driver", [CIVIL, STUBBORN])
@pytest.mark.parametrize("slow", [False, True])
def test_janitor(leak_check: LeakCheck, driver: str, slow: bool) -> None:
    """slow: as the kernel may do it, the dying raylet's descriptors are closed long before its children have another
    parent."""
    tests = str(Path(__file__).resolve().parents[1])
    raylet = subprocess.Popen(
        [sys.executable, "-c", RAYLET.format(tests=tests, driver=driver, slow=slow)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert raylet.stdout is not None and raylet.stdin is not None
    path, pid = raylet.stdout.readline().split()
    assert os.path.isdir(path)
    # A worker takes its name a moment after the fork.
    wait_until(lambda: len(leak_check.processes("hpcray-worker")) == 2, "two workers")
    if not slow:
        raylet.kill()
    raylet.stdin.close()
    raylet.wait()
    raylet.stdout.close()
    leak_check.check()
    assert int(pid) not in leak_check.processes()


def test_death_of_the_template_ends_its_workers(make: Make) -> None:
    template = make(sleeping)
    template.link.fork(1, ())
    _, pid = template.wait_for("forked", 1)
    os.kill(template.link.pid, signal.SIGKILL)
    wait_until(lambda: template.link.reports() or template.link.gone, "the end of the template")
    assert describe_exit(template.link.reap()) == "signal 9 (SIGKILL)"
    wait_until(lambda: not os.path.exists(f"/proc/{pid}/exe"), "the worker's end")
    template.link.fork(2, ())  # nobody hears it, and nothing breaks
    template.link.kill(1)
