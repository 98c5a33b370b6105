"""The names that scripts look for in Ray's temporary directory: `session_latest/logs` and `ray_current_cluster`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from typing import TextIO

from hpcray.platform.private_files import (
    HOME_DIRECTORY,
    append_private_file,
    is_trusted_owner,
    make_private_directory,
    open_private_file,
    read_private_file,
    write_private_file,
)

_LATEST, _CURRENT, _LOGS = "session_latest", "ray_current_cluster", "logs"
LOG = "ray_start.log"


def temporary_directory(given: str | None, environ: Mapping[str, str]) -> tuple[str, bool]:
    """Ray's temporary directory of a node, and whether the user has chosen it: then its logs stay.

    Args:
        given: what --temp-dir says.
    """
    if given:
        return os.path.abspath(os.path.expanduser(given)), True
    chosen = environ.get("RAY_TMPDIR", "")
    return os.path.join(chosen or environ.get("TMPDIR") or tempfile.gettempdir(), "ray"), bool(chosen)


class SessionFiles:
    """The directory `session_<time>_<pid>` of one node, with its logs, and the two names that lead to it.

    Args:
        top: Ray's temporary directory. Where it is another user's, full or gone, one with this user's id in its name is
            taken, or one in the home.
        keep: whether the logs stay when the node has ended.

    Attributes:
        top: the directory that is used.
        logs: the directory of log files.
        log: the path of the log of `ray start`.
        note: a line about the directory, "" for none.

    Raises:
        OSError: no directory can be made.
    """

    def __init__(self, top: str, keep: bool) -> None:
        self.note = self._name = ""
        self._keep = keep
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
        self._session = f"session_{stamp}_{time.time_ns() // 1000 % 1_000_000:06d}_{os.getpid()}"
        home = os.path.join(os.path.expanduser("~"), HOME_DIRECTORY, "ray")
        for place in (top, f"{top}-{os.getuid()}", home):
            self.top = place
            self.logs = os.path.join(place, self._session, _LOGS)
            self.log = os.path.join(self.logs, LOG)
            try:
                self._make_logs()
                break
            except OSError as error:
                if place == home:
                    raise
                self.note = self.note or str(error)
        if self.note:
            self.note = f"{self.note}; logs of this node are in {self.top}"

    def _make_logs(self) -> None:
        _make(self.top)
        if not self._keep:
            _sweep(self.top)
        make_private_directory(self.logs)

    def open_log(self) -> TextIO:
        """Open the log. While it is open, in this process or a child, the directory is not taken for a dead node's."""
        file = os.fdopen(append_private_file(self.log), "a", encoding="utf-8", buffering=1)
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file

    def point_here(self, name: str) -> None:
        """The node is up: have `session_latest` and `ray_current_cluster` lead to it.

        Args:
            name: H:P of the cluster.
        """
        temporary = os.path.join(self.top, f".{self._session}")
        with contextlib.suppress(OSError):
            os.symlink(self._session, temporary)
            try:
                os.replace(temporary, os.path.join(self.top, _LATEST))
            except OSError:  # another user's, in a directory such as /tmp
                os.unlink(temporary)
                raise
            write_private_file(os.path.join(self.top, _CURRENT), name.encode())
        self._name = name

    def close(self) -> None:
        """The node has ended. What leads to another node meanwhile stays."""
        latest, current = os.path.join(self.top, _LATEST), os.path.join(self.top, _CURRENT)
        with contextlib.suppress(OSError):
            mine = os.readlink(latest) == self._session
            if mine and read_private_file(current) == self._name.encode():
                os.unlink(current)
            if mine and not self._keep:
                os.unlink(latest)
        if not self._keep:
            shutil.rmtree(os.path.join(self.top, self._session), ignore_errors=True)
            with contextlib.suppress(OSError):
                os.rmdir(self.top)


def sweep_files(environ: Mapping[str, str]) -> bool:
    """Remove what killed nodes have left in the default temporary directory.

    Returns:
        Whether files of a node stay, as some process of it runs.
    """
    top, keep = temporary_directory(None, environ)
    stays = False
    with contextlib.suppress(OSError):
        if not keep and os.lstat(top).st_uid == os.getuid():
            stays = _sweep(top)
            latest = os.path.join(top, _LATEST)
            if not os.path.exists(latest):
                for path in (latest, os.path.join(top, _CURRENT)):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
            os.rmdir(top)
    return stays


def _sweep(top: str) -> bool:
    """Remove the directories of nodes whose processes were killed. Returns whether others are there."""
    stays = False
    for name in os.listdir(top):
        log = os.path.join(top, name, _LOGS, LOG)
        if not name.startswith("session_2"):
            continue
        try:
            with os.fdopen(open_private_file(log)) as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.join(top, name), ignore_errors=True)
        except BlockingIOError:
            stays = True
        except OSError:
            pass
    return stays


def _make(path: str) -> None:
    """Make a directory where it is missing; what is there must be this user's, and not writable for others.

    Raises:
        OSError: it cannot be used.
    """
    with contextlib.suppress(FileNotFoundError):
        state = os.stat(path)
        if state.st_mode & stat.S_ISVTX and is_trusted_owner(state.st_uid):
            return  # /tmp itself, as in --temp-dir=/tmp
    make_private_directory(path)
