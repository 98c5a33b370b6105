"""`hpcray dashboard`: a running job in the browser."""

from __future__ import annotations

import contextlib
import os
import socket

import click

from hpcray.cli.job_option import job, job_option, session_directory
from hpcray.platform.dashboard_address import UNIX, published_dashboard


@click.command()
@job_option
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Listen on this port of 127.0.0.1, for processes of this user; 0: one that is free. Default: a Unix socket.",
)  # fmt: skip
@click.option("--allow-actions", is_flag=True, help="Let browsers kill actors and remove nodes. Default: read-only.")
def dashboard(address: str, port: int | None, allow_actions: bool) -> None:
    """Show a running job in the browser, until Ctrl-C or the end of the job.

    Prints the line for ssh that leads here from your own machine, and a link that is good for one browser; when it was
    used, the next. Needs `pip install 'hpcray[observe]'`.
    """
    try:
        from hpcray.dashboard import server
    except ImportError as error:
        raise click.ClickException(f"{error}; hint: pip install 'hpcray[observe]'") from None
    path = session_directory(address)
    with contextlib.ExitStack() as stack:
        try:
            if port is None:
                sock, place = server.listen_on_socket(path)
                stack.callback(_remove, place)
            else:
                sock = server.listen_on_port(port)
                place = f"{server.LOOPBACK}:{sock.getsockname()[1]}"
        except OSError as error:
            raise click.ClickException(f"{error}; hint: --port 0" if port else str(error)) from None
        stack.enter_context(contextlib.closing(sock))
        here = place if port is not None else UNIX + place
        stack.enter_context(published_dashboard(path, here))
        process = stack.enter_context(job(path))
        local = server.LOCAL_PORT if port is None else sock.getsockname()[1]
        rights = "actors can be killed and nodes removed" if allow_actions else "read-only"
        click.echo(f"hpcray dashboard of the job at {path}, {rights}; Ctrl-C ends it")
        click.echo(f"from your own machine:  ssh -N -L {local}:{place} {socket.gethostname()}")
        if process.run.end or os.environ.get("SLURM_JOB_ID"):
            click.echo("through a login node:   the same with -J LOGIN_NODE")

        def announce(token: str) -> None:
            click.echo(f"open, in one browser:   http://localhost:{local}/#token={token}")

        ended = server.DashboardServer(process, sock, announce, allow_actions).run()
        if ended:
            click.echo(f"the job has ended: {ended}")


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
