"""Submitting tasks: dependencies, leases, pushes, replies, retries."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import time
from typing import Any

from hpcray.common.exceptions import TaskUnschedulableError
from hpcray.common.ids import FIRST_RETURN, TASK_BYTES, node_of, owner_of, raylet_of, return_index, show_proc
from hpcray.common.labels import NO_PLACES, Place
from hpcray.common.terminal_text import plain_line
from hpcray.core.core_worker.lease_manager import ArgumentPrefetcher, LeaseManager, LocalityLeasePolicy
from hpcray.core.core_worker.object_table import INLINE, PENDING, STORED, Waiter
from hpcray.core.core_worker.task import ExtraOptions, FunctionDescriptor, PendingTask, SchedulingClass
from hpcray.platform.sockets import node_ip_address
from hpcray.protocol import messages as m
from hpcray.protocol.messages.objects import is_error
from hpcray.protocol.serialization import serialize_argument_error, serialize_error, without_frame
from hpcray.runtime.core_worker.actor_submitter import ActorClient, ActorSubmitter
from hpcray.runtime.core_worker.arguments import NO_ARGS, pack
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.runtime.core_worker.generators import GeneratorStreams
from hpcray.runtime.core_worker.io_engine import MAX_BATCH, monotonic
from hpcray.runtime.core_worker.object_reader import UnhandledErrors, unknown_ref
from hpcray.runtime.core_worker.object_refs import ObjectRef, make_ref, new_ref
from hpcray.runtime.core_worker.task_retries import CrashRetries, RetryWarnings, TaskRetries, cancelled_blob

_LEASE_TICK = 0.02
"""Seconds between two calls of `LeaseManager.tick`."""
_FORCED_EXIT_TIMEOUT = 2.0
"""Seconds for a worker to end itself when the task that it runs is cancelled with `force`."""
_FAILURES_KEPT = 1000
_MAX_ERROR_KEPT = 1 << 14
"""Bytes; of a larger error a state listing says no more than that."""
_NOTHING = (NO_ARGS, None, None)


class TaskSubmitter:
    """The tasks that one process has submitted.

    Attributes:
        wait_reasons: why tasks of a lease class do not run, by the class's index, as far as it was reported.
        crash_retries: which of them ran out of memory.
        failures: the last runs of tasks that ended without a reply of their worker, for state listings: (id, name,
            actor, worker, error blob or b"" for a large one, time, attempt). Of a task that runs again, why its worker
            died.
    """

    def __init__(self, context: CoreWorkerContext, gcs: GcsClient, places: Mapping[int, Place] = NO_PLACES) -> None:
        self._context = context
        self._engine = context.engine
        self._table = context.table
        send = context.engine.send
        prefetcher = ArgumentPrefetcher(self._table.entries, send) if context.place.cluster_size > 1 else None
        packed = None if context.config.record else self._table.packed  # a record has every task
        self.leases = LeaseManager(context.me, send, self._push, context.config.idle_lease_timeout, prefetcher, packed)
        if context.config.max_nodes:
            self.leases.expect_durations()
        self.crash_retries = CrashRetries(context.config.task_oom_retries)
        self.retries = TaskRetries(context, self, self.leases, self.crash_retries)
        self.generator_streams = GeneratorStreams(context, self.retries)
        self.locality = LocalityLeasePolicy(
            self.leases, self._table.entries, context.node, context.place.cluster_size, places
        )
        self.actors = ActorSubmitter(context, gcs, self, self.generator_streams)
        self.cancellation = TaskCancellation(context, self.leases, self.actors, self.retries, self.fail_cancelled)
        self.wait_reasons: dict[int, str] = {}
        self._failing: deque[tuple[PendingTask, bytes, bytes | None, bytes]] = deque()
        self.failures: deque[tuple[Any, ...]] = deque(maxlen=_FAILURES_KEPT)
        self.unhandled_errors = UnhandledErrors(context)
        self.retry_warnings = RetryWarnings(context.engine)
        self._in_fail = self._ticking = False
        self._ip = ""

    def cluster_grew(self, places: Mapping[int, Place]) -> None:
        """A node has joined the job: where arguments are matters from now on, and how long nodes stay."""
        self.leases.expect_durations()
        if self.leases.prefetcher is None:
            self.leases.use_prefetcher(ArgumentPrefetcher(self._table.entries, self._engine.send))
        self.locality.cluster_grew(places)

    # ------------------------------------------------------------ submitting

    def scheduling_class(self, shape: m.Shape) -> SchedulingClass:
        """The class of a shape."""
        with self._engine.lock:
            return self.leases.scheduling_class(shape)

    def submit(
        self,
        fn: FunctionDescriptor,
        scheduling_class: SchedulingClass,
        num_returns: int,
        retries: int,
        extra: ExtraOptions,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Submit one task.

        Args:
            extra: nothing but `retry_exceptions`; `submit_with` is for the rest.

        Returns:
            Its ref, a list of refs (num_returns > 1), or None (0).
        """
        context, engine = self._context, self._engine
        blob, keep, slots = pack(context, args, kwargs) if args or kwargs else _NOTHING
        reentrant = engine.holds_lock()
        with engine.lock:
            context.task_counter += 1
            task_id = context.me + context.task_counter.to_bytes(5, "big")
            result: Any
            if (
                scheduling_class.queue and keep is None and num_returns == 1 and not reentrant and self.leases.packing
            ):  # it has to wait
                object_id = task_id + FIRST_RETURN
                template = fn.template_for(scheduling_class, retries, extra)
                self._table.packed.create(object_id, template, blob if blob is NO_ARGS else without_frame(blob))
                result = make_ref(ObjectRef)
                result._id = object_id
                if self.leases.enqueue_packed(object_id, scheduling_class):
                    engine.flush()
                elif engine.dirty:
                    engine.flush_soon()
                return result
            task = PendingTask(task_id, fn, "", blob, num_returns, keep, slots, retries, extra)
            if num_returns == 1:
                object_id = task_id + FIRST_RETURN
                self._table.create(object_id, task)
                result = make_ref(ObjectRef)  # `new_ref`, without a call
                result._id = object_id
            else:
                result = self.returns(task)
            # No lambdas here: they would make cells of the variables of every call.
            if reentrant:
                engine.call_soon(partial(self._start, task, scheduling_class))
            elif slots is None or self.resolve(task, partial(self.ready, task, scheduling_class)):
                if slots is not None:
                    scheduling_class = self.locality.scheduling_class(task, scheduling_class)
                if self.leases.submit(task, scheduling_class):
                    engine.flush()
                elif engine.dirty:
                    engine.flush_soon()
            elif engine.dirty:
                engine.flush()
        return result

    def submit_with(
        self,
        extra: ExtraOptions,
        fn: FunctionDescriptor,
        shape: m.Shape,
        num_returns: int,
        retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Submit a task with extra options. Its `slots` are never None: that leads it off the fast path."""
        blob, keep, slots = pack(self._context, args, kwargs)
        reentrant = self._engine.holds_lock()
        with self._engine.lock:
            task_id = self._context.next_task_id()
            task = PendingTask(task_id, fn, "", blob, num_returns, keep, slots or [], retries, extra)
            scheduling_class = self.leases.scheduling_class(shape)
            result = self.generator_streams.open(task) if extra.stream else self.returns(task)
            start = partial(self._start, task, scheduling_class)
            self._engine.call_soon(start) if reentrant else start()
        return result

    def _start(self, task: PendingTask, scheduling_class: SchedulingClass) -> None:
        """Go on with a task: one with options, or that a destructor submitted while this thread held the lock."""
        with self._engine.lock:
            if task.slots is None or self.resolve(task, lambda: self.ready(task, scheduling_class)):
                self.ready(task, scheduling_class)
            self._engine.flush()

    def returns(self, task: PendingTask) -> Any:
        """Entries and refs for what a task returns (lock held)."""
        refs = []
        for index in range(task.num_returns):
            object_id = task.id + return_index(index)
            self._table.create(object_id, task)
            refs.append(new_ref(object_id))
        return refs[0] if task.num_returns == 1 else refs or None

    def resolve(self, task: PendingTask, then: Callable[[], None]) -> bool:
        """Return True if every slot's object is ready; else call `then` under the lock when they are."""
        waiter = Waiter(len(task.slots or ()), callback=then)
        for object_id in task.slots or ():
            try:
                ready = self._table.wait_ready(object_id, waiter)
            except KeyError:
                raise unknown_ref(object_id) from None
            if ready:
                waiter.count -= 1
        return waiter.count == 0 and not self.failed_argument(task)

    def ready(self, task: PendingTask, scheduling_class: SchedulingClass) -> None:
        """The arguments of a task are there, or one of them is an error (lock held)."""
        if not self.failed_argument(task) and not task.cancelled:
            self.leases.submit(
                task, scheduling_class if task.slots is None else self.locality.scheduling_class(task, scheduling_class)
            )

    def failed_argument(self, task: PendingTask) -> bool:
        """Fail a task if one of its arguments is an error (`waiting` becomes -1), and return True then."""
        for object_id in task.slots or ():
            entry = self._table.entries[object_id]
            if entry.state == INLINE and is_error(entry.value):
                task.waiting = -1
                self.unhandled_errors.seen([object_id])
                self.fail(task, self._argument_error(task, entry.value), object_id)
                return True
        return False

    def _argument_error(self, task: PendingTask, blob: bytes) -> bytes:
        """The error of a task one of whose arguments is the error `blob`. One that runs again keeps the reason of the
        loss as it is."""
        if task.attempt:
            return blob
        self._ip = self._ip or node_ip_address()
        name = task.name if task.fn is not None else f"{task.scheduling_class.class_name}.{task.method}"
        return serialize_argument_error(blob, name, os.getpid(), self._ip)

    def slot_values(self, task: PendingTask) -> tuple[list[m.ArgRef] | None, list[bytes] | None]:
        """Return where the worker gets the values of the slots: refs in order, for each empty `inline` item."""
        if task.slots is None:
            return None, None
        if task.extra.announced and task.worker is not None:
            skip = self.generator_streams.received(task.id)
            want = None if self.generator_streams.is_open(task.id) else self.retries.missing_returns(task)
            self._engine.send(task.worker, task.extra.announcement(task.id, skip, want))
            self.generator_streams.announce_taken(task, task.worker)
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

    def _push(self, task: PendingTask, proc: bytes) -> None:
        engine = self._engine
        peer = engine.peers.get(proc) or engine.links.peer(proc)
        fn = task.fn
        assert fn is not None
        if fn.id not in peer.functions:
            peer.functions.add(fn.id)
            engine.send(proc, m.FunctionDef(fn.id, fn.name, fn.blob, fn.max_calls))
        if task.attempt and task.num_returns > 1:
            self.announce_missing_returns(task, proc)
        refs, inline = (None, None) if task.slots is None else self.slot_values(task)
        peer.out.append(m.PushTask(task.id, fn.id, task.args, task.num_returns, refs, inline))
        if not peer.dirty:
            peer.dirty = True
            engine.dirty.append(peer)
        elif len(peer.out) >= MAX_BATCH:
            engine.flush_peer(peer)

    def announce_missing_returns(self, task: PendingTask, proc: bytes) -> None:
        """A task with several returns runs again: those that are still there are not to be made."""
        if not task.extra.announced:  # those announce it with the rest
            want = self.retries.missing_returns(task)
            if want is not None:
                self._engine.send(proc, m.CallOptions(task.id, missing=want))

    # ------------------------------------------------------------ answers

    def on_lease_granted(self, src: bytes, msg: m.LeaseGranted) -> None:
        now = monotonic()
        shape = self.leases.by_index[msg.scheduling_class].shape
        self._engine.send(msg.worker, m.LeaseAttached(shape.resources, shape.env, shape.strategy))
        self.leases.granted(msg, now)
        if not self._ticking:
            self._ticking = True
            self._engine.add_timer(now + _LEASE_TICK, self._tick)

    def _tick(self, now: float) -> None:
        self._ticking = self.leases.tick(now)
        if self._ticking:
            self._engine.add_timer(now + _LEASE_TICK, self._tick)

    def on_task_done(self, src: bytes, msg: m.TaskDone) -> None:
        leases = self.leases
        task = leases.answered(src, msg.task, msg.us, monotonic()) if src in leases.workers else None
        if task is None:
            task = self.actors.answered(src, msg.task)
        if task is not None:
            task.keep = None
            self._table.set_inline(msg.task + FIRST_RETURN, msg.value)
            if task.attempt:
                self.retries.run_ended(task)

    def on_tasks_returned(self, src: bytes, msg: m.TasksReturned) -> None:
        if msg.leaving and msg.requested:
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
            self._engine.send(src, m.ReturnTasks(True))
            for task in self.leases.lost(src):
                if task.cancelled:
                    self.fail_cancelled(task)
                else:
                    self.leases.submit(task, task.scheduling_class)

    def on_task_reply(self, src: bytes, msg: m.TaskReply) -> None:
        task = self.leases.answered(src, msg.task, msg.us, monotonic()) or self.actors.answered(src, msg.task)
        if msg.borrowed:
            self._table.refs.add_borrows_in_reply(src, msg.borrowed)
        if task is None:
            self.drop_returns(src, msg)
            return
        if msg.status == 1:
            if task.extra.retry_exceptions and task.retries:
                self._engine.call_soon(lambda: self.retries.task_raised(task, msg))
                return
            self.unhandled_errors.watch_reply(task, msg)
        elif task.cancelled and task.fn is None and not task.extra.stream:
            # The call was cancelled before its value came: what a caller sees must not depend on which was faster.
            self.drop_returns(src, msg)
            self.left_behind(task, src)
            self.fail_cancelled(task)
            return
        self.finish(task, src, msg)

    def finish(self, task: PendingTask, src: bytes, msg: m.TaskReply) -> None:
        """Take over what a task returned (lock held)."""
        table = self._table
        if task.extra.stream:
            self.generator_streams.finish(task, src, msg)
            task.keep = None
            self.retries.run_ended(task)
            return
        durable = [msg.task + return_index(i) for i, item in enumerate(msg.returns) if item.size or item.contained]
        if durable:
            self.retries.keep(task, durable)
        for index, item in enumerate(msg.returns):
            object_id = msg.task + return_index(index)
            contained = None
            if item.contained:
                for inner in item.contained:
                    table.refs.adopt_returned_ref(inner, src)
                contained = [new_ref(inner) for inner in item.contained]
            if item.size:
                table.set_stored(object_id, item.size, node_of(src), contained)
            elif item.value:  # else it was not missing here
                table.set_inline(object_id, item.value, contained)
        task.keep = None
        if durable or task.attempt:
            self.retries.run_ended(task)

    def drop_returns(self, src: bytes, msg: m.TaskReply) -> None:
        """Release the refs in a late result, which its worker kept for us (lock held)."""
        for item in msg.returns:
            for inner in item.contained or ():
                self._table.refs.adopt_returned_ref(inner, src)
                self._table.refs.remove_local_ref(inner)

    def fail(self, task: PendingTask, blob: bytes, argument: bytes | None = None, worker: bytes = b"") -> None:
        """End a task in an error, perhaps that of its `argument`; so end those that wait for it (lock held).

        Args:
            worker: where it ran.
        """
        self._failing.append((task, blob, argument, worker))
        if self._in_fail:
            return  # a chain of any length: no recursion
        self._in_fail = True
        try:
            while self._failing:
                self._fail(*self._failing.popleft())
        finally:
            self._in_fail = False

    def _fail(self, task: PendingTask, blob: bytes, argument: bytes | None, worker: bytes) -> None:
        if argument is not None and task.attempt:
            self.retries.on_argument_lost(task, argument)
        if task.extra.stream:
            self.generator_streams.fail(task, blob)
        for index in range(task.num_returns):
            self._table.set_inline(task.id + return_index(index), blob)
        task.keep = None
        self.note_failure(task, worker, blob if len(blob) <= _MAX_ERROR_KEPT else b"")
        if task.attempt or task.num_returns < 0:
            self.retries.run_ended(task, blob)

    def note_failure(self, task: PendingTask, worker: bytes, error: bytes | str) -> None:
        """Note that a run of a task has ended without a reply. error: as in `failures`."""
        client = task.scheduling_class
        actor, class_name = (client.actor, client.class_name) if isinstance(client, ActorClient) else (b"", "")
        name = task.extra.name or (f"{class_name}.{task.name}" if class_name else task.name)
        self.failures.append((task.id, name, actor, worker, error, time(), task.attempt))

    def process_died(self, proc: bytes, reason: str) -> None:
        """A process is gone: its tasks run again, or fail."""
        leased, node_died = self.leases.workers.get(proc), node_of(proc) in self._table.dead_nodes
        if leased is not None and not node_died:
            # Perhaps only our connection broke: its raylet must not keep the lease for us.
            self._engine.send(raylet_of(node_of(proc)), m.ReturnLease(leased.lease, True))
        for position, task in enumerate(self.leases.lost(proc)):
            if task.cancelled:
                self.fail_cancelled(task)
            elif position == 0 and (over := self.crash_retries.verdict(task, show_proc(proc), reason, node_died)):
                crash = serialize_error(over)
                self.unhandled_errors.watch(task, crash)
                self.fail(task, crash, worker=proc)
            elif position == 0:
                self.note_failure(task, proc, reason or show_proc(proc))
                self.retries.worker_crashed(task, reason or show_proc(proc))
            else:
                task.worker = None
                self.retries.submit(task)
        self.actors.process_died(proc, reason)

    def on_infeasible(self, _: bytes, msg: m.Infeasible) -> None:
        """Print why tasks or actors of ours do not run, once. A class that has a lease waits for itself."""
        known, text = msg.reason, msg.reason
        self.wait_reasons[msg.scheduling_class] = msg.reason
        if msg.fails:
            self._fail_unschedulable(self.leases.by_index[msg.scheduling_class], text)
            return
        if msg.scheduling_class >= 0:
            scheduling_class = self.leases.by_index[msg.scheduling_class]
            if msg.waits:
                known = f"class {msg.scheduling_class} waits"
                if scheduling_class.rotation or not scheduling_class.queue:
                    return
            if scheduling_class.queue and text.startswith("a task "):
                text = f"task {self.leases.at(scheduling_class.queue, 0).name}{text.removeprefix('a task')}"
        if self._context.warn_once(known):
            self._engine.call_soon(lambda: print(f"hpcray: {plain_line(text)}", file=sys.stderr, flush=True))

    def on_leases_capped(self, _: bytes, msg: m.LeasesCapped) -> None:
        """Tasks of a class wait for those that are blocked: let no others wait with them, and say so, once."""
        scheduling_class = self.leases.by_index[msg.scheduling_class]
        self.leases.split_by_function(scheduling_class)
        if msg.reason and scheduling_class.queue:
            text = f"task {self.leases.at(scheduling_class.queue, 0).name}{msg.reason.removeprefix('a task')}"
            self.wait_reasons[msg.scheduling_class] = msg.reason
            if self._context.warn_once(f"class {msg.scheduling_class} is held back"):
                self._engine.call_soon(lambda: print(f"hpcray: {plain_line(text)}", file=sys.stderr, flush=True))

    def _fail_unschedulable(self, scheduling_class: SchedulingClass, reason: str) -> None:
        """End the tasks that wait for a lease which no node may ever grant."""
        self.leases.unpack_all()
        for task in list(self.leases.queued(scheduling_class)):
            if self.leases.cancel_queued(task):
                error = TaskUnschedulableError(f"task {task.name}{reason.removeprefix('a task')}")
                self.fail(task, serialize_error(error))

    def fail_cancelled(self, task: PendingTask) -> None:
        """End a task that was cancelled before it ran, or before its value came (lock held)."""
        self.fail(task, cancelled_blob(task))

    def left_behind(self, task: PendingTask, proc: bytes) -> None:
        """A process died before it answered this task; large returns may be in its node's store already (lock held)."""
        for index in range(task.num_returns):
            self._table.may_be_left_at(task.id + return_index(index), node_of(proc))

    def resubmit_call(self, task: PendingTask) -> None:
        """Run an actor call again (lock held)."""
        self.actors.resubmit(task)


class TaskCancellation:
    """Cancels what one process has submitted, and asks owners to cancel what others have."""

    def __init__(
        self,
        context: CoreWorkerContext,
        leases: LeaseManager,
        actors: ActorSubmitter,
        retries: TaskRetries,
        fail_cancelled: Callable[[PendingTask], None],
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._table = context.table
        self._leases, self._actors, self._retries = leases, actors, retries
        self._fail_cancelled = fail_cancelled

    def cancel(self, ref: ObjectRef[Any], force: bool, recursive: bool) -> None:
        """Cancel the task that makes `ref`: queued ones never run, running ones get a `CancelTask`.

        Raises:
            ValueError: `force` with a call of an actor.
        """
        if self._engine.holds_lock():
            self._engine.call_soon(lambda: self.cancel(ref, force, recursive))
            return
        with self._engine.lock:
            entry = self._table.entries.get(ref._id)
            if force and entry is not None and isinstance(entry.task, PendingTask) and entry.task.fn is None:
                raise ValueError("force=True is not supported for actor tasks. hint: kill() ends the actor")
            self.cancel_object(ref._id, force, recursive)
            self._engine.flush()

    def cancel_object(self, object_id: bytes, force: bool, recursive: bool) -> None:
        """Cancel, or ask the owner to (lock held). A task that has ended will not make a lost value again."""
        entry = self._table.entries.get(object_id)
        if entry is None:
            return
        if object_id[:8] != self._context.me:
            if entry.state in (PENDING, STORED):
                self._engine.send(owner_of(object_id), m.CancelRef(object_id, force, recursive))
        elif entry.state != PENDING:
            self._table.lineage.forbid(object_id[:TASK_BYTES])
        elif (task := self._table.packed.task_of(object_id)) is not None:
            self._task(task, force and task.fn is not None, recursive)

    def cancel_children(self, is_child: Callable[[PendingTask], bool], force: bool) -> None:
        """Cancel the pending tasks and calls that one task has submitted (lock held)."""
        for task in self.pending_children(is_child):
            if not task.cancelled:
                self._task(task, force and task.fn is not None, True)

    def pending_children(self, is_child: Callable[[PendingTask], bool]) -> list[PendingTask]:
        """Return the pending tasks and calls that one task has submitted (lock held)."""
        leases = self._leases
        leases.unpack_all()
        entries = self._table.entries.items()
        children = {oid[:TASK_BYTES]: entry.task for oid, entry in entries if entry.state == PENDING and entry.task}
        for worker in leases.workers.values():
            children.update(worker.inflight)
        for scheduling_class in leases.by_index:
            children.update((task.id, task) for task in leases.queued(scheduling_class))
        children.update((task.id, task) for task in self._actors.pending_calls())
        return [task for task in children.values() if isinstance(task, PendingTask) and is_child(task)]

    def _task(self, task: PendingTask, force: bool, recursive: bool) -> None:
        task.cancelled = True
        queued = self._actors.cancel_queued(task) if task.fn is None else self._leases.cancel_queued(task)
        if queued or task.worker is None:
            self._retries.cancel_paused(task)
            self._fail_cancelled(task)
        else:
            worker = task.worker
            self._engine.send(worker, m.CancelTask(task.id, force, recursive))
            if force:
                self._engine.add_timer(monotonic() + _FORCED_EXIT_TIMEOUT, lambda now: self._kill(task, worker))

    def _kill(self, task: PendingTask, proc: bytes) -> None:
        """Have a worker killed that has not ended itself: it is stopped, or C code in it does not let Python go on."""
        leased = self._leases.workers.get(proc)
        if leased is not None and next(iter(leased.inflight), None) == task.id:
            self._leases.suspect(proc)
            self._engine.send(raylet_of(node_of(proc)), m.ReturnLease(leased.lease, True))
