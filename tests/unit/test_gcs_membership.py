"""Gathering the ranks, heartbeats, deaths, the end."""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from hpcray.base.config import Config
from hpcray.base.ids import HEAD, raylet_of
from hpcray.core.effects import Send
from hpcray.core.gcs.membership import (
    AllIn,
    AllStopped,
    ClusterUp,
    HeadWatch,
    Membership,
    NodeLost,
    Outcome,
    StartFailed,
)
from hpcray.wire import messages as m

T = TypeVar("T")


def info(index: int, pid: int = 1) -> m.NodeInfo:
    return m.NodeInfo(index, f"id{index}", f"host{index}", "10.0.0.1", pid, {}, b"", "mpi", 0)


def hello(member: Membership, *ranks: int, now: float = 0.0) -> list[Outcome]:
    out: list[Outcome] = []
    for rank in ranks:
        out += member.handle(now, raylet_of(rank), m.NodeHello(info(rank)))
    return out


def up(size: int = 3, now: float = 0.0, **config: Any) -> Membership:
    member = Membership(size, "session", Config(**config), now)
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
    member = Membership(4, "session", Config(), 0.0)
    assert hello(member, *joined[:-1]) == [] and member.missing() == [joined[-1]]
    outcomes = hello(member, joined[-1])
    assert sent(outcomes, m.NodeTable) == [0, 1, 2, 3]
    assert [i.index for i in events(outcomes, AllIn)[0].nodes] == [0, 1, 2, 3]
    for rank in ready[:-1]:
        assert member.handle(0.0, raylet_of(rank), m.NodeReady(rank)) == []
    assert member.missing() == [ready[-1]]
    assert len(events(member.handle(0.0, raylet_of(ready[-1]), m.NodeReady(ready[-1])), ClusterUp)) == 1


def test_ranks_that_do_not_come_are_named_and_the_others_sent_home() -> None:
    member = Membership(4, "session", Config(start_timeout=5.0), 10.0)
    hello(member, 0, 2, now=11.0)
    assert member.tick(14.9) == []
    outcomes = member.tick(15.0)
    (failed,) = events(outcomes, StartFailed)
    assert "rank 1, rank 3 did not join within 5 s (2 of 4 ranks; in: 0 on host0, 2 on host2)" in failed.reason
    assert "hint:" in failed.reason and sent(outcomes, m.Stop) == [0, 2]
    assert member.tick(99.0) == [] and sent(hello(member, 1), m.Stop) == [1], "who comes too late goes home too"


def test_ranks_that_join_but_do_not_connect_are_named_with_their_host() -> None:
    member = Membership(2, "session", Config(start_timeout=5.0), 0.0)
    hello(member, 0, 1)
    member.handle(0.0, raylet_of(0), m.NodeReady(0))
    (failed,) = events(member.tick(5.0), StartFailed)
    assert "rank 1 (host host1, pid 1) joined but did not connect" in failed.reason


def test_two_processes_with_one_rank_are_an_error() -> None:
    member = Membership(2, "session", Config(), 0.0)
    hello(member, 0)
    assert hello(member, 0) == [], "the same again is harmless"
    (failed,) = events(member.handle(0.0, raylet_of(0), m.NodeHello(info(0, pid=2))), StartFailed)
    assert "two processes say they are rank 0" in failed.reason
    stray = Membership(2, "session", Config(), 0.0)
    assert "only 2 ranks" in events(hello(stray, 5), StartFailed)[0].reason


def test_a_death_during_start_up_fails_the_start() -> None:
    member = Membership(2, "session", Config(), 0.0)
    hello(member, 1)
    (failed,) = events(member.node_failed(0.0, 1, "send failed"), StartFailed)
    assert failed.reason == "rank 1 (host host1, pid 1) died during start-up: send failed"


def test_a_death_is_told_to_everybody_once() -> None:
    member = up(4)
    outcomes = member.node_failed(1.0, 2, "send failed")
    assert sent(outcomes, m.NodeDied) == [1, 3]
    assert events(outcomes, NodeLost) == [NodeLost(2, "host host2: send failed", 1)]
    assert member.node_failed(1.0, 2, "again") == []
    assert member.alive() == [0, 1, 3] and member.is_dead(2)
    assert events(member.node_failed(1.0, 1, "again"), NodeLost) == [NodeLost(1, "host host1: again", 2)]


def test_the_dead_who_speak_are_told_to_end() -> None:
    member = up()
    member.node_failed(1.0, 2, "cut off")
    assert sent(member.handle(2.0, raylet_of(2), m.Heartbeat(2)), m.Stop) == [2]
    assert member.alive() == [0, 1]


def test_silence_is_death() -> None:
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


def test_a_head_that_stood_still_blames_nobody() -> None:
    member = up(3, now=100.0, node_timeout=2.0)
    member.tick(100.5)
    assert events(member.tick(109.0), NodeLost) == [], "it was stopped: what came meanwhile has not been read yet"
    assert sent(member.tick(109.5), m.Heartbeat) == [1, 2]


def test_whoever_is_silent_for_half_the_time_is_suspected() -> None:
    member = up(2, node_timeout=2.0)
    for beat in range(1, 4):
        member.tick(beat / 2)
    assert list(member.suspects(1.5)) == [1]
    member.heard(1.6, 1)
    assert member.suspects(1.7) == {}


def test_a_slow_start_is_not_taken_for_silence() -> None:
    member = Membership(2, "session", Config(node_timeout=2.0), 0.0)
    hello(member, 0, 1, now=0.0)
    member.handle(1.0, raylet_of(1), m.NodeReady(1))
    for second in range(2, 50):
        assert sent(member.tick(second), m.Heartbeat) == [1], "it waits for the others, and shall not think us dead"
    member.handle(50.0, raylet_of(0), m.NodeReady(0))
    assert events(member.tick(50.5), NodeLost) == []


def complain(member: Membership, now: float, *pairs: tuple[int, int]) -> list[int]:
    """`(who, whom)` could not reach; the nodes that are dead a second later though all are heard of."""
    for who, whom in pairs:
        probe = member.handle(now, raylet_of(who), m.PeerFailed(whom, "broken"))
        assert sent(probe, m.Heartbeat) == ([whom] if not member.is_dead(whom) else [])
    lost: list[NodeLost] = []
    for beat in range(1, 9):
        for node in member.alive():
            member.heard(now + beat / 2, node)
        outcomes = member.tick(now + beat / 2)
        assert beat >= 2 or not events(outcomes, NodeLost), "the head may find out by itself who is dead"
        lost += events(outcomes, NodeLost)
    return [event.node for event in lost]


def test_of_two_that_cannot_reach_each_other_one_goes() -> None:
    assert complain(up(4), 1.0, (1, 2)) == [2]
    assert complain(up(4), 1.0, (1, 2), (2, 1)) == [2]


def test_who_can_reach_nobody_goes_and_not_all_the_others() -> None:
    member = up(5)
    assert complain(member, 1.0, (1, 2), (1, 3), (1, 4)) == [1]
    assert "cannot reach nodes 2, 3, 4" in member.dead[1]


def test_whom_nobody_can_reach_goes() -> None:
    assert complain(up(5), 1.0, (1, 3), (2, 3), (4, 3)) == [3]


def test_a_complaint_about_the_dead_is_old_news() -> None:
    member = up(4)
    member.node_failed(0.5, 2, "gone")
    assert complain(member, 1.0, (1, 2)) == []


def test_the_end_waits_for_everybody_and_carries_the_code() -> None:
    member = up()
    outcomes = member.stop(1.0, 7)
    assert sent(outcomes, m.Stop) == [0, 1, 2] and member.stop(1.0, 8) == []
    assert member.handle(1.1, raylet_of(1), m.NodeStopped(1)) == []
    assert member.handle(1.2, raylet_of(0), m.NodeStopped(0)) == []
    assert events(member.handle(1.3, raylet_of(2), m.NodeStopped(2)), AllStopped) == [AllStopped(7, [])]
    assert member.tick(9.0) == []


@given(st.permutations(range(3)), st.integers(1, 2))
def test_who_comes_after_the_end_began_is_sent_home_and_waited_for(order: list[int], early: int) -> None:
    member = Membership(3, "session", Config(), 0.0)
    first, late = order[:early], order[early:]
    hello(member, *first)
    assert sent(member.stop(1.0, 143), m.Stop) == sorted(first)
    for rank in late:
        assert member.handle(1.1, raylet_of(rank), m.NodeHello(info(rank))) == [Send(raylet_of(rank), m.Stop(143))]
    for rank in order[:-1]:
        assert member.handle(1.2, raylet_of(rank), m.NodeStopped(rank)) == []
    outcomes = member.handle(1.2, raylet_of(order[-1]), m.NodeStopped(order[-1]))
    assert events(outcomes, AllStopped) == [AllStopped(143, [])]
    assert sent(hello(member, 0, 1), m.Stop) == [0, 1], "nobody takes part in a job that has ended"


def test_the_end_does_not_wait_for_ever_nor_for_the_dead() -> None:
    member = up(stop_timeout=2.0)
    member.stop(1.0, 0)
    member.handle(1.0, raylet_of(0), m.NodeStopped(0))
    assert events(member.node_failed(1.1, 1, "gone"), NodeLost) != []
    assert member.tick(3.9) == []
    assert events(member.tick(4.0), AllStopped) == [AllStopped(0, [2])]


def test_the_head_is_watched_too() -> None:
    watch = HeadWatch(3, Config(head_timeout=2.0))
    for beat in range(20):
        effects, reason = watch.tick(beat / 2)
        assert [(e.dest, e.msg) for e in effects if isinstance(e, Send)] == [(HEAD, m.Heartbeat(3))]
        assert reason == "", "the head waits for others before it sends the table"
    watch.begin(10.0)
    watch.heard(10.5)
    assert [watch.tick(10.0 + beat / 2)[1] for beat in range(1, 6)] == [""] * 5
    assert "not heard of for 2.5 s" in watch.tick(13.0)[1]


def test_who_has_said_goodbye_does_not_die_of_it() -> None:
    member = up()
    member.stop(1.0, 0)
    member.handle(1.1, raylet_of(2), m.NodeStopped(2))
    assert member.node_failed(1.2, 2, "its connection closed") == []


def test_who_hears_nothing_from_the_head_asks_others() -> None:
    watch = HeadWatch(2, Config(head_timeout=4.0))
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


def test_a_head_that_speaks_again_settles_it() -> None:
    watch = HeadWatch(2, Config(head_timeout=4.0))
    watch.begin(0.0, range(3))
    for beat in range(1, 7):
        watch.tick(beat / 2)
    watch.heard_other(3.1)
    watch.heard(3.2)
    assert sent(list(watch.tick(3.5)[0]), m.Ping) == [] and watch.alone


def test_a_node_that_says_that_it_ends_is_dead_at_once() -> None:
    outcomes = up(4).handle(1.0, raylet_of(2), m.PeerFailed(2, "its template is gone"))
    assert events(outcomes, NodeLost) == [NodeLost(2, "host host2: its template is gone", 1)]
    assert sent(outcomes, m.NodeDied) == [1, 3]
