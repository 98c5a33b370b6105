"""`hpcray-launch`: run a program on one node per MPI rank."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from hpcray.cli import typed, version_option
from hpcray.common.terminal_text import plain_line
from hpcray.launch.launch_line import (
    AUTO,
    NAMES,
    LaunchError,
    LaunchOptions,
    compose,
    has_open_ports,
    probe_site,
    starts_here,
    uses_allocation,
    uses_srun,
)
from hpcray.launch.runner import run_launcher
from hpcray.platform.config_files import launch_config
from hpcray.platform.console import TERMINAL_SIZE, terminal_size
from hpcray.runtime.node.options import NODE_FLAGS, NodeOptions, parse_count

_EPILOG = """\b
Examples:
  hpcray-launch -n 4 train.py --epochs 3          this host as four nodes
  hpcray-launch --hosts a,b,c train.py            one node on each of three hosts
  hpcray-launch -n 4 -m package.train --epochs 3  a module
  hpcray-launch -n 4 --dry-run train.py           show the line only
  hpcray-launch train.py                          in a Slurm allocation: srun, one node on each of its nodes

\b
What follows the script belongs to the script.
"""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(text)


def _amount(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < math.inf:
            return float(text)
    raise ValueError(f"{text!r} is not a number of CPUs")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"{text!r} has an empty host name")
    return names


_NODE_FLAGS = {row.name: row for row in NODE_FLAGS}


def _node_option(name: str, flag: str = "", parse: Callable[[str], Any] | None = None, **changes: Any) -> click.Option:
    """The option of `hpcray-launch` for a row of `NODE_FLAGS`; it may have a second spelling and a stricter type."""
    row = _NODE_FLAGS[name]._replace(**changes)
    words = [name, row.flag, *([flag] if flag else [])]
    if not row.metavar:
        return click.Option(words, is_flag=True, help=row.help)
    return click.Option(words, type=typed(parse or row.parse), metavar=row.metavar, help=row.help)


_N_HELP = "number of nodes (default: one per host, or 1)"
_HOSTS_HELP = "hosts, one node each unless -n says more"
_STORE_HELP = "object store of each node, such as 2g (default: its share)"
_LAUNCHER_HELP = "what starts the nodes (default: srun in Slurm, flux in Flux, else what mpirun is)"
_MPIRUN_HELP = "the mpirun to use (default: beside this Python, or on PATH)"
_EXPORT_HELP = "variable to pass on to remote hosts"
_SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"], "max_content_width": 120}
_OPTIONS = [
    click.Option(["nodes", "-n", "-np", "--nodes"], type=typed(_positive), metavar="N", help=_N_HELP),
    click.Option(["--hosts"], type=typed(_names), default=(), metavar="A,B,...", help=_HOSTS_HELP),
    click.Option(["--hostfile"], default="", metavar="FILE", help="a file with one host per line"),
    _node_option("num_cpus", "--cpus-per-node", _amount, help="CPUs of each node (default: its share of the host)"),
    _node_option("num_gpus", "--gpus-per-node", parse_count, help="GPUs of each node (default: those it was given)"),
    _node_option("object_store_memory", "--object-store", help=_STORE_HELP),
    _node_option("memory", help="memory of each node that tasks may ask for (default: what there is)"),
    _node_option("resources", help="custom resources of each node, such as '{\"disk\": 2}'"),
    _node_option("labels", help="labels of each node, for label_selector"),
    click.Option(["--mpirun"], default="", metavar="PATH", help=_MPIRUN_HELP),
    click.Option(["--launcher"], type=click.Choice(NAMES), default=AUTO, help=_LAUNCHER_HELP),
    click.Option(["export", "-x", "--export"], multiple=True, metavar="NAME", help=_EXPORT_HELP),
    click.Option(["--srun"], is_flag=True, help="start with srun or not at all (the default in a Slurm allocation)"),
    click.Option(["--overlap"], is_flag=True, help="share the allocation with other steps, such as another hpcray job"),
    _node_option("log_dir"),
    _node_option("require_rdma"),
    _node_option("as_ray"),
    _node_option("ray_libraries"),
    _node_option("progress"),
    _node_option("driver_rank", help="run the program on the node of rank N (default: 0)"),
    _node_option("min_nodes"),
    _node_option("max_nodes"),
    _node_option("node_types"),
    _node_option("idle_node_timeout"),
    _node_option("end_hangs"),
    _node_option("report"),
    _node_option("broadcast_env"),
    _node_option("join"),
    _node_option("no_program"),
    click.Option(["--dry-run"], is_flag=True, help="print the line that would run, and nothing else"),
    version_option,
    click.Option(["module", "-m"], is_flag=True, help="run a module; what follows belongs to it"),
]


def _make_options(command: tuple[str, ...], module: bool, **given: Any) -> LaunchOptions:
    """Run a Ray-style program on one hpcray node per MPI rank."""
    node = {name: given.pop(name) for name in _NODE_FLAGS if name in given}
    options = LaunchOptions(NodeOptions.from_values(node, ["-m", *command] if module else command), **given)
    rank = node["driver_rank"]
    has_program = not (options.node.join or options.node.no_program)
    if command and not has_program:
        raise click.UsageError("nodes that join a job (--join), or of a job without a program (--no-program), run none")
    if has_program and not command:
        raise click.UsageError("no script given; hint: hpcray-launch -n 4 script.py")
    if options.hosts and options.hostfile:
        raise click.UsageError("--hosts and --hostfile exclude each other")
    if rank is not None and options.nodes is not None and rank >= options.nodes:
        last = options.nodes - 1
        raise click.UsageError(f"--driver-rank {rank}: with -n {options.nodes} there are the ranks 0 to {last}")
    if options.srun and (options.hosts or options.hostfile or options.mpirun):
        raise click.UsageError(
            "--srun takes its hosts from the allocation; hint: leave --hosts, --hostfile and --mpirun out"
        )
    return options


COMMAND = click.Command(
    "hpcray-launch",
    params=[*_OPTIONS, click.Argument(["command"], nargs=-1, type=click.UNPROCESSED)],
    callback=_make_options,
    help=_make_options.__doc__,
    epilog=_EPILOG,
    options_metavar="[-n N] [option ...]",
    context_settings={
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 120,
    },
)
"""The command line of `hpcray-launch`; it returns `LaunchOptions`."""
COMMAND.params[-1].metavar = "(script.py | -m module) [arg ...]"


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Options from a command line; exits with code 2 and a message where the line is wrong, with 0 after `--help`."""
    try:
        found = COMMAND.main(list(argv), "hpcray-launch", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    if not isinstance(found, LaunchOptions):
        sys.exit(found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `hpcray-launch`. Returns the exit code of the program that was launched."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        os.getcwd()
    except OSError as error:
        print(f"hpcray-launch: the working directory is gone: {error.strerror}; hint: cd to another", file=sys.stderr)
        return 2
    try:
        site = probe_site(options)
        line = compose(options, site)
        tmpdir = launch_config(os.environ).tmpdir
    except (LaunchError, ValueError) as error:
        print(f"hpcray-launch: {plain_line(error)}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(shlex.join(line))
        return 0
    if not options.node.driver:
        os.execvp(line[0], line)
    if tmpdir:
        os.environ["HPCRAY_TMPDIR"] = tmpdir  # for srun's epilog, which reads no configuration files
    by_srun, here = uses_srun(options, site), starts_here(options, site)
    if uses_allocation(options, site) and not by_srun:
        print(
            f"hpcray-launch: srun --mpi={site.slurm.mpi} does not work here: {site.slurm.problem}. Starting with "
            "mpirun instead: the job will not survive the loss of a node",
            file=sys.stderr,
        )
    if not (here or by_srun or site.no_input or os.isatty(0)):
        print(
            "hpcray-launch: the program runs on another host, and the end of this input may never reach it (Open MPI "
            "5); hint: start hpcray-launch on the program's host, or give it </dev/null",
            file=sys.stderr,
        )
    if has_open_ports(options, site):
        print(
            f"hpcray-launch: {os.path.basename(site.mpirun)} listens on ports through which other users of its hosts "
            "can run programs as you; hint: srun, or nodes of your own (docs/security.md)",
            file=sys.stderr,
        )
    if options.node.progress and (size := terminal_size(2, os.environ)) is not None:
        os.environ[TERMINAL_SIZE] = "{}x{}".format(*size)
    return run_launcher(line, console=here)


if __name__ == "__main__":
    sys.exit(main())
