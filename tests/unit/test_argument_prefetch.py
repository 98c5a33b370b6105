"""Arguments of waiting tasks are fetched to the nodes of busy workers, and tasks go where theirs are."""

from __future__ import annotations

import pytest
from test_lease_manager import ELSEWHERE, HERE, ME, Client

from hpcray.common.ids import PUT_INDEX, make_proc, raylet_of
from hpcray.core.core_worker.lease_manager import ArgumentPrefetcher
from hpcray.core.core_worker.object_entry import STORED, ObjectEntry
from hpcray.core.core_worker.task import FunctionDescriptor, PendingTask
from hpcray.protocol import messages as m

SIZE = 64 << 20
LONG = 1_000_000.0  # a function of a second: nothing is sent ahead
THIRD = make_proc(5, 20)


class Ahead(Client):
    """A lease client of several nodes; its functions are long."""

    def __init__(self) -> None:
        super().__init__(LONG)
        self.entries: dict[bytes, ObjectEntry] = {}
        self.leases.prefetcher = ArgumentPrefetcher(self.entries, lambda dest, msg: self.sent.append((dest, msg)))

    def stored(self, *nodes: int) -> bytes:
        oid = ME + (1000 + len(self.entries)).to_bytes(5, "big") + PUT_INDEX
        entry = self.entries[oid] = ObjectEntry(None, 1)
        entry.state, entry.size, entry.nodes = STORED, SIZE, list(nodes)
        return oid

    def submit_with(self, *slots: bytes) -> PendingTask:
        task = self.task()
        task.slots = list(slots)
        self.leases.submit(task, self.scheduling_class)
        return task

    def fetched(self) -> list[tuple[bytes, list[bytes]]]:
        found = [(dest, [ref.id for ref in msg.refs]) for dest, msg in self.sent if isinstance(msg, m.Prefetch)]
        self.sent = [item for item in self.sent if not isinstance(item[1], m.Prefetch)]
        return found


@pytest.fixture
def client() -> Ahead:
    return Ahead()


def test_while_the_worker_is_busy_the_arguments_of_the_next_task_travel(client: Ahead) -> None:
    a, b = client.stored(1), client.stored(1)
    first = client.submit_with(a)
    client.grant(ELSEWHERE)
    assert client.pushed == [(first.id, ELSEWHERE)] and client.fetched() == [], "it starts at once"
    second = client.submit_with(b)
    assert client.fetched() == [(raylet_of(3), [b])]
    client.answer(first)
    assert client.pushed[-1] == (second.id, ELSEWHERE)


def test_arguments_of_one_task_per_worker_are_prefetched_and_of_the_next_when_one_is_taken(client: Ahead) -> None:
    objects = [client.stored(1) for _ in range(5)]
    first = client.submit_with(objects[0])
    client.grant(ELSEWHERE)
    for oid in objects[1:]:
        client.submit_with(oid)
    assert client.fetched() == [(raylet_of(3), [objects[1]])]
    client.answer(first)
    assert client.fetched() == [(raylet_of(3), [objects[2]])]


def test_arguments_are_prefetched_when_the_first_worker_is_there(client: Ahead) -> None:
    objects = [client.stored(1) for _ in range(3)]
    for oid in objects:
        client.submit_with(oid)
    assert client.fetched() == [], "nobody knows where they will run"
    client.grant(ELSEWHERE)
    assert client.fetched() == [(raylet_of(3), [objects[1]])]


def test_arguments_of_a_task_behind_one_without_arguments_are_prefetched(client: Ahead) -> None:
    client.submit()
    oid = client.stored(1)
    client.submit_with(oid)
    client.grant(ELSEWHERE)
    assert client.fetched() == [(raylet_of(3), [oid])]


def test_arguments_that_are_there_or_inline_are_not_prefetched(client: Ahead) -> None:
    there = client.stored(1, 3)
    inline = ME + bytes(5) + PUT_INDEX
    client.entries[inline] = ObjectEntry(None, 1)
    client.submit()
    client.grant(ELSEWHERE)
    client.submit_with(there)
    client.submit_with(inline)
    client.submit(3)
    assert client.fetched() == [] and not client.scheduling_class.prefetch_node


def test_each_worker_takes_the_task_whose_arguments_were_prefetched_to_its_node(client: Ahead) -> None:
    busy = client.submit(2)
    client.grant(ELSEWHERE)
    client.grant(THIRD)
    x, y = client.stored(1), client.stored(1)
    for_one, for_other = client.submit_with(x), client.submit_with(y)
    assert client.fetched() == [(raylet_of(3), [x]), (raylet_of(5), [y])]
    on_third = next(task for task in busy if task.worker == THIRD)
    client.answer(on_third)
    assert client.pushed[-1] == (for_other.id, THIRD)
    client.answer(next(task for task in busy if task.worker == ELSEWHERE))
    assert client.pushed[-1] == (for_one.id, ELSEWHERE)


def test_the_first_task_of_a_queue_is_not_passed_over_for_ever(client: Ahead) -> None:
    busy = client.submit(2)
    client.grant(ELSEWHERE)
    client.grant(THIRD)
    waits = client.submit_with(client.stored(1))  # for a worker that never ends
    assert client.fetched()[0][0] == raylet_of(3)
    client.submit(100)
    running = next(task for task in busy if task.worker == THIRD)
    for _ in range(50):
        client.answer(running)
        last, worker = client.pushed[-1]
        assert worker == THIRD
        if last == waits.id:
            return
        running = next(task for task in client.leases.workers[THIRD].inflight.values())
    raise AssertionError("it is still waiting")


@pytest.mark.parametrize("once", [True, False])
def test_behind_another_task_goes_only_what_might_have_gone_there_as_the_first(client: Ahead, once: bool) -> None:
    """What must not run twice is never sent ahead, nor what is not known to be short."""
    client.function.us = 100.0
    first, second = client.submit(2)
    promised = client.task()
    other = client.task(retries=0 if once else 3)
    if not once:
        other.fn = FunctionDescriptor(b"g" * 16, "g", b"")  # nobody knows how long it takes
    for task in (promised, other):
        client.leases.submit(task, client.scheduling_class)
    client.scheduling_class.prefetch_node[promised.id] = 5
    client.grant(ELSEWHERE)
    ahead = list(client.leases.workers[ELSEWHERE].inflight)
    assert ahead[:2] == [first.id, second.id] and promised.id in ahead
    assert other.id not in ahead


def test_a_cancelled_task_leaves_no_prefetch_node(client: Ahead) -> None:
    first = client.submit_with(client.stored(1))
    client.grant(ELSEWHERE)
    second = client.submit_with(client.stored(1))
    assert client.scheduling_class.prefetch_node
    assert client.leases.cancel_queued(second)
    assert not client.scheduling_class.prefetch_node
    client.answer(first)


def test_without_other_nodes_the_queue_is_a_queue() -> None:
    client = Client(LONG)
    tasks = client.submit(3)
    client.grant(HERE)
    for task in tasks:
        client.answer(task)
    assert [ident for ident, _ in client.pushed] == [task.id for task in tasks]
