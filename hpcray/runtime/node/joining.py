"""Nodes that join a running job: `JoinAcceptor` on the head lets them in, `join_job` is their side.

A job is closed until a process of it asks the head to open it (OpenJob). The answer, a `JoinToken`, has all that a node
needs to find the job and to prove that it belongs to it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from hpcray.common.config import Config
from hpcray.common.exceptions import StartupError
from hpcray.core.gcs.gcs import Gcs, RecoveringGcs
from hpcray.core.gcs.handshake import (
    ACCEPTED,
    NONCE_BYTES,
    REJECTED,
    WAITING,
    Admitted,
    Answer,
    HandshakeAcceptor,
    HandshakeInitiator,
    JoinRequest,
    Proven,
    link_key,
)
from hpcray.core.gcs.node_manager import NodeManager
from hpcray.core.gcs.query_service import KeyValueStore
from hpcray.platform.arena import Arena
from hpcray.platform.launcher_environment import outside_of_job
from hpcray.protocol import messages as m
from hpcray.runtime.node.join_token import ADDED_JOBS, SILENT, JoinToken, added_job_name, write_join_token
from hpcray.runtime.node.node_transports import NodeTransports, open_world
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.transport.base import ControlTransport, StartError, TransportError
from hpcray.transport.startup import Launch
from hpcray.transport.ucx_control import JointControl, UcxControl
from hpcray.transport.ucx_data import UcxData

_REPORT_INTERVAL = 10.0
_LONGEST_SLEEP = 0.05
_BARRIER_POLL = 0.001
_TRIES, _TRY_AGAIN = 4, 0.5
"""How often a message goes to a head that cannot be reached, and seconds between two of them."""
_PATHS = "_join_tokens"
"""Namespace of the files that hold the job's join token, in the key-value store."""


def versions() -> tuple[str, str]:
    """The version of hpcray and the minor version of Python, which all nodes of a job share."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("hpcray")
    except PackageNotFoundError:
        own = "from a source directory"
    return own, f"{sys.version_info.major}.{sys.version_info.minor}"


class JoinAcceptor:
    """Lets nodes join the job, on the head.

    Args:
        node_manager: returns that of the head; None elsewhere.
        refusal: returns why no node may join now; "" when one may.
        on_numbered: called when nodes have been given numbers, before they get them.
        cancel_jobs: see `NodeFeatures`.
    """

    def __init__(
        self,
        raylet: Raylet,
        wires: NodeTransports,
        node_manager: Callable[[], NodeManager | None],
        refusal: Callable[[], str],
        on_numbered: Callable[[], None],
        cancel_jobs: Callable[[str, Sequence[tuple[str, str]], Mapping[str, str]], None],
    ) -> None:
        self._raylet = raylet
        self._wires = wires
        self._node_manager = node_manager
        self._refusal = refusal
        self._on_numbered = on_numbered
        self._cancel_jobs = cancel_jobs
        self._acceptor: HandshakeAcceptor | None = None
        self._outer: UcxControl
        self._reported_at = 0.0
        self._reported = 0

    def on_open_job(self, now: float, src: bytes, msg: m.OpenJob) -> Iterable[Any]:
        """Let nodes join from now on, and return the join token."""
        if self._node_manager() is None:
            return self._raylet.unexpected(now, src, msg)

        def answer(token: bytes, problem: str) -> None:
            value = problem.encode() if problem else msgspec.msgpack.encode(token)
            self._raylet.router.send(src, m.GcsReply(msg.req, not problem, value))

        self.open_job(msg.other_hosts, msg.path, answer)
        return ()

    def open_job(self, other_hosts: bool, path: str, then: Callable[[bytes, str], None]) -> None:
        """Let nodes join from now on. Calls `then` in a moment: with the join token, or with the reason why none can.

        Args:
            path: as for `request_join_token`.
        """
        self._wires.prepare(not other_hosts, lambda: self._answer(other_hosts, path, then))

    def _answer(self, other_hosts: bool, path: str, then: Callable[[bytes, str], None]) -> None:
        if self._node_manager() is None:
            return  # the head has moved meanwhile; the process asks again
        try:
            self._open(not other_hosts)
        except TransportError as error:
            then(b"", f"no node can join this job: {error}")
            return
        if path:
            self._kv().put(path.encode(), b"%d" % other_hosts, True, _PATHS)
        then(msgspec.json.encode(self._token()), "")

    def take_over(self, head: Gcs) -> None:
        """This node has become the head: nodes that have read the files of the old one's join tokens come here."""
        kv = head.queries.kv
        for path, other_hosts in kv.items(b"", _PATHS):
            try:
                self._open(other_hosts != b"1")
                if os.path.exists(path):
                    write_join_token(path.decode(), msgspec.json.encode(self._token()))
            except (OSError, TransportError) as error:
                self._raylet.log(f"nodes that have {path.decode()} cannot join any more: {error}")

    def close(self) -> None:
        """The job has ended: no node can join it any more. Cancels the batch jobs of those that were to."""
        if self._node_manager() is None:
            return
        paths = [path.decode() for path, other_hosts in self._kv().items(b"", _PATHS) if other_hosts == b"1"]
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        name = added_job_name(self._session()) if paths else ""
        jobs = [(kind.decode(), job_id.decode()) for job_id, kind in self._kv().items(b"", ADDED_JOBS)]
        if name or jobs:
            self._cancel_jobs(name, jobs, outside_of_job(os.environ))

    def _kv(self) -> KeyValueStore:
        head = self._raylet.head
        assert head is not None
        return (head.gcs if isinstance(head, RecoveringGcs) else head).queries.kv

    def _session(self) -> str:
        node_manager = self._node_manager()
        assert node_manager is not None
        return node_manager.session

    def _token(self) -> JoinToken:
        engine, context = self._wires.engine(), self._raylet.context
        return JoinToken(
            self._session(),
            engine.secret,
            self._raylet.node,
            engine.address(),
            context.info.host,
            engine.one_host,
            context.session_dir,
            context.config.as_dict(),
        )

    def _open(self, one_host: bool) -> None:
        self._outer = self._wires.outer(one_host)
        if self._acceptor is None:
            self._acceptor = HandshakeAcceptor(self._wires.engine().secret, *versions())
            self._raylet.loop.each_turn.append(self._turn)

    def _turn(self) -> None:
        acceptor, now = self._acceptor, self._raylet.loop.now
        assert acceptor is not None
        for message in self._outer.take_handshakes():
            for outcome in acceptor.receive(now, message, os.urandom(NONCE_BYTES)):
                if isinstance(outcome, Proven):
                    self._admit(acceptor, outcome)
                else:
                    self._send(outcome)

    def report(self) -> None:
        """Print how many messages of strangers were thrown away, on any node; called now and then."""
        now, refused = self._raylet.loop.now, self._acceptor.dropped if self._acceptor is not None else Counter()
        dropped = self._wires.dropped() + sum(refused.values())
        if dropped != self._reported and now - self._reported_at > _REPORT_INTERVAL:
            why = ", ".join(f"{count} × {reason}" for reason, count in refused.items())
            self._raylet.log(f"{dropped - self._reported} messages of strangers were thrown away ({why or 'frames'})")
            self._reported, self._reported_at = dropped, now

    def _admit(self, acceptor: HandshakeAcceptor, proven: Proven) -> None:
        raylet, node_manager, request = self._raylet, self._node_manager(), proven.request
        reason = self._refusal()
        number = None if reason or node_manager is None else node_manager.admit(raylet.loop.now, request.ranks)
        if number is None:
            outcomes = acceptor.refuse(proven.key, reason or "the job is starting or ending")
        else:
            try:
                self._wires.engine().connect(number, request.address, request.host == raylet.context.info.host)
            except TransportError as error:
                outcomes = acceptor.refuse(proven.key, str(error))
            else:
                self._outer.grow(number + request.ranks)
                raylet.router.grow(number + request.ranks)
                self._on_numbered()
                location = raylet.head_location
                admitted = Admitted(number, location.node, location.epoch, raylet.context.driver_rank)
                outcomes = acceptor.admit(proven.key, admitted)
        for outcome in outcomes:
            if isinstance(outcome, Answer):
                self._send(outcome)

    def _send(self, answer: Answer) -> None:
        same_host = answer.host == self._raylet.context.info.host
        try:
            self._outer.send_handshake(answer.address, same_host, answer.message)
        except TransportError as error:
            self._raylet.log(f"a node on {answer.host} wants to join and cannot be answered: {error}")


def join_job(
    token: JoinToken, config: Config, launch: Launch, arena: Arena
) -> tuple[ControlTransport, UcxData, Admitted]:
    """Open the transports of a node, and get its number from the head of a running job.

    Args:
        launch: the world that joins: where it has several ranks, they all call this, and rank 0 asks for them.

    Returns:
        The transports; the node's number, and what it needs to begin.

    Raises:
        StartupError: the head does not answer within `config.start_timeout` seconds, or refuses.
    """
    host = socket.gethostname()
    if token.one_host and token.host != host:
        raise StartupError(
            f"the job runs on {token.host} and lets nodes of that host join only, not of {host}; hint: start it with "
            "HPCRAY_ELASTIC=1"
        )
    try:
        if launch.size > 1:
            return _join_as_rank(token, config, launch, arena)
        control, data = open_world(None, token.secret, token.one_host, arena)
        admitted = _ask_head(control, data, token, 1, config.start_timeout)
        control.own(admitted.number)
        data.engine.connect(admitted.head, token.address, token.host == host)
    except StartError:
        raise
    except TransportError as error:
        raise StartupError(f"this node cannot reach the job: {error}") from None
    return control, data, admitted


def _join_as_rank(
    token: JoinToken, config: Config, launch: Launch, arena: Arena
) -> tuple[ControlTransport, UcxData, Admitted]:
    """Be a rank of a world of several: MPI inside of it, UCX to all other nodes.

    Raises:
        StartupError, TransportError: as `join_job`.
    """
    from hpcray.transport.mpi_control import (
        MpiControl,  # a world of one rank does without
        WorldDoorbell,
    )
    from hpcray.transport.selection import open_mpi_world

    world = open_mpi_world(config, token.secret, token.one_host)
    comm, data = world.comm, world.data
    if not isinstance(data, UcxData):
        raise TransportError("its object bytes would go over MPI, which no other world takes part in")
    data.register(arena.view(0, arena.whole), arena.view)
    outer = UcxControl(data.engine, partial(link_key, data.engine.secret))
    found: tuple[Admitted, JoinToken] | str = ""
    if launch.rank == 0:
        try:
            found = _ask_head(outer, data, token, launch.size, config.start_timeout), token
        except (StartupError, TransportError) as error:
            found = str(error)
    # Not a bcast at once, in which the ranks would use all of their cores until the head has answered.
    deadline, barrier = time.monotonic() + 2 * config.start_timeout, comm.Ibarrier()
    while not barrier.Test():
        if time.monotonic() > deadline:
            raise StartupError(f"rank 0 of this world has not joined the job within {2 * config.start_timeout:g} s")
        time.sleep(_BARRIER_POLL)
    found = comm.bcast(found)
    if isinstance(found, str):
        world.module.Finalize()
        raise StartupError(found, reported_by="rank0" if launch.rank else "self")
    admitted, token = found
    first = admitted.number
    outer.own(first + launch.rank)
    data.engine.connect(admitted.head, token.address, token.host == socket.gethostname())
    inner = MpiControl(world.module, comm, WorldDoorbell(data.engine, first, launch.size))
    return JointControl(inner, outer, first), data, msgspec.structs.replace(admitted, number=outer.rank)


def _ask_head(control: UcxControl, data: UcxData, token: JoinToken, ranks: int, timeout: float) -> Admitted:
    """Ask the head to let a world in.

    Raises:
        StartupError: it does not, or does not answer.
    """
    host = socket.gethostname()
    request = JoinRequest(*versions(), os.urandom(NONCE_BYTES), data.engine.address(), host, ranks)
    initiator = HandshakeInitiator(token.secret, request)
    control.send_handshake(token.address, token.host == host, initiator.message)
    ended = not _shake_hands(control, initiator, token, host, timeout)
    if initiator.admitted is None:
        data.close()
        raise StartupError(
            f"the job does not let this node join: {initiator.refusal}"
            if initiator.state == REJECTED
            else f"the job on {token.host} {SILENT}: nobody listens there any more; hint: has it ended?"
            if ended
            else f"the job on {token.host} {SILENT} within {timeout:g} s; hint: has it ended?"
        )
    return initiator.admitted


def _shake_hands(
    control: UcxControl, initiator: HandshakeInitiator, token: JoinToken, host: str, timeout: float
) -> bool:
    """Exchange messages until the head has decided. Returns False where no process listens at its address."""
    deadline, tries = time.monotonic() + timeout, _TRIES
    poll = select.poll()
    fd = control.fileno()
    assert fd is not None
    poll.register(fd, select.POLLIN)
    while initiator.state not in (ACCEPTED, REJECTED) and (left := deadline - time.monotonic()) > 0:
        control.poll()
        for message in control.take_handshakes():
            answer = initiator.receive(message)
            if answer is not None:
                control.send_handshake(token.address, token.host == host, answer)
        if initiator.state == WAITING and control.fails_to_reach():
            # The head has ended, or has too many callers at this moment.
            if not (tries := tries - 1):
                return False
            time.sleep(_TRY_AGAIN)
            control.send_handshake(token.address, token.host == host, initiator.message)
        if initiator.state not in (ACCEPTED, REJECTED) and control.arm():
            poll.poll(1000 * min(left, _LONGEST_SLEEP))
    return True
