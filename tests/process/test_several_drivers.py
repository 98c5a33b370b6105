"""Several drivers of one cluster: each is a job with workers, import path and namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import hpcray as ray
from hpcray.util.state import list_actors, list_jobs, list_workers

DRIVER = """
import json, os, sys
import hpcray as ray
ray.init({address!r}, runtime_env={{"env_vars": {{"OF_DRIVER": "{name}"}}}})

@ray.remote
def here():
    import mine
    context = ray.get_runtime_context()
    nested = ray.get(deeper.remote()) if {name!r} == "b" else None
    return os.getpid(), mine.NAME, context.get_job_id(), os.environ.get("OF_DRIVER"), os.getcwd(), nested

@ray.remote
def deeper():
    return ray.get_runtime_context().get_job_id()

@ray.remote
class Named:
    def ping(self):
        return os.getpid()

actor = Named.options(name="same").remote()
context = ray.get_runtime_context()
rows = [ray.get(actor.ping.remote()), *ray.get([here.remote(), here.remote()])]
print(json.dumps([context.get_job_id(), context.namespace, rows]))
"""

_WORKERS = [("worker_type", "=", "WORKER"), ("is_alive", "=", True)]


def run(address: str, place: Path) -> tuple[str, str, int, list[list[object]]]:
    place.mkdir()
    (place / "mine.py").write_text(f"NAME = {place.name!r}\n")
    (place / "driver.py").write_text(DRIVER.format(address=address, name=place.name))
    command = [sys.executable, str(place / "driver.py")]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    job, namespace, (actor, *rows) = json.loads(done.stdout.splitlines()[-1])
    return job, namespace, actor, rows


def test_each_driver_is_a_job_with_its_own_workers_path_and_names(tmp_path: Path) -> None:
    with ray.init("local", num_cpus=3) as context:

        @ray.remote
        def pid() -> tuple[int, str]:
            import os

            return os.getpid(), os.environ.get("OF_DRIVER", "")

        mine = ray.get([pid.remote() for _ in range(6)])
        jobs = [ray.get_runtime_context().get_job_id()]
        pids, spaces = {one for one, _ in mine}, {ray.get_runtime_context().namespace}
        for name in ("a", "b"):
            job, space, actor, rows = run(context["address"], tmp_path / name)
            jobs.append(job)
            assert not pids & {actor, *(row[0] for row in rows)}, "a worker serves one driver"
            pids |= {actor, *(row[0] for row in rows)}  # type: ignore[arg-type]
            assert space not in spaces
            spaces.add(space)
            for row in rows:
                assert row[1:] == [name, job, name, str(tmp_path / name), job if name == "b" else None]
        assert jobs == ["01000000", "02000000", "03000000"]
        assert sorted(row.job_id for row in list_actors()) == jobs[1:], "each actor is of its owner's job"
        listed = list_jobs(detail=True)
        assert [row.job_id for row in listed] == jobs
        assert [row.status for row in listed] == ["RUNNING", "SUCCEEDED", "SUCCEEDED"]
        assert listed[0].driver_info["pid"] == str(os.getpid())
        first, second = listed[1:]
        assert str(tmp_path / "a") in first.entrypoint and str(tmp_path / "b") in second.entrypoint
        assert first.start_time < first.end_time < second.start_time < second.end_time
        assert {said for _, said in ray.get([pid.remote() for _ in range(6)])} == {""}
        deadline = time.monotonic() + 10
        while len(list_workers(filters=_WORKERS)) > 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(list_workers(filters=_WORKERS)) <= 3, "idle ones above the CPUs end"


LISTING = """
import json, os, sys
import hpcray as ray
from hpcray.util.state import get_task, list_jobs
ray.init({address!r})

@ray.remote(num_cpus=0)
def here():
    return ray.get_runtime_context().get_task_id()

rows = {{row.job_id: row.driver_info["pid"] for row in list_jobs()}}
task = get_task(ray.get(here.remote()))
print(json.dumps([rows, os.getpid(), task.job_id, task.parent_task_id]))
"""


def test_jobs_and_tasks_are_listed_with_the_job_of_their_driver(tmp_path: Path) -> None:
    with ray.init("local", num_cpus=2) as context:
        script = tmp_path / "listing.py"
        script.write_text(LISTING.format(address=context.address_info["address"]))
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        jobs, pid, job, parent = json.loads(done.stdout.splitlines()[-1])
        mine = ray.get_runtime_context().get_job_id()
        assert sorted(jobs) == sorted({job, mine}) and job != mine and jobs[job] == str(pid)
        assert parent == "f" * 40 + job


ENDING = """
import os, signal, sys
import hpcray as ray
ray.init({address!r})
print(os.getpid(), flush=True)
{end}
"""


def test_drivers_that_have_ended_are_listed_with_how_they_ended(tmp_path: Path) -> None:
    with ray.init("local", num_cpus=1) as context:

        def ended(end: str) -> tuple[str | None, str | None]:
            script = ENDING.format(address=context.address_info["address"], end=end)
            done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
            deadline, filters = time.monotonic() + 30, [("pid", "=", int(done.stdout)), ("is_alive", "=", False)]
            while not (rows := list_workers(filters=filters, detail=True)) and time.monotonic() < deadline:
                time.sleep(0.1)
            (row,) = rows
            assert row.worker_type == "DRIVER" and row.ip and 0 < row.start_time_ms < row.end_time_ms
            return row.exit_type, row.exit_detail

        for end in ("ray.shutdown()", "pass", "sys.exit(3)"):
            kind, detail = ended(end)
            assert kind == "INTENDED_USER_EXIT" and detail is not None and "ray.shutdown()" in detail, end
        kind, detail = ended("os.kill(os.getpid(), signal.SIGKILL)")
        assert kind == "SYSTEM_ERROR" and detail is not None and detail.startswith("Worker exits unexpectedly")
        (mine,) = list_workers(filters=[("pid", "=", os.getpid())])
        assert mine.is_alive and mine.exit_type is None


LEAVING = """
import os, sys, time
import hpcray as ray
ray.init({address!r})
place, name = {place!r}, {name!r}

def runs(what):
    open(os.path.join(place, f"{{name}}-{{what}}-{{os.getpid()}}"), "w").close()
    time.sleep(1000)

task = ray.remote(num_cpus=0, max_retries=-1)(runs)
queued = task.options(resources={{name: 1}})

@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Actor:
    def runs(self, what):
        runs(what)

def seen(what):
    return [one for one in os.listdir(place) if one.startswith(f"{{name}}-{{what}}-")]

mine = []  # of the worker: what is in it outlives the task

@ray.remote(num_cpus=0)
def outer():
    actor = Actor.remote()
    mine.extend([task.remote("task"), actor, actor.runs.remote("actor"), *[queued.remote("queued") for _ in range(5)]])
    while not (seen("task") and seen("actor") and len(seen("queued")) == 1):
        time.sleep(0.02)

@ray.remote(num_cpus=0)
class Detached:
    def start(self):
        self.ref = task.remote("of_detached")
        while not seen("of_detached"):
            time.sleep(0.02)

ray.get(outer.remote())
if name == "killed":
    ray.get(Detached.options(name="stays", namespace="all", lifetime="detached").remote().start.remote())
print("up", flush=True)
sys.stdin.read()
"""


def test_what_tasks_of_an_ended_driver_have_started_ends_with_it(tmp_path: Path, leak_check: object) -> None:
    def pids(name: str) -> set[int]:
        found = {int(one.rpartition("-")[2]) for one in os.listdir(tmp_path) if one.startswith(name)}
        return {pid for pid in found if os.path.exists(f"/proc/{pid}")}

    def wait_for_end(name: str) -> None:
        deadline = time.monotonic() + 30
        while pids(name) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not pids(name)

    with ray.init("local", num_cpus=2, resources={"exits": 1, "killed": 1}) as context:
        drivers = {}
        for name in ("exits", "killed"):  # the cluster's first driver is this process, and has its own workers
            program = LEAVING.format(address=context["address"], place=str(tmp_path), name=name)
            drivers[name] = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        for driver in drivers.values():
            assert driver.stdout is not None and driver.stdout.readline() == "up\n"
        assert len(pids("exits-")) == 3 and len(pids("killed-")) == 4
        drivers["killed"].kill()
        wait_for_end("killed-task")
        wait_for_end("killed-actor")
        wait_for_end("killed-queued")
        assert len(pids("exits-")) == 3 and len(pids("killed-of_detached-")) == 1
        drivers["exits"].communicate()
        assert drivers["exits"].returncode == 0
        wait_for_end("exits-")
        ray.get(ray.remote(resources={"exits": 1, "killed": 1})(os.getpid).remote(), timeout=30)
        assert len([one for one in os.listdir(tmp_path) if "queued" in one]) == 2, "queued tasks have not begun"
        assert len(pids("killed-of_detached-")) == 1
        ray.kill(ray.get_actor("stays", namespace="all"))
        drivers["killed"].communicate()
