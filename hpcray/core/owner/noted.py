"""An object table that notes everything it is told and what it answers (`HPCRAY_RECORD=1`), for `hpcray dump`.

Who uses a table calls its methods and, where every call counts, writes a field of it directly. `NotedTable` sees both;
a plain `ObjectTable` knows nothing of this file, so a process that is not recorded pays nothing.

A table calls out while it is told something: it sends, wakes waiters, has a task run again. Who is called may tell it
more before that returns, so inputs nest, and each notes the effect of the outer one during which it came. Values of
objects are noted by a digest: a table passes them on and looks only at their last byte.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from hpcray.base.ids import node_of
from hpcray.core import recording
from hpcray.core.owner.entries import Entry, Mapping, Waiter
from hpcray.core.owner.lineage import Kept, Lineage
from hpcray.core.owner.pins import Pins
from hpcray.core.owner.replicas import Replicas
from hpcray.core.owner.table import ObjectTable
from hpcray.core.recording import Input, Record, digest, show
from hpcray.wire import messages as m

LONGEST = 32
"""Longer bytes are values, not ids, and noted by their digest."""
_OWN = (
    m.Free, m.ObjectGet, m.ObjectReady, m.ObjectLost, m.AddLocation, m.Open, m.Release,
    m.Hurry, m.DiskRead,
    m.BorrowAck, m.BorrowAdd, m.BorrowAsk, m.BorrowDrop, m.BorrowEnd, m.BorrowTake,
)  # fmt: skip
METHODS = (
    "abandon", "arrived", "adopt", "release", "view_died", "discard", "unmap", "set_inline", "set_stored",
    "created_here", "located", "told", "left_behind", "want_ready", "want_local", "forget", "fail_all", "process_died",
    "node_died", "on_opened", "on_store_error", "on_object_get", "on_object_ready", "on_object_lost",
    "on_add_location", "on_replica", "hold", "keep", "give", "take_back", "borrowed_by", "on_borrow_ack",
    "on_borrow_ask", "on_borrow_add", "on_borrow_take", "on_borrow_drop", "on_borrow_end", "settle_lost",
    "keep_task", "take_again", "on_disk", "begin_file", "end_file",
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


class _Frame:
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
        self._frames: list[_Frame] = []
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
        if known is None:
            self._waiters += 1
            known = self._numbers[id(waiter)] = (self._waiters, waiter)
        return known[0]

    def forget(self, waiter: Waiter) -> None:
        """Nobody waits with it any more."""
        self._numbers.pop(id(waiter), None)

    def _begin(self, name: str, args: tuple[Any, ...]) -> _Frame | None:
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
        return _Frame(given)

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
            return {"mapping": [value.offset, value.size, value.views]}
        if isinstance(value, Opaque):
            return {"opaque": [value.kind, value.digest]}
        if isinstance(value, msgspec.Struct):
            return {"message": m.encode([_written(value)])}
        if hasattr(value, "retries"):
            return {"task": value.id}
        return getattr(value, "_id", None) or value.id  # a ref


class NotedTable(ObjectTable):
    """As any table; `log` has what it was told."""

    def __init__(
        self,
        me: bytes,
        send: Callable[[bytes, m.Message], None],
        notify: Callable[[Waiter], None],
        lost: Callable[[bytes, str, str], bytes],
        lineage_limit: int = 1 << 30,
        log: Log | None = None,
    ) -> None:
        log = self.log = log or Log(Record("owner", node_of(me), {"limit": lineage_limit}, proc=me))

        def noted_send(dest: bytes, msg: m.Message) -> None:
            with log.out("send", dest, said(msg)):
                send(dest, msg)

        def noted_notify(waiter: Waiter) -> None:
            with log.out("notify", log.number(waiter)):
                notify(waiter)

        def noted_lost(oid: bytes, reason: str, why: str) -> bytes:
            with log.out("lost", oid, reason, why):
                blob = lost(oid, reason, why)
            log.fact(oid, short(blob))
            return blob

        self._remake: Callable[[Any], None] | None = None
        super().__init__(me, noted_send, notify, noted_lost, lineage_limit)
        self.pins = NotedPins(log, self._raylet, noted_send)
        self.lineage = NotedLineage(log, me, lineage_limit, self._unneeded, self._evicted)
        self.replicas = NotedReplicas(log, noted_send, noted_notify)
        self.dead_nodes = _Set(log, "dead_nodes")
        self.special = _Set(log, "special")
        self.on_free = _OnFree(log)

    @property
    def remake(self) -> Callable[[Any], None] | None:  # type: ignore[override]
        """What submits a kept task once more."""
        return self._remake

    @remake.setter
    def remake(self, method: Callable[[Any], None] | None) -> None:
        if method is None:
            self._remake = None
            return
        self.log.write("remake")

        def noted(task: Any) -> None:
            with self.log.out("remake", task.id):
                method(task)

        self._remake = noted

    def create(self, oid: bytes, task: Any = None) -> Entry:
        """As of any table."""
        entry = NotedEntry.__new__(NotedEntry)
        object.__setattr__(entry, "_log", self.log)
        object.__setattr__(entry, "_oid", oid)

        def make() -> None:
            Entry.__init__(entry, task)
            self.entries[oid] = entry

        self.log.call("create", (oid, task), make)
        return entry

    def bury(self, died: deque[Any]) -> None:
        """As of any table; one by one, as more may die meanwhile."""
        if self.log.inside:
            super().bury(died)
            return
        while died:
            item = died.popleft()
            self.log.call("bury", (item,), partial(ObjectTable.bury, self, deque([item])))

    def _fire(self, entry: Entry, waiters: list[Waiter] | None, failed: bool = False) -> None:
        if waiters:
            with self.log.out("fire", [self.log.number(waiter) for waiter in waiters], failed):
                super()._fire(entry, waiters, failed)
            for waiter in waiters:
                if waiter.count <= 0:
                    self.log.forget(waiter)

    def _why_not(self, entry: Entry) -> str:
        if entry.task is not None and not isinstance(entry.task, str):
            self.log.fact(entry.task.id, state_of(entry.task))
        return super()._why_not(entry)


def _noted(name: str) -> Callable[..., Any]:
    method = getattr(ObjectTable, name)

    def noted(self: NotedTable, *args: Any) -> Any:
        if self.log.inside:
            return method(self, *args)
        result = self.log.call(name, _given(name, args), lambda: method(self, *args))
        if name == "forget":
            self.log.forget(args[1])
        return result

    noted.__name__, noted.__doc__ = name, method.__doc__
    return noted


def _given(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as far as they matter."""
    if name == "arrived":  # whether there is such a list; it may be long
        return args[0], None if args[1] is None else []
    if name == "hold":
        return args[0], opaque(args[1])
    return args


for _name in METHODS:
    setattr(NotedTable, _name, _noted(_name))


def state_of(task: Any) -> tuple[int, int, bool]:
    """What a table looks at in a task."""
    return task.retries, task.attempt, bool(task.cancelled)


class NotedEntry(Entry):
    """An entry whose creator writes into it directly."""

    __slots__ = ("_log", "_oid")
    _log: Log
    _oid: bytes

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if not self._log.inside:
            self._log.write("set", self._oid, name, value)


class NotedMapping(Mapping):
    """A pin whose views are counted by who reads."""

    __slots__ = ("_log", "_oid")

    def __init__(self, log: Log, oid: bytes, mapping: Mapping) -> None:
        object.__setattr__(self, "_log", log)
        object.__setattr__(self, "_oid", oid)
        inside, log.inside = log.inside, True
        self.offset, self.size, self.views = mapping.offset, mapping.size, mapping.views
        log.inside = inside

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        log: Log = self._log  # type: ignore[attr-defined]
        if not log.inside:
            log.write("views", self._oid, value)  # type: ignore[attr-defined]


class NotedPins(Pins):
    """Pins of a noted table."""

    def __init__(self, log: Log, raylet: bytes, send: Callable[[bytes, m.Message], None]) -> None:
        super().__init__(raylet, send)
        self._log = log
        self.gathering = _List(log)
        self.lingering = _Lingering(log)

    def created(self, oid: bytes, entry: Entry, offset: int, size: int) -> None:
        """As of any pins."""
        super().created(oid, entry, offset, size)
        assert entry.mapping is not None
        entry.mapping = NotedMapping(self._log, oid, entry.mapping)

    def give_up(self, size: int) -> None:
        """As of any pins."""
        self._log.call("give_up", (size,), lambda: Pins.give_up(self, size))


class NotedKept(Kept):
    """A kept task; who runs it says so directly."""

    __slots__ = ("_log",)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "running" and not self._log.inside:
            self._log.write("running", self.task.id, value)

    def __init__(self, log: Log, task: Any, args: Any, cost: int) -> None:
        object.__setattr__(self, "_log", log)
        super().__init__(task, args, cost)


class NotedLineage(Lineage):
    """Lineage of a noted table."""

    def __init__(self, log: Log, *args: Any) -> None:
        super().__init__(*args)
        self._log = log

    def made(self, task: Any, args: Any, cost: int) -> Kept:
        """As of any lineage."""
        return NotedKept(self._log, task, args, cost)

    def why_not(self, task: Any) -> str:
        """As of any lineage."""
        self._log.fact(task.id, state_of(task))
        return super().why_not(task)

    def ended(self, kept: Kept) -> None:
        """As of any lineage."""
        self._log.call("ended", (kept.task.id,), lambda: Lineage.ended(self, kept))

    def trim(self) -> None:
        """As of any lineage."""
        self._log.call("trim", (), lambda: Lineage.trim(self))


class NotedReplicas(Replicas):
    """Second copies of a noted table."""

    def __init__(self, log: Log, *args: Any) -> None:
        super().__init__(*args)
        self._log = log

    def hold(self, oid: bytes, entry: Entry, node: int, waiter: Waiter | None = None) -> None:
        """As of any replicas."""
        self._log.call("hold_copy", (oid, entry, node, waiter), lambda: Replicas.hold(self, oid, entry, node, waiter))


class _Set(set[Any]):
    """A set of the table's to which others add."""

    def __init__(self, log: Log, name: str) -> None:
        super().__init__()
        self._log, self._name = log, name

    def add(self, item: Any) -> None:
        super().add(item)
        self._log.write("add", self._name, item)


class _List(list[list[bytes]]):
    """What somebody is about to read."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def append(self, oids: list[bytes]) -> None:
        super().append(oids)
        self._log.write("gather", oids)

    def remove(self, oids: list[bytes]) -> None:
        super().remove(oids)
        self._log.write("gathered", oids)


class _Lingering(dict[bytes, Mapping]):
    """Pins without an entry: buffers that are filled in place are among them."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __setitem__(self, oid: bytes, mapping: Mapping) -> None:
        if not isinstance(mapping, NotedMapping):
            mapping = NotedMapping(self._log, oid, mapping)
        super().__setitem__(oid, mapping)
        self._log.write("linger", oid, mapping)

    def pop(self, oid: bytes, *default: Any) -> Any:
        self._log.write("unlinger", oid)
        return super().pop(oid, *default)


class _OnFree(dict[bytes, Callable[[], None]]):
    """Who wants to know of an object's end."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def __setitem__(self, oid: bytes, call: Callable[[], None]) -> None:
        def noted() -> None:
            with self._log.out("on_free", oid):
                call()

        super().__setitem__(oid, noted)
        self._log.write("on_free", oid)

    def pop(self, oid: bytes, *default: Any) -> Any:
        self._log.write("off_free", oid)
        return super().pop(oid, *default)
