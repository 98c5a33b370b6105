"""The user's terminal, handed from `hpcray-launch` to the rank that runs the program; and that program's exit code.

mpirun's own handling of stdin, stdout and stderr does not suffice: Open MPI 5 never closes the stdin of rank 0 (a
driver that reads to the end waits forever), and gives rank 0 a pseudo terminal even when the output goes to a file. So
where the rank runs on the launcher's host, the launcher passes its own three descriptors over a Unix socket, and the
exit code comes back over the same socket. Under another launcher than mpirun, none of this happens. The socket is an
abstract one: no file can stay behind. Both ends check that the other is the same user.

For a launcher on another host the exit code goes through a file: srun ends with the highest code of its tasks, and a
rank that was killed counts with 137 although the job went on without that rank. So where ranks died on the way, the
rank with the program writes the code to a file whose name the launcher chose, in the directory where the launcher runs;
as a rule all nodes share it. Otherwise srun's code is all there is. A head that has lost the program's node writes what
it believes to a second file: it may be the one that is cut off, while the directory stays within its reach. Then the
program's node becomes the head of a newer epoch, and says so in its own file. The newest epoch counts.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence

import msgspec

from hpcray.platform.private_files import CLOSED, read_private_file, write_private_file
from hpcray.platform.sockets import is_same_user, peer_pid_and_uid

CONSOLE_VARIABLE = "HPCRAY_CONSOLE"
_STANDARD = (0, 1, 2)
_CONNECT_TIMEOUT = 5.0  # seconds


class ConsoleOffer:
    """The launcher's end: gives its descriptors to the first process of this user that connects.

    Attributes:
        name: what rank 0 finds in the variable `HPCRAY_CONSOLE`.
        pid: the process that took the descriptors, or None.
        code: the exit code that this process sent, or None.
        open: True if a process may still connect, or is connected.
    """

    def __init__(self) -> None:
        self.name = f"hpcray-{os.urandom(12).hex()}"
        self.pid: int | None = None
        self.code: int | None = None
        self.open = True
        self._received = b""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sock.bind("\0" + self.name)
        self._sock.listen(1)

    def fileno(self) -> int:
        """Readable when `serve` has something to do."""
        return self._sock.fileno()

    def serve(self, descriptors: Sequence[int]) -> None:
        """Accept rank 0 and send it `descriptors` (stdin, stdout, stderr); when connected, receive its exit code."""
        if self.pid is None:
            peer, _ = self._sock.accept()
            pid, uid = peer_pid_and_uid(peer)
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
        self._received += data
        if not data:
            with contextlib.suppress(ValueError):
                self.code = int(self._received)
            self.close()

    def close(self) -> None:
        """Refuse further connections."""
        if self.open:
            self.open = False
            self._sock.close()


class Console:
    """Rank 0's end: the launcher's descriptors are this process's stdin, stdout and stderr."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock: socket.socket | None = sock

    def leave(self, code: int) -> int:
        """Send the launcher the driver's exit code. A later call sends nothing: the first code counts.

        Returns:
            The code to exit with: 0 when the launcher has received it (mpirun then has nothing to report), else `code`.
        """
        sock, self._sock = self._sock, None
        if sock is None:
            return code
        try:
            sock.sendall(str(code).encode())
            sock.close()
        except OSError:
            return code
        return 0


def adopt_console(wanted: bool, environ: MutableMapping[str, str] | None = None) -> Console | None:
    """Take the launcher's descriptors, in the rank that starts the program, before it starts any other process.

    Args:
        wanted: True in that rank.
        environ: the variable is removed from it, so that nested launches do not see it.

    Returns:
        None in other ranks, without `hpcray-launch`, and when the launcher is on another host: the descriptors then
        stay what they are.
    """
    environ = os.environ if environ is None else environ
    name = environ.pop(CONSOLE_VARIABLE, "")
    if not wanted or not name:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(_CONNECT_TIMEOUT)
        sock.connect("\0" + name)
        if not is_same_user(sock):
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
def silenced_output(wanted: bool) -> Iterator[None]:
    """Context manager that discards what is written to standard output and error, by C libraries too, if `wanted`."""
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


EXIT_FILE_VARIABLE = "HPCRAY_EXIT_FILE"
_BELIEVED = ".believed"


class ExitReport(msgspec.Struct, frozen=True):
    """The word of one node on the end of the job.

    Attributes:
        node: who writes it. epoch: of the head that it knows: how often the head has moved.
        code: the program's exit code; None while the program runs, and its node has become the head.
        patience: seconds after which it counts; until then a node that knows better may write too.
    """

    node: int
    epoch: int
    code: int | None
    patience: float = 0.0


class ExitFile:
    """The launcher's end of the files with the exit code.

    Attributes:
        path: passed to the ranks in the variable `HPCRAY_EXIT_FILE`.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, f".hpcray-exit-{os.urandom(12).hex()}")

    def report(self) -> ExitReport | None:
        """The report that counts: of the newest epoch, and in one epoch that of the program's node."""
        with contextlib.suppress(OSError):  # opened, so that a network file system looks again
            os.close(os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        found = [report for path in (self.path, self.path + _BELIEVED) if (report := _read_report(path)) is not None]
        return max(found, key=lambda report: report.epoch, default=None)

    def take(self) -> int | None:
        """Read and remove the files. Returns the exit code, None if there is none."""
        report = self.report()
        for path in (self.path, self.path + _BELIEVED):
            with contextlib.suppress(OSError):
                os.unlink(path)
        return report.code & 0xFF if report is not None and report.code is not None else None


def _read_report(path: str) -> ExitReport | None:
    try:
        return msgspec.json.decode(read_private_file(path, CLOSED), type=ExitReport)
    except (OSError, msgspec.MsgspecError):
        return None


def take_exit_file_path(environ: MutableMapping[str, str]) -> str:
    """The path that the launcher passed, "" for none. Removes the variable: nested launches do not see it."""
    return environ.pop(EXIT_FILE_VARIABLE, "")


def write_exit_report(path: str, report: ExitReport, believed: bool = False) -> None:
    """Write it, if the directory permits it.

    Args:
        path: what the launcher passed.
        believed: by a head that has lost the program's node. Otherwise this is the program's node.
    """
    with contextlib.suppress(OSError):
        write_private_file(path + _BELIEVED * believed, msgspec.json.encode(report))


# ------------------------------------------------------------ status line
# One line at the bottom of a terminal, above which all other output scrolls, of whatever process.


TERMINAL_SIZE = "HPCRAY_TERMINAL"
"""Variable of what writes to a terminal through a launcher: its columns and rows, as `120x40`."""


def terminal_size(fd: int, environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return columns and rows of the terminal that a descriptor leads to; None where it leads to none, or a dumb one.

    Args:
        environ: says what terminal a launcher forwards to, and of what kind it is.
    """
    if environ.get("TERM", "") in ("", "dumb"):
        return None
    try:
        return tuple(os.get_terminal_size(fd))  # type: ignore[return-value]
    except OSError:
        columns, _, rows = environ.get(TERMINAL_SIZE, "").partition("x")
        return (int(columns), int(rows)) if columns.isdecimal() and rows.isdecimal() else None
