"""`get`s that wait for long: a report by themselves after a minute, and of all of them when the user asks (SIGUSR2).

A `get` pays nothing for it: the engine's background thread looks from time to time at the lists that `get` keeps of
what it gathers, and a list that it has seen before has waited.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_LOOKS = 4
_LONGEST_PERIOD = 15.0
_MOST = 3


class _Wait:
    """A `get` that waits. since: when it was first seen. due: when it is told of next."""

    __slots__ = ("due", "oids", "since")

    def __init__(self, oids: list[bytes], since: float, due: float) -> None:
        self.oids, self.since, self.due = oids, since, due


class LongWaits:
    """The waiting `get`s of one process.

    Args:
        after: seconds after which a driver's `get` is reported; 0: never.
    """

    def __init__(self, process: Process, after: float) -> None:
        self._process = process
        self._after = after
        self._seen: dict[int, _Wait] = {}
        engine = process.engine
        period = min(after / _LOOKS, _LONGEST_PERIOD) if after else _LONGEST_PERIOD
        engine.look_every(period, self._look)

    def seconds(self, oids: list[bytes]) -> float:
        """How long this `get` has waited, as far as that was noted (lock held)."""
        wait = self._seen.get(id(oids))
        return monotonic() - wait.since if wait is not None and wait.oids is oids else 0.0

    def report_soon(self) -> None:
        """Tell on stderr what this process waits for. Returns at once; safe in a signal handler."""
        self._process.engine.later(lambda: self._start(None))

    def _look(self) -> None:
        now = monotonic()
        due: list[_Wait] = []
        with self._process.engine.lock:
            waiting = {id(oids): oids for oids in self._process.table.pins.gathering}
            gone = [key for key, wait in self._seen.items() if waiting.get(key) is not wait.oids]
            for key in gone:
                del self._seen[key]
            for key, oids in waiting.items():
                wait = self._seen.setdefault(key, _Wait(oids, now, now + self._after))
                if self._after and now >= wait.due:
                    wait.due = now + 2 * (now - wait.since)
                    due.append(wait)
        # A task that waits for others is no news; what a driver waits for is, and it leads to them.
        if due and self._process.kind != "worker":
            self._start(due)

    def _start(self, due: list[_Wait] | None) -> None:
        threading.Thread(target=self._report, args=(due,), name="hpcray-report", daemon=True).start()

    def _report(self, due: list[_Wait] | None) -> None:
        """Runs in a thread of its own: it asks others, and waits for them."""
        from hpcray.runtime.why import Why, show_lines

        process = self._process
        with process.engine.lock:
            if process.dead is not None:
                return
            told = [(self.seconds(oids), list(oids)) for oids in process.table.pins.gathering] if due is None else [
                (self.seconds(wait.oids), list(wait.oids)) for wait in due
            ]  # fmt: skip
            entries = process.table.entries
            told = [(seconds, [i for i in oids if i in entries and not entries[i].available]) for seconds, oids in told]
        told = [(seconds, oids) for seconds, oids in told if oids]
        lines = []
        why = Why(process)
        for seconds, oids in told:
            count = "1 object" if len(oids) == 1 else f"{len(oids)} objects"
            known = f"{seconds:.0f} s" if seconds else "a while"
            lines.append(f"hpcray: a get has waited {known} for {count}:")
            lines += [f"  {line}" for oid in oids[:_MOST] for line in show_lines(why.explain(oid))]
            if len(oids) > _MOST:
                lines.append(f"  and {len(oids) - _MOST} more; hint: hpcray why")
        if due is None and not lines:
            lines.append("hpcray: no get waits in this process; hint: `hpcray stack` shows what every process does")
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)
