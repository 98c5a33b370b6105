"""The same inputs again for an object table that was noted (`noted`), and what it decides now."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import msgspec

from hpcray.core.owner.entries import Mapping, Waiter
from hpcray.core.owner.lineage import Lineage
from hpcray.core.owner.noted import METHODS, NotedTable
from hpcray.core.owner.notes import Frame, Log, Opaque
from hpcray.core.owner.pins import NoVisits, Pins
from hpcray.core.owner.replicas import Replicas
from hpcray.core.owner.table import ObjectTable
from hpcray.core.recording import SHOWN, Difference, Input, Record, Replay
from hpcray.wire import messages as m
from hpcray.wire.serialization import ERROR

_NEVER = 1 << 60
"""A waiter that counts down from here wakes nobody: what would have come of it is in the record."""


class _Recipe:
    """A task, as far as a table looks at it."""

    def __init__(self, ident: bytes) -> None:
        self.id = ident
        self.retries, self.attempt, self.cancelled = -1, 0, False


class _Given:
    """One input and those that came while it was dealt with, by the effect during which they came."""

    def __init__(self, step: int, given: Input) -> None:
        self.step, self.given = step, given
        self.children: dict[bytes, list[_Given]] = defaultdict(list)
        self.facts: dict[bytes, deque[Any]] = defaultdict(deque)
        for key, value in given.facts:
            self.facts[key].append(value)


def _tree(inputs: list[Input]) -> list[_Given]:
    """The inputs that came by themselves, with all others under them."""
    top: list[_Given] = []
    path: list[_Given] = []
    for step, given in enumerate(inputs):
        node = _Given(step, given)
        del path[given.depth :]
        if path:
            path[-1].children[given.anchor].append(node)
        else:
            top.append(node)
        path.append(node)
    return top


class _Stop(Exception):
    """Enough differences."""


class _Again(Log):
    """Stands where the log stood: it gives inputs when their time comes, instead of noting them."""

    def __init__(self, record: Record, done: Replay, most: int) -> None:
        super().__init__(Record(record.core, record.node, record.made, proc=record.proc))
        self._done, self._most = done, most
        self._now: list[_Given] = []
        self._tasks: dict[bytes, _Recipe] = {}
        self._waiting: dict[int, Waiter] = {}
        self.table = NotedTable(
            record.proc, lambda dest, msg: None, lambda waiter: None, self._lost, record.made["limit"], self
        )

    def play(self, node: _Given) -> None:
        """Give one input, with all that belongs to it."""
        given = node.given
        packed = msgspec.msgpack.decode(given.args)
        args = [self._object(value) for value in packed]
        self._now.append(node)
        done = Input(given.method, given.args, b"", "")
        try:
            self._once(done, lambda: _apply(self.table, given.method, args))
            for rest in list(node.children.values()):
                for child in rest:
                    self.play(child)  # what would have caused it does not happen any more; it did
        finally:
            self._now.pop()
        self._done.steps += 1
        if done.digest != given.digest:
            found = Difference(node.step, given.method, repr(packed)[:SHOWN], given.effects, done.effects)
            self._done.differences.append(found)
            if len(self._done.differences) >= self._most:
                raise _Stop

    def _once(self, done: Input, method: Callable[[], Any]) -> None:
        self._frame = Frame(done)
        try:
            self.call(done.method, (), method)
        except _Stop:
            raise
        except Exception:
            pass  # it is among the effects

    def _begin(self, name: str, args: tuple[Any, ...]) -> Frame | None:
        return self._frame

    def effect(self) -> None:
        node = self._now[-1]
        for child in node.children.pop(self._frames[-1].anchor, ()):
            self.play(child)

    def fact(self, key: bytes, value: Any) -> None:
        facts = self._now[-1].facts[key] if self._now else None
        if facts:
            then = facts.popleft()
            task = self._tasks.get(key)
            if task is not None:
                task.retries, task.attempt, task.cancelled = then

    def number(self, waiter: Waiter) -> int:
        return next((number for number, known in self._waiting.items() if known is waiter), 0)

    def _lost(self, oid: bytes, reason: str, why: str) -> bytes:
        facts = self._now[-1].facts[oid]
        return facts[0] if facts else bytes([ERROR])

    def _object(self, value: Any) -> Any:
        """What was written down, as the table takes it."""
        if isinstance(value, list):
            return [self._object(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        if kind == "waiter":
            waiter = self._waiting.get(what)
            if waiter is None:
                waiter = self._waiting[what] = Waiter(_NEVER)
            return waiter
        if kind == "task":
            return self._tasks.setdefault(what, _Recipe(what))
        if kind == "mapping":
            mapping = Mapping(*what[:3])
            mapping.views = what[3]
            return mapping
        if kind == "message":
            return m.decode(what)[0]
        return Opaque(*what) if kind == "opaque" else None


def _apply(table: NotedTable, name: str, args: list[Any]) -> Any:
    """Tell the table what somebody told it."""
    if name in METHODS:
        if name == "settle_lost":
            args[1] = table.entries[args[0]]
        return getattr(ObjectTable, name)(table, *args)
    return _WRITES[name](table, *args)


def _set_entry(table: NotedTable, oid: bytes, name: str, value: Any) -> None:
    setattr(table.entries[oid], name, value)


def _set_views(table: NotedTable, oid: bytes, views: int) -> None:
    mapping = table.entries[oid].mapping
    assert mapping is not None
    mapping.views = views


def _set_remake(table: NotedTable) -> None:
    table.remake = lambda task: None


def _hold_copy(table: NotedTable, oid: bytes, entry: Any, node: int, waiter: Any) -> None:
    Replicas.hold(table.replicas, oid, table.entries[oid], node, waiter)


def _linger(table: NotedTable, oid: bytes, mapping: Any) -> None:
    table.pins.lingering[oid] = mapping


def _create(table: NotedTable, oid: bytes, task: Any) -> None:
    table.create(oid, task)


def _bury(table: NotedTable, item: Any) -> None:
    table.bury(deque([tuple(item) if isinstance(item, list) else item]))


_WRITES: dict[str, Callable[..., Any]] = {
    "bury": _bury,
    "create": _create,
    "set": _set_entry,
    "views": _set_views,
    "remake": _set_remake,
    "running": lambda table, task, value: setattr(table.lineage.kept[task], "running", value),
    "ended": lambda table, task: Lineage.ended(table.lineage, table.lineage.kept[task]),
    "trim": lambda table: Lineage.trim(table.lineage),
    "give_up": lambda table, size, node: Pins.give_up(table.pins, size, node),
    "visit": lambda table, nodes: table.visit(nodes, NoVisits()),
    "gather": lambda table, oids: table.pins.gathering.append(oids),
    "gathered": lambda table, oids: table.pins.gathering.remove(oids),
    "linger": _linger,
    "unlinger": lambda table, oid: table.pins.lingering.pop(oid, None),
    "add": lambda table, name, item: getattr(table, name).add(item),
    "on_free": lambda table, oid: table.on_free.__setitem__(oid, lambda: None),
    "off_free": lambda table, oid: table.on_free.pop(oid, None),
    "hold_copy": _hold_copy,
    "copy_decided": lambda table, oid, node: Replicas.decided(table.replicas, oid, node),
}


def replay_owner(record: Record, done: Replay, most: int) -> None:
    """Make the table again and tell it the same. Differences, and the number of inputs, go into `done`."""
    again = _Again(record, done, most)
    try:
        for node in _tree(record.inputs):
            again.play(node)
    except _Stop:
        pass
