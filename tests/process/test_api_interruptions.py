"""Handlers of signals and destructors that use the API, and signals that a program sends itself."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine import exceptions, hpcray_only, ray, run_script

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


@ray.remote(num_cpus=0)
class Saver:
    def __init__(self):
        self.saved = []

    def save(self, what=None):
        self.saved.append(what)
        return "saved"

    def all(self):
        return self.saved


@ray.remote(num_cpus=0)
def same(x):
    return x


def _signalled(saver: Any, body: Any, tries: int = 30) -> tuple[int, list[str]]:
    """Run `body` again and again while this process gets signals whose handler has an actor save. Returns how often
    the handler worked, and its errors."""
    good, bad = [], []

    def handler(*args):
        try:
            good.append(ray.get(saver.save.remote(), timeout=30))
        except BaseException as error:
            bad.append(repr(error))

    def send():
        for count in range(1, tries + 1):
            os.kill(os.getpid(), signal.SIGUSR1)
            deadline = time.monotonic() + 10
            while len(good) + len(bad) < count and time.monotonic() < deadline:
                time.sleep(0.002)

    before = signal.signal(signal.SIGUSR1, handler)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        while sender.is_alive():
            body()
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    return len(good), bad


@pytest.fixture(scope="module")
def saver(session: None) -> Iterator[Any]:
    made = Saver.remote()
    ray.get(made.save.remote())
    yield made


REPLACED = """\
import signal, sys, time
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import current

ray.init(num_cpus=1)
old, new = [], []
later = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "handler": lambda *args: new.append(1)}
signal.signal(signal.SIGUSR1, lambda *args: old.append(1))
with current.process.engine.lock:
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, later[sys.argv[1]])
time.sleep(0.5)
print(old, new)
"""


class TestHandlersThatWait:
    @pytest.mark.parametrize("what", ["submits", "puts", "calls", "gets"])
    def test_while_the_program_is_busy_with_hpcray(self, saver, what):
        body = {
            "submits": lambda: ray.get([same.remote(i) for i in range(50)]),
            "puts": lambda: [ray.put(i) for i in range(50)],
            "calls": lambda: ray.get([saver.save.remote() for _ in range(50)]),
            "gets": lambda: ray.get(same.remote(1)),
        }[what]
        assert _signalled(saver, body) == (30, [])

    def test_in_a_task_and_in_an_actor(self, saver):
        def run(saver):
            return _signalled(saver, lambda: ray.get([same.remote(i) for i in range(50)]), tries=10)

        class Busy:
            def run(self, saver):
                return run(saver)

        assert ray.get(ray.remote(num_cpus=0)(run).remote(saver), timeout=60) == (10, [])
        assert ray.get(ray.remote(num_cpus=0)(Busy).remote().run.remote(saver), timeout=60) == (10, [])

    def test_that_raise_come_out_where_the_program_is(self):
        class TimeIsUp(Exception):
            pass

        def raise_it(*args):
            raise TimeIsUp

        before = signal.signal(signal.SIGALRM, raise_it)
        try:
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                with pytest.raises(TimeIsUp):
                    while True:
                        ray.get([same.remote(i) for i in range(20)])
            assert ray.get([same.remote(i) for i in range(20)], timeout=30) == list(range(20))
        finally:
            signal.signal(signal.SIGALRM, before)

    @hpcray_only
    @pytest.mark.parametrize("then", ["default", "handler", "ignored"])
    def test_a_handler_that_waits_may_be_replaced(self, tmp_path, then):
        """Its signal was raised again for ever, and ended a program that had gone back to the default."""
        script = tmp_path / "replaced.py"
        script.write_text(REPLACED)
        ended = run_script(script, then)
        assert (ended.returncode, ended.stdout) == (0, "[] [1]\n" if then == "handler" else "[] []\n"), ended.stderr

    def test_getsignal_and_signal_return_the_program_s_own_handler(self):
        def handler(*args):
            pass

        before = signal.signal(signal.SIGUSR1, handler)
        assert signal.getsignal(signal.SIGUSR1) is handler
        assert signal.signal(signal.SIGUSR1, before) is handler


class _Cycle:
    """A reference cycle; what is read in its destructor was made before it."""

    done: list[Any]

    def __init__(self, read):
        self.me, self.read = self, read

    def __del__(self):
        try:
            self.done.append(self.read())
        except BaseException as error:
            self.done.append(repr(error))


class TestDestructors:
    def _collected(self, reads: list[Any]) -> list[Any]:
        _Cycle.done = []
        for read in reads:
            _Cycle(read)
        del read, reads
        gc.collect()
        return sorted(_Cycle.done, key=repr)

    def test_of_a_cycle_read_its_ref(self):
        def read(ref):
            return lambda: ray.get(ref, timeout=30)

        assert self._collected([read(ray.put(i)) for i in range(10)]) == list(range(10))
        assert self._collected([read(same.remote(i)) for i in range(10)]) == list(range(10))

    def test_pass_its_ref_on(self):
        saver = Saver.remote()

        def read(ref):
            return lambda: saver.save.remote(ref) and 1

        assert self._collected([read(ray.put(i)) for i in range(10)]) == [1] * 10
        assert sorted(ray.get(saver.all.remote(), timeout=30)) == list(range(10))

    def test_read_a_generator(self):
        @ray.remote
        def count():
            yield from range(3)

        def read(generator):
            return lambda: [ray.get(ref, timeout=30) for ref in generator]

        generator = count.options(num_returns="streaming").remote()
        reads = [read(generator)]
        del generator
        assert self._collected(reads) == [[0, 1, 2]]

    def test_save_a_ref_which_is_freed_at_last(self):
        saved = []

        def read(ref):
            return lambda: saved.append(ref)

        self._collected([read(ray.put(f"value {i}")) for i in range(5)])
        time.sleep(0.1)
        ray.get(same.remote(1))
        assert sorted(ray.get(saved, timeout=30)) == [f"value {i}" for i in range(5)]

    @hpcray_only
    def test_a_saved_ref_is_freed_at_last(self):
        from hpcray.runtime.core_worker.core_worker import current

        saved = []

        def read(ref):
            return lambda: saved.append(ref)

        self._collected([read(ray.put(1))])
        oid = saved[0].binary()
        assert oid in current.process.table.entries
        saved.clear()
        ray.get(same.remote(1))
        assert oid not in current.process.table.entries

    def test_that_wait_while_the_collector_runs_by_itself(self):
        saver = Saver.remote()
        made, _Cycle.done = 0, []
        deadline = time.monotonic() + 30
        while len(_Cycle.done) < 200 and time.monotonic() < deadline:
            _Cycle(lambda: ray.get(saver.save.remote(), timeout=30))
            made += 1
            ray.get([same.remote(i) for i in range(20)])
        assert len(_Cycle.done) >= (200 if ray.__name__ == "hpcray" else 0)
        assert set(_Cycle.done) <= {"saved"}

    @hpcray_only
    def test_other_threads_make_tuples_while_a_collection_waits(self):
        """Python raises a SystemError where anything else refers to a tuple that is being made."""
        from hpcray.runtime.core_worker.core_worker import current

        engine, errors, ended = current.process.engine, [], threading.Event()

        def make_tuples():
            while not ended.is_set():
                try:
                    tuple(number for number in range(2000))
                except SystemError as error:
                    errors.append(error)

        gc.freeze()  # the objects of other tests, which would make each collection ten times as long
        objects = [[number] for number in range(200_000)]
        threads = [threading.Thread(target=make_tuples) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            with engine.lock:
                gc.collect()
            time.sleep(0.01)
        ended.set()
        for thread in threads:
            thread.join()
        gc.unfreeze()
        assert not errors and len(objects) == 200_000


def _interrupted(interrupt: Any) -> str:
    try:
        interrupt()
        time.sleep(2)
        return "not interrupted"
    except KeyboardInterrupt:
        return "interrupted"


class TestSignalsOfTheProgram:
    """Of the rows Ray has `interrupt_main` alone: it ignores SIGINT in workers, where plain Python does not."""

    @pytest.mark.parametrize("how", ["main", pytest.param("raise", marks=hpcray_only), "thread"])
    def test_interrupt_a_task_and_a_call_of_an_actor(self, how):
        def run():
            return _interrupted(
                {
                    "main": _thread.interrupt_main,
                    "raise": lambda: signal.raise_signal(signal.SIGINT),
                    "thread": lambda: threading.Timer(0.1, _thread.interrupt_main).start(),
                }[how]
            )

        class Actor:
            def run(self):
                return run()

            def fine(self):
                return "fine"

        assert ray.get(ray.remote(run).remote(), timeout=30) == "interrupted"
        actor = ray.remote(Actor).remote()
        assert ray.get([actor.run.remote(), actor.fine.remote()], timeout=30) == ["interrupted", "fine"]

    def test_that_are_not_caught_look_like_a_cancellation(self):
        def run():
            _thread.interrupt_main()
            time.sleep(2)

        with pytest.raises(exceptions.TaskCancelledError) as caught:
            ray.get(ray.remote(max_retries=0)(run).remote(), timeout=30)
        assert isinstance(caught.value, exceptions.RayTaskError)

    def test_interrupt_a_wait(self):
        @ray.remote(num_cpus=0)
        def waits():
            threading.Timer(0.2, _thread.interrupt_main).start()
            return _interrupted(lambda: ray.get(ray.remote(num_cpus=0)(time.sleep).remote(20)))

        assert ray.get(waits.remote(), timeout=15) == "interrupted"

    def test_a_cancellation_that_comes_late_interrupts_no_other_task(self):
        @ray.remote(max_retries=0)
        def short(i):
            time.sleep(0.001)
            return i

        for _ in range(20):
            refs = [short.remote(i) for i in range(20)]
            for ref in refs[::2]:
                ray.cancel(ref)
            assert ray.get(refs[1::2], timeout=30) == list(range(1, 20, 2))


@hpcray_only
def test_a_collection_is_put_off_only_where_it_may_call_code_of_the_user():
    from hpcray.runtime.core_worker.interruptions import _may_call

    class WithDestructor:
        __slots__ = ()

        def __del__(self):
            pass

    class Plain:  # there may be a weak reference to it, with a callback
        pass

    class Slots:
        __slots__ = ("value",)

    def suspended():
        yield

    async def coroutine():
        pass

    waiting = coroutine()
    waiting.close()
    assert all(_may_call(type(one)) for one in (WithDestructor(), Plain(), suspended(), waiting))
    harmless = ([], {}, set(), (), b"", Slots(), same.remote(1), len, lambda: 1)
    assert [type(one) for one in harmless if _may_call(type(one))] == []
