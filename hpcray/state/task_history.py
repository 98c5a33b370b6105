"""The rows of tasks: what workers remember of ended attempts, what runs, and what owners wait for, put together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

from hpcray.common.ids import owner_of
from hpcray.diagnostics import wait_graph
from hpcray.diagnostics.cluster_query import ClusterRoster, ProcessInfo
from hpcray.state.schemas import TaskState
from hpcray.state.summaries import DRIVER_TASK_ID_PREFIX

_STATES = {
    wait_graph.ARGUMENTS: "PENDING_ARGS_AVAIL",
    wait_graph.QUEUED: "PENDING_NODE_ASSIGNMENT",
    wait_graph.ACTOR: "PENDING_NODE_ASSIGNMENT",
    wait_graph.PAUSED: "PENDING_NODE_ASSIGNMENT",
}
_ERROR_TYPES = {
    "ActorDiedError": "ACTOR_DIED",
    "ActorPlacementGroupRemoved": "ACTOR_PLACEMENT_GROUP_REMOVED",
    "ActorUnavailableError": "ACTOR_UNAVAILABLE",
    "ActorUnschedulableError": "ACTOR_UNSCHEDULABLE_ERROR",
    "NodeDiedError": "NODE_DIED",
    "ObjectLostError": "OBJECT_LOST",
    "OutOfMemoryError": "OUT_OF_MEMORY",
    "OwnerDiedError": "OWNER_DIED",
    "RuntimeEnvSetupError": "RUNTIME_ENV_SETUP_FAILED",
    "TaskCancelledError": "TASK_CANCELLED",
    "TaskPlacementGroupRemoved": "TASK_PLACEMENT_GROUP_REMOVED",
    "TaskUnschedulableError": "TASK_UNSCHEDULABLE_ERROR",
    "WorkerCrashedError": "WORKER_DIED",
}
_FAILED = "TASK_EXECUTION_EXCEPTION"
_MILLI, _MICRO_PER_MILLI = 1000, 1000


class TaskHistory:
    """Rows of tasks and calls, one for each attempt.

    Args:
        job_id: of tasks of which no process says what job they are of.
        nodes, people: nodes by index, processes by id.
        executed: the answers of workers to "events", by process.
    """

    def __init__(
        self,
        job_id: str,
        nodes: Mapping[int, ClusterRoster],
        people: Mapping[bytes, ProcessInfo],
        executed: Mapping[bytes, dict[str, Any]],
    ) -> None:
        self._job_id, self._nodes, self._people = job_id, nodes, people
        self._attempts: dict[bytes, list[TaskState]] = {}
        self._begun: dict[bytes, list[tuple[int, bytes]]] = {}  # by worker: (start, task) in order
        for proc, answer in executed.items():
            self._add_executed(people[proc], answer)
        for attempts in self._attempts.values():
            attempts.sort(key=lambda row: (row.end_time_ms is None, row.start_time_ms))
            for number, row in enumerate(attempts):
                row.attempt_number = number
        for begun in self._begun.values():
            begun.sort()

    def add_failed(self, rows: Iterable[Mapping[str, Any]], job_id: str) -> None:
        """Take in what an owner of the job says of tasks that ended without a reply of their worker."""
        ended = {
            row["proc"]: ProcessInfo(row["proc"], row["pid"], "worker", node.index, node.host)
            for node in self._nodes.values()
            for row in node.ended
        }
        for one in rows:
            attempts = self._attempts.setdefault(one["task"], [])
            row = self._row(one["task"], one["name"], "FAILED", one["actor"], ended.get(one["worker"]), job_id)
            row.attempt_number, row.end_time_ms = len(attempts), int(one["end"] * _MILLI)
            row.error_type, row.error_message = _ERROR_TYPES.get(one["kind"], _FAILED), one["text"]
            attempts.append(row)

    def add_open(self, rows: Iterable[Mapping[str, Any]], job_id: str) -> None:
        """Take in what an owner of the job says of tasks that have not returned."""
        for one in rows:
            attempts = self._attempts.setdefault(one["task"], [])
            last = attempts[-1] if attempts else None
            if last is None or last.state == "FAILED":  # a reply may be on its way after FINISHED
                name = f"{one['class']}.{one['name']}" if one["class"] else one["name"]
                state, worker = task_state(one["state"], one["actor"]), self._people.get(one["worker"])
                last = self._row(one["task"], name, state, one["actor"], worker, job_id)
                last.attempt_number = len(attempts)
                attempts.append(last)
            last.required_resources, last.placement_group_id = one["resources"], one["group"] or None

    def add_creations(self, actors: Iterable[tuple[Mapping[str, Any], str]]) -> None:
        """Take in the creation of actors, with their jobs: of each one that waits, or that was created."""
        for actor, job_id in actors:
            ident = actor["actor"]
            if self._attempts.get(ident):
                continue  # its constructor runs
            if actor["state"] == "PENDING":
                state = "PENDING_NODE_ASSIGNMENT" if actor["complete"] else "PENDING_ARGS_AVAIL"
            else:
                state = "FAILED" if actor["failed"] or not actor["worker"] else "FINISHED"
            worker = self._people.get(actor["worker"])
            row = self._row(ident, f"{actor['class_name']}.__init__", state, ident, worker, job_id)
            if state == "FAILED":
                row.error_type = _FAILED if actor["failed"] else "ACTOR_CREATION_FAILED"
                row.error_message = actor["reason"]
            row.required_resources, row.placement_group_id = actor["resources"], actor["group"] or None
            self._attempts[ident] = [row]

    def rows(self) -> list[TaskState]:
        """Return all rows, with the tasks that started them."""
        found = []
        for task, attempts in self._attempts.items():
            for row in attempts:
                row.parent_task_id = self._parent(task, attempts[0].start_time_ms, row.job_id)
                row.events = _events(row)
                found.append(row)
        return found

    def _add_executed(self, worker: ProcessInfo, answer: Mapping[str, Any]) -> None:
        errors = {task: (kind, text) for task, kind, text in answer["errors"]}
        begun = self._begun[worker.proc] = []
        for task, name, end, us, failed in answer["ended"]:
            row = self._row(task, name, "FAILED" if failed else "FINISHED", answer["actor"], worker, answer["job"])
            row.end_time_ms = int((end + answer["offset"]) * _MILLI)
            row.creation_time_ms = row.start_time_ms = row.end_time_ms - us // _MICRO_PER_MILLI
            if failed:
                kind, row.error_message = errors.get(task, ("", None))
                row.error_type = _ERROR_TYPES.get(kind, _FAILED)
            self._attempts.setdefault(task, []).append(row)
            begun.append((row.start_time_ms, task))
        for call in answer["running"]:
            row = self._row(call["task"], call["name"], "RUNNING", call["actor"], worker, answer["job"])
            row.creation_time_ms = row.start_time_ms = int(
                (answer["now"] - call["seconds"] + answer["offset"]) * _MILLI
            )
            self._attempts.setdefault(call["task"], []).append(row)
            begun.append((row.start_time_ms, call["task"]))

    def _parent(self, task: bytes, start: int | None, job_id: str) -> str:
        """Return the id of the task that the owner ran when this one started, or ran last before."""
        begun = self._begun.get(owner_of(task))
        if begun is None:
            return DRIVER_TASK_ID_PREFIX + job_id
        place = bisect_right(begun, start, key=lambda row: row[0]) if start is not None else len(begun)
        return begun[place - 1][1].hex() if place else ""

    def _row(
        self, task: bytes, name: str, state: str, actor: bytes, worker: ProcessInfo | None, job_id: str = ""
    ) -> TaskState:
        kind = "NORMAL_TASK"
        if actor:
            kind = "ACTOR_CREATION_TASK" if task == actor and name.endswith(".__init__") else "ACTOR_TASK"
        return TaskState(
            task_id=task.hex(),
            attempt_number=0,
            name=name,
            state=state,
            job_id=job_id or self._job_id,
            actor_id=actor.hex() if actor else None,
            type=kind,
            func_or_class_name=name,
            parent_task_id="",
            node_id=self._nodes[worker.node].node_id if worker is not None else None,
            worker_id=worker.proc.hex() if worker is not None else None,
            worker_pid=worker.pid if worker is not None else None,
            error_type=None,
            language="PYTHON",
        )


def task_state(state: str, actor: bytes) -> str:
    """Return Ray's name of the state of a task that has not returned, by that of its `ObjectStatus`."""
    if state == wait_graph.SENT and actor:
        return "PENDING_ACTOR_TASK_ORDERING_OR_CONCURRENCY"
    return _STATES.get(state, "SUBMITTED_TO_WORKER")


def _events(row: TaskState) -> list[dict[str, Any]]:
    """Return the states that the row went through, as far as they are known."""
    found: list[dict[str, Any]] = []
    if row.start_time_ms is not None:
        found.append({"state": "RUNNING", "created_ms": row.start_time_ms})
    if row.end_time_ms is not None:
        found.append({"state": row.state, "created_ms": row.end_time_ms})
    return found
