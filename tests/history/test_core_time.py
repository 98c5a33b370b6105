"""The account of core time: it sums to cores × wall, and says what the cores did."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from helpers.jobs import ROOT, Job, embedded
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import astuple

from hpcray.common.figures import MOST_NAMES, OTHERS
from hpcray.history.job_history import JobHistory
from hpcray.history.node_history import (
    ACTORS,
    BETWEEN,
    BEYOND,
    BLOCKED,
    FREE,
    MOVING,
    OFF_CPU,
    ON_CPU,
    OWN,
    QUEUED,
    STARTING,
    UNKNOWN,
    WITHOUT_CORE,
    CoreTimeAccount,
    NodeLook,
)
from hpcray.history.records import FunctionCoreTime, ProcessTime
from hpcray.history.runs import runs
from hpcray.runtime.core_worker import context

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "answer", "death", "look"]),
        st.integers(0, 3),
        st.floats(0.0, 5.0),
        st.floats(0.0, 4.0),
        st.lists(st.floats(0.0, 6.0), min_size=8, max_size=8),
        st.booleans(),
    ),
    max_size=60,
)
NOTHING = (0.0,) * 8


@given(STEPS)
@example([("answer", 0, 1.0, 0.0, NOTHING, False), ("look", 0, 0.0, 1.2e-308, NOTHING, False)])
def test_rows_add_up_to_cores_times_wall(steps: list[tuple[str, int, float, float, list[float], bool]]) -> None:
    account, now = CoreTimeAccount(10.0, 4.0), 10.0
    for what, number, seconds, cores, times, flag in steps:
        now += seconds
        if what == "join":
            account.process_joined(now, bytes([number]))
        elif what == "answer":
            ran = {f"f{place}": seconds for place, seconds in enumerate(times[4:])}
            account.answered(now, bytes([number]), cores, flag, ProcessTime(*times), ran)
        elif what == "death":
            account.process_died(now, bytes([number]))
        else:
            account.look(now, NodeLook(cores, *times[:5], now - 1.0 if flag else None))
        rows = account.rows(now)
        assert all(value >= -1e-9 for value in [*rows.values(), *account.beside(0.0).values()])
        assert all(value >= -1e-9 for one in account.functions().values() for value in astuple(one))
        assert sum(rows.values()) == pytest.approx(4.0 * (now - 10.0))


def test_known_shares() -> None:
    account = CoreTimeAccount(0.0, 4.0)
    account.answered(0.0, b"a", 1.0, False, ProcessTime(cores=1.0), {})
    account.answered(0.0, b"b", 1.0, True, ProcessTime(), {})
    account.look(0.0, NodeLook(2.0, tasks=1.0, actors=1.0, waiting=0.0))
    account.look(5.0, NodeLook(2.0, tasks=1.0, actors=1.0, waiting=0.0))
    account.look(5.0, NodeLook(1.0, tasks=1.0, actors=1.0, starting=1.0))
    account.look(10.0, NodeLook(1.0, tasks=1.0, actors=1.0, starting=1.0))
    # It ran for 8 s, of which it has fetched for 2 s, on a CPU for 1.5 s of them, and has stored for 1 s of the rest.
    account.answered(10.0, b"a", 1.0, False, ProcessTime(8.0, 6.0, 2.0, 1.5, 1.0, cores=1.0), {"f": 8.0})
    account.answered(10.0, b"b", 1.0, True, ProcessTime(1.0, 5.0), {"A.m": 1.0})  # a call of 1 s, and other threads
    known = {ON_CPU: 5.5, OFF_CPU: 1.5, MOVING: 3.0, BETWEEN: 1.0, ACTORS: 9.0, QUEUED: 10.0, FREE: 5.0, STARTING: 5.0}
    assert account.rows(10.0) == pytest.approx({**known, BLOCKED: 0.0, UNKNOWN: 0.0})
    assert account.beside(0.5) == {WITHOUT_CORE: 0.0, BEYOND: 4.0, OWN: 0.5}
    assert account.functions() == {"f": FunctionCoreTime(4.5, 1.5, 3.0), "A.m": FunctionCoreTime(1.0, beside=4.0)}


def test_core_time_by_function() -> None:
    """What a process says is of the functions that it has run since its last answer, as their run times are."""
    account = CoreTimeAccount(0.0, 2.0)
    account.process_joined(0.0, b"a")
    account.process_joined(0.0, b"b")
    account.look(0.0, NodeLook(0.0, lent=0.0, tasks=2.0))
    account.answered(1.0, b"a", 1.0, False, ProcessTime(1.0, 1.0, cores=1.0), {"burns": 1.0})
    account.answered(2.0, b"a", 1.0, False, ProcessTime(2.0, 1.0, cores=1.0), {"burns": 1.0, "sleeps": 1.0})
    account.answered(2.0, b"b", 1.0, False, ProcessTime(2.0, 1.0, cores=1.0), {"burns": 1.5, "other": 0.5})
    account.answered(3.0, b"a", 1.0, False, ProcessTime(2.0, 1.0, after=1.0, cores=1.0), {"burns": 1.0, "sleeps": 1.0})
    account.answered(3.0, b"b", 0.0, False, ProcessTime(2.0, 1.5, cores=0.0), {"burns": 1.5, "other": 0.5})
    found = account.functions()
    assert astuple(found["burns"]) == pytest.approx((1.0 + 0.75, 0.75, 0.0, 0.0, 0.0))
    assert astuple(found["sleeps"]) == pytest.approx((0.0, 1.0, 1.0, 0.0, 0.0))
    assert astuple(found["other"]) == pytest.approx((0.25, 0.25, 0.0, 0.0, 0.0))
    assert account.beside(0.0)[WITHOUT_CORE] == pytest.approx(0.5), "of no function: none ran meanwhile"


def test_of_many_functions_the_last_ones_are_others() -> None:
    account = CoreTimeAccount(0.0, 1.0)
    account.process_joined(0.0, b"a")
    names = [f"f{number}" for number in range(2 * MOST_NAMES)]
    for at, name in enumerate(names, 1):
        account.answered(at, b"a", 1.0, False, ProcessTime(float(at), float(at), cores=1.0), {name: 1.0})
    found = account.functions()
    assert len(found) <= MOST_NAMES + 1 and found[OTHERS].on == pytest.approx(len(names) - MOST_NAMES, abs=1)


def test_lent_cores_are_those_of_who_waits_as_far_as_nobody_else_has_used_them() -> None:
    account = CoreTimeAccount(0.0, 2.0)
    account.process_joined(0.0, b"a")
    for at, free in ((0.0, 1.0), (5.0, 1.0), (5.0, 0.0), (10.0, 0.0)):
        account.look(at, NodeLook(free, lent=1.0, tasks=2.0 - free))
    account.answered(10.0, b"a", 0.0, False, ProcessTime(10.0, lent=8.0, fetching=2.0, cores=1.0), {"f": 10.0})
    rows = account.rows(10.0)
    assert (rows[BLOCKED], rows[MOVING], rows[OFF_CPU]) == pytest.approx((3.0, 1.0, 2.0))
    assert astuple(account.functions()["f"]) == pytest.approx((0.0, 2.0, 1.0, 3.0, 0.0))


# ------------------------------------------------------------ simulated nodes
# Work whose true account is known, moment by moment, seen as a raylet sees it: by questions once a second, and looks.

RUNS, SLEEPS, GETS, FETCHES, UNPICKLES, STORES, IDLES = "runs", "sleeps", "gets", "fetches", "unpickles", "stores", ""
ROW_OF = {RUNS: ON_CPU, SLEEPS: OFF_CPU, UNPICKLES: MOVING, STORES: MOVING, IDLES: BETWEEN}


@dataclass
class Worker:
    """A process and what it does when: (from, to, what), in order; in between it has no core, or waits as an actor."""

    plan: list[tuple[float, float, str]]
    cores: float = 1.0
    actor: bool = False
    spent: ProcessTime = field(default_factory=ProcessTime)

    def at(self, now: float) -> str | None:
        return next((what for start, end, what in self.plan if start <= now < end), None)

    def reserved(self, now: float) -> float:
        what = self.at(now)
        return 0.0 if what in (GETS, FETCHES) or (what is None and not self.actor) else self.cores

    def lent(self, now: float) -> float:
        return self.cores if self.at(now) in (GETS, FETCHES) else 0.0

    def advance(self, now: float, seconds: float) -> None:
        what, spent = self.at(now), self.spent
        spent.cores = self.cores
        spent.busy += seconds * (what not in (None, IDLES, STORES))
        spent.cpu += seconds * (what in (RUNS, UNPICKLES, STORES))
        spent.moving += seconds * (what == UNPICKLES)
        spent.moving_cpu += seconds * (what in (UNPICKLES, STORES))
        spent.after += seconds * (what == STORES)
        spent.lent += seconds * (what in (GETS, FETCHES))
        spent.fetching += seconds * (what == FETCHES)


def simulate(
    cores: float, workers: list[Worker], end: float, waiting: list[tuple[float, float]]
) -> tuple[dict[str, float], dict[str, float]]:
    """The account of a node that ran these workers, and the truth."""
    account = CoreTimeAccount(0.0, cores)
    truth = dict.fromkeys(account.rows(0.0), 0.0)
    step, look_at, period = 0.02, 0.3, 0.1
    ask_at = [0.3 + 0.1 * place for place in range(len(workers))]
    for place in range(len(workers)):
        account.process_joined(0.0, bytes([place]))
    for number in range(round(end / step)):
        now = number * step
        since = next((start for start, stop in waiting if start <= now < stop), None)
        free = cores - sum(one.reserved(now) for one in workers)
        unused = min(max(0.0, free), sum(one.lent(now) for one in workers))
        blocked = sum(one.lent(now) for one in workers if one.at(now) == GETS)
        lent = sum(one.lent(now) for one in workers)
        truth[BLOCKED] += unused * step * (blocked / lent if lent else 0.0)
        truth[MOVING] += unused * step * (1 - blocked / lent if lent else 0.0)
        truth[QUEUED if since is not None else FREE] += max(0.0, free - unused) * step
        for place, one in enumerate(workers):
            what = one.at(now)
            if one.reserved(now):
                truth[ACTORS if what is None else ROW_OF[what]] += one.cores * step
            if now >= ask_at[place]:
                account.answered(now, bytes([place]), one.reserved(now), one.actor, one.spent, {"f": one.spent.busy})
                ask_at[place] += 1.0
            one.advance(now, step)
        if now >= look_at:
            tasks, actors = (sum(one.reserved(now) for one in workers if one.actor is kind) for kind in (False, True))
            changed = account.look(now, NodeLook(max(0.0, free), lent, tasks, actors, waiting=since))
            busy = changed or lent or since is not None
            period = 0.1 if changed else min(1.0, 1.5 * period)
            look_at = now + (period if busy else 1.0)
    for place, one in enumerate(workers):
        account.answered(end, bytes([place]), one.reserved(end), one.actor, one.spent, {"f": one.spent.busy})
    account.look(end, NodeLook(cores))
    return account.rows(end), truth


def in_turn(start: float, *parts: tuple[float, str]) -> list[tuple[float, float, str]]:
    """One after the other."""
    plan = []
    for seconds, what in parts:
        plan.append((start, start + seconds, what))
        start += seconds
    return plan


NODES: dict[str, tuple[float, list[Worker], float, list[tuple[float, float]]]] = {
    "burn and sleep": (4, [Worker(in_turn(1.0, (6, RUNS), (5, SLEEPS))), Worker(in_turn(3.3, (7.7, RUNS)))], 13, []),
    "arguments over a slow wire": (
        2,
        [Worker(in_turn(0.5, *[(1.2, FETCHES), (0.3, UNPICKLES), (0.5, RUNS)] * 5)),
         Worker(in_turn(0.9, *[(0.05, UNPICKLES), (0.1, SLEEPS)] * 60))],
        11, [],
    ),
    "results that are spilled": (2, [Worker(in_turn(0.4, *[(0.7, RUNS), (1.5, STORES)] * 5))], 12, []),
    "nested": (
        4,
        [Worker(in_turn(0.5, (0.2, RUNS), (9, GETS), (0.3, RUNS))), Worker(in_turn(0.6, (0.1, RUNS), (9.2, GETS))),
         Worker(in_turn(1.0, *[(0.9, SLEEPS), (0.1, IDLES)] * 8))],
        11, [],
    ),
    "nested, with short waits": (1, [Worker(in_turn(0.5, *[(0.1, RUNS), (0.3, GETS), (0.1, SLEEPS)] * 40))], 21, []),
    "idle": (8, [], 12, []),
    "one at a time": (4, [Worker(in_turn(0.4, (4, SLEEPS), (4, SLEEPS), (4, SLEEPS)))], 13, [(0.4, 8.4)]),
    "bursts on an idle node": (
        4, [Worker([(at, at + 0.4, RUNS) for at in (2.1, 4.9, 7.3, 9.8)]) for _ in range(3)], 12, [],
    ),
    "an actor of two cores": (4, [Worker(in_turn(3.0, (1.5, RUNS), (2.5, SLEEPS)), 2.0, True)], 12, []),
    "one that waits for what a task makes, then for it to come": (
        2, [Worker(in_turn(0.5, (5.0, GETS), (3.0, FETCHES), (1.0, RUNS)))], 10, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NODES)
def test_each_share_of_a_simulated_node_is_true(name: str) -> None:
    cores, workers, end, waiting = NODES[name]
    rows, truth = simulate(cores, workers, end, waiting)
    whole = cores * end
    assert sum(rows.values()) == pytest.approx(whole)
    assert sum(truth.values()) == pytest.approx(whole)
    wrong = {row: (round(rows[row] / whole, 3), round(truth[row] / whole, 3)) for row in rows
             if abs(rows[row] - truth[row]) > 0.05 * whole}  # fmt: skip
    assert not wrong, wrong
    assert max(rows, key=rows.__getitem__) == max(truth, key=truth.__getitem__)


def test_time_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is lent is not counted again, nor what is begun within what has begun; what goes on is counted so far."""
    clock = {"wall": 100.0, "cpu": 10.0}
    monkeypatch.setattr(context, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(context, "thread_time", lambda: clock["cpu"])
    monkeypatch.setattr(context, "clock_gettime", lambda _: clock["cpu"])

    def passes(wall: float, cpu: float = 0.0) -> None:
        clock["wall"] += wall
        clock["cpu"] += cpu

    spent = context.ObjectTime()
    assert not spent.begin(), "in a driver nothing is timed"
    spent.counts = True
    assert spent.begin() and not spent.begin()
    passes(1.0, 0.25)
    spent.lend(True)
    passes(4.0)
    assert spent.so_far(lambda: True) == (1.0, 0.25, 0.0, 4.0, 4.0)
    passes(2.0)
    assert spent.so_far(lambda: False) == (1.0, 0.25, 0.0, 6.0, 5.0)  # lost meanwhile: it is made again
    passes(1.0)
    spent.take_back()
    passes(0.5, 0.5)
    spent.end()
    assert spent.so_far(lambda: True) == (1.5, 0.75, 0.0, 7.0, 5.0)
    ended = clock["wall"]
    passes(2.0, 2.0)  # it pickles what it returns
    assert spent.begin(ended)
    passes(1.0, 0.125)
    spent.end()
    passes(0.5, 0.5)
    assert spent.begin(ended)  # a second value of the same task
    passes(1.0)
    spent.end()
    assert spent.so_far(lambda: True) == (1.5, 0.75 + 2.625, 4.5, 7.0, 5.0)


PROGRAM = """\
import os, sys, time
import numpy as np
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init(num_cpus=4, resources={"place": 1})


@ray.remote
def sleep(seconds):
    time.sleep(seconds)


def used(pid):
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@ray.remote
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return os.getpid()


@ray.remote
def outer(inner):
    ray.get(inner)


@ray.remote(num_cpus=0)
class Idle:
    def ready(self):
        return True


class Slow:
    # Takes a known time to pickle, or to unpickle.
    def __init__(self, pickling, unpickling):
        self.pickling, self.unpickling = pickling, unpickling

    def __reduce__(self):
        time.sleep(self.pickling)
        return after, (self.unpickling, bytes(1 << 20))


def after(seconds, content):
    time.sleep(seconds)
    return content


@ray.remote
def takes(value):
    return len(value)


@ray.remote
def returns(seconds):
    return Slow(seconds, 0)


@ray.remote(num_cpus=4)
def fill(pieces, size):
    began = time.perf_counter()
    refs = [ray.put(np.full(size, piece, "u1")) for piece in range(pieces)]
    return time.perf_counter() - began, refs


how = sys.argv[1]
shares = {}
if how == "sleep":
    ray.get([sleep.remote(8) for _ in range(2)])
    shares = {"off": 16}
if how == "burn":
    pids = ray.get([burn.remote(4) for _ in range(2)])
    shares = {"on": sum(map(used, set(pids)))}  # of all that the workers have used, their starts included
if how == "nested":
    inner = sleep.remote(8)
    ray.get([outer.remote([inner]) for _ in range(3)])  # each has lent its core, and nothing else wants it
    shares = {"off": 8, "blocked": 24}
if how == "idle":
    ray.get(Idle.remote().ready.remote())
    time.sleep(8)
if how == "queued":
    ray.get(sleep.options(resources={"place": 1}).remote(0))  # its worker starts
    ray.get([sleep.options(resources={"place": 1}).remote(4) for _ in range(3)])  # one at a time
    shares = {"off": 12, "queued": 3 * 8}
if how == "objects":
    ref = ray.put(Slow(0, 1))
    ray.get([takes.remote(ref) for _ in range(6)])
    ray.wait([returns.remote(1) for _ in range(6)], num_returns=6)
    shares = {"moving": 12}
if how == "spill":
    size, pieces, rate = 4 << 20, 50, float(os.environ["TEST_DISK"])
    seconds, refs = ray.get(fill.remote(pieces, size))
    (store,) = need_process().diagnostics.list_stores(0, 60.0)
    least = (pieces * size - store["capacity"]) / rate  # so much has to be on the disk before the last piece fits
    assert least <= seconds <= 1.2 * least + 1, (least, seconds)
    shares = {"moving": 4 * seconds}
if how == "bundle":
    group = ray.util.placement_group([{"CPU": 2}])
    ray.get(group.ready())
    time.sleep(8)
    shares = {"actors": 16}
if how == "actor":
    actor = Idle.options(num_cpus=2).remote()
    ray.get(actor.ready.remote())
    time.sleep(8)
    shares = {"actors": 16}
print(shares)
"""
LIVE = """\
import json, time
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.state.overview import JobOverview

began = time.monotonic()
ray.init(num_cpus=4)


@ray.remote
def nap(seconds):
    time.sleep(seconds)


refs = [nap.remote(600)]
overview = JobOverview(need_process())
for _ in range(200):
    use = overview.sample()
    if use.core_time.get("running tasks, off the CPU (sleep, I/O, or no CPU to be had)", 0.0) > 3:
        break
    time.sleep(0.1)
found = {"rows": use.core_time, "beside": use.cpu_time_beside, "functions": use.nodes[0].row["function_times"]}
print(json.dumps({**found, "wall": time.monotonic() - began}))
"""


def test_the_account_of_a_job_that_runs_is_among_the_figures_of_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LIVE)
    with Job(embedded(tmp_path / "program.py"), {"HPCRAY_HISTORY_DIR": str(tmp_path / "histories")}) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
    found = json.loads(ended.out.splitlines()[-1])
    rows, functions = found["rows"], found["functions"]
    assert rows[OFF_CPU] > 3 and OWN in found["beside"], found
    assert 3 * 4 < sum(rows.values()) <= 4 * found["wall"], found
    assert functions["nap"][1] == pytest.approx(rows[OFF_CPU], rel=0.05)


# A disk that takes so many bytes per second, whoever writes.
SLOW_DISK = """\
import os, threading, time

_lock = threading.Lock()


def _slow(fd, parts, *place, write=os.pwritev):
    if threading.current_thread().name.startswith("hpcray-spill"):
        with _lock:
            time.sleep(sum(map(len, parts)) / float(os.environ["TEST_DISK"]))
    return write(fd, parts, *place)


os.pwritev = _slow
"""


OF_FUNCTION = {
    "sleep": ("sleep", "off", OFF_CPU),
    "burn": ("burn", "on", ON_CPU),
    "nested": ("outer", "blocked", BLOCKED),
    "spill": ("fill", "objects", MOVING),
}
"""Programs in which all of a row is of one function."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("sleep", OFF_CPU),
        ("burn", ON_CPU),
        ("nested", BLOCKED),
        ("idle", FREE),
        ("queued", QUEUED),
        ("objects", MOVING),
        ("spill", MOVING),
        ("actor", ACTORS),
        ("bundle", ACTORS),
    ],
)
def test_programs_whose_shares_are_known(how: str, first: str, tmp_path: Path) -> None:
    """Each row is within 5 % of cores × wall of what the program does, and what stands out is the largest one."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {"HPCRAY_HISTORY_DIR": str(tmp_path / "histories")}
    if how == "spill":
        (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
        environ |= {"HPCRAY_OBJECT_STORE_MEMORY": str(32 << 20), "TEST_DISK": str(20 << 20)}
        environ["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    with Job(embedded(tmp_path / "program.py", how), environ) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
    (run,) = runs(str(tmp_path / "histories"))
    history = JobHistory(run)
    rows, wall = history.head.account, history.last - history.started
    whole, known = 4 * wall, ast.literal_eval(ended.out.splitlines()[-1])
    names = {"on": ON_CPU, "off": OFF_CPU, "actors": ACTORS, "queued": QUEUED, "blocked": BLOCKED, "moving": MOVING}
    truth = dict.fromkeys(names.values(), 0.0) | {BETWEEN: 0.0, UNKNOWN: 0.0}
    truth |= {names[name]: seconds for name, seconds in known.items()}
    if how == "burn":
        assert rows[ON_CPU] == pytest.approx(truth[ON_CPU], rel=0.05)
        del truth[OFF_CPU]  # what the machine's other processes have taken of its processors
    print({name: (round(rows[name] / whole, 3), round(seconds / whole, 3)) for name, seconds in truth.items()})
    assert sum(rows.values()) == pytest.approx(whole, rel=0.05)
    for name, seconds in truth.items():
        assert rows[name] == pytest.approx(seconds, abs=0.05 * whole), (name, rows)
    functions = history.function_times()
    if how in OF_FUNCTION:
        name, row, row_name = OF_FUNCTION[how]
        assert getattr(functions[name], row) == pytest.approx(rows[row_name], abs=0.05 * whole), functions
    others = {FREE} if first != FREE else set()
    if how == "burn":
        others.add(OFF_CPU)
    assert max(rows.keys() - others, key=rows.__getitem__) == first, rows
