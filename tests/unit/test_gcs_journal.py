"""A head that is made of another one's journal decides as that would have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.base.config import Config
from hpcray.base.ids import make_proc, node_of, raylet_of
from hpcray.base.resources import to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import actors as actor_table
from hpcray.core.gcs import early, notes
from hpcray.core.gcs.head import HeadCore
from hpcray.core.gcs.journal import LEAST, Replica, pieces
from hpcray.core.gcs.succession import SuccessorHead
from hpcray.wire import messages as m

NODES = 3
PROCS = [make_proc(node, number) for node in range(NODES) for number in (5, 6)]
NUMBERS = range(4)


def info(node: int) -> m.NodeInfo:
    total = to_units({"CPU": 4, f"n{node}": 1000})
    return m.NodeInfo(node, f"id{node}", f"host{node}", f"10.0.0.{node}", 1, total, b"", "mpi", 0)


def up() -> HeadCore:
    head = HeadCore(Config())
    head.cluster_up(0.0, "s", [info(node) for node in range(NODES)])
    return head


def spec(creator: int, number: int, node: int, detached: bool, named: bool, restarts: int) -> m.ActorSpec:
    nothing = m.Shape((), f"node:{node}")
    return m.ActorSpec(
        PROCS[creator] + number.to_bytes(5, "big"), "A", b"class", b"args", [], nothing, nothing,
        f"name{number}" if named else "", "ns", detached, restarts, 0, 1, {},
    )  # fmt: skip


def normal(effects: list[Effect], attempts: dict[bytes, int]) -> list[bytes]:
    """What was sent, in an order that says nothing; warnings are given again by a new head."""
    found = []
    for effect in effects:
        assert isinstance(effect, Send)
        msg = effect.msg
        if isinstance(msg, m.Infeasible):
            continue
        if isinstance(msg, m.PrepareBundles):
            attempts[msg.group] = msg.attempt
            msg = msgspec.structs.replace(msg, attempt=0)
        found.append(effect.dest + m.encode([msg]))
    return sorted(found)


class Side:
    """One head, whose nodes answer at once that they hold the bundles."""

    def __init__(self, head: HeadCore) -> None:
        self.head = head

    def do(self, name: str, *args: Any) -> list[list[bytes]]:
        attempts: dict[bytes, int] = {}
        out = getattr(self.head, name)(1.0, *args)
        said = [normal(out, attempts)]
        while asked := [e for e in out if isinstance(e, Send) and isinstance(e.msg, m.PrepareBundles)]:
            out = []
            for effect in asked:
                assert isinstance(effect.msg, m.PrepareBundles)
                answer = m.BundlesPrepared(effect.msg.group, effect.msg.attempt, True)
                out += self.head.handle(1.0, effect.dest, answer)
            said.append(normal(out, attempts))
        return said


def actor_of(creator: int, number: int) -> bytes:
    return PROCS[creator] + number.to_bytes(5, "big")


creators, numbers, nodes = st.sampled_from([0, 3]), st.sampled_from(NUMBERS), st.integers(0, NODES - 1)
sources = st.sampled_from(PROCS)
actors = st.builds(actor_of, creators, numbers)
groups = st.builds(actor_of, creators, numbers.map(lambda number: 100 + number))
workers = st.builds(make_proc, nodes, st.integers(20, 23))


def told(msg: Any, source: Any = sources) -> Any:
    return st.tuples(st.just("handle"), source, msg)


def from_worker(worker: bytes, actor: bytes, error: bytes) -> tuple[str, bytes, m.Message]:
    return "handle", worker, m.ActorReady(actor, error, [])


def is_gone(worker: bytes, actor: bytes, intended: bool) -> tuple[str, bytes, m.Message]:
    node = int.from_bytes(worker[:2], "big")
    return "handle", raylet_of(node), m.ActorGone(actor, worker, "killed by signal 9", intended)


specs = st.builds(
    lambda creator, number: spec(creator, number, number % NODES, creator == 3, number % 2 == 1, number - 1),
    creators, numbers,
)  # fmt: skip
group_specs = st.builds(
    lambda ident, on, named, owner: m.GroupSpec(
        ident, [{f"n{node}": 1} for node in on], "PACK", f"g{ident[-1]}" if named else "", "ns", owner
    ),
    groups, st.lists(nodes, min_size=1, max_size=3), st.booleans(), st.sampled_from([b"", *PROCS]),
)  # fmt: skip
texts = st.sampled_from([b"a", b"b", b"c"])
spaces = st.sampled_from(["", "x", "a\0b"])
asked = st.integers(1, 1 << 30)
put = st.builds(
    lambda number, *args: m.GcsCall(number, "kv_put", msgspec.msgpack.encode(args)),
    asked, texts, texts, st.booleans(), spaces,
)  # fmt: skip
delete = st.builds(
    lambda number, *args: m.GcsCall(number, "kv_del", msgspec.msgpack.encode(args)), asked, texts, spaces
)
job = st.builds(lambda text: m.SetJob(m.JobInfo("1", text, ("/a",), "/w")), st.sampled_from(["n1", "n2"]))
event = st.one_of(
    told(st.builds(m.CreateActor, st.just(7), specs, st.booleans())),
    told(st.builds(m.CreateActor, st.just(7), specs)),
    told(st.builds(m.WatchActor, actors)),
    told(st.builds(m.KillActor, actors, st.booleans(), st.just("it was killed"))),
    told(st.builds(m.ActorOutOfScope, actors)),
    st.builds(from_worker, workers, actors, st.sampled_from([b"", b"", b"error"])),
    st.builds(is_gone, workers, actors, st.booleans()),
    told(st.builds(m.StartActorRefused, actors, st.just("")), nodes.map(raylet_of)),
    told(st.builds(m.CreateGroup, st.just(8), group_specs)),
    told(st.builds(m.WatchGroup, groups)),
    told(st.builds(m.RemoveGroup, groups)),
    told(put), told(delete), told(job),
    st.tuples(st.just("process_died"), sources, st.just("killed by signal 9")),
)  # fmt: skip
deaths = st.tuples(st.just("node_died"), st.integers(1, NODES - 1), st.just("it was lost"))
history = st.lists(st.one_of(event, event, event, event, event, event, event, event, deaths), max_size=40)


def questions(head: HeadCore) -> list[Any]:
    """What anybody may ask."""
    calls: list[tuple[str, list[Any]]] = [
        ("nodes", []), ("actors", []), ("placement_groups", []), ("list_named_actors", [True, ""]),
        *(("named_actor", [f"name{number}", "ns"]) for number in NUMBERS),
        *(("kv_keys", [b"", space]) for space in ("", "x", "a\0b")),
        *(("kv_get", [b"a", space]) for space in ("", "x", "a\0b")),
    ]  # fmt: skip
    found: list[Any] = [head.job, head.session]
    for method, args in calls:
        (answer,) = head.handle(2.0, PROCS[0], m.GcsCall(1, method, msgspec.msgpack.encode(args)))
        assert isinstance(answer, Send) and isinstance(answer.msg, m.GcsReply)
        value = msgspec.msgpack.decode(answer.msg.value) if answer.msg.ok else answer.msg.value
        if method == "placement_groups":
            value = [{**row, "attempts": 0} for row in value]
        found.append(sorted(value, key=repr) if isinstance(value, list) else value)
    return found


class Dead:
    """Who says nothing any more."""

    def __init__(self) -> None:
        self.nodes: set[int] = set()
        self.procs: set[bytes] = set()

    def may(self, name: str, subject: Any) -> bool:
        """Whether an event can come still, which it then does."""
        if name == "node_died":
            new = subject not in self.nodes
            self.nodes.add(subject)
            return new
        alive = subject not in self.procs and node_of(subject) not in self.nodes
        if name == "process_died":
            self.procs.add(subject)
        return alive


@settings(max_examples=60, deadline=None)
@given(history, history, st.booleans())
def test_a_restored_head_goes_on_as_the_first_one_would(before: Any, after: Any, compacted: bool) -> None:
    first, replica, dead = Side(up()), Replica(), Dead()
    replica.take(first.head.journal.begin(), whole=True)
    for name, *args in before:
        if dead.may(name, args[0]):
            first.do(name, *args)
            replica.take(first.head.journal.changes())
    if compacted:
        replica.take(first.head.journal.begin(), whole=True)
    second = Side(HeadCore(Config()))
    who = second.head.restore(1.0, replica)
    assert set(who.dead) == dead.nodes
    assert questions(second.head) == questions(first.head)
    for name, *args in after:
        if dead.may(name, args[0]):
            assert second.do(name, *args) == first.do(name, *args), (name, args)
    assert questions(second.head) == questions(first.head)


def restored(first: HeadCore, replica: Replica) -> HeadCore:
    replica.take(first.journal.changes())
    second = HeadCore(Config())
    second.restore(1.0, replica)
    return second


def test_what_was_killed_before_it_was_known_dies_on_arrival() -> None:
    head, replica = up(), Replica()
    replica.take(head.journal.begin(), whole=True)
    head.handle(1.0, PROCS[1], m.KillActor(actor_of(0, 1), True, "it was killed"))
    second = Side(restored(head, replica))
    second.do("handle", PROCS[0], m.CreateActor(1, spec(0, 1, 1, False, False, 0)))
    assert [row["state"] for row in questions(second.head)[3]] == ["DEAD"]


def test_the_arguments_of_a_constructor_that_came_later_are_kept() -> None:
    head, replica = up(), Replica()
    replica.take(head.journal.begin(), whole=True)
    whole = spec(0, 1, 1, True, True, 1)
    head.handle(1.0, PROCS[0], m.CreateActor(1, msgspec.structs.replace(whole, cls=b"", args=b""), ready=False))
    replica.take(head.journal.changes())
    head.handle(1.0, PROCS[0], m.CreateActor(0, whole))
    second = restored(head, replica)
    out = second.node_died(2.0, 1, "it was lost")
    assert out == head.node_died(2.0, 1, "it was lost")
    rows = dict(replica.of(notes.SPEC))
    assert msgspec.msgpack.decode(rows[whole.actor], type=m.ActorSpec) == whole


def test_what_changes_often_is_written_once_per_turn() -> None:
    head = up()
    head.journal.begin()
    for number, value in enumerate((b"1", b"2", b"3")):
        args = msgspec.msgpack.encode([b"key", value, True, ""])
        head.handle(1.0, PROCS[0], m.GcsCall(number, "kv_put", args))
    change, *answers = head.journal.changes()
    assert (change.table, change.row) == (notes.VALUE, b"3")
    assert [answer.table for answer in answers] == 3 * [notes.ANSWER]
    assert head.journal.changes() == []


def test_a_replica_forgets_who_watches_nothing_any_more() -> None:
    head, replica = up(), Replica()
    replica.take(head.journal.begin(), whole=True)
    head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, 1, 1, True, True, 0)))
    for number in range(2 * LEAST):
        proc = make_proc(2, 100 + number)
        head.handle(1.0, proc, m.WatchActor(actor_of(0, 1)))
        head.process_died(1.0, proc, "exit code 0")
        replica.take(head.journal.changes())
    assert len(list(replica.of(notes.WATCH))) < 2 * LEAST
    second = Side(restored(head, replica))
    assert questions(second.head) == questions(head)


def test_a_replica_forgets_who_watched_what_is_no_more() -> None:
    """A program that lives long and makes actors and groups all the time."""
    head, replica = up(), Replica()
    replica.take(head.journal.begin(), whole=True)
    for number in range(50):
        early = actor_of(0, 1000 + number)
        for msg in (
            m.CreateActor(1, spec(0, number, 1, False, False, 0)), m.KillActor(actor_of(0, number), True, "enough"),
            m.CreateGroup(2, m.GroupSpec(early, [{"n1": 1}], "PACK")), m.RemoveGroup(early),
            m.KillActor(early, True, "enough"), m.CreateActor(3, spec(0, 1000 + number, 1, False, False, 0)),
        ):  # fmt: skip
            head.handle(1.0, PROCS[0], msg)
            replica.take(head.journal.changes())
    assert [row["state"] for row in questions(head)[3]] == ["DEAD"] * 100
    for table in (notes.WATCH, notes.GROUP_WATCH, notes.KILLED):
        assert list(replica.of(table)) == []


def test_of_the_dead_only_the_last_ones_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_table, "DEAD_KEPT", 3)
    monkeypatch.setattr(early, "REMEMBERED", 5)
    head, replica = up(), Replica()
    replica.take(head.journal.begin(), whole=True)
    for number in range(50):
        head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, number, 1, False, False, 0)))
        head.handle(1.0, PROCS[0], m.KillActor(actor_of(0, number), True, "enough"))
        replica.take(head.journal.changes())
    forgotten = [actor_of(0, number) for number in range(42, 47)]
    assert [key for key, _ in replica.of(notes.FORGOTTEN)] == forgotten
    second = restored(head, replica)
    for one in (head, second):
        (state,) = one.handle(2.0, PROCS[1], m.WatchActor(forgotten[0]))
        assert isinstance(state, Send) and isinstance(state.msg, m.ActorState) and state.msg.state == "DEAD"
        assert one.handle(2.0, PROCS[1], m.WatchActor(actor_of(0, 1))) == [], "that was too long ago to know"


def test_an_actor_that_began_again_on_its_node_is_not_begun_once_more() -> None:
    """It died and was restarted in the old head's last moment: what its node says of that comes again."""
    first, replica, worker, second = up(), Replica(), make_proc(1, 20), make_proc(1, 21)
    replica.take(first.journal.begin(), whole=True)
    first.handle(1.0, PROCS[2], m.CreateActor(1, spec(2, 1, 1, False, False, -1)))
    ident = actor_of(2, 1)
    first.handle(1.0, worker, m.ActorReady(ident, b"", []))
    replica.take(first.journal.changes())
    head = SuccessorHead(Config())
    head.take_over(2.0, replica, 0)
    out = head.node_died(2.0, 0, "it was lost")
    out += head.handle(2.0, raylet_of(1), m.ActorGone(ident, worker, "killed by signal 9", False))
    out += head.handle(2.0, second, m.ActorReady(ident, b"", []))
    out += head.handle(2.0, raylet_of(1), m.Held(1, [(ident, second, 1)], []))
    out += head.handle(2.0, raylet_of(2), m.Held(2, [], []))
    said = [effect.msg for effect in out if isinstance(effect, Send)]
    assert not [msg for msg in said if isinstance(msg, (m.StartActor, m.KillActor, m.Exit))]
    assert [msg.state for msg in said if isinstance(msg, m.ActorState)][-1] == "ALIVE"
    actor = head.actors.actors[ident]
    assert (actor.state, actor.node, actor.worker, actor.restarts) == ("ALIVE", 1, second, 1)


def test_pieces_are_all_of_it() -> None:
    rows = [m.Change(notes.VALUE, bytes([number]), bytes(number)) for number in range(50)]
    found = list(pieces(rows, 100))
    assert [change for part in found for change in part] == rows
    assert len(found) > 5 and all(sum(1 + len(c.row or b"") for c in part[:-1]) < 100 for part in found)


def test_nothing_is_noted_while_nobody_keeps_a_journal() -> None:
    head = up()
    head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, 1, 1, True, True, 0)))
    assert head.journal.changes() == []


def test_a_log_twice_as_long_as_the_tables_is_written_anew() -> None:
    head = up()
    rows = len(head.journal.begin())
    written = 0
    while not head.journal.long:
        head.handle(1.0, PROCS[0], m.SetJob(m.JobInfo("01", str(written), (), "/")))
        written += len(head.journal.changes())
    assert 2 * rows + LEAST < written <= 2 * rows + LEAST + 2
    assert len(head.journal.begin()) == rows
    assert not head.journal.long
