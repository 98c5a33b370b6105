"""The rows of `hpcray jobs`: submitted jobs, those that run on this machine, and those in Slurm's queue, each once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from hpcray.jobs.slurm_queue import ActiveJob, active_jobs
from hpcray.jobs.submitted_job import SubmittedJob
from hpcray.platform.process_tree import ancestors
from hpcray.platform.running_jobs import RunningJob, running_jobs
from hpcray.state.reports import format_duration

Row = dict[str, Any]


def job_rows(submitted: Iterable[SubmittedJob[Any]], states: Mapping[str, str]) -> list[Row]:
    """Return a row for each job, the newest first.

    Args:
        submitted: the submitted jobs to list.
        states: their states, by the names of their folders.
    """
    rows = [_submitted_row(job, states[job.folder.name]) for job in submitted]
    of_job = {row["job_id"]: row for row in rows}
    for running in running_jobs():
        own = next((of_job[ident] for ident in _ids(running) if ident in of_job), None)
        if own is None:
            own = _running_row(running)
            rows.append(own)
            of_job[own["job_id"]] = own
        left = running.seconds_left
        own |= {
            "driver": running.driver_pid(),
            "session": running.path,
            "left": "" if left is None else format_duration(left),
        }
    for queued in active_jobs():
        row = of_job.get(queued.job_id)
        if row is None:
            rows.append(_queued_row(queued))
        elif not row["left"]:
            row["left"] = queued.time_left
    return sorted(rows, key=lambda row: -row["submitted"])


def _ids(running: RunningJob) -> list[str]:
    """Names of a running job in the list of submitted ones: Slurm's id, or the pid of a local job's controller."""
    return [running.node.slurm_job, *map(str, ancestors(running.node.pid))]


def _row(**fields: Any) -> Row:
    return {"driver": None, "left": "", "session": "", "folder": "", **fields}


def _submitted_row(job: SubmittedJob[Any], state: str) -> Row:
    return _row(
        job_id=job.job_id, name=job.name, state=state, executor=job.executor, nodes=job.nodes,
        submitted=job.record.submitted, command=list(job.record.command), folder=str(job.folder),
    )  # fmt: skip


def _running_row(job: RunningJob) -> Row:
    command = shlex.split(job.node.program)
    name = next((os.path.basename(word) for word in command if not word.startswith("-")), "")
    return _row(
        job_id=job.job_id, name="" if command[:1] == ["-c"] else name, state="RUNNING",
        executor="slurm" if job.node.slurm_job else "here", nodes=job.node.nodes, submitted=job.node.started,
        command=command,
    )  # fmt: skip


def _queued_row(job: ActiveJob) -> Row:
    return _row(
        job_id=job.job_id, name=job.name, state=job.state, executor="slurm", nodes=job.nodes,
        submitted=job.submitted, command=[], left=job.time_left,
    )  # fmt: skip
