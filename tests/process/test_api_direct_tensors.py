"""Device objects that pass by UCX from a device of one host to a device of another one, on made-up devices.

Each process has a host of its own; the memory of its devices is that of the host, and UCX takes TCP instead of RDMA."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import time
from typing import Any

import pytest
from engine import PATIENCE, eventually, exceptions, exit_actor, hpcray_only, ray

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("session"), hpcray_only,
    # Not imported here: what the driver has loaded its workers have.
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="no UCX"),
]  # fmt: skip
INIT = {"num_cpus": 2, "object_store_memory": 128 << 20, "preload": "torch", "device_transports": "tcp"}
LENGTH = 1 << 20
"""Elements: 4 MB, so a message of 1 MB and one of 3 MB."""
DTYPES = ["float64", "float16", "bfloat16", "complex64", "int8", "int64", "bool", "float8_e4m3fn"]


class Slow:
    """Memory that the wire gets to know of after a while.

    Args:
        seconds: of each message.
    """

    def __init__(self, activate: Any, seconds: float) -> None:
        self._activate, self._seconds = activate, seconds

    def __call__(self, device: str) -> None:
        time.sleep(self._seconds)
        self._activate(device)


def refuse(device: str) -> None:
    raise RuntimeError("the device is broken")


@ray.remote(num_cpus=0, max_restarts=0, max_concurrency=2)
class Holder:
    """Has tensors on made-up devices of a host of its own, or reads them.

    Args:
        host: its name. visible: devices that this process has; none: it has no driver.
    """

    def __init__(self, directory: str, host: str, *visible: str) -> None:
        from helpers.fake_device_driver import FakeDeviceDriver

        from hpcray.tensors import device_memory, device_pieces, tensor_pulls

        tensor_pulls._SMALLEST = tensor_pulls._LARGEST = device_pieces.PIECED_SIZE = 1 << 20
        tensor_pulls.TRIAL_TIME = 10.0
        device_memory.running_kernel = lambda: host  # type: ignore[assignment]
        self.driver = FakeDeviceDriver(directory, visible=visible)
        if visible:
            device_memory.use_driver(self.driver)

    def pid(self) -> int:
        return os.getpid()

    def leave(self) -> None:
        exit_actor()

    def be_slow(self, seconds: float) -> None:
        """Each message takes so long here."""
        self.driver.activate = Slow(self.driver.activate, seconds)

    def be_broken(self) -> None:
        """Other libraries cannot use this device."""
        self.driver.activate = refuse

    def be_late(self, seconds: float, times: int = 1_000_000) -> None:
        """The work that fills the tensors takes so long, so many times."""
        await_event, left = self.driver.await_event, [times]

        def wait(device: str, event: Any) -> None:
            left[0] -= 1
            time.sleep(seconds if left[0] >= 0 else 0.0)
            await_event(device, event)

        self.driver.await_event = wait

    @ray.method(tensor_transport="auto")
    def make(self, value: float, length: int = LENGTH) -> Any:
        return {"tensor": self.driver.tensor(length, value)}

    @ray.method(tensor_transport="ucx")
    def make_for_ucx(self, value: float, length: int = LENGTH) -> Any:
        return {"tensor": self.driver.tensor(length, value)}

    @ray.method(tensor_transport="auto")
    def give_views(self) -> Any:
        from helpers.tensor_views import make_views

        return make_views(self.driver, LENGTH)

    @ray.method(tensor_transport="auto")
    def give_dtypes(self) -> Any:
        return {name: self.dtype(name).t() for name in DTYPES}

    def dtype(self, name: str) -> Any:
        values = self.driver.tensor(60_000)
        raw = torch.arange(240_000, dtype=torch.int64).remainder(2).to(torch.uint8)
        values.view(torch.uint8).copy_(raw)
        return values.view(getattr(torch, name))[: 60 * 100].view(60, 100)

    def read_dtypes(self, value: Any) -> bool:
        for name, tensor in value.items():
            wanted = self.dtype(name).t()
            assert tensor.dtype is wanted.dtype and tensor.stride() == wanted.stride() == (1, 100), name
            same = torch.equal(tensor.t().contiguous().view(torch.uint8), wanted.t().contiguous().view(torch.uint8))
            assert same and self.driver.is_on_device(tensor), name
        return True

    @ray.method(tensor_transport="auto")
    def make_many(self, count: int) -> Any:
        return {f"layer.{number}": self.driver.tensor(250, float(number)) for number in range(count)}

    def read_many(self, value: Any) -> int:
        assert all(bool((tensor == number).all()) for number, tensor in enumerate(value.values()))
        return sum(self.driver.is_on_device(tensor) for tensor in value.values())

    def read(self, value: Any) -> tuple[float, bool]:
        """The one number that the tensor has, and whether it is on this process's device."""
        tensor = value["tensor"]
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0]), self.driver.is_on_device(tensor)

    def read_again(self, refs: list[Any], timeout: float = PATIENCE) -> tuple[float, bool]:
        return self.read(ray.get(refs[0], timeout=timeout))

    def read_copy(self, refs: list[Any]) -> tuple[float, bool]:
        return self.read(ray.get(refs[0], _use_object_store=True))

    def read_views(self, value: Any) -> bool:
        from helpers.tensor_views import are_views

        return are_views(value, LENGTH)

    def state(self) -> dict[str, Any]:
        import sys
        import threading

        from hpcray.runtime.core_worker.core_worker import need_process

        found = need_process().extensions.find("tensors")
        direct = None if found is None else found.direct
        return {
            "exposed": self.driver.exposed, "down": len(self.driver.down), "up": len(self.driver.up),
            "blocks": self.driver.blocks_in_use, "open": [name for name in self.driver.leaks() if "local" in name],
            "ucx": "ucxx._lib.libucxx" in sys.modules, "threads": [thread.name for thread in threading.enumerate()],
            "active": sorted(set(self.driver.active)),
            "pending": 0 if direct is None else len(direct._sends) + len(direct._pulls),
        }  # fmt: skip


def state_of(actor: Any) -> dict[str, Any]:
    found: dict[str, Any] = ray.get(actor.state.remote(), timeout=PATIENCE)
    return found


def pair(devices: str) -> tuple[Any, Any]:
    """A maker and a reader on two hosts."""
    return Holder.remote(devices, "host-0", "gpu-0"), Holder.remote(devices, "host-1", "gpu-1")


def read(reader: Any, ref: Any) -> Any:
    return ray.get(reader.read.remote(ref), timeout=PATIENCE)


def test_tensors_pass_from_device_to_device_without_the_host(devices: str) -> None:
    maker, reader = pair(devices)
    assert not state_of(maker)["ucx"], "nothing is loaded before it is needed"
    ref = maker.make.remote(2.0)
    for _ in range(2):  # the second one has the tensors in memory of its own, too
        assert read(reader, ref) == (2.0, True)
    sent, received = state_of(maker), state_of(reader)
    assert sent["exposed"] == received["exposed"] == 2 * [1 << 20, 3 << 20]
    assert sent["active"] == received["active"] == ["hpcray-device-wire"]
    assert sent["down"] == received["up"] == 0 and not sent["open"] and not received["open"]
    eventually(lambda: not state_of(maker)["pending"] and not state_of(reader)["pending"])
    before = state_of(maker)["blocks"]
    del ref
    eventually(lambda: state_of(maker)["blocks"] < before)


def test_views_parameters_and_shared_memory_arrive(devices: str) -> None:
    maker, reader = pair(devices)
    assert ray.get(reader.read_views.remote(maker.give_views.remote()), timeout=PATIENCE)
    assert sum(state_of(reader)["exposed"]) < (4 << 20) + 256, "what no tensor covers does not travel"


def test_all_dtypes_arrive(devices: str) -> None:
    maker, reader = pair(devices)
    assert ray.get(reader.read_dtypes.remote(maker.give_dtypes.remote()), timeout=PATIENCE)
    assert len(state_of(reader)["exposed"]) == len(DTYPES)


def test_many_small_tensors_arrive_and_large_ones_in_several_messages(devices: str) -> None:
    maker, reader = pair(devices)
    assert ray.get(reader.read_many.remote(maker.make_many.remote(1000)), timeout=PATIENCE) == 1000
    assert read(reader, maker.make.remote(3.0, 40 << 20)) == (3.0, True)  # 160 MB
    assert state_of(reader)["exposed"][1000:] == [1 << 20, 64 << 20, 64 << 20, 31 << 20]


def test_many_objects_at_once_and_in_both_directions_arrive(devices: str) -> None:
    maker, reader = pair(devices)
    refs = [(who.make.remote(float(number), 50_000), other) for number in range(40)
            for who, other in ((maker, reader), (reader, maker))]  # fmt: skip
    found = ray.get([other.read.remote(ref) for ref, other in refs], timeout=PATIENCE)
    assert found == [(float(number // 2), True) for number in range(80)]
    assert len(state_of(reader)["exposed"]) == len(state_of(maker)["exposed"]) == 80


def test_small_tensors_and_readers_without_a_device_or_of_this_host_do_without(devices: str) -> None:
    maker, reader = pair(devices)
    assert read(reader, maker.make.remote(1.0, 1000))[0] == 1.0
    assert read(Holder.remote(devices, "host-2"), maker.make.remote(2.0)) == (2.0, False)
    assert read(Holder.remote(devices, "host-0", "gpu-2"), maker.make.remote(3.0)) == (3.0, True)
    assert ray.get(reader.read_copy.remote([maker.make.remote(4.0)]), timeout=PATIENCE) == (4.0, True)
    found = state_of(maker)
    assert not found["ucx"] and not found["exposed"] and found["down"] == 12


def test_ucx_by_name_takes_no_other_way_and_says_why(devices: str) -> None:
    maker, reader = pair(devices)
    assert read(reader, maker.make_for_ucx.remote(1.0, 10)) == (1.0, True)
    assert read(Holder.remote(devices, "host-0", "gpu-2"), maker.make_for_ucx.remote(2.0)) == (2.0, True)
    assert state_of(maker)["exposed"] == [40, 1 << 20, 3 << 20]
    ref = maker.make_for_ucx.remote(3.0)
    with pytest.raises(exceptions.RaySystemError, match="it has no GPU; hint"):
        ray.get(ref)
    assert float(ray.get(ref, _use_object_store=True)["tensor"][5]) == 3.0
    ray.get(maker.be_broken.remote())
    with pytest.raises(exceptions.RaySystemError, match="the device is broken; hint"):
        read(reader, maker.make_for_ucx.remote(4.0))
    assert state_of(maker)["down"] == 4 and state_of(reader)["up"] == 0


@pytest.mark.parametrize("who", [0, 1], ids=["maker", "reader"])
def test_a_device_that_ucx_cannot_use_is_left_alone_after_the_first_time(
    devices: str, who: int, capfd: pytest.CaptureFixture[str]
) -> None:
    actors = pair(devices)
    maker, reader = actors
    ray.get(actors[who].be_broken.remote())
    assert read(reader, maker.make.remote(5.0)) == (5.0, True)
    assert state_of(maker)["down"] == state_of(reader)["up"] == 4
    eventually(lambda: "tensors do not pass from device to device" in capfd.readouterr().err)
    exposed = len(state_of(maker)["exposed"])
    assert read(reader, maker.make.remote(6.0)) == (6.0, True)
    assert len(state_of(maker)["exposed"]) == exposed and state_of(reader)["up"] == 8


def test_the_reader_gets_the_tensors_when_the_work_is_done_that_fills_them(devices: str) -> None:
    maker, reader = pair(devices)
    ray.get(maker.be_late.remote(1.0))
    began = time.monotonic()
    assert read(reader, maker.make.remote(7.0)) == (7.0, True)
    assert time.monotonic() - began >= 1.0
    assert state_of(reader)["up"] == 0


def test_work_that_fills_one_object_does_not_hold_up_another_one(devices: str) -> None:
    maker, reader = pair(devices)
    second = Holder.remote(devices, "host-2", "gpu-2")
    assert read(reader, maker.make.remote(0.0)) == (0.0, True)
    ray.get(maker.be_late.remote(2.0, 1))
    refs = [maker.make.remote(7.0), maker.make.remote(8.0)]
    ray.wait(refs, num_returns=2)
    late = reader.read.remote(refs[0])
    eventually(lambda: state_of(maker)["pending"])
    time.sleep(0.2)
    assert read(second, refs[1]) == (8.0, True) and not ray.wait([late], timeout=0)[0]
    assert ray.get(late, timeout=PATIENCE) == (7.0, True)
    assert state_of(maker)["down"] == 0


def test_many_readers_at_once_share_a_copy_through_the_host(devices: str) -> None:
    maker = Holder.remote(devices, "host-0", "gpu-0")
    readers = [Holder.remote(devices, f"host-{number}", f"gpu-{number}") for number in range(1, 6)]
    ray.get([reader.pid.remote() for reader in readers])
    ray.get(maker.be_late.remote(1.0))
    for make, direct in ((maker.make, 2), (maker.make_for_ucx, 5)):
        ref = make.remote(7.0)
        before = len(state_of(maker)["exposed"])
        assert ray.get([reader.read.remote(ref) for reader in readers], timeout=PATIENCE) == 5 * [(7.0, True)]
        assert len(state_of(maker)["exposed"]) - before == 2 * direct
    assert state_of(maker)["down"] == 4, "one copy for the other three"


@pytest.mark.parametrize("knew", [False, True], ids=["a reader that", "one that knew it and"])
def test_a_maker_that_was_dead_before_is_an_error_at_once_for(devices: str, knew: bool) -> None:
    maker, reader = pair(devices)
    if knew:
        assert read(reader, maker.make.remote(0.0)) == (0.0, True)
    ref = maker.make.remote(5.0)
    ray.wait([ref])
    os.kill(ray.get(maker.pid.remote()), signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):
        ray.get(maker.pid.remote(), timeout=PATIENCE)
    began = time.monotonic()
    with pytest.raises(exceptions.RayError):
        ray.get(reader.read_again.remote([ref]), timeout=PATIENCE)
    assert time.monotonic() - began < 20.0
    assert not state_of(reader)["pending"]


def test_a_get_with_a_timeout_heeds_it_and_leaves_nothing(devices: str) -> None:
    maker, reader = pair(devices)
    assert read(reader, maker.make.remote(0.0)) == (0.0, True)
    ray.get(maker.be_late.remote(2.0))
    ref = maker.make.remote(8.0)
    began = time.monotonic()
    with pytest.raises(exceptions.GetTimeoutError):
        ray.get(reader.read_again.remote([ref], 0.5), timeout=PATIENCE)
    assert time.monotonic() - began < 1.9
    eventually(lambda: not state_of(maker)["pending"] and not state_of(reader)["pending"])
    assert ray.get(reader.read_again.remote([ref]), timeout=PATIENCE) == (8.0, True)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("where", ["be_late", "be_slow"])
def test_a_maker_that_is_killed_in_the_middle_is_an_error_or_makes_it_again(
    devices: str, restarts: int, where: str
) -> None:
    maker = Holder.options(max_restarts=restarts, max_task_retries=restarts).remote(devices, "host-0", "gpu-0")
    reader = Holder.remote(devices, "host-1", "gpu-1")
    assert read(reader, maker.make.remote(0.0)) == (0.0, True)
    ray.get(getattr(maker, where).remote(1.0))
    pid = ray.get(maker.pid.remote())
    answer = reader.read.remote(maker.make.remote(6.0))
    eventually(lambda: state_of(maker)["pending"])
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)
    if restarts:
        assert ray.get(answer, timeout=PATIENCE) == (6.0, True)
    else:
        with pytest.raises(exceptions.RayError):
            ray.get(answer, timeout=PATIENCE)
    found = state_of(reader)
    assert not found["pending"] and not found["open"]
    assert read(reader, pair(devices)[0].make.remote(9.0)) == (9.0, True), "the reader works on"


@pytest.mark.parametrize("where", ["be_late", "be_slow"])
def test_a_reader_that_is_killed_in_the_middle_leaves_nothing(devices: str, where: str) -> None:
    maker, reader = pair(devices)
    assert read(reader, maker.make.remote(0.0)) == (0.0, True)
    ray.get(maker.be_late.remote(1.0) if where == "be_late" else reader.be_slow.remote(1.0))
    ref = maker.make.remote(7.0)
    ray.wait([ref])
    blocks = state_of(maker)["blocks"]
    answer = reader.read.remote(ref)
    eventually(lambda: state_of(maker)["pending"])
    os.kill(ray.get(reader.pid.remote()), signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):
        ray.get(answer, timeout=PATIENCE)
    eventually(lambda: not state_of(maker)["pending"])
    assert read(Holder.remote(devices, "host-1", "gpu-1"), ref) == (7.0, True)
    del ref
    eventually(lambda: state_of(maker)["blocks"] < blocks)


def test_a_maker_that_ends_in_order_in_the_middle_has_moved_the_value(devices: str) -> None:
    maker, reader = pair(devices)
    ray.get(maker.be_late.remote(0.5))
    answer = reader.read.remote(maker.make.remote(3.5))
    eventually(lambda: state_of(maker)["pending"])
    with contextlib.suppress(exceptions.RayActorError):
        ray.get(maker.leave.remote(), timeout=PATIENCE)
    assert ray.get(answer, timeout=PATIENCE)[0] == 3.5


@pytest.mark.parametrize("rounds", [4, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_makers_and_readers_that_are_killed_at_any_time_leave_right_values_or_errors(devices: str, rounds: int) -> None:
    source = random.Random(rounds)
    watcher = Holder.remote(devices, "host-9", "gpu-9")  # it lives, and reads in each round
    right = 0
    for number in range(rounds):
        again = {"max_restarts": -1, "max_task_retries": -1} if number % 2 else {}
        maker = Holder.options(**again).remote(devices, "host-0", "gpu-0")
        reader = Holder.options(**again).remote(devices, "host-1", "gpu-1")
        pids = ray.get([maker.pid.remote(), reader.pid.remote()])
        make = maker.make_for_ucx if number % 4 > 1 else maker.make
        refs = [make.remote(float(value), 8 << 20) for value in range(3)]
        ray.wait(refs, num_returns=3)
        answers = [(who.read.remote(ref), float(value)) for value, ref in enumerate(refs) for who in (reader, watcher)]
        time.sleep(source.uniform(0.0, 0.15))
        os.kill(source.choice(pids), signal.SIGKILL)
        for answer, value in answers:
            try:
                assert ray.get(answer, timeout=PATIENCE) == (value, True)
                right += 1
            except exceptions.GetTimeoutError:
                raise
            except exceptions.RayError:
                assert not again, "it is made again"
        eventually(lambda: not state_of(watcher)["pending"])
    assert right > rounds and not state_of(watcher)["open"] and not state_of(watcher)["up"]
    assert state_of(watcher)["threads"].count("hpcray-device-wire") == 1
