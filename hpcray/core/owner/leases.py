"""The submitter's side of leases: which task goes to which leased worker, and how many leases to ask for.

Pure. A worker takes one task at a time unless the tasks are known to be short: then up to `PIPELINE_US` of work is
sent ahead, so that it never waits for us. Of somewhat longer ones one or a few are sent ahead, as long as as many for
each other worker still wait. What was sent ahead and has not started is taken back when its worker makes no progress
(`tick`), so a short task never waits behind a long one while another worker idles.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcray.base.ids import node_of, raylet_of
from hpcray.core.owner.fetch_ahead import FetchAhead
from hpcray.core.owner.tasks import LeaseClass, LeasedWorker, Push, Send, Task
from hpcray.wire.messages import Demand, LeaseGranted, LeaseReturn, Shape, TakeBack

SHORT_US = 1_000.0
PIPELINE_US = 5_000.0
AHEAD_US = 50_000.0
"""Below this, the round trip for the next task (0.1 ms on the same node, 0.6 ms to another, more on a busy machine) is
a part of the run time that is worth saving."""
AHEAD_LOAD_US = 25_000.0
OVERHEAD_US = 20.0
STALL = 0.02
TRIES = 8


class LeaseClient:
    """All lease classes of one process.

    Args:
        me: our proc id. send: queue a message. push: send one task to a worker. idle_timeout: seconds after which an
        idle lease is returned.

    Attributes:
        ahead: has arguments of queued tasks fetched to the nodes of our workers; None on a single node.
    """

    def __init__(self, me: bytes, send: Send, push: Push, idle_timeout: float) -> None:
        self.classes: dict[Shape, LeaseClass] = {}
        self.by_index: list[LeaseClass] = []
        self.workers: dict[bytes, LeasedWorker] = {}
        self.ahead: FetchAhead | None = None
        self._raylet = raylet_of(node_of(me))
        self._my_node = node_of(me)
        self._send = send
        self._push = push
        self._idle_timeout = idle_timeout

    def klass(self, shape: Shape) -> LeaseClass:
        """The class of a shape."""
        found = self.classes.get(shape)
        if found is None:
            found = self.classes[shape] = LeaseClass(len(self.by_index), shape)
            self.by_index.append(found)
        return found

    def submit(self, task: Task, klass: LeaseClass) -> bool:
        """A task whose arguments are ready. Returns whether it was sent to an idle worker, so must be flushed now."""
        task.klass = klass
        fn = task.fn
        assert fn is not None
        if not klass.queue:
            idle = self._room(klass, task)
            if idle is not None:
                first = not idle.inflight
                self._give(idle, task)
                return first
        klass.queue.append(task)
        if task.slots is not None and self.ahead is not None:
            self.ahead.queued(task, klass)
        return self._ask(klass)

    def granted(self, msg: LeaseGranted, now: float) -> None:
        """A worker is ours."""
        klass = self.by_index[msg.klass]
        if node_of(msg.worker) == self._my_node:
            klass.granted_local += 1
        worker = LeasedWorker(msg.worker, msg.lease, klass, now)
        worker.wanted = msg.wanted
        self.workers[msg.worker] = worker
        klass.ring.append(worker)
        klass.idle[msg.worker] = worker
        if klass.queue:
            self.pump(klass)
            if self.ahead is not None:
                self.ahead.top_up(klass, node_of(msg.worker))
            self._ask(klass)
        else:
            self._give_up(worker)

    def answered(self, proc: bytes, task_id: bytes, us: int, now: float) -> Task | None:
        """A reply came: the task leaves its worker, which may get more."""
        worker = self.workers.get(proc)
        if worker is None:
            return None
        task = worker.inflight.pop(task_id, None)
        if task is None:
            return None
        fn = task.fn
        assert fn is not None
        worker.load -= task.cost
        fn.us = us if fn.us < 0.0 else fn.us + 0.2 * (us - fn.us)
        worker.progress = now
        worker.asked_back = False
        klass = worker.klass
        queue = klass.queue
        if worker.reclaimed:
            if not worker.inflight:
                self._give_up(worker)
            return task
        while queue and self._fits(worker, queue[0]):
            self._give(worker, queue.popleft() if self.ahead is None else self._next(klass, worker))
            if not queue:
                self._ask(klass)
        if not worker.inflight:
            if worker.wanted:
                self._give_up(worker)
                return task
            worker.load = 0.0
            worker.idle_since = now
            klass.idle[proc] = worker
        return task

    def pump(self, klass: LeaseClass) -> None:
        """Send queued tasks to workers that have room."""
        queue = klass.queue
        while queue:
            worker = self._room(klass, queue[0])
            if worker is None:
                return
            self._give(worker, queue.popleft() if self.ahead is None else self._next(klass, worker))
        self._ask(klass)

    def taken_back(self, proc: bytes, ids: Iterable[bytes]) -> None:
        """A worker gave back tasks that it had not started: they queue again, first in line."""
        worker = self.workers.get(proc)
        if worker is None:
            return
        back = [worker.inflight.pop(i) for i in ids if i in worker.inflight]
        if back:
            worker.asked_back = bool(worker.inflight)  # busy or blocked: nothing is sent ahead until it answers
            worker.load = sum(task.cost for task in worker.inflight.values())
            worker.klass.queue.extendleft(reversed(back))
            if not worker.inflight and worker.reclaimed:
                self._give_up(worker)
            elif not worker.inflight:
                worker.klass.idle[proc] = worker
            if len(worker.inflight) > 1:  # some crossed this answer; behind a task that blocks they would wait for it
                self._send(proc, TakeBack())
            self.pump(worker.klass)
            self._ask(worker.klass)

    def suspect(self, proc: bytes) -> None:
        """A worker may be dead: it is sent nothing more. If it is, `lost` follows."""
        worker = self.workers.get(proc)
        if worker is not None:
            worker.asked_back = True
            worker.klass.idle.pop(proc, None)

    def lost(self, proc: bytes) -> list[Task]:
        """A leased worker died. Returns its unanswered tasks in the order sent; the first was probably running."""
        worker = self.workers.pop(proc, None)
        if worker is None:
            return []
        self._forget(worker)
        tasks = list(worker.inflight.values())
        worker.inflight.clear()
        self._ask(worker.klass, force=True)
        return tasks

    def leaves(self, proc: bytes) -> None:
        """A worker's last call is about to run; from here on its lease is not returned: its raylet would grant it."""
        worker = self.workers.get(proc)
        if worker is not None:
            worker.leaving = worker.reclaimed = True

    def reclaim(self, node: int, busy: bool = True) -> None:
        """Others wait on that node: return what is idle there now, the rest when it has done what it was sent; or, if
        not `busy`, when there is nothing more to do for it."""
        for worker in [w for w in self.workers.values() if node_of(w.proc) == node]:
            if worker.inflight:
                worker.wanted = True
                worker.reclaimed = worker.reclaimed or busy
            else:
                self._give_up(worker)

    def tick(self, now: float) -> bool:
        """Return idle leases, take back what stalls. Returns whether another tick is needed."""
        for worker in list(self.workers.values()):
            if not worker.inflight:
                if now - worker.idle_since >= self._idle_timeout:
                    self._give_up(worker)
            elif worker.progress < 0.0:
                worker.progress = now
            elif len(worker.inflight) > 1 and not worker.asked_back and now - worker.progress > _patience(worker):
                worker.asked_back = True
                self._send(worker.proc, TakeBack())
        return bool(self.workers)

    def cancel_queued(self, task: Task) -> bool:
        """Take a task out of its queue; False when it is not there."""
        klass = task.klass
        if klass is not None and task in klass.queue:
            klass.queue.remove(task)
            klass.promised.pop(task.id, None)
            self._ask(klass)  # a worker whose environment takes minutes to set up need not be waited for
            return True
        return False

    def give_up_all(self, klass: LeaseClass) -> None:
        """Withdraw what the class asked for (its queue is empty now)."""
        self._ask(klass, force=True)

    # ------------------------------------------------------------ inside

    def _room(self, klass: LeaseClass, task: Task) -> LeasedWorker | None:
        """A worker for a task: an idle one, else for a short task one of the next few that have room."""
        if klass.idle:
            return next(reversed(klass.idle.values()))
        us = task.fn.us  # type: ignore[union-attr]
        if 0.0 <= us < SHORT_US and task.retries != 0:
            ring = klass.ring
            for _ in range(min(TRIES, len(ring))):
                worker = ring[0]
                ring.rotate(-1)
                if worker.load + us < PIPELINE_US and not worker.asked_back and not worker.reclaimed:
                    return worker
        return None

    def _next(self, klass: LeaseClass, worker: LeasedWorker) -> Task:
        """The queued task that a worker gets next."""
        if self.ahead is None or (klass.queue[0].slots is None and not klass.promised):  # nothing to choose
            return klass.queue.popleft()
        return self.ahead.take(klass, worker)

    def _fits(self, worker: LeasedWorker, task: Task) -> bool:
        """Whether a worker that has just answered takes this task too."""
        sent = len(worker.inflight)
        if not sent:
            return True
        us = task.fn.us  # type: ignore[union-attr]
        if not 0.0 <= us < AHEAD_US or task.retries == 0:
            return False
        if us < SHORT_US and worker.load + us < PIPELINE_US:
            return True
        if worker.load >= AHEAD_US or (sent > 1 and (us < SHORT_US or worker.load + us > AHEAD_LOAD_US)):
            return False
        # While there are as many for each other worker, it does not matter which of them are next.
        return len(worker.klass.queue) > sent * len(worker.klass.ring)

    def _give(self, worker: LeasedWorker, task: Task) -> None:
        us = task.fn.us  # type: ignore[union-attr]
        cost = (us if us > 0.0 else 0.0) + OVERHEAD_US
        if not worker.inflight:
            worker.klass.idle.pop(worker.proc, None)
            worker.load = 0.0
            worker.progress = -1.0
        worker.load += cost
        task.cost = cost
        task.worker = worker.proc
        worker.inflight[task.id] = task
        self._push(task, worker.proc)

    def _ask(self, klass: LeaseClass, force: bool = False) -> bool:
        """Tell our raylet what we want, when it changed enough to matter. Returns whether a message was queued."""
        want = len(klass.queue)
        have = klass.sent_total - klass.granted_local  # what the raylet believes is still wanted
        if want == have or not (force or have <= 0 or want == 0 or want >= 2 * have or 2 * want <= have):
            return False
        klass.sent_total = klass.granted_local + want
        self._send(self._raylet, Demand(klass.index, klass.shape, klass.sent_total))
        return True

    def _forget(self, worker: LeasedWorker) -> None:
        worker.klass.idle.pop(worker.proc, None)
        worker.klass.ring.remove(worker)

    def _give_up(self, worker: LeasedWorker) -> None:
        klass = worker.klass
        del self.workers[worker.proc]
        self._forget(worker)
        if not klass.queue:
            self._ask(klass, force=True)
        if not worker.leaving:
            self._send(raylet_of(node_of(worker.proc)), LeaseReturn(worker.lease))


def _patience(worker: LeasedWorker) -> float:
    """Seconds without an answer after which what the worker has not started is taken back."""
    running = next(iter(worker.inflight.values()))
    return max(STALL, 2e-6 * running.fn.us)  # type: ignore[union-attr]
