"""Command lines: `hpcray` (`__main__`, a table of what other modules hold) and `hpcray-launch` (`launch`).

Here is what both have, and what loads nothing of hpcray's: types of options, and `--version`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hpcray import __version__


def typed(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """A click type out of a function that makes a value from text and raises ValueError with the reason."""

    def convert(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return convert


def _print_version(context: click.Context, param: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        click.echo(f"{context.find_root().command.name} {__version__}")
        context.exit()


version_option = click.Option(
    ["--version"], is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Print the version."
)
"""The option `--version` of `hpcray` and `hpcray-launch`."""
