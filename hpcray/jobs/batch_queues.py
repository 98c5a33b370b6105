"""Jobs in batch systems: submitted, queried and cancelled."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from hpcray.autoscaler.batch_systems import BATCH_SYSTEMS, BatchRequest, is_forgotten
from hpcray.common.exceptions import JobError, SubmitError
from hpcray.platform.allocation import run_command
from hpcray.platform.launcher_environment import outside_of_job

GONE = "GONE"
"""Slurm does not know the job any more."""
REGISTRATION_TIME = 30.0  # seconds after submission within which Slurm may not know the job yet
_COMMAND_TIMEOUT = 30.0  # seconds
CACHE_TIME = 2.0  # seconds for which an answer of squeue is reused
_RUNNING = {"COMPLETING": "RUNNING", "CONFIGURING": "PENDING", "REQUEUED": "PENDING", "REQUEUE_HOLD": "PENDING"}
_RUNNING |= {"STAGE_OUT": "RUNNING", "SIGNALING": "RUNNING", "RESIZING": "RUNNING", "SUSPENDED": "RUNNING"}
_RUNNING |= {"STOPPED": "RUNNING", "REQUEUE_FED": "PENDING", "SPECIAL_EXIT": "PENDING", "RESV_DEL_HOLD": "PENDING"}


_NO_REASON = ("", "None", "(null)")


class _Cache:
    """squeue's last answer: a program may wait for many jobs, and all users share the controller."""

    time = float("-inf")
    answer: dict[str, str] | None = None
    reasons: Mapping[str, str] = MappingProxyType({})
    accounting = True


def query_state(job_id: str) -> str:
    """The state of one job: Slurm's word, reduced to PENDING or RUNNING while the job lives; GONE, or UNKNOWN where
    Slurm does not answer."""
    return query_states([job_id]).get(job_id, GONE)


def query_states(job_ids: Sequence[str]) -> dict[str, str]:
    """States by id; ids that Slurm does not know are left out."""
    if not job_ids:
        return {}
    queue = _queue()
    if queue is None:
        return dict.fromkeys(job_ids, "UNKNOWN")
    missing = [job_id for job_id in job_ids if job_id not in queue]
    return {**_accounted(missing), **{job_id: queue[job_id] for job_id in job_ids if job_id in queue}}


def query_reason(job_id: str) -> str:
    """Why a job waits, or has ended, in Slurm's word ("Resources", "TimeLimit"); "" where Slurm gives none."""
    _queue()
    reason = _Cache.reasons.get(job_id, "")
    return "" if reason in _NO_REASON else reason


@dataclass(frozen=True)
class ActiveJob:
    """A pending or running job of this user.

    Attributes:
        state: PENDING or RUNNING.
        nodes: number of nodes. node_list: their names, compressed; "" while the job waits.
        time_left: as squeue prints it.
        submitted: Unix time, seconds.
    """

    job_id: str
    name: str
    state: str
    nodes: int
    node_list: str
    time_left: str
    submitted: float


def active_jobs() -> list[ActiveJob]:
    """Return the pending and running jobs of this user; [] where Slurm does not answer."""
    found = _run_slurm(["squeue", "--me", "--noheader", "--states=PENDING,RUNNING", "--format=%A|%T|%D|%L|%V|%N|%j"])
    jobs = []
    for line in found.stdout.splitlines() if found is not None and not found.returncode else ():
        fields = line.split("|", 6)
        if len(fields) == 7:
            job_id, state, nodes, left, submitted, node_list, name = (field.strip() for field in fields)
            when = time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S"))
            jobs.append(ActiveJob(job_id, name, state, int(nodes), node_list, left, when))
    return jobs


def preempted(job_id: str) -> bool:
    """True if Slurm is taking the running job's nodes away for another job. A cancelled job does not run."""
    found = _run_slurm(["scontrol", "show", "job", "-o", job_id])
    if found is None or found.returncode:
        return False
    facts = dict(word.partition("=")[::2] for word in found.stdout.split())
    return facts.get("JobState") == "RUNNING" and facts.get("PreemptTime", "None") not in ("None", "N/A", "Unknown")


def cancel(job_id: str) -> None:
    """Cancel a job; one that has already ended is no error.

    Raises:
        JobError: Slurm refused or does not answer.
    """
    _Cache.time = float("-inf")
    found = _run_slurm(["scancel", job_id])
    if found is None or (found.returncode and "Invalid job id" not in found.stderr):
        text = found.stderr.strip() if found is not None else f"no answer within {_COMMAND_TIMEOUT:g} s"
        raise JobError(f"scancel {job_id}: {text}", "UNKNOWN")


def _queue() -> dict[str, str] | None:
    """This user's jobs that the controller knows, ended ones of the last minutes too; None: no answer."""
    if time.monotonic() - _Cache.time > CACHE_TIME:
        found = _run_slurm(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r"])
        text = None if found is None or found.returncode else found.stdout
        _Cache.answer = None if text is None else _parse(text)
        rows = [line.split("|") for line in (text or "").splitlines() if line.count("|") == 2]
        _Cache.reasons = {job_id.strip(): reason.strip() for job_id, _, reason in rows}
        _Cache.time = time.monotonic()
    return _Cache.answer


def _accounted(job_ids: Sequence[str]) -> dict[str, str]:
    """States out of the accounting; {} where there is none."""
    if not job_ids or not _Cache.accounting:
        return {}
    found = _run_slurm(["sacct", "-n", "-X", "-P", "-o", "JobID,State", "-j", ",".join(job_ids)])
    if found is None or found.returncode:
        _Cache.accounting = found is None
        return {}
    return _parse(found.stdout)


def _parse(text: str) -> dict[str, str]:
    rows = [line.split("|") for line in text.splitlines() if "|" in line]
    # sacct adds the user: "CANCELLED by 1000".
    words = {row[0].strip(): row[1].strip().partition(" ")[0].rstrip("+") for row in rows}
    return {job_id: _RUNNING.get(word, word) for job_id, word in words.items() if word}


def _run_slurm(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    try:
        return run_command(command, _COMMAND_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired):
        return None


# ------------------------------------------------------------ batch queue
# Jobs in PBS and Flux: submitted, queried and cancelled by their commands (`autoscaler/batch_systems.py`).


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
    done = _run_batch(kind, line, script)
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
    done = _run_batch(kind, BATCH_SYSTEMS[kind].query_line(job_ids))
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
    done = _run_batch(kind, line)
    if isinstance(done, str):
        raise JobError(f"{' '.join(line)}: {done}", "UNKNOWN")
    if done.returncode and not is_forgotten(done.stderr):
        raise JobError(f"{' '.join(line)}: {done.stderr.strip()}", "UNKNOWN")


def _run_batch(kind: str, line: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str] | str:
    """Output of the command; text: why it did not run to its end."""
    # flux needs the variables of the instance around: FLUX_URI is no variable of a rank.
    environ = BATCH_SYSTEMS[kind].environ(outside_of_job(os.environ))
    try:
        return run_command(line, _COMMAND_TIMEOUT, environ, text)
    except subprocess.TimeoutExpired:
        return f"no answer within {_COMMAND_TIMEOUT:g} s"
    except OSError as error:
        return f"it cannot be run: {error.strerror}"
