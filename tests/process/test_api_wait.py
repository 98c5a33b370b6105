"""get with a timeout, and wait."""

from __future__ import annotations

import threading
import time

import pytest
from engine import PATIENCE, exceptions, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


@ray.remote
class Gate:
    """Tasks wait until a test opens it."""

    def __init__(self):
        self._event = threading.Event()

    def open(self):
        self._event.set()

    def passed(self, value):
        assert self._event.wait(PATIENCE)
        return value


@pytest.fixture
def gate():
    gate = Gate.options(max_concurrency=100, num_cpus=0).remote()
    ray.get(gate.__ray_ready__.remote())
    yield gate
    gate.open.remote()


class TestGetTimeout:
    @pytest.mark.parametrize("timeout", [0, 0.01, 0.2])
    def test_a_timeout_is_raised(self, gate, timeout):
        ref = gate.passed.remote(1)
        started = time.monotonic()
        with pytest.raises(exceptions.GetTimeoutError) as caught:
            ray.get(ref, timeout=timeout)
        assert timeout <= time.monotonic() - started + 0.01
        assert isinstance(caught.value, TimeoutError)
        gate.open.remote()
        assert ray.get(ref, timeout=PATIENCE) == 1

    def test_zero_takes_what_is_there(self):
        ref = echo.remote(5)
        ray.get(ref)
        assert ray.get(ref, timeout=0) == 5
        assert ray.get([ray.put(1), ref], timeout=0) == [1, 5]

    def test_one_of_several_is_late(self, gate):
        refs = [echo.remote(1), gate.passed.remote(2), ray.put(3)]
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(refs, timeout=0.3)
        gate.open.remote()
        assert ray.get(refs, timeout=PATIENCE) == [1, 2, 3]

    def test_a_value_in_time_is_returned(self):
        assert ray.get(echo.remote(1, 0.1), timeout=PATIENCE) == 1

    def test_minus_one_is_none(self):
        assert ray.get(echo.remote(1, 0.1), timeout=-1) == 1

    def test_a_get_can_time_out_again_and_again(self, gate):
        ref = gate.passed.remote("late")
        for _ in range(50):
            with pytest.raises(exceptions.GetTimeoutError):
                ray.get(ref, timeout=0.001)
        gate.open.remote()
        assert ray.get(ref) == "late"

    def test_a_get_in_a_task_times_out(self, gate):
        @ray.remote
        def attempt(box):
            try:
                return ray.get(box[0], timeout=0.1)
            except exceptions.GetTimeoutError:
                return "timeout"

        ref = gate.passed.remote(1)
        assert ray.get(attempt.remote([ref])) == "timeout"
        gate.open.remote()
        assert ray.get(attempt.remote([ref]) if ray.get(ref) else None) == 1


class TestWait:
    def test_splits_in_the_order_given(self, gate):
        late, one, two = gate.passed.remote(0), echo.remote(1), echo.remote(2)
        ready, rest = ray.wait([late, two, one], num_returns=2)
        assert ready == [two, one]
        assert rest == [late]

    def test_returns_no_more_than_num_returns(self):
        refs = [ray.put(i) for i in range(5)]
        ready, rest = ray.wait(refs, num_returns=2)
        assert (len(ready), len(rest)) == (2, 3)
        assert [ref for ref in refs if ref in ready] == ready
        assert [ref for ref in refs if ref not in ready] == rest
        assert len(ray.wait(refs)[0]) == 1

    def test_all_refs_are_ready_in_the_end(self):
        refs = [echo.remote(i, 0.05) for i in range(10)]
        ready, rest = ray.wait(refs, num_returns=10)
        assert set(ready) == set(refs)
        assert rest == []

    def test_a_timeout_returns_what_is_ready(self, gate):
        late, there = gate.passed.remote(1), ray.put(2)
        assert ray.wait([late], timeout=0) == ([], [late])
        started = time.monotonic()
        assert ray.wait([late, there], num_returns=2, timeout=0.2) == ([there], [late])
        assert time.monotonic() - started >= 0.19
        gate.open.remote()
        assert ray.wait([late], timeout=PATIENCE) == ([late], [])

    def test_an_error_is_ready(self):
        ref = ray.remote(lambda: 1 / 0).remote()
        assert ray.wait([ref]) == ([ref], [])
        with pytest.raises(ZeroDivisionError):
            ray.get(ref)

    def test_a_large_result_without_fetching(self):
        ref = ray.remote(lambda: b"x" * 1_000_000).remote()
        assert ray.wait([ref], fetch_local=False) == ([ref], [])
        assert len(ray.get(ref)) == 1_000_000

    def test_as_a_loop_over_results(self):
        pending = [echo.remote(i, 0.001 * (i % 5)) for i in range(100)]
        found = []
        while pending:
            ready, pending = ray.wait(pending)
            found += ray.get(ready)
        assert sorted(found) == list(range(100))

    @pytest.mark.parametrize("fetch_local", [True, False])
    def test_what_is_left_over_may_grow_and_shrink_between_two_calls(self, gate, fetch_local):
        pending = [gate.passed.remote(i) for i in range(30)]
        assert ray.wait(pending, timeout=0.01, fetch_local=fetch_local) == ([], pending)
        dropped = pending.pop(3)
        added = echo.remote("added", 0.05)
        pending.insert(7, added)
        ready, pending = ray.wait(pending, fetch_local=fetch_local, timeout=PATIENCE)
        assert (ready, len(pending)) == ([added], 29)
        assert ray.wait([*pending, dropped], timeout=0.01, fetch_local=fetch_local)[0] == []
        late = [*reversed(pending), dropped]
        gate.open.remote()
        while late:
            ready, late = ray.wait(late, num_returns=min(7, len(late)), fetch_local=fetch_local, timeout=PATIENCE)
            assert ready and len(ready) <= 7
        assert ray.wait(pending, num_returns=29, fetch_local=fetch_local, timeout=PATIENCE) == (pending, [])

    def test_large_values_that_are_left_over_are_found_too(self):
        pending = [echo.remote(b"x" * 200_000, 0.01 * (i % 4)) for i in range(12)]
        found = set()
        while pending:
            ready, pending = ray.wait(pending, timeout=PATIENCE)
            found.update(ready)
        assert len(found) == 12

    def test_several_threads_wait_for_the_same_refs(self, gate):
        refs = [gate.passed.remote(i) for i in range(5)]
        found = []

        def loop():
            left = list(refs)
            while left:
                _, left = ray.wait(left, timeout=PATIENCE, fetch_local=False)
            found.append(True)

        threads = [threading.Thread(target=loop) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        gate.open.remote()
        for thread in threads:
            thread.join(PATIENCE)
        assert found == [True] * 4

    def test_left_over_refs_are_refused_when_they_occur_twice(self):
        _, rest = ray.wait([ray.put(i) for i in range(3)])
        with pytest.raises(ValueError):
            ray.wait(rest + rest)
        rest.append(5)
        with pytest.raises(TypeError):
            ray.wait(rest)

    def test_wait_for_no_refs_returns_two_empty_lists(self):
        assert ray.wait([]) == ([], [])

    def test_wait_inside_a_task(self):
        @ray.remote
        def first_of(box):
            ready, rest = ray.wait(box)
            return ray.get(ready[0]), len(rest)

        assert ray.get(first_of.remote([echo.remote(1), echo.remote(2, 0.5)])) == (1, 1)

    def test_bad_arguments_of_wait_are_refused(self):
        ref = ray.put(1)
        for bad in (ref, (ref,), [1], "x", None):
            with pytest.raises(TypeError):
                ray.wait(bad)
        with pytest.raises(ValueError):
            ray.wait([ref, ref])
        for options in ({"num_returns": 0}, {"num_returns": 2}, {"num_returns": -1}, {"timeout": -1}):
            with pytest.raises(ValueError):
                ray.wait([ref], **options)
