"""Submitted jobs: their records, states, results and logs.

    <folder>/                          default: $HPCRAY_JOBS, or ./.hpcray-jobs
        <time>-<name>-<6 hex>/         one job, 0700: submitit's files (script, pickles, logs) and
            job.json                   the record that `hpcray jobs` lists

After its end a job consists of its folder alone: removing the folder removes the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpcray.autoscaler.batch_systems import FLUX, PBS
from hpcray.common.exceptions import GetTimeoutError, JobError, SubmitError
from hpcray.common.task_errors import RayTaskError
from hpcray.history.runs import JobNames, jobs_meant, program_names
from hpcray.jobs import (
    CANCELLED,
    ERROR,
    EXIT,
    SCRIPT_OUTPUT,
    STEM,
    VALUE,
    JobOutcome,
    batch_queues,
    read_pickle,
)
from hpcray.jobs.batch_queues import cancel_batch, query_batch
from hpcray.platform.config_files import launch_config
from hpcray.platform.private_files import (
    CLOSED,
    OTHERS,
    PrivateDirectory,
    UntrustedPathError,
    read_private_file,
    state_place,
    write_private_file,
)
from hpcray.platform.process_tree import ProcessIdentity

T = TypeVar("T")
_RECORD = "job.json"
_ACTIVE = frozenset({"PENDING", "RUNNING", "UNKNOWN"})
_POLL = (0.05, 1.0)  # seconds between looks: at first, at most
# Seconds for which FAILED is not believed. Slurm may report it of a job that an administrator is requeueing; for longer
# of one that requeues itself, until a busy controller makes it PENDING.
_REQUEUE_TIME = 2 * batch_queues.CACHE_TIME
_OWN_REQUEUE_TIME = 30.0
# Seconds until a file is visible here that another node wrote to a shared file system, or a process of this host.
_SHARED_FILE_DELAY, _LOCAL_FILE_DELAY = 15.0, 0.5
_told: set[str] = set()
_TAIL = 2000  # characters of standard error in a message


@dataclass(frozen=True)
class JobRecord:
    """The facts of a job at its submission.

    Attributes:
        job_id: the batch system's, or the pid of the local controller.
        executor: "slurm", "pbs", "flux" or "local".
        submitted: Unix time, seconds.
        time_limit: seconds, or None.
        started: start of the local controller, in clock ticks since boot.
        command: the script's words, or the function's name.
        requeues: how often the job may start again.
    """

    job_id: str
    name: str
    executor: str
    nodes: int
    submitted: float
    time_limit: int | None
    started: int
    command: tuple[str, ...]
    requeues: int = 0

    def write(self, folder: Path) -> None:
        """Write the record to the job's folder."""
        write_private_file(str(folder / _RECORD), json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> JobRecord | None:
        """The record of the job in `folder`; None where there is none."""
        try:
            fields = json.loads(read_private_file(str(folder / _RECORD)))
            return cls(**{**fields, "command": tuple(fields["command"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class SubmittedJob(Generic[T]):
    """A submitted job. Any process that sees its folder may use it.

    Attributes:
        folder: its directory.
        job_id: Slurm's id, or the local controller's pid.
        name, executor, nodes: as submitted.
    """

    def __init__(self, folder: Path, record: JobRecord) -> None:
        self.folder = folder
        self.record = record
        self.job_id, self.name, self.executor, self.nodes = record.job_id, record.name, record.executor, record.nodes

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.name!r} on {self.executor}: {self.state}>"

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, or another of Slurm's words.

        UNKNOWN: Slurm does not answer at present. Without accounting, Slurm forgets a job some minutes after its end;
        one without a result is then FAILED, or CANCELLED after `cancel()`.
        """
        return self._state(lambda job_id: _query(self.executor, [job_id]).get(job_id, batch_queues.GONE))

    def _state(self, query_slurm: Any) -> str:
        outcome = self._outcome()
        if outcome is not None:
            return _state_of(outcome)
        found = self._local_state() if self.executor == "local" else query_slurm(self.job_id)
        if found == batch_queues.GONE:
            found = "FAILED" if time.time() - self.record.submitted > batch_queues.REGISTRATION_TIME else "UNKNOWN"
        if found == "FAILED" and (self.folder / CANCELLED).exists():
            return "CANCELLED"
        return str(found)

    @property
    def _stem(self) -> str:
        """The name of the job in the names of its files."""
        return STEM if self.executor in (PBS, FLUX) else self.job_id

    def _local_state(self) -> str:
        if self._controller() is not None:
            return "RUNNING"
        limit, start = self.record.time_limit, self.record.submitted
        writes = [path.stat().st_mtime for path in self.folder.iterdir() if path.name.startswith(self.job_id)]
        return "FAILED" if limit is None or max(writes, default=start) - start < limit - 1 else "TIMEOUT"

    def done(self) -> bool:
        """True if the job has ended, successfully or not."""
        return self.state not in _ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the job.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            GetTimeoutError: the job has not ended; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, longest = _POLL
        while self._outcome() is None and not self.done():
            left = longest if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise GetTimeoutError(f"{self!r} has not ended within {timeout:g} s; it goes on")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, longest)

    def result(self, timeout: float | None = None) -> T:
        """The function's return value; the exit code of a script. Waits for the end.

        Raises:
            RayTaskError: the function raised; also an instance of its exception's class.
            JobError: the job ended without a result: cancelled, out of time, killed.
            GetTimeoutError: as in `wait`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        outcome = self._outcome()
        assert outcome is not None
        found: Any = outcome.code if outcome.kind == EXIT else pickle.loads(outcome.blob)
        return found  # type: ignore[no-any-return]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error that `result()` raises after the end of the job; None where it returns a value."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        while (outcome := self._late_outcome()) is None and not self.done():
            # The job runs again, and only appeared to have ended in between.
            self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if outcome is None:
            return self._lost(self.state, "it left no result")
        if outcome.kind == ERROR:
            error = pickle.loads(outcome.blob)
            return error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
        if outcome.kind == VALUE or (outcome.kind == EXIT and not outcome.ended_by):
            return None
        why = {"SIGTERM": "SIGTERM ended it", "time": "its time was up"}.get(outcome.ended_by, "its driver was killed")
        return self._lost(_state_of(outcome), f"{why}; exit code {outcome.code}")

    def _lost(self, state: str, why: str) -> JobError:
        tail = (self.stderr() or "").strip()[-_TAIL:]
        last = f"; its standard error ends with:\n{tail}" if tail else ""
        text = f"job {self.job_id} ({self.name}, {self.executor}) is {state}: {why}{last}"
        return JobError(f"{text}\nhint: hpcray logs {self.job_id}", state)

    def _outcome(self) -> JobOutcome | None:
        """The outcome in the job's own result file; None without one."""
        try:
            kind, found = read_pickle(self.folder / f"{self._stem}_0_result.pkl")
        except (FileNotFoundError, EOFError):
            return None
        if kind == "success" and isinstance(found, JobOutcome):
            return found
        # submitit caught an error around the launch: the job's start failed, or it was out of requeues.
        error = JobError(f"job {self.job_id} ({self.name}) failed around its launch:\n{found}")
        return JobOutcome(ERROR, 1, pickle.dumps(error))

    def _late_outcome(self) -> JobOutcome | None:
        delay = _LOCAL_FILE_DELAY
        if self.executor != "local":
            state = self.state
            if state == "COMPLETED":
                delay = _SHARED_FILE_DELAY
            else:
                delay = _OWN_REQUEUE_TIME if state == "FAILED" and self.record.requeues else _REQUEUE_TIME
        deadline = time.monotonic() + delay
        while (outcome := self._outcome()) is None and self.done() and time.monotonic() < deadline:
            os.listdir(self.folder)  # makes NFS refresh its cache
            time.sleep(_POLL[0])
        return outcome

    def log_path(self, stream: str) -> Path:
        """The file of "out" or "err"."""
        return self.folder / f"{self._stem}_0_log.{stream}"

    def stdout(self) -> str | None:
        """The job's standard output so far; None before its start."""
        return _text(self.log_path("out"))

    def stderr(self) -> str | None:
        """The job's standard error so far; None before its start."""
        found = _text(self.log_path("err"))
        return found or _text(self.folder / SCRIPT_OUTPUT) or found  # of PBS and Flux, where Python did not start

    def cancel(self) -> None:
        """End the job: SIGTERM first, SIGKILL if it stays. No effect on a job that has ended.

        Raises:
            JobError: the batch system refused.
        """
        if self._outcome() is not None:
            return
        with contextlib.suppress(OSError):  # a full disk; what it says of the end is then FAILED
            (self.folder / CANCELLED).touch(0o600)
        if self.executor == "slurm":
            batch_queues.cancel(self.job_id)
            return
        if self.executor in (PBS, FLUX):
            cancel_batch(self.executor, self.job_id)
            return
        if self._controller() is not None:
            os.kill(int(self.job_id), signal.SIGTERM)  # the controller passes it on

    def kill(self) -> None:
        """Kill a local job that did not follow `cancel()`; its processes end after the controller."""
        if self.executor == "local" and self._controller() is not None:
            os.killpg(int(self.job_id), signal.SIGKILL)

    def _controller(self) -> ProcessIdentity | None:
        """The live controller of a local job, or None. Reaps a controller that is a child of this process."""
        pid = int(self.job_id)
        found = ProcessIdentity.of(pid)
        if found is not None and found.started == self.record.started:
            return found
        with contextlib.suppress(OSError):
            os.waitpid(pid, os.WNOHANG)
        return None


def _state_of(outcome: JobOutcome) -> str:
    if outcome.ok:
        return "COMPLETED"
    return {"SIGTERM": "CANCELLED", "time": "TIMEOUT"}.get(outcome.ended_by, "FAILED")


def _query(executor: str, job_ids: list[str]) -> dict[str, str]:
    """States of jobs of one batch system, by id; forgotten ones are left out."""
    return query_batch(executor, job_ids) if executor in (PBS, FLUX) else batch_queues.query_states(job_ids)


def _text(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return read_private_file(str(path)).decode(errors="replace")
    return None


def jobs_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of jobs: the given one, or that of the setting `jobs`, or `.hpcray-jobs` in the working directory.

    Below a directory of another user, who could exchange what the jobs run, it is `~/.hpcray/jobs` instead, which is
    said once.
    """
    named = given or launch_config(os.environ).jobs
    wanted = Path(named or ".hpcray-jobs").expanduser().absolute()
    # A folder that the user names is used or refused; but where it lies below another user's, jobs start elsewhere.
    place = state_place(str(wanted.parent), "jobs", own=False) if named else state_place(str(wanted), "jobs")
    if not place.passed_over:
        return wanted
    if place.passed_over not in _told:
        _told.add(place.passed_over)
        print(f"hpcray: jobs are in {place.path}: {place.passed_over}", file=sys.stderr)
    return Path(place.path)


def folder_of(base: Path, name: str) -> Path:
    """Return a new path for the directory of one job."""
    label = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:40]
    return base / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}-{os.urandom(3).hex()}"


def make_folder(base: Path, name: str) -> Path:
    """Make a 0700 directory for one job.

    Raises:
        SubmitError: the directory cannot be made, or others could write into `base`: what lies there is unpickled.
    """
    own = folder_of(base, name)
    try:
        with PrivateDirectory.open(str(base), True, OTHERS, ancestors=True) as jobs:
            jobs.directory(own.name, True, CLOSED).close()
    except UntrustedPathError as error:
        raise _not_trusted(error) from None
    except OSError as error:
        raise SubmitError(f"no folder for the job: {error}; hint: submit(folder=…), --folder, $HPCRAY_JOBS") from None
    return own


def _not_trusted(error: UntrustedPathError) -> SubmitError:
    return SubmitError(f"{error.path} {error.why}: others could plant jobs there; hint: chmod 700, or another folder")


def list_jobs(folder: str | os.PathLike[str] | None = None) -> list[SubmittedJob[Any]]:
    """The jobs of a folder, the newest first.

    Raises:
        SubmitError: the folder belongs to another user.
    """
    base = jobs_folder(folder)
    try:
        with PrivateDirectory.open(str(base), False, OTHERS, ancestors=True) as jobs:
            names = jobs.names()
    except UntrustedPathError as error:
        raise _not_trusted(error) from None
    except (FileNotFoundError, NotADirectoryError):
        return []
    found: list[SubmittedJob[Any]] = [
        SubmittedJob(base / name, record) for name in names if (record := JobRecord.read(base / name)) is not None
    ]
    return sorted(found, key=lambda job: job.record.submitted, reverse=True)


def find_job(job_id: str, folder: str | os.PathLike[str] | None = None) -> SubmittedJob[Any]:
    """The newest job of a folder with this id, or with this name or program; or the one whose id or name begins so
    (`jobs_meant`).

    Raises:
        SubmitError: there is no such job, or several begin so.
    """
    jobs = list_jobs(folder)
    found = jobs_meant(job_id, jobs, _called)
    if found and (len({job.job_id for job in found}) == 1 or job_id in _called(found[0]).names):
        return found[0]
    if found:
        lines = "\n".join(f"  {job.job_id}  {job.name}  {' '.join(job.record.command)[:_SHOWN]}" for job in found)
        raise SubmitError(f"{job_id} may be any of {len(found)} jobs:\n{lines}\nhint: its whole id")
    base = jobs_folder(folder)
    known = ", ".join(job.job_id for job in jobs[:5]) or "none"
    raise SubmitError(f"no job {job_id} in {base} (newest there: {known}); hint: --folder")


_SHOWN = 80  # characters of a command line


def _called(job: SubmittedJob[Any]) -> JobNames:
    return JobNames((job.job_id, job.folder.name), (job.name, *program_names(job.record.command)))


def states(jobs: Iterable[SubmittedJob[Any]]) -> dict[str, str]:
    """The state of each job by the name of its folder, with one query to each batch system for all of its jobs."""
    jobs = list(jobs)
    asked: dict[str, list[str]] = {}
    for job in jobs:
        if job.executor != "local" and job._outcome() is None:
            asked.setdefault(job.executor, []).append(job.job_id)
    found = {(kind, ident): state for kind, ids in asked.items() for ident, state in _query(kind, ids).items()}
    return {
        job.folder.name: job._state(lambda ident, kind=job.executor: found.get((kind, ident), batch_queues.GONE))
        for job in jobs
    }
