"""The history of one node, as its raylet writes it while the job runs, and the account of its core time.

The raylet asks its processes what they have run, once a second while they work and ever more rarely while they do not,
and appends what is new to the node's file. An idle node writes nothing, but for the head, every 30 s. The raylet never
waits for the file system: a thread writes (`hpcray.history.block_file`). Where that fails the job goes on, and one line
says what will be missing.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from hpcray.common.exceptions import StartupError
from hpcray.common.figures import FunctionRow, add_functions
from hpcray.common.job_names import logs_directory
from hpcray.common.resources import UNIT
from hpcray.core.gcs.gcs import RecoveringGcs
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
    Functions,
    Gap,
    Line,
    NewRecords,
    NodeDeath,
    Process,
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
_ACCOUNT_PERIOD = 3.0  # seconds between two records of the account of core time, while something is reserved
_WORK_SHARE = 0.003  # of its time that a process may spend on answers about what runs
_CLUSTER_SHARE = 0.005  # of the head's time that it may spend on rows of actors and groups
_ALIVE_PERIOD = 30.0  # seconds without anything new after which the head says that it lives
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
        self._figures_at = self._cluster_at = 0.0
        self._shown: tuple[Any, ...] = ()
        self._cluster: dict[bytes, dict[str, Any]] = {}
        self._nodes: list[dict[str, Any]] = []
        self._gone: dict[bytes, Process] = {}
        self._place = _Place(raylet)
        self._account: CoreTimeAccount | None = None
        self._account_at = 0.0
        self._waiting = False

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
            self._look_at_node(self._loop.now, always=True)
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
        if self._account is not None and report.busy >= 0.0:
            self._account.answered(self._loop.now, src, cores, actor, report.busy, report.cpu)
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

    def close(self) -> None:
        """The loop has ended: write what is there."""
        if self._writer is not None and self._account is not None:
            self._add(CoreTime(time.time(), self._account.rows(self._loop.now)))
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
                    self._due[proc] = (now + period, period)  # where no answer comes
            following = min(following, self._due[proc][0])
        self._look_at_node(now)
        self._look_at_cores(now)
        self._look_at_cluster(now)
        self._flush()
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
        """Cores that a process has, and that it has lent as it blocks in `get`; whether an actor has them."""
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
        manager = self._raylet.lease_manager
        reserved = [self._reservation(proc) for proc in manager.pool.workers]
        used, lent = sum(cores for cores, _, _ in reserved), sum(cores for _, cores, _ in reserved)
        total = self._raylet.context.info.total.get("CPU", 0) / UNIT
        self._account.sample(now, total - used, lent, self._waiting)
        if lent or self._waiting:
            self._schedule(now + PERIOD)  # there is no word when a task goes on, or has got a place
        if always or (used and now - self._account_at >= _ACCOUNT_PERIOD):
            self._account_at = now
            self._add(CoreTime(time.time(), self._account.rows(now)))

    def _look_at_node(self, now: float, always: bool = False) -> None:
        """Note what this node uses, where that has changed."""
        if not always and now - self._figures_at < (PERIOD if self._waiting else _FIGURES_PERIOD):
            return
        row = self._raylet.introspection.row()
        seconds, self._figures_at = now - self._figures_at, now
        self._waiting = bool(row["waiting"])
        job = row["cpu"]["job"]
        before = self._shown[0] if self._shown else job
        steps = (
            round(_STEPS * row["memory"]["used"] / max(1, row["memory"]["limit"])),
            round(_STEPS * row["store"]["used"] / max(1, row["store"]["capacity"])),
            round(_STEPS * (job - before) / max(1.0, seconds) / row["cpu"]["host_count"]),
            row["resources"], row["workers"], row["actors"], row["leases"], row["waiting"], row["store"]["on_disk"],
        )  # fmt: skip
        if always or not self._shown or steps != self._shown[1]:
            for name in ("node", "host", "time"):
                row.pop(name, None)
            self._add(Figures(time.time(), row))
        self._shown = (job, steps)

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
# A core is at each moment free or reserved. The raylet knows how many it has reserved for which process; the process
# says, when it is asked, how long it has run tasks and how much CPU time it has used since. From one answer of a
# process to the next, its reserved cores count as running on a CPU (no longer than its CPU time), as running off the
# CPU, or as reserved without a task. All other core time was free.

ON_CPU, OFF_CPU = "running tasks, on a CPU", "running tasks, off the CPU (sleep, I/O, get, or no CPU to be had)"
BETWEEN, ACTORS = "reserved, between two tasks", "reserved by actors, without a call"
BLOCKED, QUEUED, FREE = "lent by tasks blocked in get, and not used", "free, with tasks waiting", "free, nothing to do"
UNKNOWN = "reserved, and not seen"


class _Reservation(msgspec.Struct):
    """The last answer of one process: since when, cores, seconds of tasks, of CPU; whether it is an actor."""

    at: float
    cores: float
    busy: float
    cpu: float
    actor: bool


class CoreTimeAccount:
    """The account of one node.

    Args:
        now: monotonic time. cores: how many it has.
    """

    def __init__(self, now: float, cores: float) -> None:
        self._began, self._cores = now, cores
        self._reserved = dict.fromkeys((ON_CPU, OFF_CPU, BETWEEN, ACTORS, UNKNOWN), 0.0)
        self._free = dict.fromkeys((BLOCKED, QUEUED, FREE), 0.0)
        self._sampled = now
        self._seen: tuple[float, float, bool] | None = None
        self._processes: dict[bytes, _Reservation] = {}

    def answered(self, now: float, proc: bytes, cores: float, actor: bool, busy: float, cpu: float) -> None:
        """A process says what it has run.

        Args:
            cores: reserved for it now. actor: whether for an actor.
            busy: seconds of tasks and calls since its start, running ones included. cpu: its CPU time.
        """
        known = self._processes.get(proc) or _Reservation(self._began, 0.0, 0.0, 0.0, False)
        if held := known.cores or cores:  # what has run by now, has had cores for so long
            seconds = now - known.at
            ran = min(seconds, max(0.0, busy - known.busy))
            on = min(ran, max(0.0, cpu - known.cpu))
            self._reserved[ON_CPU] += held * on
            self._reserved[OFF_CPU] += held * (ran - on)
            self._reserved[ACTORS if known.actor else BETWEEN] += known.cores * (seconds - ran)
        self._processes[proc] = _Reservation(now, cores, busy, cpu, actor)

    def process_died(self, now: float, proc: bytes) -> None:
        """A process is gone; since its last answer it was not seen."""
        known = self._processes.pop(proc, None)
        if known is not None:
            self._reserved[UNKNOWN] += known.cores * (now - known.at)

    def sample(self, now: float, free: float, lent: float, waiting: bool) -> None:
        """Look at what is not reserved: half of the time since the last look was as it was then, half as it is now.

        Args:
            free: cores. lent: cores whose tasks are blocked in `get`. waiting: whether requests wait for resources.
        """
        seconds, self._sampled = now - self._sampled, now
        before, self._seen = self._seen, (max(0.0, free), lent, waiting)
        for free, lent, waiting in (before or self._seen, self._seen):
            unused = min(free, lent)
            self._free[BLOCKED] += unused * seconds / 2
            self._free[QUEUED if waiting else FREE] += (free - unused) * seconds / 2

    def rows(self, now: float) -> dict[str, float]:
        """Seconds of core time by what they were; they add up to cores × the time since the start."""
        reserved = dict(self._reserved)
        for known in self._processes.values():
            reserved[UNKNOWN] += known.cores * (now - known.at)
        whole, used = self._cores * (now - self._began), sum(reserved.values())
        if used > whole:  # amounts that changed between two answers
            return {name: seconds * whole / used for name, seconds in reserved.items()} | dict.fromkeys(self._free, 0.0)
        seen = sum(self._free.values())
        shares = {name: seconds / seen for name, seconds in self._free.items()} if seen else {**self._free, FREE: 1.0}
        return reserved | {name: (whole - used) * share for name, share in shares.items()}
