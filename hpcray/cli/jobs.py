"""`hpcray submit`, `jobs`, `logs`, `cancel` and `serve`: jobs that are submitted, listed, read and ended."""

from __future__ import annotations

import importlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, get_args

import click
from rich.text import Text

from hpcray.autoscaler.batch_systems import SLURM
from hpcray.cli import json_option, print_json
from hpcray.cli.history import ended_job, print_log_record, print_logs, remove_history
from hpcray.cli.job_option import errors_as_messages, job_option, parse_sbatch_options
from hpcray.cli.observe import print_worker_lines, text_lines
from hpcray.cli.slurm_entry import slurm_jobs_meant
from hpcray.common.config import ExecutorName
from hpcray.common.exceptions import GetTimeoutError, JobError, SubmitError
from hpcray.common.terminal_text import plain
from hpcray.history.job_history import JobHistory
from hpcray.history.outcome import outcome
from hpcray.history.runs import Run, history_root, jobs_meant, runs
from hpcray.jobs.batch_queues import ActiveJob, active_jobs, query_states
from hpcray.jobs.submission import (
    LOCAL,
    JobPreview,
    check_request,
    choose_executor,
    client_mode_command,
    preview,
    with_configured_place,
    words_of,
)
from hpcray.jobs.submission import submit as submit_job
from hpcray.jobs.submitted_job import SubmittedJob, find_job, list_jobs, states
from hpcray.processes.running_jobs import RunningJob, running_jobs
from hpcray.state.reports import format_duration, print_table

_FOLDER = click.option("--folder", help="Directory of the jobs (default: $HPCRAY_JOBS, or ./.hpcray-jobs).")
_ERRORS = (SubmitError, JobError)
_SHOWN = 80  # characters of a command line
_POLL = 0.2  # seconds between looks at a log that is followed
_JOB_COLUMNS = {
    "job_id": "job", "name": "name", "state": "state", "executor": "executor", "nodes": "nodes", "driver": "driver",
    "left": "left", "submitted": "submitted", "command": "command",
}  # fmt: skip
_STATE_COLOURS = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "UNKNOWN": "yellow",
    "LAST_SEEN": "yellow",
}

Row = dict[str, Any]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-N", "--nodes", default=1, help="hpcray nodes.", show_default=True)
@click.option("--gpus-per-node", type=int, help="GPUs of each node.")
@click.option("--cpus-per-node", type=int, help="CPUs of each node.")
@click.option("--mem", help="Memory of each node, such as 16g (Slurm).")
@click.option("-t", "--time", "limit", help="Time limit as for sbatch: minutes, 1:30:00, 2-12.")
@click.option("-p", "--partition", help="Slurm's partition, or the queue of PBS or Flux.")
@click.option("-J", "--name", help="Name of the job (default: the script's).")
@click.option("--executor", type=click.Choice(get_args(ExecutorName)), default="auto", show_default=True)
@click.option("--requeue", type=int, default=0, metavar="K", help="Start again up to K times after the time limit.")
@click.option("-x", "--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable of the job.")
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION[=VALUE]", help="A further option, as account=a1.")
@click.option("--wait", is_flag=True, help="Wait for the end of the job, and exit with its code.")
@click.option(
    "--driver",
    type=click.Choice(["batch", "here"]),
    default="batch",
    show_default=True,
    help="Where the script runs: on the job's first node, or on this machine, with the nodes elsewhere.",
)
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@click.option("--dry-run", is_flag=True, help="Print the batch script, or the command on this machine; submit nothing.")
@json_option("an object: the job, with --wait its state and exit code; with --dry-run the script and commands")
@_FOLDER
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str, args: tuple[str, ...], limit: str | None, variables: tuple[str, ...], extra: tuple[str, ...],
    wait: bool, driver: str, module: bool, dry_run: bool, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a script as a job of several hpcray nodes; what follows SCRIPT belongs to it. Prints the job's id.

    Exit code: 0 submitted; 1 not submitted; with --wait, and with --driver here, the script's.
    """
    words = ("-m", script, *args) if module else (script, *args)
    sbatch = parse_sbatch_options(extra)
    with errors_as_messages(*_ERRORS):
        if driver == "here":
            request = check_request(
                script, options["nodes"], options["gpus_per_node"], options["cpus_per_node"], options["mem"], limit,
                options["partition"], False, dict(map(_pair, variables)), sbatch,
            )  # fmt: skip
            kind = choose_executor(options["executor"])
            if kind not in (SLURM, LOCAL):
                raise SubmitError(f"--driver here needs Slurm, and this would run in {kind}; hint: --driver batch")
            request = with_configured_place(request) if kind == SLURM else request
            line, environ = client_mode_command(words, request, kind)
            if dry_run:
                provider = f"HPCRAY_NODE_PROVIDER={kind}"
                found = JobPreview(kind, "", (), ("env", provider, *words_of(request.env), *line))
                _print_preview(found, as_json)
                return
            if as_json:
                raise click.UsageError("--json: with --driver here standard output is the program's")
            sys.stdout.flush()
            os.execve(line[0], line, environ)
        options |= {"time": limit, "env": dict(map(_pair, variables)), "sbatch": sbatch}
        if dry_run:
            _print_preview(preview(*words, **options), as_json)
            return
        job = submit_job(*words, **options)
        said = f"{job.name}: {job.nodes} node(s), {job.executor}; hpcray logs -f {job.job_id}"
        code = None
        if not as_json:
            click.echo(job.job_id)
        click.echo(plain(said), err=True)
        try:
            code = int(job.result()) if wait else None
        finally:  # where it was cancelled, too
            if as_json:
                print_json(_submitted(job, code, wait))
        sys.exit(code)


def _submitted(job: SubmittedJob[Any], code: int | None, ended: bool) -> dict[str, Any]:
    known = {"job_id": job.job_id, "name": job.name, "executor": job.executor, "nodes": job.nodes}
    return {**known, "folder": str(job.folder), **({"state": job.state, "exit_code": code} if ended else {})}


def _print_preview(found: JobPreview, as_json: bool) -> None:
    """The batch script, and in comments how it is submitted, and what it runs; or the command on this machine."""
    command, by = shlex.join(found.command), shlex.join(found.submit)
    if as_json:
        row = {"executor": found.executor, "script": found.script or None}
        print_json({**row, "submit": list(found.submit) or None, "command": list(found.command)})
    elif not found.script:
        click.echo(plain(command))
    else:
        click.echo(plain(found.script.rstrip(), lines=True))
        click.echo(f"\n# it is submitted with: {plain(by)}\n# it runs: {plain(command)}")


@click.group(invoke_without_command=True)
@_FOLDER
@click.option("-a", "--all", "everything", is_flag=True, help="All jobs (default: the last 20).")
@json_option("a list of jobs")
@click.pass_context
def jobs(context: click.Context, folder: str | None, everything: bool, as_json: bool) -> None:
    """List jobs, the newest first: those that run on this machine, those in Slurm's queue, submitted ones, and those
    that have ended and left a history, with how they ended."""
    if context.invoked_subcommand is not None:
        return
    with errors_as_messages(*_ERRORS):
        found = list_jobs(folder)
        found = found if everything else found[:20]
        state = states(found)
    rows = job_rows(found, state, None if everything else 20)
    if as_json:
        print_json(rows)
    else:
        _print_jobs(rows)


jobs.add_command(remove_history)


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Print new output until the job has ended.")
@click.option("--task", default="", metavar="NAME", help="Lines of tasks of this function.")
@click.option("--actor", default="", metavar="NAME", help="Lines of actors of this name, class or id.")
@click.option("--node", "nodes", type=int, multiple=True, metavar="N", help="Lines of workers of this node.")
@click.option("--grep", "pattern", default="", metavar="REGEX", help="Lines that contain this.")
@job_option
@json_option("a stream of lines: text, stream (out or err), and as known who, pid, node, file")
@_FOLDER
def logs(
    job_id: str | None, follow: bool, task: str, actor: str, nodes: tuple[int, ...], pattern: str, address: str,
    as_json: bool, folder: str | None,
) -> None:  # fmt: skip
    """Print what the workers of a running job have printed, a file after the other, with who has printed it.

    With JOB, the id or name of a submitted job: its standard output and, on standard error, its standard error; also
    after its end. Exit code: 1 where there is no such job. Ctrl-C ends the command, not the job.
    """
    if job_id is None and (history := ended_job(address)):
        print_logs(history, pattern, as_json)
        return
    if job_id is None:
        print_worker_lines(address, follow, task, actor, nodes, pattern, as_json)
        return
    try:
        job = find_job(job_id, folder)
    except _ERRORS as error:
        if history := ended_job(job_id):
            print_logs(history, pattern, as_json)
            return
        if jobs_meant(job_id, running_jobs(), lambda one: one.called) or slurm_jobs_meant(job_id):
            print_worker_lines(job_id, follow, task, actor, nodes, pattern, as_json)
            return
        hint = f"for lines of a running job: hpcray logs --actor {job_id}, or --task {job_id}"
        raise click.ClickException(f"{error}; {hint}") from None
    readers = {stream: _JobOutput(stream, as_json) for stream in ("out", "err")}
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `hpcray logs | head` ends silently
    try:
        while True:
            ended = not follow or job.done()
            for stream, reader in readers.items():
                reader.copy(job.log_path(stream), ended)
            if ended:
                break
            time.sleep(_POLL)
    except KeyboardInterrupt:
        sys.exit(130)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.option(
    "--wait", "timeout", type=float, default=30.0, show_default=True, metavar="S", help="Seconds to wait for the end."
)
@json_option("a list of the jobs that have ended: job_id, state")
@_FOLDER
def cancel(job_ids: tuple[str, ...], timeout: float, as_json: bool, folder: str | None) -> None:
    """End jobs, given by id or name.

    Exit code: 1 where a job does not exist, cannot be cancelled, or has not ended in time; the others are cancelled.
    """
    wrong: list[str] = []
    cancelled: list[SubmittedJob[Any]] = []
    ended: list[dict[str, str]] = []
    for job_id in job_ids:
        try:
            job = find_job(job_id, folder)
            job.cancel()
            cancelled.append(job)
        except (SubmitError, JobError) as error:
            wrong.append(str(error))
    for job in cancelled:
        try:
            job.wait(timeout)
        except GetTimeoutError:
            job.kill()
            wrong.append(f"{job.job_id} has not ended within {timeout:g} s of the request")
            continue
        ended.append({"job_id": job.job_id, "state": job.state})
        if not as_json:
            click.echo(plain(f"{job.job_id} {job.state}"))
    if as_json:
        print_json(ended)
    if wrong:
        raise click.ClickException("\n".join(wrong))


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def serve(args: tuple[str, ...]) -> None:
    """The command line of Ray Serve: run, deploy, status, ... (hpcray serve --help). Needs Ray's libraries.

    `run` starts a node of its own, or joins the job that --address names; so do the others: RAY_ADDRESS, or the newest.
    """
    importlib.import_module("hpcray.compat.ray")
    try:
        scripts = importlib.import_module("ray.serve.scripts")
    except ImportError as error:
        raise click.ClickException(f"{error}; hint: docs/how-to/ray-libraries.md") from None
    scripts.cli(args, prog_name="hpcray serve")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"-x {text}: NAME=VALUE is needed")
    return name, value


class _JobOutput:
    """The output that a submitted job writes to one of its files, on the way to the same stream here; or as records."""

    def __init__(self, stream: str, as_json: bool) -> None:
        self._stream, self._as_json = stream, as_json
        self._offset, self._rest = 0, b""

    def copy(self, path: os.PathLike[str], last: bool) -> None:
        """Copy what is new in the file. last: there is no later call."""
        sink = (sys.stdout if self._stream == "out" else sys.stderr).buffer
        with suppress(FileNotFoundError), open(path, "rb") as file:
            file.seek(self._offset)
            while data := file.read(1 << 16):
                self._offset += len(data)
                if self._as_json:
                    whole, end, self._rest = (self._rest + data).rpartition(b"\n")
                    self._print_lines(whole + end)
                else:
                    sink.write(data)
            sink.flush()
        if last:
            self._print_lines(self._rest)

    def _print_lines(self, data: bytes) -> None:
        for text in text_lines([data]):
            print_log_record(text, self._stream == "err")


def _print_jobs(rows: list[dict[str, Any]]) -> None:
    if not rows:
        click.echo("no jobs here; hint: --folder, or hpcray submit script.py")
        return
    for row in rows:
        row["state"] = Text(row["state"], style=_STATE_COLOURS.get(row["state"], "red"))
        row["submitted"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["submitted"]))
        row["command"] = " ".join(" ".join(row["command"]).split())[:_SHOWN]
    print_table(list(_JOB_COLUMNS.values()), [[row[name] for name in _JOB_COLUMNS] for row in rows])


# ------------------------------------------------------------ rows
# The rows of `hpcray jobs`: submitted jobs, those that run on this machine, those in Slurm's queue, and those that have
# ended and left a history, each once.


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
        own = next((of_job[ident] for ident in running.submitted_ids if ident in of_job), None)
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
        if (row := of_job.get(queued.job_id)) is None:
            rows.append(_queued_row(queued))
        elif not row["left"]:
            row["left"] = queued.time_left
    _add_ended(rows, most_ended)
    return sorted(rows, key=lambda row: -row["submitted"])


def _add_ended(rows: list[Row], most: int | None) -> None:
    """Add the jobs that have left a history, and what it says to those that are listed already."""
    known = {row["run"] for row in rows if row["run"]}
    listed: dict[str, Row] = {row["job_id"]: row for row in rows}
    by_folder = {os.path.basename(row["folder"]): row for row in rows if row["folder"]}
    found = [run for run in runs(history_root(os.environ)) if run.name not in known][:most]
    histories = [(run, JobHistory(run, whole=False)) for run in found]
    in_slurm = [run.job for run, history in histories if run.job not in listed and _of_slurm(history)]
    slurm_states = query_states(list(dict.fromkeys(in_slurm)))
    for run, history in histories:
        result = outcome(history)
        if (row := listed.get(run.job) or by_folder.get(os.path.basename(history.submitted))) is None:
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
