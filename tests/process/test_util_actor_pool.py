"""`util.ActorPool`, `util.as_completed`, `util.map_unordered`, `util.ActorGroup`."""

from __future__ import annotations

import importlib
import os
import time

import pytest
from engine import NAME, PATIENCE, exceptions, hpcray_only, ray

util = importlib.import_module(f"{NAME}.util")
ActorPool = importlib.import_module(f"{NAME}.util.actor_pool").ActorPool
ActorGroup = importlib.import_module(f"{NAME}.util.actor_group").ActorGroup

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
class Worker:
    def double(self, value):
        return 2 * value

    def slow(self, value, delay):
        time.sleep(delay)
        return value

    def until(self, path, value):
        while not os.path.exists(path):
            time.sleep(0.01)
        return value

    def fail(self, value):
        if value == 1:
            raise ValueError("one")
        return value

    @ray.method(num_returns=2)
    def two(self, value):
        return value, -value


def double(actor, value):
    return actor.double.remote(value)


@pytest.fixture(scope="module")
def workers(session):
    return [Worker.remote() for _ in range(2)]


@pytest.fixture
def pool(workers):
    return ActorPool(workers)


class TestActorPool:
    def test_map_keeps_the_order(self, pool):
        delays = [0.2, 0.0, 0.1, 0.0]
        slow = pool.map(lambda actor, value: actor.slow.remote(value, delays[value]), range(4))
        assert list(slow) == [0, 1, 2, 3]
        assert list(pool.map(double, range(20))) == list(range(0, 40, 2))

    def test_map_unordered_yields_ready_results_first(self, pool, tmp_path):
        gate = tmp_path / "gate"

        def work(actor, value):
            return actor.until.remote(str(gate), value) if value == 0 else actor.double.remote(value)

        results = pool.map_unordered(work, range(4))
        assert [next(results) for _ in range(3)] == [2, 4, 6]
        gate.touch()
        assert list(results) == [0]

    def test_map_drops_what_was_submitted_before(self, pool):
        pool.submit(double, 100)
        assert list(pool.map(double, [1])) == [2]

    def test_map_does_not_wait_for_what_was_submitted_before(self, workers, tmp_path):
        @ray.remote(max_concurrency=4)
        class Threaded:
            def wait(self, value):
                while value == "late" and not (tmp_path / "gate").exists():
                    time.sleep(0.01)
                return value

        pool = ray.util.ActorPool([Threaded.remote()])
        pool.submit(lambda actor, value: actor.wait.remote(value), "late")
        assert list(pool.map(lambda actor, value: actor.wait.remote(value), [1, 2])) == [1, 2]
        (tmp_path / "gate").touch()

    def test_an_actor_that_died_leaves_the_pool(self):
        @ray.remote
        class Mortal:
            def work(self, value):
                return os._exit(1) if value == "die" else value

        pool = ray.util.ActorPool([Mortal.remote(), Mortal.remote()])
        for value in ("die", 1, 2, 3):
            pool.submit(lambda actor, value: actor.work.remote(value), value)
        with pytest.raises(exceptions.ActorDiedError):
            pool.get_next()
        assert [pool.get_next() for _ in range(3)] == [1, 2, 3]
        assert (len(pool._idle_actors), len(pool._pending_submits)) == (1, 0)

    def test_get_next_returns_results_in_the_order_of_submission(self, pool):
        assert not pool.has_next()
        for value in range(5):
            pool.submit(double, value)
        assert (pool.has_next(), pool.has_free()) == (True, False)
        assert [pool.get_next() for _ in range(5)] == [0, 2, 4, 6, 8]
        assert (pool.has_next(), pool.has_free()) == (False, True)
        with pytest.raises(StopIteration, match="No more results"):
            pool.get_next()
        with pytest.raises(StopIteration):
            pool.get_next_unordered()

    def test_get_next_unordered_returns_every_result_once(self, pool):
        for value in range(5):
            pool.submit(double, value)
        assert sorted(pool.get_next_unordered() for _ in range(5)) == [0, 2, 4, 6, 8]

    def test_get_next_after_get_next_unordered_is_refused(self, workers, tmp_path):
        pool, gate = ActorPool(workers), tmp_path / "gate"
        pool.submit(lambda actor, value: actor.until.remote(str(gate), value), 0)
        pool.submit(double, 1)
        assert pool.get_next_unordered() == 2
        with pytest.raises(ValueError, match="not allowed to call get_next"):
            pool.get_next()
        gate.touch()
        assert pool.get_next_unordered(timeout=PATIENCE) == 0

    def test_a_late_result_can_be_taken_later(self, pool, tmp_path):
        gate = tmp_path / "gate"
        pool.submit(lambda actor, value: actor.until.remote(str(gate), value), "late")
        with pytest.raises(TimeoutError):
            pool.get_next(timeout=0.05)
        with pytest.raises(TimeoutError):
            pool.get_next_unordered(timeout=0.05)
        gate.touch()
        assert pool.get_next(timeout=PATIENCE) == "late"

    # Ray 2.60's get_next_unordered fails here with an UnboundLocalError.
    @pytest.mark.parametrize("take", ["get_next", pytest.param("get_next_unordered", marks=hpcray_only)])
    def test_a_late_result_can_be_dropped(self, pool, tmp_path, take):
        gate = tmp_path / "gate"
        pool.submit(lambda actor, value: actor.until.remote(str(gate), value), "late")
        with pytest.raises(TimeoutError):
            getattr(pool, take)(timeout=0.05, ignore_if_timedout=True)
        assert (pool.has_next(), pool.has_free()) == (False, True)
        gate.touch()
        assert list(pool.map(double, [1, 2])) == [2, 4]

    def test_a_failed_call_of_a_pool_costs_one_result(self, pool):
        for value in range(3):
            pool.submit(lambda actor, value: actor.fail.remote(value), value)
        assert pool.get_next() == 0
        with pytest.raises(ValueError, match="one"):
            pool.get_next()
        assert pool.get_next() == 2
        assert list(pool.map(double, [4])) == [8]

    def test_a_call_of_a_pool_may_have_several_returns(self, pool):
        assert list(pool.map(lambda actor, value: actor.two.remote(value), [1, 2, 3])) == [[1, -1], [2, -2], [3, -3]]

    @hpcray_only
    def test_a_function_that_returns_no_ref_is_refused(self, pool):
        with pytest.raises(TypeError, match="ObjectRef"):
            pool.submit(lambda actor, value: value, 1)
        assert pool.has_free()

    def test_actors_can_be_pushed_and_popped(self, workers):
        pool = ActorPool(workers[:1])
        with pytest.raises(ValueError, match="already belongs"):
            pool.push(workers[0])
        pool.push(workers[1])
        assert {pool.pop_idle(), pool.pop_idle()} == set(workers)
        assert pool.pop_idle() is None
        pool.submit(double, 1)
        assert not pool.has_next()
        pool.push(workers[0])
        with pytest.raises(ValueError, match="already belongs"):
            pool.push(workers[0])
        assert pool.get_next(timeout=PATIENCE) == 2


@ray.remote
def wait_for(path, value):
    while path and not os.path.exists(path):
        time.sleep(0.01)
    if value is None:
        raise KeyError("none")
    return value


class TestCompletion:
    def test_as_completed_yields_values_as_they_become_ready(self, tmp_path):
        gate = tmp_path / "gate"
        refs = [wait_for.remote(str(gate), "late"), wait_for.remote("", 1), wait_for.remote("", 2)]
        results = util.as_completed(refs, chunk_size=1)
        assert {next(results), next(results)} == {1, 2}
        gate.touch()
        assert list(results) == ["late"]

    def test_as_completed_can_yield_refs(self):
        refs = [wait_for.remote("", value) for value in range(5)]
        assert set(util.as_completed(refs, yield_obj_refs=True)) == set(refs)

    def test_as_completed_raises_an_error_at_its_turn(self):
        with pytest.raises(KeyError):
            list(util.as_completed([wait_for.remote("", None)]))

    def test_map_unordered_of_a_function_yields_all_results(self):
        cube = ray.remote(lambda x: x**3)
        assert sorted(util.map_unordered(cube, range(30))) == [x**3 for x in range(30)]
        few = util.map_unordered(cube, range(30), backpressure_size=2, chunk_size=2, fetch_local=False)
        assert sorted(few) == [x**3 for x in range(30)]

    def test_ready_refs_come_in_chunks_in_the_order_in_which_they_were_given(self, tmp_path):
        gates = [tmp_path / str(number) for number in range(4)]
        refs = [wait_for.remote(str(gate), number) for number, gate in enumerate(gates)]
        results = util.as_completed(refs, chunk_size=2)
        gates[3].touch()
        ray.wait([refs[3]])
        gates[1].touch()
        assert [next(results), next(results)] == [1, 3]
        gates[2].touch()
        gates[0].touch()
        assert list(results) == [0, 2]

    def test_map_unordered_limits_the_tasks_in_flight(self):
        taken = []

        def items():
            for item in range(20):
                taken.append(item)
                yield item

        results = util.map_unordered(ray.remote(lambda x: x), items(), backpressure_size=4, chunk_size=1)
        next(results)
        assert len(taken) <= 6
        assert sorted([*results, taken[0]])[-1] == 19

    @hpcray_only
    def test_invalid_sizes_are_refused(self):
        with pytest.raises(ValueError, match="chunk_size"):
            util.as_completed([], chunk_size=0)
        with pytest.raises(ValueError, match="backpressure_size"):
            util.map_unordered(wait_for, [], backpressure_size=0)


class Member:
    def __init__(self, start, step=1):
        self.value, self.step = start, step

    def advance(self, times=1):
        self.value += times * self.step
        return self.value

    def pid(self):
        return os.getpid()


@hpcray_only
class TestActorGroup:
    def test_a_call_of_an_actor_group_goes_to_all_actors(self):
        group = ActorGroup(Member, 2, num_cpus_per_actor=0, init_args=[10], init_kwargs={"step": 5})
        assert len(group) == 2
        assert ray.get(group.advance.remote()) == [15, 15]
        assert ray.get(group[1].actor.advance.remote(times=2)) == 25
        assert ray.get(group.advance.remote()) == [20, 30]
        assert len(set(ray.get(group.pid.remote()))) == 2
        with pytest.raises(TypeError, match=r"\.remote\(\)"):
            group.advance()
        group.shutdown()

    def test_actor_groups_grow_shrink_and_shut_down(self):
        group = ActorGroup(Member, num_cpus_per_actor=0, init_args=[1])
        group.add_actors(2)
        second = group[1]
        group.remove_actors([0])
        assert (len(group), group[0] == second) == (2, True)
        with pytest.raises(RuntimeError, match="already been started"):
            group.start()
        group.shutdown()
        assert len(group) == 0
        with pytest.raises(exceptions.RayActorError):
            ray.get(second.actor.pid.remote())
        with pytest.raises(RuntimeError, match="start it again"):
            _ = group.advance
        group.start()
        assert ray.get(group.advance.remote()) == [2]

    def test_actor_groups_refuse_invalid_numbers(self):
        with pytest.raises(ValueError, match="num_actors"):
            ActorGroup(Member, 0)
        with pytest.raises(ValueError, match="negative"):
            ActorGroup(Member, 1, num_cpus_per_actor=-1)
