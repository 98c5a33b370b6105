"""`python -m hpcray.compat`: an environment in which `import ray` is hpcray, without a package installer."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hpcray.common.ray_version import is_replaced
from hpcray.compat import distribution
from hpcray.compat.__main__ import main
from hpcray.compat.finder import STANDIN

from .test_table_core import ROOT


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != STANDIN])
    return tmp_path


def test_install_makes_ray_importable_and_uninstall_ends_that(site: Path) -> None:
    assert main(["install"]) == 0
    code = (
        "import importlib.metadata, ray, ray.util.queue\n"
        "print(ray.__version__, importlib.metadata.version('ray'), ray.util.queue.Queue.__module__)"
    )
    found = subprocess.run(
        [sys.executable, "-c", f"import site; site.addsitedir({str(site)!r})\n{code}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert found.stdout.split() == ["2.60.0", "2.60.0+hpcray", "hpcray.util.queue"]
    assert main(["uninstall"]) == 0
    assert main(["uninstall"]) == 1
    assert not list(site.iterdir())


def test_pip_finds_the_files_of_the_distribution_and_another_version_is_claimed(site: Path) -> None:
    assert main(["install", "--version", "2.44.1"]) == 0
    (info,) = site.glob("*.dist-info")
    found = importlib.metadata.Distribution.at(info)
    assert found.version == "2.44.1+hpcray"
    listed = {file.locate() for file in found.files or ()}
    assert {Path(path).resolve() for path in listed} == {path.resolve() for path in site.rglob("*") if path.is_file()}
    assert not any(str(path).startswith(STANDIN) for path in listed), "pip removes what is listed"
    assert main(["install"]) == 0
    assert [path.name for path in site.glob("*.dist-info")] == ["ray-2.60.0+hpcray.dist-info"], "one, the last"
    assert main(["install", "--version", "new"]) == 2


def test_the_commands_of_ray_are_there_and_those_of_other_packages_stay(site: Path) -> None:
    ours = Path(STANDIN, "pyproject.toml").read_text()
    for name in ("ray", "serve", "tune"):
        assert f'\n{name} = "' in ours
    (site / "serve").write_text("#!/bin/sh\necho of another package\n")
    assert main(["install"]) == main(["install"]) == 0
    assert "another package" in (site / "serve").read_text() and os.access(site / "tune", os.X_OK)
    (info,) = site.glob("*.dist-info")
    listed = {file.name for file in importlib.metadata.Distribution.at(info).files or ()}
    assert listed & {"ray", "serve", "tune"} == {"ray", "tune"}, "pip removes what is listed"
    assert main(["uninstall"]) == 0
    assert [path.name for path in site.iterdir()] == ["serve"]
    (site / "serve").unlink()
    assert main(["install"]) == 0
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([STANDIN, str(ROOT)]), "HPCRAY_RAY_LIBRARIES": "/nowhere"}
    for name in ("serve", "tune"):
        ran = subprocess.run(
            [site / name, "--help"], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode and "libraries" in ran.stderr, "it says what is missing"


def test_the_extras_of_ray_are_those_of_hpcray() -> None:
    read = Path(STANDIN, "ray-2.60.0+hpcray.dist-info", "METADATA").read_text()
    assert read == distribution.metadata(), "python -c 'from hpcray.compat.distribution import metadata; ...' writes it"
    project = Path(STANDIN, "pyproject.toml").read_text()
    wanted = importlib.metadata.Distribution.at(Path(STANDIN, "ray-2.60.0+hpcray.dist-info")).requires or []
    ours = Path(ROOT, "pyproject.toml").read_text()
    for extra, lines in distribution.EXTRAS.items():
        assert f"{extra} = {json.dumps(list(lines))}" in project
        assert {line for line in wanted if f'extra == "{extra}"' in line} == {
            f'{line}; extra == "{extra}"' for line in lines
        }
        for line in lines:
            for own in re.findall(r"hpcray\[(.*)\]", line):
                assert all(f"\n{name} = [" in ours for name in own.split(",")), line


def test_the_version_that_is_claimed_can_be_set() -> None:
    code = "import importlib.metadata, ray; print(ray.__version__, importlib.metadata.version('ray'))"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([STANDIN, str(ROOT)]), "HPCRAY_RAY_VERSION": "2.44.1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.split() == ["2.44.1", "2.44.1+hpcray"]


def test_a_program_that_would_get_the_real_ray_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nprint(sys.modules.get('ray'))\n")
    assert not is_replaced(str(program)) and not is_replaced(str(tmp_path / "none.py")) and not is_replaced("-c")
    program.write_text("import os\nimport ray\n")
    assert not is_replaced(str(program)), "no ray is installed, or the stand-in"
    real = tmp_path / "site" / "ray"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("print('the real one')\n")
    (real / "_version.py").write_text("version = '2.44.1'\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT)])}
    line = [sys.executable, "-m", "hpcray", str(program)]
    told = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert "the real one" in told.stdout and "is the real Ray in" in told.stderr and "hint: --as-ray" in told.stderr
    line.insert(3, "--as-ray")
    ours = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60, check=True)
    assert not ours.stdout and "real Ray" not in ours.stderr


def test_install_is_refused_beside_the_real_ray(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = site / "ray-2.49.0.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.49.0\n")
    sys.path.insert(0, str(site))  # a list of this test's own
    assert main(["install"]) == 1
    assert "ray 2.49.0 is installed here" in capsys.readouterr().err
    assert [path.name for path in site.iterdir()] == [real.name]


def test_the_install_command_prints_usage_and_the_standin_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "install" in capsys.readouterr().err
    assert main(["path"]) == 0
    assert capsys.readouterr().out.strip() == STANDIN


@pytest.mark.parametrize("lazy", [False, True])
def test_the_module_that_is_imported_first_becomes_the_facade(lazy: bool) -> None:
    """Whoever holds it has hpcray, also where `importlib.util.LazyLoader` made it and loads it at its first use."""
    code = f"""
import importlib.util, sys
spec = importlib.util.find_spec("ray")
if {lazy}:
    spec.loader = importlib.util.LazyLoader(spec.loader)
module = importlib.util.module_from_spec(spec)
sys.modules["ray"] = module
spec.loader.exec_module(module)
assert module.is_initialized() is False, "loaded"
import ray, ray.util.queue
assert ray is module is sys.modules["ray"] and type(ray).__name__ == "Facade"
assert not {{"sys", "install", "hpcray"}} & set(vars(ray)), vars(ray)
print(ray.__version__, ray.util.queue.Queue.__module__, ray.__name__, ray.__spec__.name)
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([STANDIN, str(ROOT)])}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert found.stdout.split() == ["2.60.0", "hpcray.util.queue", "ray", "ray"], found.stderr


def test_a_sitecustomize_that_imports_hpcray_leaves_workers_their_modules(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import hpcray.compat.ray\n")
    code = """
import ray
ray.init(num_cpus=1)

@ray.remote
def look():
    import sys, hpcray
    return sys.modules["hpcray"] is hpcray, [
        name for name in sys.modules
        if name.startswith("hpcray.") and "." not in name[7:] and not hasattr(hpcray, name[7:])
    ]

print(ray.get(look.remote(), timeout=60))
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=90, check=False
    )
    assert found.stdout == "(True, [])\n", found


@pytest.mark.parametrize("name", ["get_object_locations", "get_local_object_locations"])
def test_locations_before_init_start_no_cluster(name: str) -> None:
    code = (
        "import hpcray.experimental as e, hpcray\n"
        f"try: e.{name}([])\n"
        "except RuntimeError as error: print(error, hpcray.is_initialized())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert found.stdout == "Ray hasn't been initialized. hint: call init() first False\n", found
