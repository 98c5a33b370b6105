"""A transport of a program's own (`tests/file_transfer`): values in files, made of what the door offers to anybody."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_transfer
import numpy as np
import pytest
from engine import PATIENCE, alive, eventually, exceptions, exit_actor, ray, start
from file_transfer.value_files import DIRECTORY
from helpers.jobs import Job, embedded, on_two_nodes
from helpers.leaks import LeakCheck

from hpcray.common.ids import FIRST_RETURN

TESTS = Path(__file__).resolve().parents[1]


PROGRAM = """
import os
import hpcray as ray
from hpcray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At

ray.init()

@ray.remote(tensor_transport="file")
def make(value):
    return value

@ray.remote
def read(text):
    return ray.get_runtime_context().get_node_id(), text

@ray.remote
class Owner:
    def own(self):
        self.refs = [ray.put("mine", _tensor_transport="file"), make.remote("mine, too")]
        ray.wait(self.refs, num_returns=2)

def files():
    return len([name for _, _, names in os.walk(os.environ["FILE_TRANSFER_DIRECTORY"]) for name in names])

refs = [make.remote("text"), ray.put("text", _tensor_transport="file")]
places = [At(node["NodeID"], soft=False) for node in ray.nodes()]
refs += [make.options(scheduling_strategy=place).remote("text") for place in places]
found = [ray.get([read.options(scheduling_strategy=place).remote(ref) for place in places * 3]) for ref in refs]
assert all(text == "text" for row in found for _, text in row)
nodes = {node for row in found for node, _ in row}
owner = Owner.remote()
ray.get(owner.own.remote())
print(len(nodes), files())
"""


# Before the other tests: programs that they start would join their session.
@pytest.mark.parametrize("nodes", [1, 2])
def test_readers_on_all_nodes_get_the_value_and_the_job_leaves_no_files(
    leak_check: LeakCheck, tmp_path: Path, nodes: int
) -> None:
    program, shared = tmp_path / "program.py", tmp_path / "shared"
    program.write_text(PROGRAM)
    shared.mkdir()
    environ = {"PYTHONPATH": str(TESTS), "HPCRAY_EXTENSIONS": file_transfer.SETTING, DIRECTORY: str(shared)}
    line = embedded(program) if nodes == 1 else on_two_nodes(program)
    with Job(line, environ) as job:
        ended = job.wait(PATIENCE)
    values = nodes + 4  # and a file that says that the driver is there
    assert (ended.code, ended.out.strip()) == (0, f"{nodes} {values + 1}"), ended.err
    assert not list(shared.iterdir())


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A session whose shared directory is this one."""
    directory = tmp_path_factory.mktemp("shared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DIRECTORY, str(directory))
        start(num_cpus=3, extensions=file_transfer.SETTING)
        yield directory
        ray.shutdown()


@pytest.fixture
def shared(session: Path) -> Iterator[Path]:
    """The directory, empty at first; it has to be empty again when the test has dropped its refs."""
    assert not files(session)
    yield session
    eventually(lambda: not files(session), "files are removed")


def values_in(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*/*") if not path.name.endswith("-driver")]


def files(directory: Path) -> int:
    """How many values are in files."""
    return len(values_in(directory))


def make(value: Any) -> Any:
    return value


@pytest.fixture(scope="module")
def by_file(session: Path) -> Any:
    """A task that returns its argument in a file."""
    return ray.remote(tensor_transport="file")(make)


@pytest.fixture(scope="module")
def maker(session: Path) -> Any:
    """A class of actors; its methods name a transport that is known after `init` only."""

    class Maker:
        @ray.method(tensor_transport="file")
        def value(self, value: Any) -> Any:
            return value

        @ray.method(tensor_transport="file")
        def values(self, count: int) -> Iterator[np.ndarray]:
            for index in range(count):
                yield np.full(1000, index)

        def put(self, value: Any) -> list[Any]:
            return [ray.put(value, _tensor_transport="file")]

        def put_and_keep(self, value: Any) -> None:
            self.kept = ray.put(value, _tensor_transport="file")

        def exit(self) -> None:
            exit_actor()

        def pid(self) -> int:
            return os.getpid()

    return ray.remote(Maker)


def test_what_a_task_returns_goes_through_a_file_that_ends_with_its_last_ref(shared: Path, by_file: Any) -> None:
    ref = by_file.remote(np.arange(100_000))
    assert ray.wait([ref], timeout=PATIENCE) == ([ref], [])
    assert files(shared) == 1
    assert ray.get(ref).sum() == np.arange(100_000).sum()
    assert ray.get([ref, ref])[1][7] == 7
    assert files(shared) == 1


def test_several_values_of_a_task_have_files_of_their_own(shared: Path) -> None:
    first, second = ray.remote(tensor_transport="file", num_returns=2)(lambda: ("a", "b")).remote()
    assert ray.get([first, second]) == ["a", "b"] and files(shared) == 2
    del first
    eventually(lambda: files(shared) == 1, "the first one is removed")
    assert ray.get(second) == "b"


def test_what_is_put_goes_through_a_file(shared: Path) -> None:
    ref = ray.put({"x": np.ones(10)}, _tensor_transport="file")
    assert files(shared) == 1
    assert ray.get(ray.remote(lambda value: float(value["x"].sum())).remote(ref)) == 10.0
    assert ray.get(ref)["x"].sum() == 10


def test_a_method_returns_and_yields_through_files(shared: Path, maker: Any) -> None:
    actor = maker.remote()
    assert ray.get(actor.value.remote("value")) == "value"
    refs = list(actor.values.remote(3))
    assert [int(array[0]) for array in ray.get(refs)] == [0, 1, 2]
    eventually(lambda: files(shared) == 3, "the file of the first value is removed")
    del refs[1]
    eventually(lambda: files(shared) == 2, "the file of one is removed")


def test_values_that_nobody_takes_from_a_generator_are_removed(shared: Path, maker: Any) -> None:
    actor = maker.remote()
    stream = actor.values.remote(20)
    assert ray.get(next(stream))[0] == 0
    del stream
    assert ray.get(actor.pid.remote())


def test_an_error_after_some_values_leaves_no_file_behind(shared: Path) -> None:
    def fails() -> Iterator[str]:
        yield "first"
        raise ValueError("second")

    refs = list(ray.remote(tensor_transport="file")(fails).remote())
    assert ray.get(refs[0]) == "first" and files(shared) == 1
    with pytest.raises(ValueError, match="second"):
        ray.get(refs[1])


def test_it_is_an_argument_of_tasks_and_stays_while_they_need_it(shared: Path, by_file: Any) -> None:
    add = ray.remote(lambda *values: sum(int(value.sum()) for value in values))
    refs = [add.remote(by_file.remote(np.ones(n)), by_file.remote(np.ones(1))) for n in range(3)]
    assert ray.get(refs) == [1, 2, 3]


def test_its_ref_inside_another_value_keeps_the_file(shared: Path, by_file: Any) -> None:
    inner = by_file.remote("inner")
    outer = by_file.remote({"ref": [inner]})  # in a file, too
    plain = ray.put([outer])
    ray.wait([inner, outer], num_returns=2)
    del inner, outer
    read = ray.remote(lambda refs: ray.get(ray.get(refs[0])["ref"][0]))
    assert ray.get(read.remote(plain)) == "inner"
    assert files(shared) == 2
    again = ray.get(ray.get(plain)[0])["ref"][0]
    del plain
    eventually(lambda: files(shared) == 1, "the outer file is removed")
    assert ray.get(again) == "inner"


def test_refs_in_a_value_in_a_file_outlive_it(shared: Path) -> None:
    ref = ray.remote(tensor_transport="file")(lambda: [ray.put(index) for index in range(100)]).remote()
    inner = ray.get(ref)
    del ref
    eventually(lambda: not files(shared), "the file is removed")
    assert ray.get(inner) == list(range(100))


def test_a_borrower_in_an_actor_keeps_the_file(shared: Path, by_file: Any) -> None:
    class Keeper:
        def keep(self, refs: list[Any]) -> None:
            self.refs = refs

        def read(self) -> Any:
            return ray.get(self.refs[0])

        def drop(self) -> None:
            self.refs = []

    keeper = ray.remote(Keeper).remote()
    ref = by_file.remote("kept")
    ray.get(keeper.keep.remote([ref]))
    del ref
    assert ray.get(keeper.read.remote()) == "kept" and files(shared) == 1
    ray.get(keeper.drop.remote())
    eventually(lambda: not files(shared), "the file is removed")


def test_the_value_outlives_the_process_that_made_it(shared: Path, maker: Any) -> None:
    actor = maker.remote()
    pid = ray.get(actor.pid.remote())
    ref = actor.value.remote(np.arange(10))
    refs = list(actor.values.remote(2))
    ray.wait([ref, *refs], num_returns=3)
    actor.exit.remote()
    eventually(lambda: not alive(pid), "the actor exits")
    assert ray.get(ref)[9] == 9 and [int(array[0]) for array in ray.get(refs)] == [0, 1]
    once = ray.remote(tensor_transport="file", max_calls=1)(lambda: (os.getpid(), "last"))
    ref = once.remote()
    ray.wait([ref])
    pid, text = ray.get(ref)
    eventually(lambda: not alive(pid), "the worker exits after its last call")
    assert (ray.get(ref), text) == ((pid, "last"), "last")


def test_what_an_actor_has_put_lives_as_long_as_others_refer_to_it(shared: Path, maker: Any) -> None:
    actor = maker.remote()
    (ref,) = ray.get(actor.put.remote("put"))
    assert ray.get(ref) == "put" and files(shared) == 1
    del ref
    eventually(lambda: not files(shared), "the file is removed")


@pytest.mark.parametrize("end", ["killed", "exits"])
def test_files_of_an_owner_that_has_ended_are_removed(shared: Path, maker: Any, end: str) -> None:
    actor = maker.remote()
    (ref,) = ray.get(actor.put.remote("put"))
    ray.get(actor.put_and_keep.remote("never read elsewhere"))
    assert ray.get(ref) == "put" and files(shared) == 2
    if end == "killed":
        ray.kill(actor)
    else:
        actor.exit.remote()
    eventually(lambda: not files(shared), "the files are removed")
    with pytest.raises(exceptions.ObjectLostError):  # an OwnerDiedError where the value had not come
        ray.get(ref)


def test_the_file_of_a_run_that_did_not_end_goes_with_that_of_the_next(shared: Path, tmp_path: Path) -> None:
    def crash_once(mark: Path) -> str:
        from file_transfer.extension import FileTransfer

        from hpcray.runtime.core_worker.core_worker import need_process

        if not mark.exists():
            mark.touch()
            process, task = need_process(), bytes.fromhex(ray.get_runtime_context().get_task_id())
            FileTransfer.of(process).outgoing_value("first", "file", task + FIRST_RETURN)
            with process.engine.lock:
                process.engine.flush()
            os._exit(1)
        return "second"

    ref = ray.remote(tensor_transport="file", max_retries=1)(crash_once).remote(tmp_path / "mark")
    assert ray.get(ref) == "second" and files(shared) == 2


def test_an_argument_that_a_task_may_need_again_stays(shared: Path, by_file: Any) -> None:
    ref = by_file.remote("argument")
    large = ray.remote(lambda _: np.zeros(1_000_000)).remote(ref)
    ray.wait([large])
    del ref
    assert ray.get(ray.remote(len).remote(large)) == 1_000_000
    assert files(shared) == 1, "where the large value is lost, its task reads its argument again"
    del large


def test_a_file_that_is_gone_is_an_error_that_names_it(shared: Path, by_file: Any) -> None:
    ref = by_file.remote("gone")
    ray.wait([ref])
    (path,) = values_in(shared)
    path.unlink()
    with pytest.raises(exceptions.ObjectLostError, match=f"{path}: the file is gone"):
        ray.get(ref)
    with pytest.raises(Exception, match=f"{path}: the file is gone"):
        ray.get(ray.remote(len).remote(ref))


def test_a_directory_that_is_missing_is_an_error_that_names_it(shared: Path, by_file: Any) -> None:
    ref = by_file.remote("gone")
    ray.wait([ref])
    shutil.rmtree(shared)
    try:
        with pytest.raises(exceptions.ObjectLostError, match=f"{shared}.*: its directory is missing on "):
            ray.get(ref)
        with pytest.raises(OSError, match=f"{shared} is no directory on .*; hint: {DIRECTORY}"):
            ray.get(by_file.remote("more"))
        with pytest.raises(OSError, match=f"{shared} is no directory on "):
            ray.put("more", _tensor_transport="file")
    finally:
        shared.mkdir()


def test_a_value_that_does_not_pickle_leaves_no_file(shared: Path, by_file: Any) -> None:
    with pytest.raises(TypeError, match="could not serialize|pickle"):
        ray.get(ray.remote(tensor_transport="file")(threading.Lock).remote())
    with pytest.raises(TypeError):
        ray.put(threading.Lock(), _tensor_transport="file")
    assert not files(shared)
