"""Packages that clients upload before the job that needs them: directories of code, as zip files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from typing import Any

from hpcray.platform.private_files import make_private_directory

LARGEST = 512 << 20
"""Bytes of one package, as in Ray."""
_MOST = 4 * LARGEST
"""Bytes of all packages; those that were used last stay."""

_PROTOCOL = "gcs"
_SCHEME = f"{_PROTOCOL}://"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\.(?:zip|whl|tar\.gz|tgz|jar)")
_PATHS = ("working_dir", "py_modules")


class PackageTooLargeError(ValueError):
    """A package is larger than one may be."""


class UploadedPackages:
    """The packages of one server, in files of their own.

    Args:
        directory: that may be made, and is removed by `close`.
        largest: bytes of one package. most: bytes of all.
    """

    def __init__(self, directory: str, largest: int = LARGEST, most: int = _MOST) -> None:
        self._directory = directory
        self._largest, self._most = largest, most
        make_private_directory(directory)

    def path_of(self, protocol: str, name: str) -> str:
        """Return where a package lies, or would.

        Raises:
            ValueError: this is no name of a package.
        """
        if protocol != _PROTOCOL or not _NAME.fullmatch(name):
            raise ValueError(f"{protocol}://{name} is no package of this cluster; hint: gcs://_ray_pkg_HASH.zip")
        return os.path.join(self._directory, name)

    def has(self, protocol: str, name: str) -> bool:
        """Return True if a package is here; it is kept before others then."""
        path = self.path_of(protocol, name)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return True
        return False

    async def take(self, protocol: str, name: str, pieces: AsyncIterator[bytes]) -> None:
        """Keep a package that comes in pieces. Others see it whole or not at all.

        Raises:
            ValueError: this is no name of a package. PackageTooLargeError: it is too large. OSError: the disk is full.
        """
        path, size = self.path_of(protocol, name), 0
        fd, fresh = tempfile.mkstemp(dir=self._directory, suffix=".new")
        try:
            with open(fd, "wb") as file:
                async for piece in pieces:
                    size += len(piece)
                    if size > self._largest:
                        raise PackageTooLargeError(
                            f"{name} is larger than {self._largest >> 20} MiB; hint: `excludes` of the runtime_env, or "
                            "a path that all nodes see"
                        )
                    file.write(piece)
            os.replace(fresh, path)
        except BaseException:
            os.unlink(fresh)
            raise
        self._make_room(path)

    def local(self, runtime_env: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return a runtime_env with the paths of packages that were uploaded instead of their URIs.

        Raises:
            ValueError: a package that it names is not here.
        """
        found = dict(runtime_env or {})
        for field in _PATHS:
            if isinstance(found.get(field), str):
                found[field] = self._local(found[field])
            elif isinstance(found.get(field), list):
                found[field] = [self._local(uri) if isinstance(uri, str) else uri for uri in found[field]]
        return found if runtime_env is not None else None

    def close(self) -> None:
        """Remove all of them."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _local(self, uri: str) -> str:
        if not uri.startswith(_SCHEME):
            return uri
        name = uri.removeprefix(_SCHEME)
        if not self.has(_PROTOCOL, name):
            raise ValueError(f"the package {uri} is not here; hint: upload it by PUT /api/packages/gcs/{name} first")
        return self.path_of(_PROTOCOL, name)

    def _make_room(self, kept: str) -> None:
        """Remove those that were used longest ago, while all are too large together."""
        files = [entry for entry in os.scandir(self._directory) if _NAME.fullmatch(entry.name)]
        states = sorted((entry.stat().st_mtime, entry.stat().st_size, entry.path) for entry in files)
        total = sum(size for _, size, _ in states)
        for _, size, path in states:
            if total <= self._most:
                return
            if path != kept:
                os.unlink(path)
                total -= size
