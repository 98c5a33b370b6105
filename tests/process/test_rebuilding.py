"""Objects whose last copy is lost are made again from lineage, or tell why they cannot be."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from engine import Marks, alive, eventually, exceptions, hpcray_only, ray

from hpcray.base.ids import raylet_of
from hpcray.core.owner.table import FREED
from hpcray.runtime.refs import current
from hpcray.wire import messages as m

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
SIZE = 200_000


def lose(*refs: Any) -> None:
    """Drop every copy of these objects behind their owner's back."""
    process = current.process
    assert process is not None
    ids = [ref._id for ref in refs]
    with process.engine.lock:
        process.drain()
        for oid in ids:
            process.table.unmap(oid)
        process.engine.send(raylet_of(process.node), m.Free(ids, []))
        process.engine.flush()


@ray.remote
def make(marks: Marks, number: int = 0):
    marks.add()
    return np.full(SIZE, number)


@ray.remote
def add(marks: Marks, array: Any, number: int):
    marks.add()
    return array + number


@ray.remote
def total(*arrays: Any):
    return int(sum(array[0] for array in arrays))


class TestTasks:
    def test_a_result_is_made_again(self, marks: Marks):
        ref = make.remote(marks, 7)
        assert ray.get(ref)[0] == 7
        lose(ref)
        assert ray.get(ref)[0] == 7
        assert len(marks.lines()) == 2

    def test_once_for_all_who_read(self, marks: Marks):
        ref = make.remote(marks, 7)
        ray.wait([ref])
        lose(ref)
        assert ray.get([total.remote(ref) for _ in range(8)]) == [7] * 8
        assert len(marks.lines()) == 2

    def test_who_reads_it_inside_of_a_value(self, marks: Marks):
        ref = make.remote(marks, 7)
        ray.wait([ref])
        lose(ref)
        read = ray.remote(lambda refs: int(ray.get(refs[0])[0]))
        assert ray.get([read.remote([ref]), read.remote([ref])]) == [7, 7]
        assert len(marks.lines()) == 2

    def test_with_inputs_that_were_freed_long_ago(self, marks: Marks):
        ref = make.remote(marks, 1)
        for _ in range(3):
            ref = add.remote(marks, ref, 1)
        assert ray.get(ref)[0] == 4
        table = current.process.table
        eventually(lambda: sum(entry.state == FREED for entry in table.entries.values()) >= 3 or ray.get(ray.put(0)))
        lose(ref)
        assert ray.get(ref)[0] == 4
        assert len(marks.lines()) == 8

    def test_a_long_chain(self, marks: Marks):
        ref = make.remote(marks, 1)
        step = ray.remote(lambda array: array + 1)
        for _ in range(150):
            ref = step.remote(ref)
        ray.wait([ref])
        lose(ref)
        assert ray.get(ref)[0] == 151

    def test_an_input_that_is_lost_too(self, marks: Marks):
        first = make.remote(marks, 1)
        second = add.remote(marks, first, 1)
        assert ray.get(second)[0] == 2
        lose(first, second)
        assert ray.get(second)[0] == 2
        assert ray.get(first)[0] == 1
        assert len(marks.lines()) == 4

    def test_several_returns_only_the_lost_one(self, marks: Marks):
        @ray.remote(num_returns=3)
        def three():
            marks.add()
            return np.full(SIZE, 1), np.full(SIZE, 2), 3

        refs = three.remote()
        kept = ray.get(refs[0])
        ray.get(refs)
        lose(refs[1])
        assert ray.get(refs[1])[0] == 2
        assert (kept == 1).all() and ray.get(refs[0])[0] == 1 and ray.get(refs[2]) == 3
        assert len(marks.lines()) == 2

    def test_as_often_as_max_retries_says(self, marks: Marks):
        ref = make.options(max_retries=1).remote(marks, 7)
        for _ in range(2):
            ray.wait([ref])
            lose(ref)
        with pytest.raises(exceptions.ObjectReconstructionFailedMaxAttemptsExceededError, match="max_retries"):
            ray.get(ref)
        assert len(marks.lines()) == 2

    def test_not_without_retries(self, marks: Marks):
        ref = make.options(max_retries=0).remote(marks, 7)
        ray.wait([ref])
        lose(ref)
        with pytest.raises(exceptions.ObjectReconstructionFailedError, match="RETRIES_DISABLED"):
            ray.get(ref)
        assert len(marks.lines()) == 1

    def test_a_run_that_raises(self, marks: Marks):
        @ray.remote
        def once():
            if marks.add() > 1:
                raise ValueError("not twice")
            return np.zeros(SIZE)

        ref = once.remote()
        ray.wait([ref])
        lose(ref)
        with pytest.raises(ValueError, match="not twice"):
            ray.get(ref)

    def test_a_run_whose_worker_dies(self, marks: Marks):
        @ray.remote
        def bad_second():
            if marks.add() == 2:
                os._exit(1)
            return np.full(SIZE, 5)

        ref = bad_second.remote()
        ray.wait([ref])
        lose(ref)
        assert ray.get(ref)[0] == 5
        assert len(marks.lines()) == 3

    def test_refs_inside_of_arguments(self, marks: Marks):
        @ray.remote
        def nested(refs):
            marks.add()
            return ray.get(refs[0]) + 1

        inner = make.remote(marks, 1)
        ref = nested.remote([inner])
        assert ray.get(ref)[0] == 2
        del inner
        lose(ref)
        assert ray.get(ref)[0] == 2
        assert len(marks.lines()) == 4

    def test_what_somebody_still_reads_an_earlier_life_of(self, marks: Marks):
        first = make.remote(marks, 1)
        view = ray.get(first)
        second = add.remote(marks, first, 1)
        ray.wait([second])
        del first
        lose(second)
        assert ray.get(second)[0] == 2
        assert (view == 1).all() and len(marks.lines()) == 4

    def test_of_a_task_in_a_task(self, marks: Marks):
        """A worker owns it, and makes it again when the driver cannot read it."""

        @ray.remote
        class Owner:
            def start(self):
                self.ref = make.remote(marks, 9)
                ray.wait([self.ref], fetch_local=False)
                return [self.ref]

        owner = Owner.remote()
        (ref,) = ray.get(owner.start.remote())
        lose(ref)
        assert ray.get(ref)[0] == 9
        assert len(marks.lines()) == 2

    def test_a_get_that_is_under_way_when_the_owner_dies(self, marks: Marks):
        @ray.remote
        class Owner:
            def start(self):
                self.ref = make.remote(marks, 9)
                ray.wait([self.ref], fetch_local=False)
                return [self.ref], os.getpid()

        owner = Owner.remote()
        (ref,), pid = ray.get(owner.start.remote())
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        lose(ref)
        with pytest.raises(exceptions.OwnerDiedError):
            ray.get(ref)


class TestWhatCannotBe:
    def test_a_put(self):
        ref = ray.put(np.zeros(SIZE))
        lose(ref)
        with pytest.raises(exceptions.ObjectLostError, match="replicas=2"):
            ray.get(ref)

    def test_the_chain_of_causes_is_told(self, marks: Marks):
        put = ray.put(np.zeros(SIZE))
        ref = add.remote(marks, add.remote(marks, put, 1), 1)
        ray.wait([ref])
        name = put.hex()
        del put
        lose(ref)
        with pytest.raises(exceptions.ObjectReconstructionFailedError) as caught:
            ray.get(ref)
        text = str(caught.value)
        assert text.count("its argument") == 2 and name in text and "[PUT]" in text

    def test_a_cancelled_run(self, marks: Marks):
        @ray.remote
        def slow_second():
            if marks.add() > 1:
                time.sleep(60)
            return np.zeros(SIZE)

        ref = slow_second.remote()
        ray.wait([ref])
        lose(ref)
        waiting = ray.remote(lambda refs: ray.get(refs)).remote([ref])
        eventually(lambda: len(marks.lines()) == 2)
        ray.cancel(ref)
        with pytest.raises(exceptions.TaskCancelledError):
            ray.get(ref)
        with pytest.raises(exceptions.RayError):
            ray.get(waiting)


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
