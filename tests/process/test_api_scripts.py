"""Whole scripts, as users run them: __main__, modules beside the script, printing, exit codes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from engine import hpcray_only, run_script

HEAD = "import engine_under_test as ray\n"


@pytest.fixture
def run(tmp_path: Path):
    """Run a script with the engine as `ray`; returns what it printed. Fails when it fails."""

    def run(body: str, *args: str, code: int = 0, **env: str):
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body))
        ended = run_script(path, *args, **env)
        assert ended.returncode == code, f"exit code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended

    return run


class TestMain:
    def test_its_functions_classes_and_exceptions(self, run):
        out = run(
            """
            import dataclasses, enum

            SCALE = 3

            @dataclasses.dataclass
            class Point:
                x: int
                def scaled(self):
                    return Point(helper(self.x))

            class Colour(enum.Enum):
                RED = 1

            class MyError(Exception):
                def __init__(self, point):
                    super().__init__(point)
                    self.point = point

            def helper(x):
                return x * SCALE

            @ray.remote
            def work(point, colour):
                assert isinstance(point, Point)
                assert colour is Colour.RED
                return point.scaled()

            @ray.remote
            class Box:
                def __init__(self, point): self.point = point
                def get(self): return self.point
                def fail(self): raise MyError(self.point)

            ray.init(num_cpus=2)
            got = ray.get(work.remote(Point(2), Colour.RED))
            assert got == Point(6), got
            assert type(got) is Point
            box = Box.remote(got)
            assert ray.get(box.get.remote()) == Point(6)
            assert ray.get(ray.put(Colour.RED)) is Colour.RED
            try:
                ray.get(box.fail.remote())
            except MyError as error:
                assert error.point == Point(6)
                print("caught", type(error.cause).__name__)
            """
        ).stdout
        assert "caught MyError" in out

    def test_is_not_run_again_by_workers(self, run, tmp_path):
        run(
            f"""
            open({str(tmp_path / "runs")!r}, "a").write("x")
            ray.init(num_cpus=2)
            f = ray.remote(lambda: 1)
            ray.get([f.remote() for _ in range(10)])
            """
        )
        assert (tmp_path / "runs").read_text() == "x"

    def test_a_module_that_does_not_shut_down(self, run):
        assert "done" in run("ray.init(num_cpus=1)\nprint('done')").stdout

    def test_auto_init(self, run):
        assert "4" in run("print(ray.get(ray.remote(lambda x: x * x).remote(2)))").stdout

    def test_under_a_main_guard_with_arguments(self, run):
        out = run(
            """
            import sys

            @ray.remote
            def argv():
                return len(sys.argv)

            def main():
                ray.init(num_cpus=1)
                print("args", sys.argv[1:], ray.get(argv.remote()) >= 0)

            if __name__ == "__main__":
                main()
            """,
            "--flag", "value",
        ).stdout  # fmt: skip
        assert "args ['--flag', 'value'] True" in out


class TestModules:
    def test_beside_the_script(self, run, tmp_path):
        (tmp_path / "localmodule.py").write_text(
            "VALUE = 5\nclass Thing:\n    x = 7\ndef double(x):\n    return 2 * x\n"
        )
        (tmp_path / "localpackage").mkdir()
        (tmp_path / "localpackage" / "__init__.py").write_text("from .inner import deep\n")
        (tmp_path / "localpackage" / "inner.py").write_text("def deep():\n    return 'deep'\n")
        out = run(
            """
            import localmodule, localpackage
            from localmodule import Thing

            @ray.remote
            def use(thing):
                from localpackage import inner
                return localmodule.double(localmodule.VALUE), localpackage.deep(), type(thing) is Thing, inner.deep()

            ray.init(num_cpus=1)
            print(ray.get(use.remote(Thing())))
            print(ray.get(ray.remote(localmodule.double).remote(21)))
            """
        ).stdout
        assert "(10, 'deep', True, 'deep')" in out
        assert "42" in out

    @hpcray_only
    def test_on_a_path_that_the_script_adds(self, run, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "faraway.py").write_text("def f():\n    return 'far'\n")
        out = run(
            """
            import os, sys
            sys.path.append(os.path.join(os.path.dirname(__file__), "elsewhere"))
            import faraway
            ray.init(num_cpus=1)
            print(ray.get(ray.remote(faraway.f).remote()))
            """
        ).stdout
        assert "far" in out

    def test_working_directory_and_environment(self, run, tmp_path):
        out = run(
            """
            import os
            os.environ["SET_BEFORE_INIT"] = "yes"
            ray.init(num_cpus=1)
            print(ray.get(ray.remote(lambda: (os.getcwd(), os.environ.get("SET_BEFORE_INIT"),
                                              os.environ.get("FROM_SHELL"))).remote()))
            """,
            FROM_SHELL="shell",
        ).stdout
        assert f"('{tmp_path}', 'yes', 'shell')" in out


class TestPrinting:
    def test_of_tasks_and_actors_with_their_names(self, run):
        out = run(
            """
            import sys, time

            @ray.remote
            def chatty(i):
                print("task says", i)
                print("to stderr", i, file=sys.stderr)

            @ray.remote
            class Actor:
                def speak(self): print("actor speaks\\nin two lines")

            ray.init(num_cpus=1)
            actor = Actor.remote()
            ray.get([chatty.remote(1), chatty.remote(2), actor.speak.remote()])
            print("driver says hello")
            time.sleep(2)
            """
        )
        lines = [line.replace("\x1b[36m", "").replace("\x1b[0m", "") for line in out.stdout.splitlines()]
        assert "driver says hello" in lines
        for i in (1, 2):
            assert any("chatty" in line and "pid=" in line and line.endswith(f"task says {i}") for line in lines)
        assert any("Actor" in line and "pid=" in line and line.endswith("actor speaks") for line in lines)
        assert any("Actor" in line and "pid=" in line and line.endswith("in two lines") for line in lines)
        assert "to stderr 2" in out.stderr
        assert "to stderr" not in out.stdout

    @hpcray_only
    def test_the_last_words_are_not_lost(self, run):
        out = run(
            """
            ray.init(num_cpus=2)
            f = ray.remote(lambda i: print(f"line {i:04}"))
            ray.get([f.remote(i) for i in range(200)])
            """
        ).stdout
        assert all(f"line {i:04}" in out for i in range(200))

    def test_not_with_log_to_driver_false(self, run):
        out = run(
            """
            import time
            ray.init(num_cpus=1, log_to_driver=False)
            ray.get(ray.remote(lambda: print("secret")).remote())
            time.sleep(1)
            """
        )
        assert "secret" not in out.stdout + out.stderr


class TestEnds:
    def test_exit_code_of_sys_exit(self, run):
        run("import sys\nray.init(num_cpus=1)\nray.get(ray.remote(lambda: 1).remote())\nsys.exit(7)", code=7)

    def test_uncaught_exception(self, run):
        ended = run(
            """
            ray.init(num_cpus=1)
            def boom():
                raise ValueError("remote trouble")
            ray.get(ray.remote(boom).remote())
            """,
            code=1,
        )
        assert "remote trouble" in ended.stderr
        assert "RayTaskError(ValueError)" in ended.stderr
        assert "in boom" in ended.stderr

    def test_with_work_still_running(self, run):
        run(
            """
            import time
            ray.init(num_cpus=2)
            @ray.remote
            class Sleeper:
                def sleep(self): time.sleep(600)
            refs = [ray.remote(lambda: time.sleep(600)).remote() for _ in range(5)]
            sleeper = Sleeper.remote()
            refs.append(sleeper.sleep.remote())
            ready, rest = ray.wait(refs, timeout=1)
            assert not ready
            """
        )

    def test_threads_of_the_script(self, run):
        out = run(
            """
            import threading
            ray.init(num_cpus=1)
            f = ray.remote(lambda x: x + 1)
            found = []
            threads = [threading.Thread(target=lambda i=i: found.append(ray.get(f.remote(i)))) for i in range(8)]
            [t.start() for t in threads]; [t.join() for t in threads]
            print(sorted(found))
            """
        ).stdout
        assert str(list(range(1, 9))) in out
