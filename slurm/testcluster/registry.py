"""Which clusters there are: a directory and a lock each, below one directory of this machine.

The lock of a cluster is held by its keeper, and so exactly as long as the cluster lives. What has a directory but no
held lock is what a killed cluster has left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

BASE = Path("/run/hpcray-testcluster")


class ClusterError(Exception):
    """What was asked for cannot be done; the message says why and what to do."""


def running() -> list[str]:
    """Names of the clusters that are up."""
    return [name for name in _names() if not is_free(name)]


def sweep() -> list[str]:
    """Remove what is left of clusters whose keeper was killed; returns their names."""
    dead = [name for name in _names() if is_free(name)]
    for name in dead:
        remove(name)
    return dead


def _names() -> list[str]:
    found = {path.name.removesuffix(".lock") for path in BASE.glob("*")} if BASE.is_dir() else set()
    return sorted(found)


def lock_file(name: str) -> Path:
    """The file that a cluster's keeper holds a lock of."""
    return BASE / f"{name}.lock"


def acquire(name: str) -> int | None:
    """A descriptor that holds the cluster's lock; None when somebody holds it."""
    path = lock_file(name)
    while True:
        BASE.mkdir(mode=0o755, exist_ok=True)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
        except FileNotFoundError:
            continue  # the last cluster has just taken the directory with it
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # its last holder has removed it meanwhile


def is_free(name: str) -> bool:
    """Whether no cluster of this name is up."""
    try:
        fd = os.open(lock_file(name), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


def wait_free(name: str, timeout: float) -> bool:
    """Wait until no cluster of this name is up; False when one still is after `timeout` seconds."""
    return wait_until(lambda: is_free(name), timeout)


def remove(name: str) -> None:
    """Remove what is left of a cluster that is down.

    Raises:
        ClusterError: it is not down.
    """
    lock = acquire(name)
    if lock is None:
        raise ClusterError(f"cluster {name!r} does not go down: its keeper still runs")
    remove_tree(BASE / name)
    lock_file(name).unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):
        BASE.rmdir()  # unless there are others


def remove_tree(directory: Path) -> None:
    """Remove a cluster's directory. Hosts mount shared directories below it, in mount namespaces of their own; should
    one ever be seen here, nothing may be removed through it."""
    if f" {directory}/" in Path("/proc/self/mountinfo").read_text():
        raise ClusterError(f"something is mounted below {directory}; hint: umount it by hand")
    shutil.rmtree(directory, ignore_errors=True)


def wait_until(condition: Callable[[], bool], timeout: float, pause: float = 0.01) -> bool:
    """Poll until the condition holds; False when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True
