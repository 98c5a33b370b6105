"""The options of `hpcray-launch`, parsed."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)

_EPILOG = """\
examples:
  hpcray-launch -n 4 train.py --epochs 3          this host as four nodes
  hpcray-launch --hosts a,b,c train.py            one node on each of three hosts
  hpcray-launch -n 4 -m package.train --epochs 3  a module
  hpcray-launch -n 4 --dry-run train.py           show the line only
  hpcray-launch train.py                          in a Slurm allocation: srun, one node on each of its nodes

What follows the script belongs to the script.
"""


@dataclass(frozen=True)
class LaunchOptions:
    """What the user asks of a launch.

    Attributes:
        command: what follows the interpreter: `("script.py", "arg")` or `("-m", "module", "arg")`.
        nodes: number of nodes; None: one for each host, or one.
        hosts: where, in order; empty: this host.
        hostfile: a file that lists the hosts, or "".
        cpus_per_node: CPUs that each node offers; None: it finds out.
        gpus_per_node: GPUs that each node offers; None: those it was given. Made up where it was given none.
        object_store: bytes of each node's object store; None: the default.
        mpirun: the launcher to use; "": found.
        export: names of further environment variables that remote hosts must have.
        srun: start with srun, inside a Slurm allocation, or not at all.
        overlap: share CPUs, memory and GPUs with the other steps of the allocation.
        require_rdma: do not start unless object bytes go over RDMA.
        as_ray: whether `import ray` in the program is hpcray.
        driver_rank: the rank whose node runs the program; None: what the ranks' environment says, else 0.
        broadcast_env: a directory that is read once per job and copied to the nodes, or "".
        dry_run: only print the line.
    """

    command: tuple[str, ...]
    nodes: int | None = None
    hosts: tuple[str, ...] = ()
    hostfile: str = ""
    cpus_per_node: float | None = None
    gpus_per_node: int | None = None
    object_store: int | None = None
    mpirun: str = ""
    export: tuple[str, ...] = ()
    srun: bool = False
    overlap: bool = False
    require_rdma: bool = False
    as_ray: bool = False
    driver_rank: int | None = None
    broadcast_env: str = ""
    dry_run: bool = False


def parse_size(text: str) -> int:
    """Bytes in a size such as `512m`, `2g`, `1.5GiB` or `1000000`.

    Raises:
        ValueError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    size = math.floor(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size; hint: write 2g, 512m or a number of bytes")
    return size


def parse_options(argv: Sequence[str]) -> LaunchOptions:
    """Options from a command line; exits with code 2 and a message where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="hpcray-launch",
        usage="hpcray-launch [-n N] [option ...] (script.py | -m module) [arg ...]",
        description="Run a Ray-style program on one hpcray node per MPI rank.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-n", "-np", "--nodes", type=_positive, metavar="N", help="number of nodes (default: one per host, or 1)")
    add("--hosts", type=_names, default=(), metavar="A,B,...", help="hosts, one node each unless -n says more")
    add("--hostfile", default="", metavar="FILE", help="a file with one host per line")
    add("--cpus-per-node", type=_amount, metavar="K", help="CPUs of each node (default: its share of the host)")
    add("--gpus-per-node", type=_count, metavar="K", help="GPUs of each node (default: those it was given)")
    add("--object-store", type=_size, metavar="SIZE", help="object store of each node, such as 2g (default: its share)")
    add(
        "--mpirun",
        default="",
        metavar="PATH",
        help="the mpirun to use (default: beside this Python, or on PATH)",
    )
    add("-x", "--export", action="append", default=[], metavar="NAME", help="variable to pass on to remote hosts")
    add("--srun", action="store_true", help="start with srun or not at all (the default in a Slurm allocation)")
    add("--overlap", action="store_true", help="share the allocation with other steps, such as another hpcray job")
    add("--require-rdma", action="store_true", help="do not start unless object bytes go over RDMA")
    add("--as-ray", action="store_true", help="the program's `import ray` is hpcray")
    add("--driver-rank", type=_count, metavar="N", help="run the program on the node of rank N (default: 0)")
    add("--broadcast-env", default="", metavar="DIR", help="read this directory once per job, use copies on the nodes")
    add("--dry-run", action="store_true", help="print the line that would run, and nothing else")
    add("-m", dest="module", nargs=argparse.REMAINDER, help="run a module; what follows belongs to it")
    add("script", nargs=argparse.REMAINDER, help="the program and its arguments")
    given = parser.parse_args(argv)
    command = ("-m", *given.module) if given.module else tuple(given.script)
    if command[:1] == ("--",):
        command = command[1:]
    if not command or command == ("-m",):
        parser.error("no script given; hint: hpcray-launch -n 4 script.py")
    if given.hosts and given.hostfile:
        parser.error("--hosts and --hostfile exclude each other")
    if given.driver_rank is not None and given.nodes is not None and given.driver_rank >= given.nodes:
        parser.error(
            f"--driver-rank {given.driver_rank}: with -n {given.nodes} there are the ranks 0 to {given.nodes - 1}"
        )
    if given.srun and (given.hosts or given.hostfile or given.mpirun):
        parser.error("--srun takes its hosts from the allocation; hint: leave --hosts, --hostfile and --mpirun out")
    return LaunchOptions(
        command=command,
        nodes=given.nodes,
        hosts=given.hosts,
        hostfile=given.hostfile,
        cpus_per_node=given.cpus_per_node,
        gpus_per_node=given.gpus_per_node,
        object_store=given.object_store,
        mpirun=given.mpirun,
        export=tuple(given.export),
        srun=given.srun,
        overlap=given.overlap,
        require_rdma=given.require_rdma,
        as_ray=given.as_ray,
        driver_rank=given.driver_rank,
        broadcast_env=given.broadcast_env,
        dry_run=given.dry_run,
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not (amount >= 0 and math.isfinite(amount)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of CPUs")
    return amount


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty host name")
    return names
