"""Device objects on a GPU: the twins of tests in test_api_device_objects.py, for one GPU that two actors share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from engine import PATIENCE, eventually, exceptions, exit_actor, hpcray_only, ray, start

from hpcray.runtime.core_worker.core_worker import current
from hpcray.tensors.tensor_pulls import PIECED_SIZE

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    hpcray_only,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
    pytest.mark.usefixtures("gpu_session"),
]
LENGTHS = [4, 1 << 20]


@pytest.fixture(scope="module")
def gpu_session() -> Iterator[None]:
    """A session that offers the GPUs of this machine."""
    patch = pytest.MonkeyPatch()
    patch.delenv("HPCRAY_MADE_UP_GPUS")
    start(num_cpus=2)
    yield
    ray.shutdown()
    patch.undo()


@ray.remote(num_cpus=0, num_gpus=0.4)
class Holder:
    def __init__(self) -> None:
        self.tensor: Any = None

    @ray.method(tensor_transport="auto")
    def make(self, value: float, length: int) -> Any:
        self.tensor = torch.full((length,), value, device="cuda")
        return {"tensor": self.tensor, "twice": [self.tensor]}

    def look(self, value: Any) -> tuple[int, float, str]:
        tensor = value["tensor"]
        assert value["twice"][0] is tensor
        return tensor.data_ptr(), float(tensor.sum()), tensor.device.type

    def look_at_copy(self, refs: list[Any]) -> tuple[bool, str]:
        tensor = ray.get(refs[0], _use_object_store=True)["tensor"]
        return bool(torch.equal(tensor, torch.arange(len(tensor), device=tensor.device))), tensor.device.type

    @ray.method(tensor_transport="auto")
    def count(self, length: int) -> Any:
        return {"tensor": torch.arange(length, device="cuda")}

    def pointer(self) -> int:
        return self.tensor.data_ptr()

    def keep(self, value: Any) -> None:
        self.tensor = value["tensor"]

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)
        torch.cuda.synchronize()

    def total(self) -> float:
        return float(self.tensor.sum())

    def leave(self) -> None:
        exit_actor()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_maker_gets_its_tensor_and_another_process_a_copy_on_its_gpu(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    ref = first.make.remote(2.0, length)
    pointer = ray.get(first.pointer.remote())
    assert ray.get(first.look.remote(ref)) == (pointer, 2.0 * length, "cuda")
    assert ray.get(second.look.remote(ref))[1:] == (2.0 * length, "cuda")


@pytest.mark.parametrize("length", LENGTHS)
def test_another_process_has_the_same_memory_and_it_is_freed_after_both(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    ref = first.make.remote(2.0, length)
    ray.get(second.keep.remote(ref))
    ray.get(first.fill.remote(3.0))
    assert ray.get(second.total.remote()) == 3.0 * length
    del ref
    gc.collect()
    for number in range(5):  # were the first one's memory free, one of these would be in it
        ray.get(first.look.remote(first.make.remote(float(number), length)))
    assert ray.get(second.total.remote()) == 3.0 * length


@pytest.mark.parametrize("length", LENGTHS)
def test_tensors_outlive_an_actor_that_ends_in_order(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    ref = first.make.remote(3.0, length)
    ray.wait([ref])
    with pytest.raises(exceptions.RayActorError):
        ray.get(first.leave.remote())
    assert ray.get(second.look.remote(ref), timeout=PATIENCE)[1:] == (3.0 * length, "cuda")


@pytest.mark.parametrize("length", [PIECED_SIZE // 8, 5 * PIECED_SIZE // 8 + 3])
def test_a_copy_of_its_own_passes_through_the_host_in_pieces(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    for _ in range(3):  # memory is allocated at first, then used again
        ref = first.count.remote(length)
        assert ray.get(second.look_at_copy.remote([ref]), timeout=PATIENCE) == (True, "cuda")
        assert ray.get(ref)["tensor"][-1] == length - 1


def test_memory_counts_tensors_by_device() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0, 1 << 20)
    ray.wait([ref])
    process = current.process
    assert process is not None
    (one,) = process.diagnostics.list_stores(10, PATIENCE, devices=True)[0]["device_objects"]
    assert (one["device"], one["objects"], one["size"]) == ("cuda:0", 1, 4 << 20)
    del ref
    gc.collect()
    eventually(lambda: not process.diagnostics.list_stores(1, PATIENCE, devices=True)[0]["device_objects"])
