"""The lease queue: turns, requests that do not fit, and reservations for those that waited for too long."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.common.labels import bound_to, node_affinity
from hpcray.common.resources import Resources, fits, subtract
from hpcray.core.raylet.lease_queue import LONGEST_RESERVATION, RESERVE_AFTER, LeaseQueue, WorkerCap
from hpcray.core.raylet.lease_requests import LeaseRequest, round_count
from hpcray.core.raylet.local_resources import LocalResources
from hpcray.protocol.messages import Shape


def lease_request(name: str, total: int, **resources: int) -> LeaseRequest:
    shape = Shape(tuple(sorted(resources.items())))
    return LeaseRequest(name.encode(), 0, shape, local=True, decided_here=True, total=total)


class Queue(LeaseQueue):
    """A queue on a node that has plenty of everything; the tests say what of it is free, and what actors hold."""

    def __init__(self, *requests: LeaseRequest) -> None:
        self.node = LocalResources(0, {"CPU": 100, "GPU": 100, "disk": 100})
        super().__init__(self.node, WorkerCap(0.0, 0.0))
        for each in requests:
            self.update(0.0, each)

    def free(self, available: Resources) -> None:
        """From now on this is free, as it changes."""
        self.node.pool.available = available
        self.recheck_all()

    def actors_hold_everything(self) -> None:
        self.node.pool.held_by_actors = dict(self.node.pool.total)


def serve(queue: Queue, available: Resources, now: float = 0.0) -> list[str]:
    """Grant all that fits; the names in order."""
    out = []
    queue.free(available)
    for served in queue.serve(now, lambda env: True):
        served.granted += 1
        subtract(available, served.resources)
        out.append(served.holder.decode())
    queue.check_invariants()
    return out


def test_turns_rotate_over_requests_not_over_single_leases() -> None:
    queue = Queue(lease_request("a", 9, CPU=1), lease_request("b", 9, CPU=1), lease_request("c", 9, CPU=2))
    assert serve(queue, {"CPU": 7}) == ["a", "b", "c", "a", "b", "a"]
    assert serve(queue, {"CPU": 4}) == ["c", "b", "a"]


def test_a_request_for_many_leases_does_not_delay_one_for_few() -> None:
    queue = Queue(lease_request("wide", 1000, CPU=1))
    assert serve(queue, {"CPU": 2}) == ["wide", "wide"]
    queue.update(1.0, lease_request("narrow", 1, CPU=1))
    assert "narrow" in serve(queue, {"CPU": 2})


def test_a_request_that_does_not_fit_does_not_hold_up_one_that_does() -> None:
    queue = Queue(lease_request("big", 1, CPU=4), lease_request("gpu", 1, GPU=1), lease_request("small", 2, CPU=1))
    assert serve(queue, {"CPU": 3}) == ["small", "small"]
    assert queue.waiting == 2


def test_a_withdrawn_request_leaves_the_queue() -> None:
    a, b = lease_request("a", 1, CPU=1), lease_request("b", 1, CPU=1)
    queue = Queue(a, b)
    assert queue.only_request() is None
    a.total = 0
    queue.update(0.0, a)
    assert queue.only_request() is b
    assert serve(queue, {"CPU": 2}) == ["b"]
    assert queue.waiting == 0


def test_requests_are_skipped_when_no_worker_with_their_environment_can_be_had() -> None:
    shape = Shape((("CPU", 1),), "", (("A", "1"),))
    with_env = LeaseRequest(b"env", 0, shape, local=True, decided_here=True, total=1)
    queue = Queue(with_env, lease_request("plain", 1, CPU=1))
    queue.free({"CPU": 2})
    assert [one.holder for one in _taken(queue.serve(0.0, lambda env: not env))] == [b"plain"]


def _taken(requests: object) -> list[LeaseRequest]:
    out = []
    for each in requests:  # type: ignore[attr-defined]
        each.granted += 1
        out.append(each)
    return out


def test_resources_are_reserved_for_a_request_that_waited_for_too_long() -> None:
    big, small = lease_request("big", 1, CPU=4), lease_request("small", 100, CPU=1)
    queue = Queue(big, small)
    available = {"CPU": 3}
    assert serve(queue, available) == ["small"] * 3
    queue.update_reservation(RESERVE_AFTER - 0.1)
    assert queue.reserved is None
    available["CPU"] += 1
    assert serve(queue, available, RESERVE_AFTER - 0.1) == ["small"]
    queue.update_reservation(RESERVE_AFTER)
    assert queue.reserved is big
    for _ in range(3):
        available["CPU"] += 1
        assert serve(queue, available, RESERVE_AFTER) == []
    available["CPU"] += 1
    assert serve(queue, available, RESERVE_AFTER) == ["big"]
    assert queue.reserved is None
    available["CPU"] = 1
    assert serve(queue, available, RESERVE_AFTER) == ["small"]


def test_a_reservation_blocks_only_requests_that_would_take_it() -> None:
    big = lease_request("big", 1, CPU=2, GPU=1)
    queue = Queue(big, lease_request("small", 100, CPU=1), lease_request("other", 1, disk=1))
    assert serve(queue, {"CPU": 1}) == ["small"]
    queue.update_reservation(RESERVE_AFTER)
    assert queue.reserved is not None
    queue.reserved = big
    assert sorted(serve(queue, {"CPU": 5, "disk": 1})) == ["other", "small", "small", "small"]


def test_a_reservation_ends_so_that_tasks_it_depends_on_can_run() -> None:
    big = lease_request("big", 1, CPU=4)
    queue = Queue(big, lease_request("small", 100, CPU=1))
    assert serve(queue, {"CPU": 1}) == ["small"]
    queue.update_reservation(1.0)
    assert queue.reserved is big
    queue.update_reservation(2.0)
    assert queue.reserved is None, "its time is over: others may go again"
    assert serve(queue, {"CPU": 1}, 2.0) == ["small"]
    queue.update_reservation(2.5)
    assert queue.reserved is None, "the others run for as long as they were held up"
    queue.update_reservation(3.0)
    assert queue.reserved is big
    queue.update_reservation(4.9)
    assert queue.reserved is big, "the second reservation is twice as long"
    queue.actors_hold_everything()
    queue.update_reservation(5.0)
    assert queue.reserved is None
    assert big.reservation <= LONGEST_RESERVATION


def test_nothing_is_reserved_for_a_request_that_only_waits_for_its_turn() -> None:
    """Tasks of a few seconds keep a small class waiting for longer than that, which is no reason to keep CPUs idle."""
    big, small = lease_request("big", 1, CPU=2), lease_request("small", 100, CPU=1)
    queue = Queue(small)
    queue.update_reservation(2.0)
    assert queue.reserved is None
    queue.update(2.0, big)
    assert serve(queue, {"CPU": 1}, 3.0) == ["small"]
    assert serve(queue, {"CPU": 1}, 5.0) == ["small"], "whose turn was later"
    queue.update_reservation(6.5)
    assert queue.reserved is big


def test_a_request_that_was_away_for_a_moment_keeps_its_turn() -> None:
    big, small = lease_request("big", 1, CPU=2), lease_request("small", 100, CPU=1)
    queue = Queue(small, big)
    assert serve(queue, {"CPU": 1}, 0.0) == ["small"]
    big.total, big.returned_at = 0, 1.0
    queue.update(1.0, big)
    big.total = 1
    queue.update(1.5, big)
    assert serve(queue, {"CPU": 1}, 1.6) == ["small"]
    queue.update_reservation(2.0)
    assert queue.reserved is big


def test_a_request_served_without_waiting_overtakes_all_queued_ones() -> None:
    big = lease_request("big", 1, CPU=2)
    queue = Queue(big)
    queue.update_reservation(2.0)
    assert queue.reserved is None
    queue.note_served_unqueued()
    queue.update_reservation(2.5)
    assert queue.reserved is big


def test_nothing_is_reserved_for_a_request_for_what_actors_hold() -> None:
    queue = Queue(lease_request("big", 1, CPU=4), lease_request("small", 2, CPU=1))
    assert serve(queue, {"CPU": 1}) == ["small"]
    queue.actors_hold_everything()
    queue.update_reservation(100.0)
    assert queue.reserved is None


def test_a_request_that_returns_soon_keeps_its_age() -> None:
    traveller = lease_request("traveller", 1, CPU=4)
    queue = Queue(traveller)
    traveller.total, traveller.returned_at = 0, 3.0
    queue.update(3.0, traveller)
    traveller.total = 1
    queue.update(4.0, traveller)
    assert traveller.waiting_since == 0.0
    traveller.total = 0
    queue.update(5.0, traveller)
    traveller.total = 1
    queue.update(50.0, traveller)
    assert traveller.waiting_since == 50.0


REQUESTS = st.dictionaries(st.sampled_from(["CPU", "GPU"]), st.integers(1, 3), max_size=2)


@given(st.lists(st.tuples(REQUESTS, st.integers(1, 4)), min_size=1, max_size=8), st.integers(0, 12), st.integers(0, 6))
def test_every_request_that_fits_is_served_and_no_other(
    wanted: list[tuple[dict[str, int], int]], cpu: int, gpu: int
) -> None:
    requests = [lease_request(str(index), total, **request) for index, (request, total) in enumerate(wanted)]
    queue = Queue(*requests)
    available = {"CPU": cpu, "GPU": gpu}
    names = Counter(serve(queue, available))
    assert min(available.values()) >= 0
    for index, each in enumerate(requests):
        assert each.granted == names[str(index)] <= each.total
        assert each.granted == each.total or not fits(each.resources, available)
    assert queue.waiting == sum(each.granted < each.total for each in requests)


def test_unknown_strategies_are_refused() -> None:
    assert node_affinity("") is None and node_affinity("SPREAD") is None
    assert node_affinity("node:12") == (12, False)
    assert node_affinity("node:3:soft") == (3, True)
    assert bound_to("node:3:soft", 3) and not bound_to("node:3", 4)
    for wrong in ("spread", "node:", "node:x", "node:1:hard", "rack:1"):
        with pytest.raises(ValueError, match="is none of"):
            node_affinity(wrong)


@given(st.integers(0, 10**7))
def test_rounded_counts_are_exact_when_small_and_never_too_high(count: int) -> None:
    assert round_count(count) <= count
    assert count - round_count(count) <= (0 if count <= 64 else count / 8)
