"""The wheel and the sdist: built as a release is, and examined by the tools that the package index's users run."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.jobs import ROOT
from test_recipes import check, project, tool

pytestmark = pytest.mark.slow  # a build fetches its backend


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    pytest.importorskip("build", reason="no build; hint: pip install 'hpcray[packaging]'")
    check(sys.executable, "-m", "build", "--outdir", out, ROOT)  # the wheel is built from the sdist
    return {path.suffix: path for path in out.iterdir()}


def test_the_metadata_is_what_a_reviewer_looks_for(packages: dict[str, Path]) -> None:
    check(tool("twine"), "check", "--strict", *packages.values())
    with zipfile.ZipFile(packages[".whl"]) as wheel:
        (name,) = (name for name in wheel.namelist() if re.fullmatch(r"hpcray-[\d.]+\.dist-info/METADATA", name))
        facts = email.message_from_bytes(wheel.read(name))
        license_text = wheel.read(name.replace("METADATA", "licenses/LICENSE"))
    assert facts["License-Expression"] == "Apache-2.0" and license_text == (ROOT / "LICENSE").read_bytes()
    assert facts["Author"] == "The hpcray authors"
    assert {text.partition(",")[0] for text in facts.get_all("Project-URL", [])} == {"Homepage", "Download"}
    extras = set(project()["project"]["optional-dependencies"])
    assert {name.replace("_", "-") for name in facts.get_all("Provides-Extra", [])} == extras


def test_the_wheel_has_the_package_and_nothing_else(packages: dict[str, Path]) -> None:
    check(tool("check-wheel-contents"), "--config", ROOT / "pyproject.toml", packages[".whl"])
    with zipfile.ZipFile(packages[".whl"]) as wheel:
        names = wheel.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"hpcray"}
    shipped = {f"hpcray/shipped/{name}" for name in ("docs/tutorial.md", "examples/digits.py", "slurm/cpu.sbatch")}
    assert shipped <= set(names), "what `hpcray copy` copies"
    kept = subprocess.run(["git", "ls-files", "hpcray"], cwd=ROOT, capture_output=True, text=True)
    if kept.returncode == 0 and kept.stdout:
        assert set(kept.stdout.split()) <= set(names), "files of the package that the wheel lacks"


def test_the_sdist_has_the_tests_and_what_people_look_for(packages: dict[str, Path]) -> None:
    with tarfile.open(packages[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    top = {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml"}
    assert top | {"tests/conftest.py", "examples/digits.py", "slurm/cpu.sbatch", "launch/hpcray-launch"} <= names
    assert not {name for name in names if name.startswith("packaging/")}, "recipes hold the checksum of the sdist"


@pytest.mark.timeout(900)
def test_all_extras_can_be_installed_together(packages: dict[str, Path]) -> None:
    """pip finds versions that suit all of them at once, and so for each of them alone and for any two."""
    extras = ",".join(project()["project"]["optional-dependencies"])
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, f"{packages['.whl']}[{extras}]"], capture_output=True, text=True, timeout=800)
    assert not done.returncode, done.stderr
