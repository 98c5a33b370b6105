"""A driver of devices without devices: their memory is files that processes map, as CUDA's IPC would have it.

It notes what a real driver does not forgive in the file `misuse` of its directory: an allocation that is mapped twice,
a mapping closed while tensors use it, a block of memory used again while a reader's work may use it, a read that waits
for nothing. Memory and events of a process that has ended cannot be opened. Work of a stream is a number: what is
queued (`queue_work`) is done when the test says so (`finish_work`).

A copy in a stream of `transfer_stream` is made when an event behind it is waited for, not before: what is used earlier
has the wrong content, and what is given up earlier is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcray.tensors.device_driver import DeviceDriverError, DeviceMemory

SEGMENT = 1 << 20
"""Bytes of an allocation; tensors are parts of it, as with PyTorch's caching allocator."""
_UNIT = 512


class _Array:
    """Memory at an address, for NumPy. owner: kept as long as it is used."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


class _Segment:
    def __init__(self, path: Path, writable_size: int = 0) -> None:
        with path.open("r+b" if not writable_size else "w+b") as file:
            if writable_size:
                file.truncate(writable_size)
            self.map = mmap.mmap(file.fileno(), 0)
        self.path, self.size = path, len(self.map)
        self.base = np.frombuffer(self.map, np.uint8).ctypes.data
        self.users = 0
        self.top = 0


class _Stream:
    """Copies that are not made yet: host address, device pointer, bytes, and whether they are to the device."""

    def __init__(self) -> None:
        self.copies: list[tuple[int, int, int, bool]] = []
        self.made = 0


def _check_alive(handle: str) -> None:
    with open(f"/proc/{handle.rpartition('-')[2]}/stat", encoding="ascii") as file:
        if file.read().rpartition(") ")[2].startswith("Z"):
            raise ProcessLookupError("the process that has the memory is dead")


def _is_reader_alive(mark: str) -> bool:
    name = mark.rpartition(".")[0].rpartition(".")[2]
    try:
        if name.startswith("process-"):
            _check_alive(name)
    except OSError:
        return False
    return True


class FakeDeviceDriver:
    """Devices of one process.

    Args:
        directory: of this host's devices. name: of the process, for what it notes. visible: the devices it can use.
    """

    def __init__(self, directory: Path | str, name: str = "", visible: tuple[str, ...] = ("gpu-0",)) -> None:
        self.directory, self.name = Path(directory), name or f"process {os.getpid()}"
        self.visible = visible
        self.queued = self.done = 0
        self.opened: list[str] = []
        """Handles of the allocations that were mapped, in order."""
        self.waited: list[str] = []
        """Events that streams of this process wait for, in order."""
        self.exports = True
        """Whether allocations with tensors can be exported."""
        self.allocates = True
        """Whether there is memory that can be exported in any case."""
        self.copied: list[int] = []
        """Bytes of all copies on the device, in order."""
        self._pool: set[int] = set()
        self._own: dict[int, tuple[_Segment, int]] = {}
        self._mapped: dict[int, tuple[_Segment, str]] = {}
        self._free: dict[int, list[int]] = {}
        self._idents = itertools.count(1)
        self._events: dict[int, Path] = {}
        self._foreign: set[Path] = set()
        self._marks: list[tuple[int, Path]] = []
        self.registers = True
        """Whether memory of the host can be registered."""
        self.registered: dict[int, int] = {}
        """Registered memory of the host: address and bytes."""
        self.registrations: list[int] = []
        """Bytes of all registrations there were, in order."""
        self._host_copies: list[tuple[int, int, int]] = []  # ticket, address, bytes
        self._worked = threading.Condition()
        self.transfers: Callable[[], bool] = lambda: True
        """Returns whether the next stream is opened, or the next copy between host and device accepted."""
        self.down: list[int] = []
        """Bytes of all copies to the host, in order."""
        self.up: list[int] = []
        """Bytes of all copies to the device, in order."""
        self.exposed: list[int] = []
        """Bytes of all memory that other libraries got, in order."""
        self.active: list[str] = []
        """Threads for which a device was activated."""
        self.used: set[str] = set()
        """Devices with copies between them and the host."""
        self.most_under_way = 0
        """Copies between host and device that were in one stream at once."""
        self.pause = 0.0
        """Seconds that a copy between host and device takes."""
        self._streams = threading.local()
        self._open_streams: list[_Stream] = []
        self._recorded: dict[int, tuple[_Stream, int]] = {}

    # ------------------------------------------------------------ for tests

    def tensor(self, length: int, value: float = 0.0) -> Any:
        """A new tensor of float32 in memory of the device."""
        size = -(-max(1, length * 4) // _UNIT) * _UNIT
        return torch.from_numpy(self._memory(size)).view(torch.float32)[:length].fill_(value)

    def _memory(self, size: int) -> Any:
        """New memory of the device, as NumPy's array."""
        address = self._block(size)
        array = np.asarray(_Array(address, size, self))
        weakref.finalize(array, self._freed, address, size)
        return array

    def _freed(self, address: int, size: int) -> None:
        if any(address < at + length and at < address + size for _, at, length, _ in self._unmade()):
            self.misuse("memory of the device was given up while a copy uses it")
        self._free.setdefault(size, []).append(address)

    def _unmade(self) -> list[tuple[int, int, int, bool]]:
        return [copy for stream in list(self._open_streams) for copy in stream.copies[stream.made :]]

    def _block(self, size: int) -> int:
        free = self._free.get(size)
        if free:
            address = free.pop()
            segment = self._segment_of(address)
            assert segment is not None
            for mark in self._uses(f"{segment.path.name}.{address - segment.base}"):
                self.misuse(f"a block is used again while a reader has it: {mark.name}")
            return address
        for segment, _ in self._own.values():
            if segment.base not in self._pool and segment.top + size <= segment.size:
                segment.top += size
                return segment.base + segment.top - size
        segment = self._allocate(max(SEGMENT, size))
        segment.top = size
        return segment.base

    def _uses(self, name: str) -> list[Path]:
        """What readers that live have of some memory."""
        return [mark for mark in self.directory.glob(f"use.{name}.*") if _is_reader_alive(mark.name)]

    def _allocate(self, size: int) -> _Segment:
        """New memory, of which parts are tensors."""
        ident = next(self._idents)
        segment = _Segment(self.directory / f"memory-{self.name.replace(' ', '-')}-{ident}-{os.getpid()}", size)
        self._own[segment.base] = segment, ident
        return segment

    def queue_work(self) -> None:
        """Work of the stream begins that has not ended."""
        self.queued += 1

    def finish_work(self) -> None:
        """All work that was queued ends."""
        with self._worked:
            self.done = self.queued
            self._worked.notify_all()
        self._host_copies.clear()
        kept = []
        for ticket, mark in self._marks:
            if ticket <= self.done:
                mark.unlink()
            else:
                kept.append((ticket, mark))
        self._marks = kept

    def copy_later(self, array: Any) -> bool:
        """A copy from memory of the host begins that has not ended, as with `non_blocking=True`.

        Returns:
            False for ordinary memory: such a copy has ended when the call returns.
        """
        address, size = array.__array_interface__["data"][0], array.nbytes
        if not self.is_registered(address, size):
            return False
        self.queue_work()
        self._host_copies.append((self.queued, address, size))
        return True

    def is_registered(self, address: int, size: int) -> bool:
        """Whether memory of the host is registered; what is so only in part cannot be copied."""
        touched = [at for at, length in self.registered.items() if at < address + size and address < at + length]
        whole = [at for at in touched if at <= address and address + size <= at + self.registered[at]]
        if touched and not whole:
            self.misuse("a copy of memory of which a part is registered")
        return bool(whole)

    def misuse(self, text: str) -> None:
        """Note what a real driver does not forgive."""
        with (self.directory / "misuse").open("a", encoding="utf-8") as file:
            file.write(f"{self.name}: {text}\n")

    @property
    def mapped(self) -> list[str]:
        """Handles of the allocations of other processes that are mapped now."""
        return [handle for _, handle in self._mapped.values()]

    @property
    def blocks_in_use(self) -> int:
        """Blocks of tensors that are alive here."""
        taken = sum(segment.top for segment, _ in self._own.values())  # those of a pool have no tensors
        return taken - sum(size * len(free) for size, free in self._free.items())

    def _segment_of(self, pointer: int) -> _Segment | None:
        for segment in (*(one for one, _ in self._own.values()), *(one for one, _ in self._mapped.values())):
            if segment.base <= pointer < segment.base + segment.size:
                return segment
        return None

    # ------------------------------------------------------------ the protocol

    def devices(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.visible)}

    def is_on_device(self, tensor: Any) -> bool:
        return self._segment_of(tensor.untyped_storage().data_ptr()) is not None

    def device_of(self, tensor: Any) -> str:
        return self.visible[0]

    def find(self, pointer: int) -> DeviceMemory:
        segment = self._segment_of(pointer)
        if segment is None or segment.base not in self._own:
            raise DeviceDriverError("this memory is of another process")
        return DeviceMemory(segment.base, self._own[segment.base][1], self.visible[0])

    def export(self, memory: DeviceMemory) -> bytes:
        if not self.exports and memory.base not in self._pool:
            raise DeviceDriverError("this memory cannot be exported")
        return str(self._own[memory.base][0].path).encode()

    def allocate(self, device: str, size: int) -> DeviceMemory:
        if not self.allocates:
            raise DeviceDriverError("there is no memory")
        segment = self._allocate(size)
        self._pool.add(segment.base)
        return DeviceMemory(segment.base, self._own[segment.base][1], device)

    def free(self, memory: DeviceMemory) -> None:
        segment, _ = self._own.pop(memory.base)
        self._pool.discard(memory.base)
        if self._uses(segment.path.name):
            self.misuse("memory was freed that a reader has")
        segment.path.unlink()

    def copy(self, device: str, target: int, source: int, size: int) -> None:
        segment = self._segment_of(target)
        if segment is None or self._segment_of(source) is None or target + size > segment.base + segment.size:
            self.misuse("a copy of what is not on the device")
            return
        start = target - segment.base
        for mark in self._uses(segment.path.name):
            if start <= int(mark.name.removeprefix(f"use.{segment.path.name}.").partition(".")[0]) < start + size:
                self.misuse(f"a block of the pool is used again while a reader has it: {mark.name}")
        ctypes.memmove(target, source, size)
        self.copied.append(size)

    @property
    def pool_segments(self) -> int:
        """Allocations of `allocate` that were not freed."""
        return len(self._pool)

    def map(self, device: str, handle: bytes) -> int:
        name = handle.decode()
        if device not in self.visible:
            raise DeviceDriverError(f"there is no {device}")
        if name in self.mapped:
            self.misuse(f"{name} is mapped twice")
        if any(str(segment.path) == name for segment, _ in self._own.values()):
            raise DeviceDriverError("a process cannot map what it has exported")
        try:
            _check_alive(name)
            segment = _Segment(Path(name))
        except OSError as error:
            raise DeviceDriverError(f"{error}") from error
        self._mapped[segment.base] = segment, name
        self.opened.append(name)
        return segment.base

    def unmap(self, device: str, base: int) -> None:
        if base not in self._mapped:
            self.misuse("what is not mapped was closed")
            return
        segment, name = self._mapped.pop(base)
        if segment.users:
            self.misuse(f"{name} was closed while {segment.users} tensors use it")

    def storage(self, device: str, pointer: int, size: int, owner: object) -> Any:
        segment = self._segment_of(pointer)
        if segment is None or pointer + size > segment.base + segment.size:
            raise DeviceDriverError("there is no such memory")
        segment.users += 1
        serial = next(self._idents)
        name = self.name.replace(" ", "-")
        mark = self.directory / f"use.{segment.path.name}.{pointer - segment.base}.{name}.{serial}"
        mark.touch()
        array = np.asarray(_Array(pointer, size, owner))
        weakref.finalize(array, self._dropped, segment, mark)
        return torch.from_numpy(array).untyped_storage()

    def _dropped(self, segment: _Segment, mark: Path) -> None:
        segment.users -= 1
        if self.queued > self.done:
            self._marks.append((self.queued, mark))
        else:
            mark.unlink()

    def expose(self, device: str, pointer: int, size: int, owner: object) -> Any:
        segment = self._segment_of(pointer)
        if segment is None or pointer + size > segment.base + segment.size:
            self.misuse("memory was exposed that is not on the device")
        self.exposed.append(size)
        return np.asarray(_Array(pointer, size, owner))

    def activate(self, device: str) -> None:
        if device not in self.visible:
            self.misuse(f"{device} was activated")
        self.active.append(threading.current_thread().name)

    def new_event(self, device: str) -> tuple[int, bytes]:
        event = next(self._idents)
        path = self._events[event] = self.directory / f"event-{self.name.replace(' ', '-')}-{event}-{os.getpid()}"
        path.write_text("never", encoding="ascii")
        return event, str(path).encode()

    def open_event(self, device: str, handle: bytes) -> Path:
        path = Path(handle.decode())
        try:
            _check_alive(path.name)
        except OSError as error:
            raise DeviceDriverError(f"{error}") from error
        self._foreign.add(path)
        return path

    def close_event(self, device: str, event: Any) -> None:
        if event in self._foreign:
            self._foreign.remove(event)
        elif getattr(self._events.get(event), "name", "").startswith("local-"):
            del self._events[event]
            self._recorded.pop(event, None)
        else:
            self.misuse("an event was closed that is not open")

    def record(self, device: str, event: int) -> None:
        stream = self._current_streams().get(device)
        if stream is not None:
            self._recorded[event] = stream, len(stream.copies)
            return
        self._events[event].write_text(str(self.queued), encoding="ascii")

    @contextlib.contextmanager
    def transfer_stream(self, device: str) -> Iterator[None]:
        if device not in self.visible:
            self.misuse(f"a stream of {device}")
        if not self.transfers():
            raise DeviceDriverError("there are no more streams")
        outer, stream = self._current_streams(), _Stream()
        self._streams.current = {**outer, device: stream}
        self._open_streams.append(stream)
        try:
            yield
        finally:
            if stream.made < len(stream.copies):
                self.misuse("a stream was given up with copies under way")
            self._open_streams.remove(stream)
            self._streams.current = outer

    def _current_streams(self) -> dict[str, _Stream]:
        """Those of `transfer_stream` that are current in this thread, by device."""
        found: dict[str, _Stream] = getattr(self._streams, "current", {})
        return found

    def _add_copy(self, device: str, address: int, pointer: int, size: int, up: bool) -> None:
        if not self.transfers():
            raise DeviceDriverError("this copy is refused")
        segment, stream = self._segment_of(pointer), self._current_streams()[device]
        if segment is None or pointer + size > segment.base + segment.size:
            self.misuse("a copy of what is not on the device")
            return
        self.is_registered(address, size)
        stream.copies.append((address, pointer, size, up))
        self.used.add(device)
        self.most_under_way = max(self.most_under_way, len(stream.copies) - stream.made)

    def copy_to_host(self, device: str, address: int, pointer: int, size: int) -> None:
        self._add_copy(device, address, pointer, size, False)

    def copy_to_device(self, device: str, pointer: int, address: int, size: int) -> None:
        self._add_copy(device, address, pointer, size, True)

    def _make_copies(self, stream: _Stream, count: int) -> None:
        for address, pointer, size, up in stream.copies[stream.made : count]:
            time.sleep(self.pause)
            ctypes.memmove(*((pointer, address) if up else (address, pointer)), size)
            (self.up if up else self.down).append(size)
            stream.made += 1

    def new_local_event(self, device: str) -> int:
        event = next(self._idents)
        self._events[event] = self.directory / f"local-{event}"
        return event

    def await_event(self, device: str, event: int) -> None:
        if event not in self._recorded:
            self.misuse("an event was waited for that was never recorded")
            return
        self._make_copies(*self._recorded[event])

    def empty(self, device: str, size: int) -> Any:
        array = self._memory(-(-max(1, size) // _UNIT) * _UNIT)
        return torch.from_numpy(array[:size]).untyped_storage() if size else torch.UntypedStorage(0)

    def current_device(self) -> str:
        return self.visible[0]

    def wait(self, device: str, event: Any) -> None:
        path = self._events.get(event, event)
        self.waited.append(path.name)
        if path not in {*self._foreign, *self._events.values()} or path.read_text(encoding="ascii") == "never":
            self.misuse("an event was waited for that is closed, or was never recorded")

    def is_done(self, device: str, event: int) -> bool:
        return int(self._events[event].read_text(encoding="ascii")) <= self.done

    def register_host(self, address: int, size: int) -> None:
        if not self.registers:
            raise DeviceDriverError("this memory cannot be registered")
        if any(at < address + size and address < at + length for at, length in self.registered.items()):
            self.misuse("memory was registered twice")
        if address % mmap.PAGESIZE:
            self.misuse("memory was registered that does not begin with a page")
        self.registered[address] = size
        self.registrations.append(size)

    def unregister_host(self, address: int) -> None:
        size = self.registered.pop(address, None)
        if size is None:
            self.misuse("what is not registered was given up")
            return
        if any(at < address + size and address < at + length for at, _, length, _ in self._unmade()):
            self.misuse("registered memory was given up while a copy between host and device uses it")
        for ticket, at, length in self._host_copies:
            if ticket > self.done and at < address + size and address < at + length:
                self.misuse("registered memory was given up while a copy uses it")

    def synchronize(self) -> None:
        wanted = self.queued
        with self._worked:
            if not self._worked.wait_for(lambda: self.done >= wanted, 30):
                self.misuse("nothing has finished the work that is waited for")

    def leaks(self) -> list[str]:
        """What is still open at the end."""
        local = [str(path) for path in self._events.values() if path.name.startswith("local-")]
        return [*local, *self.mapped, *map(str, self._foreign), *map(hex, self.registered)]
