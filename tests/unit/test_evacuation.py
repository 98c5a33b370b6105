"""The objects of a process that only a leaving node has go to others, whatever becomes of these meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from table_kit import ME, Table, put_id

from hpcray.common.ids import raylet_of
from hpcray.core.core_worker.object_table import Waiter
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.drain_client import ObjectEvacuation

LEAVES, TARGETS = 2, [4, 5, 6]


class Process:
    """What `ObjectEvacuation` needs of one: timers run when `look` is called."""

    me, node = ME, 1

    def __init__(self) -> None:
        self.table = Table()
        self.timers: list[Callable[[float], None]] = []
        self.sent: list[m.Message] = []
        self.engine = SimpleNamespace(
            add_timer=lambda when, call: self.timers.append(call),
            send=lambda dest, msg: self.sent.append(msg),
            flush=lambda: None,
        )

    def look(self) -> None:
        timers, self.timers = self.timers, []
        for call in timers:
            call(0.0)

    def opened(self) -> list[int]:
        """The nodes that were asked to take a copy since the last look."""
        return [dest[1] for dest, msg in self.table.said() if isinstance(msg, m.Open)]


@pytest.fixture
def process() -> Any:
    """A process that owns one object, on the node that leaves."""
    found = Process()
    found.table.stored(put_id(), node=LEAVES)
    return found


def first_target() -> int:
    return TARGETS[int.from_bytes(put_id()[-8:], "big") % len(TARGETS)]


def after(node: int) -> int:
    return TARGETS[(TARGETS.index(node) + 1) % len(TARGETS)]


def test_an_object_is_copied_and_its_owner_says_so(process: Any) -> None:
    ObjectEvacuation(process, m.Evacuate(LEAVES, TARGETS)).go_on()
    assert process.opened() == [first_target()] and not process.sent
    process.table.recovery.on_replica(put_id(), first_target(), "")
    process.look()
    assert process.sent == [m.Evacuated(LEAVES)] and not process.opened()


def test_a_target_that_has_no_room_or_dies_is_followed_by_the_next(process: Any) -> None:
    one, other, third = first_target(), after(first_target()), after(after(first_target()))
    ObjectEvacuation(process, m.Evacuate(LEAVES, TARGETS)).go_on()
    assert process.opened() == [one]
    process.table.recovery.on_replica(put_id(), one, "there is no room")
    process.look()
    assert process.opened() == [other]
    process.table.recovery.mark_node_dead(other)
    process.table.recovery.node_died(other, "power")
    process.look()
    assert process.opened() == [third] and not process.sent
    process.table.recovery.on_replica(put_id(), third, "there is no room")
    process.look()
    assert process.sent == [m.Evacuated(LEAVES)], "none can take it"
    assert not process.table.replicas.failed and not process.opened()


def test_a_target_that_has_left_before_is_not_waited_for(process: Any) -> None:
    """Several nodes leave at a time: the deadline of this one would have to pass."""
    process.table.recovery.mark_node_dead(first_target())
    process.table.recovery.node_died(first_target(), "it left")
    process.table.said()
    ObjectEvacuation(process, m.Evacuate(LEAVES, TARGETS)).go_on()
    process.look()
    assert process.opened() == [after(first_target())]
    process.table.recovery.on_replica(put_id(), after(first_target()), "")
    process.look()
    assert process.sent == [m.Evacuated(LEAVES)]


def test_what_an_actor_of_the_node_returns_after_the_answer_is_copied_too(process: Any) -> None:
    ObjectEvacuation(process, m.Evacuate(LEAVES, TARGETS)).go_on()
    process.table.recovery.on_replica(put_id(), first_target(), "")
    process.look()
    assert process.sent == [m.Evacuated(LEAVES)]
    process.table.stored(put_id(2), node=LEAVES)
    process.opened()
    process.look()
    assert len(process.opened()) == 1
    process.table.recovery.mark_node_dead(LEAVES)
    process.table.recovery.node_died(LEAVES, "it left")
    process.table.recovery.on_replica(put_id(2), TARGETS[0], "")
    while process.timers:
        process.table.replicas.fail_all("the test ends")
        process.look()
    assert process.sent == [m.Evacuated(LEAVES)], "there is one answer"


def test_many_objects_are_copied_a_few_at_a_time(process: Any) -> None:
    for number in range(2, 101):
        process.table.stored(put_id(number), node=LEAVES)
    ObjectEvacuation(process, m.Evacuate(LEAVES, TARGETS)).go_on()
    copied, asked = 0, [(msg.id, dest[1]) for dest, msg in process.table.said()]
    while not process.sent:
        assert 0 < len(asked) <= 32
        for oid, node in asked:
            process.table.recovery.on_replica(oid, node, "")
        copied += len(asked)
        process.look()
        asked = [(msg.id, dest[1]) for dest, msg in process.table.said() if isinstance(msg, m.Open)]
    assert copied == 100 and process.sent == [m.Evacuated(LEAVES)]


def test_a_copy_on_a_dead_node_is_refused_at_once() -> None:
    """No answer could come: `put(replicas=2)` would wait for ever."""
    table, waiter = Table(), Waiter()
    table.stored(put_id(), node=1)
    table.recovery.mark_node_dead(4)
    table.recovery.replicate(put_id(), 4, waiter)
    assert table.said() == [] and waiter.count == 0 and table.fired == [waiter]
    assert table.replicas.take_failure(put_id(), 4) == "node 4 is dead"
    table.recovery.replicate(put_id(), 5, waiter)
    assert [dest for dest, _ in table.said()] == [raylet_of(5)]
    table.check_invariants()
