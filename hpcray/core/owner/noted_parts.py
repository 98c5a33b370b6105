"""The parts of a table that notes what it is told: whoever writes into them directly is heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.core.owner.entries import Entry, Mapping, Waiter
from hpcray.core.owner.lineage import Kept, Lineage
from hpcray.core.owner.notes import Log, said
from hpcray.core.owner.pins import Pins, Visits
from hpcray.core.owner.replicas import Replicas
from hpcray.wire import messages as m


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
    _log: Log
    _oid: bytes

    def __init__(self, log: Log, oid: bytes, mapping: Mapping) -> None:
        object.__setattr__(self, "_log", log)
        object.__setattr__(self, "_oid", oid)
        inside, log.inside = log.inside, True
        self.offset, self.size, self.node, self.views = mapping.offset, mapping.size, mapping.node, mapping.views
        log.inside = inside

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if not self._log.inside:
            self._log.write("views", self._oid, value)


class NotedPins(Pins):
    """Pins of a noted table."""

    def __init__(self, log: Log, *args: Any) -> None:
        super().__init__(*args)
        self._log = log
        self.gathering = NotedList(log)
        self.lingering = Lingering(log)

    def created(self, oid: bytes, entry: Entry, offset: int, size: int, node: int) -> None:
        """As of any pins."""
        super().created(oid, entry, offset, size, node)
        assert entry.mapping is not None
        entry.mapping = NotedMapping(self._log, oid, entry.mapping)

    def give_up(self, size: int, node: int) -> None:
        """As of any pins."""
        self._log.call("give_up", (size, node), lambda: Pins.give_up(self, size, node))


class NotedVisits:
    """What a noted table says to its neighbours' stores."""

    def __init__(self, log: Log, visits: Visits) -> None:
        self._log, self._visits = log, visits

    def meet(self, node: int) -> None:
        """As of any visits."""
        with self._log.out("meet", node):
            self._visits.meet(node)

    def send(self, node: int, msg: m.Message) -> None:
        """As of any visits."""
        with self._log.out("tell", node, said(msg)):
            self._visits.send(node, msg)

    def leave(self, node: int) -> None:
        """As of any visits."""
        with self._log.out("leave", node):
            self._visits.leave(node)


class NotedKept(Kept):
    """A kept task; who runs it says so directly."""

    __slots__ = ("_log",)
    _log: Log

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

    def decided(self, oid: bytes, node: int) -> str:
        """As of any replicas."""
        waiter = self._waiters.get((oid, node))
        if waiter is None:
            return super().decided(oid, node)
        self._log.call("copy_decided", (oid, node), lambda: Replicas.decided(self, oid, node))
        self._log.forget(waiter)
        return ""


class NotedSet(set[Any]):
    """A set of the table's to which others add."""

    def __init__(self, log: Log, name: str) -> None:
        super().__init__()
        self._log, self._name = log, name

    def add(self, item: Any) -> None:
        super().add(item)
        self._log.write("add", self._name, item)


class NotedList(list[list[bytes]]):
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


class Lingering(dict[bytes, Mapping]):
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


class OnFree(dict[bytes, Callable[[], None]]):
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
