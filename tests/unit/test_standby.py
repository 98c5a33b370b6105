"""Which raylet succeeds the head."""

from __future__ import annotations

from hpcray.core.gcs.node_manager import NO_NODE, choose_standby, is_majority
from hpcray.protocol.messages import NodeInfo


def node(index: int, world: int = 0) -> NodeInfo:
    return NodeInfo(index, f"id{index}", f"host{index}", "a", 1, {}, b"", "ucx", 0, world=world)


def test_where_a_program_runs_its_node_is_the_only_one() -> None:
    nodes = [node(0), node(1), node(2, 2)]
    assert choose_standby(nodes, 0, 1) == 1
    assert choose_standby(nodes, 1, 1) == NO_NODE, "the head is there already"
    assert choose_standby([nodes[0], nodes[2]], 0, 1) == NO_NODE, "without the program the job ends"


def test_without_a_program_it_is_of_another_world_and_stays() -> None:
    nodes = [node(0), node(1), node(2, 2), node(3, 2), node(4, 4)]
    assert choose_standby(nodes, 0, NO_NODE) == 2
    assert choose_standby(nodes, 2, NO_NODE) == 0
    assert choose_standby(nodes, 0, NO_NODE, {2, 3}) == 4
    assert choose_standby(nodes[:2], 0, NO_NODE) == 1, "better than none"
    assert choose_standby(nodes, 0, NO_NODE, {1, 2, 3, 4}) == 2, "one that leaves lives for a while"
    assert choose_standby(nodes[:1], 0, NO_NODE) == NO_NODE


def test_the_present_one_stays_until_another_is_plainly_better() -> None:
    nodes = [node(0), node(1), node(2, 2), node(3, 2), node(4, 4)]
    assert choose_standby(nodes, 0, NO_NODE, (), 3) == 3
    assert choose_standby(nodes[:2], 0, NO_NODE, (), 1) == 1
    assert choose_standby(nodes, 0, NO_NODE, (), 1) == 2, "of the head's world"
    assert choose_standby(nodes, 0, NO_NODE, {3}, 3) == 2, "it is about to leave"


def test_of_two_halves_at_most_one_goes_on() -> None:
    for living in range(1, 10):
        for one in range(living + 1):
            assert not (is_majority(one, living) and is_majority(living - one, living))
    assert is_majority(2, 3) and not is_majority(1, 2)
