"""Device objects that pass in pieces from a node to another one: made-up devices, and the object plane between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.jobs import on_two_nodes, run_with_torch
from helpers.leaks import LeakCheck

from hpcray.platform.launcher_environment import open_mpi_wheel_prefix

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not open_mpi_wheel_prefix(), reason="no Open MPI from PyPI"),
    pytest.mark.timeout(180),
]

PROGRAM = """
import json, sys, time
import torch
import hpcray as ray
from hpcray.runtime.core_worker.core_worker import need_process

ray.init()
where = [ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in ray.nodes()]
LENGTH = 5 << 18

@ray.remote(num_cpus=0)
class Holder:
    def __init__(self, directory, device, pause):
        from helpers.fake_device_driver import FakeDeviceDriver
        from hpcray.tensors import tensor_pulls
        from hpcray.tensors import device_memory
        from hpcray.tensors import device_pieces
        tensor_pulls._SMALLEST = tensor_pulls._LARGEST = device_pieces.PIECED_SIZE = 1 << 20
        self.driver = FakeDeviceDriver(directory, visible=(device,))
        self.driver.pause = pause
        self.times = []
        self.driver.transfers = lambda: self.times.append(time.monotonic()) or True
        device_memory.use_driver(self.driver)
    @ray.method(tensor_transport="auto")
    def make(self):
        tensor = self.driver.tensor(LENGTH)
        return [tensor.copy_(torch.arange(float(LENGTH)))]
    def read(self, value):
        right = bool(torch.equal(value[0], torch.arange(float(LENGTH))))
        return right and self.driver.is_on_device(value[0])
    def copies(self):
        return self.times, len(self.driver.down), len(self.driver.up), self.driver.leaks()

maker = Holder.options(scheduling_strategy=where[0]).remote(sys.argv[1], "gpu-0", 0.15)
reader = Holder.options(scheduling_strategy=where[1]).remote(sys.argv[1], "gpu-1", 0.0)
ref = maker.make.remote()
good = [ray.get(reader.read.remote(ref)) for _ in range(2)]
(down, pieces, _, left), (up, _, read, left_there) = ray.get([maker.copies.remote(), reader.copies.remote()])
stores = need_process().diagnostics.list_stores(0, 60.0)
pulled = {store["node"]: store["pulled"] for store in stores}
del ref
print(json.dumps({"good": good, "overlap": up[1] < down[-1], "pieces": [pieces, read], "pulled": pulled[1],
                  "left": [name for name in left + left_there if "local" in name]}))
"""


@pytest.mark.parametrize("plane", ["ucx", "mpi"])
@pytest.mark.parametrize("same_host", ["0", "1"], ids=["other host", "same host"])
def test_pieces_are_read_on_the_other_node_while_others_are_written(
    tmp_path: Path, leak_check: LeakCheck, same_host: str, plane: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_with_torch(
        on_two_nodes(program, str(tmp_path)), HPCRAY_SAME_HOST=same_host, HPCRAY_DATA_PLANE=plane,
        HPCRAY_OBJECT_STORE_MEMORY=str(64 << 20),
    )  # fmt: skip
    found = json.loads(ended.out.splitlines()[-1])
    assert found["good"] == [True, True] and not found["left"] and not (tmp_path / "misuse").exists()
    assert found["overlap"], "a piece is read before the last one is copied"
    pieces, read = found["pieces"]
    assert pieces == 5 and read == 2 * pieces, found
    assert (found["pulled"] >= pieces) == (same_host == "0"), found
