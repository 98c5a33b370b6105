"""The head's half of placement groups: who is asked what, and what becomes of answers that are late, bad or missing."""

from __future__ import annotations

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, make_proc, raylet_of
from hpcray.base.resources import to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.placement_groups import ANSWER_WITHIN
from hpcray.wire import messages as m

DRIVER = make_proc(0, 5)
GROUP = DRIVER + (7).to_bytes(5, "big")


def head_of(*cpus: float) -> HeadCore:
    head = HeadCore(Config())
    infos = [
        m.NodeInfo(n, f"id{n}", "h", f"10.0.0.{n}", 1, to_units({"CPU": c}), b"", "mpi", 0) for n, c in enumerate(cpus)
    ]
    head.cluster_up(0.0, "s", infos)
    return head


def create(head: HeadCore, *cpus: float, group: bytes = GROUP, strategy: str = "STRICT_SPREAD") -> list[Effect]:
    spec = m.GroupSpec(group, [to_units({"CPU": c}) for c in cpus], strategy, owner=DRIVER)
    return head.handle(0.0, DRIVER, m.CreateGroup(0, spec))


def sent(effects: list[Effect], kind: type) -> list[tuple[bytes, m.Message]]:
    return [(e.dest, e.msg) for e in effects if isinstance(e, Send) and isinstance(e.msg, kind)]


def states(effects: list[Effect]) -> list[str]:
    return [msg.state for _, msg in sent(effects, m.GroupState)]


def answer(head: HeadCore, node: int, attempt: int, ok: bool, now: float = 0.1) -> list[Effect]:
    return head.handle(now, raylet_of(node), m.BundlesPrepared(GROUP, attempt, ok))


def test_committed_when_all_have_said_yes() -> None:
    head = head_of(1, 1)
    asked = sent(create(head, 1, 1), m.PrepareBundles)
    assert [dest for dest, _ in asked] == [raylet_of(0), raylet_of(1)] and not any(msg.commit for _, msg in asked)
    assert answer(head, 0, 1, True) == []
    out = answer(head, 1, 1, True)
    assert [dest for dest, _ in sent(out, m.CommitBundles)] == [raylet_of(0), raylet_of(1)]
    assert states(out) == ["CREATED"]


def test_one_node_commits_at_once() -> None:
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


def test_silence_undoes_it_too() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    assert sent(head.tick(ANSWER_WITHIN - 1), m.ReturnBundles) == []
    out = head.tick(ANSWER_WITHIN + 1)
    assert [dest for dest, _ in sent(out, m.ReturnBundles)] == [raylet_of(0), raylet_of(1)]
    assert answer(head, 1, 1, True) == []


def test_removed_while_it_is_prepared() -> None:
    head = head_of(1, 1)
    create(head, 1, 1)
    out = head.handle(0.1, DRIVER, m.RemoveGroup(GROUP))
    assert len(sent(out, m.ReturnBundles)) == 2 and states(out) == ["REMOVED"]
    assert answer(head, 0, 1, True) == [] and answer(head, 1, 1, True) == []
    assert states(head.handle(0.2, DRIVER, m.WatchGroup(GROUP))) == ["REMOVED"]


def test_removed_before_it_is_known() -> None:
    head = head_of(1)
    assert head.handle(0.0, make_proc(1, 9), m.RemoveGroup(GROUP)) == []
    out = create(head, 1)
    assert states(out) == ["REMOVED"] and sent(out, m.PrepareBundles) == []


def test_a_node_that_dies_while_it_is_asked() -> None:
    head = head_of(1, 1, 1)
    create(head, 1, 1)
    answer(head, 0, 1, True)
    out = head.node_died(0.2, 1, "gone")
    assert [dest for dest, _ in sent(out, m.ReturnBundles)] == [raylet_of(0)]


def test_who_watches_ahead_of_the_creation_is_told() -> None:
    head = head_of(1)
    other = make_proc(0, 6)
    assert head.handle(0.0, other, m.WatchGroup(GROUP)) == []
    create(head, 1)
    assert {dest for dest, _ in sent(answer(head, 0, 1, True), m.GroupState)} == {DRIVER, other}


def test_a_task_for_a_removed_group_is_told() -> None:
    head = head_of(1)
    create(head, 1)
    head.handle(0.1, DRIVER, m.RemoveGroup(GROUP))
    shape = m.Shape(((f"CPU_group_{GROUP.hex()}", 10_000), (f"bundle_group_{GROUP.hex()}", 10)), "group")
    out = head.handle(0.2, HEAD, m.Unmet(DRIVER, 3, shape, 5))
    assert [(dest, msg.state) for dest, msg in sent(out, m.GroupState)] == [(DRIVER, "REMOVED")]


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


def test_without_another_place_the_group_waits_for_one() -> None:
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
