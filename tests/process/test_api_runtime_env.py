"""`runtime_env` in workers: working directories, modules, hooks, other Pythons, inheritance, errors."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
import threading
import zipfile

import pytest
from engine import exceptions, hpcray_only, ray

from hpcray.runtime_env import RuntimeEnv

pytestmark = [pytest.mark.usefixtures("session"), hpcray_only]
INIT = {"num_cpus": 2, "num_gpus": 1}


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    root.mkdir()
    (root / "only_in_project.py").write_text("VALUE = 42\n")
    (root / "data.txt").write_text("data")
    (root / "junk.log").write_text("junk")
    return root


def look():
    import only_in_project  # of the package

    return only_in_project.VALUE, sorted(os.listdir(".")), os.getpid()


class TestVariablesReadAtStart:
    """Of Python and of the dynamic loader: workers are forked, but those are started with them."""

    def test_of_python(self):
        def seen():
            return hash("text"), os.environ["PYTHONHASHSEED"], os.getpid(), type(lambda: 1).__module__

        task = ray.remote(runtime_env={"env_vars": {"PYTHONHASHSEED": "7"}})(seen)
        first, second = ray.get(task.remote()), ray.get(task.remote())
        assert first == second and first[1] == "7"
        told = subprocess.run(
            [sys.executable, "-c", "print(hash('text'))"],
            env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert first[0] == int(told.stdout)

    def test_of_the_loader_and_the_import_path_with_references(self, project, monkeypatch):
        library = ctypes.util.find_library("anl")
        if library is None:
            pytest.skip("no library to load")

        @ray.remote(
            runtime_env={
                "env_vars": {"LD_PRELOAD": library, "PYTHONPATH": f"{project}:${{PYTHONPATH}}", "LIKE_ANY": "${HOME}/x"}
            }
        )
        class Seen:
            def look(self):
                import only_in_project

                with open("/proc/self/maps") as file:
                    return library in file.read(), only_in_project.VALUE, os.environ["LIKE_ANY"], self.nested()

            def nested(self):
                return ray.get(ray.remote(lambda: os.environ["LD_PRELOAD"]).remote())

        assert ray.get(Seen.remote().look.remote()) == (True, 42, f"{os.environ.get('HOME', '')}/x", library)

    def test_a_python_that_does_not_start_with_them_is_an_error_of_tasks_and_actors(self, tmp_path):
        env = {"env_vars": {"PYTHONHOME": str(tmp_path)}}
        with pytest.raises(
            exceptions.RuntimeEnvSetupError, match=f"PYTHONHOME={tmp_path} of env_vars[\\s\\S]*'encodings'"
        ):
            ray.get(ray.remote(runtime_env=env)(look).remote(), timeout=60)

        @ray.remote(runtime_env=env)
        class Never:
            def look(self):
                pass

        with pytest.raises(exceptions.RuntimeEnvSetupError, match="PYTHONHOME"):
            ray.get(Never.remote().look.remote(), timeout=60)
        assert ray.get(ray.remote(lambda: 1).remote()) == 1

    def test_workers_without_them_are_forked_as_before(self):
        def parent():
            return os.readlink(f"/proc/{os.getpid()}/exe"), open("/proc/self/cmdline").read()

        task = ray.remote(runtime_env={"env_vars": {"LIKE_ANY": "1", "PATH": "${PATH}:/more"}})
        plain, other = ray.get([ray.remote(parent).remote(), task(parent).remote()])
        assert plain == other
        assert ray.get(task(lambda: os.environ["PATH"]).remote()) == os.environ["PATH"] + ":/more"


class TestWorkingDir:
    def test_of_a_task(self, project):
        env = {"working_dir": str(project), "excludes": ["*.log"]}
        task = ray.remote(runtime_env=env)(look)
        value, names, pid = ray.get(task.remote())
        assert (value, [name for name in names if not name.startswith("_")]) == (42, ["data.txt", "only_in_project.py"])
        assert ray.get(task.remote())[2] == pid
        with pytest.raises(ImportError):
            ray.get(ray.remote(look).remote())

    def test_of_an_actor_from_a_zip(self, project, tmp_path):
        package = tmp_path / "project.zip"
        with zipfile.ZipFile(package, "w") as opened:
            opened.write(project / "only_in_project.py", "only_in_project.py")

        @ray.remote(runtime_env=RuntimeEnv(working_dir=str(package)))
        class Looks:
            def look(self):
                return look()[0], ray.get_runtime_context().runtime_env

        value, env = ray.get(Looks.remote().look.remote())
        assert value == 42
        assert env["working_dir"].startswith("gcs://_ray_pkg_")

    def test_in_place(self, project):
        task = ray.remote(runtime_env={"working_dir": f"local://{project}"})(lambda: (os.getcwd(), look()[0]))
        assert ray.get(task.remote()) == (str(project), 42)
        task = ray.remote(runtime_env={"working_dir": "local:///no/such"})(lambda: 1)
        with pytest.raises(exceptions.RuntimeEnvSetupError, match="must already exist on every node"):
            ray.get(task.remote())

    def test_after_a_restart(self, project):
        @ray.remote(runtime_env={"working_dir": str(project)}, max_restarts=1, max_task_retries=1)
        class Looks:
            def look(self):
                return look()

        actor = Looks.remote()
        first = ray.get(actor.look.remote())
        ray.kill(actor, no_restart=False)
        second = ray.get(actor.look.remote())
        assert first[0] == second[0] == 42
        assert first[2] != second[2]

    def test_a_changed_directory_is_another_one(self, project):
        task = lambda: ray.remote(look).options(runtime_env={"working_dir": str(project)}).remote()  # noqa: E731
        assert ray.get(task())[0] == 42
        (project / "only_in_project.py").write_text("VALUE = 43\n")
        assert ray.get(task())[0] == 43


class TestModules:
    def test_directories_files_and_modules(self, tmp_path):
        package = tmp_path / "one" / "only_here"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("NAME = 'package'\n")
        wheel = tmp_path / "in_a_wheel-1-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as opened:
            opened.writestr("in_a_wheel.py", "NAME = 'wheel'\n")
        single = tmp_path / "single_file.py"
        single.write_text("NAME = 'file'\n")

        @ray.remote(runtime_env={"py_modules": [str(package), str(single), str(wheel)]})
        def names():
            import in_a_wheel
            import only_here
            import single_file

            return only_here.NAME, single_file.NAME, in_a_wheel.NAME, os.environ["PYTHONPATH"].count("/runtime_env/")

        assert ray.get(names.remote()) == ("package", "file", "wheel", 3)

    def test_children_inherit_what_they_do_not_change(self, project, tmp_path):
        (tmp_path / "extra.py").write_text("NAME = 'extra'\n")

        @ray.remote
        def child():
            import extra
            import only_in_project

            return extra.NAME, only_in_project.VALUE, os.environ["HPCRAY_TEST_P"]

        @ray.remote(runtime_env={"working_dir": str(project), "env_vars": {"HPCRAY_TEST_P": "parent"}})
        def parent():
            return ray.get(child.options(runtime_env={"py_modules": [str(tmp_path / "extra.py")]}).remote())

        assert ray.get(parent.remote()) == ("extra", 42, "parent")

    def test_processes_of_a_worker_do_not_see_its_environment(self, project):
        @ray.remote(runtime_env={"working_dir": str(project)})
        def variables():
            return [name for name in os.environ if name.startswith("HPCRAY_RUNTIME")]

        assert ray.get(variables.remote()) == []


class TestHook:
    def test_runs_before_the_first_task(self):
        def hook():
            os.environ["HPCRAY_TEST_HOOK"] = "done"

        @ray.remote(runtime_env={"worker_process_setup_hook": hook})
        def look():
            return os.environ.get("HPCRAY_TEST_HOOK")

        assert ray.get([look.remote() for _ in range(3)]) == ["done"] * 3

    def test_by_name(self):
        @ray.remote(runtime_env={"worker_process_setup_hook": "antigravity_hpcray.setup"})
        def look():
            return 1

        with pytest.raises(exceptions.RuntimeEnvSetupError, match="antigravity_hpcray"):
            ray.get(look.remote())

    def test_that_fails(self):
        def hook():
            raise ValueError("not today")

        @ray.remote(runtime_env={"worker_process_setup_hook": hook})
        class Never:
            def f(self):
                return 1

        @ray.remote(runtime_env={"worker_process_setup_hook": hook}, max_retries=0)
        def never(x):
            return x

        failed = r"Failed to execute the setup hook method. Function name:hook\n(.|\n)*not today"
        with pytest.raises(exceptions.ActorDiedError, match=failed):
            ray.get(Never.remote().f.remote())
        for ref in [never.remote(1), never.remote(2)]:
            with pytest.raises(exceptions.RuntimeEnvSetupError, match="not today"):
                ray.get(ref)

    def test_that_cannot_be_loaded(self):
        class Sour:
            def __reduce__(self):
                return json.loads, ("no json",)

        @ray.remote(runtime_env={"worker_process_setup_hook": Sour().__str__})
        class Never:
            pass

        with pytest.raises(exceptions.ActorDiedError, match="Failed to deserialize the setup hook method"):
            ray.get(Never.remote().__ray_ready__.remote())

        lock = threading.Lock()
        with pytest.raises(exceptions.RuntimeEnvSetupError, match="Failed to export the setup function"):
            ray.remote(lambda: 1).options(runtime_env={"worker_process_setup_hook": lambda: lock}).remote()

    def test_of_a_variable(self, tmp_path):
        module = tmp_path / "this_is.py"
        module.write_text("def a_hook():\n    import colorsys\n")
        name = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"

        @ray.remote
        class Looks:
            def look(self):
                return "colorsys" in sys.modules

        assert not ray.get(Looks.remote().look.remote())
        cls = Looks.options(runtime_env={"env_vars": {name: "hpcray_test_nowhere.hook"}})
        with pytest.raises(exceptions.ActorDiedError, match=r"Failed to execute the setup hook method, hpcray_test_no"):
            ray.get(cls.remote().look.remote())
        cls = Looks.options(runtime_env={"env_vars": {name: "this_is.a_hook"}, "py_modules": [str(module)]})
        assert ray.get(cls.remote().look.remote())


class TestPython:
    def test_another_one(self, tmp_path):
        import venv

        venv.EnvBuilder(system_site_packages=False, with_pip=False, symlinks=True).create(tmp_path / "other")
        python = str(tmp_path / "other" / "bin" / "python")

        @ray.remote(runtime_env={"py_executable": python})
        def where(x):
            return x, sys.executable, sys.prefix

        large = ray.put(list(range(100_000)))
        value, executable, prefix = ray.get(where.remote(large))
        assert value[-1] == 99_999
        assert (executable, prefix) == (python, str(tmp_path / "other"))

    def test_a_command_with_variables(self):
        command = f"env HPCRAY_TEST_PY=1 nice -n 5 {sys.executable} -X utf8"
        task = ray.remote(runtime_env={"py_executable": command, "env_vars": {"HPCRAY_TEST_Q": "2"}})(
            lambda: (os.environ["HPCRAY_TEST_PY"], os.environ["HPCRAY_TEST_Q"], os.nice(0), sys.flags.utf8_mode)
        )
        niceness = min(19, os.nice(0) + 5)  # the tests may themselves be nice
        assert ray.get([task.remote(), task.remote()]) == [("1", "2", niceness, 1)] * 2

    @pytest.mark.parametrize("last_line", ['exec {} "$@"', '{} "$@"', "exec {} $@", "{} $@"])
    def test_a_script_of_the_working_dir(self, project, last_line):
        script = project / "start.sh"
        script.write_text(f"#!/bin/sh\nexport HPCRAY_TEST_PY=script\n{last_line.format(sys.executable)}\n")
        script.chmod(0o755)
        env = {"working_dir": str(project), "py_executable": "./start.sh"}
        task = ray.remote(runtime_env=env)(lambda: (os.environ["HPCRAY_TEST_PY"], look()[0]))
        assert ray.get([task.remote(), task.remote()]) == [("script", 42)] * 2

    def test_a_cancelled_task_keeps_no_cpu_while_its_worker_is_set_up(self, tmp_path):
        slow = tmp_path / "python"
        slow.write_text("#!/bin/sh\nsleep 1000\n")
        slow.chmod(0o755)
        refs = [ray.remote(runtime_env={"py_executable": str(slow)})(lambda: 1).remote() for _ in range(2)]
        assert ray.wait(refs, timeout=0.5)[0] == []
        for ref in refs:
            ray.cancel(ref)
            with pytest.raises(exceptions.TaskCancelledError):
                ray.get(ref)
        assert ray.get(ray.remote(num_cpus=2)(lambda: 2).remote()) == 2

    def test_with_a_gpu(self):
        task = ray.remote(num_gpus=1, runtime_env={"py_executable": sys.executable})(
            lambda: (ray.get_gpu_ids(), os.environ["CUDA_VISIBLE_DEVICES"], sys.argv)
        )
        assert ray.get(task.remote()) == ([0], "0", ["-c"])

    def test_that_is_not_there(self):
        task = ray.remote(runtime_env={"py_executable": "/no/such/python"})(lambda: 1)
        with pytest.raises(exceptions.RuntimeEnvSetupError, match=r"\[Node [\d.]+\] (.|\n)*/no/such/python"):
            ray.get(task.remote())

    @pytest.mark.slow  # pip takes its time
    @pytest.mark.timeout(300)
    def test_pip(self, tmp_path):
        wheel = tmp_path / "hpcray_test_package-1-py3-none-any.whl"
        info = "hpcray_test_package-1.dist-info"
        with zipfile.ZipFile(wheel, "w") as package:
            package.writestr("hpcray_test_package.py", "VALUE = 7\n")
            package.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hpcray-test-package\nVersion: 1\n")
            package.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            package.writestr(f"{info}/RECORD", "")

        @ray.remote
        def look():
            import hpcray_test_package

            return hpcray_test_package.VALUE, hpcray_test_package.__file__, os.environ["VIRTUAL_ENV"]

        with_pip = look.options(runtime_env={"pip": [str(wheel)]})
        value, path, prefix = ray.get(with_pip.remote())
        assert value == 7
        assert path.startswith(prefix)
        assert ray.get(with_pip.remote()) == (value, path, prefix)

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_pip_that_fails_says_its_last_lines(self):
        task = ray.remote(runtime_env={"pip": ["/no/such/source"]})(lambda: 1)
        with pytest.raises(exceptions.RuntimeEnvSetupError, match=r"pip: .*ended with code 1(.|\n)*/no/such/source"):
            ray.get(task.remote())


class TestRefused:
    def test_what_is_not_there(self):
        with pytest.raises(NotImplementedError, match=r"conda.*hint"):
            ray.remote(runtime_env={"conda": "base"})(lambda: 1).remote()
        with pytest.raises(ValueError, match="not a valid path"):
            ray.remote(runtime_env={"working_dir": "/no/such/directory"})(lambda: 1)
