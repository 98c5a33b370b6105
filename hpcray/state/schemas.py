"""The rows of `hpcray.util.state`: one class per kind of thing, with Ray's field names.

Fields that hpcray does not know are None; those declared with `detail=True` are None unless details were asked for.
"""

from __future__ import annotations

import datetime
import enum
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

logger = logging.getLogger(__name__)


class Humanify:
    """Converters of a column's values to text for people."""

    @staticmethod
    def timestamp(x: float) -> str:
        """Milliseconds since 1970 as local date and time."""
        return str(datetime.datetime.fromtimestamp(x / 1000))

    @staticmethod
    def memory(x: float) -> str:
        """Bytes in the largest unit that fits."""
        for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
            if x >= 1 << shift:
                return f"{x / (1 << shift):.3f} {unit}"
        return f"{x:.3f} B"

    @staticmethod
    def duration(x: float) -> str:
        """Milliseconds as hours, minutes and seconds."""
        return str(datetime.timedelta(milliseconds=x))

    @staticmethod
    def events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A task's events, with their times as text."""
        for event in events:
            if "created_ms" in event:
                event["created_ms"] = Humanify.timestamp(event["created_ms"])
        return events

    @staticmethod
    def node_resources(resources: dict[str, Any]) -> dict[str, Any]:
        """A node's resources, with amounts of memory as text."""
        for name in resources:
            if "memory" in name:
                resources[name] = Humanify.memory(resources[name])
        return resources


def state_column(
    *, filterable: bool, detail: bool = False, format_fn: Callable[[Any], Any] | None = None, **kwargs: Any
) -> Any:
    """Declare a column of a `StateSchema`.

    Args:
        filterable: filters may name the column.
        detail: the column is for details only; its default is then None.
        format_fn: converts a value to text for people.
        kwargs: further arguments of `dataclasses.field`.
    """
    if detail:
        kwargs.setdefault("default", None)
    metadata = {**kwargs.pop("metadata", {}), "detail": detail, "filterable": filterable, "format_fn": format_fn}
    return field(metadata=metadata, **kwargs)


class StateSchema:
    """Base of the rows, which are dataclasses: their fields are attributes, and items too."""

    @classmethod
    def humanify(cls, state: dict[str, Any]) -> dict[str, Any]:
        """Convert a row's values, in place, to text for people."""
        for column in fields(cls):  # type: ignore[arg-type]
            convert = column.metadata.get("format_fn")
            if convert is not None and state.get(column.name) is not None:
                try:
                    state[column.name] = convert(state[column.name])
                except Exception as error:
                    logger.error("Failed to format %s:%s with %s", column.name, state[column.name], error)
        return state

    @classmethod
    def list_columns(cls, detail: bool = True) -> list[str]:
        """Return the names of the columns in order; `detail=False`: without those for details."""
        columns = fields(cls)  # type: ignore[arg-type]
        return [column.name for column in columns if detail or not column.metadata.get("detail", False)]

    @classmethod
    def columns(cls) -> set[str]:
        """Return the names of all columns."""
        return set(cls.list_columns())

    detail_columns = columns

    @classmethod
    def base_columns(cls) -> set[str]:
        """Return the names of the columns that need no details."""
        return set(cls.list_columns(detail=False))

    @classmethod
    def filterable_columns(cls) -> set[str]:
        """Return the names of the columns that filters may name."""
        columns = fields(cls)  # type: ignore[arg-type]
        return {column.name for column in columns if column.metadata.get("filterable", False)}

    def asdict(self) -> dict[str, Any]:
        """Return all columns by name."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self, key, value)

    def __iter__(self) -> Iterator[str]:
        return iter(self.list_columns())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a column; `default` where there is no such column."""
        return getattr(self, key, default)


def filter_fields(data: Mapping[str, Any], state_dataclass: type[StateSchema], detail: bool) -> dict[str, Any]:
    """Return the columns of a row that a schema has; None for those that the row lacks."""
    return {column: data.get(column) for column in state_dataclass.list_columns(detail=detail)}


def _launch_time(x: float) -> str:
    return "" if x == -1 else Humanify.timestamp(x)


@dataclass
class ActorState(StateSchema):
    """An actor. state: DEPENDENCIES_UNREADY, PENDING_CREATION, ALIVE, RESTARTING or DEAD."""

    actor_id: str = state_column(filterable=True)
    class_name: str = state_column(filterable=True)
    state: str = state_column(filterable=True)
    job_id: str = state_column(filterable=True)
    name: str | None = state_column(filterable=True)
    node_id: str | None = state_column(filterable=True)
    pid: int | None = state_column(filterable=True)
    ray_namespace: str | None = state_column(filterable=True)
    serialized_runtime_env: str | None = state_column(filterable=False, detail=True)
    required_resources: dict[str, Any] | None = state_column(filterable=False, detail=True)
    death_cause: dict[str, Any] | None = state_column(filterable=False, detail=True)
    is_detached: bool | None = state_column(filterable=False, detail=True)
    placement_group_id: str | None = state_column(filterable=True, detail=True)
    repr_name: str | None = state_column(filterable=True, detail=True)
    num_restarts: int | None = state_column(filterable=False, detail=True)
    num_restarts_due_to_lineage_reconstruction: int | None = state_column(filterable=False, detail=True)
    num_restarts_due_to_node_preemption: int | None = state_column(filterable=False, detail=True)
    call_site: str | None = state_column(filterable=False, detail=True)
    label_selector: dict[str, str] | None = state_column(filterable=False, detail=True)
    fallback_strategy: Any = state_column(filterable=False, detail=True)


@dataclass
class PlacementGroupState(StateSchema):
    """A placement group. state: PENDING, CREATED, RESCHEDULING or REMOVED."""

    placement_group_id: str = state_column(filterable=True)
    name: str = state_column(filterable=True)
    creator_job_id: str = state_column(filterable=True)
    state: str = state_column(filterable=True)
    bundles: list[dict[str, Any]] | None = state_column(filterable=False, detail=True)
    is_detached: bool | None = state_column(filterable=True, detail=True)
    stats: dict[str, Any] | None = state_column(filterable=False, detail=True)
    topology_strategy: dict[str, Any] | None = state_column(filterable=False, detail=True)
    topology_assignments: dict[str, Any] | None = state_column(filterable=False, detail=True)


@dataclass
class NodeState(StateSchema):
    """A node. state: ALIVE or DEAD."""

    node_id: str = state_column(filterable=True)
    node_ip: str = state_column(filterable=True)
    is_head_node: bool = state_column(filterable=True)
    state: str = state_column(filterable=True)
    state_message: str | None = state_column(filterable=False)
    node_name: str = state_column(filterable=True)
    resources_total: dict[str, Any] = state_column(filterable=False, format_fn=Humanify.node_resources)
    labels: dict[str, str] = state_column(filterable=False)
    start_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    end_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)


_JOB_COLUMNS = ("job_id", "submission_id", "entrypoint", "type", "status", "message", "error_type", "driver_info")


@dataclass
class JobState(StateSchema):
    """A job. status: PENDING, RUNNING, STOPPED, SUCCEEDED or FAILED. A driver that has ended is
    SUCCEEDED, as in Ray: only submitted jobs have an exit code."""

    type: str = "DRIVER"
    job_id: str | None = None
    submission_id: str | None = None
    driver_info: dict[str, Any] | None = None
    status: str = "RUNNING"
    entrypoint: str = ""
    message: str | None = None
    error_type: str | None = None
    start_time: int | None = None
    end_time: int | None = None
    metadata: dict[str, str] | None = None
    runtime_env: dict[str, Any] | None = None
    driver_agent_http_address: str | None = None
    driver_node_id: str | None = None
    driver_exit_code: int | None = None

    @classmethod
    def filterable_columns(cls) -> set[str]:
        return {"job_id", "type", "status", "submission_id"}

    @classmethod
    def humanify(cls, state: dict[str, Any]) -> dict[str, Any]:
        return state

    @classmethod
    def list_columns(cls, detail: bool = True) -> list[str]:
        return super().list_columns() if detail else list(_JOB_COLUMNS)


@dataclass
class WorkerState(StateSchema):
    """A driver or worker. worker_type: WORKER or DRIVER."""

    worker_id: str = state_column(filterable=True)
    is_alive: bool = state_column(filterable=True)
    worker_type: str = state_column(filterable=True)
    exit_type: str | None = state_column(filterable=True)
    node_id: str = state_column(filterable=True)
    ip: str = state_column(filterable=True)
    pid: int = state_column(filterable=True)
    exit_detail: str | None = state_column(filterable=False, detail=True)
    worker_launch_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=_launch_time)
    worker_launched_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=_launch_time)
    start_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    end_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    debugger_port: int | None = state_column(filterable=True, detail=True)
    num_paused_threads: int | None = state_column(filterable=True, detail=True)


@dataclass
class ClusterEventState(StateSchema):
    """An event of a node."""

    severity: str = state_column(filterable=True)
    time: str = state_column(filterable=False)
    source_type: str = state_column(filterable=True)
    message: str = state_column(filterable=False)
    event_id: str = state_column(filterable=True)
    custom_fields: dict[str, Any] | None = state_column(filterable=False, detail=True)


@dataclass
class TaskState(StateSchema):
    """An attempt to run a task or call.

    state: PENDING_ARGS_AVAIL, PENDING_NODE_ASSIGNMENT, SUBMITTED_TO_WORKER, RUNNING, FINISHED or FAILED; of those that
    have ended each worker remembers some (`task_events`).
    parent_task_id: the task that its owner ran when it started.
    """

    task_id: str = state_column(filterable=True)
    attempt_number: int = state_column(filterable=True)
    name: str = state_column(filterable=True)
    state: str = state_column(filterable=True)
    job_id: str = state_column(filterable=True)
    actor_id: str | None = state_column(filterable=True)
    type: str = state_column(filterable=True)
    func_or_class_name: str = state_column(filterable=True)
    parent_task_id: str = state_column(filterable=True)
    node_id: str | None = state_column(filterable=True)
    worker_id: str | None = state_column(filterable=True)
    worker_pid: int | None = state_column(filterable=True)
    error_type: str | None = state_column(filterable=True)
    language: str | None = state_column(filterable=True, detail=True)
    required_resources: dict[str, Any] | None = state_column(filterable=False, detail=True)
    runtime_env_info: dict[str, Any] | None = state_column(filterable=False, detail=True)
    placement_group_id: str | None = state_column(filterable=True, detail=True)
    events: list[dict[str, Any]] | None = state_column(filterable=False, detail=True, format_fn=Humanify.events)
    profiling_data: dict[str, Any] | None = state_column(filterable=False, detail=True)
    creation_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    start_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    end_time_ms: int | None = state_column(filterable=False, detail=True, format_fn=Humanify.timestamp)
    task_log_info: dict[str, Any] | None = state_column(filterable=False, detail=True)
    error_message: str | None = state_column(filterable=False, detail=True)
    is_debugger_paused: bool | None = state_column(filterable=True, detail=True)
    call_site: str | None = state_column(filterable=False, detail=True)
    label_selector: dict[str, str] | None = state_column(filterable=False, detail=True)
    fallback_strategy: Any = state_column(filterable=False, detail=True)


@dataclass
class ObjectState(StateSchema):
    """A process's references to one object. reference_type: as in Ray."""

    object_id: str = state_column(filterable=True)
    object_size: int = state_column(filterable=True, format_fn=Humanify.memory)
    task_status: str = state_column(filterable=True)
    attempt_number: int = state_column(filterable=True)
    reference_type: str = state_column(filterable=True)
    call_site: str = state_column(filterable=True)
    type: str = state_column(filterable=True)
    pid: int = state_column(filterable=True)
    ip: str = state_column(filterable=True)


@dataclass
class RuntimeEnvState(StateSchema):
    """A runtime environment that a node has set up."""

    runtime_env: dict[str, Any] = state_column(filterable=True)
    success: bool = state_column(filterable=True)
    creation_time_ms: float | None = state_column(filterable=False, format_fn=Humanify.duration)
    node_id: str = state_column(filterable=True)
    ref_cnt: int | None = state_column(filterable=False, detail=True)
    error: str | None = state_column(filterable=True, detail=True)


# ------------------------------------------------------------ options
# Options and answers of the state API, by Ray's names.


DEFAULT_RPC_TIMEOUT = 30  # seconds
DEFAULT_LIMIT = 100
DEFAULT_LOG_LIMIT = 1000
DEFAULT_DOWNLOAD_FILENAME = "file.txt"
RAY_MAX_LIMIT_FROM_DATA_SOURCE = int(os.environ.get("RAY_MAX_LIMIT_FROM_DATA_SOURCE", "10000"))
"""Most rows of one process's answer."""


def max_limit() -> int:
    """Return the most rows of an answer. Programs set the variable after their imports, before `init`."""
    return int(os.environ.get("RAY_MAX_LIMIT_FROM_API_SERVER", "10000"))


RAY_MAX_LIMIT_FROM_API_SERVER = max_limit()
"""Most rows of an answer, as far as was known when this module was imported."""

PredicateType = str
SupportedFilterType = str | bool | int | float
Filter = tuple[str, PredicateType, SupportedFilterType]


class StateResource(enum.Enum):
    """Kinds of rows."""

    ACTORS = "actors"
    JOBS = "jobs"
    PLACEMENT_GROUPS = "placement_groups"
    NODES = "nodes"
    WORKERS = "workers"
    TASKS = "tasks"
    OBJECTS = "objects"
    RUNTIME_ENVS = "runtime_envs"
    CLUSTER_EVENTS = "cluster_events"


class SummaryResource(enum.Enum):
    """Kinds of rows that can be summarized."""

    ACTORS = "actors"
    TASKS = "tasks"
    OBJECTS = "objects"


_SCHEMAS: dict[StateResource, type[StateSchema]] = {
    StateResource.ACTORS: ActorState,
    StateResource.JOBS: JobState,
    StateResource.PLACEMENT_GROUPS: PlacementGroupState,
    StateResource.NODES: NodeState,
    StateResource.WORKERS: WorkerState,
    StateResource.TASKS: TaskState,
    StateResource.OBJECTS: ObjectState,
    StateResource.RUNTIME_ENVS: RuntimeEnvState,
    StateResource.CLUSTER_EVENTS: ClusterEventState,
}

AVAILABLE_STATES = [schema for schema in _SCHEMAS.values() if schema is not ClusterEventState]


def resource_to_schema(resource: StateResource) -> type[StateSchema]:
    """Return the class of the rows of a kind."""
    return _SCHEMAS[resource]


@dataclass
class GetApiOptions:
    """Options of `StateApiClient.get`.

    `timeout` becomes the part of the given one that the sources of the rows may take.
    """

    timeout: float = DEFAULT_RPC_TIMEOUT
    server_timeout_multiplier: float = 0.8

    def __post_init__(self) -> None:
        self.timeout = max(1, int(self.timeout * self.server_timeout_multiplier))


@dataclass
class ListApiOptions:
    """Options of `StateApiClient.list`. A row has to pass all filters. `timeout` as for `GetApiOptions`.

    Raises:
        ValueError: a filter's predicate is neither "=" nor "!=".
    """

    limit: int = DEFAULT_LIMIT
    timeout: float = DEFAULT_RPC_TIMEOUT
    detail: bool = False
    filters: list[Filter] | None = field(default_factory=list)
    exclude_driver: bool = True
    server_timeout_multiplier: float = 0.8

    def __post_init__(self) -> None:
        self.timeout = max(1, int(self.timeout * self.server_timeout_multiplier))
        self.filters = list(self.filters or ())
        check_filters(self.filters)

    def has_conflicting_filters(self) -> bool:
        """Return True, and warn, if two filters ask one column to equal different values."""
        wanted: dict[str, Any] = {}
        for column, predicate, value in self.filters or ():
            if predicate == "=" and wanted.setdefault(column, value) != value:
                warnings.warn(
                    f"There are multiple '=' filters with the same key '{column}' but different values "
                    f"'{wanted[column]}' & '{value}'. Empty result set will be returned",
                    UserWarning,
                    stacklevel=2,
                )
                return True
        return False


@dataclass
class SummaryApiOptions:
    """Options of `StateApiClient.summary`. summary_by: "func_name" or "lineage", of tasks."""

    timeout: float = DEFAULT_RPC_TIMEOUT
    filters: list[Filter] | None = field(default_factory=list)
    summary_by: str | None = None


@dataclass
class GetLogOptions:
    """Options of `get_log`.

    Raises:
        ValueError: they do not name one log. AssertionError: an interval without a stream.
    """

    timeout: float
    node_id: str | None = None
    node_ip: str | None = None
    media_type: str = "file"
    filename: str | None = None
    download_filename: str = DEFAULT_DOWNLOAD_FILENAME
    actor_id: str | None = None
    task_id: str | None = None
    attempt_number: int = 0
    pid: int | None = None
    lines: int = DEFAULT_LOG_LIMIT
    interval: float | None = None
    suffix: str = "out"
    submission_id: str | None = None

    def __post_init__(self) -> None:
        self.pid = int(self.pid) if self.pid else self.pid
        self.interval = float(self.interval) if self.interval else self.interval
        self.lines = int(self.lines)
        if self.media_type == "file":
            assert self.interval is None, "an interval is for media_type='stream'"
        if self.media_type not in ("file", "stream"):
            raise ValueError(f"Invalid media type: {self.media_type}")
        if not (self.node_id or self.node_ip or self.actor_id or self.task_id):
            raise ValueError(
                "node_id or node_ip must be provided as constructor arguments when no actor or task_id is supplied as "
                "arguments."
            )
        if self.node_id and self.node_ip:
            raise ValueError(
                "Both node_id and node_ip are given. Only one of them can be provided. "
                f"Given node id: {self.node_id}, given node ip: {self.node_ip}"
            )
        if not (self.actor_id or self.task_id or self.pid or self.filename or self.submission_id):
            raise ValueError(
                "None of actor_id, task_id, pid, submission_id or filename is provided. At least one of them is "
                "required to fetch logs."
            )
        if self.suffix not in ("out", "err"):
            raise ValueError(f"Invalid suffix: {self.suffix}. Must be one of 'out' or 'err'.")


@dataclass
class ListApiResponse:
    """An answer: `result` has the `num_filtered` rows that passed the filters, up to the limit."""

    total: int
    num_after_truncation: int
    num_filtered: int
    result: list[dict[str, Any]]
    partial_failure_warning: str | None = ""
    warnings: list[str] | None = None


@dataclass
class SummaryApiResponse:
    """A summary of the rows of an answer."""

    total: int
    num_after_truncation: int
    num_filtered: int
    result: Any = None
    partial_failure_warning: str | None = ""
    warnings: list[str] | None = None


def check_filters(filters: list[Filter]) -> None:
    """Raise ValueError unless all filters are (column, "=" or "!=", value)."""
    for one in filters:
        if not isinstance(one, (tuple, list)) or len(one) != 3:
            raise ValueError(
                f"The given filter has incorrect input type, {one}. Provide (key, predicate, value) tuples."
            )
        if one[1] not in ("=", "!="):
            raise ValueError(f"Unsupported filter predicate {one[1]} is given. Available predicates: =, !=.")
