"""The head's half of placement groups: who is asked what, and what becomes of answers that are late, bad or missing."""

from __future__ import annotations

import pytest
from invariants_kit import GCS_EVENTS, check_after

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, make_proc, node_of, raylet_of
from hpcray.common.resources import GROUP as IN_GROUP
from hpcray.common.resources import names_in, to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.placement_group_manager import ANSWER_TIMEOUT, LARGE_CLUSTER
from hpcray.protocol import messages as m

DRIVER = make_proc(0, 5)
GROUP = DRIVER + (7).to_bytes(5, "big")


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gcs, GCS_EVENTS)


def head_of(*cpus: float) -> Gcs:
    head = Gcs(Config())
    infos = [
        m.NodeInfo(n, f"id{n}", "h", f"10.0.0.{n}", 1, to_units({"CPU": c}), b"", "mpi", 0) for n, c in enumerate(cpus)
    ]
    head.cluster_up(0.0, "s", infos)
    return head


def create(head: Gcs, *cpus: float, group: bytes = GROUP, strategy: str = "STRICT_SPREAD") -> list[Effect]:
    spec = m.GroupSpec(group, [to_units({"CPU": c}) for c in cpus], strategy, owner=DRIVER)
    return head.handle(0.0, DRIVER, m.CreateGroup(0, spec))


def sent(effects: list[Effect], kind: type) -> list[tuple[bytes, m.Message]]:
    return [(e.dest, e.msg) for e in effects if isinstance(e, Send) and isinstance(e.msg, kind)]


def states(effects: list[Effect]) -> list[str]:
    return [msg.state for _, msg in sent(effects, m.PlacementGroupStateUpdate)]


def answer(head: Gcs, node: int, attempt: int, ok: bool, now: float = 0.1) -> list[Effect]:
    return head.handle(now, raylet_of(node), m.BundlesPrepared(GROUP, attempt, ok))


def test_a_group_is_committed_when_all_nodes_have_prepared() -> None:
    head = head_of(1, 1)
    asked = sent(create(head, 1, 1), m.PrepareBundles)
    assert [dest for dest, _ in asked] == [raylet_of(0), raylet_of(1)] and not any(msg.commit for _, msg in asked)
    assert answer(head, 0, 1, True) == []
    out = answer(head, 1, 1, True)
    assert [dest for dest, _ in sent(out, m.CommitBundles)] == [raylet_of(0), raylet_of(1)]
    assert states(out) == ["CREATED"]


def test_bundles_on_one_node_are_committed_at_once() -> None:
    head = head_of(2)
    ((_, msg),) = sent(create(head, 1, 1, strategy="PACK"), m.PrepareBundles)
    assert msg.commit and states(answer(head, 0, 1, True)) == ["CREATED"]


def test_a_refusal_undoes_the_others_and_late_answers_count_for_nothing() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    out = answer(head, 0, 1, False)
    assert [dest for dest, _ in sent(out, m.ReturnBundles)] == [raylet_of(1)]
    assert answer(head, 1, 1, True) == []
    out = head.tick(0.5)
    assert sent(out, m.PrepareBundles) == []  # as far as the head knows the nodes have nothing left
    for node in (0, 1):
        out = head.handle(0.6, raylet_of(node), m.NodeView(node, 1, to_units({"CPU": 1})))
    assert {msg.attempt for _, msg in sent(out, m.PrepareBundles)} == {2}
    assert answer(head, 0, 1, True) == [] and answer(head, 1, 1, True) == []
    answer(head, 0, 2, True)
    assert states(answer(head, 1, 2, True)) == ["CREATED"]


def test_a_group_that_loses_another_bundle_during_an_attempt_is_not_created_by_the_attempt_s_answer() -> None:
    head = head_of(1, 1, 1, 1, 1)
    create(head, 1, 1, 1)
    for node in (0, 1, 2):
        answer(head, node, 1, True)
    group = head.groups.find(GROUP)
    assert group is not None and group.state == "CREATED"
    first = head.node_died(1.0, 1, "crashed")
    assert [dest for dest, _ in sent(first, m.PrepareBundles)] == [raylet_of(3)]
    assert sent(head.node_died(1.1, 2, "crashed"), m.PrepareBundles) == []
    second = answer(head, 3, 2, True, 1.2)
    assert states(second) == [] and (group.state, sorted(group.nodes)) == ("RESCHEDULING", [-1, 0, 3])
    assert [dest for dest, _ in sent(second, m.PrepareBundles)] == [raylet_of(4)]
    assert states(answer(head, 4, 3, True, 1.3)) == ["CREATED"] and sorted(group.nodes) == [0, 3, 4]


def test_an_attempt_without_answers_is_undone_after_the_timeout() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    assert sent(head.tick(ANSWER_TIMEOUT - 1), m.ReturnBundles) == []
    out = head.tick(ANSWER_TIMEOUT + 1)
    assert [dest for dest, _ in sent(out, m.ReturnBundles)] == [raylet_of(0), raylet_of(1)]
    assert answer(head, 1, 1, True) == []


def test_a_group_can_be_removed_while_it_is_prepared() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    out = head.handle(0.1, DRIVER, m.RemoveGroup(GROUP))
    assert len(sent(out, m.ReturnBundles)) == 2 and states(out) == ["REMOVED"]
    assert answer(head, 0, 1, True) == [] and answer(head, 1, 1, True) == []
    assert states(head.handle(0.2, DRIVER, m.WatchGroup(GROUP))) == ["REMOVED"]


def test_a_group_can_be_removed_before_it_is_registered() -> None:
    head = head_of(1)
    assert head.handle(0.0, make_proc(1, 9), m.RemoveGroup(GROUP)) == []
    out = create(head, 1)
    assert states(out) == ["REMOVED"] and sent(out, m.PrepareBundles) == []


def test_an_attempt_is_undone_when_one_of_its_nodes_dies() -> None:
    head = head_of(1, 1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    out = head.node_died(0.2, 1, "gone")
    assert [dest for dest, _ in sent(out, m.ReturnBundles)] == [raylet_of(0)]


def test_a_watcher_ahead_of_the_group_s_creation_gets_its_states() -> None:
    head = head_of(1)
    other = make_proc(0, 6)
    assert head.handle(0.0, other, m.WatchGroup(GROUP)) == []
    create(head, 1)
    assert {dest for dest, _ in sent(answer(head, 0, 1, True), m.PlacementGroupStateUpdate)} == {DRIVER, other}


def test_the_holder_of_a_request_in_a_removed_group_gets_its_state() -> None:
    head = head_of(1)
    create(head, 1)
    head.handle(0.1, DRIVER, m.RemoveGroup(GROUP))
    shape = m.Shape(((f"CPU_group_{GROUP.hex()}", 10_000), (f"bundle_group_{GROUP.hex()}", 10)), "group")
    out = head.handle(0.2, HEAD, m.UnmetLeaseRequest(DRIVER, 3, shape, 5))
    assert [(dest, msg.state) for dest, msg in sent(out, m.PlacementGroupStateUpdate)] == [(DRIVER, "REMOVED")]


def test_bundles_of_a_dead_node_get_another_place_and_the_others_stay() -> None:
    head = head_of(1, 1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    assert states(answer(head, 1, 1, True)) == ["CREATED"]
    out = head.node_died(1.0, 1, "gone")
    assert states(out) == ["RESCHEDULING"]
    ((dest, asked),) = sent(out, m.PrepareBundles)
    assert dest == raylet_of(2) and list(asked.bundles) == [1] and asked.attempt == 2
    assert sent(out, m.ReturnBundles) == [], "what lives in the other bundle goes on"
    assert states(answer(head, 2, 2, True, 1.1)) == ["CREATED"]


def test_a_group_whose_lost_bundle_fits_nowhere_waits_for_a_node() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    answer(head, 1, 1, True)
    assert states(head.node_died(1.0, 1, "gone")) == ["RESCHEDULING"]
    assert states(head.tick(30.0)) == [] and states(head.handle(31.0, DRIVER, m.WatchGroup(GROUP))) == ["RESCHEDULING"]


def test_an_actor_of_a_lost_bundle_restarts_in_it_when_it_has_a_place_again() -> None:
    head = head_of(1, 1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    answer(head, 1, 1, True)
    name = GROUP.hex()
    shape = m.Shape(((f"CPU_group_1_{name}", 10_000), (f"bundle_group_1_{name}", 10)), "group")
    spec = m.ActorSpec(
        DRIVER + (8).to_bytes(5, "big"), "A", b"c", b"", [], shape, shape, "", "ns", False, 1, 0, 1, {}
    )  # fmt: skip
    view = m.NodeView(1, 1, to_units({"CPU": 0}), dict(shape.resources))
    head.handle(0.2, raylet_of(1), view)
    out = head.handle(0.2, DRIVER, m.CreateActor(1, spec))
    assert [dest for dest, _ in sent(out, m.StartActor)] == [raylet_of(1)]
    head.handle(0.3, make_proc(1, 4), m.ActorReady(spec.actor, b"", []))
    out = head.node_died(1.0, 1, "gone")
    assert sent(out, m.StartActor) == []
    out = answer(head, 2, 2, True, 1.1)
    assert [dest for dest, _ in sent(out, m.StartActor)] == [raylet_of(2)]


def racks(*names: str) -> Gcs:
    head = Gcs(Config())
    infos = [
        m.NodeInfo(
            n, f"id{n}", "h", f"10.0.0.{n}", 1, to_units({"CPU": 1}), b"", "mpi", 0, {"rack": rack} if rack else {}
        )
        for n, rack in enumerate(names)
    ]
    head.cluster_up(0.0, "s", infos)
    return head


def asked_nodes(effects: list[Effect]) -> list[int]:
    return [node for node in range(9) for dest, _ in sent(effects, m.PrepareBundles) if dest == raylet_of(node)]


def state_of(head: Gcs) -> str:
    group = head.groups.find(GROUP)
    assert group is not None
    return head.groups.scheduling_state(group)


def test_a_group_of_one_label_value_is_on_nodes_of_one_value_and_moves_within_them() -> None:
    head = racks("a", "b", "b", "b")
    spec = m.GroupSpec(GROUP, [to_units({"CPU": 1})] * 2, "PACK", owner=DRIVER, same="rack")
    assert asked_nodes(head.handle(0.0, DRIVER, m.CreateGroup(0, spec))) == [1, 2]
    answer(head, 1, 1, True)
    assert states(answer(head, 2, 1, True)) == ["CREATED"] and state_of(head) == "FINISHED"
    assert asked_nodes(head.node_died(1.0, 2, "cut")) == [3]
    head.node_died(1.0, 3, "cut")
    head.tick(20.0)
    assert state_of(head) == "NO_RESOURCES", "node 0 has room, in another rack"
    assert asked_nodes(head.node_died(21.0, 1, "cut")) == []


def test_nodes_without_the_label_share_nothing_where_others_have_it() -> None:
    def asked(*given: str) -> list[int]:
        spec = m.GroupSpec(GROUP, [to_units({"CPU": 1})] * 2, "PACK", owner=DRIVER, same="rack")
        return asked_nodes(racks(*given).handle(0.0, DRIVER, m.CreateGroup(0, spec)))

    assert asked("", "", "b", "b") == [2, 3]
    assert asked("", "", "b") == []
    assert asked("", "") == [0, 1], "nothing is known: as if there were no topology_strategy"


def test_a_group_that_no_switch_can_hold_is_told_what_the_switches_have() -> None:
    spec = m.GroupSpec(GROUP, [to_units({"CPU": 1})] * 3, "PACK", "big", owner=DRIVER, same="rack")
    effects = racks("a", "b", "b", "").handle(0.0, DRIVER, m.CreateGroup(0, spec))
    (text,) = [str(effect) for effect in effects if "no place" in str(effect)]
    assert "3 x {CPU: 1} (PACK, on nodes with the same rack), for which there is no place" in text
    assert "hint: nodes by rack: a: 1, b: 2, none: 1; ask for less, or leave topology_strategy out; it waits" in text


def test_the_preferred_node_holds_a_group_where_it_has_room() -> None:
    head = head_of(2, 2, 1)
    for number, (preferred, node) in enumerate((("id1", 1), ("id2", 0), ("unknown", 0))):
        ident = DRIVER + number.to_bytes(5, "big")
        bundles = [to_units({"CPU": 1})] * 2
        spec = m.GroupSpec(ident, bundles, "STRICT_PACK", owner=DRIVER, preferred=preferred)
        assert asked_nodes(head.handle(0.0, DRIVER, m.CreateGroup(0, spec))) == [node]
        head.handle(0.1, DRIVER, m.RemoveGroup(ident))
        head.handle(0.2, raylet_of(node), m.NodeView(node, number + 1, to_units({"CPU": 2})))


def test_the_scheduling_state_of_a_group_is_that_of_its_last_attempt() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    assert state_of(head) == "SCHEDULING_STARTED"
    head.handle(0.1, DRIVER, m.RemoveGroup(GROUP))
    assert state_of(head) == "REMOVED"
    for number, cpus, state in ((8, (1, 1, 1), "NO_RESOURCES"), (9, (2,), "INFEASIBLE")):
        ident = DRIVER + number.to_bytes(5, "big")
        create(head, *cpus, group=ident)
        group = head.groups.find(ident)
        assert group is not None and head.groups.scheduling_state(group) == state


def test_raylets_of_a_large_cluster_learn_where_a_group_is_and_what_was_placed_since() -> None:
    others = [DRIVER + number.to_bytes(5, "big") for number in (8, 9)]
    for nodes in (LARGE_CLUSTER, LARGE_CLUSTER + 1):
        head = head_of(*[4.0] * nodes)

        def place(group: bytes, head: Gcs = head) -> int:
            ((dest, msg),) = sent(create(head, 1, group=group, strategy="PACK"), m.PrepareBundles)
            head.handle(0.1, dest, m.BundlesPrepared(group, msg.attempt, True))
            return node_of(dest)

        def request(group: bytes, count: int = 1, head: Gcs = head) -> list[m.Message]:
            shape = m.Shape(tuple(names_in(group.hex(), -1, to_units({"CPU": 1})).items()), IN_GROUP)
            out = head.handle(0.2, raylet_of(3), m.UnmetLeaseRequest(make_proc(3, 9), 0, shape, count))
            assert all(dest == raylet_of(3) for dest, _ in sent(out, m.PlacementGroupNodes))
            return [msg for _, msg in sent(out, m.PlacementGroupNodes)]

        first = place(GROUP)
        assert request(others[0]) == [], "it has no nodes yet"
        second = place(others[0])
        if nodes == LARGE_CLUSTER:
            assert request(GROUP) == [], "the head serves all of them"
            continue
        assert request(GROUP) == [m.PlacementGroupNodes([(GROUP, [first]), (others[0], [second])])]
        assert request(GROUP, 0) == []
        third = place(others[1])
        assert request(GROUP) == [m.PlacementGroupNodes([(GROUP, [first]), (others[1], [third])])]
        head.handle(0.3, DRIVER, m.RemoveGroup(GROUP))
        assert request(GROUP) == []
