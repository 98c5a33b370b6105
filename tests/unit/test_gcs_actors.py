"""The life of actors at the head."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, TypeVar

import pytest
from invariants_kit import GCS_EVENTS, check_after

from hpcray.common.config import Config
from hpcray.common.ids import make_proc, node_of, raylet_of
from hpcray.common.resources import to_units
from hpcray.core.effects import Effect, Send
from hpcray.core.gcs import gcs as gcs_module
from hpcray.core.gcs.gcs import Gcs
from hpcray.core.raylet.local_lease_manager import ASSIGNED_TIMEOUT
from hpcray.protocol import messages as m

UNIT = 10_000
CPU1 = m.Shape((("CPU", UNIT),))
NOTHING = m.Shape(())
OWNER = make_proc(0, 5)
OTHER = make_proc(1, 6)
M = TypeVar("M", bound=m.Message)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gcs, GCS_EVENTS)


def info(index: int, cpus: float) -> m.NodeInfo:
    return m.NodeInfo(index, f"id{index}", f"host{index}", f"10.0.0.{index}", 1, to_units({"CPU": cpus}), b"", "mpi", 0)


class Head:
    """The head core, and what it sent."""

    def __init__(self, *cpus: float) -> None:
        self.core = Gcs(Config())
        self.sent: list[Send] = []
        self.now = 0.0
        if cpus:
            self.do(self.core.cluster_up(0.0, "s", [info(n, c) for n, c in enumerate(cpus)]))

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Send)
            self.sent.append(effect)

    def handle(self, src: bytes, msg: m.Message) -> None:
        self.do(self.core.handle(self.now, src, msg))

    def take(self, kind: type[M], dest: bytes | None = None) -> list[M]:
        found = [s for s in self.sent if isinstance(s.msg, kind) and dest in (None, s.dest)]
        self.sent = [s for s in self.sent if s not in found]
        return [s.msg for s in found]  # type: ignore[misc]

    def started_on(self) -> list[int]:
        nodes = [node_of(s.dest) for s in self.sent if isinstance(s.msg, m.StartActor)]
        self.take(m.StartActor)
        return nodes

    def states(self, dest: bytes = OWNER) -> list[str]:
        return [state.state for state in self.take(m.ActorStateUpdate, dest)]

    def create(self, spec: m.ActorSpec, src: bytes = OWNER) -> m.GcsReply:
        self.handle(src, m.CreateActor(7, spec))
        (reply,) = self.take(m.GcsReply, src)
        assert reply.req == 7
        return reply

    def tick(self, now: float) -> None:
        self.now = now
        self.do(self.core.tick(now))


def spec(number: int = 1, owner: bytes = OWNER, **more: Any) -> m.ActorSpec:
    values: dict[str, Any] = {
        "actor": owner + number.to_bytes(5, "big"),
        "class_name": "Counter",
        "cls": b"class",
        "args": b"args",
        "refs": [],
        "place": CPU1,
        "hold": NOTHING,
        "name": "",
        "namespace": "ns",
        "detached": False,
        "max_restarts": 0,
        "max_task_retries": 0,
        "max_concurrency": 1,
        "methods": {"inc": {"num_returns": 1}},
    }
    return m.ActorSpec(**{**values, **more})


ACTOR = spec().actor
WORKER = make_proc(0, 40)


def alive(*cpus: float, **more: Any) -> Head:
    """A head with one living actor on node 0."""
    head = Head(*(cpus or (4, 4)))
    head.create(spec(**more))
    assert head.started_on() == [0]
    head.handle(WORKER, m.ActorReady(ACTOR, b"", []))
    assert head.states() == ["ALIVE"]
    return head


def test_an_actor_is_registered_placed_and_reported_alive() -> None:
    head = Head(4, 4)
    assert head.create(spec()).ok
    assert head.started_on() == [0]
    head.handle(OTHER, m.WatchActor(ACTOR))
    assert head.states(OTHER) == ["PENDING"]
    head.handle(WORKER, m.ActorReady(ACTOR, b"", []))
    for watcher in (OWNER, OTHER):
        (state,) = head.take(m.ActorStateUpdate, watcher)
        assert (state.state, state.worker, state.restarts) == ("ALIVE", WORKER, 0)


def test_a_handle_may_be_elsewhere_before_its_actor_is_registered() -> None:
    head = Head(4, 4)
    head.handle(OTHER, m.WatchActor(ACTOR))
    assert head.states(OTHER) == []
    assert head.create(spec()).ok
    head.handle(WORKER, m.ActorReady(ACTOR, b"", []))
    assert head.states(OTHER)[-1] == "ALIVE"


def test_a_watcher_on_a_dead_node_gets_no_states_of_an_actor_registered_later() -> None:
    head = Head(4, 4)
    head.handle(OTHER, m.WatchActor(ACTOR))
    head.do(head.core.node_died(0.0, node_of(OTHER), "power cut"))
    assert head.create(spec()).ok
    assert OTHER not in head.core.actors.actors[ACTOR].watchers


def test_watchers_of_an_actor_that_can_never_come_get_its_death() -> None:
    head = Head(1)
    head.handle(OTHER, m.WatchActor(ACTOR))
    head.do(head.core.process_died(0.0, OWNER, "exit code 1"))
    head.handle(OTHER, m.WatchActor(ACTOR[:-1] + b"x"))
    states = head.take(m.ActorStateUpdate, OTHER)
    assert [state.state for state in states] == ["DEAD", "DEAD"]
    assert all("not known in this job" in state.reason for state in states)


def test_a_kill_may_come_before_the_actor_is_registered() -> None:
    head = Head(4)
    head.handle(OTHER, m.KillActor(ACTOR, True, "it was killed by kill()"))
    assert head.create(spec()).ok
    assert head.started_on() == []
    (*_, state) = head.take(m.ActorStateUpdate, OWNER)
    assert state.state == "DEAD" and "kill()" in state.reason


def test_who_waits_for_an_actor_that_is_killed_before_it_is_registered_hears_of_it_at_once() -> None:
    """Its creator waits for the constructor's arguments, which may never come."""
    head, early, late = Head(4), make_proc(0, 11), make_proc(0, 12)
    head.handle(early, m.WatchActor(ACTOR))
    head.handle(OTHER, m.KillActor(ACTOR, True, "it was killed by kill()"))
    head.handle(late, m.WatchActor(ACTOR))
    for proc in (OWNER, early, late):
        (state,) = head.take(m.ActorStateUpdate, proc)
        assert state.state == "DEAD" and "kill()" in state.reason and "never ran" in state.reason


def test_a_name_is_taken_until_its_actor_is_dead() -> None:
    head = Head(4)
    assert head.create(spec(1, name="n")).ok
    reply = head.create(spec(2, name="n"))
    assert not reply.ok and reply.value.startswith(b"name_taken: ") and b"'n'" in reply.value
    assert head.create(spec(3, name="n", namespace="elsewhere")).ok
    head.handle(OWNER, m.KillActor(ACTOR, True, ""))
    assert head.create(spec(4, name="n")).ok


def test_a_constructor_that_raises_ends_the_actor_and_its_worker() -> None:
    head = Head(4)
    head.create(spec(max_restarts=5))
    head.handle(WORKER, m.ActorReady(ACTOR, b"traceback", []))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert state.state == "DEAD" and state.error == b"traceback" and "constructor" in state.reason
    assert head.take(m.Exit, WORKER) == [m.Exit(0)]
    head.handle(OTHER, m.WatchActor(ACTOR))
    assert head.take(m.ActorStateUpdate, OTHER)[0].error == b"traceback"


def test_the_state_of_an_actor_that_crashed_without_restarts_names_what_died_where() -> None:
    head = alive()
    how = "its worker process 40 (pid 1) on node 0 died: signal 9"
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, how, False))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert state.state == "DEAD" and "signal 9 (host host0)" in state.reason
    head.handle(OTHER, m.WatchActor(ACTOR))
    assert head.take(m.ActorStateUpdate, OTHER)[0].reason == state.reason


@pytest.mark.parametrize(("limit", "lives"), [(2, 3), (-1, 6)])
def test_a_crash_restarts_while_restarts_are_left(limit: int, lives: int) -> None:
    head = alive(max_restarts=limit)
    worker = WORKER
    for restarts in range(1, 6):
        head.handle(raylet_of(node_of(worker)), m.ActorGone(ACTOR, worker, "crash", False))
        if restarts == lives:
            assert head.states() == ["DEAD"]
            return
        assert head.states() == ["RESTARTING"]
        starts = [(node_of(s.dest), s.msg.restarts) for s in head.sent if isinstance(s.msg, m.StartActor)]
        head.take(m.StartActor)
        assert [count for _, count in starts] == [restarts]
        worker = make_proc(starts[0][0], 40 + restarts)
        head.handle(worker, m.ActorReady(ACTOR, b"", []))
        assert head.states() == ["ALIVE"]
    assert limit == -1


def test_an_intended_end_is_not_restarted() -> None:
    head = alive(max_restarts=-1)
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, "exit_actor() was called", True))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert (state.state, state.reason) == ("DEAD", "exit_actor() was called")


def test_an_actor_killed_for_good_is_reported_dead_at_once_and_ended_by_its_raylet() -> None:
    head = alive(max_restarts=-1, name="n")
    head.handle(OTHER, m.KillActor(ACTOR, True, "killed with kill()"))
    assert head.states() == ["DEAD"]
    assert head.take(m.KillActor, raylet_of(0)) == [m.KillActor(ACTOR, True, "killed with kill()")]
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, "killed", True))
    head.handle(OTHER, m.KillActor(ACTOR, True, "again"))
    assert head.sent == []


def test_killing_an_actor_to_restart_it_uses_a_restart() -> None:
    head = alive(max_restarts=1)
    head.handle(OTHER, m.KillActor(ACTOR, False, "shake it"))
    assert len(head.take(m.KillActor, raylet_of(0))) == 1 and head.states() == []
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, "shake it", False))
    assert head.states() == ["RESTARTING"]


def test_a_late_actor_ready_revives_neither_a_dead_actor_nor_a_former_worker() -> None:
    head = Head(4)
    head.create(spec(max_restarts=1))
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, "crash in the constructor", False))
    assert head.states() == ["RESTARTING"]
    head.handle(WORKER, m.ActorReady(ACTOR, b"", []))
    assert head.states() == []
    head.handle(OWNER, m.KillActor(ACTOR, True, ""))
    head.take(m.Exit)
    head.handle(make_proc(0, 41), m.ActorReady(ACTOR, b"", []))
    assert head.states() == ["DEAD"] and len(head.take(m.Exit)) == 1


def test_out_of_scope_lets_a_living_actor_finish_and_cancels_an_unplaced_one() -> None:
    head = alive(max_restarts=-1)
    head.handle(OWNER, m.ActorOutOfScope(ACTOR))
    assert head.take(m.TerminateActor, WORKER) == [m.TerminateActor(ACTOR)]
    head.handle(raylet_of(0), m.ActorGone(ACTOR, WORKER, "crashed on the way out", False))
    assert head.states() == ["DEAD"], "nobody can call it, so it is not restarted"
    unplaced = spec(2, place=m.Shape((("GPU", UNIT),)))
    head.create(unplaced)
    head.handle(OWNER, m.ActorOutOfScope(unplaced.actor))
    assert head.states() == ["DEAD"]


def test_out_of_scope_while_it_starts_waits_for_the_constructor() -> None:
    head = Head(4)
    head.create(spec())
    head.handle(OWNER, m.ActorOutOfScope(ACTOR))
    assert head.states() == []
    head.handle(WORKER, m.ActorReady(ACTOR, b"", []))
    assert head.states() == ["ALIVE"] and len(head.take(m.TerminateActor, WORKER)) == 1


def test_a_refused_actor_goes_to_another_node_then_waits_until_a_node_has_more() -> None:
    head = Head(4, 4)
    head.create(spec(hold=CPU1))
    assert head.started_on() == [0]
    head.handle(raylet_of(0), m.NodeView(0, 1, {"CPU": 0}))
    head.handle(raylet_of(0), m.StartActorRefused(ACTOR, ""))
    assert head.started_on() == [1]
    head.handle(raylet_of(1), m.NodeView(1, 1, {"CPU": 0}))
    head.handle(raylet_of(1), m.StartActorRefused(ACTOR, ""))
    assert head.started_on() == []
    head.handle(raylet_of(0), m.NodeView(0, 2, {"CPU": UNIT}))
    assert head.started_on() == [0]


def test_an_actor_that_finds_no_room_queues_at_a_busy_node() -> None:
    head = Head(4, 4)
    for node in (0, 1):
        head.handle(raylet_of(node), m.NodeView(node, 1, {"CPU": 0}))
    head.create(spec(hold=CPU1))
    assert head.started_on() == []
    head.tick(0.4)
    assert head.started_on() == []
    head.tick(0.6)
    (start,) = head.take(m.StartActor, raylet_of(0))
    assert start.spec.place.strategy == "node:0"
    head.now = 3.0
    head.handle(raylet_of(0), m.StartActorRefused(ACTOR, ""))
    head.tick(3.6)
    assert head.started_on() == [0], "the same again: that node keeps room for it, for longer with each try"
    head.now = 31.0
    head.handle(raylet_of(0), m.StartActorRefused(ACTOR, ""))
    head.tick(31.6)
    assert head.started_on() == [1], "after a while another"


def test_when_no_worker_starts_the_owner_gets_the_reason_and_retries_slow_down() -> None:
    head = Head(4)
    head.create(spec())
    tries = []
    for step in range(1, 41):
        if head.started_on():
            tries.append(head.now)
            head.handle(raylet_of(0), m.StartActorRefused(ACTOR, "node 0 cannot start workers: no memory"))
        head.tick(step * 0.5)
    (warning,) = head.take(m.Infeasible, OWNER)
    assert warning.scheduling_class == -1 and "no memory" in warning.reason and "Counter" in warning.reason
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps == sorted(gaps) and len(tries) >= 4


def test_an_infeasible_actor_is_named_and_waits_for_a_node() -> None:
    head = Head(1, 2)
    head.create(spec(place=m.Shape((("CPU", 4 * UNIT),)), name="big"))
    (warning,) = head.take(m.Infeasible, OWNER)
    assert warning.scheduling_class == -1 and "actor Counter 'big' asks for {CPU: 4}" in warning.reason
    head.tick(1.0)
    assert head.sent == []
    head.do(head.core.cluster_up(2.0, "s", [info(2, 8)]))
    assert head.started_on() == [2]


def test_actors_created_before_the_cluster_is_up_are_placed_then() -> None:
    head = Head()
    assert head.create(spec()).ok
    assert head.sent == []
    head.do(head.core.cluster_up(0.0, "s", [info(0, 1)]))
    assert head.started_on() == [0]


def test_calls_fail_while_an_actor_that_was_alive_restarts() -> None:
    head = alive(max_restarts=-1)
    number, node = 40, 0
    for where in ("its methods", "its constructor", "its methods"):
        head.handle(raylet_of(node), m.ActorGone(ACTOR, make_proc(node, number), f"it crashed in {where}", False))
        (state,) = head.take(m.ActorStateUpdate, OWNER)
        assert (state.state, state.unavailable) == ("RESTARTING", True)
        (node,), number = head.started_on(), number + 1
        if where == "its constructor":
            head.handle(make_proc(node, number), m.ActorReady(ACTOR, b"", []))
            (state,) = head.take(m.ActorStateUpdate, OWNER)
            assert (state.state, state.unavailable) == ("ALIVE", False)
    head.handle(OWNER, m.KillActor(ACTOR, True, ""))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert (state.state, state.unavailable) == ("DEAD", False)


@pytest.mark.parametrize("why", ["it never ran", "its node leaves"])
def test_calls_wait_for_an_actor_of_which_nothing_is_lost(why: str) -> None:
    head, actor = Head(0, 1, 1), spec(max_restarts=-1)
    head.create(actor)
    (node,) = head.started_on()
    worker = make_proc(node, 9)
    if why == "it never ran":
        head.handle(raylet_of(node), m.ActorGone(actor.actor, worker, "it crashed", False))
    else:
        head.handle(worker, m.ActorReady(actor.actor, b"", []))
        assert head.states() == ["ALIVE"]
        head.core.set_draining({node: 0})
        head.do(head.core.node_died(0.0, node, "it left"))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert (state.state, state.unavailable) == ("RESTARTING", False)


@pytest.mark.parametrize(("limit", "moves"), [(1, 4), (0, 0), (-1, 4)])
def test_restarts_because_a_node_left_do_not_count(limit: int, moves: int) -> None:
    """As in Ray, an actor without restarts does not move."""
    head, actor = Head(0, 1, 1, 1, 1, 1, 1), spec(max_restarts=limit)
    head.create(actor)
    (node,) = head.started_on()
    for count in range(5):
        head.handle(make_proc(node, 9 + count), m.ActorReady(actor.actor, b"", []))
        head.core.set_draining({node: 0})
        head.do(head.core.node_died(0.0, node, "it left"))
        if count == moves:
            break
        (node,) = head.started_on()
    assert head.states()[-1] == ("RESTARTING" if moves else "DEAD")
    if limit > 0:
        (node,) = head.started_on()
        head.handle(make_proc(node, 20), m.ActorReady(actor.actor, b"", []))
        found = head.core.actors.actors[actor.actor]
        assert (found.restarts, found.moves) == (5, 5)
        head.handle(raylet_of(node), m.ActorGone(actor.actor, make_proc(node, 20), "crash", False))
        head.handle(make_proc(node, 21), m.ActorReady(actor.actor, b"", []))
        head.handle(raylet_of(node), m.ActorGone(actor.actor, make_proc(node, 21), "crash", False))
        assert head.states()[-1] == "DEAD", "its one restart was used by the first crash"


def test_a_death_reported_twice_costs_one_restart() -> None:
    head = alive(max_restarts=5)
    worker = head.core.actors.actors[ACTOR].worker
    gone = m.ActorGone(ACTOR, worker, "killed by signal 9", False)
    head.handle(raylet_of(node_of(worker)), gone)
    assert head.started_on() == [node_of(worker)], "the same node again: its new worker is not known yet"
    head.handle(raylet_of(node_of(worker)), gone)
    assert head.started_on() == [] and head.core.actors.actors[ACTOR].restarts == 1


def test_a_node_loss_restarts_the_living_and_moves_those_on_their_way() -> None:
    head = Head(0, 4, 4)
    head.create(spec(1, max_restarts=1))
    head.create(spec(2))
    head.create(spec(3))
    assert head.started_on() == [1, 1, 2]
    worker = make_proc(1, 9)
    head.handle(worker, m.ActorReady(spec(1).actor, b"", []))
    head.take(m.ActorStateUpdate)
    head.do(head.core.node_died(0.0, 1, "heartbeat lost"))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert state.state == "RESTARTING" and state.reason == "its node has died: node 1 died: heartbeat lost"
    assert head.started_on() == [2, 2]
    assert head.core.actors.actors[spec(2).actor].restarts == 0, "it never lived there"


def test_actors_end_with_their_owner_except_detached_ones() -> None:
    head = Head(4, 4)
    head.create(spec(1, OTHER), OTHER)
    head.create(spec(2, OTHER, detached=True, name="stays"), OTHER)
    head.handle(OWNER, m.WatchActor(spec(1, OTHER).actor))
    head.take(m.ActorStateUpdate)
    head.do(head.core.process_died(0.0, OTHER, "killed by signal 9"))
    (state,) = head.take(m.ActorStateUpdate, OWNER)
    assert state.state == "DEAD" and "its owner has died" in state.reason and "1.6" in state.reason
    assert len(head.take(m.KillActor)) == 1
    assert head.core.actors.find_by_name("stays", "ns") is not None


def test_owners_on_a_dead_node_count_as_dead() -> None:
    head = Head(4, 4)
    head.create(spec(1, OTHER), OTHER)
    head.handle(OWNER, m.WatchActor(spec(1, OTHER).actor))
    head.take(m.ActorStateUpdate)
    head.do(head.core.node_died(0.0, 1, "power"))
    assert head.states() == ["DEAD"]


def test_a_dead_watcher_gets_no_states() -> None:
    head = alive()
    head.handle(OTHER, m.WatchActor(ACTOR))
    head.take(m.ActorStateUpdate)
    head.do(head.core.process_died(0.0, OTHER, "exit code 0"))
    head.handle(OWNER, m.KillActor(ACTOR, True, ""))
    assert head.states(OTHER) == [] and head.states() == ["DEAD"]


def test_an_actor_bound_to_its_node_is_sent_there_even_when_it_is_busy() -> None:
    head = Head(4, 4)
    head.handle(raylet_of(1), m.NodeView(1, 1, {"CPU": 0}))
    head.create(spec(hold=CPU1, place=m.Shape(CPU1.resources, "node:1")))
    assert head.started_on() == [1]
    head.now = ASSIGNED_TIMEOUT
    head.handle(raylet_of(1), m.StartActorRefused(ACTOR, ""))
    assert head.started_on() == [1]


def test_an_actor_that_its_node_refuses_at_once_is_sent_there_again_at_the_next_tick() -> None:
    """The node is about to leave. On the head's own node the two would send each other these messages without end."""
    head = Head(4, 4)
    head.create(spec(hold=CPU1, place=m.Shape(CPU1.resources, "node:1")))
    assert head.started_on() == [1]
    head.handle(raylet_of(1), m.StartActorRefused(ACTOR, ""))
    assert head.started_on() == []
    head.tick(0.5)
    assert head.started_on() == [1]


def test_set_job_is_sent_to_every_raylet() -> None:
    head = Head(1, 1)
    job = m.SetJob(m.JobInfo("01", "ns", (), "/"))
    head.handle(OWNER, job)
    assert [s.dest for s in head.sent] == [raylet_of(0), raylet_of(1)] and head.core.job == job.job


def test_the_gcs_handles_exactly_the_messages_in_HANDLES() -> None:
    head = Head(1)
    assert set(head.core._handlers) == set(gcs_module.HANDLES)
    with pytest.raises(KeyError):
        head.handle(OWNER, m.Stop(0))


class TestArgumentsThatComeLater:
    """A named actor is registered before the arguments of its constructor are ready."""

    @staticmethod
    def reserved(**more: Any) -> Head:
        head = Head(1)
        head.handle(OWNER, m.CreateActor(7, spec(name="n", args=b"", cls=b"", **more), False))
        (reply,) = head.take(m.GcsReply, OWNER)
        assert reply.ok
        return head

    def test_an_incomplete_actor_has_its_name_and_no_node(self) -> None:
        head = self.reserved()
        head.tick(5.0)
        assert head.started_on() == []
        assert not head.create(spec(2, name="n")).ok
        head.handle(OTHER, m.WatchActor(spec().actor))
        assert head.states(OTHER) == ["PENDING"]

    def test_an_incomplete_actor_is_placed_with_the_arguments_that_came(self) -> None:
        head = self.reserved()
        head.handle(OWNER, m.CreateActor(0, spec(name="n")))
        (start,) = head.take(m.StartActor)
        assert (start.spec.args, start.spec.cls) == (b"args", b"class")
        head.handle(OWNER, m.CreateActor(0, spec(name="n")))
        assert head.take(m.StartActor) == []

    @pytest.mark.parametrize("detached", [False, True])
    def test_an_incomplete_actor_ends_with_its_creator(self, detached: bool) -> None:
        head = self.reserved(detached=detached)
        head.handle(OTHER, m.WatchActor(spec().actor))
        head.states(OTHER)
        head.do(head.core.process_died(0.0, OWNER, "gone"))
        assert head.states(OTHER) == ["DEAD"]
        assert head.create(spec(2, owner=OTHER, name="n"), OTHER).ok

    def test_an_incomplete_actor_can_be_killed(self) -> None:
        head = self.reserved()
        head.handle(OTHER, m.KillActor(spec().actor, True, "enough"))
        head.states()
        head.handle(OWNER, m.CreateActor(0, spec(name="n")))
        assert head.started_on() == []


def test_a_handle_kept_from_another_run_is_answered_as_of_a_dead_actor() -> None:
    gcs = Gcs(Config())
    gcs.begin_run(7)
    kept, new = make_proc(0, 1, 6) + bytes(5), make_proc(0, 1, 7) + bytes(5)
    (told,) = gcs.handle(0.0, make_proc(0, 2, 7), m.WatchActor(kept))
    assert isinstance(told, Send) and isinstance(told.msg, m.ActorStateUpdate) and told.msg.state == "DEAD"
    assert gcs.handle(0.0, make_proc(0, 2, 7), m.WatchActor(new)) == [], "it may still be registered"
