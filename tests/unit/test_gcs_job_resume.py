"""What the next run of a job takes from the journal of the one before."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from invariants_kit import GCS_EVENTS, check_after

from hpcray.common.config import Config
from hpcray.common.ids import PROC_BYTES, TASK_BYTES, make_proc, number_of, raylet_of
from hpcray.common.resources import bundle_of, names_in, to_units
from hpcray.core.effects import Effect, ForkWorker, Send
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.gcs.state_log import TableSnapshot
from hpcray.core.raylet.local_lease_manager import LocalLeaseManager
from hpcray.protocol import messages as m

DRIVER = make_proc(0, 1)
NOTHING = m.Shape(())
JOB = m.SetJob(m.JobInfo("1", "ns", (), "/"))


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gcs, GCS_EVENTS)


def up(earlier: TableSnapshot | None = None) -> Gcs:
    head = Gcs(Config())
    head.begin_run(0, earlier)
    info = m.NodeInfo(0, "id", "host", "10.0.0.1", 1, to_units({"CPU": 4}), b"", "mpi", 0)
    assert head.cluster_up(0.0, "s", [info]) == []
    return head


def spec(number: int, name: str, **more: Any) -> m.ActorSpec:
    whole: dict[str, Any] = {
        "actor": DRIVER + number.to_bytes(5, "big"), "class_name": "A", "cls": b"class", "args": b"args", "refs": [],
        "place": NOTHING, "hold": NOTHING, "name": name, "namespace": "ns", "detached": True, "max_restarts": 0,
        "max_task_retries": 0, "max_concurrency": 1, "methods": {},
    }  # fmt: skip
    return m.ActorSpec(**{**whole, **more})


def ask(head: Gcs, msg: m.Message, src: bytes = DRIVER) -> list[Effect]:
    return head.handle(1.0, src, msg)


def call(head: Gcs, method: str, *args: Any) -> Any:
    (answer,) = ask(head, m.GcsCall(1, method, msgspec.msgpack.encode(args)))
    assert isinstance(answer, Send) and isinstance(answer.msg, m.GcsReply)
    return msgspec.msgpack.decode(answer.msg.value) if answer.msg.ok else None


def next_run(head: Gcs) -> tuple[Gcs, list[Any]]:
    """The head of the next run, and the actors that it starts when the program is there."""
    snapshot = TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    second = up(snapshot)
    out = ask(second, JOB)
    assert isinstance(out[0], Send) and isinstance(out[0].msg, m.SetJob), "workers know where to import from"
    return second, [e.msg for e in out if isinstance(e, Send) and isinstance(e.msg, (m.StartActor, m.PrepareBundles))]


def lost(head: Gcs) -> list[str]:
    assert head.resumed is not None
    return head.resumed.lost


def test_a_detached_actor_begins_anew() -> None:
    first = up()
    whole = spec(5, "keeps", inline=[b"value"], max_restarts=3)
    ask(first, m.CreateActor(1, whole))
    ask(first, m.ActorReady(whole.actor, b"", []), make_proc(0, 9))
    second, (start,) = next_run(first)
    assert start.restarts == 0
    assert start.spec == msgspec.structs.replace(whole, actor=start.spec.actor)
    assert start.spec.actor != whole.actor and start.spec.actor[:8] == raylet_of(0)
    found = call(second, "named_actor", "keeps", "ns")
    assert (found["actor"], found["state"]) == (start.spec.actor, "PENDING")
    assert lost(second) == []


def test_ids_that_one_run_has_made_differ_from_those_of_the_runs_after_it() -> None:
    """A ref or a handle that a program has written to a file must not find something else in a later run."""
    run, starts, procs = up(), [], []
    ask(run, m.CreateActor(1, spec(5, "keeps")))
    for number in range(3):
        raylet = LocalLeaseManager(0, to_units({"CPU": 4}), 1, Config(prestart=1))
        (fork,) = [e for e in raylet.start(0.0, run.run) if isinstance(e, ForkWorker)]
        procs.append(raylet.pool.proc_of(fork.number))
        assert run.run == number and number_of(procs[-1]) == 1
        if number < 2:
            run, (start,) = next_run(run)
            starts.append(start.spec.actor)
    assert len(set(starts)) == 2 and len(set(procs)) == 3
    assert {len(ident) for ident in starts} == {TASK_BYTES} and {len(proc) for proc in procs} == {PROC_BYTES}


def test_a_head_that_takes_over_goes_on_in_the_same_run() -> None:
    head, _ = next_run(up())
    snapshot = TableSnapshot()
    snapshot.apply(head.log.snapshot_rows(), whole=True)
    assert Gcs(Config()).restore(0.0, snapshot).run == head.run == 1


def test_key_values_come_back_in_the_next_run() -> None:
    first = up()
    call(first, "kv_put", b"key", b"value", True, "space")
    second, _ = next_run(first)
    assert call(second, "kv_get", b"key", "space") == b"value"


def test_detached_actors_and_values_come_back_in_the_run_after_the_next() -> None:
    first = up()
    ask(first, m.CreateActor(1, spec(5, "keeps")))
    call(first, "kv_put", b"key", b"value", True, "")
    second, _ = next_run(first)
    ask(second, m.CreateActor(2, spec(1, "also")))
    third, started = next_run(second)
    assert {start.spec.name for start in started} == {"keeps", "also"}
    assert len({start.spec.actor for start in started}) == 2
    assert call(third, "kv_get", b"key", "") == b"value"


def test_actors_of_the_program_do_not_come_back_in_the_next_run() -> None:
    first = up()
    ask(first, m.CreateActor(1, spec(1, "own", detached=False)))
    ask(first, m.CreateActor(2, spec(2, "dead")))
    ask(first, m.KillActor(spec(2, "").actor, True, "it was killed"))
    ask(first, m.CreateGroup(0, m.GroupSpec(DRIVER + b"\0\0\0\0\7", [{"CPU": 1}], "PACK", "group", "ns", DRIVER)))
    second, started = next_run(first)
    assert started == [] and lost(second) == []
    assert call(second, "named_actor", "own", "ns") is None
    assert call(second, "placement_groups") == []


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"refs": [m.ArgRef(b"i" * 16, 1 << 20, [0])]}, "large arguments"),
        ({"args": b"...hpcray.runtime.refs\x94\x8c\x09ObjectRef"}, "refs or handles"),
        ({"inline": [b"...ActorHandle..."]}, "refs or handles"),
        ({"cls": b"...placed_ref..."}, "refs or handles"),
        ({"place": m.Shape(tuple(sorted(names_in("00" * 13, 0, {"CPU": 1}).items())), "group")}, "its placement group"),
    ],
)
def test_what_cannot_come_back_is_named(more: dict[str, Any], why: str) -> None:
    first = up()
    ask(first, m.CreateActor(1, spec(1, "name", **more)))
    second, started = next_run(first)
    assert started == []
    (text,) = lost(second)
    assert text.startswith("A 'name': ") and why in text


def test_an_actor_that_waited_for_its_arguments_does_not_come_back() -> None:
    first = up()
    ask(first, m.CreateActor(1, spec(1, "name", args=b""), ready=False))
    second, _ = next_run(first)
    assert "were not there yet" in lost(second)[0]


def test_a_detached_group_comes_back_with_its_actors() -> None:
    first = up()
    group = m.GroupSpec(DRIVER + b"\0\0\0\0\7", [{"CPU": 10_000}], "PACK", "group", "ns")
    ask(first, m.CreateGroup(0, group))
    inside = m.Shape(tuple(sorted(names_in(group.group.hex(), 0, {"CPU": 10_000}).items())), "group")
    ask(first, m.CreateActor(1, spec(1, "inside", place=inside, hold=inside)))
    second, started = next_run(first)
    (prepare,) = started
    assert prepare.bundles == {0: {"CPU": 10_000}} and prepare.group != group.group
    assert call(second, "placement_group", b"", "group", "ns")["group"] == prepare.group
    out = ask(second, m.BundlesPrepared(prepare.group, prepare.attempt, True), raylet_of(0))
    (start,) = [e.msg for e in out if isinstance(e, Send) and isinstance(e.msg, m.StartActor)]
    assert bundle_of(start.spec.place.resources) == (prepare.group.hex(), 0)


def test_affinity_to_a_node_of_the_run_before_is_dropped() -> None:
    first = up()
    there = m.Shape((), "node:0")
    ask(first, m.CreateActor(1, spec(1, "name", place=there, hold=NOTHING)))
    _, (start,) = next_run(first)
    assert start.spec.place == NOTHING


def test_nothing_is_started_before_the_program_is_there_and_questions_wait_for_it() -> None:
    first, snapshot = up(), TableSnapshot()
    ask(first, m.CreateActor(1, spec(1, "name")))
    call(first, "kv_put", b"key", b"value", True, "")
    snapshot.apply(first.log.snapshot_rows(), whole=True)
    second = up(snapshot)
    assert second.tick(1.0) == [] and call(second, "actors") == []
    taken = spec(9, "name")
    early = [
        m.GcsCall(5, "kv_get", msgspec.msgpack.encode([b"key", ""])),
        m.GcsCall(6, "named_actor", msgspec.msgpack.encode(["name", "ns"])),
        m.CreateActor(7, taken),
    ]
    assert [ask(second, msg) for msg in early] == [[], [], []]
    answers = {e.msg.req: e.msg for e in ask(second, JOB) if isinstance(e, Send) and isinstance(e.msg, m.GcsReply)}
    assert msgspec.msgpack.decode(answers[5].value) == b"value"
    assert answers[6].ok and not answers[7].ok and b"name_taken" in answers[7].value


def test_a_resumed_actor_without_room_is_reported_to_node_0() -> None:
    first, snapshot = up(), TableSnapshot()
    large = m.Shape((("GPU", 40_000),))
    ask(first, m.CreateActor(1, spec(1, "large", place=large, hold=large)))
    ask(first, m.CreateGroup(0, m.GroupSpec(DRIVER + b"\0\0\0\0\7", [{"GPU": 40_000}], "PACK", "group", "ns")))
    snapshot.apply(first.log.snapshot_rows(), whole=True)
    second = up(snapshot)
    told = [(e.dest, e.msg.reason) for e in ask(second, JOB) if isinstance(e, Send) and isinstance(e.msg, m.Infeasible)]
    assert [dest for dest, _ in told] == [raylet_of(0)] * 2 and all("GPU" in reason for _, reason in told)
    assert second.tick(2.0) == []
