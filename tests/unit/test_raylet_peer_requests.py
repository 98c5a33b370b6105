"""Requests for leases at the node that has the arguments, between two raylets of a large cluster."""

from __future__ import annotations

import pytest
from raylet_kit import CPU1, CPU2, FAR, UNIT, Node, spec

from hpcray.common.ids import HEAD, make_proc, raylet_of
from hpcray.core.raylet.head_reporter import SMALL_CLUSTER
from hpcray.core.raylet.local_lease_manager import ASSIGNED_TIMEOUT
from hpcray.core.raylet.peer_requests import MOST_COMING
from hpcray.protocol import messages as m

LARGE = SMALL_CLUSTER + 1
NEAR = m.Shape(CPU1.resources, "near:3")
THERE = raylet_of(3)


def asking(total: int = 1, size: int = LARGE, **config: float) -> tuple[Node, bytes]:
    """A node one of whose processes lacks leases near node 3."""
    node = Node(2, size, **config)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, NEAR, total))
    return node, driver


def sent(node: Node) -> list[int]:
    return [one.count for one in node.take(m.PeerLeaseRequest, THERE)]


def reported(node: Node) -> list[int]:
    return [one.count for one in node.take(m.UnmetLeaseRequest, HEAD)]


def test_a_request_near_another_node_goes_there_and_not_to_the_head() -> None:
    node, driver = asking()
    (request,) = node.take(m.PeerLeaseRequest, THERE)
    assert request == m.PeerLeaseRequest(driver, 0, NEAR, 1)
    node.handle(driver, m.RequestLeases(0, NEAR, 0))
    assert sent(node) == [0], "what may still queue there is withdrawn"
    assert reported(node) == []


@pytest.mark.parametrize(("size", "wait"), [(SMALL_CLUSTER, 1.0), (LARGE, 0.0)])
def test_the_head_gets_it_in_a_small_cluster_and_where_nothing_waits_for_locality(size: int, wait: float) -> None:
    node, _ = asking(size=size, locality_wait=wait)
    assert reported(node) == [1] and sent(node) == []


def test_only_what_is_not_coming_is_sent() -> None:
    node = Node(16, LARGE)
    driver = node.driver()
    for total in (2, 5, 4, 6):  # one has arrived before the last one
        node.handle(driver, m.RequestLeases(0, NEAR, total))
    assert sent(node) == [2, 3, 2]


def test_no_more_are_coming_than_this_node_could_run_at_once_and_arrivals_open_more() -> None:
    node, driver = asking(10)
    assert sent(node) == [2], "the node has two CPUs, so the other one may have as many"
    node.handle(driver, m.RequestLeases(0, NEAR, 9))
    assert sent(node) == [1]
    wide = Node(4 * MOST_COMING, LARGE)
    wide.handle(wide.driver(), m.RequestLeases(0, NEAR, 10 * MOST_COMING))
    assert sent(wide) == [MOST_COMING]


def test_a_holder_that_repeats_its_request_gets_what_it_lacks_anew() -> None:
    """It returned the lease that was coming, as others waited, while tasks were queued."""
    node, driver = asking()
    node.handle(driver, m.RequestLeases(0, NEAR, 1))
    assert sent(node) == [1, 1]


def test_the_head_takes_over_what_has_waited_for_long_and_knows_how_long() -> None:
    node, driver = asking(2)
    node.now = 0.5
    node.handle(driver, m.RequestLeases(0, NEAR, 1))
    node.tick(1.0)
    assert sent(node) == [2, 0]
    (unmet,) = node.take(m.UnmetLeaseRequest, HEAD)
    assert (unmet.count, unmet.waited, unmet.unserved_for) == (1, 1.0, 0.5)
    node.handle(driver, m.RequestLeases(0, NEAR, 2))
    node.handle(driver, m.RequestLeases(0, NEAR, 0))
    assert reported(node) == [2, 0] and sent(node) == [], "the head has it until nothing is lacking"
    node.handle(driver, m.RequestLeases(0, NEAR, 1))
    assert sent(node) == [1] and reported(node) == []


def test_a_refused_request_is_the_heads_at_once_and_a_late_refusal_is_nobodys() -> None:
    node, driver = asking()
    node.handle(raylet_of(5), m.PeerLeasesRefused(driver, 0, 1))
    assert reported(node) == [], "another node has nothing of it"
    node.handle(THERE, m.PeerLeasesRefused(driver, 0, 1))
    assert reported(node) == [1]
    node.handle(THERE, m.PeerLeasesRefused(driver, 0, 1))
    assert reported(node) == []


def test_requests_near_a_node_that_dies_are_the_heads_now_and_later() -> None:
    node, driver = asking()
    node.do(node.core.node_died(0.0, 3))
    assert reported(node) == [1]
    node.handle(driver, m.RequestLeases(0, NEAR, 0))
    node.take(m.PeerLeaseRequest)
    node.handle(driver, m.RequestLeases(0, NEAR, 1))
    assert reported(node) == [0, 1] and sent(node) == []


def test_a_new_head_gets_what_the_old_one_had_and_not_what_near_nodes_have() -> None:
    node, driver = asking()
    node.handle(driver, m.RequestLeases(1, m.Shape(CPU1.resources, "near:4"), 1))
    node.handle(raylet_of(4), m.PeerLeasesRefused(driver, 1, 1))
    assert reported(node) == [1]
    node.take(m.PeerLeaseRequest)
    node.do(node.core.head_moved(0.2))
    assert sent(node) == [] and reported(node) + [one.count for one in node.take(m.PeerLeaseRequest)] == [1]


def test_near_nodes_learn_of_a_dead_holder_after_its_requests() -> None:
    node, driver = asking()
    node.do(node.core.process_died(0.0, driver, "killed by signal 9"))
    order = [type(one.msg) for one in node.sent if one.dest == THERE]
    assert order == [m.PeerLeaseRequest, m.ProcDied]
    node.tick(5.0)
    assert reported(node) == []


# ------------------------------------------------------------ the node that has the arguments


HERE = m.Shape(CPU1.resources, "near:0")
ASKER = raylet_of(1)


def test_the_near_node_grants_what_fits_and_queues_the_rest() -> None:
    node = Node(1, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 2))
    (lease,) = node.take(m.LeaseGranted, FAR)
    node.handle(FAR, m.ReturnLease(lease.lease))
    assert len(node.take(m.LeaseGranted, FAR)) == 1
    assert node.take(m.PeerLeasesRefused) == []


def test_what_is_withdrawn_is_not_answered_and_does_not_queue_any_more() -> None:
    node = Node(1, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 3))
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 0))
    (lease,) = node.take(m.LeaseGranted, FAR)
    node.handle(FAR, m.ReturnLease(lease.lease))
    assert node.take(m.LeaseGranted) == node.take(m.PeerLeasesRefused) == node.take(m.GrantLeasesRefused) == []


def test_the_head_hears_of_its_grants_that_a_raylet_withdraws_and_the_other_way_round() -> None:
    node = Node(1, LARGE)
    bound = m.Shape(CPU1.resources, "node:0")
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 1))
    node.handle(HEAD, m.GrantLeases(FAR, 0, bound, 2))
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 0))
    assert [one.count for one in node.take(m.GrantLeasesRefused, HEAD)] == [2]
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 1))
    node.handle(HEAD, m.GrantLeases(FAR, 0, bound, 0))
    assert [one.count for one in node.take(m.PeerLeasesRefused, ASKER)] == [1]


def test_what_queues_for_too_long_or_at_a_node_that_leaves_is_refused_to_the_raylet() -> None:
    for leaves in (False, True):
        node = Node(1, LARGE)
        node.handle(node.driver(), m.RequestLeases(0, CPU1, 1))
        node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 2))
        node.do(node.core.leave(0.0)) if leaves else node.tick(ASSIGNED_TIMEOUT)
        assert [one.count for one in node.take(m.PeerLeasesRefused, ASKER)] == [2]
        if leaves:
            node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 1))
            assert [one.count for one in node.take(m.PeerLeasesRefused, ASKER)] == [1]
        assert node.take(m.GrantLeasesRefused) == []


def test_what_actors_hold_or_the_node_never_has_is_refused_at_once() -> None:
    node = Node(2, LARGE)
    node.handle(HEAD, m.StartActor(spec(), 0))
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, m.Shape(CPU2.resources, "near:0"), 1))
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 1, m.Shape((("GPU", UNIT),), "near:0"), 1))
    assert [one.scheduling_class for one in node.take(m.PeerLeasesRefused, ASKER)] == [0, 1]


def test_a_new_head_does_not_undo_what_a_raylet_has_let_queue() -> None:
    node = Node(1, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 2))
    node.do(node.core.head_moved(0.0))
    (lease,) = node.take(m.LeaseGranted, FAR)
    node.handle(FAR, m.ReturnLease(lease.lease))
    assert len(node.take(m.LeaseGranted, FAR)) == 1


def test_a_dead_holder_leaves_nothing_at_the_near_node() -> None:
    node = Node(1, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, HERE, 2))
    node.handle(ASKER, m.ProcDied(FAR, "killed by signal 9"))
    node.do(node.core.process_died(0.0, node.killed[0], "killed by signal 9"))
    assert node.free() == 1 and len(node.take(m.LeaseGranted)) == 1
    assert make_proc(1, 7) == FAR and node.core.snapshot()["pending"] == []
