"""How a keeper sees the end of its allocation, which kills nothing where processes detach from their step.

While Slurm's own processes of the job run on this host, the job does; the kernel reports their end. Where there are
none, as between two steps, the batch system is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcray.platform.allocation import run_command

_FIRST_QUESTIONS = (0.5, 1.0, 2.0, 4.0)
_INTERVAL = 10.0
"""Seconds between questions to the batch system; soon after the last of Slurm's processes has ended more often."""
_TIMEOUT = 20.0
_QUERIES: dict[str, list[str]] = {
    "slurm": ["squeue", "--noheader", "--format=%T", "--jobs"],
    "pbs": ["qstat", "-f"],
    "flux": ["flux", "jobs", "--no-header", "--format={state}"],
    "lsf": ["bjobs", "-noheader", "-o", "stat"],
}
_ENDING = re.compile(
    r"^(COMPLETED|COMPLETING|CANCELLED|FAILED|TIMEOUT|NODE_FAIL|PREEMPTED|BOOT_FAIL|OUT_OF_MEMORY|DEADLINE|REVOKED"
    r"|CLEANUP|INACTIVE|DONE|EXIT|\s*job_state = [FE])\b",
    re.MULTILINE,
)


def allocation_is_over(code: int, text: str, error: str) -> bool:
    """Return True if a batch system's answer about a job says that it has ended. Without an answer it has not."""
    if code:
        return bool(re.search(r"invalid job id|unknown job|has finished|not found", error, re.IGNORECASE))
    return not text.strip() or bool(_ENDING.search(text))


class AllocationWatch:
    """Watches the allocation of a node.

    Args:
        allocation: as `allocation_of` names it.
        ask: runs a command, and returns its exit code, its output and its error output; None where it cannot be run.
    """

    def __init__(
        self, allocation: str, ask: Callable[[Sequence[str]], tuple[int, str, str] | None] | None = None
    ) -> None:
        self._kind, _, self._job = allocation.partition("-")
        self._ask = ask or _run
        self._steps: dict[int, int] = {}  # pidfds of Slurm's processes of the job, by pid
        self._asked = 0
        self._next = 0.0
        self._look()

    def fds(self) -> list[int]:
        """Descriptors that become readable when one of Slurm's processes has ended."""
        return list(self._steps.values())

    def wait(self, now: float) -> float:
        """Seconds until the batch system has to be asked; infinite while the kernel reports it."""
        if self._steps or self._kind not in _QUERIES:
            return float("inf")
        return max(0.0, self._next - now)

    def is_over(self, now: float) -> bool:
        """Return True when the allocation has ended. Call it when a descriptor is readable, or the time has come.

        Args:
            now: monotonic seconds.
        """
        before = bool(self._steps)
        self._look()
        if self._steps or self._kind not in _QUERIES:
            return False
        if before:
            self._asked, self._next = 0, now
        if now < self._next:
            return False
        early = self._asked < len(_FIRST_QUESTIONS)
        self._next = now + (_FIRST_QUESTIONS[self._asked] if early else _INTERVAL)
        self._asked += 1
        answer = self._ask([*_QUERIES[self._kind], self._job])
        return answer is not None and allocation_is_over(*answer)

    def close(self) -> None:
        """Close the descriptors."""
        for fd in self._steps.values():
            os.close(fd)
        self._steps.clear()

    def _look(self) -> None:
        """Find Slurm's processes of this job on this host."""
        if self._kind != "slurm":
            return
        found = set(step_daemons(self._job))
        for pid in self._steps.keys() - found:
            os.close(self._steps.pop(pid))
        for pid in found - self._steps.keys():
            with contextlib.suppress(OSError):
                self._steps[pid] = os.pidfd_open(pid)


def step_daemons(job: str, proc: str = "/proc") -> list[int]:
    """Pids of the slurmstepd processes of a job on this host: `slurmstepd: [17.batch]`."""
    wanted = re.compile(rb"slurmstepd: \[%s\." % re.escape(job.encode()))
    found = []
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if Path(proc, name, "comm").read_bytes().startswith(b"slurmstepd") and wanted.match(
                    Path(proc, name, "cmdline").read_bytes()
                ):
                    found.append(int(name))
    return found


def _run(command: Sequence[str]) -> tuple[int, str, str] | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = run_command(command, _TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.returncode, done.stdout, done.stderr
