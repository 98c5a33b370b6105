"""Packed tasks: what waits without a `PendingTask` of its own is sent, cancelled, shown and freed as any other."""

from __future__ import annotations

import random
import sys

import pytest
from table_kit import ME, Table

from hpcray.common.ids import FIRST_RETURN, make_proc
from hpcray.core.core_worker.lease_manager import ArgumentPrefetcher, LeaseManager
from hpcray.core.core_worker.object_entry import NO_EXTRA
from hpcray.core.core_worker.object_table import INLINE, PENDING, ObjectEntry
from hpcray.core.core_worker.task import NO_EXTRA_OPTIONS, FunctionDescriptor, PendingTask, TaskTemplate
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize, serialize, without_frame

CPU = m.Shape((("CPU", 10_000),))
WORKER, OTHER = make_proc(1, 20), make_proc(3, 21)


class Submitter:
    """Lease manager and object table as in a process; `packed` tasks wait behind a whole one."""

    def __init__(self, packed: int = 0, prefetch: bool = False) -> None:
        self.table = Table()
        self.sent: list[tuple[bytes, m.Message]] = []
        self.pushed: list[PendingTask] = []
        prefetcher = ArgumentPrefetcher(self.table.entries, self.send) if prefetch else None
        self.leases = LeaseManager(
            ME, self.send, lambda task, proc: self.pushed.append(task), 1.0, prefetcher, self.table.packed
        )
        self.scheduling_class = self.leases.scheduling_class(CPU)
        self.function = FunctionDescriptor(b"f" * 16, "f", b"")
        self.count = 0
        self.whole(b"first")
        self.ids = [self.pack(b"%d" % number) for number in range(packed)]

    def send(self, dest: bytes, msg: m.Message) -> None:
        self.sent.append((dest, msg))

    def whole(self, args: bytes, function: FunctionDescriptor | None = None) -> PendingTask:
        self.count += 1
        task_id = ME + self.count.to_bytes(5, "big")
        task = PendingTask(task_id, function or self.function, "", args, 1, None, None, 3)
        self.table.create(task_id + FIRST_RETURN, task)
        self.leases.submit(task, self.scheduling_class)
        return task

    def pack(self, args: bytes, function: FunctionDescriptor | None = None) -> bytes:
        """Submit one as `TaskSubmitter` does."""
        if not self.leases.packing:
            return self.whole(args, function).id + FIRST_RETURN
        self.count += 1
        oid = ME + self.count.to_bytes(5, "big") + FIRST_RETURN
        template = (function or self.function).template_for(self.scheduling_class, 3, NO_EXTRA_OPTIONS)
        self.table.packed.create(oid, template, args)
        self.leases.enqueue_packed(oid, self.scheduling_class)
        return oid

    def run(self, most: int = 1 << 30, us: int = 100_000) -> list[bytes]:
        """Lease one worker and have it run what waits, in order. Returns the arguments."""
        if WORKER not in self.leases.workers:
            self.leases.granted(m.LeaseGranted(self.scheduling_class.index, b"lease", WORKER, False), 0.0)
        ran: list[bytes] = []
        while len(ran) < most and self.pushed:
            task = self.pushed.pop(0)
            ran.append(task.args)
            assert self.leases.answered(WORKER, task.id, us, 0.0) is task
            self.table.set_inline(task.id + FIRST_RETURN, b"v\0")
            self.table.check_invariants()
        return ran

    def entry(self, number: int) -> ObjectEntry:
        return self.table.entries[self.ids[number]]

    def cancel(self, number: int) -> None:
        task = self.table.packed.task_of(self.ids[number])
        assert task is not None and self.leases.cancel_queued(task)


class TestQueue:
    @pytest.mark.parametrize("us", [100, 100_000])
    def test_all_are_sent_in_order_as_whole_tasks_of_their_function(self, us: int) -> None:
        submitter = Submitter(packed=50)
        assert submitter.run(us=us) == [b"first", *(b"%d" % number for number in range(50))]
        assert all(submitter.entry(number).state == INLINE for number in range(50))

    def test_what_waits_is_an_entry_and_its_arguments(self) -> None:
        submitter = Submitter(packed=100)
        first, last = submitter.entry(0), submitter.entry(99)
        assert (first.state, first.value, first.local) == (PENDING, b"0", 1)
        assert first.task is last.task and type(first.task) is TaskTemplate
        assert first.extra is NO_EXTRA and sys.getsizeof(first) <= 64
        assert list(submitter.scheduling_class.queue)[1:] == submitter.ids

    def test_other_options_are_another_template(self) -> None:
        submitter = Submitter()
        function, near = submitter.function, submitter.leases.scheduling_class(m.Shape((), "SPREAD"))
        one = function.template_for(submitter.scheduling_class, 3, NO_EXTRA_OPTIONS)
        assert function.template_for(submitter.scheduling_class, 3, NO_EXTRA_OPTIONS) is one
        for other in (
            function.template_for(submitter.scheduling_class, 0, NO_EXTRA_OPTIONS),
            function.template_for(near, 3, NO_EXTRA_OPTIONS),
        ):
            assert other is not one
            task = other.task(ME + bytes(5) + FIRST_RETURN, b"")
            assert (task.retries, task.scheduling_class) == (other.retries, other.scheduling_class)

    def test_a_worker_that_blocks_returns_them_to_the_front(self) -> None:
        submitter = Submitter(packed=5)
        submitter.function.us = 100.0
        submitter.leases.granted(m.LeaseGranted(submitter.scheduling_class.index, b"lease", WORKER, False), 0.0)
        ahead = submitter.pushed[1:]
        assert len(ahead) > 1
        submitter.leases.taken_back(WORKER, [task.id for task in ahead])
        assert [task.args for task in submitter.leases.queued(submitter.scheduling_class)] == [
            b"0",
            b"1",
            b"2",
            b"3",
            b"4",
        ]
        del submitter.pushed[1:]
        assert submitter.run() == [b"first", b"0", b"1", b"2", b"3", b"4"]

    def test_behind_tasks_with_arguments_elsewhere(self) -> None:
        submitter = Submitter(prefetch=True)
        oid = ME + bytes(5) + bytes(3)
        submitter.table.create(oid)
        submitter.table.set_stored(oid, 1 << 20, 3)
        submitter.count += 1
        far = PendingTask(ME + submitter.count.to_bytes(5, "big"), submitter.function, "", b"far", 1, None, [oid], 3)
        submitter.table.create(far.id + FIRST_RETURN, far)
        submitter.leases.submit(far, submitter.scheduling_class)
        submitter.ids = [submitter.pack(b"%d" % number) for number in range(40)]
        assert sorted(submitter.run()) == sorted([b"first", b"far", *(b"%d" % number for number in range(40))])


class TestOne:
    def test_cancelled_ones_do_not_run(self) -> None:
        submitter = Submitter(packed=20)
        for number in (0, 7, 19):
            submitter.cancel(number)
            assert type(submitter.entry(number).task) is PendingTask
        assert submitter.run() == [b"first", *(b"%d" % n for n in range(20) if n not in (0, 7, 19))]
        assert not submitter.table.packed.unpacked

    def test_the_task_of_an_object_is_one_and_the_same(self) -> None:
        submitter = Submitter(packed=3)
        task = submitter.table.packed.task_of(submitter.ids[1])
        assert task is not None and task is submitter.table.packed.task_of(submitter.ids[1])
        assert submitter.leases.position(task) == 2
        assert list(submitter.leases.queued(submitter.scheduling_class))[2] is task
        submitter.run(most=2)
        assert submitter.pushed == [task] and submitter.leases.position(task) is None

    def test_looking_changes_nothing(self) -> None:
        submitter = Submitter(packed=3)
        shown = list(submitter.leases.queued(submitter.scheduling_class))
        assert [task.args for task in shown] == [b"first", b"0", b"1", b"2"]
        assert [submitter.leases.position(task) for task in shown] == [0, 1, 2, 3]
        assert list(submitter.scheduling_class.queue)[1:] == submitter.ids and not submitter.table.packed.unpacked

    def test_freed_by_hand_it_runs_all_the_same(self) -> None:
        submitter = Submitter(packed=3)
        submitter.table.discard(submitter.ids[1], b"freed\2")
        assert submitter.entry(1).value == b"freed\2"
        assert submitter.run() == [b"first", b"0", b"1", b"2"]
        assert submitter.entry(1).value == b"freed\2"

    def test_a_ref_that_dies_does_not_take_the_task_along(self) -> None:
        submitter = Submitter(packed=3)
        for oid in submitter.ids:
            submitter.table.refs.remove_local_ref(oid)
        assert submitter.run() == [b"first", b"0", b"1", b"2"]
        assert submitter.table.entries.keys().isdisjoint(submitter.ids)

    def test_borrowers_and_waiters_hear_of_its_value(self) -> None:
        submitter = Submitter(packed=2)
        submitter.table.on_object_get(OTHER, submitter.ids[0])
        submitter.run()
        assert (OTHER, m.ObjectReady(submitter.ids[0], 0, b"v\0", 0, [])) in submitter.table.out

    def test_everything_that_waits_fails_with_the_raylet(self) -> None:
        submitter = Submitter(packed=3)
        submitter.table.fail_all("the raylet is gone")
        assert all(submitter.entry(number).state == INLINE for number in range(3))
        assert submitter.run(most=3) == [b"first", b"0", b"1"], "a late answer finds the next task"


class TestEnd:
    """What decides on every single task unpacks all, and packs no more."""

    def test_classes_by_function(self) -> None:
        submitter = Submitter(packed=4)
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        submitter.pack(b"of the other", other)
        submitter.leases.split_by_function(submitter.scheduling_class)
        assert not submitter.leases.packing
        assert [len(klass.queue) for klass in submitter.leases.by_index] == [5, 1]
        assert submitter.run() == [b"first", b"0", b"1", b"2", b"3"]

    def test_refused_ones(self) -> None:
        submitter = Submitter(packed=4)
        refused: list[bytes] = []
        submitter.leases.admit_through(lambda scheduling_class: lambda task: refused.append(task.args))
        submitter.leases.pump(submitter.scheduling_class)
        assert refused == [b"first", b"0", b"1", b"2", b"3"] and not submitter.scheduling_class.queue


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_task_is_sent_once_or_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    submitter = Submitter(prefetch=bool(seed % 2))
    expected, ran = {b"first"}, list[bytes]()
    for number in range(300):
        what = rng.random()
        args = b"%d" % number
        if what < 0.5:
            submitter.ids.append(submitter.pack(args) if submitter.scheduling_class.queue else b"")
            if submitter.ids[-1]:
                expected.add(args)
            else:
                submitter.ids.pop()
        elif what < 0.6:
            submitter.whole(args)
            expected.add(args)
        elif what < 0.8 and submitter.ids:
            oid = rng.choice(submitter.ids)
            entry = submitter.table.entries.get(oid)
            task = submitter.table.packed.task_of(oid) if entry is not None and entry.state == PENDING else None
            if task is not None and what < 0.7 and submitter.leases.cancel_queued(task):
                submitter.ids.remove(oid)
                expected.discard(task.args)
                submitter.table.set_inline(oid, b"cancelled\2")
            elif task is not None and what >= 0.78:
                submitter.table.discard(oid, b"freed\2")
        elif what < 0.95:
            ran += submitter.run(most=rng.randrange(4))
        elif what > 0.999:
            submitter.leases.unpack_all()
        submitter.table.check_invariants()
    ran += submitter.run()
    assert sorted(ran) == sorted(expected)
    assert not submitter.table.packed.unpacked and not submitter.scheduling_class.queue


@pytest.mark.parametrize("value", [((), {}), ((1,), {}), ((1 << 40, "text"), {"name": None}), ((b"x" * 500,), {})])
def test_a_blob_without_its_frame_is_the_same_value(value: object) -> None:
    blob, _ = serialize(value)
    assert isinstance(blob, bytes)
    short = without_frame(blob)
    assert deserialize(short) == value
    assert len(short) == (len(blob) - 9 if len(blob) < 64 else len(blob))
