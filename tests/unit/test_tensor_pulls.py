"""Pulls of tensors from a device of another host: whatever comes in whatever order, each ends once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hpcray.tensors.device_mappings import DIRECT, DIRECT_SIZE, HOST, MAPPED, Place, choose_way
from hpcray.tensors.tensor_pulls import (
    DEATH_TIME,
    LEAST_RATE,
    OPEN,
    RATED,
    RETRY_TIME,
    SEGMENT,
    STALL_TIME,
    TRIAL,
    TRIAL_TIME,
    PullRange,
    TensorPulls,
    TensorPullState,
    TensorSends,
    are_within,
    divide_ranges,
)

MAKER, OTHER = b"maker", b"other"

# ------------------------------------------------------------ the way


def place(host: str, device: str = "gpu-1", wire: str = "rc") -> Place:
    return Place(host.encode(), host, {device} if device else set(), wire)


@pytest.mark.parametrize(
    ("reader", "size", "way"),
    [
        (place("b"), DIRECT_SIZE, DIRECT),
        (place("b"), DIRECT_SIZE - 1, HOST),
        (place("b", wire=""), DIRECT_SIZE, HOST),
        (place("b", wire="tcp"), DIRECT_SIZE, HOST),
        (place("b", device=""), DIRECT_SIZE, HOST),
        (place("b", device="gpu-0"), DIRECT_SIZE, DIRECT),
        (place("a")._replace(process=b"x"), DIRECT_SIZE, HOST),
        (place("a", device="gpu-0")._replace(process=b"x"), DIRECT_SIZE, MAPPED),
        (place("")._replace(process=b"x"), DIRECT_SIZE, HOST),
    ],
)
def test_tensors_pass_directly_to_other_hosts_where_both_ends_can(reader: Place, size: int, way: str) -> None:
    maker = place("a", "gpu-0")
    assert choose_way(maker, reader, size=size) == way
    assert choose_way(maker, reader, private=True, size=size, only_direct=True) == HOST
    assert choose_way(maker._replace(wire=""), reader, size=size, only_direct=True) in (HOST, MAPPED)


def test_what_is_to_pass_directly_does_whatever_its_size_and_host() -> None:
    maker = place("a", "gpu-0")
    for reader in (place("b"), place("a")._replace(process=b"x"), place("")._replace(process=b"x")):
        assert choose_way(maker, reader, size=1, only_direct=True) == DIRECT
    assert choose_way(maker, place("b", wire=""), size=1, only_direct=True) == HOST


# ------------------------------------------------------------ ranges

RANGES = st.lists(st.builds(PullRange, st.integers(0, 5), st.integers(0, 100), st.integers(0, 3 * SEGMENT)), max_size=6)


@given(RANGES)
def test_messages_are_the_ranges_in_order_and_the_first_one_is_small(ranges: list[PullRange]) -> None:
    found = divide_ranges(ranges)
    assert all(0 < each.size <= SEGMENT for each in found) and all(each.size <= TRIAL for each in found[:1])
    joined: list[PullRange] = []
    for each in found:
        last = joined[-1] if joined else None
        if last is not None and (last.storage, last.first + last.size) == each[:2]:
            joined[-1] = last._replace(size=last.size + each.size)
        else:
            joined.append(each)
    wanted: list[PullRange] = []
    for each in ranges:
        last = wanted[-1] if wanted else None
        if last is not None and (last.storage, last.first + last.size) == each[:2]:
            wanted[-1] = last._replace(size=last.size + each.size)
        elif each.size:
            wanted.append(each)
    assert joined == wanted


@pytest.mark.parametrize(
    "wrong", [(2, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, -1), (0, 90, 11), (1, 50, 1), (0, 1 << 62, 1 << 62)]
)
def test_a_reader_gets_nothing_but_the_storages(wrong: tuple[int, int, int]) -> None:
    good = [PullRange(0, 0, 100), PullRange(1, 49, 1)]
    assert are_within(good, [100, 50]) and are_within([], [])
    assert not are_within([*good, PullRange(*wrong)], [100, 50])


# ------------------------------------------------------------ the reader


def test_a_pull_is_done_when_the_answer_and_all_messages_are_here_in_any_order() -> None:
    pulls = TensorPulls()
    number = pulls.begin(MAKER, 1, [10, 20])
    assert not pulls.landed(number, 1, 0.0) and not pulls.landed(number, 0, 0.0)
    pull = pulls.find(number)
    assert pull is not None and pull.state is TensorPullState.REQUESTED
    assert not pulls.coming(number, OTHER, 0.0) and pulls.coming(number, MAKER, 0.0)
    assert pulls.take_out(number).state is TensorPullState.DONE and not len(pulls)
    number = pulls.begin(MAKER, 1, [])
    pulls.coming(number, MAKER, 0.0)
    assert pulls.take_out(number).state is TensorPullState.DONE, "there is nothing to come"


def test_the_first_message_of_a_process_has_less_time_than_later_ones() -> None:
    pulls = TensorPulls()
    number = pulls.begin(MAKER, 1, [1, 1])
    assert not pulls.expire(number, 1e9), "the work that fills the tensors takes as long as it takes"
    pulls.coming(number, MAKER, 0.0)
    assert not pulls.expire(number, TRIAL_TIME - 0.1)
    pulls.landed(number, 0, 4.0)
    assert not pulls.expire(number, 4.0 + STALL_TIME - 0.1) and pulls.expire(number, 4.0 + STALL_TIME)
    pull = pulls.take_out(number)
    assert pull.state is TensorPullState.FAILED and f"{STALL_TIME:g} s" in pull.reason
    assert pulls.problem(1, 4.0 + STALL_TIME) == pull.reason and not pulls.problem(2, 40.0)
    assert not pulls.problem(1, 4.0 + STALL_TIME + RETRY_TIME)
    number = pulls.begin(MAKER, 1, [1])
    pulls.coming(number, MAKER, 0.0)
    assert pulls.expire(number, TRIAL_TIME), "what has failed is tried anew"


def test_a_broken_transfer_fails_unless_the_death_of_the_process_is_reported() -> None:
    for answered in (False, True):
        pulls = TensorPulls()
        first, second, third = (pulls.begin(MAKER, 1, [1, 1]) for _ in range(3))
        if answered:
            assert pulls.coming(first, MAKER, 0.0) and pulls.coming(second, MAKER, 0.0)
        for number in (first, second):
            pulls.broke(number, "reset", 1.0)
            pulls.broke(number, "another", 2.0)
            pulls.coming(number, MAKER, 2.0)
            pulls.landed(number, 1, 2.0)
            assert not pulls.expire(number, 1.0 + DEATH_TIME - 0.1)
        assert pulls.expire(first, 1.0 + DEATH_TIME)
        pull = pulls.take_out(first)
        assert pull.state is TensorPullState.FAILED and pull.reason == "reset" == pulls.problem(1, 5.0)
        assert pulls.process_died(MAKER) == [second, third]
        assert pulls.take_out(second).state is TensorPullState.GONE


def test_tensors_that_are_gone_say_nothing_about_the_way() -> None:
    pulls = TensorPulls()
    number, second = pulls.begin(MAKER, 1, [1]), pulls.begin(MAKER, 1, [1])
    assert not pulls.refused(number, OTHER, "who?", False, 0.0)
    assert pulls.refused(number, MAKER, "moved", True, 0.0) and not pulls.refused(number, MAKER, "moved", True, 0.0)
    assert pulls.process_died(OTHER) == [] and pulls.process_died(MAKER) == [second]
    assert pulls.take_out(number).state is pulls.take_out(second).state is TensorPullState.GONE
    assert not pulls.problem(1, 0.0)


@pytest.mark.parametrize(
    ("total", "seconds", "is_slow"), [(RATED, 1.0, True), (RATED, 1e-3, False), (RATED - 1, 9.0, False)]
)
def test_a_node_with_which_it_is_slow_is_left_alone_for_a_while(total: int, seconds: float, is_slow: bool) -> None:
    for pulls, left_alone in ((TensorPulls(LEAST_RATE), is_slow), (TensorPulls(0.0), False)):
        number = pulls.begin(MAKER, 1, [TRIAL, total - 1, 1])
        pulls.coming(number, MAKER, 0.0)
        assert not pulls.landed(number, 0, 4.0), "they had to connect"
        assert not pulls.landed(number, 2, 4.0) and pulls.landed(number, 1, 4.0 + seconds)
        assert pulls.take_out(number).state is TensorPullState.DONE, "the tensors are right all the same"
        assert bool(pulls.problem(1, 4.0 + seconds)) == left_alone


def test_more_readers_than_two_at_once_are_too_many_for_one_object() -> None:
    sends = TensorSends()
    for reader in (b"a", b"b"):
        assert not sends.is_busy(b"x") and sends.begin(reader, 1, b"x", 1)
    assert sends.is_busy(b"x") and not sends.is_busy(b"y")
    assert sends.sent(b"a", 1, 0) == b"x" and not sends.is_busy(b"x")


# ------------------------------------------------------------ both ends, and all that may happen between them


class Transfers(RuleBasedStateMachine):
    """A reader and two processes with tensors. Messages of the job arrive late or not at all, those of UCX in any
    order; processes die. The oracle counts what is held and what has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pulls = TensorPulls()
        self.sends = {MAKER: TensorSends(), OTHER: TensorSends()}
        self.held: dict[bytes, list[int]] = {MAKER: [], OTHER: []}
        """Pulls for which a process holds tensors."""
        self.open: dict[int, tuple[bytes, int]] = {}
        self.ended: dict[int, TensorPullState] = {}
        self.requests: list[tuple[bytes, int]] = []
        self.answers: list[tuple[bytes, int, str]] = []
        self.flying: list[tuple[bytes, int, int]] = []

    @rule(source=st.sampled_from([MAKER, OTHER]), messages=st.integers(0, 3))
    def pull(self, source: bytes, messages: int) -> None:
        number = self.pulls.begin(source, 1 if source == MAKER else 2, [1] * messages)
        self.open[number] = source, messages
        self.requests.append((source, number))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), outcome=st.sampled_from(["send", "send", "gone", "unable"]))
    def serve(self, data: Any, outcome: str) -> None:
        source, number = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        if outcome != "send":
            self.answers.append((source, number, outcome))
            return
        messages = self.open.get(number, (source, 1))[1]
        assert self.sends[source].begin(b"reader", number, b"oid", messages)
        assert not self.sends[source].begin(b"reader", number, b"oid", messages)
        self.held[source].append(number)
        self.answers.append((source, number, ""))
        self.flying += [(source, number, message) for message in range(messages)]
        if not messages:
            self._release(source, number, self.sends[source].end(b"reader", number))

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: Any) -> None:
        source, number, outcome = self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))
        if outcome:
            self.pulls.refused(number, source, "why", outcome == "gone", self.now)
        else:
            self.pulls.coming(number, source, self.now)

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), arrives=st.booleans())
    def fly(self, data: Any, arrives: bool) -> None:
        source, number, message = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if arrives:
            self._release(source, number, self.sends[source].sent(b"reader", number, message))
            self.pulls.landed(number, message, self.now)
        else:
            self.pulls.broke(number, "a cable", self.now)
            self._release(source, number, self.sends[source].end(b"reader", number))

    @rule(seconds=st.floats(0.0, 2 * STALL_TIME))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for number in list(self.open):
            self.pulls.expire(number, self.now)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def give_up(self, data: Any) -> None:
        self._take_out(data.draw(st.sampled_from(sorted(self.open))), True)

    @rule(source=st.sampled_from([MAKER, OTHER]))
    def maker_dies(self, source: bytes) -> None:
        wanted = [number for number, (its, _) in self.open.items() if its == source]
        assert sorted(self.pulls.process_died(source)) == sorted(wanted)
        self.requests = [one for one in self.requests if one[0] != source]
        self.answers = [one for one in self.answers if one[0] != source]
        self.flying = [one for one in self.flying if one[0] != source]
        self.sends[source], self.held[source] = TensorSends(), []

    @rule(source=st.sampled_from([MAKER, OTHER]))
    def source_hears_that_the_reader_died(self, source: bytes) -> None:
        gone = self.sends[source].process_died(b"reader")
        assert sorted(number for number, _ in gone) == sorted(self.held[source])
        self.held[source] = []

    def _take_out(self, number: int, early: bool) -> None:
        source, _ = self.open.pop(number)
        pull = self.pulls.take_out(number)
        assert pull.state not in OPEN
        assert number not in self.ended, "a pull has ended twice"
        self.ended[number] = pull.state
        if pull.state is not TensorPullState.DONE:
            self._release(source, number, self.sends[source].end(b"reader", number))

    def _release(self, source: bytes, number: int, oid: bytes) -> None:
        if oid:
            self.held[source].remove(number)  # once, or ValueError

    @invariant()
    def what_has_ended_is_taken_out(self) -> None:
        self.pulls.check_invariants()
        for number in list(self.open):
            pull = self.pulls.find(number)
            assert pull is not None
            if pull.state not in OPEN:
                self._take_out(number, False)
        assert len(self.pulls) == len(self.open)
        for source, sends in self.sends.items():
            assert len(sends) == len(self.held[source])

    def teardown(self) -> None:
        for number in list(self.open):
            self._take_out(number, True)
        for source, sends in self.sends.items():
            for number in list(self.held[source]):
                self._release(source, number, sends.end(b"reader", number))
            assert not len(sends) and not self.held[source]
        assert not len(self.pulls)


TestTransfers = Transfers.TestCase
TestTransfers.settings = settings(max_examples=150, stateful_step_count=40)
