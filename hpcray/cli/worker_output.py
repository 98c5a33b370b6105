"""The lines of workers, as `hpcray logs` prints them."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Collection

import click

from hpcray.cli.job_option import job
from hpcray.common.terminal_text import plain
from hpcray.state.worker_lines import LineFilter, WorkerLines

_TIMEOUT = 10.0  # seconds


def print_worker_lines(address: str, follow: bool, task: str, actor: str, nodes: Collection[int], pattern: str) -> None:
    """Print lines of workers of a running job: `(f pid=123, node 2) text`; those of standard error there."""
    try:
        wanted = LineFilter(nodes or None, task, actor, re.compile(pattern) if pattern else None)
    except re.error as error:
        raise click.UsageError(f"--grep {pattern}: {error}") from None
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `hpcray logs | head` ends silently
    with job(address) as process:
        indices = {row["Index"] for row in process.gcs.nodes()}
        if unknown := sorted({*nodes} - indices):
            raise click.ClickException(f"there is no node {unknown[0]}; hint: hpcray list nodes")
        lines = WorkerLines(process, _TIMEOUT)
        found = False
        try:
            for line in lines.follow(wanted) if follow else lines.read(wanted):
                found = True
                who = f"{plain(line.who)} " if line.who else ""
                prefix = click.style(f"({who}pid={line.pid}, node {line.node})", fg="cyan")
                click.echo(f"{prefix} {line.text}", err=line.error)
        except KeyboardInterrupt:
            sys.exit(130)
        if not found and (nodes or task or actor or pattern):
            click.echo(
                f"no line matches; {lines.lines} lines of {len(lines.processes)} processes were read; "
                "hint: hpcray list actors, hpcray list tasks show the names; without options all lines are printed",
                err=True,
            )
        elif not found:
            click.echo(f"none of the {len(lines.processes)} workers has printed anything", err=True)
