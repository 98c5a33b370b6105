"""Metrics of a job: of the driver, of tasks and of actors, in one text."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from engine import eventually, hpcray_only, ray

from hpcray.diagnostics.metrics_endpoint import read_metrics
from hpcray.util.metrics import Counter, Gauge

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


def test_counts_of_driver_tasks_and_actors_are_added():
    counter = Counter("test_hits", "how often", ("who",)).set_default_tags({"who": "driver"})

    @ray.remote
    def hit():
        counter.inc(2, {"who": "task"})

    @ray.remote
    class Hits:
        def hit(self):
            Gauge("test_level").set(4)
            counter.inc()

    actor = Hits.remote()
    ray.get([hit.remote() for _ in range(4)] + [actor.hit.remote()])
    counter.inc(0.5)
    context = ray.init(ignore_reinit_error=True)
    directory = context.address_info["session_dir"]

    def told():
        text = read_metrics(directory)
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        values = {line.split("{")[0] + (line.split('who="')[1].split('"')[0] if "who" in line else ""): line.split()[-1]
                  for line in lines}  # fmt: skip
        wanted = {"ray_test_hits_totaltask": "8", "ray_test_hits_totaldriver": "1.5", "ray_test_level": "4"}
        return wanted.items() <= values.items()  # this process may have others, of tests before

    eventually(told)
    command = [sys.executable, "-m", "hpcray.cli", "metrics", "--address", directory]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert 'who="task"' in said.stdout, said.stderr
