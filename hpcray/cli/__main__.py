"""The `hpcray` command: `python -m hpcray.cli`. Here: `version`, `doctor`, and the commands of submitted jobs; in
`observe`: those that look at a running job."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any, get_args

import click
from rich.text import Text

from hpcray.autoscaler.batch_systems import SLURM
from hpcray.cli import nodes as node_commands
from hpcray.cli import observe
from hpcray.cli.attach import attach, bridge
from hpcray.cli.dashboard import dashboard
from hpcray.cli.debug import debug
from hpcray.cli.durable import durable
from hpcray.cli.history import ended_job, print_logs, remove_history, report
from hpcray.cli.job import job as job_group
from hpcray.cli.job_list import job_rows
from hpcray.cli.job_option import (
    check_configuration,
    errors_as_messages,
    job_option,
    parse_sbatch_options,
    version_option,
)
from hpcray.cli.nodes import config
from hpcray.cli.observe import print_worker_lines
from hpcray.cli.profile import profile
from hpcray.cli.progress import progress
from hpcray.cli.top import top
from hpcray.common.config import ExecutorName
from hpcray.common.exceptions import GetTimeoutError, JobError, SubmitError
from hpcray.common.terminal_text import plain
from hpcray.jobs.submission import LOCAL, check_request, choose_executor, client_mode_command, with_configured_place
from hpcray.jobs.submission import submit as submit_job
from hpcray.jobs.submitted_job import SubmittedJob, find_job, list_jobs, states
from hpcray.launch.launch_line import SrunSite, compose_step, has_mpich, protocol, try_srun
from hpcray.platform.allocation import compress_nodes, read_allocation
from hpcray.platform.process_control import module_line
from hpcray.state.doctor import FAIL, NOTE, OK, WARN, DoctorFinding, DoctorRow, examine, merge, package_version
from hpcray.state.doctor_step import examine_job, examine_nodes, judge_clocks
from hpcray.state.reports import print_table

_MARKS = {OK: ("ok", "green"), NOTE: ("", ""), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red")}
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


class _Commands(click.Group):
    """The commands. Where one cannot read or write a file, the message has its name and the reason."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OSError as error:
            if not isinstance(error.filename, str):
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from None


@click.group(
    cls=_Commands,
    params=[version_option],
    commands=[
        *observe.COMMANDS,
        *node_commands.COMMANDS,
        attach,
        bridge,
        config,
        dashboard,
        debug,
        durable,
        job_group,
        profile,
        progress,
        report,
        top,
    ],
    context_settings={"help_option_names": ["-h", "--help"]},
)
def main() -> None:
    """Ray's programming model on MPI, UCX and Slurm.

    To start a program, see: hpcray-launch --help
    """
    if click.get_current_context().invoked_subcommand not in ("doctor", "version"):
        check_configuration()


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(package_version("hpcray", "a source directory, not installed"))


@main.command()
@click.option("--require-rdma", is_flag=True, help="Fail unless object bytes would go over RDMA.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--here", is_flag=True, help="Examine this host only, in an allocation too.")
def doctor(require_rdma: bool, as_json: bool, here: bool) -> None:
    """Examine the platform of a job: this host, or in a Slurm allocation every node of it.

    Exit code 1 if a finding is red: a job on several nodes could not start.
    """
    given = read_allocation()
    if given.in_step and given.rank:
        return  # srun hpcray doctor: the task of rank 0 examines all nodes
    rows = [DoctorRow(finding) for finding in examine(require_rdma)] if here or given.kind != "slurm" else []
    rows = rows or _examine_allocation(require_rdma)
    if as_json:
        click.echo(json.dumps([{**asdict(row.finding), "nodes": row.nodes} for row in rows], indent=1))
    else:
        _print_findings(rows, len(given.nodes))
    if any(row.finding.level == FAIL for row in rows):
        sys.exit(1)


def _examine_allocation(require_rdma: bool) -> list[DoctorRow]:
    """The rows about the job, then those about its nodes."""
    given = read_allocation()
    mpi = protocol(os.environ, has_mpich())
    slurm = SrunSite(given, os.environ, mpi, try_srun(mpi, os.environ))
    command = module_line("hpcray.state.doctor_step")
    command += ["--require-rdma"] if require_rdma else []
    command += ["--without-mpi"] if slurm.problem else []
    nodes = examine_nodes(compose_step(slurm, command), given.nodes)
    job = examine_job(given, mpi, slurm.problem, os.environ)
    if nodes.missing:
        why = nodes.complaint.splitlines()[0] if nodes.complaint else "no answer in time"
        hint = "is the directory of this Python on every node? Else see the site's log of the node"
        job.append(
            DoctorFinding("Slurm", "nodes without a report", f"{compress_nodes(nodes.missing)}: {why}", FAIL, hint)
        )
    return [*map(DoctorRow, job), DoctorRow(judge_clocks(nodes.offsets)), *merge(nodes.reports)]


def _print_findings(rows: list[DoctorRow], nodes: int) -> None:
    topic = ""
    for row in rows:
        finding = row.finding
        if finding.topic != topic:
            topic = finding.topic
            click.secho(topic, bold=True)
        mark, colour = _MARKS[finding.level]
        where = f"{compress_nodes(row.nodes)}: " if 0 < len(row.nodes) < nodes else ""
        click.echo(f"  {click.style(f'{mark:<4}', fg=colour or None)} {finding.name:<18} {where}{plain(finding.value)}")
        if finding.hint:
            click.echo(f"       {'':<18} hint: {plain(finding.hint)}")
    red = sum(row.finding.level == FAIL for row in rows)
    yellow = sum(row.finding.level == WARN for row in rows)
    click.echo(f"{red} red, {yellow} yellow")


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
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
@_FOLDER
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def submit(
    script: str, args: tuple[str, ...], limit: str | None, variables: tuple[str, ...], extra: tuple[str, ...],
    wait: bool, driver: str, module: bool, **options: Any,
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
            sys.stdout.flush()
            os.execve(line[0], line, environ)
        job = submit_job(*words, time=limit, env=dict(map(_pair, variables)), sbatch=sbatch, **options)
        click.echo(job.job_id)
        print(f"{job.name}: {job.nodes} node(s), {job.executor}; hpcray logs -f {job.job_id}", file=sys.stderr)
        if wait:
            sys.exit(int(job.result()))


@main.group(invoke_without_command=True)
@_FOLDER
@click.option("-a", "--all", "everything", is_flag=True, help="All jobs (default: the last 20).")
@click.option("--json", "as_json", is_flag=True, help="Print the jobs as JSON.")
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
        click.echo(json.dumps(rows, indent=1))
    else:
        _print_jobs(rows)


jobs.add_command(remove_history)


@main.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Print new output until the job has ended.")
@click.option("--task", default="", metavar="NAME", help="Lines of tasks of this function.")
@click.option("--actor", default="", metavar="NAME", help="Lines of actors of this name, class or id.")
@click.option("--node", "nodes", type=int, multiple=True, metavar="N", help="Lines of workers of this node.")
@click.option("--grep", "pattern", default="", metavar="REGEX", help="Lines that contain this.")
@job_option
@_FOLDER
def logs(
    job_id: str | None, follow: bool, task: str, actor: str, nodes: tuple[int, ...], pattern: str, address: str,
    folder: str | None,
) -> None:  # fmt: skip
    """Print what the workers of a running job have printed, a file after the other, with who has printed it.

    With JOB, the id or name of a submitted job: its standard output and, on standard error, its standard error; also
    after its end. Exit code: 1 where there is no such job. Ctrl-C ends the command, not the job.
    """
    if job_id is None and (history := ended_job(address)):
        print_logs(history, pattern)
        return
    if job_id is None:
        print_worker_lines(address, follow, task, actor, nodes, pattern)
        return
    try:
        job = find_job(job_id, folder)
    except _ERRORS as error:
        hint = f"for lines of a running job: hpcray logs --actor {job_id}, or --task {job_id}"
        raise click.ClickException(f"{error}; {hint}") from None
    offsets = {"out": 0, "err": 0}
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `hpcray logs | head` ends silently
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


@main.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.option(
    "--wait", "timeout", type=float, default=30.0, show_default=True, metavar="S", help="Seconds to wait for the end."
)
@_FOLDER
def cancel(job_ids: tuple[str, ...], timeout: float, folder: str | None) -> None:
    """End jobs, given by id or name.

    Exit code: 1 where a job does not exist, cannot be cancelled, or has not ended in time; the others are cancelled.
    """
    wrong: list[str] = []
    cancelled: list[SubmittedJob[Any]] = []
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
        click.echo(plain(f"{job.job_id} {job.state}"))
    if wrong:
        raise click.ClickException("\n".join(wrong))


@main.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
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


def _copy(path: os.PathLike[str], offset: int, sink: Any) -> int:
    with suppress(FileNotFoundError), open(path, "rb") as file:
        file.seek(offset)
        while data := file.read(1 << 16):
            sink.write(data)
            offset += len(data)
        sink.flush()
    return offset


def _print_jobs(rows: list[dict[str, Any]]) -> None:
    if not rows:
        click.echo("no jobs here; hint: --folder, or hpcray submit script.py")
        return
    for row in rows:
        row["state"] = Text(row["state"], style=_STATE_COLOURS.get(row["state"], "red"))
        row["submitted"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["submitted"]))
        row["command"] = " ".join(" ".join(row["command"]).split())[:_SHOWN]
    print_table(list(_JOB_COLUMNS.values()), [[row[name] for name in _JOB_COLUMNS] for row in rows])


if __name__ == "__main__":
    main()
