"""Log files of the job's nodes: found by name, process, actor or task, and read through the raylets."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpcray.common.ids import raylet_of
from hpcray.common.job_names import JOB_LOGS_PATH_TEMPLATE, LOG_PIECE, parse_worker_log_name, split_rotation
from hpcray.core.core_worker.output_lines import OutputLines
from hpcray.diagnostics.cluster_query import ClusterQuery, ClusterRoster
from hpcray.protocol.messages import WorkerOutput
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.aggregator import StateAggregator
from hpcray.state.job_table import JobTable
from hpcray.state.schemas import DEFAULT_LOG_LIMIT, GetLogOptions, TaskState

RECORD_ACTOR_TASKS = "RAY_ENABLE_RECORD_ACTOR_TASK_LOGGING"
"""Variable: with 1, `get_log(task_id=...)` knows calls of actors too."""
_FOLLOW_INTERVAL = 1.0  # seconds
_GROUPS = (
    ("worker_out", lambda name: "worker" in name and name.endswith(".out")),
    ("worker_err", lambda name: "worker" in name and name.endswith(".err")),
    ("internal", lambda name: True),
)


class LogError(Exception):
    """The log that was asked for does not exist, or cannot be reached."""


@dataclass(frozen=True)
class LogPart:
    """A file of a node, or the part of it from `start` to `end` (None: to its end)."""

    node: int
    name: str
    start: int = 0
    end: int | None = None


class LogReader:
    """Finds and reads log files on behalf of one process.

    Args:
        process: who asks.
        timeout: seconds that a raylet or process may take to answer.
    """

    def __init__(self, process: CoreWorker, timeout: float) -> None:
        self._process = process
        self._timeout = timeout
        self._diagnosis = ClusterQuery(process, timeout)

    def find(self, node_id: str | None, node_ip: str | None, pattern: str) -> dict[str, list[str]]:
        """Return the names of a node's files by group, without groups that are empty.

        Raises:
            LogError: there is no such node, it does not answer, or the pattern is not valid.
        """
        found: dict[str, list[str]] = {}
        for name in self._names(self._node(node_id, node_ip), pattern):
            group = next(group for group, has in _GROUPS if has(name))
            found.setdefault(group, []).append(name)
        return found

    def read(self, node_id: str, name: str, start: int) -> bytes:
        """Return a piece of a file from offset `start` on; nothing at its end.

        Raises:
            LogError: there is no such file or node, or the node does not answer.
        """
        return self._read(LogPart(self._node(node_id, None).index, name), start, LOG_PIECE)[0]

    def piece(self, node: int, name: str, start: int) -> tuple[int, bytes, int]:
        """Return a piece of a file: where it begins, its bytes, and the size of the file.

        Args:
            node: index of the node. name: of the file. start: where the piece begins; less than 0: so many bytes before
                the end.

        Raises:
            LogError: there is no such file, or the node does not answer.
        """
        part = LogPart(node, name)
        if start < 0:
            start = max(0, self._read(part, 0, 0)[1] + start)
        return start, *self._read(part, start, LOG_PIECE)

    def stream(self, options: GetLogOptions) -> Iterator[bytes]:
        """Yield a log in pieces; with the media type "stream" without end.

        Raises:
            LogError: the log does not exist, or cannot be reached.
        """
        part = self._resolve(options)
        start = part.start
        lines = options.lines or DEFAULT_LOG_LIMIT
        data, size = self._read(part, start, 0 if lines > 0 else LOG_PIECE)
        end = size if part.end is None else min(part.end, size)
        if lines > 0:
            start = max(start, self._start_of_last(lines, part, end))
        follow = options.media_type == "stream"
        while follow or start < end:
            if not data:
                data, size = self._read(part, start, LOG_PIECE)
            if not follow:
                data = data[: end - start]
            if data:
                start += len(data)
                yield data
                data = b""
            elif follow:
                start = start if size >= start else 0  # a new file has taken its place
                time.sleep(options.interval or _FOLLOW_INTERVAL)
            else:
                return  # it became shorter

    def _start_of_last(self, lines: int, part: LogPart, end: int) -> int:
        """Return where the last lines before `end` begin."""
        start, wanted, last = end, lines, True
        while start > part.start:
            begin = max(part.start, start - LOG_PIECE)
            data, _ = self._read(part, begin, start - begin)
            if last and not data.endswith(b"\n"):
                wanted -= 1  # a line that has not ended is one
            last = False
            place = len(data)
            while (place := data.rfind(b"\n", 0, place)) >= 0:
                wanted -= 1
                if wanted < 0:
                    return begin + place + 1
            start = begin
        return start

    def _resolve(self, options: GetLogOptions) -> LogPart:
        if options.actor_id:
            found = self._of_actor(options.actor_id, options.suffix)
        elif options.task_id:
            found = self._of_task(options.task_id, int(options.attempt_number), options.suffix)
        elif options.submission_id and not options.pid:
            found = self._of_submission(options.submission_id)
        else:
            node = self._node(options.node_id, options.node_ip)
            name = options.filename if not options.pid else None
            if options.pid:
                known = [(parse_worker_log_name(one), one) for one in self._names(node, f"*{options.suffix}")]
                name = next((one for parsed, one in known if parsed and parsed[1] == options.pid), None)
            found = LogPart(node.index, name) if name else None
        if found is None:
            named = ("node_id", "filename", "actor_id", "task_id", "pid", "suffix", "submission_id", "attempt_number")
            raise LogError(
                "Could not find a log file. Please make sure the given option exists in the cluster.\n"
                + "".join(f"\t{name}: {getattr(options, name)}\n" for name in named)
            )
        return found

    def _of_submission(self, submission_id: str) -> LogPart | None:
        """The output of the entrypoint of a submitted job, on the node where it runs or ran."""
        info = JobTable(self._process).find(submission_id)
        if info is None or info.driver_node_id is None:
            return None
        name = JOB_LOGS_PATH_TEMPLATE.format(submission_id=submission_id)
        return LogPart(self._node(info.driver_node_id, None).index, name)

    def _of_actor(self, actor_id: str, suffix: str) -> LogPart | None:
        """The file of the worker of an actor: of the present one, else of the last that has ended."""
        rows = self._process.gcs.call("actors")
        row = next((row for row in rows if row["actor"].hex() == actor_id), None)
        if row is None:
            raise LogError(f"Actor ID ActorID({actor_id}) not found.")
        nodes = self._diagnosis.nodes()
        places = [(node.index, one.proc) for node in nodes for one in node.processes if one.proc == row["worker"]]
        ended = [(one["seconds"], node.index, one["proc"], one["actor"]) for node in nodes for one in node.ended]
        places += [(node, proc) for _, node, proc, actor in sorted(ended) if actor == row["actor"]]
        if not places:
            raise LogError(f"Worker ID for Actor ID ActorID({actor_id}) not found. Actor is not scheduled yet.")
        by_index = {node.index: node for node in nodes}
        for index, proc in places:
            for name in self._names(by_index[index], f"*{proc.hex()}*.{suffix}"):
                return LogPart(index, name)
        return None

    def _of_task(self, task_id: str, attempt: int, suffix: str) -> LogPart:
        attempts = [row for row in StateAggregator(self._process, self._timeout).tasks() if row.task_id == task_id]
        if not attempts:
            text = f"Could not find log file for task: {task_id} (attempt {attempt}) with suffix: {suffix}"
            raise LogError(text)
        row = next((row for row in attempts if row.attempt_number == attempt), None)
        if row is None:
            raise LogError(f"Could not find log file for task attempt:{task_id}({attempt})")
        if row.node_id is None or row.worker_id is None:
            raise LogError(f"Could not find log file for task attempt.{task_id}({attempt}) due to missing node info.")
        if row.actor_id is not None and os.environ.get(RECORD_ACTOR_TASKS) != "1":
            raise LogError(
                f"For actor task, please query actor log for actor({row.actor_id}): e.g. ray logs actor --id "
                f"{row.actor_id} . Or set {RECORD_ACTOR_TASKS}=1 in actor's runtime env or when starting the cluster."
            )
        return self._written_by(row, attempts, suffix)

    def _written_by(self, row: TaskState, attempts: list[TaskState], suffix: str) -> LogPart:
        """The part of a worker's file that one attempt of a task has written."""
        worker = bytes.fromhex(row.worker_id or "")
        answer = self._diagnosis.ask([worker], "log_parts", bytes.fromhex(row.task_id), suffix).get(worker)
        if answer is None:
            raise LogError(
                f"Could not find log file for task attempt:{row.task_id}({row.attempt_number}). Its worker "
                f"{row.worker_id} has ended; hint: get_log(pid={row.worker_pid}, node_id={row.node_id!r}) returns all "
                "that it wrote"
            )
        here = [one for one in attempts if one.worker_id == row.worker_id]
        parts: list[tuple[int, int | None]] = answer["parts"]
        number = here.index(row) - (len(here) - len(parts))  # an attempt that wrote nothing has no part
        start, end = parts[number] if 0 <= number < len(parts) else (0, 0)
        node = next(one.index for one in self._diagnosis.nodes() if one.node_id == row.node_id)
        return LogPart(node, answer["name"], start, end)

    def _node(self, node_id: str | None, node_ip: str | None) -> ClusterRoster:
        nodes = self._diagnosis.nodes()
        if node_id:
            found = next((one for one in nodes if one.node_id == node_id and one.alive), None)
            problem = f"Agent for node id: {node_id} doesn't exist."
        else:
            found = next((one for one in nodes if one.address == node_ip and one.alive), None)
            problem = f"Cannot find matching node_id for a given node ip {node_ip}"
        if found is None:
            raise LogError(problem)
        return found

    def _names(self, node: ClusterRoster, pattern: str) -> list[str]:
        names: list[str] = self._ask(node.index, "log_files", pattern)["names"]
        return names

    def _read(self, part: LogPart, start: int, size: int) -> tuple[bytes, int]:
        answer = self._ask(part.node, "log_piece", part.name, start, size)
        return answer["data"], answer["size"]

    def _ask(self, node: int, what: str, *args: Any) -> dict[str, Any]:
        raylet = raylet_of(node)
        answer: dict[str, Any] | None = self._diagnosis.ask([raylet], what, *args).get(raylet)
        if answer is None:
            raise LogError(f"the raylet of node {node} did not answer within {self._timeout:g} s, or has ended")
        if "problem" in answer:
            raise LogError(answer["problem"])
        return answer


# ------------------------------------------------------------ worker lines
# The lines that the workers of a running job print, with who has printed them: for `hpcray logs`.


_PERIOD = 0.5
"""Seconds between two looks at the files."""


_Generations = dict[int, tuple[int, int]]
"""Size and inode of a file, under 0, and of those that were rotated away."""


@dataclass(frozen=True)
class WorkerLine:
    """One line. who: the task's function or the actor, "" where none is known. error: from standard error."""

    text: str
    who: str
    pid: int
    node: int
    error: bool


@dataclass(frozen=True)
class LineFilter:
    """Which lines are wanted.

    Attributes:
        nodes: None: all. task: name of a function. actor: name, class or beginning of the id of an actor. pattern: that
            a line contains. tail: bytes of each worker's output, and of its errors, that are read at first, the
            last ones; 0: all.
    """

    nodes: Collection[int] | None = None
    task: str = ""
    actor: str = ""
    pattern: re.Pattern[str] | None = None
    tail: int = 0


class WorkerLines:
    """Reads the log files of all workers through their raylets, from the beginning on.

    Args:
        process: it asks the raylets.
        timeout: seconds that a raylet may take.

    Attributes:
        lines: number of lines read so far, wanted or not. processes: (node, pid) of those that printed them.
    """

    def __init__(self, process: CoreWorker, timeout: float) -> None:
        self._process = process
        self._query = ClusterQuery(process, timeout)
        self.lines = 0
        self.processes: set[tuple[int, int]] = set()
        self._lines: dict[int, OutputLines] = {}
        self._places: dict[tuple[int, str], tuple[int, int]] = {}  # inode and offset up to which a file was read
        self._seen: dict[tuple[int, str], _Generations] = {}

    def read(self, wanted: LineFilter, last: bool = True) -> Iterator[WorkerLine]:
        """The lines that have been printed since the last call.

        Args:
            wanted: which ones.
            last: there is no later call: lines that have not ended are given too.
        """
        nodes = [row["Index"] for row in self._process.gcs.nodes() if row["Alive"]]
        nodes = [node for node in nodes if wanted.nodes is None or node in wanted.nodes]
        workers = self._workers_of(wanted.actor) if wanted.actor else None
        sizes = self._query.ask([raylet_of(node) for node in nodes], "log_sizes")
        for node in nodes:
            files: dict[str, _Generations] = {}
            for name, state in sizes.get(raylet_of(node), {}).items():
                present, number = split_rotation(name)
                files.setdefault(present, {})[number] = state
            for name in sorted(files, key=_reading_order):
                if self._seen.get((node, name)) != files[name]:
                    yield from self._read_file(node, name, files[name], wanted, workers, last)

    def follow(self, wanted: LineFilter) -> Iterator[WorkerLine]:
        """All lines, and those that are printed later, until the job ends."""
        while self._process.dead is None:
            yield from self.read(wanted, False)
            time.sleep(_PERIOD)

    def _read_file(
        self, node: int, name: str, files: _Generations, wanted: LineFilter, workers: Collection[bytes] | None,
        last: bool,
    ) -> Iterator[WorkerLine]:  # fmt: skip
        """Read what was added to a file; first what was rotated away."""
        parsed = parse_worker_log_name(name)
        if parsed is None:
            return
        worker, pid, error = parsed
        lines, raylet = self._lines.setdefault(node, OutputLines()), raylet_of(node)
        inode, offset = self._places.get((node, name), (0, -wanted.tail))
        left, more = sum(size for size, _ in files.values()), True  # a worker may write faster than we read
        while more and left > 0:
            answer = self._query.ask([raylet], "log_next", name, inode, offset).get(raylet, {})
            data, more = answer.get("data", b""), answer.get("more", False)
            inode, offset = answer.get("inode", inode), answer.get("offset", offset)
            left -= len(data)
            self._places[node, name] = inode, offset
            for batch in lines.feed(0.0, WorkerOutput(worker, pid, "", error, data, last and not (more and left > 0))):
                self.lines += len(batch["lines"])
                self.processes.add((node, pid))
                actor, task = batch["actor_name"] or "", batch["task_name"] or ""
                if wanted.task and not _names(wanted.task, task):
                    continue
                if workers is not None and not (
                    (worker in workers and not task) or (actor and _names(wanted.actor, actor))
                ):
                    continue  # with a task's name: the worker ran it before it became the actor
                for text in batch["lines"]:
                    if wanted.pattern is None or wanted.pattern.search(text):
                        yield WorkerLine(text, actor or task, pid, node, error)
        if not more:
            self._seen[node, name] = files

    def _workers_of(self, actor: str) -> set[bytes]:
        """The processes of the actors that are meant, those that have ended included."""
        rows = self._process.gcs.call("actors")
        meant = [row for row in rows if _is_actor(row, actor)]
        idents = {row["actor"] for row in meant}
        ended = {row["proc"] for node in self._query.nodes() for row in node.ended if row["actor"] in idents}
        return ended | {row["worker"] for row in meant if row["worker"]}


def _is_actor(row: dict[str, Any], actor: str) -> bool:
    """True if a row of the GCS is about an actor of this name, class or beginning of an id."""
    named = row["name"] == actor or row["actor"].hex().startswith(actor.lower())
    return named or _names(actor, row["class_name"] or "")


def _reading_order(name: str) -> tuple[str, bool]:
    """A worker's standard output before its standard error, which may lack a name that the output has."""
    return name.removesuffix(".out").removesuffix(".err"), name.endswith(".err")


def _names(wanted: str, name: str) -> bool:
    """True if a name is the wanted one, or ends with it behind a dot."""
    return name == wanted or name.rpartition(".")[2] == wanted or name.split("(")[0] == wanted
