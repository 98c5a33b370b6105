"""The autoscaler with nodes that are processes of this machine: what a program sees of it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.leaks import LeakCheck

import hpcray as ray
from hpcray.compat.names.autoscaler import request_resources
from hpcray.exceptions import ActorUnschedulableError, TaskUnschedulableError
from hpcray.platform.process_tree import descendants
from hpcray.runtime.core_worker.core_worker import need_process

TYPES = '{"small": {"resources": {"CPU": 2}}, "disks": {"resources": {"CPU": 1, "disk": 2}, "max_workers": 1}}'


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, status()
        time.sleep(0.05)


def alive() -> list[dict[str, Any]]:
    return [row for row in ray.nodes() if row["Alive"]]


def status() -> str:
    line = [sys.executable, "-m", "hpcray.cli", "status", "--job", need_process().place.session_dir]
    return subprocess.run(line, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture
def growing(leak_check: LeakCheck) -> Iterator[None]:
    """A job of one node with one CPU, that may have three nodes."""
    settings = {"max_nodes": 3, "idle_node_timeout": 1.0, "node_provider": "local", "node_types": TYPES}
    with ray.init("local", num_cpus=1, object_store_memory=64 << 20, **settings):
        yield


@ray.remote
def work(number: int) -> tuple[int, str]:
    time.sleep(0.3)
    return number, ray.get_runtime_context().get_node_id()


@ray.remote(resources={"disk": 1}, num_cpus=0)
class Disk:
    def where(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def keep(self) -> Any:
        return [ray.put(b"x" * 1000)]


@ray.remote(num_cpus=2)
def makes_an_object() -> Any:
    return [ray.put(b"y" * 500_000)]


@pytest.mark.slow
def test_nodes_come_for_what_waits_and_go_when_they_are_idle(growing: None) -> None:
    found = ray.get([work.remote(number) for number in range(40)], timeout=60)
    assert [number for number, _ in found] == list(range(40)) and len({node for _, node in found}) > 1
    until(lambda: len(alive()) == 1)
    disk = Disk.remote()
    where = ray.get(disk.where.remote(), timeout=60)
    (row,) = [row for row in alive() if row["NodeID"] == where]
    assert row["Labels"]["ray.io/node-group"] == "disks" and row["Resources"]["disk"] == 2
    time.sleep(2.5)
    assert ray.get(disk.where.remote(), timeout=10) == row["NodeID"], "a node with an actor is not idle"
    shown = status()
    assert "1 disks" in shown and "(no pending nodes)" in shown and "(no failures)" in shown, shown


@pytest.mark.slow
def test_a_node_whose_workers_own_objects_stays_until_nobody_needs_them(growing: None) -> None:
    (ref,) = ray.get(makes_an_object.remote(), timeout=60)
    time.sleep(4)
    assert len(alive()) == 2
    assert ray.get(ref, timeout=10) == b"y" * 500_000
    del ref
    until(lambda: len(alive()) == 1)


def test_what_no_node_and_no_type_can_serve_is_an_error_at_once(growing: None) -> None:
    with pytest.raises(TaskUnschedulableError, match="nor any that may come"):
        ray.get(work.options(num_cpus=3).remote(0), timeout=30)
    actor = Disk.options(resources={"disk": 3}).remote()
    with pytest.raises(ActorUnschedulableError, match="disks"):
        ray.get(actor.where.remote(), timeout=30)
    assert ray.get(work.options(num_cpus=2).remote(7), timeout=60)[0] == 7, "pending, not infeasible"


@pytest.mark.slow
def test_requested_resources_are_a_floor_until_they_are_taken_back(growing: None) -> None:
    request_resources(bundles=[{"CPU": 2}, {"CPU": 2}])
    until(lambda: len(alive()) == 3)
    time.sleep(2.5)
    assert len(alive()) == 3
    assert "From request_resources: 2 x {CPU: 2}" in status()
    request_resources()
    until(lambda: len(alive()) == 1)


@pytest.mark.slow
def test_a_placement_group_gets_its_nodes(growing: None) -> None:
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}, {"CPU": 1}], strategy="STRICT_SPREAD")
    assert group.wait(60)
    assert len(alive()) == 3
    ray.util.remove_placement_group(group)
    until(lambda: len(alive()) == 1)


@pytest.mark.slow
def test_resources_that_serve_makes_up_are_on_nodes_that_join_later(growing: None) -> None:
    name = "node:__internal_implicit_resource_app:replica"
    replicas = [Where.options(resources={name: 1}).remote()]
    assert ray.get(replicas[0].node.remote(), timeout=30)
    replicas += [Where.options(resources={name: 1}).remote() for _ in range(2)]
    assert len(set(ray.get([one.node.remote() for one in replicas], timeout=60))) == 3, "one of them on each node"
    tasks = [work.options(num_cpus=0, resources={f"{name}2": 1}).remote(number) for number in range(9)]
    assert [number for number, _ in ray.get(tasks, timeout=60)] == list(range(9)), "tasks too"


@ray.remote(num_cpus=0)
class Where:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


INTERRUPTED = """\
import time
import hpcray as ray
ray.init("local", num_cpus=1, max_nodes=3, min_nodes=3, node_provider="local", object_store_memory=64 << 20)
while len(ray.nodes()) < 3:
    time.sleep(0.05)
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_ctrl_c_ends_all_that_was_started_and_says_so(leak_check: LeakCheck) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None and program.stdout.readline() == "up\n"
        nodes = [pid for pid in descendants(program.pid) if "--join" in command_line(pid)]
        began = time.monotonic()
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=30)
    assert time.monotonic() - began < 10, errors
    assert "the job ends, and with it 2 nodes that it has added" in errors
    assert nodes and not [pid for pid in nodes if command_line(pid)]


def command_line(pid: int) -> str:
    """Of a living process; "" of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""
