"""Device objects whose tensors lie in device memory, on a made-up driver (helpers/fake_device_driver.py).

Readers on the same host map it, the others get copies, and at the end nothing is left."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from engine import PATIENCE, alive, eventually, exceptions, exit_actor, hpcray_only, ray

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "object_store_memory": 256 << 20, "preload": "torch"}
LENGTH = 1000
REPORTED = 1.5
"""Seconds after which the head knows what is free in the stores."""


@ray.remote(num_cpus=0, max_restarts=0)
class Holder:
    """Has tensors on made-up devices, or reads them."""

    def __init__(self, directory: str, visible: tuple[str, ...] = ("gpu-0",)) -> None:
        from helpers.fake_device_driver import FakeDeviceDriver

        from hpcray.tensors import device_mappings, device_memory

        device_mappings.IDLE_TIME = 0.3
        device_memory._EXPIRE_INTERVAL = 0.1
        self.driver = FakeDeviceDriver(directory, visible=visible)
        device_memory.use_driver(self.driver)
        self.tensor: Any = None
        self.kept: list[Any] = []

    def pid(self) -> int:
        return os.getpid()

    def allocate(self, value: float, length: int = LENGTH) -> None:
        self.tensor = self.driver.tensor(length, value)

    @ray.method(tensor_transport="auto")
    def give(self) -> Any:
        return {"tensor": self.tensor, "part": [self.tensor[:3]]}

    @ray.method(tensor_transport="auto")
    def make(self, value: float) -> Any:
        return {"tensor": self.driver.tensor(LENGTH, value)}

    @ray.method(tensor_transport="auto")
    def make_mixed(self, value: float) -> Any:
        return {"tensor": self.driver.tensor(LENGTH, value), "host": torch.ones(3)}

    def fill(self, value: float) -> None:
        self.tensor.fill_(value)

    def forbid_exports(self, pool: bool) -> None:
        self.driver.exports, self.driver.allocates = False, pool

    def read(self, value: Any, keep: bool = False) -> tuple[float, bool]:
        """The sum of the tensor, and whether it is in mapped memory."""
        tensor = value["tensor"]
        if keep:
            self.kept.append(tensor)
        return float(tensor.sum()), self.driver.is_on_device(tensor)

    def drop(self) -> None:
        self.kept.clear()

    @ray.method(tensor_transport="auto")
    def pass_on(self, value: Any) -> Any:
        return {"tensor": value["tensor"]}

    def look(self) -> float:
        return float(self.kept[-1].sum())

    def queue_work(self) -> None:
        self.driver.queue_work()

    def finish_work(self) -> None:
        self.driver.finish_work()

    def state(self) -> dict[str, int]:
        return {
            "opened": len(self.driver.opened), "open": len(self.driver.leaks()), "blocks": self.driver.blocks_in_use,
        }  # fmt: skip

    def read_host(self, refs: list[Any]) -> tuple[bool, int]:
        """Whether an array of the store is registered where this process reads it, and the bytes that are."""
        array = ray.get(refs[0])
        assert array[-1] == 1
        return self.driver.is_registered(array.ctypes.data, array.nbytes), sum(self.driver.registered.values())

    def copy_host(self, refs: list[Any]) -> bool:
        """Begin a copy of an array of the store to the device."""
        return self.driver.copy_later(ray.get(refs[0]))

    def leave(self) -> None:
        exit_actor()


def state_of(actor: Any) -> dict[str, int]:
    found: dict[str, int] = ray.get(actor.state.remote(), timeout=PATIENCE)
    return found


def until_registered(reader: Any, ref: Any) -> None:
    """Wait until a reader reads the object in registered memory."""
    eventually(lambda: ray.get(reader.read_host.remote([ref]))[0])


def free_bytes() -> float:
    """Free bytes of the store, as far as the head knows."""
    found: float = ray.available_resources()["object_store_memory"]
    return found


def test_a_reader_on_the_host_maps_the_memory_of_many_objects_once(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ray.get(maker.allocate.remote(2.0))
    for _ in range(20):
        assert ray.get(reader.read.remote(maker.give.remote())) == (2.0 * LENGTH, True)
    ref = maker.give.remote()
    assert ray.get(reader.read.remote(ref, True)) == (2.0 * LENGTH, True)
    ray.get(maker.fill.remote(3.0))
    assert ray.get(reader.look.remote()) == 3.0 * LENGTH, "it is the same memory"
    assert state_of(reader)["opened"] == 1
    assert ray.get(maker.read.remote(ref)) == (3.0 * LENGTH, True)
    assert state_of(maker)["opened"] == 0
    ray.get(reader.drop.remote())
    del ref
    eventually(lambda: state_of(reader)["open"] == 0)


def test_memory_stays_while_a_reader_or_its_work_has_it(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ref = maker.make.remote(1.0)
    assert ray.get(reader.read.remote(ref, True)) == (1.0 * LENGTH, True)
    del ref
    gc.collect()
    for number in range(5):  # each would be in the block of the first one, were that free
        assert ray.get(reader.read.remote(maker.make.remote(float(number))))[1]
    assert ray.get(reader.look.remote()) == 1.0 * LENGTH and state_of(maker)["blocks"] >= 4096
    ray.get(reader.queue_work.remote())
    ray.get(reader.drop.remote())
    for number in range(5):
        assert ray.get(maker.read.remote(maker.make.remote(float(number))))[1]
    assert state_of(maker)["blocks"] >= 4096
    ray.get(reader.finish_work.remote())
    eventually(lambda: state_of(maker)["blocks"] == 0)
    eventually(lambda: state_of(reader)["open"] == 0)


def test_readers_without_the_device_and_those_who_ask_for_copies_get_copies(devices: str) -> None:
    maker, other, same = Holder.remote(devices), Holder.remote(devices, ("gpu-1",)), Holder.remote(devices)
    ray.get(maker.allocate.remote(2.0))
    ref = maker.give.remote()
    assert ray.get(other.read.remote(ref)) == (2.0 * LENGTH, False)
    assert float(ray.get(ref)["tensor"].sum()) == 2.0 * LENGTH, "the driver has no device"
    assert ray.get(same.read.remote(ref)) == (2.0 * LENGTH, True), "though a copy is in the store"
    mixed = maker.make_mixed.remote(5.0)
    assert ray.get(same.read.remote(mixed)) == (5.0 * LENGTH, False), "a tensor of the host is among them"
    assert state_of(other)["opened"] == 0


def test_memory_that_cannot_be_exported_is_copied(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ray.get(maker.forbid_exports.remote(False))
    assert ray.get(reader.read.remote(maker.make.remote(4.0))) == (4.0 * LENGTH, False)


def test_memory_that_cannot_be_exported_is_copied_into_a_pool_that_readers_map_once(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ray.get(maker.forbid_exports.remote(True))
    ref = maker.make.remote(1.0)
    assert ray.get(reader.read.remote(ref, True)) == (1.0 * LENGTH, True)
    del ref
    for number in range(10):
        assert ray.get(reader.read.remote(maker.make.remote(float(number)))) == (float(number) * LENGTH, True)
    assert ray.get(reader.look.remote()) == 1.0 * LENGTH and state_of(reader)["opened"] == 1
    ray.get(reader.drop.remote())
    eventually(lambda: state_of(maker)["blocks"] == 0)
    eventually(lambda: state_of(reader)["open"] == 0)


def test_what_was_mapped_is_copied_on_the_device_for_the_next_reader(devices: str) -> None:
    maker, reader, third = Holder.remote(devices), Holder.remote(devices), Holder.remote(devices)
    ref = reader.pass_on.remote(maker.make.remote(6.0))
    assert ray.get(third.read.remote(ref)) == (6.0 * LENGTH, True)
    assert ray.get(reader.read.remote(ref)) == (6.0 * LENGTH, True)
    assert state_of(reader)["opened"] == state_of(third)["opened"] == 1
    del ref
    eventually(lambda: state_of(maker)["blocks"] == 0)


def test_a_killed_reader_keeps_nothing_of_the_maker(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ref = maker.make.remote(1.0)
    assert ray.get(reader.read.remote(ref, True))[1]
    os.kill(ray.get(reader.pid.remote()), signal.SIGKILL)
    del ref
    eventually(lambda: state_of(maker)["blocks"] == 0)


def test_a_killed_maker_is_an_error_for_later_readers_or_a_call_again(devices: str) -> None:
    maker, reader = Holder.options(max_restarts=1, max_task_retries=1).remote(devices), Holder.remote(devices)
    once = Holder.remote(devices)
    again, lost = maker.make.remote(7.0), once.make.remote(1.0)
    ray.wait([again, lost], num_returns=2)
    for actor in (maker, once):
        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    assert ray.get(reader.read.remote(again), timeout=PATIENCE) == (7.0 * LENGTH, True)
    with pytest.raises(exceptions.RayActorError):  # until then the made-up driver maps memory of a dead process
        ray.get(once.pid.remote(), timeout=PATIENCE)
    with pytest.raises(exceptions.RayError):
        ray.get(reader.read.remote(lost), timeout=PATIENCE)


def test_tensors_outlive_a_maker_that_ends_in_order(devices: str) -> None:
    maker, reader = Holder.remote(devices), Holder.remote(devices)
    ref = maker.make.remote(8.0)
    ray.wait([ref])
    pid = ray.get(maker.pid.remote())
    with pytest.raises(exceptions.RayActorError):
        ray.get(maker.leave.remote())
    eventually(lambda: not alive(pid))
    assert ray.get(reader.read.remote(ref), timeout=PATIENCE) == (8.0 * LENGTH, False)


def test_arrays_of_the_store_that_are_read_again_are_in_registered_memory(devices: str) -> None:
    reader, other = Holder.remote(devices), Holder.remote(devices)
    ref = ray.put(np.ones(4 << 20, np.uint8))
    small = ray.put(np.ones(500_000, np.uint8))
    assert ray.get(reader.read_host.remote([ref])) == (False, 0)
    until_registered(reader, ref)
    assert ray.get([reader.read_host.remote([small]) for _ in range(3)])[-1][0] is False
    assert ray.get(other.read_host.remote([ref])) == (False, 0), "each process registers what it reads itself"
    assert 4 << 20 <= ray.get(reader.read_host.remote([ref]))[1] <= 8 << 20


def test_a_block_is_not_written_again_while_a_device_copies_it(devices: str) -> None:
    reader = Holder.remote(devices)
    gc.collect()
    size, slack = 8 << 20, 1 << 20
    ref = ray.put(np.ones(size, np.uint8))
    marker = ray.put(np.ones(2 * size, np.uint8))
    until_registered(reader, ref)
    assert ray.get(reader.copy_host.remote([ref]))
    time.sleep(REPORTED)
    free = free_bytes()
    del ref, marker
    gc.collect()
    eventually(lambda: free_bytes() >= free + 2 * size - slack)
    time.sleep(REPORTED)
    assert free_bytes() < free + 2 * size + slack, "the copy goes on: its block is in use"
    ray.get(reader.finish_work.remote())
    eventually(lambda: free_bytes() >= free + 3 * size - slack)
