"""Objects whose last copy is lost are made again from lineage, or tell why they cannot be."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from engine import Marks, alive, eventually, exceptions, hpcray_only, ray
from losing import SIZE, add, lose, make

from hpcray.core.core_worker.object_table import LINEAGE_ONLY
from hpcray.runtime.core_worker.core_worker import current

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]


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
        eventually(
            lambda: sum(entry.state == LINEAGE_ONLY for entry in table.entries.values()) >= 3 or ray.get(ray.put(0))
        )
        lose(ref)
        assert ray.get(ref)[0] == 4
        assert len(marks.lines()) == 8

    def test_with_arguments_by_value_and_puts_that_nobody_refers_to(self, marks: Marks):
        result = add.remote(marks, np.full(SIZE, 3), 1)
        of_put = add.remote(marks, ray.put(np.full(SIZE, 5)), 1)
        of_once = add.remote(marks, make.options(max_retries=0).remote(marks, 9), 1)
        nested = ray.remote(lambda refs: ray.get(refs[0]) + 1).remote(ray.put([ray.put(np.full(SIZE, 7))]))
        refs = [result, of_put, of_once, nested]
        ray.wait(refs, num_returns=4)
        ray.get([total.remote(np.ones(SIZE)) for _ in range(4)])
        lose(*refs)
        assert [array[0] for array in ray.get(refs)] == [4, 6, 10, 8]
        assert len(marks.lines()) == 7

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

    def test_several_returns_in_the_last_run(self, marks: Marks):
        @ray.remote(num_returns=3, max_retries=1)
        def three():
            marks.add()
            return np.full(SIZE, 1), np.full(SIZE, 2), np.full(SIZE, 3)

        refs = three.remote()
        ray.wait(refs, num_returns=3)
        lose(*refs)
        process = current.process
        with process.engine.lock:  # as when their node dies
            process.submitter.retries.hold()
            for ref in refs:
                process.table.recovery.lose(ref._id, process.table.entries[ref._id], "a test says so")
            process.submitter.retries.submit_held()
        assert [array[0] for array in ray.get(refs)] == [1, 2, 3]
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

    def test_a_second_copy_on_one_node(self, capfd):
        """There is none; a warning says so, once."""
        refs = [ray.put(np.zeros(SIZE), replicas=2) for _ in range(2)] + [ray.put(1, replicas=3)]
        assert capfd.readouterr().err.count("only 1 of 2 copies could be made: there is no other node") == 1
        assert ray.get(refs[2]) == 1

    @pytest.mark.parametrize("replicas", [0, -1, True, 1.5, "2"])
    def test_not_a_number_of_copies(self, replicas):
        with pytest.raises(ValueError, match="is not a number of nodes"):
            ray.put(1, replicas=replicas)

    def test_the_chain_of_causes_is_told(self, marks: Marks):
        put = ray.put(np.zeros(SIZE))
        ref = add.remote(marks, add.remote(marks, put, 1), 1)
        ray.wait([ref])
        name = put.hex()
        lose(put)
        with pytest.raises(exceptions.ObjectReconstructionFailedError):
            ray.get(put)
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
