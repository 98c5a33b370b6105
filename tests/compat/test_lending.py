"""Ray's own libraries, lent from a real wheel beside: here from a made one, whose files are ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcray.compat import RAY_VERSION, lend
from hpcray.compat.finder import FINDER, LENT

from .test_table_core import ROOT

PROGRAM = """
import hpcray.compat.ray
import ray
import ray.tune
from ray.tune.deep import where
from ray import train
print(ray.tune.__file__, where, ray.tune.REF is ray.ObjectRef, train.NAME)
print(type(ray._raylet).__name__, ray._raylet.ObjectRef.__module__, ray.get.__module__)
for name in ("ray.tune.missing", "ray.serve", "ray._private.of_the_wheel", "ray.of_the_wheel"):
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        print(error)
try:
    import ray.data
except ImportError as error:
    print(error)
print(ray.get(ray.remote(lambda: __import__("ray.tune").tune.REF.__name__).remote()))
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A directory with a package that looks like Ray's."""
    files = {
        "__init__.py": "raise RuntimeError('the real ray is imported')",
        "_version.py": f'commit = "x"\nversion = "{RAY_VERSION}"\n',
        "_raylet.py": "raise RuntimeError('the real _raylet is imported')",
        "of_the_wheel.py": "",
        "_private/__init__.py": "raise RuntimeError",
        "_private/of_the_wheel.py": "",
        "tune/__init__.py": "import ray\nfrom ray._raylet import ObjectRef as REF\nimport ray.exceptions",
        "tune/deep.py": "from ray.util import placement_group\nwhere = 'deep'",
        "train/__init__.py": "NAME = 'train of the wheel'",
        "data/__init__.py": "from ray._common.not_here import something",
    }
    for name, text in files.items():
        path = tmp_path / "wheel" / "ray" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "wheel"


def test_a_lent_wheel_provides_libraries_but_not_the_core(wheel: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), LENT: str(wheel)},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0].split(" ", 1) == [str(wheel / "ray" / "tune" / "__init__.py"), "deep True train of the wheel"]
    assert lines[1] == "Facade hpcray.runtime.core_worker.object_refs hpcray.api.objects"
    assert lines[2:4] == ["No module named 'ray.tune.missing'", "No module named 'ray.serve'"]
    assert lines[4].startswith("hpcray does not have ray._private.of_the_wheel")
    assert lines[5].startswith("hpcray does not have ray.of_the_wheel")
    assert lines[6].startswith("hpcray does not have ray._common.not_here")
    assert lines[7] == "ObjectRef", "workers have them too"


@pytest.mark.parametrize(
    ("version", "match"), [("2.9.0", "is 2.9.0, and hpcray has"), ("", "does not hold the package")]
)
def test_a_wheel_of_another_version_is_not_lent(wheel: Path, version: str, match: str) -> None:
    if version:
        (wheel / "ray" / "_version.py").write_text(f'version = "{version}"\n')
    else:
        (wheel / "ray" / "_version.py").unlink()
    with pytest.raises(ImportError, match=match):
        lend(str(wheel))
    assert (FINDER.lent, os.environ.get(LENT)) == ("", None)
