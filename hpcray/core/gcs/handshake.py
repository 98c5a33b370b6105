"""Admission of a node to a running job: a challenge that both sides answer with the job's secret.

Four messages, each with a MAC under a key that only the job's secret yields, over its content and all messages before
it:

    JoinRequest  joiner→head    versions, a nonce, the joiner's address
    Challenge    head→joiner    a nonce
    Proof        joiner→head
    Admitted     head→joiner    the node's number; or JoinRefused, at any point: why not

A message is decoded after its MAC was found right. The nonces make each of them valid in one handshake only: a message
that was recorded and is sent again gets no further than a Challenge. The frames of an admitted node have MACs under a
key of its number, which no other node of the job ever has (`link_key`).

Two cores: `HandshakeAcceptor` is in the head's raylet, `HandshakeInitiator` in a node that joins.
"""

from __future__ import annotations

from collections import Counter
from typing import Union

import msgspec

from hpcray.common.keyed_hash import blake2b, compare_digest

MAC_BYTES = 32
NONCE_BYTES = 16
MOST_PENDING = 64
"""Conversations that the head has at the same time. Further ones are not answered."""
TIMEOUT = 10.0
"""Seconds after which a handshake is forgotten."""
LONGEST_MESSAGE = 1 << 16
_LONGEST_PROOF = MAC_BYTES + 8
REQUEST, CHALLENGE, PROOF, ADMITTED, REFUSED = range(1, 6)
WAITING, CHALLENGED, PROVEN, ACCEPTED, REJECTED = "waiting", "challenged", "proven", "accepted", "rejected"
INITIATOR_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Its JoinRequest is on the way.
    WAITING: (CHALLENGED, REJECTED),
    # The head has proved that it knows the secret; the joiner's proof is on the way.
    CHALLENGED: (ACCEPTED, REJECTED),
    # It has a number.
    ACCEPTED: (),
    # The head has said why it does not let the node in.
    REJECTED: (),
}
"""States of a node that joins."""
ACCEPTOR_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # The head has sent its Challenge.
    CHALLENGED: (PROVEN, REJECTED),
    # The Proof was right; the node manager gives it a number, or says why not.
    PROVEN: (ACCEPTED, REJECTED),
    # The node has been sent its number.
    ACCEPTED: (),
    # The node has been sent the reason.
    REJECTED: (),
}
"""States of one handshake of the head; it is forgotten after `TIMEOUT`."""


class JoinRequest(msgspec.Struct, array_like=True, frozen=True):
    """The first message of a world. version, python: of its hpcray, and the minor version of its Python. address: the
    UCX worker of its rank 0. host: the host name of that. ranks: how many nodes the world has."""

    version: str
    python: str
    nonce: bytes
    address: bytes
    host: str
    ranks: int = 1


class Challenge(msgspec.Struct, array_like=True, frozen=True):
    """The head's nonce."""

    nonce: bytes


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """Its MAC, over the head's nonce, is all that it says."""


class Admitted(msgspec.Struct, array_like=True, frozen=True):
    """The number of the world's rank 0, which the others follow; the head's node and the number of its moves; the node
    that runs the program."""

    number: int
    head: int
    epoch: int
    driver_rank: int


class JoinRefused(msgspec.Struct, array_like=True, frozen=True):
    """Why the node cannot join."""

    reason: str


_KINDS: dict[int, type] = {
    REQUEST: JoinRequest,
    CHALLENGE: Challenge,
    PROOF: Proof,
    ADMITTED: Admitted,
    REFUSED: JoinRefused,
}
_KIND_OF = {kind: number for number, kind in _KINDS.items()}
Content = Union[JoinRequest, Challenge, Proof, Admitted, JoinRefused]


class Answer(msgspec.Struct, frozen=True):
    """Send this message to the UCX worker at `address`, on `host`."""

    address: bytes
    host: str
    message: bytes


class Proven(msgspec.Struct, frozen=True):
    """A world has proved that it belongs to the job: call `HandshakeAcceptor.admit` or `refuse` with `key`."""

    key: bytes
    request: JoinRequest


def derive(secret: bytes, what: bytes) -> bytes:
    """A key of its own for each use of the job's secret."""
    return blake2b(what, key=secret, digest_size=MAC_BYTES).digest()


def link_key(secret: bytes, source: int, dest: int) -> bytes:
    """The key of the frames from one node to another. Numbers are given once in a job, so keys are used once too."""
    return derive(secret, b"link" + source.to_bytes(2, "big") + dest.to_bytes(2, "big"))


def seal(key: bytes, before: bytes, content: Content) -> bytes:
    """A message: its kind, the MAC, the content. before: all earlier messages of the handshake."""
    kind = _KIND_OF[type(content)].to_bytes(1, "big")
    body = msgspec.msgpack.encode(content)
    return kind + _mac(key, kind, before, body) + body


def open_message(key: bytes, before: bytes, message: bytes, *kinds: type) -> Content | None:
    """The content of a message of one of these kinds; None where it is of another one or its MAC is wrong."""
    if not 1 + MAC_BYTES <= len(message) <= LONGEST_MESSAGE:
        return None
    kind = _KINDS.get(message[0])
    body = message[1 + MAC_BYTES :]
    expected = _mac(key, message[:1], before, body)
    if kind not in kinds or not compare_digest(expected, message[1 : 1 + MAC_BYTES]):
        return None
    try:
        found: Content = msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None
    return found


def _mac(key: bytes, kind: bytes, before: bytes, body: bytes) -> bytes:
    mac = blake2b(key=key, digest_size=MAC_BYTES)
    mac.update(kind + len(before).to_bytes(4, "big"))
    mac.update(before)
    mac.update(body)
    return mac.digest()


class _PendingAdmission(msgspec.Struct):
    state: str
    since: float
    request: JoinRequest
    messages: bytes


class HandshakeAcceptor:
    """The head's side.

    Args:
        secret: the job's.
        version: of the head's hpcray. python: the minor version of its Python.

    Attributes:
        dropped: messages that were not answered, by reason.
    """

    def __init__(self, secret: bytes, version: str, python: str) -> None:
        self._key = derive(secret, b"join")
        self._version = version
        self._python = python
        self._handshakes: dict[bytes, _PendingAdmission] = {}
        self.dropped: Counter[str] = Counter()

    def receive(self, now: float, message: bytes, nonce: bytes) -> list[Answer | Proven]:
        """Handle a message, a stranger's perhaps. nonce: `NONCE_BYTES` random bytes, new ones each time."""
        self._forget(now)
        if message[:1] == PROOF.to_bytes(1, "big"):
            return self._prove(message[:_LONGEST_PROOF])
        request = open_message(self._key, b"", message, JoinRequest)
        if not isinstance(request, JoinRequest):
            self.dropped["the job's secret is not in it"] += 1
            return []
        if request.nonce in self._handshakes:
            self.dropped["it was sent before"] += 1
            return []
        if len(self._handshakes) >= MOST_PENDING:
            self.dropped["too many join at the same time"] += 1
            return []
        theirs, ours = (request.version, request.python), (self._version, self._python)
        if theirs != ours:
            reason = (
                f"it runs hpcray {theirs[0]} on Python {theirs[1]}, the job hpcray {ours[0]} on Python {ours[1]}; "
                "hint: start it from the job's environment"
            )
            return [Answer(request.address, request.host, seal(self._key, message, JoinRefused(reason)))]
        challenge = seal(self._key, message, Challenge(nonce))
        self._handshakes[request.nonce] = _PendingAdmission(CHALLENGED, now, request, message + challenge)
        return [Answer(request.address, request.host, challenge)]

    def admit(self, key: bytes, admitted: Admitted) -> list[Answer | Proven]:
        """Give a proven node its number."""
        return self._conclude(key, admitted, ACCEPTED)

    def refuse(self, key: bytes, reason: str) -> list[Answer | Proven]:
        """Turn a proven node away."""
        return self._conclude(key, JoinRefused(reason), REJECTED)

    def _prove(self, message: bytes) -> list[Answer | Proven]:
        for key, talk in self._handshakes.items():
            if talk.state == CHALLENGED and open_message(self._key, talk.messages, message, Proof) is not None:
                talk.messages += message
                self._set_state(talk, PROVEN)
                return [Proven(key, talk.request)]
        self.dropped["it answers no challenge"] += 1
        return []

    def _conclude(self, key: bytes, content: Content, state: str) -> list[Answer | Proven]:
        talk = self._handshakes[key]
        self._set_state(talk, state)
        return [Answer(talk.request.address, talk.request.host, seal(self._key, talk.messages, content))]

    def _forget(self, now: float) -> None:
        for key in [key for key, talk in self._handshakes.items() if now - talk.since > TIMEOUT]:
            del self._handshakes[key]

    def _set_state(self, talk: _PendingAdmission, state: str) -> None:
        assert state in ACCEPTOR_TRANSITIONS[talk.state], f"a handshake: {talk.state} -> {state}"
        talk.state = state

    def check_invariants(self) -> None:
        """Check the bounds."""
        assert len(self._handshakes) <= MOST_PENDING
        assert all(key == talk.request.nonce for key, talk in self._handshakes.items())


class HandshakeInitiator:
    """The side of a node that joins.

    Args:
        secret: the job's.
        request: who it is.

    Attributes:
        state: see INITIATOR_TRANSITIONS.
        admitted: its number and what it needs to begin; None until it is in.
        refusal: why it was turned away; "" where it was not.
    """

    def __init__(self, secret: bytes, request: JoinRequest) -> None:
        self._key = derive(secret, b"join")
        self.state = WAITING
        self.admitted: Admitted | None = None
        self.refusal = ""
        self.message = self._messages = seal(self._key, b"", request)

    def receive(self, message: bytes) -> bytes | None:
        """Handle a message, a stranger's perhaps. Returns the answer, if there is one."""
        expected = (Challenge, JoinRefused) if self.state == WAITING else (Admitted, JoinRefused)
        content = open_message(self._key, self._messages, message, *expected)
        if content is None or self.state in (ACCEPTED, REJECTED):
            return None
        if isinstance(content, JoinRefused):
            self.refusal = content.reason
            self._set_state(REJECTED)
            return None
        if isinstance(content, Admitted):
            self.admitted = content
            self._set_state(ACCEPTED)
            return None
        proof = seal(self._key, self._messages + message, Proof())
        self._messages += message + proof
        self._set_state(CHALLENGED)
        return proof

    def _set_state(self, state: str) -> None:
        assert state in INITIATOR_TRANSITIONS[self.state], f"a node that joins: {self.state} -> {state}"
        self.state = state
