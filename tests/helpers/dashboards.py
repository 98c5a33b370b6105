"""`hpcray dashboard` as a user runs it, and requests to it."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import sys
import threading
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

from helpers.jobs import Ended, Job

_TUNNEL = re.compile(r"ssh -N -L (\d+):(\S+) (\S+)")
_LINK = re.compile(r"http://localhost:(\d+)/#token=(\S+)")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


class Dashboard:
    """A dashboard of the job at `address`. A context manager; at its end the dashboard gets SIGINT.

    Attributes:
        place: where it listens: a path, or an address. links: the tokens that it has printed. key: of `enter`.
    """

    def __init__(self, address: str, *options: str) -> None:
        self.job = Job([sys.executable, "-m", "hpcray.cli", "dashboard", "--job", address, *options])
        self.links: list[str] = []
        self.printed: list[str] = []
        self.key = ""
        self.place = ""
        while not self.links:
            line = self.job.line()
            assert line or self.job.child.poll() is None, self.job.wait().err
            self._read(line)
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self.job.child.poll() is None:
                self.stop()
        finally:
            self.job.__exit__(kind, error, trace)

    def stop(self, number: signal.Signals = signal.SIGINT) -> Ended:
        """Send it a signal, and return how it has ended."""
        self.job.send(number)
        return self.ended()

    def ended(self, patience: float = 60) -> Ended:
        """Wait for its end."""
        code = self.job.child.wait(patience)
        self._reader.join(patience)
        assert self.job.child.stderr is not None
        return Ended(code, "\n".join(self.printed), self.job.child.stderr.read())

    def enter(self) -> str:
        """Come in as a browser does. Returns the key."""
        self.key = self.ask("enter", bearer=self.links[-1], method="POST")["key"]
        return self.key

    def ask(self, path: str, bearer: str = "", method: str = "GET", body: Any = None, **params: Any) -> Any:
        """The answer to a question; fails where it is not 200."""
        status, answer = self.request(f"/api/{path}", bearer or self.key, method, body, **params)
        assert status == 200, (path, status, answer)
        return json.loads(answer)

    def request(
        self, path: str, bearer: str = "", method: str = "GET", body: Any = None, host: str = "", **params: Any
    ) -> tuple[int, bytes]:
        """Send a request. Returns the status and the body of the answer."""
        connection = self.connection()
        try:
            headers = {"Authorization": f"Bearer {bearer}", **({"Host": host} if host else {})}
            data = json.dumps(body) if body is not None else None
            connection.request(method, f"{path}?{urlencode(params)}" if params else path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """A connection to it."""
        if self.place.startswith("/"):
            return _UnixConnection(self.place)
        host, _, port = self.place.rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=60)

    def _read(self, line: str) -> None:
        self.printed.append(line)
        if found := _TUNNEL.search(line):
            self.place = found[2]
        if found := _LINK.search(line):
            self.links.append(found[2])

    def _read_on(self) -> None:
        assert self.job.child.stdout is not None
        for line in self.job.child.stdout:
            self._read(line.rstrip("\n"))
