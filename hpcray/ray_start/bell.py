"""The bell of a head: a TCP port that accepts, reads nothing, says nothing and closes, for scripts that test it."""

from __future__ import annotations

import socket

_BACKLOG = 512
_LISTEN_ON = "0.0.0.0"
_PATIENCE = 1.0  # seconds
NOTHING, BELL, STRANGER = "nothing", "bell", "stranger"


class Bell:
    """The listener. `serve` answers those who wait.

    Args:
        port: where; 0: one that is free.

    Attributes:
        port: where it listens.

    Raises:
        OSError: the port is taken, or may not be opened.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((_LISTEN_ON, port))
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def fileno(self) -> int:
        """The descriptor, for `select.poll`."""
        return self._socket.fileno()

    def serve(self) -> None:
        """Close each connection that waits."""
        for _ in range(_BACKLOG):
            try:
                self._socket.accept()[0].close()
            except OSError:
                return

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def who_listens(host: str, port: int) -> str:
    """Return what listens at a port: nothing, a bell, or a stranger, which keeps the connection or says something."""
    try:
        with socket.create_connection((host, port), timeout=_PATIENCE) as line:
            return STRANGER if line.recv(1) else BELL
    except TimeoutError:
        return STRANGER if _connects(host, port) else NOTHING
    except OSError:
        return NOTHING


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_PATIENCE).close()
    except OSError:
        return False
    return True
