"""The submitter's side of leases: chooses the leased worker for each task, and the number of leases to request.

Pure. A worker takes one task at a time unless the tasks are known to be short: then up to `PIPELINE_US` of work is
sent ahead, so that it never waits for us. Of somewhat longer ones one or a few are sent ahead, as long as as many for
each other worker still wait. What was sent ahead and has not started is taken back when its worker makes no progress
(`tick`), so a short task never waits behind a long one while another worker idles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from hpcray.common.ids import FIRST_RETURN, node_of, raylet_of
from hpcray.common.labels import NO_PLACES, TIME_LEFT, Place, lasting, near_node
from hpcray.core.core_worker.object_entry import STORED, ObjectEntry
from hpcray.core.core_worker.task import LeasedWorker, PackedTasks, PendingTask, Push, SchedulingClass, Send
from hpcray.protocol.messages import ArgRef, LeaseGranted, Prefetch, RequestLeases, ReturnLease, ReturnTasks, Shape

SHORT_US = 1_000.0
"""Microseconds of mean run time; up to `PIPELINE_US` of tasks below this are sent ahead to one worker."""
PIPELINE_US = 5_000.0
AHEAD_US = 50_000.0
"""Microseconds of mean run time. Below this, the round trip for the next task (0.1 ms on the same node, 0.6 ms to
another, more on a busy machine) is a part of the run time that is worth saving."""
AHEAD_LOAD_US = 25_000.0
"""Microseconds of expected run time that are sent ahead of such tasks."""
OVERHEAD_US = 20.0
"""Microseconds added to the expected run time of each task sent."""
STALL_TIMEOUT = 0.02
"""Seconds without an answer before unstarted tasks are taken back, at least."""
LONG_US = 30_000_000.0
"""Microseconds of mean run time from which on it matters how long a node stays."""
DURATION_MARGIN = 1.2
"""A node is to stay for so many times the mean run time."""
TASKS_CONSIDERED = 16
"""Number of tasks at the front of a queue that are looked at for the node which has their arguments."""
WORKERS_TRIED = 8
"""Workers of the rotation that are tried for a short task."""
SEEN_AT_ONCE, TICKS_FOR_ALL = 2_000, 10
"""Workers at which a tick looks at least, and ticks after which it has looked at all of them."""


Refuse = Callable[[PendingTask], None]
"""Ends a task that must not start."""


class LeaseManager:
    """All scheduling classes of one process.

    Args:
        me: our proc id. send: queue a message. push: send one task to a worker. idle_timeout: seconds after which an
        idle lease is returned.
        packed: where packed tasks are (`enqueue_packed`); None: there are none.

    Attributes:
        prefetcher: has arguments of queued tasks fetched to the nodes of our workers; None on a single node.
        packing: whether tasks may be packed.
        submit: sends or queues a task whose arguments are ready. Returns True when it was sent to an idle worker, so
            must be flushed now, or when a request was queued.
        pump: sends queued tasks to workers that have room.
    """

    def __init__(
        self,
        me: bytes,
        send: Send,
        push: Push,
        idle_timeout: float,
        prefetcher: ArgumentPrefetcher | None = None,
        packed: PackedTasks | None = None,
    ) -> None:
        self.classes: dict[Shape, SchedulingClass] = {}
        self.by_index: list[SchedulingClass] = []
        self.workers: dict[bytes, LeasedWorker] = {}
        self._at_node: dict[int, dict[bytes, LeasedWorker]] = {}
        self._unseen: list[LeasedWorker] = []
        self.prefetcher = prefetcher
        self._raylet = raylet_of(node_of(me))
        self._my_node = node_of(me)
        self._send = send
        self._push = push
        self._idle_timeout = idle_timeout
        # Two states: those of jobs that refuse and sort nothing, which are most, and that of all others.
        self.submit: Callable[[PendingTask, SchedulingClass], bool] = self._submit
        self.pump: Callable[[SchedulingClass], None] = self._pump
        self._refusals: list[Callable[[SchedulingClass], Refuse | None]] = []
        self._by_function: dict[SchedulingClass, dict[bytes, SchedulingClass]] = {}
        self._expects = False
        self._packed = packed
        self.packing = packed is not None

    def use_prefetcher(self, prefetcher: ArgumentPrefetcher) -> None:
        """The job has several nodes from now on."""
        self.prefetcher = prefetcher

    def scheduling_class(self, shape: Shape) -> SchedulingClass:
        """The scheduling class of a shape."""
        found = self.classes.get(shape)
        if found is None:
            found = self.classes[shape] = SchedulingClass(len(self.by_index), shape)
            self.by_index.append(found)
        return found

    def _submit(self, task: PendingTask, scheduling_class: SchedulingClass) -> bool:
        task.scheduling_class = scheduling_class
        fn = task.fn
        assert fn is not None
        if not scheduling_class.queue:
            idle = self._room(scheduling_class, task)
            if idle is not None:
                first = not idle.inflight
                self._give(idle, task)
                return first
        scheduling_class.queue.append(task)
        if task.slots is not None and self.prefetcher is not None:
            self.prefetcher.queued(task, scheduling_class)
        return self._ask(scheduling_class)

    def enqueue_packed(self, object_id: bytes, scheduling_class: SchedulingClass) -> bool:
        """Queue a packed task behind others. Its class has a queue, and `packing` is True.

        Returns:
            True when a request was queued.
        """
        scheduling_class.queue.append(object_id)
        return self._ask(scheduling_class)

    def granted(self, msg: LeaseGranted, now: float) -> None:
        """Use a worker whose lease was granted to us."""
        scheduling_class = self.by_index[msg.scheduling_class]
        if node_of(msg.worker) == self._my_node:
            scheduling_class.granted_local += 1
        else:
            scheduling_class.granted_elsewhere += 1
            scheduling_class.unreported += 1
        worker = LeasedWorker(msg.worker, msg.lease, scheduling_class, now)
        worker.contended = msg.contended
        self.workers[msg.worker] = worker
        self._at_node.setdefault(node_of(msg.worker), {})[msg.worker] = worker
        scheduling_class.add_worker(worker)
        if scheduling_class.queue:
            self.pump(scheduling_class)
            if self.prefetcher is not None:
                self.prefetcher.top_up(scheduling_class, node_of(msg.worker))
            self._ask(scheduling_class)
        else:
            self._give_up(worker)

    def answered(self, proc: bytes, task_id: bytes, us: int, now: float) -> PendingTask | None:
        """Remove a task whose reply came from its worker, which may get more."""
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
        scheduling_class = worker.scheduling_class
        queue = scheduling_class.queue
        if worker.reclaimed:
            if not worker.inflight:
                self._give_up(worker)
            return task
        while queue:
            first = queue[0]
            if type(first) is bytes:
                first = queue[0] = self._packed.take(first)  # type: ignore[union-attr]
            if not self._fits(worker, first):
                break
            self._give(worker, queue.popleft() if self.prefetcher is None else self._next(scheduling_class, worker))
            if not queue:
                self._ask(scheduling_class)
        if not worker.inflight:
            if worker.contended:
                self._give_up(worker)
                return task
            worker.load = 0.0
            worker.idle_since = now
            scheduling_class.idle[proc] = worker
        return task

    def _pump(self, scheduling_class: SchedulingClass) -> None:
        queue = scheduling_class.queue
        while queue:
            worker = self._room(scheduling_class, self.at(queue, 0))
            if worker is None:
                return
            self._give(worker, queue.popleft() if self.prefetcher is None else self._next(scheduling_class, worker))
        self._ask(scheduling_class)

    def taken_back(self, proc: bytes, ids: Iterable[bytes]) -> None:
        """Queue tasks again, first in line, that a worker gave back because it had not started them."""
        worker = self.workers.get(proc)
        if worker is None:
            return
        back = [worker.inflight.pop(i) for i in ids if i in worker.inflight]
        if back:
            worker.asked_back = bool(worker.inflight)  # busy or blocked: nothing is sent ahead until it answers
            worker.load = sum(task.cost for task in worker.inflight.values())
            worker.scheduling_class.queue.extendleft(reversed(back))
            if worker.scheduling_class in self._by_function:
                self._move_other_functions(worker.scheduling_class)
            if not worker.inflight and worker.reclaimed:
                self._give_up(worker)
            elif not worker.inflight:
                worker.scheduling_class.idle[proc] = worker
            if len(worker.inflight) > 1:  # some crossed this answer; behind a task that blocks they would wait for it
                self._send(proc, ReturnTasks())
            self.pump(worker.scheduling_class)
            self._ask(worker.scheduling_class)

    def suspect(self, proc: bytes) -> None:
        """Send nothing more to a worker that may be dead. If it is, `lost` follows."""
        worker = self.workers.get(proc)
        if worker is not None:
            worker.asked_back = True
            worker.scheduling_class.idle.pop(proc, None)

    def lost(self, proc: bytes) -> list[PendingTask]:
        """Remove a dead worker. Returns its unanswered tasks in the order sent; the first was probably running."""
        worker = self.workers.pop(proc, None)
        if worker is None:
            return []
        self._forget(worker)
        tasks = list(worker.inflight.values())
        worker.inflight.clear()
        self._ask(worker.scheduling_class, force=True)
        return tasks

    def leaves(self, proc: bytes) -> None:
        """Note that a worker ends after this call: its lease is not returned, as its raylet would grant it again."""
        worker = self.workers.get(proc)
        if worker is not None:
            worker.leaving = worker.reclaimed = True

    def reclaim(self, node: int, busy: bool = True) -> None:
        """Return leases at a node on which others wait: of idle workers now, of the rest when their tasks are done.

        Args:
            busy: False: the rest may go on as long as tasks are queued for them.
        """
        for worker in list(self._at_node.get(node, {}).values()):
            if worker.inflight:
                worker.contended = True
                worker.reclaimed = worker.reclaimed or busy
            else:
                self._give_up(worker)

    def return_idle(self) -> None:
        """Return the leases that have no work, before their time is over."""
        for worker in [worker for worker in self.workers.values() if not worker.inflight]:
            self._give_up(worker)

    def tick(self, now: float) -> bool:
        """Return idle leases, take back tasks of workers that stall. Returns True when another tick is needed.

        With very many workers each tick looks at some of them, and `TICKS_FOR_ALL` ticks at all.
        """
        for worker in self._next_to_see():
            if not worker.inflight:
                if now - worker.idle_since >= self._idle_timeout:
                    self._give_up(worker)
            elif worker.progress < 0.0:
                worker.progress = now
            elif len(worker.inflight) > 1 and not worker.asked_back and now - worker.progress > _stall_timeout(worker):
                worker.asked_back = True
                self._send(worker.proc, ReturnTasks())
        return bool(self.workers)

    def _next_to_see(self) -> list[LeasedWorker]:
        count = len(self.workers)
        if count <= SEEN_AT_ONCE or not self._unseen:
            self._unseen = list(self.workers.values())
        part = max(SEEN_AT_ONCE, count // TICKS_FOR_ALL)
        seen, self._unseen = self._unseen[:part], self._unseen[part:]
        return [worker for worker in seen if self.workers.get(worker.proc) is worker]

    def cancel_queued(self, task: PendingTask) -> bool:
        """Take a task out of its queue; False when it is not there."""
        scheduling_class = task.scheduling_class
        position = self.position(task)
        if position is not None:
            self.at(scheduling_class.queue, position)
            del scheduling_class.queue[position]
            scheduling_class.prefetch_node.pop(task.id, None)
            self._ask(scheduling_class)  # a worker whose environment takes minutes to set up need not be waited for
            return True
        return False

    # ------------------------------------------------------------ packed tasks

    def at(self, queue: deque[Any], position: int) -> PendingTask:
        """The task at a position of a queue; from here on it is not packed."""
        task: PendingTask | bytes = queue[position]
        if isinstance(task, bytes):
            assert self._packed is not None
            task = queue[position] = self._packed.take(task)
        return task

    def position(self, task: PendingTask) -> int | None:
        """How many tasks are before this one in its queue; None when it is in none."""
        queue: deque[Any] | None = getattr(task.scheduling_class, "queue", None)
        for item in (task.id + FIRST_RETURN, task):
            if queue and item in queue:
                return queue.index(item)
        return None

    def queued(self, scheduling_class: SchedulingClass) -> Iterator[PendingTask]:
        """The tasks of a queue, in order. Packed ones stay packed: to look at, not to change."""
        for item in scheduling_class.queue:
            if isinstance(item, bytes):
                assert self._packed is not None
                item = self._packed.show(item)
            yield item

    def unpack_all(self) -> None:
        """Pack no tasks from here on, and unpack what is packed: something is to be decided for every single task."""
        if self.packing:
            self.packing = False
            for scheduling_class in self.by_index:
                tasks, queue = list(scheduling_class.queue), scheduling_class.queue
                queue.clear()
                queue.extend(self._packed.take(t) if isinstance(t, bytes) else t for t in tasks)  # type: ignore

    # ------------------------------------------------------------ classes whose tasks block

    def split_by_function(self, scheduling_class: SchedulingClass) -> None:
        """Give each function of a class a class of its own, as a raylet holds back leases: tasks of one function block,
        perhaps until one of another function has run.

        Few jobs ever need it: see `_submit_by_policy`.
        """
        if scheduling_class in self._by_function or any(
            scheduling_class in classes.values() for classes in self._by_function.values()
        ):
            return
        self.unpack_all()
        self.submit = self._submit_by_policy
        running = [next(iter(worker.inflight.values())) for worker in scheduling_class.rotation if worker.inflight]
        functions = [task.fn.id for task in running or scheduling_class.queue if task.fn is not None]
        most = max(functions, key=functions.count, default=b"")
        self._by_function[scheduling_class] = {most: scheduling_class}
        self._move_other_functions(scheduling_class)

    def _class_of(self, task: PendingTask, scheduling_class: SchedulingClass) -> SchedulingClass:
        classes = self._by_function.get(scheduling_class)
        if classes is None or task.fn is None:
            return scheduling_class
        found = classes.get(task.fn.id)
        if found is None:
            found = classes[task.fn.id] = SchedulingClass(len(self.by_index), scheduling_class.shape)
            self.by_index.append(found)
        return found

    def _move_other_functions(self, scheduling_class: SchedulingClass) -> None:
        queue = scheduling_class.queue
        others = [task for task in queue if self._class_of(task, scheduling_class) is not scheduling_class]
        for task in others:
            queue.remove(task)
            scheduling_class.prefetch_node.pop(task.id, None)
        if others:
            self._ask(scheduling_class, force=True)
        for task in others:
            self.submit(task, scheduling_class)

    # ------------------------------------------------------------ nodes that come and go

    def expect_durations(self) -> None:
        """Have tasks that take long, as those of their function that have run show, placed on nodes that stay for so
        long (`labels.lasting`). Only jobs whose nodes come and go need it: see `_submit_by_policy`."""
        self._expects = True
        self.unpack_all()
        self.submit = self._submit_by_policy

    def _lasting_class(self, task: PendingTask, scheduling_class: SchedulingClass) -> SchedulingClass:
        shape = scheduling_class.shape
        if task.fn is None or task.fn.us < LONG_US or TIME_LEFT in shape.strategy:
            return scheduling_class
        strategy = lasting(shape.strategy, task.fn.us * DURATION_MARGIN / 1e6)
        return self.scheduling_class(Shape(shape.resources, strategy, shape.env))

    # ------------------------------------------------------------ admission

    def admit_through(self, refusal: Callable[[SchedulingClass], Refuse | None]) -> None:
        """Ask `refusal` too from now on before tasks of a class are queued or sent: None admits them.

        Few jobs ever refuse a task: see `_submit_by_policy`; `pump` is another one likewise.
        """
        self._refusals.append(refusal)
        self.unpack_all()
        self.submit = self._submit_by_policy
        self.pump = self._pump_if_admitted

    def _refuse(self, scheduling_class: SchedulingClass) -> Refuse | None:
        return next(filter(None, (refusal(scheduling_class) for refusal in self._refusals)), None)

    def take_back_ahead(self, scheduling_class: SchedulingClass) -> None:
        """Take back from the workers of a class what was sent ahead and has not started."""
        for worker in scheduling_class.rotation:
            if len(worker.inflight) > 1 and not worker.asked_back:
                worker.asked_back = True
                self._send(worker.proc, ReturnTasks())

    def _submit_by_policy(self, task: PendingTask, scheduling_class: SchedulingClass) -> bool:
        """Submit a task under all that `admit_through`, `expect_durations` and `split_by_function` have set up.

        Each of the three makes this the way of `submit`, so that the jobs that use none of them, which are most, pay
        nothing for it.
        """
        refuse = self._refuse(scheduling_class)
        if refuse is None:
            if self._expects:
                scheduling_class = self._lasting_class(task, scheduling_class)
            scheduling_class = self._class_of(task, scheduling_class)
            return self._submit(task, scheduling_class)
        task.scheduling_class = scheduling_class
        refuse(task)
        return True

    def _pump_if_admitted(self, scheduling_class: SchedulingClass) -> None:
        refuse = self._refuse(scheduling_class)
        if refuse is None:
            self._pump(scheduling_class)
            return
        while scheduling_class.queue:
            refuse(scheduling_class.queue.popleft())
        self._ask(scheduling_class, force=True)

    def _room(self, scheduling_class: SchedulingClass, task: PendingTask) -> LeasedWorker | None:
        """Find a worker for a task: an idle one, else for a short task one of the next few that have room."""
        if scheduling_class.idle:
            return next(reversed(scheduling_class.idle.values()))
        us = task.fn.us  # type: ignore[union-attr]
        if 0.0 <= us < SHORT_US and task.retries != 0:
            rotation, turn = scheduling_class.rotation, scheduling_class.turn
            count = len(rotation)
            for _ in range(min(WORKERS_TRIED, count)):
                turn = turn + 1 if turn + 1 < count else 0
                worker = rotation[turn]
                if worker.load + us < PIPELINE_US and not worker.asked_back and not worker.reclaimed:
                    scheduling_class.turn = turn
                    return worker
            scheduling_class.turn = turn
        return None

    def _next(self, scheduling_class: SchedulingClass, worker: LeasedWorker) -> PendingTask:
        """Take the queued task that a worker gets next."""
        if self.prefetcher is None or (
            self.at(scheduling_class.queue, 0).slots is None and not scheduling_class.prefetch_node
        ):  # nothing to choose
            first: PendingTask = scheduling_class.queue.popleft()
            return first
        for position in range(min(TASKS_CONSIDERED, len(scheduling_class.queue))):
            self.at(scheduling_class.queue, position)
        return self.prefetcher.take(scheduling_class, worker)

    def _fits(self, worker: LeasedWorker, task: PendingTask) -> bool:
        """True when a worker that has just answered takes this task too."""
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
        return len(worker.scheduling_class.queue) > sent * len(worker.scheduling_class.rotation)

    def _give(self, worker: LeasedWorker, task: PendingTask) -> None:
        us = task.fn.us  # type: ignore[union-attr]
        cost = (us if us > 0.0 else 0.0) + OVERHEAD_US
        if not worker.inflight:
            worker.scheduling_class.idle.pop(worker.proc, None)
            worker.load = 0.0
            worker.progress = -1.0
        worker.load += cost
        task.cost = cost
        task.worker = worker.proc
        worker.inflight[task.id] = task
        self._push(task, worker.proc)

    def _ask(self, scheduling_class: SchedulingClass, force: bool = False) -> bool:
        """Send our raylet the number of leases needed, when it changed enough to matter.

        Returns:
            True when a message was queued.
        """
        want = len(scheduling_class.queue)
        have = (
            scheduling_class.sent_total - scheduling_class.granted_local
        )  # the raylet believes that these are missing
        if scheduling_class.unreported and want:
            # As many fewer are coming than our raylet believes: nothing may be on its way for what was queued since.
            if not (force or want >= 2 * (have - scheduling_class.unreported) or 2 * want <= have):
                return False
        elif want == have or not (force or have <= 0 or want == 0 or want >= 2 * have or 2 * want <= have):
            return False
        scheduling_class.sent_total = scheduling_class.granted_local + want
        self._request(scheduling_class)
        return True

    def _request(self, scheduling_class: SchedulingClass) -> None:
        scheduling_class.unreported = 0
        received = scheduling_class.granted_elsewhere
        request = RequestLeases(scheduling_class.index, scheduling_class.shape, scheduling_class.sent_total, received)
        self._send(self._raylet, request)

    def _forget(self, worker: LeasedWorker) -> None:
        worker.scheduling_class.remove_worker(worker)
        at_node = self._at_node[node_of(worker.proc)]
        del at_node[worker.proc]
        if not at_node:
            del self._at_node[node_of(worker.proc)]

    def _give_up(self, worker: LeasedWorker) -> None:
        scheduling_class = worker.scheduling_class
        del self.workers[worker.proc]
        self._forget(worker)
        if not scheduling_class.queue:
            self._ask(scheduling_class, force=True)
        elif near_node(scheduling_class.shape.strategy) is not None and node_of(worker.proc) != self._my_node:
            # Tasks wait that were submitted after this lease was counted as missing: no other one may be coming.
            self._request(scheduling_class)
        if not worker.leaving:
            self._send(raylet_of(node_of(worker.proc)), ReturnLease(worker.lease))


def _stall_timeout(worker: LeasedWorker) -> float:
    """Seconds without an answer after which the tasks that the worker has not started are taken back."""
    running = next(iter(worker.inflight.values()))
    return max(STALL_TIMEOUT, 2e-6 * running.fn.us)  # type: ignore[union-attr]


class LocalityLeasePolicy:
    """Sorts the tasks of a scheduling class by the node where their arguments are; each node has a class of its own.

    Tasks run where most bytes of their arguments are, unless everything there is busy and other nodes are not. Bytes
    that are on another node behind the same switch count, too, once for each switch that they need not leave.

    Args:
        entries: all objects that the process knows.
        node: its own.
        nodes: number of nodes.
        places: of the nodes in the network, where they are known.
    """

    def __init__(
        self,
        leases: LeaseManager,
        entries: Mapping[bytes, ObjectEntry],
        node: int,
        nodes: int,
        places: Mapping[int, Place] = NO_PLACES,
    ) -> None:
        self._leases = leases
        self._entries = entries
        self._node = node
        self._matters = nodes > 1
        self._switches: dict[int, list[Place]] = {}
        self._note_places(places)
        self._near: dict[SchedulingClass, dict[int, SchedulingClass]] = {}
        self._last: dict[SchedulingClass, Sequence[bytes]] = {}

    def cluster_grew(self, places: Mapping[int, Place]) -> None:
        """A node has joined the job: this one is not the only node any more."""
        self._matters = True
        self._note_places(places)

    def _note_places(self, places: Mapping[int, Place]) -> None:
        self._switches |= {node: [place[:at] for at in range(1, len(place) + 1)] for node, place in places.items()}

    def scheduling_class(self, task: PendingTask, scheduling_class: SchedulingClass) -> SchedulingClass:
        """The class for a task whose arguments are ready; `scheduling_class` itself where it makes no difference.

        Args:
            scheduling_class: by what the task asks for. One that says already where it runs stays as it is.
        """
        if not self._matters or scheduling_class.shape.strategy or type(scheduling_class.shape) is not Shape:
            return scheduling_class
        last = self._last.get(scheduling_class, ())
        slots = self._last[scheduling_class] = task.slots or ()
        # What the task before had too is no reason to run somewhere: each node fetches it once.
        there = self._bytes([object_id for object_id in slots if object_id not in last])
        again = not there
        if again:
            there = self._bytes(slots)
        if not there:
            return scheduling_class
        most = max(there.values())
        node = self._node if there.get(self._node) == most else min(n for n, size in there.items() if size == most)
        near = self._near_class(scheduling_class, node)
        if (again and near.queue) or (node == self._node and not self._busy_elsewhere(scheduling_class)):
            return scheduling_class
        return near

    def _bytes(self, objects: Sequence[bytes]) -> dict[int, int]:
        """Bytes times links that they need not cross, for each node that has some of the objects."""
        there: dict[int, int] = {}
        behind: dict[Place, int] = {}
        for object_id in objects:
            entry: Any = self._entries.get(object_id)
            if entry is not None and entry.state == STORED and entry.nodes:
                for node in entry.nodes:
                    there[node] = there.get(node, 0) + entry.size
                if self._switches:
                    for switch in {switch for node in entry.nodes for switch in self._switches.get(node, ())}:
                        behind[switch] = behind.get(switch, 0) + entry.size
        for node in there if behind else ():
            there[node] += sum(behind[switch] for switch in self._switches.get(node, ()))
        return there

    def _busy_elsewhere(self, scheduling_class: SchedulingClass) -> bool:
        """True when other nodes have work near their data; if not, they had better take some of ours at once."""
        near = self._near[scheduling_class]
        return any(found.queue or found.rotation for node, found in near.items() if node != self._node)

    def _near_class(self, scheduling_class: SchedulingClass, node: int) -> SchedulingClass:
        classes = self._near.setdefault(scheduling_class, {})
        found = classes.get(node)
        if found is None:
            shape = msgspec.structs.replace(scheduling_class.shape, strategy=f"near:{node}")
            found = classes[node] = self._leases.scheduling_class(shape)
        return found


_MAX_PASSES = 8
"""Times that the first task of a queue may be passed over for others."""


class ArgumentPrefetcher:
    """Fetches the arguments of tasks that wait for a busy worker to its node meanwhile, so that the task need not wait.

    As many waiting tasks of a scheduling class as it has workers get a prefetch node each, whose raylet gets a
    `Prefetch` of their arguments. A prefetch node binds no worker: it is a hint for the choice among the first few
    tasks.

    Args:
        entries: all objects that it knows.
        send: queues a message.
    """

    def __init__(self, entries: Mapping[bytes, ObjectEntry], send: Send) -> None:
        self._entries = entries
        self._send = send

    def queued(self, task: PendingTask, scheduling_class: SchedulingClass) -> None:
        """A task with objects among its arguments has just been queued."""
        prefetch_node = len(scheduling_class.prefetch_node)
        if prefetch_node < len(scheduling_class.rotation) and len(scheduling_class.queue) <= TASKS_CONSIDERED:
            self._prefetch(task, scheduling_class, node_of(scheduling_class.rotation[prefetch_node].proc))

    def take(self, scheduling_class: SchedulingClass, worker: LeasedWorker) -> PendingTask:
        """Take the queued task for a worker that has room: the first without a prefetch node other than the worker's,
        or the first of these whose arguments are all on its node.

        The first task's turn has come to be sent behind another one, and it is short: others go only if they are alike.
        """
        queue, prefetch_node, node = scheduling_class.queue, scheduling_class.prefetch_node, node_of(worker.proc)
        first = None
        if scheduling_class.passed < _MAX_PASSES:
            only = queue[0].fn if worker.inflight else None
            for index, other in enumerate(islice(queue, TASKS_CONSIDERED)):
                # What must not run twice (retries 0) is never sent ahead: no process could know whether it had started.
                if prefetch_node.get(other.id, node) == node and (only is None or (other.fn is only and other.retries)):
                    first = index if first is None else first
                    if not self._elsewhere(other.slots or (), node):
                        first = index
                        break
        at = first or 0
        task: PendingTask = queue[at]
        del queue[at]
        scheduling_class.passed = scheduling_class.passed + 1 if at else 0
        prefetch_node.pop(task.id, None)
        if not queue:
            prefetch_node.clear()  # of tasks that were cancelled, if any
        else:
            self.top_up(scheduling_class, node)
        return task

    def top_up(self, scheduling_class: SchedulingClass, node: int) -> None:
        """A worker of this node is busy from now on: choose it as prefetch node of one more task."""
        prefetch_node = scheduling_class.prefetch_node
        if len(prefetch_node) < len(scheduling_class.rotation):
            for task in islice(scheduling_class.queue, TASKS_CONSIDERED):
                if (
                    type(task) is not bytes
                    and task.slots is not None
                    and task.id not in prefetch_node
                    and self._prefetch(task, scheduling_class, node)
                ):
                    return

    def _prefetch(self, task: PendingTask, scheduling_class: SchedulingClass, node: int) -> bool:
        refs = self._elsewhere(task.slots or (), node)
        if refs:
            scheduling_class.prefetch_node[task.id] = node
            self._send(raylet_of(node), Prefetch(refs))
        return bool(refs)

    def _elsewhere(self, slots: Sequence[bytes], node: int) -> list[ArgRef]:
        """The objects that are in stores, but not in that of this node."""
        refs = []
        for object_id in slots:
            entry: Any = self._entries.get(object_id)
            if entry is not None and entry.state == STORED and entry.nodes and node not in entry.nodes:
                refs.append(ArgRef(object_id, entry.size, list(entry.nodes)))
        return refs
