"""Submitted jobs: what is kept of them, and what can be asked of and done to them.

    <folder>/                          default: $HPCRAY_JOBS, or ./.hpcray-jobs
        <time>-<name>-<6 hex>/         one job, 0700: submitit's files (script, pickles, logs) and
            job.json                   what `hpcray jobs` lists

A job's folder is all that there is of a job that has ended: removing it forgets the job.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpcray.base.errors import GetTimeoutError, RayTaskError
from hpcray.base.job_errors import JobError, SubmitError
from hpcray.cluster import slurm_jobs
from hpcray.cluster.outcome import CANCELLED, ERROR, EXIT, VALUE, Outcome
from hpcray.host.processes import Family

T = TypeVar("T")
_RECORD = "job.json"
_ACTIVE = frozenset({"PENDING", "RUNNING", "UNKNOWN"})
_POLL = (0.05, 1.0)
_REQUEUED = 2 * slurm_jobs.FRESH
"""Slurm may say FAILED of a job that is being requeued (an administrator's `scontrol requeue`); it is asked once more
after so long."""
_MAY_START_AGAIN = 30.0
"""The same for a job that asks for that itself: a busy controller takes its time to make it PENDING."""
_LATE_FILES = 15.0
"""A file that another node of a shared file system has written may be seen so much later."""
_LOCAL_LATE = 0.5
_TAIL = 2000


@dataclass(frozen=True)
class Record:
    """What is kept of a job at its submission.

    Attributes:
        job_id: Slurm's, or the pid of the local controller.
        executor: "slurm" or "local".
        submitted: Unix time, seconds.
        time_limit: seconds, or None.
        started: start of the local controller, in clock ticks since boot.
        command: the script's words, or the function's name.
        requeues: how often it may start again.
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
        """Keep it in the job's folder."""
        temporary = folder / f"{_RECORD}.new"
        temporary.write_text(json.dumps(asdict(self), indent=1))
        os.replace(temporary, folder / _RECORD)

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """The record of the job in `folder`; None where there is none."""
        try:
            fields = json.loads((folder / _RECORD).read_text())
            return cls(**{**fields, "command": tuple(fields["command"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class Job(Generic[T]):
    """A submitted job. It may be looked at from any process that sees its folder.

    Attributes:
        folder: its directory.
        job_id: Slurm's id, or the local controller's pid.
        name, executor, nodes: as submitted.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record
        self.job_id, self.name, self.executor, self.nodes = record.job_id, record.name, record.executor, record.nodes

    def __repr__(self) -> str:
        return f"<Job {self.job_id} {self.name!r} on {self.executor}: {self.state}>"

    # ------------------------------------------------------------ state

    @property
    def state(self) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, and what else Slurm calls the state of a job.

        UNKNOWN: Slurm does not answer now. Without accounting, Slurm forgets a job some minutes after its end: one that
        left no result is then FAILED, or CANCELLED if `cancel()` was used.
        """
        return self._state(slurm_jobs.ask)

    def _state(self, ask: Any) -> str:
        outcome = self._outcome()
        if outcome is not None:
            return _state_of(outcome)
        found = self._local_state() if self.executor == "local" else ask(self.job_id)
        if found == slurm_jobs.GONE:
            found = "FAILED" if time.time() - self.record.submitted > slurm_jobs.SETTLED else "UNKNOWN"
        if found == "FAILED" and (self.folder / CANCELLED).exists():
            return "CANCELLED"
        return str(found)

    def _local_state(self) -> str:
        controller = self._controller()
        if controller is not None:
            return "RUNNING"
        limit = self.record.time_limit
        lived = self._last_sign() - self.record.submitted
        return "FAILED" if limit is None or lived < limit - 1 else "TIMEOUT"

    def _last_sign(self) -> float:
        """When the job last wrote something."""
        times = [path.stat().st_mtime for path in self.folder.iterdir() if path.name.startswith(self.job_id)]
        return max(times, default=self.record.submitted)

    def done(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.state not in _ACTIVE

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end.

        Args:
            timeout: seconds; None: for ever.

        Raises:
            GetTimeoutError: it has not ended; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pause, longest = _POLL
        while self._outcome() is None and not self.done():
            left = longest if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise GetTimeoutError(f"{self!r} has not ended within {timeout:g} s; it goes on")
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, longest)

    # ------------------------------------------------------------ results

    def result(self, timeout: float | None = None) -> T:
        """What the function returned; the exit code of a script. Waits for the end.

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
        """What `result()` would raise after the end of the job; None where it would return something."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self.wait(timeout)
        while (outcome := self._late_outcome()) is None and not self.done():
            # It is run again, and only looked ended in between.
            self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if outcome is None:
            return self._lost(self.state, "it left no result")
        if outcome.kind == ERROR:
            error = pickle.loads(outcome.blob)
            return error.as_instanceof_cause() if isinstance(error, RayTaskError) else error
        if outcome.kind == VALUE or (outcome.kind == EXIT and not outcome.ended_by):
            return None
        why = {"SIGTERM": "it was told to end", "time": "its time was up"}.get(
            outcome.ended_by, "its driver was killed"
        )
        return self._lost(_state_of(outcome), f"{why}; exit code {outcome.code}")

    def _lost(self, state: str, why: str) -> JobError:
        tail = (self.stderr() or "").strip()[-_TAIL:]
        last = f"; its standard error ends with:\n{tail}" if tail else ""
        text = f"job {self.job_id} ({self.name}, {self.executor}) is {state}: {why}{last}"
        return JobError(f"{text}\nhint: hpcray logs {self.job_id}", state)

    def _outcome(self) -> Outcome | None:
        """How it ended, as far as its own result file tells."""
        path = self.folder / f"{self.job_id}_0_result.pkl"
        try:
            with open(path, "rb") as file:
                kind, found = pickle.load(file)
        except (FileNotFoundError, EOFError):
            return None
        if kind == "success" and isinstance(found, Outcome):
            return found
        # submitit caught something around our own code: the job's start failed, or it was out of requeues.
        error = JobError(f"job {self.job_id} ({self.name}) failed around its launch:\n{found}")
        return Outcome(ERROR, 1, pickle.dumps(error))

    def _late_outcome(self) -> Outcome | None:
        patience = _LOCAL_LATE
        if self.executor == "slurm":
            state = self.state
            if state == "COMPLETED":
                patience = _LATE_FILES
            else:
                patience = _MAY_START_AGAIN if state == "FAILED" and self.record.requeues else _REQUEUED
        deadline = time.monotonic() + patience
        while (outcome := self._outcome()) is None and self.done() and time.monotonic() < deadline:
            os.listdir(self.folder)  # has NFS look again
            time.sleep(_POLL[0])
        return outcome

    # ------------------------------------------------------------ logs, cancel

    def log_path(self, stream: str) -> Path:
        """The file of "out" or "err"."""
        return self.folder / f"{self.job_id}_0_log.{stream}"

    def stdout(self) -> str | None:
        """What the job wrote to its standard output so far; None before it has started."""
        return _text(self.log_path("out"))

    def stderr(self) -> str | None:
        """What the job wrote to its standard error so far; None before it has started."""
        return _text(self.log_path("err"))

    def cancel(self) -> None:
        """End it. It is told first (SIGTERM), and killed if it stays. Harmless when it has ended.

        Raises:
            JobError: Slurm refused.
        """
        if self._outcome() is not None:
            return
        (self.folder / CANCELLED).touch(0o600)
        if self.executor == "slurm":
            slurm_jobs.cancel(self.job_id)
            return
        if self._controller() is not None:
            os.kill(int(self.job_id), signal.SIGTERM)  # the controller passes it on

    def kill(self) -> None:
        """End a local job that did not follow `cancel()`; its processes end after this one's."""
        if self.executor == "local" and self._controller() is not None:
            os.killpg(int(self.job_id), signal.SIGKILL)

    def _controller(self) -> Family | None:
        """The live controller of a local job; reaps it where it is our own child."""
        pid = int(self.job_id)
        found = Family.of(pid)
        if found is not None and found.started == self.record.started:
            return found
        try:
            os.waitpid(pid, os.WNOHANG)
        except OSError:
            pass
        return None


def _state_of(outcome: Outcome) -> str:
    if outcome.ok:
        return "COMPLETED"
    return {"SIGTERM": "CANCELLED", "time": "TIMEOUT"}.get(outcome.ended_by, "FAILED")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return None


# ---------------------------------------------------------------- folders


def default_folder() -> Path:
    """Where jobs are kept unless told otherwise."""
    return Path(os.environ.get("HPCRAY_JOBS") or ".hpcray-jobs").expanduser().absolute()


def make_folder(base: Path, name: str) -> Path:
    """A new 0700 directory for one job.

    Raises:
        SubmitError: it cannot be made, or others could write into `base`: what lies there is unpickled.
    """
    label = re.sub(r"[^A-Za-z0-9_.]+", "_", name)[:40]
    own = base / f"{time.strftime('%Y%m%d-%H%M%S')}-{label}-{os.urandom(3).hex()}"
    try:
        base.mkdir(0o700, parents=True, exist_ok=True)
        check_folder(base)
        own.mkdir(0o700)
    except OSError as error:
        raise SubmitError(f"no folder for the job: {error}; hint: submit(folder=…), --folder, $HPCRAY_JOBS") from None
    return own


def check_folder(folder: Path) -> None:
    """Raise SubmitError unless the folder is this user's, and nobody else may write into it."""
    state = folder.stat()
    if state.st_uid != os.getuid() or stat.S_IMODE(state.st_mode) & 0o022:
        raise SubmitError(
            f"{folder} belongs to uid {state.st_uid}, mode {stat.S_IMODE(state.st_mode):o}: others could plant "
            "jobs there; hint: chmod 700, or another folder"
        )


def list_jobs(folder: str | os.PathLike[str] | None = None) -> list[Job[Any]]:
    """The jobs of a folder, the newest first.

    Raises:
        SubmitError: the folder is somebody else's.
    """
    base = Path(folder).expanduser().absolute() if folder is not None else default_folder()
    if not base.is_dir():
        return []
    check_folder(base)
    found: list[Job[Any]] = [Job(path, record) for path in base.iterdir() if (record := Record.read(path)) is not None]
    return sorted(found, key=lambda job: job.record.submitted, reverse=True)


def find_job(job_id: str, folder: str | os.PathLike[str] | None = None) -> Job[Any]:
    """The newest job of a folder with this id, or with this name.

    Raises:
        SubmitError: there is none.
    """
    jobs = list_jobs(folder)
    for job in jobs:
        if job.job_id == job_id:
            return job
    for job in jobs:
        if job.name == job_id:
            return job
    base = folder if folder is not None else default_folder()
    known = ", ".join(job.job_id for job in jobs[:5]) or "none"
    raise SubmitError(f"no job {job_id} in {base} (newest there: {known}); hint: --folder")


def states(jobs: Iterable[Job[Any]]) -> dict[str, str]:
    """The state of each job by the name of its folder, with one question to Slurm for all of them."""
    jobs = list(jobs)
    asked = slurm_jobs.ask_all([job.job_id for job in jobs if job.executor == "slurm" and job._outcome() is None])
    return {job.folder.name: job._state(lambda ident: asked.get(ident, slurm_jobs.GONE)) for job in jobs}
