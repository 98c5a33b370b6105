"""Actors under any delays: each ends ALIVE or DEAD by the rules, watchers know it, and nothing stays held."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from realclient import RealSubmitter
from simcluster import SimCluster
from submitters import CPU1, SimTask, Submitter, shape
from test_sim_leases import DELAYS, SIM, nodes

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, node_of
from hpcray.protocol import messages as m


def actor_spec(owner: bytes, number: int, place: m.Shape, hold: m.Shape, **more: object) -> m.ActorSpec:
    values: dict[str, object] = {
        "actor": owner + number.to_bytes(5, "big"),
        "class_name": "Counter",
        "cls": b"class",
        "args": b"args",
        "refs": [],
        "place": place,
        "hold": hold,
        "name": "",
        "namespace": "ns",
        "detached": False,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1,
        "methods": {},
        **more,
    }
    return m.ActorSpec(**values)  # type: ignore[arg-type]


def last_states(cluster: SimCluster, watcher: Submitter | RealSubmitter) -> dict[bytes, m.ActorStateUpdate]:
    states = (msg for msg in cluster.inbox.get(watcher.proc, []) if isinstance(msg, m.ActorStateUpdate))
    return {state.actor: state for state in states}


def homes_of(cluster: SimCluster, actor: bytes) -> list[bytes]:
    return [worker.proc for worker in cluster.workers.values() if worker.actor == actor]


def settle(
    cluster: SimCluster, specs: list[m.ActorSpec], watcher: Submitter | RealSubmitter, rest: float = 40.0
) -> None:
    """Let everything come to rest; then what the head, the watcher and the nodes believe must be the same."""
    cluster.run_for(40.0)
    known = last_states(cluster, watcher)
    for spec in specs:
        record = cluster.head.actors.actors[spec.actor]
        assert record.state in ("ALIVE", "DEAD"), (record.state, record.reason, record.node)
        assert known[spec.actor].state == record.state
        homes = homes_of(cluster, spec.actor)
        assert homes == ([record.worker] if record.state == "ALIVE" else [])
        if record.state == "DEAD":
            assert record.reason
        limit = spec.max_restarts
        assert limit < 0 or record.restarts <= limit


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_actors_live_and_die_by_the_rules(delays: list[float], seed: int) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(2, 1, 3), delays, failing_forks=rng.sample(range(1, 20), 2))
    owner, watcher = cluster.driver(0), cluster.driver(rng.randrange(3))
    specs = []
    for number in range(rng.randint(1, 14)):
        hold = rng.choice([shape(), shape(), shape(CPU=0.25)])
        strategy = rng.choice(["", "", "SPREAD", "node:2", "node:9:soft"])
        spec = actor_spec(
            owner.proc, number, shape(strategy, CPU=1), hold, max_restarts=rng.choice([0, 1, 3, -1]), name=str(number)
        )
        if rng.random() < 0.1:
            cluster.constructor_errors[spec.actor] = b"boom"
        specs.append(spec)
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
        # Another process hears of the actor from its owner, so not before the owner asked for it.
        cluster.net.after(1.0 + rng.random(), lambda a=spec.actor: cluster.post(watcher.proc, HEAD, m.WatchActor(a)))
    for _ in range(rng.randint(0, 10)):
        victim = rng.choice(specs)
        what = rng.choice(["crash", "kill", "restart", "scope"])

        def strike(victim: m.ActorSpec = victim, what: str = what) -> None:
            if what == "crash":
                for proc in homes_of(cluster, victim.actor):
                    cluster.die(proc, "killed by signal 11")
            elif what == "scope":
                cluster.post(owner.proc, HEAD, m.ActorOutOfScope(victim.actor))
            else:
                cluster.post(owner.proc, HEAD, m.KillActor(victim.actor, what == "kill", f"test: {what}"))

        cluster.net.after(rng.random() * 4, strike)
    settle(cluster, specs, watcher)
    for spec in specs:
        cluster.post(owner.proc, HEAD, m.KillActor(spec.actor, True, "the end"))
    cluster.run_for(10)
    assert cluster.quiet(), cluster.explain()
    assert not cluster.head.actors.names
    assert all(not record.spec.cls for record in cluster.head.actors.actors.values()), "dead actors keep their class"


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_actors_on_a_node_that_dies_restart_or_end(delays: list[float], seed: int) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(2, 4, 4), delays)
    owner = cluster.driver(0)
    specs = [
        actor_spec(owner.proc, n, CPU1, rng.choice([shape(), CPU1]), max_restarts=rng.choice([0, 1])) for n in range(6)
    ]
    for number, spec in enumerate(specs):
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
    cluster.net.after(rng.random() * 2, lambda: cluster.kill_node(1))
    settle(cluster, specs, owner)
    for spec in specs:
        record = cluster.head.actors.actors[spec.actor]
        if record.state == "DEAD":
            assert spec.max_restarts == 0 and "node 1 died" in record.reason
        else:
            assert node_of(record.worker) != 1


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_an_owners_death_ends_its_actors_but_detached_ones(delays: list[float], seed: int) -> None:
    rng = random.Random(seed)
    cluster = SimCluster(nodes(1, 2), delays)
    owner, watcher = cluster.driver(1), cluster.driver(0)
    specs = [actor_spec(owner.proc, n, CPU1, shape(), detached=n % 2 == 0, name=f"a{n}") for n in range(5)]
    for number, spec in enumerate(specs):
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
        cluster.net.after(2.0, lambda a=spec.actor: cluster.post(watcher.proc, HEAD, m.WatchActor(a)))
    cluster.net.after(1.0 + rng.random(), lambda: cluster.die(owner.proc, "exit code 1"))
    settle(cluster, specs, watcher)
    for spec in specs:
        assert (cluster.head.actors.actors[spec.actor].state == "ALIVE") == spec.detached


@SIM
@given(DELAYS, st.integers(0, 2**32))
def test_a_large_actor_gets_a_node_among_a_flood_of_tasks(delays: list[float], seed: int) -> None:
    """Local tasks take every CPU the moment it is free; the actor must get its four all the same."""
    cluster = SimCluster(nodes(1, 4), delays)
    busy, owner = cluster.driver(1), cluster.driver(0)
    for _ in range(1500):
        busy.submit(SimTask(seconds=0.1))
    spec = actor_spec(owner.proc, 1, shape(CPU=4), shape(CPU=4))
    cluster.net.after(1.0, lambda: cluster.post(owner.proc, HEAD, m.CreateActor(1, spec)))
    cluster.run_for(25.0)
    assert cluster.head.actors.actors[spec.actor].state == "ALIVE", cluster.explain()


@SIM
@given(DELAYS)
def test_more_actors_than_cpus_come_one_after_the_other(delays: list[float]) -> None:
    cluster = SimCluster(nodes(2, 2, 2, 2), delays, config=Config())
    owner = cluster.driver()
    specs = [actor_spec(owner.proc, n, CPU1, shape()) for n in range(60)]
    for number, spec in enumerate(specs):
        cluster.post(owner.proc, HEAD, m.CreateActor(number, spec))
    settle(cluster, specs, owner)
    where = [node_of(record.worker) for record in cluster.head.actors.actors.values()]
    assert {where.count(node) for node in range(4)} == {15}
