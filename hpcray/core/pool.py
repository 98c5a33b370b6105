"""The worker processes of one node: who is idle, who is being forked, and which claims wait for a worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from hpcray.base.config import Config
from hpcray.base.ids import make_proc
from hpcray.base.resources import UNIT
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Send
from hpcray.core.scheduler.devices import GPU, assigned, slow, undressed
from hpcray.core.scheduler.ledger import Claim
from hpcray.core.scheduler.queue import Env
from hpcray.wire.messages import Exit

DEFAULT_MAX_WORKERS = 4096
FORK_PAUSE = 1.0
"""After a failed fork no other is tried for this long."""
FORKS_PER_CPU = 2
LEAST_FORKS = 8
"""At most this many forks (or twice the CPUs) are under way at once: a burst must not swamp the node."""

NEVER = float("inf")

STARTING, IDLE, BUSY, LEAVING = "starting", "idle", "busy", "leaving"


@dataclass(slots=True, eq=False)
class Worker:
    """One worker process. `claim` is what it works for; `since` when it became idle, or was first seen starting."""

    proc: bytes
    number: int
    env: Env
    state: str = STARTING
    pid: int = 0
    claim: Claim | None = None
    since: float = 0.0


class WorkerPool:
    """Book-keeping of worker processes; matches idle workers with claims that need one.

    A worker serves one environment, and so one set of GPUs, for life. While it idles its memory on them is still taken:
    it leaves when others get these GPUs, or when its time is up.
    """

    def __init__(self, node: int, cpus: int, config: Config) -> None:
        self._node = node
        self._cpus = cpus
        self._idle_timeout = config.idle_worker_timeout
        self._start_timeout = config.worker_start_timeout
        self._prestart = cpus if config.prestart < 0 else config.prestart
        self.limit = config.max_workers or DEFAULT_MAX_WORKERS
        self.limited_by = "; hint: raise max_workers"
        self._forks = max(LEAST_FORKS, FORKS_PER_CPU * cpus)
        self._numbers = 0
        self.workers: dict[bytes, Worker] = {}
        self._idle: dict[Env, list[Worker]] = {}
        self._starting: dict[Env, int] = {}
        self._waiting: dict[Env, deque[Claim]] = {}
        self._counts = {STARTING: 0, IDLE: 0, BUSY: 0, LEAVING: 0}
        self._n_waiting = 0
        self._slow_waiting = self._slow_starting = 0
        self._paused_until = 0.0
        self._unwelcome: list[Worker] = []
        self.failures: dict[Env, int] = {}
        self.last_failure = ""

    def new_number(self) -> int:
        """A process number of this node that nobody else has or will have."""
        self._numbers += 1
        return self._numbers

    # ------------------------------------------------------------ questions

    def full(self, now: float, env: Env) -> bool:
        """Whether no worker can be had until some process ends (limit reached, or forks fail right now)."""
        if self._idle.get(env):
            return False
        return now < self._paused_until or self._counts[BUSY] + self._counts[LEAVING] + self._n_waiting >= self.limit

    def can_supply(self, now: float, env: Env) -> bool:
        """Whether a claim decided now would soon have a worker."""
        if self._idle.get(env):
            return True
        ahead = self._slow_waiting if slow(env) else self._n_waiting - self._slow_waiting
        return ahead < self._forks and not self.full(now, env)

    def waiting(self) -> list[Claim]:
        """Claims that have no worker yet, oldest first within an environment."""
        return [claim for line in self._waiting.values() for claim in line]

    # ------------------------------------------------------------ claims

    def supply(self, claim: Claim) -> Worker | None:
        """An idle worker for the claim, the last used one first (it is warm); else the claim waits for one."""
        stack = self._idle.get(claim.env)
        worker = stack.pop() if stack else None
        if claim.devices:
            self._unwelcome += self._in_the_way(claim)
        if worker is not None:
            self._employ(worker, claim)
            return worker
        self._waiting.setdefault(claim.env, deque()).append(claim)
        self._count(claim.env, 1)
        return None

    def cancel(self, claim: Claim) -> bool:
        """Drop a claim that waits; False when it already has a worker."""
        line = self._waiting.get(claim.env)
        if line is None or claim not in line:
            return False
        line.remove(claim)
        self._count(claim.env, -1)
        if not line:
            del self._waiting[claim.env]
        return True

    def release(self, now: float, worker: Worker) -> Claim | None:
        """The worker is free. Returns the waiting claim it serves from now on, or None: it is idle."""
        line = self._waiting.get(worker.env)
        if line:
            claim = line.popleft()
            self._count(worker.env, -1)
            if not line:
                del self._waiting[worker.env]
            self._employ(worker, claim)
            return claim
        self._set(worker, IDLE)
        worker.claim = None
        worker.since = now
        self._idle.setdefault(worker.env, []).append(worker)
        return None

    def doom(self, worker: Worker) -> None:
        """It was told to leave or is being killed; it serves nobody any more."""
        if worker.state == IDLE:
            self._idle[worker.env].remove(worker)
        self._set(worker, LEAVING)

    # ------------------------------------------------------------ processes

    def joined(self, now: float, proc: bytes, pid: int) -> Claim | None:
        """A forked worker said hello. Returns the claim it serves from now on, None when it is idle (or not ours)."""
        worker = self.workers.get(proc)
        if worker is None or worker.state != STARTING:
            return None
        worker.pid = pid
        self._count_start(worker.env, -1)
        self.failures.pop(undressed(worker.env), None)
        return self.release(now, worker)

    def remove(self, proc: bytes) -> Worker | None:
        """Forget a dead worker; returns it as it was."""
        worker = self.workers.pop(proc, None)
        if worker is None:
            return None
        self._counts[worker.state] -= 1
        if worker.state == STARTING:
            self._count_start(worker.env, -1)
        elif worker.state == IDLE:
            self._idle[worker.env].remove(worker)
        return worker

    def start_failed(self, now: float, env: Env, reason: str) -> Claim | None:
        """A fork failed, or the worker died before it joined. Returns a claim that gives up waiting, if any."""
        self._paused_until = now + FORK_PAUSE
        asked = undressed(env)
        self.failures[asked] = self.failures.get(asked, 0) + 1
        self.last_failure = reason
        line = self._waiting.get(env)
        if not line:
            return None
        claim = line.pop()
        self._count(env, -1)
        if not line:
            del self._waiting[env]
        return claim

    def start(self) -> list[Effect]:
        """Fork the workers that shall be ready before they are asked for."""
        return [self._fork(()) for _ in range(min(self._prestart, self.limit))]

    def pump(self, now: float) -> list[Effect]:
        """Fork for the claims that wait, evicting idle workers of other environments when the node is full."""
        out: list[Effect] = []
        if self._unwelcome:
            here = [w for w in self._unwelcome if w.state == IDLE and w.proc in self.workers]
            out += [self._evict(worker) for worker in here]
            self._unwelcome = []
        if not self._n_waiting or now < self._paused_until:
            return out
        evicting = self._counts[LEAVING]
        for env, line in self._waiting.items():
            need = len(line) - self._starting.get(env, 0)
            while need > 0 and self._starting_beside(env) < self._forks:
                if len(self.workers) >= self.limit:
                    if evicting >= need or not self._counts[IDLE]:
                        break
                    out.append(self._evict(self._oldest_idle()))
                    evicting += 1
                    continue
                out.append(self._fork(env))
                need -= 1
        return out

    def reap(self, now: float) -> list[Effect]:
        """Tell idle workers to leave when their time is up: those with GPUs, and of the others as many as are more than
        the CPUs, the longest idle first. Kill those that were forked long ago and have not come up."""
        if self._counts[STARTING]:
            return [*self._kill_late(now), *self._reap_idle(now)]
        return self._reap_idle(now)

    def _kill_late(self, now: float) -> list[Effect]:
        out: list[Effect] = []
        for worker in self.workers.values():
            if worker.state != STARTING:
                continue
            if not worker.since:
                worker.since = now
            elif slow(worker.env):
                continue  # its environment has a timeout of its own
            elif now - worker.since >= self._start_timeout:
                worker.since = NEVER  # once is enough
                reason = (
                    f"it was forked, and was not up within {self._start_timeout:g} s; hint: what does preload run? "
                    "HPCRAY_WORKER_START_TIMEOUT"
                )
                out.append(KillWorker(worker.proc, reason))
        return out

    def _reap_idle(self, now: float) -> list[Effect]:
        if not self._counts[IDLE]:
            return []
        surplus = self._counts[IDLE] + self._tasks_running() - self._cpus
        late = [w for stack in self._idle.values() for w in stack if now - w.since >= self._idle_timeout]
        late.sort(key=lambda worker: (not assigned(worker.env), worker.since))
        return [self._evict(w) for place, w in enumerate(late) if place < surplus or assigned(w.env)]

    def snapshot(self) -> dict[str, Any]:
        """Counts and one row per worker."""
        return {
            "limit": self.limit,
            "waiting_for_worker": self._n_waiting,
            "last_failure": self.last_failure,
            "counts": dict(self._counts),
            "workers": [
                {
                    "number": w.number,
                    "pid": w.pid,
                    "state": w.state,
                    "actor": bool(w.claim and w.claim.spec),
                    "sets_up_since": w.since if w.state == STARTING and slow(w.env) else 0.0,
                }
                for w in self.workers.values()
            ],
        }

    # ------------------------------------------------------------ inside

    def _tasks_running(self) -> int:
        busy = (w for w in self.workers.values() if w.state == BUSY and w.claim is not None)
        return sum(1 for w in busy if w.claim is not None and w.claim.spec is None and not w.claim.lent)

    def _in_the_way(self, claim: Claim) -> list[Worker]:
        """Idle workers that hold memory of the claim's GPUs, but those that share them as it does."""
        wanted = assigned(claim.env)
        whole = claim.request[GPU] >= UNIT
        return [
            worker
            for env, stack in self._idle.items()
            if (whole or env != claim.env) and not wanted.isdisjoint(assigned(env))
            for worker in stack
        ]

    def _oldest_idle(self) -> Worker:
        return min((stack[0] for stack in self._idle.values() if stack), key=lambda w: w.since)

    def _evict(self, worker: Worker) -> Effect:
        self.doom(worker)
        return Send(worker.proc, Exit(0))

    def _fork(self, env: Env) -> Effect:
        number = self.new_number()
        proc = make_proc(self._node, number)
        self.workers[proc] = Worker(proc, number, env)
        self._counts[STARTING] += 1
        self._count_start(env, 1)
        return ForkWorker(number, env)

    def _count(self, env: Env, by: int) -> None:
        self._n_waiting += by
        if slow(env):
            self._slow_waiting += by

    def _count_start(self, env: Env, by: int) -> None:
        self._starting[env] = self._starting.get(env, 0) + by
        if slow(env):
            self._slow_starting += by

    def _starting_beside(self, env: Env) -> int:
        """How many are starting that a worker of this environment would start beside: the slow ones keep nobody else
        waiting."""
        return self._slow_starting if slow(env) else self._counts[STARTING] - self._slow_starting

    def _employ(self, worker: Worker, claim: Claim) -> None:
        self._set(worker, BUSY)
        worker.claim = claim
        claim.worker = worker.proc

    def _set(self, worker: Worker, state: str) -> None:
        self._counts[worker.state] -= 1
        self._counts[state] += 1
        worker.state = state
