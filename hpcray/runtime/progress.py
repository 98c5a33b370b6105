"""What a process knows of objects that are not there: for the error of a `get` that timed out, and for `hpcray why`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from hpcray.base.bundle_names import plain
from hpcray.base.ids import PUT_INDEX, TASK_BYTES, owner_of, show_proc
from hpcray.base.resources import to_amounts
from hpcray.core.owner.table import INLINE, STORED, Entry
from hpcray.core.owner.tasks import Task
from hpcray.core.scheduler.devices import slow
from hpcray.core.scheduler.wants import ACTOR_KLASS
from hpcray.runtime.actor_calls import ActorClient

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_SHOWN = 3

READY, FETCHED, FOREIGN, WRITING, GROUP = "ready", "fetched", "foreign", "writing", "group"
ARGUMENTS, QUEUED, SENT, ACTOR, PAUSED = "arguments", "queued", "sent", "actor", "paused"


@dataclass
class Known:
    """What one process knows of one object.

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


def unavailable(process: Process, missing: Sequence[bytes], timeout: float | None) -> str:
    """The text of a GetTimeoutError (lock held).

    Args:
        missing: the objects that are not there. timeout: seconds.
    """
    count = f"{len(missing)} objects are" if len(missing) > 1 else "one object is"
    lines = [f"Get timed out: some object(s) not ready; after {timeout} s: {count} not available"]
    lines += [f"  {_line(process, oid)}" for oid in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        lines.append(f"  and {len(missing) - _SHOWN} more")
    return "\n".join(lines)


def known_of(process: Process, oid: bytes, entry: Entry) -> Known:
    """What this process knows of one object (lock held)."""
    if entry.state == INLINE or entry.mapping is not None:
        return Known("object", "is ready", READY)
    if entry.state == STORED:
        nodes = ", ".join(map(str, entry.nodes or ())) or "none"
        text = f"is ready; its {entry.size} bytes are being fetched from the store of node {nodes}"
        return Known("object", text, FETCHED, nodes=list(entry.nodes or ()))
    if owner_of(oid) != process.me:
        what = "a put" if oid[TASK_BYTES:] == PUT_INDEX else "the return of a task"
        return Known("object", f"is {what} of its owner, which has not said that it is ready", FOREIGN)
    if isinstance(entry.task, Task):
        return known_of_task(process, entry.task)
    group = process.groups.group_of(oid)
    if group is not None:
        state = process.groups.state_of(group) or "not known yet"
        return Known(f"ready() of placement group {group.hex()}", f"waits; the group is {state}", GROUP, group=group)
    return Known("put", "is being written", WRITING)


def known_of_task(process: Process, task: Task) -> Known:
    """How far a task or call is that this process has submitted and that has not returned (lock held)."""
    client = task.klass if isinstance(task.klass, ActorClient) else None
    what = f"call {client.class_name}.{task.method}" if client is not None else f"task {task.name}"
    if task.waiting > 0 or (client is None and task.klass is None):
        return _arguments(process, task, what)
    if client is not None:
        return _of_call(client, task, what, process.submitter.waits.get(ACTOR_KLASS, ""))
    wanted = to_amounts(plain(dict(task.klass.shape.resources)))
    if task in task.klass.queue:
        behind = f"behind {task.klass.queue.index(task)} others"
        reason = process.submitter.waits.get(task.klass.index, "")
        env = slow(task.klass.shape.env)
        first = ", whose runtime_env is set up first" if env else ""
        text = f"waits for a worker with {wanted}{first}, {behind}. {reason}".rstrip()
        return Known(what, text, QUEUED, task.id, resources=wanted, env=env)
    paused = process.submitter.retrying.paused.get(task.id)
    if paused is not None:
        text = f"has lost {task.attempt} workers, and runs again in {max(0.0, paused - monotonic()):.1f} s"
        return Known(what, text, PAUSED, task.id, resources=wanted)
    if task.worker is None:
        return _arguments(process, task, what)
    text = f"was sent to {show_proc(task.worker)} and has not returned"
    return Known(what, text, SENT, task.id, task.worker, resources=wanted)


def _line(process: Process, oid: bytes) -> str:
    known = known_of(process, oid, process.table.entries[oid])
    return f"{oid.hex()} (owner {show_proc(oid)}): {known.what} {known.text}".rstrip()


def _of_call(client: ActorClient, task: Task, what: str, told: str) -> Known:
    actor = f"its actor {client.actor.hex()}"
    if task.id in client.inflight:
        worker = task.worker or client.worker
        text = f"was sent to {actor} in {show_proc(worker)} and has not returned"
        return Known(what, text, SENT, task.id, worker, client.actor)
    if client.worker:
        text = f"waits until the calls before it were sent to {actor}"
        late = [first for first in client.queue if first is not task and first.waiting > 0]
        open_ids = [oid for first in late for oid in first.slots or ()]
        return Known(what, text, ARGUMENTS, task.id, actor=client.actor, open=open_ids[:1])
    reason = client.reason or (told if client.class_name in told else "")
    text = f"waits for {actor}, which is {client.state}. {reason}".rstrip()
    return Known(what, text, ACTOR, task.id, actor=client.actor)


def _arguments(process: Process, task: Task, what: str) -> Known:
    entries: dict[bytes, Any] = process.table.entries
    open_ids = [oid for oid in task.slots or () if oid in entries and entries[oid].state not in (INLINE, STORED)]
    first = f": {open_ids[0].hex()} (owner {show_proc(open_ids[0])}) is not ready" if open_ids else ""
    return Known(what, f"waits for its arguments{first}", ARGUMENTS, task.id, open=open_ids)
