"""The submitter's lease client: how much it asks for, what it sends ahead, what it takes back and gives back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.ids import make_proc, raylet_of
from hpcray.core.core_worker.lease_manager import (
    AHEAD_US,
    PIPELINE_US,
    SEEN_AT_ONCE,
    SHORT_US,
    STALL_TIMEOUT,
    TICKS_FOR_ALL,
    LeaseManager,
)
from hpcray.core.core_worker.task import FunctionDescriptor, PendingTask, SchedulingClass
from hpcray.protocol import messages as m

ME = make_proc(1, 7)
HERE, ELSEWHERE = make_proc(1, 20), make_proc(3, 20)
CPU = m.Shape((("CPU", 10_000),))
IDLE = 1.0


class Client:
    """A lease client, and what it did."""

    def __init__(self, us: float = -1.0) -> None:
        self.sent: list[tuple[bytes, m.Message]] = []
        self.pushed: list[tuple[bytes, bytes]] = []
        self.leases = LeaseManager(
            ME, lambda dest, msg: self.sent.append((dest, msg)), lambda t, proc: self.pushed.append((t.id, proc)), IDLE
        )
        self.scheduling_class: SchedulingClass = self.leases.scheduling_class(CPU)
        self.function = FunctionDescriptor(b"f" * 16, "f", b"")
        self.function.us = us
        self.count = 0

    def task(self, retries: int = 3) -> PendingTask:
        self.count += 1
        return PendingTask(ME + self.count.to_bytes(5, "big"), self.function, "", b"", 1, None, None, retries)

    def submit(self, count: int = 1, retries: int = 3) -> list[PendingTask]:
        tasks = [self.task(retries) for _ in range(count)]
        for task in tasks:
            self.leases.submit(task, self.scheduling_class)
        return tasks

    def grant(self, worker: bytes = HERE, now: float = 0.0, wanted: bool = False) -> None:
        self.leases.granted(m.LeaseGranted(self.scheduling_class.index, b"lease" + worker, worker, wanted), now)

    def answer(self, task: PendingTask, us: int = 100, now: float = 0.0) -> None:
        assert task.worker is not None
        assert self.leases.answered(task.worker, task.id, us, now) is task

    def demands(self) -> list[int]:
        """The totals of the demands sent since the last look."""
        found = [msg.total for dest, msg in self.sent if isinstance(msg, m.RequestLeases) and dest == raylet_of(1)]
        self.sent = [item for item in self.sent if not isinstance(item[1], m.RequestLeases)]
        return found

    def returned(self) -> list[tuple[bytes, bytes]]:
        return [(dest, msg.lease) for dest, msg in self.sent if isinstance(msg, m.ReturnLease)]

    def asked_back(self) -> list[bytes]:
        return [dest for dest, msg in self.sent if isinstance(msg, m.ReturnTasks)]


class TestDemand:
    def test_the_first_task_asks_for_one(self):
        client = Client()
        client.submit()
        assert client.demands() == [1]
        assert client.pushed == []

    def test_a_burst_asks_a_logarithmic_number_of_times(self):
        client = Client()
        client.submit(1000)
        demands = client.demands()
        assert demands == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
        assert len(client.scheduling_class.queue) < 2 * demands[-1], "never asks for less than half of what waits"

    def test_a_local_grant_counts_in_the_total_demand(self):
        """The raylet's outstanding count is total minus its own grants: no double grant, none lost."""
        client = Client()
        client.submit(2)
        client.demands()
        client.grant()
        assert client.scheduling_class.granted_local == 1
        assert (
            client.scheduling_class.sent_total - client.scheduling_class.granted_local
            == len(client.scheduling_class.queue)
            == 1
        )
        client.submit(3)
        assert client.demands()[-1] - client.scheduling_class.granted_local >= 2

    def test_a_grant_of_another_node_shrinks_the_demand(self):
        """Our raylet does not count what others grant, so the total falls instead."""
        client = Client()
        client.submit(2)
        client.demands()
        client.grant(ELSEWHERE)
        assert client.scheduling_class.granted_local == 0
        assert client.demands() == [1]

    def test_tasks_queued_since_are_reported_when_the_lease_that_was_coming_has_taken_others(self):
        """The raylet believes that one is on its way; the count alone would not say that it has arrived."""
        client = Client()
        client.submit(4)
        client.demands()
        client.grant(ELSEWHERE)
        client.submit()
        client.grant(make_proc(4, 20))
        client.sent.clear()
        client.submit()
        (request,) = [msg for _, msg in client.sent]
        assert (request.total, request.received) == (4, 2)
        assert client.demands() == [4]
        client.submit()
        assert client.demands() == []

    def test_a_lease_near_the_arguments_that_others_need_while_tasks_are_queued_repeats_the_demand(self):
        """The raylet may think that a lease of the near node is on its way, and it is this one."""
        near = m.Shape(CPU.resources, "near:3")
        for shape, worker, repeated in ((near, ELSEWHERE, [1]), (near, HERE, []), (CPU, ELSEWHERE, [])):
            client = Client()
            client.scheduling_class = client.leases.scheduling_class(shape)
            first, _ = client.submit(2)
            client.grant(worker)
            client.leases.reclaim(3 if worker is ELSEWHERE else 1)
            client.demands()
            client.answer(first)
            assert len(client.returned()) == 1 and client.demands() == repeated

    def test_an_empty_queue_withdraws_what_is_outstanding(self):
        client = Client()
        tasks = client.submit(2)
        client.grant()
        client.demands()
        client.answer(tasks[0])
        assert client.pushed[-1] == (tasks[1].id, HERE)
        assert client.demands() == [client.scheduling_class.granted_local]

    def test_cancelled_tasks_are_no_longer_asked_for(self):
        client = Client()
        (task,) = client.submit()
        client.demands()
        assert client.leases.cancel_queued(task)
        assert not client.leases.cancel_queued(task)
        assert client.demands() == [0]

    def test_refused_tasks_are_handed_back_and_no_longer_asked_for(self):
        client = Client()
        refused = []
        queued = client.submit(2)
        assert client.demands() == [1, 2]
        client.leases.admit_through(lambda scheduling_class: refused.append)
        client.leases.pump(client.scheduling_class)
        assert client.demands() == [0]
        assert refused == queued + client.submit()
        assert client.demands() == []

    def test_admitted_tasks_are_queued_as_before(self):
        client = Client()
        client.leases.admit_through(lambda scheduling_class: None)
        (task,) = client.submit()
        assert client.demands() == [1]
        client.grant()
        assert client.pushed[-1] == (task.id, HERE)

    def test_a_grant_that_comes_when_all_was_withdrawn(self):
        client = Client()
        for task in client.submit(4):
            client.leases.cancel_queued(task)
        assert client.demands() == [1, 2, 4, 2, 1, 0]
        client.grant()
        assert client.demands() == [1], "granted here, and nothing more is wanted"

    def test_each_shape_has_its_own_scheduling_class(self):
        client = Client()
        other = client.leases.scheduling_class(m.Shape((("CPU", 20_000),)))
        client.submit()
        client.leases.submit(client.task(), other)
        assert [(msg.scheduling_class, msg.total) for _, msg in client.sent if isinstance(msg, m.RequestLeases)] == [
            (0, 1),
            (1, 1),
        ]
        client.leases.granted(m.LeaseGranted(1, b"l", HERE), 0.0)
        assert (len(client.scheduling_class.queue), len(other.queue)) == (1, 0)
        assert client.leases.scheduling_class(CPU) is client.scheduling_class


class TestPipelining:
    def test_an_idle_worker_gets_the_task_at_once(self):
        client = Client()
        (first,) = client.submit()
        client.grant()
        client.answer(first)
        client.demands()
        task = client.task()
        assert client.leases.submit(task, client.scheduling_class), "it went to an idle worker: to be flushed now"
        assert client.pushed[-1] == (task.id, HERE)
        assert client.demands() == []

    def test_tasks_of_unknown_length_are_not_sent_ahead(self):
        client = Client(us=-1.0)
        client.submit(3)
        client.grant()
        assert len(client.pushed) == 1 and len(client.scheduling_class.queue) == 2

    def test_long_tasks_are_not_sent_ahead(self):
        client = Client(us=SHORT_US)
        client.submit(3)
        client.grant()
        client.submit()
        assert len(client.pushed) == 1

    def test_short_tasks_are_sent_ahead_up_to_a_few_milliseconds(self):
        client = Client(us=500.0)
        client.submit(100)
        client.grant()
        worker = client.leases.workers[HERE]
        assert worker.load < PIPELINE_US + 500.0 + 20.0
        assert worker.load + 500.0 >= PIPELINE_US
        assert 2 <= len(client.pushed) < 15
        assert len(client.pushed) + len(client.scheduling_class.queue) == 100

    def test_tasks_that_must_not_run_twice_are_not_sent_ahead(self):
        """They would be lost with a worker that dies in the task before them."""
        client = Client(us=10.0)
        client.submit(3, retries=0)
        client.grant()
        assert len(client.pushed) == 1

    def test_the_order_of_submission_is_kept(self):
        client = Client(us=10.0)
        tasks = client.submit(50)
        client.grant()
        while len(client.pushed) < 50:
            client.answer(tasks[len(client.pushed) - len(client.leases.workers[HERE].inflight)])
        assert [ident for ident, _ in client.pushed] == [task.id for task in tasks]

    def test_a_function_that_turns_out_long_is_not_sent_ahead_any_more(self):
        client = Client(us=10.0)
        tasks = client.submit(2)
        client.grant()
        client.answer(tasks[0], us=1_000_000)
        assert client.function.us > SHORT_US
        client.submit()
        assert len(client.pushed) == 2

    def test_answers_make_room_for_tasks_sent_ahead(self):
        client = Client(us=900.0)
        tasks = client.submit(20)
        client.grant()
        sent = len(client.pushed)
        client.answer(tasks[0], us=900)
        assert len(client.pushed) == sent + 1


class TestOneAhead:
    """Of tasks of some milliseconds the next is sent before its worker asks for it."""

    def test_a_worker_that_has_answered_gets_two(self):
        client = Client(us=10_000.0)
        tasks = client.submit(10)
        client.grant(ELSEWHERE)
        assert len(client.pushed) == 1
        client.answer(tasks[0], us=10_000)
        assert [ident for ident, _ in client.pushed] == [task.id for task in tasks[:3]]
        client.answer(tasks[1], us=10_000)
        assert len(client.pushed) == 4, "one that runs, one that comes next"

    def test_a_few_of_shorter_tasks_are_sent_ahead(self):
        client = Client(us=5_000.0)
        tasks = client.submit(20)
        client.grant(ELSEWHERE)
        client.answer(tasks[0], us=5_000)
        assert len(client.leases.workers[ELSEWHERE].inflight) == 4
        for task in tasks[1:12]:
            client.answer(task, us=5_000)
        assert len(client.leases.workers[ELSEWHERE].inflight) == 4
        assert len(client.scheduling_class.queue) == 4
        for task in tasks[12:15]:
            client.answer(task, us=5_000)
        assert len(client.leases.workers[ELSEWHERE].inflight) < 4, "hardly anything is left for others"

    def test_nothing_is_sent_ahead_when_each_worker_will_need_one_of_the_queued_tasks(self):
        client = Client(us=10_000.0)
        tasks = client.submit(5)
        client.grant(HERE)
        client.grant(ELSEWHERE)
        client.answer(tasks[0], us=10_000)
        assert len(client.pushed) == 3 and len(client.scheduling_class.queue) == 2
        client.answer(tasks[1], us=10_000)
        assert len(client.pushed) == 4

    def test_no_second_long_task_is_sent_to_a_worker_that_answered(self):
        client = Client(us=AHEAD_US)
        tasks = client.submit(10)
        client.grant()
        client.answer(tasks[0], us=int(AHEAD_US))
        assert len(client.pushed) == 2

    def test_nothing_is_sent_behind_a_long_task(self):
        client = Client(us=2 * AHEAD_US)
        tasks = client.submit(10)
        client.grant()
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        other.us = SHORT_US
        for task in tasks[2:]:
            task.fn = other
        client.answer(tasks[0], us=int(2 * AHEAD_US))
        assert len(client.pushed) == 2

    def test_no_second_task_that_must_not_run_twice_is_sent_to_a_worker(self):
        client = Client(us=10_000.0)
        tasks = client.submit(10, retries=0)
        client.grant()
        client.answer(tasks[0], us=10_000)
        assert len(client.pushed) == 2

    def test_a_task_sent_ahead_is_taken_back_when_the_first_takes_twice_as_long_as_expected(self):
        client = Client(us=40_000.0)
        tasks = client.submit(10)
        client.grant()
        client.answer(tasks[0], us=40_000, now=1.0)
        client.answer(tasks[1], us=40_000, now=2.0)
        client.leases.tick(2.0 + 2 * STALL_TIMEOUT)
        assert client.asked_back() == []
        client.leases.tick(2.0 + 2.1 * 0.04)
        assert client.asked_back() == [HERE]


class TestTakeBack:
    def stalled(self) -> tuple[Client, list[PendingTask]]:
        client = Client(us=10.0)
        tasks = client.submit(5)
        client.grant()
        assert len(client.pushed) == 5
        assert client.leases.tick(1.0)  # begins to look at the clock
        assert client.asked_back() == []
        client.leases.tick(1.0 + 2 * STALL_TIMEOUT)
        return client, tasks

    def test_a_worker_without_progress_gets_one_take_back(self):
        client, _ = self.stalled()
        assert client.asked_back() == [HERE]
        client.leases.tick(2.0)
        assert client.asked_back() == [HERE]

    def test_a_worker_that_answers_gets_no_take_back(self):
        client = Client(us=10.0)
        tasks = client.submit(5)
        client.grant()
        client.leases.tick(1.0)
        client.answer(tasks[0], now=1.0 + 2 * STALL_TIMEOUT)
        client.leases.tick(1.0 + 2.5 * STALL_TIMEOUT)
        assert client.asked_back() == []

    def test_one_task_alone_is_nothing_to_take_back(self):
        client = Client(us=10.0)
        client.submit()
        client.grant()
        client.leases.tick(1.0)
        client.leases.tick(100.0)
        assert client.asked_back() == []

    def test_tasks_that_come_back_are_first_in_line_again(self):
        client, tasks = self.stalled()
        (late,) = client.submit()
        client.demands()
        client.leases.taken_back(HERE, [task.id for task in tasks[1:]])
        assert [task.id for task in client.scheduling_class.queue] == [task.id for task in (*tasks[1:], late)]
        assert list(client.leases.workers[HERE].inflight) == [tasks[0].id]
        assert client.demands(), "it needs other workers now"

    def test_another_worker_gets_the_tasks_of_a_stalled_one(self):
        client, tasks = self.stalled()
        client.leases.taken_back(HERE, [task.id for task in tasks[1:]])
        client.grant(ELSEWHERE)
        assert client.pushed[5:] == [(task.id, ELSEWHERE) for task in tasks[1:]]
        client.submit()
        assert client.pushed[-1][1] == ELSEWHERE

    def test_the_stalled_worker_is_trusted_again_once_it_answers(self):
        client, tasks = self.stalled()
        client.leases.taken_back(HERE, [task.id for task in tasks[1:]])
        client.answer(tasks[0], us=10)
        assert [proc for _, proc in client.pushed[5:]] == [HERE] * 4

    def test_an_answer_that_crossed_the_take_back_counts(self):
        """A task that was answered meanwhile is not queued again."""
        client, tasks = self.stalled()
        client.answer(tasks[0])
        client.leases.taken_back(HERE, [task.id for task in tasks])
        assert [ident for ident, _ in client.pushed].count(tasks[0].id) == 1
        assert all([ident for ident, _ in client.pushed].count(task.id) == 2 for task in tasks[1:])

    def test_tasks_taken_back_from_an_unknown_worker_are_ignored(self):
        client = Client()
        client.leases.taken_back(HERE, [b"x" * 13])
        assert client.leases.answered(HERE, b"x" * 13, 1, 0.0) is None


class TestReturn:
    def test_an_idle_lease_goes_back_after_the_timeout(self):
        client = Client()
        (task,) = client.submit()
        client.grant(ELSEWHERE)
        client.answer(task, now=10.0)
        assert client.leases.tick(10.0 + 0.9 * IDLE)
        assert client.returned() == []
        assert not client.leases.tick(10.0 + IDLE), "nothing is left to look after"
        assert client.returned() == [(raylet_of(3), b"lease" + ELSEWHERE)]
        assert not client.scheduling_class.idle and not client.scheduling_class.rotation

    def test_a_lease_that_came_too_late_goes_back_at_once(self):
        client = Client()
        (task,) = client.submit()
        client.leases.cancel_queued(task)
        client.grant()
        assert client.returned() == [(raylet_of(1), b"lease" + HERE)]
        assert client.leases.workers == {}

    def test_reclaimed_idle_leases_go_back_at_once_busy_ones_when_done(self):
        client = Client(us=10.0)
        tasks = client.submit(3)
        client.grant()
        queued = client.submit(500)
        client.leases.reclaim(3)
        assert not client.leases.workers[HERE].reclaimed, "another node"
        client.leases.reclaim(1)
        sent = len(client.pushed)
        assert client.returned() == []
        for task in [*tasks, *queued][:sent]:
            client.answer(task)
        assert len(client.pushed) == sent, "it gets nothing more, though more waits"
        assert client.returned() == [(raylet_of(1), b"lease" + HERE)]
        assert len(client.scheduling_class.queue) == 503 - sent

    def test_a_reclaimed_worker_gets_no_new_task_though_it_has_room(self):
        client = Client(us=10.0)
        client.submit(1)
        client.grant()
        client.leases.reclaim(1)
        (task,) = client.submit()
        assert [ident for ident, _ in client.pushed].count(task.id) == 0
        assert list(client.scheduling_class.queue) == [task]

    def test_a_reclaimed_worker_goes_back_when_all_its_tasks_were_taken_back(self):
        client = Client(us=10.0)
        tasks = client.submit(2)
        client.grant()
        client.leases.reclaim(1)
        client.leases.taken_back(HERE, [task.id for task in tasks])
        assert client.returned() == [(raylet_of(1), b"lease" + HERE)]
        assert [task.id for task in client.scheduling_class.queue] == [task.id for task in tasks]


class TestWanted:
    """Others wait for what the lease holds."""

    def test_a_needed_worker_goes_back_as_soon_as_there_is_nothing_to_do(self):
        client = Client()
        tasks = client.submit(2)
        client.grant(wanted=True)
        client.answer(tasks[0])
        assert client.returned() == []
        client.answer(tasks[1])
        assert client.returned() == [(raylet_of(1), b"lease" + HERE)]
        client.submit()
        assert client.demands()[-1] == 2, "what comes later asks anew"

    def test_a_busy_worker_goes_back_when_others_begin_to_wait(self):
        client = Client()
        tasks = client.submit(5)
        client.grant(HERE)
        idle = make_proc(1, 21)
        other = client.leases.scheduling_class(m.Shape((("CPU", 20_000),)))
        client.leases.submit(client.task(), other)
        client.leases.granted(m.LeaseGranted(other.index, b"idle", idle), 0.0)
        client.leases.answered(idle, client.pushed[-1][0], 5, 0.0)
        client.leases.reclaim(1, busy=False)
        assert client.returned() == [(raylet_of(1), b"idle")]
        for task in tasks:
            assert len(client.returned()) == 1, "its holder has more to do for it"
            client.answer(task)
        assert client.returned()[1:] == [(raylet_of(1), b"lease" + HERE)]


class TestLoss:
    def test_unanswered_tasks_of_a_dead_worker_come_back_in_the_order_sent(self):
        client = Client(us=10.0)
        tasks = client.submit(4)
        client.grant()
        client.answer(tasks[0])
        assert client.leases.lost(HERE) == tasks[1:]
        assert client.leases.workers == {} and not client.scheduling_class.rotation
        assert client.leases.lost(HERE) == []

    def test_a_late_answer_of_the_dead_is_ignored(self):
        client = Client()
        (task,) = client.submit()
        client.grant()
        client.leases.lost(HERE)
        assert client.leases.answered(HERE, task.id, 5, 0.0) is None


class TestSplit:
    def test_functions_of_a_class_whose_tasks_block_wait_apart(self):
        client = Client()
        blocked = client.submit(3)
        client.grant()
        assert client.pushed == [(blocked[0].id, HERE)]
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        tasks = [PendingTask(ME + bytes([9, 0, 0, 0, n]), other, "", b"", 1, None, None, 3) for n in range(2)]
        client.leases.submit(tasks[0], client.scheduling_class)
        client.demands()
        client.leases.split_by_function(client.scheduling_class)
        client.leases.submit(tasks[1], client.scheduling_class)
        apart = tasks[0].scheduling_class
        assert list(apart.queue) == tasks and list(client.scheduling_class.queue) == blocked[1:]
        assert apart is not client.scheduling_class and apart.shape == CPU
        client.leases.granted(m.LeaseGranted(apart.index, b"other", ELSEWHERE), 0.0)
        assert client.pushed[1:] == [(tasks[0].id, ELSEWHERE)]
        client.leases.split_by_function(apart)
        client.leases.split_by_function(client.scheduling_class)
        assert len(client.leases.by_index) == 2

    def test_a_task_that_a_blocked_worker_gives_back_goes_to_its_function_s_class(self):
        client = Client(us=1.0)
        client.submit()
        client.grant()
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        other.us = 1.0
        ahead = PendingTask(ME + b"ahead", other, "", b"", 1, None, None, 3)
        client.leases.submit(ahead, client.scheduling_class)
        assert ahead.worker == HERE, "it was sent ahead"
        client.leases.split_by_function(client.scheduling_class)
        client.leases.taken_back(HERE, [ahead.id])
        assert ahead.scheduling_class is not client.scheduling_class and list(ahead.scheduling_class.queue) == [ahead]

    def test_functions_wait_apart_after_classes_are_closed_too(self):
        """What closes a class, such as the removal of a placement group, leaves the split of the others."""
        client = Client()
        client.submit(2)
        client.grant()
        client.leases.split_by_function(client.scheduling_class)
        client.leases.admit_through(lambda scheduling_class: None)
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        task = PendingTask(ME + bytes([9, 0, 0, 0, 0]), other, "", b"", 1, None, None, 3)
        client.leases.submit(task, client.scheduling_class)
        assert task.scheduling_class is not client.scheduling_class
        assert task not in client.scheduling_class.queue

    def test_what_a_closed_class_refuses_is_refused_although_it_is_split(self):
        client = Client()
        closed = []
        client.submit(2)
        client.grant()
        client.leases.split_by_function(client.scheduling_class)
        client.leases.admit_through(
            lambda scheduling_class: closed.append if scheduling_class is client.scheduling_class else None
        )
        other = FunctionDescriptor(b"g" * 16, "g", b"")
        task = PendingTask(ME + bytes([9, 0, 0, 0, 0]), other, "", b"", 1, None, None, 3)
        client.leases.submit(task, client.scheduling_class)
        assert closed == [task]


class TestManyWorkers:
    def test_ticks_look_at_very_many_workers_in_parts(self):
        client, count = Client(), 3 * SEEN_AT_ONCE
        workers = [make_proc(1 + number // 100, 100 + number) for number in range(count)]
        tasks = client.submit(count)
        for proc in workers:
            client.grant(proc)
        client.function.us = 100.0
        tasks += client.submit()
        assert sum(len(worker.inflight) for worker in client.leases.workers.values()) == count + 1
        stalled = next(proc for proc, worker in client.leases.workers.items() if len(worker.inflight) > 1)
        for task in tasks:
            if task.worker != stalled:
                client.answer(task, now=1.0)
        idle = count - 1
        for now in (1.0, 1.0 + 0.9 * IDLE):
            for _ in range(TICKS_FOR_ALL):
                client.leases.tick(now)
        assert client.asked_back() == [stalled] and not client.returned()
        for ticks in range(1, TICKS_FOR_ALL + 1):
            assert client.leases.tick(1.0 + IDLE)
            assert len(client.returned()) <= ticks * SEEN_AT_ONCE
        assert len(client.returned()) == idle and list(client.leases.workers) == [stalled]
        assert client.scheduling_class.rotation == list(client.leases.workers.values())

    def test_a_node_gets_its_own_leases_back(self):
        client = Client()
        client.submit(3)
        for proc in (HERE, make_proc(1, 21), ELSEWHERE):
            client.grant(proc)
        client.leases.reclaim(1)
        assert {proc for proc, worker in client.leases.workers.items() if worker.reclaimed} == {HERE, make_proc(1, 21)}
        client.leases.lost(HERE)
        client.leases.reclaim(3)
        assert client.leases.workers[ELSEWHERE].reclaimed

    @given(st.lists(st.integers(0, 30), max_size=80))
    def test_the_rotation_has_each_worker_once_and_tries_all(self, steps: list[int]):
        client = Client(us=10.0)
        for step in steps:
            proc = make_proc(1, 20 + step)
            if proc in client.leases.workers:
                client.leases.lost(proc)
            else:
                client.submit()
                client.grant(proc)
            rotation = client.scheduling_class.rotation
            assert {worker.proc for worker in rotation} == set(client.leases.workers)
            assert all(worker.position == place for place, worker in enumerate(rotation))
        tried = {client.submit()[0].worker for _ in range(len(client.leases.workers))}
        assert tried == set(client.leases.workers)
