"""Commands of `ray` that look at a cluster, or submit jobs into it; and what those say that have no meaning here."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

import click

from hpcray.cli import observe
from hpcray.cli.debug import debug
from hpcray.cli.job import job
from hpcray.cli.job_option import job_option, session_directory
from hpcray.state.schemas import StateResource
from hpcray.util.state import RayStateApiException, StateApiClient

_LAUNCH = "a cluster lasts as long as its program; hint: hpcray-launch program.py, or sbatch"
_END = "hint: Ctrl-C at the program, scancel, or the end of the program"
_MISSING = {
    "up": _LAUNCH,
    "down": _END,
    "attach": "hint: hpcray attach JOB; a shell: srun --jobid=JOB --overlap -n 1 --pty bash",
    "exec": "hint: srun --jobid=JOB --overlap -n 1 COMMAND, or ray job submit -- COMMAND",
    "submit": "it starts a cluster in a cloud; hint: ray job submit -- python program.py, or hpcray submit program.py",
    "rsync-up": "all nodes of a job see the same files, or `runtime_env` sends them",
    "rsync-down": "all nodes of a job see the same files",
    "dashboard": "hint: hpcray dashboard, ray status, ray list, hpcray metrics",
    "monitor": "hint: ray status",
    "kill-actor": "hint: ray.kill(ray.get_actor(name, namespace)) in a program",
    "metrics": "hint: hpcray metrics",
    "check-open-ports": "no service of a cluster listens; hint: docs/security.md, Ports",
    "cluster-dump": "hint: ray logs, hpcray dump",
    "local-dump": "hint: ray logs, hpcray dump",
    "cpp": "there is no C++ API",
    "drain-node": "hint: hpcray nodes remove",
    "enable-usage-stats": "hpcray collects none",
    "get-auth-token": "processes of a cluster need none; hint: hpcray dashboard --ray-api says where its own is",
    "get-head-ip": "it asks a cluster in a cloud; hint: ray list nodes",
    "get-worker-ips": "it asks a cluster in a cloud; hint: ray list nodes",
    "global-gc": "hint: hpcray memory; gc.collect() in a program",
    "kill-random-node": "hint: scancel --signal=KILL JOB.STEP",
    "kuberay-autoscaler": "hint: hpcray-launch --max-nodes",
    "microbenchmark": "hint: python benchmarks/micro.py in a copy of the repository",
    "sanity-check": "hint: hpcray doctor",
    "serve": "hint: hpcray serve",
}


@click.command()
@click.argument("kind", type=click.Choice([*observe.KINDS]))
@click.argument("id")
@job_option
@click.option("--timeout", default=30.0, show_default=True, help="Seconds that a process may take.")
def get(kind: str, id: str, address: str, timeout: float) -> None:
    """Show the actor, task, object, ... with an id, as JSON."""
    try:
        found = StateApiClient(session_directory(address)).get(StateResource(kind.replace("-", "_")), id)
    except (ConnectionError, ValueError, RayStateApiException) as error:
        raise click.ClickException(str(error)) from None
    if found is None:
        raise click.ClickException(f"Resource with id={id} not found in the cluster.")
    click.echo(json.dumps(found, indent=1, default=_plain))


@click.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, writable=True))
@job_option
def timeline(file: str | None, address: str) -> None:
    """Write the tasks of each worker over time to a file, in Chrome's trace format."""
    name = file or time.strftime("ray-timeline-%Y-%m-%d_%H-%M-%S.json")
    click.get_current_context().invoke(observe.timeline_, file=name, address=address)


@click.command("disable-usage-stats", hidden=True)
def disable_usage_stats() -> None:
    """Accept the wish: hpcray collects no usage statistics. Scripts call this before `ray start`."""
    click.echo("Usage stats disabled for future clusters: hpcray collects none.")


class _LogsGroup(click.Group):
    """Commands of which the first, `cluster`, may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["cluster", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_LogsGroup)
def logs() -> None:
    """Print log files: of a node, of an actor, a task, a worker or a job."""


_NOTHING: dict[str, Any] = {"pid": None, "actor_id": None, "task_id": None, "submission_id": None}


def _logs_of(what: str, option: str, field: str) -> None:
    """Add the command that prints the log of one kind of thing."""

    def run(ident: str | int, err: bool, tail: int, follow: bool, address: str, **place: Any) -> None:
        wanted = {**_NOTHING, field: ident}
        click.get_current_context().invoke(
            observe.worker_logs, address=address, err=err, tail=tail, follow=follow, attempt_number=0, timeout=30.0,
            name=None, **place, **wanted,
        )  # fmt: skip

    params: list[click.Parameter] = [
        click.Option(
            ["ident", option], required=True, type=int if field == "pid" else str, metavar="ID", help=f"The {what}."
        ),
        click.Option(["--err"], is_flag=True, help="Standard error instead of standard output."),
        click.Option(["--tail"], type=int, default=-1, metavar="LINES", help="Only the last lines."),
        click.Option(["-f", "--follow"], is_flag=True, help="Go on with what is written later, until Ctrl-C."),
        click.Option(["--address"], default="auto", help="Session directory of a node."),
        click.Option(["--node-id", "-id"], help="The node; by default this one."),
        click.Option(["--node-ip", "-ip"], help="The node, by its address."),
    ]
    logs.add_command(click.Command(what, params=params, callback=run, help=f"Print what a {what} has written."))


def _cluster_logs() -> click.Command:
    """The command that lists or prints files of a node."""
    wanted = ("address", "node_id", "node_ip", "tail", "follow", "timeout", "name")

    def run(**options: Any) -> None:
        click.get_current_context().invoke(observe.worker_logs, err=False, attempt_number=0, **_NOTHING, **options)

    params = [param for param in observe.worker_logs.params if param.name in wanted]
    return click.Command("cluster", params=params, callback=run, help="List the log files of a node, or print one.")


def _refusal(name: str, hint: str) -> click.Command:
    """A command of Ray's that has no meaning here; its help and its error say what has."""

    def refuse(words: Sequence[str]) -> None:
        raise click.ClickException(f"ray {name}: {hint}")

    return click.Command(
        name, callback=refuse, hidden=True, add_help_option=False, context_settings={"ignore_unknown_options": True},
        params=[click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
    )  # fmt: skip


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


for _what, _option, _field in (
    ("actor", "--id", "actor_id"), ("task", "--id", "task_id"), ("worker", "--pid", "pid"),
    ("job", "--id", "submission_id"),
):  # fmt: skip
    _logs_of(_what, _option, _field)
logs.add_command(_cluster_logs())
COMMANDS: dict[str, click.Command] = {
    str(command.name): command
    for command in (
        debug,
        job,
        disable_usage_stats,
        observe.memory,
        observe.stack,
        observe.list_,
        observe.summary,
        get,
        logs,
        timeline,
        *(_refusal(name, hint) for name, hint in _MISSING.items()),
    )
}
"""All of them, by their names."""
