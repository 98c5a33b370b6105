"""The worker pool: who is idle, who is forked, who has to go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.base.config import Config
from hpcray.base.ids import make_proc
from hpcray.base.resources import RUNTIME_ENV
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Send
from hpcray.core.pool import FORK_PAUSE, LEAST_FORKS, Worker, WorkerPool
from hpcray.core.scheduler.ledger import Claim
from hpcray.core.scheduler.queue import Env, Want
from hpcray.wire.messages import Exit, Shape

A: Env = (("A", "1"),)
SLOW: Env = ((RUNTIME_ENV, "{}"),)
PLAIN: Env = ()


def make(cpus: int = 2, **config: object) -> WorkerPool:
    return WorkerPool(0, cpus, Config(**{"prestart": 0, **config}))  # type: ignore[arg-type]


def claim(env: Env = PLAIN) -> Claim:
    shape = Shape((), "", env)
    return Claim(b"lease", Want(b"holder", 0, shape, local=True, own=True), {}, b"holder", 0, env)


def forks(effects: list[Effect]) -> list[int]:
    return [effect.number for effect in effects if isinstance(effect, ForkWorker)]


def exits(effects: list[Effect]) -> list[bytes]:
    return [effect.dest for effect in effects if isinstance(effect, Send) and isinstance(effect.msg, Exit)]


def ready(pool: WorkerPool, count: int, env: Env = PLAIN, now: float = 0.0) -> list[Worker]:
    """`count` idle workers."""
    claims = [claim(env) for _ in range(count)]
    for each in claims:
        assert pool.supply(each) is None
    numbers = forks(pool.pump(now))
    for number in numbers:
        pool.joined(now, make_proc(0, number), number)
    workers = [pool.workers[make_proc(0, number)] for number in numbers]
    for worker in workers:
        pool.release(now, worker)
    return workers


def test_prestart_is_one_per_cpu_unless_told_otherwise() -> None:
    assert len(make(3, prestart=-1).start()) == 3
    assert len(make(3, prestart=1).start()) == 1
    assert len(make(8, prestart=-1, max_workers=4).start()) == 4


def test_a_claim_takes_the_worker_that_was_used_last() -> None:
    pool = make()
    workers = ready(pool, 2)
    assert pool.supply(claim()) is workers[1]
    assert pool.supply(claim(A)) is None, "another environment needs another worker"


def test_whoever_is_free_first_serves_the_claim_that_waits_longest() -> None:
    pool = make()
    (worker,) = ready(pool, 1)
    busy, first, second = claim(), claim(), claim()
    assert pool.supply(busy) is worker
    pool.supply(first)
    pool.supply(second)
    numbers = forks(pool.pump(0.0))
    assert len(numbers) == 2
    assert pool.release(0.0, worker) is first and first.worker == worker.proc
    assert pool.joined(0.0, make_proc(0, numbers[0]), 1) is second
    assert pool.joined(0.0, make_proc(0, numbers[1]), 1) is None, "it is idle now"
    assert pool.supply(claim()) is not None


def test_forks_under_way_are_counted_so_a_claim_forks_once() -> None:
    pool = make()
    pool.supply(claim())
    assert len(forks(pool.pump(0.0))) == 1
    assert forks(pool.pump(0.0)) == []


def test_a_burst_is_forked_in_portions() -> None:
    pool = make(1)
    for _ in range(LEAST_FORKS):
        assert pool.can_supply(0.0, PLAIN)
        pool.supply(claim())
    assert not pool.can_supply(0.0, PLAIN) and not pool.full(0.0, PLAIN)
    assert len(forks(pool.pump(0.0))) == LEAST_FORKS


def test_a_failed_fork_pauses_forking() -> None:
    pool = make()
    waiter = claim()
    pool.supply(waiter)
    (number,) = forks(pool.pump(0.0))
    pool.remove(make_proc(0, number))
    assert pool.start_failed(0.0, PLAIN, "no memory") is waiter
    pool.supply(waiter)
    assert pool.full(0.0, PLAIN) and pool.pump(FORK_PAUSE / 2) == []
    assert len(forks(pool.pump(FORK_PAUSE))) == 1
    assert pool.failures == {PLAIN: 1} and pool.last_failure == "no memory"


def test_at_the_limit_an_idle_worker_of_another_environment_makes_room() -> None:
    pool = make(4, max_workers=2)
    old, young = ready(pool, 2)
    pool.supply(claim(A))
    effects = pool.pump(0.0)
    assert forks(effects) == [] and exits(effects) == [old.proc]
    assert pool.pump(0.0) == [], "one is enough"
    pool.remove(old.proc)
    assert len(forks(pool.pump(0.0))) == 1
    assert pool.supply(claim()) is young
    assert pool.full(0.0, A)


def test_idle_workers_beyond_the_cpus_leave_after_their_time_the_oldest_first() -> None:
    pool = make(1, idle_worker_timeout=10.0)
    first = ready(pool, 2, now=0.0)
    assert pool.reap(9.0) == []
    busy = claim()
    assert pool.supply(busy) is first[1]
    late = ready(pool, 2, A, now=5.0)
    assert exits(pool.reap(10.0)) == [first[0].proc]
    assert len(exits(pool.reap(100.0))) == 2, "a busy worker uses the only CPU, nobody else is needed"
    assert {worker.state for worker in (*late, first[0])} == {"leaving"}
    pool.release(100.0, first[1])
    assert pool.reap(1000.0) == [], "one per CPU stays"


def test_a_stranger_or_a_second_hello_is_nobody() -> None:
    pool = make()
    (worker,) = ready(pool, 1)
    assert pool.joined(0.0, make_proc(0, 99), 1) is None
    assert pool.joined(0.0, worker.proc, 1) is None
    assert pool.snapshot()["counts"]["idle"] == 1


STEPS = st.lists(st.tuples(st.sampled_from(["want", "join", "free", "die", "cancel", "reap"]), st.integers(0, 9)))


@given(STEPS, st.integers(1, 5))
def test_the_books_stay_balanced(steps: list[tuple[str, int]], limit: int) -> None:
    pool = make(2, max_workers=limit, idle_worker_timeout=0.0)
    now = 0.0
    for what, which in steps:
        now += 1.0
        workers = list(pool.workers.values())
        worker = workers[which % len(workers)] if workers else None
        env = A if which % 2 else PLAIN
        if what == "want" and pool.can_supply(now, env):
            pool.supply(claim(env))
        elif what == "join" and worker is not None:
            pool.joined(now, worker.proc, 1)
        elif what == "free" and worker is not None and worker.state == "busy":
            pool.release(now, worker)
        elif what == "die" and worker is not None:
            pool.remove(worker.proc)
            if worker.state == "starting":
                pool.start_failed(now, worker.env, "died")
        elif what == "cancel" and pool.waiting():
            assert pool.cancel(pool.waiting()[which % len(pool.waiting())])
        elif what == "reap":
            pool.reap(now)
        pool.pump(now)
        counts = pool.snapshot()["counts"]
        states = [each.state for each in pool.workers.values()]
        assert counts == {name: states.count(name) for name in counts}
        assert len(states) <= limit
        assert len(pool.waiting()) == pool.snapshot()["waiting_for_worker"]
        idle = {each.env for each in pool.workers.values() if each.state == "idle"}
        assert not idle & {each.env for each in pool.waiting()}, "a claim waits while a worker idles"


def test_a_worker_that_does_not_come_up_is_killed_once_and_its_claim_goes_back() -> None:
    pool = make(worker_start_timeout=5.0)
    waiter = claim()
    pool.supply(waiter)
    (number,) = forks(pool.pump(100.0))
    assert pool.reap(100.0) == [] and pool.reap(104.9) == []
    (kill,) = pool.reap(105.0)
    assert isinstance(kill, KillWorker) and kill.worker == make_proc(0, number)
    assert "not up within 5 s" in kill.reason
    assert pool.reap(106.0) == [], "once is enough"
    worker = pool.remove(kill.worker)
    assert worker is not None and worker.state == "starting"
    assert pool.start_failed(106.0, worker.env, kill.reason) is waiter


def test_a_worker_that_comes_up_in_time_idles_by_its_own_clock() -> None:
    pool = make(1, worker_start_timeout=5.0, idle_worker_timeout=10.0)
    pool.supply(claim())
    (number,) = forks(pool.pump(0.0))
    pool.reap(1.0)
    pool.joined(4.0, make_proc(0, number), 1)
    assert pool.reap(50.0) == []


def test_workers_that_are_being_set_up_keep_no_others_waiting() -> None:
    pool = make(worker_start_timeout=5.0)
    for _ in range(LEAST_FORKS):
        assert pool.can_supply(0.0, SLOW)
        pool.supply(claim(SLOW))
    assert not pool.can_supply(0.0, SLOW) and pool.can_supply(0.0, PLAIN)
    late = claim(SLOW)
    pool.supply(late)
    slow = forks(pool.pump(0.0))
    assert len(slow) == LEAST_FORKS
    mine = claim()
    pool.supply(mine)
    (number,) = forks(pool.pump(0.0))
    assert pool.joined(1.0, make_proc(0, number), 1) is mine
    assert pool.reap(1.0) == pool.reap(100.0) == [], "their environment says how long they may take"
    assert pool.joined(100.0, make_proc(0, slow[0]), 2) is not None
    assert pool.remove(make_proc(0, slow[1])) is not None
    assert pool.cancel(late)
    assert len(forks(pool.pump(100.0))) == 1, "one for the claim whose worker went"
