"""Messages of a leased worker that cross those of its submitter."""

from __future__ import annotations

from test_lease_manager import HERE, Client


def busy() -> Client:
    """A client with three short tasks at its one worker."""
    client = Client(us=10.0)
    client.submit()
    client.grant()
    client.submit(2)
    assert len(client.pushed) == 3
    return client


def test_tasks_that_crossed_the_message_of_a_blocking_worker_are_requested_back() -> None:
    client = busy()
    first, second, third = client.leases.workers[HERE].inflight
    client.leases.taken_back(HERE, [second])  # the third arrived after it had looked, and waits behind the first
    assert client.asked_back() == [HERE]
    client.leases.taken_back(HERE, [third])
    assert client.asked_back() == [HERE]
    assert list(client.leases.workers[HERE].inflight) == [first]


def test_no_task_is_requested_back_where_none_crossed() -> None:
    client = busy()
    client.leases.taken_back(HERE, list(client.leases.workers[HERE].inflight)[1:])
    assert client.asked_back() == []


def test_the_lease_of_a_worker_that_leaves_is_never_returned() -> None:
    client = Client()
    (task,) = client.submit()
    client.grant()
    client.leases.leaves(HERE)
    client.leases.reclaim(1)
    (later,) = client.submit()
    client.answer(task)
    assert client.returned() == []
    assert HERE not in client.leases.workers
    assert later in client.scheduling_class.queue
    client.leases.tick(100.0)
    assert client.returned() == []
