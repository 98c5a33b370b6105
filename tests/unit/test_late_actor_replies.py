"""An actor answers calls and ends, on another node: its answers and the news of its end come on ways of their own.

Three ways, each in order, none with regard to the others: from the actor's node, from the head, and the clock.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from typing import Any

import pytest

from hpcray.common.exceptions import ActorDiedError, ActorUnavailableError
from hpcray.common.ids import FIRST_RETURN, make_proc
from hpcray.core.core_worker.object_table import INLINE, PENDING, ObjectTable
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize
from hpcray.runtime.core_worker.actor_submitter import ALIVE, DEAD, RESTARTING, ActorClient, ActorSubmitter
from hpcray.runtime.core_worker.peer_sockets import Peer

ME, HERE, THERE = make_proc(0, 1), make_proc(0, 7), make_proc(1, 7)
OK, LOST = b"an answer", b"an error\2"


class Engine:
    """What `ActorSubmitter` needs of one. rest: what `read_rest` finds."""

    def __init__(self) -> None:
        self.lock = contextlib.nullcontext()
        self.peers: dict[bytes, Peer] = {}
        self.dirty: list[Peer] = []
        self.links = self
        self.timers: list[Any] = []
        self.rest: Any = lambda proc: None

    def peer(self, proc: bytes) -> Any:
        return self.peers.setdefault(proc, type("APeer", (), {"out": [], "dirty": False})())  # type: ignore[arg-type]

    def add_timer(self, when: float, call: Any) -> None:
        self.timers.append(call)

    def time_passes(self) -> None:
        timers, self.timers = self.timers, []
        for call in timers:
            call(0.0)

    def read_rest(self, proc: bytes) -> None:
        self.rest(proc)

    def holds_lock(self) -> bool:
        return False

    def send(self, dest: bytes, msg: m.Message) -> None: ...
    def flush(self) -> None: ...
    def flush_soon(self) -> None: ...


class Caller:
    """A process with one actor, and the submitter that it needs."""

    def __init__(self, worker: bytes) -> None:
        self.me, self.node, self.engine = ME, 0, Engine()
        self.task_counter, self.errors = 0, []
        self.table = ObjectTable(ME, lambda dest, msg: None, lambda waiter: None, lambda *args: LOST)
        self.calls = ActorSubmitter(self, None, self, None)  # type: ignore[arg-type]
        self.client = self.calls._clients[b"a" * 13] = ActorClient(b"a" * 13, "A", False)
        self.state(ALIVE, worker)

    def left_behind(self, task: Any, proc: bytes) -> None: ...

    def note_failure(self, task: Any, worker: bytes, error: str) -> None: ...

    def fail(self, task: Any, blob: bytes, argument: bytes | None = None) -> None:
        self.table.set_inline(task.id + FIRST_RETURN, LOST)
        self.errors.append(type(deserialize(blob)))

    def state(self, state: str, worker: bytes = b"", unavailable: bool = False) -> None:
        self.calls.on_state(m.ActorStateUpdate(self.client.actor, state, worker, 0, "it died", b"", unavailable))

    def call(self, retries: int) -> bytes:
        handle: Any = type("AHandle", (), {"_actor": self.client.actor, "_limit": -1, "_keep": None})()
        oid: bytes = self.calls.call(handle, "f", 1, retries, (), {})._id
        return oid

    def answer(self, worker: bytes, oid: bytes) -> None:
        if self.calls.answered(worker, oid[:-3]) is not None:
            self.table.set_inline(oid, OK)

    def value(self, oid: bytes) -> bytes:
        entry = self.table.entries[oid]
        assert entry.state in (INLINE, PENDING)
        return entry.value if entry.state == INLINE else b""


def course(seed: int, end: str) -> None:
    """Every answer that was given counts, and every call ends."""
    rng = random.Random(seed)
    caller = Caller(THERE)
    calls = [caller.call(retries=0) for _ in range(rng.randint(1, 5))]
    given = rng.randint(0, len(calls))
    from_node: deque[Any] = deque(lambda oid=oid: caller.answer(THERE, oid) for oid in calls[:given])
    from_node.append(lambda: caller.calls.process_died(THERE, "it died"))
    from_head: deque[Any] = deque([lambda: caller.state(end)])
    if again := end == RESTARTING and rng.random() < 0.5:  # long after: its new process had to be started
        from_node.append(lambda: caller.state(ALIVE, make_proc(1, 8)))
    while from_node or from_head:
        rng.choice([way for way in (from_node, from_head) if way]).popleft()()
    if end == RESTARTING and not again:
        assert [caller.value(oid) for oid in calls] == [OK] * given + [b""] * (len(calls) - given)
        caller.engine.time_passes()
    assert [caller.value(oid) for oid in calls] == [OK] * given + [LOST] * (len(calls) - given)
    assert not caller.client.inflight
    assert not caller.calls._late_replies._open


@pytest.mark.parametrize("end", [DEAD, RESTARTING])
def test_no_reply_of_an_ended_actor_is_lost_whatever_comes_first(end: str) -> None:
    for seed in range(200):
        course(seed, end)


def test_callers_do_not_wait_for_ever_for_a_worker_that_outlives_its_actor() -> None:
    caller = Caller(THERE)
    oid = caller.call(retries=0)
    caller.state(DEAD)
    assert caller.value(oid) == b""
    (timer,) = caller.engine.timers
    timer(0.0)
    assert caller.value(oid) == LOST


def test_a_new_actor_state_ends_the_wait_for_late_replies() -> None:
    """It runs again already: what was in flight is over, and what was called meanwhile goes to the new one."""
    caller = Caller(THERE)
    first, again = caller.call(retries=0), caller.call(retries=1)
    caller.state(RESTARTING)
    later = caller.call(retries=0)
    assert [caller.value(oid) for oid in (first, again, later)] == [b""] * 3
    caller.state(ALIVE, make_proc(2, 9))
    assert caller.value(first) == LOST
    sent = [msg.task for msg in caller.engine.peers[make_proc(2, 9)].out]
    assert sent == [again[:-3], later[:-3]], "in the order in which they were made"


def test_replies_of_an_actor_on_our_node_are_read_before_its_end_is_handled() -> None:
    caller = Caller(HERE)
    answered, open_call = caller.call(retries=0), caller.call(retries=0)
    caller.engine.rest = lambda proc: caller.answer(proc, answered)
    caller.state(DEAD)
    assert (caller.value(answered), caller.value(open_call)) == (OK, LOST)


def unavailable(caller: Caller, fails_fast: bool = True) -> None:
    caller.client.fails_fast = fails_fast
    caller.state(RESTARTING, unavailable=True)
    caller.calls.process_died(HERE, "it died")


def test_calls_that_run_at_most_once_fail_while_the_actor_restarts() -> None:
    caller = Caller(HERE)
    in_flight, in_flight_again = caller.call(retries=0), caller.call(retries=1)
    unavailable(caller)
    later, later_again = caller.call(retries=0), caller.call(retries=-1)
    caller.engine.time_passes()
    assert [caller.value(oid) for oid in (in_flight, later)] == [LOST, LOST]
    assert caller.errors == [ActorUnavailableError] * 2
    last = caller.call(retries=0)
    caller.state(ALIVE, make_proc(0, 8))
    assert caller.value(last) == LOST, "at once, as the actor runs again"
    sent = [msg.task for msg in caller.engine.peers[make_proc(0, 8)].out]
    assert sent == [in_flight_again[:-3], later_again[:-3]]
    caller.call(retries=0)
    assert len(caller.engine.peers[make_proc(0, 8)].out) == 3


def test_calls_that_wait_for_an_actor_that_dies_meanwhile_say_so() -> None:
    caller = Caller(HERE)
    unavailable(caller)
    later = caller.call(retries=0)
    assert caller.value(later) == b""
    caller.state(DEAD)
    assert caller.value(later) == LOST and caller.errors == [ActorDiedError]
    caller.engine.time_passes()
    assert len(caller.errors) == 1


@pytest.mark.parametrize("how", ["it moves", "its calls may be repeated"])
def test_calls_wait_for_an_actor_that(how: str) -> None:
    """It moves from a node that leaves, or starts for the first time; or its `max_task_retries` is not 0."""
    caller = Caller(HERE)
    caller.client.fails_fast = how == "it moves"
    caller.state(RESTARTING, unavailable=how != "it moves")
    later = caller.call(retries=0)
    caller.engine.time_passes()
    assert caller.value(later) == b""
    caller.state(ALIVE, make_proc(0, 8))
    assert [msg.task for msg in caller.engine.peers[make_proc(0, 8)].out] == [later[:-3]]


@pytest.mark.parametrize("ended", [True, False])
def test_a_call_repeated_for_a_lost_value_keeps_its_attempts(ended: bool) -> None:
    """Its value is lost as its worker is killed; whoever wanted to read it says so before we hear of that end."""
    caller = Caller(HERE)
    oid = caller.call(retries=1)
    call = caller.client.inflight.pop(oid[:-3])
    caller.calls.suspect(HERE if ended else make_proc(0, 9))
    call.retries = 0  # the reconstruction counts as its second attempt
    caller.calls.resubmit(call)
    caller.state(RESTARTING)
    caller.calls.process_died(HERE, "it died")
    caller.state(ALIVE, make_proc(0, 8))
    sent = caller.engine.peers.get(make_proc(0, 8))
    assert [msg.task for msg in sent.out] == [oid[:-3]] if ended else sent is None
    again = caller.client.inflight.get(oid[:-3])
    assert again is None or again.retries == 0, "the one attempt that it has"


def test_a_cancelled_call_fails_once() -> None:
    caller = Caller(HERE)
    unavailable(caller)
    later = caller.call(retries=0)
    (task,) = caller.client.failing
    assert caller.calls.cancel_queued(task)
    caller.engine.time_passes()
    assert caller.value(later) == b"" and not caller.errors, "its end is the canceller's"
