"""The notes that a table keeps of what it is told: one entry per input, those that came during another one under it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcray.core import recording
from hpcray.core.owner.entries import Entry, Mapping, Waiter
from hpcray.core.recording import Input, Record, digest, show
from hpcray.wire import messages as m

LONGEST = 32
"""Longer bytes are values, not ids, and noted by their digest."""
_OWN = (
    m.Free, m.ObjectGet, m.ObjectReady, m.ObjectLost, m.AddLocation, m.Open, m.Release,
    m.Hurry, m.DiskRead,
    m.BorrowAck, m.BorrowAdd, m.BorrowAsk, m.BorrowDrop, m.BorrowEnd, m.BorrowTake,
)  # fmt: skip


@dataclass(frozen=True)
class Opaque:
    """A message of somebody else, which a table only keeps for a while."""

    kind: str
    digest: bytes


def short(value: bytes) -> bytes:
    """What stands for a value; what is short already stands for itself."""
    if len(value) <= LONGEST:
        return bytes(value)
    return b"#" + hashlib.blake2b(value, digest_size=8).digest() + value[-1:]


def opaque(msg: Any) -> Opaque:
    """What stands for a message that means nothing to a table."""
    if isinstance(msg, Opaque):
        return msg
    return Opaque(type(msg).__name__, hashlib.blake2b(m.encode([msg]), digest_size=8).digest())


def said(msg: Any) -> Any:
    """A message without the values in it."""
    if isinstance(msg, m.ObjectReady):
        return msgspec.structs.replace(msg, value=short(msg.value))
    return msg if isinstance(msg, _OWN) else opaque(msg)


def _written(msg: Any) -> Any:
    """One that a table is told, without the values in it."""
    return said(msg) if isinstance(msg, m.ObjectReady) else msg


def _nothing() -> None:
    """What is left to do."""


class Frame:
    """One input that is being dealt with. anchor: the effect during which others may come."""

    __slots__ = ("anchor", "effects", "given", "times")

    def __init__(self, given: Input) -> None:
        self.given = given
        self.effects: list[Any] = []
        self.times: dict[bytes, int] = {}
        self.anchor = b""

    def add(self, effect: tuple[Any, ...]) -> None:
        """It has this effect."""
        self.effects.append(effect)
        key = digest([effect])
        count = self.times[key] = self.times.get(key, 0) + 1
        self.anchor = key + count.to_bytes(4, "big")


class Log:
    """The record of one table, and where it is in it.

    Attributes:
        inside: whether the table itself is at work: what it does to itself is no input.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.inside = False
        self._frames: list[Frame] = []
        self._bytes = 0
        self._numbers: dict[int, tuple[int, Waiter]] = {}
        self._waiters = 0

    def write(self, name: str, *args: Any) -> None:
        """Somebody wrote a field of the table directly."""
        if not self.inside:
            self.call(name, args, _nothing)

    def call(self, name: str, args: tuple[Any, ...], method: Callable[[], Any]) -> Any:
        """The table is told something."""
        if self.inside:
            return method()
        frame = self._begin(name, args)
        self.inside = True
        if frame is None:
            try:
                return method()
            finally:
                self.inside = False
        self._frames.append(frame)
        try:
            result = method()
            frame.effects.append(("returned", result if isinstance(result, (bool, list)) else None))
            return result
        except Exception as error:
            frame.effects.append(("raised", type(error).__name__))
            raise
        finally:
            self.inside = False
            self._frames.pop()
            frame.given.effects = show(frame.effects)[: recording.SHOWN]
            frame.given.digest = digest(frame.effects)

    @contextmanager
    def out(self, *effect: Any) -> Iterator[None]:
        """The table calls somebody, who may tell it something before this is over."""
        if not self.inside or not self._frames or self.record.forgotten:
            yield
            return
        self._frames[-1].add(effect)
        self.inside = False
        try:
            self.effect()
            yield
        finally:
            self.inside = True

    def effect(self) -> None:
        """An input has had an effect, and what follows from that comes now."""

    def fact(self, key: bytes, value: Any) -> None:
        """The table looked at something that is not its own."""
        if self.inside and self._frames:
            given = self._frames[-1].given
            given.facts = [*given.facts, (key, value)]

    def number(self, waiter: Waiter) -> int:
        """What a waiter is called here."""
        known = self._numbers.get(id(waiter))
        if known is None and self.record.forgotten:
            return 0
        if known is None:
            self._waiters += 1
            known = self._numbers[id(waiter)] = (self._waiters, waiter)
        return known[0]

    def forget(self, waiter: Waiter) -> None:
        """Nobody waits with it any more."""
        self._numbers.pop(id(waiter), None)

    def _begin(self, name: str, args: tuple[Any, ...]) -> Frame | None:
        record = self.record
        full = len(record.inputs) >= recording.MOST_INPUTS or self._bytes >= recording.MOST_BYTES
        if record.forgotten or (full and not self._frames):
            record.forgotten += 1
            self._numbers.clear()
            return None
        packed = msgspec.msgpack.encode([self._plain(arg) for arg in args])
        self._bytes += len(packed) + recording.SHOWN // 4
        anchor = self._frames[-1].anchor if self._frames else b""
        given = Input(name, packed, b"", "", len(self._frames), anchor)
        record.inputs.append(given)
        return Frame(given)

    def _plain(self, value: Any) -> Any:
        """A value as it is written down."""
        if isinstance(value, (bytes, bytearray, memoryview)):
            return short(bytes(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            return [self._plain(item) for item in value]
        if isinstance(value, Waiter):
            return {"waiter": self.number(value)}
        if isinstance(value, Entry):
            return {"entry": True}
        if isinstance(value, Mapping):
            return {"mapping": [value.offset, value.size, value.node, value.views]}
        if isinstance(value, Opaque):
            return {"opaque": [value.kind, value.digest]}
        if isinstance(value, msgspec.Struct):
            return {"message": m.encode([_written(value)])}
        if hasattr(value, "retries"):
            return {"task": value.id}
        return getattr(value, "_id", None) or value.id  # a ref
