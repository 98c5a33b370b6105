"""The process of `hpcray dashboard`: it listens, says where, and ends with the job or with Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from hpcray.dashboard.access import DashboardAccess
from hpcray.dashboard.app import DashboardApp
from hpcray.dashboard.job_pages import EndedJobPages, JobPages
from hpcray.launch.tcp_peers import refuse_strangers, sum_up_refusals
from hpcray.platform.sockets import bind_private, connect_private

DASHBOARD_SOCKET = "dashboard.s"
LOOPBACK = "127.0.0.1"
LOCAL_PORT = 8265
"""The port on the user's own machine in the line for ssh: that of Ray's dashboard."""
_LOOK = 0.3
"""Seconds between two looks whether the job runs."""
_LAST_WORDS = 4.0
"""Seconds for which browsers can learn that the job has ended."""
_KEEP_ALIVE = 60
logger = logging.getLogger("hpcray.dashboard")


def listen_on_socket(session_dir: str) -> tuple[socket.socket, str]:
    """Listen on the Unix socket of a node's dashboard. Returns it and its path.

    Raises:
        FileExistsError: a dashboard listens there.
    """
    path = os.path.join(session_dir, DASHBOARD_SOCKET)
    try:
        connect_private(path, timeout=5.0).close()
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # left by one that was killed
    else:
        raise FileExistsError(f"a dashboard of this job runs on this node; it listens at {path}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bind_private(sock, path)
    sock.listen()
    return sock, path


def listen_on_port(port: int) -> socket.socket:
    """Listen on a port of the loopback interface; 0: one that is free.

    Raises:
        OSError: another process has it.
    """
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((LOOPBACK, port))
        sock.listen()  # before anybody is told of it
    except OSError:
        sock.close()
        raise
    return sock


class DashboardServer:
    """Serves the dashboard of one job at a socket.

    Args:
        pages: of a job that runs, or of one that has ended.
        session_dir: of the node of a job that runs; "": of one that has ended.
        sock: a Unix socket, or one of the loopback interface; it is closed at the end.
        announce: called with the token of the next browser.
        allow_actions: see `DashboardApp`.
    """

    def __init__(
        self,
        pages: JobPages | EndedJobPages,
        session_dir: str,
        sock: socket.socket,
        announce: Callable[[str], object],
        allow_actions: bool,
    ) -> None:
        self._pages = pages
        self._sock = sock
        self._access = DashboardAccess(announce)
        self._app = DashboardApp(pages, self._access, session_dir, allow_actions)

    def run(self) -> str:
        """Serve until a job that runs ends, or SIGINT or SIGTERM comes.

        Returns:
            Why the job has ended; "" where it has not, or was not running at the start.
        """
        config = uvicorn.Config(
            self._app, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=1, server_header=False, http="h11", ws="none",
        )  # fmt: skip
        config.load()
        config.http_protocol_class = refuse_strangers(config.http_protocol_class, lambda: False, logger)
        return asyncio.run(self._serve(uvicorn.Server(config)))

    async def _serve(self, server: Any) -> str:
        loop = asyncio.get_running_loop()
        sum_up_refusals(logger)
        server.install_signal_handlers = lambda: None
        server.capture_signals = contextlib.nullcontext
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop.set)
        serving = asyncio.create_task(server.serve(sockets=[self._sock]))
        self._access.open()
        try:
            while not stop.is_set() and not serving.done() and not self._pages.ended:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), _LOOK)
            ended = self._pages.ended
            if ended and not stop.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(stop.wait(), _LAST_WORDS)
        finally:
            server.should_exit = True
            self._app.cache.close()
            await serving
        return ended
