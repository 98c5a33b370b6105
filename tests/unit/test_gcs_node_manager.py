"""Gathering the ranks, heartbeats, deaths, the end."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants_kit import check_after

from hpcray.common.config import Config
from hpcray.common.ids import HEAD, raylet_of
from hpcray.core.effects import Send
from hpcray.core.gcs.node_manager import (
    DEAD,
    NODE_TRANSITIONS,
    AllIn,
    AllStopped,
    ClusterUp,
    HeadFailureDetector,
    NodeLost,
    NodeManager,
    Outcome,
    StartFailed,
)
from hpcray.protocol import messages as m

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, NodeManager, ("handle", "node_failed", "stop", "tick", "resume"))


@pytest.fixture(autouse=True)
def _node_states_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("handle", "node_failed", "stop", "tick"):
        monkeypatch.setattr(NodeManager, name, _following_the_table(getattr(NodeManager, name)))


def _following_the_table(method: Any) -> Any:
    def checked(self: NodeManager, *args: Any, **named: Any) -> Any:
        before = [self.node_state(node) for node in range(self.size)]
        out = method(self, *args, **named)
        for node, old in enumerate(before):
            new = self.node_state(node)
            assert new == old or new in NODE_TRANSITIONS[old], f"node {node}: {old} -> {new}"
        return out

    return checked


def info(index: int, pid: int = 1) -> m.NodeInfo:
    return m.NodeInfo(index, f"id{index}", f"host{index}", "10.0.0.1", pid, {}, b"", "mpi", 0)


def hello(member: NodeManager, *ranks: int, now: float = 0.0) -> list[Outcome]:
    out: list[Outcome] = []
    for rank in ranks:
        out += member.handle(now, raylet_of(rank), m.RegisterNode(info(rank)))
    return out


def up(size: int = 3, now: float = 0.0, **config: Any) -> NodeManager:
    member = NodeManager(size, "session", Config(**config), now)
    hello(member, *range(size), now=now)
    for rank in range(size):
        member.handle(now, raylet_of(rank), m.NodeReady(rank))
    assert member.state == "up"
    return member


def events(outcomes: list[Outcome], kind: type[T]) -> list[T]:
    return [outcome for outcome in outcomes if isinstance(outcome, kind)]


def sent(outcomes: list[Outcome], kind: type) -> list[int]:
    """Nodes that get a message of this type."""
    return [e.dest[1] for e in outcomes if isinstance(e, Send) and isinstance(e.msg, kind)]


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_the_cluster_is_up_when_all_are_in_and_ready_in_any_order(joined: list[int], ready: list[int]) -> None:
    member = NodeManager(4, "session", Config(), 0.0)
    assert hello(member, *joined[:-1]) == [] and member.missing() == [joined[-1]]
    outcomes = hello(member, joined[-1])
    assert sent(outcomes, m.NodeTable) == [0, 1, 2, 3]
    assert [i.index for i in events(outcomes, AllIn)[0].nodes] == [0, 1, 2, 3]
    for rank in ready[:-1]:
        assert member.handle(0.0, raylet_of(rank), m.NodeReady(rank)) == []
    assert member.missing() == [ready[-1]]
    assert len(events(member.handle(0.0, raylet_of(ready[-1]), m.NodeReady(ready[-1])), ClusterUp)) == 1


def test_ranks_that_do_not_join_are_named_and_the_others_stopped() -> None:
    member = NodeManager(4, "session", Config(start_timeout=5.0), 10.0)
    hello(member, 0, 2, now=11.0)
    assert member.tick(14.9) == []
    outcomes = member.tick(15.0)
    (failed,) = events(outcomes, StartFailed)
    assert "rank 1, rank 3 did not join within 5 s (2 of 4 ranks; in: 0 on host0, 2 on host2)" in failed.reason
    assert "hint:" in failed.reason and sent(outcomes, m.Stop) == [0, 2]
    assert member.tick(99.0) == [] and sent(hello(member, 1), m.Stop) == [1], "who comes too late goes home too"


def test_ranks_that_join_but_do_not_connect_are_named_with_their_host() -> None:
    member = NodeManager(2, "session", Config(start_timeout=5.0), 0.0)
    hello(member, 0, 1)
    member.handle(0.0, raylet_of(0), m.NodeReady(0))
    (failed,) = events(member.tick(5.0), StartFailed)
    assert "rank 1 (host host1, pid 1) joined but did not connect" in failed.reason


def test_two_processes_with_one_rank_are_an_error() -> None:
    member = NodeManager(2, "session", Config(), 0.0)
    hello(member, 0)
    assert hello(member, 0) == [], "the same again is harmless"
    (failed,) = events(member.handle(0.0, raylet_of(0), m.RegisterNode(info(0, pid=2))), StartFailed)
    assert "two processes say they are rank 0" in failed.reason
    stray = NodeManager(2, "session", Config(), 0.0)
    assert "only 2 ranks" in events(hello(stray, 5), StartFailed)[0].reason


def test_a_death_during_start_up_fails_the_start() -> None:
    member = NodeManager(2, "session", Config(), 0.0)
    hello(member, 1)
    (failed,) = events(member.node_failed(0.0, 1, "send failed"), StartFailed)
    assert failed.reason == "rank 1 (host host1, pid 1) died during start-up: send failed"


def test_a_death_is_sent_to_every_node_once() -> None:
    member = up(4)
    outcomes = member.node_failed(1.0, 2, "send failed")
    assert sent(outcomes, m.NodeDied) == [1, 3]
    assert events(outcomes, NodeLost) == [NodeLost(2, "host host2: send failed", 1)]
    assert member.node_failed(1.0, 2, "again") == []
    assert member.alive() == [0, 1, 3] and member.node_state(2) == DEAD
    assert events(member.node_failed(1.0, 1, "again"), NodeLost) == [NodeLost(1, "host host1: again", 2)]


@pytest.mark.parametrize(
    ("ordered", "reason", "told"), [(False, "cut", "cut; why"), (False, "cut; why", "cut; why"), (True, "left", "left")]
)
def test_the_note_of_a_node_is_behind_the_reason_of_its_death_once(ordered: bool, reason: str, told: str) -> None:
    member = NodeManager(2, "session", Config(), 0.0)
    for rank in range(2):
        member.handle(0.0, raylet_of(rank), m.RegisterNode(msgspec.structs.replace(info(rank), note="; why")))
    for rank in range(2):
        member.handle(0.0, raylet_of(rank), m.NodeReady(rank))
    outcomes = member.node_left(1.0, 1, reason, ()) if ordered else member.node_failed(1.0, 1, reason)
    assert [lost.reason for lost in events(outcomes, NodeLost)] == [f"host host1: {told}"]


def test_dead_nodes_that_send_messages_are_stopped() -> None:
    member = up()
    member.node_failed(1.0, 2, "cut off")
    assert sent(member.handle(2.0, raylet_of(2), m.Heartbeat(2)), m.Stop) == [2]
    assert member.alive() == [0, 1]


def test_a_node_that_is_silent_for_the_timeout_is_dead() -> None:
    member = up(3, now=100.0, node_timeout=2.0)
    assert sent(member.tick(100.5), m.Heartbeat) == [1, 2]
    for beat in range(1, 5):
        member.handle(100.5 + beat / 2, raylet_of(1), m.Heartbeat(1))
        outcomes = member.tick(100.5 + beat / 2)
    (lost,) = events(outcomes, NodeLost)
    assert lost == NodeLost(2, "host host2: it was not heard of for 2.5 s", 1)
    assert sent(outcomes, m.NodeDied) == [1] and sent(outcomes, m.Heartbeat) == [1]
    member.heard(102.6, 1)
    for beat in range(4):
        assert events(member.tick(103.0 + beat / 2), NodeLost) == []


def test_a_head_that_stood_still_declares_no_node_dead() -> None:
    member = up(3, now=100.0, node_timeout=2.0)
    member.tick(100.5)
    assert events(member.tick(109.0), NodeLost) == [], "it was stopped: what came meanwhile has not been read yet"
    assert sent(member.tick(109.5), m.Heartbeat) == [1, 2]


def test_a_node_that_is_silent_for_half_the_timeout_is_suspected() -> None:
    member = up(2, node_timeout=2.0)
    for beat in range(1, 4):
        member.tick(beat / 2)
    assert list(member.suspects(1.5)) == [1]
    member.heard(1.6, 1)
    assert member.suspects(1.7) == {}


def test_a_slow_start_is_not_taken_for_silence() -> None:
    member = NodeManager(2, "session", Config(node_timeout=2.0), 0.0)
    hello(member, 0, 1, now=0.0)
    member.handle(1.0, raylet_of(1), m.NodeReady(1))
    for second in range(2, 50):
        assert sent(member.tick(second), m.Heartbeat) == [1], "it waits for the others, and shall not think us dead"
    member.handle(50.0, raylet_of(0), m.NodeReady(0))
    assert events(member.tick(50.5), NodeLost) == []


def complain(member: NodeManager, now: float, *pairs: tuple[int, int]) -> list[int]:
    """`(who, whom)` could not reach; the nodes that are dead a second later though all are heard of."""
    for who, whom in pairs:
        probe = member.handle(now, raylet_of(who), m.PeerFailed(whom, "broken"))
        assert sent(probe, m.Heartbeat) == ([whom] if member.node_state(whom) != DEAD else [])
    lost: list[NodeLost] = []
    for beat in range(1, 9):
        for node in member.alive():
            member.heard(now + beat / 2, node)
        outcomes = member.tick(now + beat / 2)
        assert beat >= 2 or not events(outcomes, NodeLost), "the head may find out by itself who is dead"
        lost += events(outcomes, NodeLost)
    return [event.node for event in lost]


def test_one_of_two_nodes_that_cannot_reach_each_other_is_declared_dead() -> None:
    assert complain(up(4), 1.0, (1, 2)) == [2]
    assert complain(up(4), 1.0, (1, 2), (2, 1)) == [2]


def test_a_node_that_can_reach_no_other_is_declared_dead_and_the_others_stay() -> None:
    member = up(5)
    assert complain(member, 1.0, (1, 2), (1, 3), (1, 4)) == [1]
    assert "cannot reach nodes 2, 3, 4" in member.dead[1]


def test_a_node_that_no_other_can_reach_is_declared_dead() -> None:
    assert complain(up(5), 1.0, (1, 3), (2, 3), (4, 3)) == [3]


def test_an_accusation_of_a_dead_node_is_ignored() -> None:
    member = up(4)
    member.node_failed(0.5, 2, "gone")
    assert complain(member, 1.0, (1, 2)) == []


def test_the_end_of_a_job_waits_for_all_nodes_and_has_the_exit_code() -> None:
    member = up()
    outcomes = member.stop(1.0, 7)
    assert sent(outcomes, m.Stop) == [0, 1, 2] and member.stop(1.0, 8) == []
    assert member.handle(1.1, raylet_of(1), m.NodeStopped(1)) == []
    assert member.handle(1.2, raylet_of(0), m.NodeStopped(0)) == []
    assert events(member.handle(1.3, raylet_of(2), m.NodeStopped(2)), AllStopped) == [AllStopped(7, [])]
    assert member.tick(9.0) == []


@given(st.permutations(range(3)), st.integers(1, 2))
def test_a_rank_that_joins_after_the_end_began_is_stopped_and_waited_for(order: list[int], early: int) -> None:
    member = NodeManager(3, "session", Config(), 0.0)
    first, late = order[:early], order[early:]
    hello(member, *first)
    assert sent(member.stop(1.0, 143), m.Stop) == sorted(first)
    for rank in late:
        assert member.handle(1.1, raylet_of(rank), m.RegisterNode(info(rank))) == [Send(raylet_of(rank), m.Stop(143))]
    for rank in order[:-1]:
        assert member.handle(1.2, raylet_of(rank), m.NodeStopped(rank)) == []
    outcomes = member.handle(1.2, raylet_of(order[-1]), m.NodeStopped(order[-1]))
    assert events(outcomes, AllStopped) == [AllStopped(143, [])]
    assert sent(hello(member, 0, 1), m.Stop) == [0, 1], "nobody takes part in a job that has ended"


def test_the_end_of_a_job_waits_neither_for_ever_nor_for_dead_nodes() -> None:
    member = up(stop_timeout=2.0)
    member.stop(1.0, 0)
    member.handle(1.0, raylet_of(0), m.NodeStopped(0))
    assert events(member.node_failed(1.1, 1, "gone"), NodeLost) != []
    assert member.tick(3.9) == []
    assert events(member.tick(4.0), AllStopped) == [AllStopped(0, [2])]


def test_a_silent_head_is_detected_by_the_other_nodes() -> None:
    watch = HeadFailureDetector(3, Config(head_timeout=2.0))
    for beat in range(20):
        effects, reason = watch.tick(beat / 2)
        assert [(e.dest, e.msg) for e in effects if isinstance(e, Send)] == [(HEAD, m.Heartbeat(3))]
        assert reason == "", "the head waits for others before it sends the table"
    watch.begin(10.0)
    watch.heard(10.5)
    assert [watch.tick(10.0 + beat / 2)[1] for beat in range(1, 6)] == [""] * 5
    assert "not heard of for 2.5 s" in watch.tick(13.0)[1]


def test_a_node_that_has_stopped_is_not_declared_dead() -> None:
    member = up()
    member.stop(1.0, 0)
    member.handle(1.1, raylet_of(2), m.NodeStopped(2))
    assert member.node_failed(1.2, 2, "its connection closed") == []


def test_a_node_that_hears_nothing_of_the_head_pings_others() -> None:
    watch = HeadFailureDetector(2, Config(head_timeout=4.0))
    watch.begin(0.0, range(5))
    asked: list[int] = []
    for beat in range(1, 9):
        effects, reason = watch.tick(beat / 2)
        asked = sent(list(effects), m.Ping)
        assert reason == "" and asked == ([3, 4, 1] if beat > 4 else [])
    assert watch.alone
    watch.heard_other(1.0)
    assert watch.alone, "that was before the silence"
    watch.heard_other(4.1)
    assert not watch.alone and watch.tick(4.5)[1] != ""


def test_a_head_whose_heartbeats_come_again_is_not_suspected() -> None:
    watch = HeadFailureDetector(2, Config(head_timeout=4.0))
    watch.begin(0.0, range(3))
    for beat in range(1, 7):
        watch.tick(beat / 2)
    watch.heard_other(3.1)
    watch.heard(3.2)
    assert sent(list(watch.tick(3.5)[0]), m.Ping) == [] and watch.alone


def test_a_node_that_reports_its_own_failure_is_dead_at_once() -> None:
    outcomes = up(4).handle(1.0, raylet_of(2), m.PeerFailed(2, "its template is gone"))
    assert events(outcomes, NodeLost) == [NodeLost(2, "host host2: its template is gone", 1)]
    assert sent(outcomes, m.NodeDied) == [1, 3]
