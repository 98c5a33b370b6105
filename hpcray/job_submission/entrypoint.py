"""A shell command with all processes that it starts, of which none outlives the process that supervises it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping
from typing import IO

from hpcray.platform.process_tree import ProcessIdentity, descendants

_POLL = 0.05  # seconds between looks at processes that shall end
# It reads until the supervisor's end of the pipe is closed, whatever ended the supervisor.
_GUARD = 'read _; kill -9 "-$0"'
# The command begins when it is told to, which is when the guard watches: a supervisor killed between the two starts
# would leave it running.
_GATED = 'read _ || exit; exec /bin/sh -c "$0" </dev/null'


class Entrypoint:
    """A running command.

    Args:
        command: for the shell.
        log: the file for its output.
        environ: its environment.
        directory: where it runs; None for the current one.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: str, log: IO[bytes], environ: Mapping[str, str], directory: str | None) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # of this thread; the child inherits it
        # A group of its own: a script may end its group (`kill 0`), which must not be ours.
        self._child = subprocess.Popen(
            ["/bin/sh", "-c", _GATED, command], start_new_session=True, env=environ, cwd=directory,
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, str(self._child.pid)], start_new_session=True,
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            self._kill_group()
            raise
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._child.stdin as gate:  # killed already: wait() says so
            gate.write(b"\n")

    def wait(self) -> int:
        """Wait for the end of the command, and end what it has left behind. Returns the exit code, or minus a signal's
        number."""
        # Until it is reaped nobody else gets its pid, which is the number of the group.
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        code = self._child.wait()
        self._guard.kill()
        self._guard.wait()
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        return code

    def stop(self, number: int, patience: float) -> bool:
        """Signal all processes of the command; SIGKILL those that still run after `patience` seconds.

        Returns:
            True if none had to be killed.
        """
        pids = [self._child.pid, *descendants(self._child.pid)]
        found = [one for one in map(ProcessIdentity.of, pids) if one is not None]
        _send(found, number)
        deadline = time.monotonic() + patience
        while (living := [one for one in found if one.alive]) and time.monotonic() < deadline:
            time.sleep(_POLL)
        _send(living, signal.SIGKILL)
        return not living

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


def _send(processes: Iterable[ProcessIdentity], number: int) -> None:
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)
