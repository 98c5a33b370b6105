"""What a driver or worker answers when it is asked about itself (`Ask`), by whatever thread drives its engine.

=========  ==================  =========================================================================
what       arguments           answer
=========  ==================  =========================================================================
stack      []                  "threads", "coroutines", "calls" (what runs), "waiting" (ids that `get` waits for),
                               "sets_up" (seconds for which it has been setting up its runtime_env, 0: it does not)
explain    [object ids]        what is known of each: the fields of `progress.Known`, or nil
waiting    []                  [seconds, object ids] of every `get` that waits
calls      []                  the tasks and calls that run here
tasks      [limit]             the tasks and calls of ours that have not returned, and how many there are
objects    [limit]             the objects that we own or borrow, and how many there are
events     []                  what ran here and has ended: `Record.dump`
log        [core, start]       what the object table was told, if that is recorded: `recorders.owner_portion`
=========  ==================  =========================================================================
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.ids import owner_of
from hpcray.core.owner.table import FREED, INLINE, PENDING, STORED
from hpcray.core.owner.tasks import Task
from hpcray.runtime.actor_calls import ActorClient
from hpcray.runtime.progress import known_of, known_of_task
from hpcray.runtime.refs import current
from hpcray.runtime.stacks import coroutine_stacks, thread_stacks
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

_STATES = {PENDING: "pending", INLINE: "inline", STORED: "stored", FREED: "remembered"}


class Answers:
    """One process's answers. Nothing here reads a file, waits, or costs anything before it is asked."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._methods: dict[str, Callable[..., Any]] = {
            "stack": self._stack,
            "explain": self._explain,
            "waiting": self._waiting,
            "calls": self._calls,
            "tasks": self._tasks,
            "objects": self._objects,
            "events": self._events,
        }
        if process.config.record:
            from hpcray.runtime.recorders import owner_portion

            self._methods["log"] = owner_portion(process)

    def on_ask(self, src: bytes, msg: m.Ask) -> None:
        """Somebody asks (lock held)."""
        method = self._methods.get(msg.what)
        if method is None:
            reply = m.GcsReply(msg.req, False, f"unknown question {msg.what!r}".encode())
        else:
            args = msgspec.msgpack.decode(msg.args) if msg.args else []
            try:
                reply = m.GcsReply(msg.req, True, msgspec.msgpack.encode(method(*args)))
            except Exception as error:  # what it looks at changes under it, user code's variables among them
                reply = m.GcsReply(msg.req, False, f"{type(error).__name__}: {error}".encode())
        self._process.engine.send(src, reply)

    def own(self, what: str, args: Any) -> Any:
        """Our own answer, as it would reach others (lock held)."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._methods[what](*args)))

    def on_ask_retries(self, src: bytes, msg: m.AskRetries) -> None:
        """A raylet is short of memory (lock held)."""
        workers = self._process.submitter.leases.workers
        rows = []
        for proc in msg.workers:
            leased = workers.get(proc)
            task = next(iter(leased.inflight.values()), None) if leased is not None else None
            rows.append((proc, task.name if task is not None else "", task is None or task.retries != 0))
        self._process.engine.send(src, m.Retries(msg.number, rows))

    # ------------------------------------------------------------ what runs

    def _stack(self) -> dict[str, Any]:
        coroutines = []
        for loop in self._loops():
            coroutines += [_named(row) for row in coroutine_stacks(loop)]
        return {
            "pid": os.getpid(),
            "kind": self._process.kind,
            "me": threading.get_ident(),
            "threads": thread_stacks(),
            "coroutines": coroutines,
            "calls": self._calls(),
            "sets_up": _setting_up(),
            "waiting": [oid for _, oids in self._waiting() for oid in oids],
        }

    def _loops(self) -> Iterator[Any]:
        worker = current.worker
        if worker is not None and worker.actor is not None:
            yield from worker.actor.loops()

    def _calls(self) -> list[dict[str, Any]]:
        """What runs: "task" (id), "name", "seconds", "thread" (0: a coroutine), "actor" (id or b"")."""
        worker = current.worker
        if worker is None:
            return []
        now = perf_counter()
        actor = worker.actor.spec.actor if worker.actor is not None else b""
        rows = []
        for thread, local in list(worker.thread_locals.items()):
            msg = local.get("task")
            if msg is not None:
                rows.append(_call(worker.label(msg), msg, now - local.get("since", now), thread, actor))
        for loop in self._loops():
            for row in coroutine_stacks(loop):
                msg, since = row["local"].get("msg"), row["local"].get("started", now)
                if isinstance(msg, m.ActorCall):
                    rows.append(_call(worker.label(msg), msg, now - since, 0, actor))
        return rows

    # ------------------------------------------------------------ what is waited for

    def _waiting(self) -> list[tuple[float, list[bytes]]]:
        """The `get`s that wait: for how long, as far as that was noted, and for what that is not there."""
        entries = self._process.table.entries
        found = []
        for oids in self._process.table.pins.gathering:
            missing = [oid for oid in oids if oid in entries and not entries[oid].available]
            if missing:
                found.append((self._process.survey.waits.seconds(oids), missing))
        return found

    def _explain(self, oids: list[bytes]) -> list[dict[str, Any] | None]:
        entries = self._process.table.entries
        self._process.drain()
        return [
            asdict(known_of(self._process, oid, entries[oid])) if oid in entries else None  # freed, or never ours
            for oid in oids
        ]

    # ------------------------------------------------------------ what there is

    def _tasks(self, limit: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        total = 0
        for task in self._open_tasks():
            total += 1
            if len(rows) < limit:
                known = known_of_task(self._process, task)
                client = task.klass if isinstance(task.klass, ActorClient) else None
                rows.append({
                    "task": task.id,
                    "name": task.name,
                    "class": client.class_name if client is not None else "",
                    "state": known.state,
                    "worker": known.worker,
                    "actor": known.actor,
                    "resources": known.resources,
                    "retries": task.retries,
                })  # fmt: skip
        return {"total": total, "rows": rows}

    def _open_tasks(self) -> Iterator[Task]:
        """Every task of ours that has not returned, once."""
        seen: set[bytes] = set()
        submitter = self._process.submitter
        for klass in submitter.leases.by_index:
            for task in klass.queue:
                seen.add(task.id)
                yield task
        for leased in submitter.leases.workers.values():
            for task in leased.inflight.values():
                seen.add(task.id)
                yield task
        for client in submitter.actors._clients.values():
            for task in (*client.inflight.values(), *client.queue, *client.late.values()):
                seen.add(task.id)
                yield task
        for entry in self._process.table.entries.values():
            if entry.state == PENDING and isinstance(entry.task, Task) and entry.task.id not in seen:
                seen.add(entry.task.id)
                yield entry.task

    def _objects(self, limit: int) -> dict[str, Any]:
        self._process.drain()
        me = self._process.me
        entries = self._process.table.entries
        rows: list[dict[str, Any]] = []
        for oid, entry in entries.items():
            if len(rows) >= limit:
                break
            rows.append({
                "id": oid,
                "state": _STATES[entry.state],
                "size": len(entry.value) if entry.state == INLINE else entry.size,
                "local": entry.local,
                "borrowers": len(entry.borrowers or ()),
                "mine": owner_of(oid) == me,
                "mapped": entry.mapping is not None,
                "nodes": entry.nodes or [],
                "task": entry.task.name if isinstance(entry.task, Task) else "",
                "site": getattr(entry, "site", ""),
            })  # fmt: skip
        return {"total": len(entries), "rows": rows}

    def _events(self) -> dict[str, Any]:
        worker = current.worker
        record = worker.replies.record if worker is not None else None
        return {
            "pid": os.getpid(),
            "offset": time.time() - perf_counter(),
            "now": perf_counter(),
            "ended": record.dump() if record is not None else [],
            "full": record.full if record is not None else False,
            "running": self._calls(),
            "actor": worker.actor.spec.actor if worker is not None and worker.actor is not None else b"",
        }


def _setting_up() -> float:
    worker = current.worker
    since = worker.environment.since if worker is not None else 0.0
    return perf_counter() - since if since else 0.0


def _call(name: str, msg: m.PushTask | m.ActorCall, seconds: float, thread: int, actor: bytes) -> dict[str, Any]:
    return {"task": msg.task, "name": name, "seconds": seconds, "thread": thread, "actor": actor}


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """A coroutine's row as it travels: calls of ours by the name of their method."""
    msg = row["local"].get("msg")
    name = msg.method if isinstance(msg, m.ActorCall) else row["name"]
    return {"name": name, "frames": row["frames"], "task": msg.task if isinstance(msg, m.ActorCall) else b""}
