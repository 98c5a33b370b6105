"""Stands beside a nested MPI job on each of its nodes, and outlives the worker that started it by moments.

`python -m hpcray.cluster.mpi_guard DIRECTORY FD` holds the lock of the directory, whose loss ends the node's ranks. A
line on its standard input is a launcher's command and environment (JSON) to run; what became of it goes to descriptor
FD. The end of its standard input, which the worker's death brings too, ends all: launcher, descendants, directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hpcray.host.processes import adopt_orphans, descendants, kill_descendants, set_process_name

LOCK = "alive"
_TAIL = 4000
_GRACE = 5.0
_LIMIT = 10.0


class _Guard:
    def __init__(self, directory: Path, reply: int) -> None:
        self._directory = directory
        self._reply = reply
        self._child: subprocess.Popen[bytes] | None = None
        self._tail = b""

    def serve(self) -> None:
        """Run what is asked for, until the end of standard input."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            ended = -1
            asked = b""
            while True:
                for key, _ in selector.select():
                    if key.fd == 0:
                        data = os.read(0, 1 << 16)
                        asked += data
                        if not data:
                            return
                        if asked.endswith(b"\n") and self._start(**json.loads(asked)):
                            child = self._child
                            assert child is not None and child.stderr is not None
                            ended = os.pidfd_open(child.pid)
                            selector.register(ended, selectors.EVENT_READ)
                            selector.register(child.stderr, selectors.EVENT_READ)
                    elif key.fd == ended:
                        selector.unregister(ended)
                        os.close(ended)
                        self._finish(selector)
                    else:
                        self._pass_on(key.fd, selector)

    def _start(self, line: list[str], environ: dict[str, str]) -> bool:
        try:
            self._child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environ)
        except OSError as error:
            self._tell(127, f"cannot start {line[0]}: {error.strerror}")
            return False
        return True

    def _pass_on(self, fd: int, selector: selectors.BaseSelector) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            selector.unregister(fd)
        self._tail = (self._tail + data)[-_TAIL:]
        with contextlib.suppress(OSError):
            os.write(2, data)

    def _finish(self, selector: selectors.BaseSelector) -> None:
        """The launcher has ended: what its ranks have left behind ends too, and then its last words have an end."""
        child = self._child
        assert child is not None and child.stderr is not None
        status = child.wait()
        _end_descendants()
        fd = child.stderr.fileno()
        while fd in selector.get_map():
            self._pass_on(fd, selector)
        self._tell(128 - status if status < 0 else status, self._tail.decode(errors="replace"))

    def _tell(self, code: int, tail: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._reply, json.dumps({"code": code, "tail": tail}).encode() + b"\n")

    def end(self) -> None:
        """End the launcher in its own way, so that it ends its ranks on other nodes too; then what is left."""
        child = self._child
        deadline = time.monotonic() + _GRACE
        while child is not None and child.poll() is None and time.monotonic() < deadline:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE / 5)
        _end_descendants()
        shutil.rmtree(self._directory, ignore_errors=True)


def _end_descendants() -> None:
    deadline = time.monotonic() + _LIMIT
    me = os.getpid()
    while descendants(me) and time.monotonic() < deadline:
        kill_descendants(me)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)


def main(directory: Path, reply: int) -> None:
    """Serve until the end."""
    set_process_name("hpcray-mpi")
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(reply, b"{}\n")
    guard = _Guard(directory, reply)
    try:
        guard.serve()
    finally:
        guard.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
