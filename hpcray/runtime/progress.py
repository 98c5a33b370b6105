"""What is known of objects that are not there: for the error of a `get` that timed out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcray.base.ids import PUT_INDEX, TASK_BYTES, owner_of, show_proc
from hpcray.base.resources import to_amounts
from hpcray.core.owner.table import INLINE, STORED, Entry
from hpcray.core.owner.tasks import Task
from hpcray.runtime.actor_calls import ActorClient

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_SHOWN = 3


def unavailable(process: Process, missing: Sequence[bytes], timeout: float | None) -> str:
    """The text of a GetTimeoutError (lock held).

    Args:
        missing: the objects that are not there. timeout: seconds.
    """
    count = f"{len(missing)} objects are" if len(missing) > 1 else "one object is"
    lines = [f"get timed out after {timeout} s: {count} not available"]
    lines += [f"  {_line(process, oid)}" for oid in missing[:_SHOWN]]
    if len(missing) > _SHOWN:
        lines.append(f"  and {len(missing) - _SHOWN} more")
    return "\n".join(lines)


def _line(process: Process, oid: bytes) -> str:
    entry = process.table.entries[oid]
    known = _of_others(process, oid, entry) if entry.state == STORED or owner_of(oid) != process.me else ""
    what = "object" if known else "put"
    if not known and isinstance(entry.task, Task):
        what, known = _of_task(process, entry.task)
    return f"{oid.hex()} (owner {show_proc(oid)}): {what} {known or 'is being written'}".rstrip()


def _of_others(process: Process, oid: bytes, entry: Entry) -> str:
    if entry.state == STORED:
        nodes = ", ".join(map(str, entry.nodes or ())) or "none"
        return f"is ready; its {entry.size} bytes are being fetched from the store of node {nodes}"
    what = "a put" if oid[TASK_BYTES:] == PUT_INDEX else "the return of a task"
    return f"is {what} of its owner, which has not said that it is ready"


def _of_task(process: Process, task: Task) -> tuple[str, str]:
    """What makes the object, and how far that is."""
    client = task.klass if isinstance(task.klass, ActorClient) else None
    what = f"call {client.class_name}.{task.method}" if client is not None else f"task {task.name}"
    if task.waiting > 0 or (client is None and task.klass is None):
        return what, _arguments(process, task)
    if client is not None:
        return what, _of_call(client, task)
    if task in task.klass.queue:
        wanted = to_amounts(dict(task.klass.shape.resources))
        behind = f"behind {task.klass.queue.index(task)} others"
        reason = process.submitter.waits.get(task.klass.index, "")
        return what, f"waits for a worker with {wanted}, {behind}. {reason}".rstrip()
    if task.worker is None:
        return what, _arguments(process, task)
    return what, f"was sent to {show_proc(task.worker)} and has not returned"


def _of_call(client: ActorClient, task: Task) -> str:
    actor = f"its actor {client.actor.hex()}"
    if task.id in client.inflight:
        return f"was sent to {actor} in {show_proc(client.worker)} and has not returned"
    if client.worker:
        return f"waits until the calls before it were sent to {actor}"
    return f"waits for {actor}, which is {client.state}. {client.reason}".rstrip()


def _arguments(process: Process, task: Task) -> str:
    entries = process.table.entries
    open_ones = [oid for oid in task.slots or () if oid in entries and entries[oid].state not in (INLINE, STORED)]
    first = f": {open_ones[0].hex()} (owner {show_proc(open_ones[0])}) is not ready" if open_ones else ""
    return f"waits for its arguments{first}"
