"""The lines that the workers of a running job print, with who has printed them: for `hpcray logs`."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpcray.common.ids import raylet_of
from hpcray.common.job_names import parse_worker_log_name, split_rotation
from hpcray.core.core_worker.output_lines import OutputLines
from hpcray.diagnostics.cluster_query import ClusterQuery
from hpcray.protocol.messages import WorkerOutput
from hpcray.runtime.core_worker.core_worker import CoreWorker

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
