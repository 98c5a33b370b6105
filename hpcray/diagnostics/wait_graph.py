"""The chain of what an object waits for: from its owner down to the process that makes it or the missing resource."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from time import monotonic
from typing import Any

from msgspec import Struct, field

from hpcray.common.ids import PUT_INDEX, RESIDENT_INDEX, TASK_BYTES, node_of, number_of, owner_of, raylet_of, show_proc
from hpcray.common.labels import ACTOR_SCHEDULING_CLASS
from hpcray.common.resources import group_of, plain, to_amounts
from hpcray.common.terminal_text import plain_line
from hpcray.core.core_worker.object_table import INLINE, STORED, ObjectEntry, Waiter
from hpcray.core.core_worker.task import PendingTask, TaskTemplate
from hpcray.core.raylet.local_resources import needs_setup
from hpcray.diagnostics.cluster_query import QUERY_TIMEOUT, ClusterQuery, ProcessInfo, show_kernel
from hpcray.platform.stacks import is_users
from hpcray.runtime.core_worker.actor_submitter import ActorClient
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.core_worker.placement_group_client import CREATED

# ------------------------------------------------------------ object status
# The state of objects that are not ready: for the error of a `get` that timed out, and for `hpcray why`.


_MAX_SHOWN = 3
"""Objects that the text of an error names."""

READY, FETCHED, FOREIGN, WRITING, GROUP = "ready", "fetched", "foreign", "writing", "group"
ARGUMENTS, QUEUED, SENT, ACTOR, PAUSED = "arguments", "queued", "sent", "actor", "paused"


class ObjectStatus(Struct):
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


# ------------------------------------------------------------ wait graph


DEAD = "DEAD"
_MAX_DEPTH = 40
"""Objects on the way down from the first one, at most."""
_MAX_OBJECTS = 3
"""Objects of one `get` that are explained."""
_MAX_HOLDERS = 5
"""Processes shown that hold a missing resource."""


class WaitReason(Struct):
    """One line of the answer.

    Attributes:
        depth: distance from the object at the top. ident: of what the line is about, an object or process in hex; "":
            it is about another thing.
    """

    depth: int
    text: str
    ident: str = ""


class WaitGraph:
    """Explains waits on behalf of one process. Each query is made once: an instance is for one answer.

    Args:
        process: who asks.
        patience: seconds that a process may take.
        only: the nodes whose waits are explained; None: all of them.

    Attributes:
        found_waits: whether `explain_all` has found a `get` or `wait`.
    """

    def __init__(
        self, process: CoreWorker, patience: float = QUERY_TIMEOUT, only: Collection[int] | None = None
    ) -> None:
        self._process = process
        self._query = ClusterQuery(process, patience, only)
        self._known_processes: dict[bytes, ProcessInfo] | None = None
        self._seen: set[bytes] = set()
        self._described: set[bytes] = set()
        self._out: list[WaitReason] = []
        self.found_waits = False

    def explain(self, oid: bytes) -> list[WaitReason]:
        """Return what this object waits for."""
        self._out = []
        self._object(oid, 0)
        return self._out

    def explain_actor(self, actor: bytes) -> list[WaitReason]:
        """Return where this actor is, and what it waits for or died of."""
        self._out = []
        self._actor(actor, 0)
        return self._out

    def explain_all(self, everything: bool = False) -> list[WaitReason]:
        """Return what `get` and `wait` of drivers wait for; if none waits, what those of tasks and actors wait for.

        Args:
            everything: those of tasks and actors in any case.
        """
        people = self._processes()
        answers = self._query.ask([proc for proc, one in people.items() if one.kind != "raylet"], "waiting")
        every = {proc: answers[proc] for proc in people if answers.get(proc)}
        waiting = {proc: waits for proc, waits in every.items() if people[proc].kind != "worker"}
        waiting = waiting | every if everything else waiting or every
        self._out = []
        for proc, waits in waiting.items():
            for seconds, wanted, oids in waits:
                known = f" for {seconds:.0f} s" if seconds else ""
                self._say(0, f"{people[proc].title} waits{known} in {_call_for(wanted, oids)}", proc)
                self._objects(oids, 1)
        if not waiting:
            self._say(0, "no get and no wait waits in any process that answers")
        self.found_waits = bool(waiting)
        return self._out

    # ------------------------------------------------------------ objects

    def _objects(self, oids: list[bytes], depth: int) -> None:
        for oid in oids[:_MAX_OBJECTS]:
            self._object(oid, depth)
        if len(oids) > _MAX_OBJECTS:
            self._say(depth, f"and {len(oids) - _MAX_OBJECTS} more")

    def _object(self, oid: bytes, depth: int) -> None:
        if oid in self._seen:
            self._say(depth, f"{oid.hex()}: see above", oid)
            return
        self._seen.add(oid)
        if depth > _MAX_DEPTH:
            self._say(depth, f"{oid.hex()}: too deep to follow", oid)
            return
        owner = owner_of(oid)
        if not number_of(owner):
            self._say(depth, f"{oid.hex()}: no process owns it; hint: is this the id of an ObjectRef?", oid)
            return
        answers = self._query.ask([owner], "explain", [oid])
        if owner not in answers:
            self._say(depth, f"{oid.hex()}: its owner, {self._name(owner)}, does not answer{self._kernel(owner)}", oid)
            return
        known = answers[owner][0]
        if known is None:
            text = "does not know it: it was freed, as no ref to it was left, or never was"
            self._say(depth, f"{oid.hex()}: its owner, {self._name(owner)}, {text}", oid)
            return
        self._say(depth, f"{oid.hex()} (owner {self._name(owner)}): {known['what']} {known['text']}".rstrip(), oid)
        self._follow(oid, owner, known, depth + 1)

    def _follow(self, oid: bytes, owner: bytes, known: dict[str, Any], depth: int) -> None:
        state = known["state"]
        if state in (FETCHED, READY):
            self._stored(oid, known, depth)
        elif state == ARGUMENTS:
            self._objects(known["open"], depth)
            if not known["open"] and known["actor"]:
                self._actor(known["actor"], depth)
        elif state == QUEUED:
            if known["env"]:
                self._environments(depth)
            self._resources(known["resources"], depth)
        elif state == GROUP:
            self._group(known["group"], depth)
        elif state == SENT:
            self._sent(known["worker"], known["task"], depth)
        elif state == ACTOR:
            self._actor(known["actor"], depth)

    def _stored(self, oid: bytes, known: dict[str, Any], depth: int) -> None:
        """Which nodes have it, and who is fetching it."""
        nodes = {one.node for one in self._processes().values() if one.kind == "raylet"}
        answers = self._query.ask([raylet_of(node) for node in sorted(nodes)], "object", oid)
        for raylet, row in answers.items():
            if row is None:
                continue
            what = {
                "memory": "has it in memory",
                "both": "has it in memory and on disk",
                "spilled": "has it on disk; it is read back when a process asks for it",
                "restoring": "is reading it back from disk",
                "waiting": "wants it, and waits for room in its store; hint: hpcray memory",
                "pulling": "is receiving it",
                "creating": "has room for it, into which it is being written",
            }.get(row["state"], row["state"])
            self._say(depth, f"node {node_of(raylet)} {what}")
        for node in known["nodes"]:
            if raylet_of(node) not in answers:
                self._say(depth, f"node {node}, which has a copy, does not answer")

    # ------------------------------------------------------------ processes

    def _sent(
        self, worker: bytes, task: bytes, depth: int, idle: str = ": the task or its result is on the way"
    ) -> None:
        answer = self._query.ask([worker], "stack").get(worker)
        if answer is None:
            self._say(depth, f"{self._name(worker)} does not answer{self._kernel(worker)}", worker)
            return
        own = next((call for call in answer["calls"] if call["task"] == task), None)
        call = own or next(iter(answer["calls"]), None)
        if call is None and answer["sets_up"]:
            since = f"has been setting up its runtime_env for {answer['sets_up']:.1f} s"
            self._say(depth, f"{self._name(worker)} {since}{_innermost(answer)}", worker)
            return
        if call is None:
            self._say(depth, f"{self._name(worker)} runs nothing now{idle}", worker)
            return
        where = _where(answer, call)
        runs = f"runs {call['name']}" if own else f"has it in its queue, behind {call['name']}, which runs"
        self._say(depth, f"{self._name(worker)} {runs} for {call['seconds']:.1f} s{where}", worker)
        if worker not in self._described:
            self._described.add(worker)
            for wanted, oids in answer["waits"]:
                self._say(depth + 1, f"it waits in {_call_for(wanted, oids)}")
                self._objects(oids, depth + 2)

    def _actor(self, actor: bytes, depth: int) -> None:
        row = next((row for row in self._process.gcs.call("actors") if row["actor"] == actor), None)
        if row is None:
            self._say(depth, f"the head does not know actor {actor.hex()}")
            return
        name = f" {row['name']!r}" if row["name"] else ""
        place = f"node {row['node']}" if row["node"] >= 0 else "no node yet"
        reason = f" ({row['reason']})" if row["reason"] else ""
        if row["dead_for"] is not None:
            place = f"{place} since {time.strftime('%H:%M:%S', time.localtime(time.time() - row['dead_for']))}"
        restarts = f", restarted {row['restarts']} times" if row["restarts"] else ""
        restarts += ", the last time because" if restarts and reason and row["state"] == "ALIVE" else ""
        self._say(depth, f"actor {row['class_name']}{name} is {row['state']} on {place}{restarts}{reason}")
        if row["state"] == DEAD:
            self._say(depth + 1, f"hint: hpcray logs --actor {actor.hex()}")
            return
        worker = row["worker"] or self._starting(row, depth + 1)
        if worker:
            self._sent(worker, actor, depth + 1, "")
            return
        waiting = self._process.gcs.call("status")["waiting_actors"]
        wanted = next((other["resources"] for other in waiting if other["actor"] == actor), None)
        if wanted is not None:
            self._resources(wanted, depth + 1)
        elif not row.get("complete", True):
            self._say(depth + 1, "the arguments of its constructor are not ready")

    def _starting(self, row: dict[str, Any], depth: int) -> bytes:
        """The worker in which an actor's constructor runs: the head does not know it yet, its raylet does."""
        if row["node"] < 0:
            return b""
        raylet = raylet_of(row["node"])
        core = self._query.ask([raylet], "core").get(raylet, {})
        found = next((other["worker"] for other in core.get("actors", ()) if other["actor"] == row["actor"]), b"")
        if not found and core:
            self._say(depth, f"node {row['node']} has no worker process for it yet: {_pool(core['pool'])}")
        return bytes(found)

    # ------------------------------------------------------------ resources

    def _environments(self, depth: int) -> None:
        """Show the workers that cannot answer yet: their Python is being made."""
        raylets = [one.proc for one in self._processes().values() if one.kind == "raylet"]
        for raylet, core in self._query.ask(raylets, "core").items():
            node = node_of(raylet)
            for row in core["pool"]["workers"]:
                if row["sets_up_since"]:
                    seconds = max(0.0, core["now"] - row["sets_up_since"])
                    pid = f", pid {row['pid']}" if row["pid"] else ""
                    text = f"process {node}.{row['number']}{pid}, has been setting up a runtime_env for {seconds:.1f} s"
                    self._say(depth, f"a worker on node {node}, {text}")

    def _group(self, group: bytes, depth: int) -> None:
        """Where its bundles are, and what those need that have no place."""
        row = next((row for row in self._process.gcs.call("placement_groups") if row["group"] == group), None)
        if row is None:
            self._say(depth, f"the head does not know placement group {group.hex()}")
            return
        name = f" {row['name']!r}" if row["name"] else ""
        count = len(row["bundles"])
        self._say(depth, f"placement group{name} is {row['state']}: {count} bundles, strategy {row['strategy']}")
        if row["state"] == "PENDING" and count:
            largest = max(row["bundles"], key=lambda bundle: sum(bundle.values()))
            self._resources(largest, depth + 1)

    def _resources(self, wanted: dict[str, float], depth: int) -> None:
        status = self._process.gcs.call("status")
        lacking: set[str] = set()
        for node in status["nodes"]:
            short = [name for name, amount in wanted.items() if node["available"].get(name, 0) < amount]
            never = [name for name, amount in wanted.items() if node["total"].get(name, 0) < amount]
            if never:
                self._say(depth, f"node {node['index']} can never serve it: {_amounts(never, wanted, node['total'])}")
            elif short:
                lacking.update(short)
                self._say(depth, f"node {node['index']} lacks {_amounts(short, wanted, node['available'])}")
            else:
                self._say(depth, f"node {node['index']} has what it needs; a worker process may be starting there")
        for node in status["dead_nodes"]:
            self._say(depth, f"node {node['index']} is dead: {node['reason']}")
        if lacking:
            self._holders(lacking, depth)

    def _holders(self, names: set[str], depth: int) -> None:
        raylets = [one.proc for one in self._processes().values() if one.kind == "raylet"]
        cores = self._query.ask(raylets, "core")
        held = [
            (lease["worker"], lease["resources"], lease["blocked"])
            for core in cores.values()
            for lease in core["leases"]
            if names & set(lease["resources"])
        ]
        runs = self._query.ask([worker for worker, _, _ in held[:_MAX_HOLDERS]], "calls")
        for worker, resources, lent in held[:_MAX_HOLDERS]:
            calls = runs.get(worker)
            doing = f"runs {calls[0]['name']} for {calls[0]['seconds']:.1f} s" if calls else "runs nothing now"
            doing = "does not answer" if calls is None else doing
            holds = ", ".join(f"{name}: {amount:g}" for name, amount in resources.items())
            self._say(depth, f"{self._name(worker)} holds {holds}{' (lent: it waits)' if lent else ''} and {doing}")
        if len(held) > _MAX_HOLDERS:
            self._say(depth, f"and {len(held) - _MAX_HOLDERS} more; hint: hpcray stack")
        actors = [row for core in cores.values() for row in core["actors"]]
        if actors:
            classes = ", ".join(sorted({row["class"] for row in actors}))
            self._say(depth, f"{len(actors)} actors hold for life what they asked for: {classes}")

    # ------------------------------------------------------------ inside

    def _say(self, depth: int, text: str, about: bytes = b"") -> None:
        self._out.append(WaitReason(depth, text, about.hex()))

    def _processes(self) -> dict[bytes, ProcessInfo]:
        if self._known_processes is None:
            self._known_processes = {one.proc: one for one in self._query.processes()}
        return self._known_processes

    def _name(self, proc: bytes) -> str:
        one = self._processes().get(proc)
        return one.title if one is not None else show_proc(proc)

    def _kernel(self, proc: bytes) -> str:
        one = self._processes().get(proc)
        if one is None:
            return ": it is not there any more"
        state = show_kernel(self._query.kernel_state([one])[proc])
        return f" within {self._query.patience:g} s; the kernel says: {state}"


def show_lines(findings: list[WaitReason]) -> list[str]:
    """For people, and their terminals: the deeper, the further to the right."""
    return ["  " * finding.depth + plain_line(finding.text) for finding in findings]


def _where(answer: dict[str, Any], call: dict[str, Any]) -> str:
    """`, at file.py:12 in f`: the innermost line of the user's."""
    frames: list[list[Any]]
    if call["thread"]:
        frames = next((row["frames"] for row in answer["threads"] if row["ident"] == call["thread"]), [])
    else:
        frames = next((row["frames"] for row in answer["coroutines"] if row["task"] == call["task"]), [])
    theirs = [frame for frame in frames if is_users(frame)]
    frame = next(reversed(theirs or frames), None)
    return f", at {frame[0]}:{frame[1]} in {frame[2]}" if frame is not None else ""


def _innermost(answer: dict[str, Any]) -> str:
    """Where its main thread is: `, at file.py:12 in f`."""
    frames: list[list[Any]] = next((row["frames"] for row in answer["threads"] if row["name"] == "MainThread"), [])
    return f", at {frames[-1][0]}:{frames[-1][1]} in {frames[-1][2]}" if frames else ""


def _amounts(names: list[str], wanted: dict[str, float], there: dict[str, float]) -> str:
    rows = [(name, wanted[name], max(0.0, there.get(name, 0))) for name in sorted(names)]
    return ", ".join(f"{name}: {amount:g} wanted, {free:g} there" for name, amount, free in rows)


def _pool(pool: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in pool["counts"].items() if count)
    failed = f"; the last failure: {pool['last_failure']}" if pool["last_failure"] else ""
    return f"{counts or 'none'} of at most {pool['limit']} workers{failed}"


def _call_for(wanted: int, oids: list[bytes]) -> str:
    """`get for 3 objects`, `wait for 1 of 3 objects`. wanted: 0 for a `get`, which wants all."""
    count = "one object" if len(oids) == 1 else f"{len(oids)} objects"
    return f"wait for {wanted} of {count}" if wanted else f"get for {count}"


def waiting_calls(process: CoreWorker) -> Iterator[tuple[list[bytes], int, list[bytes]]]:
    """The calls of `get` and `wait` of this process that wait (lock held).

    A `get` is listed where it waits. A `wait` is found by its waiter: nothing of it is kept for this alone.

    Yields:
        The list of a `get` that is listed; how many of the objects a `wait` still wants, 0 for a `get`; and the objects
        that are not there.
    """
    entries = process.table.entries
    for oids in process.table.pins.being_read:
        missing = [oid for oid in oids if oid in entries and not entries[oid].available]
        if missing:
            yield oids, 0, missing
    unmet: dict[Waiter, list[bytes]] = {}
    for oid, entry in entries.items():
        for waiter in (*(entry.local_waiters or ()), *(entry.ready_waiters or ())):
            if waiter.count > 0 and waiter.callback is None and not waiter.eager:
                unmet.setdefault(waiter, []).append(oid)
    for waiter, missing in unmet.items():
        yield [], waiter.count, missing
    for queue in process.reader.ready_queues:
        if missing := queue.waiting():
            yield [], 1, missing


_CHECKS_PER_REPORT = 4
"""Checks for long waits before the first report of one."""
_MAX_CHECK_PERIOD = 15.0
"""Seconds between two such checks, at most."""
_MAX_REPORTED = 3
"""Objects of one `get` that are explained on stderr."""


class _Wait:
    """A `get` that waits. since: when it was first seen. due: when it is reported next."""

    __slots__ = ("due", "oids", "since")

    def __init__(self, oids: list[bytes], since: float, due: float) -> None:
        self.oids, self.since, self.due = oids, since, due


class SlowGetReport:
    """The waiting `get`s of one process.

    Args:
        after: seconds after which a driver's `get` is reported; 0: never.
    """

    def __init__(self, process: CoreWorker, after: float) -> None:
        self._process = process
        self._after = after
        self._seen: dict[int, _Wait] = {}
        engine = process.engine
        period = min(after / _CHECKS_PER_REPORT, _MAX_CHECK_PERIOD) if after else _MAX_CHECK_PERIOD
        engine.call_every(period, self._check)

    def seconds(self, oids: list[bytes]) -> float:
        """How long this `get` has waited, as far as that was noted (lock held)."""
        wait = self._seen.get(id(oids))
        return monotonic() - wait.since if wait is not None and wait.oids is oids else 0.0

    def report_soon(self) -> None:
        """Print on stderr what this process waits for. Returns at once; safe in a signal handler."""
        self._process.engine.call_soon(lambda: self._start(None))

    def _check(self) -> None:
        now = monotonic()
        due: list[_Wait] = []
        with self._process.engine.lock:
            waiting = {id(oids): oids for oids in self._process.table.pins.being_read}
            gone = [key for key, wait in self._seen.items() if waiting.get(key) is not wait.oids]
            for key in gone:
                del self._seen[key]
            for key, oids in waiting.items():
                wait = self._seen.setdefault(key, _Wait(oids, now, now + self._after))
                if self._after and now >= wait.due:
                    wait.due = now + 2 * (now - wait.since)
                    due.append(wait)
        # Only a driver reports: what it waits for leads to the tasks that wait for others.
        if due and self._process.place.kind != "worker":
            self._start(due)

    def _start(self, due: list[_Wait] | None) -> None:
        threading.Thread(target=self._report, args=(due,), name="hpcray-report", daemon=True).start()

    def _report(self, due: list[_Wait] | None) -> None:
        """Print the report, in a thread of its own: other processes are queried for it."""
        process = self._process
        with process.engine.lock:
            if process.dead is not None:
                return
            reported = {id(wait.oids) for wait in due or ()}
            calls = [
                (self.seconds(listed), wanted, missing)
                for listed, wanted, missing in waiting_calls(process)
                if due is None or id(listed) in reported
            ]
        lines = []
        why = WaitGraph(process)
        for seconds, wanted, oids in calls:
            count = "1 object" if len(oids) == 1 else f"{len(oids)} objects"
            known = f"{seconds:.0f} s" if seconds else "a while"
            what = f"wait has waited {known} for {wanted} of" if wanted else f"get has waited {known} for"
            lines.append(f"hpcray: a {what} {count}:")
            lines += [f"  {line}" for oid in oids[:_MAX_REPORTED] for line in show_lines(why.explain(oid))]
            if len(oids) > _MAX_REPORTED:
                lines.append(f"  and {len(oids) - _MAX_REPORTED} more; hint: hpcray why")
        if due is None and not lines:
            lines.append(
                "hpcray: no get and no wait waits in this process; hint: `hpcray stack` shows what every process does"
            )
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)
