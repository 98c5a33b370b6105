"""A directory packed, unpacked elsewhere, and used in its place."""

from __future__ import annotations

import io
import os
import random
import socket
import stat
import sys
import tarfile
import types
from pathlib import Path

import pytest

from hpcray.common.exceptions import StartupError
from hpcray.platform.direct_io import open_unnamed_file
from hpcray.platform.path_relocation import BROADCAST_VARIABLE, PathRelocation
from hpcray.runtime_env.env_broadcast import check_broadcast, pack_directory, share, unpack_directory


def transfer(source: Path, target: Path) -> tuple[int, int]:
    """Pack and unpack; how many things each of them counted."""
    fd = open_unnamed_file(str(target.parent), direct=False)
    packed = pack_directory(str(source), lambda data: os.write(fd, data))
    done: list[None] = []
    unpacked = unpack_directory(fd, str(target), lambda: done.append(None))
    assert len(done) == unpacked
    os.close(fd)
    return packed, unpacked


def test_an_unpacked_directory_equals_the_packed_one(tmp_path: Path) -> None:
    source = tmp_path / "source"
    noise = random.Random(1)
    files = {f"p{n % 7}/q{n % 3}/{n}.py": noise.randbytes(n * 37) for n in range(200)}
    files |= {"empty": b"", "large": noise.randbytes(3 << 20), "name with spaces and ü": b"x", "x" * 200: b"long"}
    for name, data in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (source / "tool").write_text("#!/bin/sh")
    (source / "tool").chmod(0o755)
    os.utime(source / "tool", (1_600_000_000.25, 1_600_000_000.25))
    (source / "inner").symlink_to("p1/q1")
    (source / "outer").symlink_to("/usr/bin/env")
    (source / "hollow").mkdir()
    os.mkfifo(source / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(source / "sock"))
    target = tmp_path / "target"
    packed, unpacked = transfer(source, target)
    listener.close()
    here = {str(path.relative_to(source)) for path in source.rglob("*")} - {"pipe", "sock"}
    there = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert here == there and packed == unpacked == len([name for name in here if not name.startswith("inner/")])
    assert all((target / name).read_bytes() == data for name, data in files.items())
    assert os.stat(target / "tool").st_mtime == 1_600_000_000, "or no .pyc would be valid"
    assert os.access(target / "tool", os.X_OK)
    assert os.readlink(target / "outer") == "/usr/bin/env"
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def test_packing_opens_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(100):
        (source / str(number)).write_bytes(bytes(number * 30_000))
    opened: list[str] = []
    sys.addaudithook(
        lambda event, args: opened.append(args[0]) if event == "open" and str(source) in str(args[0]) else None
    )
    pack_directory(str(source), lambda data: None)
    assert sorted(opened) == sorted(str(path) for path in source.iterdir())


def test_an_unreadable_file_is_named_in_the_error(tmp_path: Path) -> None:
    if os.getuid() == 0:
        (tmp_path / "loop").symlink_to(tmp_path)
        target = tmp_path / "gone"
        with pytest.raises(FileNotFoundError, match="gone"):
            pack_directory(str(target), lambda data: None)
        return
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    with pytest.raises(PermissionError, match="secret"):
        pack_directory(str(tmp_path), lambda data: None)


def test_an_archive_that_would_write_outside_its_directory_is_refused(tmp_path: Path) -> None:
    if not hasattr(tarfile, "tar_filter"):
        pytest.skip("this Python's tarfile has no filters")
    fd = open_unnamed_file(str(tmp_path), direct=False)
    with os.fdopen(os.dup(fd), "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("../escaped")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
    with pytest.raises(tarfile.TarError):
        unpack_directory(fd, str(tmp_path / "target"), lambda: None)
    os.close(fd)
    assert not (tmp_path / "escaped").exists()


# ---------------------------------------------------------------- using the copy


def test_a_path_is_relocated_to_the_copy_and_back() -> None:
    moved = PathRelocation([("/shared/env", "/tmp/s/env"), ("/real/env", "/tmp/s/env")])
    assert moved.copy("/shared/env") == "/tmp/s/env"
    assert moved.copy("/real/env/lib/x.py") == "/tmp/s/env/lib/x.py"
    assert moved.copy("/shared/environment") == "/shared/environment"
    assert moved.original("/tmp/s/env/lib") == "/shared/env/lib"
    assert moved.original("/elsewhere") == "/elsewhere"
    assert PathRelocation().copy("/shared/env") == "/shared/env"


def test_path_variables_are_relocated_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = PathRelocation([("/shared/env", "/tmp/s/env")])
    environ = {"PATH": "/shared/env/bin:/usr/bin", "PYTHONPATH": "/a:/shared/env", "OTHER": "/shared/env"}
    moved.set(environ)
    assert environ.pop(BROADCAST_VARIABLE)
    assert environ == {"PATH": "/tmp/s/env/bin:/usr/bin", "PYTHONPATH": "/a:/tmp/s/env", "OTHER": "/shared/env"}
    untouched = {"PATH": "/x"}
    PathRelocation().set(untouched)
    assert untouched == {"PATH": "/x"}


def test_submodules_are_imported_from_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("original", "copy"):
        package = tmp_path / place / "some_package_of_ours"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "late.py").write_text(f"place = {place!r}")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "original"), *sys.path])
    monkeypatch.setattr(sys, "prefix", sys.prefix)
    monkeypatch.setattr(sys, "exec_prefix", sys.exec_prefix)
    monkeypatch.setattr(sys, "executable", sys.executable)
    monkeypatch.setenv(BROADCAST_VARIABLE, "")
    import some_package_of_ours  # type: ignore[import-not-found]

    assert isinstance(some_package_of_ours, types.ModuleType)
    PathRelocation([(str(tmp_path / "original"), str(tmp_path / "copy"))]).apply()
    from some_package_of_ours import late  # type: ignore[import-not-found]

    assert late.place == "copy"
    assert PathRelocation.of(os.environ).original(str(tmp_path / "copy")) == str(tmp_path / "original")
    for name in ("some_package_of_ours", "some_package_of_ours.late"):
        del sys.modules[name]


# ---------------------------------------------------------------- what is refused


def test_a_directory_that_no_module_is_imported_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="no module would be imported from there; hint: give the"):
        check_broadcast(str(tmp_path), ["/elsewhere/script.py"])
    with pytest.raises(StartupError, match="no such directory"):
        check_broadcast(str(tmp_path / "none"), [])


def test_the_directory_of_the_script_is_relocated_under_all_its_names(tmp_path: Path) -> None:
    (tmp_path / "real" / "app").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    names = check_broadcast(str(tmp_path / "link"), [str(tmp_path / "link" / "app" / "main.py")])
    assert names == [str(tmp_path / "link"), str(tmp_path / "real")]


def test_a_job_of_one_node_copies_the_directory_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, session = tmp_path / "source", tmp_path / "session"
    source.mkdir()
    session.mkdir()
    (source / "m.py").write_text("x = 1")
    monkeypatch.setattr(sys, "path", [str(source), *sys.path])
    moved = share(str(source), [], None, str(session), 60.0)
    assert Path(moved.copy(str(source / "m.py"))).read_text() == "x = 1"
    assert [path.name for path in session.iterdir()] == ["env"]


def test_a_disk_that_refuses_the_copy_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    session = tmp_path / "session"
    (session / "env").mkdir(parents=True)  # in the way of the copy
    with pytest.raises(StartupError, match="--broadcast-env: node 0 on .*File exists"):
        share(str(tmp_path), [], None, str(session), 60.0)
