"""The user's terminal, handed from `hpcray-launch` to rank 0, or to the rank that `--driver-rank` names.

What mpirun itself does with stdin, stdout and stderr is not enough: Open MPI 5 never closes the stdin of rank 0 (a
driver that reads to the end waits for ever), and gives it a pseudo terminal even when the output goes to a file. So
where rank 0 runs on the launcher's host, the launcher passes its own three descriptors over a Unix socket, and the exit
code comes back over the same socket. mpirun only sees the rank; with another launcher nothing of this happens.

The socket is an abstract one: no file that could stay behind. Both ends check that the other is the same user.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, MutableMapping, Sequence

VARIABLE = "HPCRAY_CONSOLE"
_STANDARD = (0, 1, 2)
_CREDENTIALS = struct.Struct("3i")
_TIMEOUT = 5.0


class ConsoleOffer:
    """The launcher's end: gives its descriptors to the first process of this user that asks.

    Attributes:
        name: what rank 0 finds in the variable `HPCRAY_CONSOLE`.
        pid: the process that took the descriptors, or None.
        code: the exit code that it told, or None.
        open: whether somebody may still come, or has come and not left.
    """

    def __init__(self) -> None:
        self.name = f"hpcray-{secrets.token_hex(12)}"
        self.pid: int | None = None
        self.code: int | None = None
        self.open = True
        self._told = b""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.bind("\0" + self.name)
        self._sock.listen(1)

    def fileno(self) -> int:
        """Readable when `serve` has something to do."""
        return self._sock.fileno()

    def serve(self, descriptors: Sequence[int]) -> None:
        """Do what is due: let rank 0 in and give it `descriptors` (stdin, stdout, stderr), or hear its exit code."""
        if self.pid is None:
            peer, _ = self._sock.accept()
            pid, uid, _ = _credentials(peer)
            if uid != os.getuid():
                peer.close()
                return
            try:
                peer.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))])
            except OSError:
                peer.close()
                return
            self._sock.close()
            self._sock, self.pid = peer, pid
            return
        try:
            data = self._sock.recv(64)
        except OSError:
            data = b""
        self._told += data
        if not data:
            with contextlib.suppress(ValueError):
                self.code = int(self._told)
            self.close()

    def close(self) -> None:
        """Nobody is let in any more."""
        if self.open:
            self.open = False
            self._sock.close()


class Console:
    """Rank 0's end: the launcher's descriptors are this process's stdin, stdout and stderr."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def leave(self, code: int) -> int:
        """Tell the launcher the driver's exit code.

        Returns:
            The code to exit with: 0 when the launcher knows (mpirun then has nothing to report), else `code`.
        """
        try:
            self._sock.sendall(str(code).encode())
            self._sock.close()
        except OSError:
            return code
        return 0


def adopt(wanted: bool, environ: MutableMapping[str, str] | None = None) -> Console | None:
    """Take the launcher's descriptors, in the rank that starts the program, before it starts any other process.

    Args:
        wanted: whether this process is that rank.
        environ: the variable is removed from it, so that nested launches do not see it.

    Returns:
        None in other ranks, without `hpcray-launch`, and when the launcher is on another host: the descriptors then
        stay what they are.
    """
    environ = os.environ if environ is None else environ
    name = environ.pop(VARIABLE, "")
    if not wanted or not name:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_TIMEOUT)
        sock.connect("\0" + name)
        if _credentials(sock)[1] != os.getuid():
            raise OSError("not ours")
        fds = _receive(sock)
        sock.settimeout(None)
    except OSError:
        sock.close()
        return None
    for fd, target in zip(fds, _STANDARD, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    return Console(sock)


@contextlib.contextmanager
def silenced(wanted: bool) -> Iterator[None]:
    """What is written to standard output and error in the block goes nowhere, if `wanted`. By C libraries too."""
    if not wanted:
        yield
        return
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    kept = {}
    for number in (1, 2):
        with contextlib.suppress(OSError):  # closed by who started us
            kept[number] = os.dup(number)
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        for number in kept:
            os.dup2(nowhere, number)
        yield
    finally:
        os.close(nowhere)
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


def _receive(sock: socket.socket) -> list[int]:
    fds = array.array("i")
    size = fds.itemsize * len(_STANDARD)
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(size))
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    if not data or len(fds) != len(_STANDARD):
        for fd in fds:
            os.close(fd)
        raise OSError("no descriptors came")
    return list(fds)


def _credentials(sock: socket.socket) -> tuple[int, int, int]:
    pid, uid, gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid, gid
