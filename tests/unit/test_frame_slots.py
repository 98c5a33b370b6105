"""Slots of shared memory for long frames: each has one user, none is lost, and frames that arrive find some."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hpcray.core.effects import Send
from hpcray.core.raylet.frame_slots import GRANT, FrameSlotManager
from hpcray.protocol.messages import FrameSlots, ReclaimFrameSlots

COUNT = 12
PROCS = [bytes(7) + bytes([number]) for number in range(1, 5)]
A, B, C, D = PROCS


def granted(effects: list[object]) -> list[int]:
    """The slots that the effects grant."""
    return [offset for effect in effects for offset in getattr(effect.msg, "offsets", [])]


def test_a_process_gets_slots_and_gets_more_when_it_has_filled_half_of_them() -> None:
    slots = FrameSlotManager(range(COUNT))
    (first,) = slots.grant(A)
    assert isinstance(first, Send) and isinstance(first.msg, FrameSlots) and first.dest == A
    mine = list(first.msg.offsets)
    assert len(mine) == GRANT
    assert slots.grant(A) == []
    for _ in range(GRANT // 2):
        assert slots.fill(A, mine.pop())
    assert len(granted(slots.grant(A))) == COUNT // 2 - GRANT


def test_a_process_cannot_fill_what_it_was_not_granted_or_has_filled_already() -> None:
    slots = FrameSlotManager(range(COUNT))
    mine = granted(slots.grant(A))
    assert not slots.fill(B, mine[0])
    assert slots.fill(A, mine[0])
    assert not slots.fill(A, mine[0])
    assert not slots.fill(A, COUNT)


def test_half_of_the_slots_are_left_to_frames_that_arrive() -> None:
    slots = FrameSlotManager(range(COUNT))
    for proc in PROCS:
        for offset in granted(slots.grant(proc)):
            slots.fill(proc, offset)
        slots.grant(proc)
    taken = [slots.take() for _ in range(COUNT)]
    assert sum(offset >= 0 for offset in taken) == COUNT // 2


def test_slots_that_another_process_does_not_use_are_reclaimed_once() -> None:
    slots = FrameSlotManager(range(COUNT))
    held = granted(slots.grant(A)) + granted(slots.grant(B))
    assert len(held) == COUNT // 2
    assert slots.grant(C) == [Send(A, ReclaimFrameSlots())]
    assert slots.grant(C) == [Send(B, ReclaimFrameSlots())]
    assert slots.grant(C) == []
    slots.give_back(A, held[:GRANT])
    assert len(granted(slots.grant(C))) == GRANT


def test_the_death_of_a_process_frees_what_it_has_not_filled_and_what_it_has_filled_when_it_is_sent() -> None:
    slots = FrameSlotManager(range(COUNT))
    mine = granted(slots.grant(A))
    slots.fill(A, mine[0])
    slots.process_died(A)
    slots.check_invariants()
    assert sum(slots.take() >= 0 for _ in range(COUNT)) == COUNT - 1
    slots.release(mine[0])
    assert slots.take() == mine[0]


class Slots(RuleBasedStateMachine):
    """Processes fill, return and die, frames come and go, in any order; messages may be late."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = FrameSlotManager(range(COUNT))
        self.held: dict[bytes, list[int]] = {proc: [] for proc in PROCS}
        self.busy: list[int] = []
        self.reclaimed: list[bytes] = []

    def carry_out(self, effects: list[object]) -> None:
        for effect in effects:
            if isinstance(effect.msg, FrameSlots):
                self.held[effect.dest] += effect.msg.offsets
            else:
                self.reclaimed.append(effect.dest)

    @rule(proc=st.sampled_from(PROCS))
    def a_long_frame_goes_through_the_socket(self, proc: bytes) -> None:
        self.carry_out(self.slots.grant(proc))

    @rule(proc=st.sampled_from(PROCS), which=st.integers(0, GRANT))
    def a_slot_is_filled(self, proc: bytes, which: int) -> None:
        if self.held[proc]:
            offset = self.held[proc].pop(which % len(self.held[proc]))
            assert offset not in self.busy
            assert self.slots.fill(proc, offset)
            self.busy.append(offset)
            self.carry_out(self.slots.grant(proc))

    @rule()
    def a_frame_arrives(self) -> None:
        offset = self.slots.take()
        if offset >= 0:
            assert offset not in self.busy and all(offset not in held for held in self.held.values())
            self.busy.append(offset)

    @rule(which=st.integers(0, COUNT))
    def a_frame_is_sent_or_read(self, which: int) -> None:
        if self.busy:
            self.slots.release(self.busy.pop(which % len(self.busy)))

    @rule(which=st.integers(0, 3))
    def a_process_returns_its_slots(self, which: int) -> None:
        if self.reclaimed:
            proc = self.reclaimed.pop(which % len(self.reclaimed))
            offsets, self.held[proc] = self.held[proc], []
            self.slots.give_back(proc, offsets)

    @rule(proc=st.sampled_from(PROCS))
    def a_process_dies(self, proc: bytes) -> None:
        self.slots.process_died(proc)
        self.held[proc] = []

    @invariant()
    def each_slot_has_one_user(self) -> None:
        self.slots.check_invariants()

    def teardown(self) -> None:
        for proc in PROCS:
            self.slots.process_died(proc)
        for offset in self.busy:
            self.slots.release(offset)
        assert sorted(self.slots.take() for _ in range(COUNT)) == list(range(COUNT))


TestHistories = Slots.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40)
