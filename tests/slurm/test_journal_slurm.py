"""`HPCRAY_JOURNAL_DIR`: a job whose head was killed, put back into the queue, finds its names and values."""

from __future__ import annotations

import os
import signal

import pytest
from helpers.slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(240)]

PROGRAM = """\
import time
import hpcray as ray
from hpcray.experimental import internal_kv as kv

ray.init(namespace="here")


@ray.remote(num_cpus=0)
class Counter:
    def __init__(self, count):
        self.count = count

    def more(self):
        self.count += 1
        return self.count


if ray.restart_count() == 0:
    counter = Counter.options(name="counter", lifetime="detached").remote(10)
    kv._internal_kv_put(b"key", b"value")
    print("first", ray.get(counter.more.remote()), flush=True)
    time.sleep(200)
print("again", ray.get(ray.get_actor("counter").more.remote(), timeout=60), kv._internal_kv_get(b"key"), flush=True)
"""


def test_a_job_that_lost_its_head_goes_on_when_it_is_queued_again(slurm: Slurm) -> None:
    kept = {**slurm.environ(), "HPCRAY_JOURNAL_DIR": str(slurm.place / "journals" / "%j")}
    script = slurm.source / "slurm" / "cpu.sbatch"
    job = slurm.sbatch("-N2", "--requeue", "--open-mode=append", script, slurm.write(PROGRAM), environ=kept)
    slurm.wait_output(job, "first 11")
    (pid,) = slurm.processes("hpcray-raylet")["n1"]
    os.kill(pid, signal.SIGKILL)
    assert slurm.finish(job)["JobState"] == "FAILED", slurm.output()
    slurm.said("scontrol", "requeue", job)
    slurm.wait(lambda: slurm.job(job)["Restarts"] == "1", "the second run")
    facts = slurm.finish(job)
    assert facts["JobState"] == "COMPLETED", slurm.output()
    assert "again 11 b'value'" in slurm.output().splitlines(), slurm.output()
    (home,) = (slurm.place / "journals").iterdir()
    assert home.name == job and [path.name for path in home.iterdir()] == ["lock"], "the job is done"
    slurm.check()
