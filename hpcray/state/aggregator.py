"""The state of a job, by kind: gathered from the head, the raylets and the processes on request."""

from __future__ import annotations

import json
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from hpcray.common.ids import job_id_of, node_of, owner_of, raylet_of, show_proc
from hpcray.common.job_names import FIRST_JOB, jobs_space
from hpcray.common.resources import JOB_FIELD, runtime_env_fields
from hpcray.diagnostics import wait_graph
from hpcray.diagnostics.cluster_query import ClusterQuery, ClusterRoster, ProcessInfo
from hpcray.protocol.messages import USER_EXIT
from hpcray.protocol.messages import JobInfo as DriverJob
from hpcray.runtime.core_worker.core_worker import CoreWorker
from hpcray.state.breakpoints import paused_threads
from hpcray.state.job_table import JobInfo, JobTable
from hpcray.state.schemas import (
    ActorState,
    ClusterEventState,
    Filter,
    JobState,
    NodeState,
    ObjectState,
    PlacementGroupState,
    StateSchema,
    TaskState,
    WorkerState,
    check_filters,
)
from hpcray.state.summaries import DRIVER_TASK_ID_PREFIX, ActorSummaries, ObjectSummaries, TaskSummaries

Row = TypeVar("Row", bound=StateSchema)

MAX_ROWS_PER_PROCESS = 10_000


class StateAggregator:
    """Gathers rows of the state API for one process.

    Args:
        process: the process that sends the queries.
        timeout: seconds that a process may take to answer.
        only: the nodes whose processes are asked; None: all of them.

    Attributes:
        missing: one text per process or node that did not answer; the rows lack its part.
    """

    def __init__(self, process: CoreWorker, timeout: float, only: Collection[int] | None = None) -> None:
        self._process = process
        self._diagnosis = ClusterQuery(process, timeout, only)
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
                state=_actor_state(row),
                job_id=job_of_actor(row),
                name=row["name"],
                node_id=nodes[row["node"]].node_id if row["node"] in nodes else None,
                pid=pids.get(row["worker"], 0) if row["worker"] else row["pid"],
                ray_namespace=row["namespace"],
                death_cause=_death_cause(row),
                is_detached=row["detached"],
                num_restarts=row["restarts"],
                num_restarts_due_to_lineage_reconstruction=0,
                num_restarts_due_to_node_preemption=0,
                required_resources=row["resources"],
                placement_group_id=row["group"] or None,
                repr_name=row["repr_name"],
            )
            for row in self._process.gcs.call("actors")
        ]

    def nodes(self) -> list[NodeState]:
        """All nodes, dead ones too."""
        return [
            NodeState(
                node_id=row["NodeID"],
                node_ip=row["NodeManagerAddress"],
                is_head_node=row["Index"] == self._process.place.head,
                state="ALIVE" if row["Alive"] else "DEAD",
                state_message=row["DeathReason"] or None,
                node_name=row["NodeName"],
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
                is_detached=row["detached"],
                stats={"strategy": row["strategy"], "scheduling_attempt": row["attempts"]},
            )
            for row in self._process.gcs.call("placement_groups")
        ]

    def workers(self) -> list[WorkerState]:
        """Every living driver and worker, and the last ones that have ended."""
        nodes, now = self._nodes(), time.time()
        paused = Counter(worker for worker, _ in paused_threads(self._process))
        rows = [(node, {**row, "worker_type": "WORKER"}) for node in nodes.values() for row in node.ended]
        pids = {bytes.fromhex(facts["proc"]): facts["pid"] for _, facts in self._driver_facts()}
        for node in nodes.values():
            for row in node.ended_drivers:
                rows.append((node, {**row, "worker_type": "DRIVER", "pid": pids.get(row["proc"], 0)}))
        ended = [
            WorkerState(
                worker_id=row["proc"].hex(),
                is_alive=False,
                worker_type=row["worker_type"],
                exit_type=row["exit_type"],
                exit_detail=row["exit_detail"],
                start_time_ms=None if row["lived"] is None else int((now - row["seconds"] - row["lived"]) * 1000),
                end_time_ms=int((now - row["seconds"]) * 1000),
                node_id=node.node_id,
                ip=node.address,
                pid=row["pid"],
            )
            for node, row in rows
        ]
        return ended + [
            WorkerState(
                worker_id=one.proc.hex(), is_alive=True, exit_type=None, end_time_ms=0, pid=one.pid,
                worker_type="WORKER" if one.kind == "worker" else "DRIVER",
                node_id=nodes[one.node].node_id, ip=nodes[one.node].address, num_paused_threads=paused[one.proc.hex()],
                worker_launch_time_ms=one.started_ms, worker_launched_time_ms=one.started_ms,
                start_time_ms=one.started_ms,
            )
            for one in self._people()
        ]  # fmt: skip

    def jobs(self) -> list[JobState]:
        """The submitted jobs, and the jobs of the drivers that run or have run, and belong to none."""
        table = JobTable(self._process)
        jobs, drivers = table.all(), table.drivers()
        submitted = [_submitted(ident, info, drivers.get(ident)) for ident, info in jobs.items()]
        theirs = {row.job_id for row in submitted}
        running = self._drivers()
        known = theirs | {row.job_id for row in running}
        ended = [row for row in self._ended_drivers() if row.job_id not in known]
        return submitted + [row for row in running if row.job_id not in theirs] + ended

    def submitted_job(self, submission_id: str) -> JobState | None:
        """The submitted job of this id; None for none."""
        table = JobTable(self._process)
        info = table.find(submission_id)
        return _submitted(submission_id, info, table.driver(submission_id)) if info is not None else None

    def _drivers(self) -> list[JobState]:
        nodes = self._nodes()
        drivers = {one.proc: one for one in self._people() if one.kind != "worker"}
        found = []
        for proc, answer in self._query(drivers.values(), "job").items():
            if not answer["driver"]:
                continue
            driver, node = drivers[proc], nodes[drivers[proc].node]
            found.append(JobState(
                job_id=answer["id"],
                driver_info={"id": answer["id"], "node_ip_address": node.address, "pid": str(driver.pid)},
                entrypoint=answer["command"],
                start_time=int(answer["start"] * 1000),
                driver_node_id=node.node_id,
            ))  # fmt: skip
        return found

    def _ended_drivers(self) -> list[JobState]:
        """Every driver that this run has had, but for those whose node knows that they live; the first ones first."""
        nodes, now, found = self._nodes(), time.time(), []
        gone = {row["proc"]: (node, row) for node in nodes.values() for row in node.ended_drivers}
        for ident, facts in self._driver_facts():
            proc = bytes.fromhex(facts["proc"])
            job = JobState(
                job_id=ident, status="SUCCEEDED", entrypoint=facts["command"],
                driver_info={"id": ident, "node_ip_address": facts["ip"], "pid": str(facts["pid"])},
            )  # fmt: skip
            if proc in gone:
                node, row = gone[proc]
                job.driver_node_id, job.end_time = node.node_id, int((now - row["seconds"]) * 1000)
                job.start_time = int((now - row["seconds"] - row["lived"]) * 1000)
                found.append(job)
            elif node_of(proc) not in nodes or not nodes[node_of(proc)].alive:
                job.status, job.message = "FAILED", "the node of its driver has died"
                found.append(job)
        return sorted(found, key=lambda job: bytes.fromhex(job.job_id or "")[::-1])

    def _driver_facts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The job id of every driver that this run has had, and what it is known by."""
        for key, packed in self._process.gcs.call("kv_items", b"", jobs_space(self._process.me)):
            yield job_id_of(int(key)), json.loads(packed)

    def tasks(self, most: int = MAX_ROWS_PER_PROCESS) -> list[TaskState]:
        """Tasks that owners have submitted and that have not returned, and ended attempts that workers remember, or
        their raylets, where they have ended in good order.

        Args:
            most: rows of either kind that each process gives.
        """
        people = {one.proc: one for one in self._people()}
        owned = self._query(people.values(), "tasks", most)
        executed = self._query((one for one in people.values() if one.kind == "worker"), "events", most)
        raylets = [raylet_of(node.index) for node in self._nodes().values() if node.alive and not node.problem]
        before: dict[bytes, Any] = {}
        for answer in self._diagnosis.ask(raylets, "ended_events", most).values():
            before |= answer
        history = TaskHistory(self._job_id, self._nodes(), people, {**before, **executed})
        for answer in owned.values():
            history.add_failed(answer["failed"], answer["job"])
            history.add_open(answer["rows"], answer["job"])
        history.add_creations((row, job_of_actor(row)) for row in self._process.gcs.call("actors"))
        paused, found = {task for _, task in paused_threads(self._process)}, history.rows()
        for one in found:
            one.is_debugger_paused = one.state == "RUNNING" and one.task_id in paused
        return found

    def objects(self) -> list[ObjectState]:
        """Every process's references."""
        people, nodes, found = {one.proc: one for one in self._people()}, self._nodes(), []
        for proc, answer in self._query(people.values(), "objects", MAX_ROWS_PER_PROCESS).items():
            one = people[proc]
            found += [
                ObjectState(
                    object_id=row["id"].hex(),
                    object_size=row["size"],
                    attempt_number=1,
                    task_status=task_state(row["status"], row["actor"]) if row["state"] == "pending" else "FINISHED",
                    reference_type=_reference(row),
                    call_site=row["site"] or "disabled",
                    type="WORKER" if one.kind == "worker" else "DRIVER",
                    pid=one.pid,
                    ip=nodes[one.node].address,
                )
                for row in answer["rows"]
            ]
        return found

    def cluster_events(self) -> list[ClusterEventState]:
        """The events of the living nodes, oldest first."""
        raylets = [raylet_of(node.index) for node in self._nodes().values() if node.alive]
        rows = [row for answer in self._diagnosis.ask(raylets, "events").values() for row in answer]
        return [
            ClusterEventState(
                severity=row["severity"],
                time=str(datetime.fromtimestamp(row["time"])),
                source_type="RAYLET",
                message=row["message"],
                event_id=row["event_id"],
                custom_fields={},
            )
            for row in sorted(rows, key=lambda row: row["time"])
        ]

    def summarize_tasks(self, by: str | None = None) -> dict[str, Any]:
        """Counts of tasks by name and state; `by="lineage"`: by what started them."""
        tasks = [row.asdict() for row in self.tasks()]
        if by == "lineage":
            found = TaskSummaries.to_summary_by_lineage(tasks=tasks, actors=[row.asdict() for row in self.actors()])
        else:
            found = TaskSummaries.to_summary_by_func_name(tasks=tasks)
        return {"cluster": asdict(found)}

    def summarize_actors(self) -> dict[str, Any]:
        """Counts of actors by class and state."""
        return {"cluster": asdict(ActorSummaries.to_summary(actors=[row.asdict() for row in self.actors()]))}

    def summarize_objects(self) -> dict[str, Any]:
        """Counts and sizes of objects by where their refs were created."""
        found = ObjectSummaries.to_summary(objects=[row.asdict() for row in self.objects()])
        found.callsite_enabled = self._process.config.record_ref_creation_sites
        return {"cluster": asdict(found)}

    @property
    def _job_id(self) -> str:
        return self._process.place.job_id

    def _nodes(self) -> dict[int, ClusterRoster]:
        """The nodes with their processes, by index; queried once."""
        if self._roll is None:
            self._roll = {node.index: node for node in self._diagnosis.nodes()}
            roll = self._roll.values()
            self.missing += [f"node {node.index}: {node.problem}" for node in roll if node.alive and node.problem]
        return self._roll

    def _people(self) -> list[ProcessInfo]:
        """Drivers and workers, without this process where it is attached only for the query."""
        place = self._process.place
        me = self._process.me if place.kind == "attached" and not place.is_driver else b""
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
    """The rows that pass every filter, at most `limit`, in the order of their first columns.

    Args:
        filters: (column, "=" or "!=", value); the case of letters is no matter. A value may be the text of a number or
            of a truth value.

    Raises:
        ValueError: a filter is not valid.
    """
    found = list(rows)
    given = list(filters or ())
    check_filters(given)
    for column, test, value in given:
        name = column.lower()
        if found and name not in found[0].filterable_columns():
            raise ValueError(
                f"The given filter column {name} is not supported. Supported filter columns: "
                f"{sorted(found[0].filterable_columns())}"
            )
        found = [row for row in found if _equal(row[name], value) == (test == "=")]
    found.sort(key=lambda row: str(row[row.list_columns()[0]]))
    return found[:limit]


def _equal(cell: Any, value: Any) -> bool:
    text = str(value).lower()
    if isinstance(cell, bool):
        return text in (("true", "1") if cell else ("false", "0"))
    return str(cell).lower() == text


def _submitted(submission_id: str, info: JobInfo, driver: dict[str, str] | None) -> JobState:
    return JobState(
        type="SUBMISSION",
        job_id=driver["id"] if driver is not None else None,
        submission_id=submission_id,
        driver_info=driver,
        status=info.status.value,
        entrypoint=info.entrypoint,
        message=info.message,
        error_type=info.error_type.value if info.error_type is not None else None,
        start_time=info.start_time,
        end_time=info.end_time,
        metadata=info.metadata,
        runtime_env=info.runtime_env,
        driver_agent_http_address=info.driver_agent_http_address,
        driver_node_id=info.driver_node_id,
        driver_exit_code=info.driver_exit_code,
    )


def job_of_actor(row: Mapping[str, Any]) -> str:
    """Return the id of the job that a row of the GCS's table of actors is of: its worker's environment says so."""
    fields = runtime_env_fields(row["env"])
    return msgspec.convert(fields[JOB_FIELD], DriverJob).job_id if JOB_FIELD in fields else FIRST_JOB


def _death_cause(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Why an actor is dead, in Ray's form, and when it died."""
    if not row["reason"]:
        return None
    context = {
        "error_message": row["reason"],
        "class_name": row["class_name"],
        "actor_id": row["actor"].hex(),
        "name": row["name"],
        "ray_namespace": row["namespace"],
        "pid": row["pid"],
    }
    ended = {"end_time_ms": int((time.time() - row["dead_for"]) * 1000)} if row["dead_for"] is not None else {}
    return {"actor_died_error_context": context, **ended}


def _actor_state(row: dict[str, Any]) -> str:
    if row["state"] != "PENDING":
        return str(row["state"])
    return "PENDING_CREATION" if row["complete"] else "DEPENDENCIES_UNREADY"


def _reference(row: dict[str, Any]) -> str:
    if row["mapped"]:
        return "PINNED_IN_MEMORY"
    if not row["mine"]:
        return "LOCAL_REFERENCE"
    return "LOCAL_REFERENCE" if row["local"] else "CAPTURED_IN_OBJECT"


# ------------------------------------------------------------ task history
# The rows of tasks: what workers remember of ended attempts, what runs, and what owners wait for, put together.

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
        self._ended = {
            row["proc"]: ProcessInfo(row["proc"], row["pid"], "worker", node.index, node.host)
            for node in nodes.values()
            for row in node.ended
        }
        for proc, answer in executed.items():
            if (worker := people.get(proc) or self._ended.get(proc)) is not None:
                self._add_executed(worker, answer)
        for attempts in self._attempts.values():
            attempts.sort(key=lambda row: (row.end_time_ms is None, row.start_time_ms))
        for begun in self._begun.values():
            begun.sort()

    def add_failed(self, rows: Iterable[Mapping[str, Any]], job_id: str) -> None:
        """Take in what an owner of the job says of tasks that ended without a reply of their worker."""
        for one in rows:
            row = self._row(one["task"], one["name"], "FAILED", one["actor"], self._ended.get(one["worker"]), job_id)
            row.end_time_ms = int(one["end"] * _MILLI)
            row.error_type, row.error_message = _ERROR_TYPES.get(one["kind"], _FAILED), one["text"]
            self._attempts.setdefault(one["task"], []).insert(one["attempt"], row)

    def add_open(self, rows: Iterable[Mapping[str, Any]], job_id: str) -> None:
        """Take in what an owner of the job says of tasks that have not returned."""
        for one in rows:
            attempts = self._attempts.setdefault(one["task"], [])
            last = attempts[-1] if attempts else None
            if last is None or last.state == "FAILED":  # a reply may be on its way after FINISHED
                name = f"{one['class']}.{one['name']}" if one["class"] else one["name"]
                state, worker = task_state(one["state"], one["actor"]), self._people.get(one["worker"])
                while len(attempts) < one["attempt"]:  # its value was lost, with all that is known of that run
                    attempts.append(self._row(one["task"], name, "FINISHED", one["actor"], None, job_id))
                last = self._row(one["task"], name, state, one["actor"], worker, job_id)
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
            for number, row in enumerate(attempts):
                row.attempt_number = number
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
                kind, text = errors.get(task, ("", None))
                if kind == "ActorDiedError" and text and USER_EXIT in text and row.actor_id and row.actor_id in text:
                    row.state = "FINISHED"  # the call has ended its actor, as it was to
                else:
                    row.error_type, row.error_message = _ERROR_TYPES.get(kind, _FAILED), text
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
