"""The driver as a child of a rank (0, or `--driver-rank`): the user's script under `python -m hpcray script.py`."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from types import FrameType

from hpcray.host.launcher import strip_launcher
from hpcray.host.processes import catches
from hpcray.host.relocation import Relocation

ADDRESS = "HPCRAY_ADDRESS"


class DriverChild:
    """A Python process that runs the user's program; stdin, stdout and stderr are this process's.

    Attributes:
        pid: its process id.
        code: its exit code as a shell would give it (128 + n for signal n); None while it runs.
    """

    def __init__(self, command: Sequence[str], session_dir: str, moved: Relocation) -> None:
        """Start it.

        Args:
            command: what follows the interpreter: `["script.py", "arg"]`, `["-m", "module"]`, `["-c", "code"]`.
            session_dir: where `hpcray.init()` in it attaches.
            moved: the directories that it finds copies of on this node.
        """
        environ = dict(os.environ)
        strip_launcher(environ)
        environ[ADDRESS] = session_dir
        moved.set(environ)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # subprocess uses vfork and exec here: nothing runs in a copy of this process, which has MPI open.
        self._child = subprocess.Popen([moved.executable(), *flags, *command], env=environ)
        self.pid = self._child.pid
        self.code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        status = self._child.poll()
        if status is not None and self.code is None:
            self.code = 128 - status if status < 0 else status
        return self.code

    def send(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def pass_on(self, number: int) -> None:
        """Send it a signal that it has a handler for; others, which would end it, are kept from it."""
        if self.poll() is None and catches(self.pid, number):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send(signal.SIGKILL)

    def shares_terminal(self) -> bool:
        """Whether a Ctrl-C typed at the terminal reaches it without our help."""
        try:
            return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False


def pass_to(pid: int, numbers: Iterable[int]) -> None:
    """Send these signals on to another process; once that is gone they do what they do by default."""

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in numbers:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handle)
