"""The Slurm job of this raylet: requests to Slurm (to requeue it, to give its nodes to no other job, to end its step),
and this run of it as Slurm and the settings describe it."""

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
from urllib.parse import quote

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.common.terminal_text import plain_line
from hpcray.platform.allocation import ask_end_time, end_time, job_to_ask, run_command
from hpcray.platform.private_files import state_place
from hpcray.platform.process_control import LAUNCHER_NAME
from hpcray.protocol.messages import RunInfo
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
    print(f"hpcray: {where} does not start, and so the job does not: {plain_line(error)}", file=sys.stderr, flush=True)
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


# ------------------------------------------------------------ run info
# This run of the job as Slurm and the settings describe it: its end, its checkpoints, its signals.

_DIRECTORY = "hpcray-checkpoints"
_QUERY_TIMEOUT = 5.0
_SHARE = 0.25
"""The largest share of a short job's time that its drain takes."""
_SIGNALS = {"USR1": signal.SIGUSR1, "TERM": signal.SIGTERM}
_REQUEUE = ("auto", "scontrol", "exit")


def read_run(config: Config, launch: Launch, environ: Mapping[str, str] | None = None) -> RunInfo:
    """Return the facts about the whole job, as rank 0 knows them: only that rank queries Slurm's controller.

    Raises:
        ValueError: a setting is not valid.
    """
    environ = os.environ if environ is None else environ
    if config.requeue not in _REQUEUE:
        raise ValueError(f"requeue={config.requeue!r} is not valid; hint: one of {', '.join(_REQUEUE)}")
    if not 0 <= config.drain_exit_code <= 255:
        raise ValueError(f"drain_exit_code={config.drain_exit_code} is not valid; hint: 0 to 255")
    known = end_time(environ) if launch.rank else ask_end_time(environ, _QUERY_TIMEOUT)
    end = config.end_time or known or 0.0
    return RunInfo(
        end=end,
        drain_at=drain_start(end, time.time(), config.drain_margin),
        checkpoints=checkpoint_directory(config, environ, announce=launch.rank == 0),
        restarts=restart_count(environ),
        signals=drain_signals(config, launch, environ),
        exit_code=config.drain_exit_code,
    )


def drain_start(end: float, now: float, margin: float) -> float:
    """Return the Unix time at which a job that ends at `end` begins to drain; 0 for never."""
    if not end or not margin:
        return 0.0
    return end - min(margin, max(0.0, end - now) * _SHARE)


def checkpoint_directory(config: Config, environ: Mapping[str, str], announce: bool = False) -> str:
    """Return the directory of this job's checkpoints, the same in all its runs; "" when it is not known.

    In a place where another user could exchange them it is one in the user's home.

    Args:
        announce: whether a line on standard error says so.
    """
    home = environ.get("SLURM_SUBMIT_DIR") or environ.get("PBS_O_WORKDIR")
    job = environ.get("SLURM_JOB_ID") or environ.get("PBS_JOBID")
    if config.checkpoint_dir:
        wanted = os.path.abspath(os.path.expanduser(config.checkpoint_dir))
    elif home and job:
        wanted = os.path.join(home, _DIRECTORY, job)
    else:
        return ""
    # Names in the home differ as the wanted ones do: two experiments do not get each other's checkpoints.
    place = state_place(wanted, os.path.join("checkpoints", quote(wanted.strip("/"), safe="")), own=False)
    if place.passed_over and announce:
        print(f"hpcray: checkpoints are in {place.path}: {place.passed_over}", file=sys.stderr, flush=True)
    return place.path


def restart_count(environ: Mapping[str, str]) -> int:
    """Return how often Slurm has put this job back into the queue."""
    text = environ.get("SLURM_RESTART_COUNT", "")
    return int(text) if text.isdecimal() else 0


def drain_signals(config: Config, launch: Launch, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the numbers of the signals that begin a drain.

    By default those with which Slurm announces the end of a job. mpirun kills its ranks a second after the SIGTERM
    that it sends them: there is no time for a drain.
    """
    text = config.drain_signals.upper()
    if text == "AUTO":
        if not environ.get("SLURM_JOB_ID"):
            return ()
        return (signal.SIGUSR1,) if launch.kind in ("mpirun", "pmi") else (signal.SIGUSR1, signal.SIGTERM)
    if text == "NONE":
        return ()
    names = [name.strip().removeprefix("SIG") for name in text.split(",")]
    unknown = [name for name in names if name not in _SIGNALS]
    if unknown:
        raise ValueError(
            f"drain_signals={config.drain_signals!r} is not valid; hint: auto, none, or some of {', '.join(_SIGNALS)}"
        )
    return tuple(_SIGNALS[name] for name in names)


# ------------------------------------------------------------ raylet ready
# The first and only message of a raylet to the process that started it.


class RayletReady(msgspec.Struct):
    """The one message of a raylet child on its ready pipe: its session directory, or why it could not start."""

    session_dir: str = ""
    error: str = ""
    reported_by_rank0: bool = False
