"""The command `ray`: `python -m hpcray.cli.ray`. Scripts call it again and again, so each of its commands loads only
what it needs: `import hpcray` skips the names of programs for those that start, stop and look at nodes.
"""

from __future__ import annotations

import os
import sys

import click

from hpcray.cli import colour_wanted
from hpcray.cli.ray_start import start, stop, symmetric_run
from hpcray.cli.ray_status import health_check, status
from hpcray.common.ray_version import RAY_VERSION
from hpcray.common.terminal_text import plain_line
from hpcray.platform.config_files import ConfigFileError, file_settings

_OF_LOGS = "logs"


class _Commands(click.Group):
    """Those of nodes, and the others, which are loaded once one of them is asked for."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with a name; None where there is none."""
        return self.commands.get(cmd_name) or self._others().get(cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all, for the help."""
        return sorted({*self.commands, *self._others()})

    def _others(self) -> dict[str, click.Command]:
        from hpcray.cli.ray_commands import COMMANDS

        return COMMANDS


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(RAY_VERSION, prog_name="ray")
@click.pass_context
def main(context: click.Context) -> None:
    """Ray's command line, for clusters of hpcray. See also: hpcray --help"""
    context.color = colour_wanted(os.environ)
    try:
        file_settings(os.environ)  # any command may need a directory that a configuration file names
    except ConfigFileError as error:
        raise click.ClickException(plain_line(error)) from None
    name = context.invoked_subcommand
    if name is not None and (address := os.environ.get("RAY_ADDRESS")):
        named = {"address": address}
        command = main.get_command(context, name)
        inner = dict.fromkeys(command.commands, named) if isinstance(command, click.Group) and name == _OF_LOGS else {}
        context.default_map = {name: inner or named}


for _command in (start, stop, symmetric_run, status, health_check):
    main.add_command(_command)

if __name__ == "__main__":
    sys.exit(main(prog_name="ray"))
