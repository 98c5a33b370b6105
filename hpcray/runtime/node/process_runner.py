"""Commands of the batch system, run by a raylet without keeping it waiting."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hpcray.runtime.raylet.event_loop import EventLoop

_CODE = "hpcray-exit "
_WITH_CODE = f'"$@" 2>&1; echo "{_CODE}$?"'
"""The raylet reaps all children, in whatever order: a code that is printed is not lost."""
_NOT_RUN = 127
TIMEOUT = 60.0
"""Seconds that a command may take: a controller that is restarted answers late."""
Then = Callable[[int, str], None]


class ProcessRunner:
    """Runs commands at the same time, and calls back in the raylet's thread."""

    def __init__(self, loop: EventLoop, environ: Mapping[str, str]) -> None:
        self._loop = loop
        self._environ = dict(environ)
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, command: Sequence[str], then: Then, text: str = "") -> None:
        """Run a command with this standard input; then call `then(exit code, output and errors)`."""
        try:
            process = subprocess.Popen(
                ["sh", "-c", _WITH_CODE, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            then(_NOT_RUN, str(error))
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.write(text.encode())  # less than a pipe holds
            process.stdin.close()
        fd, output = process.stdout.fileno(), bytearray()
        self._running[fd] = process
        self._loop.watch(fd, lambda event: self._read(fd, output, then))
        self._loop.call_at(self._loop.now + TIMEOUT, lambda: self._check(fd, process))

    def close(self) -> None:
        """Forget what still runs; it ends by itself."""
        for fd in list(self._running):
            self._end(fd)

    def _read(self, fd: int, output: bytearray, then: Then) -> None:
        if data := os.read(fd, 1 << 16):
            output += data
            return
        self._end(fd)
        text, mark, code = output.decode(errors="replace").rpartition(_CODE)
        if mark and code.strip().isdecimal():
            then(int(code), text)
        else:
            then(_NOT_RUN, f"no answer within {TIMEOUT:g} s: {code.strip()}")

    def _check(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        if self._running.get(fd) is process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self, fd: int) -> None:
        self._loop.unwatch(fd)
        process = self._running.pop(fd)
        assert process.stdout is not None
        process.stdout.close()
        process.poll()
