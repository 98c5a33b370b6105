"""Unmet demand at the head: crossing messages, refusals, deaths, and requests that only a busy node can serve."""

from __future__ import annotations

from hpcray.base.ids import make_proc, node_of, raylet_of
from hpcray.base.resources import to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.scheduler.cluster import BOUND_SETTLE, PARK_AFTER, SETTLE, ClusterScheduler
from hpcray.core.scheduler.crowd import STAYS
from hpcray.core.scheduler.placement import ClusterView
from hpcray.core.scheduler.telling import REPORT_AFTER
from hpcray.wire.messages import (
    GrantFor,
    GrantRefused,
    Infeasible,
    NodeInfo,
    NodeView,
    OthersWait,
    ProcDied,
    Shape,
    Unmet,
)

UNIT = 10_000
CPU1 = Shape((("CPU", UNIT),))
ME = make_proc(0, 5)
OTHER = make_proc(0, 6)


def make(*cpus: float) -> tuple[ClusterView, ClusterScheduler]:
    view = ClusterView()
    view.up(
        NodeInfo(n, f"id{n}", f"host{n}", f"10.0.0.{n}", 1, to_units({"CPU": c}), b"", "mpi", 0)
        for n, c in enumerate(cpus)
    )
    return view, ClusterScheduler(view)


def grants(effects: list[Effect]) -> dict[int, int]:
    """How many leases each node is asked for."""
    out: dict[int, int] = {}
    for effect in effects:
        assert isinstance(effect, Send)
        if isinstance(effect.msg, GrantFor):
            node = node_of(effect.dest)
            assert node not in out, "one message per node would do"
            out[node] = effect.msg.count
    return out


def busy(view: ClusterView, *nodes: int, version: int = 1) -> None:
    for node in nodes:
        view.update(NodeView(node, version, {"CPU": 0}))


def test_unmet_demand_goes_to_other_nodes() -> None:
    _, scheduler = make(4, 2, 2)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 3))) == {1: 2, 2: 1}
    assert scheduler.pending()[0]["count"] == 3


def test_demand_is_sent_once_while_reports_repeat_themselves() -> None:
    _, scheduler = make(0, 8)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 3))) == {1: 3}
    assert grants(scheduler.unmet(0.1, Unmet(ME, 0, CPU1, 3))) == {}
    assert grants(scheduler.unmet(0.1, Unmet(ME, 0, CPU1, 5))) == {1: 2}
    assert grants(scheduler.unmet(0.2, Unmet(ME, 0, CPU1, 2))) == {}, "three of five have arrived"
    assert grants(scheduler.unmet(0.2, Unmet(ME, 0, CPU1, 3))) == {1: 1}


def test_what_the_report_hides_is_sent_again_after_a_while() -> None:
    """Grants arrive while as many new tasks are queued: the report stays the same, yet the demand is new."""
    _, scheduler = make(0, 8)
    scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 2))
    assert grants(scheduler.tick(SETTLE - 0.1)) == {}
    assert grants(scheduler.tick(SETTLE)) == {1: 2}


def test_refusals_go_elsewhere_and_not_back() -> None:
    _, scheduler = make(0, 4, 4)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 2))) == {1: 2}
    assert grants(scheduler.refused(0.0, 1, GrantRefused(ME, 0, 1))) == {2: 1}
    assert grants(scheduler.refused(0.0, 2, GrantRefused(ME, 0, 1))) == {}
    assert grants(scheduler.tick(0.5)) == {2: 1}, "after a while it is worth asking again"


def test_room_that_appears_is_shared_in_turn() -> None:
    view, scheduler = make(0, 4)
    busy(view, 1)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 9))) == {}
    assert grants(scheduler.unmet(0.0, Unmet(OTHER, 0, CPU1, 9))) == {}
    assert view.update(NodeView(1, 2, {"CPU": 4 * UNIT}))
    effects = scheduler.node_grew(0.1, 1)
    counts = {e.msg.holder: e.msg.count for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantFor)}
    assert counts == {ME: 2, OTHER: 2}


def test_the_holders_own_node_is_left_to_its_raylet_but_for_spread() -> None:
    view, scheduler = make(4, 4)
    busy(view, 1)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 2))) == {}
    assert grants(scheduler.unmet(0.0, Unmet(ME, 1, Shape(CPU1.resources, "SPREAD"), 2))) == {0: 2}
    assert grants(scheduler.unmet(0.0, Unmet(ME, 2, Shape(CPU1.resources, "node:9:soft"), 1))) == {0: 1}


def test_affinity_queues_at_its_node_even_when_that_is_busy_and_not_too_much() -> None:
    view, scheduler = make(4, 2)
    busy(view, 1)
    hard = Shape(CPU1.resources, "node:1")
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, hard, 9))) == {1: 2}
    assert grants(scheduler.tick(SETTLE)) == {}, "it may queue there for longer"
    assert grants(scheduler.refused(2.0, 1, GrantRefused(ME, 0, 2))) == {1: 2}
    assert grants(scheduler.tick(2.0 + BOUND_SETTLE)) == {1: 2}
    effects = scheduler.unmet(6.0, Unmet(ME, 0, hard, 0))
    assert grants(effects) == {1: 0}, "what queues there is withdrawn"
    assert scheduler.pending() == []


def test_who_finds_no_room_for_long_queues_at_busy_nodes_in_turn() -> None:
    view, scheduler = make(0, 4, 4)
    busy(view, 1, 2)
    scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 9))
    scheduler.unmet(0.0, Unmet(OTHER, 0, CPU1, 9))
    assert grants(scheduler.tick(PARK_AFTER - 0.1)) == {}
    effects = scheduler.tick(PARK_AFTER)
    assert grants(effects) == {1: 1, 2: 1}
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.msg, GrantFor)
        assert effect.msg.shape.strategy == f"node:{node_of(effect.dest)}", "so that the node lets it queue"
    assert grants(scheduler.tick(PARK_AFTER + 1.5)) == {}, "one at a time"


def test_the_infeasible_is_named_once_and_served_when_nodes_come() -> None:
    view, scheduler = make(1, 2)
    wide = Shape((("CPU", 8 * UNIT),))
    effects = scheduler.unmet(0.0, Unmet(ME, 3, wide, 1))
    assert [type(e.msg) for e in effects if isinstance(e, Send)] == [Infeasible]
    message = effects[0].msg  # type: ignore[union-attr]
    assert isinstance(message, Infeasible) and message.klass == 3 and "{CPU: 8}" in message.reason
    assert scheduler.unmet(0.1, Unmet(ME, 3, wide, 2)) == [] and scheduler.tick(1.0) == []
    assert scheduler.pending() == [
        {"resources": {"CPU": 8.0}, "strategy": "", "count": 2, "holders": 1, "feasible": False}
    ]
    view.up([NodeInfo(2, "id2", "host2", "10.0.0.2", 1, to_units({"CPU": 8}), b"", "mpi", 0)])
    assert grants(scheduler.cluster_changed(2.0)) == {2: 1}


def test_what_was_on_its_way_to_a_dead_node_goes_elsewhere() -> None:
    view, scheduler = make(0, 4, 4)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 2))) == {1: 2}
    view.lost(1, "gone")
    assert grants(scheduler.node_died(0.1, 1)) == {2: 2}


def test_the_demand_of_a_dead_nodes_processes_is_forgotten() -> None:
    view, scheduler = make(0, 1, 4)
    scheduler.unmet(0.0, Unmet(make_proc(1, 3), 0, CPU1, 9))
    view.lost(1, "gone")
    scheduler.node_died(0.1, 1)
    assert scheduler.pending() == []


def test_nodes_that_were_sent_something_for_a_dead_holder_hear_of_its_death() -> None:
    _, scheduler = make(4, 1, 1, 1)
    scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 2))
    effects = scheduler.holder_died(ME, "killed by signal 9")
    assert [(e.dest, type(e.msg)) for e in effects if isinstance(e, Send)] == [
        (raylet_of(1), ProcDied),
        (raylet_of(2), ProcDied),
    ]
    assert scheduler.pending() == [] and scheduler.holder_died(ME, "again") == []


def reports(effects: list[Effect]) -> list[tuple[bytes, Infeasible]]:
    found = [(e.dest, e.msg) for e in effects if isinstance(e, Send) and isinstance(e.msg, Infeasible)]
    return [(dest, msg) for dest, msg in found if isinstance(msg, Infeasible)]


def test_who_waits_for_others_is_told_what_every_node_has_free() -> None:
    view, scheduler = make(2, 2)
    busy(view, 0)
    view.update(NodeView(1, 1, {"CPU": UNIT // 2}))
    scheduler.unmet(0.0, Unmet(ME, 3, CPU1, 2))
    assert reports(scheduler.tick(REPORT_AFTER - 1)) == []
    ((dest, report),) = reports(scheduler.tick(REPORT_AFTER + 1))
    assert dest == ME and report.klass == 3 and report.waits
    assert "a task asks for {CPU: 1}" in report.reason
    assert "node 0 (host0): {CPU: 0} of {CPU: 2}; node 1 (host1): {CPU: 0.5} of {CPU: 2}" in report.reason
    assert reports(scheduler.tick(REPORT_AFTER + 2)) == []


def test_demand_that_goes_down_waits_for_nobody() -> None:
    view, scheduler = make(2)
    busy(view, 0)
    told = []
    for second in range(30):
        scheduler.unmet(float(second), Unmet(ME, 0, CPU1, 40 - second))
        told += reports(scheduler.tick(float(second)))
    assert told == []


def test_what_is_impossible_is_not_told_twice() -> None:
    _, scheduler = make(2)
    told = reports(scheduler.unmet(0.0, Unmet(ME, 0, Shape((("CPU", 9 * UNIT),)), 1)))
    for second in range(30):
        told += reports(scheduler.tick(float(second)))
    assert [report.waits for _, report in told] == [False]


def near(node: int) -> Shape:
    return Shape(CPU1.resources, f"near:{node}")


def lasts(view: ClusterView, node: int, cpus: float, version: int) -> None:
    view.update(NodeView(node, version, {"CPU": 0}, {}, to_units({"CPU": cpus})))


def test_work_queues_where_its_bytes_are_and_the_rest_goes_elsewhere_in_time() -> None:
    view, scheduler = make(4, 2, 2, 4)
    busy(view, 2)
    effects = scheduler.unmet(0.0, Unmet(ME, 0, near(2), 9))
    assert grants(effects) == {2: 2}, "as much as it can run at once, though it is busy"
    (grant,) = [e.msg for e in effects if isinstance(e, Send)]
    assert isinstance(grant, GrantFor) and grant.shape.strategy == "node:2", "so that it may queue there"
    wait = scheduler.locality_wait
    assert grants(scheduler.unmet(wait / 2, Unmet(ME, 0, near(2), 9))) == {}, "others must wait, idle or not"
    scheduler.unmet(wait - 0.1, Unmet(ME, 0, near(2), 8))
    sent = grants(scheduler.tick(wait))
    assert sum(count for node, count in sent.items() if node != 2) == 8 - 2 - 2 * 2, "but for its next two rounds"


def test_work_near_its_own_node_is_left_to_that_at_first() -> None:
    view, scheduler = make(2, 4)
    busy(view, 0)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, near(0), 9))) == {}
    assert grants(scheduler.tick(scheduler.locality_wait)) == {1: 4}, "nothing has begun there for long"


def test_bytes_on_a_node_that_cannot_serve_keep_nobody() -> None:
    view, scheduler = make(0, 2, 2)
    lasts(view, 1, 2, 1)
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, near(1), 2))) == {2: 2}, "actors have all of node 1"
    view, scheduler = make(0, 2, 2)
    view.lost(1, "power cut")
    assert grants(scheduler.unmet(0.0, Unmet(ME, 0, near(1), 2))) == {2: 2}


def test_who_queues_at_a_busy_node_comes_back_to_it() -> None:
    view, scheduler = make(0, 4, 4, 4)
    busy(view, 1, 2, 3)
    scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 1))
    found = set()
    for step in range(1, 20):
        effects = scheduler.tick(float(step))
        found |= grants(effects).keys()
        parked = [e.msg for e in effects if isinstance(e, Send) and isinstance(e.msg, GrantFor)]
        assert all(isinstance(msg, GrantFor) and msg.parked for msg in parked)
    assert len(found) == 1, "it is kept free for longer each time"


def told(effects: list[Effect]) -> dict[int, OthersWait]:
    """What each node is told of those who wait."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return {node_of(send.dest): send.msg for send in sends if isinstance(send.msg, OthersWait)}


class TestCrowd:
    """Nodes hear of work that finds no room, so that no lease idles meanwhile."""

    def test_nobody_is_told_while_there_is_room(self):
        _, scheduler = make(0, 4)
        assert told(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 4))) == {}
        assert told(scheduler.tick(SETTLE / 2)) == {}

    def test_every_node_once_first_of_one_then_of_several(self):
        view, scheduler = make(0, 4)
        busy(view, 1)
        alone, many = OthersWait(["CPU"], ME, 0), OthersWait(["CPU"])
        assert told(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 9))) == {0: alone, 1: alone}
        assert told(scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 12))) == {}
        assert told(scheduler.unmet(0.1, Unmet(OTHER, 0, CPU1, 1))) == {0: many, 1: many}
        assert told(scheduler.unmet(0.2, Unmet(OTHER, 1, CPU1, 1))) == {}

    def test_that_it_is_over_with_a_delay(self):
        view, scheduler = make(0, 4)
        busy(view, 1)
        scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 1))
        scheduler.unmet(0.1, Unmet(ME, 0, CPU1, 0))
        assert told(scheduler.tick(0.5)) == {}
        assert told(scheduler.tick(STAYS)) == {0: OthersWait(), 1: OthersWait()}
        assert told(scheduler.tick(2 * STAYS)) == {}

    def test_refused_is_no_room_too(self):
        _, scheduler = make(0, 4)
        scheduler.unmet(0.0, Unmet(ME, 0, CPU1, 1))
        scheduler._view.update(NodeView(1, 1, {"CPU": 0}))
        assert set(told(scheduler.refused(0.0, 1, GrantRefused(ME, 0, 1)))) == {0, 1}

    def test_what_is_lacking_and_what_only_one_node_may_serve(self):
        view, scheduler = make(0, 4)
        view.update(NodeView(1, 1, {"CPU": 4 * UNIT, "disk": 0}))
        view.nodes[1].total["disk"] = UNIT
        both = Shape((("CPU", UNIT), ("disk", UNIT)))
        assert told(scheduler.unmet(0.0, Unmet(ME, 0, both, 1)))[1].lacking == ["disk"]
        busy(view, 1, version=2)
        bound = Shape((("CPU", UNIT),), "node:1")
        assert told(scheduler.unmet(0.1, Unmet(ME, 1, bound, 50))) == {}
        assert told(scheduler.unmet(0.2, Unmet(ME, 2, CPU1, 1)))[0] == OthersWait(["CPU", "disk"])

    def test_what_can_never_run_keeps_nothing_from_idling(self):
        _, scheduler = make(0, 4)
        assert told(scheduler.unmet(0.0, Unmet(ME, 0, Shape((("GPU", UNIT),)), 1))) == {}
