"""A program that starts its own node with `init()`: the option as a variable ends its hangs, too."""

from __future__ import annotations

import pytest
from helpers.jobs import Job, embedded

CIRCLE = """\
import hpcray as ray

{quick}


@ray.remote(num_cpus=0)
class A:
    def f(self, me):
        return ray.get({call})

    def g(self):
        return 1

    def items(self):
        yield 1


ray.init(num_cpus=2, end_hangs=30.0)
a = A.remote()
ray.get(a.g.remote())
ray.get(a.f.remote(a))
"""
QUICK = "from hpcray.hangs import stillness\nstillness.SHORTEST_PERIOD, stillness.SECOND_LOOK = 0.2, 0.3"

LOCK = """\
import threading

import hpcray as ray


@ray.remote
def f():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


ray.init(num_cpus=2)
ray.get(f.remote())
"""


@pytest.mark.parametrize(
    ("call", "named"),
    [("me.g.remote()", "A.g"), ("next(me.items.options(num_returns='streaming').remote())", "A.items")],
    ids=["call", "generator"],
)
def test_a_circle_of_calls_is_an_error_of_the_program(tmp_path, call, named):
    script = tmp_path / "program.py"
    script.write_text(CIRCLE.format(quick=QUICK, call=call))
    with Job(embedded(script)) as job:
        ended = job.wait(60.0)
    assert ended.code == 1, ended.err
    assert "HangError" in ended.err and "program.py" in ended.err and named in ended.err


@pytest.mark.slow
def test_a_task_that_hangs_beside_an_idle_worker_ends_the_program(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(LOCK)
    with Job(embedded(script), {"HPCRAY_END_HANGS": "10", "HPCRAY_HANG_EXIT_CODE": "81"}) as job:
        ended = job.wait(60.0)
    assert ended.code == 81, ended.err
    assert "taken for hung" in ended.err and "program.py" in ended.err
