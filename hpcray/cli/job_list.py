"""The rows of `hpcray jobs`: submitted jobs, those that run on this machine, those in Slurm's queue, and those that
have ended and left a history, each once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from hpcray.history.job_history import JobHistory
from hpcray.history.outcome import outcome
from hpcray.history.runs import Run, history_root, runs
from hpcray.jobs.batch_queues import ActiveJob, active_jobs, query_states
from hpcray.jobs.submitted_job import SubmittedJob
from hpcray.platform.process_tree import ancestors
from hpcray.processes.running_jobs import RunningJob, running_jobs
from hpcray.state.reports import format_duration

Row = dict[str, Any]


def job_rows(
    submitted: Iterable[SubmittedJob[Any]], states: Mapping[str, str], most_ended: int | None = None
) -> list[Row]:
    """Return a row for each job, the newest first.

    Args:
        submitted: the submitted jobs to list.
        states: their states, by the names of their folders.
        most_ended: most of those that have ended and left a history; None: all.
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
            "run": running.node.session,
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
    _add_ended(rows, most_ended)
    return sorted(rows, key=lambda row: -row["submitted"])


def _add_ended(rows: list[Row], most: int | None) -> None:
    """Add the jobs that have left a history, and what it says to those that are listed already."""
    known = {row["run"] for row in rows if row["run"]}
    listed: dict[str, Row] = {row["job_id"]: row for row in rows}
    found = [run for run in runs(history_root(os.environ)) if run.name not in known][:most]
    histories = [(run, JobHistory(run, whole=False)) for run in found]
    in_slurm = [run.job for run, history in histories if run.job not in listed and _of_slurm(history)]
    slurm_states = query_states(list(dict.fromkeys(in_slurm)))
    for run, history in histories:
        result = outcome(history)
        row = listed.get(run.job)
        if row is None:
            row = _ended_row(run, history, slurm_states.get(run.job, "") or result.state)
            rows.append(row)
            listed[run.job] = row
        elif row["run"]:
            rows.append(_ended_row(run, history, result.state))  # an earlier run of a job that was requeued
            continue
        row |= {"run": run.name, "ended": history.last, "cause": result.cause}


def _of_slurm(history: JobHistory) -> bool:
    return any(node.began is not None and node.began.slurm for node in history.nodes.values())


def _ended_row(run: Run, history: JobHistory, state: str) -> Row:
    words = history.program.split()
    name = next((os.path.basename(word) for word in words if not word.startswith("-")), "")
    return _row(
        job_id=run.job, name="" if words[:1] == ["-c"] else name, state=state,
        executor="slurm" if _of_slurm(history) else "here", nodes=history.node_count, submitted=history.started,
        command=words, folder=run.path, run=run.name, ended=history.last, cause=outcome(history).cause,
    )  # fmt: skip


def _ids(running: RunningJob) -> list[str]:
    """Names of a running job in the list of submitted ones: Slurm's id, or the pid of a local job's controller."""
    return [running.node.slurm_job, *map(str, ancestors(running.node.pid))]


def _row(**fields: Any) -> Row:
    return {"driver": None, "left": "", "session": "", "folder": "", "run": "", "ended": None, "cause": "", **fields}


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
