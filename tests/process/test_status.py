"""`hpcray status` of a job that has work waiting, an actor without a place, and placement groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from engine import PATIENCE, eventually, ray

pytestmark = pytest.mark.usefixtures("session")
WIDE = {**os.environ, "COLUMNS": "160"}
INIT = {"num_cpus": 2, "resources": {"licence": 2}, "preload": "colorsys,not_there"}


def status(*more: str) -> str:
    command = [sys.executable, "-m", "hpcray.cli", "status", "--address", ray.init(ignore_reinit_error=True)["address"]]
    done = subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE, check=False, env=WIDE)
    assert done.returncode == 0, done.stderr
    return done.stdout


@ray.remote(resources={"licence": 1})
class Holder:
    def ready(self):
        return True


def test_hpcray_status_says_what_is_preloaded():
    text = status()
    assert "preloaded: colorsys\n  not_there could not be preloaded on node 0: ModuleNotFoundError:" in text, text
    found = json.loads(status("--json"))["preloaded"]["0"]
    assert found["colorsys"] == "" and "ModuleNotFoundError" in found["not_there"]


def test_hpcray_status_shows_demand_and_placement_groups():
    holder = Holder.options(num_cpus=0).remote()
    assert ray.get(holder.ready.remote(), timeout=PATIENCE)
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 0.5}], name="mine")
    late = ray.util.placement_group([{"CPU": 9}], name="never")
    assert group.wait(PATIENCE)
    waiting = [ray.remote(lambda: 1).options(num_cpus=0, resources={"moon": 1}).remote() for _ in range(4)]
    lost = Holder.options(num_cpus=0, resources={"licence": 5}).remote()
    eventually(lambda: "moon" in status() and "actors Holder" in status(), "it is shown")
    text = status()
    assert "1.5/2" in text and "licence 1/2" in text, text
    assert "4 x {moon: 1} for tasks of 1 process, which no node can ever serve" in text
    assert "1 x {licence: 5} for actors Holder, which no node can ever serve" in text
    assert "mine: CREATED, PACK of {CPU: 1}, {CPU: 0.5} on node 0" in text
    assert "never: PENDING, PACK of {CPU: 9}" in text
    found = json.loads(status("--json"))
    assert found["demand"] == {"0": 4} and {row["name"] for row in found["placement_groups"]} == {"mine", "never"}
    assert found["nodes"][0]["Labels"]["ray.io/node-id"] == ray.get_runtime_context().get_node_id()
    for one in (group, late):
        ray.util.remove_placement_group(one)
    del waiting, lost
