"""A run of a job as its history has it: the records of all nodes, put together."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import add, itemgetter
from typing import Any, NamedTuple

from msgspec.structs import astuple

from hpcray.common.figures import FunctionRow, add_counts, add_functions
from hpcray.common.ids import PROC_BYTES, TASK_BYTES, owner_of
from hpcray.history.block_file import Damage, blocks
from hpcray.history.records import (
    Began,
    ClusterState,
    CoreTime,
    Ended,
    Figures,
    FunctionCoreTime,
    Functions,
    Gap,
    Line,
    NodeDeath,
    Objects,
    Process,
    Reason,
    Running,
    Tasks,
    decode,
    is_readable,
)
from hpcray.history.runs import Run

_FIRST, _TAIL = 256 << 10, 64 << 10
"""Bytes at the beginning and at the end of a file that are read for a list of jobs."""
_LISTED = 3
"""Nodes whose files are read for a list of jobs."""
MOST_TASKS = 400_000
"""Rows of tasks that are kept in memory; beyond it every second one goes, but for those that failed."""
_MOST_ERRORS = 10_000
_MOST_SIGHTINGS = 200_000
GONE, UNSEEN = "gone", "unseen"
"""States of objects that are not in a store any more, and of which that is not known any more."""
_NO_ACTOR: dict[str, Any] = {
    "class_name": "", "name": None, "state": "", "node": None, "pid": None, "restarts": None, "reason": None,
}  # fmt: skip
_NO_GROUP: dict[str, Any] = {"name": None, "strategy": "", "state": "", "bundles": [], "nodes": []}
"""Stand for what the rows of another version lack."""
_PERIOD = 1.0  # seconds between two answers of a process that works
_SECOND = itemgetter(1)
_DRIVER, _WORKER = "driver", "worker"


class TaskRow(NamedTuple):
    """A task or call that has ended. start and end: Unix times by its node's clock."""

    id: bytes
    name: str
    start: float
    end: float
    failed: bool
    node: int
    pid: int
    actor: bytes


@dataclass(frozen=True)
class ErrorRow:
    """The error of a task that failed."""

    at: float
    node: int
    pid: int
    task: bytes
    kind: str
    text: str


class Sighting(NamedTuple):
    """A change of an object that a look at a node's store has shown: it came between `since` and `at`.

    Attributes:
        size: bytes. state: as `ObjectStore.largest_objects` has it, GONE or UNSEEN. copy: of another node's.
    """

    at: float
    since: float
    node: int
    size: int
    state: str
    copy: bool


@dataclass
class Waits:
    """Seconds that the tasks of one function have spent before and after they ran, in all.

    Attributes:
        lacking: until their arguments were there. queued: until they were sent. sent: that, and the run itself.
    """

    lacking: float = 0.0
    queued: float = 0.0
    sent: float = 0.0

    def add(self, other: Waits) -> None:
        """Add those of other tasks of the function."""
        self.lacking, self.queued, self.sent = (
            self.lacking + other.lacking, self.queued + other.queued, self.sent + other.sent
        )  # fmt: skip


class Latency(NamedTuple):
    """Mean seconds of the tasks of one function, from `remote()` to the value.

    Attributes:
        lacking: until their arguments were there. queued: until they were sent to a worker, its start included.
        sent: on the way to the worker, in its queue, and of the value back. running: from the begin to the end.
    """

    lacking: float
    queued: float
    sent: float
    running: float

    @property
    def whole(self) -> float:
        """The time from `remote()` to the value."""
        return sum(self)


@dataclass
class ProcessRow:
    """A process of the job. gone: when it ended, 0.0: it is not known to have. waits: of the tasks that it has
    submitted, by name. made: (time, number of the last id that it had made), over time."""

    node: int
    proc: bytes
    pid: int
    kind: str
    joined: float = 0.0
    gone: float = 0.0
    reason: str = ""
    exit: str = ""
    actor: bytes = b""
    running: Running | None = None
    waits: dict[str, Waits] = field(default_factory=dict)
    made: list[tuple[float, int]] = field(default_factory=list)

    def take(self, work: Running) -> None:
        """Go on to its work at a later moment. What has changed in between is taken to have done so evenly since the
        last time at which it was as before."""
        before, self.running = self.running, work
        if before is not None:
            steady = max(before.at, work.since or work.at - _PERIOD)
            first, second = steady - before.at + (work.at - steady) / 2, (work.at - steady) / 2
            for one, seconds in ((before, first), (work, second)):
                _spend(self.waits, one, max(0.0, seconds))
        elif self.joined:
            _spend(self.waits, work, max(0.0, work.at - self.joined) / 2)
        if work.made:
            since = work.since or self.joined or work.at
            if not self.made or since > self.made[-1][0]:
                self.made.append((since, self.made[-1][1] if self.made else 0))
            self.made.append((work.at, work.made))

    def waits_until(self, at: float) -> dict[str, Waits]:
        """`waits`, with what has gone on since its last record up to this time."""
        found = {name: Waits(one.lacking, one.queued, one.sent) for name, one in self.waits.items()}
        if self.running is not None and not self.gone:
            _spend(found, self.running, max(0.0, at - self.running.at))
        return found

    def submission(self, number: int) -> tuple[float, float] | None:
        """Between which times it has made the id with this number; None: not known."""
        place = bisect_left(self.made, number, key=_SECOND)
        return (self.made[place - 1][0], self.made[place][0]) if 0 < place < len(self.made) else None


def _spend(waits: dict[str, Waits], work: Running, seconds: float) -> None:
    for name, count in work.queued.items():
        lacking = work.lacking.get(name, 0)
        waits.setdefault(name, Waits()).add(Waits(lacking * seconds, max(0, count - lacking) * seconds))
    for name, count in work.sent.items():
        waits.setdefault(name, Waits()).add(Waits(sent=count * seconds))


@dataclass
class NodePart:
    """The part of the history that is about one node.

    Attributes:
        began: its first record; None: its file has none. last: time of its last record, by its own clock.
        ended: it was asked to end, with this code. figures: (time, row) over time, see `NodeFigures.row`.
        functions: what has run there. partial: some runs were not seen. lost: the head has declared it dead for this.
        damage: what could not be read of its files. cut: the last block of the last one is not whole.
        gaps: when something could not be written.
    """

    number: int
    began: Began | None = None
    last: float = 0.0
    ended: Ended | None = None
    figures: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    account: dict[str, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    function_times: dict[str, FunctionCoreTime] = field(default_factory=dict)
    functions: dict[str, FunctionRow] = field(default_factory=dict)
    partial: bool = False
    lost: str = ""
    lost_at: float = 0.0
    damage: Damage = field(default_factory=Damage)
    cut: bool = False
    gaps: list[Gap] = field(default_factory=list)
    unknown: int = 0

    @property
    def breaks_off(self) -> str:
        """Why the end of its file may not be its own end; "" if it is."""
        if self.gaps and self.gaps[-1].at >= self.last:
            return f"its history could not be written any more: {self.gaps[-1].reason}"
        return "the last block of its history is cut off, as on a full disk" if self.cut else ""


class JobHistory:
    """The history of one run.

    Args:
        run: where it is.
        whole: False: only what a list of jobs needs is read, the beginning and the end of the files.

    Attributes:
        run: where it is. nodes: by number. processes: by proc id. tasks: rows in the order of their ends, as far as
            they were noted; seen: how many have ended in all. errors: of failed tasks. actors, groups: by id, as the
            head had them last. objects: what was seen of them, by id. reasons, lines: (node, record) in the order of
            time.
        problems: files that could not be read, with the reason. last: time of the last record: the history is as of
            then.
    """

    def __init__(self, run: Run, whole: bool = True) -> None:
        self.run = run
        self.nodes: dict[int, NodePart] = {}
        self.processes: dict[bytes, ProcessRow] = {}
        self.tasks: list[TaskRow] = []
        self.seen = 0
        self.errors: list[ErrorRow] = []
        self.actors: dict[bytes, dict[str, Any]] = {}
        self.groups: dict[bytes, dict[str, Any]] = {}
        self.objects: dict[bytes, list[Sighting]] = {}
        self._sightings = 0
        self.known_nodes: list[dict[str, Any]] = []
        self.reasons: list[tuple[int, Reason]] = []
        self.lines: list[tuple[int, Line]] = []
        self.problems: list[str] = []
        with _without_collections():
            for number, names in list(run.files.items())[: None if whole else _LISTED]:
                node = self.nodes.setdefault(number, NodePart(number))  # another one may have told of its death
                for name in names if whole else names[-1:]:
                    self._read_file(node, name, whole)
        self.reasons.sort(key=lambda item: item[1].at)
        self.lines.sort(key=lambda item: item[1].at)
        self.tasks.sort(key=lambda row: row.end)
        self.last = max((node.last for node in self.nodes.values()), default=0.0) or run.changed

    # ------------------------------------------------------------ reading

    def _read_file(self, node: NodePart, name: str, whole: bool) -> None:
        try:
            parts = [self.run.read(name)] if whole else self._ends_of(name)
        except OSError as error:
            self.problems.append(f"{name}: {error.strerror or error}")
            return
        for place, data in enumerate(parts):
            damage = Damage()
            for content in blocks(data, damage, place == 0):
                records, unknown = decode(content)
                node.unknown += unknown
                for record in records:
                    if is_readable(record):
                        self._take(node, record)
                    else:
                        node.unknown += 1
            node.cut = damage.cut
            if whole:
                node.damage.add(damage)

    def _ends_of(self, name: str) -> list[bytes]:
        head = self.run.read_head(name, _FIRST)
        return [head] if len(head) < _FIRST else [head, self.run.read(name, _TAIL)]

    def _take(self, node: NodePart, record: Any) -> None:
        node.last = max(node.last, record.at if not isinstance(record, Began) or not record.earlier else 0.0)
        match record:
            case Began():
                node.began = node.began or record
            case Figures():
                node.figures.append((record.at, record.row))
            case CoreTime():
                node.account, node.beside = record.rows, record.beside
                node.function_times.update(record.functions)
            case Functions():
                node.functions.update(record.functions)
                node.partial = node.partial or record.partial
            case Tasks():
                self._take_tasks(node, record)
            case Running():
                self._process(node, record.proc, record.pid, "").take(record)
            case Process():
                known = self._process(node, record.proc, record.pid, record.kind)
                if record.what == "joined":
                    known.joined = record.at
                else:
                    known.gone, known.reason, known.exit = record.at, record.reason, record.exit
                    known.actor = record.actor or known.actor
            case Line():
                self.lines.append((node.number, record))
            case NodeDeath():
                lost = self.nodes.setdefault(record.node, NodePart(record.node))
                lost.lost, lost.lost_at = lost.lost or record.reason, lost.lost_at or record.at
            case ClusterState():
                self.actors.update({ident: {**_NO_ACTOR, **row} for ident, row in record.actors.items()})
                self.groups.update({ident: {**_NO_GROUP, **row} for ident, row in record.groups.items()})
                self.known_nodes = record.nodes or self.known_nodes
            case Reason():
                self.reasons.append((node.number, record))
            case Ended():
                node.ended = node.ended or record
            case Gap():
                node.gaps.append(record)
            case Objects():
                self._take_objects(node, record)

    def _take_objects(self, node: NodePart, record: Objects) -> None:
        rows = [(ident, *one) for ident, one in record.changed.items()]
        rows += [(ident, 0, GONE, False) for ident in record.gone]
        rows += [(ident, 0, UNSEEN, False) for ident in record.unseen]
        if self._sightings < _MOST_SIGHTINGS:
            self._sightings += len(rows)
            for ident, size, state, copy in rows:
                one = Sighting(record.at, record.since, node.number, size, state, copy)
                self.objects.setdefault(ident, []).append(one)

    def _process(self, node: NodePart, proc: bytes, pid: int, kind: str) -> ProcessRow:
        known = self.processes.get(proc)
        if known is None:
            known = self.processes[proc] = ProcessRow(node.number, proc, pid, kind)
        known.pid, known.kind = pid or known.pid, kind or known.kind
        return known

    def _take_tasks(self, node: NodePart, record: Tasks) -> None:
        self.seen += record.seen
        for task, name, end, us, failed in record.rows:
            if 0 <= name < len(record.names):
                self.tasks.append(
                    TaskRow(
                        task, record.names[name], end - us / 1e6, end, failed, node.number, record.pid, record.actor
                    )
                )
        if len(self.tasks) > MOST_TASKS:
            self.tasks = [row for place, row in enumerate(self.tasks) if row.failed or place % 2]
        if len(self.errors) < _MOST_ERRORS:
            self.errors += [
                ErrorRow(record.at, node.number, record.pid, task, kind, text) for task, kind, text in record.errors
            ]

    # ------------------------------------------------------------ answers

    @property
    def head(self) -> NodePart:
        """The node whose record says most about the job: the first one that there is."""
        return next((node for node in self.nodes.values() if node.began is not None), next(iter(self.nodes.values())))

    @property
    def program(self) -> str:
        """Command line of the program; "" if no node knew it."""
        return next((node.began.program for node in self.nodes.values() if node.began and node.began.program), "")

    @property
    def started(self) -> float:
        """When the first node took part."""
        return min((node.began.at for node in self.nodes.values() if node.began), default=self.run.changed)

    @property
    def node_count(self) -> int:
        """Nodes that the job had, with those of which there is no file."""
        started = max((node.began.nodes for node in self.nodes.values() if node.began), default=0)
        return max(len(self.nodes), started)

    @property
    def absent(self) -> list[int]:
        """Nodes that took part and of which there is no file."""
        return [number for number in range(self.node_count) if number not in self.run.files]

    @property
    def submitted(self) -> str:
        """The directory of the job of `hpcray submit` that this is a run of; "": of none."""
        return next((node.began.submitted for node in self.nodes.values() if node.began is not None), "")

    def functions(self) -> dict[str, FunctionRow]:
        """Counts and times of all nodes, by function."""
        found: dict[str, FunctionRow] = {}
        for node in self.nodes.values():
            add_functions(found, node.functions)
        return found

    def core_time(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of core time of all nodes by what the cores did; and of CPU time beside it, by whose it was."""
        account: dict[str, float] = {}
        beside: dict[str, float] = {}
        for node in self.nodes.values():
            for name, seconds in node.account.items():
                account[name] = account.get(name, 0.0) + seconds
            for name, seconds in node.beside.items():
                beside[name] = beside.get(name, 0.0) + seconds
        return account, beside

    def function_times(self) -> dict[str, FunctionCoreTime]:
        """Seconds of core time of all nodes by function, the one with most first."""
        found: dict[str, FunctionCoreTime] = {}
        for node in self.nodes.values():
            for name, more in node.function_times.items():
                one = astuple(found.setdefault(name, FunctionCoreTime()))
                found[name] = FunctionCoreTime(*map(add, one, astuple(more)))
        return dict(sorted(found.items(), key=lambda item: -sum(astuple(item[1]))))

    def latency(self) -> dict[str, Latency]:
        """By function, the mean time of its tasks from `remote()` to the value, by what it went for.

        It is estimated from how many tasks of each process were in each state when it was asked, once a second: the
        time in all is the area below that. Functions of which no task was seen to wait are left out.
        """
        waits: dict[str, Waits] = {}
        for process in self.processes.values():
            for name, one in process.waits_until(self.nodes[process.node].last).items():
                waits.setdefault(name, Waits()).add(one)
        running: dict[str, float] = {}
        open_: dict[str, int] = {}
        for process, _, name, since in self.running():
            running[name] = running.get(name, 0.0) + max(0.0, self.nodes[process.node].last - since)
            open_[name] = open_.get(name, 0) + 1
        found: dict[str, Latency] = {}
        for name, (ended, _, us, _) in self.functions().items():
            seen, ran = waits.get(name), us / 1e6 + running.get(name, 0.0)
            count = ended + open_.get(name, 0)
            if seen is not None and count:
                sent = max(0.0, seen.sent - ran)
                found[name] = Latency(*(seconds / count for seconds in (seen.lacking, seen.queued, sent, ran)))
        return found

    def submission(self, task: bytes) -> tuple[float, float] | None:
        """Between which times, by the clock of its owner's node, a task was submitted; None: not known."""
        owner = self.processes.get(owner_of(task))
        return owner.submission(int.from_bytes(task[PROC_BYTES:TASK_BYTES], "big")) if owner is not None else None

    @property
    def partial(self) -> bool:
        """True if some runs were not seen: counts are at least so large."""
        return any(node.partial for node in self.nodes.values())

    def running(self) -> Iterator[tuple[ProcessRow, bytes, str, float]]:
        """The tasks that ran when each process was heard of last, and since when. Processes that have ended before the
        job are left out."""
        for process in self.processes.values():
            over = process.gone and process.exit not in ("", "JOB_ENDED")
            if process.running is not None and not over:
                for task, name, seconds in process.running.running:
                    yield process, task, name, process.running.at - seconds

    def queued(self) -> dict[str, int]:
        """Tasks and calls that had not been sent, by name; those of processes that have ended are not known."""
        found: dict[str, int] = {}
        for process in self.processes.values():
            if process.running is not None and not process.gone:
                add_counts(found, process.running.queued)
        return found

    def task_summary(self) -> dict[str, dict[str, int]]:
        """By name of the function, how many of its tasks were in which state."""
        found: dict[str, dict[str, int]] = {}
        for name, (ended, failed, _, _) in self.functions().items():
            states = {"FINISHED": ended - failed, "FAILED": failed}
            found[name] = {state: count for state, count in states.items() if count}
        for _, _, name, _ in self.running():
            states = found.setdefault(name, {})
            states["RUNNING"] = states.get("RUNNING", 0) + 1
        for name, count in self.queued().items():
            found.setdefault(name, {})["PENDING_NODE_ASSIGNMENT"] = count
        return found

    def is_call(self, name: str) -> bool:
        """True if a function is the method of an actor, as far as that is known."""
        classes = {row.get("class_name", "").rpartition(".")[2] for row in self.actors.values()}
        return name.rpartition(".")[0].rpartition(".")[2] in classes

    def deaths(self) -> list[ProcessRow]:
        """Processes that have ended otherwise than they should, in the order of time."""
        wrong = ("SYSTEM_ERROR", "NODE_OUT_OF_MEMORY")
        return sorted((one for one in self.processes.values() if one.exit in wrong), key=lambda one: one.gone)

    def errors_by_text(self) -> list[tuple[str, str, int, ErrorRow]]:
        """(class, line, how often it was noted, the first one) of the errors of tasks, the most frequent first."""
        found: dict[tuple[str, str], list[ErrorRow]] = {}
        for error in self.errors:
            text = essence(error.text)
            kind, _, rest = text.partition(": ")
            known = (kind, rest) if kind.isidentifier() and rest else (error.kind, text)
            found.setdefault(known, []).append(error)
        rows = [(kind, text, len(errors), errors[0]) for (kind, text), errors in found.items()]
        return sorted(rows, key=lambda row: -row[2])

    def complaints(self) -> list[str]:
        """The gaps of this history, for people; nothing if it is whole."""
        found = list(self.problems)
        for node in self.nodes.values():
            damage = node.damage
            if damage.places:
                found.append(f"node {node.number}: {damage.places} damaged places ({damage.size} bytes) were left out")
            elif damage.cut:
                found.append(f"node {node.number}: its last block is cut off ({damage.size} bytes)")
            if node.gaps:
                at, reason = clock(node.gaps[0].at), node.gaps[0].reason
                found.append(f"node {node.number}: some records could not be written, from {at} on: {reason}")
            if node.unknown:
                found.append(f"node {node.number}: {node.unknown} records of another version were left out")
            if node.began is None and node.number in self.run.files:
                found.append(f"node {node.number}: the beginning of its history cannot be read")
        if self.absent:
            shown = ", ".join(map(str, self.absent[:10])) + (", ..." if len(self.absent) > 10 else "")
            found.append(f"node {shown}: no history of it is here; what it did is unknown")
        if self.partial:
            found.append("tasks came faster than they were noted: counts of ended tasks are the least that there were")
        return found

    def files(self) -> Sequence[str]:
        """Directories of log files that stay."""
        return sorted({node.began.logs for node in self.nodes.values() if node.began and node.began.logs})


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python's collector from looking at a million rows again and again, in which there is no circle: that takes
    longer than to read them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def essence(text: str) -> str:
    """The line of an error's text that says most: the last one of a traceback, else the first one."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if any(line.startswith('File "') for line in lines) else lines[0]


def clock(at: float, reference: float | None = None) -> str:
    """A time for people; with the date where it is of another day than `reference` (None: today)."""
    day = time.localtime(time.time() if reference is None else reference)[:3]
    form = "%H:%M:%S" if time.localtime(at)[:3] == day else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(at))


def program_name(program: str) -> str:
    """The script or module in a command line, without its arguments and directory: these may hold what is private."""
    words = program.split()
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[1:]
    if words[:1] == ["-m"]:
        return words[1] if len(words) > 1 else ""
    return "" if words[:1] == ["-c"] or not words else os.path.basename(words[0])
