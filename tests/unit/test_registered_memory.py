"""Parts of an arena that are registered with a made-up driver, which notes every misuse."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcray.platform.arena import Arena
from hpcray.protocol import out_of_band
from hpcray.protocol.serialization import Serialized, deserialize
from hpcray.tensors.device_driver import DeviceDriverError
from hpcray.tensors.registered_memory import RegisteredMemory, uses_devices
from hpcray.tensors.registered_ranges import GRANULE, REGISTERED_SIZE

torch = pytest.importorskip("torch")
from helpers.fake_device_driver import FakeDeviceDriver  # noqa: E402 (it imports PyTorch)

SIZE = 16 * GRANULE


class Process:
    """A process with an arena and a device."""

    def __init__(self, directory: Path, budget: int = SIZE) -> None:
        self.directory = directory
        self.arena = Arena.create(SIZE, huge="off")
        self.driver = FakeDeviceDriver(directory)
        self.warnings: list[str] = []
        self.memory = RegisteredMemory(self.driver, budget, self.warnings.append)
        self.gone: list[int] = []

    def read(self, offset: int, size: int) -> memoryview:
        """What `get` gives the program."""
        found = self.memory.view(self.arena, offset, size, lambda: self.gone.append(offset))
        return self.arena.pinned_view(offset, size, lambda: self.gone.append(offset)) if found is None else found

    def settle(self) -> None:
        """Wait until the thread has done what it got so far."""
        if self.memory._thread is not None:
            done = threading.Event()
            self.memory._queue.put(done.set)
            assert done.wait(30)

    def is_registered(self, view: memoryview) -> bool:
        return self.driver.is_registered(np.frombuffer(view, np.uint8).ctypes.data, len(view))

    def close(self) -> None:
        self.memory.close()
        assert not self.driver.leaks()
        self.arena.close()
        found = self.directory / "misuse"
        assert not found.exists(), found.read_text()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    yield made
    made.close()


def test_a_program_that_reads_a_place_again_gets_registered_memory(process: Process) -> None:
    process.arena.write(GRANULE, b"x" * (2 * GRANULE))
    kept = [process.read(GRANULE, 2 * GRANULE)]
    process.settle()
    assert not process.driver.registrations, "it is read once"
    kept.append(process.read(GRANULE, 2 * GRANULE))
    process.settle()
    assert process.driver.registrations == [2 * GRANULE]
    kept.append(process.read(GRANULE, 2 * GRANULE))
    assert [process.is_registered(view) for view in kept] == [False, False, True]
    assert kept[2] == kept[0] and kept[2].readonly
    process.arena.write(GRANULE, b"y")
    assert bytes(kept[2][:1]) == b"y", "it is the same memory"


def test_a_copy_is_never_of_memory_of_which_a_part_is_registered(process: Process) -> None:
    for _ in range(2):
        process.read(2 * GRANULE, 2 * GRANULE)
    process.settle()
    overlapping = process.read(GRANULE, 4 * GRANULE)
    assert not process.is_registered(overlapping)
    assert process.is_registered(process.read(2 * GRANULE + 64, GRANULE))


def test_a_block_is_given_back_when_the_copies_from_it_are_done(process: Process) -> None:
    for _ in range(2):
        process.read(0, GRANULE)
    process.settle()
    process.gone.clear()
    view = process.read(0, GRANULE)
    assert process.driver.copy_later(np.frombuffer(view, np.uint8))
    del view
    gc.collect()
    waiting = threading.Event()
    assert not waiting.wait(0.05) and not process.gone
    process.driver.finish_work()
    process.settle()
    assert process.gone == [0]


def test_views_of_ordinary_memory_wait_for_no_device(process: Process) -> None:
    process.driver.queue_work()
    view = process.read(0, GRANULE)
    del view
    gc.collect()
    assert process.gone == [0]
    process.driver.finish_work()


def test_what_is_registered_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcray.tensors.registered_ranges.KEPT_TIME", 0.0)
    process = Process(tmp_path, budget=4 * GRANULE)
    for at in (0, 3, 6, 9):
        for _ in range(2):
            process.read(at * GRANULE, 2 * GRANULE)
        process.settle()
        assert sum(process.driver.registered.values()) == process.memory.total <= 4 * GRANULE
    kept = process.read(9 * GRANULE, 2 * GRANULE), process.read(6 * GRANULE, 2 * GRANULE)
    assert all(map(process.is_registered, kept))
    for _ in range(3):
        process.read(0, 2 * GRANULE)
        process.settle()
    assert not process.is_registered(process.read(0, 2 * GRANULE)), "both are in use"
    del kept
    process.close()


def test_a_device_that_never_ends_its_work_does_not_keep_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpcray.tensors.registered_memory._END_TIME", 0.05)
    process = Process(tmp_path)
    for _ in range(2):
        process.read(0, GRANULE)
    process.settle()
    view = process.read(0, GRANULE)
    process.driver.queue_work()
    del view
    gc.collect()
    process.memory.close()
    assert process.driver.registered, "the system undoes it when the process has ended"
    process.driver.finish_work()
    thread = process.memory._thread
    assert thread is not None
    thread.join()
    process.close()


def test_a_driver_that_refuses_is_asked_once(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.driver.registers = False
    for _ in range(4):
        process.read(0, GRANULE)
        process.settle()
    assert len(process.warnings) == 1 and "cannot be registered" in process.warnings[0]
    process.driver.registers = True
    process.read(0, GRANULE)
    process.settle()
    assert not process.driver.registrations and not process.memory.total
    process.close()


def test_an_arena_that_goes_is_registered_no_more(process: Process) -> None:
    other = Arena.create(SIZE, huge="off")
    for _ in range(2):
        process.memory.view(other, 0, GRANULE, lambda: None)
        process.settle()
    view = process.memory.view(other, 0, GRANULE, lambda: process.gone.append(-1))
    assert view is not None and len(process.driver.registered) == 1
    process.memory.forget(other)
    other.close()
    assert bytes(view[:3]) == b"\0\0\0"
    del view
    process.settle()
    assert not process.driver.registered and process.gone == [-1]


def test_views_outlive_the_registration_of_their_memory(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.arena.write(0, b"abc")
    for _ in range(2):
        process.read(0, GRANULE)
    process.settle()
    view = process.read(0, GRANULE)
    assert process.is_registered(view)
    process.close()
    assert bytes(view[:3]) == b"abc"


def test_transfers_of_a_device_use_registered_memory_at_once(process: Process) -> None:
    content = np.frombuffer(process.arena.view(GRANULE + 64, GRANULE), np.uint8)
    with process.memory.transfer([process.arena], content) as memory:
        assert (
            process.driver.is_registered(memory.ctypes.data, len(memory)) and memory.ctypes.data != content.ctypes.data
        )
        memory[5] = 7
        assert process.memory._ranges.add(process.arena, 0, SIZE, SIZE, 0.0) is None, "it stays while it is used"
    assert content[5] == 7
    small = np.frombuffer(process.arena.view(0, REGISTERED_SIZE - 1), np.uint8)
    elsewhere = np.zeros(REGISTERED_SIZE, np.uint8)
    for array in (small, elsewhere):
        with process.memory.transfer([process.arena], array) as memory:
            assert memory is array
    assert process.driver.registrations == [2 * GRANULE]


def test_bytes_of_a_device_are_written_into_registered_memory_of_the_arena(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []

    def transfer(content: Any) -> Any:
        used.append(len(content))
        return process.memory.transfer([process.arena], content)

    monkeypatch.setattr(out_of_band._reducers, "transfer_memory", transfer, raising=False)
    made = torch.arange(GRANULE // 4, dtype=torch.int32)
    storage = out_of_band._Storage(made.untyped_storage(), 0, 2 * GRANULE, 64, GRANULE, "cuda:0")
    buffers = [storage._whole]
    storage.narrow(buffers)
    blob = Serialized(b"", [buffers[0].raw()])
    process.arena.write_all(128, blob.pieces())
    assert bytes(process.arena.view(128, GRANULE - 64)) == made.numpy().tobytes()[64:]
    assert used == [GRANULE - 64] and len(process.driver.registrations) == 1
    assert blob.join()[: GRANULE - 64] == made.numpy().tobytes()[64:]
    process.arena.copiers = 4  # as with many cores: large pieces are written by several threads
    pieces = [(0, buffers[0].raw()), (2 * GRANULE, np.ones(GRANULE, np.uint8)), (4 * GRANULE, b"end")]
    monkeypatch.setattr("hpcray.platform.arena.PARALLEL_COPY_SIZE", 2 * GRANULE - 1000)
    process.arena.write_all(0, pieces)
    assert bytes(process.arena.view(0, GRANULE - 64)) == made.numpy().tobytes()[64:]
    assert bytes(process.arena.view(4 * GRANULE, 3)) == b"end" and process.arena.view(3 * GRANULE - 1, 1)[0] == 1


def test_device_tensors_are_read_through_the_transfer_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Through:
        def __init__(self, content: Any) -> None:
            self.content = content

        def __enter__(self) -> Any:
            seen.append(len(self.content))
            return self.content.copy()

        def __exit__(self, *args: Any) -> None:
            pass

    monkeypatch.setattr(out_of_band._reducers, "transfer_memory", Through, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 9)
    blob = Serialized(
        pickle.dumps(_Moved(np.arange(64, dtype=np.uint8)), 5, buffer_callback=lambda _: None),
        [np.arange(64, dtype=np.uint8).data],
    ).join()
    storage, low = deserialize(blob)
    assert seen == [64] and low == 0 and list(storage) == list(range(64))


class _Moved:
    """Pickles as a storage of a device whose name PyTorch takes for the host here."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce__(self) -> Any:
        return out_of_band._storage_of, (pickle.PickleBuffer(self.content), None, "cpu:0")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_without_work_on_a_device_registers_nothing() -> None:
    assert not uses_devices()


def test_a_mapping_that_the_driver_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(tmp_path)

    def refuse(*args: Any) -> None:
        raise DeviceDriverError("no")

    monkeypatch.setattr(process.driver, "register_host", refuse)
    content = np.frombuffer(process.arena.view(0, GRANULE), np.uint8)
    with process.memory.transfer([process.arena], content) as memory:
        assert memory is content
    assert process.warnings and not len(process.memory._ranges)
    del content, memory
    process.close()
