"""`python slurm/testcluster COMMAND …`: a Slurm of several nodes on this machine.

    up [NODES] [--gpus K] [--share DIR[:PATH]] [--accounting] [--binding] [--owner PID]
       [--topology s1=n1-n2,s2=n3-n4 [--uplink 1gbit]]
    on [USER@]HOST COMMAND …       ctl is the login host, n1, n2, … are the nodes; users: root, ada, bob
    crash HOST [--silent] | boot HOST | cut HOST | heal HOST | rate HOST 100mbit|off
    traffic                        bytes that have crossed the link of each switch, both ways
    list | down | down --all

`--name` chooses one of several clusters.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from testcluster.cluster import Cluster
from testcluster.registry import ClusterError, running, sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code; `on` does not return, it becomes the command."""
    given = _parser().parse_args(argv)
    try:
        return _do(given)
    except ClusterError as error:
        print(f"testcluster: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="testcluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="lab", help="which cluster (default: lab)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="boot a cluster")
    up.add_argument("nodes", type=int, nargs="?", default=4)
    up.add_argument("--gpus", type=int, default=2, help="pretended GPUs a node (default: 2)")
    up.add_argument("--share", action="append", default=[], metavar="DIR[:PATH]", help="a directory that all hosts see")
    up.add_argument("--accounting", action="store_true", help="run slurmdbd, so that sacct works")
    up.add_argument("--binding", action="store_true", help="bind tasks to cores; a node has this machine's CPUs")
    up.add_argument("--topology", default="", metavar="s1=n1-n2,s2=n3-n4", help="leaf switches, told to Slurm")
    up.add_argument("--uplink", default="1gbit", metavar="RATE", help="of the links between switches (default: 1gbit)")
    up.add_argument("--owner", type=int, default=0, metavar="PID", help="end with this process")
    on = commands.add_parser("on", help="run a command on a host")
    on.add_argument("host", metavar="[user@]host", help="user: root (default), ada or bob")
    on.add_argument("what", nargs=argparse.REMAINDER, metavar="command")
    for name in ("crash", "boot", "cut", "heal", "rate"):
        one = commands.add_parser(name)
        one.add_argument("host")
        if name == "crash":
            one.add_argument("--silent", action="store_true", help="as a loss of power: no connection is closed")
        if name == "rate":
            one.add_argument("rate", help="100mbit, 1gbit, …, or off")
    commands.add_parser("list", help="clusters that are up")
    commands.add_parser("traffic", help="bytes that have crossed the link of each switch")
    down = commands.add_parser("down", help="end a cluster")
    down.add_argument("--all", action="store_true", help="all of them, and what killed ones have left")
    return parser


def _do(given: argparse.Namespace) -> int:
    if given.command == "list":
        print("\n".join(running()))
        return 0
    if given.command == "down" and given.all:
        for name in running():
            Cluster.find(name).down()
        sweep()
        return 0
    if given.command == "up":
        shared = [(source, target or source) for source, _, target in (item.partition(":") for item in given.share)]
        cluster = Cluster.up(
            given.name, given.nodes, given.gpus, shared, given.accounting, given.binding, given.owner,
            topology=given.topology, uplink=given.uplink,
        )  # fmt: skip
        print(f"{cluster.plan.nodes} nodes are idle; state and logs: {cluster.directory}")
        return 0
    cluster = Cluster.find(given.name)
    if given.command == "on":
        user, _, host = given.host.rpartition("@")
        _enter(cluster, host, user or "root", given.what)
    elif given.command == "crash":
        cluster.crash(given.host, given.silent)
    elif given.command == "boot":
        cluster.boot(given.host)
    elif given.command == "rate":
        cluster.rate(given.host, given.rate)
    elif given.command == "traffic":
        print("\n".join(f"{switch} {crossed}" for switch, crossed in cluster.traffic().items()))
    elif given.command == "down":
        cluster.down()
    else:
        getattr(cluster, given.command)(given.host)
    return 0


def _enter(cluster: Cluster, host: str, user: str, what: list[str]) -> None:
    command = cluster.command(host, what or ["bash", "-l"], user)
    os.execvpe(command[0], command, cluster.environment(os.environ, user))
