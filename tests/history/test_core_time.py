"""The account of core time: it sums to cores × wall, and says what the cores did."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.jobs import Job, embedded
from hypothesis import example, given
from hypothesis import strategies as st

from hpcray.history.job_history import JobHistory
from hpcray.history.node_history import (
    ACTORS,
    BETWEEN,
    BLOCKED,
    FREE,
    OFF_CPU,
    ON_CPU,
    QUEUED,
    UNKNOWN,
    CoreTimeAccount,
)
from hpcray.history.runs import runs

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["answer", "death", "sample"]),
        st.integers(0, 3),
        st.floats(0.0, 5.0),
        st.floats(0.0, 4.0),
        st.floats(0.0, 6.0),
        st.booleans(),
    ),
    max_size=60,
)


@given(STEPS)
@example([("answer", 0, 1.0, 0.0, 0.0, False), ("sample", 0, 0.0, 1.2e-308, 0.0, False)])
def test_rows_add_up_to_cores_times_wall(steps: list[tuple[str, int, float, float, float, bool]]) -> None:
    account, now, busy = CoreTimeAccount(10.0, 4.0), 10.0, 0.0
    for what, number, seconds, cores, amount, flag in steps:
        now, busy = now + seconds, busy + amount
        if what == "answer":
            account.answered(now, bytes([number]), cores, flag, busy, amount)
        elif what == "death":
            account.process_died(now, bytes([number]))
        else:
            account.sample(now, cores, amount, flag)
        rows = account.rows(now)
        assert all(value >= -1e-9 for value in rows.values())
        assert sum(rows.values()) == pytest.approx(4.0 * (now - 10.0))


def test_known_shares() -> None:
    account = CoreTimeAccount(0.0, 4.0)
    account.answered(0.0, b"a", 1.0, False, 0.0, 0.0)
    account.answered(0.0, b"b", 1.0, True, 0.0, 0.0)
    account.sample(5.0, 2.0, 0.0, True)
    account.sample(10.0, 2.0, 1.0, False)
    account.answered(10.0, b"a", 1.0, False, 8.0, 6.0)  # ran for 8 s, 6 of them on a CPU
    account.answered(10.0, b"b", 1.0, True, 1.0, 5.0)  # a call of 1 s; its other threads are not the task's
    assert account.rows(10.0) == pytest.approx(
        {ON_CPU: 7.0, OFF_CPU: 2.0, BETWEEN: 2.0, ACTORS: 9.0, BLOCKED: 2.5, QUEUED: 15.0, FREE: 2.5, UNKNOWN: 0.0}
    )


PROGRAM = """\
import os, resource, sys, time
import hpcray as ray

ray.init(num_cpus=4, resources={"place": 1})


@ray.remote
def sleep(seconds):
    time.sleep(seconds)


@ray.remote
def burn(seconds):
    began = resource.getrusage(resource.RUSAGE_SELF)
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    ended = resource.getrusage(resource.RUSAGE_SELF)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


@ray.remote
def outer(seconds):
    return ray.get(sleep.remote(seconds))


@ray.remote(num_cpus=0)
class Idle:
    def ready(self):
        return True


how, began = sys.argv[1], time.time()
shares = {}
if how == "sleep":
    ray.get([sleep.remote(8) for _ in range(2)])
    shares = {"off": 16}
if how == "burn":
    shares = {"on": sum(ray.get([burn.remote(2) for _ in range(2)]))}
if how == "nested":
    ray.get([outer.remote(8) for _ in range(2)])  # each has lent its core, and nothing else wants it
    shares = {"off": 16, "blocked": 16}
if how == "idle":
    ray.get(Idle.remote().ready.remote())
    time.sleep(8)
if how == "queued":
    ray.get([sleep.options(resources={"place": 1}).remote(4) for _ in range(3)])  # one at a time
    shares = {"off": 12, "queued": 3 * 8}
if how == "actor":
    actor = Idle.options(num_cpus=2).remote()
    ray.get(actor.ready.remote())
    time.sleep(8)
    shares = {"actors": 16}
print(shares)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first"),
    [("sleep", OFF_CPU), ("burn", FREE), ("nested", BLOCKED), ("idle", FREE), ("queued", QUEUED), ("actor", ACTORS)],
)
def test_programs_whose_shares_are_known(how: str, first: str, tmp_path: Path) -> None:
    """Each row is within 5 % of cores × wall of what the program does, and what stands out is the largest one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with Job(embedded(tmp_path / "program.py", how), {"HPCRAY_HISTORY_DIR": str(tmp_path / "histories")}) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
    (run,) = runs(str(tmp_path / "histories"))
    history = JobHistory(run)
    rows, wall = history.head.account, history.last - history.started
    whole, known = 4 * wall, ast.literal_eval(ended.out.splitlines()[-1])
    names = {"on": ON_CPU, "off": OFF_CPU, "actors": ACTORS, "queued": QUEUED, "blocked": BLOCKED}
    truth = dict.fromkeys((ON_CPU, OFF_CPU, BETWEEN, ACTORS, BLOCKED, QUEUED, UNKNOWN), 0.0)
    truth |= {names[name]: seconds for name, seconds in known.items()}
    if how == "burn":
        del truth[OFF_CPU]  # what the machine's other processes have taken of its processors
    print({name: (round(rows[name] / whole, 3), round(seconds / whole, 3)) for name, seconds in truth.items()})
    assert sum(rows.values()) == pytest.approx(whole, rel=0.05)
    for name, seconds in truth.items():
        # A request for a worker counts as waiting until the program has taken it back.
        share = 0.15 if how == "queued" and name == QUEUED else 0.05
        assert rows[name] == pytest.approx(seconds, abs=share * whole), (name, rows)
    assert (
        how in ("burn", "nested")
        or max((name for name in rows if name != FREE or first == FREE), key=rows.__getitem__) == first
    )
