"""Unmet lease requests at the head: crossing messages, refusals, deaths, requests that only a busy node can serve."""

from __future__ import annotations

from typing import Any

import pytest
from invariants_kit import check_after

from hpcray.common.ids import make_proc, node_of, raylet_of
from hpcray.common.resources import GROUP, REPORT_AFTER, to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.cluster_resources import ClusterResources
from hpcray.core.gcs.cluster_scheduler import (
    BOUND_GRANT_ARRIVES,
    BUSY_NODE_AFTER,
    DECREASE_AFTER,
    DEMANDS_AT_ONCE,
    ENDED_AFTER,
    GRANT_ARRIVES,
    ClusterScheduler,
)
from hpcray.core.raylet.local_lease_manager import ASSIGNED_TIMEOUT
from hpcray.protocol.messages import (
    GrantLeases,
    GrantLeasesRefused,
    Infeasible,
    NodeInfo,
    NodeView,
    ProcDied,
    ResourceContention,
    Shape,
    UnmetLeaseRequest,
)

UNIT = 10_000
CPU1 = Shape((("CPU", UNIT),))
ME = make_proc(0, 5)
OTHER = make_proc(0, 6)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(
        monkeypatch,
        ClusterScheduler,
        ("unmet_lease_request", "grant_refused", "node_grew", "tick", "holder_died", "node_died"),
    )


def make(*cpus: float) -> tuple[ClusterResources, ClusterScheduler]:
    view = ClusterResources()
    view.nodes_joined(
        NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, to_units({"CPU": c}), b"", "mpi", 0)
        for n, c in enumerate(cpus)
    )
    return view, ClusterScheduler(view, lambda group: False)


def unmet(scheduler: ClusterScheduler, now: float, *request: Any) -> list[Effect]:
    return scheduler.unmet_lease_request(now, UnmetLeaseRequest(*request))


def grants(effects: list[Effect]) -> dict[int, int]:
    """How many leases each node is asked for."""
    out: dict[int, int] = {}
    for effect in effects:
        assert isinstance(effect, Send)
        if isinstance(effect.msg, GrantLeases):
            node = node_of(effect.dest)
            assert node not in out, "one message per node would do"
            out[node] = effect.msg.count
    return out


def busy(view: ClusterResources, *nodes: int, version: int = 1) -> None:
    for node in nodes:
        view.apply_view(NodeView(node, version, {"CPU": 0}))


def test_unmet_demand_goes_to_other_nodes() -> None:
    _, scheduler = make(4, 2, 2)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 3)) == {1: 2, 2: 1}
    assert scheduler.unmet_by_shape()[0]["count"] == 3


def test_demand_is_sent_once_while_reports_repeat_themselves() -> None:
    _, scheduler = make(0, 8)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 3)) == {1: 3}
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 3)) == {}
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 5)) == {1: 2}
    assert grants(unmet(scheduler, 0.2, ME, 0, CPU1, 2)) == {}, "three of five have arrived"
    assert grants(unmet(scheduler, 0.2, ME, 0, CPU1, 3)) == {1: 1}


def test_demand_whose_grant_shows_no_effect_is_sent_again() -> None:
    """Grants arrive while as many new tasks are queued: the report stays the same, yet the demand is new."""
    _, scheduler = make(0, 8)
    unmet(scheduler, 0.0, ME, 0, CPU1, 2)
    assert grants(scheduler.tick(GRANT_ARRIVES - 0.1)) == {}
    assert grants(scheduler.tick(GRANT_ARRIVES)) == {1: 2}


def test_a_lease_that_has_arrived_and_is_used_up_is_not_waited_for() -> None:
    """As many new tasks are queued, so the count stays the same: the number of leases received says it."""
    _, scheduler = make(0, 8)
    unmet(scheduler, 0.0, ME, 0, CPU1, 2)
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 2, False, 0.0, 0.0, 1)) == {1: 1}
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 2, False, 0.0, 0.0, 1)) == {}, "one and one are on their way"
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 1, False, 0.0, 0.0, 2)) == {}, "this one is not counted twice"
    assert grants(unmet(scheduler, 0.1, ME, 0, CPU1, 2, False, 0.0, 0.0, 2)) == {1: 1}


def test_a_refused_request_goes_to_another_node_and_not_back() -> None:
    _, scheduler = make(0, 4, 4)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 2)) == {1: 2}
    assert grants(scheduler.grant_refused(0.0, 1, GrantLeasesRefused(ME, 0, 1))) == {2: 1}
    assert grants(scheduler.grant_refused(0.0, 2, GrantLeasesRefused(ME, 0, 1))) == {}
    assert grants(scheduler.tick(0.5)) == {2: 1}, "after a while it is worth asking again"


def test_room_that_appears_is_shared_in_turn() -> None:
    view, scheduler = make(0, 4)
    busy(view, 1)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 9)) == {}
    assert grants(unmet(scheduler, 0.0, OTHER, 0, CPU1, 9)) == {}
    assert view.apply_view(NodeView(1, 2, {"CPU": 4 * UNIT}))
    effects = scheduler.node_grew(0.1, 1)
    counts = {e.msg.holder: e.msg.count for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantLeases)}
    assert counts == {ME: 2, OTHER: 2}


def test_the_holders_own_node_is_left_to_its_raylet_but_for_spread() -> None:
    view, scheduler = make(4, 4)
    busy(view, 1)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 2)) == {}
    assert grants(unmet(scheduler, 0.0, ME, 1, Shape(CPU1.resources, "SPREAD"), 2)) == {0: 2}
    assert grants(unmet(scheduler, 0.0, ME, 2, Shape(CPU1.resources, "node:9:soft"), 1)) == {0: 1}


def test_affinity_queues_at_its_node_even_when_that_is_busy_and_not_too_much() -> None:
    view, scheduler = make(4, 2)
    busy(view, 1)
    hard = Shape(CPU1.resources, "node:1")
    assert grants(unmet(scheduler, 0.0, ME, 0, hard, 9)) == {1: 2}
    assert grants(scheduler.tick(GRANT_ARRIVES)) == {}, "it may queue there for longer"
    assert grants(scheduler.grant_refused(2.0, 1, GrantLeasesRefused(ME, 0, 2))) == {1: 2}
    assert grants(scheduler.tick(2.0 + BOUND_GRANT_ARRIVES)) == {1: 2}
    effects = unmet(scheduler, 6.0, ME, 0, hard, 0)
    assert grants(effects) == {1: 0}, "what queues there is withdrawn"
    assert scheduler.unmet_by_shape() == []


def test_requests_that_find_no_room_for_long_queue_at_busy_nodes_in_turn() -> None:
    view, scheduler = make(0, 4, 4)
    busy(view, 1, 2)
    unmet(scheduler, 0.0, ME, 0, CPU1, 9)
    unmet(scheduler, 0.0, OTHER, 0, CPU1, 9)
    assert grants(scheduler.tick(BUSY_NODE_AFTER - 0.1)) == {}
    effects = scheduler.tick(BUSY_NODE_AFTER)
    assert grants(effects) == {1: 1, 2: 1}
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.msg, GrantLeases)
        assert effect.msg.shape.strategy == f"node:{node_of(effect.dest)}", "so that the node lets it queue"
    assert grants(scheduler.tick(BUSY_NODE_AFTER + 1.5)) == {}, "one at a time"


def test_an_infeasible_request_is_reported_once_and_served_when_nodes_come() -> None:
    view, scheduler = make(1, 2)
    wide = Shape((("CPU", 8 * UNIT),))
    effects = unmet(scheduler, 0.0, ME, 3, wide, 1)
    assert [type(e.msg) for e in effects if isinstance(e, Send)] == [Infeasible]
    message = effects[0].msg  # type: ignore[union-attr]
    assert isinstance(message, Infeasible) and message.scheduling_class == 3 and "{CPU: 8}" in message.reason
    assert unmet(scheduler, 0.1, ME, 3, wide, 2) == [] and scheduler.tick(1.0) == []
    assert scheduler.unmet_by_shape() == [
        {"resources": {"CPU": 8.0}, "strategy": "", "count": 2, "holders": 1, "feasible": False}
    ]
    view.nodes_joined([NodeInfo(2, "id2", "host2", "10.0.0.2", 1, to_units({"CPU": 8}), b"", "mpi", 0)])
    assert grants(scheduler.cluster_changed(2.0)) == {2: 1}


def test_what_was_on_its_way_to_a_dead_node_goes_elsewhere() -> None:
    view, scheduler = make(0, 4, 4)
    assert grants(unmet(scheduler, 0.0, ME, 0, CPU1, 2)) == {1: 2}
    view.node_died(1, "gone")
    assert grants(scheduler.node_died(0.1, 1)) == {2: 2}


def test_the_demand_of_a_dead_nodes_processes_is_forgotten() -> None:
    view, scheduler = make(0, 1, 4)
    unmet(scheduler, 0.0, make_proc(1, 3), 0, CPU1, 9)
    view.node_died(1, "gone")
    scheduler.node_died(0.1, 1)
    assert scheduler.unmet_by_shape() == []


def test_nodes_that_were_sent_something_for_a_dead_holder_hear_of_its_death() -> None:
    _, scheduler = make(4, 1, 1, 1)
    unmet(scheduler, 0.0, ME, 0, CPU1, 2)
    effects = scheduler.holder_died(ME, "killed by signal 9")
    assert [(e.dest, type(e.msg)) for e in effects if isinstance(e, Send)] == [
        (raylet_of(1), ProcDied),
        (raylet_of(2), ProcDied),
    ]
    assert scheduler.unmet_by_shape() == [] and scheduler.holder_died(ME, "again") == []


def reports(effects: list[Effect]) -> list[tuple[bytes, Infeasible]]:
    found = [(e.dest, e.msg) for e in effects if isinstance(e, Send) and isinstance(e.msg, Infeasible)]
    return [(dest, msg) for dest, msg in found if isinstance(msg, Infeasible)]


def test_a_long_wait_is_reported_with_what_every_node_has_free() -> None:
    view, scheduler = make(2, 2)
    busy(view, 0)
    view.apply_view(NodeView(1, 1, {"CPU": UNIT // 2}))
    unmet(scheduler, 0.0, ME, 3, CPU1, 2)
    assert reports(scheduler.tick(REPORT_AFTER - 1)) == []
    ((dest, report),) = reports(scheduler.tick(REPORT_AFTER + 1))
    assert dest == ME and report.scheduling_class == 3 and report.waits
    assert "a task asks for {CPU: 1}" in report.reason
    assert "node 0 (host0): {CPU: 0} of {CPU: 2}; node 1 (host1): {CPU: 0.5} of {CPU: 2}" in report.reason
    assert reports(scheduler.tick(REPORT_AFTER + 2)) == []


def test_demand_that_goes_down_is_not_reported_as_waiting() -> None:
    view, scheduler = make(2)
    busy(view, 0)
    told = []
    for second in range(30):
        unmet(scheduler, float(second), ME, 0, CPU1, 40 - second)
        told += reports(scheduler.tick(float(second)))
    assert told == []


def test_an_infeasible_request_is_not_reported_as_waiting_too() -> None:
    _, scheduler = make(2)
    told = reports(unmet(scheduler, 0.0, ME, 0, Shape((("CPU", 9 * UNIT),)), 1))
    for second in range(30):
        told += reports(scheduler.tick(float(second)))
    assert [report.waits for _, report in told] == [False]


def near(node: int) -> Shape:
    return Shape(CPU1.resources, f"near:{node}")


def lasts(view: ClusterResources, node: int, cpus: float, version: int) -> None:
    view.apply_view(NodeView(node, version, {"CPU": 0}, {}, to_units({"CPU": cpus})))


def test_work_queues_where_its_bytes_are_and_the_rest_goes_elsewhere_in_time() -> None:
    view, scheduler = make(4, 2, 2, 4)
    busy(view, 2)
    effects = unmet(scheduler, 0.0, ME, 0, near(2), 9)
    assert grants(effects) == {2: 2}, "as much as it can run at once, though it is busy"
    (grant,) = [e.msg for e in effects if isinstance(e, Send)]
    assert isinstance(grant, GrantLeases) and grant.shape.strategy == "node:2", "so that it may queue there"
    wait = scheduler._locality_wait
    assert grants(unmet(scheduler, wait / 2, ME, 0, near(2), 9)) == {}, "others must wait, idle or not"
    unmet(scheduler, wait - 0.1, ME, 0, near(2), 8)
    sent = grants(scheduler.tick(wait))
    assert sum(count for node, count in sent.items() if node != 2) == 8 - 2 - 2 * 2, "but for its next two rounds"


def test_work_near_its_own_node_is_left_to_that_at_first() -> None:
    view, scheduler = make(2, 4)
    busy(view, 0)
    assert grants(unmet(scheduler, 0.0, ME, 0, near(0), 9)) == {}
    assert grants(scheduler.tick(scheduler._locality_wait)) == {1: 4}, "nothing has begun there for long"


def test_work_that_its_near_node_has_not_begun_in_time_goes_elsewhere_at_once() -> None:
    """Its raylet had asked that node without the head."""
    view, scheduler = make(0, 2, 4)
    busy(view, 2)
    wait = scheduler._locality_wait
    assert grants(unmet(scheduler, 5.0, ME, 0, near(2), 9, False, wait, wait)) == {1: 2, 2: 2}
    assert grants(unmet(scheduler, 5.0, OTHER, 0, near(2), 1, False, wait / 2, 0.0)) == {2: 1}
    assert grants(unmet(scheduler, 5.0, OTHER, 1, near(2), 1, False, wait / 4, 0.0)) == {2: 1}
    assert [demand.began for demand in scheduler._impatient] == [5.0 - wait, 5.0 - wait / 2, 5.0 - wait / 4]


def test_work_near_a_node_that_cannot_serve_it_goes_elsewhere() -> None:
    view, scheduler = make(0, 2, 2)
    lasts(view, 1, 2, 1)
    assert grants(unmet(scheduler, 0.0, ME, 0, near(1), 2)) == {2: 2}, "actors have all of node 1"
    view, scheduler = make(0, 2, 2)
    view.node_died(1, "power cut")
    assert grants(unmet(scheduler, 0.0, ME, 0, near(1), 2)) == {2: 2}


def test_work_near_a_node_that_leaves_goes_elsewhere() -> None:
    view, scheduler = make(0, 2, 2)
    view.set_draining([1])
    assert grants(unmet(scheduler, 0.0, ME, 0, near(1), 2)) == {2: 2}


def test_work_that_prefers_a_node_which_leaves_goes_elsewhere_at_once() -> None:
    view, scheduler = make(0, 2, 2)
    view.set_draining([1])
    assert grants(unmet(scheduler, 0.0, ME, 0, Shape(CPU1.resources, "node:1:soft"), 2)) == {2: 2}
    view, scheduler = make(0, 2, 2)
    assert grants(unmet(scheduler, 0.0, ME, 0, Shape(CPU1.resources, "node:1:soft"), 2)) == {1: 2}
    view.set_draining([1])
    assert grants(scheduler.grant_refused(0.1, 1, GrantLeasesRefused(ME, 0, 2))) == {2: 2}, "it had queued there"


@pytest.mark.parametrize("strategy", ["node:1", "near:1"])
def test_a_node_that_refuses_at_once_what_may_queue_there_is_asked_again_at_the_next_tick(strategy: str) -> None:
    """It takes nothing. On the head's own node the two would send each other these messages without end."""
    _, scheduler = make(0, 2)
    assert grants(unmet(scheduler, 0.0, ME, 0, Shape(CPU1.resources, strategy), 2)) == {1: 2}
    assert grants(scheduler.grant_refused(0.0, 1, GrantLeasesRefused(ME, 0, 2))) == {}
    assert grants(unmet(scheduler, 0.1, ME, 0, Shape(CPU1.resources, strategy), 2)) == {}
    assert grants(scheduler.tick(0.5)) == {1: 2}


@pytest.mark.parametrize("strategy", ["node:1", "near:1"])
def test_what_a_node_returns_from_its_queue_goes_back_at_once(strategy: str) -> None:
    _, scheduler = make(0, 2)
    assert grants(unmet(scheduler, 0.0, ME, 0, Shape(CPU1.resources, strategy), 2)) == {1: 2}
    assert grants(scheduler.grant_refused(ASSIGNED_TIMEOUT, 1, GrantLeasesRefused(ME, 0, 2))) == {1: 2}


def test_a_request_queues_again_at_the_same_busy_node() -> None:
    view, scheduler = make(0, 4, 4, 4)
    busy(view, 1, 2, 3)
    unmet(scheduler, 0.0, ME, 0, CPU1, 1)
    found = set()
    for step in range(1, 20):
        effects = scheduler.tick(float(step))
        found |= grants(effects).keys()
        parked = [e.msg for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantLeases)]
        assert all(isinstance(msg, GrantLeases) and msg.absolute for msg in parked)
    assert len(found) == 1, "it is kept free for longer each time"


def told(effects: list[Effect]) -> dict[int, ResourceContention]:
    """What each node is told of those who wait."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return {node_of(send.dest): send.msg for send in sends if isinstance(send.msg, ResourceContention)}


class TestCrowd:
    """Nodes hear of work that finds no room, so that no lease idles meanwhile."""

    def test_no_contention_is_broadcast_while_there_is_room(self):
        _, scheduler = make(0, 4)
        assert told(unmet(scheduler, 0.0, ME, 0, CPU1, 4)) == {}
        assert told(scheduler.tick(GRANT_ARRIVES / 2)) == {}

    def test_contention_is_broadcast_once_of_one_holder_then_of_several(self):
        view, scheduler = make(0, 4)
        busy(view, 1)
        alone, many = ResourceContention(["CPU"], ME, 0), ResourceContention(["CPU"])
        assert told(unmet(scheduler, 0.0, ME, 0, CPU1, 9)) == {0: alone, 1: alone}
        assert told(unmet(scheduler, 0.0, ME, 0, CPU1, 12)) == {}
        assert told(unmet(scheduler, 0.1, OTHER, 0, CPU1, 1)) == {0: many, 1: many}
        assert told(unmet(scheduler, 0.2, OTHER, 1, CPU1, 1)) == {}

    def test_less_contention_is_broadcast_with_a_delay(self):
        view, scheduler = make(0, 4)
        busy(view, 1)
        unmet(scheduler, 0.0, ME, 0, CPU1, 1)
        unmet(scheduler, 0.0, OTHER, 0, CPU1, 1)
        assert told(unmet(scheduler, 0.1, ME, 0, CPU1, 0)) == {}
        assert told(scheduler.tick(0.5)) == {} == told(scheduler.tick(DECREASE_AFTER - 0.1))
        assert set(told(scheduler.tick(DECREASE_AFTER))) == {0, 1}

    def test_the_end_of_contention_is_broadcast_soon_but_not_again_and_again(self):
        nothing = {0: ResourceContention(), 1: ResourceContention()}
        view, scheduler = make(0, 4)
        busy(view, 1)
        unmet(scheduler, 0.0, ME, 0, CPU1, 1)
        assert told(unmet(scheduler, ENDED_AFTER, ME, 0, CPU1, 0)) == nothing
        assert told(scheduler.tick(2 * DECREASE_AFTER)) == {}
        began = 3 * DECREASE_AFTER
        busy(view, 1, version=2)
        assert told(unmet(scheduler, began, ME, 0, CPU1, 1))[1].lacking == ["CPU"]
        assert told(unmet(scheduler, began + ENDED_AFTER / 2, ME, 0, CPU1, 0)) == {}
        assert told(scheduler.tick(began + 0.5)) == nothing

    def test_many_nodes_hear_of_the_end_of_contention_as_of_its_decrease(self):
        view, scheduler = make(0, 4)
        for node in range(2, 1000):
            view.nodes[node] = view.nodes[1]
        busy(view, 1)
        unmet(scheduler, 0.0, ME, 0, CPU1, 1)
        assert told(unmet(scheduler, DECREASE_AFTER - 0.1, ME, 0, CPU1, 0)) == {}
        assert len(told(scheduler.tick(DECREASE_AFTER))) == 1000

    def test_a_refused_grant_counts_as_contention(self):
        _, scheduler = make(0, 4)
        unmet(scheduler, 0.0, ME, 0, CPU1, 1)
        scheduler._resources.apply_view(NodeView(1, 1, {"CPU": 0}))
        assert set(told(scheduler.grant_refused(0.0, 1, GrantLeasesRefused(ME, 0, 1)))) == {0, 1}

    def test_contention_names_what_lacks_but_not_for_requests_of_one_node(self):
        view, scheduler = make(0, 4)
        view.apply_view(NodeView(1, 1, {"CPU": 4 * UNIT, "disk": 0}))
        view.nodes[1].total["disk"] = UNIT
        both = Shape((("CPU", UNIT), ("disk", UNIT)))
        assert told(unmet(scheduler, 0.0, ME, 0, both, 1))[1].lacking == ["disk"]
        busy(view, 1, version=2)
        bound = Shape((("CPU", UNIT),), "node:1")
        assert told(unmet(scheduler, 0.1, ME, 1, bound, 50)) == {}
        assert told(unmet(scheduler, 0.2, ME, 2, CPU1, 1))[0] == ResourceContention(["CPU", "disk"])

    def test_an_infeasible_request_causes_no_contention(self):
        _, scheduler = make(0, 4)
        assert told(unmet(scheduler, 0.0, ME, 0, Shape((("GPU", UNIT),)), 1)) == {}


def test_a_node_with_room_is_compared_with_few_kinds_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of kinds wait for their one node each: they are no reason to look at them whenever another one grows."""
    nodes = 300
    view, scheduler = make(*[1.0] * nodes)
    for node in range(nodes):
        busy(view, node)
        unmet(scheduler, 0.0, ME, node, near(node), 2)  # one more than the node can run at once
    shared: list[Shape] = []
    share = ClusterScheduler._share

    def counted(self: ClusterScheduler, now: float, shape: Shape, only: int | None, out: list[Effect]) -> None:
        shared.append(shape)
        share(self, now, shape, only, out)

    monkeypatch.setattr(ClusterScheduler, "_share", counted)
    unmet(scheduler, 0.5, ME, nodes, CPU1, 1)
    view.apply_view(NodeView(7, 2, {"CPU": UNIT}))
    assert grants(scheduler.node_grew(0.5, 7)) == {7: 1} and shared == [CPU1]
    shared.clear()
    view.apply_view(NodeView(8, 2, {"CPU": UNIT}))
    assert grants(scheduler.node_grew(1.5, 8)) == {8: 1}, "whoever has waited for so long may run anywhere"
    assert len(shared) == 1 and shared[0] != near(8)


def test_a_node_with_room_serves_groups_that_have_bundles_there() -> None:
    view, scheduler = make(4, 4)
    group = "ab" * 13
    bundle = {"CPU": UNIT}
    view.bundle_came(1, group, 0, bundle)
    wanted = Shape(((f"CPU_group_{group}", UNIT),), GROUP)
    view.apply_view(NodeView(1, 1, {}, {f"CPU_group_{group}": 0}))
    assert grants(unmet(scheduler, 0.0, ME, 0, wanted, 1)) == {}
    assert grants(scheduler.node_grew(0.1, 0)) == {}
    view.apply_view(NodeView(1, 2, {}, {f"CPU_group_{group}": UNIT}))
    assert grants(scheduler.node_grew(0.2, 1)) == {1: 1}


def test_a_node_with_room_for_one_is_not_offered_to_all_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    view, scheduler = make(0, 4)
    busy(view, 1)
    holders = [make_proc(0, 100 + n) for n in range(10 * DEMANDS_AT_ONCE)]
    for holder in holders:
        unmet(scheduler, 0.0, holder, 0, CPU1, 1)
    looked_at = 0
    place = scheduler._place

    def counted(*args: Any) -> int:
        nonlocal looked_at
        looked_at += 1
        return place(*args)

    monkeypatch.setattr(scheduler, "_place", counted)
    served: list[bytes] = []
    for version in range(2, 6):
        view.apply_view(NodeView(1, version, {"CPU": UNIT}))
        effects = scheduler.node_grew(0.0, 1)
        served += [e.msg.holder for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantLeases)]
    assert served == holders[:4], "in the order in which they came"
    assert looked_at <= 2 * 4


def test_all_who_wait_are_offered_a_node_though_the_first_of_them_may_not_use_it() -> None:
    """What is free on its own node a process's raylet gives it, not the head."""
    view, scheduler = make(4, 0)
    busy(view, 0)
    for n in range(3 * DEMANDS_AT_ONCE):
        unmet(scheduler, 0.0, make_proc(0, 100 + n), 0, CPU1, 1)
    unmet(scheduler, 0.0, make_proc(1, 5), 0, CPU1, 2)
    view.apply_view(NodeView(0, 2, {"CPU": 3 * UNIT}))
    effects = scheduler.node_grew(0.0, 0)
    assert [(e.msg.holder, e.msg.count) for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantLeases)] == [
        (make_proc(1, 5), 2)
    ]
