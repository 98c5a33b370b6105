"""Values, names, directories and surroundings that few programs have."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading

import pytest
from engine import ROOT, hpcray_only, ray

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2}


class TestParametersNamedAsOurs:
    def test_of_functions(self):
        @ray.remote
        def look(self, args=2, kwargs=3, name=4):
            return self, args, kwargs, name

        assert ray.get(look.remote(self=1, args=5)) == (1, 5, 3, 4)
        assert ray.get(look.options(num_cpus=1).remote(self=1, kwargs=5)) == (1, 2, 5, 4)

    def test_of_actors(self):
        @ray.remote
        class Actor:
            def __init__(me, self):
                me.kept = self

            def look(me, self):
                return me.kept, self

        assert ray.get(Actor.remote(self=1).look.remote(self=2)) == (1, 2)
        assert ray.get(Actor.options(num_cpus=1).remote(self=3).look.remote(self=4)) == (3, 4)

    def test_of_graphs(self):
        @ray.remote
        def look(self):
            return self

        assert ray.get(look.bind(self=7).execute()) == 7


class TestCachedFunctions:
    def test_of_a_function_travel_and_may_call_themselves(self):
        @functools.cache
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        call = ray.remote(lambda function, n: (function(n), function.cache_parameters(), function.__name__))
        expected = 832040, {"maxsize": None, "typed": False}, "fibonacci"
        assert ray.get(call.remote(fibonacci, 30)) == expected
        assert ray.get(ray.remote(fibonacci).remote(30)) == 832040
        assert ray.get(ray.remote(lambda: fibonacci(30)).remote()) == 832040

    def test_of_a_program(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            "import functools\nimport hpcray as ray\n\n"
            "@functools.lru_cache(4)\ndef cached(x):\n    return x + 1\n\n"
            "ray.init('local', num_cpus=1)\n"
            "print(ray.get([ray.remote(cached).remote(1), ray.remote(lambda f: f(2)).remote(cached)]))\n"
        )
        assert _run(program).stdout.split() == ["[2,", "3]"]


class _BadRepr:
    def __init__(self):
        self.lock = threading.Lock()

    def __repr__(self):
        raise RuntimeError("not ready")


class TestErrorsThatShowTheError:
    def test_of_a_value_whose_repr_fails(self):
        with pytest.raises(TypeError, match="whose repr raises RuntimeError"):
            ray.put(_BadRepr())
        with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
            ray.get(ray.remote(lambda: _BadRepr()).remote())

    def test_of_a_value_that_is_nested_too_deeply(self):
        def nested():
            value = []
            for _ in range(3000):
                value = [value]
            return value

        with pytest.raises(TypeError, match="recursion"):
            ray.put(nested())
        with pytest.raises(TypeError, match="recursion"):
            ray.get(ray.remote(nested).remote())

    def test_the_resource_that_no_node_has_is_named(self):
        task = ray.remote(resources={"node:10.9.9.9": 0.01})(lambda: 1)
        with pytest.raises(ray.exceptions.GetTimeoutError, match=r"none has node:10\.9\.9\.9"):
            ray.get(task.remote(), timeout=1)
        with pytest.raises(ray.exceptions.GetTimeoutError, match="none has unheard_of"):
            ray.get(ray.remote(resources={"unheard_of": 1})(lambda: 1).remote(), timeout=1)

    def test_an_exception_in_the_place_of_a_result_of_imap_differs_from_one_that_is_returned(self):
        from hpcray.util.multiprocessing import Pool, PoolTaskError

        def some(x):
            if x == 1:
                raise ValueError(x)
            return KeyError(x) if x == 2 else x

        with Pool(1) as pool:
            zero, one, two = pool.imap(some, range(3))
        assert zero == 0 and type(one) is PoolTaskError and type(one.underlying) is ValueError
        assert type(two) is KeyError


class TestDirectories:
    def test_links_and_empty_directories_are_in_working_dir_and_py_modules(self, tmp_path):
        (tmp_path / "project/results").mkdir(parents=True)
        (tmp_path / "project/package").mkdir()
        (tmp_path / "project/package/__init__.py").write_text("")
        (tmp_path / "shared/below").mkdir(parents=True)
        (tmp_path / "shared/__init__.py").write_text("VALUE = 2\n")
        (tmp_path / "project/shared").symlink_to("../shared")
        (tmp_path / "project/package/around").symlink_to("..")

        def use():
            import shared  # by the link

            with open("results/out.txt", "w") as file:
                file.write("1")
            return shared.VALUE, sorted(os.listdir(".")), os.listdir("shared/below")

        project = str(tmp_path / "project")
        value, names, below = ray.get(ray.remote(runtime_env={"working_dir": project})(use).remote(), timeout=60)
        assert (value, names, below) == (2, ["package", "results", "shared"], [])

        def look():
            import project

            return sorted(os.listdir(next(iter(project.__path__))))

        assert ray.get(ray.remote(runtime_env={"py_modules": [project]})(look).remote(), timeout=60) == names


_SMALL = """
import os
import numpy as np
import hpcray as ray
ray.init("local", num_cpus=1)
assert ray.get(ray.put(np.ones(10**6))).sum() == 10**6 and ray.get(ray.remote(lambda: 5).remote()) == 5
kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
with open(os.environ["RESULT"], "w") as file:
    file.write(" ".join(kinds))
"""


def _run(program, shell="", **environ):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = program if isinstance(program, list) else [program]
    return subprocess.run(
        ["bash", "-c", f'exec "$0" "$@" {shell}', sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, **environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


class TestSurroundings:
    @pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
    def test_closed_standard_descriptors_are_not_used_for_anything_else(self, tmp_path, closed):
        program, result = tmp_path / "program.py", tmp_path / "result"
        program.write_text(_SMALL)
        assert _run(program, closed, RESULT=str(result)).returncode == 0
        assert "memfd" not in result.read_text() and "socket" not in result.read_text().split()[0]

    def test_bytes_warnings_as_errors(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(_SMALL)
        ended = _run(["-bb", program], RESULT=str(tmp_path / "result"))
        assert ended.returncode == 0, ended.stderr

    def test_a_program_in_a_directory_whose_name_is_no_text(self, tmp_path):
        directory = os.fsencode(tmp_path) + b"/\xff\xfe"
        os.mkdir(directory)
        with open(directory + b"/program.py", "w") as file:
            file.write(_SMALL)
        ended = _run(os.fsdecode(directory + b"/program.py"), RESULT=str(tmp_path / "result"))
        assert ended.returncode == 0 and "its name is not UTF-8" in ended.stderr, ended.stderr

    def test_a_daemon_thread_that_waits_says_nothing_at_exit(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            "import threading, time\nimport hpcray as ray\nray.init('local', num_cpus=1)\n"
            "ref = ray.remote(time.sleep).remote(1000)\n"
            "threading.Thread(target=lambda: ray.get(ref), daemon=True).start()\ntime.sleep(0.5)\nprint('end')\n"
        )
        ended = _run(program)
        assert (ended.returncode, ended.stdout) == (0, "end\n") and "Traceback" not in ended.stderr, ended.stderr
