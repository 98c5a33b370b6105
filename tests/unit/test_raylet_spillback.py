"""Requests that any node may serve, or any node of a placement group, between the raylets of a large cluster."""

from __future__ import annotations

from raylet_kit import CPU1, FAR, UNIT, Node

from hpcray.common.ids import HEAD, node_of, raylet_of
from hpcray.common.resources import GROUP, LATE_BOUND_NODES, names_in, to_units
from hpcray.core.effects import Send
from hpcray.core.raylet.head_reporter import SMALL_CLUSTER
from hpcray.core.raylet.peer_requests import (
    GROUP_WAIT,
    MOST_COMING,
    PROBES,
    QUEUES,
    REFUSALS,
    SPILLED_FOR,
    SPILLED_WAIT,
)
from hpcray.protocol import messages as m

LARGE = SMALL_CLUSTER + 1
SPREAD = m.Shape(CPU1.resources, "SPREAD")
IDENT = FAR + (9).to_bytes(5, "big")
IN_GROUP = m.Shape(tuple(names_in(IDENT.hex(), -1, {"CPU": UNIT}).items()), GROUP)
IN_BUNDLE = m.Shape(tuple(names_in(IDENT.hex(), 1, {"CPU": UNIT}).items()), GROUP)
ASKER = raylet_of(1)


def full(size: int = LARGE, lacking: int = 1) -> tuple[Node, bytes]:
    """A node whose one CPU is leased, to a driver that lacks so many more leases."""
    node = Node(1, size)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1 + lacking))
    node.take(m.LeaseGranted)
    return node, driver


def asked(node: Node) -> list[tuple[int, m.PeerLeaseRequest]]:
    """The nodes that were sent requests, and these."""
    found = [(node_of(one.dest), one.msg) for one in node.sent if isinstance(one.msg, m.PeerLeaseRequest)]
    node.take(m.PeerLeaseRequest)
    return found  # type: ignore[return-value]


def reported(node: Node) -> list[int]:
    return [one.count for one in node.take(m.UnmetLeaseRequest, HEAD)]


def refuse(node: Node, driver: bytes, by: int) -> None:
    node.handle(raylet_of(by), m.PeerLeasesRefused(driver, 0, 1))


def queueing() -> tuple[Node, bytes, list[int]]:
    """A node whose request queues at others, and these."""
    node, driver = full()
    for _ in range(REFUSALS):
        ((there, _),) = asked(node)
        refuse(node, driver, there)
    found = asked(node)
    assert all((one.count, one.wait, one.absolute) == (1, True, True) for _, one in found)
    return node, driver, [there for there, _ in found]


# ------------------------------------------------------------ the node that lacks leases


def test_what_a_full_node_lacks_another_one_is_asked_for_and_not_the_head() -> None:
    node, driver = full()
    ((there, probe),) = asked(node)
    assert there != 0 and probe == m.PeerLeaseRequest(driver, 0, CPU1, 1, wait=False, spare_gpus=True)
    assert reported(node) == []


def test_in_a_small_cluster_the_head_gets_it() -> None:
    node, _ = full(SMALL_CLUSTER)
    assert reported(node) == [1] and asked(node) == []


def test_several_are_asked_for_at_several_nodes_and_very_many_are_the_heads() -> None:
    node, _ = full(lacking=6)
    assert sorted(one.count for _, one in asked(node)) == [1, 1, 2, 2] and PROBES == 4
    node, driver = full(lacking=2)
    asked(node)
    node.handle(driver, m.RequestLeases(0, CPU1, 2 + MOST_COMING))
    assert reported(node) != [] and asked(node) == []


def test_nodes_are_asked_in_turn_the_dead_ones_left_out() -> None:
    node, driver = full()
    node.do(node.core.node_died(0.0, 7))
    asked(node)
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    seen = []
    for received in range(LARGE - 2):
        node.handle(driver, m.RequestLeases(0, CPU1, 2, received))
        seen += [there for there, one in asked(node) if one.count]
        node.handle(driver, m.RequestLeases(0, CPU1, 1, received + 1))
        reported(node)
        asked(node)
    assert sorted(seen) == [n for n in range(1, LARGE) if n != 7], "each of them once"


def test_tasks_that_are_spread_run_on_their_own_node_too_when_it_is_its_turn() -> None:
    node = Node(1, LARGE)
    driver, seen = node.driver(), []
    for received in range(LARGE):
        node.handle(driver, m.RequestLeases(0, SPREAD, 1, received))
        seen += [there for there, one in asked(node) if one.count]
        node.handle(driver, m.RequestLeases(0, SPREAD, 0, received + 1))
        asked(node)
    assert sorted(seen) == list(range(LARGE)) and reported(node) == []
    node.handle(driver, m.RequestLeases(0, SPREAD, 1, LARGE))
    node.handle(raylet_of(0), m.PeerLeaseRequest(driver, 0, SPREAD, 1, wait=False))
    assert len(node.take(m.LeaseGranted, driver)) == 1


def test_a_node_never_refuses_what_it_let_queue_of_its_own_spread_request() -> None:
    node, driver = full()
    asked(node)
    node.handle(driver, m.RequestLeases(1, SPREAD, 3))
    itself = raylet_of(0)
    for _ in range(2):  # the same again: it replaces what queues
        node.handle(itself, m.PeerLeaseRequest(driver, 1, SPREAD, 2, absolute=True))
        assert node.take(m.PeerLeasesRefused) == []
        assert [one.assigned for one in node.core._queue if one.scheduling_class == 1] == [2]
    node.handle(driver, m.RequestLeases(1, SPREAD, 1, 2))
    node.handle(itself, m.PeerLeaseRequest(driver, 1, SPREAD, 2, absolute=True))
    assert node.take(m.PeerLeasesRefused) == [], "it needs one only, and that one queues"


def test_after_some_refusals_it_queues_at_others_until_one_has_granted_it() -> None:
    node, driver, there = queueing()
    assert len(there) == len(set(there)) == QUEUES and reported(node) == []
    node.handle(driver, m.RequestLeases(0, CPU1, 1, 1))
    assert [(at, one.count) for at, one in asked(node)] == [(at, 0) for at in there]


def test_where_one_was_granted_and_as_many_are_lacking_all_are_asked_again() -> None:
    node, driver, there = queueing()
    node.handle(driver, m.RequestLeases(0, CPU1, 2, 1))
    assert [(at, one.count) for at, one in asked(node)] == [(at, 1) for at in there]
    node.handle(driver, m.RequestLeases(0, CPU1, 2, 1))
    assert [one.count for _, one in asked(node)] == [1] * QUEUES, "the holder repeats it: nothing is coming"


def test_the_head_takes_over_what_gets_no_lease_or_waits_for_long() -> None:
    node, driver, there = queueing()
    node.tick(SPILLED_WAIT)
    assert [(at, one.count) for at, one in asked(node)] == [(at, 0) for at in there]
    assert reported(node) == [1]
    node, driver, there = queueing()
    received, now = 0, 0.0
    while now < SPILLED_FOR:
        assert reported(node) == []
        received, now = received + 1, now + SPILLED_WAIT / 2
        node.now = now
        node.handle(driver, m.RequestLeases(0, CPU1, 2, received))
    assert reported(node) == [1]


def test_the_head_takes_over_when_all_nodes_refuse_or_die() -> None:
    node, driver, there = queueing()
    for at in there:
        assert reported(node) == []
        refuse(node, driver, at)
    assert reported(node) == [1]
    node, _ = full()
    node.do(node.core.node_died(0.0, asked(node)[0][0]))
    assert reported(node) == [1]


def test_other_nodes_are_asked_at_once_though_leases_of_this_one_were_just_returned() -> None:
    """Nothing would remind this node of a request that it holds back before its next tick, half a second later."""
    node = Node(4, LARGE)
    first, second, third = node.driver(), node.driver(), node.driver()
    node.handle(first, m.RequestLeases(0, CPU1, 4))
    for grant in node.take(m.LeaseGranted):
        node.handle(first, m.ReturnLease(grant.lease))
    node.handle(second, m.RequestLeases(0, CPU1, 4))
    assert len(node.take(m.LeaseGranted)) == 4
    node.handle(third, m.RequestLeases(0, CPU1, 1))
    assert [one.wait for _, one in asked(node)] == [False]


def test_all_nodes_that_were_asked_learn_of_the_holders_death_whatever_they_have_refused() -> None:
    """What a node refuses may be a part, or of another class: it may have granted the rest."""
    node, driver = full()
    ((first, _),) = asked(node)
    node.handle(driver, m.RequestLeases(1, SPREAD, 1))
    ((second, _),) = asked(node)
    refuse(node, driver, first)
    ((third, _),) = asked(node)
    node.handle(raylet_of(second), m.PeerLeasesRefused(driver, 0, 1))
    node.do(node.core.node_died(0.0, third))
    node.do(node.core.process_died(0.0, driver, "killed by signal 9"))
    died = [node_of(one.dest) for one in node.sent if isinstance(one, Send) and isinstance(one.msg, m.ProcDied)]
    assert {first, second} <= set(died) and third not in died and len(died) == len(set(died))


# ------------------------------------------------------------ placement groups


def in_group(shape: m.Shape, *nodes: int) -> tuple[Node, bytes]:
    node = Node(1, LARGE)
    driver = node.driver()
    node.handle(HEAD, m.PlacementGroupNodes([(IDENT, list(nodes))]))
    node.handle(driver, m.RequestLeases(0, shape, 1))
    return node, driver


def test_a_request_in_a_group_queues_at_its_nodes_until_one_has_granted_it() -> None:
    node, driver = in_group(IN_GROUP, 5, 3, 5)
    assert [(at, one.count, one.wait) for at, one in asked(node)] == [(3, 1, True), (5, 1, True)]
    node.handle(driver, m.RequestLeases(0, IN_GROUP, 0, 1))
    assert [(at, one.count) for at, one in asked(node)] == [(3, 0), (5, 0)] and reported(node) == []


def test_a_request_in_one_bundle_is_sent_to_its_node_and_needs_no_withdrawal() -> None:
    node, driver = in_group(IN_BUNDLE, 5, 3, *range(6, 20))
    assert [at for at, _ in asked(node)] == [3]
    node.handle(driver, m.RequestLeases(0, IN_BUNDLE, 0, 1))
    assert asked(node) == [] and reported(node) == []


def test_what_arrives_of_another_node_does_not_count_as_granted_by_the_one_where_the_rest_queues() -> None:
    """A lease that was probed for may come after the request is another one's: a node would keep a surplus one."""
    node, driver = full()
    ((late, _),) = asked(node)
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    assert asked(node) == []  # the probe is on its way
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    for _ in range(REFUSALS):
        (*_, (there, _)) = asked(node)
        refuse(node, driver, there)
    queues = [there for there, _ in asked(node)]
    for there in queues[:-1]:
        refuse(node, driver, there)
    assert late not in queues and reported(node) == []
    asked(node)
    node.handle(driver, m.RequestLeases(0, CPU1, 1, 1))
    assert [(at, one.count) for at, one in asked(node)] == [(queues[-1], 0)]


def test_what_the_head_had_granted_does_not_count_as_granted_by_a_node_either() -> None:
    node, driver = in_group(IN_BUNDLE, 5, 3)
    node.tick(GROUP_WAIT)
    assert asked(node)[-1][1].count == 0 and reported(node) == [1]
    node.handle(driver, m.RequestLeases(0, IN_BUNDLE, 0))
    node.handle(driver, m.RequestLeases(0, IN_BUNDLE, 1))
    assert [one.count for _, one in asked(node)] == [1] and reported(node) == [0]
    node.handle(driver, m.RequestLeases(0, IN_BUNDLE, 0, 1))
    assert [(at, one.count) for at, one in asked(node)] == [(3, 0)]


def test_a_node_that_refuses_a_part_keeps_nothing_of_the_rest() -> None:
    node, driver = in_group(IN_BUNDLE, 5, 3)
    node.handle(driver, m.RequestLeases(0, IN_BUNDLE, 2))
    asked(node)
    refuse(node, driver, 3)
    assert [(at, one.count) for at, one in asked(node)] == [(3, 0)] and reported(node) == [2]


def test_the_head_has_requests_in_groups_that_are_not_known_or_are_on_many_nodes() -> None:
    node = Node(1, LARGE)
    node.handle(node.driver(), m.RequestLeases(0, IN_GROUP, 1))
    assert reported(node) == [1]
    node, _ = in_group(IN_GROUP, *range(1, LATE_BOUND_NODES + 2))
    assert reported(node) == [1] and asked(node) == []


def test_a_group_whose_node_refuses_or_dies_is_not_known_any_more() -> None:
    for dies in (False, True):
        node, driver = in_group(IN_GROUP, 5, 3)
        asked(node)
        node.do(node.core.node_died(0.0, 5)) if dies else refuse(node, driver, 5)
        assert [(at, one.count) for at, one in asked(node) if at != 5] == [(3, 0)] and reported(node) == [1]
        node.handle(driver, m.RequestLeases(0, IN_GROUP, 0))
        node.handle(driver, m.RequestLeases(0, IN_GROUP, 1))
        assert asked(node) == [] and reported(node) == [0, 1]


def test_the_head_takes_over_what_waits_in_a_group_before_its_holder_gets_a_report() -> None:
    node, _ = in_group(IN_GROUP, 5)
    node.tick(GROUP_WAIT - 0.1)
    assert reported(node) == []
    node.tick(GROUP_WAIT)
    (unmet,) = node.take(m.UnmetLeaseRequest)
    assert unmet.unserved_for == GROUP_WAIT


def test_a_node_serves_requests_in_its_bundles_and_refuses_others() -> None:
    node = Node(2, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, IN_GROUP, 1, absolute=True))
    assert len(node.take(m.PeerLeasesRefused, ASKER)) == 1
    node.handle(HEAD, m.PrepareBundles(IDENT, 1, {0: to_units({"CPU": 1})}, True))
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, IN_GROUP, 2, absolute=True))
    (lease,) = node.take(m.LeaseGranted, FAR)
    node.handle(FAR, m.ReturnLease(lease.lease))
    assert len(node.take(m.LeaseGranted, FAR)) == 1
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, IN_GROUP, 2, absolute=True))
    node.handle(HEAD, m.ReturnBundles(IDENT, [0], "it was removed"))
    assert [one.count for one in node.take(m.PeerLeasesRefused, ASKER)] == [2]


def test_what_the_old_head_knew_is_the_new_head_s_though_its_nodes_are_known_by_now() -> None:
    """The report may be on its way: the new head gets it too, and nothing would withdraw it there."""
    node = Node(1, LARGE)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, IN_GROUP, 1))
    assert reported(node) == [1]
    node.handle(HEAD, m.PlacementGroupNodes([(IDENT, [5, 3])]))
    node.now = 20.0
    node.do(node.core.head_moved(20.0))
    (unmet,) = node.take(m.UnmetLeaseRequest, HEAD)
    assert (unmet.count, unmet.waited, unmet.unserved_for) == (1, 0.0, 0.0) and asked(node) == []
    node.handle(driver, m.RequestLeases(0, IN_GROUP, 0))
    node.handle(driver, m.RequestLeases(0, IN_GROUP, 1))
    assert reported(node) == [0] and [at for at, _ in asked(node)] == [3, 5]


# ------------------------------------------------------------ the node that is asked


def test_a_probe_is_granted_at_once_or_refused_and_leaves_nothing() -> None:
    node = Node(1, LARGE)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, CPU1, 2, wait=False))
    assert len(node.take(m.LeaseGranted, FAR)) == 1
    assert [one.count for one in node.take(m.PeerLeasesRefused, ASKER)] == [1]
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 1, CPU1, 1, wait=False))
    assert [one.scheduling_class for one in node.take(m.PeerLeasesRefused, ASKER)] == [1]
    assert [one["scheduling_class"] for one in node.core.snapshot()["pending"]] == []
    assert node.take(m.GrantLeasesRefused) == []


def test_gpus_are_kept_from_requests_of_nodes_without_any() -> None:
    node = Node(2, LARGE, gpus=1)
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, CPU1, 1, wait=False, spare_gpus=True))
    assert len(node.take(m.PeerLeasesRefused)) == 1
    node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, CPU1, 1, wait=False))
    assert len(node.take(m.LeaseGranted)) == 1


def test_a_request_that_was_withdrawn_begins_to_wait_anew_when_it_comes_back() -> None:
    """Else it would seem to starve, and the node would keep room for it before others that do."""
    node, _ = full(lacking=0)
    for now in (0.0, 3.0):
        node.now = now
        node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, CPU1, 1, absolute=True))
        (request,) = [one for one in node.core._queue if one.holder == FAR]
        assert request.waiting_since == now
        node.handle(ASKER, m.PeerLeaseRequest(FAR, 0, CPU1, 0, absolute=True))
