"""`hpcray why` where nothing computes: a placement group without a place, an environment that is being set up."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from engine import PATIENCE, eventually, hpcray_only, ray

from hpcray.diagnostics.wait_graph import WaitGraph, show_lines
from hpcray.runtime.core_worker.core_worker import need_process

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


def why(ref) -> str:
    return "\n".join(show_lines(WaitGraph(need_process(), PATIENCE).explain(ref.binary())))


def test_why_shows_a_placement_group_that_has_no_place():
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 3}], name="large")
    ready = group.ready()
    eventually(lambda: "'large' is PENDING" in why(ready))
    told = why(ready)
    assert f"ready() of placement group {group.id.hex()} waits" in told
    assert "2 bundles" in told and "node 0 can never serve it: CPU: 3 wanted, 2 there" in told
    ray.util.remove_placement_group(group)
    with pytest.raises(ray.exceptions.RayError):
        ray.get(ready)


def test_why_shows_a_runtime_env_that_is_being_set_up(tmp_path: Path):
    began, go = tmp_path / "began", tmp_path / "go"

    def hook():
        began.touch()
        while not go.exists():
            time.sleep(0.01)

    @ray.remote(runtime_env={"worker_process_setup_hook": hook})
    def work():
        return 1

    ref = work.remote()
    eventually(began.exists)
    eventually(lambda: "has been setting up its runtime_env for" in why(ref))
    assert "hook" in why(ref).splitlines()[-1]
    go.touch()
    assert ray.get(ref) == 1


def test_why_shows_a_wait_of_a_task_and_what_it_is_for(tmp_path: Path):
    go = tmp_path / "go"

    @ray.remote(num_cpus=0)
    def slow(number):
        while not go.exists():
            time.sleep(0.01)
        return number

    @ray.remote(num_cpus=0)
    def outer():
        refs = [slow.remote(number) for number in range(3)]
        return len(ray.wait(refs, num_returns=2)[0])

    ref = outer.remote()
    eventually(lambda: "it waits in wait for 2 of 3 objects" in why(ref))
    eventually(lambda: why(ref).count("runs slow") == 3)
    all_waits = "\n".join(show_lines(WaitGraph(need_process(), PATIENCE).explain_all()))
    assert "in wait for 2 of 3 objects" in all_waits
    go.touch()
    assert ray.get(ref) == 2
    eventually(lambda: "waits in wait" not in "\n".join(show_lines(WaitGraph(need_process(), PATIENCE).explain_all())))
