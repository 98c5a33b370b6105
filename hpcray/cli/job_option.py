"""The option `--job` of the commands that look at a running job, and the way to that job: here, or through Slurm."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import click

from hpcray.cli.slurm_entry import enter_slurm_job, slurm_job_on, slurm_jobs_meant
from hpcray.common.exceptions import RayError, SubmitError
from hpcray.common.terminal_text import plain, plain_line
from hpcray.history.runs import JobNames, jobs_meant
from hpcray.job_submission.cluster_address import find_cluster
from hpcray.jobs.batch_queues import active_jobs
from hpcray.jobs.submitted_job import SubmittedJob, find_job
from hpcray.platform.config_files import ConfigFileError, file_settings
from hpcray.platform.session_directory import ADDRESS, OWN_SESSION
from hpcray.processes.running_jobs import NoRunningJobError, SeveralRunningJobsError, find_running_job, running_jobs
from hpcray.ray_start.surroundings import parse_cluster_address
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state import attached

_SLURM = "slurm://"
_NO_GUESS = 2  # exit code where more than one job could be meant

job_option = click.option(
    "--job", "--address", "address", default="auto", metavar="JOB",
    help="The job: its id or name in Slurm or of `hpcray submit`, its program, the name of its session, the beginning "
    "of one of these names, or a session directory (default: what HPCRAY_SESSION or else HPCRAY_ADDRESS says, the job "
    "of this allocation, or the only one; see hpcray jobs).",
)  # fmt: skip


@contextlib.contextmanager
def errors_as_messages(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds end the command with their text."""
    try:
        yield
    except BrokenPipeError:  # a ConnectionError, but of `hpcray ... | head`: click ends the command without a word
        raise
    except kinds as error:
        raise click.ClickException(plain_line(error)) from None


def check_configuration() -> None:
    """End the command with a message where a configuration file is not valid: any command may need a directory that it
    names."""
    with errors_as_messages(ConfigFileError):
        file_settings(os.environ)


@contextlib.contextmanager
def job(wanted: str) -> Iterator[CoreWorker]:
    """The running job that `--job` names; the command ends with a message where there is none."""
    with errors_as_messages(ConnectionError, ValueError, RayError), attached(session_directory(wanted)) as process:
        yield process


def session_directory(wanted: str) -> str:
    """Return the session directory of the job that `--job` names.

    Where no node of it is on this machine, the command runs again on the job's first node, through Slurm. Where more
    than one job could be meant, it prints them and ends with exit code 2.
    """
    name = wanted.removeprefix(_SLURM)
    with errors_as_messages(ValueError):
        parts = parse_cluster_address(wanted)
    try:
        if parts is not None:
            return find_cluster(wanted, parts)
        return find_running_job(name)
    except SeveralRunningJobsError as error:
        _end_without_guess(str(error))
    except NoRunningJobError as error:
        if parts is not None:
            _enter_job_on(wanted)
            raise click.ClickException(str(error)) from None
        if name == "auto":
            name = os.environ.get(OWN_SESSION) or os.environ.get(ADDRESS) or "auto"
        if (submitted := submitted_job(name)) is not None:
            name = submitted.job_id
            if here := next((job.path for job in running_jobs() if name in job.submitted_ids), ""):
                return here
        found = slurm_jobs_meant(name)
        if len(found) > 1:
            lines = [f"  --job {one.job_id}  {plain(one.name)}  {one.node_list}  {one.time_left} left" for one in found]
            _end_without_guess("\n".join([f"no job on this machine, and {len(found)} of this user in Slurm:", *lines]))
        if found:
            # A name of Slurm's means the only session there; that of a session, or its directory, goes on with it.
            named = name in ("auto", found[0].job_id) or found[0].name.startswith(name)
            words = _words_with([] if named else ["--job", name])
            enter_slurm_job(found[0].job_id, _command_module(), words, found[0])
        for one in jobs_meant(name, active_jobs(), lambda job: JobNames((job.job_id,), (job.name,))):
            if one.state != "RUNNING":
                text = f"job {one.job_id} ({plain(one.name)}) is {one.state}: it has no node yet"
                raise click.ClickException(text) from None
        raise click.ClickException(str(error)) from None


def submitted_job(name: str) -> SubmittedJob[Any] | None:
    """Return the job of `hpcray submit` that a name means; None: there is none."""
    if name == "auto" or os.path.isabs(name):
        return None
    try:
        return find_job(name)
    except SubmitError:
        return None


def _enter_job_on(address: str) -> None:
    """Run the command again in the Slurm job that has the host of a cluster's address, if there is one."""
    if found := slurm_job_on(address):
        enter_job(*found, address)


def enter_job(job_id: str, host: str, address: str) -> NoReturn:
    """Run the command again on a host of a Slurm job, and end with its exit code.

    Args:
        job_id: Slurm's id. host: the name of the node. address: of the cluster, for the command there.
    """
    enter_slurm_job(job_id, _command_module(), _words_with(["--job", address]), host=host)


def _words_with(named: Sequence[str]) -> list[str]:
    """The words of this command line, with another way to name the job."""
    words = without_options(sys.argv[1:], "--job", "--address")
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *named, *words[end:]]


def parse_sbatch_options(texts: Sequence[str]) -> dict[str, str | bool]:
    """Convert the values of `--sbatch`, OPTION or OPTION=VALUE, to options by name."""
    return {name: value if equals else True for name, equals, value in (text.partition("=") for text in texts)}


def _command_module() -> str:
    """The module of the command line that runs: `hpcray`'s or `ray`'s."""
    spec = sys.modules[click.get_current_context().find_root().command.callback.__module__].__spec__
    return spec.name if spec is not None else "hpcray.cli"


def _end_without_guess(text: str) -> NoReturn:
    click.echo(plain(f"hpcray: {text}", lines=True), err=True)
    sys.exit(_NO_GUESS)


def without_options(words: Sequence[str], *names: str) -> list[str]:
    """Return the words of a command line without these options and their values; what follows `--` stays."""
    end = list(words).index("--") if "--" in words else len(words)
    kept: list[str] = []
    rest = iter(words[:end])
    for word in rest:
        if word in names:
            next(rest, None)
        elif not word.startswith(tuple(f"{name}=" for name in names)):
            kept.append(word)
    return [*kept, *words[end:]]
