"""Broken data links between processes that live: their TCP connections are shut down, from outside."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from pathlib import Path

_SYS_PIDFD_GETFD = 438
_ESTABLISHED = "01"


def break_tcp(one: int, other: int) -> int:
    """Shut down every TCP connection between two processes of this host. Returns how many there were."""
    theirs = set(_connections(other).values())
    broken = 0
    for fd, (local, remote) in _connections(one).items():
        if (remote, local) in theirs:
            with _copy_of(one, fd) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            broken += 1
    return broken


def _connections(pid: int) -> dict[int, tuple[str, str]]:
    """By descriptor, the local and the remote port."""
    ports: dict[str, tuple[str, str]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _ESTABLISHED:
                    ports[f"socket:[{fields[9]}]"] = fields[1].rpartition(":")[2], fields[2].rpartition(":")[2]
    found: dict[int, tuple[str, str]] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError, KeyError):
            found[int(entry.name)] = ports[os.readlink(entry)]
    return found


def _copy_of(pid: int, fd: int) -> socket.socket:
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        copy = libc.syscall(_SYS_PIDFD_GETFD, process, fd, 0)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
        return socket.socket(fileno=copy)
    finally:
        os.close(process)
