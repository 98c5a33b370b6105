"""The answers to the questions of a dashboard's pages, gathered from a running job as plain data."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import msgspec

from hpcray.common.figures import lower_bound, upper_bound
from hpcray.common.ids import HEAD, raylet_of, show_proc
from hpcray.dashboard import job_totals
from hpcray.dashboard.node_scope import NodeScope, choose_nodes, parse_nodes
from hpcray.dashboard.object_sites import by_site, object_rows
from hpcray.dashboard.slurm_state import job_facts
from hpcray.dashboard.task_timeline import TaskTimeline
from hpcray.dashboard.wait_edges import wait_graph
from hpcray.diagnostics.cluster_query import ClusterQuery, stacks
from hpcray.diagnostics.wait_graph import WaitGraph
from hpcray.platform.session_directory import read_session
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.aggregator import StateAggregator
from hpcray.state.job_view import LiveJob
from hpcray.state.logs import LogError, LogReader
from hpcray.state.overview import JobUse, NodeUse
from hpcray.state.profile import ProfileError, ProfileRequest, limits, take_profile
from hpcray.state.profile_files import frame_name
from hpcray.state.reports import show_demand, show_stacks
from hpcray.state.worker_lines import LineFilter, WorkerLines

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

    @property
    def ended(self) -> str:
        """Why there is no job any more; "" while there is one."""
        return self._process.dead or ""

    def about(self) -> dict[str, Any]:
        """Return which job this is: all that does not change."""
        session = read_session(self._process.session_dir)
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
            self._history.append(job_totals.totals(use))
            return use

    def overview(self) -> dict[str, Any]:
        """The job as a whole, with a new sample, and the samples so far."""
        use = self.sample()
        status = self._process.gcs.call("status")
        whole = sum(one.total for one in use.functions)
        return {
            "now": self._history[-1],
            "nodes": job_totals.node_states(use.nodes),
            "rows": [job_totals.node_row(node) for node in use.nodes],
            "functions": [job_totals.function_row(one, whole) for one in use.functions],
            "buckets": {one.name: one.buckets for one in use.functions},
            "partial": use.partial,
            "left": use.left,
            "took": use.took,
            "head": self._process.head,
            "actors": status["actors"],
            "waiting": show_demand({**status, "waiting_actors": status["waiting_actors"][:50]}, [])[1:],
        }

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
            **job_totals.node_row(node),
            "resources": node.resources,
            "gpu_rows": node.gpus,
            "functions": [job_totals.function_row(one, whole) for one in use.functions],
            "processes": [],
            "tail": [],
        }
        if not node.problem:
            found["processes"] = [_process_row(row) for row in self._live.processes(index)]
            found["tail"] = [{"pid": pid, "text": text} for pid, text in self._live.tail(index)]
        return found

    def function(self, buckets: dict[int, int]) -> list[dict[str, Any]]:
        """How the run times of a function are distributed: rows "from", "to" in seconds and "runs"."""
        return [
            {"from": lower_bound(bucket), "to": upper_bound(bucket), "runs": buckets[bucket]}
            for bucket in sorted(buckets)
        ]

    # ------------------------------------------------------------ tables

    def tasks(self, nodes: str) -> dict[str, Any]:
        """The tasks that wait, run and have ended, as far as workers remember them."""
        scope = self._scope(nodes)
        workers = sum(sum(one.workers.values()) for one in self._nodes() if one.index in scope.nodes)
        most = max(_FEWEST_OF_WORKER, _MOST_TASKS // max(1, workers))
        state = StateAggregator(self._process, _PATIENCE, {*scope.nodes, self._process.head})
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
        rows.sort(key=lambda row: -row["size"])
        missing = [f"node {store['node']}: {store['problem']}" for store in stores if store["problem"]]
        cut = any(store.get("objects", 0) > len(store["list"]) for store in stores)
        note = _note(scope, missing, f"the {most} largest objects of each node" if cut else "")
        return {"rows": rows, "sites": by_site(rows), "note": note}

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
        return {"lines": list(show_stacks(rows, everything)), "note": scope.note}

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
        graph = WaitGraph(self._process, _PATIENCE, {*scope.nodes, self._process.head})
        return {**wait_graph(islice(graph.explain_all(True), _MOST_FINDINGS)), "note": scope.note}

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
        session, run = read_session(self._process.session_dir), self._process.run
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
