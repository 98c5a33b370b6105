"""Nodes that leave the running job in good order, as the head decides."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants_kit import check_after
from raylet_kit import CPU1, FAR, Node, spec

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.effects import Send
from hpcray.core.gcs.drain import MOST_TARGETS, DepartureManager, LeavingChanged, NodeLeft
from hpcray.core.gcs.gcs import Gcs
from hpcray.protocol import messages as m
from hpcray.runtime.node.node_drain import NodeDeparture
from hpcray.runtime.raylet.router import HeadLocation

ASKER = make_proc(0, 3)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, DepartureManager, ("request", "finished", "evacuated", "node_died", "tick"))


def sent(outcomes: list[Any], kind: type) -> list[bytes]:
    return [e.dest for e in outcomes if isinstance(e, Send) and isinstance(e.msg, kind)]


def test_a_node_ends_its_tasks_then_its_objects_go_then_it_is_gone() -> None:
    head = DepartureManager()
    outcomes = head.request(0.0, 2, "it was removed", 10.0, (ASKER, 7))
    assert sent(outcomes, m.Leave) == [raylet_of(2)] and LeavingChanged({2: 10.0}) in outcomes
    outcomes = head.finished(2, [0, 1, 2])
    assert sent(outcomes, m.Evacuate) == [raylet_of(0), raylet_of(1), raylet_of(2)]
    assert head.evacuated(0, 2) == [] == head.evacuated(2, 2)
    assert head.evacuated(1, 2) == [NodeLeft(2, "it was removed")]
    outcomes = head.node_died(2)
    assert sent(outcomes, m.GcsReply) == [ASKER] and LeavingChanged({}) in outcomes


def test_what_is_not_done_in_time_is_not_waited_for() -> None:
    head = DepartureManager()
    head.request(0.0, 2, "SIGTERM", 10.0)
    assert head.tick(4.9, [0, 2]) == []
    assert sent(head.tick(5.0, [0, 2]), m.Evacuate) == [raylet_of(0), raylet_of(2)], "half of it is for objects"
    assert head.tick(9.9, [0, 2]) == []
    assert head.tick(10.0, [0, 2]) == [NodeLeft(2, "SIGTERM")]


def test_objects_do_not_go_to_nodes_that_leave_too() -> None:
    head = DepartureManager()
    head.request(0.0, 1, "", 10.0)
    head.request(0.0, 2, "", 10.0)
    first, *_ = [e.msg for e in head.finished(2, [0, 1, 2]) if isinstance(e, Send)]
    assert isinstance(first, m.Evacuate) and first.targets == [0]


def test_nobody_waits_for_a_node_that_dies() -> None:
    head = DepartureManager()
    head.request(0.0, 2, "", 10.0)
    head.finished(2, [0, 1, 2])
    head.evacuated(0, 2)
    head.evacuated(2, 2)
    assert NodeLeft(2, "") in head.node_died(1)


def test_in_a_large_job_each_node_chooses_among_a_few() -> None:
    """What a departure costs grows with the number of nodes, not with its square."""
    head, living = DepartureManager(), list(range(1000))
    head.request(0.0, 7, "", 10.0)
    targets = [e.msg.targets for e in head.finished(7, living) if isinstance(e, Send) and isinstance(e.msg, m.Evacuate)]
    assert len(targets) == 1000 and {len(some) for some in targets} == {MOST_TARGETS}
    assert {node for some in targets for node in some} == set(living) - {7}


def test_the_last_node_that_could_take_objects_is_gone() -> None:
    head = DepartureManager()
    head.request(0.0, 1, "", 10.0)
    assert head.finished(1, [1]) == [NodeLeft(1, "")]


@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_every_node_that_is_to_leave_leaves(seed: int) -> None:
    draw = random.Random(seed)
    head, living, now = DepartureManager(), list(range(6)), 0.0

    def carry_out(outcomes: list[Any]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, NodeLeft) and outcome.node in living:
                living.remove(outcome.node)
                carry_out(head.node_died(outcome.node))

    asked: set[int] = set()
    for _ in range(60):
        now += draw.random()
        step, node = draw.random(), draw.choice(living)
        if step < 0.2 and node:
            asked.add(node)
            carry_out(head.request(now, node, "", 5.0))
        elif step < 0.5:
            carry_out(head.finished(node, living))
        elif step < 0.8:
            carry_out(head.evacuated(draw.choice(living), node))
        elif step < 0.85 and node:
            living.remove(node)
            carry_out(head.node_died(node))
        else:
            carry_out(head.tick(now, living))
    for _ in range(10):
        now += 5.0
        carry_out(head.tick(now, living))
    assert not asked & set(living) and not head.leaving()


def test_a_raylet_that_leaves_serves_nothing_new_and_asks_for_its_leases() -> None:
    node = Node(cpus=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (granted,) = node.take(m.LeaseGranted)
    assert node.core.runs_tasks()
    node.do(node.core.leave(node.now))
    assert len(node.take(m.ReclaimIdle)) == 1
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    assert node.take(m.LeaseGranted) == []
    assert [msg.count for msg in node.take(m.UnmetLeaseRequest)] == [1], "other nodes serve its own processes"
    node.handle(driver, m.ReturnLease(granted.lease))
    assert not node.core.runs_tasks() and node.take(m.LeaseGranted) == []
    node.handle(HEAD, m.GrantLeases(driver, 0, CPU1, 1))
    assert node.take(m.LeaseGranted) == []


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("kind", "strategy"), [("task", "node:0"), ("task", "near:0"), ("actor", "node:0")])
def test_a_head_that_leaves_does_not_send_itself_the_same_work_without_end(
    kind: str, strategy: str, known: bool
) -> None:
    """Its raylet handles nothing else before the last message to itself: it would fall silent for ever.

    Args:
        known: whether the GCS knows that the node leaves: one that has just become the head does not know it yet.
    """
    gcs, node = Gcs(Config()), Node(cpus=2, size=2)
    total = to_units({"CPU": 2})
    infos = [m.NodeInfo(n, f"id{n}", "host", "10.0.0.1", 1, total, b"", "mpi", 0) for n in range(2)]

    def settle(effects: list[Any]) -> list[Any]:
        """Handle all messages of node 0 to itself; return those to the other node."""
        elsewhere: list[Any] = []
        for _ in range(20):
            inbox, node.sent = [*effects, *node.sent], []
            effects = []
            for effect in inbox:
                if effect.dest == HEAD:
                    effects += gcs.handle(0.0, raylet_of(0), effect.msg)
                elif effect.dest == raylet_of(0):
                    node.handle(HEAD, effect.msg)
                else:
                    elsewhere.append(effect)
            if not effects and not node.sent:
                return elsewhere
        raise AssertionError(f"they still send each other {inbox}")

    settle(gcs.cluster_up(0.0, "s", infos))
    if known:
        gcs.set_draining({0: 0})
    settle(node.core.leave(0.0))
    shape = m.Shape(CPU1.resources, strategy)
    if kind == "task":
        out = settle(gcs.handle(0.0, raylet_of(1), m.UnmetLeaseRequest(FAR, 0, shape, 1)))
        assert any(isinstance(effect.msg, m.GrantLeases) for effect in out) == (known and strategy == "near:0")
    else:
        settle(gcs.handle(0.0, FAR, m.CreateActor(1, spec(hold=CPU1, place=shape))))
        assert len(gcs.actors.waiting_actors()) == 1


@pytest.mark.parametrize("head", [3, 9])
def test_a_node_that_leaves_asks_the_new_head_again_even_where_that_is_itself(head: int) -> None:
    """A head that leaves may hand over to a node that leaves too: where these two are the last, there is no other."""
    sent: list[tuple[bytes, Any]] = []
    location = HeadLocation(8)
    raylet: Any = SimpleNamespace(
        node=9,
        head_location=location,
        loop=SimpleNamespace(now=2.0),
        router=SimpleNamespace(send=lambda dest, msg: sent.append((dest, msg))),
    )
    departure = NodeDeparture(raylet, lambda: None, lambda: False, lambda: None)
    location.moved_to(4, 1)
    assert not sent, "it does not leave"
    departure.begun, departure._deadline = True, 12.0
    location.moved_to(head, 2)
    assert sent == [(HEAD, m.LeaveRequest("it was leaving when the head moved", 10.0))]
