"""The process that holds a started node: `ray start --block` itself, or one that stays when the command has returned.

The node ends with its keeper, which sees what a node cannot: that its allocation has ended, that `ray stop` wants it to
end, who rings at the bell.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from hpcray.platform.process_control import module_line, set_process_name
from hpcray.platform.session_directory import ADDRESS
from hpcray.platform.sockets import is_same_user
from hpcray.processes.bootstrap import NodeChild
from hpcray.ray_start.allocation_watch import SWEEP, SWEEP_CHECK, AllocationWatch
from hpcray.ray_start.head_search import Bell

AT_ONCE = signal.SIGQUIT
"""Signal of `ray stop --force`: the node ends without waiting for tasks."""
_ORDERLY = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_IGNORED = (signal.SIGUSR1, signal.SIGUSR2)
"""`sbatch --signal=USR1@60` sends it to every step; the program handles it, not its cluster."""
_GRACE, _BREAK_OFF = 15.0, 5.0
"""Seconds that a node has to end after a request, and to break off, which is long only on a busy host. A node that
is killed leaves its files to the next one, and its ports are seen for a moment without a process behind them."""
_SAME = 1.0
"""Seconds in which a second signal is the same request: srun, Slurm and the guard all pass on the end of a job."""
STOPPED = "stopped"
"""File in the session directory by which `ray stop` says that it is who ends the node: the exit code is then 0."""


class KeeperSignals:
    """The signals of this process, as bytes at a descriptor. A context manager.

    Attributes:
        fd: readable when a signal has come.
    """

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[int, object] = {}

    def __enter__(self) -> KeeperSignals:
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*_ORDERLY, AT_ONCE, *_IGNORED):
            if not _is_spared(number):
                self._before[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.fd)
        os.close(self._write)

    def take(self) -> list[int]:
        """The signals that have come and mean an end."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.fd, 64) if number not in _IGNORED]
        return []


def _is_spared(number: int) -> bool:
    """True for what nohup, or a shell's `&`, has this process ignore: a hangup and Ctrl-C. A shell ignores SIGQUIT for
    `&`, too, but `ray stop --force` sends it."""
    return number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) is signal.SIG_IGN


def _noted(number: int, frame: FrameType | None) -> None:
    """Handle a signal: its number is in the pipe."""


def keep_node(
    node: NodeChild,
    received: KeeperSignals,
    bell: Bell | None,
    watch: AllocationWatch | None,
    log: Callable[[str], None],
) -> int:
    """Stay until a node has ended.

    Args:
        node: held by this process.
        received: signals that ask for its end.
        bell: of a head, if there is one.
        watch: the allocation, if there is one.
        log: called with lines about what happens.

    Returns:
        0 where the cluster, or `ray stop`, has ended the node in order; 128 + n where signal n has; else the code of
        the node.
    """
    asked, asked_at, stopped = 0, 0.0, False
    deadline = float("inf")
    poll = select.poll()
    ended = os.pidfd_open(node.pid)
    try:
        while True:
            now = time.monotonic()
            watched = set(watch.fds()) if watch is not None and not asked else set()
            for fd in {ended, received.fd, *watched, *([bell.fileno()] if bell is not None else [])}:
                poll.register(fd, select.POLLIN)
            left = min(deadline - now, watch.wait(now) if watch is not None and not asked else float("inf"))
            events = dict(poll.poll(None if left == float("inf") else max(0.0, left) * 1000 + 1))
            for fd in watched:
                poll.unregister(fd)
            if ended in events:
                break
            if bell is not None and bell.fileno() in events:
                bell.serve()
            for number in received.take() if received.fd in events else []:
                stopped = stopped or os.path.exists(os.path.join(node.session_dir, STOPPED))
                log("ray stop: this node ends" if stopped else f"signal {signal.Signals(number).name}: this node ends")
                if number == AT_ONCE or (asked and time.monotonic() - asked_at > _SAME):
                    node.leave(_BREAK_OFF)
                elif not asked:
                    asked_at = time.monotonic()
                    deadline = asked_at + _GRACE
                    _terminate(node)
                asked = asked or number
            now = time.monotonic()
            due = watch is not None and not asked and (watched & events.keys() or watch.wait(now) <= 0.0)
            if due and watch is not None and watch.is_over(now):
                log("the allocation has ended, and so does this node")
                asked, asked_at, deadline = signal.SIGTERM, now, now + _GRACE
                _terminate(node)
            if now >= deadline:
                log(f"the node has not ended within {_GRACE:g} s")
                node.leave(_BREAK_OFF)
    finally:
        os.close(ended)
    code = node.leave()
    if asked:
        return 0 if stopped else 128 + asked
    return code


# ------------------------------------------------------------ door
# A command in another container of this host does not see the files of the node, nor its sockets in them. A socket that
# has a name in no file system leads it here, where the same command runs again in its place, as on another host a step
# of Slurm's would be. Both sides let no other user speak.

_OF_CONTAINER = ("TMPDIR", "HPCRAY_TMPDIR", "RAY_TMPDIR")
_LONGEST_CALL = 1 << 20
_CALL_WITHIN = 5.0


class Door:
    """The listener for commands that come in. `close` it when the node has ended.

    Args:
        ident: of the command that holds the node.
        session_dir: of the node.
    """

    def __init__(self, ident: str, session_dir: str) -> None:
        self._session_dir = session_dir
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(OSError):  # a system without such names does without the door
            self._socket.bind(_door_name(ident))
            self._socket.listen()
            threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Let no more in."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                line = self._socket.accept()[0]
            except OSError:
                return
            if _is_own(line):
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()
            else:
                line.close()

    def _answer(self, line: socket.socket) -> None:
        fds: list[int] = []
        with line, contextlib.suppress(OSError, ValueError, EOFError):
            line.settimeout(_CALL_WITHIN)
            size, fds, _, _ = socket.recv_fds(line, 8, 3)
            words, environ, place = json.loads(_receive(line, int.from_bytes(size, "big")))
            environ = {name: text for name, text in environ.items() if name not in _OF_CONTAINER}
            environ |= {name: os.environ[name] for name in _OF_CONTAINER if name in os.environ}
            environ |= {"RAY_ADDRESS": self._session_dir, ADDRESS: self._session_dir}
            stdin, stdout, stderr = fds
            command = subprocess.Popen(
                module_line("hpcray.cli.ray", *words), stdin=stdin, stdout=stdout, stderr=stderr, env=environ,
                cwd=place if os.path.isdir(place) else "/",
            )  # fmt: skip
            ended = os.pidfd_open(command.pid)
            try:
                poll = select.poll()
                for fd in (ended, line.fileno()):
                    poll.register(fd, select.POLLIN)
                if line.fileno() in dict(poll.poll()):
                    command.terminate()  # nobody waits for it
            finally:
                os.close(ended)
            line.sendall(bytes([command.wait() & 255]))
        for fd in fds:
            os.close(fd)


def run_in_node(ident: str, words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command of `ray`'s at the node that another command holds on this host, and return its exit code.

    Args:
        ident: of the command that holds it.
        words: of the command line.
        environ: the variables that it gets; those that name directories and addresses are the node's own.

    Raises:
        OSError: it is not there, or is not of this user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(_CALL_WITHIN)  # another user who listens there, and lets nobody in, is not waited for
        line.connect(_door_name(ident))
        if not _is_own(line):
            raise PermissionError("another user listens there")
        line.settimeout(None)
        text = json.dumps([list(words), dict(environ), os.getcwd()]).encode()
        socket.send_fds(line, [len(text).to_bytes(8, "big")], [0, 1, 2])
        line.sendall(text)
        code = line.recv(1)
        return code[0] if code else 1


def _is_own(line: socket.socket) -> bool:
    """True if the peer belongs to this user. Where a container has no number for this user, all users look alike."""
    with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
        return os.getuid() != int(file.read()) and is_same_user(line)


def _door_name(ident: str) -> str:
    return f"\0hpcray-{ident}"


def _receive(line: socket.socket, size: int) -> bytes:
    if size > _LONGEST_CALL:
        raise ValueError(f"{size} bytes are no command line")
    found = b""
    while len(found) < size:
        piece = line.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found


class Sweeper:
    """A process that removes what this one leaves when it is killed together with its node: `srun` that gets SIGTERM
    has Slurm kill its step. As an orphan it is no part of the step, unless the site uses cgroups.

    Args:
        sweep: removes it; called in that process, again and again until it returns True.
    """

    def __init__(self, sweep: Callable[[], bool]) -> None:
        read, self._write = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            try:
                if os.fork() == 0:
                    _be_sweeper(read, sweep)
            finally:
                os._exit(0)
        os.close(read)
        os.waitpid(child, 0)

    def dismiss(self) -> None:
        """This process removes what is left itself."""
        with contextlib.suppress(OSError):
            os.write(self._write, b".")
        os.close(self._write)


def _be_sweeper(read: int, sweep: Callable[[], bool]) -> None:
    os.setsid()
    set_process_name("hpcray-sweeper")
    signal.set_wakeup_fd(-1)
    for number in (*_ORDERLY, AT_ONCE, *_IGNORED):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    for fd in (1, 2):
        os.dup2(0, fd)
    os.dup2(read, 3)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))  # the node lives as long as its keeper has the other end of its pipe
    if os.read(3, 1):
        return
    deadline = time.monotonic() + SWEEP
    while not sweep() and time.monotonic() < deadline:
        time.sleep(SWEEP_CHECK)


def _terminate(node: NodeChild) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(node.pid, signal.SIGTERM)


@contextlib.contextmanager
def default_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit: what waits then cleans up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP, AT_ONCE):
        if not _is_spared(number):
            before[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
