"""The process that exports a node's metrics, where the job is started with `metrics_export`."""

from __future__ import annotations

import os
import subprocess
import sys

from hpcray.platform.launcher_environment import strip_launcher_variables

SOCKET_ONLY = "socket"
_STOP_TIMEOUT = 2.0  # seconds


class MetricsProcess:
    """`hpcray metrics --serve` as a child of this raylet.

    Args:
        wanted: the setting `metrics_export`.
        session_dir: of the node.
    """

    def __init__(self, wanted: str, session_dir: str) -> None:
        command = [sys.executable, "-m", "hpcray.cli", "metrics", "--job", session_dir, "--serve"]
        command += ["--textfile", wanted] if wanted != SOCKET_ONLY else []
        environ = dict(os.environ)
        strip_launcher_variables(environ)
        # subprocess uses vfork and exec here: no Python code runs in a copy of this process, which has MPI open.
        self._child = subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        """End it; it removes its file."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._child.kill()
