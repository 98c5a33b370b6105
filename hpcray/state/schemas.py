"""The rows of `hpcray.util.state`: one class per kind of thing, with Ray's field names.

Fields that hpcray does not know are None; fields from `_FIRST_DETAIL` on are None without `detail=True`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class StateSchema:
    """A row: its fields are attributes, and items too."""

    def __getitem__(self, name: str) -> Any:
        if name not in self.columns():
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns())

    def get(self, name: str, default: Any = None) -> Any:
        """A field; `default` where there is no such field."""
        return getattr(self, name) if name in self.columns() else default

    def asdict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    @classmethod
    def columns(cls) -> list[str]:
        """The names of the fields."""
        return [field.name for field in fields(cls)]

    @classmethod
    def base_columns(cls) -> list[str]:
        """The names of the fields that need no `detail`."""
        names = cls.columns()
        first = _FIRST_DETAIL.get(cls.__name__, "")
        return names[: names.index(first)] if first else names


@dataclass
class ActorState(StateSchema):
    """An actor. state: DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD."""

    actor_id: str
    class_name: str
    state: str
    job_id: str
    name: str
    node_id: str | None
    pid: int | None
    ray_namespace: str
    serialized_runtime_env: str | None = None
    required_resources: dict[str, float] | None = None
    death_cause: dict[str, Any] | None = None
    is_detached: bool | None = None
    placement_group_id: str | None = None
    repr_name: str | None = None
    num_restarts: int | None = None
    num_restarts_due_to_lineage_reconstruction: int | None = None
    num_restarts_due_to_node_preemption: int | None = None
    call_site: str | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: list[dict[str, Any]] | None = None


@dataclass
class PlacementGroupState(StateSchema):
    """A placement group. state: PENDING, CREATED, RESCHEDULING or REMOVED."""

    placement_group_id: str
    name: str
    creator_job_id: str
    state: str
    bundles: list[dict[str, Any]] | None = None
    is_detached: bool | None = None
    stats: dict[str, Any] | None = None
    topology_strategy: dict[str, Any] | None = None
    topology_assignments: dict[str, Any] | None = None


@dataclass
class NodeState(StateSchema):
    """A node. state: ALIVE or DEAD."""

    node_id: str
    node_ip: str
    is_head_node: bool
    state: str
    state_message: str | None
    node_name: str
    resources_total: dict[str, float]
    labels: dict[str, str]
    start_time_ms: int | None = None
    end_time_ms: int | None = None


@dataclass
class JobState(StateSchema):
    """The job. status: RUNNING; a job that has ended cannot be queried."""

    job_id: str
    type: str
    submission_id: str | None
    driver_info: dict[str, Any] | None
    status: str
    entrypoint: str
    message: str | None = None
    error_type: str | None = None
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None


@dataclass
class WorkerState(StateSchema):
    """A living process. worker_type: WORKER or DRIVER."""

    worker_id: str
    is_alive: bool
    worker_type: str
    exit_type: str | None
    node_id: str
    ip: str
    pid: int
    exit_detail: str | None = None
    worker_launch_time_ms: int | None = None
    worker_launched_time_ms: int | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    debugger_port: int | None = None
    num_paused_threads: int | None = None


@dataclass
class TaskState(StateSchema):
    """A task or call. state: PENDING_ARGS_AVAIL, PENDING_NODE_ASSIGNMENT, SUBMITTED_TO_WORKER, RUNNING, FINISHED or
    FAILED; of the last two each worker remembers some (`task_events`)."""

    task_id: str
    attempt_number: int | None
    name: str
    state: str
    job_id: str
    actor_id: str | None
    type: str
    func_or_class_name: str
    parent_task_id: str | None
    node_id: str | None
    worker_id: str | None
    worker_pid: int | None
    error_type: str | None
    language: str | None = None
    required_resources: dict[str, float] | None = None
    runtime_env_info: dict[str, Any] | None = None
    placement_group_id: str | None = None
    events: list[dict[str, Any]] | None = None
    creation_time_ms: int | None = None
    start_time_ms: int | None = None
    end_time_ms: int | None = None
    error_message: str | None = None
    call_site: str | None = None
    task_log_info: dict[str, Any] | None = None
    profiling_data: dict[str, Any] | None = None
    is_debugger_paused: bool | None = None
    label_selector: dict[str, str] | None = None
    fallback_strategy: list[dict[str, Any]] | None = None


@dataclass
class ObjectState(StateSchema):
    """A process's references to one object. reference_type: LOCAL_REFERENCE, PINNED_IN_MEMORY, BORROWED or
    PINNED_BY_OTHERS."""

    object_id: str
    object_size: int
    task_status: str
    reference_type: str
    call_site: str
    type: str
    pid: int
    ip: str


_FIRST_DETAIL = {
    "ActorState": "serialized_runtime_env",
    "PlacementGroupState": "bundles",
    "NodeState": "start_time_ms",
    "WorkerState": "exit_detail",
    "TaskState": "language",
}
