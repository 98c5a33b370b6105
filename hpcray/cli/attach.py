"""`hpcray bridge`: the way into a job for drivers outside of it; and `hpcray attach`."""

from __future__ import annotations

import code
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click
import msgspec

import hpcray
from hpcray.attach import starter
from hpcray.attach.carrier import LINE_MARK, MARK, PROTOCOL, BridgeAnswer, Far, Request, own_version
from hpcray.attach.endpoint import enlarge
from hpcray.attach.far_end import FarEnd, socket_path
from hpcray.cli.job_option import errors_as_messages
from hpcray.cli.slurm_entry import slurm_jobs_meant
from hpcray.common.exceptions import JobError, SubmitError
from hpcray.common.terminal_text import plain_line
from hpcray.jobs.submission import submit
from hpcray.jobs.submitted_job import SubmittedJob
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.private_files import WORLD, PrivateDirectory
from hpcray.platform.process_control import code_line
from hpcray.platform.session_directory import read_session

NAMESPACE = "hpcray.attach"
"""Namespace of the actors that are the far ends of attachments."""
READY = "ready for jobs: "
"""Start of the line that `hpcray.job_submission` prints when it takes drivers."""
_CHUNK = 1 << 20
# A compute node may have a Python 3 under any of these names.
_FIND_PYTHON = (
    'for python in python3 /usr/bin/python3 /usr/libexec/platform-python "$2"; do '
    'command -v "$python" >/dev/null 2>&1 && exec "$python" -c "$1" "$3" "$4"; done; '
    'printf \'\\n\\036hpcray-bridge {"error": "no Python 3 on this node"}\\n\'; exit 127'
)


@click.command(hidden=True)
@click.option("--job", default="auto", help="Slurm's id of the job.")
@click.option("--host", default="", help="The node; by default the first one.")
@click.option("--session", default="", help="Session directory, where the node is known.")
def bridge(job: str, host: str, session: str) -> None:
    """Carry a driver's frames into a job, on standard input and output. `init("slurm://JOBID")` runs it."""
    meant = "" if session and not job.isdecimal() and job != "auto" else job
    try:
        ident = _job_meant(meant)
    except LookupError as error:
        _say(MARK, Far(error=str(error)))
        sys.exit(1)
    with open(starter.__file__, encoding="utf-8") as file:
        text = code_line(file.read())[-1]
    words = ["sh", "-c", _FIND_PYTHON, "sh", text, sys.executable, ident, session]
    if not ident:
        os.execvp("sh", words)
    line = ["srun", f"--jobid={ident}", "--overlap", "--unbuffered", "--quiet", "--mpi=none", "-N1", "-n1"]
    line += [f"--nodelist={host}"] if host else []
    line += ["--export=ALL", "--input=0", "--disable-status"]
    environ = outside_of_job(os.environ)
    try:
        os.execvpe("srun", [*line, *words], environ)
    except OSError as error:
        _say(MARK, Far(error=f"srun cannot be run: {error}"))
        sys.exit(1)


@click.command()
@click.argument("job", metavar="[JOB]", default="")
@click.option("--new", is_flag=True, help="Submit a job for it, and cancel that at the end.")
@click.option("-N", "--nodes", default=1, help="With --new: hpcray nodes.", show_default=True)
@click.option("-t", "--time", "limit", help="With --new: time limit as for sbatch: minutes, 1:30:00, 2-12.")
@click.option("-p", "--partition", help="With --new: Slurm's partition.")
@click.option("-c", "--command", "source", help="Run this code instead, and end.")
@click.option("--namespace", help="Namespace of named actors.")
def attach(
    job: str, new: bool, nodes: int, limit: str | None, partition: str | None, source: str | None, namespace: str | None
) -> None:
    """Open IPython here as a driver of a job that runs in Slurm: its id, an address, or the only one.

    `ray` is there, attached to the job. The end of the session ends what it owned, and not the job.
    """
    if new and job:
        raise click.UsageError("--new makes a job: it takes no JOB")
    made = None
    try:
        if new:
            with errors_as_messages(SubmitError, JobError):
                made = submit(
                    "-m", "hpcray.job_submission", nodes=nodes, time=limit, partition=partition, name="attached",
                    executor="slurm",
                )  # fmt: skip
                job = _started(made)
        try:
            hpcray.init(job if "://" in job else f"slurm://{job}", namespace=namespace)
        except (ConnectionError, ValueError) as error:
            raise click.ClickException(str(error)) from None
        names = {"ray": hpcray, "hpcray": hpcray}
        if source is not None:
            exec(compile(source, "<command>", "exec"), names)
        else:
            _interact(names)
    finally:
        hpcray.shutdown()
        if made is not None:
            made.cancel()


def _started(job: SubmittedJob[Any]) -> str:
    """Wait until a job takes drivers; return its id. A line says how it is."""
    click.echo(f"hpcray: job {job.job_id}: waiting for {job.nodes} node(s)", err=True)
    begun, before = time.monotonic(), ""
    while not any(READY in line for line in (job.stdout() or "").splitlines()):
        state = job.state
        if state != before:
            click.echo(f"hpcray: job {job.job_id} is {state} after {time.monotonic() - begun:.0f} s", err=True)
        if state not in ("PENDING", "RUNNING", "UNKNOWN"):
            raise JobError(f"job {job.job_id} has not begun: {state}; hint: hpcray logs {job.job_id}")
        before = state
        time.sleep(0.5)
    return job.job_id


def _interact(names: dict[str, Any]) -> None:
    try:
        from IPython import start_ipython
    except ImportError:
        code.interact(banner="hpcray: no IPython here; hint: pip install ipython", local=names)
        return
    start_ipython(argv=["--no-banner", f"--InteractiveShellApp.ignore_cwd={not _is_own_place()}"], user_ns=names)


def _is_own_place() -> bool:
    """True if no other user can put modules into the working directory, which IPython searches first: for its own, too.
    Else a line says so."""
    try:
        PrivateDirectory.open(os.getcwd(), False, WORLD, ancestors=True).close()
    except OSError as error:
        click.echo(f"hpcray: modules in the working directory are not imported: {plain_line(error)}", err=True)
        return False
    return True


def _job_meant(job: str) -> str:
    """Return Slurm's id of the job; "" for a session on this host, where there is no Slurm.

    Raises:
        LookupError: there is none, or it is not clear which.
    """
    if not job:
        return ""
    found = slurm_jobs_meant(job)
    if len(found) == 1:
        return found[0].job_id
    if len(found) > 1:
        rows = "; ".join(f"slurm://{one.job_id} ({one.name}, {one.nodes} nodes, {one.time_left} left)" for one in found)
        raise LookupError(f"several jobs of yours could be meant: {rows}")
    what = "no job of yours that runs hpcray" if job == "auto" else f"job {job} does not run, or is not yours"
    raise LookupError(f"{what}; hint: hpcray jobs, squeue --me")


def serve_bridge(session_dir: str) -> None:
    """Be the bridge on a node of the job; called by `hpcray.attach.starter`, with the Python of the job."""
    info = read_session(session_dir)
    far = Far(
        protocol=PROTOCOL, version=own_version(), python="{}.{}.{}".format(*sys.version_info[:3]),
        host=info.host, step_host=os.environ.get("SLURMD_NODENAME", ""), session_dir=info.path,
        session_name=info.session, slurm_job=info.slurm_job, node=info.node, node_id=info.node_id, nodes=info.nodes,
        end=info.end,
    )  # fmt: skip
    _say(MARK, far)
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        line += byte
    request = msgspec.json.decode(line, type=Request)
    path = socket_path(session_dir, request.ident)
    try:
        if not request.resume:
            _make_far_end(session_dir, request, info.node_id)
        elif request.node_id != info.node_id:
            _say(LINE_MARK, _about_other_node(session_dir, request.node_id))
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        text = "the job has ended this attachment" if gone else str(error)
        _say(LINE_MARK, BridgeAnswer(f"{text} (on {info.host})", final=gone))
        return
    except Exception as error:
        _say(LINE_MARK, BridgeAnswer(f"{type(error).__name__}: {error}"))
        return
    _say(LINE_MARK, BridgeAnswer())
    for fd in (0, 1):
        enlarge(fd)
    threading.Thread(target=_pump, args=(lambda: os.read(0, _CHUNK), sock.sendall), daemon=True).start()
    _pump(lambda: sock.recv(_CHUNK), _write_all)


def _pump(read: Callable[[], bytes], write: Callable[[bytes], object]) -> None:
    """Copy to the end of either side, which is that of this process."""
    try:
        while data := read():
            write(data)
    except OSError:
        pass
    os._exit(0)


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


def _say(mark: bytes, what: msgspec.Struct) -> None:
    _write_all(b"\n" + mark + msgspec.json.encode(what) + b"\n")


def _about_other_node(session_dir: str, node_id: str) -> BridgeAnswer:
    """Say whether the node of an attachment has died: its bridge could not be reached there."""
    hpcray.init(session_dir, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    alive = {row["NodeID"]: row["Alive"] for row in hpcray.nodes()}
    hpcray.shutdown()
    if alive.get(node_id):
        return BridgeAnswer("the node of this attachment is alive, but Slurm has not reached it")
    return BridgeAnswer("the node of this attachment has died, and with it what this driver owned", final=True)


class Attachment:
    """The actor that is a far end: so it is a process of the job, and outlives the step of a bridge."""

    def __init__(self, session_dir: str, ident: str, wait: float) -> None:
        self._far_end = FarEnd(session_dir, ident, wait)
        threading.Thread(target=self._serve, name="attachment", daemon=True).start()

    def ready(self) -> None:
        """Return when it takes pipes."""

    def _serve(self) -> None:
        try:
            self._far_end.run()
        finally:
            self._far_end.close()
            hpcray.actor.exit_actor()


def _make_far_end(session_dir: str, request: Request, node_id: str) -> None:
    hpcray.init(session_dir, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    made = hpcray.remote(Attachment).options(
        name=request.ident, lifetime="detached", num_cpus=0, max_restarts=0,
        scheduling_strategy=hpcray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=False),
    )  # fmt: skip
    actor = made.remote(session_dir, request.ident, request.wait)
    hpcray.get(actor.ready.remote(), timeout=60)
    hpcray.shutdown()
