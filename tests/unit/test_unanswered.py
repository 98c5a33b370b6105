"""A node that does not answer another one: who is asked, who is accused, and who is not."""

from __future__ import annotations

from hpcray.core.gcs.silence import Unanswered

PERIOD, TIMEOUT = 0.5, 4.0


class Looker:
    """Looks every period. heard: by node, when something of it arrived."""

    def __init__(self) -> None:
        self.core = Unanswered(PERIOD, TIMEOUT)
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


def test_who_answers_is_not_even_asked() -> None:
    looker = Looker()
    for _ in range(30):
        assert looker.look(2) == ([], [])
        looker.heard[2] = looker.now + PERIOD / 2


def test_who_is_not_spoken_to_may_be_silent() -> None:
    looker = Looker()
    assert all(looker.look() == ([], []) for _ in range(30))


def test_one_word_without_an_answer_is_enough() -> None:
    looker = Looker()
    looker.heard[2] = looker.now + PERIOD  # before the word, as far as anybody knows
    assert looker.look(2) == ([], [])
    assert looker.look() == ([2], [])
    assert TIMEOUT <= looker.until_accused() <= TIMEOUT + PERIOD


def test_an_answer_to_the_question_ends_it() -> None:
    looker = Looker()
    looker.look(2)
    assert looker.look() == ([2], [])
    assert looker.until_accused(answers=TIMEOUT - 2 * PERIOD) == 0.0


def test_time_in_which_nobody_looked_is_nobodys_silence() -> None:
    looker = Looker()
    looker.look(2)
    looker.look()
    assert looker.look(after=60.0) == ([2], [])
    assert TIMEOUT - 3 * PERIOD <= looker.until_accused() <= TIMEOUT + PERIOD


def test_the_dead_are_forgotten() -> None:
    looker = Looker()
    looker.look(2)
    looker.look()
    assert looker.core.tick(looker.now + PERIOD, (2,), {}, dead={2}) == ([], [])
    assert looker.core.tick(looker.now + 2 * PERIOD, (), {}, dead={2}) == ([], [])
