"""`python -m hpcray.compat libraries install`, from a made wheel in a directory that pip takes for its index."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hpcray.compat import RAY_VERSION, libraries
from hpcray.compat.__main__ import main
from hpcray.compat.finder import LENT, wheel_version

from .test_table_core import ROOT

FILES = {
    "ray/__init__.py": "raise RuntimeError('the real ray is imported')",
    "ray/_version.py": f'version = "{RAY_VERSION}"\n',
    "ray/_raylet.so": "binary",
    "ray/core/src/ray/raylet/raylet": "binary",
    "ray/tune/__init__.py": "NAME = 'tune of the wheel'",
    "ray/widgets/templates/page.html": "<p>",
}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of packages that has Ray, of a few files."""
    directory = tmp_path / "index"
    directory.mkdir()
    name = f"ray-{RAY_VERSION}"
    files = {
        **FILES,
        f"{name}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: ray\nVersion: {RAY_VERSION}\n",
        f"{name}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{name}.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


def test_libraries_are_unpacked_without_binaries_and_found(
    index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "of" / "ray"
    assert main(["libraries", "install", str(target)]) == 0
    assert str(target) in capsys.readouterr().out
    unpacked = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert unpacked == {name for name in FILES if not name.startswith(("ray/core", "ray/_raylet"))}
    assert [path.name for path in target.parent.iterdir()] == ["ray"], "nothing else is left"
    code = "import hpcray.compat.ray, ray.tune; print(ray.tune.NAME)"
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT), LENT: str(target)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert said.stdout == "tune of the wheel\n"
    (index / f"ray-{RAY_VERSION}-py3-none-any.whl").unlink()
    assert main(["libraries", "install", str(target)]) == 0, "what is there is not downloaded again"


def test_what_stands_in_the_way_is_kept(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert main(["libraries", "install", str(tmp_path / "other")]) == 1
    assert "does not hold the libraries" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["file"]


def test_without_a_network_there_is_a_hint_and_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["libraries", "install", str(tmp_path / "ray")]) == 1
    said = capsys.readouterr().err
    assert f"pip could not download ray=={RAY_VERSION}" in said
    assert "hint: on a host that reaches PyPI" in said
    assert list(tmp_path.iterdir()) == []


def test_the_directory_of_the_environment_is_the_default(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(LENT, raising=False)
    monkeypatch.setattr(libraries, "DEFAULT_LIBRARIES", str(tmp_path / "share"))
    assert main(["libraries", "path"]) == 1
    assert main(["libraries", "install"]) == 0
    assert wheel_version(str(tmp_path / "share")) == RAY_VERSION
    capsys.readouterr()
    assert main(["libraries", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "share")
    assert main(["libraries"]) == 2
