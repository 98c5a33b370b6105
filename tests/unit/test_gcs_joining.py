"""Nodes that join the running job, as the node manager and the GCS see them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants_kit import GCS_EVENTS, check_after
from test_gcs_node_manager import events, hello, info, sent, up

from hpcray.common.config import Config
from hpcray.common.ids import make_proc, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.effects import Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.node_manager import ABSENT, ALIVE, DEAD, JOINED, NodeLost, NodeManager, NodesAdded
from hpcray.protocol import messages as m


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, NodeManager, ("handle", "admit", "node_failed", "stop", "tick", "resume"))
    check_after(monkeypatch, Gcs, (*GCS_EVENTS, "nodes_joined"))


def admitted(member: NodeManager, now: float = 0.0) -> int:
    number = member.admit(now)
    assert number is not None
    return number


def acquaint(member: NodeManager, newcomer: int, *nodes: int) -> list[Any]:
    out: list[Any] = []
    for node in nodes:
        out += member.handle(0.0, raylet_of(node), m.NodeAcquainted([newcomer]))
    return out


def test_a_node_is_in_when_all_others_and_it_itself_are_connected() -> None:
    member = up(2)
    number = admitted(member)
    assert (number, member.node_state(number)) == (2, ABSENT)
    outcomes = hello(member, number)
    assert sent(outcomes, m.NodeJoined) == [0, 1] and sent(outcomes, m.NodeTable) == [2]
    (table,) = [e.msg for e in outcomes if isinstance(e, Send) and isinstance(e.msg, m.NodeTable)]
    assert [row.index for row in table.nodes] == [0, 1, 2]
    assert acquaint(member, number, 0) == [] and member.node_state(number) == JOINED
    assert member.handle(0.0, raylet_of(number), m.NodeReady(number)) == []
    assert acquaint(member, number, 1) == [NodesAdded([info(number)])]
    assert member.node_state(number) == ALIVE and member.alive() == [0, 1, 2]


def test_a_node_reads_of_the_dead_and_connects_to_the_living_only() -> None:
    member = up(3)
    member.node_failed(1.0, 1, "gone")
    outcomes = hello(member, admitted(member))
    (table,) = [e.msg for e in outcomes if isinstance(e, Send) and isinstance(e.msg, m.NodeTable)]
    assert [row.index for row in table.nodes] == [0, 2, 3]
    assert table.dead == [m.NodeDied(1, "host host1: gone", 1)]


def test_a_node_that_ends_by_itself_is_dead_and_holds_up_nobody() -> None:
    """Such as one that has lost the head while it joined."""
    member = up(2)
    first, second = admitted(member), admitted(member)
    hello(member, first)
    hello(member, second)
    assert sent(member.handle(1.0, raylet_of(first), m.NodeStopped(first)), m.NodeTable) == [second]
    assert member.node_state(first) == DEAD
    acquaint(member, second, 0, 1)
    member.handle(1.0, raylet_of(second), m.NodeReady(second))
    assert member.alive() == [0, 1, second] and member.node_state(second) == ALIVE
    member.handle(2.0, raylet_of(1), m.NodeStopped(1))
    assert member.alive() == [0, second], "one that was in, too"


def test_nodes_that_register_while_another_is_introduced_are_introduced_together() -> None:
    """A world of many ranks costs every other node two messages, not one for each rank."""
    member = up(3)
    first = member.admit(0.0, 20)
    assert first is not None
    others = range(first + 1, first + 20)
    assert sent(hello(member, first), m.NodeJoined) == [0, 1, 2]
    assert [hello(member, number) for number in others] == [[]] * 19
    acquaint(member, first, 0, 1)
    outcomes = acquaint(member, first, 2)
    assert sent(outcomes, m.NodeJoined) == [0, 1, 2, first] and sent(outcomes, m.NodeTable) == list(others)
    joined = next(e.msg for e in outcomes if isinstance(e, Send) and isinstance(e.msg, m.NodeJoined))
    assert [row.index for row in joined.nodes] == list(others)
    for node in others:
        assert member.handle(0.0, raylet_of(node), m.NodeReady(node)) == []
    for node in (0, 1, 2):
        assert member.handle(0.0, raylet_of(node), m.NodeAcquainted(list(others))) == []
    assert member.handle(0.0, raylet_of(first), m.NodeReady(first)) == [NodesAdded([info(first)])]
    last = member.handle(0.0, raylet_of(first), m.NodeAcquainted(list(others)))
    assert last == [NodesAdded([info(number) for number in others])]


def test_those_who_wait_to_be_introduced_do_not_wait_for_the_dead() -> None:
    member = up(2)
    first = member.admit(0.0, 3)
    assert first is not None
    for number in range(first, first + 3):
        hello(member, number)
    acquaint(member, first, 0)
    outcomes = member.node_failed(1.0, 1, "gone")
    assert sent(outcomes, m.NodeJoined) == [0, first], "the last whose answer was awaited has died"
    outcomes = member.node_failed(1.0, first + 1, "gone") + acquaint(member, first + 2, 0, first)
    assert not events(outcomes, NodesAdded)
    for number in (first, first + 2):
        outcomes = member.handle(1.0, raylet_of(number), m.NodeReady(number))
        assert events(outcomes, NodesAdded) == [NodesAdded([info(number)])]


def test_nobody_waits_for_a_node_that_dies_meanwhile() -> None:
    member = up(3)
    number = admitted(member)
    hello(member, number)
    acquaint(member, number, 0, 2)
    member.handle(0.0, raylet_of(number), m.NodeReady(number))
    assert events(member.node_failed(1.0, 1, "gone"), NodesAdded) == [NodesAdded([info(number)])]


def test_a_node_that_dies_before_it_is_in_is_dead_for_all() -> None:
    member = up(2)
    number = admitted(member)
    hello(member, number)
    outcomes = member.node_failed(1.0, number, "gone")
    assert sent(outcomes, m.NodeDied) == [1] and events(outcomes, NodeLost)[0].node == number
    assert acquaint(member, number, 0, 1) == [] and member.node_state(number) == DEAD


def test_a_node_that_another_one_cannot_reach_does_not_come_in() -> None:
    member = up(2)
    number = admitted(member)
    hello(member, number)
    outcomes = member.handle(0.0, raylet_of(1), m.NodeAcquainted([number], {number: "no transport"}))
    assert "node 1 cannot reach it: no transport" in events(outcomes, NodeLost)[0].reason


def test_a_node_that_dies_before_it_registers_was_never_there() -> None:
    member = up(2)
    number = admitted(member)
    assert member.node_failed(1.0, number, "gone") == [] == member.node_failed(1.0, number, "gone again")
    assert hello(member, number, now=1.0) == [] and not member.dead


def test_the_number_of_a_node_that_never_comes_is_not_given_again() -> None:
    member = up(1, start_timeout=5.0)
    number = admitted(member)
    member.tick(6.0)
    assert hello(member, number, now=6.0) == [], "too late"
    assert admitted(member, 6.0) == number + 1


def test_nodes_are_let_in_only_while_the_job_runs() -> None:
    starting = NodeManager(2, "session", Config(), 0.0)
    assert starting.admit(0.0) is None
    member = up(2)
    number = admitted(member)
    member.stop(1.0, 0)
    assert member.admit(1.0) is None
    assert sent(hello(member, number), m.Stop) == [number], "it was let in a moment before"


def test_a_new_head_knows_the_nodes_that_have_joined() -> None:
    member = NodeManager(2, "session", Config(), 0.0, me=1)
    member.resume(0.0, [info(0), info(1), info(5)], {0: "gone"}, m.RunInfo())
    assert member.alive() == [1, 5] and admitted(member) == 6


def test_those_who_join_a_new_head_learn_who_keeps_objects_of_nodes_that_have_left() -> None:
    member = NodeManager(3, "session", Config(), 0.0, me=1)
    member.resume(0.0, [info(0), info(1), info(2)], {2: "left"}, m.RunInfo(), {2: [0, 1]})
    outcomes = hello(member, admitted(member))
    (table,) = [e.msg for e in outcomes if isinstance(e, Send) and isinstance(e.msg, m.NodeTable)]
    assert table.dead == member.deaths() == [m.NodeDied(2, "left", 1, [0, 1])]


def answers(outcomes: list[Any]) -> list[tuple[int, m.Message]]:
    """What those who are told of newcomers answer, and the newcomers."""
    found: list[tuple[int, m.Message]] = []
    for effect in outcomes:
        if isinstance(effect, Send) and isinstance(effect.msg, m.NodeJoined):
            found.append((effect.dest[1], m.NodeAcquainted([row.index for row in effect.msg.nodes])))
        elif isinstance(effect, Send) and isinstance(effect.msg, m.NodeTable):
            found.append((effect.dest[1], m.NodeReady(effect.dest[1])))
    return found


@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_nodes_come_and_go_in_any_order(seed: int) -> None:
    """Invariants are checked after each step; whoever could come in, has."""
    draw = random.Random(seed)
    member, waiting = up(3), list[tuple[int, m.Message]]()
    absent: list[int] = []
    for _ in range(60):
        step = draw.random()
        if step < 0.2:
            absent.append(admitted(member))
        elif step < 0.4 and absent:
            number = absent.pop(draw.randrange(len(absent)))
            waiting += answers(hello(member, number))
        elif step < 0.5 and len(member.alive()) > 1:
            gone = draw.choice(member.alive()[1:])
            waiting += answers(member.node_failed(0.0, gone, "gone"))
            waiting = [(node, msg) for node, msg in waiting if node != gone]
        elif waiting:
            node, msg = waiting.pop(draw.randrange(len(waiting)))
            waiting += answers(member.handle(0.0, raylet_of(node), msg))
    while waiting:
        node, msg = waiting.pop(draw.randrange(len(waiting)))
        waiting += answers(member.handle(0.0, raylet_of(node), msg))
    assert {member.node_state(node) for node in member.alive()} == {ALIVE}


def node(index: int, **amounts: float) -> m.NodeInfo:
    total = to_units({"CPU": 1, **amounts})
    return m.NodeInfo(index, f"id{index}", f"host{index}", "10.0.0.1", 1, total, b"", "ucx", 0)


def test_what_waited_for_a_resource_is_placed_on_the_node_that_has_it() -> None:
    head = Gcs(Config())
    head.cluster_up(0.0, "session", [node(0)])
    head.handle(0.0, make_proc(0, 1), m.SetJob(m.JobInfo("01", "", (), "/")))
    shape = m.Shape((("special", 10_000),))
    head.handle(1.0, raylet_of(0), m.UnmetLeaseRequest(make_proc(0, 1), 3, shape, 2))
    effects = head.nodes_joined(2.0, [node(1, special=1)])
    grants = [e for e in effects if isinstance(e, Send) and isinstance(e.msg, m.GrantLeases)]
    assert [(e.dest, e.msg.count) for e in grants] == [(raylet_of(1), 1)]
    assert any(isinstance(e, Send) and isinstance(e.msg, m.SetJob) and e.dest == raylet_of(1) for e in effects)
    assert [row["Index"] for row in head.queries._nodes()] == [0, 1]


def test_the_view_of_a_node_that_comes_before_the_node_is_not_lost() -> None:
    head = Gcs(Config())
    head.cluster_up(0.0, "session", [node(0)])
    head.handle(1.0, raylet_of(1), m.NodeView(1, 1, {"CPU": 0}, {}, {}))
    head.nodes_joined(2.0, [node(1)])
    assert head.resources.nodes[1].available["CPU"] == 0


def test_the_death_of_a_node_that_was_never_in_changes_no_table() -> None:
    head = Gcs(Config())
    head.cluster_up(0.0, "session", [node(0)])
    assert head.node_died(1.0, 1, "gone") == [] and not head.resources.dead
