"""Nodes that join a running job: the letters, and what strangers can do with them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants_kit import check_after

from hpcray.core.gcs import admission
from hpcray.core.gcs.admission import (
    IN,
    MAC_BYTES,
    MOST_PENDING,
    TIMEOUT,
    TURNED_AWAY,
    WAITING,
    Admitted,
    Answer,
    Applicant,
    Gatekeeper,
    JoinRequest,
    Proven,
    link_key,
)

SECRET, OTHER = b"s" * 32, b"o" * 32
IS_IN = Admitted(7, 0, 0, 0)


@pytest.fixture(autouse=True)
def _invariants_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    check_after(monkeypatch, Gatekeeper, ("receive", "admit", "refuse"))


def gate() -> Gatekeeper:
    return Gatekeeper(SECRET, "1.0", "3.11")


def applicant(
    nonce: bytes = b"n" * 16, secret: bytes = SECRET, version: str = "1.0", python: str = "3.11"
) -> Applicant:
    return Applicant(secret, JoinRequest(version, python, nonce, b"address", "host"))


def letters(outcomes: list[Answer | Proven]) -> list[bytes]:
    return [outcome.letter for outcome in outcomes if isinstance(outcome, Answer)]


def proven(gatekeeper: Gatekeeper, node: Applicant, now: float = 0.0) -> tuple[Proven, bytes]:
    """Go on to the Proof, which is returned too."""
    (challenge,) = letters(gatekeeper.receive(now, node.letter, random.randbytes(16)))
    proof = node.receive(challenge)
    assert proof is not None
    (outcome,) = gatekeeper.receive(now, proof, b"")
    assert isinstance(outcome, Proven)
    return outcome, proof


def test_a_node_that_knows_the_secret_gets_its_number() -> None:
    gatekeeper, node = gate(), applicant()
    outcome, _ = proven(gatekeeper, node)
    assert outcome.request.host == "host" and node.state != IN
    (letter,) = letters(gatekeeper.admit(outcome.key, IS_IN))
    assert node.receive(letter) is None
    assert node.state == IN and node.admitted == IS_IN and not gatekeeper.dropped


def test_a_node_without_the_secret_gets_no_answer_and_believes_none() -> None:
    gatekeeper, node = gate(), applicant(secret=OTHER)
    assert gatekeeper.receive(0.0, node.letter, b"h" * 16) == []
    assert gatekeeper.dropped == {"the job's secret is not in it": 1}
    (challenge,) = letters(gatekeeper.receive(0.0, applicant().letter, b"h" * 16))
    assert node.receive(challenge) is None and node.state == WAITING


@pytest.mark.parametrize("version, python", [("2.0", "3.11"), ("1.0", "3.12")])
def test_another_version_is_refused_and_both_are_named(version: str, python: str) -> None:
    node = applicant(version=version, python=python)
    (refusal,) = letters(gate().receive(0.0, node.letter, b"h" * 16))
    assert node.receive(refusal) is None and node.state == TURNED_AWAY
    assert f"hpcray {version} on Python {python}, the job hpcray 1.0 on Python 3.11" in node.refusal


def test_the_reason_of_a_refusal_arrives() -> None:
    gatekeeper, node = gate(), applicant()
    outcome, _ = proven(gatekeeper, node)
    (letter,) = letters(gatekeeper.refuse(outcome.key, "the job drains"))
    node.receive(letter)
    assert (node.state, node.refusal) == (TURNED_AWAY, "the job drains")


def test_recorded_letters_open_no_second_conversation() -> None:
    gatekeeper, node = gate(), applicant()
    outcome, proof = proven(gatekeeper, node)
    (letter,) = letters(gatekeeper.admit(outcome.key, IS_IN))
    assert gatekeeper.receive(1.0, node.letter, b"x" * 16) == [], "while the head remembers the conversation"
    assert gatekeeper.receive(1.0, proof, b"") == []
    later = TIMEOUT + 1.0
    (challenge,) = letters(gatekeeper.receive(later, node.letter, b"y" * 16))
    assert gatekeeper.receive(later, proof, b"") == [], "the head has another nonce now"
    again = applicant()
    assert again.receive(letter) is None and again.state == WAITING, "nor is a recorded answer believed"
    assert again.receive(challenge) is not None
    assert again.receive(letter) is None and again.state != IN


def test_so_many_strangers_cost_no_more_memory_than_a_few() -> None:
    gatekeeper = gate()
    for number in range(MOST_PENDING + 10):
        gatekeeper.receive(0.0, applicant(number.to_bytes(16, "big")).letter, b"h" * 16)
    assert gatekeeper.dropped == {"too many join at the same time": 10}
    assert letters(gatekeeper.receive(TIMEOUT + 1.0, applicant(b"z" * 16).letter, b"h" * 16))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_get_an_answer_by_chance(noise: bytes) -> None:
    gatekeeper, node = gate(), applicant()
    assert gatekeeper.receive(0.0, noise, b"h" * 16) == []
    assert node.receive(noise) is None and node.state == WAITING


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 255))
def test_no_letter_can_be_changed(which: int, at: int, change: int) -> None:
    gatekeeper, node = gate(), applicant()

    def spoilt(letter: bytes) -> bytes:
        place = at % len(letter)
        return letter[:place] + bytes([letter[place] ^ change]) + letter[place + 1 :]

    if which == 0:
        assert gatekeeper.receive(0.0, spoilt(node.letter), b"h" * 16) == []
        return
    (challenge,) = letters(gatekeeper.receive(0.0, node.letter, b"h" * 16))
    if which == 1:
        assert node.receive(spoilt(challenge)) is None and node.state == WAITING
        return
    proof = node.receive(challenge)
    assert proof is not None
    if which == 2:
        assert gatekeeper.receive(0.0, spoilt(proof), b"") == []
        return
    (outcome,) = gatekeeper.receive(0.0, proof, b"")
    assert isinstance(outcome, Proven)
    (letter,) = letters(gatekeeper.admit(outcome.key, IS_IN))
    assert node.receive(spoilt(letter)) is None and node.state not in (IN, TURNED_AWAY)


def test_what_is_appended_to_a_proof_is_not_read() -> None:
    gatekeeper, node = gate(), applicant()
    (challenge,) = letters(gatekeeper.receive(0.0, node.letter, b"h" * 16))
    proof = node.receive(challenge)
    assert proof is not None and len(proof) <= 1 + MAC_BYTES + 8
    assert gatekeeper.receive(0.0, proof + b"x", b"") == []


def test_each_pair_of_nodes_and_each_direction_has_a_key_of_its_own() -> None:
    keys = {link_key(SECRET, source, dest) for source in range(20) for dest in range(20)}
    assert len(keys) == 400 and link_key(OTHER, 1, 2) not in keys


def test_letters_of_one_kind_are_not_taken_for_another() -> None:
    node = applicant()
    assert len(set(admission._KINDS)) == len(admission._KIND_OF) == 5
    assert node.receive(node.letter) is None and node.state == WAITING
