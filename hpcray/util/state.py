"""Ray's state API: the present actors, tasks, objects, nodes, ... of the job. Also `hpcray list`, `hpcray summary`.

Arguments of the functions:
    address: a session directory; None: the job of this program, else the newest of this user on this machine.
    filters: [(column, "=" or "!=", value)].
    limit: most rows.
    timeout: seconds that a process may take to answer.
    detail: fill in all fields.
    raise_on_missing_output: raise RayStateApiException where a process did not answer; else warn.
    id: of the actor, node, ..., in hex.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from hpcray.state import attached
from hpcray.state.aggregator import Filter, StateAggregator, select
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

__all__ = [
    "ActorState",
    "JobState",
    "NodeState",
    "ObjectState",
    "PlacementGroupState",
    "RayStateApiException",
    "StateSchema",
    "TaskState",
    "WorkerState",
    "get_actor",
    "get_job",
    "get_node",
    "get_objects",
    "get_placement_group",
    "get_task",
    "get_worker",
    "list_actors",
    "list_jobs",
    "list_nodes",
    "list_objects",
    "list_placement_groups",
    "list_tasks",
    "list_workers",
    "summarize_actors",
    "summarize_objects",
    "summarize_tasks",
]

DEFAULT_LIMIT = 100
DEFAULT_TIMEOUT = 30
_ALL = 1 << 62

Row = TypeVar("Row", bound=StateSchema)
Found = TypeVar("Found")
Source = TypeVar("Source")
P = ParamSpec("P")
Filters = Sequence[Filter]


class RayStateApiException(Exception):
    """The answer is not complete: a process did not answer."""


def _gather(gather: Callable[[StateAggregator], Found], address: str | None, timeout: float, strict: bool) -> Found:
    with attached(address or "auto") as process:
        aggregator = StateAggregator(process, timeout)
        found = gather(aggregator)
    if aggregator.missing:
        text = f"the answer is not complete: {'; '.join(aggregator.missing)}"
        if strict:
            raise RayStateApiException(f"{text}; hint: raise_on_missing_output=False returns the known part")
        warnings.warn(text, stacklevel=3)
    return found


def _list(
    gather: Callable[[StateAggregator], list[Row]],
    address: str | None = None,
    filters: Filters | None = None,
    limit: int = DEFAULT_LIMIT,
    timeout: float = DEFAULT_TIMEOUT,
    detail: bool = False,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> list[Row]:
    if limit < 1:
        raise ValueError(f"limit={limit} is not valid; hint: at least 1")
    rows = select(_gather(gather, address, timeout, raise_on_missing_output), filters, limit)
    if not detail:
        for row in rows:
            for column in set(row.columns()) - set(row.base_columns()):
                setattr(row, column, None)
    return rows


def _get(
    source: tuple[str, Callable[[StateAggregator], list[Row]]],
    id: str,
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    _explain: bool = False,
) -> Row | None:
    column, gather = source
    found = _list(gather, address, [(column, "=", id)], _ALL, timeout, True, False)
    return found[0] if found else None


def _summarize(
    gather: Callable[[StateAggregator], dict[str, Any]],
    address: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    raise_on_missing_output: bool = True,
    _explain: bool = False,
) -> dict[str, Any]:
    return _gather(gather, address, timeout, raise_on_missing_output)


def _query(function: Callable[Concatenate[Source, P], Found], source: Source, doc: str) -> Callable[P, Found]:
    """Make a public function: `function` with its first argument bound. The end of the module names it."""

    def query(*args: P.args, **kwargs: P.kwargs) -> Found:
        return function(source, *args, **kwargs)

    signature = inspect.signature(function)
    query.__doc__ = doc
    query.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
    return query


_S = StateAggregator
list_actors = _query(_list, _S.actors, "The actors of the job, dead ones too.")
list_placement_groups = _query(_list, _S.placement_groups, "The placement groups of the job.")
list_nodes = _query(_list, _S.nodes, "The nodes of the job, dead ones too.")
list_jobs = _query(_list, _S.jobs, "The job, as a list of one row. (Jobs of the batch system: `hpcray jobs`.)")
list_workers = _query(_list, _S.workers, "The living processes of the job: drivers and workers.")
list_tasks = _query(
    _list, _S.tasks, "All tasks and calls that have not returned, and ended ones that living workers remember."
)
list_objects = _query(
    _list, _S.objects, "The references that processes hold. `hpcray memory` shows the objects in the stores."
)

get_actor = _query(_get, ("actor_id", _S.actors), "The actor with this id, or None.")
get_placement_group = _query(
    _get, ("placement_group_id", _S.placement_groups), "The placement group with this id, or None."
)
get_node = _query(_get, ("node_id", _S.nodes), "The node with this id, or None.")
get_job = _query(_get, ("job_id", _S.jobs), "The job, or None where its id is another.")
get_worker = _query(_get, ("worker_id", _S.workers), "The living process with this id, or None.")
get_task = _query(_get, ("task_id", _S.tasks), "The task or call with this id; None where it is not remembered.")


def get_objects(
    id: str, address: str | None = None, timeout: float = DEFAULT_TIMEOUT, _explain: bool = False
) -> list[ObjectState]:
    """All references to one object."""
    return list_objects(address, [("object_id", "=", id)], _ALL, timeout, True, False)


summarize_tasks = _query(_summarize, _S.summarize_tasks, "Counts of tasks and calls, by name and state.")
summarize_actors = _query(_summarize, _S.summarize_actors, "Counts of actors, by class and state.")
summarize_objects = _query(
    _summarize,
    _S.summarize_objects,
    "Counts and sizes of references, by their place of creation (`record_ref_creation_sites`).",
)

for _name, _value in list(globals().items()):
    if getattr(_value, "__name__", "") == "query":
        _value.__name__ = _value.__qualname__ = _name
