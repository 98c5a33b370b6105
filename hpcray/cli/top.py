"""`hpcray top`: a live view of a running job in a terminal, or one sample of it as text or JSON."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import asdict
from typing import Any

import click

from hpcray.cli import top_cells
from hpcray.cli.history import ended_job, print_status
from hpcray.cli.job_option import job, job_option
from hpcray.common.terminal_text import plain
from hpcray.state.overview import JobUse, LiveJob
from hpcray.state.reports import print_table

_PLAIN_WIDTH = 200  # all columns


@click.command()
@job_option
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between samples.")
@click.option("--once", is_flag=True, help="Print one sample, of two seconds, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print one sample as JSON, and end.")
def top(address: str, interval: float, once: bool, as_json: bool) -> None:
    """Show a running job live: nodes with CPU, memory, GPU, store and network; functions with times; actors; logs.

    It stays when the job ends, and says so. Needs `pip install 'hpcray[observe]'` except for --once and --json.

    Exit code: 0, also where the job has ended; 1 where there is no job; 143 after SIGTERM.
    """
    if history := ended_job(address):
        print_status(history, as_json)
        return
    with job(address) as process:
        source = LiveJob(process)
        if once or as_json or not sys.stdout.isatty():
            source.sample()
            time.sleep(interval)
            use = source.sample()
            _print_json(use) if as_json else _print(use)
            return
        try:
            from hpcray.cli.top_app import TopApp
        except ImportError as error:
            raise click.ClickException(f"{error}; hint: pip install 'hpcray[observe]', or --once") from None
        app = TopApp(source, interval)
        app.run()
    sys.exit(app.return_code or 0)


def _print(use: JobUse) -> None:
    head = top_cells.headline(use)
    if sys.stdout.isatty():
        head.truncate(shutil.get_terminal_size().columns, overflow="ellipsis")
    click.echo(plain(head.plain))
    names = [name for name, _ in top_cells.node_columns(_PLAIN_WIDTH)]
    print_table(names, [[f"node {one.index}", *top_cells.node_cells(one, _PLAIN_WIDTH)[1:]] for one in use.nodes])
    whole = sum(one.total for one in use.functions)
    names = [name for name, _ in top_cells.function_columns(_PLAIN_WIDTH)]
    print_table(names, [top_cells.function_cells(one, _PLAIN_WIDTH, whole) for one in use.functions])


def _print_json(use: JobUse) -> None:
    found: dict[str, Any] = asdict(use)
    click.echo(json.dumps(found, indent=1))
