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
from ray._common import signature
from ray._private.thirdparty.table import LINES
from ray.core.generated import common_pb2
print(signature.OF_CORE is ray.ObjectRef, LINES, common_pb2.STATUS, ray.widgets.render.SHOWN, ray.util.tpu.POD)
print(ray._private.accelerators.TPUAcceleratorManager, hasattr(ray._private.accelerators, "nothing"))
import ray._common.retry, ray._private.dict, ray.experimental.shuffle, ray.util.iter
print(ray.util.iter.SHARED, ray.experimental.shuffle.GET is ray.get, ray._private.dict.MERGED, ray._common.retry.TRIED)
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


# A driver that says nothing of libraries starts one that does.
JOINED = """
import os, subprocess, sys
import hpcray
hpcray.init()
child = '''
import os
import hpcray.compat
hpcray.compat.lend(os.environ["WHEEL"])
import hpcray.compat.ray
import ray
ray.init(address="auto")
print(ray.get(ray.remote(lambda: __import__("ray.train").train.NAME).remote()))
'''
subprocess.run([sys.executable, "-c", child], check=True)
print(hpcray.get(hpcray.remote(lambda: not os.environ.get("HPCRAY_RAY_LIBRARIES")).remote()))
"""

PRELOADED = """
import os, time
import ray
ray.init()

@ray.remote
def where():
    time.sleep(0.3)
    import ray.tune
    return ray.tune.PID, os.getpid()

found = ray.get([where.remote() for _ in range(2)])
print(len({pid for _, pid in found}) == 2, found[0][0] == found[1][0] != found[0][1])
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
        "_common/__init__.py": "raise RuntimeError",
        "_common/signature.py": "from ray._raylet import ObjectRef as OF_CORE",
        "_private/accelerators/__init__.py": "raise RuntimeError",
        "_private/accelerators/tpu.py": "TPUAcceleratorManager = 'manager'",
        "_private/thirdparty/__init__.py": "",
        "_private/thirdparty/table.py": "LINES = 3",
        "core/generated/common_pb2.py": "STATUS = 'ok'",
        "util/tpu.py": "from ray._private.accelerators import TPUAcceleratorManager\nPOD = 'pod'",
        "util/iter.py": "from ray.util.iter_metrics import SHARED",
        "util/iter_metrics.py": "SHARED = 'shared'",
        "experimental/shuffle.py": "import ray\nGET = ray.get",
        "_private/dict.py": "MERGED = 'merged'",
        "_common/retry.py": "TRIED = 'tried'",
        "widgets/__init__.py": "from ray.widgets import render",
        "widgets/render.py": "SHOWN = True",
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
    assert lines[1:3] == ["True 3 ok True pod", "manager False"], "helpers come from the wheel, one by one"
    assert lines.pop(3) == "shared True merged tried"
    assert lines[3] == "Facade hpcray.runtime.core_worker.object_refs hpcray.api.objects"
    assert lines[4:6] == ["No module named 'ray.tune.missing'", "No module named 'ray.serve'"]
    assert lines[6].startswith("hpcray does not have ray._private.of_the_wheel")
    assert lines[7].startswith("hpcray does not have ray.of_the_wheel")
    assert lines[8].startswith("hpcray does not have ray._common.not_here")
    assert lines[9] == "ObjectRef", "workers have them too"


def test_workers_of_a_driver_that_joins_have_its_libraries(wheel: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOINED)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "WHEEL": str(wheel), LENT: ""}
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray", "--num-cpus", "2", str(program)],
        env=env, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["train", "of", "the", "wheel", "True"]


def test_a_module_of_ray_is_preloaded_in_the_template(wheel: Path, tmp_path: Path) -> None:
    (wheel / "ray" / "tune" / "__init__.py").write_text("import os\nimport ray\nPID = os.getpid()")
    program = tmp_path / "program.py"
    program.write_text(PRELOADED)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray", "--num-cpus", "2", "--ray-libraries", str(wheel), str(program)],
        env={**os.environ, "PYTHONPATH": path, "HPCRAY_PRELOAD": "ray.tune"},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True", "True"], "two workers share a module that neither has imported"
    assert "warning" not in ended.stderr


@pytest.mark.parametrize("named", [{}, {"HPCRAY_PRELOAD": ""}], ids=["by itself", "not asked for"])
def test_the_node_of_a_program_that_uses_ray_data_preloads_it(
    wheel: Path, tmp_path: Path, named: dict[str, str]
) -> None:
    """Hundreds of workers that each import it are most of the time of a short pipeline."""
    (wheel / "ray" / "data" / "__init__.py").write_text("import os\nimport ray\nPID = os.getpid()")
    program = tmp_path / "program.py"
    program.write_text(f"import hpcray.compat.ray\nimport ray.data\n{PRELOADED.replace('ray.tune', 'ray.data')}")
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(program)], env={**os.environ, "PYTHONPATH": path, LENT: str(wheel), **named},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True", "False" if named else "True"]


@pytest.mark.parametrize("when", ["before init", "after it"])
def test_a_driver_that_joins_has_the_libraries_that_it_uses_preloaded(wheel: Path, tmp_path: Path, when: str) -> None:
    (wheel / "ray" / "tune" / "__init__.py").write_text("import os\nimport ray\nPID = os.getpid()")
    program = tmp_path / "program.py"
    late = PRELOADED.replace("ray.init()\n", "ray.init()\nimport ray.tune\n")
    program.write_text(f"import ray.tune\n{PRELOADED}" if when == "before init" else late)
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-m", "hpcray", "--num-cpus", "2", "--ray-libraries", str(wheel), str(program)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["True", "True"]
    assert "warning" not in ended.stderr


@pytest.mark.parametrize(("version", "match"), [("2.9.0", "holds Ray 2.9.0, and hpcray has"), ("", "holds no Ray")])
def test_a_wheel_of_another_version_is_not_lent(
    wheel: Path, version: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LENT, raising=False)  # as long as other tests of this process import `ray`, it is set
    if version:
        (wheel / "ray" / "_version.py").write_text(f'version = "{version}"\n')
    else:
        (wheel / "ray" / "_version.py").unlink()
    with pytest.raises(ImportError, match=match):
        lend(str(wheel))
    assert (FINDER.lent, os.environ.get(LENT)) == ("", None)
