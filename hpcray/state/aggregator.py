"""The state of a job, by kind: gathered from the head, the raylets and the processes on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hpcray.common.ids import show_proc
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.runtime.diagnostics import object_status
from hpcray.runtime.diagnostics.cluster_query import ClusterQuery, ClusterRoster, ProcessInfo
from hpcray.state.schemas import (
    ActorState,
    JobState,
    NodeState,
    ObjectState,
    PlacementGroupState,
    StateSchema,
    TaskState,
    WorkerState,
)

Filter = tuple[str, str, Any]
Row = TypeVar("Row", bound=StateSchema)

MAX_ROWS_PER_PROCESS = 10_000
_ACTOR_STATES = {"PENDING": "PENDING_CREATION"}
_TASK_STATES = {
    object_status.ARGUMENTS: "PENDING_ARGS_AVAIL",
    object_status.QUEUED: "PENDING_NODE_ASSIGNMENT",
    object_status.ACTOR: "PENDING_NODE_ASSIGNMENT",
    object_status.SENT: "SUBMITTED_TO_WORKER",
    object_status.PAUSED: "PENDING_NODE_ASSIGNMENT",
}


class StateAggregator:
    """Gathers rows of the state API for one process.

    Args:
        process: the process that sends the queries.
        timeout: seconds that a process may take to answer.

    Attributes:
        missing: one text per process or node that did not answer; the rows lack its part.
    """

    def __init__(self, process: CoreWorker, timeout: float) -> None:
        self._process = process
        self._diagnosis = ClusterQuery(process, timeout)
        self._roll: dict[int, ClusterRoster] | None = None
        self.missing: list[str] = []

    def actors(self) -> list[ActorState]:
        """All actors that the head remembers, dead ones too."""
        nodes = self._nodes()
        pids = {one.proc: one.pid for one in self._people()}
        return [
            ActorState(
                actor_id=row["actor"].hex(),
                class_name=row["class_name"],
                state=_ACTOR_STATES.get(row["state"], row["state"]),
                job_id=self._job_id,
                name=row["name"],
                node_id=nodes[row["node"]].node_id if row["node"] in nodes else None,
                pid=pids.get(row["worker"]) if row["worker"] else None,
                ray_namespace=row["namespace"],
                death_cause={"error_message": row["reason"]} if row["reason"] else None,
                is_detached=row["detached"],
                num_restarts=row["restarts"],
            )
            for row in self._process.gcs.call("actors")
        ]

    def nodes(self) -> list[NodeState]:
        """All nodes, dead ones too."""
        return [
            NodeState(
                node_id=row["NodeID"],
                node_ip=row["NodeManagerAddress"],
                is_head_node=row["Index"] == self._process.head,
                state="ALIVE" if row["Alive"] else "DEAD",
                state_message=row["DeathReason"] or None,
                node_name=row["NodeManagerHostname"],
                resources_total=row["Resources"],
                labels=row["Labels"],
            )
            for row in self._process.gcs.nodes()
        ]

    def placement_groups(self) -> list[PlacementGroupState]:
        """All placement groups."""
        return [
            PlacementGroupState(
                placement_group_id=row["group"].hex(),
                name=row["name"],
                creator_job_id=self._job_id,
                state=row["state"],
                bundles=[
                    {"bundle_id": str(place), "unit_resources": amounts, "node_id": node}
                    for place, (amounts, node) in enumerate(zip(row["bundles"], row["node_ids"], strict=False))
                ],
                stats={"strategy": row["strategy"], "scheduling_attempt": row["attempts"]},
            )
            for row in self._process.gcs.call("placement_groups")
        ]

    def workers(self) -> list[WorkerState]:
        """Every living driver and worker."""
        nodes = self._nodes()
        return [
            WorkerState(
                worker_id=one.proc.hex(),
                is_alive=True,
                worker_type="WORKER" if one.kind == "worker" else "DRIVER",
                exit_type=None,
                node_id=nodes[one.node].node_id,
                ip=nodes[one.node].address,
                pid=one.pid,
            )
            for one in self._people()
        ]

    def jobs(self) -> list[JobState]:
        """The job, as a list of one row."""
        job = self._process.job
        drivers = [one for one in self._people() if one.kind != "worker"]
        nodes = self._nodes()
        driver = drivers[0] if drivers else None
        address = nodes[driver.node].address if driver is not None else ""
        info = {"id": self._job_id, "node_ip_address": address, "pid": str(driver.pid)} if driver is not None else None
        return [
            JobState(
                job_id=self._job_id,
                type="DRIVER",
                submission_id=None,
                driver_info=info,
                status="RUNNING",
                entrypoint=job.sys_path[0] if job is not None and job.sys_path else "",
                driver_node_id=nodes[driver.node].node_id if driver is not None else None,
            )
        ]

    def tasks(self) -> list[TaskState]:
        """Tasks that owners have submitted and that have not returned, and ended tasks that workers remember."""
        people = {one.proc: one for one in self._people()}
        nodes = self._nodes()
        owned = self._query(people.values(), "tasks", MAX_ROWS_PER_PROCESS)
        executed = self._query((one for one in people.values() if one.kind == "worker"), "events")
        found: dict[bytes, TaskState] = {}
        for proc, answer in executed.items():
            worker, actor = people[proc], answer["actor"]
            for task, name, end, us, failed in answer["ended"]:
                ended = int((end + answer["offset"]) * 1000)
                row = self._task(task, name, "FAILED" if failed else "FINISHED", actor, worker, nodes)
                row.start_time_ms, row.end_time_ms = ended - us // 1000, ended
                row.error_type = "TASK_EXECUTION_EXCEPTION" if failed else None
                found[task] = row
        for answer in owned.values():
            for one in answer["rows"]:
                name = f"{one['class']}.{one['name']}" if one["class"] else one["name"]
                state, worker_of = _TASK_STATES.get(one["state"], "SUBMITTED_TO_WORKER"), people.get(one["worker"])
                row = self._task(one["task"], name, state, one["actor"], worker_of, nodes)
                row.required_resources = one["resources"]
                found[one["task"]] = row
        for proc, answer in executed.items():
            for call in answer["running"]:
                row = found.get(call["task"]) or self._task(call["task"], call["name"], "", call["actor"], None, nodes)
                worker = people[proc]
                row.state, row.worker_id, row.worker_pid = "RUNNING", proc.hex(), worker.pid
                row.node_id = nodes[worker.node].node_id
                row.name = call["name"] or row.name
                row.start_time_ms = int((answer["now"] - call["seconds"] + answer["offset"]) * 1000)
                if call["name"].endswith(".__init__") and call["task"] == call["actor"]:
                    row.type = "ACTOR_CREATION_TASK"
                found[call["task"]] = row
        return list(found.values())

    def _task(
        self, task: bytes, name: str, state: str, actor: bytes, worker: ProcessInfo | None,
        nodes: dict[int, ClusterRoster],
    ) -> TaskState:  # fmt: skip
        return TaskState(
            task_id=task.hex(),
            attempt_number=None,
            name=name,
            state=state,
            job_id=self._job_id,
            actor_id=actor.hex() if actor else None,
            type="ACTOR_TASK" if actor else "NORMAL_TASK",
            func_or_class_name=name,
            parent_task_id=None,
            node_id=nodes[worker.node].node_id if worker is not None else None,
            worker_id=worker.proc.hex() if worker is not None else None,
            worker_pid=worker.pid if worker is not None else None,
            error_type=None,
            language="PYTHON",
        )

    def objects(self) -> list[ObjectState]:
        """Every process's references."""
        people = {one.proc: one for one in self._people()}
        nodes = self._nodes()
        found = []
        for proc, answer in self._query(people.values(), "objects", MAX_ROWS_PER_PROCESS).items():
            one = people[proc]
            found += [
                ObjectState(
                    object_id=row["id"].hex(),
                    object_size=row["size"],
                    task_status="PENDING" if row["state"] == "pending" else "FINISHED",
                    reference_type=_reference(row),
                    call_site=row["site"],
                    type="WORKER" if one.kind == "worker" else "DRIVER",
                    pid=one.pid,
                    ip=nodes[one.node].address,
                )
                for row in answer["rows"]
            ]
        return found

    def summarize_tasks(self) -> dict[str, Any]:
        """Counts of tasks by name and state."""
        rows = self.tasks()
        summary: dict[str, Any] = {}
        for row in rows:
            new = {"func_or_class_name": row.func_or_class_name, "type": row.type, "state_counts": {}}
            _count(summary.setdefault(row.name, new)["state_counts"], row.state)
        kinds = Counter(row.type for row in rows)
        return {"cluster": {
            "summary": summary,
            "total_tasks": kinds["NORMAL_TASK"],
            "total_actor_tasks": kinds["ACTOR_TASK"],
            "total_actor_scheduled": kinds["ACTOR_CREATION_TASK"],
            "summary_by": "func_name",
        }}  # fmt: skip

    def summarize_actors(self) -> dict[str, Any]:
        """Counts of actors by class and state."""
        summary: dict[str, Any] = {}
        rows = self.actors()
        for row in rows:
            new = {"class_name": row.class_name, "state_counts": {}}
            _count(summary.setdefault(row.class_name, new)["state_counts"], row.state)
        return {"cluster": {"summary": summary, "total_actors": len(rows), "summary_by": "class"}}

    def summarize_objects(self) -> dict[str, Any]:
        """Counts and sizes of objects by where their refs were created."""
        summary: dict[str, Any] = {}
        rows = self.objects()
        for row in rows:
            site = row.call_site or "disabled"
            known = summary.setdefault(
                site,
                {"total_objects": 0, "total_size_mb": 0.0, "total_num_workers": 0, "total_num_nodes": 0,
                 "task_state_counts": {}, "ref_type_counts": {}, "_workers": set(), "_nodes": set()},
            )  # fmt: skip
            known["total_objects"] += 1
            known["total_size_mb"] += row.object_size / (1 << 20)
            known["_workers"].add((row.ip, row.pid))
            known["_nodes"].add(row.ip)
            _count(known["task_state_counts"], row.task_status)
            _count(known["ref_type_counts"], row.reference_type)
        for known in summary.values():
            known["total_num_workers"], known["total_num_nodes"] = len(known.pop("_workers")), len(known.pop("_nodes"))
        return {"cluster": {
            "summary": summary,
            "total_objects": len(rows),
            "total_size_mb": sum(row.object_size for row in rows) / (1 << 20),
            "callsite_enabled": self._process.config.record_ref_creation_sites,
            "summary_by": "callsite",
        }}  # fmt: skip

    @property
    def _job_id(self) -> str:
        return self._process.job.job_id if self._process.job is not None else ""

    def _nodes(self) -> dict[int, ClusterRoster]:
        """The nodes with their processes, by index; queried once."""
        if self._roll is None:
            self._roll = {node.index: node for node in self._diagnosis.nodes()}
            roll = self._roll.values()
            self.missing += [f"node {node.index}: {node.problem}" for node in roll if node.alive and node.problem]
        return self._roll

    def _people(self) -> list[ProcessInfo]:
        """Drivers and workers, without this process where it is attached only for the query."""
        me = self._process.me if self._process.kind == "attached" else b""
        nodes = self._nodes().values()
        return [one for node in nodes for one in node.processes if one.kind != "raylet" and one.proc != me]

    def _query(self, people: Iterable[ProcessInfo], what: str, *args: Any) -> dict[bytes, Any]:
        queried = [one.proc for one in people if one.state != "starting"]
        found = self._diagnosis.ask(queried, what, *args)
        # Processes that have ended are not missing: their state ended with them. Their raylet may still list them.
        silent = [proc for proc in queried if proc not in found and proc not in self._diagnosis.gone]
        if silent:
            living = {one.proc for one in self._diagnosis.processes()}
            self.missing += [f"{show_proc(proc)} did not answer" for proc in silent if proc in living]
        return found


def select(rows: Sequence[Row], filters: Iterable[Filter] | None, limit: int) -> list[Row]:
    """The rows that pass every filter, at most `limit`.

    Args:
        filters: (column, "=" or "!=", value); values are compared as text, upper or lower case.

    Raises:
        ValueError: a filter is not valid.
    """
    found = list(rows)
    for one in filters or ():
        if not isinstance(one, (tuple, list)) or len(one) != 3 or one[1] not in ("=", "!="):
            raise ValueError(f"{one!r} is no filter; hint: (column, '=' or '!=', value)")
        column, test, value = one
        if found and column not in found[0].columns():
            names = ", ".join(found[0].columns())
            raise ValueError(f"there is no column {column!r} to filter by; hint: one of {names}")
        text = str(value).lower()
        passes: Callable[[str], bool] = text.__eq__ if test == "=" else text.__ne__
        found = [row for row in found if passes(str(row[column]).lower())]
    return found[:limit]


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _reference(row: dict[str, Any]) -> str:
    if row["mapped"]:
        return "PINNED_IN_MEMORY"
    if not row["mine"]:
        return "BORROWED"
    return "LOCAL_REFERENCE" if row["local"] else "PINNED_BY_OTHERS"
