"""The account of latency: where tasks were from submission to value, told by records of who had how many."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from helpers.jobs import Job, embedded
from hypothesis import given
from hypothesis import strategies as st

from hpcray.cli.history import print_why
from hpcray.common.ids import FIRST_RETURN, PUT_INDEX
from hpcray.history import node_history
from hpcray.history.block_file import FIRST_LINE, pack
from hpcray.history.job_history import JobHistory, ProcessRow, clock
from hpcray.history.node_history import _OBJECTS, _NodeLooks
from hpcray.history.records import Began, Functions, Objects, Process, Running, Tasks, encode
from hpcray.history.runs import file_name, find_runs

BEGAN = 1_790_000_000.0
DRIVER, WORKER = b"driver-1", b"worker-1"
FUNCTION = "train.step"


def task(number: int) -> bytes:
    return DRIVER + number.to_bytes(5, "big")


def written(root: Path, records: list[object]) -> JobHistory:
    run = "0123456789abcdef"
    directory = root / run / run
    directory.mkdir(parents=True, mode=0o700)
    began = Began(BEGAN, run, run, 0, 1, "host", 1, 1, "boot", "train.py", {"CPU": 1.0})
    path = directory / file_name(0, 0)
    path.write_bytes(FIRST_LINE + pack(encode([began, Process(BEGAN, DRIVER, 1, "driver", "joined"), *records])))
    path.chmod(0o600)
    (found,) = find_runs(str(root), run)
    return JobHistory(found)


def seen(at: float, before: float, lacking: int, queued: int, sent: int, made: int = 0) -> Running:
    """The driver's answer at this time, so many seconds after the start; the one before it came at `before`."""
    counts = [{FUNCTION: count} if count else {} for count in (lacking + queued, lacking, sent)]
    return Running(BEGAN + at, DRIVER, 1, [], counts[0], 0, counts[1], counts[2], made, before and BEGAN + before)


def test_tasks_one_after_the_other_on_one_core(tmp_path: Path) -> None:
    """Ten tasks of 10 s are submitted at once, 0.5 s after the first answer: each waits for those before it."""
    records: list[object] = [seen(1.0, 0.0, 0, 0, 0)]
    for ended in range(10):
        records.append(seen(2.0 + 10 * ended, 1.0 + 10 * ended, 0, 9 - ended, 1, made=10))
    records += [seen(102.0, 101.0, 0, 0, 0, made=10)]
    rows = [(task(place + 1), 0, BEGAN + 11.5 + 10 * place, 10_000_000, False) for place in range(10)]
    records += [Functions(BEGAN + 102, {FUNCTION: (10, 0, 100_000_000, {70: 10})})]
    records += [Tasks(BEGAN + 102, WORKER, 2, b"", [FUNCTION], rows, 10)]  # type: ignore[list-item]
    history = written(tmp_path, records)
    latency = history.latency()[FUNCTION]
    assert latency.running == pytest.approx(10.0)
    assert latency.queued == pytest.approx(45.0, rel=0.01)
    assert (latency.lacking, latency.sent) == pytest.approx((0.0, 0.0), abs=0.1)
    assert latency.whole == pytest.approx(55.0, rel=0.01)
    for place in range(10):
        first, last = history.submission(task(place + 1)) or (0.0, 0.0)
        assert (first, last) == (BEGAN + 1.0, BEGAN + 2.0)
    assert history.submission(task(11)) is None and history.submission(b"other-01" + bytes(5)) is None


def test_tasks_that_wait_for_arguments_and_in_a_worker(tmp_path: Path) -> None:
    """Four wait for arguments for 20 s; then all are with a worker, which runs each of them for 5 s."""
    records: list[object] = [seen(1.0, 0.0, 4, 0, 0, 4), seen(21.0, 20.0, 0, 0, 4, 4)]
    records += [seen(21.0 + 5 * ended, 20.0 + 5 * ended, 0, 0, 4 - ended, 4) for ended in range(1, 5)]
    records.append(Functions(BEGAN + 41, {FUNCTION: (4, 0, 20_000_000, {66: 4})}))
    latency = written(tmp_path, records).latency()[FUNCTION]
    assert latency == pytest.approx((20.0, 0.0, 7.5, 5.0), abs=0.1)


def test_what_still_waits_waits_up_to_the_last_sign_of_life(tmp_path: Path) -> None:
    records = [
        seen(1.0, 0.0, 0, 0, 0),
        seen(2.0, 1.0, 0, 1, 1),
        Running(BEGAN + 2, WORKER, 2, [(task(1), FUNCTION, 0.5)]),
        Functions(BEGAN + 100.5, {FUNCTION: (0, 0, 0, {})}),
    ]
    history = written(tmp_path, records)
    latency = history.latency()[FUNCTION]
    assert latency == pytest.approx((0.0, 99.0, 0.0, 99.0), abs=0.1)


def test_the_story_of_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has who made it, what became of its owner, and what looks at the stores have shown of it; it says what it has
    not seen."""
    rows = [(task(2), 0, BEGAN + 9.0, 5_000_000, True)]
    history = written(tmp_path, [
        seen(1.0, 0.0, 0, 0, 0),
        seen(3.0, 2.0, 0, 1, 1, made=3),
        Tasks(BEGAN + 9, WORKER, 2, b"", [FUNCTION], rows, 1, [(task(2), "ValueError", "negative")]),  # type: ignore[list-item]
        Objects(BEGAN + 4, BEGAN + 2, {task(3) + PUT_INDEX: (4 << 20, "memory", False)}),
        Objects(BEGAN + 6, BEGAN + 4, {task(3) + PUT_INDEX: (4 << 20, "spilled", False)}),
        Objects(BEGAN + 9, BEGAN + 6, {}, [task(3) + PUT_INDEX], [task(2) + FIRST_RETURN]),
        Process(BEGAN + 10, DRIVER, 1, "driver", "gone", "killed by SIGKILL", "SYSTEM_ERROR"),
    ])  # fmt: skip

    def story(ident: bytes) -> str:
        print_why(history, ident.hex(), False)
        return capsys.readouterr().out

    died = f"its owner died at {clock(BEGAN + 10)}: killed by SIGKILL; the object went with it at the latest"
    value = story(task(2) + FIRST_RETURN)
    between = f"between {clock(BEGAN + 2)} and {clock(BEGAN + 3)}"
    assert f"value 1 of a task that was submitted by driver, pid 1 of node 0, {between}" in value
    assert f"train.step {task(2).hex()}: failed at" in value and "ValueError: negative" in value
    assert "waited for 1 s to 2 s" in value and died in value
    put = story(task(3) + PUT_INDEX)
    assert f"put by driver, pid 1 of node 0, {between}" in put and died in put
    events = [line.strip() for line in put.splitlines() if " node 0: " in line]
    assert events == [
        f"{clock(BEGAN + 4)} node 0: in memory (4.0 MiB)",
        f"{clock(BEGAN + 6)} node 0: on disk",
        f"{clock(BEGAN + 9)} node 0: not there any more",
    ]
    assert "at most 3 s apart: what lay between is not known" in put
    assert "not among the largest objects any more: what became of it is not known" in value
    assert "no copy of it is known" in story(task(1) + FIRST_RETURN)
    assert "the end of the task was not seen" in story(task(1) + FIRST_RETURN)
    with pytest.raises(click.ClickException, match="no task, actor, function or object"):
        story(b"other-01" + bytes(8))


class Store:
    """The store of a raylet, and the raylet, as the looks at it use them."""

    def __init__(self) -> None:
        self.store = self.introspection = self
        self.rows: list[dict[str, object]] = []
        self.changes = 0

    def row(self) -> dict[str, object]:
        used = {"used": 1, "capacity": 2, "on_disk": 0, "changes": self.changes}
        same = dict.fromkeys(("resources", "workers", "actors", "leases", "waiting"), 0)
        return {**same, "cpu": {"job": 0.0, "host_count": 1}, "memory": {"used": 1, "limit": 2}, "store": used}

    def largest_objects(self, limit: int) -> list[dict[str, object]]:
        return self.rows[:limit]

    def show(self, sizes: dict[bytes, int], state: str = "memory") -> None:
        self.changes += 1
        order = sorted(sizes.items(), key=lambda item: (item[1], item[0]), reverse=True)
        self.rows = [{"id": ident, "size": size, "state": state, "copy": False} for ident, size in order]


def test_an_object_that_makes_room_for_larger_ones_is_not_said_to_be_gone() -> None:
    store = Store()
    looks = _NodeLooks(store)  # type: ignore[arg-type]

    def seen() -> Objects | None:
        return next((one for one in looks.look(0.0, always=True) if isinstance(one, Objects)), None)

    small, freed = b"small", b"freed"
    store.show({small: 10, freed: 20})
    first = seen()
    assert first is not None and first.changed == {small: (10, "memory", False), freed: (20, "memory", False)}
    assert seen() is None, "the store is as it was"
    store.show({small: 10, freed: 20}, "both")
    second = seen()
    assert second is not None and set(second.changed) == {small, freed} and not second.gone
    store.show({small: 10} | {b"large%02d" % number: 15 for number in range(_OBJECTS)})
    third = seen()
    assert third is not None and (third.gone, third.unseen) == ([freed], [small])
    store.show({small: 10})
    fourth = seen()
    assert fourth is not None and set(fourth.changed) == {small} and len(fourth.gone) == _OBJECTS


def test_looks_at_a_node_with_very_many_objects_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    store, clock = Store(), [0.0]
    monkeypatch.setattr(node_history.time, "perf_counter", lambda: clock.__setitem__(0, clock[0] + 0.05) or clock[0])
    looks = _NodeLooks(store)  # type: ignore[arg-type]
    assert looks.look(10.0)
    store.show({b"one": 1})
    assert not looks.look(10.0 + 9.9), "it took 0.05 s: 0.5 % of 10 s"
    assert looks.look(10.0 + 10.1)


@given(st.lists(st.tuples(st.floats(0.2, 9.0), st.integers(0, 50)), min_size=2, max_size=30))
def test_the_time_in_all_is_the_area_below_the_counts(steps: list[tuple[float, int]]) -> None:
    """Also where answers that have changed nothing are not written."""
    row, now, area, before = ProcessRow(0, DRIVER, 1, "driver"), 0.0, 0.0, 0
    for seconds, queued in steps:
        looked = now + seconds - 0.1  # unchanged up to here, though nothing was written
        area += before * (seconds - 0.1) + (before + queued) / 2 * 0.1
        now += seconds
        row.take(seen(now, looked, 0, queued, 0))
        if row.running is not None and before == 0 and len(row.waits) == 0:
            area = 0.0  # nothing is known of the time before the first answer
        before = queued
    found = row.waits[FUNCTION].queued if FUNCTION in row.waits else 0.0
    assert found == pytest.approx(area, abs=1e-3 * (1 + area))


ARGUMENTS = """\
import time
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import current

ray.init(num_cpus=1)


@ray.remote
def late(value=None):
    time.sleep(0.5)


ray.get(late.remote())
first = late.remote()
refs = [first, late.remote(first), late.remote(first)]
process = current.process
with process.engine.lock:
    figures = process.diagnostics.introspect("figures", ())
print(figures["queued"], figures["lacking"], figures["sent"])
ray.get(refs)
"""


def test_tasks_whose_arguments_are_not_there_are_counted_as_queued(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(ARGUMENTS)
    with Job(embedded(tmp_path / "program.py"), {"HPCRAY_HISTORY": "0"}) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[-1] == "{'late': 2} {'late': 2} {'late': 1}"


PROGRAM = """\
import time
import hpcray as ray

ray.init(num_cpus=1)


@ray.remote
def step(seconds):
    time.sleep(seconds)


@ray.remote(num_cpus=0)
def late(seconds):
    time.sleep(seconds)


@ray.remote(num_cpus=0)
def after(value):
    return value


@ray.remote
def warm():
    time.sleep(0.5)


ray.get([warm.remote(), *(warm.options(num_cpus=0).remote() for _ in range(2))])  # their workers serve the others
first = late.remote(6)
second = after.remote(first)
ray.get([step.remote(2) for _ in range(4)])
ray.get(second)
"""


@pytest.mark.slow
def test_a_program_whose_waits_are_known(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environ = {"HPCRAY_HISTORY_DIR": str(tmp_path / "histories")}
    with Job(embedded(tmp_path / "program.py"), environ) as job:
        ended = job.wait()
        assert ended.code == 0, ended.err
    (name,) = os.listdir(tmp_path / "histories")
    (run,) = find_runs(str(tmp_path / "histories"), name)
    latency = JobHistory(run).latency()
    print(json.dumps({name: one._asdict() for name, one in latency.items()}))
    step, after = latency["step"], latency["after"]
    assert step == pytest.approx((0.0, 3.0, 0.0, 2.0), abs=0.5)
    assert after == pytest.approx((6.0, 0.0, 0.0, 0.0), abs=0.6)
