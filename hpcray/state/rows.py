"""What there is in a job, by kind: gathered from the head, the raylets and the processes when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hpcray.base.ids import show_proc
from hpcray.runtime import progress
from hpcray.runtime.diagnosis import Diagnosis, NodeRoll, Someone
from hpcray.runtime.process import Process
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

MOST = 10_000
"""Rows that one process is asked for, at most."""
_ACTOR_STATES = {"PENDING": "PENDING_CREATION"}
_TASK_STATES = {
    progress.ARGUMENTS: "PENDING_ARGS_AVAIL",
    progress.QUEUED: "PENDING_NODE_ASSIGNMENT",
    progress.ACTOR: "PENDING_NODE_ASSIGNMENT",
    progress.SENT: "SUBMITTED_TO_WORKER",
    progress.PAUSED: "PENDING_NODE_ASSIGNMENT",
}


class Rows:
    """Gathers rows on behalf of one process.

    Args:
        process: who asks. timeout: seconds that a process may take to answer.

    Attributes:
        missing: who did not answer; the rows lack what it would have told.
    """

    def __init__(self, process: Process, timeout: float) -> None:
        self._process = process
        self._diagnosis = Diagnosis(process, timeout)
        self._roll: list[NodeRoll] | None = None
        self.missing: list[str] = []

    # ------------------------------------------------------------ kinds

    def actors(self) -> list[ActorState]:
        """All that the head remembers, dead ones too."""
        nodes = {node.index: node for node in self._nodes()}
        pids = {one.proc: one.pid for one in self._people()}
        return [self._actor(row, nodes, pids) for row in self._process.gcs.call("actors")]

    def _actor(self, row: dict[str, Any], nodes: dict[int, NodeRoll], pids: dict[bytes, int]) -> ActorState:
        node = nodes.get(row["node"])
        return ActorState(
            actor_id=row["actor"].hex(),
            class_name=row["class_name"],
            state=_ACTOR_STATES.get(row["state"], row["state"]),
            job_id=self._job_id,
            name=row["name"],
            node_id=node.node_id if node is not None else None,
            pid=pids.get(row["worker"]) if row["worker"] else None,
            ray_namespace=row["namespace"],
            death_cause={"error_message": row["reason"]} if row["reason"] else None,
            is_detached=row["detached"],
            num_restarts=row["restarts"],
        )

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
        """All groups."""
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
        """Every driver and worker that lives."""
        nodes = {node.index: node for node in self._nodes()}
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
        """The job: there is one."""
        job = self._process.job
        drivers = [one for one in self._people() if one.kind != "worker"]
        nodes = {node.index: node for node in self._nodes()}
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
        """What owners have submitted and has not returned, and what workers remember of what has ended."""
        people = {one.proc: one for one in self._people()}
        nodes = {node.index: node for node in self._nodes()}
        owned = self._ask(people.values(), "tasks", MOST)
        ran = self._ask((one for one in people.values() if one.kind == "worker"), "events")
        found: dict[bytes, TaskState] = {}
        for proc, told in ran.items():
            worker, actor = people[proc], told["actor"]
            for task, name, end, us, failed in told["ended"]:
                ended = int((end + told["offset"]) * 1000)
                row = self._task(task, name, "FAILED" if failed else "FINISHED", actor, worker, nodes)
                row.start_time_ms, row.end_time_ms = ended - us // 1000, ended
                row.error_type = "TASK_EXECUTION_EXCEPTION" if failed else None
                found[task] = row
        for told in owned.values():
            for one in told["rows"]:
                row = self._task(
                    one["task"],
                    f"{one['class']}.{one['name']}" if one["class"] else one["name"],
                    _TASK_STATES.get(one["state"], "SUBMITTED_TO_WORKER"),
                    one["actor"],
                    people.get(one["worker"]),
                    nodes,
                )
                row.required_resources = one["resources"]
                found[one["task"]] = row
        for proc, told in ran.items():
            for call in told["running"]:
                row = found.get(call["task"]) or self._task(call["task"], call["name"], "", call["actor"], None, nodes)
                worker = people[proc]
                row.state, row.worker_id, row.worker_pid = "RUNNING", proc.hex(), worker.pid
                row.node_id = nodes[worker.node].node_id
                row.name = call["name"] or row.name
                row.start_time_ms = int((told["now"] - call["seconds"] + told["offset"]) * 1000)
                if call["name"].endswith(".__init__") and call["task"] == call["actor"]:
                    row.type = "ACTOR_CREATION_TASK"
                found[call["task"]] = row
        return list(found.values())

    def _task(
        self, task: bytes, name: str, state: str, actor: bytes, worker: Someone | None, nodes: dict[int, NodeRoll]
    ) -> TaskState:
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
        nodes = {node.index: node for node in self._nodes()}
        found = []
        for proc, told in self._ask(people.values(), "objects", MOST).items():
            one = people[proc]
            kind = "WORKER" if one.kind == "worker" else "DRIVER"
            for row in told["rows"]:
                found.append(
                    ObjectState(
                        object_id=row["id"].hex(),
                        object_size=row["size"],
                        task_status="PENDING" if row["state"] == "pending" else "FINISHED",
                        reference_type=_reference(row),
                        call_site=row["site"],
                        type=kind,
                        pid=one.pid,
                        ip=nodes[one.node].address,
                    )
                )
        return found

    # ------------------------------------------------------------ summaries

    def summarize_tasks(self) -> dict[str, Any]:
        """Counts of tasks by name and state."""
        rows = self.tasks()
        summary: dict[str, Any] = {}
        for row in rows:
            known = summary.setdefault(
                row.name, {"func_or_class_name": row.func_or_class_name, "type": row.type, "state_counts": {}}
            )
            known["state_counts"][row.state] = known["state_counts"].get(row.state, 0) + 1
        kinds = Counter(row.type for row in rows)
        return _cluster({
            "summary": summary,
            "total_tasks": kinds["NORMAL_TASK"],
            "total_actor_tasks": kinds["ACTOR_TASK"],
            "total_actor_scheduled": kinds["ACTOR_CREATION_TASK"],
            "summary_by": "func_name",
        })  # fmt: skip

    def summarize_actors(self) -> dict[str, Any]:
        """Counts of actors by class and state."""
        summary: dict[str, Any] = {}
        rows = self.actors()
        for row in rows:
            known = summary.setdefault(row.class_name, {"class_name": row.class_name, "state_counts": {}})
            known["state_counts"][row.state] = known["state_counts"].get(row.state, 0) + 1
        return _cluster({"summary": summary, "total_actors": len(rows), "summary_by": "class"})

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
            for counts, name in (("task_state_counts", row.task_status), ("ref_type_counts", row.reference_type)):
                known[counts][name] = known[counts].get(name, 0) + 1
        for known in summary.values():
            known["total_num_workers"], known["total_num_nodes"] = len(known.pop("_workers")), len(known.pop("_nodes"))
        return _cluster({
            "summary": summary,
            "total_objects": len(rows),
            "total_size_mb": sum(row.object_size for row in rows) / (1 << 20),
            "callsite_enabled": self._process.config.record_ref_creation_sites,
            "summary_by": "callsite",
        })  # fmt: skip

    # ------------------------------------------------------------ inside

    @property
    def _job_id(self) -> str:
        return self._process.job.job_id if self._process.job is not None else ""

    def _nodes(self) -> list[NodeRoll]:
        if self._roll is None:
            self._roll = self._diagnosis.roll()
            self.missing += [f"node {node.index}: {node.problem}" for node in self._roll if node.alive and node.problem]
        return self._roll

    def _people(self) -> list[Someone]:
        """Drivers and workers; a visitor that only looks is none."""
        me = self._process.me if self._process.kind == "attached" else b""
        return [one for node in self._nodes() for one in node.people if one.kind != "raylet" and one.proc != me]

    def _ask(self, people: Iterable[Someone], what: str, *args: Any) -> dict[bytes, Any]:
        asked = [one.proc for one in people if one.state != "starting"]
        found = self._diagnosis.ask(asked, what, *args)
        # Those that have ended are missed by nobody: what they held ended with them. Their raylet may list them still.
        mute = [proc for proc in asked if proc not in found and proc not in self._diagnosis.gone]
        if mute:
            living = {one.proc for one in self._diagnosis.people()}
            self.missing += [f"{show_proc(proc)} did not answer" for proc in mute if proc in living]
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
        column, test, value = _check(one)
        if found and column not in found[0].columns():
            names = ", ".join(found[0].columns())
            raise ValueError(f"there is no column {column!r} to filter by; hint: one of {names}")
        wanted = str(value).lower()
        passes: Callable[[str], bool] = wanted.__eq__ if test == "=" else wanted.__ne__
        found = [row for row in found if passes(str(row[column]).lower())]
    return found[:limit]


def _check(one: Any) -> Filter:
    if not isinstance(one, (tuple, list)) or len(one) != 3 or one[1] not in ("=", "!="):
        raise ValueError(f"{one!r} is no filter; hint: (column, '=' or '!=', value)")
    return one[0], one[1], one[2]


def _reference(row: dict[str, Any]) -> str:
    if row["mapped"]:
        return "PINNED_IN_MEMORY"
    if not row["mine"]:
        return "BORROWED"
    return "LOCAL_REFERENCE" if row["local"] else "PINNED_BY_OTHERS"


def _cluster(summary: dict[str, Any]) -> dict[str, Any]:
    return {"cluster": summary}
