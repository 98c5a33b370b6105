"""The breakpoints of a running job at which tasks wait, and the client of one of them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from hpcray.diagnostics.cluster_query import PAUSED_THREADS, QUERY_TIMEOUT, ClusterQuery
from hpcray.runtime.core_worker.core_worker import CoreWorker

KEY, NAMESPACE = "RAY_PDB_", "ray_pdb"
"""Ray's names of the breakpoints that wait, in the key-value store."""
PROMPT, RUNS, ENDED, TAKEN, GONE = "prompt", "runs", "ended", "taken", "gone"
"""States of a debugger as its client sees it; "gone": its process has ended."""


@dataclass(frozen=True)
class Breakpoint:
    """A place at which a task waits.

    Attributes:
        token: its id. name: of the task or call. file, line: where. since: Unix time. error: what was raised there;
            "" where nothing was. node, pid: the process. node_id, worker_id, actor_id, task_id: ids in hex.
    """

    token: str
    name: str
    file: str
    line: int
    since: float
    error: str
    node: int
    pid: int
    node_id: str
    worker_id: str
    actor_id: str
    task_id: str


def list_breakpoints(process: CoreWorker) -> list[Breakpoint]:
    """The breakpoints that wait, the oldest first. Those of workers that have ended are removed.

    Args:
        process: it sends the questions.
    """
    rows = process.gcs.call("kv_items", KEY.encode(), NAMESPACE)
    if not rows:
        return []
    nodes = ClusterQuery(process).nodes()
    answered = {node.node_id for node in nodes if not node.problem}
    living = {one.proc.hex() for node in nodes for one in node.processes}
    dead = {node.node_id for node in nodes if not node.alive}
    found = []
    for key, value in rows:
        said = json.loads(value)
        if said["node_id"] in dead or (said["node_id"] in answered and said["worker_id"] not in living):
            process.gcs.call("kv_del", key, NAMESPACE)
        else:
            found.append(_breakpoint(key.decode().removeprefix(KEY), said))
    return sorted(found, key=lambda one: (one.since, one.token))


def _breakpoint(token: str, said: dict[str, Any]) -> Breakpoint:
    error = said["traceback"] if not said["traceback"].startswith("NoneType: None") else ""
    return Breakpoint(
        token, said["name"] or said["proctitle"], said["filename"], said["lineno"], said["timestamp"], error,
        said["node"], said["pid"], said["node_id"], said["worker_id"], said["actor_id"], said["task_id"],
    )  # fmt: skip


class BreakpointClient:
    """The client of one breakpoint. Another one that attaches takes its place.

    Args:
        process: it sends the questions.

    Attributes:
        token: of the breakpoint. state: of the debugger, as last heard. answered: whether the last question was.
    """

    def __init__(self, process: CoreWorker, breakpoint_: Breakpoint) -> None:
        self.state = RUNS
        self.answered = False
        self._query = ClusterQuery(process, QUERY_TIMEOUT)
        self._proc = bytes.fromhex(breakpoint_.worker_id)
        self.token = breakpoint_.token
        self._name = os.urandom(8).hex()
        self._seen = 0

    def attach(self) -> None:
        """Become the one whose lines it takes."""
        self._ask("attach")

    def poll(self) -> str:
        """Wait a little for something new: the output since the last call. `state` says what it does then."""
        return str(self._ask("poll").get("output", ""))

    def look(self) -> str:
        """The state now. Unlike the other methods, for any thread, and while another one waits for a line."""
        answer = self._query.ask([self._proc], "debug", self.token, "look", self._name, 0, [])
        return self._state_of(answer.get(self._proc))

    def send(self, line: str) -> None:
        """Send what was typed at the prompt."""
        self._ask("line", line)

    def interrupt(self) -> None:
        """Interrupt a command, or stop what runs at the next chance."""
        self._ask("interrupt")

    def completions(self, text: str, line: str, begin: int, end: int) -> list[str]:
        """Return what a word of a line at the prompt could become."""
        return list(self._ask("complete", text, line, begin, end).get("completions", []))

    def _ask(self, word: str, *words: Any) -> dict[str, Any]:
        answers = self._query.ask([self._proc], "debug", self.token, word, self._name, self._seen, words)
        answer: dict[str, Any] | None = answers.get(self._proc)
        self.state, self.answered = self._state_of(answer), answer is not None
        self._seen = (answer or {}).get("seen", self._seen)
        return answer or {}

    def _state_of(self, answer: dict[str, Any] | None) -> str:
        if answer is not None:
            return str(answer["state"])
        return GONE if self._proc in self._query.gone else self.state


def paused_threads(process: CoreWorker) -> list[tuple[str, str]]:
    """Return the worker and the task, in hex, of every thread of the job that waits in a debugger; "" for no task."""
    items = [
        item for prefix in (KEY, PAUSED_THREADS) for item in process.gcs.call("kv_items", prefix.encode(), NAMESPACE)
    ]
    said = [json.loads(packed) for _, packed in items]
    return [(row["worker_id"], row["task_id"]) for row in said if "worker_id" in row]
