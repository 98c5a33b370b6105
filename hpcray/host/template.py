"""The template process: forks the node's workers, and cleans up after a raylet that died.

It is forked from the raylet before MPI, UCX or any thread exists (never fork after MPI_Init), imports once what every
worker needs, and then forks a ready worker in about 2 ms. It leads its own session, so that no terminal signal
reaches workers, and adopts orphans, so that grandchildren of workers cannot escape it.

Requests (raylet → template) and reports (template → raylet) are msgpack arrays, one per packet:

    ["prepare", copies, modules]  ["fork", number, env]  ["kill", number]  ["driver", pid, started, parent]  ["stop"]
    ["ready"]  ["broken", text]  ["forked", number, pid]  ["failed", number, reason]  ["exited", number, wait status]
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from hpcray.host.accelerators import assigned_gpus, confine, remember
from hpcray.host.binding import bind_worker
from hpcray.host.launcher import LauncherDirectory, strip_launcher
from hpcray.host.relocation import Relocation
from hpcray.host.session import remove_directory

WorkerMain = Callable[[str, int, int], NoReturn]
PACKET = 1 << 18
_DRIVER_GRACE = 2.0
_REPARENTING = 1.0
_CLEANUP_LIMIT = 10.0
_IGNORED_HERE = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""By the template. Workers take them as any program does."""

_decode_request = msgspec.msgpack.Decoder(list[Any]).decode
_encode = msgspec.msgpack.Encoder().encode


def serve(
    sock: socket.socket, load: Callable[[], WorkerMain], session_dir: str, arena_fd: int, lock_fd: int
) -> NoReturn:
    """Be the template process; called in the forked child, never returns.

    Args:
        sock: this side of the packet socket to the raylet.
        load: imports what workers need and returns the function that is a worker's life.
        session_dir: removed at the end.
        arena_fd: inherited by workers.
        lock_fd: the session's lock, held to the end.
    """
    code = 1
    try:
        _Template(sock, session_dir, arena_fd, lock_fd).run(load)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Template:
    def __init__(self, sock: socket.socket, session_dir: str, arena_fd: int, lock_fd: int) -> None:
        # Imported here: the raylet, which imports this module, has no use for ctypes at start.
        from hpcray.host import processes

        self._processes = processes
        processes.close_other_fds({arena_fd, lock_fd, sock.fileno()})
        self._sock = sock
        self._session_dir = session_dir
        self._children: dict[int, int] = {}
        self._pids: dict[int, int] = {}
        self._driver: processes.Family | None = None
        self._arena_fd = arena_fd
        self._lock_fd = lock_fd
        self._main: WorkerMain | None = None
        self._raylet = os.getppid()
        self._raylet_gone = False
        os.setsid()
        processes.adopt_orphans()
        processes.set_process_name("hpcray-template")
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for ignored in (signal.SIGINT, signal.SIGTERM, *_IGNORED_HERE):
            signal.signal(ignored, signal.SIG_IGN)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._launcher_directory = LauncherDirectory.find(os.environ)
        strip_launcher(os.environ)
        remember(os.environ)

    def run(self, load: Callable[[], WorkerMain]) -> None:
        """Serve until the raylet says stop or is gone, then clean up."""
        try:
            self._main = load()
            _keep_what_is()
            self._tell("ready")
        except Exception:
            self._tell("broken", traceback.format_exc())
        poll = select.poll()
        for fd in (self._sock.fileno(), self._wakeup_read):
            poll.register(fd, select.POLLIN)
        serving = True
        while serving:
            ready = {fd for fd, _ in poll.poll()}
            if self._wakeup_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_read, 4096)
                self._reap()
            if self._sock.fileno() in ready:
                serving = self._request()
        self._clean_up()

    def _request(self) -> bool:
        """Carry out one request; False to stop. The end of the stream is the end of the raylet."""
        try:
            data = self._sock.recv(PACKET)
        except OSError:
            data = b""
        if not data:
            self._raylet_gone = True
            return False
        what, *args = _decode_request(data)
        if what == "fork":
            self._fork(*args)
        elif what == "kill":
            pid = self._pids.get(args[0])
            if pid is not None:  # not reaped yet, so the pid is still this worker's
                os.kill(pid, signal.SIGKILL)
        elif what == "prepare":
            self._prepare(*args)
        elif what == "driver":
            self._driver = self._processes.Family(*args)
        return bool(what != "stop")

    def _prepare(self, copies: list[list[str]], modules: list[str]) -> None:
        Relocation(copies).apply()
        try:
            for name in modules:
                importlib.import_module(name)
        except Exception:
            self._main = None
            self._tell("broken", traceback.format_exc())
        _keep_what_is()

    def _fork(self, number: int, env: list[tuple[str, str]]) -> None:
        if self._main is None:
            self._tell("failed", number, "the template process could not import hpcray's worker")
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell("failed", number, f"fork: {error}; hint: ulimit -u, or the cgroup's pids.max")
            return
        if pid == 0:
            self._be_worker(self._main, parent, number, env)
        self._children[pid] = number
        self._pids[number] = pid
        self._tell("forked", number, pid)

    def _be_worker(self, main: WorkerMain, parent: int, number: int, env: list[tuple[str, str]]) -> NoReturn:
        code = 1
        try:
            self._processes.die_with_parent(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for restored in (signal.SIGTERM, signal.SIGCHLD, *_IGNORED_HERE):
                signal.signal(restored, signal.SIG_DFL)
            self._sock.close()
            for fd in (self._wakeup_read, self._wakeup_write, self._lock_fd):
                os.close(fd)
            self._processes.set_process_name("hpcray-worker")
            for name, text in env:  # not `update`: it asks every class of mappings whether a list is one of them
                os.environ[name] = text
            confine(os.environ)
            bind_worker(assigned_gpus(), os.environ)
            if "numpy.random" in sys.modules:
                sys.modules["numpy.random"].seed()  # or all workers would draw the same numbers
            main(self._session_dir, number, self._arena_fd)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
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
            if number is not None:
                # Its children go with it. Before the wait below the pid, and so the group's id, cannot be reused.
                with contextlib.suppress(OSError):
                    os.killpg(dead.si_pid, signal.SIGKILL)
            _, status = os.waitpid(dead.si_pid, 0)
            if number is not None:
                self._pids.pop(number, None)
                self._tell("exited", number, status)

    def _tell(self, *report: object) -> None:
        with contextlib.suppress(OSError):  # a raylet that is gone is noticed by the loop
            self._sock.send(_encode(report))

    def _clean_up(self) -> None:
        """Kill every descendant and the driver, remove the session directory."""
        for pid in self._children:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._await_reparenting()
        driver_deadline = time.monotonic() + _DRIVER_GRACE
        deadline = time.monotonic() + _CLEANUP_LIMIT
        self._signal_driver(signal.SIGTERM)
        me = os.getpid()
        while time.monotonic() < deadline:
            alive = self._processes.kill_descendants(me)
            if self._reap_quietly() and not alive:
                break
            time.sleep(0.002)
        while self._driver is not None and self._driver.orphaned and time.monotonic() < driver_deadline:
            time.sleep(0.01)
        self._signal_driver(signal.SIGKILL)
        remove_directory(self._session_dir)
        if self._launcher_directory is not None:
            self._launcher_directory.remove_if_abandoned()

    def _await_reparenting(self) -> None:
        """A dying raylet's descriptors are closed before its children, the driver among them, get another parent."""
        if self._raylet_gone and self._driver is not None:
            deadline = time.monotonic() + _REPARENTING
            while os.getppid() == self._raylet and time.monotonic() < deadline:
                time.sleep(0.001)

    def _reap_quietly(self) -> bool:
        """Reap what is dead; True when no child is left."""
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return True
        return False

    def _signal_driver(self, number: signal.Signals) -> None:
        """Only an orphan: a driver whose parent lives is that parent's business."""
        if self._driver is not None and self._driver.orphaned:
            with contextlib.suppress(OSError):
                os.kill(self._driver.pid, number)


def _keep_what_is() -> None:
    """The children's collectors then never touch the pages they share with this process."""
    gc.collect()
    gc.freeze()
