"""Messages as pieces of a frame: long values stay where they are until a socket, or shared memory, takes them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from hpcray.protocol.messages import Message, ObjectReady, encode

LONG_VALUE = 1 << 14
"""Bytes of a value from which on it is a piece of its own."""

_LIST_16, _LIST_32, _BINARY_16, _BINARY_32 = b"\xdc", b"\xdd", b"\xc5", b"\xc6"  # msgpack's types
_SHORT, _WORD = struct.Struct(">H"), struct.Struct(">I")
_LENGTH_OF_LIST, _TYPE_OF_LIST = 0x0F, 0x90
_BEFORE_ID, _STATUS, _NO_VALUE = 4, 1, 2  # bytes: list, tag, type and length of the id; status; type and length of b""


def encode_pieces(messages: Sequence[Message]) -> list[bytes]:
    """Encode messages in pieces: joined, they are the bytes that `encode` makes."""
    pieces: list[bytes] = []
    short = bytearray(_list_header(len(messages)))
    for msg in messages:
        if type(msg) is not ObjectReady or len(msg.value) < LONG_VALUE:
            short += encode(msg)
            continue
        rest = encode(ObjectReady(msg.id, msg.status, b"", msg.size, msg.nodes, msg.remake_count))
        at = _BEFORE_ID + len(msg.id) + _STATUS
        short += rest[:at]
        short += _binary_header(len(msg.value))
        pieces += (bytes(short), msg.value)
        short = bytearray(rest[at + _NO_VALUE :])
    pieces.append(bytes(short))
    return pieces


def _list_header(count: int) -> bytes:
    if count <= _LENGTH_OF_LIST:
        return bytes((_TYPE_OF_LIST | count,))
    return _LIST_16 + _SHORT.pack(count) if count < 1 << 16 else _LIST_32 + _WORD.pack(count)


def _binary_header(size: int) -> bytes:
    return _BINARY_16 + _SHORT.pack(size) if size < 1 << 16 else _BINARY_32 + _WORD.pack(size)
