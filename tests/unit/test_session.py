"""Session directories: made, found, swept, removed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

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
