"""Refs as awaitables and futures, in the driver."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import numpy as np
import pytest
from engine import PATIENCE, exceptions, hpcray_only, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
def echo(value, delay=0.0):
    time.sleep(delay)
    return value


@ray.remote
def fail():
    raise LookupError("remote")


class TestAwait:
    def test_a_ref(self):
        async def main():
            return await echo.remote(1), await ray.put("p"), (await echo.remote(np.arange(200_000)))[-1]

        assert asyncio.run(main()) == (1, "p", 199_999)

    def test_a_future_may_be_made_before_its_loop_runs(self):
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            futures = [echo.remote(2, 0.1).as_future(), ray.put("p").as_future(), fail.remote().as_future()]
            done, _ = loop.run_until_complete(asyncio.wait(futures))
            assert len(done) == 3
            assert [futures[0].result(), futures[1].result()] == [2, "p"]
            with pytest.raises(LookupError):
                futures[2].result()
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    @hpcray_only
    def test_between_gets_is_heard_at_once(self, monkeypatch):
        """Not only when the engine's background thread has found out that no thread waits."""
        from hpcray.runtime.core_worker import io_engine

        async def both(number):
            return ray.get(echo.remote(number)), await echo.remote(number)

        assert asyncio.run(both(0)) == (0, 0)
        monkeypatch.setattr(io_engine, "TICK", 2.0)
        started = time.monotonic()
        for number in range(6):
            assert asyncio.run(both(number)) == (number, number)
        assert time.monotonic() - started < 6.0

    def test_twice(self):
        async def main():
            ref = echo.remote([1])
            return await ref, await ref

        assert asyncio.run(main()) == ([1], [1])

    def test_gather(self):
        async def main():
            return await asyncio.gather(*[echo.remote(i, 0.001) for i in range(100)])

        assert asyncio.run(main()) == list(range(100))

    def test_an_error(self):
        async def main():
            await fail.remote()

        with pytest.raises(LookupError, match="remote") as caught:
            asyncio.run(main())
        assert isinstance(caught.value, exceptions.RayTaskError)

    def test_gather_with_errors_as_values(self):
        async def main():
            return await asyncio.gather(echo.remote(1), fail.remote(), return_exceptions=True)

        one, error = asyncio.run(main())
        assert one == 1
        assert isinstance(error, LookupError)

    def test_the_loop_goes_on_meanwhile(self):
        async def main():
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0.005)

            ticking = asyncio.create_task(tick())
            await echo.remote(1, 0.3)
            ticking.cancel()
            return ticks

        assert asyncio.run(main()) > 5

    def test_wait_for_gives_up(self):
        async def main():
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(_awaiting(echo.remote(1, 1))), 0.05)
            return await echo.remote("after")

        assert asyncio.run(main()) == "after"

    def test_a_loop_that_ends_before_the_value_comes(self):
        async def main(ref):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.ensure_future(_awaiting(ref)), 0.02)

        late = echo.remote("late", 0.3)
        asyncio.run(main(late))
        assert ray.get([late, echo.remote(1, 0.5)]) == ["late", 1]

    def test_asyncio_wait(self):
        async def main():
            slow, fast = (asyncio.wrap_future(ref.future()) for ref in (echo.remote("s", 1), echo.remote("f")))
            done, pending = await asyncio.wait([slow, fast], return_when=asyncio.FIRST_COMPLETED)
            return [task.result() for task in done], len(pending)

        assert asyncio.run(main()) == (["f"], 1)

    def test_as_completed(self):
        async def main():
            found = []
            for future in asyncio.as_completed([_awaiting(echo.remote(i)) for i in range(20)]):
                found.append(await future)
            return sorted(found)

        assert asyncio.run(main()) == list(range(20))

    def test_actor_calls(self):
        @ray.remote
        class Counter:
            def __init__(self):
                self.value = 0

            def add(self):
                self.value += 1
                return self.value

        async def main():
            counter = Counter.remote()
            return await asyncio.gather(*[counter.add.remote() for _ in range(10)])

        assert asyncio.run(main()) == list(range(1, 11))

    def test_loops_in_several_threads(self):
        async def main(i):
            return await asyncio.gather(*[echo.remote(i * 100 + j) for j in range(10)])

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda i: asyncio.run(main(i)), range(4)))
        assert found == [[i * 100 + j for j in range(10)] for i in range(4)]

    def test_what_comes_after_the_loop_is_closed_is_dropped(self, capfd):
        """`asyncio.run` with a timeout is over before the tasks are."""

        @ray.remote
        def later():
            time.sleep(0.5)
            yield 1

        value, generator = echo.remote(1, 0.5), later.remote()

        async def main():
            tasks = [asyncio.ensure_future(each) for each in (_awaiting(value), generator.__anext__())]
            await asyncio.wait(tasks, timeout=0.1)

        asyncio.run(main())
        assert ray.get([value, next(generator)], timeout=PATIENCE) == [1, 1]
        assert ray.get(echo.remote(2), timeout=PATIENCE) == 2
        assert "loop is closed" not in capfd.readouterr().err


async def _awaiting(ref):
    return await ref


class TestFuture:
    def test_result(self):
        future = echo.remote(5, 0.1).future()
        assert isinstance(future, concurrent.futures.Future)
        assert future.result(PATIENCE) == 5
        assert future.done()

    def test_exception(self):
        future = fail.remote().future()
        assert isinstance(future.exception(PATIENCE), LookupError)
        with pytest.raises(LookupError):
            future.result()

    def test_timeout(self):
        with pytest.raises(concurrent.futures.TimeoutError):
            echo.remote(1, 1).future().result(0.05)

    def test_of_what_is_there(self):
        assert ray.put(1).future().result(PATIENCE) == 1

    def test_callbacks(self):
        found, all_there = [], threading.Event()

        def done(future):
            found.append(future.result())
            if len(found) == 20:
                all_there.set()

        futures = [echo.remote(i).future() for i in range(20)]
        for future in futures:
            future.add_done_callback(done)
        assert all_there.wait(PATIENCE)
        assert sorted(found) == list(range(20))

    @hpcray_only  # Ray's deadlocks
    def test_a_callback_may_use_ray(self):
        found, there = [], threading.Event()

        def done(future):
            found.append(ray.get(echo.remote(future.result() + 1)))
            there.set()

        echo.remote(1, 0.1).future().add_done_callback(done)
        assert there.wait(PATIENCE)
        assert found == [2]

    def test_concurrent_futures_wait(self):
        futures = [echo.remote(i).future() for i in range(10)]
        done, rest = concurrent.futures.wait(futures, PATIENCE)
        assert not rest
        assert sorted(future.result() for future in done) == list(range(10))

    def test_without_a_ref(self):
        future = echo.remote(np.ones(200_000), 0.1).future()
        assert future.result(PATIENCE).sum() == 200_000

    def test_wrap_future(self):
        async def main():
            return await asyncio.wrap_future(echo.remote("wrapped").future())

        assert asyncio.run(main()) == "wrapped"
