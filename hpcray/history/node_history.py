"""The history of one node, as its raylet writes it while the job runs, and the account of its core time.

The raylet asks its processes what they have run, once a second while they work and ever more rarely while they do not,
and appends what is new to the node's file. An idle node writes nothing, but for the head, every 30 s. The raylet never
waits for the file system: a thread writes (`hpcray.history.block_file`). Where that fails the job goes on, and one line
says what will be missing.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.common.figures import MOST_NAMES, OTHERS, FunctionRow, add_functions
from hpcray.common.job_names import logs_directory
from hpcray.common.resources import UNIT
from hpcray.core.gcs.gcs import RecoveringGcs
from hpcray.core.raylet.local_resources import LocalResources
from hpcray.core.raylet.worker_pool import IDLE
from hpcray.history.block_file import BlockWriter
from hpcray.history.records import (
    Alive,
    Ask,
    Began,
    ClusterState,
    CoreTime,
    Ended,
    Figures,
    FunctionCoreTime,
    Functions,
    Gap,
    Line,
    NewRecords,
    NodeDeath,
    Objects,
    Process,
    ProcessTime,
    Reason,
    Running,
    encode,
)
from hpcray.history.runs import boot_id, file_name, history_root, job_name, prune_if_due
from hpcray.platform.private_files import PrivateDirectory
from hpcray.platform.process_tree import ProcessIdentity
from hpcray.platform.session_directory import read_session
from hpcray.protocol import messages as m
from hpcray.protocol.messages import WORKER
from hpcray.runtime.raylet.event_log import NodeExtension
from hpcray.runtime.raylet.raylet import Raylet

PERIOD = 1.0
"""Seconds between two questions to a process that works."""
_LONGEST_PERIOD = 4.0  # seconds between two questions to a process that does nothing
_FULL_RING = 0.05
"""The share of a process's room for ended tasks beyond which it is asked sooner: so much of it, half of what is
remembered anyway, is still in the caches of the process, and a task costs a tenth more where it is not."""
_ROOM = 10  # times as many as are remembered (`hpcray.runtime.worker.replies`)
_SHORTEST_PERIOD = 0.01
_FIRST_LOOK = 0.3  # seconds after the start
_FIGURES_PERIOD = 2.0  # seconds between two looks at the node's resources
_OBJECTS = 50
"""Objects of a store that are looked at, the largest ones."""
_NOT_KEPT = ("node", "host", "time")
_ACCOUNT_PERIOD = 3.0  # seconds between two records of the account of core time, while something is reserved
_WORK_SHARE = 0.003  # of its time that a process may spend on answers about what runs
_CLUSTER_SHARE = 0.005  # of the raylet's time that it may spend on each of rows of actors and groups, and figures
_ALIVE_PERIOD = 30.0  # seconds without anything new after which the head says that it lives
_FLUSH_PERIOD = 0.5  # seconds between two blocks at least, but for what may be the last one
_SHORTEST_LOOK = 0.1  # seconds between two looks at the cores while what is reserved changes
_LOOK_SHARE = 0.002  # of the raylet's time that it may spend on them
_SLACK = 0.25  # seconds by which a look may be late, to share a wake-up
_LOOK_FOR_OTHERS = 6.0  # seconds after the start at which the head looks for the files of other nodes
_CLOSING = 0.5  # seconds that the end of a node may wait for its last blocks
_LEAST_FILE = 1 << 20  # bytes
_STEPS = 50  # a change of a figure by less than one of so many steps is not written
_SECRET = re.compile(r"(?i)([\w-]*(?:token|secret|passw|api[-_]?key|credential)[\w-]*)([= ]+)('[^']*'|\S+)")
_ACTOR_FIELDS = ("class_name", "name", "state", "node", "pid", "restarts", "reason", "worker", "detached")
_GROUP_FIELDS = ("name", "strategy", "state", "bundles", "nodes")
_SUBMITTED = "SUBMITIT_FOLDER"
"""Variable of what `hpcray submit` has started: the directory of the job."""
_SLURM_FACTS = (
    "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_PARTITION", "SLURM_JOB_NUM_NODES", "SLURM_RESTART_COUNT",
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_CPUS_ON_NODE", "SLURM_MEM_PER_NODE", "SLURM_CLUSTER_NAME",
)  # fmt: skip


class NodeHistory(NodeExtension):
    """Writes what happens on one node.

    Args:
        ended: called at the end of the job on the head, with the directory of all histories and the run's name.
    """

    name: ClassVar[str] = "history"

    def __init__(self, raylet: Raylet, ended: Callable[[str, str], None]) -> None:
        self._raylet, self._ended = raylet, ended
        self._loop = raylet.loop
        self._node = raylet.node
        self._decode = msgspec.msgpack.Decoder(NewRecords).decode
        self._writer: BlockWriter | None = None
        self._pending: list[Any] = []
        self._began: Began | None = None
        self._stopping = False
        self._written_at = 0.0
        self._due: dict[bytes, tuple[float, float]] = {}  # process: time of the next question, and what lies between
        self._work_due: dict[bytes, float] = {}  # process: time of the next question about what runs and waits
        self._tick_at = float("inf")
        self._said_idle: set[bytes] = set()
        self._functions = _FunctionTotals()
        self._cluster_at = 0.0
        self._node_looks = _NodeLooks(raylet)
        self._cluster: dict[bytes, dict[str, Any]] = {}
        self._nodes: list[dict[str, Any]] = []
        self._gone: dict[bytes, Process] = {}
        self._place = _Place(raylet)
        self._account: CoreTimeAccount | None = None
        self._account_at = 0.0
        self._look_period = _SHORTEST_LOOK

    # ------------------------------------------------------------ events

    def came_up(self, session: str) -> None:
        """Begin to write."""
        if self._writer is not None:
            return
        raylet, context, now = self._raylet, self._raylet.context, self._loop.now
        self._began = began = self._describe(session)
        self._pending.insert(0, began)
        self._place.open_at(context.config.history_dir, began.job, began.run)
        share = context.config.history_size // max(1, context.cluster_size)
        self._writer = BlockWriter(
            self._place.open_file, max(_LEAST_FILE, share // 2), self._place.look_around,
            lambda reason: encode([Gap(time.time(), reason)]),
        )  # fmt: skip
        self._written_at = self._account_at = now
        self._account = CoreTimeAccount(now, raylet.context.info.total.get("CPU", 0) / UNIT)
        for proc, link in raylet.router.links.items():
            self.process_joined(proc, link.kind, link.pid)
        self._flush()
        self._schedule(now + _FIRST_LOOK)

    def process_joined(self, proc: bytes, kind: str, pid: int) -> None:
        """A process of this node was welcomed."""
        if proc not in self._due:
            self._due[proc] = (self._loop.now + _FIRST_LOOK, PERIOD)
            self._add(Process(time.time(), proc, pid, kind, "joined"))
            if self._account is not None:
                self._account.process_joined(self._loop.now, proc)
            self._schedule(self._loop.now + _FIRST_LOOK)

    def process_died(self, proc: bytes, kind: str, reason: str) -> None:
        """A process of this node is gone."""
        self._due.pop(proc, None)
        self._work_due.pop(proc, None)
        self._said_idle.discard(proc)
        self._functions.process_died(proc)
        if self._account is not None:
            self._account.process_died(self._loop.now, proc)
        worker = self._raylet.lease_manager.pool.workers.get(proc)
        self._gone[proc] = Process(time.time(), proc, worker.pid if worker is not None else 0, kind, "gone", reason)
        self._schedule(self._loop.now)

    def last_figures(self, proc: bytes, figures: bytes) -> None:
        """A worker ends in good order."""
        said = msgspec.msgpack.decode(figures)
        self._functions.said(proc, said["functions"], said["partial"])
        if not said["running"]:  # its answer to the last question may not leave it any more
            self._add(Running(time.time(), proc, 0))

    def node_died(self, node: int, reason: str) -> None:
        """Another node is dead."""
        self._add(NodeDeath(time.time(), node, reason))
        self._flush()

    def printed(self, severity: str, text: str) -> None:
        """The raylet prints a line."""
        self._add(Line(time.time(), severity, text))

    def end_explained(self, kind: str, text: str, proc: bytes) -> None:
        """A reason of the end is known."""
        self._add(Reason(time.time(), kind, text, proc))
        self._flush()

    def leaving(self, proc: bytes) -> None:
        """A process is to leave: it answers once more before it does."""
        if self._writer is not None:
            self._ask(proc, True)

    def stopping(self, code: int) -> None:
        """The processes of this node leave."""
        self._stopping = True
        if self._writer is not None:
            self._pending += self._node_looks.look(self._loop.now, always=True)
            self._look_at_cores(self._loop.now, always=True)
            self._look_at_cluster(self._loop.now, always=True)
        self._add(Ended(time.time(), code))
        self._flush()

    def on_message(self, src: bytes, body: bytes) -> None:
        """A process has answered."""
        try:
            report = self._decode(body)
        except msgspec.DecodeError:
            return
        self._functions.said(src, report.functions, report.partial)
        cores, _, actor = self._reservation(src)
        if self._account is not None and report.spent is not None:
            ran = self._functions.seconds(src, report.spent.elapsed)
            self._account.answered(self._loop.now, src, cores, actor, report.spent, ran)
            if src in self._due:
                self._work_due[src] = self._loop.now + max(PERIOD - _SLACK, report.took / _WORK_SHARE)
        self._pending += report.records
        (self._said_idle.discard if cores or not report.quiet else self._said_idle.add)(src)
        if src in self._due:
            period = self._due[src][1]
            size = _ROOM * self._raylet.context.config.task_events
            if report.quiet:
                period = min(_LONGEST_PERIOD, max(PERIOD, 1.5 * period))
            elif report.seen > _FULL_RING * size:
                period = min(PERIOD, max(_SHORTEST_PERIOD, period * _FULL_RING * size / report.seen))
            else:
                period = PERIOD
            self._due[src] = (self._loop.now + period, period)
            self._schedule(self._loop.now + period)

    def figures(self) -> dict[str, Any]:
        """The account of core time so far."""
        if self._account is None:
            return {}
        rows, beside = self._account.rows(self._loop.now), self._account.beside(time.process_time())
        return {"core_time": rows, "cpu_time_beside": beside, "function_times": self._account.functions()}

    def close(self) -> None:
        """The loop has ended: write what is there."""
        if self._writer is not None and self._account is not None:
            self._add_account()
            self._flush()
            self._writer.close(_CLOSING)
            if self._raylet.head is not None and self._began is not None:
                self._ended(self._place.root, self._began.run)

    # ------------------------------------------------------------ looks

    def _schedule(self, at: float) -> None:
        """Have a look at this time, or earlier."""
        if at < self._tick_at and self._writer is not None and not self._stopping:
            self._tick_at = at
            self._loop.call_at(at, lambda: self._tick(at), min(_SLACK, max(0.0, at - self._loop.now) / 4))

    def _tick(self, at: float) -> None:
        if at != self._tick_at or self._stopping or self._writer is None:
            return  # an earlier look has taken its place
        self._tick_at = float("inf")
        now = self._loop.now
        workers = self._raylet.lease_manager.pool.workers
        following = now + _LONGEST_PERIOD
        for proc, (due, period) in self._due.items():
            if due <= now:
                worker = workers.get(proc)
                if worker is not None and worker.state == IDLE and proc in self._said_idle:
                    self._due[proc] = (now + period, period)  # it has said all when it ran nothing
                else:
                    self._ask(proc, now >= self._work_due.get(proc, 0.0))
                    self._due[proc] = (now + max(PERIOD, period), period)  # where no answer comes
            following = min(following, self._due[proc][0])
        self._pending += self._node_looks.look(now)
        self._look_at_cores(now)
        self._look_at_cluster(now)
        if now - self._written_at >= _FLUSH_PERIOD:
            self._flush()
        elif self._pending or self._gone:
            following = min(following, self._written_at + _FLUSH_PERIOD)
        if self._raylet.head is not None and now - self._written_at >= _ALIVE_PERIOD:
            self._add(Alive(time.time()))
            self._flush()
        if problem := self._writer.problem():
            self._raylet.events.report("WARNING", self._place.complaint(problem))
        if missing := self._place.missing_nodes():
            self._raylet.events.report("WARNING", missing)
        self._schedule(max(following, now + _SHORTEST_PERIOD))

    def _ask(self, proc: bytes, work: bool) -> None:
        """Ask a process what is new. work: and what runs, which takes longer the more does."""
        self._raylet.router.send(proc, m.ExtensionMessage(self.name, encode(Ask(work))))

    def _reservation(self, proc: bytes) -> tuple[float, float, bool]:
        """Cores that a process has, and that it has lent as it is blocked; whether an actor has them."""
        worker = self._raylet.lease_manager.pool.workers.get(proc)
        allocation = worker.allocation if worker is not None else None
        if allocation is None:
            return 0.0, 0.0, False
        cores = sum(units for name, units in allocation.resources.items() if name == "CPU") / UNIT
        actor = allocation.actor_spec is not None
        return (0.0, cores, actor) if allocation.cpu_released else (cores, 0.0, actor)

    def _look_at_cores(self, now: float, always: bool = False) -> None:
        """Go on with the account of core time; write it where something has run."""
        assert self._account is not None
        if not always and now < (due := self._account.looked_at + _SHORTEST_LOOK):
            self._schedule(due)  # processes with many short tasks are asked more often
            return
        began = time.perf_counter()
        manager = self._raylet.lease_manager
        node = self._node_look(manager.resources, manager.waiting_since())
        used = node.tasks + node.actors
        changed = self._account.look(now, node)
        if changed or node.lent or node.starting or node.waiting is not None:  # there is no word when that ends
            shortest = max(_SHORTEST_LOOK, (time.perf_counter() - began) / _LOOK_SHARE)
            self._look_period = shortest if changed else min(PERIOD, 1.5 * self._look_period)
            self._schedule(now + max(shortest, self._look_period))
        if always or (used and now - self._account_at >= _ACCOUNT_PERIOD):
            self._account_at = now
            self._add_account()

    def _node_look(self, resources: LocalResources, waiting: float | None) -> NodeLook:
        """The cores of this node now. waiting: since when requests wait."""
        tasks = actors = lent = in_bundles = lent_in_bundles = 0.0
        for proc in self._raylet.lease_manager.pool.workers:
            held, lent_here, actor = self._reservation(proc)
            lent += lent_here
            if actor:
                actors += held
            else:
                tasks += held
        for bundle in resources.bundles:
            in_bundles += max(0.0, bundle.pool.available.get("CPU", 0) / UNIT)
            lent_in_bundles += sum(one.resources["CPU"] for one in bundle.allocations if one.cpu_released) / UNIT
        total, free = (amounts.get("CPU", 0) / UNIT for amounts in (resources.pool.total, resources.pool.available))
        starting = max(0.0, total - free - in_bundles - tasks - actors)
        blocked = min(in_bundles, lent_in_bundles)
        outside = max(0.0, lent - lent_in_bundles)
        return NodeLook(
            max(0.0, free) + blocked, outside + blocked, tasks, actors, in_bundles - blocked, starting, waiting
        )

    def _add_account(self) -> None:
        assert self._account is not None
        account, now, own = self._account, self._loop.now, time.process_time()
        self._add(CoreTime(time.time(), account.rows(now), account.beside(own), account.changed_functions()))

    def _look_at_cluster(self, now: float, always: bool = False) -> None:
        """On the head: note which actors, groups and nodes have changed."""
        head = self._raylet.head
        if head is None or (not always and now < self._cluster_at):
            return
        began = time.perf_counter()
        gcs = head.gcs if isinstance(head, RecoveringGcs) else head
        found = ClusterState(time.time())
        for row in gcs.actors.actor_rows(now):
            self._note(found.actors, row["actor"], {name: row[name] for name in _ACTOR_FIELDS})
        for row in _answer(gcs, "placement_groups"):
            self._note(found.groups, row["group"], {name: row[name] for name in _GROUP_FIELDS})
        nodes = [
            {"node": row["Index"], "id": row["NodeID"], "host": row["NodeManagerHostname"], "alive": row["Alive"],
             "reason": row["DeathReason"], "total": row["Resources"]}
            for row in _answer(gcs, "nodes")
        ]  # fmt: skip
        if nodes != self._nodes:
            self._nodes = found.nodes = nodes
        if found.actors or found.groups or found.nodes:
            self._add(found)
        self._cluster_at = now + max(_FIGURES_PERIOD, (time.perf_counter() - began) / _CLUSTER_SHARE)

    def _note(self, into: dict[bytes, dict[str, Any]], ident: bytes, row: dict[str, Any]) -> None:
        if self._cluster.get(ident) != row:
            self._cluster[ident] = into[ident] = row

    # ------------------------------------------------------------ writing

    def _add(self, record: Any) -> None:
        self._pending.append(record)

    def _flush(self) -> None:
        """Append what is there as one block."""
        if self._writer is None:
            return
        for proc, row in self._gone.items():
            self._add(self._with_exit(proc, row))
        self._gone.clear()
        if changed := self._functions.changed():
            self._add(Functions(time.time(), changed, self._functions.partial))
        if not self._pending:
            return
        if self._writer.full and self._began is not None:
            self._writer.begin_file(encode(self._first_records()))
            if self._account is not None:
                self._account.forget_told()
                self._add_account()
        self._writer.add(encode(self._pending))
        self._pending = []
        self._written_at = self._loop.now

    def _first_records(self) -> list[Any]:
        """The first block of a further file: all that readers need of the files before it, which may be gone then."""
        assert self._began is not None
        self._began.earlier = True
        first: list[Any] = [self._began, Functions(time.time(), self._functions.all(), self._functions.partial)]
        if self._cluster or self._nodes:
            actors = {ident: row for ident, row in self._cluster.items() if "class_name" in row}
            groups = {ident: row for ident, row in self._cluster.items() if "class_name" not in row}
            first.append(ClusterState(time.time(), actors, groups, self._nodes))
        return first

    def _with_exit(self, proc: bytes, row: Process) -> Process:
        """The record of a process that is gone, with Ray's word for its end where the lease manager knows it."""
        for known in reversed(self._raylet.lease_manager.ended.rows(self._loop.now)):
            if known["proc"] == proc:
                row.exit, row.actor, row.pid = known["exit_type"], known["actor"], known["pid"]
                break
        if row.kind == WORKER and self._stopping:
            row.exit = row.exit or "JOB_ENDED"
        return row

    def _describe(self, session: str) -> Began:
        context, info = self._raylet.context, self._raylet.context.info
        me = ProcessIdentity.of(os.getpid())
        try:
            program = read_session(context.session_dir).program
        except StartupError:
            program = ""
        return Began(
            at=time.time(),
            job=job_name(os.environ, session),
            run=session,
            submitted=os.environ.get(_SUBMITTED, ""),
            node=self._node,
            nodes=context.cluster_size,
            host=info.host,
            pid=os.getpid(),
            started=me.started if me is not None else 0,
            boot=boot_id(),
            program=_SECRET.sub(r"\1\2***", program),
            total={name: amount[1] for name, amount in self._raylet.introspection.row()["resources"].items()},
            logs=os.path.realpath(logs_directory(context.session_dir)) if context.config.log_dir else "",
            end=self._raylet.run_info.end,
            period=PERIOD,
            offset=0.0 if self._raylet.head is not None else None,
            slurm={name: os.environ[name] for name in _SLURM_FACTS if name in os.environ},
            python=sys.version.split()[0],
        )


class _NodeLooks:
    """Looks at what a node uses, and at the largest objects of its store. They take the longer, the more objects there
    are, and so are no more frequent than for a share of the raylet's time."""

    def __init__(self, raylet: Raylet) -> None:
        self._raylet = raylet
        self._next = self._at = 0.0
        self._shown: tuple[Any, ...] = ()
        self._objects: dict[bytes, tuple[int, str, bool]] = {}
        self._objects_at = time.time()
        self._store: dict[str, Any] = {}

    def look(self, now: float, always: bool = False) -> list[Any]:
        """Return the records of what has changed."""
        if not always and now < self._next:
            return []
        began = time.perf_counter()
        row = self._raylet.introspection.row()
        found = [*self._figures(now, row, always), *self._changed_objects(row["store"])]
        self._next = now + max(_FIGURES_PERIOD, (time.perf_counter() - began) / _CLUSTER_SHARE)
        return found

    def _figures(self, now: float, row: dict[str, Any], always: bool) -> Iterator[Figures]:
        seconds, self._at = now - self._at, now
        job = row["cpu"]["job"]
        before = self._shown[0] if self._shown else job
        steps = (
            round(_STEPS * row["memory"]["used"] / max(1, row["memory"]["limit"])),
            round(_STEPS * row["store"]["used"] / max(1, row["store"]["capacity"])),
            round(_STEPS * (job - before) / max(1.0, seconds) / row["cpu"]["host_count"]),
            row["resources"], row["workers"], row["actors"], row["leases"], row["waiting"], row["store"]["on_disk"],
        )  # fmt: skip
        if always or not self._shown or steps != self._shown[1]:
            yield Figures(time.time(), {name: value for name, value in row.items() if name not in _NOT_KEPT})
        self._shown = (job, steps)

    def _changed_objects(self, store: dict[str, Any]) -> Iterator[Objects]:
        since, self._objects_at = self._objects_at, time.time()
        if store == self._store:  # no object has come, gone or moved
            return
        self._store, before = store, self._objects
        rows = self._raylet.store.largest_objects(_OBJECTS)
        self._objects = {row["id"]: (row["size"], row["state"], row["copy"]) for row in rows}
        least = (rows[-1]["size"], rows[-1]["id"]) if len(rows) >= _OBJECTS else (0, b"")
        changed = {ident: one for ident, one in self._objects.items() if before.get(ident) != one}
        missing = [(one[0], ident) for ident, one in before.items() if ident not in self._objects]
        if changed or missing:
            gone = [one[1] for one in missing if one > least]
            yield Objects(self._objects_at, since, changed, gone, [one[1] for one in missing if one < least])


class _FunctionTotals:
    """Counts and times of a node by function, as its processes have said. partial: they have not seen all of it."""

    def __init__(self) -> None:
        self._ended: dict[str, FunctionRow] = {}
        self._said: dict[bytes, dict[str, FunctionRow]] = {}
        self._changed: set[str] = set()
        self.partial = False

    def said(self, proc: bytes, functions: dict[str, FunctionRow], partial: bool) -> None:
        """A process has said what it has run since its start; rows that it leaves out have not changed."""
        if functions:
            self._said.setdefault(proc, {}).update(functions)
            self._changed.update(functions)
        self.partial = self.partial or partial

    def seconds(self, proc: bytes, elapsed: Mapping[str, float]) -> dict[str, float]:
        """Seconds that a process has run each function, as it has said. elapsed: those of runs that have not ended."""
        ran = {name: row[2] / 1e6 for name, row in self._said.get(proc, {}).items()}
        return ran | {name: ran.get(name, 0.0) + seconds for name, seconds in elapsed.items()}

    def process_died(self, proc: bytes) -> None:
        """A process will say nothing more."""
        add_functions(self._ended, self._said.pop(proc, {}))

    def changed(self) -> dict[str, FunctionRow]:
        """The rows of the functions that have run since the last call."""
        names, self._changed = self._changed, set()
        return self._sum(names) if names else {}

    def all(self) -> dict[str, FunctionRow]:
        """All rows."""
        return self._sum({*self._ended, *(name for rows in self._said.values() for name in rows)})

    def _sum(self, names: set[str]) -> dict[str, FunctionRow]:
        found: dict[str, FunctionRow] = {}
        for rows in (self._ended, *self._said.values()):
            add_functions(found, {name: rows[name] for name in names if name in rows})
        return found


class _Place:
    """The directory of the run: what may have to wait for a file server, and so is called in the writer's thread.

    Attributes:
        root: the directory of all histories.
    """

    def __init__(self, raylet: Raylet) -> None:
        self._node, self._nodes = raylet.node, raylet.context.cluster_size
        self._leads = raylet.head is not None
        self.root = self._job = self._run = ""
        self._look_at = 0.0
        self._missing: list[int] = []

    def open_at(self, configured: str, job: str, run: str) -> None:
        """Say where it is."""
        self.root, self._job, self._run = history_root(os.environ, configured), job, run
        self._look_at = time.monotonic() + _LOOK_FOR_OTHERS if self._leads and self._nodes > 1 else float("inf")

    def open_file(self, number: int) -> int:
        """Open the file with this number, and remove the last but one before it."""
        if self._leads and not number:
            prune_if_due(self.root)
        with self._directory() as run:
            if number > 1:
                run.remove(file_name(self._node, number - 2))
            return run.append(file_name(self._node, number))

    def _directory(self) -> PrivateDirectory:
        with PrivateDirectory.open(self.root) as root, root.directory(self._job) as job:
            return job.directory(self._run)

    def look_around(self) -> None:
        """On the head, once: do the other nodes write to this directory?"""
        if time.monotonic() >= self._look_at:
            self._look_at = float("inf")
            with self._directory() as run:
                there = {name.split(".")[0] for name in run.names()}
            self._missing = [node for node in range(self._nodes) if f"node-{node}" not in there]

    def missing_nodes(self) -> str:
        """Which nodes' parts will be missing, said once; "" if none."""
        missing, self._missing = self._missing, []
        if not missing:
            return ""
        shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
        return (
            f"the history of this job will lack node {shown}: nothing of it comes into {self.root}, which its host "
            "does not share, or cannot write to; hint: HPCRAY_HISTORY_DIR names a directory that all nodes share"
        )

    def complaint(self, problem: str) -> str:
        """The line that is printed where nothing can be written."""
        return (
            f"the history of this node is not written, or not whole: {self.root}: {problem}. The job goes on without; "
            "hint: HPCRAY_HISTORY_DIR names another directory, HPCRAY_HISTORY=0 turns it off"
        )


def _answer(gcs: Any, method: str) -> list[dict[str, Any]]:
    reply = gcs.queries.answer(m.GcsCall(0, method, b""))
    return msgspec.msgpack.decode(reply.value) if reply.ok else []


# ------------------------------------------------------------ core time
# Where the core time of a node went: an account whose rows add up to cores × wall time by construction.
#
# Processes say, when they are asked, for how long they have run tasks, moved objects and lent their cores since, and
# their CPU time: that is exact, whatever happens between two questions. How the rest of the core time was reserved, or
# free, is told by looks at the node: often while that changes, with each question while it does not.

ON_CPU, OFF_CPU = "running tasks, on a CPU", "running tasks, off the CPU (sleep, I/O, or no CPU to be had)"
MOVING = "reserved, fetching, unpickling or storing objects"
BLOCKED = "blocked in get or wait, and not used by others meanwhile"
BETWEEN, ACTORS = "reserved, between two tasks", "reserved by actors or bundles, without a call"
STARTING = "reserved, while a worker starts or is set up"
QUEUED, FREE = "free, with tasks waiting", "free, nothing to do"
UNKNOWN = "reserved, and not seen"
WITHOUT_CORE = "processes that reserve no core"
BEYOND = "threads beyond the tasks of a reserved core"
OWN = "the raylet"


class NodeLook(NamedTuple):
    """The cores of a node at a moment, but for the lent ones all different.

    Attributes:
        free: that any task could have. lent: of tasks that are blocked, whether others use them or not.
        tasks, actors: reserved for workers. bundles: reserved by bundles, and by nothing in them.
        starting: reserved for workers that are not there yet.
        waiting: since when requests wait for resources; None: none does.
    """

    free: float
    lent: float = 0.0
    tasks: float = 0.0
    actors: float = 0.0
    bundles: float = 0.0
    starting: float = 0.0
    waiting: float | None = None


_UNUSED, _TASKS, _ACTORS = "lent, and used by nobody", "tasks", "actors"


class _Answer(msgspec.Struct):
    """The last answer of one process: when, the cores that were reserved for it, the times that it has said, the
    seconds that its functions had run, and their shares in what has run last."""

    at: float
    cores: float = 0.0
    actor: bool = False
    said: ProcessTime = msgspec.field(default_factory=ProcessTime)
    ran: dict[str, float] = {}
    shares: dict[str, float] = {}

    def take(self, name: str, spent: ProcessTime, most: float) -> float:
        """Return the new part of one of its times, at most so much of it: several threads may have spent more."""
        before, now = getattr(self.said, name), getattr(spent, name)
        setattr(self.said, name, max(before, now))
        new: float = now - before
        return min(max(0.0, most), max(0.0, new))

    def take_functions(self, ran: Mapping[str, float]) -> None:
        """Note which functions have run since its last answer; where none has, its times are of those before."""
        new = {name: seconds - before for name, seconds in ran.items() if seconds > (before := self.ran.get(name, 0.0))}
        self.ran.update(ran)
        if whole := sum(new.values()):
            self.shares = {name: seconds / whole for name, seconds in new.items()}


class _Spent(msgspec.Struct):
    """Seconds of core time of the runs of one function.

    Attributes:
        blocked: of actors, which keep their cores. lent, fetching: of tasks, see `ObjectTime`.
        without_core, beyond: of CPU time.
    """

    on: float = 0.0
    off: float = 0.0
    moving: float = 0.0
    blocked: float = 0.0
    lent: float = 0.0
    fetching: float = 0.0
    without_core: float = 0.0
    beyond: float = 0.0

    def add(self, other: _Spent, share: float = 1.0) -> None:
        """Add a share of other ones."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + share * getattr(other, name))

    def rows(self, unused: float) -> dict[str, float]:
        """By what the cores did. unused: the share of the lent cores that others have not used."""
        return {
            ON_CPU: self.on,
            OFF_CPU: self.off,
            MOVING: self.moving + unused * self.fetching,
            BLOCKED: self.blocked + unused * (self.lent - self.fetching),
        }

    def function_time(self, unused: float) -> FunctionCoreTime:
        """The same, with the CPU time beside it."""
        on, off, moving, blocked = self.rows(unused).values()
        return FunctionCoreTime(on, off, moving, blocked, self.without_core + self.beyond)


class CoreTimeAccount:
    """The account of one node.

    Args:
        now: monotonic time. cores: how many it has.

    Attributes:
        looked_at: the time of the last `look`, or of the start.
    """

    def __init__(self, now: float, cores: float) -> None:
        self._began, self._cores = now, cores
        self._spent: dict[str, _Spent] = {}  # by function; "": of none
        self._told: dict[str, FunctionCoreTime] = {}
        self._used = {False: 0.0, True: 0.0}  # by tasks, and by actors
        self._unseen = {False: 0.0, True: 0.0}
        self.looked_at, self._last = now, NodeLook(cores)
        self._seen = dict.fromkeys(("lent", _UNUSED, _TASKS, _ACTORS, "bundles", "starting", QUEUED, FREE), 0.0)
        self._processes: dict[bytes, _Answer] = {}
        self._restless = False

    def process_joined(self, now: float, proc: bytes) -> None:
        """A process has joined, and has run nothing."""
        self._processes.setdefault(proc, _Answer(now))

    def answered(
        self, now: float, proc: bytes, cores: float, actor: bool, spent: ProcessTime, ran: Mapping[str, float]
    ) -> None:
        """A process says what it has run.

        Args:
            cores: reserved for it now. actor: whether for an actor. spent: its times.
            ran: seconds that its functions have run since its start, by name. Its times are theirs in this proportion.
        """
        known = self._processes.setdefault(proc, _Answer(now))
        seconds, known.at, known.cores, known.actor = now - known.at, now, cores, actor
        known.take_functions(ran)
        held = cores if actor else spent.cores
        busy = known.take("busy", spent, seconds)
        lent = known.take("lent", spent, busy)
        fetching = known.take("fetching", spent, lent)
        moving = known.take("moving", spent, busy - lent)
        after = known.take("after", spent, math.inf)  # pickling is told when it has ended
        cpu = known.take("cpu", spent, math.inf)
        moving_cpu = known.take("moving_cpu", spent, cpu)
        run = busy - lent - moving
        on = min(run, cpu - moving_cpu)
        if not held:
            self._add(known.shares if busy else {}, _Spent(without_core=cpu))
            return
        new = _Spent(on=held * on, off=held * (run - on), moving=held * (moving + after), beyond=cpu - moving_cpu - on)
        self._used[actor] += held * (run + moving + after)
        if actor:  # it keeps its cores
            new.blocked = held * (lent - fetching)
            new.moving += held * fetching
            self._used[actor] += held * lent
        else:
            self._restless = self._restless or lent > 0  # it may have lent them between two looks
            new.lent, new.fetching = held * lent, held * fetching
        self._add(known.shares if busy + after else {}, new)

    def _add(self, shares: Mapping[str, float], new: _Spent) -> None:
        for name, share in (shares or {"": 1.0}).items():
            kept = name if name in self._spent or len(self._spent) < MOST_NAMES else OTHERS
            self._spent.setdefault(kept, _Spent()).add(new, share)

    def process_died(self, now: float, proc: bytes) -> None:
        """A process is gone; since its last answer it was not seen."""
        known = self._processes.pop(proc, None)
        if known is not None:
            self._unseen[known.actor] += known.cores * (now - known.at)

    def look(self, now: float, node: NodeLook) -> bool:
        """Look at the node: half of the time since the last look was as it was then, half as it is now, but that
        requests have waited since they say so. Returns whether anything has changed, or may have in between."""
        before, self._last = self._last, node
        middle = (self.looked_at + now) / 2
        began_to_wait = before.waiting is None and node.waiting is not None
        for look, start, end in ((before, self.looked_at, middle), (node, middle, now)):
            seconds, seen = end - start, self._seen
            unused = min(look.free, look.lent)
            seen["lent"] += look.lent * seconds
            seen[_UNUSED] += unused * seconds
            seen[_TASKS] += look.tasks * seconds
            seen[_ACTORS] += look.actors * seconds
            seen["bundles"] += look.bundles * seconds
            seen["starting"] += look.starting * seconds
            waited = seconds if look.waiting is not None else 0.0
            if began_to_wait:
                waited = end - min(max(node.waiting or 0.0, start), end)
            seen[QUEUED] += (look.free - unused) * waited
            seen[FREE] += (look.free - unused) * (seconds - waited)
        self.looked_at = now
        restless, self._restless = self._restless, False
        return restless or began_to_wait or before._replace(waiting=None) != node._replace(waiting=None)

    def rows(self, now: float) -> dict[str, float]:
        """Seconds of core time by what they were; they add up to cores × the time since the start."""
        unseen = dict(self._unseen)
        for known in self._processes.values():
            unseen[known.actor] += known.cores * (now - known.at)
        seen, whole = self._seen, self._cores * (now - self._began)
        exact = self._total().rows(self._unused())
        used = sum(exact.values())
        if used > whole:  # tasks that went on while others used the core that they had lent
            exact = {name: seconds * whole / used for name, seconds in exact.items()}
            used = whole
        rest = {
            BETWEEN: max(0.0, seen[_TASKS] - self._used[False] - unseen[False]),
            ACTORS: max(0.0, seen[_ACTORS] - self._used[True] - unseen[True]) + seen["bundles"],
            STARTING: seen["starting"],
            QUEUED: seen[QUEUED],
            FREE: seen[FREE],
            UNKNOWN: sum(unseen.values()),
        }
        looked_at = sum(rest.values())
        if not looked_at:
            return {**exact, **rest, FREE: whole - used}
        return exact | {name: seconds / looked_at * (whole - used) for name, seconds in rest.items()}

    def functions(self) -> dict[str, FunctionCoreTime]:
        """Seconds of core time by function, as far as they are those of one."""
        unused = self._unused()
        return {name: one.function_time(unused) for name, one in self._spent.items() if name}

    def changed_functions(self) -> dict[str, FunctionCoreTime]:
        """Those of `functions` that are not as at the last call."""
        before, self._told = self._told, self.functions()
        return {name: one for name, one in self._told.items() if one != before.get(name)}

    def forget_told(self) -> None:
        """Have the next call of `changed_functions` return all of them."""
        self._told = {}

    def beside(self, own: float) -> dict[str, float]:
        """Seconds of CPU time that are not of tasks on their cores, by whose they are. own: of the raylet."""
        total = self._total()
        return {WITHOUT_CORE: total.without_core, BEYOND: total.beyond, OWN: own}

    def _total(self) -> _Spent:
        total = _Spent()
        for one in self._spent.values():
            total.add(one)
        return total

    def _unused(self) -> float:
        """The share of lent cores that no other process has used: it is of those who wait."""
        seen = self._seen
        return min(1.0, seen[_UNUSED] / seen["lent"]) if seen["lent"] else 1.0
