"""Directories as packages: packed the same way whoever packs them, unpacked once per node."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence

LIMIT = 512 << 20
DEFAULT_EXCLUDES = (".git", ".venv", "venv", "__pycache__")
IGNORE_FILES = (".gitignore", ".rayignore")
DIRECTORY = "runtime_env"
"""In the session directory: what environments need on this node."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
_OFF = "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"


class PackageError(ValueError):
    """A package cannot be made of what was given; the message says why."""


def files_of(root: str, excludes: Sequence[str] = ()) -> list[str]:
    """What of a directory goes into its package: paths relative to it, sorted.

    Left out: what `excludes` and the directory's .gitignore and .rayignore files name (in Git's syntax, relative to
    where they are), .git, virtual environments called .venv or venv, __pycache__, links to directories, and what is no
    file.
    """
    return sorted(_walk(root, "", [("", _spec([*DEFAULT_EXCLUDES, *excludes]))]))


def _walk(root: str, below: str, specs: list[tuple[str, object]]) -> Iterator[str]:
    here = os.path.join(root, below)
    found = [] if os.environ.get(_OFF) == "1" else [os.path.join(here, name) for name in IGNORE_FILES]
    lines: list[str] = []
    for path in found:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            lines += file.read().splitlines()
    if lines:
        specs = [*specs, (below, _spec(lines))]
    with os.scandir(here) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = os.path.join(below, entry.name)
            directory = entry.is_dir()
            shown = name.replace(os.sep, "/") + ("/" if directory else "")
            if any(spec.match_file(shown[len(base) :].lstrip("/")) for base, spec in specs):  # type: ignore[attr-defined]
                continue
            if directory and not entry.is_symlink():
                yield from _walk(root, name, specs)
            elif not directory and entry.is_file():
                yield name


def _spec(lines: Sequence[str]) -> object:
    import pathspec  # 20 ms, and few jobs pack anything

    return pathspec.GitIgnoreSpec.from_lines(lines)


def signature(root: str, names: Sequence[str]) -> str:
    """Changes when a file of the directory does: names, sizes, times."""
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        state = os.stat(os.path.join(root, name))
        digest.update(f"{name}\0{state.st_size}\0{state.st_mtime_ns}\0{stat.S_IMODE(state.st_mode)}\n".encode())
    return digest.hexdigest()


def pack(root: str, names: Sequence[str], top: str = "") -> bytes:
    """A zip of files of a directory: equal files make equal bytes, whatever their times are.

    Args:
        names: relative to `root`; links to files become files.
        top: a directory that everything is put into.

    Raises:
        PackageError: it would be larger than half a GiB.
    """
    import zipfile  # not before: every `import hpcray` would pay for it

    total = sum(os.path.getsize(os.path.join(root, name)) for name in names)
    if total > LIMIT:
        largest = sorted(names, key=lambda name: -os.path.getsize(os.path.join(root, name)))[:3]
        raise PackageError(
            f"Package size ({total / 2**20:.2f}MiB) of {root} exceeds the maximum size of {LIMIT / 2**20:.2f}MiB. "
            f"The largest files are {largest}. You can exclude large files using the 'excludes' option to the "
            "runtime_env; hint: what is on a file system that all nodes share need not be packed at all"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as package:
        for name in names:
            path = os.path.join(root, name)
            info = zipfile.ZipInfo(os.path.join(top, name).replace(os.sep, "/"), _EPOCH)
            info.external_attr = (stat.S_IMODE(os.stat(path).st_mode) | stat.S_IFREG) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            with open(path, "rb") as file:
                package.writestr(info, file.read())
    return buffer.getvalue()


def digest_of(package: bytes) -> str:
    """What a package is called."""
    return hashlib.blake2b(package, digest_size=16).hexdigest()


def unpack(session_dir: str, name: str, fetch: Callable[[], bytes]) -> str:
    """Unpack a package on this node, once however many ask; where it is.

    Args:
        name: of the package; of equal ones the same.
        fetch: brings it, where this node has not unpacked it yet.

    Raises:
        PackageError: it is no zip, or has names that lead out of it. Nothing of it is left.
    """
    import zipfile

    with locked(session_dir, name) as path:
        if os.path.isdir(path):
            return path
        fresh = path + ".new"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            with zipfile.ZipFile(io.BytesIO(fetch())) as opened:
                for item in opened.infolist():
                    if item.filename.startswith("/") or ".." in item.filename.split("/"):
                        raise PackageError(f"the package {name} has the name {item.filename!r}, which leads out of it")
                    where = opened.extract(item, fresh)
                    mode = item.external_attr >> 16
                    if mode and not item.is_dir():
                        os.chmod(where, stat.S_IMODE(mode) | stat.S_IRUSR)
            os.makedirs(fresh, exist_ok=True)
            os.rename(fresh, path)
        except zipfile.BadZipFile as error:
            raise PackageError(f"the package {name} is no zip: {error}") from None
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return path


@contextlib.contextmanager
def locked(session_dir: str, name: str) -> Iterator[str]:
    """Hold what is called `name` in this node's directory of environments; its path, which need not exist."""
    directory = os.path.join(session_dir, DIRECTORY)
    os.makedirs(directory, 0o700, exist_ok=True)
    fd = os.open(os.path.join(directory, name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.path.join(directory, name)
    finally:
        os.close(fd)
