"""What reaches CUDA's driver by ctypes: a library in C in its place, with cuda.h's prototypes, notes the calls."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.c_library import compile_library

from hpcray.tensors import device_driver
from hpcray.tensors.device_driver import CudaDriver, DeviceDriverError

torch = pytest.importorskip("torch")

# As in cuda.h of CUDA 12 and 13: CUdeviceptr is an unsigned long long, handles are structs of 64 bytes by value.
SOURCE = r"""
#include <stddef.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned long long ptr;
typedef struct { char reserved[64]; } handle;
typedef struct { char bytes[16]; } uuid;
static int depth;
static int note(const char *format, ...) {
    FILE *file = fopen(getenv("FAKE_CUDA_CALLS"), "a");
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fprintf(file, "\n");
    fclose(file);
    return depth ? 0 : 201;
}
static int filled(const handle *one, int first) {
    for (int i = 0; i < 64; i++) if (one->reserved[i] != (char)(first + i)) return 0;
    return 1;
}
static void fill(handle *one, int first) { for (int i = 0; i < 64; i++) one->reserved[i] = (char)(first + i); }
int cuInit(unsigned int flags) { return flags; }
int cuGetErrorName(int code, const char **text) {
    *text = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_OTHER";
    return 0;
}
int cuDeviceGet(int *device, int number) { *device = 40 + number; return 0; }
int cuDeviceGetUuid_v2(uuid *out, int device) { memset(out->bytes, device, 16); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(size_t)(0x1000000000 + device);
    depth++; note("retain %d", device); depth--; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active)
{ *flags = 9; *active = device == 41; return 0; }
int cuCtxPushCurrent_v2(void *context) { if ((size_t)context < 0x1000000000) return 1; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { depth--; *context = 0; return 0; }
int cuCtxSynchronize(void) { return note("synchronize"); }
int cuPointerGetAttribute(void *out, int what, ptr at) {
    if (at < 0x7f0000000000) return 1;
    if (what == 7) *(unsigned long long *)out = 0x123456789abcdef0;
    else if (what == 9) *(int *)out = 1;
    else return 1;
    return 0;
}
int cuMemGetAddressRange_v2(ptr *base, size_t *size, ptr at) { *base = at & ~0xfffffULL; *size = 1 << 20;
    return note("range %llx", at); }
int cuIpcGetMemHandle(handle *out, ptr base) { fill(out, 3); return note("export %llx", base); }
int cuIpcOpenMemHandle_v2(ptr *base, handle given, unsigned int flags) { *base = 0x7f00aa000000;
    return note("map %d %u", filled(&given, 3), flags); }
int cuIpcCloseMemHandle(ptr base) { return note("unmap %llx", base); }
int cuMemAlloc_v2(ptr *base, size_t size) { *base = 0x7f00bb000000; return note("allocate %zu", size); }
int cuMemFree_v2(ptr base) { return note("free %llx", base); }
int cuMemcpyDtoDAsync_v2(ptr to, ptr from, size_t size, void *stream)
{ return note("copy %llx %llx %zu %p", to, from, size, stream); }
int cuMemcpyDtoHAsync_v2(void *to, ptr from, size_t size, void *stream)
{ return note("down %p %llx %zu %p", to, from, size, stream); }
int cuMemcpyHtoDAsync_v2(ptr to, const void *from, size_t size, void *stream)
{ return note("up %llx %p %zu %p", to, from, size, stream); }
int cuEventSynchronize(void *event) { return note("await %p", event); }
int cuMemHostRegister_v2(void *at, size_t size, unsigned int flags)
{ return note("register %p %zu %u", at, size, flags); }
int cuMemHostUnregister(void *at) { return note("unregister %p", at); }
int cuEventCreate(void **event, unsigned int flags) { *event = (void *)0x7fee00000010; return note("event %u", flags); }
int cuEventDestroy_v2(void *event) { return note("destroy %p", event); }
int cuIpcGetEventHandle(handle *out, void *event) { fill(out, 5); return note("export event %p", event); }
int cuIpcOpenEventHandle(void **event, handle given) { *event = (void *)0x7fee00000020;
    return note("open event %d", filled(&given, 5)); }
int cuEventRecord(void *event, void *stream) { return note("record %p %p", event, stream); }
int cuStreamWaitEvent(void *stream, void *event, unsigned int flags)
{ return note("wait %p %p %u", stream, event, flags); }
int cuEventQuery(void *event) { return note("query %p", event) ? 1 : event == (void *)0x7fee00000010 ? 600 : 0; }
"""
FIRST, SECOND = "28" * 16, "29" * 16
"""UUIDs of the made-up devices 40 and 41."""
POINTER = 0x7F00CC012345
STREAM = 0x7FDD00000001


class _Stream:
    """The current stream, or one that is made."""

    def __init__(self, number: int = -1) -> None:
        self.cuda_stream = STREAM if number < 0 else STREAM + 0x100 * (number + 1)
        self.follows: list[int] = []

    def wait_stream(self, other: _Stream) -> None:
        self.follows.append(other.cuda_stream)


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDriver]:
    made = compile_library(tmp_path, "libcuda.so.1", SOURCE)
    monkeypatch.setenv("FAKE_CUDA_CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(device_driver.ctypes, "CDLL", lambda name, load=ctypes.CDLL: load(str(made)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    current = [_Stream()]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda number: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)

    @contextlib.contextmanager
    def stream(own: _Stream) -> Iterator[None]:
        assert own.follows == [STREAM]
        current.append(own)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", stream)
    yield CudaDriver()


def calls(directory: Path) -> list[str]:
    """What was called since the last time."""
    found = (directory / "calls").read_text().splitlines()
    (directory / "calls").write_text("")
    return found


def test_devices_have_their_uuids_and_no_context_before_one_is_needed(driver: CudaDriver, tmp_path: Path) -> None:
    assert driver.devices() == {FIRST: 0, SECOND: 1}
    assert not (tmp_path / "calls").exists()
    driver.register_host(0x7F0011112000, 1 << 33)
    assert calls(tmp_path) == ["retain 41", f"register 0x7f0011112000 {1 << 33} 1"]
    driver.unregister_host(0x7F0011112000)
    assert calls(tmp_path) == ["unregister 0x7f0011112000"]


def test_only_devices_with_a_context_are_waited_for(driver: CudaDriver, tmp_path: Path) -> None:
    driver.synchronize()
    assert calls(tmp_path) == ["retain 41", "synchronize"]


def test_allocations_are_found_exported_and_mapped(driver: CudaDriver, tmp_path: Path) -> None:
    found = driver.find(POINTER)
    assert found == (0x7F00CC000000, 0x123456789ABCDEF0, SECOND)
    handle = driver.export(found)
    assert handle == bytes(range(3, 67))
    base = driver.map(FIRST, handle)
    assert base == 0x7F00AA000000
    driver.unmap(FIRST, base)
    assert calls(tmp_path) == [
        "retain 41", f"range {POINTER:x}", "export 7f00cc000000", "retain 40", "map 1 1", "unmap 7f00aa000000",
    ]  # fmt: skip
    with pytest.raises(DeviceDriverError, match="cuPointerGetAttribute: CUDA_ERROR_OTHER"):
        driver.find(0x1000)


def test_memory_of_the_pool_is_allocated_copied_to_in_the_stream_and_freed(driver: CudaDriver, tmp_path: Path) -> None:
    made = driver.allocate(SECOND, 1 << 33)
    assert made.base == 0x7F00BB000000 and made.device == SECOND
    driver.copy(SECOND, made.base + 512, POINTER, 1 << 32)
    driver.free(made)
    assert calls(tmp_path) == [
        "retain 41", f"allocate {1 << 33}", "range 7f00bb000000",
        f"copy 7f00bb000200 {POINTER:x} {1 << 32} {STREAM:#x}", "free 7f00bb000000",
    ]  # fmt: skip


def test_events_are_of_the_current_stream_and_travel(driver: CudaDriver, tmp_path: Path) -> None:
    event, handle = driver.new_event(FIRST)
    driver.record(FIRST, event)
    assert not driver.is_done(FIRST, event)
    other = driver.open_event(FIRST, handle)
    driver.wait(FIRST, other)
    assert driver.is_done(FIRST, other)
    driver.close_event(FIRST, other)
    assert calls(tmp_path) == [
        "retain 40", "event 6", "export event 0x7fee00000010", f"record 0x7fee00000010 {STREAM:#x}",
        "query 0x7fee00000010", "open event 1", f"wait {STREAM:#x} 0x7fee00000020 0", "query 0x7fee00000020",
        "destroy 0x7fee00000020",
    ]  # fmt: skip


def test_copies_from_and_to_the_host_are_of_a_stream_of_their_own(driver: CudaDriver, tmp_path: Path) -> None:
    with driver.transfer_stream(SECOND):
        event = driver.new_local_event(SECOND)
        driver.copy_to_host(SECOND, 0x7F0011112040, POINTER, 1 << 33)
        driver.copy_to_device(SECOND, POINTER, 0x7F0011112080, 1 << 32)
        driver.record(SECOND, event)
        driver.await_event(SECOND, event)
    driver.copy(SECOND, POINTER, POINTER, 5)
    own = f"{STREAM + 0x200:#x}"
    assert calls(tmp_path) == [
        "retain 41", "event 3", f"down 0x7f0011112040 {POINTER:x} {1 << 33} {own}",
        f"up {POINTER:x} 0x7f0011112080 {1 << 32} {own}", f"record 0x7fee00000010 {own}", "await 0x7fee00000010",
        f"copy {POINTER:x} {POINTER:x} 5 {STREAM:#x}",
    ]  # fmt: skip
    assert driver.current_device() == SECOND


def test_a_stream_that_cannot_be_made_is_an_error_of_the_driver(
    driver: CudaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(number: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    with pytest.raises(DeviceDriverError, match="out of memory"), driver.transfer_stream(FIRST):
        pass


def test_tensors_name_their_device(driver: CudaDriver) -> None:
    class Tensor:
        class device:
            index = 1
            type = "cuda"

    made: Any = Tensor()
    assert driver.device_of(made) == SECOND and driver.is_on_device(made)
    made.device.index = 7
    with pytest.raises(DeviceDriverError, match="device 7, which this process does not see"):
        driver.device_of(made)
