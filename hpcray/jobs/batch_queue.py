"""Jobs in PBS and Flux: submitted, queried and cancelled by their commands (`platform/batch_systems.py`)."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence

from hpcray.common.exceptions import JobError, SubmitError
from hpcray.platform.batch_systems import BATCH_SYSTEMS, BatchRequest, is_forgotten
from hpcray.platform.launcher_environment import outside_of_job

_COMMAND_TIMEOUT = 30.0  # seconds
_CACHE_TIME = 2.0  # seconds for which an answer is reused: a program may wait for many jobs
_answers: dict[tuple[str, str], tuple[float, str]] = {}


def submit_batch(kind: str, request: BatchRequest, script: str) -> str:
    """Submit a batch script.

    Args:
        kind: name of the batch system.
        request: the job.
        script: for /bin/sh.

    Returns:
        The id of the job.

    Raises:
        SubmitError: the batch system refused the job, does not answer, or has no such option.
    """
    system = BATCH_SYSTEMS[kind]
    try:
        line = system.submit_line(request)
    except ValueError as error:
        raise SubmitError(str(error)) from None
    done = _run(kind, line, script)
    if isinstance(done, str):
        raise SubmitError(f"{line[0]}: {done}; hint: submit from a login node, or executor='local'")
    job_id = system.job_id(done.stdout)
    if done.returncode or not job_id:
        why = done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}"
        raise SubmitError(f"{system.submit_command} refused the job: {why}")
    return job_id


def query_batch(kind: str, job_ids: Sequence[str]) -> dict[str, str]:
    """States by id, as `BatchSystem.states`; UNKNOWN where the batch system does not answer; forgotten jobs are left
    out."""
    if not job_ids:
        return {}
    now = time.monotonic()
    known = {job: _answers[kind, job] for job in job_ids if (kind, job) in _answers}
    if len(known) == len(job_ids) and all(now - when < _CACHE_TIME for when, _ in known.values()):
        return {job: state for job, (_, state) in known.items() if state}
    done = _run(kind, BATCH_SYSTEMS[kind].query_line(job_ids))
    if isinstance(done, str):
        return dict.fromkeys(job_ids, "UNKNOWN")
    found = BATCH_SYSTEMS[kind].states(done.stdout)
    if done.returncode and not found and not is_forgotten(done.stderr):
        return dict.fromkeys(job_ids, "UNKNOWN")  # the server is down, or the user has no permission
    for job in job_ids:
        _answers[kind, job] = time.monotonic(), found.get(job, "")
    return {job: found[job] for job in job_ids if job in found}


def cancel_batch(kind: str, job_id: str) -> None:
    """Cancel a job; one that has already ended is no error.

    Raises:
        JobError: the batch system refused or does not answer.
    """
    _answers.pop((kind, job_id), None)
    line = BATCH_SYSTEMS[kind].cancel_line([job_id])
    done = _run(kind, line)
    if isinstance(done, str):
        raise JobError(f"{' '.join(line)}: {done}", "UNKNOWN")
    if done.returncode and not is_forgotten(done.stderr):
        raise JobError(f"{' '.join(line)}: {done.stderr.strip()}", "UNKNOWN")


def _run(kind: str, line: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str] | str:
    """Output of the command; text: why it did not run to its end."""
    # flux needs the variables of the instance around: FLUX_URI is no variable of a rank.
    environ = BATCH_SYSTEMS[kind].environ(outside_of_job(os.environ))
    try:
        return subprocess.run(
            line, input=text, capture_output=True, text=True, errors="replace", timeout=_COMMAND_TIMEOUT, env=environ
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_COMMAND_TIMEOUT:g} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
