"""The commands `ray start`, `ray stop` and `ray symmetric-run`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import click

from hpcray.common.exceptions import StartupError
from hpcray.platform.config_files import launch_config
from hpcray.platform.process_control import module_line
from hpcray.ray_start.flags import START_FLAGS, StartFlag
from hpcray.ray_start.start import Started, StartRequest, start_and_return, start_and_stay, write_failure
from hpcray.ray_start.stop import GRACE, SeveralAllocationsError, stop_nodes
from hpcray.ray_start.symmetric import run_symmetric, split_words

_KINDS: dict[str, Any] = {"int": int, "float": float, "text": str, "bool": bool}
_ERRORS = (StartupError, ConnectionError, OSError, ValueError)
_SETTINGS: dict[str, Any] = {
    "token_normalize_func": lambda text: text.replace("_", "-"),
    "help_option_names": ["-h", "--help"],
}


def _option(row: StartFlag) -> click.Option:
    if row.kind == "switch":
        return click.Option([*row.names, row.key], is_flag=True, default=False, help=row.effect)
    return click.Option([*row.names, row.key], type=_KINDS[row.kind], default=None, help=row.effect)


def _start(**given: Any) -> None:
    """Start a node, which others join or which joins others, and print how."""
    request = _request(given)
    try:
        if given["block"]:
            sys.exit(start_and_stay(request, lambda started: _report(request, started)))
        _report(request, start_and_return(request))
    except _ERRORS as error:
        raise click.ClickException(str(error)) from None


def _request(given: Mapping[str, Any]) -> StartRequest:
    try:
        return StartRequest(given, os.environ)
    except _ERRORS as error:
        write_failure(str(error), os.environ)
        raise click.ClickException(str(error)) from None


class _StartCommand(click.Command):
    """A command that leaves the reason of a refusal where the program's error finds it: it may run in the background,
    where its output is lost."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.UsageError as error:
            write_failure(error.format_message(), os.environ)
            raise


def _report(request: StartRequest, started: Started) -> None:
    lines = [f"Local node IP: {started.ip}", ""]
    if not request.head:
        lines = [f"Local node IP: {started.ip}", f"Connected to Ray cluster {started.address}.", ""]
    lines += ["--------------------", "Ray runtime started.", "--------------------", ""]
    if request.head:
        lines += [
            "Next steps",
            "  To add another node to this Ray cluster, run",
            f"    ray start --address='{started.address}'",
            "",
            "  To connect to this Ray cluster:",
            "    import ray",
            "    ray.init()",
            "",
            "  To terminate the Ray runtime, run",
            "    ray stop",
            "",
            "  To view the status of the cluster, use",
            "    ray status",
            "",
        ]
    else:
        lines += ["To terminate the Ray runtime, run", "  ray stop", ""]
    if request.head and launch_config(os.environ).ray_api:
        lines += [*_rest_api(started), ""]
    lines += [f"{note}" for note in started.notes]
    lines += [f"Log: {started.log}"]
    if request.given["block"]:
        lines += ["", "--block", "  This command will now block until the cluster ends, or until a signal ends it."]
    click.echo("\n".join(lines))
    sys.stdout.flush()


def _rest_api(started: Started) -> list[str]:
    """Start Ray's REST API beside a head, as HPCRAY_RAY_API=1 asks for it, and return what it says once it serves."""
    try:
        from hpcray.ray_api import server
    except ImportError as error:
        return [f"no REST API of Ray's: {error}; hint: pip install 'hpcray[observe]'"]
    line = module_line(server.__name__, started.session_dir, str(started.dashboard_port))
    child = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    with child.stdout as said:
        return said.read().splitlines() or [f"no REST API of Ray's: its process has ended ({child.wait()})"]


start = _StartCommand(
    "start", callback=_start, params=[_option(row) for row in START_FLAGS], context_settings=_SETTINGS,
    help="Start a node: the head of a cluster, or one that joins a cluster.",
)  # fmt: skip


@click.command(context_settings=_SETTINGS)
@click.option("-f", "--force", is_flag=True, help="End the nodes at once, without waiting for their tasks.")
@click.option("-g", "--grace-period", "grace", type=float, default=GRACE, help="Seconds that they have; then killed.")
@click.option("--log-style", hidden=True)
@click.option("--log-color", hidden=True)
@click.option("-v", "--verbose", is_flag=True, hidden=True)
def stop(force: bool, grace: float, **_: Any) -> None:
    """End this user's nodes of this allocation on this host that `ray start` has started. 0 where there is none."""
    try:
        count = stop_nodes(os.environ, force, grace)
    except SeveralAllocationsError as error:
        raise click.ClickException(str(error)) from None
    if count:
        click.echo(f"Stopped all {count} Ray node{'s' * (count > 1)}.")
    else:
        click.echo("Did not find any active Ray processes.")


@click.command(
    "symmetric-run", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}
)
@click.option("--address", required=True, help="H:P of the cluster; it starts on host H.")
@click.option("--min-nodes", type=int, default=1, help="Nodes that there have to be before the command runs.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def symmetric_run(address: str, min_nodes: int, words: tuple[str, ...]) -> None:
    """Start a node on each host that runs this, run a command on the first, and end all.

    \b
    ray symmetric-run --address H:P [--min-nodes N] [options of ray start] -- COMMAND ...
    """
    try:
        options, command = split_words(sys.argv[sys.argv.index("symmetric-run") + 1 :])
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    if not command:
        raise click.ClickException("no command; hint: ray symmetric-run --address H:P -- python program.py")
    context = start.make_context("ray start", ["--address", address, *options])
    try:
        sys.exit(run_symmetric(context.params, address, min_nodes, command, click.echo))
    except _ERRORS as error:
        write_failure(str(error), os.environ)
        raise click.ClickException(str(error)) from None
