"""How actors end: kill, exit_actor, crashes, failed constructors, restarts; what their callers hear."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from engine import IS_HPCRAY, Marks, alive, eventually, exceptions, exit_actor, ray

pytestmark = pytest.mark.usefixtures("session")


@ray.remote
class Mortal:
    def __init__(self, marks: Marks | None = None):
        self.calls = 0
        if marks is not None:
            marks.add()

    def pid(self):
        return os.getpid()

    def call(self):
        self.calls += 1
        return self.calls

    def sleep(self, seconds):
        time.sleep(seconds)

    def crash(self):
        os._exit(1)

    def crash_once(self, marks: Marks):
        if marks.add() == 1:
            os._exit(1)
        return len(marks.lines())

    def leave(self):
        exit_actor()

    def leave_in_a_helper(self):
        def helper():
            exit_actor()

        try:
            helper()
        except Exception:
            return "not caught by this"

    def system_exit(self, code):
        sys.exit(code)

    def fail(self):
        raise ValueError("only a method")


def assert_dead(actor):
    """Calls fail as Ray's do: now, again, and from somewhere else."""
    for _ in range(2):
        with pytest.raises(exceptions.ActorDiedError) as caught:
            ray.get(actor.call.remote())
        assert isinstance(caught.value, exceptions.RayActorError)
        assert caught.value.actor_id == actor._actor_id.hex()
    elsewhere = ray.remote(max_retries=0)(lambda box: ray.get(box[0].call.remote()))
    with pytest.raises(exceptions.RayActorError):
        ray.get(elsewhere.remote([actor]))


class TestKill:
    def test_ends_the_process(self):
        actor = Mortal.remote()
        pid = ray.get(actor.pid.remote())
        ray.kill(actor)
        eventually(lambda: not alive(pid))
        assert_dead(actor)

    def test_calls_in_flight_fail(self):
        actor = Mortal.remote()
        ray.get(actor.call.remote())
        refs = [actor.sleep.remote(60), actor.call.remote()]
        time.sleep(0.1)
        ray.kill(actor)
        for ref in refs:
            with pytest.raises(exceptions.ActorDiedError):
                ray.get(ref)

    def test_before_it_runs(self):
        actor = Mortal.remote()
        ref = actor.call.remote()
        ray.kill(actor)
        try:
            assert ray.get(ref) == 1
        except exceptions.ActorDiedError:
            pass
        assert_dead(actor)

    def test_twice(self):
        actor = Mortal.remote()
        ray.get(actor.call.remote())
        ray.kill(actor)
        ray.kill(actor)
        eventually(lambda: _is_dead(actor))
        assert_dead(actor)

    def test_by_another_actor_or_task(self):
        actor = Mortal.remote()
        pid = ray.get(actor.pid.remote())
        ray.get(ray.remote(lambda box: ray.kill(box[0])).remote([actor]))
        eventually(lambda: not alive(pid))
        assert_dead(actor)

    def test_of_an_actor_that_waits_for_a_place(self):
        actor = Mortal.options(resources={"nowhere": 1}).remote()
        ref = actor.call.remote()
        ray.kill(actor)
        with pytest.raises(exceptions.RayActorError):
            ray.get(ref)

    def test_of_an_actor_whose_arguments_are_not_ready(self, marks: Marks):
        actor = Mortal.remote(ray.remote(lambda: time.sleep(0.5) or marks).remote())
        ray.kill(actor)
        with pytest.raises(exceptions.RayActorError):
            ray.get(actor.call.remote())
        time.sleep(0.7)
        assert marks.lines() == []

    def test_only_for_actors(self):
        for bad in (1, ray.put(1), Mortal):
            with pytest.raises(ValueError, match="only supported for actors"):
                ray.kill(bad)

    def test_results_of_a_dead_actor_stay(self):
        actor = Mortal.remote()
        ref = actor.call.remote()
        ray.wait([ref])
        ray.kill(actor)
        eventually(lambda: _is_dead(actor))
        assert ray.get(ref) == 1


class TestExit:
    @pytest.mark.parametrize("method", ["leave", "leave_in_a_helper"])
    def test_exit_actor(self, method):
        actor = Mortal.remote()
        pid = ray.get(actor.pid.remote())
        with pytest.raises(exceptions.ActorDiedError, match="exit_actor"):
            ray.get(getattr(actor, method).remote())
        eventually(lambda: not alive(pid))
        assert_dead(actor)

    @pytest.mark.parametrize("code", [0, 1])
    def test_sys_exit(self, code):
        actor = Mortal.remote()
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.system_exit.remote(code))
        assert_dead(actor)

    def test_ray_terminate_lets_earlier_calls_finish(self):
        actor = Mortal.remote()
        refs = [actor.call.remote() for _ in range(10)]
        actor.__ray_terminate__.remote()
        assert ray.get(refs) == list(range(1, 11))
        eventually(lambda: _is_dead(actor))

    def test_exit_handlers_run(self, marks: Marks):
        actor = Mortal.remote()
        ray.get(actor.__ray_call__.remote(lambda self, marks: _register(marks), marks))
        actor.leave.remote()
        eventually(marks.lines)

    def test_only_inside_actors(self):
        with pytest.raises(TypeError):
            exit_actor()
        with pytest.raises(TypeError):
            ray.get(ray.remote(lambda: exit_actor()).remote())


def _register(marks):
    import atexit

    atexit.register(marks.add)


def _is_dead(actor):
    try:
        ray.get(actor.call.remote())
    except exceptions.RayActorError:
        return True
    return False


class TestCrash:
    def test_during_a_call(self):
        actor = Mortal.remote()
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(actor.crash.remote())
        assert_dead(actor)

    def test_between_calls(self):
        actor = Mortal.remote()
        pid = ray.get(actor.pid.remote())
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        assert_dead(actor)

    def test_is_heard_by_all_who_wait(self):
        actor = Mortal.remote()
        ray.get(actor.call.remote())
        waiter = ray.remote(max_retries=0)(lambda box: ray.get(box[0].sleep.remote(60)))
        refs = [waiter.remote([actor]), waiter.remote([actor]), actor.sleep.remote(60)]
        time.sleep(0.5)
        other = Mortal.remote()
        os.kill(ray.get(other.pid.remote()), 0)
        ray.kill(actor)
        for ref in refs:
            with pytest.raises(exceptions.RayActorError):
                ray.get(ref)

    def test_an_exception_is_not_a_death(self):
        actor = Mortal.remote()
        with pytest.raises(ValueError, match="only a method"):
            ray.get(actor.fail.remote())
        assert ray.get(actor.call.remote()) == 1

    def test_says_who_died(self):
        actor = Mortal.options(name="the departed").remote()
        with pytest.raises(exceptions.ActorDiedError) as caught:
            ray.get(actor.crash.remote())
        text = str(caught.value)
        assert actor._actor_id.hex() in text
        if IS_HPCRAY:
            assert "Mortal" in text


class TestConstructor:
    def test_its_exception_is_the_answer_to_every_call(self):
        @ray.remote
        class Broken:
            def __init__(self):
                raise ValueError("no way to be")

            def call(self):
                return 1

        broken = Broken.remote()
        for _ in range(2):
            with pytest.raises(exceptions.ActorDiedError, match="no way to be") as caught:
                ray.get(broken.call.remote())
            assert isinstance(caught.value, exceptions.RayActorError)
            assert "__init__" in str(caught.value)
            assert caught.value.actor_init_failed

    def test_a_crash_in_it(self):
        @ray.remote
        class Crashes:
            def __init__(self):
                os._exit(3)

            def call(self):
                return 1

        with pytest.raises(exceptions.ActorDiedError):
            ray.get(Crashes.remote().call.remote())

    def test_a_failed_argument(self):
        @ray.remote
        class Takes:
            def __init__(self, x):
                self.x = x

            def call(self):
                return self.x

        actor = Takes.remote(ray.remote(lambda: 1 / 0).remote())
        with pytest.raises(exceptions.RayError):
            ray.get(actor.call.remote())

    def test_a_class_that_does_not_unpickle(self):
        cls = type("Evil", (), {"bomb": _Bomb(), "call": lambda self: 1})
        with pytest.raises(exceptions.RayActorError):
            ray.get(ray.remote(cls).remote().call.remote())

    def test_its_exception_ends_the_process(self, marks: Marks):
        @ray.remote
        class Broken:
            def __init__(self):
                marks.add(str(os.getpid()))
                raise ValueError

            def call(self):
                return 1

        with pytest.raises(exceptions.ActorDiedError):
            ray.get(Broken.remote().call.remote())
        (pid,) = marks.lines()
        eventually(lambda: not alive(int(pid)))


class _Bomb:
    def __reduce__(self):
        return _explode, ()


def _explode():
    raise ImportError("not importable there")


class TestRestart:
    def test_with_fresh_state(self, marks: Marks):
        actor = Mortal.options(max_restarts=1).remote(marks)
        first = ray.get(actor.pid.remote())
        ray.get([actor.call.remote() for _ in range(3)])
        os.kill(first, signal.SIGKILL)
        eventually(lambda: _answers(actor))
        assert ray.get(actor.pid.remote()) != first
        assert len(marks.lines()) == 2
        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
        eventually(lambda: _is_dead_for_good(actor))
        assert len(marks.lines()) == 2

    def test_kill_without_no_restart(self):
        actor = Mortal.options(max_restarts=-1).remote()
        for _ in range(2):
            pid = ray.get(actor.pid.remote())
            ray.kill(actor, no_restart=False)
            eventually(lambda pid=pid: not alive(pid))
            eventually(lambda: _answers(actor))
        ray.kill(actor)
        eventually(lambda: _is_dead_for_good(actor))

    def test_no_call_after_a_kill_reaches_what_was_killed(self):
        actor = Mortal.options(max_restarts=-1, max_task_retries=-1).remote()
        for _ in range(5):
            pid = ray.get(actor.pid.remote())
            ray.kill(actor, no_restart=False)
            assert ray.get(actor.pid.remote()) != pid
        ray.kill(actor)
        with pytest.raises(ray.exceptions.ActorDiedError):
            ray.get(actor.pid.remote())

    def test_max_task_retries(self, tmp_path):
        executions = Marks(tmp_path / "executions")
        actor = Mortal.options(max_restarts=1, max_task_retries=1).remote()
        assert ray.get(actor.crash_once.remote(executions)) == 2

    def test_exit_actor_is_not_undone(self):
        actor = Mortal.options(max_restarts=-1).remote()
        ray.get(actor.call.remote())
        actor.leave.remote()
        eventually(lambda: _is_dead_for_good(actor))

    def test_knows_that_it_was_restarted(self):
        @ray.remote(max_restarts=1)
        class Asks:
            def ask(self):
                return ray.get_runtime_context().was_current_actor_reconstructed, os.getpid()

        actor = Asks.remote()
        again, pid = ray.get(actor.ask.remote())
        assert again is False
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))

        def asked():
            try:
                return ray.get(actor.ask.remote())[0]
            except exceptions.RayActorError:
                return None

        eventually(asked)


def _answers(actor):
    """Whether calls get through again; while it restarts they may fail as unavailable."""
    try:
        return ray.get(actor.call.remote()) > 0
    except exceptions.ActorUnavailableError:
        return False


def _is_dead_for_good(actor):
    try:
        ray.get(actor.call.remote())
    except exceptions.ActorDiedError:
        return True
    except exceptions.ActorUnavailableError:
        return False
    return False


def test_a_kill_ends_the_calls_of_an_actor_whose_argument_never_comes():
    @ray.remote(resources={"nowhere": 1})
    def never():
        return 0

    @ray.remote
    class Waits:
        def __init__(self, argument):
            self.argument = argument

        def call(self):
            return self.argument

    @ray.remote
    def call_and_kill(handle):
        call = handle.call.remote()
        ray.kill(handle)
        try:
            ray.get(call, timeout=60)
        except exceptions.ActorDiedError:
            return True

    argument = never.remote()
    ours, lent = Waits.remote(argument), Waits.remote(argument)
    call = ours.call.remote()
    ray.kill(ours)
    with pytest.raises(exceptions.ActorDiedError, match=r"killed by `ray.kill`"):
        ray.get(call, timeout=60)
    with pytest.raises(exceptions.ActorDiedError):
        ray.get(ours.call.remote(), timeout=60)
    call = lent.call.remote()
    assert ray.get(call_and_kill.remote(lent), timeout=60)
    with pytest.raises(exceptions.ActorDiedError):
        ray.get(call, timeout=60)
