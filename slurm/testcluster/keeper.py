"""The keeper: first process of the PID namespace that all hosts of a cluster live in, and the owner of their switch.

Its end, however it comes, is the end of every process of the cluster: the kernel sees to that. When it is asked to end
(SIGTERM), or when the process that owns the cluster is gone, it also removes the cluster's directory.

    keeper.py DIRECTORY LOCK_FILE LOCK_FD SOCKET_FD OWNER_PIDFD
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_PATIENCE = 10.0


def main() -> None:
    """Say that we are there, then reap orphans until it is time to go."""
    directory, lock_file = sys.argv[1:3]
    lock, parent, owner = (int(text) for text in sys.argv[3:6])
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    switch = "link set lo up\nlink add br0 type bridge\nlink set br0 up\n"
    subprocess.run(["ip", "-batch", "-"], input=switch, text=True, check=True)
    with socket.socket(fileno=parent) as said:
        said.send(b"here")
    poll = select.poll()
    poll.register(wake_read, select.POLLIN)
    if owner >= 0:
        poll.register(owner, select.POLLIN)
    while not asked:
        events = dict(poll.poll())
        if owner in events:
            break
        with contextlib.suppress(BlockingIOError):
            os.read(wake_read, 4096)
        _reap()
    _end_everything()
    if f" {directory}/" not in Path("/proc/self/mountinfo").read_text():  # never remove through a mount
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(lock_file)  # while we hold it: who waits for it sees that it is no longer the file of that name
    os.close(lock)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_everything() -> None:
    """Kill all other processes of this namespace and of those inside it, and wait until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            return
        _reap()
        time.sleep(0.005)


if __name__ == "__main__":
    main()
