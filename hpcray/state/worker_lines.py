"""The lines that the workers of a running job print, with who has printed them: for `hpcray logs`."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hpcray.common.ids import raylet_of
from hpcray.common.log_names import LOG_PIECE, parse_worker_log_name
from hpcray.core.core_worker.output_lines import OutputLines
from hpcray.protocol.messages import WorkerOutput
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.diagnostics.cluster_query import ClusterQuery

_PERIOD = 0.5
"""Seconds between two looks at the files."""


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
            a line contains. tail: bytes of each file that are read at first, the last ones; 0: all.
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
    """

    def __init__(self, process: CoreWorker, timeout: float) -> None:
        self._process = process
        self._query = ClusterQuery(process, timeout)
        self._lines: dict[int, OutputLines] = {}
        self._read: dict[tuple[int, str], int] = {}

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
            for name, size in sorted(sizes.get(raylet_of(node), {}).items()):
                yield from self._read_file(node, name, size, wanted, workers, last)

    def follow(self, wanted: LineFilter) -> Iterator[WorkerLine]:
        """All lines, and those that are printed later, until the job ends."""
        while self._process.dead is None:
            yield from self.read(wanted, False)
            time.sleep(_PERIOD)

    def _read_file(
        self, node: int, name: str, size: int, wanted: LineFilter, workers: Collection[bytes] | None,
        last: bool,
    ) -> Iterator[WorkerLine]:  # fmt: skip
        parsed = parse_worker_log_name(name)
        start = self._read.get((node, name), max(0, size - wanted.tail) if wanted.tail else 0)
        if parsed is None or size == start:
            return
        start = start if size > start else 0  # a new file has taken its place
        worker, pid, error = parsed
        lines, raylet = self._lines.setdefault(node, OutputLines()), raylet_of(node)
        while start < size:
            answer = self._query.ask([raylet], "log_piece", name, start, LOG_PIECE).get(raylet, {})
            data = answer.get("data", b"")
            if not data:
                break
            start += len(data)
            for batch in lines.feed(0.0, WorkerOutput(worker, pid, "", error, data, last and start >= size)):
                actor, task = batch["actor_name"] or "", batch["task_name"] or ""
                if wanted.task and not _names(wanted.task, task):
                    continue
                if workers is not None and not (actor and (worker in workers or _names(wanted.actor, actor))):
                    continue  # a worker may have run tasks before it became the actor
                for text in batch["lines"]:
                    if wanted.pattern is None or wanted.pattern.search(text):
                        yield WorkerLine(text, actor or task, pid, node, error)
        self._read[node, name] = start

    def _workers_of(self, actor: str) -> set[bytes]:
        """The processes of the actors that are meant, those that have ended included."""
        rows = self._process.gcs.call("actors")
        meant = [row for row in rows if row["name"] == actor or row["actor"].hex().startswith(actor.lower())]
        idents = {row["actor"] for row in meant}
        ended = {row["proc"] for node in self._query.nodes() for row in node.ended if row["actor"] in idents}
        return ended | {row["worker"] for row in meant if row["worker"]}


def _names(wanted: str, name: str) -> bool:
    """True if a name is the wanted one, or ends with it behind a dot."""
    return name == wanted or name.rpartition(".")[2] == wanted or name.split("(")[0] == wanted
