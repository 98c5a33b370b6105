"""Lost results of actors and of generators are made again; what actors keep over their restarts."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from engine import Marks, alive, eventually, exceptions, hpcray_only, ray
from losing import SIZE, lose, make

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import current

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]


class TestActors:
    def test_a_result_where_max_task_retries_allows(self, marks: Marks):
        @ray.remote(max_restarts=1, max_task_retries=2)
        class Maker:
            def make(self):
                marks.add()
                return np.full(SIZE, 3)

        maker = Maker.remote()
        ref = maker.make.remote()
        ray.wait([ref])
        lose(ref)
        assert ray.get(ref)[0] == 3
        assert len(marks.lines()) == 2
        ray.kill(maker)
        lose(ref)
        with pytest.raises(exceptions.ActorDiedError):
            ray.get(ref)

    def test_a_call_that_waits_lets_those_of_its_actor_pass_that_make_its_argument_again(self, marks: Marks):
        """They are behind it in the queue. The actor runs one call at a time, and this one has not begun."""

        @ray.remote(max_restarts=1, max_task_retries=-1)
        class Maker:
            def __init__(self):
                self.running = 0

            def _run(self):
                self.running += 1
                time.sleep(0.05)
                assert self.running == 1
                self.running -= 1

            def wait(self):
                marks.add()
                while len(marks.lines()) < 2:
                    time.sleep(0.01)

            def make(self):
                self._run()
                return np.full(SIZE, 3)

            def double(self, array):
                self._run()
                return 2 * array

            def look(self, first, second):
                self._run()
                return int(first[0]), int(second[0])

        maker = Maker.remote()
        first = maker.make.remote()
        second = maker.double.remote(first)
        ray.wait([first, second], num_returns=2)
        blocked = maker.wait.remote()
        eventually(marks.lines)
        both, after = maker.look.remote(first, second), maker.look.remote(second, second)
        lose(first, second)
        marks.add()
        assert ray.get([both, after], timeout=30) == [(3, 6), (6, 6)]
        ray.get(blocked)

    def test_and_not_elsewhere(self):
        @ray.remote
        class Maker:
            def make(self):
                return np.full(SIZE, 3)

        maker = Maker.remote()
        ref = maker.make.remote()
        ray.wait([ref])
        lose(ref)
        with pytest.raises(exceptions.ObjectReconstructionFailedError, match="RETRIES_DISABLED"):
            ray.get(ref)

    def test_constructor_arguments_outlive_the_first_life(self, marks: Marks):
        """They are wanted again, and by then the creator has dropped its refs, and the store its copies."""

        @ray.remote(max_restarts=2)
        class Holder:
            def __init__(self, array):
                self.array = array

            def look(self):
                return int(self.array[0]), os.getpid()

        argument = make.remote(marks, 4)
        holder = Holder.remote(argument)
        value, pid = ray.get(holder.look.remote())
        oid = argument._id
        del argument
        for lost in (False, True):
            if lost:
                process = current.process
                with process.engine.lock:
                    process.engine.send(raylet_of(process.node), m.Free([oid], []))
                    process.engine.flush()
            os.kill(pid, signal.SIGKILL)
            eventually(lambda gone=pid: not alive(gone))
            value, pid = eventually(lambda: _try(holder))
            assert value == 4
        assert len(marks.lines()) == 2

    def test_calls_keep_their_order_over_restarts(self):
        @ray.remote(max_restarts=-1, max_task_retries=-1)
        class Log:
            def __init__(self):
                self.seen = []

            def add(self, number):
                time.sleep(0.002)
                self.seen.append(number)
                return os.getpid()

            def all(self):
                return self.seen

        log = Log.remote()
        pid = ray.get(log.add.remote(-1))
        refs = [log.add.remote(number) for number in range(200)]
        ray.get(refs[20])
        os.kill(pid, signal.SIGKILL)
        assert pid not in ray.get(refs[150:])
        seen = ray.get(log.all.remote())
        assert seen == sorted(seen) and seen[-1] == 199 and seen == list(range(seen[0], 200))

    def test_dead_actors_are_forgotten(self):
        clients = current.process.submitter.actors._clients

        @ray.remote(num_cpus=0)
        class Short:
            def work(self):
                return 1

        actor = Short.remote()
        ident = actor._actor
        assert ray.get(actor.work.remote()) == 1 and ident in clients
        ray.kill(actor)
        eventually(lambda: clients[ident].state == "DEAD" or ray.wait([ray.put(0)])[1])
        with pytest.raises(exceptions.ActorDiedError, match="kill"):
            ray.get(actor.work.remote())
        del actor
        eventually(lambda: ray.get(ray.put(0)) == 0 and ident not in clients)


def _try(holder: Any) -> Any:
    try:
        return ray.get(holder.look.remote())
    except exceptions.ActorUnavailableError:
        return None


class TestStreams:
    def test_a_value_is_made_again(self, marks: Marks):
        @ray.remote
        def produce():
            for number in range(4):
                marks.add()
                yield np.full(SIZE, number)

        refs = list(produce.options(num_returns="streaming").remote())
        ray.wait(refs, num_returns=4)
        kept = ray.get(refs[1])
        lose(refs[2])
        assert [ray.get(ref)[0] for ref in refs] == [0, 1, 2, 3]
        assert (kept == 1).all()
        eventually(lambda: len(marks.lines()) == 8)

    def test_while_its_task_still_runs(self, marks: Marks, tmp_path):
        @ray.remote
        def produce(gate):
            for number in range(3):
                if number == 2:
                    while not os.path.exists(gate):
                        time.sleep(0.01)
                marks.add()
                yield np.full(SIZE, number)

        gate = tmp_path / "gate"
        stream = produce.options(num_returns="streaming").remote(str(gate))
        first, second = next(stream), next(stream)
        lose(first)
        assert ray.wait([first], timeout=0.2)  # is asked for, and cannot be made yet
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get(first, timeout=0.5)
        gate.touch()
        assert ray.get(first)[0] == 0 and ray.get(second)[0] == 1
        assert ray.get(next(stream))[0] == 2
        assert next(stream, None) is None

    def test_with_a_window(self):
        @ray.remote
        def produce():
            for number in range(6):
                yield np.full(SIZE, number)

        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 1}
        refs = list(produce.options(**options).remote())
        ray.get(refs)
        lose(refs[4], refs[5])
        assert [ray.get(ref)[0] for ref in refs] == [0, 1, 2, 3, 4, 5]

    def test_one_that_yields_less_the_second_time(self, marks: Marks):
        @ray.remote
        def produce():
            for number in range(2 if marks.add() == 1 else 1):
                yield np.full(SIZE, number)

        refs = list(produce.options(num_returns="streaming").remote())
        ray.wait(refs, num_returns=2)
        lose(refs[1])
        with pytest.raises(exceptions.RaySystemError, match="did not yield value 2"):
            ray.get(refs[1])

    def test_it_ends_when_its_caller_dies(self, marks: Marks):
        @ray.remote
        def produce():
            for number in range(2000):
                marks.add()
                time.sleep(0.01)
                yield number
            marks.add("end")

        @ray.remote
        class Caller:
            def start(self):
                self.stream = produce.options(num_returns="streaming").remote()
                ray.get(next(self.stream))
                return os.getpid()

        caller = Caller.remote()
        os.kill(ray.get(caller.start.remote()), signal.SIGKILL)

        def still() -> bool:
            count = len(marks.lines())
            time.sleep(0.3)
            return len(marks.lines()) == count

        eventually(still)
        assert "end" not in marks.lines()
