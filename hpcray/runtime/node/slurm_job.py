"""Requests to Slurm about the job of this raylet: to requeue it, to give its nodes to no other job, to end its step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.platform.allocation import job_to_ask, run_command
from hpcray.platform.process_control import LAUNCHER_NAME
from hpcray.transport.startup import Launch

if TYPE_CHECKING:  # the end of a step is told before the template of workers is forked
    from hpcray.runtime.raylet.event_loop import EventLoop

_SCONTROL_TIME = 10.0
_ALIVE = ("RUNNING", "SIGNALING")
"""States of a job that Slurm has not ended: SIGNALING follows a signal of `--signal` for a while."""


def requeue_job(config: Config, environ: Mapping[str, str] | None = None) -> str:
    """Requeue this job, if the settings require it and Slurm has not decided otherwise.

    A job that is preempted by requeue runs on for the partition's GraceTime, and counts as failed when it ends by then.
    One that was cancelled, or is out of time, is no longer running for Slurm, and is not requeued.

    Returns:
        The error; "" when there was none.
    """
    environ = os.environ if environ is None else environ
    job = job_to_ask(environ)
    if config.requeue == "exit" or (not job and config.requeue == "auto"):
        return ""
    if not job:
        return "this is no Slurm job (no SLURM_JOB_ID); hint: HPCRAY_REQUEUE=exit"
    try:
        shown = _scontrol("show", "job", "-o", job)
        if wants_requeue(config.requeue, shown):
            _scontrol("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        trouble = str(getattr(error, "stderr", "") or error).strip()
        return f"{trouble}; hint: `scontrol requeue {job}` by hand; the job needs `#SBATCH --requeue`"
    return ""


def wants_requeue(setting: str, shown: str) -> bool:
    """Return whether a job is to be requeued. shown: the output of `scontrol show job -o` for it."""
    facts = dict(part.split("=", 1) for part in shown.split() if "=" in part)
    if facts.get("JobState") not in _ALIVE:
        return False
    preempted = facts.get("PreemptTime", "None") not in ("None", "") and facts.get("Requeue") == "1"
    return setting == "scontrol" or preempted


def _scontrol(*command: str) -> str:
    # Slurm sends SIGTERM to all processes of a job that is requeued, also to the scontrol that waits for the reply.
    done = run_command(["sh", "-c", "trap '' TERM; exec scontrol \"$@\"", "sh", *command], _SCONTROL_TIME)
    done.check_returncode()
    return done.stdout


# ------------------------------------------------------------ slurm nodes
# The nodes of this job that Slurm is to give to no other job (`scontrol update nodename=… state=drain`).


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


# ------------------------------------------------------------ end step
# Ends the other ranks of a step when this one cannot start: they would wait for it in `MPI_Init`.


_SCANCEL_TIME = 10.0
_DAMPING, _LONGEST_DAMPING = 0.01, 3.0


def reported_by_launcher(error: StartupError, launch: Launch) -> StartupError:
    """End the other ranks for this reason that this one does not start (`end_step`). Returns the error to raise."""
    return StartupError(str(error), reported_by="launcher") if end_step(launch, error) else error


def end_step(launch: Launch, error: Exception, environ: Mapping[str, str] | None = None) -> bool:
    """Print why this rank cannot start, and end the others, which would wait for it in `MPI_Init`: by Slurm, or by an
    mpirun that runs with `--enable-recovery`. (Any other mpirun ends all ranks by itself when one fails.)

    Returns:
        Whether the reason was printed; if Slurm does not end the others, their start times out.
    """
    environ = os.environ if environ is None else environ
    launcher = _patient_mpirun() if launch.kind == "mpirun" else 0
    if (launch.kind != "srun" and not launcher) or launch.size == 1:
        return False
    where = f"rank {launch.rank} on {socket.gethostname()}"
    print(f"hpcray: {where} does not start, and so the job does not: {error}", file=sys.stderr, flush=True)
    if launcher:
        with contextlib.suppress(OSError):
            os.kill(launcher, signal.SIGTERM)
        return True
    # Many ranks may fail alike: the first scancel ends the others before they run theirs.
    time.sleep(random.uniform(0, min(_DAMPING * launch.rank, _LONGEST_DAMPING)))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        step = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
        # SIGTERM lets them tidy up. Without --signal, scancel kills the tasks of a step at once.
        line = ["scancel", "--signal=TERM", step]
        subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCANCEL_TIME)
    return True


def _patient_mpirun() -> int:
    """Return the pid of the parent if it is an mpirun that survives a rank's death, or its daemon here, or
    `hpcray.launch.local_ranks`; else 0."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{parent}/cmdline").read_bytes()
        if (
            Path(f"/proc/{parent}/comm").read_text() == f"{LAUNCHER_NAME}\n"
            or b"--enable-recovery" in line
            or b"/prted\0" in line
        ):
            return parent
    return 0
