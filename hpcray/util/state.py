"""Ray's state API: the present actors, tasks, objects, nodes, ... of the job. Also `hpcray list`, `hpcray summary`.

Arguments of the functions:
    address: a session directory; None: the job of this program, else the newest of this user on this machine.
    filters: [(column, "=" or "!=", value)].
    limit: most rows.
    timeout: seconds that the answer may take.
    detail: fill in all fields.
    raise_on_missing_output: raise RayStateApiException where a process did not answer.
    id: of the actor, node, ..., in hex. A task's may be a ref that it returns.
    _explain: warn of what the answer lacks.
"""

from __future__ import annotations

import codecs
import contextlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

from hpcray.runtime.core_worker.object_refs import ObjectRef
from hpcray.state import attached
from hpcray.state.aggregator import StateAggregator, select
from hpcray.state.logs import LogError, LogReader
from hpcray.state.schemas import (
    DEFAULT_LIMIT,
    DEFAULT_RPC_TIMEOUT,
    ActorState,
    Filter,
    GetApiOptions,
    GetLogOptions,
    JobState,
    ListApiOptions,
    NodeState,
    ObjectState,
    PlacementGroupState,
    StateResource,
    StateSchema,
    SummaryApiOptions,
    SummaryResource,
    TaskState,
    WorkerState,
    max_limit,
    resource_to_schema,
)

__all__ = [
    "ActorState",
    "JobState",
    "NodeState",
    "ObjectState",
    "PlacementGroupState",
    "RayStateApiException",
    "StateApiClient",
    "StateSchema",
    "TaskState",
    "WorkerState",
    "get_actor",
    "get_job",
    "get_log",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_task",
    "get_worker",
    "list_actors",
    "list_cluster_events",
    "list_jobs",
    "list_logs",
    "list_nodes",
    "list_objects",
    "list_placement_groups",
    "list_runtime_envs",
    "list_tasks",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
    "summarize_tasks",
]

_ANSI_CODE = re.compile(rb"\x1b(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")

Found = TypeVar("Found")
Source = TypeVar("Source")
P = ParamSpec("P")


class DataSourceUnavailable(Exception):
    """A source of rows did not answer."""


class RayStateApiException(Exception):
    """The query is not valid, or the answer is not complete."""


class ServerUnavailable(RayStateApiException):
    """There is no job to ask."""


_GATHER: dict[StateResource, Callable[[StateAggregator], list[Any]]] = {
    StateResource.ACTORS: StateAggregator.actors,
    StateResource.JOBS: StateAggregator.jobs,
    StateResource.PLACEMENT_GROUPS: StateAggregator.placement_groups,
    StateResource.NODES: StateAggregator.nodes,
    StateResource.WORKERS: StateAggregator.workers,
    StateResource.TASKS: StateAggregator.tasks,
    StateResource.OBJECTS: StateAggregator.objects,
    # A job keeps no list of these.
    StateResource.RUNTIME_ENVS: lambda _: [],
    StateResource.CLUSTER_EVENTS: StateAggregator.cluster_events,
}
_ID_COLUMNS = {
    StateResource.NODES: "node_id",
    StateResource.ACTORS: "actor_id",
    StateResource.PLACEMENT_GROUPS: "placement_group_id",
    StateResource.WORKERS: "worker_id",
    StateResource.TASKS: "task_id",
    StateResource.OBJECTS: "object_id",
    StateResource.JOBS: "job_id",
}


class StateApiClient:
    """Queries of the state of a job.

    Args:
        address: as for `list_actors`.
        cookies, headers: without effect: no HTTP server is asked.
    """

    def __init__(
        self,
        address: str | None = None,
        cookies: dict[str, Any] | None = None,
        headers: dict[str, Any] | None = None,
    ) -> None:
        self._address = address or "auto"

    def get(
        self, resource: StateResource, id: Any, options: GetApiOptions | None = None, _explain: bool = False
    ) -> Any:
        """Return the row of an id, with details; None where there is none.

        Objects, and tasks that were tried more than once, have several: then a list.

        Raises:
            ValueError: rows of this kind have no ids.
        """
        if resource not in _ID_COLUMNS:
            raise ValueError(f"Can't get {resource.name} by id.")
        if isinstance(id, ObjectRef):
            id = id.task_id().hex()
        timeout = (options or GetApiOptions()).timeout
        rows, _ = _gather(self._address, _GATHER[resource], timeout)
        found = select(rows, [(_ID_COLUMNS[resource], "=", id)], len(rows))
        if resource is StateResource.OBJECTS or len(found) > 1:
            return found or None
        return found[0] if found else None

    def list(
        self,
        resource: StateResource,
        options: ListApiOptions | None = None,
        raise_on_missing_output: bool = True,
        _explain: bool = False,
    ) -> list[Any]:
        """Return rows in the order of their ids.

        Raises:
            RayStateApiException: an option is not valid, or the answer is not complete.
        """
        options = options or ListApiOptions()
        if options.has_conflicting_filters():
            return []
        most = max_limit()
        if not 0 <= options.limit <= most:
            raise RayStateApiException(
                f"Given limit {options.limit} exceeds the supported limit {most}. Use a lower "
                "limit, or set the `RAY_MAX_LIMIT_FROM_API_SERVER` environment variable to a larger value."
            )
        schema = resource_to_schema(resource)
        for column, _, _ in options.filters or ():
            if column.lower() not in schema.filterable_columns():
                raise RayStateApiException(
                    f"The given filter column {column} is not supported. Supported filter columns: "
                    f"{sorted(schema.filterable_columns())}"
                )
        rows, missing = _gather(self._address, _GATHER[resource], options.timeout)
        _report(missing, raise_on_missing_output)
        passed = select(rows, options.filters, len(rows))
        found = passed[: options.limit]
        if _explain and len(passed) > len(found):
            warnings.warn(
                f"Limit last {len(found)} entries (Total {len(passed)}). Use `--filter` to reduce the amount of data "
                "to return or setting a higher limit with `--limit` to see all data. ",
                stacklevel=3,
            )
        if not options.detail:
            for row in found:
                for column in row.columns() - row.base_columns():
                    setattr(row, column, None)
        return found

    def summary(
        self,
        resource: SummaryResource,
        *,
        options: SummaryApiOptions | None = None,
        raise_on_missing_output: bool = True,
        _explain: bool = False,
    ) -> dict[str, Any]:
        """Return the summaries of the rows, by node id; there is one, of "cluster".

        Raises:
            RayStateApiException: the answer is not complete.
        """
        options = options or SummaryApiOptions()
        by = options.summary_by
        gather: dict[SummaryResource, Callable[[StateAggregator], dict[str, Any]]] = {
            SummaryResource.ACTORS: StateAggregator.summarize_actors,
            SummaryResource.TASKS: lambda aggregator: aggregator.summarize_tasks(by),
            SummaryResource.OBJECTS: StateAggregator.summarize_objects,
        }
        found, missing = _gather(self._address, gather[resource], options.timeout)
        _report(missing, raise_on_missing_output)
        return found


def _gather(address: str, gather: Callable[[StateAggregator], Found], timeout: float) -> tuple[Found, list[str]]:
    """Return what was gathered, and what is missing of it."""
    with attached(address) as process:
        aggregator = StateAggregator(process, timeout)
        return gather(aggregator), aggregator.missing


def _report(missing: list[str], strict: bool) -> None:
    if missing:
        text = f"the answer is not complete: {'; '.join(missing)}"
        if strict:
            raise RayStateApiException(f"{text}; hint: raise_on_missing_output=False returns the known part")
        warnings.warn(text, stacklevel=4)


def _list(
    resource: StateResource,
    address: str | None = None,
    filters: list[Filter] | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_RPC_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[Any]:
    options = ListApiOptions(limit, timeout, detail, filters)
    return StateApiClient(address).list(resource, options, raise_on_missing_output, _explain)


def _get(
    resource: StateResource,
    id: Any,
    address: str | None = None,
    timeout: float = DEFAULT_RPC_TIMEOUT,
    _explain: bool = False,
) -> Any:
    return StateApiClient(address).get(resource, id, GetApiOptions(timeout), _explain)


def _summarize(
    resource: SummaryResource,
    address: str | None = None,
    timeout: float = DEFAULT_RPC_TIMEOUT,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> dict[str, Any]:
    return StateApiClient(address).summary(
        resource,
        options=SummaryApiOptions(timeout),
        raise_on_missing_output=raise_on_missing_output,
        _explain=_explain,
    )


def _query(function: Callable[Concatenate[Source, P], Found], source: Source, doc: str) -> Callable[P, Found]:
    """Make a public function: `function` with its first argument bound. The end of the module names it."""

    def query(*args: P.args, **kwargs: P.kwargs) -> Found:
        return function(source, *args, **kwargs)

    signature = inspect.signature(function)
    query.__doc__ = doc
    query.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return query


_R = StateResource
list_actors = _query(_list, _R.ACTORS, "The actors of the job, dead ones too.")
list_placement_groups = _query(_list, _R.PLACEMENT_GROUPS, "The placement groups of the job.")
list_nodes = _query(_list, _R.NODES, "The nodes of the job, dead ones too.")
list_jobs = _query(
    _list,
    _R.JOBS,
    "The submitted jobs, and those of other drivers that run or have run. (Jobs of the batch system: `hpcray jobs`.)",
)
list_workers = _query(_list, _R.WORKERS, "The living processes of the job: drivers and workers.")
list_tasks = _query(
    _list, _R.TASKS, "All tasks and calls that have not returned, and ended attempts that living workers remember."
)
list_objects = _query(
    _list, _R.OBJECTS, "The references that processes hold. `hpcray memory` shows the objects in the stores."
)
list_runtime_envs = _query(_list, _R.RUNTIME_ENVS, "No rows: hpcray keeps no list of runtime environments.")
list_cluster_events = _query(_list, _R.CLUSTER_EVENTS, "Events that living nodes have reported, such as a full disk.")

get_actor = _query(_get, _R.ACTORS, "The actor with this id, or None.")
get_placement_group = _query(_get, _R.PLACEMENT_GROUPS, "The placement group with this id, or None.")
get_node = _query(_get, _R.NODES, "The node with this id, or None.")
get_job = _query(_get, _R.JOBS, "The job, or None where its id is another.")
get_worker = _query(_get, _R.WORKERS, "The living process with this id, or None.")
get_task = _query(
    _get, _R.TASKS, "The task or call with this id, a list of its attempts if there are several; None: not remembered."
)


def get_objects(
    id: str, address: str | None = None, timeout: float = DEFAULT_RPC_TIMEOUT, _explain: bool = False
) -> list[ObjectState]:
    """All references to one object."""
    return _get(StateResource.OBJECTS, id, address, timeout, _explain) or []


def list_logs(
    address: str | None = None,
    node_id: str | None = None,
    node_ip: str | None = None,
    glob_filter: str | None = None,
    timeout: float = DEFAULT_RPC_TIMEOUT,
) -> dict[str, list[str]]:
    """The names of a node's log files, by group: "worker_out", "worker_err", "internal".

    Args:
        node_id, node_ip: the node.
        glob_filter: a pattern that the names have to match, such as "*worker*".

    Raises:
        AssertionError: no node is named. RayStateApiException: there is none, or it does not answer.
    """
    assert node_ip is not None or node_id is not None, "At least one of node ip and node id is required"
    with attached(address or "auto") as process, _log_errors():
        return LogReader(process, timeout).find(node_id, node_ip, glob_filter or "*")


def get_log(
    address: str | None = None,
    node_id: str | None = None,
    node_ip: str | None = None,
    filename: str | None = None,
    actor_id: str | None = None,
    task_id: str | None = None,
    pid: int | None = None,
    follow: bool = False,
    tail: int = -1,
    timeout: float = DEFAULT_RPC_TIMEOUT,
    suffix: str = "out",
    encoding: str | None = "utf-8",
    errors: str = "strict",
    submission_id: str | None = None,
    attempt_number: int = 0,
    _interval: float | None = None,
    filter_ansi_code: bool = False,
) -> Iterator[Any]:
    """Yield a log file in pieces.

    Args:
        node_id, node_ip: the node, for `filename` and `pid`.
        filename: name of the file, as `list_logs` returns it.
        actor_id, task_id, pid: whose output it has. Of a task it is the part that the task wrote.
        follow: go on with what is written later, without end.
        tail: begin with the last so many lines; -1: with the first.
        suffix: "out" or "err".
        encoding, errors: of the text; encoding None: yield bytes.
        submission_id: whose entrypoint's output it is.
        attempt_number: which run of the task, from 0.
        filter_ansi_code: leave out the codes by which terminals show colors.

    Raises:
        ValueError: the arguments do not name a log. RayStateApiException: there is none, or its node does not answer.
    """
    options = GetLogOptions(
        timeout=timeout,
        node_id=node_id,
        node_ip=node_ip,
        media_type="stream" if follow else "file",
        filename=filename,
        actor_id=actor_id,
        task_id=task_id,
        attempt_number=attempt_number,
        pid=pid,
        lines=tail,
        interval=_interval,
        suffix=suffix,
        submission_id=submission_id,
    )
    decoder = codecs.getincrementaldecoder(encoding)(errors) if encoding is not None else None
    with attached(address or "auto") as process, _log_errors():
        for data in LogReader(process, timeout).stream(options):
            shown = _ANSI_CODE.sub(b"", data) if filter_ansi_code else data
            yield decoder.decode(shown) if decoder is not None else shown
    if decoder is not None and (rest := decoder.decode(b"", final=True)):
        yield rest


@contextlib.contextmanager
def _log_errors() -> Iterator[None]:
    try:
        yield
    except LogError as error:
        raise RayStateApiException(str(error)) from None


summarize_tasks = _query(_summarize, SummaryResource.TASKS, "Counts of tasks and calls, by name and state.")
summarize_actors = _query(_summarize, SummaryResource.ACTORS, "Counts of actors, by class and state.")
summarize_objects = _query(
    _summarize,
    SummaryResource.OBJECTS,
    "Counts and sizes of references, by their place of creation (`record_ref_creation_sites`).",
)

for _name, _value in list(globals().items()):
    if getattr(_value, "__name__", "") == "query":
        _value.__name__ = _value.__qualname__ = _name
