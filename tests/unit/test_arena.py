"""The shared memory of a node: creation, writing, pinned views, the end."""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hpcray.common.config import Config
from hpcray.common.memory import parallel_copy
from hpcray.platform import arena as arena_module
from hpcray.platform.arena import Arena, ArenaError, available_memory, default_arena_size

SIZE = 64 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    before = open_descriptors()
    made = Arena.create(SIZE)
    yield made
    made.close()
    gc.collect()
    assert open_descriptors() <= before, "a descriptor is left"


def open_descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink('/proc/self/fd/' + name)}")
        except OSError:
            continue  # the one that listed the directory
    return {entry for entry in found if "hpcray-arena" in entry}


# ---------------------------------------------------------------- making and sharing


def test_what_one_process_writes_another_reads(arena: Arena) -> None:
    arena.write(100, b"hello")
    pid = os.fork()
    if pid == 0:
        ok = bytes(arena.view(100, 5)) == b"hello"
        arena.view(200, 3)[:] = b"yes"
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert bytes(arena.view(200, 3)) == b"yes"


def test_a_process_that_attaches_sees_the_same_bytes_at_an_address_of_its_own(arena: Arena) -> None:
    other = Arena.attach(os.dup(arena.fd), SIZE)
    try:
        arena.write(SIZE - 4, b"tail")
        assert bytes(other.view(SIZE - 4, 4)) == b"tail"
        assert other.address != arena.address and other.address % mmap.PAGESIZE == 0
    finally:
        other.close()


def test_a_new_arena_uses_no_memory(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_blocks == 0


def test_the_descriptor_is_not_inherited_by_other_programs(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fd)


def test_an_arena_larger_than_memory_is_refused_with_numbers() -> None:
    with pytest.raises(ArenaError, match=r"an object store of \d+ bytes does not fit: this machine has \d+ .*hint: "):
        Arena.create(1 << 50)


def test_an_arena_too_small_is_refused() -> None:
    with pytest.raises(ArenaError, match="too small"):
        Arena.create(4096)


def test_a_refusal_by_the_system_is_a_clear_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()

    def refuse(*_: object) -> None:
        raise OSError(27, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ArenaError, match=r"File too large.*hint: check `ulimit -f`"):
        Arena.create(SIZE)
    monkeypatch.undo()
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ArenaError, match=r"mapping .* failed.*hint: check `ulimit -v`"):
        Arena.create(SIZE)
    assert open_descriptors() <= before


def test_attaching_to_less_than_was_announced_is_refused(arena: Arena) -> None:
    with pytest.raises(ArenaError, match=f"has {SIZE} bytes, {2 * SIZE} were announced"):
        Arena.attach(arena.fd, 2 * SIZE)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("size", [0, 1, 63, 4096, (1 << 20) - 1, 1 << 20, (5 << 20) + 17])
def test_writes_of_every_size_arrive_and_touch_nothing_else(arena: Arena, size: int) -> None:
    data = np.random.default_rng(size).integers(0, 255, size, dtype=np.uint8)
    start = (1 << 20) + 8
    arena.write(start, data)
    assert bytes(arena.view(start, size)) == data.tobytes()
    assert bytes(arena.view(start - 8, 8)) == bytes(8)
    assert bytes(arena.view(start + size, 8)) == bytes(8)
    arena.write(start, bytes(size))
    assert not any(arena.view(start, size))


def test_any_contiguous_buffer_can_be_written_whatever_its_items(arena: Arena) -> None:
    sources: list[Any] = [np.ones((3, 4)), bytearray(b"abc"), memoryview(b"abc"), np.zeros((0, 3)), np.float64(2)]
    for source in sources:
        arena.write(0, source)
        assert bytes(arena.view(0, memoryview(source).nbytes)) == memoryview(source).tobytes()
    with pytest.raises(TypeError):
        arena.write(0, np.arange(12.0).reshape(3, 4).T)


def test_writes_work_on_a_kernel_that_cannot_populate(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "madvise", lambda *_: False)
    assert not arena.populate(0, 4096)
    arena.write(0, b"x" * (2 << 20))
    assert bytes(arena.view((2 << 20) - 2, 3)) == b"xx\0"


@pytest.mark.parametrize(("offset", "size"), [(-1, 2), (0, SIZE + 1), (SIZE, 1), (SIZE - 1, 2), (0, -1)])
def test_ranges_outside_the_arena_are_refused(arena: Arena, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="is not in the arena"):
        arena.view(offset, size)
    with pytest.raises(ValueError, match="is not in the arena"):
        arena.pinned_view(offset, size, lambda: None)
    if size >= 0:
        with pytest.raises(ValueError, match="is not in the arena"):
            arena.write(offset, bytes(size))


def test_populating_changes_no_bytes(arena: Arena) -> None:
    arena.write(5000, b"kept")
    assert arena.populate(4999, 3 << 20)
    assert bytes(arena.view(5000, 4)) == b"kept"
    assert os.fstat(arena.fd).st_blocks * 512 >= 3 << 20
    assert arena.populate(SIZE - 10, 1 << 20), "cut at the end of the arena"


# ---------------------------------------------------------------- pinned views


class Pin:
    """Counts how often a pin was reported dead."""

    def __init__(self) -> None:
        self.deaths = 0

    def __call__(self) -> None:
        self.deaths += 1


@pytest.fixture
def pin() -> Pin:
    return Pin()


def test_a_pinned_view_is_read_only_for_ever(arena: Arena, pin: Pin) -> None:
    view = arena.pinned_view(0, 4096, pin)
    with pytest.raises(TypeError):
        view[0] = 1
    array = np.frombuffer(view[64:128], dtype=np.float64)
    assert not array.flags.writeable
    with pytest.raises(ValueError):
        array.flags.writeable = True


def test_the_pin_dies_with_the_view_and_only_once(arena: Arena, pin: Pin) -> None:
    view = arena.pinned_view(0, 4096, pin)
    assert pin.deaths == 0
    del view
    assert pin.deaths == 1
    gc.collect()
    assert pin.deaths == 1


PICKLED: bytes = pickle.dumps(np.zeros(8), protocol=5, buffer_callback=lambda buffer: None)
HOLDERS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda view: view[10:20],
    "slice of a slice": lambda view: view[10:200][5:6],
    "cast": lambda view: view.cast("d"),
    "array": lambda view: np.frombuffer(view, dtype=np.float64),
    "array of a slice": lambda view: np.frombuffer(view[64:128], dtype=np.float64),
    "slice of an array of a slice": lambda view: np.frombuffer(view[64:128], dtype=np.float64)[2:3],
    "view of a transposed array": lambda view: np.frombuffer(view, np.int32).reshape(32, -1).T[1:].view(np.uint32),
    "asarray": lambda view: np.asarray(view)[3:],
    "unpickled": lambda view: pickle.loads(PICKLED, buffers=[view[64:128]]),
    "slice of unpickled": lambda view: pickle.loads(PICKLED, buffers=[view[64:128]])[1:2],
    "pickle buffer": lambda view: pickle.PickleBuffer(view[1:]),
    "in a reference cycle": lambda view: cycle(np.frombuffer(view, np.uint8)),
}


def cycle(value: object) -> object:
    ring: list[object] = [value]
    ring.append(ring)
    return ring


@pytest.mark.parametrize("name", HOLDERS)
def test_every_object_that_holds_the_buffer_holds_the_pin(arena: Arena, pin: Pin, name: str) -> None:
    view = arena.pinned_view(4096, 4096, pin)
    holder = HOLDERS[name](view)
    del view
    gc.collect()
    assert pin.deaths == 0, "the buffer is alive, the pin is gone"
    del holder
    gc.collect()
    assert pin.deaths == 1, "the buffer is dead, the pin is not"


def test_a_copy_does_not_hold_the_pin(arena: Arena, pin: Pin) -> None:
    copy = np.frombuffer(arena.pinned_view(0, 64, pin), np.uint8).copy()
    assert pin.deaths == 1 and copy.nbytes == 64


def test_pins_of_one_block_are_independent(arena: Arena) -> None:
    pins = [Pin() for _ in range(3)]
    views = [arena.pinned_view(0, 64, pin) for pin in pins]
    del views[1]
    assert [pin.deaths for pin in pins] == [0, 1, 0]
    views.clear()
    assert [pin.deaths for pin in pins] == [1, 1, 1]


def test_an_empty_view_can_be_pinned_at_the_very_end(arena: Arena, pin: Pin) -> None:
    view = arena.pinned_view(SIZE, 0, pin)
    assert view.nbytes == 0
    del view
    assert pin.deaths == 1


def test_pins_may_come_and_go_in_many_threads(arena: Arena) -> None:
    pins = [Pin() for _ in range(4)]

    def churn(pin: Pin) -> None:
        for _ in range(500):
            np.frombuffer(arena.pinned_view(0, 4096, pin)[8:], np.uint8)

    threads = [threading.Thread(target=churn, args=(pin,)) for pin in pins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [pin.deaths for pin in pins] == [500] * 4


# ---------------------------------------------------------------- the end


def test_views_outlive_the_arena_that_made_them(pin: Pin) -> None:
    arena = Arena.create(SIZE)
    arena.write(0, b"still here")
    view = arena.pinned_view(0, 10, pin)
    arena.close()
    del arena
    gc.collect()
    assert bytes(view) == b"still here" and pin.deaths == 0
    del view
    assert pin.deaths == 1
    assert open_descriptors() == set()


def test_a_closed_arena_refuses_use_and_may_be_closed_again() -> None:
    arena = Arena.create(SIZE)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="which is closed"):
        arena.view(0, 1)
    with pytest.raises(ValueError, match="which is closed"):
        arena.write(0, b"x")


@pytest.mark.parametrize("end", ["", "arena.close()", "sys.exit(0)", "os.kill(os.getpid(), 15)"])
def test_a_process_with_pinned_views_ends_without_messages(end: str) -> None:
    script = f"""
        import os, sys
        import numpy as np
        from hpcray.platform.arena import Arena
        arena = Arena.create(16 << 20)
        def died(): raise SystemError("called while the interpreter shuts down")
        held = np.frombuffer(arena.pinned_view(0, 4096, died)[8:], np.uint8)
        ring = [arena, held]; ring.append(ring)
        writable = arena.view(0, 10)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert done.returncode == (-15 if "kill" in end else 0)


# ---------------------------------------------------------------- sizes


def test_the_default_arena_size_is_a_share_of_available_memory_divided_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arena_module, "usable_memory", lambda: 10 << 30)
    monkeypatch.setattr(arena_module, "_available_now", lambda: 20 << 30)
    assert default_arena_size(Config()) == 3 << 30
    assert default_arena_size(Config(), ranks_on_host=4) == 768 << 20
    monkeypatch.setattr(arena_module, "_available_now", lambda: 5 << 30)
    assert default_arena_size(Config()) == 1536 << 20
    assert default_arena_size(Config(object_store_memory=123 << 20), ranks_on_host=4) == 123 << 20
    monkeypatch.setattr(arena_module, "_available_now", lambda: 0)
    assert default_arena_size(Config()) == 1 << 20


def test_available_memory_of_this_machine_is_positive_and_plausible() -> None:
    assert 1 << 26 < available_memory() < 1 << 50


# ---------------------------------------------------------------- huge pages


def free_huge_pages() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:")), 0)


@pytest.mark.parametrize("huge", ["off", "reserved"])
def test_an_arena_works_with_every_mode_of_huge_pages(huge: str) -> None:
    arena = Arena.create(8 << 20, 1 << 20, huge)
    other = Arena.attach(os.dup(arena.fd), arena.size, huge)
    try:
        data = os.urandom(3 << 20)
        arena.write(4096, data)
        assert bytes(other.view(4096, len(data))) == data
        assert arena.populate(arena.size - 4096, 4096)
        assert arena.reserved == (huge == "reserved" and free_huge_pages() > 0)
    finally:
        other.close()
        arena.close()


def test_an_unknown_mode_of_huge_pages_is_refused() -> None:
    with pytest.raises(ArenaError, match=r"huge_pages='yes' is not one of auto, off, reserved; hint:"):
        Arena.create(8 << 20, 0, "yes")


# ---------------------------------------------------------------- copies by several threads


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000])
def test_each_byte_is_copied_once_by_any_number_of_threads(threads: int, size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target, parts = np.zeros(size, dtype=np.uint8), []

    def copy(part: Any, of: Any) -> None:
        parts.append(len(part))
        part[:] = of

    parallel_copy(copy, target, source, threads)
    assert np.array_equal(target, source)
    assert sum(parts) == size and len(parts) <= threads


def test_an_interrupted_parallel_copy_returns_when_all_threads_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, done = threading.Event(), []
    join = threading.Thread.join

    def interrupt_once(thread: threading.Thread) -> None:
        monkeypatch.setattr(threading.Thread, "join", join)
        gate.set()
        raise KeyboardInterrupt

    def copy(target: Any, source: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gate.wait(60)
        done.append(len(target))

    monkeypatch.setattr(threading.Thread, "join", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        parallel_copy(copy, bytearray(3 * 4096), bytes(3 * 4096), 3)
    assert done == [4096] * 3, "nobody writes any more"


def test_a_large_buffer_is_written_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.create(8 << 20)
    monkeypatch.setattr(arena_module, "PARALLEL_COPY_SIZE", 1 << 20)
    arena.copiers = 3
    data = os.urandom((5 << 20) + 77)
    arena.write(64, data)
    assert bytes(arena.view(64, len(data))) == data
    arena.close()
