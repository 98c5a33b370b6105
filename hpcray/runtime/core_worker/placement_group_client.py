"""A process's view of placement groups: which are ready, which are removed, and in which it runs itself."""

from __future__ import annotations

import weakref
from typing import Any

from hpcray.common.exceptions import GroupAlreadyExistsError, TaskPlacementGroupRemoved
from hpcray.common.ids import HEAD, PUT_INDEX
from hpcray.common.resources import CAPTURING, Resources, group_of, plain
from hpcray.core.core_worker.object_table import Waiter
from hpcray.core.core_worker.task import PendingTask
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import Serialized, serialize, serialize_error
from hpcray.runtime.core_worker.context import CoreWorkerContext
from hpcray.runtime.core_worker.drain_client import DrainAdmission
from hpcray.runtime.core_worker.gcs_client import GcsClient
from hpcray.runtime.core_worker.io_engine import monotonic
from hpcray.runtime.core_worker.object_refs import ObjectRef, new_ref

PENDING, CREATED, REMOVED = "PENDING", "CREATED", "REMOVED"


class PlacementGroupClient:
    """The placement groups that one process has created, waits for, or runs in.

    Attributes:
        running_in: id (in hex) of the group that this process's task or actor runs in, "" for none.
        captures: whether what is started from here runs in that group too.
        bound: remote functions whose shape depends on that; they find it out again when it changes.
    """

    def __init__(self, context: CoreWorkerContext, gcs: GcsClient, admission: DrainAdmission) -> None:
        self._gcs = gcs
        self._admission = admission
        self._context = context
        self._engine = context.engine
        self._states: dict[bytes, str] = {}
        self._watched: set[bytes] = set()
        self._waiters: dict[bytes, list[Waiter]] = {}
        self._promised: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self.running_in = ""
        self.captures = False
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()

    # ------------------------------------------------------------ what runs here (worker)

    def enter(self, resources: tuple[tuple[str, int], ...], strategy: str) -> Resources:
        """A lease or an actor begins in this process, placed so. Returns what it holds, by plain names."""
        before = self.running_in if self.captures else ""
        self.running_in = group_of(resources)
        self.captures = strategy.startswith(CAPTURING)
        if (self.running_in if self.captures else "") != before:
            for function in list(self.bound):
                function.unbind()
        return plain(dict(resources)) if self.running_in else dict(resources)

    # ------------------------------------------------------------ groups by id

    def create(self, spec: m.GroupSpec) -> None:
        """Have the head register a group. One with a name is registered when this returns.

        Raises:
            GroupAlreadyExistsError: the name is taken.
        """
        with self._engine.lock:
            self._context.check_alive()
            self._watched.add(spec.group)
            if not spec.name:
                self._engine.send(HEAD, m.CreateGroup(0, spec))
                self._engine.flush()
                return
            reply = self._gcs.ask(lambda request: m.CreateGroup(request, spec))
        if not reply.ok:
            raise GroupAlreadyExistsError(reply.value.decode())

    def remove(self, group: bytes) -> None:
        """Have the head remove a group."""
        with self._engine.lock:
            self._context.check_alive()
            self._engine.send(HEAD, m.RemoveGroup(group))
            self._engine.flush()
            if group in self._watched or group in self._states:
                self._states[group] = REMOVED  # for this process, before the head confirms it

    def wait(self, group: bytes, timeout: float) -> bool:
        """Return True once the group has its bundles; False after `timeout` seconds.

        Raises:
            ValueError: it is removed.
        """
        deadline = monotonic() + timeout
        with self._engine.lock:
            self._watch(group)
            while self._states.get(group) not in (CREATED, REMOVED):
                self._context.check_alive()
                waiter = Waiter()
                self._waiters.setdefault(group, []).append(waiter)
                if not self._context.block(waiter, deadline):
                    self._waiters[group].remove(waiter)
                    return False
            if self._states[group] == REMOVED:
                raise ValueError(f"Placement group {group.hex()} does not exist.")
        return True

    def ready(self, group: bytes, value: Any) -> ObjectRef[Any]:
        """A ref that is ready when the group is; its value is `value`."""
        blob, _ = serialize(value)
        data = blob.join() if isinstance(blob, Serialized) else blob
        with self._engine.lock:
            self._context.check_alive()
            oid = self._context.next_task_id() + PUT_INDEX
            self._context.table.create(oid)
            self._promised.setdefault(group, []).append((oid, data))
            self._watch(group)
            self._settle(group)
        return new_ref(oid)

    def group_of(self, oid: bytes) -> bytes | None:
        """The group for which an object of ours waits; None: it waits for none (lock held)."""
        promised = self._promised.items()
        return next((group for group, refs in promised if any(oid == waiting for waiting, _ in refs)), None)

    def state_of(self, group: bytes) -> str:
        """Return the last state of a group that the head has sent, PENDING if it has sent none; "" for a group that
        this process does not watch (lock held)."""
        return self._states.get(group, PENDING if group in self._watched else "")

    def on_state(self, msg: m.PlacementGroupStateUpdate) -> None:
        """Take over the state of a group from the head (lock held). After a removal, earlier states are ignored."""
        if msg.state != REMOVED and self._states.get(msg.group) == REMOVED:
            return
        if msg.state == REMOVED:
            self._watched.discard(msg.group)
            self._states.pop(msg.group, None)
            self._removed(msg.group.hex())
        self._states[msg.group] = msg.state
        self._settle(msg.group)
        for waiter in self._waiters.pop(msg.group, ()):
            waiter.count = 0
            self._engine.notify(waiter)
        if msg.state == REMOVED and len(self._states) > _REMEMBERED:
            self._forget()

    def head_moved(self) -> None:
        """Watch all groups again at the new head: states that the old one sent may be lost (lock held)."""
        for group in self._watched:
            self._engine.send(HEAD, m.WatchGroup(group))

    def fail(self) -> None:
        """Our raylet is gone: whoever waits wakes (lock held)."""
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.count = 0
                self._engine.notify(waiter)

    # ------------------------------------------------------------ inside

    def _watch(self, group: bytes) -> None:
        if group not in self._watched and self._states.get(group) != REMOVED:
            self._watched.add(group)
            self._engine.send(HEAD, m.WatchGroup(group))
            self._engine.flush()

    def _settle(self, group: bytes) -> None:
        state = self._states.get(group)
        if state not in (CREATED, REMOVED):
            return
        for oid, data in self._promised.pop(group, ()):
            text = f"The placement group {group.hex()} was removed before it was ready."
            self._context.table.set_inline(
                oid, data if state == CREATED else serialize_error(TaskPlacementGroupRemoved(text))
            )

    def _removed(self, group: str) -> None:
        """Tasks that wait for a place in it fail, and those that come."""

        def refusal(task: PendingTask) -> BaseException:
            return TaskPlacementGroupRemoved(
                f"The placement group {group} corresponding to task {task.name!r} has been removed."
            )

        self._admission.close_where(lambda shape: group_of(shape.resources) == group, refusal)

    def _forget(self) -> None:
        for group in [group for group, state in self._states.items() if state == REMOVED][: _REMEMBERED // 2]:
            del self._states[group]


_REMEMBERED = 10_000
