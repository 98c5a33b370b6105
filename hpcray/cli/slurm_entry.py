"""The way from a login node to a job that runs in Slurm: a command becomes a step on the job's first node."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import NoReturn

import click

from hpcray.common.exceptions import StartupError
from hpcray.common.terminal_text import plain
from hpcray.history.runs import JobNames, jobs_meant
from hpcray.jobs.batch_queues import ActiveJob, active_jobs
from hpcray.platform.allocation import expand_nodes
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.process_control import code_line, die_with_parent, module_line
from hpcray.ray_start.lookup import hidden_node
from hpcray.ray_start.surroundings import addresses_of, parse_cluster_address

ENTERED = "HPCRAY_ENTERED_JOB"
"""Variable that is set where `enter_slurm_job` has brought a command."""
START_TIMEOUT = 30.0
"""Seconds within which Slurm has to start the step."""
_ADDED = ("hpcray-nodes-", "hpcray-added-")  # batch jobs of nodes that join a job (node_provider, node_command)
_ADDRESSES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
_MOST_HOSTS = 256  # hosts of a job whose addresses are looked up
_MOST_ASKED = 16  # jobs that are asked whether they run hpcray
_STARTED = b"\x1e"  # on standard error: the step has started
_CHUNK = 1 << 16  # bytes
_ANNOUNCE = 'printf "\\036" >&2; exec "$@"'
_FIND = "from hpcray.processes.running_jobs import {0}, {1}\ntry: find_running_job(sys.argv[1])\n"
_FIND = _FIND.format("SeveralRunningJobsError", "find_running_job") + "except SeveralRunningJobsError: pass"


class StepStartError(click.ClickException):
    """Slurm has not started the step of a command in time."""


def slurm_jobs_meant(name: str) -> list[ActiveJob]:
    """Return the running Slurm jobs of this user that `--job` can mean, [] where there is no Slurm.

    Where several could be, each of them is asked whether it runs hpcray, and the session that is named. Nodes that were
    added to a job are no jobs of their own.

    Args:
        name: "auto", Slurm's id or name of a job, the name of a session, or a session directory.
    """
    if os.environ.get(ENTERED) or shutil.which("srun") is None:
        return []
    running = [job for job in active_jobs() if job.state == "RUNNING" and not job.name.startswith(_ADDED)]
    if name == "auto":
        allocation = os.environ.get("SLURM_JOB_ID", "")
        running = [job for job in running if job.job_id == allocation] or running
    elif named := jobs_meant(name, running, lambda job: JobNames((job.job_id,), (job.name,))):
        if any(job.job_id == name for job in named):
            return named
        running, name = named, "auto"
    if len(running) < 2 and not name.isdecimal():  # else it is a session's name, or an id of a job that has ended
        return running
    if not running:
        return []
    asked = sorted(running, key=lambda job: -job.submitted)[:_MOST_ASKED]
    with ThreadPoolExecutor(len(asked)) as threads:
        return [job for job, runs in zip(asked, threads.map(partial(_runs_session, name), asked), strict=True) if runs]


def slurm_job_on(address: str) -> tuple[str, str] | None:
    """Return the running Slurm job of this user that has the host of a cluster's address, and the node's name.

    The newest one where several share the host. None where there is none, or no Slurm; and for a command that has come
    to a job's host already.

    Args:
        address: `H:P`, `http://H:P` or `ray://H:P`.
    """
    parts = parse_cluster_address(address)
    if parts is None or os.environ.get(ENTERED) or shutil.which("srun") is None:
        return None
    wanted = {parts.host, parts.host.partition(".")[0], *addresses_of(parts.host)}
    for job in sorted(active_jobs(), key=lambda job: -job.submitted):
        if job.state != "RUNNING" or job.name.startswith(_ADDED):
            continue
        for node in expand_nodes(job.node_list)[:_MOST_HOSTS]:
            if not wanted.isdisjoint({node, *addresses_of(node)}):
                return job.job_id, node
    return None


def enter_hidden_node(address: str | None, words: Sequence[str]) -> None:
    """Run the same command at a node of this host whose files are in another container, and end with its exit code.
    Returns where no such node is meant.

    Args:
        address: of the cluster, as the user gave it; None: what the variables say.
        words: of the command line of `ray`, without the address.
    """
    if os.environ.get(ENTERED):
        return
    with contextlib.suppress(ConnectionError, StartupError, ValueError):
        if ident := hidden_node(address or "auto"):
            from hpcray.ray_start.keeper import run_in_node  # few commands come here

            environ = {name: text for name, text in os.environ.items() if name not in _ADDRESSES}
            with contextlib.suppress(OSError):  # it has just ended
                sys.exit(run_in_node(ident, words, {**environ, ENTERED: "node"}))


def enter_slurm_job(
    job_id: str, module: str, words: Sequence[str], found: ActiveJob | None = None, host: str = ""
) -> NoReturn:
    """Run the same command on a node of a Slurm job, where the job's sockets are, and end with its exit code.

    Args:
        job_id: Slurm's id.
        module: of the command line.
        words: its arguments.
        found: what is known of the job, for the line that says so.
        host: the node; "": the first one.

    Raises:
        StepStartError: Slurm has not started the step in time.
    """
    if shutil.which("srun") is None:
        raise click.ClickException(f"job {job_id}: there is no srun on this machine")
    if found is not None:
        click.echo(f"hpcray: job {job_id} ({plain(found.name)}, {found.node_list}), through srun --overlap", err=True)
    command = module_line(module, *words)
    environ = _environment(job_id)
    if sys.stdin.isatty() and sys.stdout.isatty():
        os.execvpe("srun", [*_step(job_id, host), f"--immediate={START_TIMEOUT:.0f}", "--pty", *command], environ)
    sys.exit(_run_step(job_id, [*_step(job_id, host), "sh", "-c", _ANNOUNCE, "sh", *command], environ))


def _environment(job_id: str) -> dict[str, str]:
    """The variables of the step: those of this shell, but for what it has of another job, and srun's options."""
    environ = {name: text for name, text in outside_of_job(os.environ).items() if name not in _ADDRESSES}
    return {**environ, ENTERED: job_id}


def _step(job_id: str, host: str = "") -> list[str]:
    line = ["srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", "--quiet", "--mpi=none"]
    line += [f"--nodelist={host}"] if host else []
    return [*line, "--export=ALL", "--disable-status"]  # Ctrl-C goes to the command at once


def _runs_session(name: str, job: ActiveJob) -> bool:
    """Return True if the first node of the job runs a node of hpcray, and of this session unless `name` is "auto"."""
    line = [*_step(job.job_id), *code_line(_FIND, name)]
    null = subprocess.DEVNULL
    try:
        return not subprocess.run(
            line, env=_environment(job.job_id), stdin=null, stdout=null, stderr=null, timeout=START_TIMEOUT
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def _run_step(job_id: str, line: list[str], environ: dict[str, str]) -> int:
    """Run a step that announces its start on standard error; return its exit code."""
    parent = os.getpid()
    child = subprocess.Popen(
        line, stderr=subprocess.PIPE, env=environ, preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM)
    )

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT or not _in_foreground():  # else the terminal has sent it to srun, too
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        if not _pass_errors_on(child, START_TIMEOUT):
            child.kill()
            raise StepStartError(
                f"job {job_id}: Slurm has started no step within {START_TIMEOUT:g} s; hint: scontrol show job {job_id}"
            )
        code = child.wait()
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _pass_errors_on(child: subprocess.Popen[bytes], limit: float) -> bool:
    """Copy the standard error of a step to this process's, to its end. False if it has not started in time."""
    assert child.stderr is not None
    fd, deadline, started = child.stderr.fileno(), time.monotonic() + limit, False
    with selectors.DefaultSelector() as ready:
        ready.register(fd, selectors.EVENT_READ)
        while True:
            if not ready.select(None if started else max(0.0, deadline - time.monotonic())):
                return False
            data = os.read(fd, _CHUNK)
            if not data:
                return True
            if not started and _STARTED in data:
                started, data = True, data.replace(_STARTED, b"", 1)
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()


def _in_foreground() -> bool:
    """Return True if the terminal's keys reach the process group of this process."""
    try:
        fd = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(fd)
