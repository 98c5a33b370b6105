"""`python -m hpcray.compat`: an environment in which `import ray` is hpcray, without a package installer."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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
