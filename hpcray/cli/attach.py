"""`hpcray bridge`: the way into a job for drivers outside of it; and `hpcray attach`."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable

import click
import msgspec

import hpcray
from hpcray.attach import starter
from hpcray.attach.carrier import LINE_MARK, MARK, PROTOCOL, Answer, Far, Request, own_version
from hpcray.attach.endpoint import enlarge
from hpcray.attach.far_end import FarEnd, socket_path
from hpcray.cli.slurm_entry import slurm_jobs_meant
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.platform.session_directory import read_session

NAMESPACE = "hpcray.attach"
"""Namespace of the actors that are the far ends of attachments."""
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
        text = file.read()
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
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(path)
    except OSError as error:
        gone = isinstance(error, (FileNotFoundError, ConnectionRefusedError))
        text = "the job has ended this attachment" if gone else str(error)
        _say(LINE_MARK, Answer(f"{text} (on {info.host})", final=gone))
        return
    except Exception as error:
        _say(LINE_MARK, Answer(f"{type(error).__name__}: {error}"))
        return
    _say(LINE_MARK, Answer())
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
