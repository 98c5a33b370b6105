"""`ray status` and `ray health-check`: whether there is a cluster, and what it has. Scripts ask again and again, so
what only unusual questions need is imported where it is needed."""

from __future__ import annotations

import os
import shutil
import sys

import click

from hpcray.common.terminal_text import plain, plain_line
from hpcray.processes.running_jobs import NoRunningJobError, SeveralRunningJobsError, find_running_job, running_jobs
from hpcray.ray_start.clusters import SeveralClustersError
from hpcray.ray_start.lookup import head_elsewhere, hidden_node, session_here
from hpcray.ray_start.order import unexpected_ends
from hpcray.ray_start.surroundings import parse_cluster_address
from hpcray.state.cluster_status import JobAsker, cluster_status, show_status

_ADDRESS = "RAY_ADDRESS"
_AUTO = ("", "auto", "local")
_NONE = (
    "Could not find any running Ray instance. Please specify the one to connect to by setting the `--address` flag or "
    "`RAY_ADDRESS` environment variable."
)
_NO_NODE = "No node of this user runs on this host; hint: srun --jobid=JOB --overlap -n 1 ray status"
_CLIENT_SERVER = "ray_client_server"

_address_option = click.option(
    "--address", "--job", default=None, metavar="ADDRESS",
    help="Of the cluster: H:P, http://H:8265, a session directory, or Slurm's id of its job (default: what RAY_ADDRESS "
    "says, else the cluster of this allocation, or the only one here).",
)  # fmt: skip


@click.command()
@_address_option
@click.option("-v", "--verbose", is_flag=True, help="With times, reasons, and the resources of each node.")
def status(address: str | None, verbose: bool) -> None:
    """Show the nodes, the resources and what waits for them, in Ray's words. Exit code: 1 where there is no cluster.

    See also: hpcray status
    """
    try:
        found = cluster_status(JobAsker(_cluster(address)))
    except ConnectionError as error:
        raise click.ClickException(plain_line(error)) from None
    click.echo(plain(show_status(found, verbose), lines=True))
    lost, why = unexpected_ends(node.reason for node in found.ended)
    if lost:
        click.echo(plain_line(f"Nodes have ended, and no command has stopped them{why}"), err=True)


@click.command("health-check", hidden=True)
@_address_option
@click.option("--component", help=f"Whether this part of Ray runs; {_CLIENT_SERVER} does where the cluster does.")
@click.option("--skip-version-check", is_flag=True, help="Accepted: nodes of a cluster are of one version.")
def health_check(address: str | None, component: str | None, skip_version_check: bool) -> None:
    """Say by the exit code whether a cluster runs, and answers: 0 where it does, else 1."""
    try:
        JobAsker(_cluster(address)).call("cluster_resources")
    except ConnectionError as error:
        raise click.ClickException(plain_line(error)) from None
    if component and component != _CLIENT_SERVER:
        raise SystemExit(1)


def _cluster(address: str | None) -> str:
    """Return the session directory of the cluster that is meant; the command ends with exit code 1 where there is none.

    Inside of an allocation only this host is looked at: a script asks again and again until there is a cluster, and a
    step of Slurm's each time would take seconds and hold up the steps that are to start it.
    """
    wanted = address or os.environ.get(_ADDRESS) or ""
    try:
        if wanted in _AUTO:
            try:
                return session_here("auto") or find_running_job()
            except NoRunningJobError:
                _ask_in_container(wanted)
                if os.environ.get("SLURM_JOB_ID"):
                    raise
                wanted = "auto"  # on a login host
        elif parts := parse_cluster_address(wanted):
            if (started := session_here(wanted)) is not None:
                return started
            try:
                if not running_jobs():
                    raise NoRunningJobError(f"Failed to connect to Ray at address: {wanted}. {_NO_NODE}")
                from hpcray.job_submission.cluster_address import find_cluster

                return find_cluster(wanted, parts)
            except NoRunningJobError:
                _ask_in_container(wanted)
                _ask_on_head(wanted)
                raise
    except NoRunningJobError as error:
        raise click.ClickException(f"{_NONE} {error}") from None
    except (SeveralRunningJobsError, SeveralClustersError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    from hpcray.cli.job_option import session_directory

    return session_directory(wanted)


def _ask_in_container(address: str) -> None:
    """Run the command again at a node of this host whose files are in another container."""
    if hidden_node(address):
        from hpcray.cli.job_option import without_options
        from hpcray.cli.slurm_entry import enter_hidden_node

        enter_hidden_node(address, without_options(sys.argv[1:], "--address", "--job"))


def _ask_on_head(address: str) -> None:
    """Run the command again on the host of the head, where this host has no node of a cluster that `ray start` made:
    scripts ask there before they start one."""
    job, host = head_elsewhere(address)
    if job and host and shutil.which("srun"):
        from hpcray.cli.job_option import enter_job
        from hpcray.cli.slurm_entry import ENTERED

        if not os.environ.get(ENTERED):
            enter_job(job, host, address)
