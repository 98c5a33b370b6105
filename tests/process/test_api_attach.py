"""A second program joins a running session."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from engine import eventually, ray, run_script

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2, "namespace": "shared", "resources": {"mark": 3}}


@ray.remote
class Board:
    def __init__(self):
        self.notes = {}

    def write(self, key, value):
        self.notes[key] = value

    def read(self, key):
        return self.notes.get(key)


@pytest.fixture
def second(tmp_path: Path):
    """Run a script that has joined this session; returns what it printed."""

    def run(body: str) -> str:
        path = tmp_path / "second.py"
        head = "import engine_under_test as ray\nray.init(address='auto', namespace='shared')\n"
        path.write_text(head + textwrap.dedent(body))
        ended = run_script(path)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    return run


def test_it_sees_the_same_cluster(second):
    out = second("print(ray.cluster_resources()['mark'], len(ray.nodes()), ray.is_initialized())")
    assert "3.0 1 True" in out


def test_it_runs_tasks_of_its_own(second):
    out = second(
        """
        class Local:
            def __init__(self, x): self.x = x
        @ray.remote
        def f(x): return Local(x * 2)
        print([got.x for got in ray.get([f.remote(i) for i in range(10)])])
        """
    )
    assert str([2 * i for i in range(10)]) in out


def test_named_actors_are_shared_both_ways(second):
    board = Board.options(name="board").remote()
    ray.get(board.write.remote("first", [1]))
    out = second(
        """
        board = ray.get_actor("board")
        print("read", ray.get(board.read.remote("first")))
        ray.get(board.write.remote("second", {"k": 2}))
        """
    )
    assert "read [1]" in out
    assert ray.get(board.read.remote("second")) == {"k": 2}


def test_its_actors_end_with_it_and_detached_ones_do_not(second):
    second(
        """
        @ray.remote
        class Mine:
            def hello(self): return "hello"
        keep = [Mine.options(name="mine").remote(), Mine.options(name="ours", lifetime="detached").remote()]
        ray.get([actor.hello.remote() for actor in keep])
        """
    )

    def gone():
        try:
            ray.get_actor("mine")
        except ValueError:
            return True
        return False

    eventually(gone)
    ours = ray.get_actor("ours")
    assert ray.get(ours.hello.remote()) == "hello"
    ray.kill(ours)


def test_its_crash_ends_nothing_of_ours(second, tmp_path):
    board = Board.remote()
    path = tmp_path / "crash.py"
    path.write_text(
        "import engine_under_test as ray, os\nray.init(address='auto', namespace='shared')\n"
        "import time\nrefs = [ray.remote(lambda: time.sleep(600)).remote() for _ in range(4)]\n"
        "ray.wait(refs, timeout=0.5)\nos._exit(9)\n"
    )
    assert run_script(path).returncode == 9
    ray.get(board.write.remote("k", 1))
    assert ray.get(board.read.remote("k")) == 1
    assert ray.get([ray.remote(lambda i: i).remote(i) for i in range(4)]) == [0, 1, 2, 3]
    eventually(lambda: ray.available_resources().get("CPU") == 2)
