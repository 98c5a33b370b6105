"""Session directories: where the sockets, the lock and the description of one node of one job live.

    <tmp>/hpcray-<uid>/            0700, one per user and machine; <tmp> is ~/.hpcray/tmp/<host> where no other is safe
        <8 hex>/                   0700, one per node of a job
            lock                   flock held by the raylet and its fork server: the node is alive while it is held
            r.s  <number>.s        Unix sockets of the raylet and of the processes
            info.json              what `init(address="auto")` looks for; written when the node is ready

A directory whose lock is free belongs to a dead node; the next node that starts removes it.

All users share temporary directories: only files that this user owns are trusted. A name that another user has taken is
an error when a node starts and HPCRAY_TMPDIR names its directory, and is passed over else; when nodes are listed, it is
skipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import configured_environment
from hpcray.platform.private_files import (
    CLOSED,
    SAFE_DIRECTORIES,
    PrivateDirectory,
    exposed_directory,
    make_private_directory,
    open_private_file,
    read_private_file,
    write_private_file,
)
from hpcray.platform.process_tree import end_processes_with

ADDRESS = "HPCRAY_ADDRESS"
"""Variable with the session directory of a node of the job that `init()` joins; the programs of a launcher have it, and
what they start. For commands, OWN_SESSION comes before it."""
OWN_SESSION = "HPCRAY_SESSION"
"""Variable with the session directory of the node that this program has started or joined, and of that of a worker.
Commands that they start look there, and so does `init()` of their children, which joins the job of its parent."""
OWN_NAMESPACE = "HPCRAY_NAMESPACE"
"""Variable with the namespace of that program or worker, which children that join without an address have too."""
NODE_SESSION = "HPCRAY_NODE_SESSION"
"""Variable with the session directory of the node, in workers and what they start: if the node is killed with its fork
server, who removes the directory finds by it what has to end too."""
RAYLET_SOCKET = "r.s"
_TMPDIR = "HPCRAY_TMPDIR"
_SYSTEM_TMP = "/tmp"
_HOME, _IN_HOME = "HOME", ".hpcray/tmp"
_LOCK = "lock"
_MAX_ROOT_TRIES = 100
_INFO = "info.json"
_MAX_SOCKET_PATH = 107  # bytes
_LONGEST_SOCKET_NAME = "4294967295.s"
_LONGEST_COMMAND_LINE = 4096  # bytes
_REFRESH_INTERVAL = 6 * 3600.0
"""Seconds between two updates of the times of a session's files."""
_LEAST_ROOM = 1 << 20
"""Bytes that must be free where a session directory is made: its files are small, the logs of a job are not."""
_NAME = re.compile(r"[0-9a-f]{8}")
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class SessionError(StartupError):
    """No session directory can be made or used; the message gives the path and the reason."""


class SessionInfo(msgspec.Struct, frozen=True):
    """The content of info.json: a live node.

    Attributes:
        path: the session directory.
        pid: process id of the raylet.
        session: name of the job's session, equal on all of its nodes.
        node: index of the node in the job.
        node_id: its id, 56 hex characters.
        host: host name.
        slurm_job: Slurm's job id, or "".
        started: Unix time of the start, seconds.
        nodes: nodes of the job.
        program: command line of the program; "" if this node does not know it.
        embedded: whether the program has started this node, as its child; else the node's rank starts the program.
        end: Unix time at which the batch system ends the job; 0.0 if that is not known.
        python, root: the interpreter of the node, and where it has found hpcray.
        relayed: this is no node, but stands here for one elsewhere (`hpcray.attach`).
    """

    path: str
    pid: int
    session: str
    node: int
    node_id: str
    host: str
    slurm_job: str
    started: float
    nodes: int = 1
    program: str = ""
    embedded: bool = False
    end: float = 0.0
    python: str = ""
    root: str = ""
    relayed: bool = False


class SessionDirectory:
    """The session directory of a node, and the lock that marks the node as alive.

    Attributes:
        path: of the directory. lock_fd: holds the lock.
        driver: the program's command line after the interpreter; empty where the program has started this node.
    """

    def __init__(self, path: str, lock_fd: int) -> None:
        self.path = path
        self.lock_fd = lock_fd
        self.driver: Sequence[str] = ()
        self._info = b""
        self._fresh_at = time.monotonic()

    @classmethod
    def create(cls, environ: Mapping[str, str] | None = None) -> SessionDirectory:
        """Make and lock a new session directory; remove those of dead nodes.

        Raises:
            SessionError: no temporary directory is usable.
        """
        root, passed_over = _choose_root(os.environ if environ is None else environ)
        if passed_over:
            print(f"hpcray: session directories are in {root}: {passed_over}", file=sys.stderr)
            _make_parent(root)
        if full := _full(os.path.dirname(root)):
            raise SessionError(full)
        with _locked_root(root):
            _sweep(root)
            while True:
                path = os.path.join(root, os.urandom(4).hex())
                try:
                    os.mkdir(path, 0o700)
                    break
                except FileExistsError:
                    continue
            lock_fd = open_private_file(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT, CLOSED)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return cls(path, lock_fd)

    def socket_path(self, number: int) -> str:
        """Path of the socket of process `number` of this node; 0 is the raylet."""
        return os.path.join(self.path, f"{number}.s" if number else RAYLET_SOCKET)

    def publish(
        self, session: str, node: int, node_id: str, nodes: int = 1, end: float = 0.0, relayed: bool = False
    ) -> None:
        """Write info.json, by which `init(address="auto")` finds this node. Arguments: see `SessionInfo`."""
        info = SessionInfo(
            path=self.path,
            pid=os.getpid(),
            session=session,
            node=node,
            node_id=node_id,
            host=socket.gethostname(),
            slurm_job=os.environ.get("SLURM_JOB_ID", ""),
            started=time.time(),
            nodes=nodes,
            program=shlex.join(self.driver or _command_line_of_parent()),
            embedded=not self.driver,
            end=end,
            python=sys.executable,
            root=_ROOT,
            relayed=relayed,
        )
        self._info = msgspec.json.encode(info)
        write_private_file(os.path.join(self.path, _INFO), self._info)

    def missing(self) -> list[str]:
        """The paths of what was removed: the directory, its lock, the raylet's socket, its description.
        Now and then the files get a new time, by which cleaners go."""
        try:
            closed = os.stat(self.path, follow_symlinks=False).st_mode & stat.S_IRWXU == stat.S_IRWXU
        except OSError:
            closed = False
        if not closed:
            return [self.path]
        if time.monotonic() - self._fresh_at > _REFRESH_INTERVAL:
            self._refresh()
        names = (_LOCK, RAYLET_SOCKET, *([_INFO] if self._info else []))
        return [path for name in names if not os.path.lexists(path := os.path.join(self.path, name))]

    def restore(self) -> None:
        """Make the directory again, its lock and its description; not the sockets. The fork server takes the lock too.

        Raises:
            SessionError: its place is taken, or gone.
            OSError: it cannot be made.
        """
        root = os.path.dirname(self.path)
        _make_parent(root)
        with _locked_root(root):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
            if not _is_private(self.path, follow=False):
                raise SessionError(f"{self.path} was removed, and what is there now is no directory of this user alone")
            os.chmod(self.path, 0o700)
            share_session_lock(self.path, self.lock_fd)
        if self._info:
            write_private_file(os.path.join(self.path, _INFO), self._info)

    def _refresh(self) -> None:
        self._fresh_at = time.monotonic()
        for directory, _, names in os.walk(self.path):
            for path in (directory, *(os.path.join(directory, name) for name in names)):
                with contextlib.suppress(OSError):
                    os.utime(path, follow_symlinks=False)

    def remove(self) -> None:
        """Remove the directory and release the lock. Harmless if the directory is gone."""
        remove_session_directory(self.path)
        if self.lock_fd >= 0:
            os.close(self.lock_fd)
            self.lock_fd = -1


def share_session_lock(path: str, lock_fd: int) -> None:
    """Hold the lock of a session directory that was made again, by the descriptor of the one that is gone.

    The raylet and its fork server no longer have one open file: each has a shared lock.

    Raises:
        OSError: the file cannot be made.
    """
    fd = open_private_file(os.path.join(path, _LOCK), os.O_RDWR | os.O_CREAT, CLOSED)
    try:
        if os.path.samestat(os.fstat(fd), os.fstat(lock_fd)):
            return  # it is the one that is held
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.dup2(fd, lock_fd, inheritable=False)
    finally:
        os.close(fd)


def session_root(environ: Mapping[str, str]) -> str:
    """The user's directory of session directories: in the first temporary directory whose path is short enough, and
    where no other user could exchange it; at last in the user's home.

    Raises:
        ValueError: a configuration file is not valid.
    """
    return _choose_root(environ)[0]


def _choose_root(environ: Mapping[str, str]) -> tuple[str, str]:
    """The root, and why it is not in the directory that variables name, "" if it is."""
    passed_over = ""
    for variable, root in _possible_roots(environ):
        parent = os.path.dirname(root)
        exposed = exposed_directory(parent)
        if variable == _TMPDIR and (exposed is None or exposed.path == os.path.realpath(parent)):
            return root, ""  # it is used as the user says, or refused
        problem = str(exposed or _taken(root) or _full(parent))
        if not problem:
            return root, passed_over
        passed_over = passed_over or problem
    return os.path.join(_SYSTEM_TMP, f"hpcray-{os.getuid()}"), ""  # is refused


def _taken(root: str) -> str:
    """The reason why the name of the root is not free for this user; "" if it is."""
    try:
        owner = os.stat(root, follow_symlinks=False).st_uid
    except OSError:
        return ""
    return "" if owner == os.getuid() else f"{root} belongs to uid {owner}; hint: set {_TMPDIR} to a directory of yours"


def _full(directory: str) -> str:
    """The reason why a session does not fit into a directory; "" if it does, or that is not known."""
    try:
        room = os.statvfs(directory)
    except OSError:
        return ""
    free = room.f_bavail * room.f_frsize
    if not room.f_blocks or (free >= _LEAST_ROOM and (room.f_favail or not room.f_files)):
        return ""
    what = f"{free >> 10} KiB are free" if free < _LEAST_ROOM else "no file can be made"
    return f"{directory} is full: {what}; hint: set {_TMPDIR} to a directory that has room"


def _make_parent(root: str) -> None:
    parent = os.path.dirname(root)
    if not os.path.isdir(parent):
        try:
            make_private_directory(parent, ancestors=True)
        except OSError as error:
            raise SessionError(f"cannot use {parent}: {error}; hint: set {_TMPDIR} to a directory of yours") from error


def _possible_roots(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The roots that there may be, by the variables that name their directories, in their order."""
    environ = configured_environment(environ)
    name = f"hpcray-{os.getuid()}"
    tail = len(f"/{name}/01234567/{_LONGEST_SOCKET_NAME}")
    for variable in (_TMPDIR, "SLURM_TMPDIR", "TMPDIR"):
        tmp = environ.get(variable, "")
        if tmp and os.path.isdir(tmp) and len(os.fsencode(os.path.abspath(tmp))) + tail <= _MAX_SOCKET_PATH:
            yield variable, os.path.join(os.path.abspath(tmp), name)
    yield "", os.path.join(_SYSTEM_TMP, name)
    # Nodes may share a home: one must not take the sessions of another, whose locks it may not see, for dead ones.
    home = os.path.join(os.path.expanduser("~"), _IN_HOME, socket.gethostname().partition(".")[0])
    if os.path.isabs(home) and len(os.fsencode(home)) + tail <= _MAX_SOCKET_PATH:
        yield _HOME, os.path.join(home, name)


def remove_session_directory(path: str) -> None:
    """Remove a session directory; and the user's root, if this was the last one."""
    shutil.rmtree(path, ignore_errors=True)
    root = os.path.dirname(path)
    # Another user may have taken the name of a root that a cleaner has removed, and would never release its lock.
    with contextlib.suppress(OSError), PrivateDirectory.open(root, make=False, excess=0) as opened:
        fcntl.flock(opened.fd, fcntl.LOCK_EX)
        os.rmdir(root)


def remove_dead_sessions(environ: Mapping[str, str]) -> None:
    """Remove the session directories of nodes that were killed with all that could remove them, as the next start of a
    node would, and end what their workers have started."""
    root = session_root(environ)
    if _is_private(root, follow=False):
        with contextlib.suppress(OSError, SessionError), _locked_root(root):
            _sweep(root)
            os.rmdir(root)


def live_sessions(environ: Mapping[str, str] | None = None) -> list[SessionInfo]:
    """The ready nodes of this user on this machine; the job started last comes first, in it the lowest node."""
    environ = os.environ if environ is None else environ
    roots = [session_root(environ)]
    named = configured_environment(environ).get(_TMPDIR, "")
    if not named or os.path.dirname(roots[0]) != os.path.abspath(named):
        # One may have started at home while another user had the name here.
        roots += [root for variable, root in _possible_roots(environ) if variable == _HOME and root != roots[0]]
    private = [root for root in roots if _is_private(root, follow=False) and not exposed_directory(root)]
    found = [info for root in private for path in _sessions(root) if (info := _read_info(path)) and _is_live(path)]
    found = [info for info in found if not info.relayed]
    newest: dict[str, float] = {}
    for info in found:
        newest[info.session] = max(newest.get(info.session, 0.0), info.started)
    return sorted(found, key=lambda info: (-newest[info.session], info.session, info.node))


def has_session_file(name: str, environ: Mapping[str, str]) -> bool:
    """True if some session directory of this user on this machine, of a live node or a dead one, has a file with a
    name."""
    for _, root in _possible_roots(environ):
        with contextlib.suppress(OSError):
            if any(os.path.exists(os.path.join(root, session, name)) for session in os.listdir(root)):
                return True
    return False


def read_session(path: str) -> SessionInfo:
    """The node whose session directory is `path`.

    Raises:
        SessionError: there is none, the node is dead, or other users can read the directory.
    """
    if os.path.isdir(path) and not _is_private(path, follow=True):
        state = os.stat(path)
        raise SessionError(
            f"{path!r} is no session directory of yours: it belongs to uid {state.st_uid} and has mode "
            f"{stat.S_IMODE(state.st_mode):o}, yours would be uid {os.getuid()} and 700; hint: a job can be joined by "
            "the user who started it, and by nobody else"
        )
    if problem := exposed_directory(path):
        raise SessionError(f"{path!r} is not used: {problem}")
    info = _read_info(path)
    if info is None or not _is_live(path):
        raise SessionError(
            f"no live hpcray node at {path!r}; hint: the job has ended, or the address is of another machine"
        )
    return info


@contextlib.contextmanager
def _locked_root(root: str) -> Iterator[None]:
    """Context manager that holds the lock of the user's root directory, made if necessary. Cleaning up and making are
    serialized."""
    parent = os.path.dirname(root)
    if problem := exposed_directory(parent):
        also = f"{SAFE_DIRECTORIES}={problem.path} trusts it"
        raise SessionError(
            f"{problem.path} {problem.why}; hint: set HPCRAY_TMPDIR to a directory of yours, or {also}, if you do"
        )
    tries = iter(range(_MAX_ROOT_TRIES))
    while True:
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(root, 0o700)
            fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            if os.path.isdir(parent):
                if next(tries, None) is not None:
                    continue  # the last node of another job removed it between our two calls
                raise SessionError(
                    f"{parent} takes no directories; hint: set HPCRAY_TMPDIR to a directory of yours"
                ) from None
            raise SessionError(f"no directory {parent}; hint: set HPCRAY_TMPDIR") from None
        except OSError as error:
            raise SessionError(
                f"cannot use {root}: {error}; hint: set HPCRAY_TMPDIR to a directory of yours"
            ) from error
        try:
            state = os.fstat(fd)
            if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o077:
                raise SessionError(
                    f"{root} belongs to uid {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}; it must be yours "
                    f"(uid {os.getuid()}) and 0700; hint: set HPCRAY_TMPDIR to a directory of yours"
                )
            fcntl.flock(fd, fcntl.LOCK_EX)
            if _is_same_file(fd, root):
                yield
                return
        finally:
            os.close(fd)


def _is_private(path: str, follow: bool) -> bool:
    """True if `path` is a directory of this user that no other user can read."""
    try:
        state = os.stat(path, follow_symlinks=follow)
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


def _command_line_of_parent() -> list[str]:
    """The words of the command line of the process that has started this one, without the interpreter."""
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            words = file.read(_LONGEST_COMMAND_LINE).split(b"\0")[1:-1]
    except OSError:
        return []
    return [word.decode(errors="replace") for word in words]


def _is_same_file(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _sweep(root: str) -> None:
    """Remove the directories of dead nodes. The caller holds the lock of the root."""
    dead = [path for path in _sessions(root) if not _is_live(path)]
    if dead:
        end_processes_with(NODE_SESSION, dead)
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)


def _sessions(root: str) -> list[str]:
    """Every session directory, live or dead."""
    try:
        paths = [os.path.join(root, name) for name in os.listdir(root) if _NAME.fullmatch(name)]
    except OSError:
        return []
    return [path for path in paths if _is_private(path, follow=False)]


def _is_live(path: str) -> bool:
    try:
        fd = open_private_file(os.path.join(path, _LOCK), os.O_RDWR, CLOSED)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _read_info(path: str) -> SessionInfo | None:
    try:
        return msgspec.json.decode(read_private_file(os.path.join(path, _INFO), CLOSED), type=SessionInfo)
    except (OSError, msgspec.MsgspecError):
        return None


# ------------------------------------------------------------ kept logs
# Log files that outlive their job: the directory of a session's log files is a link to where they stay.


def node_logs(directory: str, node: int) -> str:
    """The directory where the log files of a node stay.

    Args:
        directory: of the whole job; %j stands for the number of Slurm's job.
        node: the number of the node.
    """
    return os.path.join(os.path.abspath(directory.replace("%j", os.environ.get("SLURM_JOB_ID", "0"))), f"node-{node}")


def keep_logs(session_logs: str, kept: str) -> str:
    """Have the log files of a node written to a directory that stays.

    Args:
        session_logs: the directory of log files in the session directory; made here, as a link.
        kept: where they stay.

    Returns:
        Why they are not, "" if they are.
    """
    try:
        make_private_directory(kept)
        os.symlink(kept, session_logs)
    except OSError as error:
        return f"the log files of workers do not stay in {kept}: {error}; hint: HPCRAY_LOG_DIR"
    return ""
