"""Session directories: made, found, swept, removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hpcray.platform import session_directory
from hpcray.platform.session_directory import (
    SessionDirectory,
    SessionError,
    live_sessions,
    read_session,
    remove_session_directory,
    session_root,
)


@pytest.fixture
def tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short temporary directory that sessions go to."""
    path = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("HPCRAY_TMPDIR", str(path))
    return path


def abandon(session: SessionDirectory) -> None:
    """What the death of all who hold the lock does."""
    os.close(session.lock_fd)
    session.lock_fd = -1


def test_a_session_directory_is_private_and_has_a_short_path(tmp: Path) -> None:
    session = SessionDirectory.create()
    for path in (session.path, os.path.dirname(session.path)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert len(session.socket_path(2**32 - 1)) <= 107
    assert session.socket_path(0) == f"{session.path}/r.s"
    session.remove()
    session.remove()
    assert list(tmp.iterdir()) == []


def test_creating_a_session_removes_dead_ones_and_spares_live_ones(tmp: Path) -> None:
    dead, alive = SessionDirectory.create(), SessionDirectory.create()
    abandon(dead)
    other = Path(os.path.dirname(dead.path), "start-0123abcd")
    other.mkdir()
    new = SessionDirectory.create()
    assert not os.path.exists(dead.path)
    assert os.path.isdir(alive.path) and os.path.isdir(new.path)
    assert other.is_dir(), "not a session directory: not ours to sweep"
    alive.remove()
    new.remove()


def test_live_sessions_are_listed_with_the_newest_job_first(tmp: Path) -> None:
    old, second, first, unpublished, dead = (SessionDirectory.create() for _ in range(5))
    old.publish("old", 0, "a")
    second.publish("new", 1, "b")
    first.publish("new", 0, "c")
    dead.publish("dead", 0, "d")
    abandon(dead)
    found = live_sessions()
    assert [info.path for info in found] == [first.path, second.path, old.path]
    assert (found[0].pid, found[0].node, found[0].session) == (os.getpid(), 0, "new")
    for session in (old, second, first, unpublished):
        session.remove()
    assert live_sessions() == []


def test_reading_the_session_of_a_dead_node_is_an_error(tmp: Path) -> None:
    session = SessionDirectory.create()
    session.publish("job", 0, "a")
    assert read_session(session.path).session == "job"
    abandon(session)
    with pytest.raises(SessionError, match="no live hpcray node"):
        read_session(session.path)
    remove_session_directory(session.path)


def test_a_session_with_a_broken_info_file_is_not_listed(tmp: Path) -> None:
    session = SessionDirectory.create()
    Path(session.path, "info.json").write_text('{"path": 3}')
    assert live_sessions() == []
    session.remove()


@pytest.mark.parametrize("name", ["HPCRAY_TMPDIR", "SLURM_TMPDIR", "TMPDIR"])
def test_the_session_root_is_in_the_first_usable_temporary_directory(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = tmp_path_factory.mktemp("s")
    assert session_root({name: str(short)}) == f"{short}/hpcray-{os.getuid()}"
    long = short / ("x" * 100)
    long.mkdir()
    assert session_root({name: str(long)}) == f"/tmp/hpcray-{os.getuid()}", "sockets need a short path"
    assert session_root({name: "/does/not/exist"}) == f"/tmp/hpcray-{os.getuid()}"


def test_a_session_root_open_to_other_users_is_refused(tmp: Path) -> None:
    root = Path(session_root(os.environ))
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(SessionError, match="0700"):
        SessionDirectory.create()


def test_a_symbolic_link_as_session_root_is_refused(tmp: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path, session_root(os.environ))
    with pytest.raises(SessionError, match="cannot use"):
        SessionDirectory.create()


def test_a_temporary_directory_that_takes_no_subdirectories_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRAY_TMPDIR", "/proc")
    with pytest.raises(SessionError, match="/proc takes no directories; hint: set HPCRAY_TMPDIR"):
        SessionDirectory.create()


@pytest.mark.parametrize(("blocks", "files", "why"), [(10, 9, "40 KiB are free"), (10_000, 0, "no file can be made")])
def test_where_a_directory_is_full_the_session_is_elsewhere_or_refused(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], blocks: int, files: int, why: str
) -> None:
    full = tmp / "full"
    full.mkdir()
    real = os.statvfs

    def statvfs(path: str) -> os.statvfs_result:
        if str(path) != str(full):
            return real(path)
        return os.statvfs_result((4096, 4096, 20_000, blocks, blocks, 1000, files, files, 0, 255))

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setenv("HPCRAY_TMPDIR", str(full))
    with pytest.raises(SessionError, match=f"{full} is full: {why}; hint: set HPCRAY_TMPDIR"):
        SessionDirectory.create()
    monkeypatch.delenv("HPCRAY_TMPDIR")
    monkeypatch.setenv("TMPDIR", str(full))
    session = SessionDirectory.create()
    assert not session.path.startswith(str(full)) and not list(full.iterdir())
    session.remove()
    assert f"{full} is full: {why}" in capsys.readouterr().err


# ---------------------------------------------------------------- what others may have put there

OTHER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def test_files_of_a_session_are_private_under_every_umask(tmp: Path) -> None:
    before = os.umask(0)
    try:
        session = SessionDirectory.create()
        session.publish("job", 0, "a")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(session.path).iterdir()}
    assert modes == {"lock": 0o600, "info.json": 0o600}
    session.remove()


def test_a_world_writable_temporary_directory_without_sticky_bit_is_refused(tmp: Path) -> None:
    tmp.chmod(0o777)
    with pytest.raises(SessionError, match="no sticky bit.*hint: set HPCRAY_TMPDIR"):
        SessionDirectory.create()
    tmp.chmod(0o1777)
    SessionDirectory.create().remove()


@as_root
def test_a_temporary_directory_of_another_user_is_refused(tmp: Path) -> None:
    os.chown(tmp, OTHER, OTHER)
    with pytest.raises(SessionError, match=f"belongs to uid {OTHER}.*hint: set HPCRAY_TMPDIR"):
        SessionDirectory.create()


@as_root
@pytest.mark.parametrize("victim", ["root", "directory", "info.json"])
def test_sessions_that_another_user_owns_are_ignored(tmp: Path, victim: str) -> None:
    session = SessionDirectory.create()
    session.publish("job", 0, "a")
    assert [info.path for info in live_sessions()] == [session.path]
    taken = {"root": os.path.dirname(session.path), "directory": session.path}.get(victim, f"{session.path}/{victim}")
    os.chown(taken, OTHER, OTHER)
    assert live_sessions() == []
    if victim != "root":
        with pytest.raises(SessionError, match=f"belongs to uid {OTHER}" if victim == "directory" else "no live"):
            read_session(session.path)
    session.remove()


def test_a_session_open_to_other_users_is_not_joined(tmp: Path) -> None:
    session = SessionDirectory.create()
    session.publish("job", 0, "a")
    os.chmod(session.path, 0o755)
    assert live_sessions() == []
    with pytest.raises(SessionError, match="mode 755"):
        read_session(session.path)
    session.remove()


def test_an_info_file_that_is_a_symbolic_link_is_not_read(tmp: Path, tmp_path: Path) -> None:
    session = SessionDirectory.create()
    session.publish("job", 0, "a")
    os.rename(f"{session.path}/info.json", tmp_path / "info.json")
    os.symlink(tmp_path / "info.json", f"{session.path}/info.json")
    assert live_sessions() == []
    session.remove()
    assert (tmp_path / "info.json").exists()


def test_removing_dead_sessions_does_not_follow_symbolic_links(tmp: Path, tmp_path: Path) -> None:
    dead = SessionDirectory.create()
    abandon(dead)
    (tmp_path / "precious").write_text("x")
    os.symlink(tmp_path, Path(dead.path).with_name("0123abcd"))
    os.symlink(tmp_path, Path(dead.path, "inside"))
    SessionDirectory.create().remove()
    assert not os.path.exists(dead.path)
    assert (tmp_path / "precious").exists()
    Path(dead.path).with_name("0123abcd").unlink()


# ---------------------------------------------------------------- places that cannot be trusted


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a short path."""
    path = tmp_path_factory.mktemp("h", numbered=True)
    monkeypatch.setenv("HOME", str(path))
    return path


@as_root
@pytest.mark.parametrize("variable", ["HPCRAY_TMPDIR", "SLURM_TMPDIR", "TMPDIR"])
def test_below_a_directory_of_another_user_a_node_starts_elsewhere_and_says_why(
    tmp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    mine = tmp / "g" / "m"
    mine.mkdir(parents=True)
    os.chown(tmp / "g", OTHER, OTHER)
    monkeypatch.delenv("HPCRAY_TMPDIR")
    monkeypatch.setenv(variable, str(mine))
    session = SessionDirectory.create()
    try:
        assert not session.path.startswith(str(mine)) and not list(mine.iterdir())
        said = capsys.readouterr().err
        assert f"{tmp}/g belongs to uid {OTHER}" in said and f"HPCRAY_SAFE_DIRECTORIES={tmp}/g" in said
        session.publish("job", 0, "a")
        assert session.path in [info.path for info in live_sessions()], "and it is found there"
    finally:
        session.remove()
    monkeypatch.setenv("HPCRAY_SAFE_DIRECTORIES", f"{tmp}/g")
    session = SessionDirectory.create()
    assert session.path.startswith(str(mine)) and capsys.readouterr().err == ""
    session.remove()


@as_root
def test_a_name_that_another_user_has_taken_in_a_default_place_sends_the_session_home(
    tmp: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HPCRAY_TMPDIR")
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(session_directory, "_SYSTEM_TMP", str(tmp))
    taken = tmp / f"hpcray-{os.getuid()}"
    taken.mkdir()
    os.chown(taken, OTHER, OTHER)
    session = SessionDirectory.create()
    try:
        assert session.path.startswith(f"{home}/.hpcray/tmp/")
        assert f"{taken} belongs to uid {OTHER}" in capsys.readouterr().err
        session.publish("job", 0, "a")
        taken.rmdir()
        assert [info.path for info in live_sessions()] == [session.path], "found when the name is free again, too"
    finally:
        session.remove()
