"""The jobs of this user that run on this machine, and which of them a command or `init(address="auto")` means."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from hpcray.common.exceptions import StartupError
from hpcray.history.runs import JobNames, jobs_meant, program_names
from hpcray.platform.private_files import CLOSED, open_private_file
from hpcray.platform.process_tree import ancestors, children_by_name
from hpcray.platform.session_directory import ADDRESS, OWN_SESSION, SessionInfo, live_sessions, read_session

_OWN_PROCESSES = "hpcray-"
_SHOWN = 80  # characters of a command line


class RunningJob(Struct, frozen=True):
    """A job that has nodes on this machine.

    Attributes:
        node: the one to connect to; the lowest here.
        here: nodes on this machine.
    """

    node: SessionInfo
    here: int

    @property
    def job_id(self) -> str:
        """Slurm's id, else the name of the session."""
        return self.node.slurm_job or self.node.session

    @property
    def path(self) -> str:
        """Session directory of `node`."""
        return self.node.path

    @property
    def program(self) -> str:
        """Command line of the program, in one line; "" if it is not known here."""
        return " ".join(self.node.program.split())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the batch system ends the job; None if that is not known."""
        return max(0.0, self.node.end - time.time()) if self.node.end else None

    @property
    def submitted_ids(self) -> list[str]:
        """Ids that `hpcray submit` may have given it: Slurm's, or the pid of a local job's controller."""
        return [self.node.slurm_job, *map(str, ancestors(self.node.pid))]

    @property
    def called(self) -> JobNames:
        """Its ids and names: of Slurm, of its session, of its program."""
        ids = self.node.slurm_job, self.node.session, os.path.basename(self.path)
        return JobNames(tuple(filter(None, ids)), program_names(self.program.split()))

    def driver_pid(self) -> int | None:
        """Return the pid of the program, where it runs on this machine."""
        if self.node.embedded:
            return next(iter(ancestors(self.node.pid)), None)
        children = children_by_name(self.node.pid).items()
        return next((pid for pid, name in children if not name.startswith(_OWN_PROCESSES)), None)

    def line(self) -> str:
        """One line for a list to choose from."""
        left = self.seconds_left
        parts = [
            f"--job {self.job_id}",
            self.path,
            f"{self.node.nodes} node{'s' * (self.node.nodes != 1)}",
            f"started {time.strftime('%H:%M:%S', time.localtime(self.node.started))}",
            "" if left is None else f"{left / 60:.0f} min left",
            self.program[:_SHOWN],
            self._directory(),
        ]
        return "  ".join(filter(None, parts))

    def _directory(self) -> str:
        with contextlib.suppress(OSError):
            return f"in {os.readlink(f'/proc/{self.driver_pid()}/cwd')}"
        return ""


class NoRunningJobError(ConnectionError):
    """No job of this user runs on this machine, or none that was asked for."""


class SeveralRunningJobsError(ConnectionError):
    """More than one job could be meant.

    Attributes:
        jobs: to choose from.
    """

    def __init__(self, jobs: Sequence[RunningJob]) -> None:
        lines = "\n".join(f"  {job.line()}" for job in jobs)
        super().__init__(
            f"{len(jobs)} jobs of this user run on this machine:\n{lines}\nhint: name one: --job of a command, "
            f"{ADDRESS} or the address of init() (a session directory)"
        )
        self.jobs = list(jobs)


def running_jobs(environ: Mapping[str, str] | None = None) -> list[RunningJob]:
    """Return this user's jobs on this machine, the newest first."""
    nodes: dict[str, list[SessionInfo]] = {}
    for info in live_sessions(environ):
        nodes.setdefault(info.session, []).append(info)
    return [RunningJob(infos[0], len(infos)) for infos in nodes.values()]


def find_running_job(wanted: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """Return the session directory of the job that is meant.

    Args:
        wanted: Slurm's id of the job, the name of its session or of its program (see `jobs_meant`), or a session
            directory; None or "auto": what HPCRAY_SESSION says, else HPCRAY_ADDRESS, else the job of this shell's
            allocation, else the only one.
        environ: the variables, of this process by default.

    Raises:
        NoRunningJobError: there is none.
        SeveralRunningJobsError: more than one could be meant.
    """
    environ = os.environ if environ is None else environ
    if wanted in (None, "auto"):
        wanted = environ.get(OWN_SESSION) or environ.get(ADDRESS)
    if wanted is not None and os.path.isabs(wanted):
        try:
            return read_session(wanted).path
        except StartupError as error:
            raise NoRunningJobError(str(error)) from None
    jobs = running_jobs(environ)
    if wanted is None:
        allocation = environ.get("SLURM_JOB_ID", "")
        found = [job for job in jobs if allocation and job.node.slurm_job == allocation] or jobs
        if not found:
            raise NoRunningJobError("no running hpcray node of this user on this machine; hint: start the job first")
    else:
        found = jobs_meant(wanted, jobs, lambda job: job.called)
        if not found:
            known = ", ".join(job.job_id for job in jobs) or "none"
            raise NoRunningJobError(
                f"no job {wanted!r} of this user on this machine; hint: those that run here: {known}"
            )
    if len(found) > 1:
        raise SeveralRunningJobsError(found)
    return found[0].path


# ------------------------------------------------------------ dashboard address
# Where the dashboard of a node listens, while one does: `ClientContext.dashboard_url`.


_FILE = "dashboard"
UNIX = "unix:"


@contextlib.contextmanager
def published_dashboard(session_dir: str, address: str) -> Iterator[None]:
    """Say meanwhile where the dashboard of a node listens: `127.0.0.1:8265`, or `unix:` and a path.

    The file is locked as long as this process lives. Of two dashboards the first one says so.
    """
    path = os.path.join(session_dir, _FILE)
    fd = open_private_file(path, os.O_RDWR | os.O_CREAT, CLOSED)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        yield
        return
    try:
        os.truncate(fd, 0)
        os.write(fd, address.encode())
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def dashboard_address(session_dir: str) -> str:
    """Return where the dashboard of a node listens; "" where there is none."""
    try:
        with open(open_private_file(os.path.join(session_dir, _FILE), os.O_RDONLY, CLOSED), encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return file.read()
    except OSError:
        pass
    return ""  # none, or one that was killed
