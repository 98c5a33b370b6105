"""What once hung: every wait here must end by itself, long before its timeout."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from engine import PATIENCE, ROOT, eventually, exceptions, hpcray_only, ray

pytestmark = [hpcray_only, pytest.mark.usefixtures("session")]
INIT = {"num_cpus": 4, "object_store_memory": 128 << 20}


@ray.remote
def echo(value):
    return value


@ray.remote(num_cpus=99)
def never(value=None):
    return value


@ray.remote
class Actor:
    def echo(self, value):
        return value

    def pid(self):
        return os.getpid()

    def put(self, value):
        return [ray.put(value)]

    def relay(self, other, size, count):
        value = bytes(size)
        return sum(map(len, ray.get([other.echo.remote(value) for _ in range(count)])))


def in_thread(work):
    """Run `work` in a thread; returns a function that gives its result or raises its error."""
    box: list = []

    def run():
        try:
            box.append((work(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE)
        assert box, "the thread still waits"
        value, error = box[0]
        if error is not None:
            raise error
        return value

    return result


def engine_of():
    from hpcray.runtime.core_worker.core_worker import current

    return current.process.engine


def asleep(thread_id):
    """Whether a thread waits inside the engine."""
    return thread_id in engine_of().asleep


def run_alone(code: str, timeout: float = PATIENCE) -> str:
    """Run a program; its output."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- who wakes whom


def test_a_thread_ends_what_the_sleeping_driver_waits_for():
    """No message comes: the thread that cancels must wake the one that sleeps in epoll."""
    ref, main = never.remote(), threading.get_ident()

    def cancel():
        eventually(lambda: asleep(main))
        ray.cancel(ref)

    done = in_thread(cancel)
    started = time.monotonic()
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(ref, timeout=PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    done()


def test_a_thread_ends_what_a_future_waits_for():
    """The same for callbacks: somebody must make them while all threads sleep."""
    ref, other, main = never.remote(), never.remote(), threading.get_ident()
    future = ref.future()

    def cancel():
        eventually(lambda: asleep(main))
        ray.cancel(ref)
        try:
            return type(future.exception(PATIENCE / 2))
        finally:
            ray.cancel(other)

    kind = in_thread(cancel)
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(other, timeout=PATIENCE)
    assert kind() is exceptions.TaskCancelledError


def test_a_callback_may_wait():
    first, second = Actor.remote(), []
    future = first.echo.remote(1).future()
    done = threading.Event()

    def more(ended):
        second.append(ray.get(echo.remote(ended.result() + 1), timeout=PATIENCE))
        done.set()

    future.add_done_callback(more)
    assert ray.get(first.echo.remote(3), timeout=PATIENCE) == 3
    assert done.wait(PATIENCE)
    assert second == [2]


def test_a_callback_that_raises_costs_nobody_anything(capfd):
    ref, done = echo.remote(1), threading.Event()
    ref._on_completed(lambda value: 1 / 0)
    ref._on_completed(lambda value: done.set())
    assert ray.get(ref, timeout=PATIENCE) == 1
    assert done.wait(PATIENCE)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_signal_handler_may_wait_while_the_wait_it_interrupts_is_under_way():
    """The main thread drives in the first round; in the second another thread does, and ends meanwhile."""
    out = run_alone("""
        import os, signal, threading, time
        import hpcray as ray
        ray.init(num_cpus=4)

        @ray.remote
        def sleep(seconds):
            time.sleep(seconds)
            return seconds

        def handle(*_):
            print("handled", ray.get(sleep.remote(0.5), timeout=30))

        def other():
            ray.get(sleep.remote(0.4), timeout=30)

        def ask():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGUSR1)

        ray.get([sleep.remote(0) for _ in range(4)])
        signal.signal(signal.SIGUSR1, handle)
        for threads in ([ask], [other, ask]):
            for target in threads:
                threading.Thread(target=target).start()
                time.sleep(0.05)
            print(ray.get(sleep.remote(1), timeout=30))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            ray.get(sleep.remote(600))
        except KeyboardInterrupt:
            print("interrupted")
        """)
    assert out.split("\n")[:-1] == ["handled 0.5", "1"] * 2 + ["handled 0.5", "interrupted"]


def test_a_destructor_that_runs_when_the_interpreter_ends_starts_no_session():
    out = run_alone("""
        import hpcray as ray
        ray.init(num_cpus=1)

        class Cycle:
            def __del__(self):
                for use in (lambda: ray.put(1), ray.init):
                    try:
                        use()
                    except ray.exceptions.RaySystemError as error:
                        print("the interpreter ends" in str(error))

        cycle = Cycle()
        cycle.me = cycle
        """)
    assert out.split() == ["True", "True"]


def test_interrupts_of_main_leave_the_other_threads_going():
    """Ctrl-C may hit main just as another thread hands the driving over to it."""
    out = run_alone(
        """
        import os, signal, threading
        import hpcray as ray
        ray.init(num_cpus=2)

        @ray.remote
        def echo(value):
            return value

        ray.get(echo.remote(0))
        armed = threading.Event()
        results, interrupts = [], 0

        def work():
            for i in range(700):
                results.append(ray.get(echo.remote(i), timeout=15) == i)
                if i % 3 == 0 and armed.is_set():
                    armed.clear()
                    os.kill(os.getpid(), signal.SIGINT)

        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads]
        while True:
            try:
                while any(thread.is_alive() for thread in threads):
                    armed.set()
                    ray.get(echo.remote(1), timeout=15)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                break
            except KeyboardInterrupt:
                interrupts += 1
        print(len(results), all(results), interrupts > 5)
        """,
        timeout=3 * PATIENCE,
    )
    assert out.split() == ["1400", "True", "True"]


def test_shutdown_ends_every_wait():
    out = run_alone(
        """
        import threading, time
        import hpcray as ray
        from hpcray.runtime.core_worker.core_worker import current
        ray.init(num_cpus=1)

        @ray.remote(num_cpus=99)
        def never():
            pass

        ended, refs = [], [never.remote() for _ in range(4)]
        future = refs[0].future()

        def work(wait):
            try:
                wait()
            except ray.exceptions.RayError as error:
                ended.append("shutdown" in str(error))

        waits = [lambda: ray.get(refs[1]), lambda: ray.get(refs), lambda: ray.wait(refs[2:], num_returns=2)]
        threads = [threading.Thread(target=work, args=(wait,)) for wait in waits]
        [thread.start() for thread in threads]
        engine = current.process.engine
        while len(engine.asleep - {engine.background.thread.ident}) < 3:
            time.sleep(0.001)
        ray.shutdown()
        [thread.join(10) for thread in threads]
        print(len(ended) >= 2, all(ended), any(thread.is_alive() for thread in threads), future.exception(10) is None)
        """
    )
    assert out.split() == ["True", "True", "False", "False"]


@pytest.mark.parametrize("timeout", [0, 1e7, 1e12, float("inf")])
def test_any_timeout(timeout):
    ref = echo.remote(1)
    ray.wait([ref], timeout=PATIENCE)
    assert ray.get(ref, timeout=timeout) == 1
    assert ray.wait([echo.remote(1), ref], timeout=timeout)[0]


# ---------------------------------------------------------------- destructors


def test_destructors_that_the_garbage_collector_runs_may_call_actors():
    """The collector may run while hpcray holds its lock."""
    actor, count, thresholds = Actor.remote(), 0, gc.get_threshold()
    ray.get(actor.pid.remote())

    class Cyclic:
        def __init__(self):
            self.me = self

        def __del__(self):
            nonlocal count
            count += 1
            actor.echo.remote(count)
            if count % 10 == 0:
                ray.cancel(echo.remote(count))

    gc.set_threshold(20, 2, 2)
    try:
        refs = []
        for i in range(2000):
            Cyclic()
            refs.append(echo.remote(i))
        assert ray.get(refs, timeout=PATIENCE) == list(range(2000))
    finally:
        gc.set_threshold(*thresholds)
    eventually(lambda: gc.collect() >= 0 and count == 2000)  # another thread may still be collecting
    assert ray.get(actor.echo.remote("end"), timeout=PATIENCE) == "end"


def test_a_wait_inside_our_lock_is_an_error():
    engine = engine_of()
    with engine.lock, pytest.raises(exceptions.RaySystemError, match="cannot wait"):
        ray.get(never.remote())


# ---------------------------------------------------------------- cancelling


def test_cancelled_in_the_middle_of_our_own_code():
    """A task that is cancelled while it uses hpcray ends in TaskCancelledError and leaves its worker whole."""

    @ray.remote
    def busy(i):
        while True:
            ray.get(echo.remote(i)) if i % 2 else [ray.put(i) for _ in range(5)]

    for _ in range(3):
        refs = [busy.remote(i) for i in range(4)]
        ray.wait(refs, timeout=0.05)
        for ref in refs:
            ray.cancel(ref)
        for ref in refs:
            with pytest.raises(exceptions.TaskCancelledError):
                ray.get(ref, timeout=PATIENCE)
        assert ray.get([echo.remote(i) for i in range(50)], timeout=PATIENCE) == list(range(50))


def test_a_task_that_never_waits_hears_that_it_is_cancelled():
    @ray.remote
    def put():
        while True:
            ray.put(1)

    ref = put.remote()
    ray.wait([ref], timeout=1.0)
    ray.cancel(ref)
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(ref, timeout=PATIENCE)


def test_every_cancelled_task_ends():
    """Also one that ends by itself, or has not quite begun, at that moment."""

    @ray.remote
    def short(i):
        return i

    for _ in range(10):
        refs = [short.remote(i) for i in range(40)]
        for ref in refs[::2]:
            ray.cancel(ref)
        for i, ref in enumerate(refs):
            try:
                assert ray.get(ref, timeout=PATIENCE) == i
            except exceptions.TaskCancelledError:
                assert i % 2 == 0


def test_cancelling_a_queued_call_frees_those_behind_it():
    actor = Actor.remote()
    blocked = actor.echo.remote(never.remote())
    behind = actor.echo.remote(2)
    ray.cancel(blocked)
    with pytest.raises(exceptions.TaskCancelledError):
        ray.get(blocked, timeout=PATIENCE)
    assert ray.get(behind, timeout=PATIENCE) == 2


# ---------------------------------------------------------------- deaths


def test_a_reply_does_not_wait_for_an_owner_that_died():
    """A worker holds its reply back until the owners of what it borrows know of it; a dead one never will."""
    owner = Actor.remote()
    pid = ray.get(owner.pid.remote())
    (ref,) = ray.get(owner.put.remote(1))

    @ray.remote
    def borrow(ident, actor):
        os.kill(pid, signal.SIGSTOP)
        thread = threading.Thread(target=ray.ObjectRef, args=(ident,))  # outside of the task: it registers at once
        thread.start()
        thread.join()
        actor.echo.remote("borrowed")
        return "done"

    other = Actor.remote()
    done = borrow.remote(ref.binary(), other)
    stopped = lambda: open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "T"  # noqa: E731, SIM115
    eventually(stopped)
    assert ray.wait([done], timeout=0.3)[0] == []
    os.kill(pid, signal.SIGKILL)
    assert ray.get(done, timeout=PATIENCE) == "done"


def test_a_handle_dropped_before_the_arguments_came():
    """The actor must not live on, and keep its CPUs, when nobody can reach it."""
    gate = Actor.remote()

    @ray.remote
    class Wide:
        def __init__(self, value):
            pass

    wide = Wide.options(num_cpus=4).remote(echo.remote(gate.echo.remote(1)))
    del wide, gate
    assert ray.get(echo.options(num_cpus=4).remote(5), timeout=PATIENCE) == 5


def test_a_function_that_cannot_be_loaded_says_so_every_time():
    class Broken:
        def __reduce__(self):
            return eval, ("1/0",)

    broken = Broken()

    @ray.remote
    def use():
        return broken

    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"failed to import on the worker(.|\n)*division by zero"):
            ray.get(use.remote(), timeout=PATIENCE)


def test_a_forked_child_is_not_in_the_job():
    pid = os.fork()
    if pid == 0:
        os._exit(7 if ray.is_initialized() else 0)
    assert os.waitpid(pid, 0)[1] == 0
    assert ray.get(echo.remote(1), timeout=PATIENCE) == 1


@ray.remote
class Forks:
    def fork(self, how):
        child = os.fork()
        if not child:
            if how == "return":
                return 0
            raise {"raise": ValueError, "exit": SystemExit}[how]
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class AsyncForks(Forks.__ray_actor_class__):
    async def ready(self):
        return True


def test_a_child_that_a_task_forks_ends_where_its_code_does():
    """It came to wait for tasks, with the worker's own epoll."""
    task, actor = ray.remote(Forks.__ray_actor_class__.fork), Forks.remote()
    group = ray.remote(AsyncForks).remote()
    for how, code in (("return", 0), ("raise", 1), ("exit", 0)):
        calls = [task.remote(None, how), actor.fork.remote(how), group.fork.remote(how)]
        assert ray.get(calls, timeout=PATIENCE) == [code] * 3


# ---------------------------------------------------------------- full sockets


def test_two_processes_write_much_to_each_other():
    first, second = (Actor.options(max_concurrency=2).remote() for _ in range(2))
    both = [first.relay.remote(second, 90_000, 500), second.relay.remote(first, 90_000, 500)]
    assert ray.get(both, timeout=2 * PATIENCE) == [45_000_000] * 2
