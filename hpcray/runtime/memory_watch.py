"""A raylet's eye on the memory of its node: ends a worker before the kernel ends any process, the raylet among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hpcray.base.deaths import LOW_MEMORY
from hpcray.core.memory import Candidate, Guard, choose, explain
from hpcray.core.pool import BUSY, IDLE, Worker
from hpcray.host.memory import MemoryGauge, Usage
from hpcray.host.procfs import group_memory
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.raylet import Raylet

_NEAR = 0.85
_HASTE = 5
"""Near the threshold it looks so many times as often."""
_FAR = 0.5
"""Where not even so much of the threshold is reached it looks half as often: an idle job costs nothing."""
_ASK_PERIOD = 1.0
_ANSWER_TIME = 0.1
"""When so much of the threshold is reached, those who have leases here are asked what may be run again, from time to
time. When it is passed they have this long to say it."""


class MemoryWatch:
    """See the module. Its period, threshold and limit are settings.

    Args:
        raylet: its loop brings it round, its processes are told to die.
    """

    def __init__(self, raylet: Raylet) -> None:
        config = raylet.seat.config
        self._raylet = raylet
        self._threshold = config.memory_usage_threshold
        self._period = config.memory_monitor_period
        self._guard = Guard(self._threshold)
        self._gauge = MemoryGauge(config.memory_limit)
        self._number = 0
        self._asked = -_ASK_PERIOD
        self._awaiting: set[bytes] = set()
        self._told: dict[bytes, tuple[str, bool]] = {}
        self._since: dict[bytes, tuple[bytes, float]] = {}
        self._last = Usage(0, 0, "")
        self._kernel_kills = self._gauge.kernel_kills()
        self.killed = 0
        raylet.handlers[m.Retries] = self._answered
        raylet.processes.why_killed = self._why_killed
        if self._threshold and self._period:
            raylet.loop.call_at(raylet.loop.now + self._period, self._look)

    def snapshot(self) -> dict[str, Any]:
        """What was seen last: "used", "limit" (bytes), "source"; "killed": workers that were ended."""
        return {**self._last._asdict(), "killed": self.killed}

    def _why_killed(self) -> str:
        """A worker was killed, and not by us: perhaps the kernel was faster."""
        kills = self._gauge.kernel_kills()
        before, self._kernel_kills = self._kernel_kills, kills
        if kills <= before:
            return ""
        raylet = self._raylet
        return (
            f"{LOW_MEMORY}\nThe kernel ended the worker: a cgroup of node {raylet.node} (host {raylet.seat.info.host}) "
            f"had reached its limit, faster than its memory watcher looks (every {self._period:g} s); hint: "
            "HPCRAY_MEMORY_USAGE_THRESHOLD lower, or more memory for the job"
        )

    def _look(self) -> None:
        loop = self._raylet.loop
        if self._raylet.processes.leaving:
            return
        self._note_claims()
        self._last = usage = self._read()
        share = usage.used / (self._threshold * usage.limit) if usage.limit else 0.0
        near = share > _NEAR
        loop.call_at(loop.now + self._period * (1 / _HASTE if near else 2 if share < _FAR else 1), self._look)
        if near and loop.now - self._asked >= _ASK_PERIOD:
            self._ask()
        if not self._guard.short(loop.now, usage.used, usage.limit):
            return
        if self._guard.critical(usage.used, usage.limit) or not self._awaiting:
            self._act()
        else:
            number = self._number
            loop.call_at(loop.now + _ANSWER_TIME, lambda: self._act() if self._number == number else None)

    def _read(self) -> Usage:
        raylet = self._raylet
        pids = [link.pid for link in raylet.router.links.values()]
        return self._gauge.read(pids, raylet.store.high_water)

    def _note_claims(self) -> None:
        """Since when each worker does what it does; to the next look exactly."""
        now, workers = self._raylet.loop.now, self._raylet.core.pool.workers
        for proc in [proc for proc in self._since if proc not in workers]:
            del self._since[proc]
            self._told.pop(proc, None)
            self._guard.gone(proc)
        for proc, worker in workers.items():
            ident = worker.claim.ident if worker.claim is not None else b""
            if self._since.get(proc, (None, 0.0))[0] != ident:
                self._since[proc] = (ident, now)

    def _ask(self) -> None:
        """Only who submitted a task knows whether it may run again."""
        self._number += 1
        self._asked = self._raylet.loop.now
        holders: dict[bytes, list[bytes]] = {}
        for worker in self._raylet.core.pool.workers.values():
            claim = worker.claim
            if worker.state == BUSY and claim is not None and claim.spec is None and claim.holder:
                holders.setdefault(claim.holder, []).append(worker.proc)
        self._awaiting = set(holders)
        for holder, workers in holders.items():
            self._raylet.router.send(holder, m.AskRetries(self._number, workers))

    def _answered(self, now: float, src: bytes, msg: m.Retries) -> Iterable[Any]:
        if msg.number == self._number:
            self._told |= {proc: (name, retriable) for proc, name, retriable in msg.rows}
            self._awaiting.discard(src)
            if not self._awaiting:
                self._act()
        return ()

    def _act(self) -> None:
        self._awaiting = set()
        self._number += 1
        raylet = self._raylet
        usage = self._read()
        if not self._guard.short(raylet.loop.now, usage.used, usage.limit):
            return
        workers = [one for one in raylet.core.pool.workers.values() if one.pid and one.state in (IDLE, BUSY)]
        used = group_memory([worker.pid for worker in workers])
        candidates = [self._candidate(worker, used[worker.pid]) for worker in workers]
        victim = choose(candidates)
        if victim is None:
            return
        where = f"node {raylet.node} (host {raylet.seat.info.host}, limit of {usage.source})"
        reason = explain(victim, candidates, where, usage.used, usage.limit, self._threshold)
        self._guard.ended(raylet.loop.now, victim.worker)
        self.killed += 1
        raylet.say("\n".join(reason.splitlines()[1:2]))
        raylet.processes.kill(victim.worker, reason)

    def _candidate(self, worker: Worker, used: int) -> Candidate:
        claim = worker.claim
        name, retriable = "", True
        if claim is not None and claim.spec is not None:
            name, retriable = f"actor {claim.spec.class_name}", claim.spec.max_restarts != 0
        elif claim is not None:
            name, retriable = self._told.get(worker.proc, ("a task", True))
        return Candidate(worker.proc, worker.pid, used, self._since.get(worker.proc, (b"", 0.0))[1], retriable, name)
