"""`wait`. A program that waits for its refs one by one calls it each time with the list that the last call has left
over: that list is recognized, and as a rule only its first refs are looked at. What has to be done for every ref is
done by C loops, and what has been requested of the table stays requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, STORED, Waiter
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_refs import ObjectRef

_NOT_URGENT = 1
"""Priority of objects that `wait` needs: behind those that a `get` needs."""
_FIRST_LOOK, _GROWTH = 16, 8
"""Refs that are looked at first, and how many times as many each time after that: as a rule one of the first is
ready."""
_LEFT_KEPT = 0.05
"""Seconds after which the list of the last call is forgotten, as its refs live that long, or up to twice as long."""
_EXISTS = bytes([0, 1, 1, 1]).ljust(256, b"\1")
"""Translation table from states of objects to 1 if the object exists, else 0."""
_id_of, _state_of, _waiters_of = attrgetter("_id"), attrgetter("state"), attrgetter("extra.ready_waiters")
Refs = list[ObjectRef[Any]]


class WaitManager:
    """The calls of `wait` of one process.

    Its waiter for objects that do not exist yet stays at them after a call: the next one adds what is new. It remembers
    at which list of waiters of each object it is, as an object may come, be lost, and be awaited again.

    Args:
        unknown: makes the error for an id that this process does not know.
    """

    def __init__(self, context: CoreWorkerContext, unknown: Callable[[bytes], Exception]) -> None:
        self._context = context
        self._unknown = unknown
        self._engine = context.engine
        self._table = context.table
        self._entries = context.table.entries
        self._waiter = Waiter(0)
        self._at: dict[bytes, list[Waiter]] = {}
        self._in_use = bool(context.config.record)  # a record has the counts of waiters from their beginning alone
        self._left: Refs | None = None  # what the last call has left over
        self._left_ids: list[bytes] = []
        self._left_used = self._forgetting = False

    def wait(self, refs: Refs, num_returns: int, timeout: float | None, fetch_local: bool) -> tuple[Refs, Refs]:
        """Wait until `num_returns` of the refs are ready; both lists keep the order of `refs`.

        Args:
            refs: distinct; the list is not changed.
        """
        with self._engine.lock:
            found = self._wait(refs.copy(), list(map(_id_of, refs)), num_returns, timeout, fetch_local)
        if self._engine.pending_calls:
            self._engine.run_pending_calls()
        return found

    def wait_again(
        self, refs: Refs, num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[Refs, Refs] | None:
        """`wait`, if these refs are those which the last call has left over; else None."""
        with self._engine.lock:
            left, self._left = self._left, None
            if left is None or left != refs or num_returns > len(left):
                return None
            found = self._wait(left, self._left_ids, num_returns, timeout, fetch_local)
        if self._engine.pending_calls:
            self._engine.run_pending_calls()
        return found

    def _wait(
        self, refs: Refs, oids: list[bytes], num_returns: int, timeout: float | None, fetch_local: bool
    ) -> tuple[Refs, Refs]:
        """`wait` with the lock held. Both lists are changed, and kept."""
        deadline = None if timeout is None else monotonic() + timeout
        self._context.check_alive()
        self._context.drain()
        if self._table.hints.unread:
            self._table.hints.read(oids)
        ready = self._ready(oids, num_returns, fetch_local)
        if len(ready) < num_returns:
            if self._in_use or (fetch_local and len(ready) + 1 < num_returns):
                ready = self._wait_once(oids, ready, num_returns, deadline, fetch_local)
            else:
                self._in_use = True
                try:
                    ready = self._wait_again(oids, ready, num_returns, deadline, fetch_local)
                finally:
                    self._in_use = False
                    self._waiter.count = 0
        else:
            self._engine.flush()
        if len(ready) > _FIRST_LOOK:
            flags = bytearray(len(refs))
            for at in ready:
                flags[at] = 1
            done, left = list(compress(refs, flags)), flags.translate(b"\1\0".ljust(256, b"\0"))
            refs, oids = list(compress(refs, left)), list(compress(oids, left))
        else:
            done = [refs[at] for at in ready]
            for at in reversed(ready):
                del refs[at], oids[at]
        self._keep(refs, oids)
        return done, refs.copy()

    def _keep(self, left: Refs, oids: list[bytes]) -> None:
        """Remember what a call has left over, for a while: its refs must not live on because of that."""
        self._left, self._left_ids, self._left_used = (left or None), oids, True
        if left and not self._forgetting:
            self._forgetting = True
            self._engine.add_timer(monotonic() + _LEFT_KEPT, self._forget_left)

    def _forget_left(self, now: float) -> None:
        self._forgetting = self._left_used and self._left is not None
        if self._forgetting:
            self._left_used = False
            self._engine.add_timer(now + _LEFT_KEPT, self._forget_left)
        else:
            self._left = None

    def _ready(self, oids: list[bytes], limit: int, local: bool) -> list[int]:
        """Positions of the first `limit` objects that are ready (`local`: whose value is here)."""
        found: list[int] = []
        begin, end = 0, _FIRST_LOOK
        while begin < len(oids):
            flags = self._flags(oids if end >= len(oids) and not begin else oids[begin:end], local)
            at = flags.find(1)
            while at >= 0:
                found.append(begin + at)
                if len(found) == limit:
                    return found
                at = flags.find(1, at + 1)
            begin, end = end, end * _GROWTH
        return found

    def _flags(self, oids: list[bytes], local: bool) -> bytes:
        """For each object 1 if it is ready, else 0."""
        try:
            states = bytes(map(_state_of, map(self._entries.__getitem__, oids)))
        except KeyError as unknown:
            raise self._unknown(unknown.args[0]) from None
        if local and (STORED in states or LINEAGE_ONLY in states):
            entries, pins = self._entries, self._table.pins
            odd = {*pins.refused, *pins.files}
            return bytes(
                state == INLINE or (state != PENDING and (entries[oid].mapping is not None or oid in odd))
                for oid, state in zip(oids, states, strict=True)
            )
        return states.translate(_EXISTS)

    def _wait_once(
        self, oids: list[bytes], ready: list[int], num_returns: int, deadline: float | None, local: bool
    ) -> list[int]:
        """Wait with a waiter of this call alone."""
        waiter = Waiter(num_returns - len(ready))
        there = set(ready)
        missing = [oid for at, oid in enumerate(oids) if at not in there]
        for oid in missing:
            if local:
                self._table.wait_local(oid, waiter, _NOT_URGENT)
            else:
                self._table.wait_ready(oid, waiter)
        enough = self._context.block(waiter, deadline)
        self._table.remove_waiter(missing, waiter)
        ready = self._ready(oids, num_returns, local)
        if enough and len(ready) < num_returns:  # they came, but not all of them had room here together
            ready = self._ready(oids, num_returns, False)
        return ready

    def _wait_again(
        self, oids: list[bytes], ready: list[int], num_returns: int, deadline: float | None, local: bool
    ) -> list[int]:
        """Wait with the waiter that stays. local: one object is missing, and the first to come here will do."""
        waiter, elsewhere = self._waiter, list[bytes]()
        while True:
            waiter.count = num_returns - len(ready)
            states = bytes(map(_state_of, map(self._entries.__getitem__, oids)))
            self._await_creation(list(compress(oids, states.translate(_PENDING))))
            before, elsewhere = elsewhere, []
            if local and states.count(PENDING) < len(states):
                there = set(ready)
                elsewhere = [oid for at, oid in enumerate(oids) if states[at] != PENDING and at not in there]
                for oid in elsewhere:
                    if self._table.wait_local(oid, waiter, _NOT_URGENT):
                        waiter.count -= 1
            try:
                enough = self._context.block(waiter, deadline)
            finally:
                if elsewhere:
                    self._table.remove_waiter(elsewhere, waiter)
            ready = self._ready(oids, num_returns, local)
            if len(ready) >= num_returns or not enough:
                return ready
            if elsewhere and elsewhere == before:  # one came, but there was no room for it for long
                return self._ready(oids, num_returns, False)

    def _await_creation(self, oids: list[bytes]) -> None:
        """Have the waiter count down when one of these objects is made, and of no other."""
        at, waiter = self._at, self._waiter
        lists = map(_waiters_of, map(self._entries.__getitem__, oids))
        for oid in list(compress(oids, map(is_not, lists, map(at.get, oids, repeat(0))))):
            self._table.wait_ready(oid, waiter)
            at[oid] = self._entries[oid].ready_waiters or []
        if len(at) > len(oids):
            self._forget(at.keys() - oids)

    def _forget(self, oids: Iterable[bytes]) -> None:
        for oid in oids:
            del self._at[oid]
        self._table.remove_waiter(oids, self._waiter)


_PENDING = bytes([1]).ljust(256, b"\0")
"""Translation table from states of objects to 1 if the object is still pending, else 0."""
