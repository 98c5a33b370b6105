"""Ray Data on three nodes: a node that is drained gets no work any more, and its loss costs nothing."""

from __future__ import annotations

import time

import pytest
from helpers.slurm import Slurm

pytest.importorskip("pyarrow")
pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]
_PATIENCE = 300.0

# A pool with an actor on each node notes where and when it worked. It goes on until the file `stop` is there.
PIPELINE = """\
import itertools, json, os, socket, sys, time
import ray

PLACE = sys.argv[1]


class Note:
    def __init__(self):
        self.host = socket.gethostname()
        self.file = open(os.path.join(PLACE, f"{self.host}-{os.getpid()}"), "a", buffering=1)

    def __call__(self, batch):
        time.sleep(0 if os.path.exists(os.path.join(PLACE, "stop")) else 0.4)
        self.file.write(f"{time.time()}\\n")
        return {"id": batch["id"] * 2}


ray.init()
rows = ray.data.range(6000, override_num_blocks=1200).map_batches(
    Note, compute=ray.data.ActorPoolStrategy(size=3), num_cpus=1, batch_size=5
)
total = sum(row["id"] for row in rows.iter_rows())
print("total", total, flush=True)
"""


def test_a_drained_node_gets_no_work(slurm: Slurm, lent: dict[str, str]) -> None:
    def newest(host: str) -> float:
        found = [line for path in slurm.place.glob(f"{host}-*") for line in path.read_text().splitlines()]
        return max(map(float, found), default=0.0)

    batch = slurm.source / "slurm" / "cpu.sbatch"
    script, environ = slurm.write(PIPELINE), {**lent, "HPCRAY_PRELOAD": "ray.data"}
    job = slurm.sbatch("-N3", batch, "--as-ray", script, slurm.place, environ=environ)
    slurm.wait(lambda: all(newest(f"n{number}") for number in (1, 2, 3)), "work on all nodes", _PATIENCE)
    drained = time.time()
    slurm.said("scontrol", "update", "nodename=n3", "state=drain", "reason=test")
    try:
        slurm.wait(lambda: newest("n3") < time.time() - 8 < newest("n1"), "the end of work on n3")
        noticed = newest("n3") - drained
        assert noticed < 45.0, "Slurm is asked every 30 s"
        slurm.kill("n3")
        slurm.write("", "stop")
        facts = slurm.finish(job, _PATIENCE)
    finally:
        slurm.said("scontrol", "update", "nodename=n3", "state=resume")
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), slurm.output()
    assert f"total {sum(range(6000)) * 2}" in slurm.output()
    print(f"the last work on n3 was {noticed:.1f} s after the drain")
    slurm.check()
