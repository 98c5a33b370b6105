"""One raylet: demand, workers, blocking, refusals, deaths."""

from __future__ import annotations

import pytest
from raylet_kit import CPU1, CPU2, FAR, JOB, UNIT, Node

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, make_proc
from hpcray.base.resources import to_units
from hpcray.core import raylet as raylet_module
from hpcray.core.raylet import PATIENCE, RayletCore
from hpcray.core.scheduler.ledger import granter_of
from hpcray.wire import messages as m


def test_demand_is_cumulative_so_a_repeated_report_grants_nothing_twice() -> None:
    node = Node(4)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 2))
    node.handle(driver, m.Demand(0, CPU1, 2))
    first = node.take(m.LeaseGranted, driver)
    assert len(first) == 2 and node.free() == 2
    node.handle(driver, m.LeaseReturn(first[0].lease))
    assert node.take(m.LeaseGranted) == []
    node.handle(driver, m.Demand(0, CPU1, 3))
    assert len(node.take(m.LeaseGranted)) == 1
    assert granter_of(first[0].lease) == 0


def test_a_lease_that_waits_for_its_worker_holds_resources_and_can_be_withdrawn() -> None:
    node = Node(2, forks=False)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 2))
    assert node.free() == 0 and len(node.forked) == 2 and node.take(m.LeaseGranted) == []
    node.handle(driver, m.Demand(0, CPU1, 1))
    assert node.free() == 1
    for fork in node.forked:
        node.do(node.core.process_joined(0.0, make_proc(0, fork.number), "worker", 1))
    assert len(node.take(m.LeaseGranted)) == 1
    assert node.core.snapshot()["pool"]["counts"]["idle"] == 1, "the other one joined without purpose"


def test_returned_workers_are_reused_the_warm_one_first() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 2))
    a, b = node.take(m.LeaseGranted)
    node.handle(driver, m.LeaseReturn(a.lease))
    node.handle(driver, m.LeaseReturn(b.lease))
    node.handle(driver, m.Demand(0, CPU1, 3))
    assert node.take(m.LeaseGranted)[0].worker == b.worker
    assert len(node.forked) == 2


def test_a_bad_worker_is_killed_and_its_resources_free_when_it_is_dead() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 2))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(driver, m.LeaseReturn(lease.lease, bad=True))
    assert node.killed == [lease.worker] and node.free() == 0 and node.take(m.LeaseGranted) == []
    node.do(node.core.process_died(0.0, lease.worker, "killed by signal 9"))
    assert node.take(m.LeaseRevoked) == [], "it was given back"
    assert len(node.take(m.LeaseGranted)) == 1 and len(node.forked) == 2


def test_a_return_by_somebody_else_or_twice_is_ignored() -> None:
    node = Node(1)
    driver, other = node.driver(), node.driver()
    node.handle(driver, m.Demand(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(other, m.LeaseReturn(lease.lease))
    assert node.free() == 0
    node.handle(driver, m.LeaseReturn(lease.lease))
    node.handle(driver, m.LeaseReturn(lease.lease))
    assert node.free() == 1


def test_a_dead_worker_is_reported_to_its_holder_in_words() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.do(node.core.process_died(0.0, lease.worker, "killed by signal 11"))
    (revoked,) = node.take(m.LeaseRevoked, driver)
    assert revoked.lease == lease.lease and revoked.worker == lease.worker
    assert "pid 102" in revoked.reason and "node 0" in revoked.reason and "killed by signal 11" in revoked.reason
    assert node.free() == 1


def test_a_dead_holder_loses_its_leases_and_the_workers_that_run_its_tasks() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 5))
    leases = node.take(m.LeaseGranted)
    node.take(m.Unmet)
    node.do(node.core.process_died(0.0, driver, "exit code 1"))
    assert sorted(node.killed) == sorted(lease.worker for lease in leases)
    assert [u.count for u in node.take(m.Unmet)] == [0]
    for lease in leases:
        node.do(node.core.process_died(0.0, lease.worker, "killed by signal 9"))
    assert node.free() == 2 and node.take(m.LeaseRevoked) == [] and node.core.snapshot()["pending"] == []


def test_a_blocked_worker_lends_its_cpu_and_takes_it_back_at_once() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 2))
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
    node.handle(driver, m.LeaseReturn(second.lease))
    assert node.free() == 0
    node.handle(driver, m.LeaseReturn(first.lease))
    assert node.free() == 1


def test_recursion_is_not_bounded_by_the_cpus() -> None:
    node = Node(1)
    holder = node.driver()
    for _ in range(50):
        node.handle(holder, m.Demand(0, CPU1, 1))
        (lease,) = node.take(m.LeaseGranted, holder)
        node.handle(lease.worker, m.Blocked())
        holder = lease.worker
    assert len(node.forked) == 50


def test_only_the_cpu_is_lent() -> None:
    node = Node(1)
    node.core = RayletCore(0, to_units({"CPU": 1, "GPU": 1}), 2, Config(prestart=0))
    driver = node.driver()
    node.handle(driver, m.Demand(0, m.Shape((("CPU", UNIT), ("GPU", UNIT))), 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(lease.worker, m.Blocked())
    assert node.core.available() == {"CPU": UNIT, "GPU": 0}
    node.do(node.core.process_died(0.0, lease.worker, "killed"))
    assert node.core.available() == {"CPU": UNIT, "GPU": UNIT}


def test_what_does_not_fit_is_reported_as_unmet_until_it_is_met() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 5))
    leases = node.take(m.LeaseGranted)
    assert [(u.holder, u.klass, u.count) for u in node.take(m.Unmet, HEAD)] == [(driver, 0, 3)]
    node.handle(driver, m.LeaseReturn(leases[0].lease))
    assert [u.count for u in node.take(m.Unmet)] == [2]
    node.handle(driver, m.Demand(0, CPU1, 3))
    assert [u.count for u in node.take(m.Unmet)] == [0]


def test_alone_the_head_hears_only_of_what_is_impossible_here() -> None:
    node = Node(1, size=1)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 5))
    node.handle(driver, m.Demand(1, m.Shape(CPU1.resources, "SPREAD"), 5))
    assert node.take(m.Unmet) == []
    node.handle(driver, m.Demand(2, CPU2, 1))
    assert [u.klass for u in node.take(m.Unmet)] == [2]


def test_spread_and_foreign_affinity_are_left_to_the_head() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, m.Shape(CPU1.resources, "SPREAD"), 1))
    node.handle(driver, m.Demand(1, m.Shape(CPU1.resources, "node:1"), 1))
    assert node.take(m.LeaseGranted) == [] and [u.klass for u in node.take(m.Unmet)] == [0, 1]
    node.handle(driver, m.Demand(2, m.Shape(CPU1.resources, "node:0"), 3))
    assert len(node.take(m.LeaseGranted)) == 2 and node.take(m.Unmet) == [], "nobody else can help"
    node.handle(HEAD, m.GrantFor(driver, 0, m.Shape(CPU1.resources, "SPREAD"), 1))
    assert [r.count for r in node.take(m.GrantRefused)] == [1]


def test_the_head_may_send_spread_demand_back_home() -> None:
    node = Node(2)
    driver = node.driver()
    spread = m.Shape(CPU1.resources, "SPREAD")
    node.handle(driver, m.Demand(0, spread, 1))
    node.take(m.Unmet)
    node.handle(HEAD, m.GrantFor(driver, 0, spread, 2))
    assert len(node.take(m.LeaseGranted)) == 1
    assert [u.count for u in node.take(m.Unmet)] == [0]
    assert [r.count for r in node.take(m.GrantRefused)] == [1], "the second is not wanted any more"


def test_a_grant_for_a_holder_elsewhere_is_served_or_refused_at_once() -> None:
    node = Node(2)
    node.handle(HEAD, m.GrantFor(FAR, 4, CPU1, 3))
    grants = node.take(m.LeaseGranted, FAR)
    assert [grant.klass for grant in grants] == [4, 4]
    order = [type(s.msg) for s in node.sent]
    assert order.index(m.NodeView) < order.index(m.GrantRefused), "or the head would send the same again"
    assert [(r.holder, r.klass, r.count) for r in node.take(m.GrantRefused, HEAD)] == [(FAR, 4, 1)]
    assert node.take(m.Unmet) == []
    node.handle(FAR, m.LeaseReturn(grants[0].lease))
    assert node.free() == 1


def test_a_grant_bound_to_this_node_queues_until_patience_ends() -> None:
    node = Node(1)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 9))
    (mine,) = node.take(m.LeaseGranted)
    here = m.Shape(CPU1.resources, "node:0")
    node.handle(HEAD, m.GrantFor(FAR, 0, here, 2))
    assert node.take(m.GrantRefused) == []
    node.handle(driver, m.LeaseReturn(mine.lease))
    assert len(node.take(m.LeaseGranted)) == 1
    (lease,) = node.core.snapshot()["leases"]
    holders = {lease["holder"]}
    (claim,) = node.core._claims.leases.values()
    node.handle(claim.holder, m.LeaseReturn(claim.ident))
    holders |= {row["holder"] for row in node.core.snapshot()["leases"]}
    assert holders == {driver, FAR}, "they take turns"
    node.tick(PATIENCE)
    assert [(r.holder, r.count) for r in node.take(m.GrantRefused)] == [(FAR, 1)]


def test_queued_grants_can_be_withdrawn() -> None:
    node = Node(0.5)
    here = m.Shape(CPU1.resources, "node:0")
    node.handle(HEAD, m.GrantFor(FAR, 0, here, 2))
    node.handle(HEAD, m.GrantFor(FAR, 0, here, 0))
    assert [r.count for r in node.take(m.GrantRefused)] == [2]


def test_the_death_of_a_far_holder_ends_its_leases_here() -> None:
    node = Node(4)
    node.handle(HEAD, m.GrantFor(FAR, 0, CPU1, 1))
    node.handle(HEAD, m.GrantFor(make_proc(1, 8), 0, CPU1, 1))
    node.handle(HEAD, m.GrantFor(make_proc(2, 8), 0, CPU1, 1))
    a, b, _ = (lease.worker for lease in node.take(m.LeaseGranted))
    node.handle(HEAD, m.ProcDied(FAR, "killed"))
    assert node.killed == [a]
    node.do(node.core.node_died(0.0, 1))
    assert node.killed == [a, b]


def test_others_are_asked_for_idle_leases_but_not_to_make_room_for_themselves() -> None:
    node = Node(2)
    first, second = node.driver(), node.driver()
    node.handle(first, m.Demand(0, CPU1, 50))
    assert node.take(m.ReclaimIdle) == []
    node.now = 1.0
    node.handle(second, m.Demand(0, CPU1, 1))
    assert len(node.take(m.ReclaimIdle, first)) == 1
    node.handle(second, m.Demand(0, CPU1, 2))
    assert node.take(m.ReclaimIdle) == [], "once until something changes"
    node.tick(1.5)
    assert node.take(m.ReclaimIdle) == []
    node.tick(2.0)
    assert len(node.take(m.ReclaimIdle, first)) == 1, "who forgot is reminded"


def test_a_lease_for_which_others_wait_should_not_idle() -> None:
    node = Node(2)
    first, second = node.driver(), node.driver()
    node.handle(first, m.Demand(0, CPU1, 2))
    assert [lease.wanted for lease in node.take(m.LeaseGranted)] == [False, False]
    node.now = 0.1
    node.handle(second, m.Demand(0, CPU1, 2))
    assert [msg.busy for msg in node.take(m.ReclaimIdle, first)] == [True]
    node.handle(first, m.Demand(0, CPU1, 5))
    lease, other = node.core._claims.held[first]
    node.handle(first, m.LeaseReturn(lease))
    assert [lease.wanted for lease in node.take(m.LeaseGranted, second)] == [True]
    node.handle(first, m.LeaseReturn(other))
    (granted,) = node.take(m.LeaseGranted, first)
    assert granted.wanted, "the second driver waits still"


def test_when_one_waits_shortly_after_another_only_idle_leases_are_asked_for() -> None:
    node = Node(2)
    first, second, third = node.driver(), node.driver(), node.driver()
    node.handle(first, m.Demand(0, CPU1, 1))
    node.handle(second, m.Demand(0, CPU1, 1))
    node.now = 1.0
    node.handle(third, m.Demand(0, CPU1, 1))
    assert [msg.busy for msg in node.take(m.ReclaimIdle)] == [True, True]
    node.handle(third, m.Demand(0, CPU1, 0))
    for holder in (first, second):
        (lease,) = node.core._claims.held[holder]
        node.handle(holder, m.LeaseReturn(lease))
    node.handle(first, m.Demand(0, CPU1, 3))
    assert node.take(m.ReclaimIdle) == []
    node.now = 1.01
    node.handle(third, m.Demand(0, CPU1, 1))
    assert [msg.busy for msg in node.take(m.ReclaimIdle)] == [False]
    node.handle(third, m.Demand(0, CPU1, 2))
    assert node.take(m.ReclaimIdle) == [], "once"


def test_leases_that_hold_nothing_of_what_others_lack_may_idle() -> None:
    node = Node(2, gpus=1)
    first, second = node.driver(), node.driver()
    gpu = m.Shape((("GPU", UNIT),))
    node.handle(first, m.Demand(0, gpu, 1))
    node.handle(second, m.Demand(0, gpu, 1))
    node.take(m.ReclaimIdle)
    node.handle(first, m.Demand(1, CPU1, 1))
    assert [lease.wanted for lease in node.take(m.LeaseGranted) if lease.klass == 1] == [False]


def test_work_that_waits_elsewhere_counts_as_here() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 1))
    assert not node.take(m.LeaseGranted)[0].wanted
    node.handle(HEAD, m.OthersWait(["GPU"]))
    assert node.take(m.ReclaimIdle) == []
    node.handle(HEAD, m.OthersWait(["CPU"], driver, 0))
    assert node.take(m.ReclaimIdle) == [], "it is the holder that waits"
    node.handle(HEAD, m.OthersWait(["CPU"], FAR, 0))
    assert [msg.busy for msg in node.take(m.ReclaimIdle, driver)] == [False]
    node.handle(driver, m.Demand(0, CPU1, 2))
    assert node.take(m.LeaseGranted)[0].wanted
    node.handle(HEAD, m.OthersWait())
    (lease, *_) = node.core._claims.held[driver]
    node.handle(driver, m.LeaseReturn(lease))
    node.handle(driver, m.Demand(0, CPU1, 3))
    assert not node.take(m.LeaseGranted)[0].wanted


def test_failed_forks_are_retried_after_a_pause_and_reported() -> None:
    node = Node(1, forks=False)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 1))
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


def test_at_the_worker_limit_demand_waits_and_says_so() -> None:
    node = Node(4, max_workers=2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 3))
    leases = node.take(m.LeaseGranted)
    assert len(leases) == 2 and node.free() == 2
    node.sent.clear()
    node.handle(HEAD, m.GrantFor(FAR, 0, CPU1, 1))
    assert [type(s.msg) for s in node.sent] == [m.NodeView, m.GrantRefused], "a view, though nothing changed"
    node.tick(5.0)
    assert "max_workers" in node.take(m.Infeasible, driver)[0].reason
    node.handle(driver, m.LeaseReturn(leases[0].lease))
    assert len(node.take(m.LeaseGranted)) == 1


def test_views_count_up_and_come_only_with_news() -> None:
    node = Node(2)
    driver = node.driver()
    node.handle(driver, m.Demand(0, CPU1, 1))
    (lease,) = node.take(m.LeaseGranted)
    node.tick(0.5)
    node.handle(driver, m.LeaseReturn(lease.lease))
    views = node.take(m.NodeView, HEAD)
    assert [view.available["CPU"] // UNIT for view in views] == [2, 1, 2]
    assert [view.version for view in views] == sorted({view.version for view in views})


def test_the_job_goes_up_to_the_head_and_down_to_every_process() -> None:
    node = Node(1, prestart=1)
    driver = node.driver()
    node.do(RayletCore(1, {}, 2, Config()).handle(0.0, make_proc(1, 3), m.SetJob(JOB)))
    assert node.take(m.SetJob, HEAD) == [m.SetJob(JOB)]
    node.handle(HEAD, m.SetJob(JOB))
    assert node.core.job == JOB
    assert {s.dest for s in node.sent if isinstance(s.msg, m.SetJob)} == {driver, make_proc(0, node.forked[0].number)}


def test_environments_have_workers_of_their_own() -> None:
    node = Node(2)
    driver = node.driver()
    env = (("A", "1"),)
    node.handle(driver, m.Demand(0, m.Shape(CPU1.resources, "", env), 1))
    (lease,) = node.take(m.LeaseGranted)
    node.handle(driver, m.LeaseReturn(lease.lease))
    node.handle(driver, m.Demand(1, CPU1, 1))
    assert node.take(m.LeaseGranted)[0].worker != lease.worker
    assert [fork.env for fork in node.forked] == [env, ()]


def test_every_message_it_names_is_handled_and_others_are_not() -> None:
    node = Node()
    assert set(node.core._handlers) == set(raylet_module.HANDLES)
    with pytest.raises(KeyError):
        node.handle(HEAD, m.Stop(0))
