"""Command lines: `hpcray` (`__main__`, a table of what other modules hold) and `hpcray-launch` (`launch`).

Here is what they share, and what loads nothing of hpcray's: types of options, `--version`, `--json` and colours.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
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


# ------------------------------------------------------------ JSON
# What every command has for programs: with `--json` its standard output holds one value, or where it is a stream one
# value a line, and nothing else. Where it fails, that is said on standard error and by the exit code.

JSON_HELP = "Print JSON: "


def json_option(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--json` of a command, as a decorator.

    Args:
        what: what it prints; the table of all commands in the documentation is made of it.
    """
    return click.option("--json", "as_json", is_flag=True, help=f"{JSON_HELP}{what}.")


def print_json(value: Any) -> None:
    """Print the one value of a command."""
    click.echo(json.dumps(value, indent=1))


def print_record(**fields: Any) -> None:
    """Print one record of a stream, in one line, at once."""
    click.echo(json.dumps(fields))


# ------------------------------------------------------------ files


def write_named(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that the user or hpcray has named, or replace it. In a directory that others can write to, nothing
    of theirs is followed or waited for.

    Raises:
        click.ClickException: another user's link, pipe or device has the name.
        OSError: it cannot be written.
    """
    from hpcray.platform.private_files import is_trusted_owner, write_private_file  # few commands write files

    path = os.fspath(path)
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path)
        if not is_trusted_owner(found.st_uid) and not stat.S_ISREG(found.st_mode):
            raise click.ClickException(f"{path} is a link or a pipe of uid {found.st_uid}; hint: another name")
        if not stat.S_ISREG(found.st_mode):  # such as /dev/stdout
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
            return
    umask = os.umask(0o077)
    os.umask(umask)
    write_private_file(path, text.encode(), mode=0o666 & ~umask)


# ------------------------------------------------------------ colours


def colour_wanted(environ: Mapping[str, str]) -> bool | None:
    """Return whether output is coloured: not with NO_COLOR, else with FORCE_COLOR; None: on a terminal.

    Each counts where it is not empty (https://no-color.org, https://force-color.org). The commands set their click
    context's `color` to it, which click and the tables of `state/reports.py` follow.
    """
    return False if environ.get("NO_COLOR") else True if environ.get("FORCE_COLOR") else None
