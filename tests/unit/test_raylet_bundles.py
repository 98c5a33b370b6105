"""A raylet that waits for room for bundles: kept free for them, answered once, given up in time."""

from __future__ import annotations

from raylet_kit import CPU1, FAR, Node

from hpcray.common.ids import HEAD
from hpcray.common.resources import to_units
from hpcray.protocol import messages as m


def prepare(node: Node, number: int, reservation: float = 8.0, attempt: int = 1, **amounts: float) -> None:
    group = FAR + (100 + number).to_bytes(5, "big")
    bundles = {0: to_units(amounts)}
    node.handle(HEAD, m.PrepareBundles(group, attempt, bundles, False, reservation))


def test_bundles_with_a_reservation_wait_for_free_resources_and_are_answered_once() -> None:
    node = Node(cpus=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 100))
    leases = [msg.lease for msg in node.take(m.LeaseGranted)]
    prepare(node, 1, CPU=2)
    assert node.take(m.BundlesPrepared) == []
    node.tick(0.5)  # sets the node aside for it
    for lease in leases:
        node.handle(driver, m.ReturnLease(lease))
    assert [msg.ok for msg in node.take(m.BundlesPrepared)] == [True]
    assert node.take(m.LeaseGranted) == [] and node.free() == 0


def test_bundles_that_do_not_fit_in_time_hold_nothing() -> None:
    node = Node(cpus=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    prepare(node, 1, reservation=2.0, CPU=2)
    node.tick(1.0)
    assert node.take(m.BundlesPrepared) == []
    node.tick(2.5)
    node.tick(4.0)
    assert [msg.ok for msg in node.take(m.BundlesPrepared)] == [False]
    prepare(node, 2, reservation=0.0, CPU=2)
    assert [msg.ok for msg in node.take(m.BundlesPrepared)] == [False], "without a reservation at once"


def test_bundles_of_a_removed_group_stop_waiting() -> None:
    node = Node(cpus=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    leases = [msg.lease for msg in node.take(m.LeaseGranted)]
    prepare(node, 1, CPU=2)
    node.handle(HEAD, m.ReturnBundles(FAR + (101).to_bytes(5, "big"), [0], "removed"))
    for lease in leases:
        node.handle(driver, m.ReturnLease(lease))
    assert node.take(m.BundlesPrepared) == [] and node.free() == 2
