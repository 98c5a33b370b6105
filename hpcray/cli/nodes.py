"""`hpcray join`, `hpcray nodes add` and `hpcray nodes remove`: nodes that come to a running job, and go."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, get_args

import click
from msgspec import structs

from hpcray.cli.job_option import errors_as_messages, job_option, parse_sbatch_options, session_directory
from hpcray.common.config import ExecutorName
from hpcray.common.exceptions import StartupError, SubmitError
from hpcray.jobs.added_nodes import idle_nodes, remove_nodes, scale
from hpcray.platform.config_files import config_files, file_settings, setting_sources
from hpcray.processes.running_jobs import find_running_job
from hpcray.runtime.node.join_token import node_command, request_join_token, write_join_token
from hpcray.state.reports import print_table

_ERRORS = (ConnectionError, StartupError, SubmitError, ValueError)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("job", default="auto")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def join(job: str, options: tuple[str, ...]) -> None:
    """Be a further node of a running job, until that ends. JOB is a join token, or as for `--job` of other commands.

    What follows JOB are options of the node, as of `python -m hpcray`: --num-cpus 4. Exit code: 0, or 1 where the node
    could not join.
    """
    with errors_as_messages(*_ERRORS):
        token = job
        if not os.path.isfile(job):
            where = find_running_job(job)
            token = os.path.join(where, "join-token")
            write_join_token(token, request_join_token(where))
    sys.stdout.flush()
    os.execv(sys.executable, [*node_command(token), *options])


@click.group()
def nodes() -> None:
    """Add nodes to the job that runs on this machine, or remove some."""


@nodes.command()
@click.option("-N", "--nodes", "count", default=1, show_default=True, help="How many.")
@click.option("-t", "--time", "limit", help="Time limit as for sbatch: minutes, 1:30:00, 2-12.")
@click.option("--gpus-per-node", "gpus", type=int, help="GPUs of each node.")
@click.option("--cpus-per-node", "cpus", type=int, help="CPUs of each node.")
@click.option("--mem", help="Memory of each node, such as 16g (Slurm).")
@click.option("-p", "--partition", help="Slurm's partition, or the queue of PBS or Flux.")
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION[=VALUE]", help="A further option, as account=a1.")
@click.option("--executor", type=click.Choice(get_args(ExecutorName)), default="auto", show_default=True)
@click.option("--wait", is_flag=True, help="Return when the nodes are in the job.")
@job_option
def add(
    count: int, limit: str | None, gpus: int | None, cpus: int | None, mem: str | None, partition: str | None,
    extra: tuple[str, ...], executor: str, wait: bool, address: str,
) -> None:  # fmt: skip
    """Submit a batch job of further nodes. Prints its id, or process ids with the local executor."""
    sbatch = parse_sbatch_options(extra)
    with errors_as_messages(*_ERRORS):
        started = scale(
            count, time=limit, gpus=gpus, cpus=cpus, mem=mem, partition=partition, sbatch=sbatch, executor=executor,
            wait=wait, address=session_directory(address),
        )  # fmt: skip
    click.echo("\n".join(started))


@nodes.command()
@click.option("--idle", is_flag=True, help="All nodes that have joined the job and do nothing.")
@click.option("--within", "seconds", default=60.0, show_default=True, help="Seconds that each node may take.")
@job_option
@click.argument("which", nargs=-1)
def remove(which: tuple[str, ...], idle: bool, seconds: float, address: str) -> None:
    """Have nodes leave the job: WHICH are indices (7 or n7) or ids. Prints the ids of those that have left."""
    with errors_as_messages(*_ERRORS):
        where = session_directory(address)
        for ident in remove_nodes([*which, *(idle_nodes(where) if idle else ())], seconds=seconds, address=where):
            click.echo(ident)


COMMANDS = [join, nodes]


# ------------------------------------------------------------ config
# `hpcray config show`: the settings that a job started here would have, and where each of them comes from.


@click.group()
def config() -> None:
    """Settings of the site, the user and the environment."""


@config.command()
@click.option("--changed", is_flag=True, help="Only settings that are not the default.")
@click.option("-p", "--partition", help="As a job in this partition has them.")
@click.option("--json", "as_json", is_flag=True, help="Print the settings as JSON.")
def show(changed: bool, partition: str | None, as_json: bool) -> None:
    """Print the settings that a job started here would have, each with its source.

    A source is a line of a configuration file, a variable of the environment, or the default. Options of commands and
    arguments of `init` come before all of them.
    """
    with errors_as_messages(ValueError):
        found = setting_sources(os.environ, partition)
        files = config_files(os.environ)
        partitions = sorted({row.partition for row in file_settings(os.environ)} - {""})
    shown = [row for row in found if not changed or row.source != "default"]
    if as_json:
        click.echo(json.dumps([structs.asdict(row) for row in shown], indent=1))
        return
    print_table(("name", "value", "source"), [(row.name, _shown(row.value), row.source) for row in shown])
    for path, named in files:
        state = "" if os.path.exists(path) else " (there is none)"
        click.echo(f"file: {path}{f', of ${named}' if named else ''}{state}")
    if partitions:
        click.echo(f"partitions with settings of their own: {', '.join(partitions)}; hint: --partition NAME")


def _shown(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else str(value)
