"""Device objects that pass by UCX from a device of a node to one of another node: made-up devices, and TCP for RDMA."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from helpers.jobs import ROOT, on_two_nodes, run_with_torch
from helpers.leaks import LeakCheck

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="no UCX"),
    pytest.mark.timeout(180),
]
PROGRAM = """
import json, sys, threading
import torch
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init()
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes()]
LENGTH = 16 << 20

@ray.remote(num_cpus=0)
class Holder:
    def __init__(self, directory, number):
        from helpers.fake_device_driver import FakeDeviceDriver
        from hpcray.tensors import tensor_pulls
        from hpcray.tensors import device_memory
        tensor_pulls.TRIAL_TIME = 20.0
        device_memory.running_kernel = lambda: f"host {number}"
        self.driver = FakeDeviceDriver(directory, visible=(f"gpu-{number}",))
        device_memory.use_driver(self.driver)
    @ray.method(tensor_transport="auto")
    def make(self):
        return [self.driver.tensor(LENGTH).copy_(torch.arange(float(LENGTH)))]
    @ray.method(tensor_transport="ucx")
    def make_for_ucx(self):
        return self.make()
    @ray.method(tensor_transport="auto")
    def make_many(self, count):
        return {number: self.driver.tensor(1000, float(number)) for number in range(count)}
    def read(self, value):
        return bool(torch.equal(value[0], torch.arange(float(LENGTH)))) and self.driver.is_on_device(value[0])
    def read_many(self, value):
        return all(bool((tensor == number).all()) for number, tensor in value.items())
    def state(self):
        names = {thread.name for thread in threading.enumerate()}
        return len(self.driver.exposed), len(self.driver.down), "hpcray-device-wire" in names

maker, reader = (Holder.options(scheduling_strategy=where[n]).remote(sys.argv[1], n) for n in range(2))
good = [ray.get(reader.read.remote(maker.make.remote())), ray.get(reader.read_many.remote(maker.make_many.remote(500)))]
try:
    forced = ray.get(reader.read.remote(maker.make_for_ucx.remote()))
except ray.exceptions.RaySystemError as error:
    forced = str(error)
print(json.dumps({"good": good, "forced": forced, "state": ray.get([maker.state.remote(), reader.state.remote()])}))
"""


@pytest.mark.parametrize("transports", ["tcp", "none"])
def test_the_rows_of_two_hosts_are_measured_without_gpus_too(leak_check: LeakCheck, transports: str) -> None:
    program = ROOT / "benchmarks" / "direct_rows.py"
    command = on_two_nodes(program, "--device", "cpu", "--largest", "1000000", "--seconds", "0.05")
    ended = run_with_torch(command, HPCRAY_SAME_HOST="0", HPCRAY_DEVICE_TRANSPORTS=transports)
    if transports == "none":
        assert re.search("GPUDirect +untried: HPCRAY_DEVICE_TRANSPORTS=none$", ended.out, re.MULTILINE), ended.out
    else:
        assert "GPUDirect, 1 MB, rate" in ended.out and "through both hosts, 1 MB" in ended.out, ended.out


@pytest.mark.parametrize(
    ("transports", "forced"),
    [
        ("tcp", ""),
        ("auto", "has no RDMA adapter; hint"),
        ("none", "HPCRAY_DEVICE_TRANSPORTS=none; hint"),
        ("rc,dc,cuda_copy,gdr_copy", "UCX has no transport of rc,dc,cuda_copy,gdr_copy"),
    ],
)
def test_tensors_pass_from_a_device_of_a_node_to_one_of_another_node(
    tmp_path: Path, leak_check: LeakCheck, transports: str, forced: str
) -> None:
    if transports == "auto" and os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("this machine has RDMA")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_with_torch(
        on_two_nodes(program, str(tmp_path)), HPCRAY_SAME_HOST="0", HPCRAY_DEVICE_TRANSPORTS=transports,
        HPCRAY_OBJECT_STORE_MEMORY=str(256 << 20),
    )  # fmt: skip
    found = json.loads(ended.out.splitlines()[-1])
    assert found["good"] == [True, True] and not (tmp_path / "misuse").exists(), found
    (sent, down, wire), (received, _, _) = found["state"]
    if not forced:
        assert found["forced"] is True
        assert sent == received == 2 + 500 + 2 and down == 0 and wire, found
        return
    assert forced in found["forced"] and sent == received == 0 and down > 0, found
    assert not wire or transports.startswith("rc"), "UCX is not loaded where it cannot be used"
    assert ("do not pass from device to device" in ended.err) == transports.startswith("rc"), ended.err[-2000:]
