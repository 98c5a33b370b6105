"""Refs that travel: in arguments, in results, in the state of actors; what they name stays right."""

from __future__ import annotations

import asyncio
import copy
import gc
import importlib
import os
import signal
import time

import numpy as np
import pytest
from engine import PATIENCE, alive, eventually, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 4, "object_store_memory": 256 << 20}

LARGE = 200_000


def churn():
    """Put more than the store holds, so that what was freed too early is overwritten."""
    gc.collect()
    for i in range(60):
        ray.put(np.full(1 << 20, i))
        ray.put(i)


@ray.remote
def make(start, size=LARGE):
    return np.arange(start, start + size)


@ray.remote
def put(value):
    return ray.put(value)


@ray.remote
def resolve(value):
    """Replace every ref in a nest of lists, dicts and objects by its value."""
    if isinstance(value, ray.ObjectRef):
        return resolve_here(ray.get(value))
    return resolve_here(value)


def resolve_here(value):
    if isinstance(value, ray.ObjectRef):
        return resolve_here(ray.get(value))
    if isinstance(value, (list, tuple)):
        return [resolve_here(item) for item in value]
    if isinstance(value, dict):
        return {key: resolve_here(item) for key, item in value.items()}
    if isinstance(value, Holder):
        return resolve_here(vars(value))
    return value


class Holder:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


@ray.remote
class Keeper:
    """Keeps what it is given."""

    def __init__(self, first=None):
        self.kept = {"first": first}

    def keep(self, key, value):
        self.kept[key] = value

    def read(self, key):
        return resolve_here(self.kept[key])

    def hand_out(self, key):
        return self.kept[key]

    def drop(self, key):
        del self.kept[key]
        gc.collect()

    def put(self, value):
        return ray.put(value)

    def pid(self):
        return os.getpid()


class TestInArguments:
    def test_in_containers_and_objects(self):
        small, large, task = ray.put("s"), ray.put(np.arange(LARGE)), make.remote(5, 3)
        nest = {"list": [small, [task]], "holder": Holder(large=large, other=(small, 1))}
        got = ray.get(resolve.remote(nest))
        assert got["list"][0] == "s"
        assert got["list"][1][0].tolist() == [5, 6, 7]
        assert got["holder"]["large"][-1] == LARGE - 1
        assert got["holder"]["other"] == ["s", 1]

    def test_a_ref_in_a_ref_in_a_ref(self):
        ref = ray.put("core")
        for _ in range(5):
            ref = ray.put([ref])
        assert ray.get(resolve.remote([ref])) == [[[[[["core"]]]]]]

    def test_inner_refs_outlive_the_names_of_the_driver(self):
        outer = ray.put([ray.put(np.arange(LARGE)), ray.put("small"), make.remote(7)])
        churn()
        array, small, made = ray.get(ray.get(outer))
        assert (array[-1], small, made[0]) == (LARGE - 1, "small", 7)

    def test_a_ref_dropped_right_after_the_call(self):
        calls = [resolve.remote([ray.put(np.full(LARGE, i)), ray.put(i)]) for i in range(20)]
        churn()
        for i, (array, number) in enumerate(ray.get(calls)):
            assert (array[0], number) == (i, i)

    def test_a_top_level_argument_dropped_before_the_task_starts(self):
        @ray.remote
        def total(_, array):
            return int(array.sum())

        calls = [total.remote(make.remote(0), ray.put(np.full(LARGE, i))) for i in range(8)]
        churn()
        assert ray.get(calls) == [i * LARGE for i in range(8)]

    def test_pending_refs_inside_arguments(self):
        @ray.remote
        def slow(i):
            import time

            time.sleep(0.2)
            return i

        assert ray.get(resolve.remote([slow.remote(i) for i in range(3)])) == [0, 1, 2]

    def test_passed_on_through_several_tasks(self):
        @ray.remote
        def pass_on(box, times):
            return ray.get(box[0]) if times == 0 else ray.get(pass_on.remote(box, times - 1))

        call = pass_on.remote([ray.put(np.arange(LARGE))], 4)
        churn()
        assert ray.get(call)[-1] == LARGE - 1


class TestReturned:
    def test_a_ref_as_the_result(self):
        inner = ray.get(put.remote("value"))
        assert isinstance(inner, ray.ObjectRef)
        assert ray.get(inner) == "value"

    def test_large_values_owned_by_a_worker(self):
        inners = ray.get([put.remote(np.full(LARGE, i)) for i in range(8)])
        churn()
        assert [int(array[0]) for array in ray.get(inners)] == list(range(8))

    def test_a_ref_of_a_task_that_the_task_started(self):
        @ray.remote
        def start():
            return make.remote(3), [make.remote(4)]

        three, (four,) = ray.get(start.remote())
        churn()
        assert [int(a[0]) for a in ray.get([three, four])] == [3, 4]

    def test_a_ref_in_a_large_result(self):
        @ray.remote
        def both():
            return np.ones(LARGE), ray.put("small"), ray.put(np.full(LARGE, 2))

        array, small, large = ray.get(both.remote())
        churn()
        assert (array[0], ray.get(small), ray.get(large)[0]) == (1, "small", 2)

    def test_the_argument_itself(self):
        @ray.remote
        def back(box):
            return box

        ref = ray.put(np.arange(LARGE))
        (again,) = ray.get(back.remote([ref]))
        assert again == ref
        del ref
        churn()
        assert ray.get(again)[-1] == LARGE - 1

    def test_a_result_that_is_never_fetched(self):
        for _ in range(50):
            put.remote(np.ones(LARGE))
        churn()
        assert ray.get(ray.get(put.remote(1))) == 1

    def test_a_borrowed_ref_passed_on_by_the_borrower(self):
        inner = ray.get(put.remote(np.full(LARGE, 9)))
        call = resolve.remote([inner])
        del inner
        churn()
        assert ray.get(call)[0][0] == 9


class TestKeptByActors:
    @pytest.mark.parametrize("value", ["small", np.arange(LARGE)], ids=["small", "large"])
    def test_beyond_the_call(self, value):
        keeper = Keeper.remote()
        ray.get(keeper.keep.remote("k", [ray.put(value)]))
        churn()
        assert np.array_equal(ray.get(keeper.read.remote("k"))[0], value)

    def test_given_to_the_constructor(self):
        keeper = Keeper.remote([ray.put(np.full(LARGE, 4)), ray.put("c")])
        churn()
        array, text = ray.get(keeper.read.remote("first"))
        assert (array[0], text) == (4, "c")

    def test_of_a_pending_task(self):
        keeper = Keeper.remote()
        ray.get(keeper.keep.remote("k", [make.remote(11)]))
        churn()
        assert ray.get(keeper.read.remote("k"))[0][0] == 11

    def test_handed_from_actor_to_actor(self):
        first, second = Keeper.remote(), Keeper.remote()
        ray.get(first.keep.remote("k", [ray.put(np.full(LARGE, 6))]))
        ray.get(second.keep.remote("k", ray.get(first.hand_out.remote("k"))))
        ray.get(first.drop.remote("k"))
        churn()
        assert ray.get(second.read.remote("k"))[0][0] == 6

    def test_owned_by_an_actor_kept_by_the_driver(self):
        keeper = Keeper.remote()
        ref = ray.get(keeper.put.remote(np.full(LARGE, 3)))
        churn()
        assert ray.get(ref)[0] == 3

    def test_many_keepers_of_one_object(self):
        keepers = [Keeper.remote() for _ in range(4)]
        box = [ray.put(np.full(LARGE, 8))]
        ray.get([keeper.keep.remote("k", box) for keeper in keepers])
        del box
        ray.get([keeper.drop.remote("k") for keeper in keepers[:3]])
        churn()
        assert ray.get(keepers[3].read.remote("k"))[0][0] == 8

    def test_taken_back_out_of_an_actor(self):
        keeper = Keeper.remote()
        ray.get(keeper.keep.remote("k", [ray.put(np.full(LARGE, 5))]))
        (ref,) = ray.get(keeper.hand_out.remote("k"))
        ray.get(keeper.drop.remote("k"))
        churn()
        assert ray.get(ref)[0] == 5

    @pytest.mark.parametrize("value", ["small", b"large" * LARGE], ids=["small", "large"])
    def test_the_owner_dies(self, value):
        """The value, if it was copied in time, or an error; no hang."""
        keeper = Keeper.remote()
        ref = ray.get(keeper.put.remote(value))
        pid = ray.get(keeper.pid.remote())
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        try:
            assert ray.get(ref, timeout=PATIENCE) == value
        except exceptions.ObjectLostError:
            pass

    @hpcray_only
    def test_the_store_gets_its_room_back(self):
        """Ten times the store's size, each piece kept by an actor for a while."""
        keeper = Keeper.remote()
        for i in range(100):
            ray.get(keeper.keep.remote("k", [ray.put(np.full(3 << 20, i))]))
            assert ray.get(keeper.read.remote("k"))[0][-1] == i


class TestReady:
    """`_ready` and `_on_ready`: an object exists, and its value stays where it is."""

    def test_they_wait_for_the_object_and_not_for_its_value(self):
        @ray.remote
        def late():
            time.sleep(0.3)
            return np.zeros(LARGE)

        async def wait_for(ref):
            return await ref._ready()

        ref = late.remote()
        calls = []
        ref._on_ready(calls.append)
        withdraw = ref._on_ready(lambda error: calls.append("withdrawn"))
        withdraw()
        assert calls == [] and asyncio.run(wait_for(ref)) == ref
        assert eventually(lambda: calls == [None])
        ref._on_ready(calls.append)
        assert calls == [None, None], "at once, where it exists"

    def test_a_cancelled_wait_is_withdrawn(self):
        @ray.remote
        def late():
            time.sleep(0.5)

        async def give_up(ref):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(ref._ready(), 0.05)

        ref = late.remote()
        asyncio.run(give_up(ref))
        assert ray.get(ref, timeout=PATIENCE) is None


@hpcray_only
class TestOutOfScope:
    """Data's accounting of memory hangs on these calls: each comes once, and when all holders are gone."""

    @staticmethod
    def watch(ref):
        calls = []
        watching = importlib.import_module("hpcray.compat.names.worker").global_worker.core_worker
        assert watching.add_object_out_of_scope_callback(ref, calls.append)
        return calls

    @pytest.mark.parametrize("size", [1, 1 << 20])
    def test_refs_tasks_and_borrowers_keep_an_object(self, size):
        @ray.remote
        class Keeper:
            def keep(self, box):
                self.box = box

            def drop(self):
                self.box = None

        @ray.remote
        def slow(value):
            time.sleep(0.3)

        ref = ray.put(b"x" * size)
        ident = ref.binary()
        calls = self.watch(ref)
        twice = self.watch(ref)
        keeper = Keeper.remote()
        ray.get(keeper.keep.remote([ref]))
        task = slow.remote(ref)
        del ref
        ray.get(task)
        time.sleep(0.1)
        assert calls == []
        ray.get(keeper.drop.remote())
        assert eventually(lambda: calls == [ident]) and twice == [ident]

    def test_the_result_of_a_task_in_a_worker(self):
        @ray.remote
        def counts():
            calls = self.watch(make.remote(1))
            return eventually(lambda: len(calls) == 1)

        assert ray.get(counts.remote(), timeout=PATIENCE)

    def test_a_callback_that_raises_does_not_stop_the_others(self, capfd):
        watching = importlib.import_module("hpcray.compat.names.worker").global_worker.core_worker
        ref = ray.put(1)
        watching.add_object_out_of_scope_callback(ref, lambda ident: 1 / 0)
        calls = self.watch(ref)
        del ref
        assert eventually(lambda: len(calls) == 1) and "ZeroDivisionError" in capfd.readouterr().err

    def test_the_owner_alone_may_watch(self):
        ref = ray.get(put.remote(1))
        with pytest.raises(ValueError, match="not owned by this worker"):
            self.watch(ref)


class Fails:
    """Does not unpickle."""

    def __reduce__(self):
        return self.fail, ()

    @staticmethod
    def fail():
        raise ValueError("on purpose")


def test_many_refs_in_a_value_are_read_again_and_again_and_outlive_it():
    @ray.remote
    def many(count):
        return {"refs": [ray.put(i) for i in range(count)]}

    outer = many.remote(100)
    first, second = ray.get(outer)["refs"], ray.get([outer])[0]["refs"]
    assert first == second and len(set(first)) == 100
    del second, outer
    gc.collect()
    assert ray.get(first) == list(range(100))

    kept = [ray.put(i) for i in range(20)]
    boxes = ray.put([kept, kept[:5], np.zeros(100_000)])
    read = ray.get(boxes)
    assert read[0] == kept and read[1] == kept[:5]
    del kept, boxes
    gc.collect()
    assert ray.get(read[0] + read[1]) == [*range(20), *range(5)]


def test_a_value_with_many_refs_that_does_not_unpickle_loses_none():
    refs = [ray.put(i) for i in range(20)]
    for _ in range(3):
        with pytest.raises(ray.exceptions.RaySystemError):
            ray.get(ray.put([refs, Fails()]))
    gc.collect()
    assert ray.get(refs) == list(range(20))


def test_a_copy_of_a_ref_is_a_ref_of_its_own():
    ref = ray.put(np.ones(100_000))
    copied = copy.copy(ref)
    assert copied == ref and copied is not ref
    del ref
    gc.collect()
    assert ray.get(copied)[0] == 1
