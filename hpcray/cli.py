"""The `hpcray` command."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from hpcray.state.doctor import FAIL, WARN, Finding, examine, package_version

_MARKS = {"ok": ("ok", "green"), "note": ("", ""), WARN: ("warn", "yellow"), FAIL: ("FAIL", "red")}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Ray's programming model on MPI, UCX and Slurm.

    To start a program, see: hpcray-launch --help
    """


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(package_version("hpcray", "a source directory, not installed"))


@main.command()
@click.option("--require-rdma", is_flag=True, help="Fail unless object bytes would go over RDMA.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(require_rdma: bool, as_json: bool) -> None:
    """Show what a job on this host would run on; exit code 1 if a job on several nodes could not start."""
    findings = examine(require_rdma)
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    if any(finding.level == FAIL for finding in findings):
        sys.exit(1)


@main.command()
@click.option("--address", default="auto", help="Session directory of a node (default: the newest job of this user).")
@click.option("--json", "as_json", is_flag=True, help="Print the nodes as JSON.")
def status(address: str, as_json: bool) -> None:
    """Show the nodes of the job that runs on this machine, and what is free of their resources."""
    from hpcray.api import context, session

    try:
        session.init(address=address)
    except (ConnectionError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    try:
        nodes, total, free = context.nodes(), context.cluster_resources(), context.available_resources()
    finally:
        session.shutdown()
    if as_json:
        click.echo(json.dumps({"nodes": nodes, "total": total, "available": free}, indent=1))
    else:
        _show_nodes(nodes, total, free)


def _show(findings: list[Finding]) -> None:
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            click.secho(topic, bold=True)
        mark, colour = _MARKS[finding.level]
        click.echo(f"  {click.style(f'{mark:<4}', fg=colour or None)} {finding.name:<18} {finding.value}")
        if finding.hint:
            click.echo(f"       {'':<18} hint: {finding.hint}")


def _show_nodes(nodes: list[dict[str, Any]], total: dict[str, float], free: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("node", "host", "state", "CPU", "object store", "id")
    for index, node in enumerate(nodes):
        resources = node["Resources"]
        table.add_row(
            str(index),
            str(node["NodeManagerHostname"]),
            "alive" if node["Alive"] else "dead",
            f"{resources.get('CPU', 0):g}",
            f"{resources.get('object_store_memory', 0) / 1e9:.2f} GB",
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
