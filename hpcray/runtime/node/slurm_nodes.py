"""The nodes of this job that Slurm is to give to no other job (`scontrol update nodename=… state=drain`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from time import monotonic

from hpcray.runtime.raylet.event_loop import EventLoop

PERIOD = 30.0
"""Seconds between two questions: all jobs share the controller."""
_LEAVING = ("drain", "drng", "fail")
"""Beginnings of the states of such nodes."""


class NodeQuery:
    """Asks sinfo, when it is wanted, without keeping the raylet waiting.

    Args:
        loop: of the raylet.
        environ: with the job's nodes in SLURM_JOB_NODELIST; outside of Slurm nothing is asked.
    """

    def __init__(self, loop: EventLoop, environ: Mapping[str, str]) -> None:
        self._loop = loop
        self._nodes = environ.get("SLURM_JOB_NODELIST", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._output = bytearray()
        self._next = 0.0

    def query(self, then: Callable[[set[str]], None]) -> None:
        """Call `then` with the hosts that are to leave, in a while; not where the last answer is younger than PERIOD,
        and not where Slurm does not answer."""
        now = monotonic()
        if not self._nodes or self._process is not None or now < self._next:
            return
        self._next = now + PERIOD
        command = ["sinfo", "--noheader", "--Node", f"--nodes={self._nodes}", "--format=%N|%n|%T"]
        try:
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError:
            self._nodes = ""  # there is no sinfo in this container
            return
        assert process.stdout is not None
        self._output.clear()
        self._loop.watch(process.stdout.fileno(), lambda event: self._read(process, then))

    def close(self) -> None:
        """End the question that is under way."""
        if self._process is not None:
            self._process.kill()
            self._end(self._process)

    def _read(self, process: subprocess.Popen[bytes], then: Callable[[set[str]], None]) -> None:
        assert process.stdout is not None
        if data := os.read(process.stdout.fileno(), 1 << 16):
            self._output += data
        elif self._end(process) == 0:
            then(leaving_hosts(self._output.decode(errors="replace")))

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        assert process.stdout is not None
        self._loop.unwatch(process.stdout.fileno())
        process.stdout.close()
        self._process = None
        return process.wait()


def leaving_hosts(text: str) -> set[str]:
    """Return the short names, as Slurm and as they themselves call them, of the hosts that are to leave.

    Args:
        text: lines of `name|host name|state`.
    """
    rows = [line.strip().split("|") for line in text.splitlines()]
    leaving = [row for row in rows if len(row) == 3 and row[2].startswith(_LEAVING)]
    return {name.partition(".")[0] for row in leaving for name in row[:2]}
