"""The head moves again and again, in simulated jobs without a program: it dies, leaves, or is cut off."""

from __future__ import annotations

import random

import pytest
from raylets import World
from test_sim_head_failover import Client, check, check_leaders, something, work

from hpcray.common.ids import HEAD

NO_PROGRAM = -1
MOVES = 5


def begun(seed: int, size: int = MOVES + 2) -> tuple[World, list[Client]]:
    """The clients are on the two nodes that become the head last, or never."""
    world = World(size, NO_PROGRAM, seed)
    world.run(1.5)
    return world, [Client(world.nodes[rank]) for rank in (size - 2, size - 1)]


def moves(seed: int) -> None:
    world, clients = begun(seed)
    rng = random.Random(seed)
    for count in range(1, MOVES + 1):
        work(world, clients, world.net.now + rng.uniform(0.3, 1.5))
        head = world.leader()
        if rng.random() < 0.5:
            for _ in range(rng.randrange(20)):
                something(world, clients)
            world.run(world.net.now + rng.uniform(0.0, 0.1))
            head.end()
        else:
            head.cluster.departure.ask("the end of its time limit")
        deadline = world.net.now + 40.0
        while HEAD in head.router.mine and not (head.ended or head.leaving.begun):
            work(world, clients, world.net.now + 0.2)
            assert world.net.now < deadline, (seed, count, world.said[-5:])
        work(world, clients, world.net.now + rng.uniform(1.0, 4.0))
        assert world.leader().raylet.head_location.epoch == count, world.said[-5:]
    world.run(world.net.now + 25.0)
    check_leaders(world)
    check(world, clients)
    assert len(world.alive()) == 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_head_moves_five_times_and_nothing_is_lost(seed: int) -> None:
    moves(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_head_moves_five_times_in_many_jobs() -> None:
    for seed in range(100, 250):
        moves(seed)


def test_of_a_job_that_is_cut_in_two_the_larger_part_goes_on() -> None:
    world, clients = begun(1, 5)
    work(world, clients, 3.0)
    world.cut = {frozenset((one, other)) for one in (0, 4) for other in (1, 2, 3)}
    world.run(60.0)
    assert HEAD in world.nodes[1].router.mine and not world.nodes[1].leaving.begun
    assert world.nodes[0].leaving.begun and world.nodes[4].leaving.begun
    assert sorted(node.rank for node in world.alive() if not node.leaving.begun) == [1, 2, 3]


def test_a_head_with_most_nodes_goes_on() -> None:
    world, clients = begun(2, 5)
    work(world, clients, 3.0)
    world.cut = {frozenset((one, other)) for one in (1, 4) for other in (0, 2, 3)}
    world.run(60.0)
    assert world.leader().rank == 0
    assert sorted(node.rank for node in world.alive() if not node.leaving.begun) == [0, 2, 3]


def test_two_that_are_cut_from_each_other_do_not_both_lead() -> None:
    world, _ = begun(3, 2)
    world.cut = {frozenset((0, 1))}
    world.run(60.0)
    assert world.leader().rank == 0 and world.nodes[1].leaving.begun


def test_the_last_node_s_departure_is_the_end_of_the_job() -> None:
    world, _ = begun(4, 2)
    for rank in (0, 1):
        world.nodes[rank].cluster.departure.ask("it was sent SIGTERM")
        world.run(world.net.now + 15.0)
    assert all(node.ended for node in world.nodes)
