"""Queries to all processes of the job at once, over the job's own connections."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import msgspec

from hpcray.common.ids import raylet_of, show_proc
from hpcray.platform.process_tree import describe_process
from hpcray.platform.session_directory import read_session
from hpcray.protocol import messages as m
from hpcray.runtime.core_worker.core_worker import CoreWorker

QUERY_TIMEOUT = 2.0
"""Seconds after which the kernel is asked about a process that has not answered."""
ATTACHED = "attached"
PAUSED_THREADS = "HPCRAY_PAUSED_"
"""Before the keys, beside those of breakpoints, of threads that wait in a debugger of another kind."""


class ProcessInfo(msgspec.Struct):
    """One process of the job.

    Attributes:
        proc: its proc id. pid, kind: "raylet", "driver", "attached", "worker", "template". node, host: where it is.
        state: of a worker: "idle", "busy", "starting", "leaving". actor, actor_class: what it is.
        started_ms: when it started, in milliseconds since 1970; None where it is just starting, or has ended.
    """

    proc: bytes
    pid: int
    kind: str
    node: int
    host: str
    state: str = ""
    actor: bytes = b""
    actor_class: str = ""
    started_ms: int | None = None

    @property
    def title(self) -> str:
        """`process 0.3 (worker, pid 123)`."""
        what = f"actor {self.actor_class}" if self.actor_class else self.kind
        return f"{show_proc(self.proc)} ({what}, pid {self.pid})"


class ClusterRoster(msgspec.Struct):
    """One node and who is on it.

    Attributes:
        problem: why nothing is known of them, "" when something is.
        ended, ended_drivers: a row for each of its last workers, and drivers, that have ended.
        preloaded: modules that its workers have from the fork server, and why it could not import them; "" if it has.
    """

    index: int
    node_id: str
    host: str
    address: str
    alive: bool
    problem: str = ""
    template: int = 0
    processes: list[ProcessInfo] = msgspec.field(default_factory=list)
    ended: list[dict[str, Any]] = msgspec.field(default_factory=list)
    ended_drivers: list[dict[str, Any]] = msgspec.field(default_factory=list)
    preloaded: dict[str, str] = msgspec.field(default_factory=dict)


class ClusterQuery:
    """Queries on behalf of one process.

    Args:
        process: who asks; it is left out of what it finds unless it is a driver or worker.
        patience: seconds that those who are asked may take.
        only: the nodes that `nodes` and `processes` list; None: all of them.

    Attributes:
        gone: processes that had ended, or ended instead of answering.
    """

    def __init__(
        self, process: CoreWorker, patience: float = QUERY_TIMEOUT, only: Collection[int] | None = None
    ) -> None:
        self._process = process
        self.patience = patience
        self._only = only
        self.gone: set[bytes] = set()

    def ask(self, procs: Iterable[bytes], what: str, *args: Any) -> dict[bytes, Any]:
        """The answers of those that gave one within `patience` seconds. We ourselves answer at once."""
        packed = msgspec.msgpack.encode(args)
        procs = list(procs)
        others = {proc: partial(m.Introspect, what=what, args=packed) for proc in procs if proc != self._process.me}
        found = self._process.gcs.ask_many(others, self.patience, self.gone) if others else {}
        if self._process.me in procs:
            with self._process.engine.lock:
                found[self._process.me] = self._process.diagnostics.introspect(what, args)
        return found

    def nodes(self) -> list[ClusterRoster]:
        """Every node, dead ones too, and who is on it."""
        rows = [row for row in self._process.gcs.nodes() if self._only is None or row["Index"] in self._only]
        nodes = [
            ClusterRoster(
                row["Index"], row["NodeID"], row["NodeManagerHostname"], row["NodeManagerAddress"], row["Alive"]
            )
            for row in rows
        ]
        answers = self.ask([raylet_of(node.index) for node in nodes if node.alive], "node")
        for node, row in zip(nodes, rows, strict=True):
            answer = answers.get(raylet_of(node.index))
            if not node.alive:
                node.problem = f"dead: {row['DeathReason'] or 'no reason is known'}"
            elif answer is None:
                node.problem = (
                    f"its raylet did not answer within {self.patience:g} s{self._own_raylet_state(node.index)}"
                )
            else:
                node.template = answer["template"]
                node.ended, node.ended_drivers = answer["ended"], answer["ended_drivers"]
                node.preloaded = answer["preloaded"]
                node.processes = [
                    ProcessInfo(answer["proc"], answer["pid"], "raylet", node.index, node.host),
                    *(self._process_info(node, row) for row in answer["processes"]),
                ]
        return nodes

    def processes(self) -> list[ProcessInfo]:
        """Return all processes known, without this one if it is attached only to ask."""
        return [
            one
            for node in self.nodes()
            for one in node.processes
            if one.proc != self._process.me or self._process.place.kind != ATTACHED
        ]

    def kernel_state(self, silent: Iterable[ProcessInfo]) -> dict[bytes, dict[str, Any]]:
        """Return the kernel's view of processes that do not answer: from their raylets, or from here for this node."""
        by_node: dict[int, list[ProcessInfo]] = {}
        for one in silent:
            by_node.setdefault(one.node, []).append(one)
        found: dict[bytes, dict[str, Any]] = {}
        for node, people in by_node.items():
            answer = self.ask([raylet_of(node)], "os", [one.pid for one in people]).get(raylet_of(node))
            if answer is None and node == self._process.node:
                answer = {one.pid: describe_process(one.pid) for one in people}  # its raylet is mute too
            found |= {one.proc: (answer or {}).get(one.pid, {}) for one in people}
        return found

    def _process_info(self, node: ClusterRoster, row: Mapping[str, Any]) -> ProcessInfo:
        return ProcessInfo(
            row["proc"], row["pid"], row["kind"], node.index, node.host, row["state"], row["actor"], row["class"],
            row.get("started_ms"),
        )  # fmt: skip

    def _own_raylet_state(self, node: int) -> str:
        if node != self._process.node:
            return ""
        pid = read_session(self._process.place.session_dir).pid
        return f"; the kernel says of pid {pid}: {show_kernel(describe_process(pid))}"


def show_kernel(found: Mapping[str, Any]) -> str:
    """Render what `describe_process` found."""
    if "state" not in found:
        return "there is no such process"
    where = f", waits in {found['wchan']}" if found["wchan"] else ""
    return f"{found['state']}{where}, {found['threads']} threads, {found['rss'] >> 20} MiB"


def stacks(diagnosis: ClusterQuery, only: Collection[int] | None = None, proc: bytes = b"") -> list[dict[str, Any]]:
    """Every node with every process on it and its stacks.

    Args:
        diagnosis: sends the questions.
        only: the nodes; None: all of them.
        proc: the only process; b"": all of them.

    Returns:
        Rows "node", "host", "problem", "processes"; of each process "process", "pid", "kind", "state", "actor",
        "problem" ("" when it answered), "kernel", "threads", "coroutines", "calls", "waits": [how many objects a
        `wait` wants, 0 for a `get`; of which]. Ids are hex.
    """
    nodes = [node for node in diagnosis.nodes() if only is None or node.index in only]
    people = {one.proc: one for node in nodes for one in node.processes if proc in (b"", one.proc)}
    me = diagnosis._process.me
    if diagnosis._process.place.kind == ATTACHED:
        people.pop(me, None)
    answers = diagnosis.ask(people, "stack")
    kernel = diagnosis.kernel_state(one for proc, one in people.items() if proc not in answers)
    rows = []
    for node in nodes:
        here = [_stack_row(one, answers, kernel, diagnosis.patience) for one in node.processes if one.proc in people]
        rows.append({"node": node.index, "host": node.host, "problem": node.problem, "processes": here})
    return rows


def _stack_row(
    one: ProcessInfo, answers: Mapping[bytes, Any], kernel: Mapping[bytes, dict[str, Any]], patience: float
) -> dict[str, Any]:
    answer = answers.get(one.proc)
    return {
        "process": show_proc(one.proc),
        "pid": one.pid,
        "kind": one.kind,
        "state": one.state,
        "actor": one.actor_class,
        "actor_id": one.actor.hex(),
        "problem": "" if answer is not None else f"no answer within {patience:g} s",
        "kernel": kernel.get(one.proc, {}),
        "threads": answer["threads"] if answer else [],
        "coroutines": [
            {**row, "task": row["task"].hex()} for row in (answer.get("coroutines") or () if answer else ())
        ],
        "calls": [
            {**row, "task": row["task"].hex(), "actor": row["actor"].hex()}
            for row in (answer.get("calls") or () if answer else ())
        ],
        "waits": [
            [wanted, [oid.hex() for oid in oids]] for wanted, oids in (answer.get("waits") or () if answer else ())
        ],
    }
