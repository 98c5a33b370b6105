"""Blocks of memory that other processes can map."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcray.tensors.device_mappings import POOL_IDLE_TIME, SEGMENT_SIZE, UNIT, ExportPool, PoolBlock, segment_size


def test_blocks_are_in_the_first_segment_with_room_and_join_again() -> None:
    pool = ExportPool()
    assert pool.allocate(10) is None
    pool.add(7, segment_size(10), 0.0)
    first, second = pool.allocate(10), pool.allocate(UNIT + 1)
    assert first == PoolBlock(7, 0, UNIT) and second == PoolBlock(7, UNIT, 2 * UNIT)
    assert pool.allocate(SEGMENT_SIZE - UNIT) is None
    pool.free(first, 1.0)
    pool.free(second, 2.0)
    assert pool.allocate(SEGMENT_SIZE) == PoolBlock(7, 0, SEGMENT_SIZE)
    with pytest.raises(ValueError, match="is a segment 7"):
        pool.add(7, SEGMENT_SIZE, 0.0)


def test_a_large_block_has_a_segment_of_its_own() -> None:
    assert segment_size(10 * SEGMENT_SIZE + 1) == 10 * SEGMENT_SIZE + UNIT


def test_segments_that_are_empty_for_long_are_freed() -> None:
    pool = ExportPool()
    pool.add(1, SEGMENT_SIZE, 0.0)
    block = pool.allocate(10)
    assert block is not None and pool.expire(1e6) == []
    pool.free(block, 5.0)
    assert pool.expire(5.0 + POOL_IDLE_TIME - 1) == [] and pool.expire(5.0 + POOL_IDLE_TIME) == [1] and not len(pool)


def test_a_block_is_not_freed_twice() -> None:
    pool = ExportPool()
    pool.add(1, SEGMENT_SIZE, 0.0)
    block = pool.allocate(10)
    assert block is not None
    pool.free(block, 0.0)
    with pytest.raises(AssertionError):
        pool.free(block, 0.0)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, SEGMENT_SIZE // 3)), max_size=80))
def test_blocks_in_use_never_overlap(steps: list[tuple[bool, int]]) -> None:
    pool, used, segments = ExportPool(), list[PoolBlock](), 0
    for allocate, number in steps:
        if allocate:
            block = pool.allocate(number)
            if block is None:
                segments += 1
                pool.add(segments, segment_size(number), 0.0)
                block = pool.allocate(number)
            assert block is not None and block.size >= number
            for other in used:
                if other.segment == block.segment:
                    assert other.offset + other.size <= block.offset or block.offset + block.size <= other.offset
            used.append(block)
        elif used:
            pool.free(used.pop(number % len(used)), 0.0)
        pool.check_invariants()
    for block in used:
        pool.free(block, 0.0)
    assert len(pool.expire(POOL_IDLE_TIME)) == segments
