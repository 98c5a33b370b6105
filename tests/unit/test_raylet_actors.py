"""Actors on one raylet: workers of their own, what they hold, and how they end."""

from __future__ import annotations

from raylet_kit import CPU1, Node, spec

from hpcray.common.ids import HEAD, make_proc
from hpcray.core.raylet.local_lease_manager import ASSIGNED_TIMEOUT
from hpcray.protocol import messages as m


def test_an_actor_gets_a_worker_of_its_own_and_holds_its_resources() -> None:
    node = Node(1, prestart=1)
    node.handle(HEAD, m.StartActor(spec(), 2))
    worker = make_proc(0, node.forked[0].number)
    (become,) = node.take(m.BecomeActor, worker)
    assert become.restarts == 2 and node.free() == 0
    node.handle(HEAD, m.StartActor(spec(2), 0))
    assert [r.reason for r in node.take(m.StartActorRefused)] == [""]
    node.do(node.core.process_died(0.0, worker, "killed by signal 9"))
    (gone,) = node.take(m.ActorGone, HEAD)
    assert not gone.intended and gone.worker == worker and "killed by signal 9" in gone.reason and node.free() == 1


def test_the_end_of_an_actor_that_exits_or_is_killed_for_good_is_reported_as_intended() -> None:
    node = Node(4)
    for number in (1, 2, 3):
        node.handle(HEAD, m.StartActor(spec(number), 0))
    procs = [make_proc(0, fork.number) for fork in node.forked]
    node.handle(procs[0], m.ProcLeaving("exit_actor()"))
    node.handle(HEAD, m.KillActor(spec(2).actor, True, "killed by its owner"))
    node.handle(HEAD, m.KillActor(spec(3).actor, False, "killed to restart"))
    assert node.killed == procs[1:]
    for proc in procs:
        node.do(node.core.process_died(0.0, proc, "some way"))
    gone = node.take(m.ActorGone)
    assert [(g.reason, g.intended) for g in gone] == [
        ("exit_actor()", True),
        ("killed by its owner", True),
        ("killed to restart", False),
    ]
    assert node.free() == 4


def test_an_actor_killed_before_it_has_a_worker_holds_nothing_afterwards() -> None:
    node = Node(1, forks=False)
    node.handle(HEAD, m.StartActor(spec(), 0))
    assert node.free() == 0
    node.handle(HEAD, m.KillActor(spec().actor, True, "not wanted"))
    assert node.free() == 1
    node.do(node.core.process_joined(0.0, make_proc(0, node.forked[0].number), "worker", 1))
    assert node.take(m.BecomeActor) == []


def test_an_actor_bound_to_this_node_queues_and_is_refused_after_its_timeout() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    here = m.Shape(CPU1.resources, "node:0")
    node.handle(HEAD, m.StartActor(spec(1, place=here), 0))
    node.handle(HEAD, m.StartActor(spec(2, place=here), 0))
    assert node.take(m.StartActorRefused) == []
    node.handle(driver, m.ReturnLease(lease.lease))
    assert [b.spec.actor for b in node.take(m.BecomeActor)] == [spec(1).actor]
    node.tick(ASSIGNED_TIMEOUT)
    assert [r.actor for r in node.take(m.StartActorRefused)] == [spec(2).actor]
    assert node.core._queue.waiting == 0


def test_an_actor_whose_worker_does_not_start_is_refused_with_the_reason() -> None:
    node = Node(1, forks=False)
    node.handle(HEAD, m.StartActor(spec(), 0))
    node.do(node.core.process_died(0.0, make_proc(0, node.forked[0].number), "exit code 127"))
    (refused,) = node.take(m.StartActorRefused)
    assert "exit code 127" in refused.reason and node.free() == 1


def test_many_actors_that_hold_nothing_queue_for_forks_instead_of_being_refused() -> None:
    node = Node(1, forks=False)
    for number in range(100):
        node.handle(HEAD, m.StartActor(spec(number, hold=m.Shape(())), 0))
    assert node.take(m.StartActorRefused) == []
    assert len(node.forked) < 20
    started = 0
    while started < len(node.forked):
        fork = node.forked[started]
        started += 1
        node.do(node.core.process_joined(0.0, make_proc(0, fork.number), "worker", 1))
    assert len(node.take(m.BecomeActor)) == 100 == started
