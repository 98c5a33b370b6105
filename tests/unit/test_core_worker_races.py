"""What ends in the middle leaves nothing over: files that are being read, answers, values of a run that is repeated."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hpcray.common.ids import make_proc, return_index
from hpcray.core.core_worker.object_table import ObjectTable, Waiter
from hpcray.core.core_worker.task import ExtraOptions, FunctionDescriptor, PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker import object_reader
from hpcray.runtime.core_worker.arguments import NO_ARGS
from hpcray.runtime.core_worker.core_worker import HANDLERS, CoreWorker
from hpcray.runtime.core_worker.extensions import NO_FEATURES
from hpcray.runtime.core_worker.object_reader import ObjectReader
from hpcray.runtime.core_worker.task_retries import CrashRetries, TaskRetries
from hpcray.runtime.core_worker.task_submitter import TaskSubmitter
from hpcray.runtime.core_worker.wait_manager import WaitManager
from hpcray.runtime.worker.concurrency_groups import AsyncioCallRunner

ME, WORKER = make_proc(1, 7), make_proc(3, 20)


class Engine:
    def __init__(self) -> None:
        self.lock = threading.RLock()

    pending_calls = ()

    def flush(self) -> None:
        """Nothing is queued."""

    def run_pending_calls(self) -> None:
        """Nothing is to be called."""

    def add_timer(self, when: float, call: Callable[[float], None]) -> None:
        """Time does not pass."""


NOTHING_UNSEEN: Any = SimpleNamespace(seen=lambda oids: None)


def unexplained(missing: Any, timeout: float | None) -> str:
    return ""


def test_an_interrupt_gives_up_all_files_that_were_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bytes] = []
    table: Any = SimpleNamespace(pins=SimpleNamespace(end_file=ended.append))
    context: Any = SimpleNamespace(engine=Engine(), table=table, extensions=SimpleNamespace(features=NO_FEATURES))
    reader = ObjectReader(context, {}, unexplained, NOTHING_UNSEEN)
    places: list[Any] = [m.OnDisk(bytes([n]) * 14, "/nowhere", 0, 10) for n in range(4)]

    def read(path: str, position: int, size: int) -> bytes:
        if len(ended) == 1:
            raise KeyboardInterrupt
        return b"value"

    monkeypatch.setattr(object_reader, "read_private_copy", read)
    with pytest.raises(KeyboardInterrupt):
        reader._values([*places[:2], b"something else", *places[2:]])
    assert sorted(ended) == [place.id for place in places], "each once"


def test_wait_counts_objects_that_came_and_were_evicted_again() -> None:
    sent: list[m.Message] = []
    table = ObjectTable(ME, lambda dest, msg: sent.append(msg), lambda waiter: None, lambda *why: b"lost")
    context: Any = SimpleNamespace(
        engine=Engine(), table=table, check_alive=lambda: None, drain=lambda: table.bury(deque()),
        config=SimpleNamespace(record=""),
    )  # fmt: skip
    waits = WaitManager(context, ValueError)
    refs = [object_reader.new_ref(WORKER + bytes([0, 0, 0, 0, n]) + return_index(0)) for n in range(3)]
    for ref in refs:
        table.refs.ref_deserialized(ref._id, None)
        table.hint_locations(ref._id, 1 << 20, [3])

    def come_one_after_the_other(waiter: Any, deadline: float | None) -> bool:
        for offset, ref in enumerate(refs[:2]):
            table.on_opened(m.Opened(ref._id, offset << 20, 1 << 20, True))
            table.pins.give_up(1, 1)  # the store is short of room
        return bool(waiter.count <= 0)

    context.block = come_one_after_the_other
    done, rest = waits.wait(list(refs), 2, None, True)
    assert sum(isinstance(msg, m.Release) for msg in sent) == 2, "none is here any more"
    assert (done, rest) == (refs[:2], refs[2:])


@pytest.mark.parametrize("size", [0, 1 << 20])
def test_a_signal_handler_may_drop_the_last_ref_while_its_object_becomes_ready(size: int) -> None:
    """The lock is reentrant: a `get` or `put` of the handler's takes deaths of refs into account."""
    sent: list[m.Message] = []
    table = ObjectTable(ME, lambda dest, msg: sent.append(msg), lambda waiter: waiter.callback(), lambda *why: b"lost")  # type: ignore[misc]
    oid = ME + bytes(5) + return_index(0)
    table.create(oid)
    table.wait_ready(oid, Waiter(callback=lambda: table.bury(deque([oid]))))
    if size:
        table.set_stored(oid, size, 3)
    else:
        table.set_inline(oid, b"value")
    assert not table.entries
    assert len([msg for msg in sent if isinstance(msg, m.Free)]) == (1 if size else 0), "freed once"


def test_a_call_that_is_cancelled_when_it_has_ended_is_answered() -> None:
    """Large answers leave from a thread; where none is free they wait, and must not be cancelled there."""
    gate, answered = threading.Event(), threading.Event()
    task = ME + bytes(5)

    async def method() -> list[int]:
        lane.threads.submit(gate.wait)
        lane._cancel(task)  # just before the end
        return [1, 2, 3]

    worker = SimpleNamespace(
        engine=Engine(), options={}, cancelled=set(), forget=lambda task: None, reply=lambda *args: answered.set()
    )
    host: Any = SimpleNamespace(
        worker=worker, method=lambda name: method, name_of=lambda name: name, described=lambda: ("A", "")
    )
    lane = AsyncioCallRunner(host, SimpleNamespace(), "lane", 1)  # type: ignore[arg-type]
    lane.call(WORKER, m.ActorCall(task, "method", NO_ARGS, 1))
    still = threading.Event()

    def later(rounds: int) -> None:
        if rounds:
            lane.loop.call_soon(later, rounds - 1)
        else:
            still.set()

    while lane._tasks or not lane._taken:
        assert not still.wait(0.001)
    lane.loop.call_soon_threadsafe(later, 5)  # whatever was to be cancelled has been
    assert still.wait(30)
    gate.set()
    arrived = answered.wait(30)
    lane.loop.call_soon_threadsafe(lane.loop.stop)
    lane.threads.shutdown()
    assert arrived


def test_what_a_generator_made_before_it_raised_goes_with_the_object_of_its_next_run() -> None:
    sent: list[m.Message] = []
    table = ObjectTable(ME, lambda dest, msg: sent.append(msg), lambda waiter: None, lambda *why: b"lost")
    again: list[PendingTask] = []
    warnings: Any = SimpleNamespace(task_runs_again=lambda *about: None)
    submission: Any = SimpleNamespace(drop_returns=lambda src, msg: None, retry_warnings=warnings)
    leases: Any = SimpleNamespace(submit=lambda task, klass: again.append(task))
    process: Any = SimpleNamespace(engine=Engine(), table=table)
    retries = TaskRetries(process, submission, leases, CrashRetries(0))
    task = PendingTask(ME + bytes(5), FunctionDescriptor(b"f" * 16, "f", b""), "", b"", 2, None, None, 3)
    task.extra, task.worker = ExtraOptions(retry_exceptions=True), WORKER
    first = task.id + return_index(0)
    table.create(first, task)
    failed = m.TaskReply(task.id, 1, [m.Returned(b"", 1 << 20), m.Returned(serialize_error(ValueError("x")))], 10)
    retries.task_raised(task, failed)
    assert again == [task]
    table.set_stored(first, 1 << 20, 5)
    table.refs.remove_local_ref(first)
    (freed,) = [msg for msg in sent if isinstance(msg, m.Free)]
    assert freed.ids == [first] and set(freed.nodes) == {3, 5}


@pytest.mark.parametrize("answered", [True, False])
def test_a_lease_that_ends_with_its_worker_is_a_death_like_any(answered: bool) -> None:
    """Its last answers count; what it may have written without an answer goes with the object."""
    table = ObjectTable(ME, lambda dest, msg: None, lambda waiter: None, lambda *why: b"lost")
    task = PendingTask(ME + bytes(5), FunctionDescriptor(b"f" * 16, "f", b""), "", b"", 1, None, None, 3)
    oid = task.id + return_index(0)
    engine: Any = Engine()
    engine.send = lambda dest, msg: None
    engine.call_soon = lambda call: None
    engine.links = SimpleNamespace(drop_peer=lambda proc: None)
    engine.peers = {WORKER: SimpleNamespace(functions={task.fn.id}, out=[], dirty=True)}  # type: ignore[union-attr]
    config = SimpleNamespace(idle_lease_timeout=1.0, task_oom_retries=0, max_nodes=0, record="")
    died: list[bytes] = []
    process: Any = SimpleNamespace(
        engine=engine, table=table, me=ME, node=1, place=SimpleNamespace(cluster_size=1), config=config,
        executor=SimpleNamespace(process_died=died.append),
        gcs=SimpleNamespace(process_died=lambda proc: None),
        extensions=SimpleNamespace(process_died=lambda proc: None),
    )  # fmt: skip
    process.process_died = lambda proc, reason: CoreWorker.process_died(process, proc, reason)
    submitter = process.submitter = TaskSubmitter(process, process.gcs)
    engine.read_rest = lambda proc: answered and submitter.on_task_done(proc, m.TaskDone(task.id, b"value", 10))
    table.create(oid, task)
    klass = submitter.leases.scheduling_class(m.Shape((("CPU", 10_000),)))
    submitter.leases.submit(task, klass)
    submitter.leases.granted(m.LeaseGranted(klass.index, b"lease", WORKER), 0.0)
    HANDLERS[m.LeaseRevoked](process)(b"", m.LeaseRevoked(b"lease", WORKER, "killed by signal 9"))
    entry = table.entries[oid]
    assert died == [WORKER]
    assert (entry.value, entry.left_at, list(klass.queue)) == ((b"value", None, []) if answered else (b"", [3], [task]))
