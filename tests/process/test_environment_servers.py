"""From its second worker on, an environment has a fork server of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine import ray
from helpers.jobs import ROOT, Job
from helpers.leaks import wait_until

from hpcray.platform import fork_server
from hpcray.platform.fork_server import EnvironmentServers, WorkerCode
from hpcray.processes.environment_server import needs_server

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


def _parent(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        parent = stat.read().rpartition(")")[2].split()[1]
    with open(f"/proc/{parent}/comm") as comm:
        return comm.read().strip()


@ray.remote(num_cpus=0)
class Worker:
    def facts(self) -> tuple[Any, ...]:
        import numpy  # noqa: F401
        from threadpoolctl import threadpool_info

        return (
            os.getpid(),
            os.environ.get("TZ"),
            time.strftime("%Z"),
            max(one["num_threads"] for one in threadpool_info()),
        )

    def draw(self) -> tuple[Any, ...]:
        import numpy

        return random.random(), float(numpy.random.random()), os.urandom(4)


def _workers(count: int, **variables: str) -> list[Any]:
    return [Worker.options(runtime_env={"env_vars": variables}).remote() for _ in range(count)]


def test_later_workers_of_an_environment_are_forks_with_its_variables():
    workers = _workers(6, TZ="Asia/Tokyo", OMP_NUM_THREADS="1")
    found = ray.get([one.facts.remote() for one in workers], timeout=60)
    assert {facts[1:] for facts in found} == {("Asia/Tokyo", "JST", 1)}
    parents = sorted(_parent(facts[0]) for facts in found)
    assert parents == ["hpcray-env"] * 5 + ["hpcray-template"]
    drawn = ray.get([one.draw.remote() for one in workers], timeout=60)
    assert all(len(set(column)) == 6 for column in zip(*drawn, strict=True))


def test_environments_do_not_share_a_server():
    found = [
        ray.get([one.facts.remote() for one in _workers(3, TZ=zone)], timeout=60)
        for zone in ("Asia/Tokyo", "Asia/Dubai")
    ]
    assert [{facts[1] for facts in one} for one in found] == [{"Asia/Tokyo"}, {"Asia/Dubai"}]


def test_what_does_not_need_a_process_of_its_own_is_forked_by_the_node():
    workers = _workers(3, UNREAD="1")
    found = ray.get([one.facts.remote() for one in workers], timeout=60)
    assert {_parent(facts[0]) for facts in found} == {"hpcray-template"}


def test_a_server_that_is_killed_takes_its_workers_along_and_they_start_again():
    workers = [
        Worker.options(runtime_env={"env_vars": {"TZ": "Asia/Tokyo"}}, max_restarts=-1, max_task_retries=-1).remote()
        for _ in range(4)
    ]
    before = [facts[0] for facts in ray.get([one.facts.remote() for one in workers], timeout=60)]
    forked = [pid for pid in before if _parent(pid) == "hpcray-env"]
    with open(f"/proc/{forked[0]}/stat") as stat:
        server = int(stat.read().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in forked), "the end of its workers")
    after = ray.get([one.facts.remote() for one in workers], timeout=60)
    assert len({facts[0] for facts in after} - set(before)) == len(forked) and {facts[2] for facts in after} == {"JST"}


def test_a_worker_that_dies_is_reported():
    workers = _workers(3, TZ="Asia/Tokyo")
    pids = [facts[0] for facts in ray.get([one.facts.remote() for one in workers], timeout=60)]
    for pid, worker in zip(pids, workers, strict=True):
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(worker.facts.remote(), timeout=60)


def test_actors_dropped_while_they_wait_for_a_worker_never_start(tmp_path):
    @ray.remote(num_cpus=0)
    class Marked:
        def __init__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

        def pid(self) -> int:
            return os.getpid()

    env = {"env_vars": {"TZ": "Asia/Tokyo"}}
    actors = [Marked.options(runtime_env=env).remote() for _ in range(24)]
    for one in actors[1:]:
        ray.kill(one)
    ray.get(actors[0].pid.remote(), timeout=60)
    ray.get(Marked.options(runtime_env=env).remote().pid.remote(), timeout=60)
    assert len(list(tmp_path.iterdir())) <= 2 + INIT["num_cpus"]


_PROGRAM = """
import os, sys, time
import hpcray as ray

@ray.remote(num_cpus=0)
class Actor:
    def look(self):
        early = "with_mode" in sys.modules
        import with_mode
        return with_mode.MODE, early, with_mode.PID == os.getpid()

ray.init(num_cpus=2)
actors = [Actor.options(runtime_env={"env_vars": {"THE_MODE": "own"}}).remote() for _ in range(4)]
for one in ray.get([actor.look.remote() for actor in actors], timeout=60):
    print(*one)
"""


def test_servers_import_what_the_job_preloads_with_their_own_variables(tmp_path):
    (tmp_path / "with_mode.py").write_text("import os\nMODE, PID = os.environ.get('THE_MODE'), os.getpid()\n")
    (tmp_path / "program.py").write_text(_PROGRAM)
    environ = {"HPCRAY_PRELOAD": "with_mode", "PYTHONPATH": f"{tmp_path}:{ROOT}", "THE_MODE": "job"}
    with Job([sys.executable, str(tmp_path / "program.py")], environ) as job:
        ended = job.wait(120.0)
    assert ended.code == 0 and sorted(ended.out.splitlines()) == ["own False True"] + ["own True False"] * 3, ended


def test_a_server_that_cannot_import_what_is_preloaded_is_done_without(tmp_path):
    (tmp_path / "with_mode.py").write_text(
        "import os\nMODE, PID = os.environ.get('THE_MODE'), os.getpid()\n"
        "if MODE == 'own' and open('/proc/self/comm').read().strip() == 'hpcray-env': os._exit(2)\n"
    )
    (tmp_path / "program.py").write_text(_PROGRAM)
    environ = {"HPCRAY_PRELOAD": "with_mode", "PYTHONPATH": f"{tmp_path}:{ROOT}", "THE_MODE": "job"}
    with Job([sys.executable, str(tmp_path / "program.py")], environ) as job:
        ended = job.wait(120.0)
    assert ended.code == 0 and ended.out.splitlines() == ["own False True"] * 4, ended


class TestServers:
    ENV = (("A", "1"),)

    @pytest.fixture(autouse=True)
    def children(self) -> Iterator[None]:
        self.pids: list[int] = []
        yield
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):  # `EnvironmentServers` has reaped it
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

    def make(self) -> tuple[EnvironmentServers, list[Any], list[socket.socket]]:
        said: list[Any] = []
        ends: list[socket.socket] = []

        def start(env: Any) -> tuple[int, socket.socket]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ends.append(theirs)
            pid = os.fork()
            if pid == 0:
                for end in (ours, *ends):
                    end.close()
                time.sleep(600)
            self.pids.append(pid)
            return pid, ours

        servers = EnvironmentServers(
            start, lambda number, env: said.append(("here", number)), lambda *report: said.append(report)
        )
        return servers, said, ends

    def test_one_worker_has_none(self):
        servers, _, ends = self.make()
        assert not servers.take(1, self.ENV) and not servers.take(2, (("A", "2"),)) and not ends

    def test_without_a_worker_for_a_while_it_ends(self, monkeypatch):
        servers, said, (end,) = self.started()
        monkeypatch.setattr(fork_server, "IDLE_TIME", 0.0)
        assert servers.end_idle() is None and servers.descriptors(), "it has a worker"
        end.send(fork_server._encode(["exited", 2, 0, ""]))
        servers.read(servers.descriptors()[0])
        assert servers.end_idle() is None and not servers.descriptors()
        assert end.recv(100) == fork_server._encode(["fork", 2, ()]) and end.recv(100) == b""
        assert said == [("forked", 2, 77), ("exited", 2, 0, "")]

    def test_what_was_not_forked_when_it_ended_is_forked_by_the_node(self):
        servers, said, ends = self.make()
        servers.take(1, self.ENV)
        servers.take(2, self.ENV)
        servers.take(3, self.ENV)
        servers.kill(3)
        ends[0].close()
        servers.read(servers.descriptors()[0])
        assert said[0] == ("here", 2) and said[1][:2] == ("failed", 3)
        assert not servers.take(4, self.ENV), "it is not tried again"

    def started(self) -> tuple[EnvironmentServers, list[Any], list[socket.socket]]:
        servers, said, ends = self.make()
        servers.take(1, self.ENV)
        assert servers.take(2, self.ENV)
        for report in (["ready"], ["forked", 2, 77]):
            ends[0].send(fork_server._encode(report))
            servers.read(servers.descriptors()[0])
        return servers, said, ends


def test_which_environments_may_have_one():
    plain = (("HPCRAY_RUNTIME_ENV", '{"working_dir": {"hash": "1"}}'),)
    assert not needs_server(()) and not needs_server((("A", "1"),)) and not needs_server(plain)
    assert not WorkerCode(lambda *args: sys.exit()).needs_server(plain)
