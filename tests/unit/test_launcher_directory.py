"""The session directory of a launcher: removed only when it is certainly an abandoned one of ours."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcray.platform.launcher_environment import LauncherDirectory


@pytest.fixture
def launcher() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def make(path: Path, mode: int = 0o700) -> dict[str, str]:
    (path / "1" / "0").mkdir(parents=True)
    (path / "hwloc.sm").write_text("x")
    path.chmod(mode)
    return {"PMIX_SERVER_TMPDIR": str(path)}


def test_the_launchers_directory_is_removed_once_its_process_is_gone(
    tmp_path: Path, launcher: subprocess.Popen[bytes]
) -> None:
    path = tmp_path / f"ompi.{launcher.pid}"
    found = LauncherDirectory.find(make(path))
    assert found is not None
    found.remove_if_abandoned()
    assert (path / "hwloc.sm").exists(), "its process lives"
    launcher.kill()
    os.waitid(os.P_PID, launcher.pid, os.WEXITED | os.WNOWAIT)  # a zombie is gone
    found.remove_if_abandoned()
    assert not path.exists()
    found.remove_if_abandoned()  # another rank was faster


@pytest.mark.parametrize("name", ["ompi.{pid}.0", "ompi.host.0", "mine.{pid}", "ompi.0", "ompi.{dead}"])
def test_a_launcher_directory_with_an_unknown_owner_stays(
    tmp_path: Path, launcher: subprocess.Popen[bytes], name: str
) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    path = tmp_path / name.format(pid=launcher.pid, dead=dead.pid)
    assert LauncherDirectory.find(make(path)) is None


def test_without_the_variable_no_launcher_directory_is_found() -> None:
    assert LauncherDirectory.find({}) is None
    assert LauncherDirectory.find({"PMIX_SERVER_TMPDIR": "ompi.1"}) is None, "a relative path"


@pytest.mark.parametrize("what", ["open to others", "a link"])
def test_a_launcher_directory_that_other_users_can_write_stays(
    tmp_path: Path, launcher: subprocess.Popen[bytes], what: str
) -> None:
    path = tmp_path / f"ompi.{launcher.pid}"
    environ = make(path, 0o755 if what == "open to others" else 0o700)
    if what == "a link":
        real = path.rename(tmp_path / "real")
        path.symlink_to(real)
    found = LauncherDirectory.find(environ)
    assert found is not None
    launcher.kill()
    launcher.wait()
    found.remove_if_abandoned()
    assert (path / "hwloc.sm").exists()
