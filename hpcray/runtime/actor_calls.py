"""The caller's side of actors: creation, calls in order, and what their deaths do to calls in flight."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.errors import ActorAlreadyExistsError, ActorUnavailableError, TaskCancelledError
from hpcray.base.ids import FIRST_RETURN, HEAD, PUT_INDEX, owner_of
from hpcray.core.owner.table import INLINE, Waiter
from hpcray.core.owner.tasks import Task
from hpcray.runtime.actor_client import ALIVE, DEAD, ActorClient, Handle
from hpcray.runtime.arguments import NO_ARGS, pack
from hpcray.runtime.crashes import actor_error
from hpcray.runtime.last_words import LastWords
from hpcray.runtime.links import MAX_BATCH
from hpcray.runtime.own_options import Own, OwnTask
from hpcray.runtime.refs import ObjectRef, make_ref, new_ref
from hpcray.wire import messages as m
from hpcray.wire.serialization import NONE_BLOB, serialize_error

if TYPE_CHECKING:
    from hpcray.runtime.process import Process
    from hpcray.runtime.submission import Submitter

__all__ = ["ActorCalls", "ActorClient"]

_DEAD_KEPT = 1000
_NOTHING = (NO_ARGS, None, None)


class ActorCalls:
    """All actors that this process has called or created."""

    def __init__(self, process: Process, submitter: Submitter) -> None:
        self._process = process
        self._engine = process.engine
        self._table = process.table
        self._submitter = submitter
        self._clients: dict[bytes, ActorClient] = {}
        self._by_worker: dict[bytes, ActorClient] = {}
        self._dead: deque[bytes] = deque()
        self._last_words = LastWords(process, self._end)

    # ------------------------------------------------------------ creation

    def create(self, spec: m.ActorSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ObjectRef[Any] | None:
        """Register an actor with the GCS; `spec.actor` and the arguments are filled in here.

        Returns:
            The ref that keeps it alive (None when detached): when no copy of it is left, the actor ends.

        Raises:
            ActorAlreadyExistsError: the name is taken.
        """
        process, engine, table = self._process, self._engine, self._table
        spec.args, keep, slots = pack(process, args, kwargs)
        with engine.lock:
            process.check_alive()
            spec.actor = process.next_task_id()
            client = self._clients[spec.actor] = ActorClient(spec.actor, spec.class_name, spec.out_of_order)
            client.creation_keep = keep
            client.restartable, client.detached = spec.max_restarts != 0, spec.detached
            task = Task(spec.actor, None, "__init__", b"", 0, keep, slots, 0)
            handle: ObjectRef[Any] | None = None
            if not spec.detached:
                object_id = spec.actor + PUT_INDEX
                entry = table.create(object_id)
                entry.state, entry.value, entry.local = INLINE, NONE_BLOB, 1
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
                if table.want_ready(slot, waiter):
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
                table.on_free.pop(spec.actor + PUT_INDEX, None)
                raise ActorAlreadyExistsError(reply.value.decode().removeprefix("name_taken: "))
            registered = True
            if not ready and waiter.count <= 0:
                complete()
                engine.flush()
        return handle

    def _out_of_scope(self, actor: bytes) -> None:
        """No handle of an actor of ours is left."""
        self._engine.send(HEAD, m.ActorOutOfScope(actor))
        client = self._clients.get(actor)
        if client is not None and client.state == DEAD:
            del self._clients[actor]

    def _reserve(self, spec: m.ActorSpec, task: Task, ready: bool) -> m.GcsReply:
        """Register a named actor, and its name alone as long as its arguments are not `ready` (lock held)."""
        if ready:
            spec.refs, spec.inline = self._creation_values(task)
        known = spec if ready else msgspec.structs.replace(spec, cls=b"", args=b"")
        return self._process.gcs.ask(lambda request: m.CreateActor(request, known, ready))

    def _creation_values(self, task: Task) -> tuple[list[m.ArgRef], list[bytes] | None]:
        refs, inline = self._submitter.slot_values(task)
        return refs or [], inline

    # ------------------------------------------------------------ calls

    def call(
        self,
        handle: Handle,
        method: str,
        num_returns: int,
        retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a method. Calls of one caller start in the order in which it made them."""
        process, engine = self._process, self._engine
        blob, keep, slots = pack(process, args, kwargs) if args or kwargs else _NOTHING
        nested = engine.nested()
        with engine.lock:
            client = self._clients.get(handle._actor) or self.client(handle)
            limit = handle._limit
            if limit >= 0:
                client.check_limit(limit)
            process._counter += 1
            task_id = process.me + process._counter.to_bytes(5, "big")
            task = Task(task_id, None, method, blob, num_returns, keep, slots, retries)
            task.klass = client
            if num_returns == 1:
                object_id = task_id + FIRST_RETURN
                self._table.create(object_id, task).local = 1
                result: Any = make_ref(ObjectRef)  # `new_ref`, without a call
                result._id = object_id
            else:
                result = self._submitter.returns(task)
            if client.state == DEAD:
                self._fail_dead(client, task)
                return result
            client.hold = handle._keep
            if nested:
                engine.later(partial(self._start, client, task, handle._keep))
            elif client.worker and not client.queue and slots is None:
                first = not client.inflight
                self._push(client, task)
                if first:
                    engine.flush()
                else:
                    engine.buffered()
            else:
                self._enqueue(client, task)
        return result

    def call_with(
        self,
        own: Own,
        handle: Handle,
        method: str,
        num_returns: int,
        retries: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`call` with options that few calls have."""
        blob, keep, slots = pack(self._process, args, kwargs)
        nested = self._engine.nested()
        with self._engine.lock:
            client = self.client(handle)
            client.check_limit(handle._limit)
            task = OwnTask(self._process.next_task_id(), None, method, blob, num_returns, keep, slots or [], retries)
            task.own, task.retry_exceptions, task.klass = own, own.retry_exceptions, client
            result = self._submitter.streams.open(task) if own.stream else self._submitter.returns(task)
            hold = handle._keep
            if nested:
                self._engine.later(lambda: self._start(client, task, hold))
            elif client.state == DEAD:
                self._fail_dead(client, task)
            else:
                client.hold = hold
                self._enqueue(client, task)
        return result

    def _enqueue(self, client: ActorClient, task: Task) -> None:
        if task.slots is not None:
            task.waiting = 1
            if self._submitter.resolve(task, lambda: self._resolved(client, task)):
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

    def _start(self, client: ActorClient, task: Task, hold: ObjectRef[Any] | None) -> None:
        """Go on with a call that a destructor made while this thread held the lock."""
        with self._engine.lock:
            client.hold = hold
            if client.state == DEAD:
                self._fail_dead(client, task)
            elif not task.cancelled:
                self._enqueue(client, task)

    def client(self, handle: Handle) -> ActorClient:
        """The record of an actor, watching it from now on (lock held)."""
        found = self._clients.get(handle._actor)
        if found is None:
            found = self._clients[handle._actor] = ActorClient(handle._actor, handle._class_name, handle._out_of_order)
            if owner_of(handle._actor) == self._process.me:
                # Ours, and yet unknown: nobody would ever answer.
                found.state, found.reason = DEAD, "it died long ago, or belongs to an earlier session of this program"
            else:
                self._engine.send(HEAD, m.WatchActor(handle._actor))
        return found

    def _resolved(self, client: ActorClient, task: Task) -> None:
        if task.cancelled:
            return
        task.waiting = 0
        self._submitter.failed_argument(task)
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
        if not client.inflight and not client.queue:
            client.hold = None

    def _push(self, client: ActorClient, task: Task) -> None:
        task.worker = client.worker
        client.inflight[task.id] = task
        refs, inline = (None, None) if task.slots is None else self._submitter.slot_values(task)
        if task.attempt and task.num_returns > 1:
            self._submitter.tell_wanted(task, client.worker)
        engine = self._engine
        peer = engine.peers.get(client.worker) or engine.peer(client.worker)
        peer.out.append(m.ActorCall(task.id, task.method, task.args, task.num_returns, refs, inline))
        if not peer.dirty:
            peer.dirty = True
            engine.dirty.append(peer)
        elif len(peer.out) >= MAX_BATCH:
            engine.flush_peer(peer)

    def answered(self, src: bytes, task_id: bytes) -> Task | None:
        """A reply of an actor came."""
        client = self._by_worker.get(src)
        if client is None:
            return None
        task = client.inflight.pop(task_id, None)
        if not client.inflight and not client.queue:
            client.hold = None
        return task

    def withdraw(self, task: Task) -> bool:
        """A call was cancelled: if it has not been sent it never will be, nor hold up those behind it."""
        client: ActorClient = task.klass
        if task.id in client.inflight:
            return False
        task.waiting = -1
        client.late.pop(task.id, None)
        self._pump(client)
        return True

    def again(self, task: Task) -> None:
        """Send a call once more: its retry, or to make again what is lost."""
        client: ActorClient = task.klass
        if client.state == DEAD:
            self._fail_dead(client, task)
        else:
            self._enqueue(client, task)

    # ------------------------------------------------------------ states

    def on_state(self, msg: m.ActorState) -> None:
        """The GCS tells what became of an actor."""
        client = self._clients.get(msg.actor)
        if client is None:
            return
        client.heard()
        if msg.state != client.state:
            self._last_words.news(client)
        waits = msg.state != ALIVE and bool(client.inflight) and self._last_words.wait(client)
        client.state, client.reason, client.error = msg.state, msg.reason, msg.error
        if msg.state == ALIVE:
            if client.inflight and next(iter(client.inflight.values())).worker != msg.worker:
                self._interrupted(client, msg.reason)  # that it restarted went down with a head
            client.worker = msg.worker
            self._by_worker[msg.worker] = client
            if not client.restartable:
                client.creation_keep = None
            self._pump(client)
            return
        if not waits:
            self._end(client.worker, client)
        if msg.state == DEAD:
            client.creation_keep = client.hold = None
            calls = [*client.queue, *client.late.values()]
            client.queue.clear()
            client.late.clear()
            for task in calls:
                self._fail_dead(client, task)

    def _end(self, worker: bytes, client: ActorClient) -> None:
        """It has ended, and all answers of its worker have come: other calls in flight are made again, or fail."""
        self._by_worker.pop(worker, None)
        if client.state != DEAD:
            self._interrupted(client, client.reason)
            return
        self._unbind(client)
        inflight, client.inflight = client.inflight, {}
        for task in inflight.values():
            self._fail_dead(client, task)
        self._forget_dead(client)

    def _interrupted(self, client: ActorClient, reason: str) -> None:
        """It restarts: calls in flight are made again or fail."""
        self._unbind(client)
        inflight, client.inflight = client.inflight, {}
        again = [task for task in inflight.values() if task.retries and not task.cancelled]
        for task in inflight.values():
            task.attempt += 1
            if task.cancelled:
                self._submitter.fail_cancelled(task)
            elif task.retries > 0:
                task.retries -= 1
            elif task.retries == 0:
                text = f"The actor died and is being restarted; this call may have run. {reason}"
                self._submitter.fail(task, serialize_error(ActorUnavailableError(text, client.actor)))
        client.queue.extendleft(reversed(again))

    def head_moved(self) -> None:
        """What the old head said last of them may have been lost: ask the new one (lock held)."""
        for client in self._clients.values():
            if client.state != DEAD:
                self._engine.send(HEAD, m.WatchActor(client.actor))

    def process_died(self, proc: bytes, reason: str) -> None:
        """A worker is gone; if it was an actor's, the GCS will say what follows. Calls wait for its word."""
        client = self._by_worker.get(proc)
        if client is not None:
            client.heard()
            for task in client.inflight.values():
                self._process.left_behind(task, proc)
            self._unbind(client)
            self._last_words.heard(proc)

    def _forget_dead(self, client: ActorClient) -> None:
        """Keep what calls of a dead actor raise, for those who still have a handle; not for ever."""
        mine = owner_of(client.actor) == self._process.me and not client.detached
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

    def _fail_dead(self, client: ActorClient, task: Task) -> None:
        if task.cancelled:
            error = serialize_error(TaskCancelledError(error_message=f"{task.name} was cancelled"))
        else:
            error = client.error or serialize_error(actor_error(client.actor, client.class_name, client.reason))
        self._submitter.fail(task, error)
