"""Nodes that join a running job: `JobGate` on the head lets them in, `join_job` is their side.

A job is closed until a process of it asks the head to open it (OpenJob). The answer, a `Ticket`, has all that a node
needs to find the job and to prove that it belongs to it.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.core.gcs.admission import (
    IN,
    NONCE_BYTES,
    TURNED_AWAY,
    Admitted,
    Answer,
    Applicant,
    Gatekeeper,
    JoinRequest,
    Proven,
)
from hpcray.core.gcs.node_manager import NodeManager
from hpcray.platform.arena import Arena
from hpcray.protocol import messages as m
from hpcray.runtime.node.ticket import Ticket
from hpcray.runtime.node.wires import Wires, open_world
from hpcray.runtime.raylet.raylet import Raylet
from hpcray.transport.base import TransportError
from hpcray.transport.ucx_control import UcxControl
from hpcray.transport.ucx_data import UcxData

_REPORT_INTERVAL = 10.0
_LONGEST_SLEEP = 0.05


def versions() -> tuple[str, str]:
    """The version of hpcray and the minor version of Python, which all nodes of a job share."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        own = version("hpcray")
    except PackageNotFoundError:
        own = "from a source directory"
    return own, f"{sys.version_info.major}.{sys.version_info.minor}"


class JobGate:
    """Lets nodes join the job, on the head.

    Args:
        node_manager: returns that of the head; None elsewhere.
        refusal: returns why no node may join now; "" when one may.
    """

    def __init__(
        self, raylet: Raylet, wires: Wires, node_manager: Callable[[], NodeManager | None], refusal: Callable[[], str]
    ) -> None:
        self._raylet = raylet
        self._wires = wires
        self._node_manager = node_manager
        self._refusal = refusal
        self._gatekeeper: Gatekeeper | None = None
        self._outer: UcxControl
        self._reported_at = 0.0
        self._reported = 0

    def on_open_job(self, now: float, src: bytes, msg: m.OpenJob) -> Iterable[Any]:
        """Let nodes join from now on, and return the ticket."""
        node_manager = self._node_manager()
        if node_manager is None:
            return self._raylet.unexpected(now, src, msg)
        try:
            self._open(not msg.other_hosts)
        except TransportError as error:
            self._raylet.router.send(src, m.GcsReply(msg.req, False, f"no node can join this job: {error}".encode()))
            return ()
        engine, context = self._wires.engine(), self._raylet.context
        ticket = Ticket(
            node_manager.session,
            engine.secret,
            self._raylet.node,
            engine.address(),
            context.info.host,
            engine.one_host,
            context.session_dir,
        )
        self._raylet.router.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(msgspec.json.encode(ticket))))
        return ()

    def _open(self, one_host: bool) -> None:
        self._outer = self._wires.outer(one_host)
        if self._gatekeeper is None:
            self._gatekeeper = Gatekeeper(self._wires.engine().secret, *versions())
            self._raylet.loop.each_turn.append(self._turn)

    def _turn(self) -> None:
        gatekeeper, now = self._gatekeeper, self._raylet.loop.now
        assert gatekeeper is not None
        for letter in self._outer.take_letters():
            for outcome in gatekeeper.receive(now, letter, os.urandom(NONCE_BYTES)):
                if isinstance(outcome, Proven):
                    self._admit(gatekeeper, outcome)
                else:
                    self._send(outcome)
        dropped = self._outer.dropped + sum(gatekeeper.dropped.values())
        if dropped != self._reported and now - self._reported_at > _REPORT_INTERVAL:
            why = ", ".join(f"{count} × {reason}" for reason, count in gatekeeper.dropped.items())
            self._raylet.log(f"{dropped - self._reported} messages of strangers were thrown away ({why or 'frames'})")
            self._reported, self._reported_at = dropped, now

    def _admit(self, gatekeeper: Gatekeeper, proven: Proven) -> None:
        raylet, node_manager, request = self._raylet, self._node_manager(), proven.request
        reason = self._refusal()
        number = None if reason or node_manager is None else node_manager.admit(raylet.loop.now)
        if number is None:
            outcomes = gatekeeper.refuse(proven.key, reason or "the job is starting or ending")
        else:
            try:
                self._wires.engine().connect(number, request.address, request.host == raylet.context.info.host)
            except TransportError as error:
                outcomes = gatekeeper.refuse(proven.key, str(error))
            else:
                self._outer.grow(number + 1)
                raylet.router.grow(number + 1)
                location = raylet.head_location
                admitted = Admitted(number, location.node, location.epoch, raylet.context.driver_rank)
                outcomes = gatekeeper.admit(proven.key, admitted)
        for outcome in outcomes:
            if isinstance(outcome, Answer):
                self._send(outcome)

    def _send(self, answer: Answer) -> None:
        same_host = answer.host == self._raylet.context.info.host
        try:
            self._outer.write_letter(answer.address, same_host, answer.letter)
        except TransportError as error:
            self._raylet.log(f"a node on {answer.host} wants to join and cannot be answered: {error}")


def join_job(ticket: Ticket, arena: Arena, timeout: float) -> tuple[UcxControl, UcxData, Admitted]:
    """Open the wires of a node, and get its number from the head of a running job.

    Raises:
        StartupError: the head does not answer within `timeout` seconds, or refuses.
    """
    host = socket.gethostname()
    if ticket.one_host and ticket.host != host:
        raise StartupError(
            f"the job runs on {ticket.host} and lets nodes of that host join only, not of {host}; hint: start it with "
            "HPCRAY_ELASTIC=1"
        )
    try:
        control, data = open_world(None, ticket.secret, ticket.one_host, arena)
        request = JoinRequest(*versions(), os.urandom(NONCE_BYTES), data.engine.address(), host)
        applicant = Applicant(ticket.secret, request)
        control.write_letter(ticket.address, ticket.host == host, applicant.letter)
        _correspond(control, applicant, ticket, host, timeout)
        admitted = applicant.admitted
        if admitted is None:
            data.close()
            raise StartupError(
                f"the job does not let this node join: {applicant.refusal}"
                if applicant.state == TURNED_AWAY
                else f"the job on {ticket.host} has not answered within {timeout:g} s; hint: has it ended?"
            )
        control.own(admitted.number)
        data.engine.connect(admitted.head, ticket.address, ticket.host == host)
    except TransportError as error:
        raise StartupError(f"this node cannot reach the job: {error}") from None
    return control, data, admitted


def _correspond(control: UcxControl, applicant: Applicant, ticket: Ticket, host: str, timeout: float) -> None:
    """Exchange letters until the head has decided."""
    deadline = time.monotonic() + timeout
    poll = select.poll()
    fd = control.fileno()
    assert fd is not None
    poll.register(fd, select.POLLIN)
    while applicant.state not in (IN, TURNED_AWAY) and (left := deadline - time.monotonic()) > 0:
        control.poll()
        for letter in control.take_letters():
            answer = applicant.receive(letter)
            if answer is not None:
                control.write_letter(ticket.address, ticket.host == host, answer)
        if applicant.state not in (IN, TURNED_AWAY) and control.arm():
            poll.poll(1000 * min(left, _LONGEST_SLEEP))
