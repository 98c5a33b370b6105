"""Leases of one raylet: requests, grants, workers, blocking, refusals, deaths."""

from __future__ import annotations

import msgspec
import pytest
from raylet_kit import CPU1, CPU2, FAR, JOB, UNIT, Node

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, node_of
from hpcray.common.resources import to_units
from hpcray.core.raylet import local_lease_manager
from hpcray.core.raylet.local_lease_manager import ASSIGNED_TIMEOUT, LocalLeaseManager
from hpcray.protocol import messages as m


def test_requested_totals_are_cumulative_so_a_repeated_request_grants_nothing_twice() -> None:
    node = Node(4)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    first = node.take(m.LeaseGranted, driver)
    assert len(first) == 2 and node.free() == 2
    node.handle(driver, m.ReturnLease(first[0].lease))
    assert node.take(m.LeaseGranted) == []
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    assert len(node.take(m.LeaseGranted)) == 1
    assert node_of(first[0].lease) == 0


def test_a_lease_that_waits_for_its_worker_holds_resources_and_can_be_withdrawn() -> None:
    node = Node(2, forks=False)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    assert node.free() == 0 and len(node.forked) == 2 and node.take(m.LeaseGranted) == []
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    assert node.free() == 1
    for fork in node.forked:
        node.do(node.core.process_joined(0.0, make_proc(0, fork.number), "worker", 1))
    assert len(node.take(m.LeaseGranted)) == 1
    assert node.core.snapshot()["pool"]["counts"]["idle"] == 1, "the other one joined without purpose"


def test_returned_workers_are_reused_the_last_used_one_first() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    a, b = node.take(m.LeaseGranted)
    node.handle(driver, m.ReturnLease(a.lease))
    node.handle(driver, m.ReturnLease(b.lease))
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    assert node.take(m.LeaseGranted)[0].worker == b.worker
    assert len(node.forked) == 2


def test_a_bad_worker_is_killed_and_its_resources_free_when_it_is_dead() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(driver, m.ReturnLease(lease.lease, bad=True))
    assert node.killed == [lease.worker] and node.free() == 0 and node.take(m.LeaseGranted) == []
    node.do(node.core.process_died(0.0, lease.worker, "killed by signal 9"))
    assert node.take(m.LeaseRevoked) == [], "it was given back"
    assert len(node.take(m.LeaseGranted)) == 1 and len(node.forked) == 2


def test_a_lease_returned_by_another_process_or_twice_is_ignored() -> None:
    node = Node(1)
    driver, other = node.driver(), node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(other, m.ReturnLease(lease.lease))
    assert node.free() == 0
    node.handle(driver, m.ReturnLease(lease.lease))
    node.handle(driver, m.ReturnLease(lease.lease))
    assert node.free() == 1


def test_the_death_of_a_leased_worker_is_reported_to_the_holder_with_its_reason() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.do(node.core.process_died(0.0, lease.worker, "killed by signal 11"))
    (revoked,) = node.take(m.LeaseRevoked, driver)
    assert revoked.lease == lease.lease and revoked.worker == lease.worker
    assert "pid 102" in revoked.reason and "node 0" in revoked.reason and "killed by signal 11" in revoked.reason
    assert node.free() == 1


def test_a_dead_holder_loses_its_leases_and_the_workers_that_run_its_tasks() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 5))
    leases = node.take(m.LeaseGranted)
    node.take(m.UnmetLeaseRequest)
    node.do(node.core.process_died(0.0, driver, "exit code 1"))
    assert sorted(node.killed) == sorted(lease.worker for lease in leases)
    assert [u.count for u in node.take(m.UnmetLeaseRequest)] == [0]
    for lease in leases:
        node.do(node.core.process_died(0.0, lease.worker, "killed by signal 9"))
    assert node.free() == 2 and node.take(m.LeaseRevoked) == [] and node.core.snapshot()["pending"] == []


def test_a_blocked_worker_releases_its_cpu_and_takes_it_back_at_once() -> None:
    node = Node(1, worker_cap_initial_backoff=0.0)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    (first,) = node.take(m.LeaseGranted)
    node.handle(first.worker, m.Blocked())
    node.handle(first.worker, m.Blocked())
    (second,) = node.take(m.LeaseGranted)
    assert node.free() == 0
    node.handle(first.worker, m.Unblocked())
    assert node.free() == -1
    node.handle(first.worker, m.Unblocked())
    node.handle(second.worker, m.Blocked())
    assert node.free() == 0
    node.handle(driver, m.ReturnLease(second.lease))
    assert node.free() == 0
    node.handle(driver, m.ReturnLease(first.lease))
    assert node.free() == 1


def test_nesting_of_tasks_is_not_limited_by_the_number_of_cpus() -> None:
    node = Node(1)
    holder = node.driver()
    for _ in range(50):
        node.handle(holder, m.RequestLeases(0, CPU1, 1))
        (lease,) = node.take(m.LeaseGranted, holder)
        node.handle(lease.worker, m.Blocked())
        holder = lease.worker
    assert len(node.forked) == 50


def test_a_blocked_worker_releases_no_resource_but_its_cpu() -> None:
    node = Node(1)
    node.core = LocalLeaseManager(0, to_units({"CPU": 1, "GPU": 1}), 2, Config(prestart=0))
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, m.Shape((("CPU", UNIT), ("GPU", UNIT))), 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(lease.worker, m.Blocked())
    assert node.core.available() == {"CPU": UNIT, "GPU": 0}
    node.do(node.core.process_died(0.0, lease.worker, "killed"))
    assert node.core.available() == {"CPU": UNIT, "GPU": UNIT}


def test_a_request_that_does_not_fit_is_reported_as_unmet_until_it_is_served() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 5))
    leases = node.take(m.LeaseGranted)
    assert [(u.holder, u.scheduling_class, u.count) for u in node.take(m.UnmetLeaseRequest, HEAD)] == [(driver, 0, 3)]
    node.handle(driver, m.ReturnLease(leases[0].lease))
    assert [u.count for u in node.take(m.UnmetLeaseRequest)] == [2]
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    assert [u.count for u in node.take(m.UnmetLeaseRequest)] == [0]


def test_in_a_cluster_of_one_node_only_infeasible_requests_are_reported_to_the_gcs() -> None:
    node = Node(1, size=1)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 5))
    node.handle(driver, m.RequestLeases(1, m.Shape(CPU1.resources, "SPREAD"), 5))
    assert node.take(m.UnmetLeaseRequest) == []
    node.handle(driver, m.RequestLeases(2, CPU2, 1))
    assert [u.scheduling_class for u in node.take(m.UnmetLeaseRequest)] == [2]


def test_spread_requests_and_affinity_to_other_nodes_are_left_to_the_gcs() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, m.Shape(CPU1.resources, "SPREAD"), 1))
    node.handle(driver, m.RequestLeases(1, m.Shape(CPU1.resources, "node:1"), 1))
    assert node.take(m.LeaseGranted) == [] and [u.scheduling_class for u in node.take(m.UnmetLeaseRequest)] == [0, 1]
    node.handle(driver, m.RequestLeases(2, m.Shape(CPU1.resources, "node:0"), 3))
    assert len(node.take(m.LeaseGranted)) == 2 and node.take(m.UnmetLeaseRequest) == [], "nobody else can help"
    node.handle(HEAD, m.GrantLeases(driver, 0, m.Shape(CPU1.resources, "SPREAD"), 1))
    assert [r.count for r in node.take(m.GrantLeasesRefused)] == [1]


def test_the_gcs_may_assign_a_spread_request_to_the_node_it_came_from() -> None:
    node = Node(2)
    driver = node.driver()
    spread = m.Shape(CPU1.resources, "SPREAD")
    node.handle(driver, m.RequestLeases(0, spread, 1))
    node.take(m.UnmetLeaseRequest)
    node.handle(HEAD, m.GrantLeases(driver, 0, spread, 2))
    assert len(node.take(m.LeaseGranted)) == 1
    assert [u.count for u in node.take(m.UnmetLeaseRequest)] == [0]
    assert [r.count for r in node.take(m.GrantLeasesRefused)] == [1], "the second is not wanted any more"


def test_leases_for_a_holder_on_another_node_are_granted_or_refused_at_once() -> None:
    node = Node(2)
    node.handle(HEAD, m.GrantLeases(FAR, 4, CPU1, 3))
    grants = node.take(m.LeaseGranted, FAR)
    assert [grant.scheduling_class for grant in grants] == [4, 4]
    order = [type(s.msg) for s in node.sent]
    assert order.index(m.NodeView) < order.index(m.GrantLeasesRefused), "or the head would send the same again"
    assert [(r.holder, r.scheduling_class, r.count) for r in node.take(m.GrantLeasesRefused, HEAD)] == [(FAR, 4, 1)]
    assert node.take(m.UnmetLeaseRequest) == []
    node.handle(FAR, m.ReturnLease(grants[0].lease))
    assert node.free() == 1


def test_a_request_bound_to_this_node_queues_until_its_timeout() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 9))
    (mine,) = node.take(m.LeaseGranted)
    here = m.Shape(CPU1.resources, "node:0")
    node.handle(HEAD, m.GrantLeases(FAR, 0, here, 2))
    assert node.take(m.GrantLeasesRefused) == []
    node.handle(driver, m.ReturnLease(mine.lease))
    assert len(node.take(m.LeaseGranted)) == 1
    (lease,) = node.core.snapshot()["leases"]
    holders = {lease["holder"]}
    (allocation,) = node.core._leases.leases.values()
    node.handle(allocation.holder, m.ReturnLease(allocation.id))
    holders |= {row["holder"] for row in node.core.snapshot()["leases"]}
    assert holders == {driver, FAR}, "they take turns"
    node.tick(ASSIGNED_TIMEOUT)
    assert [(r.holder, r.count) for r in node.take(m.GrantLeasesRefused)] == [(FAR, 1)]


def test_the_gcs_can_withdraw_what_it_let_queue_here() -> None:
    node = Node(0.5)
    here = m.Shape(CPU1.resources, "node:0")
    node.handle(HEAD, m.GrantLeases(FAR, 0, here, 2))
    node.handle(HEAD, m.GrantLeases(FAR, 0, here, 0))
    assert [r.count for r in node.take(m.GrantLeasesRefused)] == [2]


def test_the_death_of_a_holder_on_another_node_ends_its_leases_here() -> None:
    node = Node(4)
    node.handle(HEAD, m.GrantLeases(FAR, 0, CPU1, 1))
    node.handle(HEAD, m.GrantLeases(make_proc(1, 8), 0, CPU1, 1))
    node.handle(HEAD, m.GrantLeases(make_proc(2, 8), 0, CPU1, 1))
    a, b, _ = (lease.worker for lease in node.take(m.LeaseGranted))
    node.handle(HEAD, m.ProcDied(FAR, "killed"))
    assert node.killed == [a]
    node.do(node.core.node_died(0.0, 1))
    assert node.killed == [a, b]


def test_holders_are_requested_to_return_idle_leases_but_not_for_their_own_request() -> None:
    node = Node(2)
    first, second = node.driver(), node.driver()
    node.handle(first, m.RequestLeases(0, CPU1, 50))
    assert node.take(m.ReclaimIdle) == []
    node.now = 1.0
    node.handle(second, m.RequestLeases(0, CPU1, 1))
    assert len(node.take(m.ReclaimIdle, first)) == 1
    node.handle(second, m.RequestLeases(0, CPU1, 2))
    assert node.take(m.ReclaimIdle) == [], "once until something changes"
    node.tick(1.5)
    assert node.take(m.ReclaimIdle) == []
    node.tick(2.0)
    assert len(node.take(m.ReclaimIdle, first)) == 1, "who forgot is reminded"


def test_a_lease_whose_resources_others_wait_for_is_granted_as_contended() -> None:
    node = Node(2)
    first, second = node.driver(), node.driver()
    node.handle(first, m.RequestLeases(0, CPU1, 2))
    assert [lease.contended for lease in node.take(m.LeaseGranted)] == [False, False]
    node.now = 0.1
    node.handle(second, m.RequestLeases(0, CPU1, 2))
    assert [msg.busy for msg in node.take(m.ReclaimIdle, first)] == [True]
    node.handle(first, m.RequestLeases(0, CPU1, 5))
    lease, other = node.core._leases.by_holder[first]
    node.handle(first, m.ReturnLease(lease))
    assert [lease.contended for lease in node.take(m.LeaseGranted, second)] == [True]
    node.handle(first, m.ReturnLease(other))
    (granted,) = node.take(m.LeaseGranted, first)
    assert granted.contended, "the second driver waits still"


def test_a_second_reclaim_within_its_minimal_interval_is_for_idle_leases_only() -> None:
    node = Node(2)
    first, second, third = node.driver(), node.driver(), node.driver()
    node.handle(first, m.RequestLeases(0, CPU1, 1))
    node.handle(second, m.RequestLeases(0, CPU1, 1))
    node.now = 1.0
    node.handle(third, m.RequestLeases(0, CPU1, 1))
    assert [msg.busy for msg in node.take(m.ReclaimIdle)] == [True, True]
    node.handle(third, m.RequestLeases(0, CPU1, 0))
    for holder in (first, second):
        (lease,) = node.core._leases.by_holder[holder]
        node.handle(holder, m.ReturnLease(lease))
    node.handle(first, m.RequestLeases(0, CPU1, 3))
    assert node.take(m.ReclaimIdle) == []
    node.now = 1.01
    node.handle(third, m.RequestLeases(0, CPU1, 1))
    assert [msg.busy for msg in node.take(m.ReclaimIdle)] == [False]
    node.handle(third, m.RequestLeases(0, CPU1, 2))
    assert node.take(m.ReclaimIdle) == [], "once"


def test_a_lease_that_holds_no_short_resource_is_not_contended() -> None:
    node = Node(2, gpus=1)
    first, second = node.driver(), node.driver()
    gpu = m.Shape((("GPU", UNIT),))
    node.handle(first, m.RequestLeases(0, gpu, 1))
    node.handle(second, m.RequestLeases(0, gpu, 1))
    node.take(m.ReclaimIdle)
    node.handle(first, m.RequestLeases(1, CPU1, 1))
    assert [lease.contended for lease in node.take(m.LeaseGranted) if lease.scheduling_class == 1] == [False]


def test_requests_that_wait_on_other_nodes_make_leases_contended() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    assert not node.take(m.LeaseGranted)[0].contended
    node.handle(HEAD, m.ResourceContention(["GPU"]))
    assert node.take(m.ReclaimIdle) == []
    node.handle(HEAD, m.ResourceContention(["CPU"], driver, 0))
    assert node.take(m.ReclaimIdle) == [], "it is the holder that waits"
    node.handle(HEAD, m.ResourceContention(["CPU"], FAR, 0))
    assert [msg.busy for msg in node.take(m.ReclaimIdle, driver)] == [False]
    node.handle(driver, m.RequestLeases(0, CPU1, 2))
    assert node.take(m.LeaseGranted)[0].contended
    node.handle(HEAD, m.ResourceContention())
    (lease, *_) = node.core._leases.by_holder[driver]
    node.handle(driver, m.ReturnLease(lease))
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    assert not node.take(m.LeaseGranted)[0].contended


def test_failed_forks_are_retried_after_a_pause_and_reported() -> None:
    node = Node(1, forks=False)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    for attempt in range(3):
        assert len(node.forked) == attempt + 1
        node.do(node.core.fork_failed(node.now, node.forked[-1].number, "Resource temporarily unavailable"))
        assert node.free() == 1 and len(node.forked) == attempt + 1
        node.tick(node.now + 0.5)
        assert len(node.forked) == attempt + 1
        node.tick(node.now + 0.6)
    node.do(node.core.fork_failed(node.now, node.forked[-1].number, "Resource temporarily unavailable"))
    node.tick(node.now + 0.1)
    (warning,) = node.take(m.Infeasible, driver)
    assert "cannot start workers: Resource temporarily unavailable" in warning.reason


def test_at_the_worker_limit_requests_wait_and_their_holders_are_warned() -> None:
    node = Node(4, max_workers=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 3))
    leases = node.take(m.LeaseGranted)
    assert len(leases) == 2 and node.free() == 2
    node.sent.clear()
    node.handle(HEAD, m.GrantLeases(FAR, 0, CPU1, 1))
    assert [type(s.msg) for s in node.sent] == [m.NodeView, m.GrantLeasesRefused], "a view, though nothing changed"
    node.tick(5.0)
    assert "max_workers" in node.take(m.Infeasible, driver)[0].reason
    node.handle(driver, m.ReturnLease(leases[0].lease))
    assert len(node.take(m.LeaseGranted)) == 1


def test_views_are_numbered_and_sent_only_when_something_changed() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.tick(0.5)
    node.handle(driver, m.ReturnLease(lease.lease))
    views = node.take(m.NodeView, HEAD)
    assert [view.available["CPU"] // UNIT for view in views] == [2, 1, 2]
    assert [view.version for view in views] == sorted({view.version for view in views})


def test_the_job_is_forwarded_to_the_head_and_from_there_to_every_worker() -> None:
    node = Node(1, prestart=1)
    node.driver()
    node.do(LocalLeaseManager(1, {}, 2, Config()).handle(0.0, make_proc(1, 3), m.SetJob(JOB)))
    assert node.take(m.SetJob, HEAD) == [m.SetJob(JOB)]
    node.handle(HEAD, m.SetJob(JOB))
    assert node.core.job == JOB
    assert {s.dest for s in node.sent if isinstance(s.msg, m.SetJob)} == {make_proc(0, node.forked[0].number)}


def test_a_job_that_preloads_has_idle_workers_replaced_after_the_import() -> None:
    node = Node(2, prestart=2)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    (busy,) = node.take(m.LeaseGranted, driver)
    before = [make_proc(0, fork.number) for fork in node.forked]
    job = msgspec.structs.replace(JOB, preload=("ray.data", "ray.train"), env=(("A", "1"),))
    node.handle(HEAD, m.SetJob(job))
    assert [(one.modules, one.env) for one in node.preloaded] == [(job.preload, job.env)]
    (left,) = (proc for proc in before if node.take(m.Exit, proc))
    assert left != busy.worker
    assert len(node.forked) == 3, "one is forked in the place of the one that idled"
    worker = make_proc(0, node.forked[2].number)
    node.sent.clear()
    more = msgspec.structs.replace(job, preload=("ray.data", "ray.train", "ray.tune"))
    node.handle(HEAD, m.SetJob(more))
    assert (len(node.preloaded), node.take(m.SetJob)) == (2, []), "for workers nothing has changed"
    assert node.take(m.Exit, worker)
    node.handle(HEAD, m.SetJob(more))
    assert (len(node.forked), len(node.preloaded), node.sent) == (4, 2, [])


def test_workers_that_are_starting_are_replaced_by_those_with_what_a_job_preloads() -> None:
    node = Node(2, prestart=2, forks=False)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 1))
    before = [make_proc(0, fork.number) for fork in node.forked]
    node.handle(HEAD, m.SetJob(msgspec.structs.replace(JOB, preload=("ray.data",))))
    assert node.killed == before
    after = [make_proc(0, fork.number) for fork in node.forked[2:]]
    assert len(after) == 2
    for proc in (*before, *after):
        node.do(node.core.process_joined(0.0, proc, "worker", 100))
    (granted,) = node.take(m.LeaseGranted, driver)
    assert granted.worker in after


def test_each_environment_has_workers_of_its_own() -> None:
    node = Node(2)
    driver = node.driver()
    env = (("A", "1"),)
    node.handle(driver, m.RequestLeases(0, m.Shape(CPU1.resources, "", env), 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(driver, m.ReturnLease(lease.lease))
    node.handle(driver, m.RequestLeases(1, CPU1, 1))
    assert node.take(m.LeaseGranted)[0].worker != lease.worker
    assert [fork.env for fork in node.forked] == [env, ()]


def test_the_lease_manager_handles_exactly_the_messages_in_its_list() -> None:
    node = Node()
    assert set(node.core._handlers) == set(local_lease_manager.HANDLES)
    with pytest.raises(KeyError):
        node.handle(HEAD, m.Stop(0))


def test_a_node_in_use_leaves_the_choice_of_the_node_to_the_gcs_for_a_moment() -> None:
    node = Node(4, spread_threshold=0.5)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 4))
    assert len(node.take(m.LeaseGranted)) == 2, "as far as half of its CPUs"
    (unmet,) = node.take(m.UnmetLeaseRequest)
    assert (unmet.count, unmet.shared) == (2, True)
    assert node.take(m.NodeView)[-1].available["CPU"] == 2 * UNIT, "the GCS knows what is left here"
    node.handle(HEAD, m.GrantLeases(driver, 0, CPU1, 1))
    assert len(node.take(m.LeaseGranted)) == 1, "the GCS chose this node"
    node.tick(0.5)
    assert len(node.take(m.LeaseGranted)) == 1, "no other node was better, or the head is gone"
    node.handle(driver, m.RequestLeases(1, CPU1, 1))
    assert node.take(m.UnmetLeaseRequest)[-1].count == 1


def test_a_full_queue_is_served_here_as_soon_as_there_is_room() -> None:
    node = Node(2, spread_threshold=0.5)
    driver = node.driver()
    node.handle(driver, m.RequestLeases(0, CPU1, 9))
    node.tick(0.5)
    first, second = node.take(m.LeaseGranted)
    for lease in (first, second):
        node.handle(driver, m.ReturnLease(lease.lease))
        assert len(node.take(m.LeaseGranted)) == 1


def test_the_head_learns_that_leases_of_other_nodes_have_arrived_though_as_many_are_lacking() -> None:
    node = Node(0)
    driver = node.driver()
    for received in (0, 0, 2, 2):
        node.handle(driver, m.RequestLeases(0, CPU1, 3, received))
    assert [(one.count, one.received) for one in node.take(m.UnmetLeaseRequest)] == [(3, 0), (3, 2)]
