"""Device objects that `get` reads into tensors of the program, with CPU tensors."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
from engine import NAME, PATIENCE, exceptions, hpcray_only, ray

torch = pytest.importorskip("torch")
experimental = importlib.import_module(f"{NAME}.experimental")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]  # Ray's own needs NIXL
INIT = {"num_cpus": 2, "object_store_memory": 256 << 20, "preload": "torch"}
LENGTH = 1 << 19


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Maker:
    @ray.method(tensor_transport="nixl")
    def make(self, value: float, length: int = LENGTH) -> Any:
        experimental.register_nixl_memory_pool(1 << 20, torch.device("cpu"))
        return [torch.full((length,), value), {"small": torch.full((2, 3), value, dtype=torch.int32)}, "text"]

    def put(self, value: float) -> Any:
        tensor = torch.full((LENGTH,), value)
        experimental.register_nixl_memory(tensor)
        return [ray.put(tensor, _tensor_transport="nixl")]

    def pid(self) -> int:
        return os.getpid()

    def plain(self) -> Any:
        return torch.ones(3)

    def read_into_own(self, refs: list[Any], value: float) -> bool:
        own = [torch.zeros(LENGTH)]
        experimental.set_target_for_ref(refs[0], own)
        return ray.get(refs[0]) is own[0] and bool((own[0] == value).all())


def targets(length: int = LENGTH) -> list[Any]:
    return [torch.zeros(length), torch.zeros((2, 3), dtype=torch.int32)]


def test_get_fills_the_targets_which_the_value_has_then() -> None:
    maker, own = Maker.remote(), targets()
    for value in (1.0, 2.0):  # as a learner's weights do again and again
        ref = maker.make.remote(value)
        experimental.set_target_for_ref(ref, own)
        large, others, text = ray.get(ref)
        assert large is own[0] and others["small"] is own[1] and text == "text"
        assert bool((own[0] == value).all()) and bool((own[1] == value).all())
    own[0].zero_()
    assert float(ray.get(maker.make.remote(3.0))[0][0]) == 3.0, "others are read as ever"
    assert ray.get(ref, timeout=PATIENCE)[0] is own[0] and float(own[0].sum()) == 2.0 * LENGTH, "again, at each get"


def test_lists_of_refs_and_objects_that_were_put() -> None:
    maker, other = Maker.remote(), Maker.remote()
    own, plain = targets(), torch.zeros(LENGTH)
    (ref,), made, no = ray.get(maker.put.remote(5.0)), maker.make.remote(6.0), maker.plain.remote()
    experimental.set_target_for_ref(ref, [plain])
    experimental.set_target_for_ref(made, own)
    values = ray.get([no, ref, made, made])
    assert values[1] is plain and values[2][0] is own[0] and values[3][0] is own[0]
    assert float(plain[-1]) == 5.0 and float(own[0][-1]) == 6.0 and float(values[0].sum()) == 3.0
    assert ray.get(other.read_into_own.remote([ref], 5.0), timeout=PATIENCE), "in an actor, of a ref that it borrows"
    assert ray.get(maker.read_into_own.remote([ref], 5.0), timeout=PATIENCE), "and in the process that has the tensors"


def test_parameters_strides_and_other_devices() -> None:
    maker = Maker.remote()
    parameter = torch.nn.Parameter(torch.zeros(LENGTH))
    strided = torch.zeros((3, 2), dtype=torch.int32).t()
    ref = maker.make.remote(4.0)
    experimental.set_target_for_ref(ref, [parameter, strided])
    assert ray.get(ref)[1]["small"] is strided and strided.tolist() == [[4] * 3] * 2
    assert parameter.requires_grad and float(parameter.detach().sum()) == 4.0 * LENGTH
    experimental.set_target_device_for_ref(ref, "meta")
    assert ray.get(ref)[0].device.type == "meta"
    experimental.set_target_device_for_ref(ref, "cpu")
    found = ray.get(ref)[0]
    assert float(found[0]) == 4.0 and found is not parameter
    with pytest.raises(RuntimeError):
        experimental.set_target_device_for_ref(ref, "nowhere")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: targets()[:1], r"Length of tensor_buffers \(1\) does not match length from object metadata \(2\)"),
        (lambda: targets(7), "Shape of tensor_buffer at index 0"),
        (lambda: [torch.zeros(LENGTH), torch.zeros((2, 3))], "Dtype of tensor_buffer at index 1"),
    ],
)
def test_targets_that_do_not_fit_stay_as_they_are(wrong: Any, text: str) -> None:
    ref, own = Maker.remote().make.remote(1.0), wrong()
    experimental.set_target_for_ref(ref, own)
    with pytest.raises(ValueError, match=text):
        ray.get(ref)
    assert not any(tensor.any() for tensor in own)
    right = targets()
    experimental.set_target_for_ref(ref, right)
    assert ray.get([ref])[0][0] is right[0]


def test_what_is_no_target_and_no_device_object() -> None:
    maker = Maker.remote()
    ref = maker.plain.remote()
    with pytest.raises(TypeError, match="ndarray"):
        experimental.set_target_for_ref(ref, [np.zeros(3)])
    with pytest.raises(TypeError):
        experimental.set_target_for_ref(3, [torch.zeros(3)])
    experimental.set_target_for_ref(ref, [torch.zeros(3)])
    with pytest.raises(ValueError, match="is not an RDT object"):
        ray.get(ref)


def test_targets_that_are_gone_and_errors() -> None:
    maker, own = Maker.remote(), targets()
    ref = maker.make.remote(8.0)
    experimental.set_target_for_ref(ref, own)
    del own
    gc.collect()
    assert float(ray.get(ref)[0][0]) == 8.0, "new tensors, as in Ray"
    failed, mine = maker.make.remote("no number"), targets()
    experimental.set_target_for_ref(failed, mine)
    with pytest.raises(exceptions.RayTaskError):
        ray.get(failed)
    slow = ray.remote(lambda: threading.Event().wait(30)).remote()
    experimental.set_target_for_ref(slow, mine)
    with pytest.raises(exceptions.GetTimeoutError, match="one object is not available"):
        ray.get([ref, slow], timeout=0.2)
    ray.cancel(slow, force=True)


def test_tensors_that_are_lost_and_made_again() -> None:
    maker, own = Maker.options(max_restarts=1, max_task_retries=1).remote(), targets()
    pid, ref = ray.get(maker.pid.remote()), maker.make.remote(9.0)
    ray.wait([ref])
    os.kill(pid, signal.SIGKILL)
    assert ray.get(maker.pid.remote(), timeout=PATIENCE) != pid
    experimental.set_target_for_ref(ref, own)
    assert ray.get(ref, timeout=PATIENCE)[0] is own[0] and float(own[0].sum()) == 9.0 * LENGTH


def test_threads_with_targets_of_their_own() -> None:
    maker = Maker.remote()
    wrong: list[float] = []

    def read(value: float) -> None:
        own = targets()
        for _ in range(5):
            ref = maker.make.remote(value)
            experimental.set_target_for_ref(ref, own)
            if ray.get(ref)[0] is not own[0] or not bool((own[0] == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=read, args=(float(number),)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
