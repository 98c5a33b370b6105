"""The join token of a running job: by it nodes find the job, and prove that they belong to it. A file of mode 0600."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.common.ids import HEAD, NIL_PROC
from hpcray.common.resources import Resources, to_amounts
from hpcray.platform.config_files import launch_config
from hpcray.platform.private_files import CLOSED, PrivateDirectory, UntrustedPathError, read_private_file, state_place
from hpcray.platform.process_control import module_line
from hpcray.platform.session_directory import RAYLET_SOCKET
from hpcray.platform.sockets import connect_private
from hpcray.protocol.frames import FrameReader, pack
from hpcray.protocol.messages import (
    ATTACHED,
    Evacuate,
    Evacuated,
    GcsCall,
    GcsReply,
    HeadMoved,
    Hello,
    Message,
    OpenJob,
    Welcome,
    decode,
    encode,
)

JOIN_TOKENS = "join-tokens"
"""Name of the directory of join tokens for nodes of other hosts."""
SILENT = "does not answer"
"""Words in the error of a node whose head is gone."""
_TIMEOUT = 30.0
REQUEST = 1
"""Number of the one request of `ask_head`."""
_RECEIVE = 1 << 16


class JoinToken(msgspec.Struct, frozen=True):
    """The facts that a node needs to join a job.

    Attributes:
        session: name of the job's session.
        secret: the job's secret. Only this file and MPI, among the ranks of one world, carry it.
        head: the node of the head. address: its UCX worker. host: its host name.
        one_host: whether only nodes of that host can join.
        session_dir: the head's session directory on its host.
        settings: the job's (`Config`).
    """

    session: str
    secret: bytes
    head: int
    address: bytes
    host: str
    one_host: bool
    session_dir: str
    settings: dict[str, Any] = {}


def read_join_token(path: str) -> JoinToken:
    """The join token in a file.

    Raises:
        StartupError: there is none, or other users could have read or written it.
    """
    try:
        return msgspec.json.decode(read_private_file(path, CLOSED, ancestors=True), type=JoinToken)
    except UntrustedPathError as error:
        raise StartupError(
            f"{path} is no join token of yours: it must be yours alone, with mode 0600, and {error}"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"{path} is no join token of a running job: {error}") from None


def join_token_path(session: str) -> str:
    """The path of the join token of a job for nodes of other hosts: where jobs are kept, on a file system that all
    nodes share; in the user's home where others could exchange it."""
    jobs = os.path.expanduser(launch_config(os.environ).jobs or ".hpcray-jobs")
    place = state_place(os.path.join(jobs, JOIN_TOKENS), JOIN_TOKENS)
    if place.passed_over:
        print(f"hpcray: join tokens are in {place.path}: {place.passed_over}", file=sys.stderr)
    return os.path.join(place.path, f"{session}.join-token")


def write_join_token(path: str, token: bytes) -> None:
    """Write a join token, in a directory that no other user can enter or exchange.

    Raises:
        OSError: the file system refuses, or the directory is not this user's alone.
    """
    with PrivateDirectory.open(os.path.dirname(path), True, CLOSED, ancestors=True) as directory:
        directory.write(os.path.basename(path), token)


def request_join_token(session_dir: str, other_hosts: bool = False, path: str = "") -> bytes:
    """Open a job for further nodes, through one of its nodes on this host.

    Args:
        session_dir: of that node.
        other_hosts: whether nodes of other hosts will join.
        path: where the token will be, on a file system that all nodes share: a later head writes it anew.

    Returns:
        The join token, for `write_join_token`.

    Raises:
        StartupError: there is no such node, or no node can join its job.
    """
    reply = ask_head(session_dir, OpenJob(REQUEST, other_hosts, path), _TIMEOUT)
    if not reply.ok:
        raise StartupError(reply.value.decode())
    found: bytes = msgspec.msgpack.decode(reply.value)
    return found


def ask_head(session_dir: str, question: Message, timeout: float) -> GcsReply:
    """Send one question to the head of a job, through one of its nodes on this host, without joining the job.

    Args:
        question: a message whose answer is a GcsReply; its `req` is `REQUEST`.
        timeout: seconds until the answer must be there.

    Raises:
        StartupError: there is no such node, or no answer comes.
    """
    found = ask_job(session_dir, [(HEAD, question)], timeout)
    if REQUEST not in found:
        raise StartupError(f"the job of {session_dir} does not answer")
    return found[REQUEST]


def query_head(session_dir: str, method: str, timeout: float, *args: Any) -> Any:
    """Return the head's answer to a query (`GcsCall`), as `ask_head` gets it.

    Raises:
        StartupError: there is no such node, no answer comes, or the head refuses the query.
    """
    reply = ask_head(session_dir, GcsCall(REQUEST, method, msgspec.msgpack.encode(args)), timeout)
    if not reply.ok:
        raise StartupError(reply.value.decode())
    return msgspec.msgpack.decode(reply.value)


def ask_job(session_dir: str, questions: Sequence[tuple[bytes, Message]], timeout: float) -> dict[int, GcsReply]:
    """Send questions to processes of a job, all at once, through one of its nodes on this host, without joining it.

    Args:
        questions: proc ids, and messages whose answers are GcsReplies; `req` of the first is `REQUEST`, of each
            further one by one more.
        timeout: seconds; answers that come later are left out.

    Returns:
        The answers by their `req`.

    Raises:
        StartupError: there is no such node.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, GcsReply] = {}
    try:
        with connect_private(os.path.join(session_dir, RAYLET_SOCKET), timeout=timeout) as sock:
            sock.sendall(pack(NIL_PROC, NIL_PROC, encode([Hello(os.getpid(), ATTACHED)])))
            data, fds, _, _ = socket.recv_fds(sock, _RECEIVE, 1, socket.MSG_CMSG_CLOEXEC)
            for fd in fds:
                os.close(fd)
            reader, me = FrameReader(), NIL_PROC
            while data and (left := deadline - time.monotonic()) > 0:
                for frame in reader.feed(data):
                    for msg in decode(frame[20:]):
                        if isinstance(msg, Welcome):
                            me = msg.proc
                            sock.sendall(b"".join(pack(to, me, encode([question])) for to, question in questions))
                        elif isinstance(msg, HeadMoved):
                            for to, question in questions:
                                if to == HEAD:
                                    sock.sendall(pack(HEAD, me, encode([question])))
                        elif isinstance(msg, Evacuate):  # this process owns no objects
                            sock.sendall(pack(bytes(frame[12:20]), me, encode([Evacuated(msg.node)])))
                        elif isinstance(msg, GcsReply):
                            found[msg.req] = msg
                            if len(found) == len(questions):
                                return found
                sock.settimeout(left)
                data = sock.recv(_RECEIVE)
    except TimeoutError:
        return found
    except OSError as error:
        raise StartupError(f"no node of a running job answers in {session_dir}: {error}") from None
    return found


# ------------------------------------------------------------ node command
# The command of a node that joins a running job.


NODE_TYPE = "RAY_NODE_TYPE_NAME"
"""Variable of a node: the name of its type, which becomes a label."""
ADDED_JOBS = "_added_jobs"
"""Namespace of the ids of such batch jobs, where names do not do, in the key-value store: the batch system of each."""
_BY_SLURM = ("CPU", "GPU", "memory", "object_store_memory")


def added_job_name(session: str) -> str:
    """Name of the batch jobs of nodes that were added by hand; by it the job cancels them. The autoscaler's differ."""
    return f"hpcray-added-{session}"


def node_command(
    token: str, cpus: float | None = None, gpus: float | None = None, resources: Mapping[str, float] | None = None,
    settings: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """The command line of one node that joins.

    Args:
        token: path of the job's join token.
        cpus, gpus, resources: of the node; None: what it has.
        settings: further options, by their names without the dashes.
    """
    line = module_line("hpcray", "--join", token)
    line += [] if cpus is None else ["--num-cpus", f"{cpus:.15g}"]
    line += [] if gpus is None else ["--num-gpus", f"{gpus:.15g}"]
    line += ["--resources", json.dumps(dict(resources))] if resources else []
    return line + [word for name, value in (settings or {}).items() if value for word in (f"--{name}", value)]


def custom_resources(resources: Resources) -> dict[str, float]:
    """The amounts that a node cannot find out by itself."""
    return {name: amount for name, amount in to_amounts(resources).items() if name not in _BY_SLURM}
