"""Session directories: made, found, swept, removed."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from hpcray.host import session as session_module
from hpcray.host.session import Session, SessionError, live_sessions, read_session, remove_directory, session_root


@pytest.fixture
def tmp(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short temporary directory that sessions go to."""
    path = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("HPCRAY_TMPDIR", str(path))
    return path


def abandon(session: Session) -> None:
    """What the death of all who hold the lock does."""
    os.close(session.lock_fd)
    session.lock_fd = -1


def test_is_private_and_short(tmp: Path) -> None:
    session = Session.create()
    for path in (session.path, os.path.dirname(session.path)):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o700
    assert len(session.socket_path(2**32 - 1)) <= 107
    assert session.socket_path(0) == f"{session.path}/r.s"
    session.remove()
    session.remove()
    assert list(tmp.iterdir()) == []


def test_sweeps_the_dead_and_spares_the_living(tmp: Path) -> None:
    dead, alive = Session.create(), Session.create()
    abandon(dead)
    other = Path(os.path.dirname(dead.path), "start-0123abcd")
    other.mkdir()
    new = Session.create()
    assert not os.path.exists(dead.path)
    assert os.path.isdir(alive.path) and os.path.isdir(new.path)
    assert other.is_dir(), "not a session directory: not ours to sweep"
    alive.remove()
    new.remove()


def test_live_sessions_newest_job_first(tmp: Path) -> None:
    old, second, first, unpublished, dead = (Session.create() for _ in range(5))
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


def test_read_session_tells_the_dead(tmp: Path) -> None:
    session = Session.create()
    session.publish("job", 0, "a")
    assert read_session(session.path).session == "job"
    abandon(session)
    with pytest.raises(SessionError, match="no live hpcray node"):
        read_session(session.path)
    remove_directory(session.path)


def test_broken_description_is_none(tmp: Path) -> None:
    session = Session.create()
    Path(session.path, "info.json").write_text('{"path": 3}')
    assert live_sessions() == []
    session.remove()


@pytest.mark.parametrize("name", ["HPCRAY_TMPDIR", "SLURM_TMPDIR", "TMPDIR"])
def test_where_it_goes(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    short = tmp_path_factory.mktemp("s")
    assert session_root({name: str(short)}) == f"{short}/hpcray-{os.getuid()}"
    long = short / ("x" * 100)
    long.mkdir()
    assert session_root({name: str(long)}) == f"/tmp/hpcray-{os.getuid()}", "sockets need a short path"
    assert session_root({name: "/does/not/exist"}) == f"/tmp/hpcray-{os.getuid()}"


def test_directory_open_to_others_is_refused(tmp: Path) -> None:
    root = Path(session_root(os.environ))
    root.mkdir()
    root.chmod(0o755)
    with pytest.raises(SessionError, match="0700"):
        Session.create()


def test_link_in_the_way_is_refused(tmp: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path, session_root(os.environ))
    with pytest.raises(SessionError, match="cannot use"):
        Session.create()


def test_a_directory_that_takes_no_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCRAY_TMPDIR", "/proc")
    with pytest.raises(SessionError, match="/proc takes no directories; hint: set HPCRAY_TMPDIR"):
        Session.create()


# ---------------------------------------------------------------- what others may have put there

OTHER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def test_everything_in_it_is_private_whatever_the_umask(tmp: Path) -> None:
    before = os.umask(0)
    try:
        session = Session.create()
        session.publish("job", 0, "a")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in Path(session.path).iterdir()}
    assert modes == {"lock": 0o600, "info.json": 0o600}
    session.remove()


def test_temporary_directory_that_anybody_can_rename_in_is_refused(tmp: Path) -> None:
    tmp.chmod(0o777)
    with pytest.raises(SessionError, match="no sticky bit.*hint: set HPCRAY_TMPDIR"):
        Session.create()
    tmp.chmod(0o1777)
    Session.create().remove()


@as_root
def test_temporary_directory_of_somebody_else_is_refused(tmp: Path) -> None:
    os.chown(tmp, OTHER, OTHER)
    with pytest.raises(SessionError, match=f"belongs to uid {OTHER}.*hint: set HPCRAY_TMPDIR"):
        Session.create()


@as_root
@pytest.mark.parametrize("victim", ["root", "directory", "info.json"])
def test_what_somebody_else_owns_is_not_believed(tmp: Path, victim: str) -> None:
    session = Session.create()
    session.publish("job", 0, "a")
    assert [info.path for info in live_sessions()] == [session.path]
    taken = {"root": os.path.dirname(session.path), "directory": session.path}.get(victim, f"{session.path}/{victim}")
    os.chown(taken, OTHER, OTHER)
    assert live_sessions() == []
    if victim != "root":
        with pytest.raises(SessionError, match=f"belongs to uid {OTHER}" if victim == "directory" else "no live"):
            read_session(session.path)
    session.remove()


def test_session_open_to_others_is_not_joined(tmp: Path) -> None:
    session = Session.create()
    session.publish("job", 0, "a")
    os.chmod(session.path, 0o755)
    assert live_sessions() == []
    with pytest.raises(SessionError, match="mode 755"):
        read_session(session.path)
    session.remove()


def test_description_that_is_a_link_is_not_read(tmp: Path, tmp_path: Path) -> None:
    session = Session.create()
    session.publish("job", 0, "a")
    os.rename(f"{session.path}/info.json", tmp_path / "info.json")
    os.symlink(tmp_path / "info.json", f"{session.path}/info.json")
    assert live_sessions() == []
    session.remove()
    assert (tmp_path / "info.json").exists()


def test_sweeping_spares_what_a_link_leads_to(tmp: Path, tmp_path: Path) -> None:
    dead = Session.create()
    abandon(dead)
    (tmp_path / "precious").write_text("x")
    os.symlink(tmp_path, Path(dead.path).with_name("0123abcd"))
    os.symlink(tmp_path, Path(dead.path, "inside"))
    Session.create().remove()
    assert not os.path.exists(dead.path)
    assert (tmp_path / "precious").exists()
    Path(dead.path).with_name("0123abcd").unlink()


def test_root_of_the_host_seen_from_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": "0 1000 1\n"}

    def fake(path: str, **_: object) -> io.StringIO:
        return io.StringIO(maps[path])

    monkeypatch.setattr(session_module, "open", fake, raising=False)
    assert session_module._is_outside(65534)
    assert not session_module._is_outside(12345)
    maps["/proc/self/uid_map"] = "0 0 4294967295\n"
    assert not session_module._is_outside(65534), "nobody is somebody here"
