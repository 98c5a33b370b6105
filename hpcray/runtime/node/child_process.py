"""Commands that look at the job as children of a raylet: what exports its metrics, and what shows its progress."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

from hpcray.platform.console import TERMINAL_SIZE
from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.path_relocation import PathRelocation
from hpcray.platform.process_control import module_line
from hpcray.platform.process_tree import handles_signal
from hpcray.platform.session_directory import ADDRESS

SOCKET_ONLY = "socket"
_STOP_TIMEOUT = 2.0  # seconds


class ChildProcess:
    """A command of `hpcray` that looks at the job of this raylet; it ends before the raylet does.

    Args:
        words: the command with its options.
        session_dir: of the node.
        silent: its standard output goes nowhere.

    Attributes:
        pid: its process id.
    """

    def __init__(self, words: Sequence[str], session_dir: str, silent: bool) -> None:
        command = module_line("hpcray.cli", *words, "--job", session_dir)
        environ = dict(os.environ)
        strip_launcher_variables(environ)
        # subprocess uses vfork and exec here: no Python code runs in a copy of this process, which has MPI open. In a
        # session of its own: a Ctrl-C at the terminal is for the program.
        self._child = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if silent else None,
            start_new_session=True,
        )
        self.pid = self._child.pid

    @property
    def ended(self) -> bool:
        """Return True once it has ended."""
        return self._child.poll() is not None

    def terminate(self) -> None:
        """Have it end; it removes its file, or shows its last line."""
        self._child.terminate()

    def stop(self) -> None:
        """End it, and wait until it has."""
        self.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._child.kill()


def export_metrics(wanted: str, session_dir: str) -> ChildProcess:
    """Start the export of this node's metrics.

    Args:
        wanted: the setting `metrics_export`.
        session_dir: of the node.
    """
    textfile = ["--textfile", wanted] if wanted != SOCKET_ONLY else []
    return ChildProcess(["metrics", "--serve", *textfile], session_dir, True)


def show_progress(session_dir: str) -> ChildProcess:
    """Start to show on standard error how far the tasks of the job are."""
    return ChildProcess(["progress"], session_dir, False)


# ------------------------------------------------------------ driver child
# The user's program as a child of the raylet that started it.


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
