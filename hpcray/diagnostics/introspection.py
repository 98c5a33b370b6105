"""A driver's or worker's answers about itself (`Introspect`), by whatever thread drives its engine; the job's objects.

=========  ==================  =========================================================================
what       arguments           answer
=========  ==================  =========================================================================
stack      []                  "threads", "coroutines", "calls" (what runs), "waits" (how many objects a `wait` wants,
                               0 for a `get`; of which), "sets_up" (seconds for which it has been setting up its
                               runtime_env, 0: it does not)
explain    [object ids]        what is known of each: the fields of `ObjectStatus`, or nil
waiting    []                  [seconds, wanted, object ids] of every `get` and `wait` that waits, as in "waits"
calls      []                  the tasks and calls that run here
tasks      [limit]             the tasks and calls of ours that have not returned, how many there are, and the last
                               that failed without a reply of their worker
objects    [limit]             the objects that we own or borrow, and how many there are
devices    []                  by device, the number of device objects that are kept here, and their bytes
job        []                  "id" of the job, "driver" (whether this process is its driver), "command" line of this
                               process, "start" in seconds since 1970
events     [limit, since,      what ran here and has ended: `TaskEventBuffer.dump`; whether with the texts of errors.
           errors]             All three may be left out
figures    []                  what ran, runs and waits, by function: `TaskFigures.answer`
ended      []                  of that, what has run: `TaskFigures.ended`
work       []                  "figures", and "calls", the answer to that
last       []                  "figures" as this process ends, and "events", the answer to that
profile    [token, options]    begins a profile of this process, which ends by itself: `ProcessProfiler.start`
debug      [token, word, ...]  what the client of a breakpoint has typed, or wants to know: `debugger.answer`
profiled   [token, most]       ends it; the answer comes when it is ready: `ProcessProfiler.answer_later`
log_parts  [task, suffix]      "name" of this worker's log file ("out" or "err"), and "parts": from where to where each
                               run of the task has written; nil: it has no such file
log        [core, start]       the inputs of the object table, if they are recorded: `owner_portion`
=========  ==================  =========================================================================
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice, takewhile
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.common.exceptions import ObjectFreedError
from hpcray.common.figures import FunctionRow, add_counts, add_functions, bucket_of, count_names
from hpcray.common.ids import number_of, owner_of, raylet_of, show_proc
from hpcray.common.resources import group_of
from hpcray.core.core_worker.object_table import INLINE, LINEAGE_ONLY, PENDING, STORED
from hpcray.core.core_worker.task import PendingTask, TaskTemplate
from hpcray.diagnostics.wait_graph import (
    SlowGetReport,
    status_of_object,
    status_of_task,
    timeout_message,
    waiting_calls,
)
from hpcray.platform.stacks import coroutine_stacks, thread_stacks
from hpcray.protocol import messages as m
from hpcray.protocol.serialization import deserialize, serialize_error
from hpcray.runtime.core_worker.actor_submitter import ActorClient
from hpcray.runtime.core_worker.context import Handler, HandlerTable
from hpcray.runtime.core_worker.core_worker import CoreWorker, current
from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.runtime.worker.task_events import MAX_ERROR_TEXT

if TYPE_CHECKING:
    from hpcray.diagnostics.process_profile import ProcessProfiler


# ------------------------------------------------------------ task figures
# The tasks and calls of one process by function: those that have run here, that run, and that it waits for.


_NAME, _TIME, _FAILURE, _COUNTED = itemgetter(1), itemgetter(3), itemgetter(4), itemgetter(1, 3, 4)
_MOST_COUNTED = 2000
"""Queued tasks of one scheduling class that are looked at; their names stand for those of all."""
_MOST_SEARCHED = 20_000
"""Objects among which tasks that wait for their arguments are looked for, at most."""


_FEW = 8  # tasks of one worker whose names are looked at


def _scaled(few: dict[str, int], count: int) -> dict[str, int]:
    looked_at = sum(few.values())
    return {name: round(count * some / looked_at) for name, some in few.items()}


class TaskFigures:
    """Counts what a worker has run since its start, as far as its ring of ended tasks has it at the next question.

    Nothing is counted between questions: each reads what has come into the ring since the last one.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._functions: dict[str, FunctionRow] = {}
        self._last = 0.0
        self._last_lost: tuple[Any, ...] | None = None
        self._partial = False

    def answer(self, running: list[dict[str, Any]]) -> dict[str, Any]:
        """The reply to "figures" (lock held).

        Args:
            running: the calls that run here.
        """
        elapsed: dict[str, int] = {}
        for call in running:
            elapsed[call["name"]] = elapsed.get(call["name"], 0) + round(1e6 * call["seconds"])
        few = len(self._process.table.entries) <= _MOST_SEARCHED
        lacking = count_names(self._without_arguments()) if few else {}
        return {
            **self.ended(),
            "running": count_names(call["name"] for call in running),
            "elapsed": elapsed,
            "queued": self._queued(lacking),
            "lacking": lacking,
            "sent": self._sent(),
        }

    def ended(self) -> dict[str, Any]:
        """Return the rows of what has ended here, and whether some of it was not seen (lock held)."""
        self._count_ended()
        self._count_lost()
        functions = self._functions
        for extension in self._process.extensions.loaded:
            if rows := extension.function_rows():
                functions = {**functions, **rows}
        return {"functions": functions, "partial": self._partial}

    def _count_ended(self) -> None:
        worker = current.worker
        record = worker.replies.record if worker is not None else None
        if record is None:
            return
        new, overflowed = record.since(self._last), record.overflowed
        if not new:
            return
        self._partial = self._partial or (overflowed and record.first > self._last)
        self._last = new[-1][2]
        record.trim()
        found: dict[str, FunctionRow] = {}
        if any(map(_FAILURE, new)) or len(set(map(_NAME, new))) > 1:
            counted = Counter(map(_COUNTED, new))
        else:  # mostly it is one function, which costs a third then
            counted = Counter({(new[0][1], us, False): count for us, count in Counter(map(_TIME, new)).items()})
        for (name, us, failed), count in counted.items():
            if (row := found.get(name)) is None:
                row = found[name] = [0, 0, 0, {}]
            row[0] += count
            row[1] += count * failed
            row[2] += count * us
            bucket = bucket_of(us)
            row[3][bucket] = row[3].get(bucket, 0) + count
        add_functions(self._functions, found)

    def _count_lost(self) -> None:
        """Count our tasks and calls that have ended without a reply, as their process died, or before they ran: no
        worker has them in its ring. They have no run time."""
        failures = self._process.submitter.failures
        new = list(takewhile(lambda row: row is not self._last_lost, reversed(failures)))
        if new:
            self._partial = self._partial or len(new) == failures.maxlen
            self._last_lost = new[0]
            counts = Counter(map(_NAME, new))
            add_functions(self._functions, {name: [count, count, 0, {}] for name, count in counts.items()})

    def _queued(self, lacking: dict[str, int]) -> dict[str, int]:
        """Tasks and calls of ours that have not been sent, by name. lacking: those that wait for their arguments."""
        submitter, entries = self._process.submitter, self._process.table.entries
        counts: dict[str, int] = {}
        for scheduling_class in submitter.leases.by_index:
            queue = scheduling_class.queue
            sample = count_names(
                entries[task].task.name if type(task) is bytes else task.name  # a packed one has a template's name
                for task in islice(queue, _MOST_COUNTED)
            )
            for name, count in sample.items():
                counts[name] = counts.get(name, 0) + round(count * len(queue) / min(len(queue), _MOST_COUNTED))
        for client in submitter.actors._clients.values():
            if client.queue:
                name = f"{client.class_name}.{client.queue[0].method}"
                counts[name] = counts.get(name, 0) + len(client.queue)
        add_counts(counts, lacking)
        return counts

    def _sent(self) -> dict[str, int]:
        """Tasks and calls of ours that were sent and have not been answered, by name; a few of each worker stand for
        all that it has."""
        submitter = self._process.submitter
        counts: dict[str, int] = {}
        for leased in submitter.leases.workers.values():
            if inflight := leased.inflight:
                few = count_names(task.name for task in islice(inflight.values(), _FEW))
                add_counts(counts, _scaled(few, len(inflight)))
        for client in submitter.actors._clients.values():
            if inflight := client.inflight:
                few = count_names(f"{client.class_name}.{task.method}" for task in islice(inflight.values(), _FEW))
                add_counts(counts, _scaled(few, len(inflight)))
        return counts

    def _without_arguments(self) -> Iterator[str]:
        seen: set[bytes] = set()
        for entry in self._process.table.entries.values():
            task = entry.task
            # The calls of an actor are in its queue.
            waits = type(task) is PendingTask and task.scheduling_class is None and entry.state == PENDING
            if waits and task.id not in seen:
                seen.add(task.id)
                yield task.name


# ------------------------------------------------------------ introspection


_MAX_IDS = 10_000
"""Objects that one message asks an owner about, at most."""
_START = perf_counter()
_STATES = {PENDING: "pending", INLINE: "inline", STORED: "stored", LINEAGE_ONLY: "remembered"}


class Introspection:
    """One process's answers. Nothing here reads a file, waits, or costs anything without a query."""

    def __init__(self, process: CoreWorker, waits: SlowGetReport) -> None:
        self._slow_gets = waits
        self._process = process
        self._task_figures = TaskFigures(process)
        self._methods: dict[str, Callable[..., Any]] = {
            "stack": self._stack,
            "explain": self._explain,
            "waiting": self._waiting,
            "calls": self._calls,
            "tasks": self._tasks,
            "objects": self._objects,
            "references": self._references,
            "events": self._events,
            "figures": lambda: self._task_figures.answer(self._calls()),
            "ended": self._task_figures.ended,
            "work": self._work,
            "last": lambda: {**self._task_figures.answer(self._calls()), "events": {**self._events(), "running": []}},
            "log_parts": self._log_parts,
            "devices": self._devices,
            "job": self._job,
            "profile": self._profile,
        }
        self._profiler: ProcessProfiler | None = None
        if process.config.record:
            self._methods["log"] = owner_portion(process)

    def on_introspect(self, src: bytes, msg: m.Introspect) -> None:
        """Answer a query (lock held)."""
        try:
            reply = self._reply(src, msg)
        except Exception as error:  # what it looks at changes under it, user code's variables among them
            reply = m.GcsReply(msg.req, False, f"{type(error).__name__}: {error}".encode())
        if reply is not None:
            self._process.engine.send(src, reply)

    def _reply(self, src: bytes, msg: m.Introspect) -> m.GcsReply | None:
        """The reply; None: it follows."""
        if msg.what == "debug":
            self._debug(src, msg)
            return None
        if msg.what == "profiled":
            self._started_profiler().answer_later(src, msg.req, *msgspec.msgpack.decode(msg.args))
            return None
        if (method := self._methods.get(msg.what)) is None:
            return m.GcsReply(msg.req, False, f"unknown question {msg.what!r}".encode())
        args = msgspec.msgpack.decode(msg.args) if msg.args else []
        return m.GcsReply(msg.req, True, msgspec.msgpack.encode(method(*args)))

    def answer_locally(self, what: str, args: Any) -> Any:
        """Our own answer, as it would reach others (lock held)."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self._methods[what](*args)))

    def on_list_retriable_tasks(self, src: bytes, msg: m.ListRetriableTasks) -> None:
        """A raylet is short of memory (lock held)."""
        workers = self._process.submitter.leases.workers
        rows = []
        for proc in msg.workers:
            leased = workers.get(proc)
            task = next(iter(leased.inflight.values()), None) if leased is not None else None
            rows.append((proc, task.name if task is not None else "", task is None or task.retries != 0))
        self._process.engine.send(src, m.RetriableTasks(msg.number, rows))

    # ------------------------------------------------------------ profiles, breakpoints

    def _debug(self, src: bytes, msg: m.Introspect) -> None:
        from hpcray.diagnostics.debugger import answer

        token, *words = msgspec.msgpack.decode(msg.args)
        answer(src, msg.req, token, words, self._send_now, lambda: {call["task"] for call in self._calls()})

    def _profile(self, token: bytes, options: dict[str, Any]) -> dict[str, Any]:
        from hpcray.diagnostics.process_profile import ProfileOptions  # few processes are ever profiled

        return self._started_profiler().start(token, msgspec.convert(options, ProfileOptions))

    def _started_profiler(self) -> ProcessProfiler:
        from hpcray.diagnostics.process_profile import ProcessProfiler, labels_of

        if self._profiler is None:
            self._profiler = ProcessProfiler(partial(labels_of, self._process), self._send_now)
        return self._profiler

    def _send_now(self, dest: bytes, reply: m.GcsReply) -> None:
        """Send a reply from a thread that does not drive the engine."""
        engine = self._process.engine
        with engine.lock:
            engine.send(dest, reply)
            engine.flush()

    # ------------------------------------------------------------ what runs

    def _stack(self) -> dict[str, Any]:
        coroutines = []
        for loop in self._loops():
            coroutines += [_named(row) for row in coroutine_stacks(loop)]
        return {
            "pid": os.getpid(),
            "kind": self._process.place.kind,
            "me": threading.get_ident(),
            "threads": thread_stacks(),
            "coroutines": coroutines,
            "calls": self._calls(),
            "sets_up": _setting_up(),
            "waits": [(wanted, oids) for _, wanted, oids in self._waiting()],
        }

    def _loops(self) -> Iterator[Any]:
        if (worker := current.worker) is not None and worker.actor is not None:
            yield from worker.actor.loops()

    def _calls(self) -> list[dict[str, Any]]:
        """Return what runs: "task" (id), "name", "seconds", "thread" (0: a coroutine), "actor" (id or b"")."""
        if (worker := current.worker) is None:
            return []
        now = perf_counter()
        actor = worker.actor.spec.actor if worker.actor is not None else b""
        rows = []
        for thread, local in list(worker.thread_locals.items()):
            if (msg := local.get("task")) is not None:
                rows.append(_call(worker.running_name(msg), msg, now - local.get("since", now), thread, actor))
        for loop in self._loops():
            for row in coroutine_stacks(loop, frames=False):
                msg, since = row["local"].get("msg"), row["local"].get("started")
                if isinstance(msg, m.ActorCall) and since is not None:  # else it waits for its turn
                    rows.append(_call(worker.running_name(msg), msg, now - since, 0, actor))
        return rows

    def _work(self) -> dict[str, Any]:
        calls = self._calls()
        return {**self._task_figures.answer(calls), "calls": calls}

    # ------------------------------------------------------------ what is waited for

    def _waiting(self) -> list[tuple[float, int, list[bytes]]]:
        """The calls that wait: for how long, as far as that was noted; how many more objects a `wait` wants, 0 for a
        `get`; and for what that is not there."""
        return [
            (self._slow_gets.seconds(listed), wanted, missing)
            for listed, wanted, missing in waiting_calls(self._process)
        ]

    def _explain(self, oids: list[bytes]) -> list[dict[str, Any] | None]:
        entries = self._process.table.entries
        self._process.drain()
        return [
            msgspec.structs.asdict(status_of_object(self._process, oid, entries[oid]))
            if oid in entries
            else None  # freed, or never ours
            for oid in oids
        ]

    # ------------------------------------------------------------ what there is

    def _tasks(self, limit: int) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []
        total = 0
        for task in self._open_tasks():
            total += 1
            if len(rows) < limit:
                known = status_of_task(self._process, task)
                client = task.scheduling_class if isinstance(task.scheduling_class, ActorClient) else None
                shape = getattr(task.scheduling_class, "shape", None)
                rows.append({
                    "task": task.id,
                    "name": task.name,
                    "class": client.class_name if client is not None else "",
                    "state": known.state,
                    "worker": known.worker,
                    "actor": known.actor,
                    "resources": known.resources,
                    "group": group_of(shape.resources) if shape is not None else "",
                    "retries": task.retries,
                    "attempt": task.attempt,
                })  # fmt: skip
        failed = [_failure(row) for row in self._process.submitter.failures]
        return {"total": total, "rows": rows, "failed": failed, "job": self._job_id}

    def _devices(self) -> dict[str, tuple[int, int]]:
        return {
            device: counted
            for extension in self._process.extensions.loaded
            for device, counted in extension.device_totals().items()
        }

    def _job(self) -> dict[str, Any]:
        return {
            "id": self._job_id,
            "driver": self._process.place.is_driver,
            "command": " ".join(sys.orig_argv),
            "start": time.time() - perf_counter() + _START,
        }

    def _log_parts(self, task: bytes, suffix: str) -> dict[str, Any] | None:
        worker = current.worker
        return worker.log_parts.find(task, suffix) if worker is not None and worker.log_parts is not None else None

    @property
    def _job_id(self) -> str:
        return self._process.place.job_id

    def _open_tasks(self) -> Iterator[PendingTask]:
        """Every task of ours that has not returned, once."""
        seen: set[bytes] = set()
        submitter = self._process.submitter
        for scheduling_class in submitter.leases.by_index:
            for task in submitter.leases.queued(scheduling_class):
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
            if entry.state == PENDING and isinstance(entry.task, PendingTask) and entry.task.id not in seen:
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
            task = entry.task if isinstance(entry.task, PendingTask) else None
            if isinstance(entry.task, TaskTemplate):
                task = self._process.table.packed.show(oid)
            known = status_of_task(self._process, task) if task is not None and entry.state == PENDING else None
            rows.append({
                "id": oid,
                "status": known.state if known is not None else "",
                "actor": known.actor if known is not None else b"",
                "state": _STATES[entry.state],
                "size": len(entry.value) if entry.state == INLINE else entry.size,
                "local": entry.local,
                "borrowers": len(entry.borrowers or ()),
                "mine": owner_of(oid) == me,
                "mapped": entry.mapping is not None,
                "nodes": entry.nodes or [],
                "task": task.name if task is not None else "",
                "site": entry.site,
            })  # fmt: skip
        return {"total": len(entries), "rows": rows}

    def _references(self) -> list[tuple[bytes, int, int]]:
        """Objects that this process refers to: refs that its program holds, and mentions in tasks that have not ended.

        A ref that only such a task holds, or another object, is none of the program's.
        """
        self._process.drain()
        me, entries = self._process.me, self._process.table.entries
        kept = [ref for task in self._open_tasks() for ref in task.keep or ()]
        contained = [ref for entry in entries.values() for ref in entry.contained or ()]
        held = Counter(map(id, kept + contained))
        hidden: Counter[bytes] = Counter()
        for ref in {id(ref): ref for ref in kept + contained}.values():
            # Each of the `held` lists of tasks and objects is here once more; then there are the dict, `ref`, and the
            # argument of this call.
            if sys.getrefcount(ref) <= 2 * held[id(ref)] + 3:
                hidden[ref._id] += 1
        mentions = Counter(ref._id for ref in kept)
        return [
            (oid, max(0, entry.local - hidden[oid]), mentions[oid])
            for oid, entry in entries.items()
            if entry.local > 0 or entry.borrowers or entry.state != PENDING or owner_of(oid) != me
        ]

    def _events(self, limit: int = 0, since: float = 0.0, errors: bool = True) -> dict[str, Any]:
        worker = current.worker
        record = worker.replies.record if worker is not None else None
        return {
            "pid": os.getpid(),
            "offset": time.time() - perf_counter(),
            "now": perf_counter(),
            "ended": record.dump(limit, since) if record is not None else [],
            "errors": record.dump_errors(limit) if record is not None and errors else [],
            "full": record.full if record is not None else False,
            "running": self._calls(),
            "job": self._job_id,
            "actor": worker.actor.spec.actor if worker is not None and worker.actor is not None else b"",
        }


def _failure(row: tuple[Any, ...]) -> dict[str, Any]:
    task, name, actor, worker, blob, end, attempt = row
    kind, text = "", "a large error"
    if isinstance(blob, str):  # the task runs again
        kind, text = "ActorDiedError" if actor else "WorkerCrashedError", blob
    elif blob:
        try:
            error = deserialize(blob)
            kind, text = type(error).__name__, str(error)[:MAX_ERROR_TEXT]
        except Exception as unknown:  # a program's error
            text = f"an error that cannot be read: {unknown!r}"
    return {
        "task": task, "name": name, "actor": actor, "worker": worker, "kind": kind, "text": text, "end": end,
        "attempt": attempt,
    }  # fmt: skip


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


def owner_portion(process: CoreWorker) -> Callable[..., Any]:
    """Return the handler of "log": the recorded inputs of the object table of `process`."""
    from hpcray.diagnostics.record_replay import portion  # it loads all cores, and few jobs record

    assert process.recorder is not None
    record = process.recorder.record

    def answer(name: str = "", start: int = 0) -> Any:
        return portion(record, start) if name else [record.core]

    return answer


class ObjectInventory:
    """The diagnostics of one process: its answers, and its queries about the job's objects.

    Attributes:
        introspection: answers about this process. slow_gets: its `get`s that wait for long.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._table = process.table
        self._engine = process.engine
        self.slow_gets = SlowGetReport(process, process.config.get_report_after)
        self.introspection = Introspection(process, self.slow_gets)
        # See `Diagnostics`.
        self.explain = partial(timeout_message, process)
        self.introspect = self.introspection.answer_locally
        self.report_waits = self.slow_gets.report_soon

    @property
    def handlers(self) -> HandlerTable:
        """See `Diagnostics.handlers`."""
        return self, HANDLERS

    def _list_refs(self, src: bytes, msg: m.ListRefs) -> None:
        rows = {}
        self._process.drain()
        for oid in msg.ids:
            if (entry := self._table.entries.get(oid)) is not None:
                rows[oid] = {
                    "local": entry.local,
                    "borrowers": len(entry.borrowers or ()),
                    "site": entry.site,
                }
        self._engine.send(src, m.GcsReply(msg.req, True, msgspec.msgpack.encode(rows)))

    # ------------------------------------------------------------ hints

    def hint(self, value: Any) -> str:
        """Return " hint: ..." for what `get` takes no value of, as it is neither a ref nor a list of refs."""
        if isinstance(value, dict):
            return " hint: of a dict `d` of refs, dict(zip(d, ray.get(list(d.values())))) has the values"
        if isinstance(value, list):
            return " hint: a list of lists needs a `get` for each of them"
        if isinstance(value, (tuple, set, frozenset, Iterator)):
            return " hint: ray.get(list(...))"
        if hasattr(value, "__ray_metadata__"):
            return " hint: .remote(...) of an actor class makes an actor; the calls of its methods return refs"
        if hasattr(type(value), "_ray_actor_id"):
            return " hint: it is an actor: the calls of its methods, handle.method.remote(...), return refs"
        if hasattr(value, "remote"):
            return " hint: it has not been called: its .remote(...) returns a ref"
        if callable(value):
            return " hint: @ray.remote makes a remote function of it, whose .remote(...) returns a ref"
        return " hint: this is the value itself" if isinstance(value, (str, bytes, int, float, type(None))) else ""

    # ------------------------------------------------------------ free

    def free(self, refs: Iterable[ObjectRef[Any]], local_only: bool) -> None:
        """Drop objects by hand: everywhere, or our node's copies of them."""
        engine, me = self._engine, self._process.me
        oids = list(dict.fromkeys(ref._id for ref in refs))
        with engine.lock:
            self._process.check_alive()
            self._process.drain()
            if local_only:
                for oid in oids:
                    self._table.unmap(oid)
                engine.send(raylet_of(self._process.node), m.Free(oids, []))
            else:
                self._free_owned([oid for oid in oids if oid[:8] == me])
                borrowed = [oid for oid in oids if oid[:8] != me]
                for oid in borrowed:
                    self._table.discard(oid, _freed(oid))
                for owner, theirs in _by_owner(borrowed).items():
                    engine.send(owner, m.FreeRequest(theirs))
            engine.flush()
        engine.run_pending_calls()

    def _free_owned(self, oids: Iterable[bytes]) -> None:
        for oid in oids:
            self._table.discard(oid, _freed(oid))

    # ------------------------------------------------------------ memory

    def list_stores(
        self, limit: int, timeout: float, only: Collection[int] | None = None, devices: bool = False
    ) -> list[dict[str, Any]]:
        """The stores of all nodes.

        Args:
            limit: most objects per node; the largest are given.
            timeout: seconds for the nodes to answer, and again for the owners.
            only: the nodes that are asked; None: all of them.
            devices: ask each process for its device objects, too.

        Returns:
            A row per node: "node", "host", "problem" ("" unless it did not answer), then what its store reports
            and "list", its objects. Ids are hex, processes are for people. With `devices` also "device_objects": their
            "process", "device", number ("objects") and bytes ("size").
        """
        gcs = self._process.gcs
        nodes = [node for node in gcs.nodes() if only is None or node["Index"] in only]
        ask = partial(m.ListStore, limit=limit)
        alive = {raylet_of(node["Index"]): ask for node in nodes if node["Alive"]}
        stores = gcs.ask_many(alive, timeout)
        known = self._ask_owners(stores, timeout)
        rows = []
        for node in nodes:
            store = stores.get(raylet_of(node["Index"]))
            row = {"node": node["Index"], "host": node["NodeManagerHostname"], "problem": ""}
            if store is None:
                row["problem"] = f"no answer within {timeout:g} s" if node["Alive"] else f"dead: {node['DeathReason']}"
            else:
                row |= store
            rows.append(row)
        kept = self._ask_devices(stores, timeout) if devices else {}
        names = _names(stores, {row["worker"]: _title(row) for row in gcs.call("actors")} if stores else {})
        for row in rows:
            row["list"] = [_describe(obj, names, known) for obj in row.get("list", ())]
            processes = row.pop("processes", ())
            if devices:
                row["device_objects"] = [
                    {"process": names.get(proc, show_proc(proc)), "device": device, "objects": count, "size": size}
                    for proc, _, _ in processes
                    for device, (count, size) in sorted(kept.get(proc, {}).items())
                ]
        return rows

    def _ask_devices(self, stores: dict[bytes, Any], timeout: float) -> dict[bytes, Any]:
        """Return the totals of device objects by process, of those that have any."""
        ask = partial(m.Introspect, what="devices")
        questions = {proc: ask for store in stores.values() for proc, _, _ in store["processes"]}
        found = self._process.gcs.ask_many(questions, timeout)
        return {proc: totals for proc, totals in found.items() if totals}

    def _ask_owners(self, stores: dict[bytes, Any], timeout: float) -> dict[bytes, Any]:
        """Return what the living owners know of the objects, by id."""
        alive = {proc for store in stores.values() for proc, _, _ in store["processes"]}
        ids = {obj["id"] for store in stores.values() for obj in store["list"]}
        owners = {owner: oids for owner, oids in _by_owner(ids).items() if owner in alive}
        known: dict[bytes, Any] = {}
        for start in range(0, max(map(len, owners.values()), default=0), _MAX_IDS):
            part = {owner: oids[start : start + _MAX_IDS] for owner, oids in owners.items() if oids[start:]}
            questions = {owner: partial(m.ListRefs, ids=oids) for owner, oids in part.items()}
            for rows in self._process.gcs.ask_many(questions, timeout).values():
                known |= rows
        return known


def _freed(oid: bytes) -> bytes:
    return serialize_error(ObjectFreedError(oid.hex(), show_proc(owner_of(oid))))


def _by_owner(oids: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for oid in oids:
        found[owner_of(oid)].append(oid)
    return found


def _names(stores: dict[bytes, Any], actors: dict[bytes, str]) -> dict[bytes, str]:
    """Return the names of processes for people. actors: those of actors by their processes."""
    found = {}
    for store in stores.values():
        for proc, pid, kind in store["processes"]:
            actor = f"{actors[proc]}, " if proc in actors else ""
            found[proc] = f"{'driver' if kind != 'worker' else kind} {show_proc(proc).split()[-1]} ({actor}pid {pid})"
    return found


def _title(actor: dict[str, Any]) -> str:
    return f"actor {actor['class_name']}" + (f" {actor['name']!r}" if actor["name"] else "")


def _describe(obj: dict[str, Any], names: dict[bytes, str], known: dict[bytes, Any]) -> dict[str, Any]:
    oid = obj["id"]
    owner = owner_of(oid)
    ref = known.get(oid)
    return {
        **obj,
        "id": oid.hex(),
        "owner": names.get(owner, f"{show_proc(owner)} (not found)") if number_of(owner) else show_proc(owner),
        "pins": [names.get(proc, show_proc(proc)) for proc in obj["pins"]],
        "refs": ref["local"] if ref else None,
        "borrowers": ref["borrowers"] if ref else None,
        "site": ref["site"] if ref else "",
    }


HANDLERS: dict[type, Callable[[ObjectInventory], Handler]] = {
    m.ListRefs: lambda p: p._list_refs,
    m.FreeRequest: lambda p: lambda _, msg: p._free_owned(msg.ids),
    m.Introspect: lambda p: p.introspection.on_introspect,
    m.ListRetriableTasks: lambda p: p.introspection.on_list_retriable_tasks,
}
"""The handlers of queries about a process, in that process."""
