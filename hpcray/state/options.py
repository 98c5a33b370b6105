"""Options and answers of the state API, by Ray's names."""

from __future__ import annotations

import enum
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

from hpcray.state.schemas import (
    ActorState,
    ClusterEventState,
    JobState,
    NodeState,
    ObjectState,
    PlacementGroupState,
    RuntimeEnvState,
    StateSchema,
    TaskState,
    WorkerState,
)

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
