"""The arena's allocator: no overlap, alignment, coalescing, warm memory first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcray.core.object_store.allocator import ALIGN, LARGE, PAGE, Allocator

SIZES = st.one_of(
    st.integers(0, 5000), st.integers(LARGE - 100, LARGE + 10_000), st.sampled_from([0, 1, 63, 64, 65, PAGE, LARGE])
)
# A number allocates that many bytes; ("free", k) frees the k-th live block.
STEPS = st.lists(st.one_of(SIZES, st.tuples(st.just("free"), st.integers(0, 10_000))), max_size=120)


def check(allocator: Allocator, live: dict[int, int]) -> None:
    end = 0
    for offset, size in sorted(live.items()):
        assert offset >= end, "two blocks overlap"
        assert offset % (PAGE if size >= LARGE else ALIGN) == 0
        end = offset + size
    assert end <= allocator.high_water <= allocator.size
    assert sum(live.values()) <= allocator.used <= allocator.size
    assert allocator.free_bytes == allocator.size - allocator.used
    assert allocator.largest_free <= allocator.free_bytes


@given(STEPS, st.integers(1, 12 * LARGE))
def test_blocks_never_overlap_and_free_space_becomes_one_again(steps: list[object], capacity: int) -> None:
    allocator = Allocator(max(capacity, ALIGN))
    live: dict[int, int] = {}
    high = 0
    for step in steps:
        if isinstance(step, int):
            offset = allocator.allocate(step)
            if offset is None:
                slack = 2 * PAGE if step > LARGE - ALIGN else ALIGN  # sizes are rounded up first
                assert allocator.largest_free < step + slack, "refused although a free run is long enough"
            else:
                assert offset not in live
                live[offset] = step
        elif live:
            assert isinstance(step, tuple)
            offset = sorted(live)[step[1] % len(live)]
            del live[offset]
            allocator.free(offset)
        check(allocator, live)
        assert allocator.high_water >= high, "the high-water mark sank"
        high = allocator.high_water
    for offset in live:
        allocator.free(offset)
    assert allocator.used == 0
    assert allocator.largest_free == allocator.size


@settings(max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_an_arena_can_be_filled_to_the_last_unit_in_any_order(sizes: list[int], random: object) -> None:
    allocator = Allocator(sum(sizes) * ALIGN)
    offsets = [allocator.allocate(size * ALIGN) for size in sizes]
    assert None not in offsets
    assert allocator.free_bytes == 0 and allocator.largest_free == 0
    assert allocator.allocate(1) is None
    random.shuffle(offsets)  # type: ignore[attr-defined]
    for offset in offsets:
        assert offset is not None
        allocator.free(offset)
    assert allocator.allocate(sum(sizes) * ALIGN) == 0


def test_freed_memory_is_used_again_before_untouched_memory() -> None:
    allocator = Allocator(100 * LARGE)
    blocks = [allocator.allocate(LARGE) for _ in range(3)]
    assert blocks[1] is not None
    allocator.free(blocks[1])
    high = allocator.high_water
    assert allocator.allocate(LARGE) == blocks[1]
    assert allocator.high_water == high


def test_the_best_fit_is_taken_not_the_first() -> None:
    allocator = Allocator(1 << 20)
    large = allocator.allocate(10 * ALIGN)
    allocator.allocate(ALIGN)
    small = allocator.allocate(3 * ALIGN)
    allocator.allocate(ALIGN)
    assert large is not None and small is not None
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(3 * ALIGN) == small


def test_a_warm_block_at_the_end_grows_into_untouched_memory() -> None:
    allocator = Allocator(10 * LARGE)
    first = allocator.allocate(4 * LARGE)
    assert first is not None
    allocator.free(first)
    assert allocator.allocate(10 * LARGE) == first == 0
    assert allocator.high_water == 10 * LARGE


def test_a_large_block_is_page_aligned_and_the_gap_before_it_stays_usable() -> None:
    allocator = Allocator(4 * LARGE)
    allocator.allocate(ALIGN)
    assert allocator.allocate(LARGE) == PAGE
    assert allocator.allocate(PAGE - ALIGN) == ALIGN


@pytest.mark.parametrize("offset", [1, 64, 1 << 40])
def test_freeing_an_offset_that_was_not_allocated_is_an_error_and_changes_nothing(offset: int) -> None:
    allocator = Allocator(1 << 20)
    allocator.allocate(64)
    with pytest.raises(ValueError, match=str(offset)):
        allocator.free(offset)
    assert allocator.used == 64


def test_freeing_twice_is_an_error() -> None:
    allocator = Allocator(1 << 20)
    offset = allocator.allocate(64)
    assert offset == 0
    allocator.free(offset)
    with pytest.raises(ValueError, match="offset 0"):
        allocator.free(offset)


@pytest.mark.parametrize("size", [0, -1, (1 << 48) + 1])
def test_an_arena_of_impossible_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Allocator(size)


def test_whether_a_block_could_ever_fit_counts_the_rounding() -> None:
    allocator = Allocator(LARGE + 64)
    assert allocator.could_hold(LARGE)
    assert not allocator.could_hold(LARGE + 1)
    assert not allocator.could_hold(LARGE + 65)
