"""Messages in pieces are the bytes that the encoder makes of them, and long values are not copied."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcray.common.ids import make_proc
from hpcray.protocol import messages as m
from hpcray.protocol.frames import LONG_VALUE, encode_pieces

SIZES = st.sampled_from([0, 1, 200, 300, LONG_VALUE - 1, LONG_VALUE, (1 << 16) - 1, 1 << 16, 100_000])
READY = st.builds(
    lambda ident, status, size, stored, nodes, count: m.ObjectReady(
        ident, status, bytes(size), stored, nodes, count
    ),
    st.binary(min_size=16, max_size=16), st.integers(0, 2), SIZES, st.integers(0, 1 << 40),
    st.lists(st.integers(0, 65535), max_size=4), st.integers(0, 300),
)  # fmt: skip
OTHER = st.sampled_from([m.ProcDied(make_proc(1, 2), "it ended"), m.BorrowAck(70_000), m.FrameRead(1 << 33)])


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.one_of(READY, OTHER), max_size=20))
def test_the_pieces_are_what_the_encoder_makes(messages: list[m.Message]) -> None:
    pieces = encode_pieces(messages)
    assert b"".join(pieces) == m.encode(messages)
    long_values = [msg.value for msg in messages if isinstance(msg, m.ObjectReady) and len(msg.value) >= LONG_VALUE]
    assert [piece for piece in pieces if any(piece is value for value in long_values)] == long_values


def test_many_messages_are_one_piece() -> None:
    for count in (15, 16, 70_000):
        messages: list[m.Message] = [m.BorrowAck(number) for number in range(count)]
        assert encode_pieces(messages) == [m.encode(messages)]
