"""The `hpcray` command: `python -m hpcray.cli`. Here: which commands there are; each is loaded when it is called."""

from __future__ import annotations

import errno
import importlib
import os
from typing import Any

import click

from hpcray.cli import colour_wanted, version_option
from hpcray.common.terminal_text import plain_line

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "submit": ("jobs:submit", "Submit a script as a job of several hpcray nodes."),
        "jobs": ("jobs:jobs", "List jobs, running, queued and ended ones, the newest first."),
        "cancel": ("jobs:cancel", "End jobs, given by id or name."),
        "job": ("job:job", "Submit, stop, delete, or list jobs in a running cluster, as `ray job` does."),
        "serve": ("jobs:serve", "The command line of Ray Serve."),
        "attach": ("attach:attach", "Open IPython here as a driver of a job that runs in Slurm."),
        "bridge": ("attach:bridge", ""),
    },
    "Look": {
        "status": ("observe:status", "Nodes, resources, waiting work and dead actors of a job."),
        "top": ("dashboard:top", "A running job live, in the terminal."),
        "dashboard": ("dashboard:dashboard", "A running job in the browser."),
        "progress": ("progress:progress", "How far the tasks of a running job are, by function."),
        "logs": ("jobs:logs", "What the workers of a job have printed."),
        "worker-logs": ("observe:worker_logs", "One log file: of a worker, an actor or a task."),
        "list": ("observe:list_", "The actors, tasks, objects, ... of a job."),
        "summary": ("observe:summary", "Actors, tasks or objects, counted by name and state."),
        "metrics": ("observe:metrics", "The metrics of this node and its programs."),
        "topology": ("observe:topology", "The network of a job: switches, and the nodes behind each."),
    },
    "Explain": {
        "why": ("observe:why", "What an object, a task or an actor waits for, or died of."),
        "report": ("history:report", "One HTML page on a job: how it ended, what ran when, errors."),
        "memory": ("observe:memory", "The objects in the stores, and who pins them."),
        "timeline": ("observe:timeline_", "The tasks of each worker over time, in Chrome's trace format."),
        "profile": ("profile:profile", "Which functions of a running job take time."),
        "stack": ("observe:stack", "The stacks of every process of a running job."),
    },
    "Grow": {
        "nodes": ("nodes:nodes", "Add nodes to a running job, or remove some."),
        "join": ("nodes:join", "Be a further node of a running job."),
    },
    "Debug": {
        "debug": ("debug:debug", "Attach this terminal to a task or actor at a `breakpoint()`."),
        "dump": ("observe:dump", "Write the inputs and decisions of a job's cores to a file."),
        "replay": ("observe:replay", "Give the cores the inputs of such a file again."),
    },
    "Site": {
        "doctor": ("site:doctor", "Examine the platform of a job, on every node of an allocation."),
        "config": ("site:config", "Settings of the site, the user and the environment."),
        "copy": ("site:copy_shipped", "Copy an example, batch scripts or the documentation to a directory."),
        "durable": ("durable:durable", "Kept results of durable tasks: list, explain and remove them."),
        "version": ("site:version", "Print the version."),
    },
}
"""The commands by what they are for: module and name of each, and what the help says of it ("": it is hidden)."""
_COMMANDS = {name: row for rows in GROUPS.values() for name, row in rows.items()}


WITHOUT_JSON = {
    "attach": "a session of IPython, whose output is the user's",
    "bridge": "carries the bytes of an attached driver",
    "dashboard": "serves a page until Ctrl-C; what the page shows is in `status`, `top`, `list` and `why`",
    "join": "becomes a node, until the job ends; `nodes add` returns",
    "serve": "the command line of Ray Serve, with its own options",
}
"""The commands that have no `--json`, each with the reason."""


class _Commands(click.Group):
    """The commands. Where one cannot read or write a file, the message has its name and the reason."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all."""
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with a name, loaded; None where there is none."""
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"hpcray.cli.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table for `--help`; nothing is loaded."""
        for title, rows in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, text) for name, (_, text) in rows.items() if text])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.ClickException as error:
            if type(error) is not click.ClickException:  # click's own, with what the user has typed
                raise
            raise click.ClickException(plain_line(error.message)) from None  # other users choose names of files
        except OSError as error:
            if isinstance(error.filename, str):
                raise click.ClickException(plain_line(f"{error.filename}: {error.strerror}")) from None
            if isinstance(error, FileNotFoundError) and not os.stat(".").st_nlink:
                raise click.ClickException("the working directory was removed; hint: cd to another one") from None
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):  # of a write, which names no file
                raise click.ClickException(f"what this command writes does not fit: {error.strerror}") from None
            raise


@click.group("hpcray", cls=_Commands, params=[version_option], context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Ray's programming model on MPI, UCX and Slurm.

    To start a program, see: hpcray-launch --help
    """
    context = click.get_current_context()
    context.color = colour_wanted(os.environ)
    if context.invoked_subcommand not in ("doctor", "version"):
        from hpcray.cli.job_option import check_configuration

        check_configuration()


if __name__ == "__main__":
    main()
