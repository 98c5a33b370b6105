"""Nodes that crash, stop, are cut off and come back: who is declared dead, what becomes of actors and tasks."""

from __future__ import annotations

import random

import pytest
from faultcluster import FaultCluster
from helpers.examples import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simcluster import SimCluster
from submitters import CPU1, SimTask, shape
from test_sim_actors import actor_spec, homes_of, last_states
from test_sim_leases import DELAYS, SIM, nodes

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, node_of
from hpcray.protocol import messages as m

CONFIG = Config(prestart=0)
REST = 60.0
FEW = settings(SIM, max_examples=examples(12))
FOUND = [
    ([0.05, 0.05, 0.3], 8788),  # a death that was told twice cost two restarts, and the actor then lived on two nodes
]


def agree(cluster: SimCluster, specs: list[m.ActorSpec]) -> None:
    """All is quiet: the head and the nodes agree about every actor."""
    for spec in specs:
        record = cluster.head.actors.actors[spec.actor]
        assert record.state in ("ALIVE", "DEAD"), (record.state, record.reason, record.node)
        homes = [proc for proc in homes_of(cluster, spec.actor) if node_of(proc) not in cluster.dead_nodes]
        assert homes == ([record.worker] if record.state == "ALIVE" else [])
        assert spec.max_restarts < 0 or record.restarts <= spec.max_restarts
        assert record.state == "ALIVE" or record.reason


@FEW
@given(DELAYS, st.integers(0, 2**32))
@example([0.0], 384)  # the head stands still while a link to it is cut
def test_whatever_happens_to_nodes_every_wait_ends(delays: list[float], seed: int) -> None:
    anything(delays, seed)


@pytest.mark.parametrize(("delays", "seed"), FOUND)
def test_courses_of_node_failures_that_once_failed_end_well(delays: list[float], seed: int) -> None:
    anything(delays, seed)


def some_delays(seed: int) -> list[float]:
    """As `DELAYS`, from a seed."""
    rng = random.Random(seed)
    return [rng.choice([0.0, 0.0001, 0.001, 0.01, 0.05, 0.3]) for _ in range(rng.choice([1, 2, 3, 10, 30]))]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_more_than_a_million_events_of_node_failures_end_well() -> None:
    """Crashes, stops, cuts, late and repeated messages: no task is lost, none that must not run twice does, and every
    wait ends, in hundreds of courses of events."""
    events = sum(anything(some_delays(seed), seed).net.events for seed in range(500))
    print(f"{events:,} events")
    assert events >= 1_000_000


def anything(delays: list[float], seed: int) -> FaultCluster:
    rng = random.Random(seed)
    cluster = FaultCluster(nodes(4, 2, 2, 3, 2), delays, rng, CONFIG, real=rng.random() < 0.5)
    owner, elsewhere = cluster.driver(0), cluster.driver(rng.randrange(1, 5))
    specs: list[m.ActorSpec] = []
    for number in range(rng.randint(2, 12)):
        detached = rng.random() < 0.3
        creator = owner if rng.random() < 0.7 else elsewhere
        spec = actor_spec(
            creator.proc, number, rng.choice([CPU1, shape("SPREAD", CPU=1)]), rng.choice([shape(), shape(CPU=0.25)]),
            max_restarts=rng.choice([0, 1, 2, -1]), detached=detached, name=str(number) if detached else "",
        )  # fmt: skip
        specs.append(spec)
        cluster.post(creator.proc, HEAD, m.CreateActor(number, spec))
        cluster.net.after(0.5, lambda a=spec.actor: cluster.post(owner.proc, HEAD, m.WatchActor(a)))
    tasks = [SimTask(rng.choice([CPU1, shape("SPREAD", CPU=1)]), rng.choice([0.01, 0.5, 3.0])) for _ in range(30)]
    for task in tasks:
        task.once = rng.random() < 0.3
        cluster.net.after(rng.choice([0.0, 10 * rng.random()]), lambda task=task: owner.submit(task))
    for _ in range(10):  # its node may die, and they with it
        lost = SimTask(rng.choice([CPU1, shape("SPREAD", CPU=1)]), rng.choice([0.5, 5.0]))
        cluster.net.after(6 * rng.random(), lambda task=lost: elsewhere.proc in cluster.dead or elsewhere.submit(task))
    for _ in range(rng.randint(1, 5)):
        victim, other = rng.sample(range(1, 5), 2)
        long = rng.choice([0.5, 2.0, 6.0, 20.0, 45.0])
        short, unlucky = min(long, 6.0), rng.choice(specs).actor
        fault = rng.choice(
            [
                lambda v=victim: cluster.crash(v),
                lambda v=victim, s=long: cluster.stop(v, s),
                lambda v=victim, s=long: cluster.isolate(v, s),
                lambda v=victim, s=long: cluster.cut(0, v, s),
                lambda v=victim, o=other, s=long: cluster.cut(v, o, s),
                lambda s=short: cluster.stop(0, s),
                lambda a=unlucky: [cluster.die(p, "signal 11") for p in homes_of(cluster, a)],
            ]
        )
        when = rng.random() * 8
        cluster.net.after(when, fault)
        for _ in range(40):  # so short that they are sent ahead
            tasks.append(SimTask(CPU1, 0.0002, function="short", once=rng.random() < 0.3))
            soon = max(0.0, when - 0.02 * rng.random())
            cluster.net.after(soon, lambda task=tasks[-1]: owner.submit(task))
    cluster.run_for(2 * REST)
    agree(cluster, [spec for spec in specs if spec.actor in cluster.head.actors.actors])
    states = last_states(cluster, owner)
    for spec in specs:  # also those whose creator died before the head heard of them
        assert states[spec.actor].state in ("ALIVE", "DEAD"), (spec.actor.hex(), states[spec.actor])
        known = cluster.head.actors.actors.get(spec.actor)
        assert known is None or known.state == states[spec.actor].state
    assert all(task.done + task.failed == 1 for task in tasks), cluster.explain()
    assert not any(task.failed for task in tasks if not task.once)
    assert all(len(task.ran_on) <= 1 for task in tasks if task.once)
    for spec in specs:
        cluster.post(owner.proc, HEAD, m.KillActor(spec.actor, True, "the end"))
    cluster.run_for(20.0)
    assert cluster.quiet(), cluster.explain()
    return cluster


@FEW
@given(DELAYS, st.integers(0, 2**32))
def test_no_node_dies_of_a_short_disturbance(delays: list[float], seed: int) -> None:
    """A stopped raylet, also the head's, and a cut link: as long as it is shorter than the time-out, all come back."""
    rng = random.Random(seed)
    cluster = FaultCluster(nodes(2, 2, 2), delays, rng, CONFIG)
    owner = cluster.driver(0)
    specs = [actor_spec(owner.proc, n, shape("SPREAD", CPU=1), shape()) for n in range(4)]
    for number, spec in enumerate(specs):
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
    at = 0.0
    for _ in range(4):
        at += 6.0 + rng.random()
        victim = rng.randrange(3)
        if victim == 0 and rng.random() < 0.5:
            cluster.net.after(at, lambda: cluster.stop(0, 5.5))
        elif victim == 0:
            cluster.net.after(at, lambda: cluster.cut(1, 2, 2.8))
        elif rng.random() < 0.5:
            cluster.net.after(at, lambda v=victim: cluster.stop(v, 2.8))
        else:
            cluster.net.after(at, lambda v=victim: cluster.isolate(v, 2.8))
    cluster.run_for(REST)
    assert cluster.declared == {} and cluster.dead_nodes == set()
    assert {cluster.head.actors.actors[spec.actor].state for spec in specs} == {"ALIVE"}


@SIM
@given(DELAYS, st.integers(0, 2**32), st.sampled_from(["crash", "isolate"]))
def test_a_lost_node_is_declared_dead_in_time(delays: list[float], seed: int, how: str) -> None:
    rng = random.Random(seed)
    cluster = FaultCluster(nodes(1, 2, 2), delays, rng, CONFIG)
    cluster.run_for(rng.random() * 3 + 1)
    began = cluster.net.now
    if how == "crash":
        cluster.crash(2)
    else:
        cluster.isolate(2, 60.0)
    cluster.run_for(20.0)
    assert list(cluster.declared) == [2]
    assert cluster.declared[2] - began < 5.0 + max(delays)
    assert cluster.dead_nodes == {2}, "a node that is cut off ends itself"
    assert cluster.alone == ({2: True} if how == "isolate" else {})


@FEW
@given(DELAYS, st.integers(0, 2**32))
def test_a_cut_between_two_nodes_that_reach_the_head_is_noticed_in_time(delays: list[float], seed: int) -> None:
    """One has something to say to the other, whatever it is; nobody but the two can know. One of them goes."""
    rng = random.Random(seed)
    cluster = FaultCluster(nodes(0, 2, 2), delays, rng, CONFIG)
    driver = cluster.driver(1)
    tasks = [SimTask(shape("node:2", CPU=1), rng.choice([0.1, 1.0, 9.0])) for _ in range(6)]
    tasks += [SimTask(shape("SPREAD", CPU=1), 0.5) for _ in range(rng.randint(0, 20))]
    for task in tasks:
        cluster.net.after(rng.random() * 3, lambda task=task: driver.submit(task))
    cluster.run_for(2.0)
    cluster.cut(1, 2, 60.0)
    began = cluster.net.now
    cluster.post(driver.proc, make_proc(2, 77), m.BorrowAck(0))
    cluster.run_for(30.0)
    assert len(cluster.declared) == 1 and set(cluster.declared) < {1, 2}
    (when,) = cluster.declared.values()
    assert when - began < CONFIG.node_timeout + 5 * CONFIG.heartbeat_interval + 2 * max(delays)


@FEW
@given(DELAYS, st.integers(0, 2**32))
def test_a_cut_between_nodes_that_send_each_other_nothing_kills_no_node(delays: list[float], seed: int) -> None:
    cluster = FaultCluster(nodes(2, 2, 2), delays, random.Random(seed), CONFIG)
    cluster.run_for(3.0)
    cluster.cut(1, 2, 20.0)
    cluster.run_for(30.0)
    assert cluster.declared == {} and cluster.dead_nodes == set()


@FEW
@given(DELAYS, st.integers(0, 2**32))
def test_without_the_head_nodes_know_that_it_is_not_they_who_are_cut_off(delays: list[float], seed: int) -> None:
    cluster = FaultCluster(nodes(1, 2, 2, 2), delays, random.Random(seed), CONFIG)
    cluster.run_for(3.0)
    cluster.stop(0, 60.0)
    cluster.run_for(20.0)
    assert cluster.alone == dict.fromkeys((1, 2, 3), False)


@FEW
@given(DELAYS, st.integers(0, 2**32))
def test_a_node_that_comes_back_is_fenced(delays: list[float], seed: int) -> None:
    """It was stopped, or cut off, for longer than the time-out: its actors live elsewhere by then."""
    rng = random.Random(seed)
    cluster = FaultCluster(nodes(1, 2, 2), delays, rng, CONFIG)
    owner = cluster.driver(0)
    specs = [actor_spec(owner.proc, n, shape("SPREAD", CPU=1), shape(), max_restarts=1) for n in range(6)]
    for number, spec in enumerate(specs):
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
    cluster.run_for(6.0)
    if rng.random() < 0.5:
        cluster.stop(1, 8.0)
    else:
        cluster.isolate(1, 8.0)
    cluster.run_for(REST)
    assert list(cluster.declared) == [1] and cluster.dead_nodes == {1}
    records = [cluster.head.actors.actors[spec.actor] for spec in specs]
    assert {record.state for record in records} == {"ALIVE"}
    assert all(node_of(record.worker) != 1 for record in records)
    assert all(len(homes_of(cluster, spec.actor)) == 1 for spec in specs)
