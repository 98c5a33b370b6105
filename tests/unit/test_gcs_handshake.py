"""Nodes that join a running job: the messages, and what strangers can do with them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants_kit import check_after

from hpcray.core.gcs import handshake
from hpcray.core.gcs.handshake import (
    ACCEPTED,
    MAC_BYTES,
    MOST_PENDING,
    REJECTED,
    TIMEOUT,
    WAITING,
    Admitted,
    Answer,
    HandshakeAcceptor,
    HandshakeInitiator,
    JoinRequest,
    Proven,
    link_key,
)

SECRET, OTHER = b"s" * 32, b"o" * 32
IS_IN = Admitted(7, 0, 0, 0)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, HandshakeAcceptor, ("receive", "admit", "refuse"))


def gate() -> HandshakeAcceptor:
    return HandshakeAcceptor(SECRET, "1.0", "3.11")


def initiator(
    nonce: bytes = b"n" * 16, secret: bytes = SECRET, version: str = "1.0", python: str = "3.11"
) -> HandshakeInitiator:
    return HandshakeInitiator(secret, JoinRequest(version, python, nonce, b"address", "host"))


def messages(outcomes: list[Answer | Proven]) -> list[bytes]:
    return [outcome.message for outcome in outcomes if isinstance(outcome, Answer)]


def proven(acceptor: HandshakeAcceptor, node: HandshakeInitiator, now: float = 0.0) -> tuple[Proven, bytes]:
    """Go on to the Proof, which is returned too."""
    (challenge,) = messages(acceptor.receive(now, node.message, random.randbytes(16)))
    proof = node.receive(challenge)
    assert proof is not None
    (outcome,) = acceptor.receive(now, proof, b"")
    assert isinstance(outcome, Proven)
    return outcome, proof


def test_a_node_that_knows_the_secret_gets_its_number() -> None:
    acceptor, node = gate(), initiator()
    outcome, _ = proven(acceptor, node)
    assert outcome.request.host == "host" and node.state != ACCEPTED
    (message,) = messages(acceptor.admit(outcome.key, IS_IN))
    assert node.receive(message) is None
    assert node.state == ACCEPTED and node.admitted == IS_IN and not acceptor.dropped


def test_a_node_without_the_secret_gets_no_answer_and_believes_none() -> None:
    acceptor, node = gate(), initiator(secret=OTHER)
    assert acceptor.receive(0.0, node.message, b"h" * 16) == []
    assert acceptor.dropped == {"the job's secret is not in it": 1}
    (challenge,) = messages(acceptor.receive(0.0, initiator().message, b"h" * 16))
    assert node.receive(challenge) is None and node.state == WAITING


@pytest.mark.parametrize("version, python", [("2.0", "3.11"), ("1.0", "3.12")])
def test_another_version_is_refused_and_both_are_named(version: str, python: str) -> None:
    node = initiator(version=version, python=python)
    (refusal,) = messages(gate().receive(0.0, node.message, b"h" * 16))
    assert node.receive(refusal) is None and node.state == REJECTED
    assert f"hpcray {version} on Python {python}, the job hpcray 1.0 on Python 3.11" in node.refusal


def test_the_reason_of_a_refusal_arrives() -> None:
    acceptor, node = gate(), initiator()
    outcome, _ = proven(acceptor, node)
    (message,) = messages(acceptor.refuse(outcome.key, "the job drains"))
    node.receive(message)
    assert (node.state, node.refusal) == (REJECTED, "the job drains")


def test_recorded_letters_open_no_second_conversation() -> None:
    acceptor, node = gate(), initiator()
    outcome, proof = proven(acceptor, node)
    (message,) = messages(acceptor.admit(outcome.key, IS_IN))
    assert acceptor.receive(1.0, node.message, b"x" * 16) == [], "while the head remembers the handshake"
    assert acceptor.receive(1.0, proof, b"") == []
    later = TIMEOUT + 1.0
    (challenge,) = messages(acceptor.receive(later, node.message, b"y" * 16))
    assert acceptor.receive(later, proof, b"") == [], "the head has another nonce now"
    again = initiator()
    assert again.receive(message) is None and again.state == WAITING, "nor is a recorded answer believed"
    assert again.receive(challenge) is not None
    assert again.receive(message) is None and again.state != ACCEPTED


def test_so_many_strangers_cost_no_more_memory_than_a_few() -> None:
    acceptor = gate()
    for number in range(MOST_PENDING + 10):
        acceptor.receive(0.0, initiator(number.to_bytes(16, "big")).message, b"h" * 16)
    assert acceptor.dropped == {"too many join at the same time": 10}
    assert messages(acceptor.receive(TIMEOUT + 1.0, initiator(b"z" * 16).message, b"h" * 16))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_bytes_get_an_answer_by_chance(noise: bytes) -> None:
    acceptor, node = gate(), initiator()
    assert acceptor.receive(0.0, noise, b"h" * 16) == []
    assert node.receive(noise) is None and node.state == WAITING


@settings(max_examples=200)
@given(st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 255))
def test_no_letter_can_be_changed(which: int, at: int, change: int) -> None:
    acceptor, node = gate(), initiator()

    def spoilt(message: bytes) -> bytes:
        place = at % len(message)
        return message[:place] + bytes([message[place] ^ change]) + message[place + 1 :]

    if which == 0:
        assert acceptor.receive(0.0, spoilt(node.message), b"h" * 16) == []
        return
    (challenge,) = messages(acceptor.receive(0.0, node.message, b"h" * 16))
    if which == 1:
        assert node.receive(spoilt(challenge)) is None and node.state == WAITING
        return
    proof = node.receive(challenge)
    assert proof is not None
    if which == 2:
        assert acceptor.receive(0.0, spoilt(proof), b"") == []
        return
    (outcome,) = acceptor.receive(0.0, proof, b"")
    assert isinstance(outcome, Proven)
    (message,) = messages(acceptor.admit(outcome.key, IS_IN))
    assert node.receive(spoilt(message)) is None and node.state not in (ACCEPTED, REJECTED)


def test_what_is_appended_to_a_proof_is_not_read() -> None:
    acceptor, node = gate(), initiator()
    (challenge,) = messages(acceptor.receive(0.0, node.message, b"h" * 16))
    proof = node.receive(challenge)
    assert proof is not None and len(proof) <= 1 + MAC_BYTES + 8
    assert acceptor.receive(0.0, proof + b"x", b"") == []


def test_each_pair_of_nodes_and_each_direction_has_a_key_of_its_own() -> None:
    keys = {link_key(SECRET, source, dest) for source in range(20) for dest in range(20)}
    assert len(keys) == 400 and link_key(OTHER, 1, 2) not in keys


def test_letters_of_one_kind_are_not_taken_for_another() -> None:
    node = initiator()
    assert len(set(handshake._KINDS)) == len(handshake._KIND_OF) == 5
    assert node.receive(node.message) is None and node.state == WAITING
