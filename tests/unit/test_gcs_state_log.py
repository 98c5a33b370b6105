"""A head that is made of another one's journal decides as that would have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hpcray.common.config import Config
from hpcray.common.ids import make_proc, node_of, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import actor_manager, state_log
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.state_log import SMALLEST_SNAPSHOT, TableSnapshot, pieces
from hpcray.protocol import messages as m

NODES = 3
PROCS = [make_proc(node, number) for node in range(NODES) for number in (5, 6)]
NUMBERS = range(4)


def info(node: int) -> m.NodeInfo:
    total = to_units({"CPU": 4, f"n{node}": 1000})
    return m.NodeInfo(node, f"id{node}", f"host{node}", f"10.0.0.{node}", 1, total, b"", "mpi", 0)


def up(config: Config | None = None) -> Gcs:
    head = Gcs(config or Config())
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

    def __init__(self, head: Gcs) -> None:
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
        self.head.check_invariants()
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


def questions(head: Gcs) -> list[Any]:
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
        if method == "actors":  # clocks of two hosts are not comparable
            value = [{**row, "started_for": None, "dead_for": None} for row in value]
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


OWNED_GROUP = m.GroupSpec(actor_of(0, 100), [{"n1": 1}], "PACK", "", "ns", PROCS[0])
WATCHED_EARLY = ("handle", PROCS[3], m.WatchGroup(OWNED_GROUP.group))
CREATED_LATE = ("handle", PROCS[2], m.CreateGroup(8, OWNED_GROUP))
ACTOR_OF_NODE_1 = spec(3, 2, 2, True, False, 1)
UNKNOWN_AT_ONCE = [
    ("handle", PROCS[0], m.WatchActor(ACTOR_OF_NODE_1.actor)),
    ("node_died", 1, "it was lost"),
    ("handle", PROCS[1], m.CreateActor(7, ACTOR_OF_NODE_1, False)),
]
KILLED_LATE = ("handle", PROCS[0], m.KillActor(ACTOR_OF_NODE_1.actor, True, "it was killed"))


@settings(max_examples=60)
@given(history, history, st.booleans())
@example([WATCHED_EARLY, ("process_died", PROCS[0], "killed by signal 9")], [CREATED_LATE], False)
@example(UNKNOWN_AT_ONCE, [KILLED_LATE], False)
@example([WATCHED_EARLY, ("handle", PROCS[0], m.RemoveGroup(OWNED_GROUP.group))], [CREATED_LATE], False)
def test_a_restored_head_goes_on_as_the_first_one_would(before: Any, after: Any, compacted: bool) -> None:
    first, snapshot, dead = Side(up()), TableSnapshot(), Dead()
    snapshot.apply(first.head.log.snapshot_rows(), whole=True)
    for name, *args in before:
        if dead.may(name, args[0]):
            first.do(name, *args)
            snapshot.apply(first.head.log.changed_rows())
    if compacted:
        snapshot.apply(first.head.log.snapshot_rows(), whole=True)
    second = Side(Gcs(Config()))
    who = second.head.restore(1.0, snapshot)
    assert set(who.dead) == dead.nodes
    assert questions(second.head) == questions(first.head)
    for name, *args in after:
        if dead.may(name, args[0]):
            assert second.do(name, *args) == first.do(name, *args), (name, args)
    assert questions(second.head) == questions(first.head)


def test_an_actor_that_its_only_node_refuses_after_a_move_of_the_head_waits_for_the_next_tick() -> None:
    """As without the move: it is not sent there again in the same moment, and refused again, and so on."""
    first, snapshot = up(), TableSnapshot()
    snapshot.apply(first.log.snapshot_rows(), whole=True)
    bound = spec(0, 0, 0, False, False, -1)
    first.handle(1.0, PROCS[0], m.CreateActor(7, bound))
    second = restored(first, snapshot)
    refusal = m.StartActorRefused(bound.actor, "")
    assert second.handle(1.0, raylet_of(0), refusal) == first.handle(1.0, raylet_of(0), refusal) == []


@pytest.mark.parametrize("creator_dies", [True, False])
def test_a_process_that_watches_a_group_which_can_no_longer_come_gets_its_removal(creator_dies: bool) -> None:
    head = up()
    assert head.handle(1.0, *WATCHED_EARLY[1:]) == []
    if creator_dies:
        out = head.process_died(1.0, PROCS[0], "killed by signal 9")
    else:
        out = head.handle(1.0, PROCS[0], m.RemoveGroup(OWNED_GROUP.group))
    assert out == [Send(PROCS[3], m.PlacementGroupStateUpdate(OWNED_GROUP.group, "REMOVED", "it was removed"))]


def restored(first: Gcs, snapshot: TableSnapshot) -> Gcs:
    snapshot.apply(first.log.changed_rows())
    second = Gcs(first.config)
    second.restore(1.0, snapshot)
    return second


def test_a_restored_head_kills_an_actor_that_was_killed_before_it_was_registered() -> None:
    head, snapshot = up(), TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    head.handle(1.0, PROCS[1], m.KillActor(actor_of(0, 1), True, "it was killed"))
    second = Side(restored(head, snapshot))
    second.do("handle", PROCS[0], m.CreateActor(1, spec(0, 1, 1, False, False, 0)))
    assert [row["state"] for row in questions(second.head)[3]] == ["DEAD"]


def test_the_log_has_the_arguments_of_a_constructor_that_came_later() -> None:
    head, snapshot = up(), TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    whole = spec(0, 1, 1, True, True, 1)
    head.handle(1.0, PROCS[0], m.CreateActor(1, msgspec.structs.replace(whole, cls=b"", args=b""), ready=False))
    snapshot.apply(head.log.changed_rows())
    head.handle(1.0, PROCS[0], m.CreateActor(0, whole))
    second = restored(head, snapshot)
    out = second.node_died(2.0, 1, "it was lost")
    assert out == head.node_died(2.0, 1, "it was lost")
    rows = dict(snapshot.table(state_log.SPEC))
    assert msgspec.msgpack.decode(rows[whole.actor], type=m.ActorSpec) == whole


def test_a_row_that_changes_often_is_logged_once_per_turn() -> None:
    head = up()
    head.log.snapshot_rows()
    for number, value in enumerate((b"1", b"2", b"3")):
        args = msgspec.msgpack.encode([b"key", value, True, ""])
        head.handle(1.0, PROCS[0], m.GcsCall(number, "kv_put", args))
    change, *answers = head.log.changed_rows()
    assert (change.table, change.row) == (state_log.VALUE, b"3")
    assert [answer.table for answer in answers] == 3 * [state_log.ANSWER]
    assert head.log.changed_rows() == []


def test_a_snapshot_drops_the_rows_of_dead_watchers() -> None:
    head, snapshot = up(), TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, 1, 1, True, True, 0)))
    for number in range(2 * SMALLEST_SNAPSHOT):
        proc = make_proc(2, 100 + number)
        head.handle(1.0, proc, m.WatchActor(actor_of(0, 1)))
        head.process_died(1.0, proc, "exit code 0")
        snapshot.apply(head.log.changed_rows())
    assert len(list(snapshot.table(state_log.WATCH))) < 2 * SMALLEST_SNAPSHOT
    second = Side(restored(head, snapshot))
    assert questions(second.head) == questions(head)


def test_a_snapshot_drops_the_watchers_of_dead_actors_and_groups() -> None:
    """A program that lives long and makes actors and groups all the time."""
    head, snapshot = up(), TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    for number in range(50):
        early = actor_of(0, 1000 + number)
        for msg in (
            m.CreateActor(1, spec(0, number, 1, False, False, 0)), m.KillActor(actor_of(0, number), True, "enough"),
            m.CreateGroup(2, m.GroupSpec(early, [{"n1": 1}], "PACK")), m.RemoveGroup(early),
            m.KillActor(early, True, "enough"), m.CreateActor(3, spec(0, 1000 + number, 1, False, False, 0)),
        ):  # fmt: skip
            head.handle(1.0, PROCS[0], msg)
            snapshot.apply(head.log.changed_rows())
    assert [row["state"] for row in questions(head)[3]] == ["DEAD"] * 100
    for table in (state_log.WATCH, state_log.GROUP_WATCH, state_log.KILLED):
        assert list(snapshot.table(table)) == []


def test_only_the_last_dead_actors_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_manager, "ENDED_KEPT", 5)
    config = Config.from_env({"RAY_maximum_gcs_destroyed_actor_cached_count": "3"})
    head, snapshot = up(config), TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    for number in range(50):
        head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, number, 1, False, False, 0)))
        head.handle(1.0, PROCS[0], m.KillActor(actor_of(0, number), True, "enough"))
        snapshot.apply(head.log.changed_rows())
    forgotten = [actor_of(0, number) for number in range(42, 47)]
    assert [key for key, _ in snapshot.table(state_log.FORGOTTEN)] == forgotten
    second = restored(head, snapshot)
    for one in (head, second):
        assert len(one.actors.actors) == config.dead_actors == 3
        (state,) = one.handle(2.0, PROCS[1], m.WatchActor(forgotten[0]))
        assert isinstance(state, Send) and isinstance(state.msg, m.ActorStateUpdate) and state.msg.state == "DEAD"
        assert one.handle(2.0, PROCS[1], m.WatchActor(actor_of(0, 1))) == [], "that was too long ago to know"


def test_an_actor_that_began_again_on_its_node_is_not_begun_once_more() -> None:
    """It died and was restarted in the old head's last moment: what its node says of that comes again."""
    first, snapshot, worker, second = up(), TableSnapshot(), make_proc(1, 20), make_proc(1, 21)
    snapshot.apply(first.log.snapshot_rows(), whole=True)
    first.handle(1.0, PROCS[2], m.CreateActor(1, spec(2, 1, 1, False, False, -1)))
    ident = actor_of(2, 1)
    first.handle(1.0, worker, m.ActorReady(ident, b"", []))
    snapshot.apply(first.log.changed_rows())
    head = RecoveringGcs(Config())
    head.take_over(2.0, snapshot, 0)
    out = head.node_died(2.0, 0, "it was lost")
    out += head.handle(2.0, raylet_of(1), m.ActorGone(ident, worker, "killed by signal 9", False))
    out += head.handle(2.0, second, m.ActorReady(ident, b"", []))
    out += head.handle(2.0, raylet_of(1), m.NodeInventory(1, [(ident, second, 1)], []))
    out += head.handle(2.0, raylet_of(2), m.NodeInventory(2, [], []))
    said = [effect.msg for effect in out if isinstance(effect, Send)]
    assert not [msg for msg in said if isinstance(msg, (m.StartActor, m.KillActor, m.Exit))]
    assert [msg.state for msg in said if isinstance(msg, m.ActorStateUpdate)][-1] == "ALIVE"
    actor = head.gcs.actors.actors[ident]
    assert (actor.state, actor.node, actor.worker, actor.restarts) == ("ALIVE", 1, second, 1)


def test_pieces_of_a_snapshot_are_all_of_its_rows() -> None:
    rows = [m.RowChange(state_log.VALUE, bytes([number]), bytes(number)) for number in range(50)]
    found = list(pieces(rows, 100))
    assert [change for part in found for change in part] == rows
    assert len(found) > 5 and all(sum(1 + len(c.row or b"") for c in part[:-1]) < 100 for part in found)


def test_no_row_is_noted_before_the_first_snapshot() -> None:
    head = up()
    head.handle(1.0, PROCS[0], m.CreateActor(1, spec(0, 1, 1, True, True, 0)))
    assert head.log.changed_rows() == []


def test_a_log_twice_as_long_as_the_tables_is_written_anew() -> None:
    head = up()
    rows = len(head.log.snapshot_rows())
    written = 0
    while not head.log.is_long:
        head.handle(1.0, PROCS[0], m.SetJob(m.JobInfo("01", str(written), (), "/")))
        written += len(head.log.changed_rows())
    assert 2 * rows + SMALLEST_SNAPSHOT < written <= 2 * rows + SMALLEST_SNAPSHOT + 2
    assert len(head.log.snapshot_rows()) == rows
    assert not head.log.is_long
