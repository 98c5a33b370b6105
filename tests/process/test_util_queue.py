"""`util.queue.Queue`."""

from __future__ import annotations

import asyncio
import importlib
import queue
import threading

import numpy as np
import pytest
from engine import NAME, PATIENCE, eventually, exceptions, hpcray_only, ray

module = importlib.import_module(f"{NAME}.util.queue")
Queue, Empty, Full = module.Queue, module.Empty, module.Full

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def put_all(to, items):
    for item in items:
        to.put(item)


@ray.remote
def take(out_of, count):
    return [out_of.get(timeout=PATIENCE) for _ in range(count)]


class TestOrderAndSize:
    def test_a_queue_is_first_in_first_out(self):
        q = Queue()
        for item in range(10):
            q.put(item)
        assert (q.size(), q.qsize(), len(q), q.empty(), q.full()) == (10, 10, 10, False, False)
        assert [q.get() for _ in range(10)] == list(range(10))
        assert q.empty()

    def test_values_leave_a_queue_unchanged(self):
        q = Queue()
        array = np.arange(300_000)
        q.put({"array": array, "none": None})
        got = q.get()
        assert np.array_equal(got["array"], array)
        assert got["none"] is None

    def test_refs_in_a_queue_stay_refs(self):
        q = Queue()
        q.put([ray.put("inside")])
        assert ray.get(q.get()) == ["inside"]


class TestLimits:
    def test_get_from_an_empty_queue_raises_empty(self):
        q = Queue()
        with pytest.raises(Empty):
            q.get(block=False)
        with pytest.raises(queue.Empty):
            q.get_nowait()
        with pytest.raises(Empty):
            q.get(timeout=0.05)

    def test_put_into_a_full_queue_raises_full(self):
        q = Queue(maxsize=1)
        q.put(0)
        assert q.full()
        with pytest.raises(Full):
            q.put(1, block=False)
        with pytest.raises(queue.Full):
            q.put_nowait(1)
        with pytest.raises(Full):
            q.put(1, timeout=0.05)
        assert q.get() == 0
        q.put(2)
        assert (q.get(), q.empty()) == (2, True)

    @hpcray_only
    def test_a_timeout_of_zero_takes_what_is_there(self):
        q = Queue(maxsize=1)
        q.put("x", timeout=0)
        with pytest.raises(Full):
            q.put("y", timeout=0)
        assert q.get(timeout=0) == "x"
        with pytest.raises(Empty):
            q.get(timeout=0)

    def test_negative_timeouts_are_refused(self):
        q = Queue()
        with pytest.raises(ValueError, match="non-negative"):
            q.get(timeout=-1)
        with pytest.raises(ValueError, match="non-negative"):
            q.put(1, timeout=-1)

    def test_batches_are_all_or_nothing(self):
        q = Queue(maxsize=3)
        q.put_nowait_batch([1, 2])
        with pytest.raises(Full):
            q.put_nowait_batch([3, 4])
        with pytest.raises(Empty):
            q.get_nowait_batch(3)
        assert q.size() == 2
        assert q.get_nowait_batch(2) == [1, 2]
        assert q.get_nowait_batch(0) == []
        with pytest.raises(TypeError):
            q.put_nowait_batch(3)
        with pytest.raises(TypeError):
            q.get_nowait_batch("3")
        with pytest.raises(ValueError, match="nonnegative"):
            q.get_nowait_batch(-1)


class TestSharing:
    def test_a_queue_connects_producers_and_consumers_anywhere(self):
        q = Queue(maxsize=3)
        makers = [put_all.remote(q, [(maker, item) for item in range(15)]) for maker in range(2)]
        takers = [take.remote(q, 10) for _ in range(2)]
        here = [q.get(timeout=PATIENCE) for _ in range(10)]
        ray.get(makers)
        everything = here + sum(ray.get(takers), [])
        assert sorted(everything) == [(maker, item) for maker in range(2) for item in range(15)]
        for maker in range(2):
            mine = [item for who, item in here if who == maker]
            assert mine == sorted(mine)

    def test_a_getter_waits_for_a_putter(self):
        q = Queue()
        waiting = take.remote(q, 1)
        assert not ray.wait([waiting], timeout=0.2)[0]
        q.put("late")
        assert ray.get(waiting) == ["late"]

    def test_a_putter_waits_for_a_getter(self):
        q = Queue(maxsize=1)
        waiting = put_all.remote(q, ["a", "b"])
        eventually(q.full, "the first item")
        assert not ray.wait([waiting], timeout=0.2)[0]
        assert [q.get(timeout=PATIENCE), q.get(timeout=PATIENCE)] == ["a", "b"]
        ray.get(waiting)

    def test_threads_share_a_queue(self):
        q = Queue(maxsize=4)
        got = []

        def drain():
            for _ in range(10):
                got.append(q.get(timeout=PATIENCE))

        threads = [threading.Thread(target=drain) for _ in range(3)]
        for thread in threads:
            thread.start()
        for item in range(30):
            q.put(item, timeout=PATIENCE)
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(got) == list(range(30))

    def test_a_queue_travels_in_actors_and_in_their_results(self):
        @ray.remote
        class Holder:
            def __init__(self):
                self.queue = Queue()

            def get_queue(self):
                return self.queue

            def next(self):
                return self.queue.get(timeout=PATIENCE)

        holder = Holder.remote()
        ray.get(holder.get_queue.remote()).put("through")
        assert ray.get(holder.next.remote()) == "through"


class TestAsync:
    def test_coroutines_put_and_get(self):
        async def main():
            q = Queue(maxsize=1)
            getter = asyncio.ensure_future(q.get_async())
            await q.put_async("x")
            assert await getter == "x"
            with pytest.raises(Empty):
                await q.get_async(block=False)
            with pytest.raises(Empty):
                await q.get_async(timeout=0.05)
            await q.put_async(1, block=False)
            with pytest.raises(Full):
                await q.put_async(2, block=False)
            with pytest.raises(Full):
                await q.put_async(2, timeout=0.05)
            with pytest.raises(ValueError, match="non-negative"):
                await q.get_async(timeout=-1)
            return await q.get_async()

        assert asyncio.run(main()) == 1

    @hpcray_only
    def test_a_cancelled_getter_takes_nothing(self):
        async def main():
            q = Queue()
            getter = asyncio.ensure_future(q.get_async())
            await asyncio.sleep(0.2)
            getter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await getter
            await asyncio.sleep(0.2)  # the cancellation travels on a wire of its own
            q.put("kept")
            return q.get(timeout=PATIENCE)

        assert asyncio.run(main()) == "kept"


class TestItsActor:
    def test_options_of_the_actor_of_a_queue_apply(self):
        q = Queue(actor_options={"name": "the-queue", "num_cpus": 0})
        q.put("x")
        assert ray.get(ray.get_actor("the-queue").qsize.remote()) == 1
        q.shutdown()

    @pytest.mark.parametrize("force", [False, True])
    def test_shutdown_ends_the_actor_of_a_queue(self, force):
        q = Queue()
        actor = q.actor
        q.put(1)
        q.shutdown(force=force)
        with pytest.raises(exceptions.RayActorError):
            eventually(lambda: ray.get(actor.empty.remote()) is None, "the actor's end")  # a kill takes a moment

    @hpcray_only
    @pytest.mark.parametrize("how", [{"force": True}, {"grace_period_s": 0.5}])
    def test_waiting_callers_get_an_error_when_the_queue_ends(self, how):
        q = Queue()
        waiting = take.remote(q, 1)
        assert not ray.wait([waiting], timeout=0.2)[0]
        q.shutdown(**how)
        with pytest.raises(exceptions.RayActorError):
            ray.get(waiting, timeout=PATIENCE)
        with pytest.raises(exceptions.RayActorError):
            q.get()

    def test_the_queue_actor_class_works_by_itself(self):
        actor = ray.remote(num_cpus=0)(module._QueueActor).remote(2)
        ray.get([actor.put.remote(1), actor.put.remote(2)])
        assert ray.get(actor.full.remote())
        assert sorted(ray.get(actor.get_nowait_batch.remote(2))) == [1, 2]
