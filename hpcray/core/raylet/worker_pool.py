"""The worker processes of one node: which are idle, which are being forked, and which allocations wait for a worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Struct

from hpcray.common.config import Config
from hpcray.common.ids import make_proc
from hpcray.common.resources import UNIT
from hpcray.core.effects import Effect, ForkWorker, KillWorker, Send
from hpcray.core.raylet.lease_requests import WorkerEnv
from hpcray.core.raylet.local_resources import ResourceAllocation, assigned_devices, needs_setup, strip_devices
from hpcray.protocol.messages import CONSTRUCTOR_RAISED, LOW_MEMORY, NOTHING_BESIDE, USER_EXIT, Exit, out_of_memory

DEFAULT_MAX_WORKERS = 4096
FORK_RETRY_DELAY = 1.0
"""Seconds after a failed fork in which none is tried."""
FAILURES_TO_BACK_OFF, MAX_FORK_RETRY_DELAY = 3, 30.0
"""Starts that fail in the same way one after the other, from which on the delay doubles; its limit in seconds."""
FORKS_PER_CPU = 2
MIN_CONCURRENT_FORKS = 8
"""At most this many forks (or `FORKS_PER_CPU` times the CPUs) are under way at once: a burst must not swamp the
node. In one runtime environment, as many as there are CPUs: who stops waiting meanwhile needs no worker."""

NEVER = float("inf")

STARTING, IDLE, BUSY, LEAVING = "starting", "idle", "busy", "leaving"
WORKER_TRANSITIONS: dict[str, set[str]] = {
    STARTING: {IDLE, BUSY, LEAVING},
    IDLE: {BUSY, LEAVING},
    BUSY: {IDLE, BUSY, LEAVING},
    LEAVING: {LEAVING, IDLE, BUSY},
}
"""States of a worker. It is STARTING until it joins, IDLE in the pool, BUSY while it has an allocation (after one, it
may go on to the next), LEAVING from the order to exit, or to kill it, to its death; unless it only was asked to exit,
and refuses. In each state it may die."""


class WorkerProcess(Struct, eq=False):
    """One worker process.

    Attributes:
        allocation: the lease or actor that it runs for.
        joined: time at which it connected; 0 before.
        since: time at which it became idle, or was first seen starting.
        asked: whether it is LEAVING only if it agrees.
        needed: whether it has not agreed since it became idle: it owns objects.
    """

    proc: bytes
    number: int
    env: WorkerEnv
    state: str = STARTING
    pid: int = 0
    allocation: ResourceAllocation | None = None
    joined: float = 0.0
    since: float = 0.0
    asked: bool = False
    needed: bool = False


class WorkerPool:
    """Matches idle workers with allocations that need one, and decides which to fork and which to end.

    A worker serves one environment, and so one set of GPUs, for life. While it idles, it still occupies memory of its
    GPUs: it leaves when another allocation gets them, or when its idle time is over.

    Args:
        node: index of the node. cpus: its number of CPUs.

    Attributes:
        workers: those that are not dead, by proc id.
        limit: how many there may be. limit_reason: ends the text that reports the limit.
        failures: failed starts since the last success, by requested environment. last_failure: why the last one failed.
    """

    def __init__(self, node: int, cpus: int, config: Config) -> None:
        self._node = node
        self._cpus = cpus
        self._idle_timeout = config.idle_worker_timeout
        self._start_timeout = config.worker_start_timeout
        self._prestart = cpus if config.prestart < 0 else config.prestart
        self.limit = config.max_workers or DEFAULT_MAX_WORKERS
        self.limit_reason = "; hint: raise max_workers"
        self._max_forks = max(MIN_CONCURRENT_FORKS, FORKS_PER_CPU * cpus)
        self._last_number = 0
        self._run = 0
        self.workers: dict[bytes, WorkerProcess] = {}
        self._idle: dict[WorkerEnv, list[WorkerProcess]] = {}
        self._starting: dict[WorkerEnv, int] = {}
        self._waiting: dict[WorkerEnv, deque[ResourceAllocation]] = {}
        self._counts = {STARTING: 0, IDLE: 0, BUSY: 0, LEAVING: 0}
        self._waiting_count = 0
        self._waiting_with_setup = self._starting_with_setup = 0
        self._no_fork_until = 0.0
        self._ask_next: list[WorkerProcess] = []
        self.failures: dict[WorkerEnv, int] = {}
        self._pauses: dict[WorkerEnv, tuple[str, int, float]] = {}
        self.last_failure = ""

    def begin_run(self, run: int) -> None:
        """Set the number of the job's run, before the first process id is made."""
        self._run = run

    def proc_of(self, number: int) -> bytes:
        """Id of the process of this node that has this number."""
        return make_proc(self._node, number, self._run)

    def new_number(self) -> int:
        """A process number that no process of this node has had."""
        self._last_number += 1
        return self._last_number

    def set_limit(self, limit: int, reason: str) -> None:
        """Allow fewer workers than the settings do. reason: ends the text that reports the limit."""
        self.limit, self.limit_reason = limit, reason

    # ------------------------------------------------------------ can a worker be had

    def is_full(self, now: float, env: WorkerEnv) -> bool:
        """True if no worker can be had until a process ends (limit reached), or for a moment, as a start has failed."""
        if self._idle.get(env):
            return False
        return now < self._no_fork_until or self._is_paused(now, env) or self.is_at_limit(now, env)

    def is_at_limit(self, now: float, env: WorkerEnv) -> bool:
        """True if no worker can be had until a process ends: there are as many as there may be."""
        if self._idle.get(env):
            return False
        in_use = self._counts[BUSY] + self._counts[LEAVING] + self._waiting_count
        return in_use >= self.limit or (len(self.workers) >= self.limit and in_use + self.owners(now) >= self.limit)

    def can_supply(self, now: float, env: WorkerEnv) -> bool:
        """True if an allocation made now would have a worker soon."""
        if self._idle.get(env):
            return True
        ahead = self._waiting_with_setup if needs_setup(env) else self._waiting_count - self._waiting_with_setup
        return ahead < self._max_forks and not self.is_full(now, env)

    def owners(self, now: float) -> int:
        """Count the idle workers that stay for now because they own objects."""
        return sum(self._stays(now, worker) for stack in self._idle.values() for worker in stack)

    def waiting(self) -> list[ResourceAllocation]:
        """Allocations that have no worker yet, oldest first within an environment."""
        return [allocation for line in self._waiting.values() for allocation in line]

    # ------------------------------------------------------------ allocations

    def assign_worker(self, allocation: ResourceAllocation) -> WorkerProcess | None:
        """Give the allocation an idle worker, the last used one (it is warm); without one, it waits for the next."""
        stack = self._idle.get(allocation.env)
        worker = stack.pop() if stack else None
        if allocation.devices:
            self._ask_next += self._idle_on_devices_of(allocation)
        if worker is not None:
            self._employ(worker, allocation)
            return worker
        self._waiting.setdefault(allocation.env, deque()).append(allocation)
        self._count_waiting(allocation.env, 1)
        return None

    def cancel_waiting(self, allocation: ResourceAllocation) -> bool:
        """Drop an allocation that waits for a worker; False when it has one already."""
        line = self._waiting.get(allocation.env)
        if line is None or allocation not in line:
            return False
        line.remove(allocation)
        self._count_waiting(allocation.env, -1)
        if not line:
            del self._waiting[allocation.env]
        return True

    def release_worker(self, now: float, worker: WorkerProcess) -> ResourceAllocation | None:
        """End the worker's allocation. Returns the waiting one that it serves from now on, or None: it is idle."""
        line = self._waiting.get(worker.env)
        if line:
            allocation = line.popleft()
            self._count_waiting(worker.env, -1)
            if not line:
                del self._waiting[worker.env]
            self._employ(worker, allocation)
            return allocation
        self._change_state(worker, IDLE)
        worker.allocation = None
        worker.since = now
        self._idle.setdefault(worker.env, []).append(worker)
        return None

    def mark_leaving(self, worker: WorkerProcess) -> None:
        """The worker got the order to exit, or is being killed; it serves no other allocation."""
        if worker.state == IDLE:
            self._idle[worker.env].remove(worker)
        elif worker.state == STARTING:
            self._count_starting(worker.env, -1)
        self._change_state(worker, LEAVING)
        worker.asked = False

    def exit_refused(self, now: float, proc: bytes) -> ResourceAllocation | None:
        """A worker that was asked to exit stays. Returns the allocation that it serves from now on; None: it is idle,
        or has been killed meanwhile."""
        worker = self.workers.get(proc)
        if worker is None or not worker.asked:
            return None
        worker.asked, worker.needed = False, True
        return self.release_worker(now, worker)

    def drop_hopeless(self, now: float) -> list[ResourceAllocation]:
        """Drop and return the allocations that wait where the node is full, and all who could make room own objects."""
        full = self._waiting_count and len(self.workers) >= self.limit
        if not full or self._counts[STARTING] or self._counts[LEAVING] or next(self._leavers(now), None) is not None:
            return []
        dropped = self.waiting()
        for allocation in dropped:
            self.cancel_waiting(allocation)
        return dropped

    # ------------------------------------------------------------ processes

    def worker_joined(self, now: float, proc: bytes, pid: int) -> ResourceAllocation | None:
        """A forked worker connected. Returns the allocation that it serves from now on; None when it is idle, has
        joined before, or was not forked here."""
        worker = self.workers.get(proc)
        if worker is None or worker.state != STARTING:
            return None
        worker.pid, worker.joined = pid, now
        self._count_starting(worker.env, -1)
        if self.failures:
            self.failures.pop(strip_devices(worker.env), None)
            self._pauses.pop(strip_devices(worker.env), None)
        return self.release_worker(now, worker)

    def remove_worker(self, proc: bytes) -> WorkerProcess | None:
        """Forget a dead worker; returns it as it was."""
        worker = self.workers.pop(proc, None)
        if worker is None:
            return None
        self._counts[worker.state] -= 1
        if worker.state == STARTING:
            self._count_starting(worker.env, -1)
        elif worker.state == IDLE:
            self._idle[worker.env].remove(worker)
        return worker

    def start_failed(self, now: float, env: WorkerEnv, reason: str) -> ResourceAllocation | None:
        """A fork failed, or the worker died before it joined. Returns the allocation that stops waiting, if any."""
        self._no_fork_until = now + FORK_RETRY_DELAY
        requested = strip_devices(env)
        self.failures[requested] = self.failures.get(requested, 0) + 1
        self.last_failure = reason
        self._back_off(now, requested, reason)
        line = self._waiting.get(env)
        if not line:
            return None
        allocation = line.pop()
        self._count_waiting(env, -1)
        if not line:
            del self._waiting[env]
        return allocation

    def _back_off(self, now: float, env: WorkerEnv, reason: str) -> None:
        """Wait longer and longer with an environment whose workers fail in the same way. Those that were forked at one
        time fail at one time, and count once."""
        before, count, until = self._pauses.get(env, ("", 0, 0.0))
        if reason != before:
            count, until = 0, 0.0
        if now >= until:
            count += 1
            delay = FORK_RETRY_DELAY * 2.0 ** max(0, count - FAILURES_TO_BACK_OFF + 1)
            until = now + min(MAX_FORK_RETRY_DELAY, delay)
        self._pauses[env] = (reason, count, until)

    def _is_paused(self, now: float, env: WorkerEnv) -> bool:
        """True if starts with this environment have failed so often that none is tried now."""
        return bool(self._pauses) and now < self._pauses.get(strip_devices(env), ("", 0, 0.0))[2]

    def prestart_workers(self) -> list[Effect]:
        """Fork the workers that should be ready before the first request."""
        return [self._fork(()) for _ in range(min(self._prestart, self.limit))]

    def replace_idle_workers(self) -> list[Effect]:
        """Fork workers in the place of those that idle or are just starting, which lack what has been preloaded since.

        Idle workers exit unless they own something. Those that are just starting are killed; where there is no room for
        further workers, they exit once they are up, unless an allocation waits for them.
        """
        room = max(0, self.limit - len(self.workers))
        starting = [worker for worker in self.workers.values() if worker.state == STARTING and not worker.env]
        killed, self._ask_next = starting[:room], [*self._ask_next, *starting[room:]]
        idle = list(self._idle.get((), ()))[: room - len(killed)]
        for worker in killed:
            self.mark_leaving(worker)
        return [
            *(KillWorker(worker.proc, "it was replaced by one with what the job preloads") for worker in killed),
            *(self._ask_to_leave(worker) for worker in idle),
            *(self._fork(()) for _ in (*killed, *idle)),
        ]

    def fork_for_waiting(self, now: float) -> list[Effect]:
        """Fork for the allocations that wait; where the node is full, ask idle workers of others to exit."""
        out: list[Effect] = []
        if self._ask_next:
            idle = [worker for worker in self._ask_next if worker.state == IDLE and worker.proc in self.workers]
            out += [self._ask_to_leave(worker) for worker in idle]
            self._ask_next = [one for one in self._ask_next if one.state == STARTING and one.proc in self.workers]
        if not self._waiting_count or now < self._no_fork_until:
            return out
        leaving = self._counts[LEAVING]
        leavers: Iterator[WorkerProcess] | None = None
        for env, line in self._waiting.items():
            if self._is_paused(now, env):
                continue
            need = len(line) - self._starting.get(env, 0)
            most = max(1, self._cpus) if needs_setup(env) else self._max_forks
            while need > 0 and self._starting_beside(env) < self._max_forks and self._starting.get(env, 0) < most:
                if len(self.workers) >= self.limit:
                    if leaving >= need:
                        break
                    leavers = self._leavers(now) if leavers is None else leavers
                    leaver = next(leavers, None)
                    if leaver is None:
                        break
                    out.append(self._ask_to_leave(leaver))
                    leaving += 1
                    continue
                out.append(self._fork(env))
                need -= 1
        return out

    def reap(self, now: float) -> list[Effect]:
        """Let workers exit that have idled for too long: those with GPUs, and of the others as many as exceed the CPUs,
        the longest idle first. Who owns objects stays. Kill those that were forked long ago and have not joined."""
        if self._counts[STARTING]:
            return [*self._kill_late_starters(now), *self._evict_idle(now)]
        return self._evict_idle(now)

    def evict_all_idle(self) -> list[Effect]:
        """Let all idle workers exit, but for those that own objects."""
        return [self._ask_to_leave(one) for stack in list(self._idle.values()) for one in list(stack)]

    def ask_to_leave(self, proc: bytes) -> list[Effect]:
        """Let an idle worker exit, unless it owns objects."""
        worker = self.workers.get(proc)
        return [self._ask_to_leave(worker)] if worker is not None and worker.state == IDLE else []

    @property
    def evicts(self) -> bool:
        """True if a worker is being ended."""
        return bool(self._counts[LEAVING])

    def _kill_late_starters(self, now: float) -> list[Effect]:
        out: list[Effect] = []
        for worker in self.workers.values():
            if worker.state != STARTING:
                continue
            if not worker.since:
                worker.since = now
            elif needs_setup(worker.env):
                continue  # its runtime environment has a timeout of its own
            elif now - worker.since >= self._start_timeout:
                worker.since = NEVER  # once is enough
                reason = (
                    f"it was forked, and was not up within {self._start_timeout:g} s; hint: what does preload run? "
                    "HPCRAY_WORKER_START_TIMEOUT"
                )
                out.append(KillWorker(worker.proc, reason))
        return out

    def _evict_idle(self, now: float) -> list[Effect]:
        if not self._counts[IDLE]:
            return []
        surplus = self._counts[IDLE] + self._running_tasks() - self._cpus
        late = [one for stack in self._idle.values() for one in stack if now - one.since >= self._idle_timeout]
        late.sort(key=lambda worker: (not assigned_devices(worker.env), worker.since))
        out: list[Effect] = []
        for place, one in enumerate(late):
            if place < surplus or assigned_devices(one.env):
                out.append(self._ask_to_leave(one))
        return out

    # ------------------------------------------------------------ for people and tests

    def snapshot(self) -> dict[str, Any]:
        """Counts and one row per worker."""
        return {
            "limit": self.limit,
            "waiting_for_worker": self._waiting_count,
            "last_failure": self.last_failure,
            "counts": dict(self._counts),
            "workers": [
                {
                    "number": one.number,
                    "pid": one.pid,
                    "state": one.state,
                    "actor": bool(one.allocation and one.allocation.actor_spec),
                    "sets_up_since": one.since if one.state == STARTING and needs_setup(one.env) else 0.0,
                }
                for one in self.workers.values()
            ],
        }

    def check_invariants(self) -> None:
        """Raise AssertionError unless counts, idle stacks and waiting allocations agree with the workers."""
        states = Counter(one.state for one in self.workers.values())
        assert self._counts == {state: states[state] for state in WORKER_TRANSITIONS}, (self._counts, states)
        assert len(self.workers) <= self.limit, f"{len(self.workers)} workers, more than {self.limit}"
        starting = Counter(one.env for one in self.workers.values() if one.state == STARTING)
        assert {env: count for env, count in self._starting.items() if count} == starting, (self._starting, starting)
        with_setup = sum(count for env, count in starting.items() if needs_setup(env))
        assert self._starting_with_setup == with_setup, f"{self._starting_with_setup} set up, not {with_setup}"
        for env, stack in self._idle.items():
            for worker in stack:
                facts = worker.state, worker.env, self.workers.get(worker.proc)
                assert facts == (IDLE, env, worker), f"worker {worker.number} in the idle stack of {env}: {facts}"
        assert sum(map(len, self._idle.values())) == states[IDLE], "a worker is in the idle stacks twice, or in none"
        for worker in self.workers.values():
            if worker.state == BUSY:
                assert worker.allocation is not None, f"worker {worker.number} is busy for nothing"
                assert worker.allocation.worker == worker.proc, f"worker {worker.number} has the allocation of another"
            elif worker.state in (IDLE, STARTING):
                assert worker.allocation is None, f"worker {worker.number} is {worker.state} and has an allocation"
        waiting = self.waiting()
        assert all(self._waiting.values()) and len(waiting) == self._waiting_count, "the waiting are miscounted"
        with_setup = sum(needs_setup(one.env) for one in waiting)
        assert self._waiting_with_setup == with_setup, f"{self._waiting_with_setup} wait for set up, not {with_setup}"
        for allocation in waiting:
            assert not allocation.worker, "an allocation waits that has a worker"
            assert not self._idle.get(allocation.env), "an allocation waits while a worker of its environment idles"

    def _running_tasks(self) -> int:
        busy = (one.allocation for one in self.workers.values() if one.state == BUSY)
        return sum(1 for one in busy if one is not None and one.actor_spec is None and not one.cpu_released)

    def _idle_on_devices_of(self, allocation: ResourceAllocation) -> list[WorkerProcess]:
        """Idle workers that occupy memory of the allocation's devices, except those that share them as it does."""
        devices = assigned_devices(allocation.env)
        whole = all(allocation.resources[name] >= UNIT for name in allocation.devices)
        return [
            worker
            for env, stack in self._idle.items()
            if (whole or env != allocation.env) and not devices.isdisjoint(assigned_devices(env))
            for worker in stack
        ]

    def _leavers(self, now: float) -> Iterator[WorkerProcess]:
        """Return idle workers, the longest idle first. Those that own objects are asked again only after a while."""
        idle = [worker for stack in self._idle.values() for worker in stack if not self._stays(now, worker)]
        return iter(sorted(idle, key=lambda worker: worker.since))

    def _stays(self, now: float, worker: WorkerProcess) -> bool:
        return worker.needed and now - worker.since < self._idle_timeout

    def _ask_to_leave(self, worker: WorkerProcess) -> Effect:
        self.mark_leaving(worker)
        worker.asked = True
        return Send(worker.proc, Exit(0, if_unused=True))

    def _fork(self, env: WorkerEnv) -> Effect:
        number = self.new_number()
        proc = self.proc_of(number)
        self.workers[proc] = WorkerProcess(proc, number, env)
        self._counts[STARTING] += 1
        self._count_starting(env, 1)
        return ForkWorker(number, env)

    def _count_waiting(self, env: WorkerEnv, by: int) -> None:
        self._waiting_count += by
        if needs_setup(env):
            self._waiting_with_setup += by

    def _count_starting(self, env: WorkerEnv, by: int) -> None:
        self._starting[env] = self._starting.get(env, 0) + by
        if needs_setup(env):
            self._starting_with_setup += by

    def _starting_beside(self, env: WorkerEnv) -> int:
        """How many workers are starting that limit the forks for `env`: those with a long set-up keep only each other
        waiting."""
        return self._starting_with_setup if needs_setup(env) else self._counts[STARTING] - self._starting_with_setup

    def _employ(self, worker: WorkerProcess, allocation: ResourceAllocation) -> None:
        self._change_state(worker, BUSY)
        worker.needed = False
        worker.allocation = allocation
        allocation.worker = worker.proc

    def _change_state(self, worker: WorkerProcess, state: str) -> None:
        assert state in WORKER_TRANSITIONS[worker.state], f"worker {worker.number}: {worker.state} -> {state}"
        self._counts[worker.state] -= 1
        self._counts[state] += 1
        worker.state = state


# ------------------------------------------------------------ ended workers
# The workers of one node that have ended, and how, in Ray's words; and its drivers.


ENDED_KEPT = 1000
SYSTEM_ERROR, NODE_OUT_OF_MEMORY, USER_ERROR = "SYSTEM_ERROR", "NODE_OUT_OF_MEMORY", "USER_ERROR"
INTENDED_USER_EXIT, INTENDED_SYSTEM_EXIT = "INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT"


class EndedWorkers:
    """The last `ENDED_KEPT` of either."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_KEPT)
        self._drivers: deque[tuple[float, dict[str, Any]]] = deque(maxlen=ENDED_KEPT)

    def add(self, now: float, worker: WorkerProcess, reason: str) -> None:
        """Keep a worker that has died, as it was; `reason` says how its process ended."""
        kind, detail = exit_of(worker, reason)
        spec = worker.allocation.actor_spec if worker.allocation is not None else None
        actor = spec.actor if spec is not None else b""
        row = {"proc": worker.proc, "pid": worker.pid, "actor": actor, "exit_type": kind, "exit_detail": detail}
        row["lived"] = now - worker.joined if worker.joined else None
        self._rows.append((now, row))

    def add_driver(self, now: float, proc: bytes, joined: float, left: str, reason: str) -> None:
        """Keep that a driver has left, and why, or died (`left`: ""), of this reason; `joined`: when it came."""
        kind, detail = (INTENDED_USER_EXIT, left) if left else (SYSTEM_ERROR, f"Worker exits unexpectedly: {reason}")
        self._drivers.append((now, {"proc": proc, "lived": now - joined, "exit_type": kind, "exit_detail": detail}))

    def drivers(self, now: float) -> list[dict[str, Any]]:
        """Return one row for each of the last drivers that have left, the earliest first."""
        return [{**row, "seconds": now - at} for at, row in self._drivers]

    def rows(self, now: float) -> list[dict[str, Any]]:
        """Return one row for each, the earliest first. seconds: since its end."""
        return [{**row, "seconds": now - at} for at, row in self._rows]


def exit_of(worker: WorkerProcess, reason: str) -> tuple[str, str]:
    """Return Ray's type of a worker's exit, and what is known of it.

    Args:
        worker: as it was when it died.
        reason: how its process ended: an exit code, a signal, or why it was killed.
    """
    allocation = worker.allocation
    why = (allocation.exit_reason or allocation.kill_reason) if allocation is not None else ""
    if USER_EXIT in why:
        return INTENDED_USER_EXIT, why
    if CONSTRUCTOR_RAISED in why:
        return USER_ERROR, why
    if out_of_memory(why) or out_of_memory(reason):
        return NODE_OUT_OF_MEMORY, why or reason
    if why:
        return INTENDED_SYSTEM_EXIT, f"Worker exits because {why}"
    if reason == "exit code 0":
        if worker.state == BUSY:
            return INTENDED_USER_EXIT, f"{USER_EXIT} Its last call is over (max_calls), or raised SystemExit(0)."
        return INTENDED_SYSTEM_EXIT, "Worker exits because it was idle for a long time."
    hint = "; hint: perhaps the kernel's OOM killer ended it, see dmesg" if "SIGKILL" in reason else ""
    return SYSTEM_ERROR, f"Worker exits unexpectedly: {reason}{hint}"


# ------------------------------------------------------------ worker killing policy
# The choice of the worker that ends when the memory of a node is short, its time, and the text that says why.


SMALLEST_SHARE = 4
"""Only workers that use at least this fraction (1 / 4) of what the largest one does are considered: the end of a
smaller one would free too little."""
_WORKERS_LISTED = 10


class Candidate(Struct, frozen=True):
    """A worker that could be killed.

    Attributes:
        worker: its proc id. pid: its process id.
        used: bytes that its end would free.
        since: when it began its task or actor; seconds of any clock.
        retriable: whether its task or actor is started again without the user's help; of an idle worker, whether it
            owns nothing.
        name: of the task or actor, for users; "" for an idle worker.
    """

    worker: bytes
    pid: int
    used: int
    since: float
    retriable: bool
    name: str


class WorkerKillingPolicy:
    """Decides when a worker has to be killed: above the threshold, and not while the previous one is still ending.

    Args:
        threshold: share of the memory limit; 0: no worker is ever killed.
        exit_timeout: seconds after which a killed worker is not waited for any more.
    """

    def __init__(self, threshold: float, exit_timeout: float = 2.0) -> None:
        self._threshold = threshold
        self._exit_timeout = exit_timeout
        self._victim = b""
        self._wait_until = 0.0

    def must_kill(self, now: float, used: int, limit: int) -> bool:
        """True if a worker must be killed now. used, limit: bytes."""
        if not self._threshold or limit <= 0 or used <= self._threshold * limit:
            return False
        return not self._victim or now >= self._wait_until

    def is_critical(self, used: int, limit: int) -> bool:
        """True if no time is left to learn from the owners which tasks are retriable."""
        return used > (1.0 + self._threshold) / 2 * limit

    def worker_killed(self, now: float, worker: bytes) -> None:
        """This worker was sent a SIGKILL, or was asked to exit."""
        self._victim, self._wait_until = worker, now + self._exit_timeout

    def worker_died(self, worker: bytes) -> None:
        """A worker is dead, or stays."""
        if worker == self._victim:
            self._victim = b""


def choose_victim(candidates: Iterable[Candidate]) -> Candidate | None:
    """The worker whose end frees much and loses little: among the large ones a retriable one, the newest. One that does
    nothing and owns objects is the last."""
    alive = list(candidates)
    largest = max((one.used for one in alive), default=0)
    large = [one for one in alive if one.used * SMALLEST_SHARE >= largest]
    return max(
        large, key=lambda one: (one.retriable, bool(one.name) or one.retriable, one.since, one.used), default=None
    )


def explain_kill(
    victim: Candidate, candidates: Iterable[Candidate], where: str, used: int, limit: int, threshold: float
) -> str:
    """Why this worker was killed, and what the others use: the text of the OutOfMemoryError.

    Args:
        where: the node, and what sets its limit. used, limit: bytes of it. threshold: share of it.
    """
    top = sorted(candidates, key=lambda one: -one.used)
    beside = sum(one.used for one in top if one.name and one is not victim)
    alone = f" {NOTHING_BESIDE}" if beside * SMALLEST_SHARE < victim.used else ""
    again = "what it ran may run again" if victim.retriable else "no worker as large as it runs what may be run again"
    lines = [
        LOW_MEMORY,
        f"Memory on {where} was {_gib(used)} / {_gib(limit)} ({used / limit:.3f}), above the threshold of {threshold:g}"
        f". The worker with pid {victim.pid}, which ran {victim.name or 'nothing'} and used {_gib(victim.used)}, was "
        f"ended: of the large ones it is the newest, and {again}.{alone}",
        "Workers by memory:",
        *(f"  pid {one.pid}: {_gib(one.used)}, {one.name or 'idle'}" for one in top[:_WORKERS_LISTED]),
        "hint: let tasks ask for more (num_cpus, memory=), so that fewer run side by side; "
        "HPCRAY_MEMORY_USAGE_THRESHOLD sets the threshold (0: no worker is ended)",
    ]
    return "\n".join(lines)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
