"""Commands that look at the job as children of a raylet: what exports its metrics, and what shows its progress."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from hpcray.platform.launcher_environment import strip_launcher_variables
from hpcray.platform.python_lines import module_line

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
