"""The way of installation that the doctor names, from made-up prefixes and environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.jobs import ROOT

import hpcray
from hpcray.state import doctor
from hpcray.state.doctor import NOTE, WARN, installation


def files(root: Path, **content: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (root / name).write_text(text)
    return root


def installed(prefix: Path, installer: str = "pip", url: str = "") -> Path:
    """The package in the site-packages of a prefix, with what pip writes beside it. Returns the package's directory."""
    packages = prefix / "lib" / "python3.12" / "site-packages"
    facts = {"METADATA": "Metadata-Version: 2.1\nName: hpcray\nVersion: 0.1.0\n", "INSTALLER": f"{installer}\n"}
    files(packages / "hpcray-0.1.0.dist-info", **facts, **({"direct_url.json": url} if url else {}))
    return files(packages / "hpcray", **{"__init__.py": ""})


def way(package: Path, tmp_path: Path, prefix: Path, base: str = "/usr", **environ: str) -> str:
    found = installation(environ, package, str(prefix), base, [str(package.parent)], str(tmp_path))
    assert (found.problem, found.hint) == ("", "")
    return found.way


def test_a_wheel_in_a_virtual_environment(tmp_path: Path) -> None:
    package = installed(tmp_path / "venv")
    assert way(package, tmp_path, tmp_path / "venv") == "wheel, by pip in a virtual environment"
    package = installed(tmp_path / "other", "uv")
    assert way(package, tmp_path, tmp_path / "other") == "wheel, by uv in a virtual environment"


def test_a_wheel_in_the_systems_python(tmp_path: Path) -> None:
    package = installed(tmp_path / "usr")
    assert way(package, tmp_path, tmp_path / "usr", str(tmp_path / "usr")) == "wheel, by pip in the system's Python"
    below = way(package, tmp_path, tmp_path / "venv", str(tmp_path / "usr"))
    assert below == "wheel, by pip in the system's Python, below a virtual environment"


def test_a_wheel_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("site.getuserbase", lambda: str(tmp_path / "home" / ".local"))
    package = installed(tmp_path / "home" / ".local")
    assert way(package, tmp_path, Path("/usr")) == "wheel, by pip in the user's directory of packages"


def test_a_wheel_elsewhere_on_the_path(tmp_path: Path) -> None:
    package = installed(tmp_path / "target")
    assert way(package, tmp_path, tmp_path / "venv") == f"wheel, by pip in {package.parent}, by PYTHONPATH"


def test_an_editable_installation_and_a_bare_source_directory(tmp_path: Path) -> None:
    source = files(tmp_path / "my source" / "hpcray", **{"__init__.py": ""})
    url = json.dumps({"url": (tmp_path / "my source").as_uri(), "dir_info": {"editable": True}})
    packages = installed(tmp_path / "venv", url=url).parent
    place = (str(tmp_path / "venv"), "/usr", [str(packages)], str(tmp_path))
    assert installation({}, source, *place).way == f"editable, from {tmp_path}/my source"
    other = files(tmp_path / "other" / "hpcray", **{"__init__.py": ""})
    assert installation({}, other, *place).way == f"source directory {tmp_path}/other, without an installation"


SPEC = {"spec": {"nodes": [{"name": "py-hpcray", "version": "0.1.0", "hash": "abcdefghij"}, {"name": "py-click"}]}}


def test_spack_in_its_prefix_and_in_views(tmp_path: Path) -> None:
    prefix = tmp_path / "opt" / "spack" / "linux" / "py-hpcray-0.1.0-abcdefghij"
    package = installed(prefix)
    files(prefix / ".spack", **{"spec.json": json.dumps(SPEC)})
    wanted = "Spack: py-hpcray@0.1.0/abcdefg"
    assert way(package, tmp_path, tmp_path / "python") == wanted
    linked = tmp_path / "linked" / "lib" / "python3.12" / "site-packages" / "hpcray"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(package)
    assert way(linked, tmp_path, tmp_path / "linked") == wanted
    copied = installed(tmp_path / "copied")
    files(tmp_path / "copied" / ".spack" / "py-hpcray", **{"spec.json": json.dumps(SPEC)})
    assert way(copied, tmp_path, tmp_path / "copied") == wanted
    (tmp_path / "copied" / ".spack" / "py-hpcray" / "spec.json").write_text("[]")
    assert way(copied, tmp_path, tmp_path / "copied") == "wheel, by pip in a virtual environment"


def test_easybuild(tmp_path: Path) -> None:
    root = tmp_path / "software" / "hpcray" / "0.1.0-foss-2024a"
    package = installed(root)
    files(root / "easybuild", **{"hpcray-0.1.0-foss-2024a.eb": "", "easybuild-hpcray-0.1.0.log": ""})
    loaded = {"EBROOTHPCRAY": str(root), "LOADEDMODULES": "GCC/13.3.0:hpcray/0.1.0-foss-2024a"}
    assert way(package, tmp_path, tmp_path / "python", **loaded) == "EasyBuild: hpcray-0.1.0-foss-2024a"
    assert way(package, tmp_path, tmp_path / "python") == "EasyBuild: hpcray-0.1.0-foss-2024a"


def test_conda_with_condas_package_and_with_a_wheel(tmp_path: Path) -> None:
    prefix = tmp_path / "envs" / "ray"
    package = installed(prefix, "conda")
    files(prefix / "conda-meta", history="", **{"python-3.12.json": "{}"})
    assert way(package, tmp_path, prefix, str(prefix)) == "wheel, by conda in a conda environment"
    files(prefix / "conda-meta", **{"hpcray-0.1.0-pyh_0.json": "{}"})
    assert way(package, tmp_path, prefix, str(prefix)) == "conda package in a conda environment"


def test_an_environment_module(tmp_path: Path) -> None:
    root = tmp_path / "apps" / "hpcray" / "0.1.0"
    package = installed(root)
    loaded = {"HPCRAY_ROOT": str(root), "LOADEDMODULES": "python/3.12:openmpi/5:hpcray/0.1.0"}
    assert way(package, tmp_path, root, **loaded) == f"environment module hpcray/0.1.0 at {root}"


@pytest.mark.parametrize("variable", ["HPCRAY_ROOT", "EBROOTHPCRAY"])
def test_a_module_that_another_installation_hides_is_a_warning(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = installed(tmp_path / "venv")
    loaded = {variable: "/apps/hpcray/0.1.0", "LOADEDMODULES": "hpcray/0.1.0"}
    found = installation(loaded, package, str(tmp_path / "venv"), "/usr", [str(package.parent)], str(tmp_path))
    assert found.way == "wheel, by pip in a virtual environment"
    assert variable in found.problem and str(package) in found.problem and "module unload hpcray/0.1.0" in found.hint
    monkeypatch.setattr(doctor, "installation", lambda environ: found)
    rows = {row.name: row for row in doctor.examine_software({})}
    assert (rows["installation"].level, rows["module"].level, rows["module"].hint) == (NOTE, WARN, found.hint)


@pytest.mark.parametrize(
    ("environ", "mark", "said"),
    [
        ({"APPTAINER_CONTAINER": "/images/hpcray.sif"}, "", "an Apptainer container of /images/hpcray.sif"),
        ({"SINGULARITY_CONTAINER": "/images/old.sif"}, ".singularity.d/x", "an Apptainer container of /images/old.sif"),
        ({}, ".singularity.d/x", "an Apptainer container"),
        ({"CH_RUNNING": "Weird Al Yankovic"}, "", "a Charliecloud container"),
        ({}, ".dockerenv", "a Docker container"),
        ({}, "run/.containerenv", "a Podman container"),
    ],
)
def test_a_container_is_named_beside_the_way_inside_of_it(
    environ: dict[str, str], mark: str, said: str, tmp_path: Path
) -> None:
    package = installed(tmp_path / "venv")
    if mark:
        files((tmp_path / mark).parent, **{Path(mark).name: ""})
    assert way(package, tmp_path, tmp_path / "venv", **environ) == f"wheel, by pip in a virtual environment, in {said}"


def test_the_installation_of_these_tests_is_recognised() -> None:
    """A real interpreter: `.ci/run` has a wheel, developers an editable installation or the checkout on the path."""
    code = "import os; from hpcray.state.doctor import installation; print(installation(os.environ).way)"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True, env=dict(os.environ))
    here = Path(hpcray.__file__).parents[1]
    ways = (f"editable, from {here}", f"source directory {here}, without") if here == ROOT else ("wheel, by ",)
    assert done.stdout.startswith(ways), done.stderr
