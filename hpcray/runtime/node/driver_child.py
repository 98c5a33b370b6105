"""The user's program as a child of the raylet that started it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.process_tree import handles_signal
from hpcray.platform.python_lines import module_line
from hpcray.platform.session_directory import ADDRESS
from hpcray.platform.status_line import TERMINAL_SIZE


class DriverChild:
    """A Python process that runs the user's program; stdin, stdout and stderr are this process's.

    Attributes:
        pid: its process id.
        code: its exit code as a shell would give it (128 + n for signal n); None while it runs.
    """

    def __init__(self, command: Sequence[str], session_dir: str, moved: PathRelocation) -> None:
        """Start it.

        Args:
            command: what follows the interpreter: `["script.py", "arg"]`, `["-m", "module"]`, `["-c", "code"]`.
            session_dir: where `hpcray.init()` in it attaches.
            moved: the directories of which it uses copies on this node.
        """
        environ = dict(os.environ)
        strip_launcher_variables(environ)
        environ[ADDRESS] = session_dir
        environ.pop(TERMINAL_SIZE, None)
        moved.set(environ)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        line = [moved.executable(), *command]
        if command[0] == "-m" and command[1].startswith("hpcray."):
            line = module_line(command[1], *command[2:], python=line[0])
        # -P is for this node (`module_line`): the program has the sys.path of `python program.py`.
        line[1:1] = [flag for flag in flags if flag != "-P"]
        # subprocess uses vfork and exec here: no Python code runs in a copy of this process, which has MPI open.
        self._child = subprocess.Popen(line, env=environ)
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

    def forward(self, number: int) -> None:
        """Send it a signal if it has a handler for it; the signal would end it otherwise."""
        if self.poll() is None and handles_signal(self.pid, number):
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send(signal.SIGKILL)

    def shares_terminal(self) -> bool:
        """Return whether a Ctrl-C typed at the terminal reaches it directly."""
        try:
            return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
        except OSError:
            return False
