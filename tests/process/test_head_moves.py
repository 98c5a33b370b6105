"""A job without a program: programs attach to it, its head moves from node to node, and it outlives its first nodes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.platform.private_files import write_private_file
from hpcray.platform.session_directory import SessionInfo, live_sessions
from hpcray.runtime.node.join_token import request_join_token

NODE = [sys.executable, "-m", "hpcray", "--num-cpus", "1", "--object-store-memory", str(64 << 20)]

PROGRAM = """\
import os, signal, sys, time
import numpy as np
import hpcray as ray
from hpcray.platform.session_directory import live_sessions, read_session
from hpcray.runtime.core_worker.core_worker import need_process

MOVES = 5
ray.init(address=sys.argv[1])
process = need_process()
session = read_session(sys.argv[1]).session
pids = {info.node: info.pid for info in live_sessions() if info.session == session}

@ray.remote(max_retries=-1)
def add(number, array):
    time.sleep(0.05)
    return number + int(array[0])

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Echo:
    def say(self, word):
        return word

echo = Echo.options(name="echo", lifetime="detached").remote()
given = ray.put(np.ones(1 << 17))
for number in range(MOVES):
    refs = [add.remote(count, given) for count in range(30)]
    old = process.place.head
    os.kill(pids[old], signal.SIGKILL if number % 2 else signal.SIGTERM)
    while process.place.head == old:
        time.sleep(0.02)
    assert sum(ray.get(refs)) == sum(range(1, 31))
    assert ray.get(ray.get_actor("echo").say.remote(number)) == number
    while ray.nodes()[old]["Alive"]:
        time.sleep(0.02)
    print("moved", flush=True)
print("alive", sum(row["Alive"] for row in ray.nodes()), flush=True)
"""


BOUND = """\
import os, signal, sys, time
import numpy as np
import hpcray as ray
from hpcray.platform.session_directory import live_sessions, read_session
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(address=sys.argv[1])
session = read_session(sys.argv[1]).session
(pid,) = [info.pid for info in live_sessions() if info.session == session and info.node == 0]
there = On(ray.nodes()[0]["NodeID"], soft=False)

@ray.remote(num_cpus=0.5)
def make():
    return np.ones(1 << 17)

@ray.remote(num_cpus=0.5)
def hold():
    time.sleep(3)
    return 0

@ray.remote(num_cpus=0.5)
def add(number, array):
    return number + int(array[0])

given = [make.options(scheduling_strategy=there).remote() for number in range(20)]
ray.wait(given, num_returns=20, fetch_local=False)
held = hold.options(scheduling_strategy=there).remote()
time.sleep(0.5)
os.kill(pid, signal.SIGTERM)
time.sleep(0.5)
bound = [add.options(scheduling_strategy=there).remote(number, np.ones(1)) for number in range(20)]
near = [add.remote(number, array) for number, array in enumerate(given)]
print(sum(ray.get([held, *near], timeout=60)), flush=True)
"""


def sessions_of(*processes: subprocess.Popen[bytes]) -> list[SessionInfo]:
    """The session directories of these nodes, once they are up."""
    pids = [process.pid for process in processes]
    deadline = time.monotonic() + 60.0
    while len(found := {info.pid: info for info in live_sessions() if info.pid in pids}) < len(pids):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.05)
    return [found[pid] for pid in pids]


@contextlib.contextmanager
def nodes(token: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A job without a program, of so many nodes that have all come one by one."""
    started = [subprocess.Popen([*NODE, "--no-program"])]
    try:
        (first,) = sessions_of(*started)
        write_private_file(str(token), request_join_token(first.path, path=str(token)))
        started += [subprocess.Popen([*NODE, "--join", str(token)]) for _ in range(count - 1)]
        sessions_of(*started)
        yield started
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_head_moves_five_times_under_load(tmp_path: Path, leak_check: object) -> None:
    with nodes(tmp_path / "token", 7) as started:
        last = max(sessions_of(*started), key=lambda info: info.node)
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        ended = subprocess.run([sys.executable, program, last.path], capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines() == [*["moved"] * 5, "alive 2"]
        left = [process for process in started if process.poll() is None]
        assert len(left) == 2
        for process in left:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in left] == [0, 0], "the departure of the last is the end of the job"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nodes_join_after_the_head_has_moved(tmp_path: Path, leak_check: object) -> None:
    """The file of the join token is written anew."""
    token = tmp_path / "token"
    with nodes(token, 2) as started:
        before = token.read_bytes()
        started[0].send_signal(signal.SIGTERM)
        assert started[0].wait(60) == 0
        assert token.read_bytes() != before and token.stat().st_mode & 0o777 == 0o600
        started.append(subprocess.Popen([*NODE, "--join", str(token)]))
        assert sessions_of(started[2])[0].node == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1, 0.3])
def test_all_nodes_leave_at_once(tmp_path: Path, leak_check: object, delay: float) -> None:
    """The head hands over to a node that leaves too, and may have been declared dead meanwhile."""
    with nodes(tmp_path / "token", 3) as started:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            time.sleep(delay)
        assert [process.wait(60) for process in started] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_head_leaves_while_tasks_wait_for_its_node(tmp_path: Path, leak_check: object) -> None:
    """For their arguments there, or by their strategy. It refuses them, and would be asked again without end."""
    with nodes(tmp_path / "token", 3) as started:
        other = sessions_of(started[1])[0]
        program = tmp_path / "program.py"
        program.write_text(BOUND)
        ended = subprocess.run([sys.executable, program, other.path], capture_output=True, text=True, timeout=90)
        assert ended.stdout == f"{sum(range(1, 21))}\n", ended.stderr
        assert started[0].wait(60) == 0
