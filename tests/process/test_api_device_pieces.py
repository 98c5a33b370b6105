"""Device objects that pass through the host in pieces, on a made-up driver (helpers/fake_device_driver.py).

A reader on another device, or with none, has the first pieces while the maker writes the last ones; nobody sees less
than all of them."""

from __future__ import annotations

import gc
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from engine import PATIENCE, Marks, eventually, exceptions, exit_actor, hpcray_only, ray

from hpcray.core.core_worker.object_entry import resident_of
from hpcray.runtime.core_worker.core_worker import current

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "object_store_memory": 64 << 20, "preload": "torch"}
LENGTH = 1 << 20
"""Elements: 4 MB, so four pieces of 1 MB."""
PIECES = 4
REPORTED = 1.5
"""Seconds after which the head knows what is free in the stores."""


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class Holder:
    """Has tensors on made-up devices, or reads them.

    Args:
        visible: devices that this process has; none: it has no driver.
    """

    def __init__(self, directory: str, *visible: str) -> None:
        from helpers.fake_device_driver import FakeDeviceDriver

        from hpcray.tensors import device_memory, device_pieces, tensor_pulls

        tensor_pulls._SMALLEST = tensor_pulls._LARGEST = device_pieces.PIECED_SIZE = 1 << 20
        self.driver = FakeDeviceDriver(directory, visible=visible)
        self.driver.transfers = self.transfer
        if visible:
            device_memory.use_driver(self.driver)
        self.began: list[float] = []
        self.accepted, self.broken = 1_000_000, False
        self.value: Any = None

    def transfer(self) -> bool:
        self.began.append(time.monotonic())
        if self.broken and len(self.began) > self.accepted:
            raise RuntimeError("the device is broken")
        return len(self.began) <= self.accepted

    def accept(self, number: int, broken: bool = False) -> None:
        """The driver refuses after so many streams and copies more, or the device is broken then."""
        self.accepted, self.broken = len(self.began) + number, broken

    def be_slow(self, pause: float) -> None:
        self.driver.pause = pause

    def use_several(self) -> None:
        """Tensors of an odd length count as those of the second device."""
        self.driver.device_of = lambda tensor: self.driver.visible[tensor.numel() % 2]

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        exit_actor()

    @ray.method(tensor_transport="auto")
    def make(self, value: float, length: int = LENGTH) -> Any:
        tensor = self.driver.tensor(length, value)
        tensor[-1] = -value
        return {"tensor": tensor}

    @ray.method(tensor_transport="auto")
    def give_views(self) -> Any:
        from helpers.tensor_views import make_views

        tensors = make_views(self.driver, LENGTH)
        return tensors, [tensor.shape for tensor in tensors]

    @ray.method(tensor_transport="auto")
    def make_several(self) -> Any:
        return [self.driver.tensor(length, float(length)) for length in (LENGTH, LENGTH + 1, 10, 11)]

    @ray.method(tensor_transport="auto")
    def make_many(self, count: int) -> Any:
        return {f"layer.{number}": self.driver.tensor(250, float(number)) for number in range(count)}

    def announce_less(self) -> None:
        from hpcray.tensors import device_pieces

        device_pieces._ANNOUNCED_SIZE = 10_000

    def read_many(self, value: Any) -> int:
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(value.values()))
        return sum(self.driver.is_on_device(tensor) for tensor in value.values())

    def read_several(self, value: Any) -> list[str]:
        """The devices that the copies went to."""
        for tensor in value:
            assert torch.equal(tensor, torch.full_like(tensor, float(tensor.numel())))
        return sorted(self.driver.used)

    def read(self, value: Any) -> tuple[bool, bool]:
        """Whether the value is right, and on this process's device."""
        tensor = value["tensor"]
        expected = torch.full_like(tensor, float(tensor[0]))
        expected[-1] = -float(tensor[0])
        return torch.equal(tensor, expected), self.driver.is_on_device(tensor)

    def read_copy(self, refs: list[Any]) -> tuple[bool, bool]:
        return self.read(ray.get(refs[0], _use_object_store=True))

    def read_views(self, value: Any) -> bool:
        from helpers.tensor_views import are_views

        tensors, shapes = value
        assert [tensor.shape for tensor in tensors] == shapes
        return are_views(tensors, LENGTH)

    def copies(self) -> dict[str, Any]:
        return {
            "down": len(self.driver.down), "up": len(self.driver.up), "began": self.began, "now": time.monotonic(),
            "most": self.driver.most_under_way, "registered": sum(self.driver.registered.values()),
            "open": [name for name in self.driver.leaks() if "local" in name], "blocks": self.driver.blocks_in_use,
        }  # fmt: skip


def copies_of(actor: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor.copies.remote(), timeout=PATIENCE)
    return found


def free_bytes() -> float:
    """Free bytes of the store, as far as the head knows."""
    found: float = ray.available_resources()["object_store_memory"]
    return found


def settled_free_bytes() -> float:
    time.sleep(REPORTED)
    gc.collect()
    time.sleep(REPORTED)
    return free_bytes()


def test_a_reader_on_another_device_reads_pieces_while_others_are_written(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ray.get(maker.be_slow.remote(0.15))
    ref = maker.make.remote(2.0)
    assert ray.get(reader.read.remote(ref), timeout=PATIENCE) == (True, True)
    down, up = copies_of(maker), copies_of(reader)
    assert down["down"] == up["up"] == PIECES and down["up"] == up["down"] == 0
    assert down["most"] == 2 and up["most"] >= 1
    assert up["began"][1] < down["began"][-1], "the first copy up begins before the last one down"
    assert down["registered"] >= 4 << 20 and up["registered"] >= 4 << 20
    assert not down["open"] and not up["open"]
    before = down["blocks"]
    del ref
    eventually(lambda: copies_of(maker)["blocks"] < before)


def test_all_readers_share_the_pieces_and_have_memory_of_their_own(devices: str) -> None:
    maker, host = Holder.remote(devices, "gpu-0"), Holder.remote(devices)
    ref = maker.make.remote(3.0)
    assert ray.get(host.read.remote(ref), timeout=PATIENCE) == (True, False), "a reader without a device"
    value = ray.get(ref)
    assert float(value["tensor"][-1]) == -3.0
    same = Holder.remote(devices, "gpu-0")
    assert ray.get(same.read_copy.remote([ref]), timeout=PATIENCE) == (True, True)
    assert copies_of(maker)["down"] == PIECES and copies_of(same)["up"] == PIECES
    value["tensor"][0] = 100.0
    assert float(ray.get(ref)["tensor"][0]) == 3.0


def test_views_parameters_and_shared_memory_arrive(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ref = maker.give_views.remote()
    assert ray.get(reader.read_views.remote(ref), timeout=PATIENCE)
    assert ray.get(Holder.remote(devices).read_views.remote(ref), timeout=PATIENCE)
    assert copies_of(reader)["up"] == PIECES + 1, "what no tensor covers does not travel; small ones share a piece"


@pytest.mark.parametrize(("visible", "used"), [(("a", "b"), ["a", "b"]), (("a",), ["a"])])
def test_tensors_of_several_devices_arrive_on_those_with_the_same_numbers(
    devices: str, visible: tuple[str, ...], used: list[str]
) -> None:
    maker, reader = Holder.remote(devices, "gpu-0", "gpu-1"), Holder.remote(devices, *visible)
    ray.get(maker.use_several.remote())
    assert ray.get(reader.read_several.remote(maker.make_several.remote()), timeout=PATIENCE) == used
    assert not copies_of(maker)["open"] and not copies_of(reader)["open"]


def test_many_small_tensors_share_pieces_and_too_many_pass_as_a_whole(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    assert ray.get(reader.read_many.remote(maker.make_many.remote(3000)), timeout=PATIENCE) == 3000
    assert copies_of(maker)["down"] == copies_of(reader)["up"] >= 3000
    ray.get(maker.announce_less.remote())
    assert ray.get(reader.read_many.remote(maker.make_many.remote(3000)), timeout=PATIENCE) == 0
    assert copies_of(maker)["down"] == 3000


def test_pieces_are_freed_with_the_value(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    assert ray.get(reader.read.remote(maker.make.remote(1.0)), timeout=PATIENCE)[0]
    free = settled_free_bytes()
    ref = maker.make.remote(2.0)
    assert ray.get(reader.read.remote(ref), timeout=PATIENCE)[0]
    time.sleep(REPORTED)
    assert free_bytes() < free - (3 << 20)
    del ref
    eventually(lambda: free_bytes() >= free - (1 << 19))


@pytest.mark.parametrize("accepted", [0, 1, 2, 4])
def test_pytorch_copies_where_the_driver_of_the_maker_refuses(
    devices: str, accepted: int, capfd: pytest.CaptureFixture[str]
) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ray.get(maker.accept.remote(accepted))
    assert ray.get(reader.read.remote(maker.make.remote(4.0)), timeout=PATIENCE)[0]
    found = copies_of(maker)
    assert found["down"] == max(0, accepted - 1) and not found["open"]
    eventually(lambda: "does not copy tensors in pieces" in capfd.readouterr().err)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_pytorch_copies_where_the_driver_of_the_reader_refuses(devices: str, accepted: int) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ray.get(reader.accept.remote(accepted))
    assert ray.get(reader.read.remote(maker.make.remote(5.0)), timeout=PATIENCE) == (True, True)
    found = copies_of(reader)
    assert found["up"] == max(0, accepted - 1) and not found["open"]


def test_an_error_in_the_middle_reaches_the_reader_and_the_next_one_gets_the_tensors(devices: str) -> None:
    maker = Holder.remote(devices, "gpu-0")
    free = settled_free_bytes()
    ref = maker.make.remote(4.0)
    for accepted in (1, 3):
        reader = Holder.remote(devices, "gpu-1")  # one that has had the error may still have it
        ray.get(maker.accept.remote(accepted, True))
        with pytest.raises(exceptions.RaySystemError, match="the device is broken"):
            ray.get(reader.read_copy.remote([ref]), timeout=PATIENCE)
        assert not copies_of(reader)["open"]
    ray.get(maker.accept.remote(1_000_000))
    reader = Holder.remote(devices, "gpu-1")
    assert ray.get(reader.read.remote(ref), timeout=PATIENCE) == (True, True)
    assert not copies_of(maker)["open"] and not copies_of(reader)["open"]
    del ref
    eventually(lambda: free_bytes() >= free - (1 << 19))


def test_a_maker_that_is_killed_in_the_middle_is_an_error_or_makes_it_again(devices: str) -> None:
    for restarts in (0, 1):
        maker = Holder.options(max_restarts=restarts, max_task_retries=restarts).remote(devices, "gpu-0")
        reader = Holder.remote(devices, "gpu-1")
        ray.get(maker.be_slow.remote(0.3))
        pid = ray.get(maker.pid.remote())
        answer = reader.read.remote(maker.make.remote(6.0))
        eventually(lambda reader=reader: copies_of(reader)["up"] >= 1)
        os.kill(pid, signal.SIGKILL)
        if restarts:
            assert ray.get(answer, timeout=PATIENCE) == (True, True)
        else:
            with pytest.raises(exceptions.RayError):
                ray.get(answer, timeout=PATIENCE)
        assert not copies_of(reader)["open"]


@ray.remote(num_cpus=0)
def ends_of(refs: list[Any], marks: Marks) -> list[float]:
    marks.add()
    tensor = ray.get(refs[0])["tensor"]
    return [float(tensor[0]), float(tensor[-2]), float(tensor[-1])]


def test_a_value_that_is_made_again_while_a_task_reads_it_is_read_again(devices: str, marks: Marks) -> None:
    maker = Holder.options(max_restarts=1, max_task_retries=1).remote(devices, "gpu-0")
    ray.get(maker.be_slow.remote(0.3))
    ref = maker.make.remote(6.5)
    answer = ends_of.remote([ref], marks)
    eventually(lambda: copies_of(maker)["down"] >= 1)
    process = current.process
    assert process is not None
    with process.engine.lock:  # as if another reader had reported it
        tensors = resident_of(process.table.entries[ref._id])
        process.table.recovery.resident_lost(ref._id, tensors, "a test says so")
        process.engine.flush()
    assert ray.get(answer, timeout=PATIENCE) == [6.5, 6.5, -6.5]
    assert copies_of(maker)["down"] > PIECES and len(marks.lines()) == 1


def test_a_maker_that_ends_in_order_in_the_middle_has_moved_the_value(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ray.get(maker.be_slow.remote(0.5))
    answer = reader.read.remote(maker.make.remote(3.5))
    eventually(lambda: copies_of(reader)["up"] >= 1)
    with pytest.raises(exceptions.RayActorError):
        ray.get(maker.leave.remote(), timeout=PATIENCE)
    assert ray.get(answer, timeout=PATIENCE)[0]
    assert not copies_of(reader)["open"]


def test_a_reader_that_is_killed_in_the_middle_leaves_nothing(devices: str) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    assert ray.get(reader.read.remote(maker.make.remote(1.0)), timeout=PATIENCE)[0]
    free = settled_free_bytes()
    ray.get(maker.be_slow.remote(0.2))
    ref = maker.make.remote(7.0)
    answer = reader.read.remote(ref)
    eventually(lambda: copies_of(maker)["down"] >= PIECES + 1)
    os.kill(ray.get(reader.pid.remote()), signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):
        ray.get(answer, timeout=PATIENCE)
    assert ray.get(Holder.remote(devices, "gpu-1").read.remote(ref), timeout=PATIENCE) == (True, True)
    del ref, answer
    eventually(lambda: free_bytes() >= free - (1 << 19))
    found = copies_of(maker)
    assert found["blocks"] == 0 and not found["open"] and found["down"] == 2 * PIECES


def test_a_get_with_a_timeout_ends_in_the_middle_and_leaves_no_copy_under_way(devices: str) -> None:
    maker = Holder.remote(devices, "gpu-0")
    ray.get(maker.be_slow.remote(0.5))
    ref = maker.make.remote(8.0)
    ray.wait([ref])
    with pytest.raises(exceptions.GetTimeoutError):
        ray.get(ref, timeout=0.7)
    assert float(ray.get(ref, timeout=PATIENCE)["tensor"][-1]) == -8.0
    assert copies_of(maker)["down"] == PIECES


def test_tensors_larger_than_the_store_pass_through_it(devices: str, tmp_path: Path) -> None:
    maker, reader = Holder.remote(devices, "gpu-0"), Holder.remote(devices, "gpu-1")
    ref = maker.make.remote(9.0, 20 << 20)  # 80 MB
    assert ray.get(reader.read.remote(ref), timeout=PATIENCE) == (True, True)
    assert copies_of(reader)["up"] == 80
