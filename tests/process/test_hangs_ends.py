"""What hung, or was left behind, when somebody went away: a generator's caller, its worker, a leased worker, a view."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter

import numpy as np
import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray, run_script

pytestmark = [hpcray_only, pytest.mark.usefixtures("session")]
INIT = {"num_cpus": 2, "object_store_memory": 128 << 20}
NEXT = {"num_returns": "streaming", "_generator_backpressure_num_objects": 1}
IN_FLIGHT = os.cpu_count() + 6
"""More than the threads of an event loop's default executor."""


@ray.remote(max_retries=3)
def count(n, dies_at=-1, marks=None):
    for i in range(n):
        if i == dies_at and marks.add() == 1:
            os._exit(1)
        yield i


@ray.remote
class Source:
    def count(self, n):
        yield from range(n)

    def ping(self):
        return "here"


@ray.remote
class AsyncSource:
    async def count(self, n):
        for i in range(n):
            yield i

    def plain(self, n):
        yield from range(n)

    async def large(self):
        return np.zeros(1 << 20, np.uint8)


def take(generator):
    """All its values, in a thread, so that a generator that hangs is a failure and no more."""
    found = []
    thread = threading.Thread(target=lambda: found.extend(ray.get(ref) for ref in generator), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"it hangs after {found}"
    return found


def test_a_generator_that_is_dropped_before_its_task_starts_holds_nothing_up():
    completed = [count.options(**NEXT).remote(5).completed() for _ in range(4)]
    gc.collect()
    assert ray.get(completed, timeout=PATIENCE) == [None] * 4


def test_a_task_that_runs_again_knows_what_was_taken(marks):
    assert take(count.options(**NEXT).remote(8, 3, marks)) == list(range(8))


def test_an_actor_does_not_wait_for_a_caller_that_is_dead():
    @ray.remote(max_retries=0)
    def caller(source):
        next(source.count.options(**NEXT).remote(100))
        os._exit(1)

    source = Source.remote()
    ray.get(source.ping.remote())
    with pytest.raises(exceptions.WorkerCrashedError):
        ray.get(caller.remote(source), timeout=PATIENCE)
    assert ray.get(source.ping.remote(), timeout=PATIENCE) == "here"


@pytest.mark.parametrize("method", ["count", "plain"])
def test_generators_that_wait_for_their_callers_do_not_hold_up_others(method):
    source = AsyncSource.options(max_concurrency=100).remote()
    generators = [getattr(source, method).options(**NEXT).remote(5) for _ in range(IN_FLIGHT)]
    assert take(generators[-1]) == list(range(5))
    assert len(ray.get(source.large.remote(), timeout=PATIENCE)) == 1 << 20


def test_a_cancelled_generator_gives_its_thread_back():
    source = AsyncSource.options(max_concurrency=IN_FLIGHT).remote()
    for _ in range(2):
        generators = [source.count.options(**NEXT).remote(50) for _ in range(IN_FLIGHT)]
        for generator in generators:
            ray.wait([generator.peek()], timeout=PATIENCE)
            ray.cancel(generator)
        for generator in generators:
            with pytest.raises(exceptions.TaskCancelledError):
                ray.get(generator.completed(), timeout=PATIENCE)
    assert len(ray.get(source.large.remote(), timeout=PATIENCE)) == 1 << 20


def test_next_after_the_end_of_the_raylet(tmp_path):
    script = tmp_path / "gone.py"
    script.write_text(
        "import os, signal, time\n"
        "import engine_under_test as ray\n"
        "from hpcray.platform.session_directory import read_session\n"
        "from hpcray.runtime.core_worker.core_worker import current\n"
        "ray.init(num_cpus=1)\n"
        "os.kill(read_session(current.process.place.session_dir).pid, signal.SIGKILL)\n"
        "while current.process.dead is None:\n"
        "    time.sleep(0.01)\n"
        "@ray.remote(num_returns='streaming')\n"
        "def count():\n"
        "    yield 1\n"
        "try:\n"
        "    next(count.remote())\n"
        "except ray.exceptions.LocalRayletDiedError:\n"
        "    print('told')\n"
    )
    assert "told" in run_script(script, timeout=PATIENCE).stdout


class Shy:
    def __repr__(self):
        raise RuntimeError("has no name yet")

    def fail(self):
        raise ValueError("of the method")


@ray.remote
class AsyncShy(Shy):
    async def fail(self):
        raise ValueError("of the method")


@pytest.mark.parametrize("concurrency", [1, 2])
def test_an_error_comes_although_the_actors_repr_fails(concurrency):
    shy = ray.remote(Shy).options(max_concurrency=concurrency).remote()
    with pytest.raises(ValueError, match="of the method"):
        ray.get(shy.fail.remote(), timeout=PATIENCE)


def test_an_error_comes_although_an_async_actors_repr_fails():
    with pytest.raises(ValueError, match="of the method"):
        ray.get(AsyncShy.remote().fail.remote(), timeout=PATIENCE)


def _broken():
    raise ImportError("not on this node")


class Broken:
    def __reduce__(self):
        return _broken, ()


def test_a_value_that_cannot_be_read_costs_the_others_no_pin():
    from hpcray.runtime.core_worker.core_worker import current

    table = current.process.table
    broken = ray.put(Broken())
    for _ in range(3):
        large = ray.put(np.zeros(16 << 20, np.uint8))
        with pytest.raises(ray.exceptions.RaySystemError, match="not on this node"):
            ray.get([broken, large])
        ident = large._id
        del large

        def gone(ident=ident):
            gc.collect()
            with current.process.engine.lock:
                current.process.drain()
                return ident not in table.pins.views_without_entry and ident not in table.entries

        eventually(gone)


def test_no_call_is_sent_to_a_worker_that_another_caller_used_up():
    @ray.remote(max_calls=1, max_retries=0)
    def once():
        return 1

    @ray.remote(num_cpus=0)
    class Caller:
        def run(self, rounds):
            outcomes = Counter()
            for _ in range(rounds):
                try:
                    ray.get([once.remote() for _ in range(3)])
                    outcomes["ok"] += 1
                except exceptions.WorkerCrashedError:
                    outcomes["crashed"] += 1
            return outcomes

    found = ray.get([caller.run.remote(10) for caller in [Caller.remote() for _ in range(4)]], timeout=3 * PATIENCE)
    assert sum(found, Counter()) == {"ok": 40}


_INTERRUPT = """
import os, signal, sys, threading, time
import engine_under_test as ray

def interrupt_in(name):
    "Ctrl-C as soon as the main thread is in a function of this name."
    def names():
        frame = sys._current_frames()[threading.main_thread().ident]
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    while name not in set(names()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
"""


def test_ctrl_c_ends_the_wait_for_the_callbacks_of_a_drain(tmp_path):
    script = tmp_path / "drains.py"
    script.write_text(
        _INTERRUPT + "from hpcray.runtime.core_worker.core_worker import current\n"
        "ray.init(num_cpus=1)\n"
        "ray.on_drain(lambda left: time.sleep(1000))\n"
        "ray.drain(seconds=1000)\n"
        "while ray.draining() is None:\n"
        "    time.sleep(0.01)\n"
        "threading.Thread(target=interrupt_in, args=('wait_for_checkpoints',), daemon=True).start()\n"
        "try:\n"
        "    ray.shutdown()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', ray.is_initialized())\n"
    )
    assert "interrupted False" in run_script(script, timeout=PATIENCE).stdout


def test_ctrl_c_ends_the_wait_for_another_job(tmp_path):
    script = tmp_path / "submits.py"
    script.write_text(
        _INTERRUPT + "import hpcray.cluster\n"
        "def nap():\n"
        "    time.sleep(1000)\n"
        "if __name__ == '__main__':\n"
        "    ray.init(num_cpus=1)\n"
        "    job = hpcray.cluster.submit(nap, nodes=1, executor='local')\n"
        "    threading.Thread(target=interrupt_in, args=('result',), daemon=True).start()\n"
        "    try:\n"
        "        job.result()\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
        "    job.cancel()\n"
    )
    assert "interrupted" in run_script(script, timeout=PATIENCE).stdout


class Stubborn(Exception):
    def __reduce__(self):
        raise SystemExit(3)


class Mute(Exception):
    def __getattribute__(self, name):
        raise RuntimeError(name)


@ray.remote
class Failing:
    def fail(self, kind):
        raise globals()[kind]("x")


@pytest.mark.parametrize("kind", ["Stubborn", "Mute"])
def test_an_exception_that_cannot_be_pickled_or_inspected_ends_its_call(kind):
    failing = Failing.options(max_concurrency=2).remote()
    with pytest.raises(exceptions.RayTaskError, match=kind):
        ray.get(failing.fail.remote(kind), timeout=PATIENCE)


def test_what_another_thread_asks_for_again_is_not_missing(monkeypatch):
    from hpcray.core.core_worker.object_table import Waiter
    from hpcray.protocol.messages import StoreError
    from hpcray.runtime.core_worker.core_worker import current

    process = current.process
    ref = ray.put(np.arange(1 << 20))
    with process.engine.lock:
        process.table.entries[ref._id].mapping = None
        del process.table.pins.mapped[ref._id]

    def refused(waiter, deadline):
        monkeypatch.undo()
        process.table.on_store_error(StoreError(ref._id, "full", "no room"))
        process.table.wait_local(ref._id, Waiter())  # another thread, before this one has the lock again
        return True

    monkeypatch.setattr(process, "block", refused)
    assert ray.get(ref, timeout=PATIENCE)[-1] == (1 << 20) - 1
