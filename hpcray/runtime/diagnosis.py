"""Questions to all processes of the job at once, over the job's own wires: who is there, what each does and holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hpcray.base.ids import raylet_of, show_proc
from hpcray.host.procfs import describe_process
from hpcray.host.session import read_session
from hpcray.wire import messages as m

if TYPE_CHECKING:
    from hpcray.runtime.process import Process

PATIENCE = 2.0
"""Seconds: a process that has not answered by then is asked about, not asked."""
ATTACHED = "attached"


@dataclass
class Someone:
    """One process of the job.

    Attributes:
        proc: its proc id. pid, kind: "raylet", "driver", "attached", "worker", "template". node, host: where it is.
        state: of a worker: "idle", "busy", "starting", "leaving". actor, actor_class: what it is.
    """

    proc: bytes
    pid: int
    kind: str
    node: int
    host: str
    state: str = ""
    actor: bytes = b""
    actor_class: str = ""

    @property
    def title(self) -> str:
        """`process 0.3 (worker, pid 123)`."""
        what = f"actor {self.actor_class}" if self.actor_class else self.kind
        return f"{show_proc(self.proc)} ({what}, pid {self.pid})"


@dataclass
class NodeRoll:
    """One node and who is on it. problem: why nothing is known of them, "" when something is."""

    index: int
    node_id: str
    host: str
    address: str
    alive: bool
    problem: str = ""
    template: int = 0
    people: list[Someone] = field(default_factory=list)


class Diagnosis:
    """Asks on behalf of one process.

    Args:
        process: who asks; it is left out of what it finds unless it is a driver or worker.

    Attributes:
        gone: whoever was asked and had ended, or did so instead of answering.
    """

    def __init__(self, process: Process, patience: float = PATIENCE) -> None:
        self._process = process
        self.patience = patience
        self.gone: set[bytes] = set()

    def ask(self, procs: Iterable[bytes], what: str, *args: Any) -> dict[bytes, Any]:
        """The answers of those that gave one within `patience` seconds. We ourselves answer at once."""
        packed = msgspec.msgpack.encode(args)
        procs = list(procs)
        others = {proc: partial(m.Ask, what=what, args=packed) for proc in procs if proc != self._process.me}
        found = self._process.gcs.ask_many(others, self.patience, self.gone) if others else {}
        if self._process.me in procs:
            with self._process.engine.lock:
                found[self._process.me] = self._process.survey.answers.own(what, args)
        return found

    def roll(self) -> list[NodeRoll]:
        """Every node, dead ones too, and who is on it."""
        rows = self._process.gcs.nodes()
        nodes = [
            NodeRoll(row["Index"], row["NodeID"], row["NodeManagerHostname"], row["NodeManagerAddress"], row["Alive"])
            for row in rows
        ]
        told = self.ask([raylet_of(node.index) for node in nodes if node.alive], "node")
        for node, row in zip(nodes, rows, strict=True):
            answer = told.get(raylet_of(node.index))
            if not node.alive:
                node.problem = f"dead: {row['DeathReason'] or 'no reason is known'}"
            elif answer is None:
                node.problem = f"its raylet did not answer within {self.patience:g} s{self._own_raylet(node.index)}"
            else:
                node.template = answer["template"]
                node.people = [
                    Someone(answer["proc"], answer["pid"], "raylet", node.index, node.host),
                    *(self._someone(node, row) for row in answer["processes"]),
                ]
        return nodes

    def people(self) -> list[Someone]:
        """Everybody who is known, ourselves included when we are more than a visitor."""
        return [
            one
            for node in self.roll()
            for one in node.people
            if one.proc != self._process.me or self._process.kind != ATTACHED
        ]

    def kernel(self, mute: Iterable[Someone]) -> dict[bytes, dict[str, Any]]:
        """What the kernel tells of processes that do not answer: their raylets ask it, or we do where they are here."""
        by_node: dict[int, list[Someone]] = {}
        for one in mute:
            by_node.setdefault(one.node, []).append(one)
        found: dict[bytes, dict[str, Any]] = {}
        for node, people in by_node.items():
            answer = self.ask([raylet_of(node)], "os", [one.pid for one in people]).get(raylet_of(node))
            if answer is None and node == self._process.node:
                answer = {one.pid: describe_process(one.pid) for one in people}  # its raylet is mute too
            found |= {one.proc: (answer or {}).get(one.pid, {}) for one in people}
        return found

    def _someone(self, node: NodeRoll, row: Mapping[str, Any]) -> Someone:
        return Someone(
            row["proc"], row["pid"], row["kind"], node.index, node.host, row["state"], row["actor"], row["class"]
        )

    def _own_raylet(self, node: int) -> str:
        """Of the raylet of our own node the kernel can be asked right here."""
        if node != self._process.node:
            return ""
        pid = read_session(self._process.session_dir).pid
        return f"; the kernel says of pid {pid}: {show_kernel(describe_process(pid))}"


def show_kernel(told: Mapping[str, Any]) -> str:
    """What `procfs.describe_process` found, in words."""
    if not told:
        return "there is no such process"
    where = f", waits in {told['wchan']}" if told["wchan"] else ""
    return f"{told['state']}{where}, {told['threads']} threads, {told['rss'] >> 20} MiB"


def stacks(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """Every node with every process on it and its stacks.

    Returns:
        Rows "node", "host", "problem", "processes"; of each process "process", "pid", "kind", "state", "actor",
        "problem" ("" when it answered), "kernel", "threads", "coroutines", "calls", "waiting". Ids are hex.
    """
    nodes = diagnosis.roll()
    people = {one.proc: one for node in nodes for one in node.people}
    me = diagnosis._process.me
    if diagnosis._process.kind == ATTACHED:
        people.pop(me, None)
    told = diagnosis.ask(people, "stack")
    kernel = diagnosis.kernel(one for proc, one in people.items() if proc not in told)
    rows = []
    for node in nodes:
        here = [_stack_row(one, told, kernel, diagnosis.patience) for one in node.people if one.proc in people]
        rows.append({"node": node.index, "host": node.host, "problem": node.problem, "processes": here})
    return rows


def _stack_row(
    one: Someone, told: Mapping[bytes, Any], kernel: Mapping[bytes, dict[str, Any]], patience: float
) -> dict[str, Any]:
    answer = told.get(one.proc)
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
        "waiting": [oid.hex() for oid in (answer.get("waiting") or () if answer else ())],
    }
