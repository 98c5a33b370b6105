"""Worlds that come and go: they join, work, leave in good order, die, or are cut off, in simulated jobs."""

from __future__ import annotations

import random

import pytest
from raylets import SimNode, World
from simnet import MOST_EVENTS
from test_sim_head_failover import Client, check, check_leaders, work

from hpcray.common.ids import raylet_of
from hpcray.core.gcs.node_manager import ALIVE, DEAD
from hpcray.protocol import messages as m


def come_and_go(worlds: int, ranks: int, most_alive: int, seed: int, check_every: int = 10) -> World:
    """One world after the other joins; when there are too many, one goes. The program is on node 0, as is the head."""
    world = World(1, 0, seed, check_every=check_every)
    world.net.most_events = max(MOST_EVENTS, 10_000 * most_alive)
    world.run(0.5)
    client, rng = Client(world.nodes[0]), random.Random(seed)
    there: list[list[SimNode]] = []
    for _ in range(worlds):
        there.append(world.join(ranks))
        work(world, [client], world.net.now + rng.uniform(0.05, 0.5))
        if rng.random() < 0.1:  # it dies as it comes
            die(world, there.pop())
        while sum(map(len, there)) > most_alive:
            gone = there.pop(rng.randrange(len(there)))
            fate = rng.choice([leave, leave, die, cut_off])
            fate(world, gone)
            work(world, [client], world.net.now + rng.uniform(0.0, 0.5))
    world.run(world.net.now + 40.0)
    world.mend()
    world.run(world.net.now + 20.0)
    living = {node.rank for some in there for node in some} | {0}
    assert {node.rank for node in world.alive()} == living
    node_manager = world.nodes[0].cluster._node_manager
    assert node_manager is not None and set(node_manager.alive()) == living
    assert all(node_manager.node_state(node.rank) == (ALIVE if node.rank in living else DEAD) for node in world.nodes)
    assert world.head().resources.nodes.keys() == living
    for node in world.alive():
        known = node.raylet.forgotten_nodes
        late = {rank for rank in node_manager.dead if rank < node.rank}
        assert late <= known <= node_manager.dead.keys()
    check_leaders(world)
    check(world, [client])
    return world


def leave(world: World, nodes: list[SimNode]) -> None:
    for node in nodes:
        node.cluster.departure.ask("it was sent SIGTERM")


def die(world: World, nodes: list[SimNode]) -> None:
    for node in nodes:
        node.end()


def cut_off(world: World, nodes: list[SimNode]) -> None:
    inside = {node.rank for node in nodes}
    others = [node.rank for node in world.alive() if node.rank not in inside]
    world.cut |= {frozenset((one, other)) for one in inside for other in others}


def test_a_raylet_that_answers_itself_without_end_is_found() -> None:
    """In many turns: the simulation counts its events, so it does not run for ever."""
    world = World(1, 0, 0)
    world.run(0.5)
    world.net.most_events = 1000
    (node,) = world.nodes
    messages = node.raylet.messages

    def answer(src: bytes, msgs: list[m.Message]) -> None:
        messages(src, msgs)
        node.router.send(raylet_of(0), m.Ping(0))

    node.raylet.messages = answer  # type: ignore[method-assign]
    node.router.send(raylet_of(0), m.Ping(0))
    with pytest.raises(AssertionError, match="livelock: 1000 events"):
        world.run(10.0)


@pytest.mark.parametrize("seed", range(2))
def test_worlds_come_and_go(seed: int) -> None:
    come_and_go(8, 3, 10, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_worlds_come_and_go_many_times() -> None:
    for seed in range(100, 130):
        come_and_go(10, 4, 16, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_thousand_nodes_in_fifty_worlds_come_and_go() -> None:
    world = come_and_go(50, 20, 300, 7, check_every=1000)
    assert len(world.nodes) == 1001
    print(f"{world.net.events:,} events")
