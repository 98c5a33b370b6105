"""Files and directories that other users could have made first, or could exchange."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcray.platform import private_files
from hpcray.platform.private_files import (
    CLOSED,
    OTHERS,
    PrivateDirectory,
    UntrustedPathError,
    append_private_file,
    exposed_directory,
    make_private_directory,
    open_private_file,
    read_private_file,
    write_private_file,
)

OTHER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory that others can enter."""
    tmp_path.chmod(0o755)
    return tmp_path


def given_away(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


# ---------------------------------------------------------------- files


def test_what_was_written_is_read_and_nobody_else_can(place: Path) -> None:
    path = str(place / "secret")
    old = os.umask(0)
    try:
        write_private_file(path, b"one")
        write_private_file(path, b"two", durable=True)
        fd = append_private_file(path)
    finally:
        os.umask(old)
    os.write(fd, b"!")
    os.close(fd)
    assert read_private_file(path, CLOSED, ancestors=True) == b"two!"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert os.listdir(place) == ["secret"], "no temporary file stays"


def link(path: Path) -> None:
    path.with_name("other").write_bytes(b"x")
    path.symlink_to("other")


def second_name(path: Path) -> None:
    path.with_name("other").write_bytes(b"x")
    os.link(path.with_name("other"), path)


def open_to_all(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o606)


def open_to_group(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o660)


def of_another(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0o666)
    given_away(path)


PLANTED: dict[str, Callable[[Path], None]] = {
    "symbolic link": link,
    "2 names": second_name,
    "mode 606": open_to_all,
    "mode 660": open_to_group,
    "is no file": lambda path: os.mkfifo(path, 0o600),
    f"belongs to uid {OTHER}": of_another,
}


@pytest.mark.parametrize("why", PLANTED)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_TRUNC])
def test_a_planted_file_is_neither_read_nor_appended_to_nor_emptied(place: Path, why: str, flags: int) -> None:
    if "belongs" in why and os.getuid():
        pytest.skip("only root can give files away")
    path = place / "state"
    PLANTED[why](path)
    with pytest.raises(UntrustedPathError, match=f"{path} .*{why}.*hint:"):
        open_private_file(str(path), flags)
    with PrivateDirectory.open(str(place)) as directory, pytest.raises(UntrustedPathError, match=why):
        directory.open_file("state", flags)
    if not path.is_fifo():
        assert path.read_bytes() == b"x"


@pytest.mark.parametrize("why", PLANTED)
def test_a_planted_file_is_replaced_and_what_it_leads_to_stays(place: Path, why: str) -> None:
    if "belongs" in why and os.getuid():
        pytest.skip("only root can give files away")
    path = place / "state"
    PLANTED[why](path)
    write_private_file(str(path), b"mine")
    assert read_private_file(str(path), CLOSED) == b"mine"
    assert path.with_name("other").read_bytes() == b"x" if path.with_name("other").exists() else True


def test_what_a_closed_directory_holds_may_have_any_mode_but_not_what_is_secret(place: Path) -> None:
    closed = make_private_directory(str(place / "closed"))
    open_to_all(Path(closed, "pickle"))
    assert read_private_file(f"{closed}/pickle") == b"x", (
        "a program with umask 0 has written it; nobody else gets there"
    )
    with pytest.raises(UntrustedPathError, match="mode 606"):
        read_private_file(f"{closed}/pickle", CLOSED)


def test_a_file_that_is_missing_is_missing(place: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        read_private_file(str(place / "nothing"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_private_file(str(place / "nowhere" / "nothing"), ancestors=True)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(place / "state")
    write_private_file(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write_private_file(path, b"new")
    assert Path(path).read_bytes() == b"old" and os.listdir(place) == ["state"]


# ---------------------------------------------------------------- directories


def test_a_directory_is_made_with_those_above_for_this_user_alone(place: Path) -> None:
    old = os.umask(0)
    try:
        path = make_private_directory(str(place / "a" / "b"), CLOSED, ancestors=True)
        with PrivateDirectory.open(path) as directory, directory.directory("c") as inner:
            inner.write("file", b"1")
            assert inner.names() == ["file"] and inner.read("file", CLOSED) == b"1"
            inner.remove("file")
            inner.remove("file")
            assert inner.names() == []
    finally:
        os.umask(old)
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((place / name).stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("mode", "excess", "ok"), [(0o770, OTHERS, False), (0o755, CLOSED, False), (0o755, OTHERS, True)]
)
def test_a_directory_with_permissions_that_are_too_many_is_refused(
    place: Path, mode: int, excess: int, ok: bool
) -> None:
    (place / "d").mkdir()
    (place / "d").chmod(mode)
    if ok:
        make_private_directory(str(place / "d"), excess)
    else:
        with pytest.raises(UntrustedPathError, match=f"mode {mode:o}.*hint: chmod"):
            make_private_directory(str(place / "d"), excess)
    with PrivateDirectory.open(str(place)) as directory:
        directory.directory("d").close()  # members of its group are trusted where that is not asked for


def test_a_directory_in_another_is_not_reached_by_a_link(place: Path) -> None:
    (place / "real").mkdir()
    (place / "link").symlink_to("real")
    with PrivateDirectory.open(str(place)) as directory, pytest.raises(UntrustedPathError, match="symbolic link"):
        directory.directory("link")


def test_an_open_directory_stays_what_it_is_when_its_path_is_exchanged(place: Path) -> None:
    make_private_directory(str(place / "d"))
    with PrivateDirectory.open(str(place / "d")) as directory:
        (place / "d").rename(place / "old")
        (place / "d").mkdir()
        (place / "d" / "state").write_bytes(b"planted")
        directory.write("state", b"mine")
        assert directory.read("state") == b"mine" and (place / "old" / "state").exists()


# ---------------------------------------------------------------- directories above


@needs_root
def test_a_directory_of_another_user_above_is_named_with_its_owner_and_the_setting(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = place / "theirs" / "mine"
    mine.mkdir(parents=True)
    given_away(place / "theirs")
    message = f"{place}/theirs belongs to uid {OTHER}, .*HPCRAY_SAFE_DIRECTORIES={place}/theirs"
    with pytest.raises(UntrustedPathError, match=message):
        make_private_directory(str(mine), ancestors=True)
    with pytest.raises(UntrustedPathError, match=message):
        write_private_file(str(mine / "secret"), b"", ancestors=True)
    assert not list(mine.iterdir()), "refused before anything is written"
    write_private_file(str(mine / "state"), b"1")
    with pytest.raises(UntrustedPathError, match=message):
        read_private_file(str(mine / "state"), ancestors=True)
    assert str(exposed_directory(str(mine))).startswith(f"{place}/theirs belongs")
    monkeypatch.setenv("HPCRAY_SAFE_DIRECTORIES", f"/nowhere:{place}/theirs")
    assert read_private_file(str(mine / "state"), CLOSED, ancestors=True) == b"1"
    assert exposed_directory(str(mine)) is None


def test_a_directory_above_is_trusted_with_a_sticky_bit_or_for_its_group_and_not_open_to_all(place: Path) -> None:
    above = place / "above"
    (above / "mine").mkdir(parents=True)
    for mode, trusted in ((0o1777, True), (0o2775, True), (0o777, False)):
        above.chmod(mode)
        problem = exposed_directory(str(above / "mine"))
        assert (problem is None) == trusted, oct(mode)
    assert "no sticky bit" in str(problem)


@needs_root
def test_links_on_the_way_are_followed_unless_another_user_made_them_where_all_may(place: Path) -> None:
    (place / "real" / "mine").mkdir(parents=True)
    tmp = place / "tmp"
    tmp.mkdir()
    tmp.chmod(0o1777)
    (tmp / "absolute").symlink_to(place / "real")
    (tmp / "relative").symlink_to("../real/../real")
    for name in ("absolute", "relative"):
        with PrivateDirectory.open(str(tmp / name / "mine"), False, ancestors=True) as directory:
            assert os.path.samestat(os.fstat(directory.fd), os.stat(place / "real" / "mine"))
        given_away(tmp / name)
        with pytest.raises(UntrustedPathError, match=f"{tmp}/{name} is a link of uid {OTHER}"):
            PrivateDirectory.open(str(tmp / name / "mine"), False, ancestors=True)


@needs_root
def test_where_a_link_leads_to_counts(place: Path) -> None:
    (place / "theirs" / "mine").mkdir(parents=True)
    given_away(place / "theirs")
    (place / "link").symlink_to(place / "theirs" / "mine")
    assert f"{place}/theirs belongs" in str(exposed_directory(str(place / "link")))


def test_a_circle_of_links_is_an_error(place: Path) -> None:
    (place / "a").symlink_to("b")
    (place / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many"):
        make_private_directory(str(place / "a" / "c"), ancestors=True)


def test_the_hosts_root_is_trusted_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {"/proc/sys/kernel/overflowuid": "65534\n", "/proc/self/uid_map": "0 1000 1\n"}

    def fake(path: str, **_: object) -> io.StringIO:
        return io.StringIO(maps[path])

    monkeypatch.setattr(private_files, "open", fake, raising=False)
    assert private_files.is_trusted_owner(65534)
    assert not private_files.is_trusted_owner(OTHER)
    maps["/proc/self/uid_map"] = "0 0 4294967295\n"
    assert not private_files.is_trusted_owner(65534), "nobody is somebody here"
