"""Where the dashboard of a node listens, while one does: `ClientContext.dashboard_url`."""

from __future__ import annotations

import contextlib
import os
import socket

from hpcray.platform.private_file import write_private_file
from hpcray.platform.sockets import connect_private

_FILE = "dashboard"
UNIX = "unix:"
_TIMEOUT = 1.0  # seconds


def publish_dashboard(session_dir: str, address: str) -> None:
    """Write down where the dashboard of a node listens: `127.0.0.1:8265`, or `unix:` and a path."""
    write_private_file(os.path.join(session_dir, _FILE), address.encode())


def withdraw_dashboard(session_dir: str, address: str) -> None:
    """The dashboard at this address has ended."""
    with contextlib.suppress(OSError):
        if _published(session_dir) == address:
            os.unlink(os.path.join(session_dir, _FILE))


def dashboard_address(session_dir: str) -> str:
    """Return where the dashboard of a node listens; "" where there is none."""
    address = _published(session_dir)
    with contextlib.suppress(OSError, ValueError):
        if address.startswith(UNIX):
            connect_private(address.removeprefix(UNIX), _TIMEOUT).close()
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _TIMEOUT).close()
        return address
    return ""


def _published(session_dir: str) -> str:
    try:
        with open(os.path.join(session_dir, _FILE), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
