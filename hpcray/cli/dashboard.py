"""`hpcray dashboard` and `hpcray top`: a job in the browser and in the terminal, live while it runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from hpcray.cli import json_option, print_json, top_cells
from hpcray.cli.history import ended_job, print_core_time, print_status
from hpcray.cli.job_option import errors_as_messages, job, job_option, session_directory
from hpcray.common.terminal_text import plain
from hpcray.history.outcome import ask_slurm, outcome
from hpcray.platform.config_files import launch_config
from hpcray.processes.running_jobs import UNIX, published_dashboard
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.overview import JobUse, LiveJob
from hpcray.state.reports import print_table

if TYPE_CHECKING:
    from hpcray.ray_api.server import ApiAddress


@click.command()
@job_option
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="PORT",
    help="Listen on this port of 127.0.0.1, for processes of this user; 0: one that is free. Default: a Unix socket.",
)  # fmt: skip
@click.option("--allow-actions", is_flag=True, help="Let browsers kill actors and remove nodes. Default: read-only.")
@click.option(
    "--ray-api", is_flag=True,
    help="Serve Ray's REST API for jobs too, on a port of 127.0.0.1, for requests with a token. HPCRAY_RAY_API=1 does "
    "the same.",
)  # fmt: skip
@click.option(
    "--ray-api-port", type=click.IntRange(0, 65535), metavar="PORT", default=8265, show_default=True,
    help="Port of that API; 0: one that is free.",
)  # fmt: skip
@click.option(
    "--ray-api-host", metavar="ADDRESS", default="127.0.0.1", show_default=True,
    help="Address of this host for that API. Where it is none of loopback, other hosts reach it, and other users.",
)  # fmt: skip
@click.option(
    "--ray-api-tls", nargs=2, type=click.Path(exists=True, dir_okay=False), metavar="CERT KEY",
    help="Files of the certificate and its key, for https.",
)  # fmt: skip
def dashboard(
    address: str, port: int | None, allow_actions: bool, ray_api: bool, ray_api_port: int, ray_api_host: str,
    ray_api_tls: tuple[str, str] | None,
) -> None:  # fmt: skip
    """Show a job in the browser: a running one until Ctrl-C or its end, one that has ended from its history.

    Prints the line for ssh that leads here from your own machine, and a link that is good for one browser; when it was
    used, the next. Needs `pip install 'hpcray[observe]'`.
    """
    try:
        from hpcray.dashboard import server
        from hpcray.dashboard.job_pages import EndedJobPages, JobPages
        from hpcray.ray_api.server import ApiAddress
    except ImportError as error:
        raise click.ClickException(f"{error}; hint: pip install 'hpcray[observe]'") from None
    with errors_as_messages(ValueError):
        ray_api = ray_api or launch_config(os.environ).ray_api
    api_place = ApiAddress(ray_api_host, ray_api_port, *(ray_api_tls or ())) if ray_api else None
    history = ended_job(address)
    path = session_directory(address) if history is None else ""
    with contextlib.ExitStack() as stack:
        directory = path or stack.enter_context(tempfile.TemporaryDirectory(prefix="hpcray-dashboard-"))
        try:
            if port is None:
                sock, place = server.listen_on_socket(directory)
                stack.callback(_remove, place)
            else:
                sock = server.listen_on_port(port)
                place = f"{server.LOOPBACK}:{sock.getsockname()[1]}"
        except OSError as error:
            raise click.ClickException(f"{error}; hint: --port 0" if port else str(error)) from None
        stack.enter_context(contextlib.closing(sock))
        local = server.LOCAL_PORT if port is None else sock.getsockname()[1]
        through_login = False
        pages: JobPages | EndedJobPages
        if history is not None:
            pages = EndedJobPages(history, outcome(history, ask_slurm(history)))
            click.echo(plain(f"hpcray dashboard of the history of job {history.run.job}; Ctrl-C ends it"))
        else:
            stack.enter_context(published_dashboard(path, place if port is not None else UNIX + place))
            api_sock = _listen(stack, api_place) if api_place is not None else None
            process = stack.enter_context(job(path))
            pages, through_login = JobPages(process), bool(process.place.run.end or os.environ.get("SLURM_JOB_ID"))
            rights = "actors can be killed and nodes removed" if allow_actions else "read-only"
            click.echo(f"hpcray dashboard of the job at {path}, {rights}; Ctrl-C ends it")
        click.echo(f"from your own machine:  ssh -N -L {local}:{place} {socket.gethostname()}")
        if through_login:
            click.echo("through a login node:   the same with -J LOGIN_NODE")
        if history is None and api_place is not None and api_sock is not None:
            _serve_api(stack, process, api_sock, api_place)

        def announce(token: str) -> None:
            click.echo(f"open, in one browser:   http://localhost:{local}/#token={token}")

        ended = server.DashboardServer(pages, path, sock, announce, allow_actions and history is None).run()
        if ended:
            click.echo(f"the job has ended: {ended}")


def _listen(stack: contextlib.ExitStack, place: ApiAddress) -> socket.socket:
    """Listen where Ray's API is to be; the command ends with a message where that is not possible."""
    try:
        return stack.enter_context(contextlib.closing(place.listen()))
    except (OSError, ValueError) as error:
        hint = "" if isinstance(error, ValueError) else f" ({place.host}:{place.port}); hint: --ray-api-port 0"
        raise click.ClickException(f"{error}{hint}") from None


def _serve_api(stack: contextlib.ExitStack, process: CoreWorker, sock: socket.socket, place: ApiAddress) -> None:
    """Serve Ray's API until the stack ends, and say how its clients find it."""
    from hpcray.ray_api.server import api_token, path_beside, serving

    try:
        token = api_token(os.environ, path_beside(process.place.session_dir, sock, "token"))
        if token.is_new:
            stack.callback(_remove, token.path)
        stack.enter_context(serving(process, sock, place, token.value))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"Ray's API: {error}") from None
    except ImportError as error:
        raise click.ClickException(f"Ray's API: {error}; hint: pip install 'hpcray[observe]'") from None
    click.echo(f"Ray's REST API at {place.url(sock)}; for Ray's clients:")
    for name, text in {"RAY_API_SERVER_ADDRESS": place.url(sock), **token.exports()}.items():
        click.echo(f"  export {name}={shlex.quote(text)}")
    if not token.path:
        click.echo("  and RAY_AUTH_TOKEN as it is here")
    if not place.is_loopback and not place.cert:
        click.echo(
            f"hpcray: warning: other hosts reach {place.host}, and the token goes over the network in plain text: who "
            "reads it there can run commands as you; hint: --ray-api-tls CERT KEY, or 127.0.0.1 and a tunnel of ssh",
            err=True,
        )


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


# ------------------------------------------------------------ top
# A live view in a terminal, or one sample of it as text or JSON.

_PLAIN_WIDTH = 200  # all columns


@click.command()
@job_option
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(0.2), help="Seconds between samples.")
@click.option("--once", is_flag=True, help="Print one sample, of two seconds, and end.")
@json_option("an object: one sample")
def top(address: str, interval: float, once: bool, as_json: bool) -> None:
    """Show a running job live: nodes with CPU, memory, GPU, store and network; functions with times; actors; logs.

    It stays when the job ends, and says so. Needs `pip install 'hpcray[observe]'` except for --once and --json.

    Exit code: 0, also where the job has ended; 1 where there is no job; 143 after SIGTERM.
    """
    if history := ended_job(address):
        print_status(history, as_json)
        return
    with job(address) as process:
        source = LiveJob(process)
        if once or as_json or not sys.stdout.isatty():
            source.sample()
            time.sleep(interval)
            use = source.sample()
            print_json(asdict(use)) if as_json else _print(use)
            return
        try:
            from hpcray.cli.top_app import TopApp
        except ImportError as error:
            raise click.ClickException(f"{error}; hint: pip install 'hpcray[observe]', or --once") from None
        app = TopApp(source, interval)
        app.run()
    sys.exit(app.return_code or 0)


def _print(use: JobUse) -> None:
    head = top_cells.headline(use)
    if sys.stdout.isatty():
        head.truncate(shutil.get_terminal_size().columns, overflow="ellipsis")
    click.echo(plain(head.plain))
    names = [name for name, _ in top_cells.node_columns(_PLAIN_WIDTH)]
    print_table(names, [[f"node {one.index}", *top_cells.node_cells(one, _PLAIN_WIDTH)[1:]] for one in use.nodes])
    whole = sum(one.total for one in use.functions)
    names = [name for name, _ in top_cells.function_columns(_PLAIN_WIDTH)]
    print_table(names, [top_cells.function_cells(one, _PLAIN_WIDTH, whole) for one in use.functions])
    print_core_time(use.core_time, use.cpu_time_beside)
