"""The directory with the secrets of this user's started clusters: which one it is, and how it is opened."""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Mapping

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import launch_config

_DEFAULT = "~/.hpcray/clusters"
_HINT = "hint: HPCRAY_START_DIR names another directory, of yours alone, that all nodes see"


def start_directory(environ: Mapping[str, str]) -> str:
    """The path of the directory."""
    path = launch_config(environ).start_dir or _DEFAULT
    if path.startswith("~/") and not environ.get("HOME"):
        with contextlib.suppress(KeyError):
            path = os.path.join(pwd.getpwuid(os.getuid()).pw_dir, path[2:])
    return os.path.abspath(os.path.expanduser(path))


class SecretDirectory:
    """The directory, opened; a context manager. Nobody but this user can read, write or exchange what is in it.

    Args:
        path: of the directory.
        make: whether it is made where it is missing.

    Raises:
        StartupError: it cannot be used; the message says why.
    """

    def __init__(self, path: str, make: bool) -> None:
        self.path = path
        try:
            if make:
                os.makedirs(path, 0o700, exist_ok=True)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StartupError(f"{path} cannot keep the secrets of clusters: {error.strerror}; {_HINT}") from None
        state = os.fstat(self._fd)
        if state.st_uid != os.getuid() or state.st_mode & 0o077:
            self.close()
            raise StartupError(
                f"{path} cannot keep the secrets of clusters: it belongs to uid {state.st_uid} and has mode "
                f"{stat.S_IMODE(state.st_mode):o}; it must be yours and 700; {_HINT}"
            )

    def __enter__(self) -> SecretDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)

    def names(self) -> list[str]:
        """The names of the files."""
        return sorted(os.listdir(self._fd))

    def read(self, name: str) -> bytes:
        """The content of a file that is this user's alone.

        Raises:
            OSError: there is none.
        """
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._fd)
        with open(fd, "rb") as file:
            state = os.fstat(fd)
            if not stat.S_ISREG(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
                raise PermissionError(f"{self.path}/{name} must be yours alone, with mode 0600")
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Write a file of mode 0600, or replace it; others see nothing, this user's processes all of it or nothing."""
        temporary = f".{name[:100]}.{os.urandom(6).hex()}"
        fd = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._fd
        )
        with open(fd, "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._fd)
