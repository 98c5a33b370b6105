"""`init(runtime_env=...)`: for every task and actor of a job."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from engine import alive, eventually, hpcray_only, ray, start

pytestmark = hpcray_only


def test_of_the_job(tmp_path, leak_check):
    (tmp_path / "of_the_job.py").write_text("VALUE = 1\n")
    (tmp_path / "of_the_task.py").write_text("VALUE = 2\n")

    def hook():
        os.environ["HPCRAY_TEST_HOOK"] = "job"

    env = {
        "working_dir": str(tmp_path),
        "excludes": ["of_the_task.py"],
        "env_vars": {"HPCRAY_TEST_J": "job", "HPCRAY_TEST_K": "job"},
        "worker_process_setup_hook": hook,
    }
    with start(num_cpus=1, runtime_env=env) as context:
        directory = context.address_info["session_dir"]

        @ray.remote
        def look():
            import of_the_job

            return of_the_job.VALUE, [os.environ[f"HPCRAY_TEST_{name}"] for name in ("J", "K", "HOOK")]

        @ray.remote
        def look_for_both():
            import of_the_job
            import of_the_task

            return of_the_job.VALUE, of_the_task.VALUE, os.environ["HPCRAY_TEST_J"]

        own = {"env_vars": {"HPCRAY_TEST_K": "task"}}
        assert ray.get(look.remote()) == (1, ["job", "job", "job"])
        assert ray.get(look.options(runtime_env=own).remote()) == (1, ["job", "task", "job"])
        more = {"py_modules": [str(tmp_path / "of_the_task.py")]}
        assert ray.get(look_for_both.options(runtime_env=more).remote()) == (1, 2, "job")
        assert ray.get_runtime_context().runtime_env["worker_process_setup_hook"].endswith("hook")
        assert os.path.isdir(os.path.join(directory, "runtime_env"))
    assert not os.path.exists(directory)


def test_wrong_ones_start_nothing():
    for env, error in (({"env_vars": {"A": 1}}, TypeError), ({"conda": "base"}, NotImplementedError)):
        with pytest.raises(error):
            start(num_cpus=1, runtime_env=env)
        assert not ray.is_initialized()


def test_another_python_goes_with_its_raylet(leak_check):
    """A worker that became another Python by `exec` is still the template's child."""
    with start(num_cpus=1) as context:
        with open(os.path.join(context["session_dir"], "info.json")) as file:
            raylet = json.load(file)["pid"]

        @ray.remote(runtime_env={"py_executable": sys.executable})
        class Other:
            def pid(self):
                return os.getpid()

        other = Other.remote()
        pid = ray.get(other.pid.remote())
        os.kill(raylet, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        eventually(lambda: not os.path.exists(context["session_dir"]))


@pytest.mark.slow  # it has to be slow
def test_a_slow_setup_is_no_worker_that_does_not_come_up(tmp_path):
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 2\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    with start(num_cpus=1, worker_start_timeout=0.5):
        task = ray.remote(runtime_env={"py_executable": str(slow)})(lambda: sys.executable)
        assert ray.get(task.remote()) == sys.executable
