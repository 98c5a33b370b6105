"""The worker cap: tasks whose like are all blocked start later and later, and hold up nothing else."""

from __future__ import annotations

from raylet_kit import CPU1, CPU2, Node

from hpcray.common.ids import make_proc
from hpcray.protocol import messages as m


def request(node: Node, holder: bytes, total: int, shape: m.Shape = CPU1, scheduling_class: int = 0) -> None:
    node.handle(holder, m.RequestLeases(scheduling_class, shape, total))


def block(node: Node, *granted: m.LeaseGranted) -> None:
    for lease in granted:
        node.handle(lease.worker, m.Blocked())


def test_each_further_one_waits_twice_as_long_up_to_the_longest_wait():
    node = Node(cpus=2, size=1, worker_cap_max_backoff=4.0)
    driver = node.driver()
    request(node, driver, 9)
    block(node, *node.take(m.LeaseGranted))
    (told,) = node.take(m.LeasesCapped, driver)
    assert (told.scheduling_class, told.reason) == (0, "")
    started = []
    for step in range(1, 32):
        node.tick(0.5 * step)
        for lease in node.take(m.LeaseGranted):
            started.append(node.now)
            block(node, lease)
    assert started == [1.0, 3.0, 7.0, 11.0, 15.0]
    assert "more than node 0 has CPUs for, are blocked" in node.take(m.LeasesCapped, driver)[-1].reason


def test_one_that_ends_makes_room_at_once():
    node = Node(cpus=2, size=1)
    driver = node.driver()
    request(node, driver, 9)
    first, second = node.take(m.LeaseGranted)
    block(node, first, second)
    node.handle(driver, m.ReturnLease(first.lease))
    assert len(node.take(m.LeaseGranted)) == 1
    node.tick(0.5)
    assert node.take(m.LeaseGranted) == []


def test_it_holds_back_no_other_process_and_no_other_class():
    node = Node(cpus=1, size=1)
    driver = node.driver()
    request(node, driver, 9)
    (lease,) = node.take(m.LeaseGranted)
    block(node, lease)
    request(node, lease.worker, 1)
    (child,) = node.take(m.LeaseGranted)
    block(node, child)
    request(node, driver, 1, scheduling_class=1)
    assert len(node.take(m.LeaseGranted)) == 1
    assert node.core.snapshot()["pending"][0]["missing"] == 8


def test_tasks_that_do_not_block_are_never_held_back():
    node = Node(cpus=2, size=1)
    driver = node.driver()
    request(node, driver, 9)
    request(node, driver, 9, CPU2, 1)
    for _ in range(18):
        for lease in node.take(m.LeaseGranted):
            node.handle(driver, m.ReturnLease(lease.lease))
    assert node.take(m.LeasesCapped) == [] and node.core.snapshot()["pending"] == []


def test_the_head_is_told_of_it_and_a_node_at_its_cap_refuses():
    node = Node(cpus=1, size=2)
    driver, far = node.driver(), make_proc(1, 9)
    request(node, driver, 2)
    block(node, *node.take(m.LeaseGranted))
    assert node.take(m.UnmetLeaseRequest)[-1].count == 1, "another node may run it"
    node.handle(make_proc(0, 0), m.GrantLeases(far, 3, CPU1, 1))
    block(node, *node.take(m.LeaseGranted, far))
    node.handle(make_proc(0, 0), m.GrantLeases(far, 3, CPU1, 1))
    assert node.take(m.GrantLeasesRefused) == [m.GrantLeasesRefused(far, 3, 1)]


def test_without_a_backoff_all_start_at_once():
    node = Node(cpus=1, size=1, worker_cap_initial_backoff=0.0)
    driver = node.driver()
    request(node, driver, 5)
    for _ in range(5):
        block(node, *node.take(m.LeaseGranted))
    assert node.core.snapshot()["pending"] == []
