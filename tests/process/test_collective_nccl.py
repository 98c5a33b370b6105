"""Collectives of tensors on GPUs, with a made-up NCCL (helpers/fake_nccl.py): every operation, and ranks that die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray

from hpcray.util import collective as col
from hpcray.util.collective import ReduceOp

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 4, "preload": "torch"}
SIZE = 3
TIMEOUT = 4000  # milliseconds


@ray.remote(num_cpus=0)
class Rank:
    def __init__(self, directory: str) -> None:
        from helpers.fake_nccl import FakeNccl, FakeStreams

        from hpcray.util.collective import nccl

        self.library = FakeNccl(directory)
        nccl.use_nccl(self.library, FakeStreams(self.library))

    def pid(self) -> int:
        return os.getpid()

    def join(self, size: int, rank: int, group: str = "default", timeout: int = TIMEOUT) -> int:
        col.init_collective_group(size, rank, "nccl", group, timeout)
        return col.get_rank(group)

    def leave(self, group: str = "default") -> int:
        col.destroy_collective_group(group)
        return len(self.library.live)

    def run(self, function: Any, *args: Any) -> Any:
        return function(*args)


def joined(directory: str, size: int = SIZE, **options: Any) -> list[Any]:
    made = [Rank.remote(directory) for _ in range(size)]
    assert ray.get([actor.join.remote(size, rank, **options) for rank, actor in enumerate(made)]) == list(range(size))
    return made


def each(ranks: list[Any], function: Any, *args: Any) -> list[Any]:
    found: list[Any] = ray.get([actor.run.remote(function, *args) for actor in ranks], timeout=PATIENCE)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    made = tmp_path_factory.mktemp("nccl")
    yield str(made)
    misuse = made / "misuse"
    assert not misuse.exists(), misuse.read_text()


@pytest.fixture(scope="module")
def ranks(session: Any, place: str) -> Iterator[list[Any]]:
    made = joined(place)
    yield made
    assert ray.get([actor.leave.remote() for actor in made]) == [0] * SIZE


@pytest.mark.parametrize(("op", "value"), [("SUM", 6), ("PRODUCT", 6), ("MIN", 1), ("MAX", 3), ("AVERAGE", 2)], ids=str)
def test_allreduce_reduces_on_every_rank(ranks: list[Any], op: str, value: int) -> None:
    def work(op: str) -> Any:
        mine = torch.full((5, 2), col.get_rank() + 1.0)
        col.allreduce(mine, op=ReduceOp[op])
        return mine

    assert all(bool((found == value).all()) and found.shape == (5, 2) for found in each(ranks, work, op))


def test_tensors_that_are_not_in_a_row_and_other_dtypes_are_reduced(ranks: list[Any]) -> None:
    def work() -> Any:
        mine = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t()
        part = torch.zeros(4, 6, dtype=torch.int64)[:, ::2]
        part += col.get_rank()
        flag = torch.tensor([col.get_rank() == 1, False])
        col.allreduce(mine)
        col.allreduce(part)
        col.allreduce(flag)
        return mine, part, flag

    for mine, part, flag in each(ranks, work):
        assert torch.equal(mine, 3 * torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).t())
        assert bool((part == 3).all()) and flag.tolist() == [True, False]


def test_reduce_and_broadcast(ranks: list[Any]) -> None:
    def work() -> Any:
        mine = torch.full((4,), col.get_rank() + 1, dtype=torch.int32)
        col.reduce(mine, dst_rank=1)
        other = torch.full((2, 2), float(col.get_rank()))
        col.broadcast(other, src_rank=2)
        return mine.tolist()[0], other.tolist()[1][1]

    assert each(ranks, work) == [(1, 2.0), (6, 2.0), (3, 2.0)]


def test_allgather_and_reducescatter(ranks: list[Any]) -> None:
    def work() -> Any:
        rank = col.get_rank()
        found = [torch.zeros(2, 2) for _ in range(3)]
        col.allgather(found, torch.full((2, 2), float(rank)))
        mine = torch.zeros(4)
        col.reducescatter(mine, [torch.full((4,), float(10 * part + rank)) for part in range(3)], op=ReduceOp.MAX)
        return [float(part[1][1]) for part in found], mine.tolist()

    assert each(ranks, work) == [([0, 1, 2], [10.0 * rank + 2] * 4) for rank in range(3)]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gather_scatter_and_alltoall(ranks: list[Any], backend: str) -> None:
    def work(backend: str) -> Any:
        rank, group = col.get_rank(), "default"
        if backend == "gloo":
            group = "gatherers"
            col.init_collective_group(3, rank, "gloo", group)
        gathered = [torch.zeros(2) for _ in range(3)] if rank == 1 else None
        col.gather(torch.full((2,), float(rank)), gathered, 1, group)
        mine = torch.zeros(2)
        col.scatter(mine, [torch.full((2,), 5.0 + part) for part in range(3)] if rank == 2 else None, 2, group)
        into = [torch.zeros(3, dtype=torch.int64) for _ in range(3)]
        col.alltoall(into, [torch.full((3,), 10 * rank + part) for part in range(3)], group)
        if backend == "gloo":
            col.destroy_collective_group(group)
        return (
            None if gathered is None else [float(part[1]) for part in gathered], mine.tolist(),
            [int(part[2]) for part in into],
        )  # fmt: skip

    expected = [
        (None, [5.0, 5.0], [0, 10, 20]), ([0.0, 1.0, 2.0], [6.0, 6.0], [1, 11, 21]), (None, [7.0, 7.0], [2, 12, 22]),
    ]  # fmt: skip
    assert each(ranks, work, backend) == expected


def test_send_recv_and_barrier(ranks: list[Any]) -> None:
    def work() -> Any:
        rank = col.get_rank()
        mine = torch.full((3,), float(rank))
        for _ in range(2):
            if rank == 0:
                col.send(mine, 2)
            elif rank == 2:
                col.recv(mine, 0)
            mine += 1
        col.barrier()
        return mine.tolist()

    assert each(ranks, work) == [[2.0] * 3, [3.0] * 3, [2.0] * 3]


def test_mistakes_are_named_before_any_rank_waits(ranks: list[Any]) -> None:
    def work() -> Any:
        found = []
        for call in (
            lambda: col.allreduce(np.zeros(3)),
            lambda: col.allreduce(torch.zeros(3, dtype=torch.complex64)),
            lambda: col.allgather([torch.zeros(2)] * 3, torch.zeros(3)),
            lambda: col.gather(torch.zeros(2), [torch.zeros(2)], col.get_rank()),
            lambda: col.scatter(torch.zeros(2), None, col.get_rank()),
            lambda: col.alltoall([torch.zeros(2)] * 3, [torch.zeros(2)] * 2),
        ):
            try:
                call()
            except RuntimeError as error:
                found.append(str(error))
        return found

    for found in each(ranks, work):
        assert len(found) == 6
        assert "Backend.GLOO" in found[0] and "complex64" in found[1] and "need 3 elements" in found[2]
        assert "equal to world_size" in found[3] and "must be a list" in found[4] and "alltoall" in found[5]


def test_a_rank_that_does_not_come_ends_the_operation_of_the_others(place: str) -> None:
    made = joined(place, group="late", timeout=1500)

    def work(late: bool) -> str:
        mine = torch.ones(3)
        if late and col.get_rank("late") == 2:
            return "late"
        col.allreduce(mine, "late")  # returns before it is done
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            time.sleep(0.05)
            try:
                col.allreduce(mine, "late")
            except RuntimeError as error:
                return str(error)
        return "it goes on"

    found = each(made, work, True)
    assert found[2] == "late" and all("was not done after 1.5 s" in text for text in found[:2])
    assert ray.get([actor.leave.remote("late") for actor in made]) == [0, 0, 0]


def test_the_name_of_a_group_is_used_again_after_a_member_has_died(place: str) -> None:
    for victim in (2, 0):
        made = joined(place, group="again")
        os.kill(ray.get(made[victim].pid.remote()), signal.SIGKILL)
        eventually(lambda made=made, victim=victim: _is_dead(made[victim]))
        rest = [actor for number, actor in enumerate(made) if number != victim]
        ray.get([actor.leave.remote("again") for actor in rest], timeout=PATIENCE)

        def work() -> list[float]:
            mine = torch.full((2,), col.get_rank("again") + 1.0)
            col.allreduce(mine, "again")
            return mine.tolist()

        again = [*rest, Rank.remote(place)]
        assert ray.get([actor.join.remote(3, rank, "again") for rank, actor in enumerate(again)], timeout=PATIENCE) == [
            0, 1, 2,
        ]  # fmt: skip
        assert each(again, work) == [[6.0, 6.0]] * 3
        ray.get([actor.leave.remote("again") for actor in again])


def _is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.pid.remote(), timeout=5)
    except (exceptions.RayActorError, exceptions.GetTimeoutError):
        return True
    return False


def test_a_rank_that_dies_while_others_join_is_an_error(place: str) -> None:
    first = Rank.remote(place)
    with pytest.raises(RuntimeError, match="did not arrive within 1.5 s"):
        ray.get(first.join.remote(2, 0, "alone", 1500))
    assert ray.get(first.leave.remote("alone")) == 0
    assert not list(Path(place).glob("misuse"))
