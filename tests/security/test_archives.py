"""Archives as working_dir that no worker should unpack are refused on the driver, with the reason."""

from __future__ import annotations

import io
import os
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcray.exceptions import RuntimeEnvSetupError
from hpcray.runtime_env.runtime_env_setup import PackageError, pack_package, unpack_package
from hpcray.runtime_env.submitted_runtime_env import package_of

FILE = stat.S_IFREG | 0o644
Entry = tuple[str, bytes, int]


def zipped(*entries: Entry) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as package:
        for name, data, mode in entries:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            package.writestr(info, data)
    return buffer.getvalue()


def changed(package: bytes, offset: int, value: int) -> bytes:
    """A zip of one entry with another number in its header, and 2 bytes later in the central directory."""
    found = bytearray(package)
    struct.pack_into("<H", found, offset, value)
    struct.pack_into("<H", found, found.index(b"PK\x01\x02") + offset + 2, value)
    return bytes(found)


def tarred(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, kind, text in members:
            info = tarfile.TarInfo(name)
            info.type = kind
            if kind == tarfile.REGTYPE:
                info.size = len(text)
            else:
                info.linkname = text
            archive.addfile(info, io.BytesIO(text.encode()) if kind == tarfile.REGTYPE else None)
    return buffer.getvalue()


def commented(size: int) -> bytes:
    """A tar whose one file has a long comment, which tarfile takes into memory before it says how large anything is."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x")
        info.pax_headers = {"comment": "c" * size}
        archive.addfile(info)
    return made.getvalue()


ONE = zipped(("x", b"1" * 100, FILE))
BAD: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "encrypted": ("zip", lambda: changed(ONE, 6, 1), "is encrypted"),
    "unknown method": ("zip", lambda: changed(ONE, 8, 99), "method 99"),
    "empty name": ("zip", lambda: zipped(("", b"x", FILE)), "no name of a file"),
    "a dot": ("zip", lambda: zipped(("./.", b"x", FILE)), "no name of a file"),
    "out": ("zip", lambda: zipped(("a/../../x", b"x", FILE)), "leads out of it"),
    "absolute": ("zip", lambda: zipped(("/tmp/x", b"x", FILE)), "leads out of it"),
    "setuid": ("zip", lambda: zipped(("su", b"x", stat.S_IFREG | 0o4755)), "setuid"),
    "long name": ("zip", lambda: zipped(("n" * 300, b"x", FILE)), "255 bytes"),
    "file and directory": ("zip", lambda: zipped(("x", b"1", FILE), ("x/y", b"2", FILE)), "as a file and as a dir"),
    "bomb": (
        "zip",
        lambda: zipped(*((f"z{n}", bytes(40 << 20), FILE) for n in range(4))),
        "160 MiB when it is unpacked",
    ),
    "no zip": ("zip", lambda: b"hello", "is no zip"),
    "half a zip": ("zip", lambda: ONE[:40], "is no zip"),
    "tar, out": ("tar.gz", lambda: tarred(("../../x", tarfile.REGTYPE, "x")), "leads out of it"),
    "tar, loop": (
        "tar.gz",
        lambda: tarred(("a", tarfile.SYMTYPE, "b"), ("b", tarfile.SYMTYPE, "a")),
        "links that lead to each other",
    ),
    "tar, link out": ("tar.gz", lambda: tarred(("pw", tarfile.SYMTYPE, "/etc/passwd")), "no archive that can be read"),
    "tar, empty name": ("tar.gz", lambda: tarred(("", tarfile.REGTYPE, "x")), "without a name"),
    "tar, bomb": ("tar.gz", lambda: tarred(("z", tarfile.REGTYPE, "\0" * (70 << 20))), "70 MiB when it is unpacked"),
    "tar, a comment": ("tar.gz", lambda: commented(70 << 20), "70 MiB when it is unpacked"),
    "tar, no xz": ("tar.xz", lambda: b"\xfd7zXZ\0garbage", "no archive that can be read"),
    "half a tar": ("tar.gz", lambda: tarred(("z", tarfile.REGTYPE, os.urandom(4096).hex()))[:2000], "no archive"),
}


@pytest.mark.parametrize("what", BAD)
def test_archive_that_no_worker_can_unpack_is_refused_with_the_reason(tmp_path: Path, what: str) -> None:
    suffix, make, why = BAD[what]
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(make())
    with pytest.raises(RuntimeEnvSetupError, match=why):
        package_of(str(path), [], False)
    if suffix == "zip":
        with pytest.raises(PackageError, match=why):  # on a node too, wherever the package comes from
            unpack_package(str(tmp_path), "0" * 32, path.read_bytes)
        assert not (tmp_path / "runtime_env" / ("0" * 32)).exists()


def test_what_runs_with_its_owners_rights_is_packed_and_unpacked_without_them(tmp_path: Path) -> None:
    source = tmp_path / "d"
    source.mkdir()
    (source / "tool").write_bytes(b"#!/bin/sh\n")
    (source / "tool").chmod(0o6755)
    package = pack_package(str(source), ["tool"])
    where = unpack_package(str(tmp_path), "1" * 32, lambda: package)
    assert stat.S_IMODE(os.stat(f"{where}/tool").st_mode) == 0o755


def test_a_directory_is_packed_without_what_is_no_file(tmp_path: Path) -> None:
    """Links in a circle, a pipe that would never end, and a socket; a link out of it stands for what it leads to."""
    source = tmp_path / "d"
    source.mkdir()
    (source / "module.py").write_text("x = 1")
    (source / "self").symlink_to("self")
    (source / "there").symlink_to("back")
    (source / "back").symlink_to("there")
    (source / "up").symlink_to("..")
    (source / "nowhere").symlink_to("nothing")
    (tmp_path / "outside").write_text("y = 2")
    (source / "link.py").symlink_to("../outside")
    os.mkfifo(source / "pipe")
    os.mkfifo(source / ".gitignore")
    package = zipfile.ZipFile(io.BytesIO(package_of(str(source), [], False)))
    assert {name: package.read(name) for name in package.namelist()} == {"module.py": b"x = 1", "link.py": b"y = 2"}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "d"
    source.mkdir()
    (source / "secret").touch()
    real = open

    def refuse(path: object, *args: object, **words: object) -> object:
        if str(path).endswith("/secret"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **words)  # type: ignore[call-overload]

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(PackageError, match=f"{source}/secret cannot be packed: Permission denied; hint: .*excludes"):
        package_of(str(source), [], False)
