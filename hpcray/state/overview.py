"""The whole job in figures, one sample after another: what `hpcray top`, `metrics` and `status` show."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcray.common.figures import FunctionRow
from hpcray.common.ids import node_of, raylet_of
from hpcray.common.job_names import parse_worker_log_name
from hpcray.common.labels import Place, place_of
from hpcray.diagnostics.cluster_query import ClusterQuery, ClusterRoster, stacks
from hpcray.diagnostics.figures_gathering import FIGURES, quantile
from hpcray.platform.session_directory import read_session
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.reports import show_stacks

_MORE = 1.0
"""Seconds that the answer may be under way, beyond those that the nodes may take."""


@dataclass
class NodeUse:
    """One node.

    Attributes:
        problem: why there are no figures, "" where there are.
        cpu: share of the host's CPUs that are busy. cores: CPUs that the job's processes here use.
        memory: used and limit in bytes, as the memory monitor sees them. rss: resident bytes of the processes here.
        resources: of each, the used and the total amount.
        store: the numbers of the object store (`ObjectStore.snapshot`), bytes and counts.
        spilling, restoring, receiving, sending: bytes per second, of the disk and of the host's networks.
        pulling, pushing: bytes of objects per second, from and to other nodes' stores.
        gpus: rows of `GpuSampler`. workers: counts by state. latency: seconds of a message to it and back, if known.
        slowness: how many times as long as elsewhere the runs of functions take that other nodes run too, as far as is
            known. place: its switches from the top of the network down, as far as they are known.
        row: what the node has said.
    """

    index: int
    host: str
    node_id: str
    problem: str = ""
    cpu: float = 0.0
    cpu_count: int = 0
    cores: float = 0.0
    memory: tuple[int, int] = (0, 0)
    rss: int = 0
    resources: dict[str, tuple[float, float]] = field(default_factory=dict)
    store: dict[str, Any] = field(default_factory=dict)
    spilling: float = 0.0
    restoring: float = 0.0
    receiving: float = 0.0
    sending: float = 0.0
    pulling: float = 0.0
    pushing: float = 0.0
    gpus: list[dict[str, Any]] = field(default_factory=list)
    workers: dict[str, int] = field(default_factory=dict)
    actors: int = 0
    waiting: int = 0
    latency: float | None = None
    slowness: float | None = None
    place: Place = ()
    row: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> bool:
        """True if it has left the job in good order: nothing is wrong with it, and it is not lost."""
        return self.problem.startswith("left")


_IN_ORDER = ("it was removed", "it was idle", "it was sent SIG", "it was leaving")
"""How the reasons of nodes begin that left because they were asked to: by a user, the autoscaler or a signal."""


_SLOW_RUNS = 1.5  # run times on a node, to those on the others


def is_slow(use: NodeUse) -> bool:
    """True if the same functions take longer on this node than elsewhere."""
    return use.slowness is not None and use.slowness >= _SLOW_RUNS


@dataclass
class FunctionUse:
    """The tasks of one function, or the calls of one method.

    Attributes:
        ended, failed: runs since the start of the workers. rate: ended per second since the sample before.
        seconds: run time of the ended ones in all. elapsed: that of the running ones so far. p50, p99: of one that has
            ended, in seconds, to about a tenth.
    """

    name: str
    running: int = 0
    queued: int = 0
    ended: int = 0
    failed: int = 0
    rate: float = 0.0
    seconds: float = 0.0
    p50: float = 0.0
    p99: float = 0.0
    buckets: dict[int, int] = field(default_factory=dict)
    elapsed: float = 0.0

    @property
    def total(self) -> float:
        """Run time in seconds of all runs, ended or not."""
        return self.seconds + self.elapsed


@dataclass
class JobUse:
    """One sample.

    Attributes:
        time: Unix time. took: seconds that it took. nodes: by index. functions: those that took most time first.
        partial: some runs had been forgotten before the first question: numbers of runs are lower bounds.
        left: seconds until the batch system ends the job; None: not known.
        core_time: seconds of core time of all nodes since their start, by what the cores did. cpu_time_beside: of CPU
            time that is in none of them, by whose it is. Both are empty where the job keeps no history.
    """

    time: float
    took: float
    nodes: list[NodeUse]
    functions: list[FunctionUse]
    partial: bool
    program: str
    job_id: str
    left: float | None
    core_time: dict[str, float] = field(default_factory=dict)
    cpu_time_beside: dict[str, float] = field(default_factory=dict)


class JobOverview:
    """Takes samples of a job on behalf of one process.

    Args:
        process: it asks the raylet of its own node, which asks the others.
        patience: seconds that the nodes may take.
    """

    def __init__(self, process: CoreWorker, patience: float = 2.0) -> None:
        self._process = process
        self._patience = patience
        self._query = ClusterQuery(process, patience + _MORE)
        self._before: JobUse | None = None

    def sample(self, only: Sequence[int] | None = None) -> JobUse:
        """Take a sample: of all nodes, or of some.

        Raises:
            ConnectionError: the raylet of this node does not answer.
        """
        began = time.monotonic()
        rows = [row for row in self._process.gcs.nodes() if only is None or row["Index"] in only]
        alive = [row["Index"] for row in rows if row["Alive"]]
        raylet = raylet_of(self._process.node)
        report = self._query.ask([raylet], FIGURES, alive, self._patience).get(raylet)
        if report is None:
            raise ConnectionError(f"the raylet of node {self._process.node} did not answer; hint: hpcray stack --all")
        said = {row["node"]: row for row in report["nodes"]}
        before = {one.index: one for one in self._before.nodes} if self._before is not None else {}
        nodes = [
            node_use(row, said.get(row["Index"]), before.get(row["Index"]), report["latency"].get(row["Index"]))
            for row in rows
        ]
        now = time.time()
        known = {one.name: one for one in self._before.functions} if self._before is not None else {}
        elapsed = now - self._before.time if self._before is not None else 0.0
        session = read_session(self._process.place.session_dir)
        made = JobUse(
            now,
            time.monotonic() - began,
            sorted(nodes, key=lambda one: one.index),
            _functions(report, known, elapsed),
            report["partial"],
            " ".join(session.program.split()),
            session.slurm_job or session.session,
            max(0.0, session.end - now) if session.end else None,
            *(_added(one.row.get(name, {}) for one in nodes) for name in ("core_time", "cpu_time_beside")),
        )
        for one in made.nodes:
            one.slowness = _slowness(one.row, report["functions"])
        self._before = made
        return made

    def processes(self, node: int) -> list[dict[str, Any]]:
        """The processes of a node: what they are, what they run, their CPU seconds and resident bytes."""
        raylet = raylet_of(node)
        usage = {row["proc"]: row for row in self._query.ask([raylet], "usage").get(raylet, ())}
        here = self._query.ask([raylet], "node").get(raylet, {}).get("processes", [])
        calls = self._query.ask([row["proc"] for row in here], "calls")
        return [
            {**row, **usage.get(row["proc"], {"cpu": 0.0, "rss": 0}), "calls": calls.get(row["proc"])} for row in here
        ]


def node_use(
    listed: Mapping[str, Any], row: dict[str, Any] | None, before: NodeUse | None, latency: float | None
) -> NodeUse:
    """The use of a node between two samples.

    Args:
        listed: its row in the table of nodes. row: what it has said now, `NodeFigures.row`; None: nothing.
        before: the sample before; None: amounts per second are not known. latency: see `NodeUse`.
    """
    index, host, place = listed["Index"], listed["NodeManagerHostname"], place_of(listed["Labels"])
    use = NodeUse(index, host, listed["NodeID"], latency=latency, place=place)
    if row is None:
        reason = listed["DeathReason"] or "no reason is known"
        end = "left" if reason.startswith(_IN_ORDER) else "dead"
        use.problem = "no answer" if listed["Alive"] else f"{end}: {reason}"
        return use
    memory, cpu, store = row["memory"], row["cpu"], row["store"]
    use.row, use.store, use.gpus, use.workers = row, store, row["gpus"], row["workers"]
    use.cpu_count, use.rss = cpu["host_count"], memory["rss"]
    use.memory = memory["used"], memory["limit"]
    use.resources = {name: (used, total) for name, (used, total) in row["resources"].items()}
    use.actors, use.waiting = row["actors"], row["waiting"]
    use.cpu = cpu["host_busy"] / cpu["host_all"] if cpu["host_all"] else 0.0
    if before is None or not before.row:
        return use
    last = before.row
    elapsed = row["time"] - last["time"]
    if elapsed <= 0:  # the node has answered with the figures of the sample before
        use.cpu, use.cores = before.cpu, before.cores
        use.spilling, use.restoring = before.spilling, before.restoring
        use.receiving, use.sending = before.receiving, before.sending
        use.pulling, use.pushing = before.pulling, before.pushing
        return use
    whole = cpu["host_all"] - last["cpu"]["host_all"]
    use.cpu = (cpu["host_busy"] - last["cpu"]["host_busy"]) / whole if whole > 0 else before.cpu
    use.cores = max(0.0, cpu["job"] - last["cpu"]["job"]) / elapsed  # less: a process has ended
    use.spilling = (store["spilled_bytes"] - last["store"]["spilled_bytes"]) / elapsed
    use.restoring = (store["loaded_bytes"] - last["store"]["loaded_bytes"]) / elapsed
    use.pulling = (store["pulled_bytes"] - last["store"]["pulled_bytes"]) / elapsed
    use.pushing = (store["sent_bytes"] - last["store"]["sent_bytes"]) / elapsed
    use.receiving = (row["network"]["received"] - last["network"]["received"]) / elapsed
    use.sending = (row["network"]["sent"] - last["network"]["sent"]) / elapsed
    return use


def _added(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        for name, seconds in row.items():
            found[name] = found.get(name, 0.0) + seconds
    return found


def _slowness(row: Mapping[str, Any], functions: Mapping[str, FunctionRow]) -> float | None:
    """The time of a node's runs, divided by what they would have taken at the speed of the other nodes."""
    took = usual = 0.0
    for name, (ended, us) in row.get("times", {}).items():
        known: Sequence[Any] = functions.get(name, (0, 0, 0, {}))
        others, others_us = sum(known[3].values()) - ended, known[2] - us
        if ended > 0 and others > 0:
            took += us
            usual += ended * max(0, others_us) / others
    return took / usual if usual > 0 else None


def _functions(report: Mapping[str, Any], before: Mapping[str, FunctionUse], elapsed: float) -> list[FunctionUse]:
    functions: dict[str, FunctionRow] = report["functions"]
    names = {*functions, *report["running"], *report["queued"]}
    found = []
    for name in names:
        row = functions.get(name, [0, 0, 0, {}])
        ended, failed, us, buckets = row
        last = before.get(name)
        rate = max(0, ended - last.ended) / elapsed if last is not None and elapsed > 0 else 0.0
        found.append(FunctionUse(
            name, report["running"].get(name, 0), report["queued"].get(name, 0), ended, failed, rate, us / 1e6,
            quantile(row, 0.5), quantile(row, 0.99), buckets, report["elapsed"].get(name, 0) / 1e6,
        ))  # fmt: skip
    return sorted(found, key=lambda one: (-one.total, -one.running, -one.queued, one.name))


# ------------------------------------------------------------ job view
# The rows of `hpcray top`: samples of the whole job, and details of a node, a process and the actors.

_QUERY_TIMEOUT = 2.0
_TAIL = 50  # lines


class JobSource(Protocol):
    """Where a view of a job gets its rows from. Every call may take seconds, and raise ConnectionError."""

    @property
    def ended(self) -> str:
        """Why there is nothing more to ask: the job, or the node that is asked, is gone; "" while it is there."""

    def sample(self) -> JobUse:
        """All nodes and functions."""

    def functions_of(self, node: int) -> JobUse:
        """One node and what has run there."""

    def processes(self, node: int) -> list[dict[str, Any]]:
        """The processes of a node."""

    def actors(self) -> list[dict[str, Any]]:
        """All actors; of dead ones when and why they ended."""

    def stack(self, node: int, proc: bytes) -> list[str]:
        """The stacks of a process."""

    def transfers(self) -> list[dict[str, Any]]:
        """The transfers of objects between nodes that are under way, or wait for their turn."""

    def tail(self, node: int) -> list[tuple[str, str]]:
        """The last lines of workers of a node: (pid, line)."""


class LiveJob:
    """The job of a process that is in it.

    Args:
        process: it sends the questions.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._overview = JobOverview(process)
        self._of_node: dict[int, JobOverview] = {}
        self._query = ClusterQuery(process, _QUERY_TIMEOUT)

    @property
    def ended(self) -> str:
        """See `JobSource`."""
        return self._process.dead or ""

    def sample(self) -> JobUse:
        """See `JobSource`."""
        return self._overview.sample()

    def functions_of(self, node: int) -> JobUse:
        """See `JobSource`."""
        overview = self._of_node.get(node)
        if overview is None:
            overview = self._of_node[node] = JobOverview(self._process)
        return overview.sample([node])

    def processes(self, node: int) -> list[dict[str, Any]]:
        """See `JobSource`."""
        return self._overview.processes(node)

    def nodes(self) -> list[ClusterRoster]:
        """Every node, dead ones too, and who is on it."""
        return self._query.nodes()

    def actors(self) -> list[dict[str, Any]]:
        """See `JobSource`. Rows "actor", "class", "name", "state", "node", "pid", "proc", "restarts", "reason",
        "ended"."""
        return self.actors_on(self.nodes())

    def actors_on(self, nodes: Sequence[ClusterRoster]) -> list[dict[str, Any]]:
        """The same, where the nodes have been asked already."""
        now = time.time()
        ended = {row["actor"]: row["seconds"] for node in nodes for row in node.ended if row["actor"]}
        pids = {one.proc: one.pid for node in nodes for one in node.processes}
        return [
            {
                "actor": row["actor"].hex(),
                "class": row["class_name"],
                "name": row["name"] or "",
                "state": row["state"],
                "node": row["node"],
                "pid": pids.get(row["worker"], 0) or row["pid"] or 0,
                "proc": (row["worker"] or b"").hex(),
                "restarts": row["restarts"],
                "reason": row["reason"] or "",
                "ended": None if dead_for is None or row["state"] != "DEAD" else now - dead_for,
            }
            for row in self._process.gcs.call("actors")
            for dead_for in [row["dead_for"] if row["dead_for"] is not None else ended.get(row["actor"])]
        ]

    def stack(self, node: int, proc: bytes) -> list[str]:
        """See `JobSource`."""
        return list(show_stacks(stacks(self._query, [node], proc), False))

    def transfers(self) -> list[dict[str, Any]]:
        """See `JobSource`. Rows "object", "size", "done", "from", "to" (nodes; -1: not known yet), "state"; a transfer
        that both ends list is one row, the receiver's."""
        alive = [raylet_of(row["Index"]) for row in self._process.gcs.nodes() if row["Alive"]]
        found: dict[tuple[bytes, int], dict[str, Any]] = {}
        for raylet, rows in self._query.ask(alive, "transfers").items():
            here = node_of(raylet)
            for row in rows:
                sends = row["state"] == "sends"
                ends = (here, row["node"]) if sends else (row["node"], here)
                key = row["id"], ends[1]
                if not sends or key not in found:
                    found[key] = {
                        "object": row["id"].hex(), "size": row["size"], "done": row["done"], "from": ends[0],
                        "to": ends[1], "state": row["state"],
                    }  # fmt: skip
        return sorted(found.values(), key=lambda row: (row["done"] - row["size"], row["object"]))

    def tail(self, node: int) -> list[tuple[str, str]]:
        """See `JobSource`."""
        raylet = raylet_of(node)
        rows = self._query.ask([raylet], "log_tail", _TAIL).get(raylet, [])
        found = []
        for name, _, line in rows:
            parsed = parse_worker_log_name(name)
            found.append((str(parsed[1]) if parsed else name, line))
        return found
