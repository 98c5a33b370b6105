"""The fork server: a process that forks this node's workers, and cleans up after a raylet that died. And its client, by
which the raylet starts it, asks it for workers, and learns of their ends.

The server (in messages and `ps` output: the template process) is forked from the raylet before MPI, UCX or any thread
exists (never fork after MPI_Init), imports once what every worker needs, and then forks a ready worker in about 2 ms.
The server leads a session of its own, so that no terminal signal reaches workers, and is a subreaper, so that
grandchildren of workers cannot escape.

Requests (raylet → server) and reports (server → raylet) are msgpack arrays, one per packet:

    ["load"]  ["prepare", copies, modules, env]  ["fork", number, env]  ["kill", number]
    ["driver", pid, started, parent]  ["lock"]  ["stop"]
    ["ready"]  ["broken", text]  ["preloaded", module, traceback or ""]
    ["forked", number, pid]  ["failed", number, reason]  ["exited", number, wait status, why it did not start or ""]
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import mmap
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import msgspec

from hpcray.common.ray_version import STANDIN
from hpcray.platform.accelerators import apply_device_visibility, assigned_gpus, record_node_environment
from hpcray.platform.launcher_environment import LauncherDirectory, strip_launcher_variables
from hpcray.platform.mpi_directory import remove_abandoned
from hpcray.platform.numa_binding import bind_worker, limit_loaded_libraries_to_one_thread
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.process_control import TEMPLATE_NAME, become_subreaper, die_with_parent, set_process_name
from hpcray.platform.process_tree import ProcessIdentity, close_other_fds, kill_descendants
from hpcray.platform.session_directory import NODE_SESSION, remove_session_directory, share_session_lock

# ------------------------------------------------------------ environment reads
# The environment variables that modules read while the fork server imports them.
#
# A module that reads a variable when it is imported keeps what it read: in a worker that is forked later, a variable of
# its `runtime_env` comes too late for such a module. So the fork server notes what is read during its imports, and a
# worker that is to have another value becomes a fresh process, which imports again (`worker_runtime_env`).
#
# Noted is what goes through `os.environ`. Libraries in C read on their own: `runtime_env.read_at_start` lists theirs.


class EnvironmentReads:
    """Notes which variables are read through `os.environ`.

    Attributes:
        values: what each variable was at its first read; None: it was not set.
    """

    def __init__(self) -> None:
        self.values: dict[str, str | None] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Context manager: note all reads inside."""
        environ = os.environ
        encode = environ.encodekey
        known = environ.copy()

        def note(name: Any) -> Any:
            if isinstance(name, str):
                self.values.setdefault(name, known.get(name))
            return encode(name)

        environ.encodekey = note
        try:
            yield
        finally:
            environ.encodekey = encode

    def differ(self, variables: Mapping[str, str]) -> bool:
        """Return True if a module has read one of these variables when it was another, or was not set."""
        return any(name in variables and variables[name] != text for name, text in self.values.items())

    def differ_at_all(self, variables: Mapping[str, str]) -> bool:
        """Return True if a module has read something that is not so in these variables, all that a process has."""
        return any(variables.get(name) != text for name, text in self.values.items())


of_imports = EnvironmentReads()
"""The reads during the imports of the fork server. Forked workers inherit it; elsewhere it is empty."""


# ------------------------------------------------------------ fork server


WorkerMain = Callable[[str, int, int], NoReturn]
_MAX_TRACEBACK = 1 << 14  # characters
_DRIVER_GRACE = 2.0  # seconds from SIGTERM to SIGKILL of an orphaned driver
_REPARENTING_TIMEOUT = 1.0  # seconds
_CLEANUP_TIMEOUT = 10.0  # seconds
_BLOCKED_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
"""By the server; workers have the default actions."""

_REASON_SLOTS, _REASON_BYTES = 32, 2048
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE


class WorkerCode(msgspec.Struct, frozen=True):
    """What a fork server runs in the processes that it forks.

    Attributes:
        main: a worker's life.
        needs_server: whether the workers of an environment might be forks of a server of its own.
        be_server: becomes such a server, in a process that has the environment's variables. Gets the session directory
            and the descriptor of the packet socket; returns the reason if it cannot.
    """

    main: WorkerMain
    needs_server: Callable[[Environment], bool] = lambda env: False
    be_server: Callable[[str, int], str] = lambda session_dir, fd: "there is none"


_decode = msgspec.msgpack.Decoder(list[Any]).decode
_encode = msgspec.msgpack.Encoder().encode


def run_fork_server(
    sock: socket.socket, load: Callable[[], WorkerCode], session_dir: str, arena_fd: int, lock_fd: int
) -> NoReturn:
    """Run as the fork server. Called in the forked child; never returns.

    Args:
        sock: this side of the packet socket to the raylet.
        load: imports what workers need, on request, and returns the main function of a worker.
        session_dir: the node's session directory; the server removes it at the end.
        arena_fd: the arena; workers inherit it.
        lock_fd: the session's lock, held to the end.
    """
    code = 1
    try:
        close_other_fds({arena_fd, lock_fd, sock.fileno()})
        cleaning = _NodeCleaning(session_dir, lock_fd)
        os.setsid()
        set_process_name(TEMPLATE_NAME)
        os.environ[NODE_SESSION] = session_dir
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        strip_launcher_variables(os.environ)
        record_node_environment(os.environ)
        _ForkServer(sock, load, session_dir, arena_fd, cleaning).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def run_environment_server(sock: socket.socket, main: WorkerMain, session_dir: str) -> NoReturn:
    """Run as the fork server of an environment, in an interpreter of its own, below the fork server of the node."""
    code = 1
    try:
        set_process_name("hpcray-env")
        server = _ForkServer(sock, lambda: WorkerCode(main), session_dir)
        server.load()
        server.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _ForkServer:
    """Args: see `run_fork_server`. node: what the server of a node cleans up; None for that of an environment."""

    def __init__(
        self,
        sock: socket.socket,
        load: Callable[[], WorkerCode],
        session_dir: str,
        arena_fd: int = -1,
        node: _NodeCleaning | None = None,
    ) -> None:
        self._sock = sock
        self._load_worker = load
        self._session_dir = session_dir
        self._children: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._arena_fd = arena_fd
        self._node = node
        self._code: WorkerCode | None = None
        self._servers = EnvironmentServers(self._start_server, self._fork, self._report)
        self._failures = StartFailures()
        become_subreaper()
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED_SIGNALS)
        for blocked in _BLOCKED_SIGNALS:
            signal.signal(blocked, signal.default_int_handler if blocked is signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> None:
        """Serve until the other side asks to stop or is gone, then clean up."""
        own = {self._sock.fileno(), self._wakeup_read}
        serving = True
        while serving:
            until = self._servers.end_idle()
            poll = select.poll()
            for fd in (*own, *self._servers.descriptors()):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(None if until is None else until * 1000 + 1)}
            if self._wakeup_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_read, 4096)
                self._reap()
            for fd in ready - own:
                self._servers.read(fd)
            if self._sock.fileno() in ready:
                serving = self._serve(*self._next_request())
        if self._node is not None:
            self._node.clean_up(list(self._children))
        else:
            kill_descendants(os.getpid())

    def _next_request(self) -> list[Any]:
        """Receive one request. The end of the stream is the end of the other side."""
        try:
            data = self._sock.recv(PACKET_SIZE)
        except OSError:
            data = b""
        if not data and self._node is not None:
            self._node.raylet_gone = True
        return _decode(data) if data else ["stop"]

    def _serve(self, what: str, *args: Any) -> bool:
        """Carry out one request; False to stop."""
        if what == "fork":
            self._fork_or_delegate(*args)
        elif what == "kill":
            pid = self._pids.get(args[0])
            if pid is not None:  # not reaped yet, so the pid is still this worker's
                os.kill(pid, signal.SIGKILL)
            else:
                self._servers.kill(args[0])
        elif what == "lock" and self._node is not None:
            with contextlib.suppress(OSError):  # it was removed once more: the next request follows
                share_session_lock(self._session_dir, self._node.lock_fd)
        elif what == "load":
            self.load()
        elif what == "prepare":
            self._prepare(*args)
        elif what == "driver" and self._node is not None:
            self._node.driver = ProcessIdentity(*args)
        return bool(what != "stop")

    def load(self) -> None:
        """Import what workers run, and report that this server forks, or why it cannot."""
        try:
            with of_imports.noted():
                self._code = self._load_worker()
            _freeze_heap()
            self._report("ready")
        except Exception:
            self._report("broken", traceback.format_exc())
        gc.enable()

    def _prepare(self, copies: list[list[str]], modules: list[str], env: list[tuple[str, str]]) -> None:
        PathRelocation(copies).apply()
        before = dict(os.environ)
        for variable, text in env:
            os.environ[variable] = text
        if STANDIN not in sys.path and any(name.partition(".")[0] == "ray" for name in modules):
            sys.path.insert(0, STANDIN)  # the server's import path is not the job's
        for name in modules:
            problem = ""
            try:
                with of_imports.noted():
                    importlib.import_module(name)
            except (Exception, SystemExit):  # a task that needs the module gets the error when it imports it
                problem = traceback.format_exc()[-_MAX_TRACEBACK:]
            self._report("preloaded", name, problem)
        for variable, _ in env:  # workers get those of their own job
            if variable in before:
                os.environ[variable] = before[variable]
            else:
                os.environ.pop(variable, None)
        if modules:
            limit_loaded_libraries_to_one_thread()
            self._servers.preload(modules, env)
        _freeze_heap()

    def _fork_or_delegate(self, number: int, env: list[list[str]]) -> None:
        named = tuple((name, text) for name, text in env)
        if self._code is None or not self._code.needs_server(named) or not self._servers.take(number, named):
            self._fork(number, named)

    def _fork(self, number: int, env: Environment) -> None:
        if self._code is None:
            self._report("failed", number, "the template process could not import hpcray's worker")
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report("failed", number, f"fork: {error}; hint: ulimit -u, or the cgroup's pids.max")
            return
        if pid == 0:
            self._be_worker(self._code.main, parent, number, env)
        self._children[pid] = number
        self._pids[number] = pid
        self._report("forked", number, pid)

    def _start_server(self, env: Environment) -> tuple[int, socket.socket]:
        """Fork the process that becomes the server of an environment."""
        assert self._code is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return pid, ours
        problem = "it ended"
        try:
            self._be_child(parent)
            close_other_fds({theirs.fileno()})
            for name, text in env:
                os.environ[name] = text
            theirs.set_inheritable(True)
            problem = self._code.be_server(self._session_dir, theirs.fileno())
        except BaseException:
            problem = traceback.format_exc()[-_MAX_TRACEBACK:]
        finally:
            with contextlib.suppress(OSError):
                theirs.send(_encode(["broken", problem]))
            os._exit(1)

    def _be_child(self, parent: int) -> None:
        """Undo, in a child that was just forked, what makes a fork server of this process."""
        die_with_parent(parent)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED_SIGNALS)
        self._sock.close()
        for fd in (self._wakeup_read, self._wakeup_write, *self._servers.descriptors()):
            os.close(fd)
        if self._node is not None:
            os.close(self._node.lock_fd)

    def _be_worker(self, main: WorkerMain, parent: int, number: int, env: Environment) -> NoReturn:
        code = 1
        try:
            self._be_child(parent)
            set_process_name("hpcray-worker")
            for name, text in env:  # not `update`: it asks every class of mappings whether a list is one of them
                os.environ[name] = text
            apply_device_visibility(os.environ)
            bind_worker(assigned_gpus(), os.environ)
            _seed_generators()
            main(self._session_dir, number, self._arena_fd)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException as error:
            if self._failures.note(number, error):
                traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while True:
            try:
                dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if dead is None:
                return
            number = self._children.pop(dead.si_pid, None)
            if number is None:
                number = self._servers.adopted(dead.si_pid)
            if number is not None:
                # Its children go with it. Before the wait below the pid, and so the group's id, cannot be reused.
                with contextlib.suppress(OSError):
                    os.killpg(dead.si_pid, signal.SIGKILL)
            _, status = os.waitpid(dead.si_pid, 0)
            if number is not None:
                self._pids.pop(number, None)
                self._report("exited", number, status, self._failures.take(number) if status else "")

    def _report(self, *report: object) -> None:
        with contextlib.suppress(OSError):  # the loop notices a raylet that is gone
            self._sock.send(_encode(report))


class _NodeCleaning:
    """What the fork server of a node does at the end: it kills what is left, and removes the session directory.

    Attributes:
        lock_fd: the session's lock, held until then.
        driver: the process that runs the program. raylet_gone: the raylet has ended without a request to stop.
    """

    def __init__(self, session_dir: str, lock_fd: int) -> None:
        self._session_dir = session_dir
        self.lock_fd = lock_fd
        self.driver: ProcessIdentity | None = None
        self.raylet_gone = False
        self._raylet = os.getppid()
        self._launcher_directory = LauncherDirectory.find(os.environ)

    def clean_up(self, workers: Sequence[int]) -> None:
        """Kill every descendant and the driver, remove the session directory. workers: pids, not reaped yet."""
        for pid in workers:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._await_reparenting()
        driver_deadline = time.monotonic() + _DRIVER_GRACE
        deadline = time.monotonic() + _CLEANUP_TIMEOUT
        self._signal_driver(signal.SIGTERM)
        me = os.getpid()
        while time.monotonic() < deadline:
            alive = kill_descendants(me)
            if self._reap_quietly() and not alive:
                break
            time.sleep(0.002)
        while self.driver is not None and self.driver.orphaned and time.monotonic() < driver_deadline:
            time.sleep(0.01)
        self._signal_driver(signal.SIGKILL)
        remove_session_directory(self._session_dir)
        if self._launcher_directory is not None:
            self._launcher_directory.remove_if_abandoned()
        remove_abandoned()  # of MPI's memory in a raylet that MPI itself has ended

    def _await_reparenting(self) -> None:
        """Wait until the driver of a dead raylet has another parent: the kernel closes the descriptors first."""
        if self.raylet_gone and self.driver is not None:
            deadline = time.monotonic() + _REPARENTING_TIMEOUT
            while os.getppid() == self._raylet and time.monotonic() < deadline:
                time.sleep(0.001)

    def _reap_quietly(self) -> bool:
        """Reap dead children; True when no child is left."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    def _signal_driver(self, number: signal.Signals) -> None:
        """Signal the driver if it is an orphan; a driver with a live parent is left to that parent."""
        if self.driver is not None and self.driver.orphaned:
            with contextlib.suppress(OSError):
                os.kill(self.driver.pid, number)


class StartFailures:
    """Why workers failed before they could report it themselves: memory that the server shares with all of them.

    Workers that fail at one moment may write to one slot; then the reason of one of them is lost.
    """

    def __init__(self) -> None:
        size = _REASON_SLOTS * _REASON_BYTES
        fd = os.memfd_create("hpcray-reasons", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            # Not `mmap.mmap`: it keeps a descriptor, which each worker would have too.
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            place = libc.mmap(None, ctypes.c_size_t(size), _READ_WRITE, mmap.MAP_SHARED, fd, ctypes.c_long(0))
            if place == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), "mmap")
        finally:
            os.close(fd)
        self._memory = memoryview((ctypes.c_char * size).from_address(place)).cast("B")
        self._told: set[str] = set()

    def note(self, number: int, error: BaseException) -> bool:
        """Note why this worker fails. Returns whether no other one has failed in this way before."""
        text = f"{type(error).__name__}: {error}"
        data = _encode([number, text[: _REASON_BYTES // 4 - 8]])
        start = number % _REASON_SLOTS * _REASON_BYTES
        self._memory[start : start + 2 + len(data)] = len(data).to_bytes(2, "little") + data
        return text not in self._told

    def take(self, number: int) -> str:
        """The reason that this worker has noted; "" if there is none."""
        start = number % _REASON_SLOTS * _REASON_BYTES
        slot = bytes(self._memory[start : start + _REASON_BYTES])
        size = int.from_bytes(slot[:2], "little")
        self._memory[start : start + 2] = b"\0\0"
        try:
            who, text = _decode(slot[2 : 2 + size]) if size else (0, "")
        except (msgspec.MsgspecError, ValueError):
            return ""  # two have written at once
        if who != number:
            return ""
        self._told.add(text)
        return str(text)


def _seed_generators() -> None:
    """Give the global generators of this forked worker seeds of its own, or all workers would draw the same numbers."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def _freeze_heap() -> None:
    """Exempt all objects from garbage collection, so that collectors of forked workers do not touch shared pages."""
    gc.collect()
    gc.freeze()


class ForkServerClient:
    """The raylet's end. Requests never block: what the server cannot take at once is queued and sent by `flush`.

    Attributes:
        pid: process id of the server.
        gone: whether the server has ended; set by `reports`.
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
        """Request a worker. The answer is a report: "forked" or "failed".

        Args:
            number: the worker's number on this node.
            env: variables of the worker beside the server's own.
        """
        data = _encode(["fork", number, env])
        if len(data) > PACKET_SIZE // 2:
            size = len(data)
            reason = f"environment of {size} bytes is too large; hint: at most {PACKET_SIZE // 2}"
            self._failed.append(["failed", number, reason])
        else:
            self._send(data)

    def load(self) -> None:
        """Have the server import what workers need; before the first `prepare` or `fork`."""
        self._send(_encode(["load"]))

    def prepare(
        self, copies: Sequence[Sequence[str]], modules: Sequence[str], env: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Import from `copies` (see `PathRelocation`) from now on, and import `modules`, for workers forked later.

        Each module is reported as "preloaded", with the traceback where it cannot be imported.

        Args:
            copies: before the first fork only.
            modules: names, in the order of their import.
            env: variables that are set meanwhile.
        """
        if copies or modules:
            self._send(_encode(["prepare", copies, list(modules), env]))

    def kill(self, number: int) -> None:
        """SIGKILL worker `number`, if that worker still runs."""
        self._send(_encode(["kill", number]))

    def watch_driver(self, pid: int) -> None:
        """Have the server end this process when it cleans up, should the parent of that process be gone by then."""
        driver = ProcessIdentity.of(pid)
        if driver is not None:  # identified here: when the server reads the request, the parent may be gone already
            self._send(_encode(["driver", driver.pid, driver.started, driver.parent]))

    def lock_session(self) -> None:
        """Have the server hold the lock of the session directory too, which was made again."""
        self._send(_encode(["lock"]))

    def stop(self) -> None:
        """Request that the server kills all workers, removes the session directory and ends (see `gone`)."""
        self._send(_encode(["stop"]))

    def reports(self) -> list[list[Any]]:
        """The reports that have arrived since the last call."""
        found, self._failed = self._failed, []
        try:
            while data := self._sock.recv(PACKET_SIZE):
                found.append(_decode(data))
            self.gone = True
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True
        return found

    def flush(self) -> bool:
        """Send queued requests; False while some are left (the socket becomes writable later)."""
        while self._waiting:
            try:
                self._sock.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError:
                self._waiting.clear()  # the server is gone; `reports` notices
                return True
            self._waiting.popleft()
        return True

    def reap(self) -> int:
        """Wait for the end of the server. Returns its wait status."""
        try:
            self._status = os.waitpid(self.pid, 0)[1]
        except ChildProcessError:
            pass  # reaped before
        self._reaped = True
        return self._status

    def kill_server(self) -> None:
        """SIGKILL the server itself, if it did not end on request."""
        if not self._reaped:
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the socket. The server takes that for the death of this process and cleans up."""
        self._sock.close()

    def _send(self, data: bytes) -> None:
        self._waiting.append(data)
        self.flush()


def start_fork_server(
    load: Callable[[], WorkerCode], session_dir: str, arena_fd: int, lock_fd: int
) -> ForkServerClient:
    """Fork the fork server. Call it before MPI, UCX or any thread exists.

    Args:
        load: runs in the server: imports what workers need, returns the main function of a worker.
        session_dir: the node's session directory, which the server removes at the end.
        arena_fd: the arena; workers inherit it under the same number.
        lock_fd: the session's lock, kept so that the session counts as alive until the server has cleaned up.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        run_fork_server(theirs, load, session_dir, arena_fd, lock_fd)
    theirs.close()
    return ForkServerClient(pid, ours)


# ------------------------------------------------------------ environment servers
# Fork servers of single environments, below the fork server of the node.
#
# A worker whose variables come too late for a forked process, or that needs another Python, starts as a fresh
# interpreter, which takes it most of a second, and longer with what the job preloads. The first worker of such an
# environment does so by itself. From the second on they are forked by a server of the environment: a fresh
# interpreter with these variables that imports once what they need. It is the child of the node's fork server, gets
# its requests and sends its reports through that, and ends with it, or when it has had no worker for a while.
#
# An environment that cannot have a server (its Python does not start, its imports crash) goes on with fresh
# interpreters.

Environment = tuple[tuple[str, str], ...]
PACKET_SIZE = 1 << 18
"""Largest packet between the raylet and a server, or between two servers, bytes."""
IDLE_TIME = 60.0
"""Seconds without a worker after which the server of an environment ends."""
_MOST_REMEMBERED = 10_000
"""Environments that have had a worker."""


class _Server:
    """One server.

    Attributes:
        ready: it forks. waiting: requests until then.
        running: its workers that were requested and have not ended: number, and pid or 0.
        idle_since: when the last worker ended.
    """

    def __init__(self, env: Environment, pid: int, sock: socket.socket) -> None:
        self.env = env
        self.pid = pid
        self.sock = sock
        self.ready = False
        self.waiting: list[list[Any]] = []
        self.running: dict[int, int] = {}
        self.idle_since = 0.0


class EnvironmentServers:
    """The servers of a node's environments, as the node's fork server sees them.

    Args:
        start: forks a server: given the environment, it returns the pid and the packet socket to it.
        fork: forks a worker without a server. report: sends a report to the raylet.

    Attributes:
        preloads: what every server imports before its first worker: modules, and variables that are set meanwhile.
    """

    def __init__(
        self,
        start: Callable[[Environment], tuple[int, socket.socket]],
        fork: Callable[[int, Environment], None],
        report: Callable[..., None],
    ) -> None:
        self._start = start
        self._fork = fork
        self._report = report
        self._servers: dict[Environment, _Server] = {}
        self._by_fd: dict[int, _Server] = {}
        self._by_number: dict[int, _Server] = {}
        self._pids: dict[int, int] = {}
        self._known: dict[int, bool] = {}
        self.preloads: list[tuple[list[str], list[tuple[str, str]]]] = []

    def descriptors(self) -> list[int]:
        """The sockets of the servers, to be polled."""
        return list(self._by_fd)

    def take(self, number: int, env: Environment) -> bool:
        """Have a worker forked by the server of its environment. False if the environment has none, and gets none now:
        this is its first worker, or it cannot have a server."""
        server = self._servers.get(env)
        if server is None:
            key = hash(env)
            known = self._known.get(key)
            if not known:
                if known is None and len(self._known) < _MOST_REMEMBERED:
                    self._known[key] = True
                return False
            try:
                pid, sock = self._start(env)
            except OSError:
                return False
            server = self._servers[env] = self._by_fd[sock.fileno()] = _Server(env, pid, sock)
        server.running[number] = 0
        self._by_number[number] = server
        self._request(server, ["fork", number, ()])
        return True

    def kill(self, number: int) -> bool:
        """Kill a worker; False if no server has it."""
        server = self._by_number.get(number)
        if server is not None:
            self._request(server, ["kill", number])
        return server is not None

    def preload(self, modules: list[str], env: list[tuple[str, str]]) -> None:
        """Have all servers, also the later ones, import modules."""
        self.preloads.append((modules, env))
        for server in self._servers.values():
            if server.ready:
                self._request(server, ["prepare", [], modules, env])

    def read(self, fd: int) -> None:
        """Handle one report of the server with this socket, or its end."""
        server = self._by_fd.get(fd)
        if server is None:
            return
        try:
            data = server.sock.recv(PACKET_SIZE)
        except OSError:
            data = b""
        if not data:
            self._give_up(server)
            return
        what, *args = _decode(data)
        if what == "ready":
            self._begin(server)
        elif what == "broken":
            self._give_up(server)
        elif what == "forked":
            number, pid = args
            server.running[number] = pid
            self._pids[pid] = number
            self._report(what, number, pid)
        elif what in ("exited", "failed"):
            self._forget(server, args[0])
            self._report(what, *args)

    def adopted(self, pid: int) -> int | None:
        """A child of this process is dead. Returns the number of the worker that it was, if its server has died."""
        server = next((one for one in self._servers.values() if one.pid == pid), None)
        if server is not None:
            server.pid = 0  # once it is reaped, another process may have the pid
        number = self._pids.pop(pid, None)
        if number is not None:
            self._forget(self._by_number.get(number), number)
        return number

    def end_idle(self) -> float | None:
        """End the servers that have had no worker for a while. Returns the seconds until the next one; None: never."""
        now = time.monotonic()
        idle = [server for server in self._servers.values() if server.ready and not server.running]
        for server in idle:
            if now - server.idle_since >= IDLE_TIME:
                self._remove(server)  # it ends as its socket closes
        left = [server.idle_since + IDLE_TIME - now for server in idle if server.env in self._servers]
        return min(left) if left else None

    def _begin(self, server: _Server) -> None:
        server.ready = True
        requests, server.waiting = server.waiting, []
        for modules, env in self.preloads:
            self._request(server, ["prepare", [], modules, env])
        for request in requests:
            self._request(server, request)

    def _request(self, server: _Server, request: list[Any]) -> None:
        if not server.ready:
            server.waiting.append(request)
            return
        try:
            server.sock.send(_encode(request))
        except OSError:
            pass  # it is gone; `read` finds out, and knows who waits

    def _forget(self, server: _Server | None, number: int) -> None:
        self._by_number.pop(number, None)
        if server is not None:
            self._pids.pop(server.running.pop(number, 0), None)
            server.idle_since = time.monotonic()

    def _give_up(self, server: _Server) -> None:
        """A server cannot be had, or is gone, and its workers with it. Those that it had not forked are forked here."""
        self._known[hash(server.env)] = False
        if server.pid:
            os.kill(server.pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)  # from now on its workers are children of this process
        self._remove(server)
        killed = {number for what, number, *_ in server.waiting if what == "kill"}
        for number, pid in list(server.running.items()):
            if pid and _is_our_child(pid):
                self._by_number.pop(number)
                continue  # it is killed, and will be reaped
            self._forget(server, number)
            if pid:
                self._report("exited", number, signal.SIGKILL, "")
            elif number in killed:
                self._report("failed", number, "it was killed before it had been forked")
            else:
                self._fork(number, server.env)

    def _remove(self, server: _Server) -> None:
        del self._servers[server.env]
        del self._by_fd[server.sock.fileno()]
        server.sock.close()


def _is_our_child(pid: int) -> bool:
    """Return True if a process, dead or not, is waiting to be reaped by this one."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
