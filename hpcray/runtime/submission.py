"""Submitting tasks: dependencies, leases, pushes, replies, retries."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hpcray.base.errors import TaskCancelledError
from hpcray.base.ids import FIRST_RETURN, node_of, raylet_of, return_index, show_proc
from hpcray.core.owner.fetch_ahead import FetchAhead
from hpcray.core.owner.leases import LeaseClient
from hpcray.core.owner.locality import Locality
from hpcray.core.owner.table import INLINE, Waiter
from hpcray.core.owner.tasks import Function, LeaseClass, Task
from hpcray.runtime.actor_calls import ActorCalls
from hpcray.runtime.arguments import NO_ARGS, pack
from hpcray.runtime.cancelling import Cancelling
from hpcray.runtime.crashes import Crashes
from hpcray.runtime.engine import monotonic
from hpcray.runtime.links import MAX_BATCH
from hpcray.runtime.own_options import Own, OwnTask
from hpcray.runtime.reading import foreign
from hpcray.runtime.refs import ObjectRef, make_ref, new_ref
from hpcray.runtime.retrying import Retrying
from hpcray.runtime.streams import Streams
from hpcray.wire import messages as m
from hpcray.wire.serialization import is_error, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_LEASE_TICK = 0.02


_NOTHING = (NO_ARGS, None, None)


class Submitter:
    """The tasks that one process has submitted.

    Attributes:
        waits: why tasks of a lease class do not run, by the class's index, as far as somebody has said so.
        crashes: which of them ran out of memory.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._engine = process.engine
        self._table = process.table
        self.leases = LeaseClient(
            process.me, process.engine.send, self._push, process.config.idle_lease_timeout
        )  # fmt: skip
        if process.cluster_size > 1:
            self.leases.ahead = FetchAhead(self._table.entries, process.engine.send)
        self.retrying = Retrying(process, self)
        self.locality = Locality(self.leases, self._table.entries, process.node, process.cluster_size)
        self.actors = ActorCalls(process, self)
        self.cancelling = Cancelling(process, self)
        self.streams = Streams(process)
        self.waits: dict[int, str] = {}
        self._failing: deque[tuple[Task, bytes, bytes | None]] = deque()
        self._in_fail = self._ticking = False
        self.crashes = Crashes(process.config.task_oom_retries)

    def handlers(self) -> dict[type, Callable[[bytes, Any], None]]:
        """Message handlers, for the engine."""
        return {
            m.LeaseGranted: self._on_granted,
            m.TaskDone: self._on_done,
            m.TaskReply: self._on_reply,
            m.TakenBack: self._on_taken_back,
            m.ReclaimIdle: lambda src, msg: self.leases.reclaim(node_of(src), msg.busy),
            m.LeaseRevoked: lambda _, msg: self._process.process_died(msg.worker, msg.reason),
            m.Infeasible: self._on_infeasible,
            m.ActorState: lambda _, msg: self.actors.on_state(msg),
            m.CancelRef: lambda _, msg: self.cancelling.by_id(msg.id, msg.force, msg.recursive),
            m.StreamItem: self.streams.on_item,
        }

    # ------------------------------------------------------------ submitting

    def klass(self, shape: m.Shape) -> LeaseClass:
        """The class of a shape."""
        with self._engine.lock:
            return self.leases.klass(shape)

    def submit(
        self,
        fn: Function,
        klass: LeaseClass,
        num_returns: int,
        retries: int,
        retry_exceptions: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Submit one task. Returns its ref, a list of refs (num_returns > 1), or None (0)."""
        process, engine = self._process, self._engine
        blob, keep, slots = pack(process, args, kwargs) if args or kwargs else _NOTHING
        nested = engine.nested()
        with engine.lock:
            process._counter += 1
            task_id = process.me + process._counter.to_bytes(5, "big")
            task = Task(task_id, fn, "", blob, num_returns, keep, slots, retries)
            if retry_exceptions:
                task.retry_exceptions = retry_exceptions
            result: Any
            if num_returns == 1:
                object_id = task_id + FIRST_RETURN
                self._table.create(object_id, task).local = 1
                result = make_ref(ObjectRef)  # `new_ref`, without a call
                result._id = object_id
            else:
                result = self.returns(task)
            # No lambdas here: they would make cells of the variables of every call.
            if nested:
                engine.later(partial(self._start, task, klass))
            elif slots is None or self.resolve(task, partial(self.ready, task, klass)):
                if slots is not None:
                    klass = self.locality.klass(task, klass)
                if self.leases.submit(task, klass):
                    engine.flush()
                elif engine.dirty:
                    engine.buffered()
            elif engine.dirty:
                engine.flush()
        return result

    def submit_with(
        self,
        own: Own,
        fn: Function,
        shape: m.Shape,
        num_returns: int,
        retries: int,
        retry_exceptions: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`submit` for a task that has options of its own."""
        blob, keep, slots = pack(self._process, args, kwargs)
        nested = self._engine.nested()
        with self._engine.lock:
            task = OwnTask(self._process.next_task_id(), fn, "", blob, num_returns, keep, slots or [], retries)
            task.own = own
            task.retry_exceptions = retry_exceptions
            klass = self.leases.klass(shape)
            result = self.streams.open(task) if own.stream else self.returns(task)
            if nested:
                self._engine.later(lambda: self._start(task, klass))
                return result
            if self.resolve(task, lambda: self.ready(task, klass)):
                self.leases.submit(task, self.locality.klass(task, klass))
            self._engine.flush()
        return result

    def _start(self, task: Task, klass: LeaseClass) -> None:
        """Go on with a task that a destructor submitted while this thread held the lock."""
        with self._engine.lock:
            if task.slots is None or self.resolve(task, lambda: self.ready(task, klass)):
                self.ready(task, klass)
            self._engine.flush()

    def returns(self, task: Task) -> Any:
        """Entries and refs for what a task returns (lock held)."""
        refs = []
        for index in range(task.num_returns):
            object_id = task.id + return_index(index)
            self._table.create(object_id, task).local = 1
            refs.append(new_ref(object_id))
        return refs[0] if task.num_returns == 1 else refs or None

    def resolve(self, task: Task, then: Callable[[], None]) -> bool:
        """Whether every slot's object is ready; if not, `then` is called under the lock when it is."""
        waiter = Waiter(len(task.slots or ()), callback=then)
        for object_id in task.slots or ():
            try:
                ready = self._table.want_ready(object_id, waiter)
            except KeyError:
                raise foreign(object_id) from None
            if ready:
                waiter.count -= 1
        return waiter.count == 0 and not self.failed_argument(task)

    def ready(self, task: Task, klass: LeaseClass) -> None:
        """The arguments of a task are there, or one of them is an error (lock held)."""
        if not self.failed_argument(task) and not task.cancelled:
            self.leases.submit(task, klass if task.slots is None else self.locality.klass(task, klass))

    def failed_argument(self, task: Task) -> bool:
        """Whether one of the task's arguments is an error; then so is the task (`waiting` is -1)."""
        for object_id in task.slots or ():
            entry = self._table.entries[object_id]
            if entry.state == INLINE and is_error(entry.value):
                task.waiting = -1
                self.fail(task, entry.value, object_id)
                return True
        return False

    def slot_values(self, task: Task) -> tuple[list[m.ArgRef] | None, list[bytes] | None]:
        """Where the worker gets the values of the slots: refs in order, for each empty `inline` item."""
        if task.slots is None:
            return None, None
        if isinstance(task, OwnTask) and task.worker is not None:
            skip = self.streams.received(task.id)
            want = None if self.streams.is_open(task.id) else self.retrying.wanted(task)
            self._engine.send(task.worker, task.announcement(skip, want))
            self.streams.tell_taken(task, task.worker)
        refs: list[m.ArgRef] = []
        inline: list[bytes] = []
        for object_id in task.slots:
            entry = self._table.entries[object_id]
            if entry.state == INLINE:
                inline.append(entry.value)
            else:
                inline.append(b"")
                refs.append(m.ArgRef(object_id, entry.size, entry.nodes or []))
        return refs or None, inline

    def _push(self, task: Task, proc: bytes) -> None:
        engine = self._engine
        peer = engine.peers.get(proc) or engine.peer(proc)
        fn = task.fn
        assert fn is not None
        if fn.id not in peer.functions:
            peer.functions.add(fn.id)
            engine.send(proc, m.FunctionDef(fn.id, fn.name, fn.blob, fn.max_calls))
        if task.attempt and task.num_returns > 1:
            self.tell_wanted(task, proc)
        refs, inline = (None, None) if task.slots is None else self.slot_values(task)
        peer.out.append(m.PushTask(task.id, fn.id, task.args, task.num_returns, refs, inline))
        if not peer.dirty:
            peer.dirty = True
            engine.dirty.append(peer)
        elif len(peer.out) >= MAX_BATCH:
            engine.flush_peer(peer)

    def tell_wanted(self, task: Task, proc: bytes) -> None:
        """A task with several returns runs again: those that are still there are not to be made."""
        if not isinstance(task, OwnTask):  # those announce it with the rest
            want = self.retrying.wanted(task)
            if want is not None:
                self._engine.send(proc, m.CallOptions(task.id, want=want))

    # ------------------------------------------------------------ answers

    def _on_granted(self, src: bytes, msg: m.LeaseGranted) -> None:
        now = monotonic()
        shape = self.leases.by_index[msg.klass].shape
        self._engine.send(msg.worker, m.Leased(shape.resources, shape.env, shape.strategy))
        self.leases.granted(msg, now)
        if not self._ticking:
            self._ticking = True
            self._engine.add_timer(now + _LEASE_TICK, self._tick)

    def _tick(self, now: float) -> None:
        self._ticking = self.leases.tick(now)
        if self._ticking:
            self._engine.add_timer(now + _LEASE_TICK, self._tick)

    def _on_done(self, src: bytes, msg: m.TaskDone) -> None:
        leases = self.leases
        task = leases.answered(src, msg.task, msg.us, monotonic()) if src in leases.workers else None
        if task is None:
            task = self.actors.answered(src, msg.task)
        if task is not None:
            task.keep = None
            self._table.set_inline(msg.task + FIRST_RETURN, msg.value)
            if task.attempt:
                self.retrying.ended(task)

    def _on_taken_back(self, src: bytes, msg: m.TakenBack) -> None:
        if msg.leaving and msg.asked:
            self.leases.leaves(src)
            return
        leased = self.leases.workers.get(src)
        for task_id in msg.tasks if leased is not None else ():
            task = leased.inflight.get(task_id)  # type: ignore[union-attr]
            if task is not None and task.cancelled:
                # The worker gave it back before it heard that it was cancelled: it must not be sent again.
                self.leases.answered(src, task_id, 0, monotonic())
                self.fail_cancelled(task)
        self.leases.taken_back(src, msg.tasks)
        if msg.leaving:
            self._engine.send(src, m.TakeBack(True))
            for task in self.leases.lost(src):
                if task.cancelled:
                    self.fail_cancelled(task)
                else:
                    self.leases.submit(task, task.klass)

    def _on_reply(self, src: bytes, msg: m.TaskReply) -> None:
        task = self.leases.answered(src, msg.task, msg.us, monotonic()) or self.actors.answered(src, msg.task)
        if msg.borrowed:
            self._table.borrowed_by(src, msg.borrowed)
        if task is None:
            self.drop_returns(src, msg)
            return
        if msg.status == 1 and task.retry_exceptions and task.retries:
            self._engine.later(lambda: self.retrying.raised(task, msg))
            return
        self.finish(task, src, msg)

    def finish(self, task: Task, src: bytes, msg: m.TaskReply) -> None:
        """Take over what a task returned (lock held)."""
        table = self._table
        if isinstance(task, OwnTask) and task.own.stream:
            self.streams.finish(task, src, msg)
            task.keep = None
            self.retrying.ended(task)
            return
        durable = [msg.task + return_index(i) for i, item in enumerate(msg.returns) if item.size or item.contained]
        if durable:
            self.retrying.keep(task, durable)
        for index, item in enumerate(msg.returns):
            object_id = msg.task + return_index(index)
            contained = None
            if item.contained:
                for inner in item.contained:
                    table.adopt(inner, src)
                contained = [new_ref(inner) for inner in item.contained]
            if item.size:
                table.set_stored(object_id, item.size, node_of(src), contained)
            elif item.value:  # else it was not wanted: we have it
                table.set_inline(object_id, item.value, contained)
        task.keep = None
        if durable or task.attempt:
            self.retrying.ended(task)

    def drop_returns(self, src: bytes, msg: m.TaskReply) -> None:
        """Nobody waits for this result any more; the refs in it were kept for us all the same (lock held)."""
        for item in msg.returns:
            for inner in item.contained or ():
                self._table.adopt(inner, src)
                self._table.release(inner)

    def fail(self, task: Task, blob: bytes, argument: bytes | None = None) -> None:
        """End a task in an error, perhaps that of its `argument`; so end those that wait for it (lock held)."""
        self._failing.append((task, blob, argument))
        if self._in_fail:
            return  # a chain of any length: no recursion
        self._in_fail = True
        try:
            while self._failing:
                self._fail(*self._failing.popleft())
        finally:
            self._in_fail = False

    def _fail(self, task: Task, blob: bytes, argument: bytes | None) -> None:
        if argument is not None and task.attempt:
            self.retrying.argument_lost(task, argument)
        if isinstance(task, OwnTask) and task.own.stream:
            self.streams.fail(task, blob)
        for index in range(task.num_returns):
            self._table.set_inline(task.id + return_index(index), blob)
        task.keep = None
        if task.attempt or task.num_returns < 0:
            self.retrying.ended(task, blob)

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process is gone: its tasks run again, or fail."""
        leased = self.leases.workers.get(proc)
        if leased is not None and node_of(proc) not in self._table.dead_nodes:
            # Perhaps only our connection broke: its raylet must not keep the lease for us.
            self._engine.send(raylet_of(node_of(proc)), m.LeaseReturn(leased.lease, True))
        for position, task in enumerate(self.leases.lost(proc)):
            if task.cancelled:
                self.fail_cancelled(task)
            elif position == 0 and (over := self.crashes.verdict(task, show_proc(proc), reason)) is not None:
                self.fail(task, serialize_error(over))
            elif position == 0:
                self.retrying.crashed(task)
            else:
                task.worker = None
                self.retrying.submit(task)
        self.actors.process_died(proc, reason)

    def _on_infeasible(self, _: bytes, msg: m.Infeasible) -> None:
        """Print why tasks or actors of ours do not run, once. A class that has a lease waits for itself."""
        known, text = msg.reason, msg.reason
        self.waits[msg.klass] = msg.reason
        if msg.klass >= 0:
            klass = self.leases.by_index[msg.klass]
            if msg.waits:
                known = f"class {msg.klass} waits"
                if klass.ring or not klass.queue:
                    return
            if klass.queue and text.startswith("a task "):
                text = f"task {klass.queue[0].name}{text.removeprefix('a task')}"
        if known not in self._process._warned:
            self._process._warned.add(known)
            self._engine.later(lambda: print(f"hpcray: {text}", file=sys.stderr, flush=True))

    def fail_cancelled(self, task: Task) -> None:
        """End a task that was cancelled before it ran (lock held)."""
        self.fail(task, serialize_error(TaskCancelledError(error_message=f"{task.name} was cancelled")))
