"""A command in a terminal of its own: a pty, with what it shows as text."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

import pyte

PATIENCE = 60.0


class Terminal:
    """Runs a command in a pty.

    Args:
        command: with its arguments. environ: its variables. width, height: of the terminal, in characters.

    Attributes:
        printed: all that the command has written, escape sequences included.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str] | None = None, width: int = 80, height: int = 24
    ) -> None:
        self._screen = pyte.Screen(width, height)
        self._stream = pyte.ByteStream(self._screen)
        self.pid, self._fd = pty.fork()
        if not self.pid:
            try:
                variables = {**(os.environ if environ is None else environ), "TERM": "xterm-256color"}
                for name in ("COLUMNS", "LINES", "NO_COLOR"):
                    variables.pop(name, None)
                os.execvpe(command[0], list(command), variables)
            finally:
                os._exit(127)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.code: int | None = None
        self.printed = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    def read(self, seconds: float = 0.05) -> bool:
        """Take in what comes within this time. False when the command has closed its terminal."""
        if not select.select([self._fd], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:  # Linux's word for a pty without a process
            return False
        self.printed += data.decode(errors="replace")
        self._stream.feed(data)
        return bool(data)

    def shows(self, *parts: str, timeout: float = PATIENCE) -> str:
        """Wait until all of these texts are on the screen."""
        deadline = time.monotonic() + timeout
        while not all(part in self.text for part in parts):
            assert time.monotonic() < deadline and self.read(), f"{parts} not shown:\n{self.text}"
        return self.text

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self._fd, keys.encode())

    def ends(self, timeout: float = PATIENCE) -> int:
        """Wait for the command's end. Returns its exit code."""
        deadline = time.monotonic() + timeout
        while self.read():
            assert time.monotonic() < deadline, f"it has not ended:\n{self.text}"
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    @property
    def left_alternate_screen(self) -> bool:
        """True if the last word on the alternate screen was to leave it."""
        return self.printed.rfind("\x1b[?1049l") > self.printed.rfind("\x1b[?1049h")
