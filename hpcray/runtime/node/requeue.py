"""Requeues this Slurm job once its drain is over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from hpcray.common.config import Config
from hpcray.platform.allocation import job_to_ask

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
    return subprocess.run(
        ["sh", "-c", "trap '' TERM; exec scontrol \"$@\"", "sh", *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SCONTROL_TIME,
        check=True,
    ).stdout
