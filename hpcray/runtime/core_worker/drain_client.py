"""The part of a driver or worker in a drain, the announced end of its job.

Callbacks run in a thread of their own: the main thread may sit in `get`, or in a task, and shall go on meanwhile.
"""

from __future__ import annotations

import inspect
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from hpcray.common.exceptions import JobDrainingError, NotEnoughTimeError, RayError
from hpcray.common.ids import HEAD, node_of, owner_of, raylet_of
from hpcray.core.core_worker.lease_manager import LeaseManager, Refuse
from hpcray.core.core_worker.object_entry import INLINE, PENDING, STORED
from hpcray.core.core_worker.object_table import Waiter
from hpcray.core.core_worker.task import PendingTask, SchedulingClass
from hpcray.protocol import messages as m
from hpcray.protocol.messages import Shape
from hpcray.protocol.messages.objects import ERROR
from hpcray.protocol.serialization import serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_refs import new_ref
from hpcray.runtime.core_worker.object_writer import ObjectWriter

Callback = Callable[[float], object]
callbacks: list[Callback] = []
"""Registered by `on_drain` in this interpreter, in that order."""

_DEAD_CHECK = 0.05
"""Seconds between two checks for the end of the session while the program waits."""
_DEADLINE_GRACE = 1.0
"""Seconds after the deadline at which such a wait ends."""


class DrainClient:
    """The state of the drain in one process, and the callbacks of its program.

    Attributes:
        reason: why the job drains; "" while it does not.
        deadline: monotonic time at which the job is ended.
        admission: the work that is not started for it.
        on_begin: called once, with the engine's lock held, when the drain begins.
        takes_part: whether this program takes part in the drain: it is then given time.
        borrowed: of owners whose nodes leave. leaving: nodes that leave the job while others stay.
    """

    def __init__(self, context: CoreWorkerContext, admission: DrainAdmission, borrowed: BorrowedObjects) -> None:
        self.reason = ""
        self.borrowed = borrowed
        self.leaving: set[int] = set()
        self.deadline = 0.0
        self.takes_part = False
        self.admission = admission
        admission.refusal_listeners.append(self.take_part)
        self.on_begin: list[Callable[[], object]] = []
        self._context = context
        self._pending: list[Callback] = []
        self._called: list[Callback] = []
        self._running = False
        self._ready = threading.Event()
        self._over = threading.Event()

    def on_drain_over(self, src: bytes, msg: m.DrainOver) -> None:
        """End `wait_for_checkpoints`: all that can be written are written (lock held)."""
        self._over.set()

    def seconds_left(self) -> float:
        """Seconds until the job is ended, not below 0."""
        return max(0.0, self.deadline - monotonic())

    def register(self, callback: Callback) -> None:
        """Call `callback` when the job drains; soon, if it drains already."""
        with self._context.engine.lock:
            if self.reason:
                self._start([callback])

    def take_part(self) -> None:
        """Note that the program knows of the drain: it called `draining()`, or got an error of it (lock held)."""
        if not self.takes_part:
            self.takes_part = True
            if self._ready.is_set():
                self._send_ready()

    def wait_for_checkpoints(self) -> None:
        """Before the program ends while the job drains: let callbacks end, and actors write their checkpoints."""
        if not self.reason or self._context.place.kind == "worker":
            return
        self._wait(self._ready)
        self._wait(self._over)

    # ------------------------------------------------------------ inside

    def on_drain(self, src: bytes, msg: m.Drain) -> None:
        """Begin the drain that the head announces (lock held)."""
        first = not self.reason
        self.reason = msg.reason
        self.deadline = monotonic() + msg.seconds
        if first:
            self.admission.all_tasks(msg.reason, self.deadline)
            for call in self.on_begin:
                call()
            self._start(list(callbacks))

    def _start(self, more: list[Callback]) -> None:
        """Run callbacks that have not run yet (lock held)."""
        self._pending += [callback for callback in more if callback not in self._called]
        self._called += more
        if not self._running:
            self._running = True
            threading.Thread(target=self._run, name="hpcray-drain", daemon=True).start()

    def _run(self) -> None:
        context = self._context
        while True:
            with context.engine.lock:
                if not self._pending:
                    self._running = False
                    self._ready.set()
                    self._send_ready()
                    return
                callback = self._pending.pop(0)
            run_callback(callback, self.seconds_left())

    def _send_ready(self) -> None:
        context = self._context
        if context.place.kind != "worker":
            context.engine.send(HEAD, m.DrainReady(self.takes_part or bool(self._called)))
            context.engine.flush()

    def _wait(self, event: threading.Event) -> None:
        asleep, me = self._context.engine.asleep, threading.get_ident()
        asleep.add(me)  # a KeyboardInterrupt is let through
        try:
            while not event.wait(_DEAD_CHECK):
                if self._context.dead is not None or monotonic() > self.deadline + _DEADLINE_GRACE:
                    return
        finally:
            asleep.discard(me)


def run_callback(callback: Callback, seconds: float) -> None:
    """Run one callback; its errors are printed, others still run."""
    try:
        callback(seconds)
    except BaseException:
        traceback.print_exc()


def check_callback(callback: Any) -> None:
    """Raise TypeError for what cannot be a callback."""
    if not callable(callback):
        raise TypeError(f"on_drain takes a function of one argument (seconds left), not {callback!r}")
    if inspect.iscoroutinefunction(callback):
        raise TypeError(f"on_drain takes no coroutine function ({callback!r}); hint: a method of an actor may be one")


def time_left(run: m.RunInfo) -> float | None:
    """Seconds until the batch system ends the job, not below 0; None when that is not known."""
    return max(0.0, run.end - time.time()) if run.end else None


Refusal = Callable[[PendingTask], BaseException]


class TimedShape(Shape, array_like=True, frozen=True):
    """The shape of tasks that have a `max_runtime`: they are leased apart from others. Raylets see a plain `Shape`."""

    max_runtime: float = 0.0


class DrainAdmission:
    """Refuses the tasks of one process that must not start any more. All methods want the engine's lock held.

    Attributes:
        refusal_listeners: called, in this order, when a task was refused.
    """

    def __init__(
        self, context: CoreWorkerContext, leases: LeaseManager, fail: Callable[[PendingTask, bytes], None]
    ) -> None:
        self._context = context
        self._leases = leases
        self._fail_task = fail
        self._drain: tuple[str, float] | None = None
        self._closed: dict[SchedulingClass, Refusal] = {}
        self._refuses = False
        self._limited: set[SchedulingClass] = set()
        self.refusal_listeners: list[Callable[[], None]] = []

    def with_max_runtime(self, shape: Shape, seconds: float | None) -> Shape:
        """Return the shape of tasks that take at most `seconds` (None: unknown). Lock not held."""
        if seconds is None:
            return shape
        made = TimedShape(shape.resources, shape.strategy, shape.env, max_runtime=float(seconds))
        with self._context.engine.lock:
            self.limit(made)
            self._context.engine.flush()
        return made

    def all_tasks(self, reason: str, deadline: float) -> None:
        """The job drains: what has not been sent to a worker fails, and so does all that comes."""
        self._drain = reason, deadline
        self._begin_to_refuse()
        for scheduling_class in self._leases.by_index:
            self._close(scheduling_class)

    def _fail(self, refusal: Refusal, task: PendingTask) -> None:
        self._fail_task(task, serialize_error(refusal(task)))
        for listener in self.refusal_listeners:
            listener()

    def limit(self, shape: TimedShape) -> None:
        """Tasks of this shape are started only while there is time for them."""
        drain_at = self._context.place.run.drain_at
        scheduling_class = self._leases.scheduling_class(shape)
        if not drain_at or scheduling_class in self._limited:
            return
        self._limited.add(scheduling_class)
        needed = shape.max_runtime

        def refusal(task: PendingTask) -> BaseException:
            return NotEnoughTimeError(f"task {task.name!r}", needed, max(0.0, drain_at - time.time()))

        def close(now: float) -> None:
            self._closed[scheduling_class] = refusal
            self._close(scheduling_class)

        last = monotonic() + (drain_at - time.time()) - needed
        if last <= monotonic():
            close(monotonic())
        else:
            self._context.engine.add_timer(last, close)

    def close(self, scheduling_class: SchedulingClass, refusal: Refusal) -> None:
        """No task of this class is started any more."""
        self._closed[scheduling_class] = refusal
        self._close(scheduling_class)

    def close_where(self, matches: Callable[[Shape], bool], refusal: Refusal) -> None:
        """Close every class whose shape matches."""
        for scheduling_class in self._leases.by_index:
            if matches(scheduling_class.shape):
                self.close(scheduling_class, refusal)

    def _close(self, scheduling_class: SchedulingClass) -> None:
        """Fail what waits, and take back what was sent ahead."""
        self._begin_to_refuse()
        self._leases.pump(scheduling_class)
        self._leases.take_back_ahead(scheduling_class)

    def _begin_to_refuse(self) -> None:
        if not self._refuses:
            self._refuses = True
            self._leases.admit_through(self._refusal)

    def _drain_refusal(self, task: PendingTask) -> BaseException:
        assert self._drain is not None
        reason, deadline = self._drain
        left = max(0.0, deadline - monotonic())
        return JobDrainingError(
            f"task {task.name!r} was not started: the job drains ({reason}), {left:.0f} s are left; hint: end the "
            "program, or catch this; what on_drain callbacks and __hpcray_checkpoint__ save is there in the next run"
        )

    def _refusal(self, scheduling_class: SchedulingClass) -> Refuse | None:
        refusal = self._drain_refusal if self._drain is not None else self._closed.get(scheduling_class)
        return None if refusal is None else partial(self._fail, refusal)


# ------------------------------------------------------------ evacuation
# Objects of a node that leaves the job, as one process sees them while that node still lives: it copies those that it
# owns to other nodes, and keeps those that it borrows; on the node itself, it has their borrowers keep its own.


_LOOK_INTERVAL = 0.02
_AT_ONCE = 32
_MOST_TRIES = 4
"""Nodes that are asked for a copy of one object: the first may have no room, or leave or die itself."""
_LATE_LOOK_INTERVAL = 0.5
_LONGEST_LOOK_INTERVAL = 0.5
_ASK_AGAIN = 2.0
"""Seconds after which a borrower is asked again: its node may have had no room, or an object may have moved."""


class ObjectEvacuation:
    """Copies what only a leaving node has, a few objects at a time (lock held in all methods).

    Args:
        msg: names the node. Each object goes to one of `msg.targets`, to the next where that has no room, or is gone.
    """

    def __init__(self, context: CoreWorkerContext, msg: m.Evacuate) -> None:
        self._context = context
        self._node, self._targets = msg.node, msg.targets
        self._most_tries = min(len(msg.targets), _MOST_TRIES)
        self._queue: deque[bytes] = deque()
        self._tries: dict[bytes, int] = {}
        self._under_way: dict[bytes, Waiter] = {}
        self._answered = False

    def go_on(self, now: float = 0.0) -> None:
        """Begin, or look what has been copied. The answer follows when all are copied or cannot be. What actors of the
        node return after that is copied too, as far as there is time."""
        context = self._context
        self._read_answers()
        if not self._queue and not self._under_way:
            self._queue.extend(self._find())
        while self._queue and len(self._under_way) < _AT_ONCE:
            self._copy(self._queue.popleft())
        if not self._under_way and not self._answered:
            self._answered = True
            context.engine.send(raylet_of(context.node), m.Evacuated(self._node))
        if self._under_way or self._node not in context.table.dead_nodes:
            pause = _LOOK_INTERVAL if self._under_way else _LATE_LOOK_INTERVAL
            context.engine.add_timer(monotonic() + pause, self.go_on)
        context.engine.flush()

    def _read_answers(self) -> None:
        replicas = self._context.table.replicas
        for oid in [oid for oid, waiter in self._under_way.items() if waiter.count <= 0]:
            del self._under_way[oid]
            if replicas.take_failure(oid, self._target(oid)) and self._tries[oid] < self._most_tries:  # no other reads
                self._queue.append(oid)

    def _find(self) -> list[bytes]:
        """The objects of this process that only the node has. Takes time: this process may own a million others."""
        me, tries, most = self._context.me, self._tries, self._most_tries
        return [
            oid
            for oid, entry in self._context.table.entries.items()
            if entry.state == STORED
            and entry.nodes == [self._node]
            and owner_of(oid) == me
            and tries.get(oid, 0) < most
        ]

    def _copy(self, oid: bytes) -> None:
        entry = self._context.table.entries.get(oid)
        if entry is not None and entry.state == STORED and entry.nodes == [self._node]:
            self._tries[oid] = self._tries.get(oid, 0) + 1
            waiter = self._under_way[oid] = Waiter()
            self._context.table.recovery.replicate(oid, self._target(oid), waiter)

    def _target(self, oid: bytes) -> int:
        """The target that is asked at this try."""
        return self._targets[(int.from_bytes(oid[-8:], "big") + self._tries[oid] - 1) % len(self._targets)]


class ObjectHandover:
    """The objects of this process, whose node leaves, that processes elsewhere refer to (lock held in all methods).

    Args:
        leaving: all nodes that leave, as far as this process knows. What only processes of these refer to goes too.
        is_saved: returns whether the state of the actor that this process is, if it is one, was saved or need not be.
    """

    def __init__(
        self, context: CoreWorkerContext, leaving: Collection[int], is_saved: Callable[[], bool] = lambda: True
    ) -> None:
        self._context = context
        self._leaving = leaving
        self._is_saved = is_saved
        self._asked_at: dict[tuple[bytes, bytes], float] = {}

    def begin(self, pause: float = _LOOK_INTERVAL) -> None:
        """Have each borrower keep a copy. The answer follows when none borrows anything any more, and the state of the
        actor is saved."""
        context, now = self._context, monotonic()
        lent = context.table.refs.lent_beyond(self._leaving)
        for borrower, oids in lent.items():
            self._ask(borrower, oids, now)
        if lent or not self._is_saved():
            longer = min(2 * pause, _LONGEST_LOOK_INTERVAL)
            context.engine.add_timer(now + pause, lambda _: self.begin(longer))
        else:
            kept_at = sorted({node_of(borrower) for borrower, _ in self._asked_at})
            context.engine.send(raylet_of(context.node), m.Evacuated(context.node, kept_at))
        context.engine.flush()

    def _ask(self, borrower: bytes, oids: list[bytes], now: float) -> None:
        entries, asked_at = self._context.table.entries, self._asked_at
        due = [
            oid
            for oid in oids
            if entries[oid].state != PENDING and asked_at.get((borrower, oid), -_ASK_AGAIN) <= now - _ASK_AGAIN
        ]
        if due:
            asked_at.update(((borrower, oid), now) for oid in due)
            contained = {oid: [ref._id for ref in entries[oid].contained or ()] for oid in due}
            self._context.engine.send(
                borrower, m.KeepCopies(due, {oid: refs for oid, refs in contained.items() if refs})
            )


class BorrowedObjects:
    """The objects that this process borrows from owners whose nodes leave."""

    def __init__(self, context: CoreWorkerContext, writer: ObjectWriter) -> None:
        self._context = context
        self._writer = writer
        self._small: deque[bytes] = deque()
        self._writes = False

    def keep(self, msg: m.KeepCopies) -> None:
        """Have this node's store keep the objects as soon as they exist (lock held)."""
        context = self._context
        table = context.table
        for oid in msg.ids:
            if oid not in table.entries:
                continue  # the owner will read that it is not borrowed any more
            inner = msg.contained.get(oid)
            if inner and table.entries[oid].contained is None:
                for ident in inner:
                    table.refs.ref_deserialized(ident, None)
                table.copies.hold(oid, [new_ref(ident) for ident in inner])
            if table.wait_ready(oid, Waiter(callback=partial(self._ready, oid))):
                self._ready(oid)
        context.engine.flush()

    def _ready(self, oid: bytes) -> None:
        table = self._context.table
        entry = table.entries.get(oid)
        if entry is None:
            return
        if entry.state == STORED:
            table.copies.keep(oid)
        elif entry.state == INLINE and entry.value[-1] == ERROR:
            table.copies.keep_error(oid)
        elif entry.state == INLINE and oid not in self._small:
            self._small.append(oid)
            if not self._writes:  # a store may let its writers wait
                self._writes = True
                threading.Thread(target=self._write, name="hpcray-keep-copies", daemon=True).start()

    def _write(self) -> None:
        """Write small values, which live in this process, into the store: processes that get a ref read them there."""
        context = self._context
        while True:
            with context.engine.lock:
                if not self._small:
                    self._writes = False
                    return
                oid = self._small.popleft()
                entry = context.table.entries.get(oid)
                blob = entry.value if entry is not None and entry.state == INLINE else b""
            if not blob:
                continue
            try:
                offset = self._writer.write_unless_there(oid, blob)
            except RayError:
                continue  # there is no room: its owner asks again
            with context.engine.lock:
                context.table.copies.written(oid, offset, len(blob))
                context.engine.flush()
