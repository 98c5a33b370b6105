"""Tensors that stay in the process that made them, with CPU tensors."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from engine import NAME, PATIENCE, exceptions, hpcray_only, ray

torch = pytest.importorskip("torch")
wait_tensor_freed = importlib.import_module(f"{NAME}.experimental").wait_tensor_freed
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]  # Ray's own needs a communicator for CPU tensors
INIT = {"num_cpus": 2, "object_store_memory": 256 << 20}
LENGTH = 1 << 20


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Holder:
    def __init__(self) -> None:
        self.tensor: Any = None

    @ray.method(tensor_transport="gloo")
    def make(self, value: float, length: int = LENGTH) -> Any:
        self.tensor = torch.full((length,), value)
        return {"tensor": self.tensor, "twice": [self.tensor], "array": np.arange(5.0), "text": "x"}

    def pointer(self) -> int:
        return self.tensor.data_ptr()

    def look(self, value: Any) -> tuple[int, float]:
        return value["tensor"].data_ptr(), float(value["tensor"].sum())

    def plain(self, length: int) -> Any:
        self.tensor = torch.ones(length)
        return self.tensor

    def pair(self) -> Any:
        return torch.zeros(3), [torch.ones(2), "y"]

    def several(self) -> Any:
        yield torch.ones(1)

    def put(self, length: int) -> Any:
        self.tensor = torch.ones(length)
        return [ray.put(self.tensor, _tensor_transport="auto")]

    def wait_freed(self, timeout: float | None) -> None:
        wait_tensor_freed(self.tensor, timeout)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("length", [4, LENGTH])
def test_the_same_process_gets_the_same_tensor_and_others_a_copy(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    ref = first.make.remote(2.0, length)
    pointer = ray.get(first.pointer.remote())
    assert ray.get(first.look.remote(ref)) == (pointer, 2.0 * length)
    assert ray.get(second.look.remote(ref))[1] == 2.0 * length
    value = ray.get(ref)
    assert value["tensor"].sum() == 2.0 * length and value["twice"][0] is value["tensor"]
    assert value["array"].tolist() == [0, 1, 2, 3, 4] and value["text"] == "x"
    assert ray.wait([ref]) == ([ref], [])


def test_a_nested_ref_and_a_put_in_an_actor() -> None:
    holder, other = Holder.remote(), Holder.remote()
    (inner,) = ray.get(holder.put.remote(LENGTH))
    assert ray.get(inner).sum() == LENGTH
    assert ray.get(other.look.remote({"tensor": ray.get(inner)}))[1] == LENGTH


def test_tasks_and_the_driver_have_device_objects() -> None:
    @ray.remote(tensor_transport="auto")
    def made(given: Any) -> Any:
        return given * 2

    mine = torch.ones(LENGTH)
    ref = ray.put([mine, 7], _tensor_transport="ucx")
    assert ray.get(ref)[0] is mine and ray.get(ref)[1] == 7
    task = made.remote(ray.put(mine, _tensor_transport="auto"))
    assert ray.get(made.options(tensor_transport="object_store").remote(task)).sum() == 4 * LENGTH
    assert mine.sum() == LENGTH


def test_options_of_a_call_and_several_returns() -> None:
    holder = Holder.remote()
    assert ray.get(holder.plain.options(tensor_transport="AUTO").remote(LENGTH)).sum() == LENGTH
    one, two = holder.pair.options(tensor_transport="auto", num_returns=2).remote()
    assert ray.get(one).tolist() == [0, 0, 0]
    assert ray.get(two)[0].tolist() == [1, 1] and ray.get(two)[1] == "y"


def test_tensors_are_freed_with_the_last_ref() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0)
    ray.get(ref)
    with pytest.raises(TimeoutError, match="not freed"):
        ray.get(holder.wait_freed.remote(0.1))
    del ref
    gc.collect()
    ray.get(holder.wait_freed.remote(PATIENCE), timeout=PATIENCE)
    tensor = torch.ones(3)
    ref = ray.put(tensor, _tensor_transport="auto")
    with pytest.raises(TimeoutError):
        wait_tensor_freed(tensor, 0.05)
    del ref
    wait_tensor_freed(tensor, PATIENCE)


def test_the_loss_of_the_process_is_said() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0)
    ray.wait([ref])
    os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(exceptions.ObjectLostError):
        ray.get(ref)


def test_collective_groups_are_made_found_and_ended() -> None:
    groups = importlib.import_module(f"{NAME}.experimental.collective")
    util = importlib.import_module(f"{NAME}.util.collective")
    actors = [Holder.remote() for _ in range(2)]
    made = groups.create_collective_group(actors, backend="gloo", name="two")
    assert groups.get_collective_groups([actors[1]], backend="gloo") == [made] and made.get_rank(actors[1]) == 1
    assert groups.get_collective_groups(actors, backend="nccl") == [] and made.get_rank(None) == -1

    def rank(_: Any) -> int:
        return int(util.get_rank("two"))

    assert ray.get([actor.__ray_call__.remote(rank) for actor in actors]) == [0, 1]
    with pytest.raises(RuntimeError, match="already in group for backend"):
        groups.create_collective_group(actors[:1], backend="gloo")
    ray.kill(actors[0])
    groups.destroy_collective_group("two")
    assert groups.get_collective_groups() == []
    again = groups.create_collective_group(actors[1:], backend="gloo")
    groups.destroy_collective_group(again)
    with pytest.raises(ValueError, match="No group with name"):
        groups.destroy_collective_group("two")
    with pytest.raises(ValueError, match="must be unique"):
        groups.create_collective_group([actors[1]] * 2, backend="gloo")


def test_wrong_use_is_refused() -> None:
    holder = Holder.remote()
    with pytest.raises(ValueError, match="Invalid tensor transport: CARRIER"):
        holder.plain.options(tensor_transport="carrier")
    with pytest.raises(ValueError, match="Invalid tensor transport"):
        ray.put(torch.ones(1), _tensor_transport="pigeon")
    with pytest.raises(ValueError, match="NCCL does not support tensor transfer on device cpu"):
        ray.get(holder.plain.options(tensor_transport="nccl").remote(3))
    with pytest.raises(ValueError, match="CUDA_IPC does not support"):
        ray.put(torch.ones(1), _tensor_transport="cuda_ipc")

    with pytest.raises(NotImplementedError, match="generators"):
        holder.several.options(tensor_transport="auto").remote()
    with pytest.raises(ValueError, match="generators"):

        @ray.remote(tensor_transport="auto")
        def several() -> Any:
            yield 1
