"""Tensors that stay in the process that made them, with CPU tensors."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import os
import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from engine import NAME, PATIENCE, Marks, alive, eventually, exceptions, exit_actor, hpcray_only, ray

from hpcray.common.ids import raylet_of
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import current
from hpcray.state.reports import show_stores

torch = pytest.importorskip("torch")
wait_tensor_freed = importlib.import_module(f"{NAME}.experimental").wait_tensor_freed
pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]  # Ray's own needs a communicator for CPU tensors
INIT = {"num_cpus": 2, "object_store_memory": 256 << 20, "preload": "torch"}
LENGTH = 1 << 20


@ray.remote(num_cpus=0, enable_tensor_transport=True)
class Holder:
    def __init__(self) -> None:
        self.tensor: Any = None

    @ray.method(tensor_transport="gloo")
    def make(self, value: float, length: int = LENGTH) -> Any:
        self.tensor = torch.full((length,), value)
        return {"tensor": self.tensor, "twice": [self.tensor], "array": np.arange(5.0), "text": "x"}

    def pointer(self) -> int:
        return self.tensor.data_ptr()

    def look(self, value: Any) -> tuple[int, float]:
        return value["tensor"].data_ptr(), float(value["tensor"].sum())

    def plain(self, length: int) -> Any:
        self.tensor = torch.ones(length)
        return self.tensor

    def pair(self) -> Any:
        return torch.zeros(3), [torch.ones(2), "y"]

    @ray.method(num_returns="streaming")
    def several(self) -> Any:
        yield torch.ones(1)

    def put(self, length: int) -> Any:
        self.tensor = torch.ones(length)
        return [ray.put(self.tensor, _tensor_transport="auto")]

    def wait_freed(self, timeout: float | None) -> None:
        wait_tensor_freed(self.tensor, timeout)

    def pid(self) -> int:
        return os.getpid()


@pytest.mark.parametrize("length", [4, LENGTH])
def test_the_same_process_gets_the_same_tensor_and_others_a_copy(length: int) -> None:
    first, second = Holder.remote(), Holder.remote()
    ref = first.make.remote(2.0, length)
    pointer = ray.get(first.pointer.remote())
    assert ray.get(first.look.remote(ref)) == (pointer, 2.0 * length)
    assert ray.get(second.look.remote(ref))[1] == 2.0 * length
    value = ray.get(ref)
    assert value["tensor"].sum() == 2.0 * length and value["twice"][0] is value["tensor"]
    assert value["array"].tolist() == [0, 1, 2, 3, 4] and value["text"] == "x"
    assert ray.wait([ref]) == ([ref], [])


def test_a_nested_ref_and_a_put_in_an_actor() -> None:
    holder, other = Holder.remote(), Holder.remote()
    (inner,) = ray.get(holder.put.remote(LENGTH))
    assert ray.get(inner).sum() == LENGTH
    assert ray.get(other.look.remote({"tensor": ray.get(inner)}))[1] == LENGTH


def test_tasks_and_the_driver_have_device_objects() -> None:
    @ray.remote(tensor_transport="auto")
    def made(given: Any) -> Any:
        return given * 2

    mine = torch.ones(LENGTH)
    ref = ray.put([mine, 7], _tensor_transport="ucx")
    assert ray.get(ref)[0] is mine and ray.get(ref)[1] == 7
    task = made.remote(ray.put(mine, _tensor_transport="auto"))
    assert ray.get(made.options(tensor_transport="object_store").remote(task)).sum() == 4 * LENGTH
    assert mine.sum() == LENGTH


def test_options_of_a_call_and_several_returns() -> None:
    holder = Holder.remote()
    assert ray.get(holder.plain.options(tensor_transport="AUTO").remote(LENGTH)).sum() == LENGTH
    one, two = holder.pair.options(tensor_transport="auto", num_returns=2).remote()
    assert ray.get(one).tolist() == [0, 0, 0]
    assert ray.get(two)[0].tolist() == [1, 1] and ray.get(two)[1] == "y"


def test_tensors_are_freed_with_the_last_ref() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0)
    ray.get(ref)
    with pytest.raises(TimeoutError, match="not freed"):
        ray.get(holder.wait_freed.remote(0.1))
    del ref
    gc.collect()
    ray.get(holder.wait_freed.remote(PATIENCE), timeout=PATIENCE)
    tensor = torch.ones(3)
    ref = ray.put(tensor, _tensor_transport="auto")
    with pytest.raises(TimeoutError):
        wait_tensor_freed(tensor, 0.05)
    del ref
    wait_tensor_freed(tensor, PATIENCE)


def test_the_loss_of_the_process_is_said() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0)
    ray.wait([ref])
    os.kill(ray.get(holder.pid.remote()), signal.SIGKILL)
    time.sleep(0.3)
    with pytest.raises(exceptions.ObjectLostError):
        ray.get(ref)


def test_collective_groups_are_made_found_and_ended() -> None:
    groups = importlib.import_module(f"{NAME}.experimental.collective")
    util = importlib.import_module(f"{NAME}.util.collective")
    actors = [Holder.remote() for _ in range(2)]
    made = groups.create_collective_group(actors, backend="gloo", name="two")
    assert groups.get_collective_groups([actors[1]], backend="gloo") == [made] and made.get_rank(actors[1]) == 1
    assert groups.get_collective_groups(actors, backend="nccl") == [] and made.get_rank(None) == -1

    def rank(_: Any) -> int:
        return int(util.get_rank("two"))

    assert ray.get([actor.__ray_call__.remote(rank) for actor in actors]) == [0, 1]
    with pytest.raises(RuntimeError, match="already in group for backend"):
        groups.create_collective_group(actors[:1], backend="gloo")
    ray.kill(actors[0])
    groups.destroy_collective_group("two")
    assert groups.get_collective_groups() == []
    again = groups.create_collective_group(actors[1:], backend="gloo")
    groups.destroy_collective_group(again)
    with pytest.raises(ValueError, match="No group with name"):
        groups.destroy_collective_group("two")
    with pytest.raises(ValueError, match="must be unique"):
        groups.create_collective_group([actors[1]] * 2, backend="gloo")


def test_wrong_use_is_refused() -> None:
    holder = Holder.remote()
    with pytest.raises(ValueError, match="Invalid tensor transport: CARRIER"):
        holder.plain.options(tensor_transport="carrier")
    with pytest.raises(ValueError, match="Invalid tensor transport"):
        ray.put(torch.ones(1), _tensor_transport="pigeon")
    with pytest.raises(ValueError, match="NCCL does not support tensor transfer on device cpu"):
        ray.get(holder.plain.options(tensor_transport="nccl").remote(3))
    with pytest.raises(ValueError, match="CUDA_IPC does not support"):
        ray.put(torch.ones(1), _tensor_transport="cuda_ipc")


# ---------------------------------------------------------------- tensors whose process ends


@ray.remote(max_restarts=-1, max_task_retries=-1, num_cpus=0)
class Restarting:
    """Its calls run again when it dies."""

    def __init__(self, born: Marks | None = None) -> None:
        if born is not None:
            born.add()

    @ray.method(tensor_transport="auto")
    def make(self, marks: Marks, value: float, length: int = LENGTH) -> Any:
        marks.add()
        return {"tensor": torch.full((length,), value), "pid": os.getpid()}

    def pid(self) -> int:
        return os.getpid()

    def look(self, value: Any) -> float:
        return float(value["tensor"].sum())

    def look_inside(self, refs: list[Any]) -> float:
        return self.look(ray.get(refs[0]))


@ray.remote(tensor_transport="auto")
def made(marks: Marks, value: float, length: int, rest: int = 0) -> Any:
    marks.add()
    return {"tensor": torch.full((length,), value), "pid": os.getpid(), "rest": np.full(rest, value)}


@ray.remote(tensor_transport="auto", max_calls=1)
def made_once(marks: Marks, value: float) -> Any:
    marks.add()
    return {"tensor": torch.full((LENGTH,), value), "pid": os.getpid()}


@ray.remote(tensor_transport="auto")
def doubled(marks: Marks, value: Any) -> Any:
    marks.add()
    return {**value, "tensor": 2 * value["tensor"], "pid": os.getpid()}


def kill(pid: int) -> None:
    """Kill a worker. When this returns its raylet knows, and so does this process: the word came before the answer."""
    process = current.process
    assert process is not None
    raylet = raylet_of(process.node)

    def gone() -> bool:
        answers = process.gcs.ask_many({raylet: partial(m.ListStore, limit=0)}, PATIENCE)
        return pid not in [other for _, other, _ in answers[raylet]["processes"]]

    os.kill(pid, signal.SIGKILL)
    eventually(gone)


@pytest.mark.parametrize(("length", "rest"), [(4, 1 << 15), (LENGTH, 0)])
def test_a_task_whose_process_died_makes_its_tensors_again(marks: Marks, length: int, rest: int) -> None:
    other = Holder.remote()
    ray.get(other.pid.remote())  # or it would get the worker that the task leaves
    ref = made.remote(marks, 3.0, length, rest)
    pid = ray.get(ref)["pid"]
    assert ray.get(other.look.remote(ref))[1] == 3 * length
    kill(pid)
    assert ray.get(other.look.remote(ref))[1] == 3 * length
    value = ray.get(ref)
    assert value["tensor"].sum() == 3 * length and value["pid"] != pid and (value["rest"] == 3).all()
    assert len(value["rest"]) == rest and len(marks.lines()) == 2


def test_what_was_made_of_lost_tensors_is_made_again_with_them(marks: Marks) -> None:
    first = made.remote(marks, 3.0, LENGTH)
    second = doubled.remote(marks, first)
    pids = {ray.get(first)["pid"], ray.get(second)["pid"]}
    del first
    gc.collect()
    for pid in pids:
        kill(pid)
    assert ray.get(second)["tensor"].sum() == 6 * LENGTH
    eventually(lambda: len(marks.lines()) == 4)


def test_an_actor_that_restarts_makes_its_tensors_again_before_it_uses_them(marks: Marks) -> None:
    actor = Restarting.remote()
    ref = actor.make.remote(marks, 2.0)
    ray.wait([ref])
    kill(ray.get(actor.pid.remote()))
    assert ray.get(actor.look.remote(ref), timeout=PATIENCE) == 2 * LENGTH
    assert ray.get(ref)["tensor"].sum() == 2 * LENGTH and len(marks.lines()) == 2


@ray.remote(num_cpus=0)
class Rival:
    """Calls an actor right after its death, before the owner of what it passes on hears of that."""

    def hold(self, refs: list[Any]) -> float:
        self.refs = refs
        return float(ray.get(refs[0])["tensor"].sum())

    def kill_and_call(self, actor: Any, pid: int, method: str) -> str:
        kill(pid)
        try:
            found = actor.look.remote(self.refs[0]) if method == "look" else actor.look_inside.remote(self.refs)
            return str(ray.get(found, timeout=PATIENCE))
        except exceptions.ObjectLostError as error:
            return str(error)


@pytest.mark.parametrize("method", ["look", "look_inside"])
def test_a_call_that_holds_up_what_it_waits_for_lets_it_run_first(marks: Marks, tmp_path: Any, method: str) -> None:
    born = Marks(tmp_path / "born")
    actor, rival = Restarting.remote(born), Rival.remote()
    ref = actor.make.remote(marks, 2.0)
    assert ray.get(rival.hold.remote([ref])) == 2 * LENGTH
    answer = rival.kill_and_call.remote(actor, ray.get(actor.pid.remote()), method)
    process = current.process
    assert process is not None
    with process.engine.lock:  # deaf: the other call reaches the next life of the actor first
        eventually(lambda: len(born.lines()) == 2)
        time.sleep(1.0)
    said = ray.get(answer, timeout=PATIENCE)
    if method == "look":
        assert said == str(2.0 * LENGTH)
    else:  # its method has begun, and no other may begin
        assert "waits behind the call that reads it" in said, said
    assert ray.get(actor.look.remote(ref), timeout=PATIENCE) == 2 * LENGTH, "it was made again after that"


def test_a_borrower_reads_tensors_that_were_made_again(marks: Marks) -> None:
    ref = made.remote(marks, 1.0, LENGTH)
    kill(ray.get(ref)["pid"])

    @ray.remote
    def read(refs: Any) -> float:
        return float(ray.get(refs[0])["tensor"].sum())

    assert ray.get([read.remote([ref]), read.remote([ref])], timeout=PATIENCE) == [LENGTH] * 2
    assert len(marks.lines()) == 2


def test_the_error_says_why_tensors_cannot_be_made_again(marks: Marks) -> None:
    ref = made.options(max_retries=0).remote(marks, 1.0, LENGTH)
    kill(ray.get(ref)["pid"])
    with pytest.raises(
        exceptions.ObjectReconstructionFailedError,
        match="RETRIES_DISABLED.*stayed in a process that is gone",
    ):
        ray.get(ref)
    assert len(marks.lines()) == 1


@ray.remote(num_cpus=0)
class Leaving:
    """Ends in order."""

    @ray.method(tensor_transport="auto")
    def make(self, length: int, rest: int) -> Any:
        self.kept = torch.ones(length)
        return {"tensor": self.kept, "same": [self.kept], "rest": np.arange(rest), "ref": ray.put(7)}

    def add(self) -> None:
        self.kept += 1

    def leave(self) -> None:
        exit_actor()


@pytest.mark.parametrize(("length", "rest"), [(4, 1 << 15), (LENGTH, 0)])
def test_tensors_outlive_an_actor_that_ends_in_order(length: int, rest: int) -> None:
    actor, other = Leaving.remote(), Holder.remote()
    ref = actor.make.remote(length, rest)
    ray.wait([ref])
    ray.get(actor.add.remote())
    with pytest.raises(exceptions.RayActorError):
        ray.get(actor.leave.remote())
    value = ray.get(ref, timeout=PATIENCE)
    assert value["tensor"].sum() == 2 * length and value["same"][0] is value["tensor"]
    assert value["rest"].tolist() == list(range(rest))
    assert ray.get(other.look.remote(ref), timeout=PATIENCE)[1] == 2 * length


def test_tensors_outlive_an_actor_without_handles_and_a_worker_with_max_calls(marks: Marks) -> None:
    actor = Leaving.remote()
    refs = [actor.make.remote(LENGTH, 0), made_once.remote(marks, 2.0)]
    ray.wait([refs[0]])
    del actor
    gc.collect()
    pid = ray.get(refs[1])["pid"]
    eventually(lambda: not alive(pid))
    assert [ray.get(ref, timeout=PATIENCE)["tensor"].sum() for ref in refs] == [LENGTH, 2 * LENGTH]
    assert len(marks.lines()) == 1


def test_tensors_outlive_idle_workers_that_end(marks: Marks) -> None:
    @ray.remote(tensor_transport="auto", num_cpus=0)
    def slow(number: int) -> Any:
        marks.add()
        eventually(lambda: len(marks.lines()) >= 5)
        return {"tensor": torch.full((LENGTH,), float(number)), "pid": os.getpid()}

    refs = [slow.remote(number) for number in range(5)]
    pids = {value["pid"] for value in ray.get(refs)}
    assert len(pids) == 5
    eventually(lambda: sum(map(alive, pids)) <= 2)
    assert [int(value["tensor"][-1]) for value in ray.get(refs)] == [0, 1, 2, 3, 4]
    assert len(marks.lines()) == 5, "nothing ran again"


# ---------------------------------------------------------------- reading


def test_get_heeds_its_timeout_while_tensors_come() -> None:
    holder = Holder.remote()
    ref = holder.make.remote(1.0)
    ray.wait([ref])
    pid = ray.get(holder.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(exceptions.GetTimeoutError, match="tensors of a value"):
            ray.get(ref, timeout=0.3)
        with pytest.raises(exceptions.GetTimeoutError):
            ray.get([ref], timeout=0.3)
        assert time.monotonic() - began < PATIENCE / 4
    finally:
        os.kill(pid, signal.SIGCONT)
    assert ray.get(ref, timeout=PATIENCE)["tensor"].sum() == LENGTH


def test_the_object_store_gives_copies_in_the_same_process_too() -> None:
    mine = torch.ones(3)
    ref = ray.put({"a": mine, "b": mine}, _tensor_transport="auto")
    copy = ray.get(ref, _use_object_store=True)
    assert copy["a"] is copy["b"] and copy["a"].tolist() == [1, 1, 1]
    copy["a"] += 1
    assert mine.tolist() == [1, 1, 1] and ray.get(ref)["a"] is mine


@ray.remote(num_cpus=0)
class Careless:
    """Makes device objects that cannot be sent, or fails with them in hand."""

    @ray.method(tensor_transport="auto", num_returns=2)
    def half(self) -> Any:
        return torch.ones(LENGTH), threading.Lock()

    @ray.method(tensor_transport="auto", num_returns="streaming")
    def stream_that_breaks(self) -> Any:
        yield torch.ones(LENGTH)
        raise ValueError("after one value")

    @ray.method(tensor_transport="auto")
    def locked(self) -> Any:
        tensor = torch.ones(LENGTH)
        tensor.lock = threading.Lock()
        return tensor

    def total(self, tensor: Any) -> float:
        return float(tensor.sum())

    def fail_with(self, tensor: Any) -> None:
        raise ValueError(f"{tensor.shape}")

    def submit(self, maker: Any) -> tuple[Any, int]:
        """A value that this process owns, whose tensors are with another one."""
        self.ref = maker.plain.remote(LENGTH)
        ray.wait([self.ref])
        return [self.ref], os.getpid()


def none_are_kept() -> bool:
    process = current.process
    assert process is not None
    gc.collect()
    return not process.diagnostics.list_stores(1, PATIENCE, devices=True)[0]["device_objects"]


def test_nothing_is_kept_of_values_that_could_not_be_sent() -> None:
    maker = Careless.remote()
    for _ in range(2):
        first, second = maker.half.remote()
        with pytest.raises(TypeError, match="lock"):
            ray.get(second)
        with pytest.raises(TypeError, match="lock"):
            ray.get(first)
    stream = maker.stream_that_breaks.remote()
    value = next(stream)
    assert ray.get(value).sum() == LENGTH
    with pytest.raises(ValueError, match="after one value"):
        ray.get(next(stream))
    del value, stream, first, second
    eventually(none_are_kept)


def test_tensors_that_cannot_be_copied_are_an_error_for_others_and_not_for_their_maker() -> None:
    maker, other = Careless.remote(), Careless.remote()
    ref = maker.locked.remote()
    for _ in range(2):
        with pytest.raises(exceptions.RayTaskError, match="could not serialize"):
            ray.get(other.total.remote(ref), timeout=PATIENCE)
        with pytest.raises(exceptions.RaySystemError, match="could not serialize"):
            ray.get(ref, timeout=PATIENCE)
        assert ray.get(maker.total.remote(ref)) == LENGTH
    del ref
    eventually(none_are_kept)


def test_readers_that_fail_and_owners_that_die_keep_no_tensors() -> None:
    holder, reader, owner = Holder.remote(), Careless.remote(), Careless.remote()
    ref = holder.plain.options(tensor_transport="auto").remote(LENGTH)
    inside = ray.put([{"deep": [ref]}])
    for _ in range(2):
        with pytest.raises(ValueError, match="Size"):
            ray.get(reader.fail_with.remote(ref))
    assert ray.get(ray.get(inside)[0]["deep"][0]).sum() == LENGTH
    del ref, inside
    eventually(none_are_kept)
    (borrowed,), pid = ray.get(owner.submit.remote(TransportOf(holder)))
    kill(pid)
    with pytest.raises(exceptions.ObjectLostError):
        ray.get(borrowed, timeout=PATIENCE)
    del borrowed
    eventually(none_are_kept)


class TransportOf:
    """A handle of a Holder whose `plain` returns device objects."""

    def __init__(self, holder: Any) -> None:
        self.plain = holder.plain.options(tensor_transport="auto")


def test_generators_yield_device_objects() -> None:
    @ray.remote(tensor_transport="auto", num_returns="streaming")
    def several(count: int) -> Any:
        for number in range(count):
            yield {"tensor": torch.full((LENGTH,), float(number)), "pid": os.getpid()}

    refs = list(several.remote(3))
    assert [int(ray.get(ref)["tensor"][0]) for ref in refs] == [0, 1, 2]
    kill(ray.get(refs[0])["pid"])
    assert [int(ray.get(ref)["tensor"][0]) for ref in refs] == [0, 1, 2]
    holder = Holder.remote()
    assert [ray.get(ref)[0] for ref in holder.several.options(tensor_transport="auto").remote()] == [1]


class Exchanged:
    """An array of another library, which knows DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


@dataclasses.dataclass
class Batch:
    weights: Any
    names: list[str]
    inner: Any = None


def test_tensors_are_found_in_every_value() -> None:
    layer = torch.nn.Linear(2, 2)
    array = Exchanged(np.arange(3.0))
    value = Batch({"layer": layer, "tuple": (torch.ones(2),)}, ["a"], Batch(array, []))
    ref = ray.put(value, _tensor_transport="auto")
    again = ray.get(ref)
    assert again is not value and again.weights["layer"].weight is layer.weight
    assert again.weights["tuple"][0] is value.weights["tuple"][0]
    assert again.inner.weights is array and again.names == ["a"]

    @ray.remote
    def read(value: Any) -> Any:
        back = np.from_dlpack(value.inner.weights).tolist()
        return float(value.weights["layer"].weight.detach().sum()), value.weights["tuple"][0].tolist(), back

    assert ray.get(read.remote(ref)) == (float(layer.weight.detach().sum()), [1, 1], [0, 1, 2])


# ---------------------------------------------------------------- accounting


def test_memory_lists_the_tensors_of_each_process() -> None:
    holder = Holder.remote()
    refs = [holder.make.remote(1.0), holder.make.remote(2.0, 4), ray.put([torch.ones(6)], _tensor_transport="auto")]
    ray.wait(refs, num_returns=3)
    process = current.process
    assert process is not None
    (row,) = process.diagnostics.list_stores(10, PATIENCE, devices=True)
    kept = {(one["process"].partition(" (")[2].split(",")[0], one["device"]): one for one in row["device_objects"]}
    assert kept["actor Holder", "cpu"] | {"process": ""} == {
        "process": "", "device": "cpu", "objects": 2, "size": 4 * LENGTH + 16
    }  # fmt: skip
    (driver,) = (one for one in row["device_objects"] if one["process"].startswith("driver"))
    assert (driver["objects"], driver["size"]) == (1, 24)
    lines = "\n".join(show_stores([row]))
    assert "device objects, in the processes that made them:" in lines and "actor Holder" in lines
    del refs
    gc.collect()
    ray.get(ray.put(0))
    eventually(lambda: not process.diagnostics.list_stores(1, PATIENCE, devices=True)[0]["device_objects"])


# ---------------------------------------------------------------- registered transports

experimental = importlib.import_module(f"{NAME}.experimental")


@dataclasses.dataclass
class FileMetadata(experimental.TensorTransportMetadata):
    path: str = ""


def make_file_transport(folder: str) -> type:
    """A class of transports by files, so that both ends are seen at work."""

    class Files(experimental.TensorTransportManager):
        def tensor_transport_backend(self) -> str:
            return "files"

        @staticmethod
        def is_one_sided() -> bool:
            return True

        @staticmethod
        def can_abort_transport() -> bool:
            return False

        def actor_has_tensor_transport(self, actor: Any) -> bool:
            return True

        def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Any:
            path = os.path.join(folder, obj_id)
            np.savez(path, *rdt_object)
            return FileMetadata([(array.shape, array.dtype) for array in rdt_object], "cpu", f"{path}.npz")

        def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: Any = None) -> Any:
            return experimental.CommunicatorMetadata()

        def recv_multiple_tensors(self, obj_id: str, metadata: Any, shared: Any, target_buffers: Any = None) -> Any:
            with open(os.path.join(folder, "reads"), "a") as file:
                file.write(f"{obj_id}\n")
            with np.load(metadata.path) as found:
                return [found[f"arr_{place}"] for place in range(len(metadata.tensor_meta))]

        def send_multiple_tensors(self, tensors: Any, metadata: Any, shared: Any) -> None:
            raise NotImplementedError

        def garbage_collect(self, obj_id: str, metadata: Any, tensors: Any) -> None:
            os.unlink(metadata.path)

        def abort_transport(self, obj_id: str, shared: Any) -> None:
            raise NotImplementedError

    return Files


def test_a_registered_transport_carries_what_it_takes(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    kind = make_file_transport(str(tmp_path))
    experimental.register_tensor_transport("Files", ["cpu"], kind, np.ndarray)

    @ray.remote(num_cpus=0)
    class Maker:
        @ray.method(tensor_transport="files")
        def make(self, length: int) -> Any:
            return {"array": np.arange(length), "tensor": torch.ones(2)}

        def total(self, value: Any) -> int:
            return int(value["array"].sum())

    maker, reader = Maker.remote(), Maker.remote()
    ref = maker.make.remote(100)
    assert ray.get(reader.total.remote(ref)) == 4950 == ray.get(maker.total.remote(ref))
    value = ray.get(ref)
    assert value["array"].tolist() == list(range(100)) and value["tensor"].tolist() == [1, 1]
    reads = (tmp_path / "reads").read_text().split()
    assert len(reads) == 2, "the reader and the driver; not the maker"
    assert ray.get(ref, _use_object_store=True)["array"].sum() == 4950
    assert (tmp_path / "reads").read_text().split() == reads
    (file,) = tmp_path.glob("*.npz")
    file.rename(tmp_path / "gone")
    assert ray.get(ref)["array"].sum() == 4950, "through the object store"
    assert "the tensor transport 'files' failed (FileNotFoundError" in capfd.readouterr().err
    (tmp_path / "gone").rename(file)
    del ref, value
    gc.collect()
    ray.get(ray.put(0))
    eventually(lambda: not file.exists())


def test_registration_refuses_what_cannot_work(tmp_path: Any) -> None:
    kind = make_file_transport(str(tmp_path))
    with pytest.raises(ValueError, match="not a subclass of TensorTransportManager"):
        experimental.register_tensor_transport("x", ["cpu"], dict, np.ndarray)
    with pytest.raises(ValueError, match="'nccl' exists"):
        experimental.register_tensor_transport("nccl", ["cpu"], kind, np.ndarray)
    two_sided = type("TwoSided", (kind,), {"is_one_sided": staticmethod(lambda: False)})
    with pytest.raises(NotImplementedError, match="two-sided"):
        experimental.register_tensor_transport("x", ["cpu"], two_sided, np.ndarray)
