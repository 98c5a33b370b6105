"""hpcray.internal: objects built where they stay, freed by hand; and what `hpcray memory` shows of them."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from engine import PATIENCE, eventually, exceptions, hpcray_only, ray, start

pytestmark = [hpcray_only, pytest.mark.timeout(180)]
STORE = 64 << 20
INIT = {"num_cpus": 2, "object_store_memory": STORE, "spill_threshold": 0.0, "record_ref_creation_sites": True}
N = 1 << 16


def process():
    from hpcray.runtime.core_worker.core_worker import current

    return current.process


def objects() -> list[dict]:
    """What the store holds, once what was dropped is known to be."""
    gc.collect()
    with process().engine.lock:
        process().drain()
        process().engine.flush()
    return process().diagnostics.list_stores(1000, PATIENCE)[0]["list"]


@pytest.fixture(autouse=True)
def nothing_left(session: None) -> Iterator[None]:
    yield
    if ray.is_initialized():
        eventually(lambda: not objects(), "an empty store", 20.0)


# ---------------------------------------------------------------- create


@pytest.mark.parametrize(
    ("shape", "dtype", "order"),
    [
        (N, "u1", "C"),
        ((300, 500), "f4", "F"),
        ([20, 30, 40], [("a", "i4"), ("b", "S5")], "C"),
        ((0, 7), "f8", "C"),
        ((), "i8", "C"),
        (1000, "M8[s]", "C"),
    ],
)
def test_a_buffer_reads_as_it_was_filled(shape, dtype, order):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    content = np.frombuffer(np.random.default_rng(1).bytes(size), "u1") % 100
    with ray.internal.create(shape, dtype, order) as buffer:
        assert buffer.nbytes == size
        buffer.array.reshape(-1, order="A").view("u1")[:] = content
        expected = buffer.array.copy(order="A")
        where = buffer.array.__array_interface__["data"][0]
        ref = buffer.seal()
    got = ray.get(ref)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()
    assert got.flags.f_contiguous == expected.flags.f_contiguous
    assert not got.flags.writeable
    assert got.__array_interface__["data"][0] == where, "it was copied"


def test_seal_makes_the_writers_array_read_only():
    buffer = ray.internal.create(N)
    array = buffer.array
    array[:] = 1
    ref = buffer.seal()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 2
    for use in (buffer.seal, lambda: buffer.array, lambda: buffer.nbytes):
        with pytest.raises(ValueError, match="hint:"):
            use()
    del ref
    for _ in range(40):
        ray.put(np.zeros(STORE // 16, "u1"))
    assert array.sum() == N, "the writer's view did not hold its memory"


def test_an_abandoned_buffer_frees_its_memory():
    def leave_a_block_early():
        with ray.internal.create(N) as buffer:
            buffer.array[:] = 1
            raise OSError("no input")

    with pytest.raises(OSError, match="no input"):
        leave_a_block_early()
    with ray.internal.create(N):
        pass
    ray.internal.create(N)
    ray.internal.create(N).abandon()
    kept = ray.internal.create(N).array[5:]
    eventually(lambda: len(objects()) == 1, "abandoned buffers to go")
    kept[:] = 7  # nobody else may get this memory yet
    others = [ray.put(np.zeros(STORE // 16, "u1")) for _ in range(12)]
    assert kept.sum() == 7 * (N - 5) and not any(ray.get(ref).any() for ref in others)


def test_a_dead_workers_unsealed_buffer_is_freed():
    @ray.remote(max_restarts=0)
    class Writer:
        def begin(self):
            self.buffer = ray.internal.create(N)

    writer = Writer.remote()
    ray.get(writer.begin.remote())
    assert [obj["state"] for obj in objects()] == ["creating"]
    ray.kill(writer)


def test_tasks_and_actors_build_in_place():
    def build(value):
        with ray.internal.create((4, N), "i8") as buffer:
            buffer.array[:] = value
            return buffer.seal()

    @ray.remote
    def task(value):
        return [build(value)]

    @ray.remote
    class Actor:
        def build(self, value):
            return [build(value)]

    @ray.remote
    def total(array):
        return int(array.sum())

    actor = Actor.remote()
    for (ref,), value in ((ray.get(task.remote(2)), 2), (ray.get(actor.build.remote(3)), 3), ((build(5),), 5)):
        assert ray.get(total.remote(ref)) == 4 * N * value
        assert (ray.get(ref) == value).all()


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ((-1,), ValueError),
        (((3, -2),), ValueError),
        (("ten",), TypeError),
        ((1.5,), TypeError),
        ((10, "nonsense"), TypeError),
        ((10, object), TypeError),
        ((10, [("a", object)]), TypeError),
        ((10, "u1", "K"), ValueError),
        (((1 << 40, 1 << 40),), ValueError),
        ((1 << 50,), exceptions.ObjectStoreFullError),
    ],
)
def test_invalid_shapes_and_dtypes_of_buffers_are_refused(args, error):
    with pytest.raises(error):
        ray.internal.create(*args)
    assert not objects()


# ---------------------------------------------------------------- free


def test_a_freed_object_raises_and_its_memory_is_freed():
    refs = [ray.put(np.full(N, value)) for value in range(3)]
    small = ray.put(17)
    ray.internal.free([*refs[:2], small])
    for ref in (*refs[:2], small):
        with pytest.raises(exceptions.ObjectFreedError):
            ray.get(ref)
    eventually(lambda: len(objects()) == 1, "the memory to be free")
    assert ray.get(refs[2])[0] == 2
    ray.internal.free(refs)
    ray.internal.free([])
    eventually(lambda: not objects())
    del refs, ref


def test_a_view_outlives_free():
    ref = ray.put(np.arange(N))
    view = ray.get(ref)
    ray.internal.free(ref)
    for _ in range(40):
        ray.put(np.zeros(STORE // 16, "u1"))
    assert np.array_equal(view, np.arange(N))
    with pytest.raises(exceptions.ObjectFreedError):
        ray.get(ref)


def test_a_borrower_frees_for_the_owner():
    @ray.remote
    def drop(refs):
        ray.internal.free(refs)
        try:
            ray.get(refs)
        except exceptions.ObjectFreedError:
            return True

    ref = ray.put(np.arange(N))
    assert ray.get(drop.remote([ref]))
    eventually(lambda: not objects(), "the memory to be free")
    with pytest.raises(exceptions.ObjectFreedError):
        ray.get(ref)


def test_the_result_of_a_running_task_is_dropped(marks):
    @ray.remote
    def slow():
        eventually(lambda: marks.lines(), "the free")
        return np.ones(N)

    ref = slow.remote()
    ray.internal.free([ref])
    marks.add()
    with pytest.raises(exceptions.ObjectFreedError):
        ray.get(ref)


def test_free_of_the_only_copy_here_loses_it():
    ref = ray.put(np.ones(N))
    ray.internal.free([ref], local_only=True)
    eventually(lambda: not objects(), "the memory to be free")
    with pytest.raises(exceptions.ObjectLostError):
        ray.get(ref)


def test_free_refuses_values_that_are_no_refs():
    ref = ray.put(np.ones(N))
    for wrong in (5, [ref, 5], "x"):
        with pytest.raises(TypeError):
            ray.internal.free(wrong)
    assert ray.get(ref).sum() == N


# ---------------------------------------------------------------- memory


def test_stored_objects_are_listed_with_the_processes_that_pin_them():
    @ray.remote
    class Holder:
        def __init__(self, refs):
            self.refs = refs
            self.view = ray.get(refs[0])

        def ready(self):
            return True

    large, little = ray.put(np.ones(4 * N)), ray.put(np.ones(N))
    holder = Holder.remote([large])
    ray.get(holder.ready.remote())
    first, second = objects()
    assert (first["id"], second["id"]) == (large.hex(), little.hex())
    assert (first["state"], first["copy"], first["refs"], first["borrowers"]) == ("memory", False, 1, 1)
    assert first["size"] > 32 * N > second["size"] > 8 * N
    assert first["owner"].startswith("driver 0.") and first["owner"] == second["owner"]
    assert sorted(name.split()[0] for name in first["pins"]) == ["driver", "worker"]
    assert (
        first["site"].startswith("(put object) ")
        and "test_api_internal.py:" in first["site"]
        and "in test_stored_objects_are_listed" in first["site"]
    )
    ray.kill(holder)


def test_call_sites_of_tasks_are_where_they_were_called():
    @ray.remote
    def make():
        return np.ones(N)

    ref = make.remote()
    ray.wait([ref])
    (found,) = objects()
    assert found["site"].startswith("(task call) ") and "in test_call_sites_of_tasks" in found["site"]
    del ref

    @ray.remote
    class Maker:
        def make(self):
            return 1

    assert Maker.remote().make.remote().call_site().startswith("(actor call) ")


def test_the_memory_command_prints_objects_and_holders():
    from hpcray.state.reports import show_stores, sum_stores

    ref = ray.put(np.ones(N))
    rows = process().diagnostics.list_stores(0, PATIENCE)
    lines = list(show_stores(rows))
    assert "1 objects" in lines[0] and "1 smaller ones are not shown" in lines[1]
    lines = list(show_stores(process().diagnostics.list_stores(10, PATIENCE)))
    assert any("512.1 KiB" in line and ref.hex() in line and "driver 0." in line for line in lines), lines
    total = sum_stores(rows)
    assert (total["nodes"], total["objects"], total["capacity"]) == (1, 1, STORE)
    problem = [{"node": 0, "host": "h", "problem": "no answer within 3 s", "list": []}]
    assert next(show_stores(problem)) == "node 0 (h): no answer within 3 s"


def test_the_memory_command_prints_text_and_json():
    ref = ray.put(np.ones(N))
    where = process().place.session_dir
    command = [sys.executable, "-m", "hpcray.cli", "memory", "--address", where]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    assert ref.hex() in plain
    found = json.loads(subprocess.run([*command, "--json"], capture_output=True, timeout=PATIENCE, check=True).stdout)
    assert found["nodes"][0]["list"][0]["id"] == ref.hex() and found["total"]["objects"] == 1


def test_the_object_inventory_lists_spilled_objects():
    ray.shutdown()
    start(num_cpus=1, object_store_memory=STORE, spill_threshold=0.5)
    refs = [ray.put(np.ones(STORE // 8 // 8)) for _ in range(20)]
    found = eventually(lambda: [obj for obj in objects() if obj["state"] == "spilled"], "spilling")
    assert not any(obj["pins"] for obj in found)
    total = process().diagnostics.list_stores(0, PATIENCE)[0]
    assert total["on_disk"] >= sum(obj["size"] for obj in found)
    assert all(obj["site"] == "" for obj in objects()), "call sites are recorded without being asked for"
    assert len(refs) == len(objects())
    with ray.internal.create(STORE // 8) as buffer:
        ray.shutdown()
        with pytest.raises(exceptions.RaySystemError, match="over"):
            buffer.seal()
    start(**INIT)


def test_the_error_of_a_lost_object_names_where_its_ref_was_created():
    class Owner:
        def make(self):
            self.ref = ray.put(np.zeros(300_000))
            return [self.ref], os.getpid()

    owner = ray.remote(Owner).remote()
    (ref,), pid = ray.get(owner.make.remote())
    assert "in make" in ref.call_site()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(exceptions.RayActorError):  # until that is known, the value can still be read
        ray.get(owner.make.remote())
    with pytest.raises(exceptions.OwnerDiedError, match="owner has exited") as caught:
        ray.get(ref)
    assert f"The ObjectRef was created at: {ref.call_site()}" in str(caught.value)
