"""`runtime_env`: what it may say, packages, merging."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcray.runtime_env.runtime_env import RuntimeEnv, RuntimeEnvConfig, unsupported_field_error, validated_runtime_env
from hpcray.runtime_env.runtime_env_setup import (
    PackageError,
    PythonOfWorkers,
    PythonSetupError,
    files_signature,
    pack_package,
    package_digest,
    package_files,
    set_up_python,
    unpack_package,
    zip_of_tar,
)
from hpcray.runtime_env.submitted_runtime_env import merge_submitted_runtime_env


@dataclass
class _Item:
    names: list[str]
    flag: bool


@dataclass
class _Plugin:
    items: list[_Item]
    text: str


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name in ("a.py", "data/big.bin", "data/kept.txt", "__pycache__/a.pyc", ".git/config", "venv/x", "b.log"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root


class TestValidation:
    @pytest.mark.parametrize(
        ("fields", "error", "text"),
        [
            ({"env_vars": {"A": 1}}, TypeError, "Dict.str, str.*the value 1 is of type <class 'int'>, in 'A'"),
            ({"env_vars": {1.23: "a"}}, TypeError, "the key 1.23 is of type <class 'float'>"),
            ({"working_dir": 3}, TypeError, "`working_dir` must be a string, got"),
            ({"working_dir": "/no/such/place"}, ValueError, "/no/such/place is not a valid path"),
            ({"working_dir": "s3://bucket/a"}, ValueError, "Only .zip, .* supported for remote URIs"),
            ({"working_dir": "local://relative"}, ValueError, "absolute path"),
            ({"conda": "/no/such/env"}, ValueError, "Can't find conda env directory"),
            ({"conda": "none.yaml"}, ValueError, "Can't find conda YAML file"),
            ({"container": {"image": "x"}, "pip": ["a"]}, ValueError, "'container' field currently cannot be used"),
            ({"uv": {"packages": "a"}}, ValueError, "not a valid file"),
            ({"pip": {"packages": 3}}, ValueError, r"must be of type str or list"),
            ({"uv": ["a", 3]}, TypeError, "for 1-th item"),
            ({"uv": {"packages": ["a"], "uv_pip_install_options": ["-q", 3]}}, TypeError, "uv_pip_in.*int'> for 1-th"),
            ({"pip": {"packages": ["a"], "pip_install_options": [None]}}, TypeError, "pip_install_options.* for 0-th"),
            ({"pip": {"packages": ["a"], "pip_install_options": "-q"}}, TypeError, "pip_install_options.* type list"),
            ({"py_modules": "x"}, TypeError, "`py_modules` must be a list of strings"),
            ({"py_modules": [3]}, TypeError, "py_modules"),
            ({"excludes": "x"}, TypeError, "excludes"),
            ({"pip": 3}, TypeError, r"runtime_env\['pip'\] must be of type"),
            ({"pip": {"pip_check": True}}, ValueError, "must include field 'packages'"),
            ({"pip": {"packages": ["a"], "colour": 1}}, ValueError, "can only have these fields"),
            ({"pip": "/no/requirements.txt"}, ValueError, "not a valid file"),
            ({"pip": ["a"], "conda": "b"}, ValueError, "'conda' field of runtime_env cannot be specified"),
            ({"pip": ["a"], "uv": ["b"]}, ValueError, "'uv' field, and 'conda' field of runtime_env cannot be"),
            ({"worker_process_setup_hook": 3}, TypeError, "setup_hook"),
            ({"py_executable": ""}, TypeError, "py_executable"),
            ({"config": 3}, TypeError, "config"),
            ({"config": {"setup_timeout_seconds": 0}}, ValueError, "greater than zero or equals to -1"),
            ({"config": {"setup_timeout_seconds": "1"}}, TypeError, "setup_timeout_seconds must be of type int"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
    )
    def test_wrong_values(self, fields: dict[str, Any], error: type[Exception], text: str) -> None:
        with pytest.raises(error, match=text):
            RuntimeEnv(**fields)

    def test_a_dict_is_as_good(self, tree: Path) -> None:
        env = {"working_dir": str(tree), "env_vars": {"A": "1"}}
        assert validated_runtime_env(env) == RuntimeEnv(**env) == env
        assert validated_runtime_env(None) == {}
        with pytest.raises(TypeError, match="env_vars"):
            validated_runtime_env({"env_vars": ["A"]})

    def test_fields_of_dataclasses(self) -> None:
        env = RuntimeEnv()
        env.set("plugin", _Plugin([_Item(["a"], False), _Item([], True)], "x"))
        assert json.loads(env.serialize())["plugin"]["items"][0] == {"names": ["a"], "flag": False}
        again = RuntimeEnv.deserialize(env.serialize())
        assert again.get("plugin", data_class=_Plugin) == _Plugin([_Item(["a"], False), _Item([], True)], "x")
        assert env.get("nothing", 3, data_class=_Plugin) == 3

    def test_what_ray_adds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert RuntimeEnv(pip=["a"])["_ray_commit"]
        assert RuntimeEnv(conda="a", _ray_commit="x")["_ray_commit"] == "x"
        assert "_ray_commit" not in RuntimeEnv(env_vars={"A": "b"})
        assert "_inject_current_ray" not in RuntimeEnv(env_vars={"A": "b"})
        monkeypatch.setenv("RAY_RUNTIME_ENV_LOCAL_DEV_MODE", "1")
        assert RuntimeEnv(env_vars={"A": "b"})["_inject_current_ray"] is True

    def test_packages_elsewhere_are_valid_and_refused(self) -> None:
        env = RuntimeEnv(working_dir="https://example.org/a.zip")
        assert "not fetched" in unsupported_field_error(env)
        assert not unsupported_field_error(RuntimeEnv(working_dir="local:///tmp"))

    def test_forms_of_pip(self, tmp_path: Path) -> None:
        requirements = tmp_path / "requirements.txt"
        requirements.write_text("# mine\nnumpy\n\nrich>=13\n")
        assert RuntimeEnv(pip=str(requirements))["pip"] == {"packages": ["numpy", "rich>=13"], "pip_check": False}
        assert RuntimeEnv(pip=["numpy", "numpy"])["pip"] == {"packages": ["numpy"], "pip_check": False}
        assert "pip" not in RuntimeEnv(pip=[])

    def test_unknown_fields_warn(self, caplog: pytest.LogCaptureFixture) -> None:
        RuntimeEnv(colour="blue")
        assert "unknown entries" in caplog.text

    def test_of_ray_and_not_here(self) -> None:
        env = RuntimeEnv(conda="base")
        assert env.has_conda()
        assert "conda" in unsupported_field_error(env) and "hint" in unsupported_field_error(env)
        assert unsupported_field_error({"container": None, "env_vars": {"A": "1"}}) == ""

    def test_travels(self) -> None:
        env = RuntimeEnv(env_vars={"A": "1"}, config={"setup_timeout_seconds": 5})
        assert pickle.loads(pickle.dumps(env)) == env
        assert RuntimeEnv.deserialize(env.serialize()).env_vars() == {"A": "1"}
        assert json.loads(json.dumps(env.to_dict()))["config"]["setup_timeout_seconds"] == 5
        assert RuntimeEnvConfig.default_config()["setup_timeout_seconds"] == 600

    def test_what_the_submitter_said_is_below(self) -> None:
        submitted = {"runtime_env": {"py_executable": "p", "env_vars": {"A": "1", "B": "1"}}}
        said = {"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(submitted)}
        own = {"env_vars": {"B": "2"}}
        assert merge_submitted_runtime_env(own, {}) is own
        assert merge_submitted_runtime_env(None, said) == {"py_executable": "p", "env_vars": {"A": "1", "B": "1"}}
        for conflict in (own, {"py_executable": "p"}):
            with pytest.raises(ValueError, match="because of a conflict"):
                merge_submitted_runtime_env(conflict, said)
        assert merge_submitted_runtime_env({"env_vars": {"C": "3"}}, said) == {
            "py_executable": "p", "env_vars": {"A": "1", "B": "1", "C": "3"},
        }  # fmt: skip
        said["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
        assert merge_submitted_runtime_env(own, said) == {"py_executable": "p", "env_vars": {"A": "1", "B": "2"}}
        assert merge_submitted_runtime_env(own, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}) is own


class TestPackages:
    def test_a_tar_archive_becomes_a_zip(self, tree: Path, tmp_path: Path) -> None:
        archive = tmp_path / "a.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tree / "a.py", "a.py")
            tar.add(tree / "data", "./data")
        with zipfile.ZipFile(io.BytesIO(zip_of_tar(str(archive)))) as package:
            assert package.namelist() == ["data/big.bin", "data/kept.txt", "a.py"]
            assert package.read("a.py") == b"a.py"
        archive.write_bytes(b"no archive")
        with pytest.raises(PackageError, match="no archive"):
            zip_of_tar(str(archive))

    def test_what_is_always_left_out_can_be_said(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAY_OVERRIDE_RUNTIME_ENV_DEFAULT_EXCLUDES", "data, *.log")
        assert package_files(str(tree)) == [".git/config", "__pycache__/a.pyc", "a.py", "venv/x"]

    def test_what_goes_in(self, tree: Path) -> None:
        assert package_files(str(tree)) == ["a.py", "b.log", "data/big.bin", "data/kept.txt"]
        assert package_files(str(tree), ["*.log", "data/big.bin"]) == ["a.py", "data/kept.txt"]
        (tree / ".gitignore").write_text("*.log\ndata/*\n!data/kept.txt\n")
        assert package_files(str(tree)) == [".gitignore", "a.py", "data/kept.txt"]

    def test_links_and_what_is_no_file(self, tree: Path) -> None:
        (tree / "link.py").symlink_to("a.py")
        (tree / "loop").symlink_to(".")
        (tree / "broken").symlink_to("nowhere")
        os.mkfifo(tree / "pipe")
        names = package_files(str(tree))
        assert names == ["a.py", "b.log", "data/big.bin", "data/kept.txt", "link.py"]
        with zipfile.ZipFile(io.BytesIO(pack_package(str(tree), names))) as package:
            assert package.read("link.py") == b"a.py"

    def test_gitignore_can_be_ignored(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tree / ".gitignore").write_text("*")
        assert package_files(str(tree)) == []
        monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
        assert "a.py" in package_files(str(tree))

    def test_equal_files_make_equal_packages(self, tree: Path) -> None:
        names = package_files(str(tree))
        first, before = pack_package(str(tree), names), files_signature(str(tree), names)
        os.utime(tree / "a.py", (1, 1))
        assert files_signature(str(tree), names) != before
        assert pack_package(str(tree), names) == first
        (tree / "a.py").write_text("changed")
        assert package_digest(pack_package(str(tree), names)) != package_digest(first)

    def test_unpacked_once_with_modes(self, tree: Path, tmp_path: Path) -> None:
        (tree / "a.py").chmod(0o750)
        package = pack_package(str(tree), package_files(str(tree)), "top")
        asked = []

        def fetch() -> bytes:
            asked.append(time.monotonic())
            return package

        where = {unpack_package(str(tmp_path), "name", fetch) for _ in range(3)}
        assert len(where) == len(asked) == 1
        found = Path(where.pop()) / "top" / "a.py"
        assert found.read_text() == "a.py"
        assert found.stat().st_mode & 0o777 == 0o750

    def test_too_large(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hpcray.runtime_env.runtime_env_setup.PACKAGE_SIZE_LIMIT", 10)
        with pytest.raises(PackageError, match=r"exceeds the maximum size.*excludes"):
            pack_package(str(tree), package_files(str(tree)))

    @pytest.mark.parametrize("name", ["../out", "/out"])
    def test_names_that_lead_out(self, tmp_path: Path, name: str) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as package:
            package.writestr(name, "x")
        with pytest.raises(PackageError, match="leads out of it"):
            unpack_package(str(tmp_path), "evil", buffer.getvalue)
        assert os.listdir(tmp_path / "runtime_env") == ["evil.lock"]

    def test_no_zip(self, tmp_path: Path) -> None:
        with pytest.raises(PackageError, match="is no zip"):
            unpack_package(str(tmp_path), "broken", lambda: b"nothing")


class TestPython:
    def test_a_command_that_fails_says_why(self, tmp_path: Path) -> None:
        with pytest.raises(PythonSetupError, match=r"^py_executable: /no/such/python ended with code 127\n.*No such"):
            set_up_python(str(tmp_path), {"py_executable": "/no/such/python"}, 10)

    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        fake = tmp_path / "python"
        fake.write_text("""#!/bin/sh\necho '{"executable": "/x", "version": [3, 3], "env": {}}'\n""")
        fake.chmod(0o755)
        with pytest.raises(PythonSetupError, match=r"Python 3\.3, but the job runs with"):
            set_up_python(str(tmp_path), {"py_executable": str(fake)}, 10)

    @pytest.mark.parametrize("said", ["hello", "", "[1]", '{"executable": 1}'])
    def test_what_is_no_python(self, tmp_path: Path, said: str) -> None:
        fake = tmp_path / "python"
        fake.write_text(f"#!/bin/sh\necho '{said}'\n")
        fake.chmod(0o755)
        with pytest.raises(PythonSetupError, match="is no Python"):
            set_up_python(str(tmp_path), {"py_executable": str(fake)}, 10)

    def test_a_trial_that_fails(self, tmp_path: Path) -> None:
        trial = ["-c", "raise ImportError('of something')"]
        for _ in range(2):  # nothing is kept of the first time
            with pytest.raises(PythonSetupError, match=r"cannot run hpcray's workers(.|\n)*ImportError: of something"):
                set_up_python(str(tmp_path), {"py_executable": sys.executable}, 30, trial)

    def test_nothing_asked_for(self, tmp_path: Path) -> None:
        assert set_up_python(str(tmp_path), {"env_vars": {"A": "1"}}, 10) == PythonOfWorkers()
        assert not list(tmp_path.iterdir())

    def test_what_takes_too_long_is_ended_with_all_that_it_started(self, tmp_path: Path) -> None:
        fake, pid = tmp_path / "python", tmp_path / "pid"
        fake.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {pid}\necho waiting\nwait\n")
        fake.chmod(0o755)
        with pytest.raises(PythonSetupError, match=r"took longer.*setup_timeout_seconds(.|\n)*waiting"):
            set_up_python(str(tmp_path), {"py_executable": str(fake)}, 1)
        deadline = time.monotonic() + 30
        while os.path.exists(f"/proc/{pid.read_text().strip()}"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
