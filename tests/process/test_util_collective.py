"""Collectives of actors over the object store: values in place, order, mistakes, ranks that do not come."""

from __future__ import annotations

import numpy as np
import pytest
from engine import hpcray_only, ray

from hpcray.util import collective as col
from hpcray.util.collective import ReduceOp

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 4}
SIZES = [5, 20_001]  # inline, and in the store


@ray.remote(num_cpus=0.5)
class Rank:
    def join(self, size, rank, group="default", timeout=30_000):
        col.init_collective_group(size, rank, "gloo", group, timeout)
        return col.get_rank(group), col.get_collective_group_size(group), col.is_group_initialized(group)

    def leave(self, group="default"):
        col.destroy_collective_group(group)
        return col.get_rank(group), col.get_collective_group_size(group)

    def run(self, function, *args):
        return function(*args)


@pytest.fixture(scope="module")
def ranks(session):
    made = [Rank.remote() for _ in range(3)]
    assert ray.get([actor.join.remote(3, i) for i, actor in enumerate(made)]) == [(i, 3, True) for i in range(3)]
    yield made
    assert ray.get([actor.leave.remote() for actor in made]) == [(-1, -1)] * 3


def _zeros(shape):
    return [np.zeros(shape, np.float32) for _ in range(3)]


def each(ranks, function, *args):
    return ray.get([actor.run.remote(function, *args) for actor in ranks])


@pytest.mark.parametrize("size", SIZES)
class TestValues:
    @pytest.mark.parametrize(
        ("op", "value"), [("SUM", 6), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3), ("AVERAGE", 2)], ids=str
    )
    def test_allreduce_reduces_on_every_rank(self, ranks, size, op, value):
        def work(size):
            mine = np.full((size, 2), col.get_rank() + 1.0)
            col.allreduce(mine, op=ReduceOp[op])
            return mine

        for found in each(ranks, work, size):
            assert found.shape == (size, 2) and (found == value).all()

    def test_reduce_changes_the_tensor_of_one_rank(self, ranks, size):
        def work(size):
            mine = np.full(size, col.get_rank() + 1, dtype=np.int32)
            col.reduce(mine, dst_rank=1)
            return mine

        assert [found[-1] for found in each(ranks, work, size)] == [1, 6, 3]

    def test_broadcast_copies_the_tensor_of_one_rank(self, ranks, size):
        def work(size):
            mine = np.full(size, col.get_rank())
            col.broadcast(mine, src_rank=2)
            return mine

        assert [found[-1] for found in each(ranks, work, size)] == [2, 2, 2]

    def test_allgather_collects_the_tensors_of_all_ranks(self, ranks, size):
        def work(size):
            found = [np.zeros(size) for _ in range(3)]
            col.allgather(found, np.full(size, float(col.get_rank())))
            return [part[-1] for part in found]

        assert each(ranks, work, size) == [[0, 1, 2]] * 3

    def test_reducescatter_leaves_each_rank_its_part(self, ranks, size):
        def work(size):
            mine = np.zeros(size)
            col.reducescatter(mine, [np.full(size, float(part + col.get_rank())) for part in range(3)])
            return mine[-1]

        assert each(ranks, work, size) == [3, 6, 9]

    def test_tensors_are_received_in_the_order_of_send(self, ranks, size):
        def work(size):
            rank, found = col.get_rank(), np.zeros(size)
            if rank == 0:
                for value in (1.0, 2.0, 3.0):
                    col.send(np.full(size, value), 2)
            if rank != 2:
                return []
            got = []
            for _ in range(3):
                col.recv(found, 0)
                got.append(found[-1])
            return got

        assert each(ranks, work, size) == [[], [], [1, 2, 3]]


def test_a_barrier_waits_for_all_ranks(ranks, tmp_path):
    def work(path):
        if col.get_rank() == 1:
            with open(path, "a") as file:
                file.write("x")
        col.barrier()
        with open(path) as file:
            return file.read()

    assert each(ranks, work, str(tmp_path / "mark")) == ["x"] * 3


def test_a_group_that_the_driver_declared_is_joined_at_its_first_operation():
    actors = [Rank.remote() for _ in range(2)]
    col.create_collective_group(actors, 2, [1, 0], "gloo", "declared")
    with pytest.raises(RuntimeError, match="initialize a group twice"):
        col.create_collective_group(actors, 2, [0, 1], "gloo", "declared")

    def work():
        mine = np.ones(1)
        col.allreduce(mine, "declared")
        return mine[0], col.get_rank("declared")

    assert each(actors, work) == [(2, 1), (2, 0)]
    ray.get([actor.leave.remote("declared") for actor in actors])


def test_the_name_of_a_destroyed_group_can_be_reused():
    for _ in range(2):
        actors = [Rank.remote() for _ in range(2)]
        ray.get([actor.join.remote(2, i, "again") for i, actor in enumerate(actors)])
        ray.get([actor.leave.remote("again") for actor in actors])


class TestMistakes:
    def test_collectives_in_the_driver_are_refused(self):
        with pytest.raises(RuntimeError, match="only used inside a Ray actor or task"):
            col.init_collective_group(1, 0, "gloo")

    @pytest.mark.parametrize(
        ("function", "error", "text"),
        [
            (lambda: col.allreduce(np.ones(1), "nobody"), RuntimeError, "'nobody' is not initialized"),
            (lambda: col.allreduce([1.0]), RuntimeError, "Unrecognized tensor type"),
            (lambda: col.broadcast(np.ones(1), 3), ValueError, "'3' must be less than world size '3'"),
            (lambda: col.reduce(np.ones(1), -1), ValueError, "'-1' is negative"),
            (lambda: col.send(np.ones(1), col.get_rank()), RuntimeError, "is self"),
            (lambda: col.allgather([np.ones(1)], np.ones(1)), RuntimeError, "must be equal to world_size"),
            (lambda: col.init_collective_group(3, 0, "gloo"), RuntimeError, "group twice"),
            (lambda: col.init_collective_group(3, 0, "nccl", "gpus"), RuntimeError, "NCCL is not available.*hint"),
            (lambda: col.init_collective_group(3, 0, "smoke", "x"), ValueError, "Unrecognized backend"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_invalid_arguments_of_collectives_are_refused(self, ranks, function, error, text):
        with pytest.raises(error, match=text):
            ray.get(ranks[0].run.remote(function))

    def test_results_for_read_only_arrays_are_refused(self, ranks):
        read_only = ray.put(np.zeros(100_000))

        def work(ref):
            col.broadcast(ray.get(ref[0]) if col.get_rank() else np.zeros(100_000), 0)

        with pytest.raises(RuntimeError, match=r"read-only.*np\.array"):
            each(ranks[1:] + ranks[:1], work, [read_only])

    @pytest.mark.parametrize("shape", [(2,), (1000,), (10, 100)], ids=str)
    @pytest.mark.parametrize("turned", [False, True], ids=["", "transposed"])
    def test_small_arguments_which_came_in_a_message_are_written_in_place(self, ranks, shape, turned):
        def work(array, others):
            mine = array.T if turned else array
            col.allreduce(mine)
            assert (array == 3).all()  # in place: every view of the memory shows it
            col.broadcast(others[0], 1)
            col.allgather(others[1:], np.full(shape, col.get_rank(), np.float32))
            return [array[0].tolist(), *(each.ravel()[0] for each in others)]

        found = ray.get(
            [
                actor.run.remote(work, np.ones(shape, np.float32), [np.full(shape, rank, np.float32), *_zeros(shape)])
                for rank, actor in enumerate(ranks)
            ]
        )
        assert [values[1:] for values in found] == [[1, 0, 1, 2]] * 3

    def test_an_object_that_other_processes_read_is_never_written(self, ranks):
        """A small value that its owner has put is in the owner's memory, and is sent to whoever asks for it."""

        def work():
            ref = ray.put(np.zeros(10))
            try:
                col.allreduce(ray.get(ref))
            except RuntimeError as error:
                return str(error), [ref]
            return "written", [ref]

        for text, (ref,) in each(ranks, work):
            assert "read-only" in text and (ray.get(ref) == 0).all()

    def test_a_tensor_over_the_object_store_is_refused(self, ranks):
        torch = pytest.importorskip("torch")
        stored = ray.put(np.zeros(100_000))

        def work(refs):
            import warnings

            warnings.simplefilter("ignore")
            tensor = torch.from_numpy(ray.get(refs[0]))
            col.allreduce(tensor)

        with pytest.raises(RuntimeError, match=r"the tensor is read-only.*x\.clone"):
            each(ranks, work, [stored])
        assert (ray.get(stored) == 0).all()

    def test_backends_have_rays_values(self):
        assert (col.Backend.GLOO, col.Backend.NCCL) == ("GLOO", "NCCL")
        assert col.Backend("gloo") == col.Backend("torch_gloo") == col.Backend.GLOO
        for unknown in ("unrecognized", "smoke"):
            with pytest.raises(ValueError, match=f"Unrecognized backend: '{unknown}'. Only NCCL and GLOO"):
                col.Backend(unknown)

    def test_the_error_for_a_missing_rank_names_the_rank(self):
        actor = Rank.remote()
        with pytest.raises(RuntimeError, match=r"ranks \[1\] of 2 did not arrive within 0\.3 s"):
            ray.get(actor.join.remote(2, 0, "alone", 300))
        with pytest.raises(RuntimeError, match="rank 0 of the collective group 'headless' did not join"):
            ray.get(actor.join.remote(2, 1, "headless", 300))

    @pytest.mark.parametrize("operation", ["barrier", "recv"])
    def test_a_rank_that_has_died_is_not_waited_for(self, operation):
        ranks = [Rank.remote() for _ in range(3)]
        ray.get([actor.join.remote(3, i, operation, 3_600_000) for i, actor in enumerate(ranks)])

        def work(operation):
            if operation == "barrier":
                col.barrier(operation)
            else:
                col.recv(np.zeros(1), 2, operation)

        waiting = [actor.run.remote(work, operation) for actor in ranks[:2]]
        ray.kill(ranks[2])
        for ref in waiting:
            with pytest.raises(
                RuntimeError, match=rf"{operation} of the collective group '{operation}': of its 3 ranks"
            ):
                ray.get(ref, timeout=60)
