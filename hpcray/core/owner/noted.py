"""An object table that notes everything it is told and what it answers (`HPCRAY_RECORD=1`), for `hpcray dump`.

Who uses a table calls its methods and, where every call counts, writes a field of it directly. `NotedTable` sees both;
a plain `ObjectTable` knows nothing of this file, so a process that is not recorded pays nothing.

A table calls out while it is told something: it sends, wakes waiters, has a task run again. Who is called may tell it
more before that returns, so inputs nest, and each notes the effect of the outer one during which it came. Values of
objects are noted by a digest: a table passes them on and looks only at their last byte.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hpcray.base.ids import node_of
from hpcray.core.owner.entries import Entry, Waiter
from hpcray.core.owner.noted_parts import (
    NotedEntry,
    NotedLineage,
    NotedPins,
    NotedReplicas,
    NotedSet,
    NotedVisits,
    OnFree,
    state_of,
)
from hpcray.core.owner.notes import Log, opaque, said, short
from hpcray.core.owner.pins import Visits
from hpcray.core.owner.table import ObjectTable
from hpcray.core.recording import Record
from hpcray.wire import messages as m

METHODS = (
    "abandon", "arrived", "adopt", "release", "view_died", "discard", "unmap", "set_inline", "set_stored",
    "created_here", "located", "told", "left_behind", "want_ready", "want_local", "forget", "fail_all", "process_died",
    "node_died", "on_opened", "on_store_error", "on_object_get", "on_object_ready", "on_object_lost",
    "on_add_location", "on_replica", "hold", "keep", "give", "take_back", "borrowed_by", "on_borrow_ack",
    "on_borrow_ask", "on_borrow_add", "on_borrow_take", "on_borrow_drop", "on_borrow_end", "settle_lost",
    "keep_task", "take_again", "on_disk", "begin_file", "end_file", "file_failed", "met", "unmet",
)  # fmt: skip


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
        self.lineage = NotedLineage(log, me, lineage_limit, self._unneeded, self._evicted)
        self.replicas = NotedReplicas(log, noted_send, noted_notify)
        self.dead_nodes = NotedSet(log, "dead_nodes")
        self.pins = NotedPins(log, self._node, noted_send, self.dead_nodes)
        self.special = NotedSet(log, "special")
        self.on_free = OnFree(log)

    @property
    def remake(self) -> Callable[[Any], None] | None:
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

    def visit(self, nodes: Iterable[int], visits: Visits) -> None:
        """As of any table."""
        near = sorted(nodes)
        self.log.call("visit", (near,), lambda: ObjectTable.visit(self, near, NotedVisits(self.log, visits)))

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
