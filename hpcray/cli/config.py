"""`hpcray config show`: the settings that a job started here would have, and where each of them comes from."""

from __future__ import annotations

import json
import os
from typing import Any

import click
from msgspec import structs

from hpcray.cli.job_option import errors_as_messages
from hpcray.platform.config_files import config_files, file_settings, setting_sources
from hpcray.state.reports import print_table


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
