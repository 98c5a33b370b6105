"""The caller's side of actors: creation, calls in order, and what their deaths do to calls in flight."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from hpcray.common.exceptions import ActorAlreadyExistsError, ActorUnavailableError, PendingCallsLimitExceeded
from hpcray.common.ids import FIRST_RETURN, HEAD, PUT_INDEX, node_of, owner_of
from hpcray.core.core_worker.object_table import Waiter
from hpcray.core.core_worker.task import ExtraOptions, PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import NONE_BLOB, serialize_error
from hpcray.runtime.core_worker.arguments import NO_ARGS, pack
from hpcray.runtime.core_worker.context import CoreWorkerContext, TaskSubmission
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.runtime.core_worker.generators import GeneratorStreams
from hpcray.runtime.core_worker.io_engine import MAX_BATCH, monotonic
from hpcray.runtime.core_worker.object_refs import ObjectRef, make_ref, new_ref
from hpcray.runtime.core_worker.task_retries import actor_error, cancelled_blob

__all__ = ["ActorClient", "ActorSubmitter"]

UNAVAILABLE_AFTER = 1.0
"""Seconds for which the ActorUnavailableError of calls waits, as in Ray, for what becomes of the actor: if it dies,
that is their error, and if it runs again, programs that repeat a call do not do so in vain."""
_DEAD_KEPT = 1000
"""Dead actors of other owners whose errors are kept for the handles that are left."""
_NOTHING = (NO_ARGS, None, None)


class ActorSubmitter:
    """All actors that this process has called or created."""

    def __init__(
        self, context: CoreWorkerContext, gcs: GcsClient, submission: TaskSubmission, streams: GeneratorStreams
    ) -> None:
        self._context = context
        self._engine = context.engine
        self._table = context.table
        self._submission = submission
        self._gcs = gcs
        self._streams = streams
        self._clients: dict[bytes, ActorClient] = {}
        self._by_worker: dict[bytes, ActorClient] = {}
        self._dead: deque[bytes] = deque()
        self._late_replies = LateActorReplies(context, self._end)

    # ------------------------------------------------------------ creation

    def create(self, spec: m.ActorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectRef[Any] | None:
        """Register an actor with the GCS; `spec.actor` and the arguments are filled in here.

        Returns:
            The ref that keeps it alive (None when detached): when no copy of it is left, the actor ends.

        Raises:
            ActorAlreadyExistsError: the name is taken.
        """
        context, engine, table = self._context, self._engine, self._table
        spec.args, keep, slots = pack(context, args, kwargs)
        with engine.lock:
            context.check_alive()
            spec.actor = context.next_task_id()
            client = self._clients[spec.actor] = ActorClient(spec.actor, spec.class_name, spec.out_of_order)
            client.creation_keep = keep
            client.max_restarts, client.detached = spec.max_restarts, spec.detached
            client.fails_fast = not spec.max_task_retries
            task = PendingTask(spec.actor, None, "__init__", b"", 0, keep, slots, 0)
            handle: ObjectRef[Any] | None = None
            if not spec.detached:
                object_id = spec.actor + PUT_INDEX
                table.put_inline(object_id, NONE_BLOB)
                table.when_freed(object_id, lambda: self._out_of_scope(spec.actor))
                handle = new_ref(object_id)

            named, registered = bool(spec.name), not spec.name

            def complete() -> None:
                if not registered:
                    return
                spec.refs, spec.inline = self._creation_values(task)
                engine.send(HEAD, m.CreateActor(0, spec))
                if not spec.detached and spec.actor + PUT_INDEX not in table.entries:
                    engine.send(HEAD, m.ActorOutOfScope(spec.actor))  # no handle was left before its arguments came

            waiter = Waiter(len(slots or ()), callback=complete)
            for slot in slots or ():
                if table.wait_ready(slot, waiter):
                    waiter.count -= 1
            if not named and waiter.count <= 0:
                complete()
            if not named:
                engine.flush()
                return handle
            ready = waiter.count <= 0
            reply = self._reserve(spec, task, ready)
            if not reply.ok:
                del self._clients[spec.actor]
                table.cancel_when_freed(spec.actor + PUT_INDEX)
                raise ActorAlreadyExistsError(reply.value.decode().removeprefix("name_taken: "))
            registered = True
            if not ready and waiter.count <= 0:
                complete()
                engine.flush()
        return handle

    def _out_of_scope(self, actor: bytes) -> None:
        """Report to the GCS that no handle of an actor of ours is left."""
        self._engine.send(HEAD, m.ActorOutOfScope(actor))
        client = self._clients.get(actor)
        if client is not None and client.state == DEAD:
            del self._clients[actor]

    def _reserve(self, spec: m.ActorSpec, task: PendingTask, ready: bool) -> m.GcsReply:
        """Register a named actor, and its name alone as long as its arguments are not `ready` (lock held)."""
        if ready:
            spec.refs, spec.inline = self._creation_values(task)
        known = spec if ready else msgspec.structs.replace(spec, cls=b"", args=b"")
        return self._gcs.ask(lambda request: m.CreateActor(request, known, ready))

    def _creation_values(self, task: PendingTask) -> tuple[list[m.ArgRef], list[bytes] | None]:
        refs, inline = self._submission.slot_values(task)
        return refs or [], inline

    # ------------------------------------------------------------ calls

    def call(
        self,
        handle: HandleProtocol,
        method: str,
        num_returns: int,
        retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method. Calls of one caller start in the order in which it made them."""
        context, engine = self._context, self._engine
        blob, keep, slots = pack(context, args, kwargs) if args or kwargs else _NOTHING
        reentrant = engine.holds_lock()
        with engine.lock:
            client = self._clients.get(handle._actor) or self.client(handle)
            limit = handle._limit
            if limit >= 0:
                client.check_limit(limit, method)
            context.task_counter += 1
            task_id = context.me + context.task_counter.to_bytes(5, "big")
            task = PendingTask(task_id, None, method, blob, num_returns, keep, slots, retries)
            task.scheduling_class = client
            if num_returns == 1:
                object_id = task_id + FIRST_RETURN
                self._table.create(object_id, task)
                result: Any = make_ref(ObjectRef)  # `new_ref`, without a call
                result._id = object_id
            else:
                result = self._submission.returns(task)
            if client.state == DEAD:
                self._fail_dead(client, task)
                return result
            client.hold = handle._keep
            if reentrant:
                engine.call_soon(partial(self._start, client, task, handle._keep))
            elif client.worker and not client.queue and slots is None:
                first = not client.inflight
                self._push(client, task)
                if first:
                    engine.flush()
                else:
                    engine.flush_soon()
            else:
                self._enqueue(client, task)
        return result

    def call_with(
        self,
        extra: ExtraOptions,
        handle: HandleProtocol,
        method: str,
        num_returns: int,
        retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`call` with options that few calls have."""
        blob, keep, slots = pack(self._context, args, kwargs)
        reentrant = self._engine.holds_lock()
        with self._engine.lock:
            client = self.client(handle)
            client.check_limit(handle._limit, method)
            task_id = self._context.next_task_id()
            task = PendingTask(task_id, None, method, blob, num_returns, keep, slots or [], retries, extra)
            task.scheduling_class = client
            result = self._streams.open(task) if extra.stream else self._submission.returns(task)
            start = partial(self._start, client, task, handle._keep)
            self._engine.call_soon(start) if reentrant else start()
        return result

    def _enqueue(self, client: ActorClient, task: PendingTask) -> None:
        if task.slots is not None:
            task.waiting = 1
            if self._submission.resolve(task, lambda: self._resolved(client, task)):
                task.waiting = 0
        if task.waiting > 0 and client.out_of_order:
            client.late[task.id] = task
            task.keep = [*(task.keep or ()), client.hold]
        elif client.queue and task.id < client.queue[-1].id:
            # One that runs again, for its result was lost. Calls that were made later may be waiting for just that.
            later = next(index for index, other in enumerate(client.queue) if task.id < other.id)
            client.queue.insert(later, task)
        else:
            client.queue.append(task)
        self._pump(client)
        self._engine.flush()

    def _start(self, client: ActorClient, task: PendingTask, hold: ObjectRef[Any] | None) -> None:
        """Go on with a call: one with options, or that a destructor made while this thread held the lock."""
        with self._engine.lock:
            client.hold = hold
            if client.state == DEAD:
                self._fail_dead(client, task)
            elif not task.cancelled:
                self._enqueue(client, task)

    def state_of(self, actor: bytes) -> str | None:
        """Return the state of an actor as far as this process knows; None for one that it has not used."""
        client = self._clients.get(actor)
        return client.state if client is not None else None

    def client(self, handle: HandleProtocol) -> ActorClient:
        """The record of an actor, watching it from now on (lock held)."""
        found = self._clients.get(handle._actor)
        if found is None:
            found = self._clients[handle._actor] = ActorClient(handle._actor, handle._class_name, handle._out_of_order)
            found.fails_fast = not handle._retries
            if owner_of(handle._actor) == self._context.me:
                # Ours, and yet unknown: the GCS would never answer.
                found.state, found.reason = DEAD, "it died long ago, or belongs to an earlier session of this program"
            else:
                self._engine.send(HEAD, m.WatchActor(handle._actor))
        return found

    def _resolved(self, client: ActorClient, task: PendingTask) -> None:
        if task.cancelled:
            return
        task.waiting = 0
        self._submission.failed_argument(task)
        late = client.late.pop(task.id, None)
        if late is not None:
            if late.keep:
                client.hold = late.keep.pop()
            client.queue.append(late)
        self._pump(client)

    def _pump(self, client: ActorClient) -> None:
        while client.queue and client.worker and client.queue[0].waiting <= 0:
            task = client.queue.popleft()
            if task.waiting == 0:
                self._push(client, task)
        if client.queue:
            if client.unavailable:
                self._fail_unavailable(client)
        elif not client.inflight:
            client.hold = None

    def _push(self, client: ActorClient, task: PendingTask) -> None:
        task.worker = client.worker
        client.inflight[task.id] = task
        refs, inline = (None, None) if task.slots is None else self._submission.slot_values(task)
        if task.attempt and task.num_returns > 1:
            self._submission.announce_missing_returns(task, client.worker)
        engine = self._engine
        peer = engine.peers.get(client.worker) or engine.links.peer(client.worker)
        peer.out.append(m.ActorCall(task.id, task.method, task.args, task.num_returns, refs, inline))
        if not peer.dirty:
            peer.dirty = True
            engine.dirty.append(peer)
        elif len(peer.out) >= MAX_BATCH:
            engine.flush_peer(peer)

    def answered(self, src: bytes, task_id: bytes) -> PendingTask | None:
        """Remove and return the call that a reply of an actor answers."""
        client = self._by_worker.get(src)
        if client is None:
            return None
        task = client.inflight.pop(task_id, None)
        if not client.inflight and not client.queue:
            client.hold = None
        return task

    def pending_calls(self) -> Iterator[PendingTask]:
        """The calls that have no answer yet (lock held)."""
        for client in self._clients.values():
            yield from (*client.queue, *client.late.values(), *client.inflight.values(), *client.failing)

    def cancel_queued(self, task: PendingTask) -> bool:
        """Take a cancelled call out of its queue; False when it was sent already."""
        client: ActorClient = task.scheduling_class
        if task.id in client.inflight:
            return False
        task.waiting = -1
        client.late.pop(task.id, None)
        self._pump(client)
        return True

    def resubmit(self, task: PendingTask) -> None:
        """Send a call again: a retry, or a reconstruction."""
        client: ActorClient = task.scheduling_class
        if client.state == DEAD:
            self._fail_dead(client, task)
        else:
            if task.retries >= 0 and client.worker and client.worker == client.suspect:
                task.retries += 1  # it will hardly begin there: its next attempt is this one
            self._enqueue(client, task)

    def suspect(self, proc: bytes) -> None:
        """A value that had stayed in `proc` is lost: the process may be dead, which is not reported yet."""
        client = self._by_worker.get(proc)
        if client is not None:
            client.suspect = proc

    # ------------------------------------------------------------ states

    def on_state(self, msg: m.ActorStateUpdate) -> None:
        """Take over the state of an actor from the GCS."""
        client = self._clients.get(msg.actor)
        if client is None:
            return
        client.unblock()
        if msg.state != client.state:
            self._late_replies.stop_waiting_for(client)
        if msg.state == RESTARTING != client.state and client.max_restarts:
            self._submission.retry_warnings.actor_restarts(
                client.class_name, client.actor, msg.restarts, client.max_restarts, msg.reason
            )
        waits = msg.state != ALIVE and bool(client.inflight) and self._late_replies.expect(client)
        client.state, client.reason, client.error = msg.state, msg.reason, msg.error
        client.unavailable = msg.unavailable and client.fails_fast
        if msg.state == DEAD:
            client.where = {"pid": msg.pid, "name": msg.name, "namespace": msg.namespace, "ip": msg.ip}
        if msg.state == ALIVE:
            if client.inflight and next(iter(client.inflight.values())).worker != msg.worker:
                self._interrupted(client)  # the old head died before it could report this restart
            if client.failing:
                self._end_failing(client)
            client.worker = msg.worker
            self._by_worker[msg.worker] = client
            if not client.max_restarts:
                client.creation_keep = None
            self._pump(client)
            return
        if not waits:
            self._end(client.worker, client)
        if client.unavailable:
            self._pump(client)
        if msg.state == DEAD:
            client.creation_keep = client.hold = None
            calls = [*client.queue, *client.late.values()]
            client.queue.clear()
            client.late.clear()
            self._end_failing(client)
            for task in calls:
                self._fail_dead(client, task)

    def _end(self, worker: bytes, client: ActorClient) -> None:
        """Retry or fail the calls in flight of an actor that has ended, after all replies of its worker have come."""
        self._by_worker.pop(worker, None)
        if client.state != DEAD:
            self._interrupted(client)
            return
        self._unbind(client)
        inflight, client.inflight = client.inflight, {}
        for task in inflight.values():
            self._fail_dead(client, task)
        self._forget_dead(client)

    def _interrupted(self, client: ActorClient) -> None:
        """Retry or fail the calls in flight of an actor that restarts."""
        self._unbind(client)
        inflight, client.inflight = client.inflight, {}
        again = [task for task in inflight.values() if task.retries and not task.cancelled]
        for task in again:
            self._submission.note_failure(task, task.worker or b"", client.reason)
        for task in inflight.values():
            task.attempt += 1
            if task.cancelled:
                self._submission.fail_cancelled(task)
            elif task.retries > 0:
                task.retries -= 1
            elif task.retries == 0:
                self._add_failing(client, task)
        later = bool(again and client.queue and client.queue[0].id < again[-1].id)
        client.queue.extendleft(reversed(again))
        if later:  # one that runs again, for its result was lost with the actor: others may be waiting for just that
            client.queue = deque(sorted(client.queue, key=attrgetter("id")))

    def _fail_unavailable(self, client: ActorClient) -> None:
        """Fail the calls at the head of the queue of an actor that restarts, but those that may run more than once."""
        queue, kept = client.queue, []
        while queue and queue[0].waiting <= 0:
            task = queue.popleft()
            if task.waiting == 0:
                if task.retries or task.attempt:
                    kept.append(task)
                else:
                    self._add_failing(client, task)
        queue.extendleft(reversed(kept))

    def _add_failing(self, client: ActorClient, task: PendingTask) -> None:
        if not client.failing:
            self._engine.add_timer(monotonic() + UNAVAILABLE_AFTER, lambda now: self._end_failing(client))
        client.failing.append(task)

    def _end_failing(self, client: ActorClient) -> None:
        """Fail the calls that have waited for what becomes of the actor."""
        failing, client.failing = client.failing, []
        for task in failing:
            if task.waiting < 0:
                continue  # it was cancelled
            if client.state == DEAD:
                self._fail_dead(client, task)
            else:
                text = f"The actor is restarting. It died: {client.reason}"
                self._submission.fail(task, serialize_error(ActorUnavailableError(text, client.actor)))
        if not client.inflight and not client.queue:
            client.hold = None

    def head_moved(self) -> None:
        """Watch all actors again at the new head: notices of the old one may be lost (lock held)."""
        for client in self._clients.values():
            if client.state != DEAD:
                self._engine.send(HEAD, m.WatchActor(client.actor))

    def process_died(self, proc: bytes, reason: str) -> None:
        """Unbind the actor of a dead worker. Its calls wait for the new state from the GCS."""
        client = self._by_worker.get(proc)
        if client is not None:
            client.unblock()
            for task in client.inflight.values():
                self._submission.left_behind(task, proc)
            self._unbind(client)
            self._late_replies.replies_complete(proc)

    def _forget_dead(self, client: ActorClient) -> None:
        """Keep what calls of a dead actor raise, for those who still have a handle; not for ever."""
        mine = owner_of(client.actor) == self._context.me and not client.detached
        if mine and client.actor + PUT_INDEX not in self._table.entries:
            self._clients.pop(client.actor, None)
            return
        self._dead.append(client.actor)
        if len(self._dead) > _DEAD_KEPT:
            oldest = self._clients.get(self._dead.popleft())
            if oldest is not None and oldest.state == DEAD:
                del self._clients[oldest.actor]

    def _unbind(self, client: ActorClient) -> None:
        if client.worker:
            self._by_worker.pop(client.worker, None)
            client.worker = b""

    def _fail_dead(self, client: ActorClient, task: PendingTask) -> None:
        if task.cancelled:
            error = cancelled_blob(task)
        else:
            found = actor_error(client.actor, client.class_name, client.reason, client.where)
            error = client.error or serialize_error(found)
        self._submission.fail(task, error)


PENDING, ALIVE, RESTARTING, DEAD = "PENDING", "ALIVE", "RESTARTING", "DEAD"


class ActorClient:
    """One actor as this process sees it.

    queue: calls not sent yet, in order; the head may wait for its arguments. inflight: sent, not answered.
    out_of_order: calls may overtake those that wait for their arguments; these are in `late` until they are ready.
    hold: the ref that keeps the actor alive, as long as there are such calls: a handle may die before they are done.
    creation_keep: the refs in the constructor's arguments, of an actor that we created, as long as it may run again.
    fails_fast: its `max_task_retries` is 0. unavailable: it was lost and restarts, and so calls fail; failing: these.
    killed: its worker, after we have had it killed and until we hear what becomes of it; calls wait meanwhile.
    max_restarts: 0 also where the actor is not ours. detached: whether handles to it are not counted.
    where: of a dead one, where it ran, and its name.
    suspect: a worker from which another process got no value: it may be dead, which has not been reported yet.
    """

    __slots__ = (
        "actor", "class_name", "creation_keep", "detached", "error", "failing", "fails_fast", "hold", "inflight",
        "killed", "late", "max_restarts", "out_of_order", "queue", "reason", "state", "suspect", "unavailable", "where",
        "worker",
    )  # fmt: skip

    def __init__(self, actor: bytes, class_name: str, out_of_order: bool) -> None:
        self.actor = actor
        self.class_name = class_name
        self.out_of_order = out_of_order
        self.late: dict[bytes, PendingTask] = {}
        self.hold: Any = None
        self.state = PENDING
        self.worker = self.killed = self.suspect = b""
        self.reason = ""
        self.where: dict[str, Any] = {}
        self.error = b""
        self.queue: deque[PendingTask] = deque()
        self.inflight: dict[bytes, PendingTask] = {}
        self.failing: list[PendingTask] = []
        self.creation_keep: Any = None
        self.max_restarts = 0
        self.detached = self.fails_fast = self.unavailable = False

    def kill(self) -> None:
        """Hold new calls back: the worker that the actor still has is being killed."""
        if self.worker:
            self.killed, self.worker = self.worker, b""

    def unblock(self) -> None:
        """Send calls again: the GCS has reported the state after `kill`."""
        if self.killed:
            self.worker, self.killed = self.killed, b""

    def check_limit(self, limit: int, method: str) -> None:
        """Raise PendingCallsLimitExceeded when one more call would be too many; limit: -1 for none."""
        if 0 <= limit <= len(self.inflight) + len(self.queue) + len(self.late):
            raise PendingCallsLimitExceeded(
                f"The task {method} could not be submitted to Actor({self.class_name}, {self.actor.hex()}) because "
                f"more than {limit} tasks are queued on the actor. This limit can be adjusted with the "
                "`max_pending_calls` actor option."
            )


class HandleProtocol(Protocol):
    """The part of an `api.actor.ActorHandle` that calls use."""

    _actor: bytes
    _class_name: str
    _limit: int
    _retries: int
    _keep: ObjectRef[Any] | None
    _out_of_order: bool


LATE_REPLY_TIMEOUT = 5.0
"""Seconds. A worker may outlive its actor for longer: hooks of the user's run when it exits."""


class LateActorReplies:
    """Workers of ended actors whose last replies may still be on their way from another node (lock held).

    Args:
        end: called with (worker, client) once no reply of that worker can come any more.
    """

    def __init__(self, context: CoreWorkerContext, end: Callable[[bytes, ActorClient], None]) -> None:
        self._context = context
        self._end = end
        self._open: dict[bytes, ActorClient] = {}

    def expect(self, client: ActorClient) -> bool:
        """Wait for replies of the worker of an ended actor. Returns True if `end` will be called later."""
        worker = client.worker
        if not worker:
            return client in self._open.values()
        if node_of(worker) == self._context.node:
            self._context.engine.read_rest(worker)
            return False
        client.worker = b""
        self._open[worker] = client
        self._context.engine.add_timer(monotonic() + LATE_REPLY_TIMEOUT, lambda now: self.replies_complete(worker))
        return True

    def replies_complete(self, worker: bytes) -> None:
        """Call `end`: no reply of this worker can come any more."""
        client = self._open.pop(worker, None)
        if client is not None:
            self._end(worker, client)

    def stop_waiting_for(self, client: ActorClient) -> None:
        """End the wait for replies of earlier workers of an actor."""
        for worker in [worker for worker, other in self._open.items() if other is client]:
            self.replies_complete(worker)


GRAPHS_GROUP = "_hpcray_graphs"
SYSTEM_GROUPS = {"_ray_system": 1, "_ray_system_error": 1, GRAPHS_GROUP: 16}
"""Concurrency groups that every actor has, with their number of threads: libraries run their own calls there, and
compiled graphs their loops."""
MARK = "__hpcray_on_drain__"
"""Attribute of methods that `on_drain` decorates."""


class ExitActor(SystemExit):
    """Raised by `exit_actor` inside a method."""


def has_async_method(cls: type) -> bool:
    """Return True for the class of an async actor: one with a coroutine function or an async generator function."""
    seen: set[str] = set()
    for base in cls.__mro__[:-1]:  # not `inspect.getmembers`, which asks for each attribute of `object`
        for name, member in vars(base).items():
            if name not in seen:
                seen.add(name)
                function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                    return True
    return False
