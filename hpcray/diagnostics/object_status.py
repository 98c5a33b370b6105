"""The state of objects that are not ready: for the error of a `get` that timed out, and for `hpcray why`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from hpcray.common.ids import PUT_INDEX, RESIDENT_INDEX, TASK_BYTES, owner_of, show_proc
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS
from hpcray.common.resources import group_of, plain, to_amounts
from hpcray.core.core_worker.object_table import INLINE, STORED, ObjectEntry
from hpcray.core.core_worker.task import PendingTask, TaskTemplate
from hpcray.core.raylet.local_resources import needs_setup
from hpcray.runtime.core_worker.actor_submitter import ActorClient
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.placement_group_client import CREATED

_MAX_SHOWN = 3
"""Objects that the text of an error names."""

READY, FETCHED, FOREIGN, WRITING, GROUP = "ready", "fetched", "foreign", "writing", "group"
ARGUMENTS, QUEUED, SENT, ACTOR, PAUSED = "arguments", "queued", "sent", "actor", "paused"


@dataclass
class ObjectStatus:
    """The state of one object, as far as one process knows it.

    Attributes:
        what: "put", "object", "task f", "call C.m", "ready() of placement group 12ab".
        text: what it waits for, in words.
        state: READY (its value is here), FETCHED (in a store), FOREIGN (only its owner knows), WRITING (a put),
            ARGUMENTS, QUEUED (for a worker), SENT (to a worker), ACTOR (for its actor), PAUSED (before another run),
            GROUP (for a placement group).
        task: the id of what makes it. worker: where that was sent. actor: whose call it is. group: for which it waits.
        open: arguments that are not ready. nodes: where copies are. resources: what it needs of a node.
        env: whether its worker has a runtime_env to set up first.
    """

    what: str
    text: str
    state: str
    task: bytes = b""
    worker: bytes = b""
    actor: bytes = b""
    open: list[bytes] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    resources: dict[str, float] = field(default_factory=dict)
    group: bytes = b""
    env: bool = False


def timeout_message(process: CoreWorker, missing: Sequence[bytes], timeout: float | None) -> str:
    """The text of a GetTimeoutError (lock held).

    Args:
        missing: the objects that are not there. timeout: seconds.
    """
    count = f"{len(missing)} objects are" if len(missing) > 1 else "one object is"
    lines = [f"Get timed out: some object(s) not ready; after {timeout} s: {count} not available"]
    lines += [f"  {_line(process, oid)}" for oid in missing[:_MAX_SHOWN]]
    if len(missing) > _MAX_SHOWN:
        lines.append(f"  and {len(missing) - _MAX_SHOWN} more")
    return "\n".join(lines)


def status_of_object(process: CoreWorker, oid: bytes, entry: ObjectEntry) -> ObjectStatus:
    """Return the state of one object as this process knows it (lock held)."""
    if entry.state == INLINE or entry.mapping is not None:
        return ObjectStatus("object", "is ready", READY)
    if entry.state == STORED:
        nodes = ", ".join(map(str, entry.nodes or ())) or "none"
        text = f"is ready; its {entry.size} bytes are being fetched from the store of node {nodes}"
        return ObjectStatus("object", text, FETCHED, nodes=list(entry.nodes or ()))
    if owner_of(oid) != process.me:
        if oid[TASK_BYTES:] == RESIDENT_INDEX:
            text = f"is the tensors of a value, which {show_proc(owner_of(oid))} has not sent"
            return ObjectStatus("object", text, FOREIGN)
        what = "a put" if oid[TASK_BYTES:] == PUT_INDEX else "the return of a task"
        return ObjectStatus("object", f"is {what} of its owner, which has not said that it is ready", FOREIGN)
    if isinstance(entry.task, TaskTemplate):
        return status_of_task(process, process.table.packed.show(oid))
    if isinstance(entry.task, PendingTask):
        return status_of_task(process, entry.task)
    group = process.placement_groups.group_of(oid)
    if group is not None:
        state = process.placement_groups.state_of(group)
        why = process.submitter.wait_reasons.get(ACTOR_SCHEDULING_CLASS, "")
        told = group.hex() in why and state != CREATED
        waits = f"waits: {why}" if told else f"waits; the group is {state}{_no_place(state)}"
        return ObjectStatus(f"ready() of placement group {group.hex()}", waits, GROUP, group=group)
    return ObjectStatus("put", "is being written", WRITING)


def _no_place(state: str) -> str:
    return "" if state == CREATED else " (not each of its bundles has a node yet)"


def status_of_task(process: CoreWorker, task: PendingTask) -> ObjectStatus:
    """How far a task or call is that this process has submitted and that has not returned (lock held)."""
    client = task.scheduling_class if isinstance(task.scheduling_class, ActorClient) else None
    what = f"call {client.class_name}.{task.method}" if client is not None else f"task {task.name}"
    if task.waiting > 0 or (client is None and task.scheduling_class is None):
        return _waiting_for_arguments(process, task, what)
    if client is not None:
        return _status_of_call(client, task, what, process.submitter.wait_reasons.get(ACTOR_SCHEDULING_CLASS, ""))
    needed = to_amounts(plain(dict(task.scheduling_class.shape.resources)))
    position = process.submitter.leases.position(task)
    if position is not None:
        behind = f"behind {position} others"
        reason = process.submitter.wait_reasons.get(task.scheduling_class.index, "")
        env = needs_setup(task.scheduling_class.shape.env)
        first = ", whose runtime_env is set up first" if env else ""
        if group := group_of(task.scheduling_class.shape.resources):
            state = process.placement_groups.state_of(bytes.fromhex(group))
            first = f" in placement group {group}" + (f", which is {state}{_no_place(state)}" if state else "") + first
        text = f"waits for a worker with {needed}{first}, {behind}. {reason}".rstrip()
        return ObjectStatus(what, text, QUEUED, task.id, resources=needed, env=env)
    paused = process.submitter.retries.paused.get(task.id)
    if paused is not None:
        text = f"has lost {task.attempt} workers, and runs again in {max(0.0, paused - monotonic()):.1f} s"
        return ObjectStatus(what, text, PAUSED, task.id, resources=needed)
    if task.worker is None:
        return _waiting_for_arguments(process, task, what)
    text = f"was sent to {show_proc(task.worker)} and has not returned"
    return ObjectStatus(what, text, SENT, task.id, task.worker, resources=needed)


def _line(process: CoreWorker, oid: bytes) -> str:
    known = status_of_object(process, oid, process.table.entries[oid])
    return f"{oid.hex()} (owner {show_proc(oid)}): {known.what} {known.text}".rstrip()


def _status_of_call(client: ActorClient, task: PendingTask, what: str, reason: str) -> ObjectStatus:
    actor = f"its actor {client.actor.hex()}"
    if task.id in client.inflight:
        worker = task.worker or client.worker
        text = f"was sent to {actor} in {show_proc(worker)} and has not returned"
        return ObjectStatus(what, text, SENT, task.id, worker, client.actor)
    if client.worker:
        text = f"waits until the calls before it were sent to {actor}"
        late = [first for first in client.queue if first is not task and first.waiting > 0]
        open_ids = [oid for first in late for oid in first.slots or ()]
        return ObjectStatus(what, text, ARGUMENTS, task.id, actor=client.actor, open=open_ids[:1])
    reason = client.reason or (reason if client.class_name in reason else "")
    text = f"waits for {actor}, which is {client.state}. {reason}".rstrip()
    return ObjectStatus(what, text, ACTOR, task.id, actor=client.actor)


def _waiting_for_arguments(process: CoreWorker, task: PendingTask, what: str) -> ObjectStatus:
    entries: dict[bytes, Any] = process.table.entries
    open_ids = [oid for oid in task.slots or () if oid in entries and entries[oid].state not in (INLINE, STORED)]
    first = f": {open_ids[0].hex()} (owner {show_proc(open_ids[0])}) is not ready" if open_ids else ""
    return ObjectStatus(what, f"waits for its arguments{first}", ARGUMENTS, task.id, open=open_ids)
