"""`ray job` and `hpcray job`: jobs in a cluster that runs. Options and output are Ray's."""

from __future__ import annotations

import asyncio
import json
import os
import pprint
import shlex
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import click

from hpcray.cli import json_option, print_json, print_record, typed
from hpcray.cli.job_option import errors_as_messages, without_options
from hpcray.cli.slurm_entry import enter_hidden_node, enter_slurm_job, slurm_job_on
from hpcray.common.config import parse_size
from hpcray.common.exceptions import RayError
from hpcray.common.terminal_text import plain
from hpcray.compat.names.serve_submission import parse_runtime_env_args
from hpcray.job_submission import JobStatus, JobSubmissionClient
from hpcray.job_submission.cluster_address import ADDRESS_VARIABLES, replaced_by_variables
from hpcray.processes.running_jobs import NoRunningJobError
from hpcray.runtime_env.runtime_env import load_function

_SUBMIT_HOOK = "RAY_JOB_SUBMIT_HOOK"
_SLURM = "slurm://"
_ERRORS = (ConnectionError, RuntimeError, TypeError, ValueError, OSError, RayError)
_HEADERS = "RAY_JOB_HEADERS"
_RECORDS, _SILENT = "hpcray.records", "hpcray.silent"
_COLORS = {"auto": None, "true": True, "false": False}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}
_POLL = 1.0  # seconds between looks at a job that was stopped


@click.group()
def job() -> None:
    """Submit, stop, delete, or list jobs in a cluster that runs on this machine, or in a Slurm job."""


def _command(function: Callable[..., None]) -> click.Command:
    """Make a command of `job` with the options that all of them have."""

    def run(
        address: str | None, headers: str | None, verify: str, log_style: str, log_color: str, verbose: int,
        **options: Any,
    ) -> None:  # fmt: skip
        context = click.get_current_context()
        chosen = _COLORS[log_color.lower()]
        context.color = context.color if chosen is None else chosen
        context.meta[_RECORDS], context.meta[_SILENT] = log_style.lower() == "record", options["as_json"]
        address = replaced_by_variables(address)
        if address is not None and address.startswith(_SLURM):
            _enter_slurm_job(address.removeprefix(_SLURM))
        with errors_as_messages(*_ERRORS):
            try:
                client = JobSubmissionClient(address, headers=_headers(headers), verify=_bool_or_path(verify))
            except NoRunningJobError:
                enter_hidden_node(address, without_options(sys.argv[sys.argv.index("job") :], "--address"))
                if address is not None and (found := slurm_job_on(address)):
                    _enter_slurm_job(*found)
                raise
            _say(f"Job submission server address: {client.get_address()}")
            function(client, **options)

    params = list(getattr(function, "__click_params__", ()))[::-1]
    address_help = (
        "Address of the cluster: http://H:8265, H:P, a session directory, or slurm://JOBID; H is any name of its "
        "head's host (default: what HPCRAY_ADDRESS says, or the only cluster of this user on this machine). "
        "RAY_API_SERVER_ADDRESS and RAY_ADDRESS replace it."
    )
    unused = "No request is made over HTTP, so that it has no effect."
    common = [
        click.Option(["--address"], help=address_help),
        click.Option(
            ["--verify"], default="True", show_default=True, metavar="BOOL|PATH", help=f"For TLS. {unused}"
        ),
        click.Option(["--headers"], metavar="JSON", help=f"Headers of requests. {unused}"),
        click.Option(
            ["--log-style"], type=click.Choice(["auto", "record", "pretty"], case_sensitive=False), default="auto",
            show_default=True, help="record: each line of this command with its time, as in a log.",
        ),
        click.Option(
            ["--log-color"], type=click.Choice(["auto", "false", "true"], case_sensitive=False), default="auto",
            show_default=True, help="Colours; auto: on a terminal.",
        ),
        click.Option(["-v", "--verbose"], count=True, help="Accepted, as all is said anyway."),
    ]  # fmt: skip
    made = click.Command(function.__name__.rstrip("_"), params=[*common, *params], callback=run, help=function.__doc__)
    job.add_command(made)
    return made


@_command
@click.option("--job-id", help="Deprecated: --submission-id.")
@click.option("--submission-id", help="Id of the job (default: a new one).")
@click.option("--runtime-env", help="Path of a YAML file with a runtime_env.")
@click.option("--runtime-env-json", help="The runtime_env as JSON.")
@click.option("--working-dir", help="Directory of the files of the job; replaces the one in the runtime_env.")
@click.option("--metadata-json", help="Metadata of the job as JSON.")
@click.option("--entrypoint-num-cpus", type=float, help="CPUs for the entrypoint itself.")
@click.option("--entrypoint-num-gpus", type=float, help="GPUs for the entrypoint itself.")
@click.option("--entrypoint-memory", type=typed(parse_size), metavar="SIZE", help="Memory for the entrypoint, as 2g.")
@click.option("--entrypoint-resources", help="Further resources for the entrypoint itself, as JSON.")
@click.option("--entrypoint-label-selector", help="Labels of the node of the entrypoint, as JSON.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end of the job, nor print its output.")
@json_option("an object: the facts of the job, whose output goes to standard error")
@click.argument("entrypoint", nargs=-1, required=True, type=click.UNPROCESSED)
def submit(
    client: JobSubmissionClient, entrypoint: tuple[str, ...], no_wait: bool, runtime_env: str | None,
    runtime_env_json: str | None, working_dir: str | None, metadata_json: str | None, job_id: str | None,
    submission_id: str | None, entrypoint_resources: str | None, entrypoint_label_selector: str | None,
    as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a job, and print its output until it has ended: ray job submit -- python program.py --steps 3

    Exit code 1 where it has failed.
    """
    if job_id:
        click.echo("--job-id option is deprecated. Please use --submission-id instead.", err=True)
    submission_id = submission_id or job_id
    if os.environ.get(_SUBMIT_HOOK):
        load_function(os.environ[_SUBMIT_HOOK])(
            address=client.get_address(), job_id=submission_id, submission_id=submission_id, runtime_env=runtime_env,
            runtime_env_json=runtime_env_json, metadata_json=metadata_json, working_dir=working_dir,
            entrypoint=entrypoint, entrypoint_resources=entrypoint_resources,
            entrypoint_label_selector=entrypoint_label_selector, no_wait=no_wait, **options,
        )  # fmt: skip
    job_id = client.submit_job(
        entrypoint=shlex.join(entrypoint),
        submission_id=submission_id,
        runtime_env=parse_runtime_env_args(runtime_env, runtime_env_json, working_dir),
        metadata=_parsed("metadata-json", metadata_json),
        entrypoint_resources=_parsed("entrypoint-resources", entrypoint_resources),
        entrypoint_label_selector=_parsed("entrypoint-label-selector", entrypoint_label_selector),
        **options,
    )
    _print_framed(f"Job '{job_id}' submitted successfully", "green")
    _say("Next steps")
    for text, command in (
        ("Query the logs of the job:", "logs"),
        ("Query the status of the job:", "status"),
        ("Request the job to be stopped:", "stop"),
    ):
        _say(f"  {text}\n    {click.style(f'ray job {command} {job_id}', bold=True)}")
    _say()
    if not no_wait:
        _say("Tailing logs until the job exits (disable with --no-wait):")
        ended = _follow(client, job_id, err=as_json)
    if as_json:
        _print_facts(client, job_id)
    if not no_wait and ended is JobStatus.FAILED:
        sys.exit(1)


@_command
@json_option("an object: the facts of the job")
@click.argument("job-id")
def status(client: JobSubmissionClient, job_id: str, as_json: bool) -> None:
    """Print the status of a job."""
    _print_status(client, job_id)
    if as_json:
        _print_facts(client, job_id)


@_command
@click.option("--no-wait", is_flag=True, help="Do not wait for the end of the job.")
@json_option("an object: the facts of the job")
@click.argument("job-id")
def stop(client: JobSubmissionClient, no_wait: bool, job_id: str, as_json: bool) -> None:
    """Ask a job to end, and wait until it has."""
    _say(f"Attempting to stop job '{job_id}'")
    client.stop_job(job_id)
    if not no_wait:
        _say(f"Waiting for job '{job_id}' to exit (disable with --no-wait):")
        while not (found := client.get_job_status(job_id)).is_terminal():
            _say(f"Job has not exited yet. Status: {found}")
            time.sleep(_POLL)
        _print_status(client, job_id)
    if as_json:
        _print_facts(client, job_id)


@_command
@json_option("an object: the id of the job")
@click.argument("job-id")
def delete(client: JobSubmissionClient, job_id: str, as_json: bool) -> None:
    """Forget a job that has ended. Its log stays."""
    client.delete_job(job_id)
    _say(f"Job '{job_id}' deleted successfully")
    if as_json:
        print_json({"submission_id": job_id})


@_command
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@json_option("a stream of lines: text")
@click.argument("job-id")
def logs(client: JobSubmissionClient, follow: bool, job_id: str, as_json: bool) -> None:
    """Print the output of a job."""
    if follow:
        _follow(client, job_id, as_json=as_json)
    elif as_json:
        _print_lines(client.get_job_logs(job_id))
    else:
        click.echo(client.get_job_logs(job_id), nl=False)


@_command
@json_option("a list of the facts of each job")
def list_(client: JobSubmissionClient, as_json: bool) -> None:
    """List all jobs."""
    found = client.list_jobs()
    _say(pprint.pformat(found))
    if as_json:
        print_json([one.dict() for one in found])


def _follow(client: JobSubmissionClient, job_id: str, err: bool = False, as_json: bool = False) -> JobStatus:
    """Print a job's output to its end. Ctrl-C ends the command, not the job."""
    rest = ""

    async def follow() -> None:
        nonlocal rest
        async for piece in client.tail_job_logs(job_id):
            if as_json:
                whole, end, rest = (rest + piece).rpartition("\n")
                _print_lines(whole + end)
            else:
                click.echo(piece, nl=False, err=err)

    asyncio.run(follow())
    _print_lines(rest)
    return _print_status(client, job_id)


def _print_status(client: JobSubmissionClient, job_id: str) -> JobStatus:
    found = client.get_job_info(job_id)
    if found.status is JobStatus.SUCCEEDED:
        _print_framed(f"Job '{job_id}' succeeded", "green")
    elif found.status is JobStatus.STOPPED:
        _say(f"Job '{job_id}' was stopped", fg="yellow")
    else:
        if found.status is JobStatus.FAILED:
            _print_framed(f"Job '{job_id}' failed", "red")
        else:
            _say(f"Status for job '{job_id}': {found.status}")
        _say(f"Status message: {found.message}")
    return found.status


def _print_lines(text: str) -> None:
    for line in text.splitlines():
        print_record(text=line)


def _print_facts(client: JobSubmissionClient, job_id: str) -> None:
    print_json(client.get_job_info(job_id).dict())


def _say(text: str = "", **style: Any) -> None:
    """Print a line of this command's own, in the style that `--log-style` asks for; with `--json` none."""
    if click.get_current_context().meta.get(_SILENT):
        return
    if click.get_current_context().meta.get(_RECORDS):
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03}"
        for line in text.splitlines() or [""]:
            click.echo(f"{stamp}\tINFO {os.path.basename(__file__)} -- {plain(line)}")
    else:
        click.secho(plain(text, lines=True), **style)


def _print_framed(text: str, colour: str) -> None:
    line = "-" * len(text)
    _say()
    for one in (line, text, line):
        _say(one, fg=colour)
    _say()


def _parsed(option: str, text: str | None) -> dict[str, Any] | None:
    """The JSON object that an option holds."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--{option} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"--{option} is no JSON object: {text}")
    return found


def _headers(text: str | None) -> dict[str, Any] | None:
    """The headers that the option or the variable of Ray's gives."""
    text = os.environ.get(_HEADERS) if text is None else text
    return _parsed("headers", text)


def _bool_or_path(text: str) -> bool | str:
    """The value of `--verify`."""
    return _BOOLS.get(text.lower(), text)


def _enter_slurm_job(slurm_job: str, host: str = "") -> NoReturn:
    """Run this command again on a node of a Slurm job: on a host, or on the first one."""
    if not slurm_job.isdecimal():
        raise click.UsageError(f"--address {_SLURM}{slurm_job}: a job id is needed, as in slurm://4711 (see squeue)")
    for name in ADDRESS_VARIABLES:
        os.environ.pop(name, None)
    words = without_options(sys.argv[sys.argv.index("job") :], "--address")
    enter_slurm_job(slurm_job, "hpcray.cli.ray", words, host=host)
