"""Device objects that move to the object store when there are too many on a device, on a made-up driver.

A process may keep some of them; those used least recently move, but for those that others have mapped."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
from engine import PATIENCE, eventually, hpcray_only, ray

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
LENGTH = 1000
PIECED = 600_000
"""Elements that pass through the store in three pieces."""
ROOM = 4
"""Device objects for which a process has room."""
INIT = {
    "num_cpus": 2, "object_store_memory": 256 << 20, "preload": "torch", "device_object_memory": ROOM * 1024 * 4,
}  # fmt: skip


@ray.remote(num_cpus=0, max_restarts=0)
class Holder:
    """Has tensors on a made-up device, or reads them."""

    def __init__(self, directory: str) -> None:
        from helpers.fake_device_driver import FakeDeviceDriver

        from hpcray.tensors import device_mappings, device_memory, device_pieces, tensor_pulls

        tensor_pulls._SMALLEST = tensor_pulls._LARGEST = device_pieces.PIECED_SIZE = 1 << 20
        device_mappings.IDLE_TIME = 0.3
        device_memory._EXPIRE_INTERVAL = 0.1
        self.driver = FakeDeviceDriver(directory)
        device_memory.use_driver(self.driver)
        self.kept: Any = None

    def pid(self) -> int:
        return os.getpid()

    @ray.method(tensor_transport="auto")
    def make(self, value: float, length: int = LENGTH) -> Any:
        return {"tensor": self.driver.tensor(length, value)}

    @ray.method(tensor_transport="auto")
    def give_own(self, value: float) -> Any:
        self.kept = self.driver.tensor(LENGTH, value)
        return {"tensor": self.kept}

    def read(self, value: Any, keep: bool = False) -> tuple[float, bool]:
        """The sum of the tensor, and whether it is in mapped memory, or on the device."""
        tensor = value["tensor"]
        if keep:
            self.kept = tensor
        return float(tensor.sum()), self.driver.is_on_device(tensor)

    def copies(self) -> tuple[int, int]:
        return len(self.driver.down), len(self.driver.up)

    def look(self) -> float:
        return float(self.kept.sum())

    def add(self, value: Any) -> None:
        value["tensor"] += 1

    def drop(self) -> None:
        self.kept = None

    def state(self) -> dict[str, int]:
        return {"blocks": self.driver.blocks_in_use // 4096, "open": len(self.driver.leaks())}

    def fail_next_read(self) -> None:
        """The next read of the store by a `get` of device tensors fails, as a device has no memory left."""
        from hpcray.runtime.core_worker.core_worker import need_process

        process = need_process()
        own = process.reader.get_one
        failed = []

        def get_one(ref: Any, timeout: Any) -> Any:
            if not failed and process.extensions.get("tensors")._table.has_moved_out(ref._id):
                failed.append(ref)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return own(ref, timeout)

        process.reader.get_one = get_one


def state_of(actor: Any) -> dict[str, int]:
    found: dict[str, int] = ray.get(actor.state.remote(), timeout=PATIENCE)
    return found


def made(maker: Any, count: int) -> list[Any]:
    """Refs of values of so many tensors, made one after the other."""
    refs = []
    for number in range(count):
        refs.append(maker.make.remote(float(number)))
        ray.wait(refs[-1:])
    return refs


def test_a_process_keeps_so_many_and_all_of_them_are_read(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    refs = made(maker, 3 * ROOM)
    eventually(lambda: state_of(maker)["blocks"] <= ROOM)
    for number, ref in enumerate(refs):
        total, in_place = ray.get(reader.read.remote(ref), timeout=PATIENCE)
        assert total == float(number) * LENGTH
        assert in_place == (number >= 2 * ROOM), "those that moved are read from the store"
    for number, ref in enumerate(refs):  # they come back to their own process, and others move
        assert ray.get(maker.read.remote(ref), timeout=PATIENCE)[0] == float(number) * LENGTH
    assert [float(ray.get(ref)["tensor"][0]) for ref in refs] == list(map(float, range(3 * ROOM)))
    del refs, ref
    gc.collect()
    eventually(lambda: state_of(maker)["blocks"] == 0)
    eventually(lambda: state_of(reader)["open"] == 0)


def test_what_others_have_mapped_stays_until_they_drop_it_or_die(devices: str) -> None:
    maker, reader, other = Holder.remote(devices), Holder.remote(devices), Holder.remote(devices)
    first, second = made(maker, 2)
    assert ray.get(reader.read.remote(first, True)) == (0.0, True)
    assert ray.get(other.read.remote(second, True)) == (1.0 * LENGTH, True)
    refs = made(maker, 2 * ROOM)
    assert ray.get(reader.look.remote()) == 0.0 and ray.get(other.look.remote()) == 1.0 * LENGTH
    assert ray.get(reader.read.remote(first))[1] and ray.get(other.read.remote(second))[1], "they are where they were"
    ray.get(reader.drop.remote())
    os.kill(ray.get(other.pid.remote()), signal.SIGKILL)

    def both_moved() -> bool:
        refs.append(maker.make.remote(0.0))
        ray.wait(refs[-1:])
        return not ray.get(reader.read.remote(first))[1] and not ray.get(reader.read.remote(second))[1]

    eventually(both_moved)
    assert ray.get(reader.read.remote(second))[0] == 1.0 * LENGTH


def test_what_the_program_has_itself_stays(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ref = maker.give_own.remote(5.0)
    refs = made(maker, 3 * ROOM)
    assert ray.get(reader.read.remote(ref)) == (5.0 * LENGTH, True)
    ray.get(maker.drop.remote())
    refs += made(maker, ROOM + 1)
    eventually(lambda: ray.get(reader.read.remote(ref)) == (5.0 * LENGTH, False))


def test_what_was_written_to_after_it_was_copied_does_not_move(devices: str) -> None:
    maker = Holder.remote(devices)
    refs = made(maker, 2 * ROOM)
    ray.get(maker.add.remote(refs[0]))  # it has come back, and differs from its copy in the store
    more = made(maker, 2 * ROOM)
    assert ray.get(maker.read.remote(refs[0])) == (1.0 * LENGTH, False)
    assert more


def test_tensors_come_back_when_the_device_had_no_memory_at_first(devices: str) -> None:
    maker = Holder.remote(devices)
    refs = made(maker, 2 * ROOM)
    ray.get(maker.fail_next_read.remote())
    assert ray.get(maker.read.remote(refs[0]), timeout=PATIENCE)[0] == 0.0


def test_what_has_moved_outlives_a_maker_that_ends_in_order(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    refs = made(maker, 2 * ROOM)
    del maker
    gc.collect()
    for number, ref in enumerate(refs):
        assert ray.get(reader.read.remote(ref), timeout=PATIENCE)[0] == float(number) * LENGTH


def test_pieces_that_readers_have_are_where_the_tensors_move_to(devices: str) -> None:
    maker = Holder.remote(devices)
    ref = maker.make.remote(7.0, PIECED)
    assert float(ray.get(ref)["tensor"].sum()) == 7.0 * PIECED
    assert ray.get(maker.copies.remote()) == (3, 0)
    others = [maker.make.remote(float(number)) for number in range(ROOM)]
    assert ray.get([maker.read.remote(other) for other in others])
    eventually(lambda: state_of(maker)["blocks"] <= ROOM)
    assert ray.get(maker.copies.remote()) == (3, 0), "they were in the store already"
    assert ray.get(maker.read.remote(ref)) == (7.0 * PIECED, True)
    assert ray.get(maker.copies.remote()) == (3, 3)
    assert float(ray.get(ref)["tensor"].sum()) == 7.0 * PIECED
    del ref, others
    eventually(lambda: state_of(maker)["blocks"] == 0)
