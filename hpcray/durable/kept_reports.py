"""Reports about kept results, for people: what a key was made of, and how two keys differ."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from hpcray.durable.records import FUNCTION, STREAM_END, Description, Meta, decode_description
from hpcray.durable.result_store import RecordPlace, ResultStore


class Entry(NamedTuple):
    """A kept result, without its value."""

    key: bytes
    time: float
    kind: int
    meta: Meta

    def arguments(self) -> str:
        """The arguments as text; of large ones their digests."""
        return ", ".join(f"{name}={show_argument(content)}" for name, content in self.meta.arguments)


def read_entry(store: ResultStore, key: bytes, place: RecordPlace) -> Entry | None:
    """Return the entry of a key; None if it is damaged."""
    record = store.read(key, place, values=False)
    return Entry(key, record.header.time, record.header.kind, record.meta) if record is not None else None


def explain(store: ResultStore, entry: Entry) -> Iterator[str]:
    """Yield lines: everything that the key of a result was made of."""
    kind = "the end of a stream" if entry.kind == STREAM_END else "a result"
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.time))
    yield f"key        {entry.key.hex()}"
    meta = entry.meta
    yield f"function   {meta.name}, {kind} of {meta.size:,} bytes, made {made} in {meta.seconds:.3g} s"
    for name, content in entry.meta.arguments:
        yield f"argument   {name} = {show_argument(content)}"
    description = describe(store, entry.meta.function)
    if description is None:
        yield f"           the description of its function, {entry.meta.function.hex()[:16]}, is not kept"
        return
    for name, value in description.settings:
        if value:
            yield f"setting    {name} = {value}"
    for label, mark in description.parts:
        yield f"part       {label}: {_show_mark(label, mark)}"
    for module, version in entry.meta.versions:
        yield f"needs      {module}: {version}"
    for module, name, mark in entry.meta.needs:
        yield f"needs      {module}.{name}: {mark.hex()[:16]}"


def nearest(store: ResultStore, entry: Entry) -> Entry | None:
    """Return the result of a function of the same name whose key has most in common with that of another one."""
    best: tuple[int, float] | None = None
    found: Entry | None = None
    own = dict(entry.meta.arguments)
    descriptions: dict[bytes, int] = {}
    for key, place in store.entries():
        if key == entry.key or place.kind == FUNCTION:
            continue
        other = read_entry(store, key, place)
        if other is None or other.meta.name != entry.meta.name or other.kind != entry.kind:
            continue
        theirs = dict(other.meta.arguments)
        distance = sum(own.get(name) != theirs.get(name) for name in {*own, *theirs})
        function = other.meta.function
        if function not in descriptions:
            descriptions[function] = len(list(_differences(store, entry.meta.function, function)))
        rank = distance + descriptions[function], -other.time
        if best is None or rank < best:
            best, found = rank, other
    return found


def compare(store: ResultStore, one: Entry, other: Entry) -> Iterator[str]:
    """Yield lines: what differs between the keys of two results."""
    own, theirs = dict(one.meta.arguments), dict(other.meta.arguments)
    for name in sorted({*own, *theirs}):
        if own.get(name) != theirs.get(name):
            shown = [show_argument(side[name]) if name in side else "none" for side in (own, theirs)]
            yield f"argument {name}: {shown[0]}, there {shown[1]}"
    yield from _differences(store, one.meta.function, other.meta.function)


def describe(store: ResultStore, function: bytes) -> Description | None:
    """Return what all keys of a function are made of; None where that is not kept."""
    place = store.find(function)
    record = store.read(function, place) if place is not None else None
    if record is None or record.header.kind != FUNCTION:
        return None
    return decode_description(record.data)


def _differences(store: ResultStore, one: bytes, other: bytes) -> Iterator[str]:
    if one == other:
        return
    own, theirs = describe(store, one), describe(store, other)
    if own is None or theirs is None:
        yield "the function, or what it names"
        return
    settings, their_settings = dict(own.settings), dict(theirs.settings)
    for name in settings:
        if settings[name] != their_settings.get(name):
            yield f"setting {name}: {settings[name] or 'none'}, there {their_settings.get(name) or 'none'}"
    parts, their_parts = dict(own.parts), dict(theirs.parts)
    for label in sorted({*parts, *their_parts}):
        if parts.get(label) != their_parts.get(label):
            shown = [_show_mark(label, side[label]) if label in side else "none" for side in (parts, their_parts)]
            yield f"{label}: {shown[0]}, there {shown[1]}"


def _show_mark(label: str, mark: bytes) -> str:
    return mark.decode(errors="replace") if label.startswith("package ") else mark.hex()[:16]


def show_argument(content: bytes) -> str:
    """Return an argument's canonical bytes as text, if they are those of a number or a short text."""
    tag, rest = content[:1], content[4:]
    if tag == b"f" and len(content) == 9:
        return repr(struct.unpack("<d", content[1:])[0])
    if tag == b"i":
        return rest.decode(errors="replace")
    if tag == b"s":
        return repr(rest.decode(errors="replace"))
    if tag == b"b":
        return repr(rest)
    if tag in (b"t", b"l") and content[1:2] == b"=":
        return content[5:].decode(errors="replace")
    if tag == b"@":
        return f"the result {content[2:10].hex()}" if content[1:2] == b"K" else f"a value {content[2:10].hex()}"
    return f"#{content[1:9].hex()}"
