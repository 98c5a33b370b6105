"""How the memory of a device object is divided into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcray.tensors.tensor_pulls import bytes_of, divide, piece_size


@given(st.lists(st.integers(0, 1000), max_size=12), st.integers(1, 8).map(lambda number: 64 * number))
def test_every_byte_is_in_one_piece_and_pieces_do_not_exceed_their_size(sizes: list[int], largest: int) -> None:
    pieces = divide(sizes, largest)
    found = [bytearray(size) for size in sizes]
    for piece in pieces:
        assert 0 < bytes_of(piece) <= largest
        end = 0
        for part in piece:
            assert part.at % 64 == 0 and part.at >= end and part.size > 0
            end = part.at + part.size
            for place in range(part.first, part.first + part.size):
                found[part.storage][place] += 1
    assert all(set(each) <= {1} for each in found)


def test_small_storages_share_a_piece_and_large_ones_are_divided() -> None:
    assert [len(piece) for piece in divide([100, 28, 60], 1 << 10)] == [3]
    assert [bytes_of(piece) for piece in divide([3000], 1 << 10)] == [1024, 1024, 952]


def test_pieces_are_neither_too_small_nor_too_large() -> None:
    totals = (1 << 20, 100_000_000, 300_000_001, 1 << 30, 1 << 36)
    sizes = [piece_size(total, 8 << 30) for total in totals]
    assert sizes[0] == sizes[1] == 16 << 20 and sizes[-1] == sizes[-2] == 32 << 20
    assert all(size % 64 == 0 for size in sizes) and 300_000_001 / 16 <= sizes[2] < 300_000_001 / 16 + 64
    assert piece_size(1 << 30, 256 << 20) == 8 << 20, "a small store has room for several"
    assert piece_size(1 << 30, 0) == 64
