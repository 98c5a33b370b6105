"""`LocalLeaseManager.check_invariants` finds each way in which leases, workers, resources and bundles can disagree."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from raylet_kit import CPU1, CPU2, FAR, UNIT, Node, spec

from hpcray.common.ids import HEAD
from hpcray.common.resources import names_in, to_units
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.core.raylet.local_resources import (
    ALLOCATION_TRANSITIONS,
    BUNDLE_TRANSITIONS,
    COMMITTED,
    ENDING,
    FREED,
    GRANTED,
    LEAVING,
    PREPARED,
    RETURNED,
    WAITING,
)
from hpcray.core.raylet.worker_pool import BUSY, IDLE, STARTING, WORKER_TRANSITIONS
from hpcray.protocol import messages as m

GROUP = FAR + (100).to_bytes(5, "big")


def busy_node() -> Node:
    """A node with leases, one that waits for its worker, a queue, an actor on a GPU, a bundle, idle workers."""
    node = Node(cpus=8, size=1, gpus=2)
    driver, other = node.driver(), node.driver()
    node.handle(HEAD, m.PrepareBundles(GROUP, 1, {0: to_units({"CPU": 2})}, True, 0.0))
    node.handle(HEAD, m.StartActor(spec(1, m.Shape((("GPU", UNIT),)), CPU1), 0))
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    lease = node.take(m.LeaseGranted)[0]
    node.handle(driver, m.RequestLeases(1, in_bundle(1), 1))
    node.handle(other, m.RequestLeases(0, CPU2, 1))
    node.forks = False
    node.handle(other, m.RequestLeases(1, m.Shape(CPU1.resources, "", (("A", "1"),)), 1))
    node.handle(other, m.RequestLeases(2, m.Shape((("CPU", 8 * UNIT),)), 1))
    node.handle(driver, m.ReturnLease(lease.lease))
    assert node.free() == 1 and node.core._queue.waiting == 1 and len(node.core.pool.waiting()) == 1
    return node


def in_bundle(cpus: int) -> m.Shape:
    request = names_in(GROUP.hex(), 0, {"CPU": cpus * UNIT})
    return m.Shape(tuple(sorted(request.items())), "group")


def a_resource_leaks(core: LocalLeaseManager) -> None:
    core.resources.pool.available["CPU"] -= 1


def a_bundle_leaks(core: LocalLeaseManager) -> None:
    next(iter(core.resources.bundles)).pool.available["CPU"] += 1


def a_published_amount_is_wrong(core: LocalLeaseManager) -> None:
    core.resources.bundles.available[next(iter(core.resources.bundles.available))] += 1


def a_gpu_is_held_twice(core: LocalLeaseManager) -> None:
    core.resources.pool.devices["GPU"].free = [UNIT, UNIT]


def what_actors_hold_is_forgotten(core: LocalLeaseManager) -> None:
    core.resources.pool.held_by_actors.clear()


def a_lease_is_forgotten(core: LocalLeaseManager) -> None:
    core._leases.leases.popitem()


def a_lease_has_a_worker_that_is_gone(core: LocalLeaseManager) -> None:
    core.pool.remove_worker(next(iter(core._leases.leases.values())).worker)


def a_lease_is_granted_that_was_freed(core: LocalLeaseManager) -> None:
    next(iter(core._leases.leases.values())).state = FREED


def an_idle_worker_is_lost(core: LocalLeaseManager) -> None:
    next(stack for stack in core.pool._idle.values() if stack).pop()


def a_busy_worker_is_counted_as_idle(core: LocalLeaseManager) -> None:
    next(one for one in core.pool.workers.values() if one.state == BUSY).state = IDLE


def an_allocation_stops_waiting_for_its_worker(core: LocalLeaseManager) -> None:
    core.pool.cancel_waiting(core.pool.waiting()[0])


def a_request_is_not_queued(core: LocalLeaseManager) -> None:
    core._queue._buckets.clear()
    core._queue.waiting = 0


def a_queued_request_has_nothing_to_serve(core: LocalLeaseManager) -> None:
    next(iter(core._queue)).total = 0


def a_reservation_outlives_its_request(core: LocalLeaseManager) -> None:
    core._queue.reserved = next(iter(core._leases.leases.values())).lease_request


@pytest.mark.parametrize(
    "defect",
    [
        a_resource_leaks, a_bundle_leaks, a_published_amount_is_wrong, a_gpu_is_held_twice,
        what_actors_hold_is_forgotten, a_lease_is_forgotten, a_lease_has_a_worker_that_is_gone,
        a_lease_is_granted_that_was_freed, an_idle_worker_is_lost, a_busy_worker_is_counted_as_idle,
        an_allocation_stops_waiting_for_its_worker, a_request_is_not_queued, a_queued_request_has_nothing_to_serve,
        a_reservation_outlives_its_request,
    ],
    ids=lambda defect: defect.__name__,
)  # fmt: skip
def test_a_contradiction_in_the_state_of_a_raylet_is_found(defect: Callable[[LocalLeaseManager], None]) -> None:
    core = busy_node().core
    core.check_invariants()
    defect(core)
    with pytest.raises(AssertionError):
        core.check_invariants()


@pytest.mark.parametrize(
    ("table", "first", "last"),
    [
        (ALLOCATION_TRANSITIONS, WAITING, {FREED}),
        (BUNDLE_TRANSITIONS, PREPARED, {RETURNED}),
        (WORKER_TRANSITIONS, STARTING, {LEAVING}),
    ],
)
def test_every_state_is_reached_and_leads_to_an_end(table: dict[str, set[str]], first: str, last: set[str]) -> None:
    def reached(start: str) -> set[str]:
        found = {start}
        while more := {after for state in found for after in table[state]} - found:
            found |= more
        return found

    assert reached(first) == set(table)
    assert all(last <= reached(state) for state in table)


def test_states_change_only_as_the_tables_allow() -> None:
    node = busy_node()
    (bundle,) = node.core.resources.bundles
    lease = next(iter(node.core._leases.leases.values()))
    assert (bundle.state, lease.state) == (COMMITTED, GRANTED)
    with pytest.raises(AssertionError):
        bundle.change_state(PREPARED)
    with pytest.raises(AssertionError):
        lease.change_state(WAITING)
    lease.change_state(ENDING)
    with pytest.raises(AssertionError):
        lease.change_state(GRANTED)


def test_a_lease_that_is_returned_while_its_worker_is_being_killed_does_not_free_the_worker() -> None:
    """The group was removed: the worker must not serve the next request, which would fail with it."""
    node = Node(cpus=2, size=1)
    driver = node.driver()
    node.handle(HEAD, m.PrepareBundles(GROUP, 1, {0: to_units({"CPU": 1})}, True, 0.0))
    node.handle(driver, m.RequestLeases(0, in_bundle(1), 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(HEAD, m.ReturnBundles(GROUP, [0], "the group was removed"))
    assert node.killed == [lease.worker]
    node.handle(driver, m.ReturnLease(lease.lease))
    node.handle(driver, m.RequestLeases(1, CPU1, 1))
    (other,) = node.take(m.LeaseGranted)
    assert other.worker != lease.worker and node.free() == 0, "the bundle's CPU is held until the worker is dead"
    node.do(node.core.process_died(0.0, lease.worker, "killed by signal 9"))
    node.handle(driver, m.ReturnLease(lease.lease))
    assert node.free() == 1 and node.take(m.LeaseRevoked) == []
