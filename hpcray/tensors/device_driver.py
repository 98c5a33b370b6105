"""Device memory that processes of a host share: what hpcray needs of a driver, and CUDA's.

`CudaDriver` has not run on a GPU yet (docs/explain/device-objects.md). Source: CUDA driver API, "Memory Management"
(cuIpc...), "Event Management", "Unified Addressing" (CU_POINTER_ATTRIBUTE_BUFFER_ID).
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DeviceDriverError(Exception):
    """The driver refuses. Tensors go through the host then."""


class DeviceMemory(NamedTuple):
    """An allocation of this process.

    base: pointer. ident: a number that the process uses for no other. device: its UUID.
    """

    base: int
    ident: int
    device: str


class DeviceDriver(Protocol):
    """The driver of a kind of devices. Devices are named by UUID; events are in the order of PyTorch's current stream.

    All methods but `is_done` raise a DeviceDriverError where the driver refuses.
    """

    def devices(self) -> Mapping[str, int]:
        """Return the devices that this process can use, and their numbers."""

    def is_on_device(self, tensor: Any) -> bool:
        """Return True if the memory of a PyTorch tensor is that of a device of this driver."""

    def device_of(self, tensor: Any) -> str:
        """Return the device with the memory of a tensor."""

    def find(self, pointer: int) -> DeviceMemory:
        """Return the allocation that has this pointer."""

    def export(self, memory: DeviceMemory) -> bytes:
        """Return the handle by which other processes of the host map an allocation."""

    def allocate(self, device: str, size: int) -> DeviceMemory:
        """Allocate memory that can be exported, whatever PyTorch does for its tensors."""

    def free(self, memory: DeviceMemory) -> None:
        """Free what was allocated."""

    def copy(self, device: str, target: int, source: int, size: int) -> None:
        """Copy `size` bytes of a device, as work of the current stream."""

    def map(self, device: str, handle: bytes) -> int:
        """Map an allocation of another process; returns its base here."""

    def unmap(self, device: str, base: int) -> None:
        """Close a mapping."""

    def storage(self, device: str, pointer: int, size: int, owner: object) -> Any:
        """Return `size` bytes from `pointer` on as a PyTorch storage, which keeps `owner` alive."""

    def expose(self, device: str, pointer: int, size: int, owner: object) -> Any:
        """Return what stands for memory of a device in calls of other libraries, and keeps `owner` alive: it has
        `__cuda_array_interface__`, or is a buffer."""

    def activate(self, device: str) -> None:
        """Have this thread use a device from now on, as libraries need that copy its memory."""

    def new_event(self, device: str) -> tuple[Any, bytes]:
        """Return an event, and the handle by which other processes open it."""

    def open_event(self, device: str, handle: bytes) -> Any:
        """Return the event of another process."""

    def close_event(self, device: str, event: Any) -> None:
        """Give an event back."""

    def record(self, device: str, event: Any) -> None:
        """Have the event happen when all work that the current stream has now is done."""

    def wait(self, device: str, event: Any) -> None:
        """Have later work of the current stream wait for the event. Does not wait itself."""

    def is_done(self, device: str, event: Any) -> bool:
        """Return whether a recorded event has happened; True where the driver cannot say, as after an error."""

    def transfer_stream(self, device: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a new stream is the current one of this thread on a device. It begins after the
        work that the current one has; later work of that one does not wait for it."""

    def copy_to_host(self, device: str, address: int, pointer: int, size: int) -> None:
        """Copy `size` bytes of a device to memory of the host, as work of the current stream."""

    def copy_to_device(self, device: str, pointer: int, address: int, size: int) -> None:
        """Copy `size` bytes of the host to memory of a device, as work of the current stream."""

    def new_local_event(self, device: str) -> Any:
        """Return an event for this process alone."""

    def await_event(self, device: str, event: Any) -> None:
        """Wait until a recorded event has happened."""

    def empty(self, device: str, size: int) -> Any:
        """Return a PyTorch storage of new memory, for the current stream."""

    def current_device(self) -> str:
        """Return the device that this thread uses by default."""

    def register_host(self, address: int, size: int) -> None:
        """Register memory of the host, so that devices copy from and to it at full speed. It stays where it is."""

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`. No device may be copying from or to the memory."""

    def synchronize(self) -> None:
        """Wait until all work is done that this process has given to its devices so far."""


def running_kernel() -> str:
    """Return what identifies the running kernel of this host; "" where it does not say."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return ""


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _CudaArray:
    """Memory of a device for `torch.as_tensor`, which keeps this object."""

    def __init__(self, pointer: int, size: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (pointer, False), "shape": (size,), "strides": None, "typestr": "|u1", "version": 3,
        }  # fmt: skip


_LAZY_PEER_ACCESS = 1
_PORTABLE = 1
"""Registered for the contexts of all devices."""
_BLOCKING_SYNC, _NO_TIMING, _INTERPROCESS = 1, 2, 4
_BUFFER_ID = 7
_NOT_READY = 600


class CudaDriver:
    """CUDA's driver, beside PyTorch.

    Raises:
        DeviceDriverError: PyTorch sees no GPU, or the driver's library is not CUDA's.
    """

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available() or torch.version.cuda is None:
            raise DeviceDriverError("PyTorch finds no CUDA device")
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DeviceDriverError(f"{error}") from error
        self._torch = torch
        self._call("cuInit", 0)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._devices: dict[str, int] = {}
        for number in range(torch.cuda.device_count()):
            uuid = _Uuid()
            self._call("cuDeviceGetUuid_v2", ctypes.byref(uuid), self._device(number))
            self._devices[bytes(uuid.bytes).hex()] = number

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DeviceDriverError(f"{name}: {(text.value or b'').decode() or code}")

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        return device

    @contextlib.contextmanager
    def _context(self, device: str) -> Iterator[int]:
        """The context of a device, current in this thread; its number."""
        self._call("cuCtxPushCurrent_v2", self._retained(device))
        try:
            yield self._devices[device]
        finally:
            self._cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _retained(self, device: str) -> ctypes.c_void_p:
        number = self._devices[device]
        context = self._contexts.get(number)
        if context is None:
            # PyTorch's own: the primary context, which this only counts once more. One of a device that the program
            # does not use would take some hundred MB there.
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(number))
            self._contexts[number] = context
        return context

    def _stream(self, number: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._torch.cuda.current_stream(number).cuda_stream)

    def devices(self) -> Mapping[str, int]:
        return self._devices

    def is_on_device(self, tensor: Any) -> bool:
        return bool(tensor.device.type == "cuda")

    def device_of(self, tensor: Any) -> str:
        return self._name(tensor.device.index)

    def _name(self, wanted: int) -> str:
        for name, number in self._devices.items():
            if number == wanted:
                return name
        raise DeviceDriverError(f"the memory is of device {wanted}, which this process does not see")

    def find(self, pointer: int) -> DeviceMemory:
        ident, ordinal = ctypes.c_ulonglong(), ctypes.c_int()
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        at = ctypes.c_uint64(pointer)
        self._call("cuPointerGetAttribute", ctypes.byref(ident), _BUFFER_ID, at)
        self._call("cuPointerGetAttribute", ctypes.byref(ordinal), 9, at)  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        device = self._name(ordinal.value)
        with self._context(device):
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), at)
        return DeviceMemory(base.value, ident.value, device)

    def export(self, memory: DeviceMemory) -> bytes:
        handle = _Handle()
        with self._context(memory.device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(memory.base))
        return ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle))

    def allocate(self, device: str, size: int) -> DeviceMemory:
        base = ctypes.c_uint64()
        with self._context(device):
            self._call("cuMemAlloc_v2", ctypes.byref(base), ctypes.c_size_t(size))
        return self.find(base.value)

    def free(self, memory: DeviceMemory) -> None:
        with self._context(memory.device):
            self._call("cuMemFree_v2", ctypes.c_uint64(memory.base))

    def copy(self, device: str, target: int, source: int, size: int) -> None:
        with self._context(device) as number:
            self._call(
                "cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size),
                self._stream(number),
            )  # fmt: skip

    def map(self, device: str, handle: bytes) -> int:
        base = ctypes.c_uint64()
        with self._context(device):
            given = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return base.value

    def unmap(self, device: str, base: int) -> None:
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(base))

    def storage(self, device: str, pointer: int, size: int, owner: object) -> Any:
        number = self._devices[device]
        array = _CudaArray(pointer, size, owner)
        return self._torch.as_tensor(array, device=f"cuda:{number}").untyped_storage()

    def expose(self, device: str, pointer: int, size: int, owner: object) -> Any:
        return _CudaArray(pointer, size, owner)

    def activate(self, device: str) -> None:
        self._call("cuCtxSetCurrent", self._retained(device))

    def new_event(self, device: str) -> tuple[Any, bytes]:
        event, handle = self._create_event(device, _INTERPROCESS), _Handle()
        with self._context(device):
            self._call("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return event, ctypes.string_at(ctypes.byref(handle), ctypes.sizeof(handle))

    def open_event(self, device: str, handle: bytes) -> Any:
        event = ctypes.c_void_p()
        with self._context(device):
            self._call("cuIpcOpenEventHandle", ctypes.byref(event), _Handle.from_buffer_copy(handle))
        return event

    def close_event(self, device: str, event: Any) -> None:
        with self._context(device):
            self._call("cuEventDestroy_v2", event)

    def record(self, device: str, event: Any) -> None:
        with self._context(device) as number:
            self._call("cuEventRecord", event, self._stream(number))

    def wait(self, device: str, event: Any) -> None:
        with self._context(device) as number:
            self._call("cuStreamWaitEvent", self._stream(number), event, ctypes.c_uint(0))

    def is_done(self, device: str, event: Any) -> bool:
        with contextlib.suppress(DeviceDriverError), self._context(device):
            return bool(self._cuda.cuEventQuery(event) != _NOT_READY)
        return True

    @contextlib.contextmanager
    def transfer_stream(self, device: str) -> Iterator[None]:
        number, cuda = self._devices[device], self._torch.cuda
        try:
            own = cuda.Stream(number)
            own.wait_stream(cuda.current_stream(number))
        except RuntimeError as error:
            raise DeviceDriverError(f"{error}") from error
        with cuda.stream(own):
            yield

    def copy_to_host(self, device: str, address: int, pointer: int, size: int) -> None:
        with self._context(device) as number:
            self._call(
                "cuMemcpyDtoHAsync_v2", ctypes.c_void_p(address), ctypes.c_uint64(pointer), ctypes.c_size_t(size),
                self._stream(number),
            )  # fmt: skip

    def copy_to_device(self, device: str, pointer: int, address: int, size: int) -> None:
        with self._context(device) as number:
            self._call(
                "cuMemcpyHtoDAsync_v2", ctypes.c_uint64(pointer), ctypes.c_void_p(address), ctypes.c_size_t(size),
                self._stream(number),
            )  # fmt: skip

    def new_local_event(self, device: str) -> Any:
        return self._create_event(device, _BLOCKING_SYNC)

    def await_event(self, device: str, event: Any) -> None:
        with self._context(device):
            self._call("cuEventSynchronize", event)

    def empty(self, device: str, size: int) -> Any:
        made = self._torch.empty(size, dtype=self._torch.uint8, device=f"cuda:{self._devices[device]}")
        return made.untyped_storage()

    def current_device(self) -> str:
        return self._name(self._torch.cuda.current_device())

    def register_host(self, address: int, size: int) -> None:
        with self._context(self.current_device()):
            self._call(
                "cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE)
            )

    def unregister_host(self, address: int) -> None:
        with self._context(self.current_device()):
            self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def synchronize(self) -> None:
        for device, number in self._devices.items():
            flags, active = ctypes.c_uint(), ctypes.c_int()
            self._call(
                "cuDevicePrimaryCtxGetState", self._device(number), ctypes.byref(flags), ctypes.byref(active)
            )  # fmt: skip
            if active.value:
                with self._context(device):
                    self._call("cuCtxSynchronize")

    def _create_event(self, device: str, kind: int) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        with self._context(device):
            self._call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(_NO_TIMING | kind))
        return event
