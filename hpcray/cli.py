"""The `hpcray` command."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from hpcray.cluster import commands
from hpcray.cluster.srun import Slurm, compose_step, has_mpich, protocol, try_srun
from hpcray.host.allocation import read_allocation
from hpcray.host.allocation_nodes import compress_nodes
from hpcray.state import commands as looks
from hpcray.state.doctor import examine, examine_job, judge_clocks
from hpcray.state.doctor_host import package_version
from hpcray.state.doctor_nodes import ask_nodes
from hpcray.state.findings import FAIL, NOTE, OK, WARN, Finding, Row, merge
from hpcray.state.status import node_columns, show_demand

_MARKS = {OK: ("ok", "green"), NOTE: ("", ""), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red")}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Ray's programming model on MPI, UCX and Slurm.

    To start a program, see: hpcray-launch --help
    """


for _command in (commands.submit, commands.jobs, commands.logs, commands.cancel, *looks.COMMANDS):
    main.add_command(_command)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(package_version("hpcray", "a source directory, not installed"))


@main.command()
@click.option("--require-rdma", is_flag=True, help="Fail unless object bytes would go over RDMA.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--here", is_flag=True, help="Look at this host only, in an allocation too.")
def doctor(require_rdma: bool, as_json: bool, here: bool) -> None:
    """Show what a job would run on: on this host, or in a Slurm allocation on every node of it.

    Exit code 1 if something is red: a job on several nodes could not start.
    """
    given = read_allocation()
    if given.in_step and given.rank:
        return  # srun hpcray doctor: one task asks for all
    rows = [Row(finding) for finding in examine(require_rdma)] if here or given.kind != "slurm" else []
    rows = rows or _examine_allocation(require_rdma)
    if as_json:
        click.echo(json.dumps([{**asdict(row.finding), "nodes": row.nodes} for row in rows], indent=1))
    else:
        _show(rows, len(given.nodes))
        _show_sum(rows)
    if any(row.finding.level == FAIL for row in rows):
        sys.exit(1)


def _examine_allocation(require_rdma: bool) -> list[Row]:
    """The job's rows, then those of its nodes."""
    given = read_allocation()
    mpi = protocol(os.environ, has_mpich())
    slurm = Slurm(given, os.environ, mpi, try_srun(mpi, os.environ))
    command = [sys.executable, "-m", "hpcray.state.node_report"]
    command += ["--require-rdma"] if require_rdma else []
    command += ["--without-mpi"] if slurm.problem else []
    said = ask_nodes(compose_step(slurm, command), given.nodes)
    job = examine_job(given, mpi, slurm.problem, os.environ)
    if said.missing:
        why = said.complaint.splitlines()[0] if said.complaint else "no answer in time"
        hint = "is the directory of this Python on every node? Else see the site's log of the node"
        job.append(Finding("Slurm", "nodes without a report", f"{compress_nodes(said.missing)}: {why}", FAIL, hint))
    return [*map(Row, job), Row(judge_clocks(said.offsets)), *merge(said.reports)]


@main.command()
@click.option("--address", default="auto", help="Session directory of a node (default: the newest job of this user).")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON.")
def status(address: str, as_json: bool) -> None:
    """Show the job that runs on this machine: what its nodes have and lend, what waits, and its placement groups."""
    from hpcray.api import context, session
    from hpcray.runtime.refs import need_process

    try:
        session.init(address=address)
    except (ConnectionError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        nodes, total, free = context.nodes(), context.cluster_resources(), context.available_resources()
        gcs = need_process().gcs
        now, groups = gcs.call("status"), gcs.call("placement_groups")
    finally:
        session.shutdown()
    if as_json:
        waits = {"unmet": now["unmet"], "demand": now["demand"], "actors": now["actors"]}
        rows = [{**group, "group": group["group"].hex()} for group in groups]
        found = {"nodes": nodes, "total": total, "available": free, **waits, "placement_groups": rows}
        click.echo(json.dumps(found, indent=1))
    else:
        _show_nodes(nodes, total, free, now)
        for line in show_demand(now, groups):
            click.echo(line)


@main.command()
@click.option("--address", default="auto", help="Session directory of a node (default: the newest job of this user).")
@click.option("--limit", default=100, show_default=True, type=click.IntRange(0), help="Most objects per node.")
@click.option("--timeout", default=10.0, show_default=True, help="Seconds that the nodes may take to answer.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def memory(address: str, limit: int, timeout: float, as_json: bool) -> None:
    """Show what the object stores of a running job hold: largest objects first, who owns them and who has them pinned.

    With HPCRAY_RECORD_REF_CREATION_SITES=1 at the start of the job also where each ref was created.
    """
    from hpcray.api import session
    from hpcray.runtime.refs import need_process
    from hpcray.state.memory import show_stores, sum_stores

    try:
        session.init(address=address)
    except (ConnectionError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        rows = need_process().survey.look(limit, timeout)
    finally:
        session.shutdown()
    if as_json:
        click.echo(json.dumps({"nodes": rows, "total": sum_stores(rows)}, indent=1))
    else:
        for line in show_stores(rows):
            click.echo(line)
    if any(row["problem"] for row in rows):
        sys.exit(1)


@main.command()
@click.option("--address", default="auto", help="Session directory of a node (default: the newest job of this user).")
def metrics(address: str) -> None:
    """Print what the programs on this node measure with ray.util.metrics, in the text format of Prometheus.

    The same text can be had by HTTP: curl --unix-socket <session directory>/metrics.s http://node/metrics
    """
    from hpcray.host.metrics import ask
    from hpcray.host.session import live_sessions, read_session

    sessions = live_sessions() if address == "auto" else [read_session(address)]
    if not sessions:
        raise click.ClickException("no running hpcray node of this user on this machine; hint: start the job first")
    try:
        click.echo(ask(sessions[0].path), nl=False)
    except OSError as error:
        raise click.ClickException(f"the metrics of {sessions[0].path} cannot be read: {error}") from None


def _show(rows: list[Row], nodes: int) -> None:
    topic = ""
    for row in rows:
        finding = row.finding
        if finding.topic != topic:
            topic = finding.topic
            click.secho(topic, bold=True)
        mark, colour = _MARKS[finding.level]
        where = f"{compress_nodes(row.nodes)}: " if 0 < len(row.nodes) < nodes else ""
        click.echo(f"  {click.style(f'{mark:<4}', fg=colour or None)} {finding.name:<18} {where}{finding.value}")
        if finding.hint:
            click.echo(f"       {'':<18} hint: {finding.hint}")


def _show_sum(rows: list[Row]) -> None:
    red = sum(row.finding.level == FAIL for row in rows)
    yellow = sum(row.finding.level == WARN for row in rows)
    click.echo(f"{red} red, {yellow} yellow")


def _show_nodes(
    nodes: list[dict[str, Any]], total: dict[str, float], free: dict[str, float], now: dict[str, Any]
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("node", "host", "state", "CPU", "GPU", "others", "object store", "waiting", "id")
    columns = node_columns(now)
    for node in nodes:
        resources, here = node["Resources"], columns.get(node["Index"], {})
        table.add_row(
            str(node["Index"]),
            str(node["NodeManagerHostname"]),
            "alive" if node["Alive"] else "dead",
            here.get("CPU", ""),
            here.get("GPU", ""),
            here.get("others", ""),
            f"{resources.get('object_store_memory', 0) / 1e9:.2f} GB",
            here.get("waiting", ""),
            str(node["NodeID"])[:12],
        )
    console = Console()
    console.print(table)
    for name in sorted(total):
        if not name.startswith("node:"):
            scale, unit = (1e9, " GB") if "memory" in name else (1, "")
            text = f"{name}: {free.get(name, 0) / scale:.4g} of {total[name] / scale:.4g}{unit} free"
            console.print(text, highlight=False)


if __name__ == "__main__":
    main()
