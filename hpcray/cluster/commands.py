"""The commands of submitted jobs: `hpcray submit`, `jobs`, `logs`, `cancel`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from hpcray.base.errors import GetTimeoutError
from hpcray.base.job_errors import JobError, SubmitError

_FOLDER = click.option("--folder", help="Where jobs are kept (default: $HPCRAY_JOBS, or ./.hpcray-jobs).")
_POLL = 0.2
_STATE_COLOURS = {"COMPLETED": "green", "RUNNING": "cyan", "PENDING": "yellow", "UNKNOWN": "yellow"}


@contextmanager
def _told() -> Iterator[None]:
    """Errors of ours as one message and exit code 1."""
    try:
        yield
    except (SubmitError, JobError) as error:
        raise click.ClickException(str(error)) from None


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-N", "--nodes", default=1, help="hpcray nodes.", show_default=True)
@click.option("--gpus-per-node", type=int, help="GPUs of each node.")
@click.option("--cpus-per-node", type=int, help="CPUs of each node.")
@click.option("--mem", help="Memory of each node, such as 16g (Slurm).")
@click.option("-t", "--time", "limit", help="Time limit as for sbatch: minutes, 1:30:00, 2-12.")
@click.option("-p", "--partition", help="Slurm's partition.")
@click.option("-J", "--name", help="Name of the job (default: the script's).")
@click.option("--executor", type=click.Choice(["auto", "slurm", "local"]), default="auto", show_default=True)
@click.option("--requeue", type=int, default=0, metavar="K", help="Start again up to K times when its time is up.")
@click.option("-x", "--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable of the job.")
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION[=VALUE]", help="A further option, as account=a1.")
@click.option("--wait", is_flag=True, help="Wait for its end, and exit with its code.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@_FOLDER
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str, args: tuple[str, ...], limit: str | None, variables: tuple[str, ...], extra: tuple[str, ...],
    wait: bool, module: bool, **options: Any,
) -> None:  # fmt: skip
    """Submit a script as a job of several hpcray nodes; what follows SCRIPT belongs to it. Prints the job's id.

    Exit code: 0 submitted; 1 not submitted; with --wait the script's.
    """
    from hpcray.cluster.submission import submit as submit_job

    words = ("-m", script, *args) if module else (script, *args)
    with _told():
        job = submit_job(
            *words, time=limit, env=dict(_pair(text) for text in variables), sbatch=_sbatch_options(extra), **options
        )
        click.echo(job.job_id)
        print(f"{job.name}: {job.nodes} node(s), {job.executor}; hpcray logs -f {job.job_id}", file=sys.stderr)
        if wait:
            sys.exit(int(job.result()))


@click.command()
@_FOLDER
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that have ended (default: the last 20).")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def jobs(folder: str | None, everything: bool, as_json: bool) -> None:
    """List submitted jobs, the newest first."""
    from hpcray.cluster.jobs import list_jobs, states

    with _told():
        found = list_jobs(folder)
        found = found if everything else found[:20]
        state = states(found)
    rows = [
        {
            "job_id": job.job_id,
            "name": job.name,
            "state": state[job.folder.name],
            "executor": job.executor,
            "nodes": job.nodes,
            "submitted": job.record.submitted,
            "command": list(job.record.command),
            "folder": str(job.folder),
        }
        for job in found
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        _show(rows)


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@_FOLDER
def logs(job_id: str, follow: bool, folder: str | None) -> None:
    """Print what a job (its id, or its name) wrote: its standard output and, on standard error, its standard error.

    Exit code: 1 where there is no such job. Ctrl-C ends the command, not the job.
    """
    from hpcray.cluster.jobs import find_job

    with _told():
        job = find_job(job_id, folder)
    offsets = {"out": 0, "err": 0}
    _quiet_pipe()
    try:
        while True:
            ended = not follow or job.done()
            for stream, sink in (("out", sys.stdout), ("err", sys.stderr)):
                offsets[stream] = _copy(job.log_path(stream), offsets[stream], sink.buffer)
            if ended:
                break
            time.sleep(_POLL)
    except KeyboardInterrupt:
        sys.exit(130)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.option("--wait", "patience", type=float, default=30.0, show_default=True, metavar="S", help="Wait for the end.")
@_FOLDER
def cancel(job_ids: tuple[str, ...], patience: float, folder: str | None) -> None:
    """End jobs, by id or name.

    Exit code: 1 where one does not exist, cannot be cancelled, or has not ended in time; the others are cancelled.
    """
    from hpcray.cluster.jobs import Job, find_job

    wrong: list[str] = []
    asked: list[Job[Any]] = []
    for job_id in job_ids:
        try:
            job = find_job(job_id, folder)
            job.cancel()
            asked.append(job)
        except (SubmitError, JobError) as error:
            wrong.append(str(error))
    for job in asked:
        try:
            job.wait(patience)
        except GetTimeoutError:
            job.kill()
            wrong.append(f"{job.job_id} has not ended within {patience:g} s of being told to")
            continue
        click.echo(f"{job.job_id} {job.state}")
    if wrong:
        raise click.ClickException("\n".join(wrong))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise click.UsageError(f"-x {text}: NAME=VALUE is wanted")
    return name, value


def _sbatch_options(texts: tuple[str, ...]) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        found[name] = value if equals else True
    return found


def _copy(path: os.PathLike[str], offset: int, sink: Any) -> int:
    """Write what a file holds from `offset` on; the new offset."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while data := file.read(1 << 16):
                sink.write(data)
                offset += len(data)
    except FileNotFoundError:
        return offset
    sink.flush()
    return offset


def _quiet_pipe() -> None:
    """`hpcray logs | head` ends as other programs do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    if not rows:
        click.echo("no jobs here; hint: --folder, or hpcray submit script.py")
        return
    table = Table("job", "name", "state", "executor", "nodes", "submitted", "command")
    for row in rows:
        colour = _STATE_COLOURS.get(row["state"], "red")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["submitted"]))
        command = " ".join(row["command"])
        table.add_row(
            row["job_id"],
            row["name"],
            f"[{colour}]{row['state']}[/]",
            row["executor"],
            str(row["nodes"]),
            when,
            command,
        )
    Console().print(table)
