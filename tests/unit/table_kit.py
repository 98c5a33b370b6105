"""One object table, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcray.common.ids import FIRST_RETURN, PUT_INDEX, make_proc, raylet_of
from hpcray.core.core_worker.object_recovery import OWNER_DIED
from hpcray.core.core_worker.object_table import INLINE, ObjectEntry, ObjectTable, Waiter
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import ERROR

ME, PEER, THIRD = make_proc(1, 5), make_proc(1, 6), make_proc(2, 7)
RAYLET = raylet_of(1)
SIZE = 1 << 20


def put_id(counter: int = 1, owner: bytes = ME) -> bytes:
    return owner + counter.to_bytes(5, "big") + PUT_INDEX


def return_id(counter: int = 1, owner: bytes = ME) -> bytes:
    return owner + counter.to_bytes(5, "big") + FIRST_RETURN


def error(entry: ObjectEntry) -> str:
    """The text of an object that is an error."""
    assert entry.state == INLINE
    return entry.value.decode()


class Table(ObjectTable):
    """An object table of process ME that keeps what it sends."""

    def __init__(self, remake: Callable[[Any], None] | None = None) -> None:
        self.out: list[tuple[bytes, m.Message]] = []
        self.fired: list[Waiter] = []
        super().__init__(
            ME,
            lambda dest, msg: self.out.append((dest, msg)),
            self.fired.append,
            lambda oid, reason, why: f"{'died' if why == OWNER_DIED else 'lost'}: {reason}".encode() + bytes([ERROR]),
            remake=remake,
        )

    def said(self) -> list[tuple[bytes, m.Message]]:
        """What was sent since the last look."""
        out, self.out = self.out, []
        return out

    def owned(
        self, oid: bytes, value: bytes = b"v\0", local: int = 1, contained: list[Any] | None = None
    ) -> ObjectEntry:
        self.create(oid)
        entry = self.entries[oid]
        entry.local = local
        assert self.set_inline(oid, value, contained)
        return entry

    def stored(self, oid: bytes, node: int = 1, local: int = 1) -> ObjectEntry:
        self.create(oid)
        entry = self.entries[oid]
        entry.local = local
        assert self.set_stored(oid, SIZE, node)
        return entry

    def borrow(self, oid: bytes, size: int = 0) -> ObjectEntry:
        """Hold a ref of somebody else's, registered and acknowledged; with a size, known to be stored on node 2."""
        self.refs.ref_deserialized(oid, None)
        self.refs.on_borrow_ack(m.BorrowAck(self.refs._seq))
        if size:
            self.set_locations(oid, size, [2])
        self.said()
        return self.entries[oid]


class Task:
    """As much of a task as lineage looks at."""

    def __init__(self, number: int, retries: int = 3) -> None:
        self.id = return_id(number)[:-3]
        self.retries = retries
        self.attempt = 0
        self.cancelled = False


class Owner(Table):
    """A table whose lost objects are made again by a list of tasks that the test looks at."""

    def __init__(self) -> None:
        self.again: list[Any] = []
        super().__init__(self.remake)

    def remake(self, task: Any) -> None:
        self.again.append(task)

    def made(
        self, number: int = 1, args: tuple[bytes, ...] = (), node: int = 2, retries: int = 3, size: int = 0
    ) -> Any:
        """The large return of a task is there, and one ref to it."""
        oid, task = return_id(number), Task(number, retries)
        self.create(oid, task)
        self.recovery.keep_task(task, [oid], args, size)
        self.set_stored(oid, SIZE, node)
        return task
