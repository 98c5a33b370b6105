"""The worker pool: which worker serves which allocation, which are forked, and which have to exit."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.config import Config
from hpcray.common.ids import make_proc
from hpcray.common.resources import RUNTIME_ENV
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Send
from hpcray.core.raylet.lease_requests import LeaseRequest, WorkerEnv
from hpcray.core.raylet.local_resources import ResourceAllocation
from hpcray.core.raylet.worker_pool import FORK_RETRY_DELAY, MIN_CONCURRENT_FORKS, WorkerPool, WorkerProcess
from hpcray.protocol.messages import Exit, Shape

A: WorkerEnv = (("A", "1"),)
SLOW: WorkerEnv = ((RUNTIME_ENV, "{}"),)
PLAIN: WorkerEnv = ()


def make(cpus: int = 2, **config: object) -> WorkerPool:
    return WorkerPool(0, cpus, Config(**{"prestart": 0, **config}))  # type: ignore[arg-type]


def allocation(env: WorkerEnv = PLAIN) -> ResourceAllocation:
    shape = Shape((), "", env)
    request = LeaseRequest(b"holder", 0, shape, local=True, decided_here=True)
    return ResourceAllocation(b"lease", request, {}, b"holder", 0, env)


def forks(effects: list[Effect]) -> list[int]:
    return [effect.number for effect in effects if isinstance(effect, ForkWorker)]


def exits(effects: list[Effect]) -> list[bytes]:
    return [effect.dest for effect in effects if isinstance(effect, Send) and isinstance(effect.msg, Exit)]


def ready(pool: WorkerPool, count: int, env: WorkerEnv = PLAIN, now: float = 0.0) -> list[WorkerProcess]:
    """`count` idle workers."""
    allocations = [allocation(env) for _ in range(count)]
    for each in allocations:
        assert pool.assign_worker(each) is None
    numbers = forks(pool.fork_for_waiting(now))
    for number in numbers:
        pool.worker_joined(now, make_proc(0, number), number)
    workers = [pool.workers[make_proc(0, number)] for number in numbers]
    for worker in workers:
        pool.release_worker(now, worker)
    return workers


def test_prestart_is_one_worker_per_cpu_unless_a_setting_differs() -> None:
    assert len(make(3, prestart=-1).prestart_workers()) == 3
    assert len(make(3, prestart=1).prestart_workers()) == 1
    assert len(make(8, prestart=-1, max_workers=4).prestart_workers()) == 4


def test_an_allocation_takes_the_worker_that_was_used_last() -> None:
    pool = make()
    workers = ready(pool, 2)
    assert pool.assign_worker(allocation()) is workers[1]
    assert pool.assign_worker(allocation(A)) is None, "another environment needs another worker"


def test_the_first_free_worker_serves_the_allocation_that_waits_longest() -> None:
    pool = make()
    (worker,) = ready(pool, 1)
    busy, first, second = allocation(), allocation(), allocation()
    assert pool.assign_worker(busy) is worker
    pool.assign_worker(first)
    pool.assign_worker(second)
    numbers = forks(pool.fork_for_waiting(0.0))
    assert len(numbers) == 2
    assert pool.release_worker(0.0, worker) is first and first.worker == worker.proc
    assert pool.worker_joined(0.0, make_proc(0, numbers[0]), 1) is second
    assert pool.worker_joined(0.0, make_proc(0, numbers[1]), 1) is None, "it is idle now"
    assert pool.assign_worker(allocation()) is not None


def test_forks_under_way_are_counted_so_an_allocation_forks_once() -> None:
    pool = make()
    pool.assign_worker(allocation())
    assert len(forks(pool.fork_for_waiting(0.0))) == 1
    assert forks(pool.fork_for_waiting(0.0)) == []


def test_forks_of_a_burst_are_limited() -> None:
    pool = make(1)
    for _ in range(MIN_CONCURRENT_FORKS):
        assert pool.can_supply(0.0, PLAIN)
        pool.assign_worker(allocation())
    assert not pool.can_supply(0.0, PLAIN) and not pool.is_full(0.0, PLAIN)
    assert len(forks(pool.fork_for_waiting(0.0))) == MIN_CONCURRENT_FORKS


def test_a_failed_fork_pauses_forking() -> None:
    pool = make()
    waiter = allocation()
    pool.assign_worker(waiter)
    (number,) = forks(pool.fork_for_waiting(0.0))
    pool.remove_worker(make_proc(0, number))
    assert pool.start_failed(0.0, PLAIN, "no memory") is waiter
    pool.assign_worker(waiter)
    assert pool.is_full(0.0, PLAIN) and pool.fork_for_waiting(FORK_RETRY_DELAY / 2) == []
    assert not pool.is_at_limit(0.0, PLAIN), "it will start more in a moment: nobody is to be told otherwise"
    assert len(forks(pool.fork_for_waiting(FORK_RETRY_DELAY))) == 1
    assert pool.failures == {PLAIN: 1} and pool.last_failure == "no memory"


def test_starts_that_fail_in_the_same_way_are_tried_less_and_less_often() -> None:
    pool = make()
    times = []
    now = 0.0
    while len(times) < 12:
        if not pool.waiting():
            pool.assign_worker(allocation())
        for number in forks(pool.fork_for_waiting(now)):
            times.append(now)
            pool.remove_worker(make_proc(0, number))
            pool.start_failed(now, PLAIN, "exit code 1: OSError: no such file")
        now += 0.5
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0, 30.0]
    now += FORK_RETRY_DELAY
    assert pool.is_full(now, PLAIN) and not pool.is_full(now, A), "other environments have nothing to do with it"
    pool.start_failed(now, PLAIN, "another reason")
    assert not pool.is_full(now + 1.0, PLAIN)


def test_a_burst_of_failures_is_one() -> None:
    pool = make()
    for _ in range(8):
        pool.assign_worker(allocation())
    for number in forks(pool.fork_for_waiting(0.0)):
        pool.remove_worker(make_proc(0, number))
        pool.start_failed(0.0, PLAIN, "died")
    assert not pool.is_full(FORK_RETRY_DELAY, PLAIN)


def test_at_the_limit_an_idle_worker_of_another_environment_makes_room() -> None:
    pool = make(4, max_workers=2)
    old, young = ready(pool, 2)
    pool.assign_worker(allocation(A))
    effects = pool.fork_for_waiting(0.0)
    assert forks(effects) == [] and exits(effects) == [old.proc]
    assert pool.fork_for_waiting(0.0) == [], "one is enough"
    pool.remove_worker(old.proc)
    assert len(forks(pool.fork_for_waiting(0.0))) == 1
    assert pool.assign_worker(allocation()) is young
    assert pool.is_full(0.0, A) and pool.is_at_limit(0.0, A)


def test_at_the_limit_a_worker_that_owns_objects_stays_and_the_next_one_makes_room() -> None:
    pool = make(4, max_workers=2, idle_worker_timeout=10.0)
    old, young = ready(pool, 2)
    pool.assign_worker(allocation(A))
    assert exits(pool.fork_for_waiting(0.0)) == [old.proc]
    assert pool.exit_refused(1.0, old.proc) is None and pool.owners(1.0) == 1
    assert exits(pool.fork_for_waiting(1.0)) == [young.proc]
    assert pool.exit_refused(2.0, young.proc) is None and pool.owners(2.0) == 2
    assert pool.fork_for_waiting(3.0) == [] and pool.is_full(3.0, A), "nobody's objects are lost for it"
    assert len(pool.drop_hopeless(3.0)) == 1 and not pool.waiting(), "who waits is told"
    assert not pool.is_full(11.0, A), "one of them may own nothing any more"
    pool.assign_worker(allocation(A))
    assert pool.drop_hopeless(11.0) == []
    assert exits(pool.fork_for_waiting(11.0)) == [old.proc]
    pool.remove_worker(old.proc)
    assert len(forks(pool.fork_for_waiting(11.0))) == 1 and pool.owners(11.0) == 1
    pool.check_invariants()


def test_idle_workers_beyond_the_cpus_leave_after_their_time_the_oldest_first() -> None:
    pool = make(1, idle_worker_timeout=10.0)
    first = ready(pool, 2, now=0.0)
    assert pool.reap(9.0) == []
    busy = allocation()
    assert pool.assign_worker(busy) is first[1]
    late = ready(pool, 2, A, now=5.0)
    assert exits(pool.reap(10.0)) == [first[0].proc]
    assert len(exits(pool.reap(100.0))) == 2, "a busy worker uses the only CPU, nobody else is needed"
    assert {worker.state for worker in (*late, first[0])} == {"leaving"}
    pool.release_worker(100.0, first[1])
    assert pool.reap(1000.0) == [], "one per CPU stays"


def test_an_unknown_process_or_a_second_join_gets_no_allocation() -> None:
    pool = make()
    (worker,) = ready(pool, 1)
    assert pool.worker_joined(0.0, make_proc(0, 99), 1) is None
    assert pool.worker_joined(0.0, worker.proc, 1) is None
    assert pool.snapshot()["counts"]["idle"] == 1


STEPS = st.lists(st.tuples(st.sampled_from(["want", "join", "free", "die", "cancel", "reap"]), st.integers(0, 9)))


@given(STEPS, st.integers(1, 5))
def test_counts_of_workers_and_waiting_allocations_stay_true(steps: list[tuple[str, int]], limit: int) -> None:
    pool = make(2, max_workers=limit, idle_worker_timeout=0.0)
    now = 0.0
    for what, which in steps:
        now += 1.0
        workers = list(pool.workers.values())
        worker = workers[which % len(workers)] if workers else None
        env = A if which % 2 else PLAIN
        if what == "want" and pool.can_supply(now, env):
            pool.assign_worker(allocation(env))
        elif what == "join" and worker is not None:
            pool.worker_joined(now, worker.proc, 1)
        elif what == "free" and worker is not None and worker.state == "busy":
            pool.release_worker(now, worker)
        elif what == "die" and worker is not None:
            pool.remove_worker(worker.proc)
            if worker.state == "starting":
                pool.start_failed(now, worker.env, "died")
        elif what == "cancel" and pool.waiting():
            assert pool.cancel_waiting(pool.waiting()[which % len(pool.waiting())])
        elif what == "reap":
            pool.reap(now)
        pool.fork_for_waiting(now)
        pool.check_invariants()
        counts = pool.snapshot()["counts"]
        states = [each.state for each in pool.workers.values()]
        assert counts == {name: states.count(name) for name in counts}
        assert len(states) <= limit
        assert len(pool.waiting()) == pool.snapshot()["waiting_for_worker"]
        idle = {each.env for each in pool.workers.values() if each.state == "idle"}
        assert not idle & {each.env for each in pool.waiting()}, "an allocation waits while a worker idles"


def test_a_worker_that_does_not_join_is_killed_once_and_its_allocation_stops_waiting() -> None:
    pool = make(worker_start_timeout=5.0)
    waiter = allocation()
    pool.assign_worker(waiter)
    (number,) = forks(pool.fork_for_waiting(100.0))
    assert pool.reap(100.0) == [] and pool.reap(104.9) == []
    (kill,) = pool.reap(105.0)
    assert isinstance(kill, KillWorker) and kill.worker == make_proc(0, number)
    assert "not up within 5 s" in kill.reason
    assert pool.reap(106.0) == [], "once is enough"
    worker = pool.remove_worker(kill.worker)
    assert worker is not None and worker.state == "starting"
    assert pool.start_failed(106.0, worker.env, kill.reason) is waiter


def test_a_worker_that_joins_in_time_idles_from_then_on() -> None:
    pool = make(1, worker_start_timeout=5.0, idle_worker_timeout=10.0)
    pool.assign_worker(allocation())
    (number,) = forks(pool.fork_for_waiting(0.0))
    pool.reap(1.0)
    pool.worker_joined(4.0, make_proc(0, number), 1)
    assert pool.reap(50.0) == []


def test_workers_with_a_long_setup_keep_no_others_waiting() -> None:
    pool = make(worker_start_timeout=5.0)
    for number in range(MIN_CONCURRENT_FORKS):
        assert pool.can_supply(0.0, SLOW)
        pool.assign_worker(allocation(((RUNTIME_ENV, str(number)),)))
    assert not pool.can_supply(0.0, SLOW) and pool.can_supply(0.0, PLAIN)
    late = allocation(SLOW)
    pool.assign_worker(late)
    slow = forks(pool.fork_for_waiting(0.0))
    assert len(slow) == MIN_CONCURRENT_FORKS
    mine = allocation()
    pool.assign_worker(mine)
    (number,) = forks(pool.fork_for_waiting(0.0))
    assert pool.worker_joined(1.0, make_proc(0, number), 1) is mine
    assert pool.reap(1.0) == pool.reap(100.0) == [], "their environment says how long they may take"
    assert pool.worker_joined(100.0, make_proc(0, slow[0]), 2) is not None
    assert pool.remove_worker(make_proc(0, slow[1])) is not None
    assert pool.cancel_waiting(late)
    assert len(forks(pool.fork_for_waiting(100.0))) == 1, "one for the allocation whose worker died"


def test_in_one_environment_as_many_start_at_a_time_as_there_are_cpus() -> None:
    pool = make(2)
    waiting = [allocation(SLOW) for _ in range(32)]
    for one in waiting:
        pool.assign_worker(one)
    first = forks(pool.fork_for_waiting(0.0))
    assert len(first) == 2 and not forks(pool.fork_for_waiting(0.0))
    assert pool.worker_joined(1.0, make_proc(0, first[0]), 1) is waiting[0]
    assert len(forks(pool.fork_for_waiting(1.0))) == 1
    for one in waiting[1:]:
        assert pool.cancel_waiting(one)
    assert not forks(pool.fork_for_waiting(2.0)), "who was dropped never starts"
    pool.check_invariants()


def test_an_idle_worker_that_owns_objects_refuses_to_exit_and_serves_who_waits() -> None:
    pool = make(0, idle_worker_timeout=1.0)
    worker, other = ready(pool, 2)
    assert exits(pool.reap(1.0)) == [worker.proc, other.proc]
    waiting = allocation()
    assert pool.assign_worker(waiting) is None, "who was asked to exit is not given work"
    assert pool.exit_refused(2.0, worker.proc) is waiting
    assert pool.exit_refused(2.0, other.proc) is None
    pool.check_invariants()
    assert pool.reap(2.5) == [] and exits(pool.reap(3.0)) == [other.proc], "it is asked again after its idle time"
    pool.mark_leaving(other)
    assert pool.exit_refused(4.0, other.proc) is None and other.state == "leaving", "killed meanwhile"
