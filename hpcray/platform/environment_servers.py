"""Fork servers of single environments, below the fork server of the node.

A worker whose variables come too late for a forked process, or that needs another Python, starts as a fresh
interpreter, which takes it most of a second, and longer with what the job preloads. The first worker of such an
environment does so by itself. From the second on they are forked by a server of the environment: a fresh interpreter
with these variables that imports once what they need. It is the child of the node's fork server, gets its requests and
sends its reports through that, and ends with it, or when it has had no worker for a while.

An environment that cannot have a server (its Python does not start, its imports crash) goes on with fresh interpreters.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

Environment = tuple[tuple[str, str], ...]
PACKET_SIZE = 1 << 18
"""Largest packet between the raylet and a server, or between two servers, bytes."""
IDLE_TIME = 60.0
"""Seconds without a worker after which the server of an environment ends."""
_MOST_REMEMBERED = 10_000
"""Environments that have had a worker."""

_decode = msgspec.msgpack.Decoder(list[Any]).decode
_encode = msgspec.msgpack.Encoder().encode


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
