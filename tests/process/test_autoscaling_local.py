"""The autoscaler with nodes that are processes of this machine: what a program sees of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.leaks import LeakCheck

import hpcray as ray
from hpcray.compat.names.autoscaler_sdk import request_resources
from hpcray.exceptions import ActorUnschedulableError, TaskUnschedulableError
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
    line = [sys.executable, "-m", "hpcray.cli", "status", "--job", need_process().session_dir]
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
