"""Admission of a node to a running job: a challenge that both sides answer with the job's secret.

Four letters, each with a MAC under a key that only the job's secret yields, over its content and all letters before it:

    JoinRequest  joiner→head    versions, a nonce, the joiner's address
    Challenge    head→joiner    a nonce
    Proof        joiner→head
    Admitted     head→joiner    the node's number; or JoinRefused, at any point: why not

A letter is decoded after its MAC was found right. The nonces make each of them valid in one conversation only: a letter
that was recorded and is sent again gets no further than a Challenge. The frames of an admitted node have MACs under a
key of its number, which no other node of the job ever has (`link_key`).

Two cores: `Gatekeeper` is in the head's raylet, `Applicant` in a node that joins.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from dataclasses import dataclass
from typing import Union

import msgspec

MAC_BYTES = 32
NONCE_BYTES = 16
MOST_PENDING = 64
"""Conversations that the head has at the same time. Further ones are not answered."""
TIMEOUT = 10.0
"""Seconds after which a conversation is forgotten."""
LONGEST_LETTER = 1 << 16
_LONGEST_PROOF = MAC_BYTES + 8
REQUEST, CHALLENGE, PROOF, ADMITTED, REFUSED = range(1, 6)
WAITING, CHALLENGED, PROVEN, IN, TURNED_AWAY = "waiting", "challenged", "proven", "in", "turned away"
APPLICANT_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # Its JoinRequest is on the way.
    WAITING: (CHALLENGED, TURNED_AWAY),
    # The head has proved that it knows the secret; the joiner's proof is on the way.
    CHALLENGED: (IN, TURNED_AWAY),
    # It has a number.
    IN: (),
    # The head has said why it does not let the node in.
    TURNED_AWAY: (),
}
"""States of a node that joins."""
CONVERSATION_TRANSITIONS: dict[str, tuple[str, ...]] = {
    # The head has sent its Challenge.
    CHALLENGED: (PROVEN, TURNED_AWAY),
    # The Proof was right; the node manager gives it a number, or says why not.
    PROVEN: (IN, TURNED_AWAY),
    # The node has been sent its number.
    IN: (),
    # The node has been sent the reason.
    TURNED_AWAY: (),
}
"""States of one conversation of the head; it is forgotten after `TIMEOUT`."""


class JoinRequest(msgspec.Struct, array_like=True, frozen=True):
    """The first letter of a node. version, python: of its hpcray, and the minor version of its Python. address: its UCX
    worker. host: its host name."""

    version: str
    python: str
    nonce: bytes
    address: bytes
    host: str


class Challenge(msgspec.Struct, array_like=True, frozen=True):
    """The head's nonce."""

    nonce: bytes


class Proof(msgspec.Struct, array_like=True, frozen=True):
    """Its MAC, over the head's nonce, is all that it says."""


class Admitted(msgspec.Struct, array_like=True, frozen=True):
    """The node's number; the head's node and the number of its moves; the node that runs the program."""

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


@dataclass(slots=True, frozen=True)
class Answer:
    """Send this letter to the UCX worker at `address`, on `host`."""

    address: bytes
    host: str
    letter: bytes


@dataclass(slots=True, frozen=True)
class Proven:
    """A node has proved that it belongs to the job: call `Gatekeeper.admit` or `Gatekeeper.refuse` with `key`."""

    key: bytes
    request: JoinRequest


def derive(secret: bytes, what: bytes) -> bytes:
    """A key of its own for each use of the job's secret."""
    return hashlib.blake2b(what, key=secret, digest_size=MAC_BYTES).digest()


def link_key(secret: bytes, source: int, dest: int) -> bytes:
    """The key of the frames from one node to another. Numbers are given once in a job, so keys are used once too."""
    return derive(secret, b"link" + source.to_bytes(2, "big") + dest.to_bytes(2, "big"))


def seal(key: bytes, before: bytes, content: Content) -> bytes:
    """A letter: its kind, the MAC, the content. before: all earlier letters of the conversation."""
    kind = _KIND_OF[type(content)].to_bytes(1, "big")
    body = msgspec.msgpack.encode(content)
    return kind + _mac(key, kind, before, body) + body


def open_letter(key: bytes, before: bytes, letter: bytes, *kinds: type) -> Content | None:
    """The content of a letter of one of these kinds; None where it is of another one or its MAC is wrong."""
    if not 1 + MAC_BYTES <= len(letter) <= LONGEST_LETTER:
        return None
    kind = _KINDS.get(letter[0])
    body = letter[1 + MAC_BYTES :]
    expected = _mac(key, letter[:1], before, body)
    if kind not in kinds or not hmac.compare_digest(expected, letter[1 : 1 + MAC_BYTES]):
        return None
    try:
        found: Content = msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError:
        return None
    return found


def _mac(key: bytes, kind: bytes, before: bytes, body: bytes) -> bytes:
    mac = hashlib.blake2b(key=key, digest_size=MAC_BYTES)
    mac.update(kind + len(before).to_bytes(4, "big"))
    mac.update(before)
    mac.update(body)
    return mac.digest()


@dataclass(slots=True)
class _PendingAdmission:
    state: str
    since: float
    request: JoinRequest
    letters: bytes


class Gatekeeper:
    """The head's side.

    Args:
        secret: the job's.
        version: of the head's hpcray. python: the minor version of its Python.

    Attributes:
        dropped: letters that were not answered, by reason.
    """

    def __init__(self, secret: bytes, version: str, python: str) -> None:
        self._key = derive(secret, b"join")
        self._version = version
        self._python = python
        self._conversations: dict[bytes, _PendingAdmission] = {}
        self.dropped: Counter[str] = Counter()

    def receive(self, now: float, letter: bytes, nonce: bytes) -> list[Answer | Proven]:
        """Handle a letter, a stranger's perhaps. nonce: `NONCE_BYTES` random bytes, new ones each time."""
        self._forget(now)
        if letter[:1] == PROOF.to_bytes(1, "big"):
            return self._prove(letter[:_LONGEST_PROOF])
        request = open_letter(self._key, b"", letter, JoinRequest)
        if not isinstance(request, JoinRequest):
            self.dropped["the job's secret is not in it"] += 1
            return []
        if request.nonce in self._conversations:
            self.dropped["it was sent before"] += 1
            return []
        if len(self._conversations) >= MOST_PENDING:
            self.dropped["too many join at the same time"] += 1
            return []
        theirs, ours = (request.version, request.python), (self._version, self._python)
        if theirs != ours:
            reason = (
                f"it runs hpcray {theirs[0]} on Python {theirs[1]}, the job hpcray {ours[0]} on Python {ours[1]}; "
                "hint: start it from the job's environment"
            )
            return [Answer(request.address, request.host, seal(self._key, letter, JoinRefused(reason)))]
        challenge = seal(self._key, letter, Challenge(nonce))
        self._conversations[request.nonce] = _PendingAdmission(CHALLENGED, now, request, letter + challenge)
        return [Answer(request.address, request.host, challenge)]

    def admit(self, key: bytes, admitted: Admitted) -> list[Answer | Proven]:
        """Give a proven node its number."""
        return self._conclude(key, admitted, IN)

    def refuse(self, key: bytes, reason: str) -> list[Answer | Proven]:
        """Turn a proven node away."""
        return self._conclude(key, JoinRefused(reason), TURNED_AWAY)

    def _prove(self, letter: bytes) -> list[Answer | Proven]:
        for key, talk in self._conversations.items():
            if talk.state == CHALLENGED and open_letter(self._key, talk.letters, letter, Proof) is not None:
                talk.letters += letter
                self._set_state(talk, PROVEN)
                return [Proven(key, talk.request)]
        self.dropped["it answers no challenge"] += 1
        return []

    def _conclude(self, key: bytes, content: Content, state: str) -> list[Answer | Proven]:
        talk = self._conversations[key]
        self._set_state(talk, state)
        return [Answer(talk.request.address, talk.request.host, seal(self._key, talk.letters, content))]

    def _forget(self, now: float) -> None:
        for key in [key for key, talk in self._conversations.items() if now - talk.since > TIMEOUT]:
            del self._conversations[key]

    def _set_state(self, talk: _PendingAdmission, state: str) -> None:
        assert state in CONVERSATION_TRANSITIONS[talk.state], f"a conversation: {talk.state} -> {state}"
        talk.state = state

    def check_invariants(self) -> None:
        """Check the bounds."""
        assert len(self._conversations) <= MOST_PENDING
        assert all(key == talk.request.nonce for key, talk in self._conversations.items())


class Applicant:
    """The side of a node that joins.

    Args:
        secret: the job's.
        request: who it is.

    Attributes:
        state: see APPLICANT_TRANSITIONS.
        admitted: its number and what it needs to begin; None until it is in.
        refusal: why it was turned away; "" where it was not.
    """

    def __init__(self, secret: bytes, request: JoinRequest) -> None:
        self._key = derive(secret, b"join")
        self.state = WAITING
        self.admitted: Admitted | None = None
        self.refusal = ""
        self.letter = self._letters = seal(self._key, b"", request)

    def receive(self, letter: bytes) -> bytes | None:
        """Handle a letter, a stranger's perhaps. Returns the answer, if there is one."""
        expected = (Challenge, JoinRefused) if self.state == WAITING else (Admitted, JoinRefused)
        content = open_letter(self._key, self._letters, letter, *expected)
        if content is None or self.state in (IN, TURNED_AWAY):
            return None
        if isinstance(content, JoinRefused):
            self.refusal = content.reason
            self._set_state(TURNED_AWAY)
            return None
        if isinstance(content, Admitted):
            self.admitted = content
            self._set_state(IN)
            return None
        proof = seal(self._key, self._letters + letter, Proof())
        self._letters += letter + proof
        self._set_state(CHALLENGED)
        return proof

    def _set_state(self, state: str) -> None:
        assert state in APPLICANT_TRANSITIONS[self.state], f"a node that joins: {self.state} -> {state}"
        self.state = state
