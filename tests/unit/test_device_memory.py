"""Tensors in device memory of another process, on a made-up driver that notes every misuse: two processes in one."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.tensors import device_memory
from hpcray.tensors.device_driver import CudaDriver, DeviceDriverError
from hpcray.tensors.device_mappings import IDLE_TIME, POOL_IDLE_TIME
from hpcray.tensors.device_memory import (
    DeviceMemoryOwner,
    DeviceMemoryReader,
    find_driver,
    is_only_here,
    is_out_of_memory,
    source_driver,
    use_driver,
)

torch = pytest.importorskip("torch")
from helpers.fake_device_driver import SEGMENT, FakeDeviceDriver  # noqa: E402 (it imports PyTorch)


class Tensors(list[Any]):
    """Those of an object: what refs to it keep alive."""


class Pair:
    """A process that has tensors on a device, and one that reads them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.maker, self.reader = FakeDeviceDriver(directory, "maker"), FakeDeviceDriver(directory, "reader")
        self.exports = DeviceMemoryOwner(self.maker, b"maker")
        self.mapped = DeviceMemoryReader(self.reader, b"reader")
        self.mapped._start = lambda: None  # type: ignore[method-assign]
        self.now = 0.0
        self.objects: dict[bytes, list[Any]] = {}

    def make(self, oid: bytes, tensors: list[Any]) -> Any:
        """What a reader gets to know of an object with these tensors."""
        self.objects[oid] = kept = Tensors(tensors)
        weakref.finalize(kept, self.exports.drop, oid)
        return pickle.loads(pickle.dumps(self.exports.describe(oid, tensors)))

    def read(self, source: Any, oid: bytes = b"") -> list[Any]:
        return self.mapped.read(source, self.objects.get(oid))

    def free(self, oid: bytes) -> None:
        """No ref is left but those that readers hold. When these are gone, the object is freed."""
        del self.objects[oid]

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.mapped.step(self.now)

    def misuse(self) -> str:
        found = self.directory / "misuse"
        return found.read_text() if found.exists() else ""


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    made = Pair(tmp_path)
    monkeypatch.setattr(device_memory, "monotonic", lambda: made.now)
    yield made
    assert not made.misuse()


def test_a_reader_sees_the_memory_itself_and_maps_it_once(pair: Pair) -> None:
    first, second = pair.maker.tensor(1000, 1.0), pair.maker.tensor(10, 2.0)
    values = [
        pair.read(pair.make(bytes([number]), tensors), bytes([number]))
        for number, tensors in enumerate([[first, second], [second], [first[5:10], first]])
    ]
    assert pair.reader.opened == [str(pair.reader.opened[0])], "one allocation, mapped once"
    first.fill_(7.0)
    assert float(values[0][0].sum()) == 7000.0 and float(values[2][0].sum()) == 35.0
    values[1][0][3] = 9.0
    assert float(second[3]) == 9.0 == float(values[0][1][3])
    part, whole = values[2]
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr(), "they share it again"
    del values, part, whole
    pair.step()
    assert pair.reader.mapped
    pair.step(IDLE_TIME)
    assert not pair.reader.leaks()


def test_shapes_strides_parameters_and_dtypes_arrive(pair: Pair) -> None:
    base = pair.maker.tensor(64)
    base.copy_(torch.arange(64.0))
    tensors = [
        base.view(8, 8).t()[1:3], base.view(torch.int32), torch.nn.Parameter(base[:4]), base[3], base[7:7],
        torch.nn.Parameter(base[:4], requires_grad=False), base[8:12].requires_grad_(),
    ]  # fmt: skip
    got = pair.read(pair.make(b"1", tensors), b"1")
    for sent, read in zip(tensors, got, strict=True):
        assert type(sent) is type(read) and sent.dtype == read.dtype and sent.requires_grad == read.requires_grad
        assert sent.shape == read.shape and sent.stride() == read.stride() and torch.equal(sent, read)


def test_memory_is_not_used_again_before_the_work_of_its_reader_is_done(pair: Pair) -> None:
    tensor = pair.maker.tensor(100, 1.0)
    got = pair.read(pair.make(b"1", [tensor]), b"1")
    del tensor
    pair.free(b"1")
    pair.reader.queue_work()
    del got
    gc.collect()
    pair.step()
    other = pair.maker.tensor(100)  # would be in the same block, and the made-up driver would note it
    assert pair.maker.blocks_in_use == 1024
    pair.reader.finish_work()
    pair.step()
    assert pair.maker.blocks_in_use == 512
    again = pair.maker.tensor(100)
    assert again.data_ptr() != other.data_ptr()


def test_the_made_up_driver_notes_memory_that_is_used_again_too_early(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    got = pair.mapped.read(pair.make(b"1", [pair.maker.tensor(100)]), "not what has the tensors")
    pair.free(b"1")
    pair.maker.tensor(100)
    assert "used again" in pair.misuse() and got


def test_events_are_used_again_when_their_object_is_freed(pair: Pair) -> None:
    tensor = pair.maker.tensor(10)
    for number in range(20):
        source = pair.make(b"%d" % number, [tensor])
        pair.read(source, b"%d" % number)
        pair.free(b"%d" % number)
        pair.step()
    assert len(list(pair.directory.glob("event-maker-*"))) == 1
    assert len(list(pair.directory.glob("event-reader-*"))) == 1


def test_work_of_the_thread_that_copies_tensors_follows_that_which_fills_them(pair: Pair) -> None:
    pair.make(b"1", [pair.maker.tensor(10)])
    assert not pair.exports.order_after(b"2") and not pair.maker.waited
    assert pair.exports.order_after(b"1")
    assert len(pair.maker.waited) == 1 and pair.maker.waited[0].startswith("event-maker")
    pair.read(pair.make(b"2", [pair.maker.tensor(10)]), b"2")
    assert len(pair.reader.waited) == 1 and pair.reader.waited != pair.maker.waited


def test_memory_that_cannot_be_exported_or_mapped_is_refused_and_nothing_is_kept(pair: Pair) -> None:
    tensor = pair.maker.tensor(10)
    pair.maker.exports = pair.maker.allocates = False
    with pytest.raises(DeviceDriverError, match="no memory"):
        pair.exports.describe(b"1", [tensor])
    pair.maker.exports = pair.maker.allocates = True
    pair.exports._not_exportable.clear()
    source = pair.make(b"2", [tensor, torch.from_numpy(pair.maker.tensor(SEGMENT).numpy())])
    assert len(source.allocations) == 2
    Path(source.allocations[1][2].decode()).unlink()
    with pytest.raises(DeviceDriverError, match="No such file"):
        pair.read(source, b"2")
    gc.collect()
    pair.step()
    pair.step(IDLE_TIME)
    assert not pair.reader.leaks()


def test_what_was_read_in_place_is_passed_on_as_a_copy_in_the_pool_of_its_reader(pair: Pair) -> None:
    got = pair.read(pair.make(b"1", [pair.maker.tensor(10, 4.0)]), b"1")
    known = DeviceMemoryOwner(pair.reader, b"reader").describe(b"2", got)
    assert pair.reader.pool_segments == 1 and pair.reader.copied == [512]
    third = DeviceMemoryReader(FakeDeviceDriver(pair.directory, "third"), b"third")
    third._start = lambda: None  # type: ignore[method-assign]
    read = third.read(known, None)
    assert float(read[0].sum()) == 40.0
    got[0].fill_(1.0)
    assert float(read[0].sum()) == 40.0


def test_tensors_in_memory_that_cannot_be_exported_are_copied_into_a_pool_that_is_mapped_once(pair: Pair) -> None:
    pair.maker.exports = False
    first, second = pair.maker.tensor(1000, 1.0), pair.maker.tensor(10, 2.0)
    values = [
        pair.read(pair.make(bytes([number]), tensors), bytes([number]))
        for number, tensors in enumerate([[first, second, first[:5]], [second]])
    ]
    assert len(pair.reader.opened) == 1 and pair.maker.pool_segments == 1
    assert pair.maker.copied == [4096, 512, 512], "one copy of each storage of an object"
    first.fill_(7.0)
    assert float(values[0][0].sum()) == 1000.0 and float(values[1][0].sum()) == 20.0, "a copy, as it was then"
    assert values[0][0].data_ptr() == values[0][2].data_ptr()
    del values
    pair.step()
    for oid in (b"\0", b"\1"):
        pair.free(oid)
    pair.read(pair.make(b"2", [first]), b"2")
    assert pair.maker.pool_segments == 1 and len(pair.reader.opened) == 1, "its memory is used again"
    pair.step(IDLE_TIME)
    pair.step(IDLE_TIME)
    pair.free(b"2")
    pair.now += POOL_IDLE_TIME
    pair.exports.drop(b"2")
    assert pair.maker.pool_segments == 0, "unused for long"


def test_a_block_of_the_pool_is_not_used_again_before_the_work_of_its_reader_is_done(pair: Pair) -> None:
    pair.maker.exports = False
    got = pair.read(pair.make(b"1", [pair.maker.tensor(100, 1.0)]), b"1")
    pair.reader.queue_work()
    again = pair.make(b"2", [pair.maker.tensor(100, 2.0)])
    assert float(got[0][0]) == 1.0 and float(pair.read(again, b"2")[0][0]) == 2.0
    del got
    pair.reader.finish_work()
    pair.step()
    pair.free(b"1")
    assert float(pair.read(pair.make(b"3", [pair.maker.tensor(100, 3.0)]), b"3")[0][0]) == 3.0


def test_a_pool_that_cannot_be_exported_either_leaves_no_memory(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise DeviceDriverError("no IPC here")

    monkeypatch.setattr(pair.maker, "export", refuse)
    with pytest.raises(DeviceDriverError, match="no IPC"):
        pair.exports.describe(b"1", [pair.maker.tensor(10)])
    assert pair.maker.pool_segments == 0 and not pair.exports._blocks


def test_an_event_that_cannot_be_recorded_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*args: Any) -> None:
        raise DeviceDriverError("no")

    monkeypatch.setattr(pair.maker, "record", record)
    with pytest.raises(DeviceDriverError):
        pair.exports.describe(b"1", [pair.maker.tensor(10)])
    monkeypatch.undo()
    pair.make(b"1", [pair.maker.tensor(10)])
    assert len(list(pair.directory.glob("event-maker-*"))) == 1


def test_the_thread_closes_what_is_idle_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "_EXPIRE_INTERVAL", 0.01)
    monkeypatch.setattr("hpcray.tensors.device_mappings.IDLE_TIME", 0.02)
    pair = Pair(tmp_path)
    del pair.mapped._start
    got = pair.read(pair.make(b"1", [pair.maker.tensor(10, 3.0)]), b"1")
    thread = pair.mapped._thread
    assert thread is not None and float(got[0].sum()) == 30.0
    pair.reader.queue_work()
    del got
    for _ in range(500):
        if pair.reader.queued > pair.reader.done:
            pair.reader.finish_work()
        if not pair.reader.mapped:
            break
        thread.join(0.01)
    assert not pair.reader.leaks()
    pair.mapped.close()
    assert not thread.is_alive() and not pair.misuse()


def test_only_plain_tensors_that_are_all_on_a_device_are_read_in_place(tmp_path: Path) -> None:
    driver = FakeDeviceDriver(tmp_path)
    use_driver(driver)
    try:
        plain = driver.tensor(10)
        assert source_driver([plain, torch.nn.Parameter(plain)]) is driver
        marked = plain.view(10)
        marked.note = 3
        for other in (torch.zeros(3), plain.to_sparse(), torch.zeros(0), marked, torch.nested.nested_tensor([plain])):
            assert source_driver([plain, other]) is None
    finally:
        use_driver(None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_driver() -> None:
    use_driver(None)
    assert source_driver([torch.zeros(3)]) is None
    assert not device_memory._DriverOfProcess.known, "tensors of the host do not look for one"
    with pytest.raises(DeviceDriverError, match="no CUDA device"):
        CudaDriver()
    assert find_driver() is None
    use_driver(None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["make", "read", "free", "drop", "queue", "finish", "step", "expire"]), st.integers(0, 30)
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(STEPS, st.booleans())
def test_whatever_two_processes_do_the_driver_is_not_misused(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], exports: bool
) -> None:
    pair = Pair(tmp_path_factory.mktemp("devices"))
    pair.maker.exports = exports  # else all goes through the pool
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(device_memory, "monotonic", lambda: pair.now)
    sources: dict[bytes, tuple[Any, list[float]]] = {}
    values: list[tuple[list[Any], list[float]]] = []
    count = 0
    try:
        for step, which in steps:
            alive = sorted(sources)
            if step == "make":
                count += 1
                oid = b"%04d" % count
                tensors = [pair.maker.tensor(100 * (which % 3 + 1), float(count + at)) for at in range(which % 2 + 1)]
                sources[oid] = pair.make(oid, tensors), [float(count + at) for at in range(which % 2 + 1)]
                del tensors
            elif step == "read" and alive:
                oid = alive[which % len(alive)]
                values.append((pair.read(sources[oid][0], oid), sources[oid][1]))
            elif step == "free" and alive:
                oid = alive[which % len(alive)]
                del sources[oid]
                pair.free(oid)
            elif step == "drop" and values:
                del values[which % len(values)]
            elif step == "queue":
                pair.reader.queue_work()
            elif step == "finish":
                pair.reader.finish_work()
            elif step in ("step", "expire"):
                pair.step(IDLE_TIME if step == "expire" else 0.0)
            for tensors, wanted in values:
                assert [float(tensor[0]) for tensor in tensors] == wanted, "the memory was used for something else"
            tensors = []
        values.clear()
        pair.reader.finish_work()
        for oid in list(sources):
            pair.free(oid)
        pair.step()
        pair.step(IDLE_TIME)
        assert not pair.misuse() and not pair.reader.leaks() and pair.maker.blocks_in_use == 0
    finally:
        monkeypatch.undo()


def test_memory_that_the_program_has_as_well_is_seen(tmp_path: Path) -> None:
    driver = FakeDeviceDriver(tmp_path)
    tensors = [driver.tensor(10)]
    assert is_only_here(tensors)
    tensors.append(tensors[0][:3])
    assert is_only_here([driver.tensor(10), torch.zeros(3), torch.zeros(2, 3).t()])
    view = tensors[0].view(2, 5)
    assert not is_only_here(tensors)
    del view, tensors[1]
    assert is_only_here(tensors)
    held = tensors[0]
    assert not is_only_here(tensors)
    del held
    storage = tensors[0].untyped_storage()
    assert not is_only_here(tensors)
    del storage
    tensors[0].requires_grad_()
    (tensors[0] * 2).sum().backward()
    assert not is_only_here(tensors), "its gradient would be lost"
    base = torch.zeros(10)
    assert not is_only_here([base[:3]])
    assert not is_only_here([driver.tensor(3), torch.zeros(3).to_sparse()])
    assert len(base) == 10


def test_a_device_without_memory_is_known_by_its_error() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(error) and not is_out_of_memory(ValueError()) and not is_out_of_memory(None)
    outer = RuntimeError("unreadable")
    outer.__cause__ = error
    assert is_out_of_memory(outer)
