"""`get_draining_nodes()`: what Slurm takes away from a job, as every process of the job sees it."""

from __future__ import annotations

import pytest
from helpers.slurm import SRUN, Slurm

pytestmark = pytest.mark.slurm

PROGRAM = """\
import os, time
import hpcray.compat.ray
import ray
from ray._private.state import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init()


@ray.remote(num_cpus=0)
class Looker:
    def look(self):
        from ray._private.state import state

        return state.get_draining_nodes()


names = {row["NodeID"]: row["NodeManagerHostname"] for row in ray.nodes()}
lookers = [Looker.options(scheduling_strategy=On(ident, soft=False)).remote() for ident in names]
ray.get([looker.__ray_ready__.remote() for looker in lookers])


def print_once(enough):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [state.get_draining_nodes(), *ray.get([looker.look.remote() for looker in lookers])]
        if all(one == found[0] for one in found) and enough(found[0]):
            left = [deadline and round(deadline / 1000 - time.time()) for deadline in found[0].values()]
            print(*sorted(names[ident] for ident in found[0]), min(left), max(left), flush=True)
            return
        time.sleep(0.1)
    print("never", found, flush=True)


print("ready", flush=True)
while not os.path.exists("drained"):
    time.sleep(0.05)
print_once(lambda found: found)
print_once(lambda found: len(found) == len(names))
"""


def test_a_node_that_is_drained_and_a_job_that_drains(slurm: Slurm) -> None:
    script = slurm.write(PROGRAM)
    line = [*SRUN, "-N3", "-J", "drained", "python", "-m", "hpcray", script]
    with slurm.start(*line, environ={"HPCRAY_DRAIN_TIMEOUT": "20"}) as started:
        assert started.line() == "ready", started.wait()
        slurm.said("scontrol", "update", "nodename=n2", "state=drain", "reason=test")
        try:
            slurm.write("", "drained")
            assert started.line() == "n2 0 0", "Slurm waits for the job's end, whenever that is"
            slurm.said("scancel", "--signal=TERM", "-n", "drained")
            *hosts, least, most = started.line().split()
            assert hosts == ["n1", "n2", "n3"] and 10 <= int(least) <= int(most) <= 20, "who asks takes part"
            assert started.wait().code == 0
        finally:
            slurm.said("scontrol", "update", "nodename=n2", "state=resume")
    slurm.check()
