"""This run of the job as Slurm and the settings describe it: its end, its checkpoints, its signals."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from urllib.parse import quote

import msgspec

from hpcray.common.config import Config
from hpcray.platform.allocation import ask_end_time, end_time
from hpcray.platform.private_files import state_place
from hpcray.protocol.messages import RunInfo
from hpcray.transport.startup import Launch

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
