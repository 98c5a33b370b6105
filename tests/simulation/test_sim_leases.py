"""Many raylets, a head and submitters under any delays: every lease request is served, and nothing is left over."""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from simcluster import SimCluster
from submitters import CPU1, SimTask, shape

from hpcray.common.config import Config
from hpcray.common.resources import to_units
from hpcray.protocol import messages as m

DELAYS = st.lists(st.sampled_from([0.0, 0.0001, 0.001, 0.01, 0.05, 0.3]), min_size=1, max_size=30)
SIM = settings(max_examples=examples(60), print_blob=True)


def nodes(*cpus: float, **extra: float) -> list[dict[str, int]]:
    return [to_units({"CPU": c, **extra}) for c in cpus]


def finish(cluster: SimCluster, tasks: list[SimTask], seconds: float = 600.0) -> None:
    assert cluster.run(seconds), cluster.explain()
    assert all(task.done == 1 for task in tasks)


@SIM
@given(DELAYS, st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_every_task_of_a_flood_from_one_driver_is_run(delays: list[float], n: int, count: int, lazy: bool) -> None:
    cluster = SimCluster(nodes(*[2] * n), delays, lazy=lazy)
    driver = cluster.driver()
    tasks = [SimTask() for _ in range(count)]
    for task in tasks:
        driver.submit(task)
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.integers(0, 2**32), st.sampled_from(["eager", "lazy", "real"]))
def test_mixed_work_on_every_node_is_done(delays: list[float], seed: int, client: str) -> None:
    rng = random.Random(seed)
    totals = nodes(*[rng.choice([1, 2, 4]) for _ in range(rng.randint(1, 5))])
    for total in totals:
        if rng.random() < 0.5:
            total["GPU"] = 20_000
    totals[-1]["special"] = 10_000
    cluster = SimCluster(totals, delays, lazy=client == "lazy", real=client == "real")
    biggest = max(t["CPU"] for t in totals) // 10_000
    shapes = [
        CPU1,
        shape(CPU=0.5),
        shape(CPU=biggest),
        shape("SPREAD", CPU=1),
        shape(f"node:{len(totals) - 1}", CPU=1),
        shape("node:0", CPU=1),
        shape("node:0:soft", CPU=1),
        shape("node:77:soft", CPU=1),
        shape(env=(("A", "1"),), CPU=1),
        shape(),
    ]
    scarce = [shape(CPU=1, special=1)]
    if any("GPU" in t for t in totals):
        scarce += [shape(CPU=1, GPU=0.5), shape(GPU=2)]

    def make(depth: int) -> SimTask:
        children = [make(depth - 1) for _ in range(rng.choice([0, 0, 1, 2]))] if depth else []
        # Who waits lends only its CPU: a parent that kept a scarce thing its children need would wait for ever.
        mine = shapes if children else shapes + scarce
        return SimTask(rng.choice(mine), rng.choice([0.0, 0.001, 0.02, 0.3]), children)

    tasks = []
    for node in range(len(totals)):
        driver = cluster.driver(node)
        for _ in range(rng.randint(0, 12)):
            tasks.append(make(2))
            cluster.net.after(rng.random(), lambda d=driver, t=tasks[-1]: d.submit(t))
            driver.waiting_for += 1  # not quiet before it is submitted
            cluster.net.after(1.0, lambda d=driver: setattr(d, "waiting_for", d.waiting_for - 1))
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.integers(1, 3), st.integers(1, 12))
def test_tasks_nested_deeper_than_there_are_cpus_are_done(delays: list[float], cpus: int, depth: int) -> None:
    cluster = SimCluster(nodes(cpus), delays)
    task = SimTask()
    for _ in range(depth):
        task = SimTask(children=[task])
    cluster.driver().submit(task)
    finish(cluster, [task])


@SIM
@given(DELAYS, st.integers(0, 2**32), st.booleans())
def test_tasks_are_done_though_workers_and_forks_die(delays: list[float], seed: int, real: bool) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(2, 2, 1), delays, real=real, failing_forks=rng.sample(range(1, 12), 3))
    tasks = [SimTask(seconds=rng.choice([0.01, 0.2, 1.0])) for _ in range(25)]
    driver = cluster.driver()
    for task in tasks:
        driver.submit(task)

    def murder() -> None:
        if cluster.workers:
            cluster.die(rng.choice(sorted(cluster.workers)), "killed by signal 9")

    for _ in range(8):
        cluster.net.after(rng.random() * 3, murder)
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.integers(0, 2**32), st.booleans())
def test_tasks_are_done_though_a_node_dies(delays: list[float], seed: int, real: bool) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(1, 2, 2), delays, real=real)
    driver, other = cluster.driver(0), cluster.driver(1)
    tasks = [SimTask(seconds=0.3) for _ in range(15)]
    for task in tasks:
        driver.submit(task)
    for _ in range(10):
        other.submit(SimTask(seconds=0.3))
    cluster.net.after(rng.random() * 2, lambda: cluster.kill_node(1))
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_dead_holders_leave_no_lease_and_no_request(delays: list[float], seed: int) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(2, 1), delays)
    doomed = [cluster.driver(n) for n in (0, 1, 0)]
    for driver in doomed:
        for _ in range(10):
            driver.submit(SimTask(rng.choice([CPU1, shape("SPREAD", CPU=1)]), seconds=rng.choice([0.05, 5.0])))
        cluster.net.after(rng.random(), lambda d=driver: cluster.die(d.proc, "killed by signal 9"))
    survivor = cluster.driver(1)
    tasks = [SimTask(seconds=0.05) for _ in range(5)]
    for task in tasks:
        survivor.submit(task)
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.integers(3, 8))
def test_tasks_are_done_under_a_low_worker_limit(delays: list[float], limit: int) -> None:
    cluster = SimCluster(nodes(4, 4), delays, config=Config(prestart=0, max_workers=limit))
    driver = cluster.driver()
    tasks = [SimTask(shape(env=(("E", str(i % 3)),), CPU=0.5)) for i in range(30)]
    for task in tasks:
        driver.submit(task)
    finish(cluster, tasks)


@SIM
@given(DELAYS, st.booleans())
def test_a_scheduling_class_with_many_tasks_does_not_starve_one_with_few(delays: list[float], real: bool) -> None:
    """One CPU's worth of another class, asked for later, does not wait for the whole flood."""
    cluster = SimCluster(nodes(2, 2), delays, real=real)
    driver, other = cluster.driver(), cluster.driver(1)
    for _ in range(600):
        driver.submit(SimTask(seconds=0.1))
    narrow = [SimTask(shape(CPU=2), seconds=0.1), SimTask(shape(CPU=0.5), seconds=0.1)]
    elsewhere = SimTask(shape("node:0", CPU=1), seconds=0.1)
    cluster.net.after(1.0, lambda: [driver.submit(task) for task in narrow])
    cluster.net.after(1.0, lambda: other.submit(elsewhere))
    cluster.run_for(10.0)
    assert driver.waiting_for > 100, "the flood must not be over by itself"
    assert all(task.done for task in (*narrow, elsewhere)), cluster.explain()


def test_nothing_stalls_when_grants_and_new_requests_cross() -> None:
    """Virtual time, so this is no measurement: a task never waits for a timer while a node is idle."""
    for client in ("eager", "lazy", "real"):
        for seed in range(5):
            rng = random.Random(seed)
            delays = [rng.choice([0.0001, 0.0005, 0.002]) for _ in range(50)]
            config = Config(idle_worker_timeout=1e9)
            cluster = SimCluster(nodes(*[1] * 4), delays, config, lazy=client == "lazy", real=client == "real")
            driver = cluster.driver(rng.randrange(4))
            cluster.run_for(0.1)
            in_time: list[int] = []

            def submit(cluster: SimCluster = cluster, in_time: list[int] = in_time, driver: Any = driver) -> None:
                task = SimTask(seconds=0.02)
                driver.submit(task)
                cluster.net.after(0.02 + 0.2, lambda: in_time.append(task.done))

            for i in range(100):
                cluster.net.after(i * 0.01 * rng.choice([0.9, 1.0, 1.1]), submit)
            cluster.run_for(10.0)
            assert cluster.quiet(), cluster.explain()
            assert len(in_time) == 100 and all(in_time), f"{client}: a task took 0.2 s more than it runs"


def test_a_hundred_nodes_share_the_work() -> None:
    rng = random.Random(1)
    delays = [rng.choice([0.0001, 0.0005, 0.002]) for _ in range(200)]
    cluster = SimCluster(nodes(*[4] * 100), delays, lazy=True)
    tasks = []
    for node in (0, 17, 99):
        driver = cluster.driver(node)
        for _ in range(400):
            tasks.append(SimTask(rng.choice([CPU1, shape("SPREAD", CPU=1), shape(CPU=2)]), seconds=1.0))
            driver.submit(tasks[-1])
    finish(cluster, tasks)
    assert len({task.ran_on[0] for task in tasks}) == 100
    assert cluster.net.now < 10.0, "1,600 CPU seconds on 400 CPUs, and not one second of them long idle"


@pytest.mark.parametrize("other", [0, 1])
def test_leases_that_become_idle_go_to_a_waiting_request_at_once(other: int) -> None:
    """Who waits is on the same node (1), or on one without CPUs (0), so that only the head knows of it."""
    cluster = SimCluster(nodes(0, 1, 1), [0.0005], Config(prestart=0), real=True)
    first, second = cluster.driver(1), cluster.driver(other)
    mine, others = [SimTask(seconds=0.05) for _ in range(2)], [SimTask(seconds=0.01) for _ in range(2)]
    for task in mine:
        first.submit(task)
    cluster.net.after(0.03, lambda: [second.submit(task) for task in others])
    cluster.run_for(0.045)
    assert {task.ran_on[0] for task in mine} == {1, 2} and not any(task.ran_on for task in others)
    cluster.run_for(0.045)
    assert all(task.done for task in others), cluster.explain()


def test_a_lease_may_idle_while_no_request_waits_for_it() -> None:
    """Or each call of a loop would ask for one."""
    cluster = SimCluster(nodes(1, 1), [0.0005], Config(prestart=0), real=True)
    driver = cluster.driver(0)
    for _ in range(20):
        task = SimTask(seconds=0.001)
        driver.submit(task)
        cluster.net.run(1.0, lambda task=task: bool(task.done), cluster.check)  # type: ignore[misc]
    assert sum(isinstance(msg, m.LeaseGranted) for msg in cluster.inbox[driver.proc]) == 1


def test_tasks_sent_ahead_do_not_wait_behind_a_task_that_blocks() -> None:
    """Parents of some milliseconds, one CPU: what is behind a parent that waits must be given back for its child."""
    cluster = SimCluster(nodes(1), [0.0005], Config(prestart=0), real=True)
    driver = cluster.driver(0)
    tasks = [SimTask(seconds=0.005) for _ in range(30)]
    for task in tasks[2::3]:
        task.children = [SimTask(seconds=0.005)]
    for task in tasks:
        driver.submit(task)
    finish(cluster, tasks, 20.0)
    assert any(isinstance(msg, m.TasksReturned) for msg in cluster.inbox[driver.proc]), "nothing was sent ahead"
