"""Processes that a driver, a task or an actor starts, in whatever way, join the job of the one that started them."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
from engine import ROOT, ray


@pytest.fixture(scope="module")
def counter() -> Iterator[Any]:
    ray.init(num_cpus=2, namespace="children", include_dashboard=False)

    @ray.remote(num_cpus=0)
    class Counter:
        def __init__(self):
            self.count = 0

        def add(self):
            self.count += 1
            return self.count

    found = Counter.options(name="counter").remote()
    ray.get(found.add.remote())
    yield found
    ray.shutdown()


def count() -> tuple[str, bool]:
    """What a child does: the first use of the API joins."""
    import hpcray

    known = hpcray.get_actor("counter")  # in the namespace of the parent
    return hpcray.get_runtime_context().get_node_id(), hpcray.get(known.add.remote(), timeout=30) > 1


def _put(queue: Any) -> None:
    queue.put(count())


_PROGRAM = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {os.path.dirname(os.path.abspath(__file__))!r}, {str(ROOT / "tests")!r}]
import hpcray
INIT
known = hpcray.get_actor("counter")
print(hpcray.get_runtime_context().get_node_id(), hpcray.get(known.add.remote(), timeout=30) > 1)
"""


def _by_multiprocessing(method: str) -> tuple[str, bool]:
    context: Any = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_put, args=(queue,))
    child.start()
    found = queue.get(timeout=60)
    child.join(30)
    return found


def _by_subprocess(call: str) -> tuple[str, bool]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.replace("INIT", call)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    node, counted = done.stdout.split()
    return node, counted == "True"


def _by_pool() -> tuple[str, bool]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(count).result(timeout=60)


WAYS = {
    "fork": lambda: _by_multiprocessing("fork"),
    "spawn": lambda: _by_multiprocessing("spawn"),
    "pool": _by_pool,
    "program": lambda: _by_subprocess(""),
    "program that calls init": lambda: _by_subprocess("hpcray.init()"),
}


def _start(way: str) -> tuple[str, bool]:
    sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), str(ROOT / "tests")]
    import test_child_processes

    return test_child_processes.WAYS[way]()


def _start_in_task(way: str, here: str) -> tuple[str, bool]:
    sys.path[:0] = [here, os.path.join(os.path.dirname(here))]
    import test_child_processes

    return test_child_processes._start(way)


class _Starter:
    def start(self, way: str, here: str) -> tuple[str, bool]:
        return _start_in_task(way, here)


HERE = os.path.dirname(os.path.abspath(__file__))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["driver", "task", "actor"])
def test_they_count_with_the_actor_of_their_parent_s_job(counter: Any, where: str, way: str) -> None:
    if where == "driver":
        found = WAYS[way]()
    elif where == "task":
        found = ray.get(ray.remote(num_cpus=0)(_start_in_task).remote(way, HERE), timeout=60)
    else:
        found = ray.get(ray.remote(num_cpus=0)(_Starter).remote().start.remote(way, HERE), timeout=60)
    assert found == (ray.get_runtime_context().get_node_id(), True)


def test_a_child_that_describes_a_node_starts_a_job_of_its_own(counter: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import hpcray as r; r.init(num_cpus=1); print(r.get_runtime_context().get_node_id())"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() != [ray.get_runtime_context().get_node_id()]
    assert "starts a job of its own" in done.stderr and "hint: init()" in done.stderr


def test_a_program_that_outlives_its_parent_s_job_starts_its_own() -> None:
    code = "import hpcray as r; r.init(); print(r.get_runtime_context().get_node_id())"
    environ = {**os.environ, "HPCRAY_SESSION": "/tmp/of-a-job-that-has-ended", "HPCRAY_NAMESPACE": "x"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and len(done.stdout.split()) == 1, done.stderr


# ------------------------------------------------------------ signals of a child that is forked

_OF_A_CHILD = """
import json, multiprocessing, os, signal, sys, threading
import hpcray as ray

NUMBERS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2


def mine(number, frame):
    pass


def shown(number):
    handler = signal.getsignal(number)
    return getattr(handler, "__name__", None) or str(int(handler))


def forked():
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, json.dumps([*map(shown, NUMBERS), signal.set_wakeup_fd(-1)]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(os.read(read, 1000))


def of_children():
    found = [forked()]
    thread = threading.Thread(target=lambda: found.append(forked()))
    thread.start()
    thread.join()
    signal.signal(signal.SIGUSR1, mine)
    found.append(forked())
    return found


def pools():
    for _ in range(20):  # each process is ended by SIGTERM
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    return True


ray.init(num_cpus=1)
told = ray.get([ray.remote(max_calls=1)(of_children).remote(), ray.remote(pools).remote()], timeout=60)
print(json.dumps([*told, pools(), of_children(), ray.get(ray.remote(lambda: "not drained").remote())]), flush=True)
"""


@pytest.mark.parametrize("drain", ["", "USR1,TERM"], ids=["default", "as under Slurm"])
def test_a_forked_child_has_the_usual_signals_and_a_pool_of_processes_ends(drain: str, tmp_path: Any) -> None:
    """A pool in a task waited for ever under Slurm, and one in a program drained the job."""
    program = tmp_path / "program.py"
    program.write_text(_OF_A_CHILD)
    environ = {**os.environ, **({"HPCRAY_DRAIN_SIGNALS": drain} if drain else {})}
    done = subprocess.run([sys.executable, program], env=environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    usual = ["default_int_handler", "0", "0", "0", "0", -1]
    own = ["default_int_handler", "0", "0", "mine", "0", -1]
    assert json.loads(done.stdout) == [[usual, usual, own], True, True, [usual, usual, own], "not drained"]
