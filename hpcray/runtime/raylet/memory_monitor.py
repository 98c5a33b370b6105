"""The memory monitor of a raylet: it ends a worker before the kernel ends any process, such as the raylet."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hpcray.core.object_store.object_store import ObjectStore
from hpcray.core.raylet.worker_pool import (
    BUSY,
    IDLE,
    LEAVING,
    Candidate,
    WorkerKillingPolicy,
    WorkerPool,
    WorkerProcess,
    choose_victim,
    explain_kill,
)
from hpcray.platform.resource_limits import MemoryGauge, MemoryUsage, group_memory
from hpcray.protocol import messages as m
from hpcray.runtime.raylet.event_loop import EventLoop
from hpcray.runtime.raylet.local_processes import LocalProcesses, NodeContext
from hpcray.runtime.raylet.router import Router

_NEAR = 0.85
"""From this share of the threshold on, memory is read more often, and lease holders list their retriable tasks."""
_NEAR_SPEEDUP = 5
_FAR = 0.5
"""Below this share of the threshold, memory is read half as often: an idle job costs nothing."""
_FAR_SLACK = 0.25
"""There it may be read by this share of the period later, in a turn that has another reason."""
_LIST_INTERVAL = 1.0
_REPLY_TIMEOUT = 0.1
"""Seconds that the holders of leases have to reply when the threshold is passed."""


class MemoryMonitor:
    """Reads the memory of the node periodically. Period, threshold and limit are settings.

    Args:
        ask_to_leave: asks an idle worker to exit, unless it owns objects (`LocalLeaseManager.ask_worker_to_leave`).

    Attributes:
        killed: number of workers that lack of memory has ended.
    """

    def __init__(
        self,
        context: NodeContext,
        loop: EventLoop,
        router: Router,
        processes: LocalProcesses,
        pool: WorkerPool,
        store: ObjectStore,
        log: Callable[[str], None],
        ask_to_leave: Callable[[bytes], None],
    ) -> None:
        config = context.config
        self._node = context.info.index
        self._host = context.info.host
        self._loop = loop
        self._router = router
        self._processes = processes
        self._pool = pool
        self._store = store
        self._log = log
        self._ask_to_leave = ask_to_leave
        self._asked: set[bytes] = set()
        self._threshold = config.memory_usage_threshold
        self._period = config.memory_monitor_period
        self._policy = WorkerKillingPolicy(self._threshold)
        self._gauge = MemoryGauge(config.memory_limit)
        self._number = 0
        self._listed_at = -_LIST_INTERVAL
        self._awaiting: set[bytes] = set()
        self._retriable: dict[bytes, tuple[str, bool]] = {}
        self._since: dict[bytes, tuple[bytes, float]] = {}
        self._last = MemoryUsage(0, 0, "")
        self._kernel_kills = self._gauge.kernel_kills()
        self.killed = 0
        if self._threshold and self._period:
            loop.call_at(loop.now + self._period, self._tick)

    def snapshot(self) -> dict[str, Any]:
        """Return the last reading: "used", "limit" (bytes), "source"; and "killed": workers that it has ended."""
        return {**self._last._asdict(), "killed": self.killed}

    def current(self) -> dict[str, Any]:
        """Return a reading of now: "used", "limit" (bytes), "source"; and "killed", as `snapshot`."""
        return {**self._read()._asdict(), "killed": self.killed}

    def explain_sigkill(self) -> str:
        """Return the reason of a SIGKILL that the raylet did not send, if the kernel was out of memory; else ""."""
        kills = self._gauge.kernel_kills()
        before, self._kernel_kills = self._kernel_kills, kills
        if kills <= before:
            return ""
        self.killed += 1
        return (
            f"{m.LOW_MEMORY}\nThe kernel ended the worker: a cgroup of node {self._node} (host {self._host}) "
            f"had reached its limit, faster than its memory watcher looks (every {self._period:g} s); hint: "
            "HPCRAY_MEMORY_USAGE_THRESHOLD lower, or more memory for the job"
        )

    def _tick(self) -> None:
        loop = self._loop
        if self._processes.stopping:
            return
        self._note_allocations()
        self._last = usage = self._read()
        share = usage.used / (self._threshold * usage.limit) if usage.limit else 0.0
        near = share > _NEAR
        period = self._period * (1 / _NEAR_SPEEDUP if near else 2 if share < _FAR else 1)
        loop.call_at(loop.now + period, self._tick, _FAR_SLACK * period if share < _FAR else 0.0)
        if near and loop.now - self._listed_at >= _LIST_INTERVAL:
            self._list_retriable_tasks()
        if not self._policy.must_kill(loop.now, usage.used, usage.limit):
            return
        if self._policy.is_critical(usage.used, usage.limit) or not self._awaiting:
            self._kill_worker()
        else:
            number = self._number
            loop.call_at(loop.now + _REPLY_TIMEOUT, lambda: self._kill_worker() if self._number == number else None)

    def _read(self) -> MemoryUsage:
        return self._gauge.read([link.pid for link in self._router.links.values()], self._store.high_water)

    def _note_allocations(self) -> None:
        """Note since when each worker has its lease, to the precision of one period."""
        now, workers = self._loop.now, self._pool.workers
        for proc in [proc for proc in self._since if proc not in workers]:
            del self._since[proc]
            self._retriable.pop(proc, None)
            self._policy.worker_died(proc)
        for proc in [proc for proc in self._asked if proc not in workers or workers[proc].state != LEAVING]:
            self._asked.discard(proc)
            self._policy.worker_died(proc)  # or it stays: another one has to end
        for proc, worker in workers.items():
            ident = worker.allocation.id if worker.allocation is not None else b""
            if self._since.get(proc, (None, 0.0))[0] != ident:
                self._since[proc] = (ident, now)

    def _list_retriable_tasks(self) -> None:
        """Send ListRetriableTasks to the holders of leases: only the submitter of a task knows if it may run again."""
        self._number += 1
        self._listed_at = self._loop.now
        holders: dict[bytes, list[bytes]] = {}
        for worker in self._pool.workers.values():
            lease = worker.allocation
            if worker.state == BUSY and lease is not None and lease.actor_spec is None and lease.holder:
                holders.setdefault(lease.holder, []).append(worker.proc)
        self._awaiting = set(holders)
        for holder, workers in holders.items():
            self._router.send(holder, m.ListRetriableTasks(self._number, workers))

    def on_retriable_tasks(self, now: float, src: bytes, msg: m.RetriableTasks) -> Iterable[Any]:
        """Note which tasks may run again; with the last reply a worker may be ended."""
        if msg.number == self._number:
            self._retriable |= {proc: (name, retriable) for proc, name, retriable in msg.rows}
            self._awaiting.discard(src)
            if not self._awaiting:
                self._kill_worker()
        return ()

    def _kill_worker(self) -> None:
        self._awaiting = set()
        self._number += 1
        usage = self._read()
        if not self._policy.must_kill(self._loop.now, usage.used, usage.limit):
            return
        workers = [one for one in self._pool.workers.values() if one.pid and one.state in (IDLE, BUSY)]
        used = group_memory([worker.pid for worker in workers])
        candidates = [self._candidate(worker, used[worker.pid]) for worker in workers]
        victim = choose_victim(candidates)
        if victim is None:
            return
        worker = self._pool.workers[victim.worker]
        if worker.state == IDLE and not worker.needed:
            self._policy.worker_killed(self._loop.now, victim.worker)
            self._asked.add(victim.worker)
            self._ask_to_leave(victim.worker)
            return
        where = f"node {self._node} (host {self._host}, limit of {usage.source})"
        reason = explain_kill(victim, candidates, where, usage.used, usage.limit, self._threshold)
        self._policy.worker_killed(self._loop.now, victim.worker)
        self.killed += 1
        self._log("\n".join(reason.splitlines()[1:2]))
        self._processes.kill(victim.worker, reason)

    def _candidate(self, worker: WorkerProcess, used: int) -> Candidate:
        allocation = worker.allocation
        name, retriable = "", not worker.needed
        if allocation is not None and allocation.actor_spec is not None:
            spec = allocation.actor_spec
            name, retriable = f"actor {spec.class_name}", spec.max_restarts != 0
        elif allocation is not None:
            name, retriable = self._retriable.get(worker.proc, ("a task", True))
        return Candidate(worker.proc, worker.pid, used, self._since.get(worker.proc, (b"", 0.0))[1], retriable, name)
