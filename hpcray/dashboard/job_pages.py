"""The answers to the questions of a dashboard's pages as plain data: of a running job, or from the history of one that
has ended."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from hpcray.common.figures import FunctionRow, add_counts, lower_bound, upper_bound
from hpcray.common.ids import HEAD, node_of, raylet_of, show_proc
from hpcray.common.job_names import parse_worker_log_name
from hpcray.core.object_store.allocator import format_size
from hpcray.dashboard.task_timeline import TaskTimeline, timeline_of
from hpcray.diagnostics.cluster_query import ClusterQuery, stacks
from hpcray.diagnostics.figures_gathering import quantile
from hpcray.diagnostics.wait_graph import WaitReason
from hpcray.history.job_history import JobHistory, NodePart, clock
from hpcray.history.outcome import Outcome, explain
from hpcray.platform.allocation import run_command
from hpcray.platform.session_directory import read_session
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.aggregator import StateAggregator
from hpcray.state.logs import LineFilter, LogError, LogReader, WorkerLines
from hpcray.state.overview import FunctionUse, JobUse, LiveJob, NodeUse, is_slow, node_use
from hpcray.state.profile import ProfileError, ProfileRequest, frame_name, limits, take_profile
from hpcray.state.reports import NEVER, NEVER_SERVED, WaitSearch, show_demand, show_stacks
from hpcray.topology.node_order import in_order

# ------------------------------------------------------------ wait edges
# Waits as nodes and edges, from the lines of `hpcray why`.


_MOST = 300  # boxes


def wait_graph(findings: Iterable[WaitReason]) -> dict[str, Any]:
    """Return "nodes", each with "depth" and "text", "edges" from who waits to what it waits for, and "more".

    An object or process that occurs twice is one node, so that a circle of waits is seen as one.
    """
    nodes: list[dict[str, Any]] = []
    edges: list[tuple[int, int]] = []
    known: dict[str, int] = {}
    above: list[int] = []  # the nodes from the top down to the present line
    more = 0
    for one in findings:
        del above[one.depth :]
        number = known.get(one.ident, -1) if one.ident else -1
        if number < 0:
            if len(nodes) >= _MOST:
                more += 1
                above += [above[-1]] if above else []
                continue
            number = len(nodes)
            never = NEVER in one.text
            nodes.append({"depth": one.depth, "text": one.text, "ident": one.ident, "never": never})
            for before in above if never else ():
                nodes[before]["never"] = True
            if one.ident:
                known[one.ident] = number
        elif one.text not in nodes[number]["text"] and not one.text.endswith("see above"):
            nodes[number]["text"] += f"\n{one.text}"
        if above and (edge := (above[-1], number)) not in edges and edge[0] != edge[1]:
            edges.append(edge)
        above.append(number)
    return {"nodes": nodes, "edges": edges, "more": more}


# ------------------------------------------------------------ alerts
# What is wrong with a job, a row each, with the page of the dashboard that shows the cause.


_ENDED_IN_ORDER = (
    "it was killed by `ray.kill`", "it was killed from the dashboard", "all references to the actor were removed",
    "its compiled graph was torn down",
)  # fmt: skip
_BAD, _WARN = "bad", "warn"


def is_fault(reason: str) -> bool:
    """True if an actor has ended for this reason without having been asked to."""
    return bool(reason) and not reason.startswith(_ENDED_IN_ORDER) and m.USER_EXIT not in reason


def alerts(use: JobUse, waiting: Sequence[str], dead_actors: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Return what is wrong: rows "title", "text", "level" ("bad", "warn") and "page", what is worst first.

    Args:
        waiting: lines of `show_demand`. dead_actors: rows of the table of actors.
    """
    found: list[tuple[str, str, str, str]] = []
    if never := [line.strip().removesuffix(NEVER_SERVED) for line in waiting if line.endswith(NEVER_SERVED)]:
        found.append(("Can never run", _several(never), _BAD, "waits"))
    alive = [node for node in use.nodes if not node.problem]
    if dead := [f"node {node.index} ({node.host})" for node in use.nodes if node.problem.startswith("dead")]:
        found.append(("Lost nodes", _several(dead), _BAD, "nodes"))
    if killed := {node.index: node.row.get("memory", {}).get("killed", 0) for node in alive}:
        where = [f"node {index}: {count} ended" for index, count in killed.items() if count]
        if where:
            found.append(("Out of memory", f"workers, {_several(where)}", _BAD, "tasks?state=FAILED"))
    if failed := sorted((one for one in use.functions if one.failed), key=lambda one: -one.failed):
        text = _several([f"{one.name}: {one.failed} of {one.ended + one.running}" for one in failed])
        found.append(("Failed", text, _BAD, "tasks?state=FAILED"))
    if faults := [row for row in dead_actors if is_fault(row["reason"])]:
        text = _several([f"{row['class']}{row['name'] and ' ' + row['name']}: {row['reason']}" for row in faults])
        page = f"actor?id={faults[0]['id']}" if len(faults) == 1 else "actors?state=DEAD"
        found.append(("Dead actors", text, _BAD, page))
    if slow := sorted(filter(is_slow, alive), key=lambda node: -(node.slowness or 0.0)):
        text = _several(
            [f"node {node.index} ({node.host}): runs take {node.slowness:.2g} times as long" for node in slow]
        )
        page = f"node?node={slow[0].index}" if len(slow) == 1 else "nodes"
        found.append(("Slow nodes", text, _WARN, page))
    if spilled := [node for node in alive if node.store.get("on_disk", 0) or node.spilling]:
        size = sum(node.store.get("on_disk", 0) for node in spilled)
        found.append(("Spilling", f"{format_size(size)} on disk, of {_count(len(spilled), 'node')}", _WARN, "objects"))
    return [{"title": title, "text": text, "level": level, "page": page} for title, text, level, page in found]


def _several(texts: Sequence[str]) -> str:
    return f"{texts[0]}; and {len(texts) - 1} more" if len(texts) > 1 else texts[0]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


# ------------------------------------------------------------ object sites
# The memory of stores by where its objects were created.


_UNKNOWN = "(not recorded)"
_ON_DISK = ("spilled", "both")


def object_rows(stores: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per object and node.

    Args:
        stores: as `ObjectInventory.list_stores` gives them.
    """
    return [
        {
            "id": one["id"],
            "node": store["node"],
            "size": one["size"],
            "state": one["state"],
            "copy": one["copy"],
            "owner": one["owner"],
            "refs": one["refs"],
            "borrowers": one["borrowers"],
            "pins": ", ".join(one["pins"]),
            "reads": one["reads"],
            "site": one["site"],
        }
        for store in stores
        for one in store["list"]
    ]


_ONE = ("id", "reads")
"""Fields that may differ between rows that are shown as one."""


def alike(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of objects that differ only in their ids as one, with their "count", and "bytes" of all of them."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(value for name, value in row.items() if name not in _ONE)
        one = found.setdefault(key, {**row, "count": 0, "bytes": 0})
        one["count"] += 1
        one["bytes"] += row["size"]
    return sorted(found.values(), key=lambda one: -one["bytes"])


def by_site(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per site of creation, or per owner where sites are not recorded; the largest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = (row["site"] or _UNKNOWN, "" if row["site"] else row["owner"])
        one = found.setdefault(
            key, {"site": key[0], "owner": key[1], "bytes": 0, "objects": 0, "pinned": 0, "on_disk": 0, "copies": 0}
        )
        one["bytes"] += row["size"]
        one["objects"] += 1
        one["pinned"] += row["size"] if row["pins"] else 0
        one["on_disk"] += row["size"] if row["state"] in _ON_DISK else 0
        one["copies"] += 1 if row["copy"] else 0
    return sorted(found.values(), key=lambda one: -one["bytes"])


# ------------------------------------------------------------ stacks and files that are alike


_HOW_LONG = re.compile(r" for [\d.]+ s\b")
_PROCESS = re.compile(r"  process (?P<name>\S+) \((?P<what>.*?), pid (?P<pid>\d+)(?P<state>.*)\)$")


def fold_stacks(lines: Iterable[str]) -> list[str]:
    """The lines of `show_stacks`, where processes of a node that stand at the same place are one entry."""
    folded: list[str] = []
    found: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}  # of this node: who is alike, and the lines below

    def flush() -> None:
        for who, body in found.values():
            others = [f"{one['name']} (pid {one['pid']})" for one in map(_PROCESS.match, who[1:]) if one]
            folded.extend([f"{who[0]}, and {len(others)} alike: {', '.join(others)}" if others else who[0], *body])
        found.clear()

    head, body = "", list[str]()
    for line in [*lines, ""]:
        if head and not line.startswith("    "):
            known = _PROCESS.match(head)
            kind = (known["what"], known["state"]) if known else (head,)
            who = found.setdefault((*kind, *(_HOW_LONG.sub("", one) for one in body)), ([], body))[0]
            who.append(head)
            head, body = "", []
        if line.startswith("    "):
            body.append(line)
        elif line.startswith("  "):
            head = line
        else:
            flush()
            folded += [line] if line else []
    return folded


def fold_empty(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """The files in which there is something, and a line about the others."""
    found = [row for row in rows if row["size"]]
    return found, f"{_count(len(rows) - len(found), 'more file')}: nothing printed" if len(found) < len(rows) else ""


# ------------------------------------------------------------ node scope
# Which nodes a question about single processes goes to: in a large job not all of them at once.


MOST_PROCESSES = 512
"""Processes that one question asks, at most; one node is asked however many it has."""


@dataclass(frozen=True)
class NodeScope:
    """The nodes that are asked. note: says so where that is not all that was wanted, else ""."""

    nodes: tuple[int, ...]
    note: str = ""


def choose_nodes(nodes: Sequence[NodeUse], wanted: str, most: int = MOST_PROCESSES) -> NodeScope:
    """Choose the nodes to ask.

    Args:
        nodes: those of the job.
        wanted: those that the user has named: "0-3,7"; "" for all.
        most: processes.

    Raises:
        ValueError: `wanted` cannot be read.
    """
    named = parse_nodes(wanted)
    alive = [node for node in nodes if not node.problem and (named is None or node.index in named)]
    chosen: list[int] = []
    processes = 0
    for node in alive:
        processes += sum(node.workers.values()) + 1
        if chosen and processes > most:
            break
        chosen.append(node.index)
    if len(chosen) == len(alive):
        return NodeScope(tuple(chosen))
    shown = f"{len(chosen)} of {len(alive)} nodes ({chosen[0]} to {chosen[-1]})"
    return NodeScope(tuple(chosen), f"{shown}: there are more processes than are asked at once; name the nodes")


def parse_nodes(text: str) -> set[int] | None:
    """The indices in a text such as "0-3,7"; None for "".

    Raises:
        ValueError: this is no such text.
    """
    if not text.strip():
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(first) > 6 or len(last) > 6:
            raise ValueError(f"{text!r} names no nodes; hint: 0-3,7")
        found.update(range(int(first), int(last or first) + 1))
    return found


# ------------------------------------------------------------ slurm state
# The job by Slurm: its limits, its nodes, whether it is requeued.


_TIMEOUT = 10.0  # seconds
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][\w:/]*)=(\S*)")
_FIELDS = (
    "JobState", "Reason", "Partition", "QOS", "Account", "NumNodes", "NumCPUs", "TRES", "TimeLimit", "RunTime",
    "StartTime", "EndTime", "PreemptTime", "Requeue", "Restarts", "NodeList", "Features", "Dependency", "WorkDir",
)  # fmt: skip


def job_facts(job_id: str) -> dict[str, Any]:
    """Ask Slurm's controller about a job. Returns "fields" (name, value), "nodes", "problem" ("" where it answers)."""
    if not job_id:
        return {"fields": [], "nodes": [], "problem": "this is no Slurm job"}
    if shutil.which("scontrol") is None:
        return {"fields": [], "nodes": [], "problem": "there is no scontrol on this machine"}
    try:
        known = dict(_FIELD.findall(_run("scontrol", "show", "job", "-o", job_id)))
        nodes = [parse_node(line) for line in _run("scontrol", "show", "node", "-o", known["NodeList"]).splitlines()]
    except (OSError, subprocess.SubprocessError, KeyError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        return {"fields": [], "nodes": [], "problem": f"Slurm does not answer: {said}"}
    return {
        "fields": [(name, known[name]) for name in _FIELDS if name in known],
        "nodes": [node for node in nodes if node["name"]],
        "problem": "",
    }


def parse_node(line: str) -> dict[str, str]:
    """Return "name", "state" and "reason" in a line of `scontrol show node -o`. The reason may have blanks."""
    known = dict(_FIELD.findall(line))
    reason = re.search(r"\sReason=(.*?)(?:\s\w+=|$)", line)
    return {
        "name": known.get("NodeName", ""),
        "state": known.get("State", ""),
        "reason": reason[1].strip() if reason else "",
    }


def _run(*command: str) -> str:
    done = run_command(command, _TIMEOUT)
    done.check_returncode()
    return done.stdout


# ------------------------------------------------------------ job totals
# A sample of a job as one row, whatever the number of its nodes; and the rows of its nodes.


_MOST_PROBLEMS = 20
_SUMMED = ("cores", "rss", "spilling", "restoring", "pulling", "pushing", "actors", "waiting")


def totals(use: JobUse) -> dict[str, Any]:
    """Return a sample of the job as one row: amounts added up, shares averaged, what hosts share counted once."""
    nodes = [node for node in use.nodes if not node.problem]
    found: dict[str, Any] = {name: sum(getattr(node, name) for node in nodes) for name in _SUMMED}
    workers: dict[str, int] = {}
    for node in nodes:
        add_counts(workers, node.workers)
    hosts = list({node.host: node for node in nodes}.values())
    # Two nodes of a host, or of a container, have the same memory, unless each has a limit of its own.
    limits = list({(node.host, node.memory[1]): node for node in nodes}.values())
    cpus = sum(node.cpu_count for node in hosts)
    return found | {
        "time": use.time,
        "cpu": sum(node.cpu * node.cpu_count for node in hosts) / cpus if cpus else 0.0,
        "cpu_count": cpus,
        "memory_used": sum(node.memory[0] for node in limits),
        "memory_limit": sum(node.memory[1] for node in limits),
        "receiving": sum(node.receiving for node in hosts),
        "sending": sum(node.sending for node in hosts),
        "store_used": sum(node.store["used"] for node in nodes),
        "store_capacity": sum(node.store["capacity"] for node in nodes),
        "on_disk": sum(node.store["on_disk"] for node in nodes),
        "objects": sum(node.store["objects"] for node in nodes),
        **_gpu_use([gpu for node in nodes for gpu in node.gpus]),
        "workers": workers,
        "resources": _resources(nodes),
        **{name: sum(getattr(one, name) for one in use.functions) for name in ("running", "queued", "ended", "failed")},
        "rate": sum(one.rate for one in use.functions),
    }


def node_states(nodes: Sequence[NodeUse]) -> dict[str, Any]:
    """How many nodes are alive, silent and dead, and what is wrong with the first of those that are not alive.

    Nodes that left in good order are none of them.
    """
    there = [node for node in nodes if not node.left]
    wrong = [node for node in there if node.problem]
    dead = sum(1 for node in wrong if node.problem.startswith("dead"))
    rows = [{"node": node.index, "host": node.host, "problem": node.problem} for node in wrong[:_MOST_PROBLEMS]]
    return {"alive": len(there) - len(wrong), "silent": len(wrong) - dead, "dead": dead, "problems": rows}


def by_place(nodes: Sequence[NodeUse]) -> list[NodeUse]:
    """Nodes of a switch one after the other, those whose place is not known last."""
    known = {node.node_id: node for node in nodes}
    return [known[ident] for ident in in_order([*known], {ident: node.place for ident, node in known.items()})]


def node_row(node: NodeUse) -> dict[str, Any]:
    """A row of the table of nodes."""
    return {
        "node": node.index,
        "host": node.host,
        "id": node.node_id,
        "state": node.problem or "alive",
        "place": " › ".join(node.place),
        "cpu": node.cpu,
        "cpu_count": node.cpu_count,
        "cores": node.cores,
        "memory_used": node.memory[0],
        "memory_limit": node.memory[1],
        "memory": node.memory[0] / node.memory[1] if node.memory[1] else 0.0,
        "rss": node.rss,
        "store_used": node.store.get("used", 0),
        "store_capacity": node.store.get("capacity", 0),
        "on_disk": node.store.get("on_disk", 0),
        "spilling": node.spilling,
        "restoring": node.restoring,
        "receiving": node.receiving,
        "sending": node.sending,
        "pulling": node.pulling,
        "pushing": node.pushing,
        "slowness": node.slowness,
        **_gpu_use(node.gpus),
        "workers": sum(node.workers.values()),
        "busy": node.workers.get("busy", 0),
        "actors": node.actors,
        "waiting": node.waiting,
        "latency": node.latency,
    }


def function_row(one: FunctionUse, whole: float) -> dict[str, Any]:
    """A row of the table of functions. whole: run time of all functions in seconds."""
    return {
        "name": one.name,
        "running": one.running,
        "queued": one.queued,
        "ended": one.ended,
        "failed": one.failed,
        "rate": one.rate,
        "seconds": one.total,
        "share": one.total / whole if whole else 0.0,
        "p50": one.p50,
        "p99": one.p99,
    }


def run_times(buckets: Mapping[int, int]) -> list[dict[str, Any]]:
    """How run times are distributed: rows "from", "to" in seconds and "runs"."""
    return [
        {"from": lower_bound(bucket), "to": upper_bound(bucket), "runs": buckets[bucket]} for bucket in sorted(buckets)
    ]


def _gpu_use(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The GPUs' number, their average share of time in use (None without one), and their memory in bytes."""
    return {
        "gpus": len(gpus),
        "gpu": sum(gpu["busy"] for gpu in gpus) / len(gpus) if gpus else None,
        "gpu_used": sum(gpu["used"] for gpu in gpus),
        "gpu_total": sum(gpu["total"] for gpu in gpus),
    }


def _resources(nodes: Sequence[NodeUse]) -> dict[str, list[float]]:
    """Return of each resource the used and the total amount, but for those of one node and the store's."""
    found: dict[str, list[float]] = {}
    for node in nodes:
        for name, (used, total) in node.resources.items():
            if not name.startswith("node:") and name != "object_store_memory":
                row = found.setdefault(name, [0.0, 0.0])
                row[0] += used
                row[1] += total
    return found


# ------------------------------------------------------------ job pages


_PATIENCE = 3.0
"""Seconds that processes and raylets may take to answer."""
_NODES_FRESH, _EVENTS_FRESH = 10.0, 1.0
"""Seconds after which nodes are listed again for other questions, and workers asked again what they have run."""
_HISTORY = 900
"""Samples that are kept for plots."""
_MOST_TASKS, _FEWEST_OF_WORKER = 20_000, 20
"""Ended tasks that a table is made of, and of one worker however many there are."""
_EVENTS_AT_ONCE = 5000
_MOST_OBJECTS, _FEWEST_OF_NODE = 5000, 20
_MOST_LINES, _SEARCHED, _LEAST_SEARCHED = 1000, 32 << 20, 32 << 10
"""Lines that a search returns; bytes of log files that it reads, and of one file however many there are."""
_MOST_FINDINGS = 1000
_MOST_STACKS = 5000
_LATER = 1e12
"""Sorts tasks that wait before those that have started."""
_LIVING = ("ALIVE", "PENDING", "RESTARTING")


class JobPages:
    """Gathers answers. Every method may take seconds, is called in any thread, and returns what JSON can hold.

    Args:
        process: it is in the job.
    """

    def __init__(self, process: CoreWorker) -> None:
        self._process = process
        self._live = LiveJob(process)
        self._sampling = threading.Lock()
        self._history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        self._last: JobUse | None = None
        self._timeline = TaskTimeline()
        self._timing = threading.Lock()
        self._read: dict[tuple[int, ...], float] = {}
        self._dead: tuple[int, list[dict[str, Any]]] = 0, []

    @property
    def ended(self) -> str:
        """Why there is no job any more; "" while there is one."""
        return self._process.dead or ""

    def about(self) -> dict[str, Any]:
        """Return which job this is: all that does not change."""
        session = read_session(self._process.place.session_dir)
        return {
            "program": " ".join(session.program.split()),
            "job": session.slurm_job or session.session,
            "slurm": session.slurm_job,
            "session": session.session,
            "host": session.host,
            "node": self._process.node,
            "started": session.started,
            "end": session.end,
            "sites": self._process.config.record_ref_creation_sites,
        }

    # ------------------------------------------------------------ figures

    def sample(self) -> JobUse:
        """Take a sample of the whole job, and remember its totals."""
        with self._sampling:
            self._last = use = self._live.sample()
            self._history.append(totals(use))
            return use

    def overview(self) -> dict[str, Any]:
        """The job as a whole, with a new sample, and the samples so far."""
        use = self.sample()
        status = self._process.gcs.call("status")
        whole = sum(one.total for one in use.functions)
        waiting = show_demand({**status, "waiting_actors": status["waiting_actors"][:50]}, [])[1:]
        return {
            "alerts": alerts(use, waiting, self._dead_actors(status["actors"].get("DEAD", 0))),
            "now": self._history[-1],
            "nodes": node_states(use.nodes),
            "rows": [node_row(node) for node in by_place(use.nodes)],
            "functions": [function_row(one, whole) for one in use.functions],
            "buckets": {one.name: one.buckets for one in use.functions},
            "partial": use.partial,
            "left": use.left,
            "took": use.took,
            "head": self._process.place.head,
            "actors": status["actors"],
            "waiting": waiting,
            "core_time": use.core_time,
            "cpu_time_beside": use.cpu_time_beside,
        }

    def _dead_actors(self, count: int) -> list[dict[str, Any]]:
        """The rows of dead actors: the head is asked where there are others than the last time."""
        if count != self._dead[0]:
            self._dead = count, [row for row in self.actors()["rows"] if row["state"] == "DEAD"]
        return self._dead[1]

    def history(self, since: float) -> list[dict[str, Any]]:
        """The samples after a Unix time."""
        return [row for row in list(self._history) if row["time"] > since]

    def node(self, index: int) -> dict[str, Any]:
        """One node: its figures, what has run there, its processes, GPUs, last lines of output."""
        use = self._live.functions_of(index)
        if not use.nodes:
            raise ValueError(f"there is no node {index}")
        (node,) = use.nodes
        whole = sum(one.total for one in use.functions)
        found = {
            **node_row(node),
            "resources": node.resources,
            "gpu_rows": node.gpus,
            "functions": [function_row(one, whole) for one in use.functions],
            "processes": [],
            "tail": [],
        }
        if not node.problem:
            found["processes"] = [_process_row(row) for row in self._live.processes(index)]
            found["tail"] = [{"pid": pid, "text": text} for pid, text in self._live.tail(index)]
        return found

    def function(self, buckets: dict[int, int]) -> list[dict[str, Any]]:
        """How the run times of a function are distributed: rows "from", "to" in seconds and "runs"."""
        return run_times(buckets)

    # ------------------------------------------------------------ tables

    def tasks(self, nodes: str) -> dict[str, Any]:
        """The tasks that wait, run and have ended, as far as workers remember them."""
        scope = self._scope(nodes)
        workers = sum(sum(one.workers.values()) for one in self._nodes() if one.index in scope.nodes)
        most = max(_FEWEST_OF_WORKER, _MOST_TASKS // max(1, workers))
        state = StateAggregator(self._process, _PATIENCE, {*scope.nodes, self._process.place.head})
        names = {row["NodeID"]: row["Index"] for row in self._process.gcs.nodes()}
        rows: list[dict[str, Any]] = [
            {
                "id": row.task_id,
                "attempt": row.attempt_number,
                "name": row.name,
                "state": row.state,
                "node": names.get(row.node_id or ""),
                "pid": row.worker_pid,
                "start": row.start_time_ms / 1000 if row.start_time_ms is not None else None,
                "seconds": _seconds(row.start_time_ms, row.end_time_ms),
                "type": row.type,
                "actor": row.actor_id,
                "error": row.error_type,
                "message": row.error_message,
                "resources": row.required_resources,
            }
            for row in state.tasks(most)
        ]
        rows.sort(key=lambda row: row["start"] or _LATER, reverse=True)
        return {"rows": rows, "note": _note(scope, state.missing, f"the last {most} ended tasks of each worker")}

    def actors(self) -> dict[str, Any]:
        """All actors that the head remembers, those that are alive first."""
        now = time.time()
        rows = [
            {
                "id": row["actor"].hex(),
                "class": row["class_name"],
                "name": row["name"] or "",
                "state": row["state"],
                "node": row["node"] if row["node"] >= 0 else None,
                "pid": row["pid"] or None,
                "worker": row["worker"].hex(),
                "restarts": row["restarts"],
                "namespace": row["namespace"],
                "detached": row["detached"],
                "resources": row["resources"],
                "reason": row["reason"] or "",
                "fault": row["state"] == "DEAD" and is_fault(row["reason"] or ""),
                "ended": now - row["dead_for"] if row["dead_for"] is not None else None,
            }
            for row in self._process.gcs.call("actors")
        ]
        rows.sort(key=lambda row: (row["state"] not in _LIVING, row["class"], row["id"]))
        return {"rows": rows, "note": ""}

    def pids(self, nodes: Sequence[int]) -> dict[str, int]:
        """The pids of the processes of some nodes."""
        found = ClusterQuery(self._process, _PATIENCE, nodes).nodes()
        return {one.proc.hex(): one.pid for node in found for one in node.processes}

    def objects(self, nodes: str) -> dict[str, Any]:
        """The largest objects of the stores, and the memory by site of creation."""
        scope = self._scope(nodes)
        most = max(_FEWEST_OF_NODE, _MOST_OBJECTS // max(1, len(scope.nodes)))
        stores = self._process.diagnostics.list_stores(most, _PATIENCE, scope.nodes)
        rows = object_rows(stores)
        missing = [f"node {store['node']}: {store['problem']}" for store in stores if store["problem"]]
        cut = any(store.get("objects", 0) > len(store["list"]) for store in stores)
        note = _note(scope, missing, f"the {most} largest objects of each node" if cut else "")
        return {"rows": alike(rows), "sites": by_site(rows), "note": note}

    def groups(self) -> dict[str, Any]:
        """All placement groups."""
        rows = [
            {
                "id": row["group"].hex(),
                "name": row["name"] or "",
                "state": row["state"],
                "strategy": row["strategy"],
                "count": len(row["bundles"]),
                "bundles": _bundles(row),
                "nodes": ", ".join(str(node) for node in sorted({node for node in row["nodes"] if node >= 0})[:50]),
                "attempts": row["attempts"],
                "detached": row["detached"],
                "scheduling": row["scheduling_state"],
            }
            for row in self._process.gcs.call("placement_groups")
        ]
        return {"rows": rows, "note": ""}

    # ------------------------------------------------------------ what happens

    def timeline(self, nodes: str, start: float, end: float, width: int, offset: int, rows: int) -> dict[str, Any]:
        """The tasks over time; see `TaskTimeline.view`."""
        scope = self._scope(nodes)
        with self._timing:
            if time.monotonic() - self._read.get(scope.nodes, 0.0) > _EVENTS_FRESH:
                self._read_events(scope)
                self._read = {scope.nodes: time.monotonic()}
            found = self._timeline.view(scope.nodes, start, end, width, offset, rows)
        return {**found, "note": scope.note}

    def stacks(self, nodes: str, everything: bool) -> dict[str, Any]:
        """The stacks of all threads and coroutines, as text and folded by what they run."""
        scope = self._scope(nodes)
        rows = stacks(ClusterQuery(self._process, _PATIENCE, scope.nodes))
        return {"lines": fold_stacks(show_stacks(rows, everything)), "note": scope.note}

    def profile(self, nodes: str, seconds: float, memory: bool) -> dict[str, Any]:
        """Sample the stacks of processes for some seconds, or the memory that they allocate and do not free."""
        scope = self._scope(nodes)
        request = ProfileRequest(seconds, memory=memory, nodes=scope.nodes)
        try:
            found = take_profile(self._process, request)
        except ProfileError as error:
            raise ValueError(str(error)) from None
        stacks = found.stacks()
        rows = [
            ([stack.label or "(driver)", *map(frame_name, stack.frames)], stack.value)
            for stack in stacks[:_MOST_STACKS]
        ]
        problems = [f"{one.title}: {one.problem}" for one in found.processes if one.problem]
        cut = (
            f"{len(stacks) - _MOST_STACKS} stacks with less than these are not shown"
            if len(stacks) > _MOST_STACKS
            else ""
        )
        rows += [([f"({what})"], seconds) for what, seconds in sorted(found.idle().items())]
        said = [*filter(None, (scope.note, cut)), *limits(found)]
        return {"unit": found.unit, "stacks": rows, "limits": said, "problems": problems[:20]}

    def waits(self, nodes: str) -> dict[str, Any]:
        """Return what waits for what."""
        scope = self._scope(nodes)
        search = WaitSearch(self._process, _PATIENCE, {*scope.nodes, self._process.place.head})
        return {**wait_graph(islice(search.explain_all(True), _MOST_FINDINGS)), "note": scope.note}

    # ------------------------------------------------------------ logs

    def log_files(self, nodes: str) -> dict[str, Any]:
        """The log files of nodes, with the process that writes each."""
        scope = self._scope(nodes)
        raylets = {raylet_of(node): node for node in scope.nodes}
        sizes = ClusterQuery(self._process, _PATIENCE).ask(raylets, "log_sizes")
        rows = [
            {"node": raylets[raylet], "name": name, "size": size}
            for raylet, files in sizes.items()
            for name, (size, _) in files.items()
        ]
        rows.sort(key=lambda row: (row["node"], row["name"]))
        missing = [f"node {node} does not answer" for raylet, node in raylets.items() if raylet not in sizes]
        return {"rows": rows, "note": _note(scope, missing)}

    def log_piece(self, node: int, name: str, start: int) -> dict[str, Any]:
        """A piece of a log file from a byte on; a negative one counts from the end."""
        try:
            begin, data, size = LogReader(self._process, _PATIENCE).piece(node, name, start)
        except LogError as error:
            raise ValueError(str(error)) from None
        return {"start": begin, "end": begin + len(data), "size": size, "text": data.decode(errors="replace")}

    def log_search(self, nodes: str, pattern: str, task: str, actor: str) -> dict[str, Any]:
        """The lines of workers that contain a regular expression, and are of a function or actor."""
        scope = self._scope(nodes)
        try:
            wanted = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        files = max(1, len(self.log_files(nodes)["rows"]))
        tail = max(_LEAST_SEARCHED, _SEARCHED // files)
        found = WorkerLines(self._process, _PATIENCE).read(LineFilter(scope.nodes, task, actor, wanted, tail))
        lines = deque(found, maxlen=_MOST_LINES + 1)
        note = f"the last {tail >> 10} KiB of each of {files} files"
        note += f"; only the last {_MOST_LINES} lines are shown" if len(lines) > _MOST_LINES else ""
        shown = [asdict(line) for line in list(lines)[-_MOST_LINES:]]
        return {"lines": shown, "note": _note(scope, [], note)}

    # ------------------------------------------------------------ Slurm, actions

    def slurm(self) -> dict[str, Any]:
        """The job's limits, drain and requeue, by Slurm and by the head."""
        session, run = read_session(self._process.place.session_dir), self._process.place.run
        status = self._process.gcs.call("status")
        return {
            **job_facts(session.slurm_job),
            "job": session.slurm_job,
            "end": session.end or None,
            "drain_at": run.drain_at or None,
            "restarts": run.restarts,
            "checkpoints": run.checkpoints,
            "draining": status["draining"],
            "autoscaler": status["autoscaler"],
            "dead_nodes": status["dead_nodes"][:100],
        }

    def kill_actor(self, actor: str) -> str:
        """Kill an actor for good."""
        ident = bytes.fromhex(actor)
        if not any(row["actor"] == ident for row in self._process.gcs.call("actors")):
            raise ValueError(f"there is no actor {actor}")
        with self._process.engine.lock:
            self._process.engine.send(HEAD, m.KillActor(ident, True, "it was killed from the dashboard."))
            self._process.engine.flush()
        return f"actor {actor} is being killed"

    # ------------------------------------------------------------ inside

    def _nodes(self) -> Sequence[NodeUse]:
        """The nodes as of the last sample; of a new one where that is old."""
        last = self._last
        return (last if last is not None and time.time() - last.time < _NODES_FRESH else self.sample()).nodes

    def _scope(self, wanted: str) -> NodeScope:
        found = choose_nodes(self._nodes(), wanted)
        named = parse_nodes(wanted)
        if not found.nodes and named is None:
            raise ConnectionError("no node of the job answers")
        return found

    def _read_events(self, scope: NodeScope) -> None:
        """Ask the workers for the tasks that have ended since they were last asked."""
        nodes = ClusterQuery(self._process, _PATIENCE, scope.nodes).nodes()
        people = {
            one.proc: one
            for node in nodes
            for one in node.processes
            if one.kind == "worker" and one.state != "starting"
        }
        questions = {
            proc: partial(
                m.Introspect,
                what="events",
                args=msgspec.msgpack.encode((_EVENTS_AT_ONCE, self._timeline.seen(proc), False)),
            )
            for proc in people
        }
        for proc, answer in self._process.gcs.ask_many(questions, _PATIENCE).items():
            self._timeline.add(proc, people[proc].node, people[proc].actor_class, answer)
        for node in nodes:
            self._timeline.retain(node.index, {one.proc for one in node.processes})


def _seconds(start: int | None, end: int | None) -> float | None:
    """How long a task has run, in seconds; None before it does."""
    if start is None:
        return None
    return max(0.0, (end / 1000 if end is not None else time.time()) - start / 1000)


def _process_row(row: dict[str, Any]) -> dict[str, Any]:
    calls = row["calls"]
    return {
        "process": show_proc(row["proc"]),
        "proc": row["proc"].hex(),
        "pid": row["pid"],
        "kind": row["kind"],
        "state": row["state"],
        "actor": row["actor"].hex(),
        "class": row["class"],
        "cpu": row["cpu"],
        "rss": row["rss"],
        "runs": ", ".join(f"{call['name']} for {call['seconds']:.1f} s" for call in calls or ()),
        "answers": calls is not None,
    }


def _bundles(group: dict[str, Any]) -> str:
    """The kinds of bundles of a group and how many there are of each."""
    kinds: dict[str, int] = {}
    for amounts in group["bundles"]:
        text = ", ".join(f"{name}: {amount:g}" for name, amount in sorted(amounts.items()))
        kinds[text] = kinds.get(text, 0) + 1
    return "; ".join(f"{count} x {{{text}}}" for text, count in kinds.items())


def _note(scope: NodeScope, missing: Sequence[str], more: str = "") -> str:
    """Return the line below a table that may not be complete."""
    gone = f"not complete: {'; '.join(missing[:3])}" if missing else ""
    gone += f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return ". ".join(filter(None, (scope.note, more, gone)))


# ------------------------------------------------------------ a job that has ended


_SAMPLES, _MOST_READ, _FEWEST_SAMPLES = 300, 30_000, 20
"""Moments that plots of an ended job show: of few nodes; figures of nodes that are read for that; and of many nodes."""
_MOST_WORKERS = 1024
_RUNS_NO_MORE = "the job has ended"


class EndedJobPages:
    """The same answers about a job that has ended, from its history: a page of what that does not have says so.

    Args:
        history: of the job. result: how it has ended.
    """

    def __init__(self, history: JobHistory, result: Outcome) -> None:
        self._history, self._result = history, result
        self._ids = {row["node"]: str(row.get("id", "")) for row in history.known_nodes if "node" in row}
        self._timing = threading.Lock()

    @property
    def ended(self) -> str:
        """Its questions are answered for as long as one asks: ""."""
        return ""

    def about(self) -> dict[str, Any]:
        """Return which job this was, and "outcome": how it has ended, and as of when it is shown."""
        history, result = self._history, self._result
        return {
            "program": history.program, "job": history.run.job,
            "slurm": history.run.job if result.slurm is not None else "", "session": history.run.name,
            "host": history.head.began.host if history.head.began is not None else "", "node": history.head.number,
            "started": history.started, "end": 0.0, "sites": True,
            "outcome": f"{result.state}: {result.cause}. As of {clock(history.last)}, from its history.",
        }  # fmt: skip

    # ------------------------------------------------------------ figures

    @cached_property
    def _samples(self) -> list[dict[str, Any]]:
        """Totals of the job over time."""
        history, nodes = self._history, [node for node in self._history.nodes.values() if node.figures]
        if not nodes:
            return []
        count = min(_SAMPLES, max(_FEWEST_SAMPLES, _MOST_READ // len(nodes)))
        first = min(node.figures[0][0] for node in nodes)
        seconds = max(1e-3, history.last - first) / count
        ends = [row.end for row in history.tasks]
        noted = history.seen / len(ends) if ends else 0.0
        found, before = [], 0
        for at in (first + number * seconds for number in range(count + 1)):
            place = bisect_right(ends, at)
            row = totals(self._use(at, [use for node in nodes if (use := self._node_use(node, at)) is not None], []))
            found.append({**row, "rate": (place - before) * noted / seconds})
            before = place
        return found

    def overview(self) -> dict[str, Any]:
        """The job as it was heard of last."""
        history = self._history
        nodes = [self._last_use(node) for _, node in sorted(history.nodes.items())]
        use = self._use(history.last, nodes, self._functions(history.functions(), None))
        whole = sum(one.total for one in use.functions)
        actors: dict[str, int] = {}
        for row in history.actors.values():
            actors[row["state"]] = actors.get(row["state"], 0) + 1
        lost = [node for node in history.nodes.values() if node.lost]
        problems = [
            {"node": node.number, "host": self._host(node), "problem": f"dead: {node.lost}"}
            for node in lost[:_MOST_PROBLEMS]
        ]
        dead_actors = [row for row in self.actors()["rows"] if row["state"] == "DEAD"]
        return {
            "alerts": alerts(use, (), dead_actors), "now": {**totals(use), "rate": 0.0},
            "nodes": {"alive": len(nodes) - len(lost), "silent": 0, "dead": len(lost), "problems": problems},
            "rows": [{**node_row(one), "state": self._state(history.nodes[one.index])} for one in nodes],
            "functions": [function_row(one, whole) for one in use.functions],
            "buckets": {one.name: one.buckets for one in use.functions}, "partial": history.partial, "left": None,
            "took": 0.0, "head": history.head.number, "actors": actors,
            **dict(zip(("core_time", "cpu_time_beside"), history.core_time(), strict=True)),
            "waiting": ["  " * depth + text for depth, text in explain(history, self._result)],
        }  # fmt: skip

    def history(self, since: float) -> list[dict[str, Any]]:
        """The samples after a Unix time."""
        return [row for row in self._samples if row["time"] > since]

    def node(self, index: int) -> dict[str, Any]:
        """One node as it was heard of last: figures, what has run there, processes, last lines of its raylet."""
        history = self._history
        part = history.nodes.get(index)
        if part is None:
            raise ValueError(f"there is no node {index}")
        use = self._last_use(part)
        functions = self._functions(part.functions, index)
        whole = sum(one.total for one in functions)
        runs: dict[bytes, list[str]] = {}
        for process, _, name, since in history.running():
            runs.setdefault(process.proc, []).append(f"{name} for {history.last - since:.1f} s")
        return {
            **node_row(use),
            "state": self._state(part), "resources": use.resources, "gpu_rows": use.gpus,
            "functions": [function_row(one, whole) for one in functions],
            "processes": [
                {
                    "process": show_proc(one.proc), "proc": one.proc.hex(), "pid": one.pid, "kind": one.kind,
                    "state": f"{one.exit or 'ended'} at {clock(one.gone)}" if one.gone else "no word about its end",
                    "actor": one.actor.hex(), "class": history.actors.get(one.actor, {}).get("class_name", ""),
                    "cpu": None, "rss": None, "runs": ", ".join(runs.get(one.proc, ())), "answers": True,
                }
                for one in history.processes.values()
                if one.node == index
            ],
            "tail": [
                {"pid": part.began.pid if part.began is not None else 0, "text": f"{clock(line.at)} {line.text}"}
                for number, line in history.lines
                if number == index
            ][-50:],
        }  # fmt: skip

    def function(self, buckets: dict[int, int]) -> list[dict[str, Any]]:
        """How the run times of a function are distributed: rows "from", "to" in seconds and "runs"."""
        return run_times(buckets)

    # ------------------------------------------------------------ tables

    def tasks(self, nodes: str) -> dict[str, Any]:
        """The tasks that ran when it was heard of last, and those that have ended, as far as they were noted."""
        history, wanted = self._history, parse_nodes(nodes)
        errors = {error.task: error for error in history.errors}
        rows: list[dict[str, Any]] = [
            _task_row(task, name, "RUNNING", process.node, process.pid, since, history.last - since, process.actor)
            for process, task, name, since in history.running()
            if wanted is None or process.node in wanted
        ]
        known = [row for row in history.tasks if wanted is None or row.node in wanted]
        failed = [row for row in known if row.failed]
        others = [row for row in known if not row.failed]
        for one in [*failed[-_MOST_TASKS // 2 :], *others[-_MOST_TASKS // 2 :]]:
            state, error = "FAILED" if one.failed else "FINISHED", errors.get(one.id) if one.failed else None
            row = _task_row(one.id, one.name, state, one.node, one.pid, one.start, one.end - one.start, one.actor)
            rows.append({**row, "error": error.kind, "message": error.text} if error is not None else row)
        rows.sort(key=lambda row: row["start"], reverse=True)
        some = f"{len(rows)} of {history.seen + len(rows) - len(known)} tasks were noted or are shown"
        return {"rows": rows, "note": some if history.seen > len(known) or len(known) > _MOST_TASKS // 2 else ""}

    def actors(self) -> dict[str, Any]:
        """All actors, as the head had them last."""
        rows = [
            {
                "id": ident.hex(), "class": row.get("class_name", ""), "name": row.get("name") or "",
                "state": row.get("state", ""),
                "node": row["node"] if (row.get("node") or 0) >= 0 and row.get("pid") else None,
                "pid": row.get("pid") or None,
                "worker": row["worker"].hex() if isinstance(row.get("worker"), bytes) else "",
                "restarts": row.get("restarts", 0), "namespace": "", "detached": row.get("detached", False),
                "resources": {}, "reason": row.get("reason") or "", "ended": None,
                "fault": row.get("state") == "DEAD" and is_fault(row.get("reason") or ""),
            }
            for ident, row in self._history.actors.items()
        ]  # fmt: skip
        rows.sort(key=lambda row: (row["state"] not in _LIVING, row["class"], row["id"]))
        return {"rows": rows, "note": ""}

    def pids(self, nodes: Sequence[int]) -> dict[str, int]:
        """The pids of the processes of some nodes."""
        return {one.proc.hex(): one.pid for one in self._history.processes.values() if one.node in nodes}

    def objects(self, nodes: str) -> dict[str, Any]:
        """No objects: a history has not which there were."""
        return {"rows": [], "sites": [], "note": "A history has no objects, but how full the stores were: see Nodes."}

    def groups(self) -> dict[str, Any]:
        """All placement groups, as the head had them last."""
        rows = [
            {
                "id": ident.hex(), "name": row.get("name") or "", "state": row.get("state", ""),
                "strategy": row.get("strategy", ""), "count": len(row.get("bundles", ())),
                "bundles": _bundles({"bundles": row.get("bundles", ())}),
                "nodes": ", ".join(map(str, sorted({node for node in row.get("nodes", ()) if node >= 0})[:50])),
                "attempts": None, "detached": None, "scheduling": "",
            }
            for ident, row in self._history.groups.items()
        ]  # fmt: skip
        return {"rows": rows, "note": ""}

    # ------------------------------------------------------------ what happened

    def timeline(self, nodes: str, start: float, end: float, width: int, offset: int, rows: int) -> dict[str, Any]:
        """The tasks over time; see `TaskTimeline.view`."""
        history, wanted = self._history, parse_nodes(nodes)
        chosen = [node for node in history.nodes if wanted is None or node in wanted]
        with self._timing:
            kept, processes = self._timeline
            found = kept.view(chosen, start, end, width, offset, rows)
        note = f"the first {_MOST_WORKERS} of {processes} processes. " if processes > _MOST_WORKERS else ""
        if history.seen > len(history.tasks):
            note += f"{len(history.tasks)} of {history.seen} tasks were noted: gaps may be tasks that were not."
        return {**found, "note": note}

    @cached_property
    def _timeline(self) -> tuple[TaskTimeline, int]:
        return timeline_of(self._history, _MOST_WORKERS)

    def stacks(self, nodes: str, everything: bool) -> dict[str, Any]:
        """No stacks, but what ran when it was heard of last."""
        history, wanted = self._history, parse_nodes(nodes)
        lines = [
            f"node {process.node}, pid {process.pid}: {name} {task.hex()} for {history.last - since:.1f} s"
            for process, task, name, since in history.running()
            if wanted is None or process.node in wanted
        ]
        return {"lines": lines, "note": f"A history has no stacks. This ran at {clock(history.last)}."}

    def profile(self, nodes: str, seconds: float, memory: bool) -> dict[str, Any]:
        """Refuse: nothing runs."""
        raise ValueError(f"{_RUNS_NO_MORE}: nothing can be sampled")

    def waits(self, nodes: str) -> dict[str, Any]:
        """Return why it has ended, in the form of waits."""
        lines = explain(self._history, self._result)
        return {**wait_graph(WaitReason(depth, text) for depth, text in lines), "note": ""}

    # ------------------------------------------------------------ logs

    @cached_property
    def _logs(self) -> dict[str, tuple[int, Path]]:
        """The log files that are visible here: node and path by name."""
        found: dict[str, tuple[int, Path]] = {}
        for folder in self._history.files():
            for path in sorted((*Path(folder).glob("*.out"), *Path(folder).glob("*.err"))):
                writer = parse_worker_log_name(path.name)
                if writer is not None:
                    found.setdefault(path.name, (node_of(writer[0]), path))
        return found

    def log_files(self, nodes: str) -> dict[str, Any]:
        """The log files of workers that stay, where HPCRAY_LOG_DIR has kept them."""
        wanted, rows = parse_nodes(nodes), []
        for name, (node, path) in self._logs.items():
            if wanted is None or node in wanted:
                with contextlib.suppress(OSError):
                    rows.append({"node": node, "name": name, "size": path.stat().st_size})
        rows.sort(key=lambda row: (row["node"], row["name"]))
        return {"rows": rows, "note": "" if rows else "No log files stayed, or none is visible here: HPCRAY_LOG_DIR."}

    def log_piece(self, node: int, name: str, start: int) -> dict[str, Any]:
        """A piece of a log file from a byte on; a negative one counts from the end."""
        data, size, begin = self._read(name, start)
        return {"start": begin, "end": begin + len(data), "size": size, "text": data.decode(errors="replace")}

    def log_search(self, nodes: str, pattern: str, task: str, actor: str) -> dict[str, Any]:
        """The lines of workers that contain a regular expression; of which function a line is was not kept."""
        try:
            wanted = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        files = self.log_files(nodes)["rows"]
        tail = max(_LEAST_SEARCHED, _SEARCHED // max(1, len(files)))
        lines: deque[dict[str, Any]] = deque(maxlen=_MOST_LINES)
        for row in files:
            _, pid, is_error = parse_worker_log_name(row["name"]) or (b"", 0, False)
            for text in self._read(row["name"], -tail, tail)[0].decode(errors="replace").splitlines():
                if wanted.search(text):
                    lines.append({"text": text, "who": "", "pid": pid, "node": row["node"], "error": is_error})
        note = f"the last {tail >> 10} KiB of each of {len(files)} files, at most {_MOST_LINES} lines"
        return {
            "lines": list(lines),
            "note": f"{note}; functions and actors are not told apart" if task or actor else note,
        }

    def _read(self, name: str, start: int, most: int = 64 << 10) -> tuple[bytes, int, int]:
        """Bytes of a log file, its size, and where they begin."""
        if name not in self._logs:
            raise ValueError(f"there is no log file {name!r}")
        try:
            with self._logs[name][1].open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                begin = max(0, size + start) if start < 0 else min(start, size)
                file.seek(begin)
                return file.read(most), size, begin
        except OSError as error:
            raise ValueError(f"{name}: {error.strerror or error}") from None

    # ------------------------------------------------------------ Slurm, actions

    def slurm(self) -> dict[str, Any]:
        """The word of Slurm on the job."""
        said, run = self._result.slurm, self._history.run
        lost = [node for node in self._history.nodes.values() if node.lost]
        return {
            "fields": [("State", said.state), *said.facts.items()] if said is not None else [], "nodes": [],
            "problem": "" if said is not None else "Slurm is not here, or does not know this job",
            "job": run.job if said is not None else "", "end": None, "drain_at": None, "restarts": 0,
            "checkpoints": "", "draining": {}, "autoscaler": None,
            "dead_nodes": [{"index": node.number, "reason": node.lost} for node in lost[:100]],
        }  # fmt: skip

    def kill_actor(self, actor: str) -> str:
        """Refuse: nothing runs."""
        raise ValueError(f"{_RUNS_NO_MORE}: there is no actor {actor}")

    # ------------------------------------------------------------ inside

    def _host(self, node: NodePart) -> str:
        return node.began.host if node.began is not None else ""

    def _state(self, node: NodePart) -> str:
        if node.lost:
            return f"dead: {node.lost}"
        return "ended" if node.ended is not None else f"silent since {clock(node.last)}" if node.last else "not known"

    def _use(self, at: float, nodes: list[NodeUse], functions: list[FunctionUse]) -> JobUse:
        history = self._history
        return JobUse(at, 0.0, nodes, functions, history.partial, history.program, history.run.job, None)

    def _last_use(self, node: NodePart) -> NodeUse:
        found = self._node_use(node, self._history.last)
        if found is None:
            found = NodeUse(node.number, self._host(node), self._ids.get(node.number, ""), "no figures")
        return found

    def _node_use(self, node: NodePart, at: float) -> NodeUse | None:
        """The use of a node at a moment; None before its first figures, or where they are of another version."""
        place = bisect_right(node.figures, at, key=itemgetter(0))
        if not place:
            return None
        ident = self._ids.get(node.number, "")
        listed = {"Index": node.number, "NodeManagerHostname": self._host(node), "NodeID": ident, "Labels": {}}
        rows = [{**row, "time": time} for time, row in node.figures[max(0, place - 2) : place]]
        before = NodeUse(node.number, "", "", row=rows[0]) if len(rows) > 1 else None
        try:
            use = node_use(listed, rows[-1], before, None)
            use.store = {"objects": 0, **use.store}
            return use
        except (KeyError, TypeError, AttributeError):
            return None

    def _functions(self, rows: Mapping[str, FunctionRow], node: int | None) -> list[FunctionUse]:
        """The functions of one node or of all that have run or ran; those that took most time first."""
        history = self._history
        found = {
            name: FunctionUse(
                name, 0, 0, row[0], row[1], 0.0, row[2] / 1e6, quantile(row, 0.5), quantile(row, 0.99), row[3]
            )
            for name, row in rows.items()
        }
        for process, _, name, since in history.running():
            if node is None or process.node == node:
                one = found.setdefault(name, FunctionUse(name))
                one.running, one.elapsed = one.running + 1, one.elapsed + max(0.0, history.last - since)
        for name, count in (history.queued() if node is None else {}).items():
            found.setdefault(name, FunctionUse(name)).queued = count
        return sorted(found.values(), key=lambda one: (-one.total, -one.running, -one.queued, one.name))


def _task_row(
    task: bytes, name: str, state: str, node: int, pid: int, start: float, seconds: float, actor: bytes
) -> dict[str, Any]:
    return {
        "id": task.hex(), "attempt": None, "name": name, "state": state, "node": node, "pid": pid, "start": start,
        "seconds": max(0.0, seconds), "type": "ACTOR_TASK" if actor else "NORMAL_TASK", "actor": actor.hex() or None,
        "error": None, "message": None, "resources": None,
    }  # fmt: skip
