"""A node that does not answer another one: who is asked, who is accused, and who is not."""

from __future__ import annotations

from hpcray.core.gcs.node_manager import PeerProbe

PERIOD, TIMEOUT = 0.5, 4.0


class Looker:
    """Looks every period. heard: by node, when something of it arrived."""

    def __init__(self) -> None:
        self.core = PeerProbe(PERIOD, TIMEOUT)
        self.now = 100.0
        self.heard: dict[int, float] = {}

    def look(self, *spoken: int, after: float = PERIOD) -> tuple[list[int], list[int]]:
        self.now += after
        asked, accused = self.core.tick(self.now, spoken, self.heard)
        return asked, [node for node, _ in accused]

    def until_accused(self, answers: float = 0.0) -> float:
        """Seconds of looks until a node is accused; 0.0: it never is. answers: when node 2 is heard of, then."""
        began = self.now
        while self.now - began < 10 * TIMEOUT:
            if answers and self.now - began >= answers:
                self.heard[2] = self.now + PERIOD / 2
            if self.look()[1]:
                return self.now - began
        return 0.0


def test_a_peer_that_answers_gets_no_ping() -> None:
    looker = Looker()
    for _ in range(30):
        assert looker.look(2) == ([], [])
        looker.heard[2] = looker.now + PERIOD / 2


def test_a_peer_to_which_nothing_was_sent_may_be_silent() -> None:
    looker = Looker()
    assert all(looker.look() == ([], []) for _ in range(30))


def test_a_peer_is_pinged_then_accused_after_one_unanswered_message() -> None:
    looker = Looker()
    looker.heard[2] = looker.now + PERIOD  # before the word, as far as anybody knows
    assert looker.look(2) == ([], [])
    assert looker.look() == ([2], [])
    assert TIMEOUT <= looker.until_accused() <= TIMEOUT + PERIOD


def test_a_peer_that_answers_its_ping_is_not_accused() -> None:
    looker = Looker()
    looker.look(2)
    assert looker.look() == ([2], [])
    assert looker.until_accused(answers=TIMEOUT - 2 * PERIOD) == 0.0


def test_time_in_which_the_prober_stood_still_is_no_silence() -> None:
    looker = Looker()
    looker.look(2)
    looker.look()
    assert looker.look(after=60.0) == ([2], [])
    assert TIMEOUT - 3 * PERIOD <= looker.until_accused() <= TIMEOUT + PERIOD


def test_a_dead_peer_is_neither_pinged_nor_accused() -> None:
    looker = Looker()
    looker.look(2)
    looker.look()
    assert looker.core.tick(looker.now + PERIOD, (2,), {}, dead={2}) == ([], [])
    assert looker.core.tick(looker.now + 2 * PERIOD, (), {}, dead={2}) == ([], [])
