"""Variables of a runtime_env that Python, the C library or a module reads once, when it starts or is imported."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import pytest
from engine import hpcray_only, ray
from helpers.jobs import MPIRUN, ROOT, Ended, Job

pytestmark = pytest.mark.usefixtures("session")
INIT = {"num_cpus": 2}


def run(command: list[str], environ: dict[str, str]) -> Ended:
    with Job(command, environ) as job:
        return job.wait(120.0)


def _in_task(variables: dict[str, str], function: Any) -> Any:
    return ray.get(ray.remote(runtime_env={"env_vars": variables})(function).remote(), timeout=60)


class TestReadOnce:
    def test_the_time_zone_is_one_for_the_process_and_its_children(self):
        def look():
            import datetime
            import subprocess

            said = subprocess.run(["date", "+%Z"], capture_output=True, text=True, check=True).stdout.strip()
            return time.strftime("%Z"), time.localtime(0).tm_hour, str(datetime.datetime.fromtimestamp(0)), said

        assert _in_task({"TZ": "Asia/Tokyo"}, look) == ("JST", 9, "1970-01-01 09:00:00", "JST")

    def test_in_an_actor(self):
        @ray.remote(runtime_env={"env_vars": {"TZ": "Asia/Tokyo"}})
        class Clock:
            def zone(self):
                return time.strftime("%Z")

        assert ray.get(Clock.remote().zone.remote(), timeout=60) == "JST"

    def test_python_s_own(self):
        def look():
            import tracemalloc

            return sys.get_int_max_str_digits(), tracemalloc.is_tracing()

        assert _in_task({"PYTHONINTMAXSTRDIGITS": "640", "PYTHONTRACEMALLOC": "1"}, look) == (640, True)

    def test_the_kernels_of_a_library_that_the_fork_server_has_loaded(self):
        def look():
            import numpy  # noqa: F401
            from threadpoolctl import threadpool_info

            return [one["architecture"] for one in threadpool_info() if one["internal_api"] == "openblas"]

        assert _in_task({"OPENBLAS_CORETYPE": "Prescott"}, look) != _in_task({"LIKE_ANY": "1"}, look)


def _threads():
    import numpy  # noqa: F401
    from threadpoolctl import threadpool_info

    return os.environ["OMP_NUM_THREADS"], {one["num_threads"] for one in threadpool_info()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a library has no more threads than there are cores")
class TestThreadsOfLibraries:
    @pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"])
    def test_a_number_in_env_vars_holds(self, name):
        found = ray.remote(num_cpus=1, runtime_env={"env_vars": {name: "2"}})(_threads).remote()
        assert ray.get(found, timeout=60)[1] == {2}

    @hpcray_only
    def test_a_number_of_the_job_holds_on_two_nodes_in_driver_tasks_and_actors(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(_PROGRAM)
        ended = run(
            [*MPIRUN, "--bind-to", "none", "-n", "2", sys.executable, "-m", "hpcray", str(program)],
            {"OMP_NUM_THREADS": "2"},
        )
        assert ended.code == 0 and ended.out.split() == ["2"] * 4, ended


_PROGRAM = """
import hpcray as ray

def threads():
    import numpy
    from threadpoolctl import threadpool_info
    return max(one["num_threads"] for one in threadpool_info())

@ray.remote
class Actor:
    def threads(self):
        return threads()

ray.init()
task = ray.remote(scheduling_strategy="SPREAD", num_cpus=1)(threads)
print(threads(), *ray.get([task.remote(), task.remote(), Actor.remote().threads.remote()]))
"""


@hpcray_only
class TestPreloadedModules:
    def test_what_a_preloaded_module_read_is_read_again_where_a_task_has_it_otherwise(self, tmp_path):
        (tmp_path / "with_mode.py").write_text(
            "import os\nMODE = os.environ.get('THE_MODE'), os.getenv('OTHER_MODE', 'none')\n"
        )
        program = tmp_path / "program.py"
        program.write_text(_PRELOADING)
        ended = run(
            [sys.executable, str(program)],
            {"HPCRAY_PRELOAD": "with_mode", "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        )
        assert ended.code == 0 and ended.out.splitlines() == [
            "('job', 'none') True", "('task', 'none') False", "('job', 'other') False",
            "('job', 'none') True",
        ], ended  # fmt: skip


_PRELOADING = """
import os, time
import hpcray as ray

def look():
    import sys
    early = "with_mode" in sys.modules
    import with_mode
    return with_mode.MODE, early

def show(**variables):
    task = ray.remote(runtime_env={"env_vars": variables}) if variables else ray.remote
    print(*ray.get(task(look).remote()))

os.environ["THE_MODE"] = "job"
ray.init(num_cpus=1)
show()
show(THE_MODE="task")
show(OTHER_MODE="other")
show(UNREAD="1")
"""


class TestNoVariables:
    @hpcray_only
    @pytest.mark.parametrize(
        ("variables", "word"),
        [({"A=B": "x"}, "'='"), ({"": "x"}, "empty"), ({"A": "x\0y"}, "NUL"), ({"A\0": "x"}, "NUL"),
         ({"A": "\ud800"}, "encoded"), ({"A": "x" * (1 << 17)}, "characters")],
        ids=["equals", "empty", "nul", "nul in the name", "surrogate", "long"],
    )  # fmt: skip
    def test_what_no_process_can_have_is_refused_where_it_is_given(self, variables, word):
        env = {"env_vars": variables}
        with pytest.raises(ValueError, match=f"env_vars.*{word}"):
            ray.remote(runtime_env=env)(_threads).remote()

        class Actor:
            pass

        with pytest.raises(ValueError, match=f"env_vars.*{word}"):
            ray.remote(Actor).options(runtime_env=env).remote()
