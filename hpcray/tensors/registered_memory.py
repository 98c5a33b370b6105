"""The node's arena and CUDA: what a process with a GPU reads from the arena, or writes there, at the GPU's full speed.

A range of the arena with a large object is mapped once more and registered with the driver (`RegisteredRanges` says why
not in place). Copies between tensors on a device and the store go through such a range from the first time on. What a
program reads with `get` is a view of one from the second time on that an object in this place is read, as it may never
go to a device; a thread registers it meanwhile (about 70 ms a GB).

A copy from registered memory may go on when the call that began it has returned (`non_blocking=True`). So where a view
of such memory is dropped, its block is given back when the devices have done all work that they had then.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from time import monotonic
from typing import Any

from hpcray.platform.arena import Arena, watched_view
from hpcray.platform.resource_limits import usable_memory
from hpcray.protocol.messages.objects import OVERFLOW
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.extensions import Extension
from hpcray.tensors.device_driver import DeviceDriver, DeviceDriverError
from hpcray.tensors.device_memory import find_driver, is_driver_set
from hpcray.tensors.registered_ranges import REGISTERED_SIZE, RegisteredRange, RegisteredRanges

__all__ = ["REGISTERED_SIZE", "RegisteredMemory", "registered_memory"]


_END_TIME = 10.0
"""Seconds for which the end of a process waits for the work of its devices."""


class _RegisteredMapping:
    """A range of an arena that is mapped once more, and registered until `close`.

    Raises:
        DeviceDriverError: the driver refuses. OSError, ValueError: the system does.
    """

    def __init__(self, driver: DeviceDriver, arena: Arena, found: RegisteredRange) -> None:
        self._driver = driver
        self._map = arena.map_again(found.start, found.end)
        self.memory = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        try:
            driver.register_host(self._address, found.size)
        except DeviceDriverError:
            self._unmap()
            raise

    def close(self) -> None:
        """Undo the registration; the mapping goes with the last view of it."""
        with contextlib.suppress(DeviceDriverError):  # a device in this state copies nothing any more
            self._driver.unregister_host(self._address)
        self._unmap()

    def _unmap(self) -> None:
        with contextlib.suppress(BufferError):
            self.memory.release()
            self._map.close()


class RegisteredMemory:
    """The registered memory of one process, and the thread that makes it and gives it up.

    Args:
        budget: bytes.
        warn: called, once, with the reason why nothing is registered any more.
    """

    def __init__(self, driver: DeviceDriver, budget: int, warn: Callable[[str], object]) -> None:
        self._driver, self._warn = driver, warn
        self._lock = threading.Lock()
        self._ranges = RegisteredRanges(budget)
        self._mappings: dict[RegisteredRange, _RegisteredMapping] = {}
        # Its `put` may be called by a destructor, wherever that runs.
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._refused = False

    @property
    def total(self) -> int:
        """Bytes that are registered."""
        with self._lock:
            return self._ranges.total

    def view(self, arena: Arena, offset: int, size: int, gone: Callable[[], object]) -> memoryview | None:
        """Return a read-only view of a block in registered memory; None where it is not registered so far. Does not
        wait for the driver.

        Args:
            gone: called once the view is dropped, and no work of the devices can use it any more.
        """
        if offset >= OVERFLOW:
            return None
        with self._lock:
            found = self._ranges.use(arena, offset, offset + size, monotonic())
            if found is None:
                if self._ranges.note_read(arena, offset, offset + size) and not self._refused:
                    self._call(partial(self._register, arena, offset, offset + size))
                return None
            memory = self._mappings[found].memory[offset - found.start : offset - found.start + size]
        return watched_view(memory, partial(self._queue.put, partial(self._view_gone, found, gone)))

    @contextlib.contextmanager
    def transfer(self, arenas: list[Arena], content: Any) -> Iterator[Any]:
        """A context with an array of the same bytes in registered memory, or with `content` itself. What is copied from
        or to it has to be there when the context ends.

        Args:
            content: NumPy's array of bytes.
        """
        address = content.__array_interface__["data"][0]
        arena = next((one for one in arenas if one.address <= address < one.address + one.whole), None)
        if arena is None or len(content) < REGISTERED_SIZE:
            yield content
            return
        start = address - arena.address
        end = start + len(content)
        with self._lock:
            found = self._ranges.use(arena, start, end, monotonic())
        if found is None and self._register(arena, start, end):
            with self._lock:
                found = self._ranges.use(arena, start, end, monotonic())
        if found is None:
            yield content
            return
        import numpy

        try:
            memory = self._mappings[found].memory[start - found.start : end - found.start]
            yield numpy.frombuffer(memory, numpy.uint8)
        finally:
            self._unuse(found)

    def forget(self, arena: Arena) -> None:
        """An arena is about to be unmapped."""
        with self._lock:
            closed = [self._mappings.pop(each) for each in self._ranges.forget(arena)]
        self._close(closed)

    def close(self) -> None:
        """End the thread, and undo all registrations. Views that live on are of ordinary memory then.

        Where a device does not end its work in time, the registrations stay until the process ends.
        """
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(_END_TIME)
            if self._thread.is_alive():
                return
        with self._lock:
            self._ranges.clear()
            closed = list(self._mappings.values())
            self._mappings.clear()
            self._refused = True
        self._close(closed)

    def _register(self, arena: Arena, start: int, end: int) -> bool:
        """Register a range of an arena. Returns True if it is registered now."""
        with self._lock:
            planned = None if self._refused else self._ranges.add(arena, start, end, arena.whole, monotonic())
            if planned is None:
                return False
            made, surplus = planned
            closed = [self._mappings.pop(each) for each in surplus]
        self._close(closed)
        try:
            mapping = _RegisteredMapping(self._driver, arena, made)
        except (DeviceDriverError, OSError, ValueError) as error:
            with self._lock:
                self._ranges.failed(made)
                first, self._refused = not self._refused and not made.closing, True
            if first:
                self._warn(f"memory of the object store cannot be registered with the GPU's driver ({error})")
            return False
        with self._lock:
            kept = self._ranges.registered(made)
            if kept:
                self._mappings[made] = mapping
        if not kept:
            self._close([mapping])
        return kept

    def _close(self, mappings: list[_RegisteredMapping]) -> None:
        for mapping in mappings:
            mapping.close()

    def _unuse(self, found: RegisteredRange) -> None:
        with self._lock:
            closed = [self._mappings.pop(found)] if self._ranges.unuse(found) else []
        self._close(closed)

    # ------------------------------------------------------------ the thread

    def _call(self, call: Callable[[], object]) -> None:
        """Have the thread make a call (lock held)."""
        self._queue.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpcray-registered-memory", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            call()
            del call  # or what it refers to stays until the next one comes

    def _view_gone(self, found: RegisteredRange, gone: Callable[[], object]) -> None:
        with contextlib.suppress(DeviceDriverError):  # a device in this state copies nothing any more
            self._driver.synchronize()
        if found in self._mappings:  # else all was given up
            self._unuse(found)
        gone()


class MemoryRegistrations(Extension):
    """The registered memory of one process, which has some once it uses a GPU.

    Attributes:
        memory: None before that.
    """

    name = "registered_memory"

    def __init__(self, process: CoreWorker) -> None:
        super().__init__(process)
        self.memory: RegisteredMemory | None = None

    def begin(self, driver: DeviceDriver) -> RegisteredMemory:
        """Return the registered memory; makes it at the first call."""
        budget = min(self.process.config.registered_memory, usable_memory() // 8)

        def warn(text: str) -> None:
            print(f"hpcray: {text}: tensors are copied at the speed of ordinary memory", file=sys.stderr, flush=True)

        with self.process.engine.lock:
            if self.memory is None:
                self.memory = RegisteredMemory(driver, budget, warn)
            return self.memory

    def arena_closed(self, arena: Arena) -> None:
        """Undo the registrations of an arena."""
        if self.memory is not None:
            self.memory.forget(arena)

    def close(self) -> None:
        """Undo all registrations."""
        if self.memory is not None:
            self.memory.close()


def registered_memory(process: CoreWorkerContext) -> RegisteredMemory | None:
    """Return the registered memory of a process; makes it where that uses a GPU already. None: it does not."""
    found = process.extensions.find(MemoryRegistrations.name)
    if isinstance(found, MemoryRegistrations) and found.memory is not None:
        return found.memory
    driver = find_driver() if process.config.registered_memory and uses_devices() else None
    if driver is None:
        return None
    made = process.extensions.get(MemoryRegistrations.name)
    assert isinstance(made, MemoryRegistrations)
    return made.begin(driver)


def device_view(
    process: CoreWorkerContext, arena: Arena, offset: int, size: int, gone: Callable[[], object]
) -> memoryview | None:
    """Return a view of an object from which a device copies at full speed; see `RegisteredMemory.view`."""
    registered = registered_memory(process)
    return registered.view(arena, offset, size, gone) if registered is not None else None


def uses_devices() -> bool:
    """Return True if this process has given work to a device. Does not make it do so, nor import PyTorch."""
    if is_driver_set():
        return True
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # while another thread imports it, it is there in part
    return cuda is not None and bool(cuda.is_initialized())


@contextlib.contextmanager
def transfer_memory(process: CoreWorker, content: Any) -> Iterator[Any]:
    """A context with the memory through which bytes are copied to or from a device; see `RegisteredMemory.transfer`."""
    registered = registered_memory(process) if process.dead is None else None
    if registered is None:
        yield content
        return
    with registered.transfer(list(process.stores.arenas.values()), content) as memory:
        yield memory
