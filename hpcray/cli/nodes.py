"""`hpcray join`, `hpcray nodes add` and `hpcray nodes remove`: nodes that come to a running job, and go."""

from __future__ import annotations

import os
import sys
from typing import get_args

import click

from hpcray.cli import json_option, print_json
from hpcray.cli.job_option import errors_as_messages, job_option, parse_sbatch_options, session_directory
from hpcray.common.config import ExecutorName
from hpcray.common.exceptions import StartupError, SubmitError
from hpcray.jobs.added_nodes import idle_nodes, remove_nodes, scale
from hpcray.processes.running_jobs import find_running_job
from hpcray.runtime.node.join_token import node_command, request_join_token, write_join_token

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
@click.option("-N", "--nodes", "count", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.option("-t", "--time", "limit", help="Time limit as for sbatch: minutes, 1:30:00, 2-12.")
@click.option("--gpus-per-node", "gpus", type=int, help="GPUs of each node.")
@click.option("--cpus-per-node", "cpus", type=int, help="CPUs of each node.")
@click.option("--mem", help="Memory of each node, such as 16g (Slurm).")
@click.option("-p", "--partition", help="Slurm's partition, or the queue of PBS or Flux.")
@click.option("--sbatch", "extra", multiple=True, metavar="OPTION[=VALUE]", help="A further option, as account=a1.")
@click.option("--executor", type=click.Choice(get_args(ExecutorName)), default="auto", show_default=True)
@click.option("--wait", is_flag=True, help="Return when the nodes are in the job.")
@job_option
@json_option("a list of ids: of the batch job, or of processes")
def add(
    count: int, limit: str | None, gpus: int | None, cpus: int | None, mem: str | None, partition: str | None,
    extra: tuple[str, ...], executor: str, wait: bool, address: str, as_json: bool,
) -> None:  # fmt: skip
    """Submit a batch job of further nodes. Prints its id, or process ids with the local executor."""
    sbatch = parse_sbatch_options(extra)
    with errors_as_messages(*_ERRORS):
        started = scale(
            count, time=limit, gpus=gpus, cpus=cpus, mem=mem, partition=partition, sbatch=sbatch, executor=executor,
            wait=wait, address=session_directory(address),
        )  # fmt: skip
    if as_json:
        print_json(started)
    else:
        click.echo("\n".join(started))


@nodes.command()
@click.option("--idle", is_flag=True, help="All nodes that have joined the job and do nothing.")
@click.option("--within", "seconds", default=60.0, show_default=True, help="Seconds that each node may take.")
@job_option
@json_option("a list of the ids of the nodes that have left")
@click.argument("which", nargs=-1)
def remove(which: tuple[str, ...], idle: bool, seconds: float, address: str, as_json: bool) -> None:
    """Have nodes leave the job: WHICH are indices (7 or n7) or ids. Prints the ids of those that have left."""
    if not which and not idle:
        raise click.UsageError("which nodes? hint: hpcray nodes remove n7, or --idle; hpcray status lists them")
    with errors_as_messages(*_ERRORS):
        where = session_directory(address)
        gone = remove_nodes([*which, *(idle_nodes(where) if idle else ())], seconds=seconds, address=where)
    if as_json:
        print_json(gone)
    else:
        click.echo("\n".join(gone), nl=bool(gone))
