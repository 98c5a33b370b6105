"""Records of kept results: their layout in a pack, and how a torn or foreign one is recognised.

A pack is a file to which the processes of one node append records, each with one `write`::

    magic 8 B | key 32 B | kind u8 | flags u8 | meta size u32 | data size u64 | time f64 | header check 4 B |
    meta | data | check 16 B

The header has a check of its own, so that a look through a pack need not read the data. A process that is killed while
it writes leaves a torn record; what others append behind it is found by its magic.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

MAGIC = b"\x93hpcdr1\n"
_HEADER = struct.Struct("<8s32sBBIQd")
HEADER_BYTES = _HEADER.size + 4
CHECK_BYTES = 16
KEY_BYTES = 32
VALUE, ERROR, STREAM_END, FUNCTION = 1, 2, 3, 4
"""Kinds: what a task returned, or an item of a stream; what it raised; how many items a stream has; what a part of keys
was made of."""
IN_FILE, REBOUND = 1, 2
"""Flags: the data is the name of a file with the values; the values are a pickle of the room's own, not a blob."""


class Meta(msgspec.Struct, array_like=True, frozen=True):
    """The part of a record that describes it.

    Attributes:
        name: of the function. function: digest of all but the arguments, under which a FUNCTION record describes it.
        arguments: the name of each argument, and the beginning of its canonical bytes or their digest.
        needs: classes and functions of the program that the value names: (module, qualified name, digest).
        versions: packages that the value names: (module, version).
        size: bytes of the value. expires: Unix time after which it may be removed; 0 for never.
        seconds: for which the function ran.
    """

    name: str = ""
    function: bytes = b""
    arguments: Sequence[tuple[str, bytes]] = ()
    needs: Sequence[tuple[str, str, bytes]] = ()
    versions: Sequence[tuple[str, str]] = ()
    size: int = 0
    expires: float = 0.0
    seconds: float = 0.0


class Description(msgspec.Struct, array_like=True, frozen=True):
    """The data of a FUNCTION record: what goes into all keys of one function.

    Attributes:
        parts: label and digest of each function, class, global and package. settings: name and value of the rest.
    """

    parts: Sequence[tuple[str, bytes]] = ()
    settings: Sequence[tuple[str, str]] = ()


class Header(NamedTuple):
    """The header of a record."""

    key: bytes
    kind: int
    flags: int
    meta_size: int
    data_size: int
    time: float

    @property
    def size(self) -> int:
        """Bytes of the whole record."""
        return HEADER_BYTES + self.meta_size + self.data_size + CHECK_BYTES


class KeptRecord(NamedTuple):
    """A record whose check was right."""

    header: Header
    meta: Meta
    data: memoryview


encode_meta = msgspec.msgpack.Encoder().encode
_decode_meta = msgspec.msgpack.Decoder(Meta).decode
encode_description = msgspec.msgpack.Encoder().encode
decode_description = msgspec.msgpack.Decoder(Description).decode


def make_record(key: bytes, kind: int, flags: int, time: float, meta: bytes, data: bytes) -> bytes:
    """Return a record as it stands in a pack."""
    header = _HEADER.pack(MAGIC, key, kind, flags, len(meta), len(data), time)
    content = b"".join((header, zlib.crc32(header).to_bytes(4, "little"), meta, data))
    return content + hashlib.blake2b(content, digest_size=CHECK_BYTES).digest()


def read_header(content: Any, at: int) -> Header | None:
    """Return the header that begins at an offset; None if there is none, or not all of it."""
    if len(content) < at + HEADER_BYTES or content[at : at + 8] != MAGIC:
        return None
    end = at + _HEADER.size
    if zlib.crc32(content[at:end]) != int.from_bytes(content[end : end + 4], "little"):
        return None
    return Header(*_HEADER.unpack_from(content, at)[1:])


def read_record(content: bytes | memoryview, key: bytes) -> KeptRecord | None:
    """Return a record, judged by its check; None if it is not whole, or is that of another key."""
    view = memoryview(content)
    header = read_header(view, 0)
    if header is None or header.key != key or header.size != len(view):
        return None
    body = len(view) - CHECK_BYTES
    if hashlib.blake2b(view[:body], digest_size=CHECK_BYTES).digest() != view[body:]:
        return None
    try:
        meta = _decode_meta(view[HEADER_BYTES : HEADER_BYTES + header.meta_size])
    except msgspec.MsgspecError:
        return None
    return KeptRecord(header, meta, view[HEADER_BYTES + header.meta_size : body])


def scan(content: Any, start: int, size: int, find: Any) -> Iterator[tuple[int, Header | None]]:
    """Go through the records of a pack.

    Args:
        content: the pack, as a map or bytes. start: where to begin. size: bytes of it that count.
        find: `content.find`.

    Yields:
        Offset and header of each record that may be whole; last the offset from which to look again, with None.
    """
    at = start
    while at + HEADER_BYTES <= size:
        header = read_header(content, at)
        if header is not None:
            end = at + header.size
            if end <= size and (end + 8 > size or content[end : end + 8] == MAGIC):
                yield at, header
                at = end
                continue
        following = find(MAGIC, at + 1, size)
        while following >= 0 and following + HEADER_BYTES <= size and read_header(content, following) is None:
            following = find(MAGIC, following + 1, size)
        if following < 0 or following + HEADER_BYTES > size:
            if header is not None and at + header.size <= size:  # garbage behind it, which may be the start of the next
                yield at, header
                at += header.size
            break
        at = following
    yield at, None


_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def join_values(blobs: Sequence[bytes]) -> bytes:
    """Several blobs as one."""
    return b"".join((_COUNT.pack(len(blobs)), *(_LENGTH.pack(len(blob)) for blob in blobs), *blobs))


def split_values(data: memoryview) -> list[memoryview]:
    """The blobs that `join_values` joined.

    Raises:
        ValueError: it is not of this form.
    """
    try:
        (count,) = _COUNT.unpack_from(data)
        at = _COUNT.size + count * _LENGTH.size
        blobs = []
        for index in range(count):
            (length,) = _LENGTH.unpack_from(data, _COUNT.size + index * _LENGTH.size)
            blobs.append(data[at : at + length])
            at += length
    except struct.error as error:
        raise ValueError(f"no list of values: {error}") from None
    if at != len(data):
        raise ValueError(f"a list of values of {len(data)} bytes, not {at}")
    return blobs
