"""Tensors in device memory of another process of this host, read in place.

What a reader has to know (`DeviceDescriptor`) travels with the value: for each allocation with tensors a handle, and an
event for the work that fills them. The reader maps each allocation once, and makes tensors of parts of it. They hold
the ref of the object that has the tensors, so its owner keeps them, and PyTorch does not use their memory again. A
tensor that is dropped may still be read by work that its reader has queued: the ref goes when an event has shown that
this is done.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, NamedTuple

from hpcray.protocol.out_of_band import UNIT
from hpcray.tensors.device_driver import (
    CudaDriver,
    DeviceDriver,
    DeviceDriverError,
    DeviceMemory,
    running_kernel,
)
from hpcray.tensors.device_mappings import DeviceAllocation, DeviceMappings, ExportPool, Place, PoolBlock, segment_size

_DRAIN_INTERVAL = 0.01
"""Seconds between two looks whether work with dropped tensors is done."""
_EXPIRE_INTERVAL = 1.0
_HANDLES = 4096
"""Handles of allocations that are kept, as PyTorch allocates in large pieces and uses them again."""


class StorageLocation(NamedTuple):
    """A storage. allocation: its number in `DeviceDescriptor.allocations`. offset, size: its part of that, in bytes."""

    allocation: int
    offset: int
    size: int


class TensorLocation(NamedTuple):
    """A tensor. storage: its number in `DeviceDescriptor.storages`. first: its first element there."""

    storage: int
    dtype: Any
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool
    is_parameter: bool


def location_of(tensor: Any, storage: int) -> TensorLocation:
    """Return where a tensor is in its storage, which has this number."""
    import torch

    return TensorLocation(
        storage, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()),
        tensor.requires_grad, type(tensor) is torch.nn.Parameter,
    )  # fmt: skip


def locate(tensors: Sequence[Any]) -> tuple[list[tuple[Any, Any]], list[TensorLocation]]:
    """Return the storages of tensors, each once and with the first tensor that has it, and where the tensors are."""
    numbers: dict[tuple[int, int], int] = {}
    storages: list[tuple[Any, Any]] = []
    found: list[TensorLocation] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        number = numbers.setdefault((storage.data_ptr(), storage.nbytes()), len(storages))
        if number == len(storages):
            storages.append((storage, tensor))
        found.append(location_of(tensor, number))
    return storages, found


def covered_bytes(tensors: Sequence[TensorLocation], storages: int) -> list[tuple[int, int]]:
    """Return, for each of so many storages, where the part that tensors cover begins and ends, in bytes."""
    spans = [(0, 0)] * storages
    for each in tensors:
        low, high = _covered(each)
        first, last = spans[each.storage]
        if low < high:
            spans[each.storage] = (min(first, low), max(last, high)) if first < last else (low, high)
    return spans


def _covered(found: TensorLocation) -> tuple[int, int]:
    if 0 in found.shape:
        return 0, 0
    last = found.first + sum((length - 1) * step for length, step in zip(found.shape, found.strides, strict=True)) + 1
    element = found.dtype.itemsize
    return found.first * element // UNIT * UNIT, last * element


def tensor_at(storage: Any, location: TensorLocation, low: int = 0) -> Any:
    """Return the tensor at a location.

    Args:
        storage: that of the tensor, or its bytes from `low` on.
    """
    import torch

    tensor = torch.empty(0, dtype=location.dtype, device=storage.device)
    first = 0 if 0 in location.shape else location.first - low // tensor.element_size()
    tensor.set_(storage, first, location.shape, location.strides)
    if location.is_parameter:
        return torch.nn.Parameter(tensor, location.requires_grad)
    return tensor.requires_grad_() if location.requires_grad else tensor


class DeviceDescriptor(NamedTuple):
    """The tensors of a device object, for readers that can map their memory.

    process: the one that has them. host: see `running_kernel`. allocations: number in that process, device, handle.
    events: device and handle of the event after which the tensors are as they should be, one for each device. moves:
    whether the tensors may move to the object store: a reader has to ask whether they are there (`OpenTensors`). wire:
    as in `Place`; numbers: those of the devices in that process, where it has a wire. only_direct: whether readers that
    cannot map them are to get them directly, or an error.
    """

    process: bytes
    host: str
    allocations: list[tuple[int, str, bytes]]
    events: list[tuple[str, bytes]]
    storages: list[StorageLocation]
    tensors: list[TensorLocation]
    moves: bool = False
    wire: str = ""
    numbers: Mapping[str, int] = {}
    only_direct: bool = False

    @property
    def place(self) -> Place:
        """Where the tensors are."""
        return Place(self.process, self.host, {device for _, device, _ in self.allocations}, self.wire)

    def covered(self) -> int:
        """Return the bytes of the storages that the tensors cover."""
        return sum(high - low for low, high in covered_bytes(self.tensors, len(self.storages)))

    def device_of(self, storage: int) -> str:
        """Return the device with a storage, in the process that has it."""
        return self.allocations[self.storages[storage].allocation][1]


class _DriverOfProcess:
    """The driver of this process, found at its first use."""

    driver: DeviceDriver | None = None
    known = False


def use_driver(driver: DeviceDriver | None) -> None:
    """Use another driver than CUDA's in this process, for device objects made or read from now on."""
    _DriverOfProcess.driver, _DriverOfProcess.known = driver, driver is not None


def is_driver_set() -> bool:
    """Return True if `use_driver` has set the driver, or it has been found before."""
    return _DriverOfProcess.driver is not None


def find_driver() -> DeviceDriver | None:
    """Return the driver of the devices that this process can use; None: there are none."""
    if not _DriverOfProcess.known:
        _DriverOfProcess.known = True
        try:
            _DriverOfProcess.driver = CudaDriver()
        except (DeviceDriverError, ImportError, AttributeError, RuntimeError):  # an old driver, or none that works
            _DriverOfProcess.driver = None
    return _DriverOfProcess.driver


def source_driver(tensors: Sequence[Any]) -> DeviceDriver | None:
    """Return the driver of the devices with these tensors, of which there is one at least; None: they are elsewhere."""
    torch = sys.modules.get("torch")
    if torch is None or not all(_is_plain(torch, tensor) for tensor in tensors):
        return None
    if not _DriverOfProcess.known and not any(tensor.device.type == "cuda" for tensor in tensors):
        return None
    driver = find_driver()
    return driver if driver is not None and all(map(driver.is_on_device, tensors)) else None


def is_only_here(tensors: Sequence[Any]) -> bool:
    """Return True if nothing else in this process has these tensors or their memory, so that it is free once they are
    dropped. `tensors` is the one sequence that has them.

    PyTorch's own names for what is counted are private. Where they are missing, the answer is False.
    """
    torch = sys.modules.get("torch")
    use_count = None if torch is None else getattr(torch._C, "_storage_Use_Count", None)
    if (
        torch is None
        or use_count is None
        or not all(_is_plain(torch, tensor) and _has_no_grad(tensor) for tensor in tensors)
    ):
        return False
    # Counted are: the sequence, the item of the loop, and the argument of the call.
    if any(sys.getrefcount(tensor) > _SEQUENCE_REFS for tensor in tensors):
        return False
    users: dict[int, int] = {}
    bases: dict[int, Any] = {}  # a view keeps the tensor that it is a view of
    for tensor in tensors:
        storage = tensor.untyped_storage()._cdata
        users[storage] = users.get(storage, 0) + 1
        base = tensor._base
        if base is not None and id(base) not in bases:
            bases[id(base)] = base
            users[storage] += 1
    del base
    view = torch.empty(2)[:1]
    dropped = {0: view._base}  # PyTorch itself counts for one, in some of its versions
    most = max(sys.getrefcount(base) for base in dropped.values())
    if any(sys.getrefcount(base) > most for base in bases.values()):
        return False
    if not {id(tensor) for tensor in tensors}.isdisjoint(bases):
        return False  # it is counted twice
    plain = torch.empty(1)
    looked_at = use_count(plain.untyped_storage()._cdata) - 1
    object_refs = sys.getrefcount(plain.untyped_storage())
    return all(
        use_count(tensor.untyped_storage()._cdata) <= users[tensor.untyped_storage()._cdata] + looked_at
        and sys.getrefcount(tensor.untyped_storage()) <= object_refs
        for tensor in tensors
    )


def _has_no_grad(tensor: Any) -> bool:
    return tensor.is_leaf and tensor.grad is None


def _sequence_refs() -> int:
    items = [object()]
    return max(sys.getrefcount(item) for item in items)


_SEQUENCE_REFS = _sequence_refs()
"""References that the interpreter counts where `is_only_here` looks."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error is, or comes from, PyTorch's that a device has no memory left."""
    torch = sys.modules.get("torch")
    kind = None if torch is None else getattr(torch, "OutOfMemoryError", None)
    seen = 0
    while error is not None and kind is not None and seen < 10:
        if isinstance(error, kind):
            return True
        error, seen = getattr(error, "cause", None) or error.__cause__, seen + 1
    return False


def empty_device_caches() -> None:
    """Have PyTorch give back the memory of devices that no tensor uses."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def wait_for_devices(tensors: Sequence[Any]) -> None:
    """Wait until all work of the GPUs that have these tensors is done: it may be in the stream of any thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            torch.cuda.synchronize(tensor.device)


def _is_plain(torch: Any, tensor: Any) -> bool:
    """Return True if a tensor is nothing but a part of a storage."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (
            tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor._backward_hooks
        )
        and not tensor.__dict__
        and tensor.untyped_storage().nbytes() > 0
    )


class DeviceMemoryOwner:
    """The device memory of one process that others may map: its handles, and the events of its objects.

    Not safe for threads.

    Args:
        process: id of this process.
    """

    def __init__(self, driver: DeviceDriver, process: bytes) -> None:
        self._driver, self._process, self._host = driver, process, running_kernel()
        self._handles: dict[int, bytes] = {}
        self._events: dict[str, list[tuple[Any, bytes]]] = {}  # unused ones, by device
        self._recorded: dict[bytes, list[tuple[str, Any, bytes]]] = {}
        self._not_exportable: set[int] = set()
        self._pools: dict[str, ExportPool] = {}
        self._segments: dict[int, DeviceMemory] = {}  # of the pools, by ident
        self._blocks: dict[bytes, list[tuple[str, PoolBlock]]] = {}  # by object

    def describe(self, oid: bytes, tensors: Sequence[Any]) -> DeviceDescriptor:
        """Return what readers have to know of the tensors of an object, as all work with them that is queued now ends.

        Where other processes cannot map their memory, they are copied into a pool that they can map.

        Raises:
            DeviceDriverError: other processes cannot map that either. Nothing is kept of them.
        """
        try:
            return self._describe(oid, tensors)
        except DeviceDriverError:
            self._free_blocks(oid)
            raise

    def _describe(self, oid: bytes, tensors: Sequence[Any]) -> DeviceDescriptor:
        allocations: dict[int, tuple[int, DeviceMemory]] = {}
        parts: list[StorageLocation] = []
        storages, found = locate(tensors)
        for storage, tensor in storages:
            memory, offset = self._exportable(oid, tensor)
            at, _ = allocations.setdefault(memory.ident, (len(allocations), memory))
            parts.append(StorageLocation(at, offset, storage.nbytes()))
        exported = [(memory.ident, memory.device, self._handle(memory)) for _, memory in allocations.values()]
        events = self._record(oid, dict.fromkeys(device for _, device, _ in exported))
        return DeviceDescriptor(self._process, self._host, exported, events, parts, found)

    def order_after(self, oid: bytes) -> bool:
        """Have later work of the calling thread's streams wait for that which fills the tensors of an object.

        Returns:
            False where no event says when that is done.
        """
        recorded = self._recorded.get(oid, ())
        for device, event, _ in recorded:
            self._driver.wait(device, event)
        return bool(recorded)

    def drop(self, oid: bytes) -> None:
        """An object is freed, or cannot be mapped any more: its events and blocks are used for others."""
        for device, event, handle in self._recorded.pop(oid, ()):
            self._events.setdefault(device, []).append((event, handle))
        self._free_blocks(oid)

    def _exportable(self, oid: bytes, tensor: Any) -> tuple[DeviceMemory, int]:
        """The allocation where other processes read the storage of a tensor, and its offset there: its own, or a
        segment of the pool with a copy."""
        storage = tensor.untyped_storage()
        pointer, size = storage.data_ptr(), storage.nbytes()
        own = self._own_memory(pointer)
        if own is not None:
            return own, pointer - own.base
        device = self._driver.device_of(tensor)
        pool = self._pools.setdefault(device, ExportPool())
        block = pool.allocate(size)
        if block is None:
            self._add_segment(device, pool, segment_size(size))
            block = pool.allocate(size)
            assert block is not None
        self._blocks.setdefault(oid, []).append((device, block))
        segment = self._segments[block.segment]
        self._driver.copy(device, segment.base + block.offset, pointer, size)
        return segment, block.offset

    def _own_memory(self, pointer: int) -> DeviceMemory | None:
        """The allocation with a pointer; None where other processes cannot map it: it is not CUDA's own kind, or was
        mapped by this process itself."""
        try:
            memory = self._driver.find(pointer)
            if memory.ident in self._not_exportable:
                return None
        except DeviceDriverError:
            return None
        try:
            self._handle(memory)
        except DeviceDriverError:
            if len(self._not_exportable) >= _HANDLES:
                self._not_exportable.clear()
            self._not_exportable.add(memory.ident)  # not to be tried again for each tensor in it
            return None
        return memory

    def _add_segment(self, device: str, pool: ExportPool, size: int) -> None:
        made = self._driver.allocate(device, size)
        try:
            self._handle(made)
        except DeviceDriverError:
            self._driver.free(made)
            raise
        self._segments[made.ident] = made
        pool.add(made.ident, size, monotonic())

    def _free_blocks(self, oid: bytes) -> None:
        now = monotonic()
        for device, block in self._blocks.pop(oid, ()):
            self._pools[device].free(block, now)
        for pool in self._pools.values():
            for number in pool.expire(now):
                self._handles.pop(number, None)
                with contextlib.suppress(DeviceDriverError):
                    self._driver.free(self._segments.pop(number))

    def _handle(self, memory: DeviceMemory) -> bytes:
        handle = self._handles.pop(memory.ident, None)
        if handle is None:
            handle = self._driver.export(memory)
            if len(self._handles) >= _HANDLES:
                del self._handles[next(iter(self._handles))]
        self._handles[memory.ident] = handle  # the last one that was used
        return handle

    def _record(self, oid: bytes, devices: Sequence[str] | dict[str, None]) -> list[tuple[str, bytes]]:
        recorded = self._recorded[oid] = []
        try:
            for device in devices:
                unused = self._events.get(device)
                event, handle = unused.pop() if unused else self._driver.new_event(device)
                recorded.append((device, event, handle))
                self._driver.record(device, event)
        except DeviceDriverError:
            self.drop(oid)
            raise
        return [(device, handle) for device, _, handle in recorded]


class _MappingRef:
    """One storage's use of a mapping. The storage keeps it alive."""

    __slots__ = ("_allocation", "_held", "_mapped")

    def __init__(self, mapped: DeviceMemoryReader, allocation: DeviceAllocation, held: object) -> None:
        self._mapped, self._allocation, self._held = mapped, allocation, held

    def __del__(self, finalizing: Any = sys.is_finalizing) -> None:
        if not finalizing():
            self._mapped.released(self._allocation, self._held)


class _Released(NamedTuple):
    allocation: DeviceAllocation
    event: Any
    held: object


class DeviceMemoryReader:
    """Device memory of other processes that this process has mapped, and the thread that closes it.

    Args:
        process: id of this process.
    """

    def __init__(self, driver: DeviceDriver, process: bytes) -> None:
        self.place = Place(process, running_kernel(), driver.devices().keys())
        self._driver = driver
        self._mappings = DeviceMappings()
        self._lock = threading.RLock()  # a destructor that runs meanwhile may read, too
        self._events: dict[str, deque[Any]] = {device: deque() for device in driver.devices()}
        # Its `put` may be called by a destructor, wherever that runs.
        self._queue: queue.SimpleQueue[_Released | None] = queue.SimpleQueue()
        self._draining: deque[_Released] = deque()
        self._thread: threading.Thread | None = None

    def read(self, source: DeviceDescriptor, held: object) -> list[Any]:
        """Return tensors in the memory that `source` names. Later work of the current stream waits for that which fills
        them.

        Args:
            held: kept until no work of this process uses the tensors any more.

        Raises:
            DeviceDriverError: their memory cannot be mapped. Nothing is kept.
        """
        storages: list[Any] = []
        with self._lock:
            self._start()
            for device, handle in source.events:
                event = self._driver.open_event(device, handle)
                try:
                    self._driver.wait(device, event)
                finally:
                    self._driver.close_event(device, event)
            for one in source.storages:
                ident, device, handle = source.allocations[one.allocation]
                allocation = DeviceAllocation(source.process, ident, device)
                base = self._map(allocation, handle)
                use = _MappingRef(self, allocation, held)
                storages.append(self._driver.storage(device, base + one.offset, one.size, use))
        return [tensor_at(storages[each.storage], each) for each in source.tensors]

    def _map(self, allocation: DeviceAllocation, handle: bytes) -> int:
        """The base of an allocation here, used once more (lock held)."""
        base = self._mappings.use(allocation)
        if base is None:
            self._mappings.opened(allocation, self._driver.map(allocation.device, handle), monotonic())
            base = self._mappings.use(allocation)
            assert base is not None
        return base

    def released(self, allocation: DeviceAllocation, held: object) -> None:
        """A storage was dropped. Called by destructors, in any thread: waits for nothing."""
        event, device = None, allocation.device
        try:
            unused = self._events[device]
            try:
                event = unused.pop()
            except IndexError:
                event, _ = self._driver.new_event(device)
            self._driver.record(device, event)
        except DeviceDriverError:
            event = None  # a device in this state runs nothing any more
        self._queue.put(_Released(allocation, event, held))

    def close(self) -> None:
        """End the thread; close what has no tensors."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hpcray-device-memory", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            pause = _DRAIN_INTERVAL if self._draining else _EXPIRE_INTERVAL if len(self._mappings) else None
            with contextlib.suppress(queue.Empty):
                item = self._queue.get(timeout=pause)
                if item is None:
                    break
                self._draining.append(item)
                del item  # or its ref stays until the next one comes
            self.step(monotonic())
        self._close_mappings(self._mappings.clear())

    def step(self, now: float) -> None:
        """Let go of dropped tensors whose work is done; close what has been idle for long. For the thread, and tests
        without it."""
        self._take_queued()
        for _ in range(len(self._draining)):
            self._settle(self._draining.popleft(), now)
        with self._lock:
            self._close_mappings(self._mappings.expire(now))

    def _take_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (item := self._queue.get_nowait()) is not None:
                self._draining.append(item)
            self._queue.put(None)

    def _settle(self, one: _Released, now: float) -> None:
        device = one.allocation.device
        if one.event is not None:
            if not self._driver.is_done(device, one.event):
                self._draining.append(one)
                return
            self._events[device].append(one.event)
        with self._lock:
            self._mappings.unuse(one.allocation, now)

    def _close_mappings(self, closed: Sequence[tuple[DeviceAllocation, int]]) -> None:
        for allocation, base in closed:
            with contextlib.suppress(DeviceDriverError):  # the process that had it may be gone
                self._driver.unmap(allocation.device, base)
