"""Nodes that join a running job of one node, work, and leave or die."""

from __future__ import annotations

import base64
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpcray as ray
from hpcray import cluster, mpi
from hpcray.common.exceptions import StartupError, SubmitError, TaskUnschedulableError
from hpcray.jobs import added_nodes
from hpcray.platform.launcher_environment import open_mpi_wheel_prefix
from hpcray.platform.private_files import write_private_file
from hpcray.platform.process_tree import descendants
from hpcray.platform.session_directory import live_sessions, read_session
from hpcray.runtime.core_worker.core_worker import need_process
from hpcray.runtime.node.join_token import read_join_token, request_join_token

SIZE = 1 << 18


def until(condition: Callable[[], Any], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive() -> int:
    return sum(row["Alive"] for row in ray.nodes())


@pytest.fixture
def token(tmp_path: Path, leak_check: object) -> Iterator[Path]:
    """The join token of a running job of one node."""
    path = tmp_path / "token"
    with ray.init("local", num_cpus=1, object_store_memory=64 << 20, node_timeout=2.0):
        write_private_file(str(path), request_join_token(need_process().place.session_dir))
        yield path


@contextlib.contextmanager
def joined(token: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A further node; in the job when the block begins."""
    there = alive()
    line = [sys.executable, "-m", "hpcray", "--num-cpus", "2", "--resources", '{"extra": 2}', *options]
    with subprocess.Popen([*line, "--join", str(token)], stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: alive() > there or process.poll() is not None)
            assert process.poll() is None, process.communicate()[1]
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            if process.poll() is None:
                process.kill()


@ray.remote(resources={"extra": 1})
def there(array: Any) -> Any:
    return array + 1


@ray.remote(resources={"extra": 1}, num_cpus=0, max_restarts=1, max_task_retries=-1)
class Counter:
    def __init__(self) -> None:
        self.count = 0

    def up(self) -> int:
        self.count += 1
        return self.count


def test_a_node_that_joins_takes_what_waits_and_leaves_with_nothing_lost(token: Path) -> None:
    given = ray.put(np.zeros(SIZE))
    waiting = there.remote(given)
    group = ray.util.placement_group([{"extra": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    with joined(token) as process:
        assert ray.get(waiting, timeout=30).sum() == SIZE
        assert group.wait(30)
        ray.util.remove_placement_group(group)
        counter = Counter.remote()
        assert ray.get([counter.up.remote() for _ in range(100)], timeout=30)[-1] == 100
        kept = [there.remote(ray.put(np.full(SIZE, number))) for number in range(5)]
        ray.wait(kept, num_returns=5, timeout=30, fetch_local=False)
        process.terminate()
        assert process.wait(30) == 0
        assert "this node has left the job" in process.communicate()[1]
        until(lambda: alive() == 1)
        assert [ray.get(ref, timeout=10)[0] for ref in kept] == [1, 2, 3, 4, 5], (
            "copied, as no other node can make them"
        )
        with joined(token):
            assert ray.get(counter.up.remote(), timeout=30) == 1, "restarted on the next node"


@ray.remote(resources={"extra": 1}, num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Saved:
    """Its state moves with it."""

    def __init__(self) -> None:
        self.count = 0

    def up(self) -> int:
        self.count += 1
        return self.count

    def __hpcray_checkpoint__(self, directory: str) -> None:
        time.sleep(0.3)  # calls come meanwhile
        Path(directory, "count").write_text(str(self.count))

    def __hpcray_restore__(self, directory: str) -> None:
        self.count = int(Path(directory, "count").read_text())


def test_an_actor_with_a_checkpoint_moves_with_its_state(
    tmp_path: Path, leak_check: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCRAY_CHECKPOINT_DIR", str(tmp_path / "saved"))
    path, counts, over = tmp_path / "token", [], threading.Event()
    with ray.init("local", num_cpus=1, object_store_memory=64 << 20):
        write_private_file(str(path), request_join_token(need_process().place.session_dir))
        with joined(path) as process:
            actor = Saved.options(name="counter").remote()

            def call() -> None:
                while not over.is_set():
                    counts.append(ray.get(actor.up.remote(), timeout=60))

            caller = threading.Thread(target=call)
            caller.start()
            until(lambda: len(counts) > 100)
            with joined(path):
                process.terminate()
                assert process.wait(30) == 0
                there = len(counts)
                until(lambda: len(counts) > there + 100)
                over.set()
                caller.join()
                assert counts == list(range(1, len(counts) + 1)), "each call has run once"


@ray.remote(resources={"extra": 1}, num_cpus=0)
class Owner:
    """Owns what it returns refs to."""

    def make(self) -> list[Any]:
        inner = [ray.put("inside"), ray.put(np.full(SIZE, 2))]
        return [ray.put(np.full(SIZE, 1)), ray.put("small"), ray.put(inner), ray.put([*inner, np.zeros(SIZE)])]

    def sum_later(self, ref: Any) -> Any:
        return [total_of.remote(ref, 1.0)]

    def fail(self) -> list[Any]:
        return [total_of.options(max_retries=0).remote(None)]


@ray.remote(num_cpus=0)
def total_of(array: Any, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return int(array.sum())


@ray.remote(num_cpus=0)
def read(refs: list[Any]) -> Any:
    large, small, inner, mixed = refs
    values = [ray.get(large).sum(), ray.get(small), ray.get(ray.get(inner)[0]), ray.get(ray.get(mixed)[1]).sum()]
    return [*values[:3], int(values[3])]


def test_objects_that_a_process_of_a_leaving_node_owns_outlive_it(token: Path) -> None:
    with joined(token) as process:
        owner = Owner.remote()
        refs = ray.get(owner.make.remote(), timeout=30)
        holder = Holder.options(num_cpus=1).remote(refs)  # on the first node
        assert ray.get(holder.read.remote(), timeout=30)
        (total,) = ray.get(owner.sum_later.remote(refs[0]), timeout=30)
        (failed,) = ray.get(owner.fail.remote(), timeout=30)
        with pytest.raises(AttributeError, match="sum"):
            ray.get(failed, timeout=30)
        began = time.monotonic()
        process.terminate()
        assert process.wait(30) == 0
        assert time.monotonic() - began < 15, "it does not wait until the refs are gone"
        until(lambda: alive() == 1)
        expected = [SIZE, "small", "inside", 2 * SIZE]
        assert ray.get(read.remote(refs), timeout=30) == expected, "passed on after its owner has gone"
        assert ray.get(total_of.remote(refs[0]), timeout=30) == SIZE
        assert ray.get(refs[0], timeout=30).sum() == SIZE and ray.get(refs[1], timeout=30) == "small"
        assert ray.get(total, timeout=30) == SIZE, "its owner waited until it was made"
        with pytest.raises(AttributeError, match="sum"):
            ray.get(failed, timeout=30)
        assert ray.get(holder.read.remote(), timeout=30) == expected, "another process of the same node holds them too"
        del refs, total, failed, holder
        until(lambda: not ray.cluster_resources().get("extra"))
        until(lambda: store_is_empty(), 20)


@ray.remote(resources={"extra": 1}, num_cpus=0)
class Maker:
    """Returns values whose tensors it keeps."""

    @ray.method(tensor_transport="auto")
    def make(self, number: int, length: int) -> Any:
        import torch

        tensor = torch.full((length,), float(number))
        return {"tensor": tensor, "same": tensor}


@ray.remote(num_cpus=0)
def tensor_sum(value: Any) -> float:
    assert value["same"] is value["tensor"]
    return float(value["tensor"].sum())


@pytest.mark.slow
def test_tensors_in_a_process_of_a_leaving_node_outlive_it(token: Path) -> None:
    pytest.importorskip("torch")
    with joined(token) as process:
        maker = Maker.remote()
        refs = [maker.make.remote(number, length) for number, length in ((1, 4), (2, SIZE), (3, 4), (4, SIZE))]
        ray.wait(refs, num_returns=4, timeout=60)
        assert ray.get([tensor_sum.remote(ref) for ref in refs[:2]], timeout=60) == [4, 2 * SIZE]
        process.terminate()
        assert process.wait(60) == 0
        until(lambda: alive() == 1)
        expected = [4, 2 * SIZE, 12, 4 * SIZE]
        assert ray.get([tensor_sum.remote(ref) for ref in refs], timeout=60) == expected
        assert [float(value["tensor"].sum()) for value in ray.get(refs, timeout=60)] == expected
        del refs
        until(lambda: store_is_empty(), 20)


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self, refs: list[Any]) -> None:
        self.refs = refs

    def read(self) -> Any:
        large, small, inner, mixed = self.refs
        values = [ray.get(large).sum(), ray.get(small), ray.get(ray.get(inner)[0]), ray.get(ray.get(mixed)[1]).sum()]
        return [*values[:3], int(values[3])]


def store_is_empty() -> bool:
    """Whether the stores hold nothing: what is kept for refs goes with them."""
    return not any(row.get("objects") for row in need_process().diagnostics.list_stores(0, 10.0))


@pytest.mark.slow
def test_work_that_takes_long_is_not_placed_on_a_node_that_leaves_soon(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its task says, and as the tasks of its function have taken."""
    monkeypatch.setattr("hpcray.core.core_worker.lease_manager.LONG_US", 1e6)

    @ray.remote
    def where(seconds: float) -> str:
        time.sleep(seconds)
        return str(ray.get_runtime_context().get_node_id())

    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setenv("HPCRAY_END_TIME", str(time.time() + 100))
    with joined(token):
        (leaves,) = [row["NodeID"] for row in ray.nodes() if row["NodeID"] != here]
        # Only the node of the program stays; it is busy, while the other one is free.
        with_time = where.options(_expected_time=600)
        assert ray.get([with_time.remote(0.5) for _ in range(4)], timeout=60) == [here] * 4
        assert leaves in ray.get([where.remote(0.5) for _ in range(6)], timeout=60)
        assert leaves in ray.get([where.options(_expected_time=10).remote(0.5) for _ in range(6)], timeout=60)

        @ray.remote
        def learned(seconds: float) -> str:
            time.sleep(seconds)
            return str(ray.get_runtime_context().get_node_id())

        monkeypatch.setattr("hpcray.core.core_worker.lease_manager.DURATION_MARGIN", 400.0)  # 1.5 s are 10 min here
        ray.get([learned.remote(1.5) for _ in range(3)], timeout=60)
        assert ray.get([learned.remote(1.5) for _ in range(3)], timeout=60) == [here] * 3


@pytest.mark.slow
def test_work_that_prefers_a_node_which_leaves_does_not_wait_until_it_has_left(token: Path) -> None:
    """Neither what had queued there nor what comes later, tasks and actors."""

    @ray.remote(num_cpus=1)
    def busy() -> None:
        time.sleep(6)

    with joined(token) as process, joined(token):
        _, leaves, stays = (row["NodeID"] for row in ray.nodes())
        there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(leaves, soft=True)

        @ray.remote(num_cpus=1, scheduling_strategy=there)
        def where() -> str:
            return str(ray.get_runtime_context().get_node_id())

        @ray.remote(num_cpus=1, scheduling_strategy=there)
        class Where:
            def where(self) -> str:
                return str(ray.get_runtime_context().get_node_id())

        assert ray.get(where.remote(), timeout=30) == leaves
        runs = [busy.options(scheduling_strategy=there).remote() for _ in range(2)]
        time.sleep(0.5)
        queued = where.remote()
        assert ray.wait([queued], timeout=0.5)[0] == [], "the node is busy"
        process.terminate()
        began = time.monotonic()
        others = {row["NodeID"] for row in ray.nodes()} - {leaves}
        assert ray.get(queued, timeout=30) in others
        actor = Where.remote()
        assert set(ray.get([where.remote(), actor.where.remote()], timeout=30)) <= others
        assert time.monotonic() - began < 4 and process.poll() is None, "before the tasks there have ended"
        ray.get(runs, timeout=30)
        assert process.wait(30) == 0 and stays in others


@pytest.mark.slow
def test_the_death_of_a_joined_node_is_noticed_and_its_work_done_on_the_next(token: Path) -> None:
    with joined(token) as process, joined(token):
        refs = [there.remote(ray.put(np.full(SIZE, number))) for number in range(8)]
        process.kill()
        until(lambda: alive() == 2)
        assert [ray.get(ref, timeout=30)[0] for ref in refs] == list(range(1, 9))
    until(lambda: alive() == 1)


@pytest.mark.slow
def test_a_joined_node_ends_with_the_job(tmp_path: Path, leak_check: object) -> None:
    path = tmp_path / "token"
    with ray.init("local", num_cpus=1):
        write_private_file(str(path), request_join_token(need_process().place.session_dir))
        there_before = alive()
        line = [sys.executable, "-m", "hpcray", "--num-cpus", "1", "--join", str(path)]
        process = subprocess.Popen(line)
        until(lambda: alive() > there_before)
    assert process.wait(20) == 0


STOPS_THE_HEAD = """\
import os, runpy, signal, sys
from hpcray.runtime.node.cluster_member import ClusterMember

join, head = ClusterMember.join, int(sys.argv.pop(1))

def stop_then_join(member):
    os.kill(head, signal.SIGSTOP)
    join(member)

ClusterMember.join = stop_then_join
runpy.run_module("hpcray", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_node_that_loses_the_head_between_its_number_and_the_table_ends(tmp_path: Path, leak_check: object) -> None:
    """The head is silent from the moment at which the node has its number, as when the link is cut then."""
    path = tmp_path / "token"
    (tmp_path / "stops.py").write_text(STOPS_THE_HEAD)
    with ray.init("local", num_cpus=1, node_timeout=2.0, head_timeout=2.0):
        place = need_process().place.session_dir
        write_private_file(str(path), request_join_token(place))
        session = read_session(place).session
        (head,) = [info.pid for info in live_sessions() if info.session == session]
        line = [sys.executable, str(tmp_path / "stops.py"), str(head), "--num-cpus", "1", "--join", str(path)]
        try:
            ended = subprocess.run(line, capture_output=True, text=True, timeout=40)
        finally:
            os.kill(head, signal.SIGCONT)
        assert ended.returncode == 1, ended.stderr
        assert "this node has not joined the job: the head (node 0) is lost: it was not heard of for 2." in ended.stderr
        assert alive() == 1 and ray.get(ray.remote(lambda: 1).remote(), timeout=10) == 1
        with joined(path):
            assert alive() == 2, "the next one is let in"


MEETS_LATE = """\
import runpy, sys
from hpcray.runtime.node.node_transports import NodeTransports
from hpcray.transport.base import TransportError

meet, left = NodeTransports.meet, int(sys.argv.pop(1))

def meet_late(wires, info):
    global left
    left -= 1
    if left >= 0:
        raise TransportError("the wire is cut")
    meet(wires, info)

NodeTransports.meet = meet_late
runpy.run_module("hpcray", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 1000])
def test_a_node_that_cannot_reach_another_tries_again_and_ends_alone(token: Path, tmp_path: Path, times: int) -> None:
    """It may have been sent a table with a node that has just died."""
    (tmp_path / "late.py").write_text(MEETS_LATE)
    line = [sys.executable, str(tmp_path / "late.py"), str(times), "--num-cpus", "1", "--join", str(token)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        if times == 2:
            until(lambda: alive() == 2)
            process.terminate()
        assert process.wait(30) == (0 if times == 2 else 1)
        said = process.communicate()[1]
    assert ("node 0 on" in said and "cannot be reached: the wire is cut" in said) is (times > 2), said
    until(lambda: alive() == 1)
    with joined(token):
        assert ray.get(ray.remote(lambda: 1).remote(), timeout=10) == 1, "the job goes on"


@pytest.mark.slow
def test_a_join_token_with_another_secret_opens_nothing(token: Path, tmp_path: Path) -> None:
    forged = tmp_path / "forged"
    text = token.read_bytes()
    secret = read_join_token(str(token)).secret

    write_private_file(str(forged), text.replace(base64.b64encode(secret), base64.b64encode(b"x" * len(secret))))
    assert read_join_token(str(forged)).secret != secret
    line = [sys.executable, "-m", "hpcray", "--join", str(forged)]
    environ = {**os.environ, "HPCRAY_START_TIMEOUT": "2"}
    ended = subprocess.run(line, capture_output=True, text=True, timeout=60, env=environ)
    assert ended.returncode == 1 and "does not answer within 2 s" in ended.stderr
    assert alive() == 1 and ray.get(ray.remote(lambda: 1).remote(), timeout=10) == 1


def test_a_join_token_that_others_can_read_is_refused(token: Path) -> None:
    token.chmod(0o644)
    with pytest.raises(StartupError, match="must be yours alone, with mode 0600"):
        read_join_token(str(token))


@pytest.mark.slow
def test_a_program_adds_nodes_and_removes_them(leak_check: object) -> None:
    with ray.init("local", num_cpus=1):
        assert len(cluster.scale(2, cpus=2, executor="local", wait=True)) == 2
        assert ray.cluster_resources()["CPU"] == 5
        with pytest.raises(TaskUnschedulableError, match=r"1 \| 2 \| 2 CPUs, in 3 MPI worlds"):
            mpi.run(print, 3)
        refs = [ray.remote(lambda: np.ones(SIZE)).remote() for _ in range(10)]
        ray.wait(refs, num_returns=10, timeout=30, fetch_local=False)
        (gone,) = cluster.remove_nodes(["n1"])
        assert [row["Alive"] for row in ray.nodes()] == [True, False, True] and gone == ray.nodes()[1]["NodeID"]
        until(lambda: len(cluster.scale(to=1)) == 1)  # a lease may idle for a moment
        assert alive() == 1 and sum(ray.get(ref)[0] for ref in refs) == 10
        with pytest.raises(ValueError, match="runs the program"):
            cluster.remove_nodes([0])
        assert cluster.remove_nodes([1]), "it is gone already"


def test_a_node_outlives_the_command_that_has_added_it(leak_check: object) -> None:
    with ray.init("local", num_cpus=0):
        line = [sys.executable, "-m", "hpcray.cli", "nodes", "add", "--executor", "local", "--wait"]
        line += ["--cpus-per-node", "1", "--job", need_process().place.session_dir]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        time.sleep(0.5)  # within which a node has looked several times whether its starter is there
        assert ray.get(ray.remote(lambda: "there").remote(), timeout=30) == "there" and alive() == 2
        assert cluster.remove_nodes(["n1"])


def test_who_waits_for_new_nodes_that_end_at_once_gets_their_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = ["sh", "-c", "echo no such interface; exit 3"]
    monkeypatch.setattr(added_nodes, "node_command", lambda *given: broken)
    with ray.init("local", num_cpus=1):
        with pytest.raises(SubmitError, match=r"(?s)process \d+ ended with code 3; .*no such interface"):
            cluster.scale(2, cpus=1, executor="local", wait=True)
        assert alive() == 1


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        ("77|CANCELLED|None", "batch job 77 is CANCELLED; .*nodes-77.out"),
        ("77|FAILED|NonZeroExitCode", r"batch job 77 is FAILED \(NonZeroExitCode\); .*nodes-77.out"),
        ("77|PENDING|PartitionTimeLimit", "will not start: PartitionTimeLimit; hint: .*scancel 77"),
        ("77|RUNNING|None", r"77 has been running for \d s, and 2 of its nodes have not; .*nodes-77.out"),
    ],
)
def test_who_waits_for_nodes_of_a_batch_job_that_do_not_come_is_told(
    queue: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, line in {"sbatch": "echo 77", "squeue": f"echo '{queue}'"}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HPCRAY_JOBS", str(tmp_path / "jobs"))
    # No UCX is needed for nodes that do not come.
    monkeypatch.setattr(added_nodes, "request_join_token", lambda *given: b'{"settings": {"start_timeout": 0.5}}')
    monkeypatch.setattr("hpcray.jobs.batch_queues._Cache.time", float("-inf"))
    with ray.init("local", num_cpus=1), pytest.raises(SubmitError, match=said):
        cluster.scale(2, cpus=1, executor="slurm", wait=True)


def test_the_end_of_the_job_cancels_the_batch_jobs_of_nodes_that_have_not_come(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, line in {"sbatch": f"cat > {tmp_path}/script; echo 77", "scancel": f"echo $* >> {tmp_path}/said"}.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{line}\n")
        program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("HPCRAY_JOBS", str(tmp_path / "jobs"))
    with ray.init("local", num_cpus=1):
        name = f"hpcray-added-{read_session(need_process().place.session_dir).session}"
        assert cluster.scale(2, cpus=1, executor="slurm") == ["77"]
        (token,) = tmp_path.rglob("*.join-token")
        assert f"#SBATCH --job-name={name}\n" in (tmp_path / "script").read_text()
    until(lambda: (tmp_path / "said").exists())
    assert (tmp_path / "said").read_text() == f"--name={name}\n" and not token.exists()


def raylets_below(pid: int) -> list[int]:
    """The raylets that a launcher has started so far."""
    found = []
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{child}/comm").read_text().strip() == "hpcray-raylet":
                found.append(child)
    return sorted(child for child in found if Path(f"/proc/{child}/stat").read_text().split()[3] not in map(str, found))


def signalled(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.slow
@pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["all killed", "all stopped", "one killed"])
@pytest.mark.parametrize("when", ["joins", "works", "leaves"])
def test_the_job_goes_on_when_a_world_fails(token: Path, when: str, what: str) -> None:
    """A world of two ranks is killed, stopped as if it were cut off, or loses a rank."""
    rng = random.Random(f"{when} {what}")
    work = ray.remote(num_cpus=1, max_retries=-1, scheduling_strategy="SPREAD")(lambda number: np.full(SIZE, number))
    refs: list[Any] = []
    for _ in range(3 if when == "joins" else 1):
        line = [sys.executable, "-m", "hpcray.cli.launch", "-n", "2", "--cpus-per-node", "1", "--join", str(token)]
        world = subprocess.Popen(line, stderr=subprocess.DEVNULL)
        until(lambda world=world: len(raylets_below(world.pid)) == 2)
        if when == "joins":
            time.sleep(rng.uniform(0.0, 1.5))
        else:
            until(lambda: alive() == 3)
            refs += [work.remote(number) for number in range(20)]
        if when == "leaves":
            ray.wait(refs, num_returns=len(refs), timeout=60, fetch_local=False)
            for row in ray.nodes():
                if row["Alive"] and row["Index"]:
                    threading.Thread(target=leave_quietly, args=(row["NodeID"],), daemon=True).start()
            time.sleep(rng.uniform(0.0, 0.3))
        raylets = raylets_below(world.pid)
        victims = raylets[:1] if what == "one killed" else raylets
        signalled(victims, signal.SIGSTOP if what == "all stopped" else signal.SIGKILL)
        refs += [work.remote(number) for number in range(20, 30)]
        if what == "one killed" and when != "leaves":
            until(lambda: alive() <= 2)
            signalled(raylets[1:], signal.SIGTERM)
        else:
            time.sleep(3.0 if what == "all stopped" else 0.5)
        until(lambda: alive() == 1)
        assert sorted(int(array[0]) for array in ray.get(refs, timeout=60)) == sorted(
            [*range(20), *range(20, 30)] if when != "joins" else [*range(20, 30)] * (len(refs) // 10)
        )
        signalled(victims, signal.SIGCONT)
        if when == "joins" and what == "all stopped":  # it joins all the same, or was given up
            until(lambda world=world: alive() == 3 or world.poll() is not None)
            signalled(raylets_below(world.pid), signal.SIGTERM)
        world.wait(60)


def leave_quietly(node: str) -> None:
    with contextlib.suppress(ValueError, StartupError):
        cluster.remove_nodes([node])
