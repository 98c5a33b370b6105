"""Where the dashboard of a node listens, while one does: `ClientContext.dashboard_url`."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from hpcray.platform.private_files import CLOSED, open_private_file

_FILE = "dashboard"
UNIX = "unix:"


@contextlib.contextmanager
def published_dashboard(session_dir: str, address: str) -> Iterator[None]:
    """Say meanwhile where the dashboard of a node listens: `127.0.0.1:8265`, or `unix:` and a path.

    The file is locked as long as this process lives. Of two dashboards the first one says so.
    """
    path = os.path.join(session_dir, _FILE)
    fd = open_private_file(path, os.O_RDWR | os.O_CREAT, CLOSED)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        yield
        return
    try:
        os.truncate(fd, 0)
        os.write(fd, address.encode())
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def dashboard_address(session_dir: str) -> str:
    """Return where the dashboard of a node listens; "" where there is none."""
    try:
        with open(open_private_file(os.path.join(session_dir, _FILE), os.O_RDONLY, CLOSED), encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read()
    except OSError:
        pass
    return ""  # none, or one that was killed
