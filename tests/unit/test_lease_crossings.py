"""Messages of a leased worker that cross those of its submitter."""

from __future__ import annotations

from test_lease_client import HERE, Client


def busy() -> Client:
    """A client with three short tasks at its one worker."""
    client = Client(us=10.0)
    client.submit()
    client.grant()
    client.submit(2)
    assert len(client.pushed) == 3
    return client


def test_what_crossed_a_worker_that_blocks_is_asked_back() -> None:
    client = busy()
    first, second, third = client.leases.workers[HERE].inflight
    client.leases.taken_back(HERE, [second])  # the third arrived after it had looked, and waits behind the first
    assert client.asked_back() == [HERE]
    client.leases.taken_back(HERE, [third])
    assert client.asked_back() == [HERE]
    assert list(client.leases.workers[HERE].inflight) == [first]


def test_nothing_is_asked_back_where_nothing_crossed() -> None:
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
    assert later in client.klass.queue
    client.leases.tick(100.0)
    assert client.returned() == []
