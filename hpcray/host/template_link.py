"""The raylet's side of the template process: start it, ask it for workers, hear of their ends."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hpcray.host import template
from hpcray.host.processes import Family

_decode_report = msgspec.msgpack.Decoder(list[Any]).decode
_encode = msgspec.msgpack.Encoder().encode


class TemplateLink:
    """Requests never block: what the template process cannot take at once waits here and goes out in `flush`.

    Attributes:
        pid: the template's process id.
        gone: it has ended; known from `reports`.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.gone = False
        self._reaped = False
        self._status = 0
        self._sock = sock
        self._waiting: deque[bytes] = deque()
        self._failed: list[list[Any]] = []
        sock.setblocking(False)

    def fileno(self) -> int:
        """For epoll."""
        return self._sock.fileno()

    def fork(self, number: int, env: tuple[tuple[str, str], ...]) -> None:
        """Ask for a worker. The answer is a report: "forked" or "failed"."""
        data = _encode(["fork", number, env])
        if len(data) > template.PACKET // 2:
            size = len(data)
            reason = f"environment of {size} bytes is too large; hint: at most {template.PACKET // 2}"
            self._failed.append(["failed", number, reason])
        else:
            self._send(data)

    def prepare(self, copies: Sequence[Sequence[str]], modules: Sequence[str]) -> None:
        """Before the first fork: import from `copies` (see `Relocation`) from now on, and import `modules` now.

        What goes wrong is reported as "broken".
        """
        if copies or modules:
            self._send(_encode(["prepare", copies, modules]))

    def kill(self, number: int) -> None:
        """SIGKILL worker `number`; nothing happens when it is gone already."""
        self._send(_encode(["kill", number]))

    def watch_driver(self, pid: int) -> None:
        """Let the template end this process too when it cleans up, should its parent be gone by then."""
        family = Family.of(pid)
        if family is not None:  # looked at here and now: the template may read this when its parent is gone already
            self._send(_encode(["driver", family.pid, family.started, family.parent]))

    def stop(self) -> None:
        """Ask it to kill all workers, remove the session directory and leave; `gone` tells when it has."""
        self._send(_encode(["stop"]))

    def reports(self) -> list[list[Any]]:
        """The reports that have come."""
        found, self._failed = self._failed, []
        try:
            while data := self._sock.recv(template.PACKET):
                found.append(_decode_report(data))
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        return found

    def flush(self) -> bool:
        """Send what waits; False while something is left (the socket becomes writable later)."""
        while self._waiting:
            try:
                self._sock.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError:
                self._waiting.clear()  # it is gone; `reports` finds that out
                return True
            self._waiting.popleft()
        return True

    def reap(self) -> int:
        """Wait for the end of the template process; its wait status."""
        try:
            self._status = os.waitpid(self.pid, 0)[1]
        except ChildProcessError:
            pass  # reaped before
        self._reaped = True
        return self._status

    def kill_template(self) -> None:
        """SIGKILL the template process itself: it did not leave when asked."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let the descriptors go. The template takes that for this process's death and cleans up."""
        self._sock.close()

    def _send(self, data: bytes) -> None:
        self._waiting.append(data)
        self.flush()


def start_template(
    load: Callable[[], template.WorkerMain], session_dir: str, arena_fd: int, lock_fd: int
) -> TemplateLink:
    """Fork the template process. Call it before MPI, UCX or any thread exists.

    Args:
        load: runs in the template: imports what workers need, returns the function that is a worker's life.
        session_dir: the node's session directory, which the template removes at the end.
        arena_fd: the arena; workers inherit it under the same number.
        lock_fd: the session's lock, kept so that the session counts as alive until the template has cleaned up.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        template.serve(theirs, load, session_dir, arena_fd, lock_fd)
    theirs.close()
    return TemplateLink(pid, ours)
